"""FlashMLA and DeepGEMM as backends: their inputs, their results, and refusals.

Stand-ins of the same signatures (`fake_external.py`) run here, so that the CPU tests everything
around the external kernels; `test_external_gpu.py` runs the real ones.
"""

import sys
import types
from dataclasses import replace

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward, warm_up
from dsv4.kernels.backends import load_backend
from dsv4.kernels.external import deepgemm, find, flashmla, limits
from dsv4.kernels.index_scratch import index_row_bytes
from dsv4.testing import model_projections, model_weights
from dsv4.tools.bench.external import flashmla as bench_flashmla
from tests.kernels import test_triton_attention as attention_tests
from tests.kernels import test_triton_indexer as index_tests
from tests.kernels.fake_external import FakeDeepGEMM, FakeFlashMLA
from tests.kernels.test_triton_compile import ARCHITECTURES, assert_fits, compile_kernels
from tests.kernels.test_triton_gather import filled

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins run on the CPU")
SWA, CSA, HCA = (0,), (4,), (128,)


@pytest.fixture
def flash_mla(monkeypatch):
    fake = FakeFlashMLA()
    for module in (flashmla, limits):
        monkeypatch.setattr(module, "load_flash_mla", lambda: fake)
    return fake


@pytest.fixture
def deep_gemm(monkeypatch):
    fake = FakeDeepGEMM()
    for module in (deepgemm, limits):
        monkeypatch.setattr(module, "load_deep_gemm", fake.logits)
    return fake


class Case(attention_tests.Case):
    """A layer of V4-Flash's width, and lengths before and after the last forward."""

    def filled(self):
        choices = {"index_topk": 64, "num_query_heads": self.heads, **self.choices}
        config = CacheConfig.v4_flash(compress_ratios=self.ratios, **choices)
        return filled(config, self.before, self.after)


CASES = [
    Case("swa", SWA, [0, 126, 200], [1, 127, 201]),
    Case("csa", CSA, [2, 126, 300], [3, 127, 301]),
    Case("hca", HCA, [126, 127, 511], [127, 128, 512]),
    Case("64 heads", CSA, [6], [7], heads=64),
    Case("72 heads", HCA, [127], [128], heads=72),
    Case("a list that 128 does not divide", CSA, [300], [301], choices={"index_topk": 40}),
    Case("verify", CSA, [0, 126], [3, 129], choices={"drafts_per_step": 2}),
    Case("a chunk and a step", HCA, [126, 5], [130, 6]),
    Case("blocks of 384 tokens", CSA, [500], [501], choices={"block_tokens": 384}),
    Case("pages close together", HCA, [300], [301], choices={"page_align": 16}),
]


def attend(handle, inputs, **options):
    return attention_tests.run(load_backend("flashmla"), handle, inputs, **options)


def flashmla_bound(handle, inputs, expected):
    """Bound the error: our own kernel's, and one more rounding to BF16 before the rotation."""
    bound = attention_tests.error_bound(handle, inputs, expected)
    cos, sin = (rows[:, None].double() for rows in handle.rope)
    turned = attention_tests.reference.attention.rotate(expected.output, cos, sin)
    rounded = attention_tests.BF16_ROUNDOFF * (turned.abs() + 2 * bound.output)
    more = attention_tests.rotate_magnitude(rounded, handle)
    more[..., : -handle.config.rope_dim] = 0
    return bound._replace(output=bound.output + more * (1 + attention_tests.BF16_ROUNDOFF))


def assert_attended(handle, inputs, got) -> None:
    attention_tests.assert_within_bound(handle, inputs, got, flashmla_bound)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashmla_attends_the_same_rows(case, flash_mla):
    handle = case.filled()
    inputs = attention_tests.make_inputs(handle)
    inputs.query[1 if case.after[0] - case.before[0] == 1 else -1].mul_(3)
    got = attend(handle, inputs)
    assert_attended(handle, inputs, got)
    assert flash_mla.calls and got.output.isfinite().all()


def test_flashmla_padding_is_nothing(flash_mla):
    handle = Case("", CSA, [127, 5], [128, 6]).filled()
    inputs = attention_tests.make_inputs(handle)
    inputs.query[1] = torch.nan
    got = attend(handle, inputs)
    assert (got.output[1] == 0).all() and (got.lse[1] == -torch.inf).all()
    assert got.output.isfinite().all()


