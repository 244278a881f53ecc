"""SGLang's kernels: the search, the refusals, and calls by SGLang's signatures."""

import os
import sys
import types

import pytest
import torch

from dsv4.kernels.external import find
from dsv4.tools.bench.external import sglang


@pytest.fixture
def no_sglang(monkeypatch):
    """Hide all packages but the build tools, and forget loaded kernels."""
    for name in [*sys.modules]:
        if name.split(".")[0] in ("sglang", "tvm_ffi"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setitem(sys.modules, "tvm_ffi", types.ModuleType("tvm_ffi"))
    monkeypatch.delenv(find.FOLDER_VARIABLE, raising=False)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sglang.shutil, "which", lambda name: f"/bin/{name}")
    sglang.load_sglang.cache_clear()
    yield
    sglang.load_sglang.cache_clear()


def refusal():
    with pytest.raises(ImportError, match=r"pip install sglang==0\.5\.23") as refused:
        sglang.load_sglang()
    return str(refused.value)


def test_what_to_install(no_sglang, monkeypatch):
    assert f"({sglang.MODULE}: not installed)" in refusal()
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    assert "(tvm_ffi: not installed)" in refusal()


def test_tools(no_sglang, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert f"(nvcc: expected it on the path or at {tmp_path}/bin/nvcc)" in refusal()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert "nvcc: expected" not in refusal()
    monkeypatch.setattr(sglang.shutil, "which", lambda name: None)
    assert "(ninja: not installed)" in refusal()


def declare(package):
    """Declare functions with SGLang 0.5.23's parameters; each returns its arguments."""

    class CompressorDecodePlan:
        @staticmethod
        def generate(compress_ratio, req_pool_indices, req_to_token, full_to_state, seq_lens,
                     swa_page_size, ring_size, use_req_ring=False):  # fmt: skip
            return types.SimpleNamespace(**locals())

    def plan_topk_v2(seq_lens, static_threshold=-1, *, out=None):
        return locals()

    def topk_transform_paged_v2(scores, seq_lens, page_tables, out_page_indices, page_size,
                                metadata, out_raw_indices=None):  # fmt: skip
        return locals()

    def fused_q_indexer_rope_hadamard_quant(q_input, weight, weight_scale, freqs_cis, positions):
        return locals()

    def fused_k_norm_rope_flashmla(kv, kv_weight, eps, freqs_cis, positions, out_loc, kvcache,
                                   page_size, layout="v4", q=None):  # fmt: skip
        return locals()

    def compress_forward(kv_score_buffer, kv_score_input, ape, plan, *, head_dim, compress_ratio,
                         out=None, is_online=False):  # fmt: skip
        return locals()

    def compress_norm_rope_store(kv, plan, *, norm_weight, norm_eps, freq_cis, out_loc, kvcache,
                                 page_size, use_fp4=False, bf16_store=False):  # fmt: skip
        package.stored = locals()

    vars(package).update({k: v for k, v in locals().items() if k != "package"})


@pytest.fixture
def package(no_sglang, monkeypatch):
    """Install a package with these functions."""
    parts = sglang.MODULE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    declare(sys.modules[sglang.MODULE])
    return sys.modules[sglang.MODULE]


def test_the_package_is_called_as_it_is_declared(package):
    kernels = sglang.load_sglang()
    assert kernels.plan_topk("lengths")["seq_lens"] == "lengths"
    got = kernels.choose_entries("scores", "lengths", "table", "rows", 64, "plan")
    assert [*got.values()] == ["scores", "lengths", "table", "rows", 64, "plan", None]
    got = kernels.make_query("query", "weights", 0.5, "frequencies", "positions")
    assert [*got.values()] == ["query", "weights", 0.5, "frequencies", "positions"]
    got = kernels.store_window("kv", "weight", 0.1, "freqs", "positions", "rows", "pages", 256)
    assert [*got.values()][:8] == ["kv", "weight", 0.1, "freqs", "positions", "rows", "pages", 256]


@pytest.mark.parametrize(("ratio", "ring_size"), [(4, 8), (128, 128)])
def test_compressors_are_called_as_they_are_declared(ratio, ring_size, package):
    kernels = sglang.load_sglang()
    plan = kernels.plan_compress(ratio, torch.arange(3), torch.full((3,), 256))
    assert plan.req_pool_indices.dtype is plan.seq_lens.dtype is torch.int64
    assert plan.req_to_token.dim() == 2 and plan.req_to_token.dtype is torch.int32
    assert plan.full_to_state.dim() == 1 and plan.full_to_state.dtype is torch.int64
    assert (plan.ring_size, plan.use_req_ring) == (ring_size, ratio == 4)
    bias = torch.zeros(8, 512)
    got = kernels.pool("state", "projections", bias, plan)
    assert (got["kv_score_buffer"], got["kv_score_input"]) == ("state", "projections")
    assert got["ape"] is bias and got["plan"] is plan
    assert (got["head_dim"], got["compress_ratio"]) == (512, ratio)
    kernels.store_entries("pooled", plan, "weight", 0.1, "freqs", "rows", "pages", 64, True)
    stored = package.stored
    assert (stored["kv"], stored["norm_weight"], stored["norm_eps"]) == ("pooled", "weight", 0.1)
    assert (stored["freq_cis"], stored["out_loc"], stored["kvcache"]) == ("freqs", "rows", "pages")
    assert (stored["page_size"], stored["use_fp4"], stored["bf16_store"]) == (64, True, False)


def test_a_package_without_a_function(package):
    del package.compress_forward
    assert f"({sglang.MODULE}: has no compress_forward)" in refusal()


def test_a_folder_of_external_kernels(no_sglang, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "sglang")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text(
        "import os\nos.environ['SOME_CACHE'] = 'elsewhere'\nimport no_such_package_of_ours"
    )
    monkeypatch.setenv(find.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("SOME_CACHE", "here")
    assert f"({sglang.MODULE}: needs no_such_package_of_ours)" in refusal()
    assert os.environ["SOME_CACHE"] == "here"