def test_flashmla_rows_outside_of_the_pool_are_absent(flash_mla):
    handle = Case("", CSA, [300], [301], choices={"index_topk": 40}).filled()
    attention_tests.assert_absent_outside_of_the_pool(load_backend("flashmla"), handle)


def test_flashmla_takes_raw_queries(flash_mla):
    handle = Case("", HCA, [0, 3, 200], [11, 5, 201], heads=20).filled()
    raw, prepared = attention_tests.make_raw(handle)
    got = attend(handle, raw, is_query_raw=True)
    attention_tests.assert_same_bits(got, attend(handle, prepared))


def test_flashmla_in_parts(flash_mla, monkeypatch):
    """Tokens beyond one call's limit go to the next call."""
    handle = Case("", HCA, [0, 3], [11, 5]).filled()
    inputs = attention_tests.make_inputs(handle)
    whole = attend(handle, inputs)
    monkeypatch.setattr(flashmla, "MAX_TOKENS", 4)
    flash_mla.calls.clear()
    parts = attend(handle, inputs)
    assert [len(call.query) for call in flash_mla.calls] == [4, 4, 4, 2] * 2
    assert torch.equal(parts.output, whole.output) and torch.equal(parts.lse, whole.lse)


def test_flashmla_chunks_alone_are_one_call(flash_mla):
    config = CacheConfig.v4_flash(compress_ratios=HCA, num_query_heads=8)
    manager = KVCacheManager(config, max_requests=1, num_blocks=2)
    plan = prepare_forward(manager, [manager.open_request()], [0], [130])
    handle = manager.acquire(0, plan)
    handle.write(model_projections(config, 130, seed=1)[0], model_weights(config, seed=0)[0])
    inputs = attention_tests.make_inputs(handle)
    assert_attended(handle, inputs, attend(handle, inputs))
    assert len(flash_mla.calls) == 1
    assert flash_mla.calls[0].window.shape[:2] == (1, manager.capacity.workspace_rows)


def test_flashmla_in_a_manager(flash_mla):
    config = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), num_query_heads=8)
    manager = KVCacheManager(
        config, max_requests=2, num_blocks=2, attention_backend="flashmla", max_forward_tokens=16
    )
    assert (manager.attention_backend, manager.index_backend) == ("flashmla", "reference")
    weights = model_weights(config, seed=0)
    warm_up(manager, weights)
    flash_mla.calls.clear()
    plan = prepare_forward(manager, [manager.open_request()], [0], [5])
    for layer_idx, layer in enumerate(model_projections(config, 5, seed=1, dtype=torch.bfloat16)):
        handle = manager.acquire(layer_idx, plan)
        if layer_idx == 0:
            wide = layer._replace(query=layer.query.float())
            with pytest.raises(TypeError, match="dtype of query: expected bfloat16, got"):
                handle.forward(wide, weights[0])
        got = handle.forward(layer, weights[layer_idx])
        inputs = attention_tests.Inputs(layer.query, weights[layer_idx].sinks, None)
        assert_attended(handle, inputs, got)
    assert len(flash_mla.calls) == 3


def flash(**choices) -> CacheConfig:
    choices = {"num_query_heads": 1, "index_format": "fp8", **choices}
    return CacheConfig.v4_flash(compress_ratios=(4,), **choices)


INDEX_CASES = [
    index_tests.Case("steps", [300, 3, 260], [301, 4, 261]),
    index_tests.Case("a chunk among steps", [300, 250], [340, 251]),
    index_tests.Case("32 heads", [320], [321], {"index_num_heads": 32}),
]


@pytest.mark.parametrize("case", INDEX_CASES, ids=str)
def test_deepgemm_chooses_the_same_entries(case, deep_gemm):
    config = flash(index_topk=64, **case.choices)
    handle = index_tests.filled(config, case.before, case.after)
    query, weights = index_tests.random_query(handle)
    got = index_tests.select(load_backend("deepgemm"), handle, query, weights)
    index_tests.assert_selected(got, handle, query, weights)
    num_tokens = handle.plan.num_tokens
    assert deep_gemm.sizes == [num_tokens if num_tokens <= 32 else 64]


def test_deepgemm_in_parts(deep_gemm, monkeypatch):
    """Tokens beyond the workspace's rows go to the next call."""
    handle = index_tests.filled(flash(index_topk=64), [260], [330])
    query, weights = index_tests.random_query(handle)
    row = sum(index_row_bytes("fp8", num_heads=64, dim=128, topk=64, max_entries=82))
    small = handle.memory._replace(index_scratch=handle.memory.index_scratch[: 40 * row])
    got = index_tests.select(load_backend("deepgemm"), handle, query, weights, memory=small)
    assert deep_gemm.sizes == [32, 32, 7]  # 70 tokens and one of padding
    index_tests.assert_selected(got, handle, query, weights)


def test_deepgemm_is_not_asked_where_all_are_chosen(deep_gemm):
    handle = index_tests.filled(flash(index_topk=64), [200, 3], [201, 4])
    query, weights = index_tests.random_query(handle)
    got = index_tests.select(load_backend("deepgemm"), handle, query, weights)
    assert got.counts.tolist() == [50, 0, 1] and not deep_gemm.sizes


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, [1]), (32, [32]), (33, [32]), (64, [32, 64]), (300, [32, 64, 128, 256])]
)
def test_sizes_of_deepgemm_calls(rows, sizes):
    assert deepgemm.call_sizes(rows) == sizes
    step = deepgemm.tokens_at_once(rows)
    assert step <= rows and {deepgemm.padded_tokens(n) for n in range(1, step + 1)} <= {
        *range(1, 33), *sizes,
    }  # fmt: skip


def test_warm_up_makes_every_call_size(deep_gemm):
    config = flash(index_topk=8)
    manager = KVCacheManager(
        config, max_requests=2, num_blocks=2, index_backend="deepgemm", max_forward_tokens=100
    )
    warm_up(manager, model_weights(config, seed=0))
    rows = deepgemm.index_scratch(
        torch.empty(100, 64, 128), manager.device_memory.memories[0], max_entries=9
    ).num_rows
    assert {32, 64} <= set(deep_gemm.sizes)
    assert set(deepgemm.call_sizes(rows)) <= {deepgemm.padded_tokens(n) for n in deep_gemm.sizes}


REFUSED = [
    ({"kv_format": "bf16"}, {}, "expected kv_format 'fp8', got 'bf16'"),
    ({"head_dim": 576}, {}, r"expected head_dim and rope_dim \(512, 64\), got \(576, 64\)"),
    ({"num_query_heads": 129}, {}, "expected num_query_heads at most 128, got 129"),
    ({}, {"batch_invariant": True}, "expected batch_invariant False, got True"),
]


@pytest.mark.parametrize(("choices", "options", "problem"), REFUSED)
def test_flashmla_refuses_caches_it_cannot_read(choices, options, problem, flash_mla):
    config = CacheConfig.v4_flash(compress_ratios=(4,), **choices)
    with pytest.raises(ValueError, match=f"'flashmla' cannot read this cache: {problem}"):
        KVCacheManager(
            config, max_requests=1, num_blocks=1, attention_backend="flashmla", **options
        )


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ({"index_format": "mxfp4"}, "expected index_format 'fp8', got 'mxfp4'"),
        ({"index_head_dim": 64}, "expected index_head_dim 128, got 64"),
        ({"index_num_heads": 16}, "expected index_num_heads 32 or 64, got 16"),
        ({"block_tokens": 512}, "expected block_tokens 256, got 512"),
    ],
)
def test_deepgemm_refuses_caches_it_cannot_read(choices, problem, deep_gemm):
    config = CacheConfig.v4_flash(compress_ratios=(4,), **{"index_format": "fp8", **choices})
    with pytest.raises(ValueError, match=f"'deepgemm' cannot read this cache: {problem}"):
        KVCacheManager(config, max_requests=1, num_blocks=1, index_backend="deepgemm")


def test_unknown_backends():
    config = CacheConfig.tiny()
    with pytest.raises(ValueError, match="Unknown attention_backend: expected one of reference, t"):
        KVCacheManager(config, max_requests=1, num_blocks=1, attention_backend="deepgemm")
    with pytest.raises(ValueError, match=r"Unknown index_backend: .*, deepgemm, got 'fl"):
        KVCacheManager(config, max_requests=1, num_blocks=1, index_backend="flashmla")
    with pytest.raises(ValueError, match="Unknown backend: expected one of reference, triton, got"):
        KVCacheManager(config, max_requests=1, num_blocks=1, backend="flashmla")


@pytest.fixture
def no_external(monkeypatch):
    """Hide all packages, and forget loaded kernels."""
    for name in ("flash_mla", "deep_gemm", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(find.FOLDER_VARIABLE, raising=False)
    loads = (find.load_flash_mla, find.load_deep_gemm, bench_flashmla.load_flash_mla_prefill)
    for load in loads:
        load.cache_clear()
    yield
    for load in loads:
        load.cache_clear()


def test_what_to_install(no_external):
    with pytest.raises(ImportError, match=r"pip install 'dsv4\[flashmla\]'.*vllm: not installed"):
        KVCacheManager(
            CacheConfig.v4_flash(), max_requests=1, num_blocks=1, attention_backend="flashmla"
        )
    with pytest.raises(ImportError, match=r"pip install 'dsv4\[deepgemm\]', or use vLLM's copy"):
        KVCacheManager(flash(), max_requests=1, num_blocks=1, index_backend="deepgemm")


def flash_mla_package(**functions):
    package = types.ModuleType("flash_mla")
    vars(package).update(functions)
    return package


PACKAGES = {
    "built without the legacy kernels": flash_mla_package(has_legacy=lambda: False),
    "too old to take window and entries": flash_mla_package(
        flash_mla_with_kvcache=lambda q, k_cache: None
    ),
    "reads V4.1's rows, and no longer V4's": flash_mla_package(
        flash_mla_with_kvcache=lambda q, extra_k_cache, enable_batch_invariant: None
    ),
}


@pytest.mark.parametrize("problem", PACKAGES)
def test_packages_that_do_not_read_our_rows(problem, no_external, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", PACKAGES[problem])
    with pytest.raises(ImportError, match=f"flash_mla: .*{problem}"):
        find.load_flash_mla()


@pytest.mark.parametrize("is_legacy", [True, False])
def test_the_package_is_called_as_it_is_declared(is_legacy, no_external, monkeypatch):
    """sgl-flash-mla gets use_legacy; an older flash_mla does not."""
    seen = {}

    def decode(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
               num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=None,
               indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
               topk_length=None, extra_topk_length=None, **more):  # fmt: skip
        seen.update(more, scale=softmax_scale, schedule=tile_scheduler_metadata, rows=indices)
        assert is_fp8_kvcache and head_dim_v == 512 and not causal
        assert extra_indices_in_kvcache == "entry_rows" and extra_topk_length == "counts"
        return "output", "lse"

    functions = {"flash_mla_with_kvcache": decode, "get_mla_metadata": lambda: ("new", None)}
    if is_legacy:
        functions["has_legacy"] = lambda: True
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_package(**functions))
    run = find.load_flash_mla()
    inputs = find.DecodeInputs("q", "sinks", "window", "rows", "entries", "entry_rows", "counts")
    assert run(inputs, None) == ("output", "lse", "new")
    assert run(inputs, "old").schedule == "old" and seen["rows"] == "rows"
    assert seen["scale"] == 512**-0.5 and seen.get("use_legacy", False) is is_legacy


@pytest.fixture
def vllm_operator():
    """Declare the operators as vLLM 0.26's library does; yield their recorded calls."""
    calls = []
    library = torch.library.Library("_flashmla_C", "FRAGMENT")
    library.define(
        "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, "
        "Tensor? attn_sink, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
        "Tensor? extra_kv, Tensor? extra_indices, Tensor? extra_topk_length, int d_v, "
        "float sm_scale, Tensor(c!)? out_) -> (Tensor, Tensor, Tensor, Tensor)"
    )

    def run(*arguments):
        calls.append(arguments)
        return tuple(torch.full((1,), float(part)) for part in range(4))

    library.impl("sparse_decode_fwd", run, "CPU")
    library.define(
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, "
        "Tensor? attn_sink, Tensor? topk_length, Tensor(a!)? out_) -> Tensor[]"
    )

    def run_prefill(query, *arguments):
        calls.append((query, *arguments))
        return [torch.full((2, 3, *tail), float(part)) for part, tail in enumerate([(4,), (), ()])]

    library.impl("sparse_prefill_fwd", run_prefill, "CPU")
    yield calls
    library._destroy()


def test_vllms_operator_is_called_as_it_is_declared(vllm_operator, no_external):
    run = find.load_flash_mla()
    inputs = find.DecodeInputs(*(torch.full((1,), 10.0 + part) for part in range(7)))
    decoded = run(inputs, None)
    run(inputs, decoded.schedule)
    first, second = vllm_operator
    assert (first[0], first[1], first[2], first[4]) == (10, 12, 13, 11)
    assert first[3] is first[5] is first[6] is first[12] is None
    assert first[7:10] == (14, 15, 16) and first[10:12] == (512, 512**-0.5)
    assert second[5:7] == (2, 3) and (decoded.output, decoded.lse) == (0, 1)


def test_vllms_prefill_is_called_as_it_is_declared(vllm_operator, no_external):
    run = bench_flashmla.load_flash_mla_prefill()
    inputs = bench_flashmla.PrefillInputs(*(torch.full((1,), 10.0 + part) for part in range(5)))
    output, lse, _ = run(inputs)
    run(inputs._replace(sinks=None, counts=None))
    first, second = vllm_operator
    assert first[:3] == (10, 12, 13) and first[5:] == (11, 14, None)
    assert first[3:5] == second[3:5] == (512**-0.5, 512)
    assert second[5:] == (None, None, None)
    assert output.shape == (2, 1, 3, 4) and lse.shape == (2, 3, 1)
    assert (output == 0).all() and (lse == 2).all()


def test_no_prefill_of_flashmla(no_external, monkeypatch):
    with pytest.raises(ImportError, match="vllm: not installed"):
        bench_flashmla.load_flash_mla_prefill()
    monkeypatch.setattr(find, "_load_library", lambda package, pattern: None)
    with pytest.raises(ImportError, match="vllm: its FlashMLA has no sparse_prefill_fwd"):
        bench_flashmla.load_flash_mla_prefill()


def deep_gemm_package(**functions):
    package = types.ModuleType("deep_gemm")
    vars(package).update(functions)
    return package


def test_deepgemm_is_called_as_it_is_declared(no_external, monkeypatch):
    def score(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
        return (q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len)

    package = deep_gemm_package(
        fp8_fp4_paged_mqa_logits=score, get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata=lambda context_lens, block_kv, num_sms: (block_kv, num_sms),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    logits = find.load_deep_gemm()
    assert logits.make_schedule("lengths") == (64, 132)
    got = logits.score("q", "pages", "weights", "lengths", "table", "schedule", 8)
    assert got == (("q", None), "pages", "weights", "lengths", "table", "schedule", 8)


def test_a_deepgemm_without_the_function(no_external, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm_package(get_num_sms=lambda: 1))
    with pytest.raises(ImportError, match="deep_gemm: has no fp8_fp4_paged_mqa_logits"):
        find.load_deep_gemm()


def test_a_folder_of_external_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    (tmp_path / "deep_gemm.py").write_text(
        "fp8_fp4_paged_mqa_logits = get_paged_mqa_logits_metadata = get_num_sms = len"
    )
    monkeypatch.setenv(find.FOLDER_VARIABLE, str(tmp_path))
    find.load_deep_gemm.cache_clear()
    try:
        assert find.load_deep_gemm().set_overlap is None
    finally:
        find.load_deep_gemm.cache_clear()
        sys.modules.pop("deep_gemm", None)
    with pytest.raises(ValueError, match="of external kernels: expected a folder, got no/such"):
        find.add_folder("no/such")


def test_a_library_that_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    (tmp_path / "vllm").mkdir()
    find.add_folder(tmp_path)
    find.load_flash_mla.cache_clear()
    with pytest.raises(ImportError, match=r"vllm: has no _flashmla_C\*\.so"):
        find.load_flash_mla()
    (tmp_path / "vllm" / "_flashmla_C.abi3.so").write_bytes(b"no library")
    with pytest.raises(ImportError, match=r"vllm: .*_flashmla_C.abi3.so"):
        find.load_flash_mla()


def test_a_device_without_external_kernels(flash_mla, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="Invalid device of 'flashmla': expected compute capabil"):
        limits.check_attention_backend(
            "flashmla", CacheConfig.v4_flash(), torch.device("cuda"), batch_invariant=False
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ValueError, match="expected page_align a multiple of 576 on this GPU"):
        limits.check_attention_backend(
            "flashmla", replace(CacheConfig.v4_flash(), page_align=16), torch.device("cuda"),
            batch_invariant=False,
        )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_spills(arch):
    kernels = compile_kernels("compile_external", arch)
    names = {"_prepare_kernel", "_list_kernel", "_finish_kernel", "_table_kernel"}
    assert {kernel["kernel"] for kernel in kernels} == names
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []
    assert_fits(kernels, arch)
