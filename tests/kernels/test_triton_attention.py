"""Triton's attention against the reference in fp64, within a derived bound."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import KV_FORMATS
from dsv4.kernels import reference
from dsv4.kernels.backends import load_backend
from dsv4.kernels.contracts import AttentionResult
from dsv4.kernels.reference.arithmetic import rotate
from dsv4.kernels.reference.attention import attend_dense
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows, window_values_of
from dsv4.kernels.triton import attention
from dsv4.kernels.triton.hopper import attention as hopper
from dsv4.kernels.triton.launch import HopperLaunch, find_launch
from dsv4.testing import model_weights, move_to, poison, take_rows
from tests.kernels.serving import write_in_parts
from tests.kernels.test_triton_gather import DEVICE, filled, written_projections

SWA, CSA, HCA = (0,), (4,), (128,)
BF16_ROUNDOFF = 2.0**-8
FP32_ROUNDOFF = 2.0**-23  # tensor cores may truncate where the CPU rounds


@dataclass(frozen=True)
class Case:
    """A layer, its choices, and lengths of each request before and after the last forward."""

    name: str
    ratios: tuple[int, ...]
    before: list[int]
    after: list[int]
    heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    choices: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def filled(self):
        config = CacheConfig.tiny(
            compress_ratios=self.ratios, num_query_heads=self.heads, **self.choices
        )
        return filled(config, self.before, self.after)


STEPS = {
    "decode": ([0, 3, 130], [1, 4, 131], {}),
    "verify": ([0, 126], [3, 129], {"drafts_per_step": 2}),
    "chunk": ([0, 126], [5, 129], {}),
}
TYPES = {"swa": SWA, "csa": CSA, "hca": HCA}
CASES = [
    *(Case(f"{kind} {step}", ratios, before, after, choices=choices)
      for kind, ratios in TYPES.items() for step, (before, after, choices) in STEPS.items()),
    *(Case(f"{kind} {name} rows", ratios, [6, 127], [7, 128], choices={"kv_format": name})
      for kind, ratios in TYPES.items() for name in KV_FORMATS),
    *(Case(f"{heads} heads", CSA, [6], [7], heads) for heads in (1, 16, 20, 64)),
    *(Case(f"fp32 query, {name} rows", CSA, [6], [7], dtype=torch.float32,
           choices={"kv_format": name}) for name in KV_FORMATS),
    Case("no entries", CSA, [0, 1, 2], [1, 2, 3]),
    Case("no entries of an hca layer", HCA, [126], [127]),
    Case("entries in several blocks", HCA, [511, 383], [512, 384]),
    Case("a window that no tile divides", HCA, [300], [301], choices={"sliding_window": 100}),
    Case("rows that are no power of two", CSA, [3], [5],
         choices={"head_dim": 104, "rope_dim": 24, "kv_format": "fp8_entry_scale"}),
    Case("more rotated channels than a group has", HCA, [127], [128],
         choices={"head_dim": 192, "rope_dim": 128, "index_head_dim": 128}),
]  # fmt: skip


class Inputs(NamedTuple):
    query: Tensor
    sinks: Tensor
    rows: Tensor | None


def make_inputs(handle, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> Inputs:
    """Random queries and sinks; of a CSA layer, what its indexer selects for random queries."""
    generator = torch.Generator().manual_seed(seed)
    config, num_tokens = handle.config, handle.plan.num_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(handle.positions.device)

    query = normal(num_tokens, config.num_query_heads, config.head_dim).to(dtype)
    rows = None
    if handle.layer.ratio == 4:
        rows = reference.select_entries(
            normal(num_tokens, config.index_num_heads, config.index_head_dim),
            normal(num_tokens, config.index_num_heads), handle.memory, handle.tokens,
            max_entries=handle.plan.max_entries(4),
        ).rows  # fmt: skip
    return Inputs(query, normal(config.num_query_heads), rows)


def run(backend, handle, inputs: Inputs, *, more_entries: int = 0, **options) -> AttentionResult:
    max_entries = handle.plan.max_entries(handle.layer.ratio) + more_entries
    return backend.attend(
        inputs.query, inputs.sinks, handle.memory, inputs.rows, handle.tokens,
        max_entries=max_entries, **options,
    )  # fmt: skip


def triton():
    return load_backend("triton")


def in_fp64(handle, inputs: Inputs) -> AttentionResult:
    wide = inputs._replace(query=inputs.query.double())
    return run(reference, handle, wide, compute_dtype=torch.float64)


def context(handle, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp64 rows `[num_tokens, n, dim]` that each token attends, and which of them exist."""
    memory, tokens, every = handle.memory, handle.tokens, slice(None)
    values, is_present = window_values_of(memory.window, tokens, every)
    if memory.entries is not None:
        if rows is None:
            ratio = handle.layer.ratio
            rows = visible_entry_rows(
                memory.entries, tokens, every, ratio=ratio,
                max_entries=handle.plan.max_entries(ratio),
            )  # fmt: skip
        values = torch.cat((values, gather_rows(memory.entries, rows)), dim=1)
        is_present = torch.cat((is_present, rows >= 0), dim=1)
    return values.double(), is_present


class Bound(NamedTuple):
    output: Tensor
    lse: Tensor


def error_bound(handle, inputs: Inputs, expected: AttentionResult) -> Bound:
    """How far a kernel may be from fp64, elementwise.

    Queries and rows are exact operands. With u and e the roundoffs of BF16 and fp32, D channels
    and n rows:

    - A logit is a sum of D exact products, scaled; the largest is subtracted, and exp2 is good to
      a few e. Its error is at most E = D e max_j Σ_c |q_c k_jc| / √D + 8 e max(|s_j|, |sink|).
    - A weight is exp of it, so off by a factor of exp(±E), and with BF16 operands rounded once
      more, by 1 ± u. A sum over n rows, rescaled when the largest logit grows, and combined of
      parts, is off by a factor of 1 ± 2 n e.
    - A weight over the sum is thus off by at most R = exp(2 E) (1 + u) (1 + 2 n e)² - 1, and the
      output by R Σ_j w_j |v_j|. The rotation mixes the errors of a pair as it mixes the values.
    - The output is rounded once to the query's dtype, which adds its roundoff of the value and of
      the error before.
    - What lies below fp32's normal numbers may be 0.
    - The lse is the logarithm of a sum that is off by exp(±E) and 1 ± 2 n e.
    """
    values, is_present = context(handle, inputs.rows)
    query, dim, num_rows = inputs.query.double(), values.shape[-1], values.shape[1]
    is_bf16 = inputs.query.dtype is torch.bfloat16 and handle.config.kv_format != "fp32"
    scale = dim**-0.5
    logits = torch.einsum("thd,tnd->thn", query, values) * scale
    logits = torch.where(is_present[:, None], logits, 0.0)
    products = torch.einsum("thd,tnd->thn", query.abs(), values.abs()) * scale
    sinks = torch.where(inputs.sinks.isfinite(), inputs.sinks, 0.0).double().abs()
    size = torch.maximum(logits.abs().amax(-1), sinks)
    logit = FP32_ROUNDOFF * (dim * torch.where(is_present[:, None], products, 0.0).amax(-1))
    logit = logit + 8 * FP32_ROUNDOFF * size
    sums = 2 * (num_rows + dim) * FP32_ROUNDOFF
    weight = BF16_ROUNDOFF if is_bf16 else 0.0
    factor = torch.exp(2 * logit) * (1 + weight) * (1 + sums) ** 2 - 1
    magnitude, _ = attend_dense_magnitude(query, values, is_present, inputs.sinks)
    error = rotate_magnitude(factor[:, :, None] * magnitude, handle)
    roundoff = BF16_ROUNDOFF if inputs.query.dtype is torch.bfloat16 else FP32_ROUNDOFF
    error = error + roundoff * (expected.output.abs() + error)
    error = error + 2.0**-126 * num_rows * values.abs().max()
    lse = expected.lse.double().abs()
    return Bound(error, logit + sums + 4 * FP32_ROUNDOFF * torch.where(lse.isfinite(), lse, 0.0))


def attend_dense_magnitude(query, values, is_present, sinks) -> AttentionResult:
    """Σ_j w_j |v_j|: the same weights over the values' magnitudes."""
    logits = torch.einsum("thd,tnd->thn", query, values) * query.shape[-1] ** -0.5
    logits = torch.where(is_present[:, None], logits, -torch.inf)
    sink = sinks.double()[None, :, None].expand(len(query), -1, 1)
    weights = torch.cat((logits, sink), dim=-1)
    weights = torch.where(weights.amax(-1, keepdim=True) == torch.inf, 0.0, weights.softmax(-1))
    weights = torch.where(is_present.any(-1)[:, None, None], weights, 0.0)
    return AttentionResult(torch.einsum("thn,tnd->thd", weights[..., :-1], values.abs()), logits)


def rotate_magnitude(error: Tensor, handle) -> Tensor:
    cos, sin = (rows[:, None].abs() for rows in handle.rope)
    rope_dim = 2 * cos.shape[-1]
    even, odd = error[..., -rope_dim:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos + odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((error[..., :-rope_dim], turned), dim=-1)


def assert_within_bound(handle, inputs: Inputs, got: AttentionResult, bound=error_bound) -> None:
    expected = in_fp64(handle, inputs)
    bound = bound(handle, inputs, expected)
    assert got.output.dtype == inputs.query.dtype and got.lse.dtype == torch.float32
    error = (got.output.double() - expected.output).abs()
    assert (error <= bound.output).all(), (error / bound.output.clamp(min=1e-30)).max()
    same = got.lse == expected.lse  # -inf
    error = torch.where(same, 0.0, (got.lse.double() - expected.lse.double()).abs())
    assert (error <= bound.lse).all(), (error / bound.lse).max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_the_bound(case):
    handle = case.filled()
    inputs = make_inputs(handle, case.dtype)
    inputs.query[1 if case.after[0] - case.before[0] == 1 else -1].mul_(3)
    got = run(triton(), handle, inputs)
    assert_within_bound(handle, inputs, got)
    assert got.output.isfinite().all(), "nothing of the poison is read"


def same_precision(handle, inputs: Inputs) -> Tensor:
    """The reference with weights rounded to BF16 and sums in fp32, rounded to BF16."""
    values, is_present = context(handle, inputs.rows)
    logits = torch.einsum("thd,tnd->thn", inputs.query.double(), values) * values.shape[-1] ** -0.5
    logits = torch.where(is_present[:, None], logits, -torch.inf).float()
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = weights.sum(-1) + torch.exp(inputs.sinks - logits.amax(-1))
    output = torch.einsum("thn,tnd->thd", weights.bfloat16().float(), values.float())
    return reference.attention.unrotate(output / total[..., None], handle.rope)


@pytest.mark.parametrize("ratios", [SWA, CSA, HCA], ids=list(TYPES))
def test_error_is_that_of_the_same_precision(ratios):
    handle = Case("", ratios, [200, 255], [201, 256], heads=16).filled()
    inputs = make_inputs(handle)
    expected, got = in_fp64(handle, inputs).output, run(triton(), handle, inputs).output
    is_token = torch.tensor([True, False, True], device=DEVICE)  # the second is padding
    expected, got = expected[is_token], got[is_token].double()
    same = same_precision(handle, inputs)[is_token].bfloat16().double()
    rounding = (expected.bfloat16().double() - expected).norm()
    assert (got - expected).norm() <= (same - expected).norm() + rounding


RAW_NAMES = (
    "swa decode", "csa chunk", "hca verify", "csa fp32 rows", "20 heads",
    "fp32 query, fp8 rows", "rows that are no power of two",
    "more rotated channels than a group has",
)  # fmt: skip


def make_raw(handle, dtype: torch.dtype = torch.bfloat16) -> tuple[Inputs, Inputs]:
    """Raw queries whose heads differ in size, one of them 0, and the same queries prepared."""
    inputs = make_inputs(handle, dtype)
    generator = torch.Generator().manual_seed(1)
    scale = torch.randn(inputs.query.shape[:2], generator=generator).mul(4).exp()
    raw = inputs._replace(query=inputs.query * scale[:, :, None].to(inputs.query))
    raw.query[0, 0] = 0.0
    prepared = reference.attention.prepare_query(raw.query, handle.memory)
    return raw, raw._replace(query=prepared)


def assert_same_bits(got: AttentionResult, expected: AttentionResult) -> None:
    assert torch.equal(got.output, expected.output) and torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("choices", [{}, {"head_dim": 104, "rope_dim": 24}], ids=str)
def test_a_prepared_query_is_normed_and_rotated(choices, dtype):
    choices = {"kv_format": "bf16", "rms_norm_eps": 1e-3, **choices}
    handle = Case("", HCA, [300, 5], [305, 6], choices=choices).filled()
    raw, prepared = make_raw(handle, dtype)
    query = raw.query.double()
    norm = (query.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    cos, sin = (rows[:, None].double() for rows in handle.rope)
    expected = rotate(query * norm, cos, sin)
    roundoff = FP32_ROUNDOFF if dtype is torch.float32 else BF16_ROUNDOFF
    size = rotate_magnitude((query * norm).abs(), handle)
    assert prepared.query.dtype == dtype
    assert ((prepared.query.double() - expected).abs() <= 8 * FP32_ROUNDOFF * size
            + roundoff * expected.abs()).all()  # fmt: skip


@pytest.mark.parametrize("name", RAW_NAMES)
def test_raw_queries_give_the_bits_of_prepared_ones(name):
    (case,) = (case for case in CASES if case.name == name)
    handle = case.filled()
    raw, prepared = make_raw(handle, case.dtype)
    for backend in (reference, triton()):
        expected = run(backend, handle, prepared)
        assert_same_bits(run(backend, handle, raw, is_query_raw=True), expected)
        assert not torch.equal(run(backend, handle, raw).output, expected.output)


def test_padding_gives_nothing_and_may_hold_anything():
    handle = Case("", HCA, [127, 5], [128, 6]).filled()
    inputs = make_inputs(handle)
    inputs.query[1] = torch.nan
    for wave in (1, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "num_multiprocessors", lambda device, wave=wave: wave)
            got = run(triton(), handle, inputs)
        assert (got.output[1] == 0).all() and (got.lse[1] == -torch.inf).all()
        assert got.output.isfinite().all()


def split_as_often_as(wave: int, monkeypatch) -> None:
    """So many multiprocessors, and parts that cost nothing."""
    monkeypatch.setattr(attention, "num_multiprocessors", lambda device: wave)
    replace_combine(monkeypatch, combine_cost=0, part_cost=0)


def replace_combine(monkeypatch, **fields: int | None) -> None:
    """Other constants by which rows are split."""
    changed = attention.combine_launch(torch.device("cpu"))._replace(**fields)
    monkeypatch.setattr(attention, "combine_launch", lambda device, num_splits=1: changed)


SINKS = {
    "none": None,
    "minus infinity": -torch.inf,
    "plus infinity": torch.inf,
    "large": 300.0,
    "small": -300.0,
}


@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize("wave", [1, 100])
def test_sinks(name, wave, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    handle = Case("", CSA, [6], [7]).filled()
    inputs = make_inputs(handle)
    value = SINKS[name]
    given = None if value is None else torch.full_like(inputs.sinks, value)
    got = run(triton(), handle, inputs._replace(sinks=given))
    if value is None or value == -torch.inf:
        given = torch.full_like(inputs.sinks, -torch.inf)
    assert_within_bound(handle, inputs._replace(sinks=given), got)
    if value == torch.inf:
        assert (got.output == 0).all() and got.lse[0].isfinite().all()


def test_sinks_in_bf16():
    handle = Case("", SWA, [6], [7]).filled()
    inputs = make_inputs(handle)
    rounded = inputs.sinks.bfloat16()
    got = run(triton(), handle, inputs._replace(sinks=rounded))
    assert_within_bound(handle, inputs._replace(sinks=rounded.float()), got)


def test_no_selected_row_leaves_the_window():
    handle = Case("", CSA, [30], [31]).filled()
    inputs = make_inputs(handle)
    inputs = inputs._replace(rows=torch.full_like(inputs.rows, -1))
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


def test_missing_rows_between_others_and_any_strides():
    handle = Case("", CSA, [30], [31]).filled()
    inputs = make_inputs(handle)
    rows = inputs.rows.flip(1).clone()
    rows[:, ::3] = -1
    wide = torch.empty(*inputs.query.shape[::-1], dtype=torch.bfloat16, device=DEVICE)
    wide.copy_(inputs.query.permute(2, 1, 0))
    strided = Inputs(wide.permute(2, 1, 0), inputs.sinks, rows.t().contiguous().t())
    assert not strided.query.is_contiguous() and not strided.rows.is_contiguous()
    assert_within_bound(handle, strided, run(triton(), handle, strided))


def hostile(handle, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A list with rows that the pool does not have among the others, and with -1 in their place."""
    num_rows = handle.memory.entries.num_rows
    wrong = [num_rows, num_rows + 5, 2**31, 2**32 + 1, 2**62, -2, -(2**31), -(2**32) + 1, -(2**63)]
    listed, cleaned = rows.clone(), rows.clone()
    for nth, row in enumerate(wrong):
        listed[:, nth::16], cleaned[:, nth::16] = row, -1
    return listed, cleaned


def assert_absent_outside_of_the_pool(backend, handle) -> None:
    inputs = make_inputs(handle)
    listed, cleaned = hostile(handle, inputs.rows)
    assert (cleaned >= 0).any()
    got, want = (run(backend, handle, inputs._replace(rows=each)) for each in (listed, cleaned))
    assert torch.equal(got.output, want.output) and torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_rows_outside_of_the_pool_are_absent(name):
    handle = Case("", CSA, [300], [301], choices={"index_topk": 40}).filled()
    assert_absent_outside_of_the_pool(load_backend(name), handle)


@pytest.mark.parametrize("wave", [1, 2, 100])
def test_any_number_of_splits(wave, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    handle = Case("", HCA, [511], [512], choices={"sliding_window": 33}).filled()
    inputs = make_inputs(handle)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))
    # A captured graph passes the most entries of any request.
    assert_within_bound(handle, inputs, run(triton(), handle, inputs, more_entries=90))


def test_parts_in_few_places(monkeypatch):
    """Tokens take turns if there is not room for the parts of all."""
    handle = Case("", HCA, [511, 3, 127], [512, 4, 128]).filled()
    inputs = make_inputs(handle)
    small = handle.memory._replace(partials=handle.memory.partials[:3])
    handle = replace(handle, parts=replace(handle.parts, memory=small))
    replace_combine(monkeypatch, whole_rows=32, split_rows=64)
    launch = attention.attend_launch(8, torch.bfloat16, small)
    num_tiles = attention.count_tiles(small, launch, 4)
    splits = attention.invariant_splits(num_tiles, num_tiles, launch, small)
    assert 1 < splits.num_splits <= 3 < splits.num_splits * len(inputs.query)
    got = run(triton(), handle, inputs, batch_invariant=True)
    assert_within_bound(handle, inputs, got)


CUTS = [(1, 2, 8, 1), (16, 2, 8, 1), (32, 2, 16, 1), (64, 2, 64, 1), (1, 6, 8, 6), (8, 6, 64, 6),
        (1, 10, 8, 10), (2, 10, 8, 5), (16, 10, 64, 5), (32, 10, 64, 4), (128, 10, 64, 1),
        (1, 130, 16, 33)]  # fmt: skip


@pytest.mark.parametrize(("num_tokens", "num_tiles", "heads", "num_splits"), CUTS)
def test_few_tokens_have_programs_of_few_heads(
    num_tokens, num_tiles, heads, num_splits, monkeypatch
):
    """On an H200, of a model with 64 heads."""
    monkeypatch.setattr(attention, "num_multiprocessors", lambda device: 132)
    memory = Case("", SWA, [6], [7]).filled().memory._replace(partials=torch.empty(256, 1))
    widest = find_launch(HopperLaunch, "attend hopper", torch.device("cpu"), 64)
    sizes = num_tokens, 64, num_tiles
    launch = attention.choose_launch(*sizes, widest, memory)
    splits = attention.choose_splits(*sizes, launch, memory)
    assert (launch.heads, 1 if splits is None else splits.num_splits) == (heads, num_splits)
    narrow = find_launch(HopperLaunch, "attend hopper", torch.device("cpu"), 8)
    assert attention.choose_launch(num_tokens, 8, num_tiles, narrow, memory) == narrow
    other = attention.attend_launch(64, torch.bfloat16, memory)
    assert attention.choose_launch(*sizes, other, memory) is other, "not on Hopper"


def attend_alone(handle, inputs: Inputs, token: int, *, has_chunks: bool = True) -> AttentionResult:
    """One token of a forward as if it were all of it, beside its chunks or not."""
    only = slice(token, token + 1)
    tokens = handle.tokens._replace(
        positions=handle.tokens.positions[only], request_ids=handle.tokens.request_ids[only]
    )
    if not has_chunks:
        tokens = tokens._replace(chunk_ids=tokens.chunk_ids[:0])
    memory = handle.memory._replace(rope_rows=handle.memory.rope_rows[:, :, only])
    return triton().attend(
        inputs.query[only], inputs.sinks, memory,
        None if inputs.rows is None else inputs.rows[only], tokens,
        max_entries=handle.plan.max_entries(handle.layer.ratio), batch_invariant=True,
    )  # fmt: skip


@pytest.mark.parametrize("ratios", [SWA, CSA, HCA], ids=list(TYPES))
@pytest.mark.parametrize("after", [[385, 4, 10], [385, 43]], ids=["decode", "beside a chunk"])
def test_batch_invariant_bits(ratios, after, monkeypatch):
    """A request alone and beside others."""
    replace_combine(monkeypatch, whole_rows=32, split_rows=64)
    handle = Case("", ratios, [384, 3, 9][: len(after)], after).filled()
    inputs = make_inputs(handle)
    whole = run(triton(), handle, inputs, batch_invariant=True)
    for token in (0, 1):
        alone = attend_alone(handle, inputs, token)
        assert torch.equal(alone.output[0], whole.output[token])
        assert torch.equal(alone.lse[0], whole.lse[token])


def test_parts_of_the_context_merge_by_their_lse():
    """Window and rows A, window and rows B, less the window, are the whole."""
    handle = Case("", CSA, [30], [31], dtype=torch.float32).filled()
    inputs = make_inputs(handle, torch.float32)._replace(sinks=None)
    first, second, none = (inputs.rows.clone() for _ in range(3))
    first[:, 4:], second[:, :4], none[:] = -1, -1, -1
    whole, *parts = (
        run(triton(), handle, inputs._replace(rows=rows))
        for rows in (inputs.rows, first, second, none)
    )
    weights = [torch.exp(part.lse.double() - whole.lse.double())[..., None] for part in parts]
    weights[-1] = -weights[-1]
    merged = sum(w * part.output.double() for w, part in zip(weights, parts, strict=True))
    assert torch.allclose(sum(weights)[0], torch.ones_like(weights[0][0]), rtol=0, atol=1e-5)
    assert torch.allclose(merged[0], whole.output[0].double(), rtol=0, atol=1e-5)


def test_the_handle_uses_it():
    handle = Case("", HCA, [127], [128]).filled()
    inputs = make_inputs(handle)
    parts = replace(
        handle.parts, backend="triton", attention_backend="triton", batch_invariant=True
    )
    kernels = replace(handle, parts=parts)
    got = kernels.attend(inputs.query, inputs.sinks)
    want = run(triton(), handle, inputs, batch_invariant=True)
    assert torch.equal(got.output, want.output) and torch.equal(got.lse, want.lse)


def test_a_manager_passes_batch_invariant_on():
    config = CacheConfig.tiny(compress_ratios=SWA)
    for chosen in (False, True):
        manager = KVCacheManager(config, max_requests=1, num_blocks=1, batch_invariant=chosen)
        plan = prepare_forward(manager, [manager.open_request()], [0], [1])
        assert manager.acquire(0, plan).parts.batch_invariant is chosen
    with pytest.raises(ValueError, match="Invalid batch_invariant: expected True or False, got 1"):
        KVCacheManager(config, max_requests=1, num_blocks=1, batch_invariant=1)


def test_no_tokens():
    config = CacheConfig.tiny(compress_ratios=SWA)
    manager = KVCacheManager(config, max_requests=1, num_blocks=1, device=DEVICE)
    tokens = prepare_forward(manager, [], [], []).tokens
    query = torch.empty(0, 4, 96, dtype=torch.bfloat16, device=DEVICE)
    memory = manager.device_memory.memories[0]
    got = triton().attend(query, None, memory, None, tokens, max_entries=0)
    assert got.output.shape == (0, 4, 96) and got.lse.shape == (0, 4)


def test_magnitudes_weigh_as_the_reference_does():
    """The bound's own weights, over values that are all positive, are the reference's."""
    handle = Case("", SWA, [6], [7]).filled()
    inputs = make_inputs(handle)
    values, is_present = context(handle, None)
    query = inputs.query.double()
    got = attend_dense_magnitude(query, values.abs(), is_present, inputs.sinks)
    want = attend_dense(query, values.abs(), is_present, inputs.sinks)
    assert torch.allclose(got.output, want.output, rtol=1e-12, atol=0)


PRESETS = {"flash": CacheConfig.v4_flash, "pro": CacheConfig.v4_pro}
LENGTHS = {
    "decode": ([0, 254, 5000, 700], [1, 255, 5001, 701]),
    "chunk": ([0, 254, 5000], [130, 255, 5040]),
}


def real(preset: str, ratios: tuple[int, ...], step: str, name: str = "fp8", **choices):
    config = PRESETS[preset](compress_ratios=ratios, kv_format=name, **choices)
    before, after = LENGTHS[step]
    manager = KVCacheManager(
        config, max_requests=8, num_blocks=64, device="cuda", max_forward_tokens=8192
    )
    poison(manager)
    slots = [manager.open_request() for _ in before]
    (weights,), inputs = model_weights(config, seed=0), written_projections(config, 6000, seed=1)
    for starts, ends in (([0] * len(before), before), (before, after)):
        plan = prepare_forward(manager, [-1, *slots, -1], [0, *starts, 0], [1, *ends, 1])
        rows = slice(0, plan.num_tokens)
        handle = manager.acquire(0, plan)
        write_in_parts(handle, move_to("cuda", take_rows(inputs, rows)), move_to("cuda", weights))
    return handle


@pytest.mark.gpu
@pytest.mark.parametrize("step", LENGTHS)
@pytest.mark.parametrize("ratios", [SWA, CSA, HCA], ids=list(TYPES))
@pytest.mark.parametrize(
    ("preset", "heads"),
    [("flash", 64), ("flash", 8), ("flash", 16), ("flash", 32), ("pro", 128), ("pro", 96)],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_real_width(preset, heads, ratios, step, invariant):
    handle = real(preset, ratios, step, num_query_heads=heads)
    inputs = make_inputs(handle)
    got = run(triton(), handle, inputs, batch_invariant=invariant)
    assert_within_bound(handle, inputs, got)


@pytest.mark.gpu
@pytest.mark.parametrize("step", LENGTHS)
@pytest.mark.parametrize("ratios", [SWA, CSA, HCA], ids=list(TYPES))
@pytest.mark.parametrize(("preset", "heads"), [("flash", 64), ("flash", 8), ("pro", 96)])
@pytest.mark.parametrize("invariant", [False, True])
def test_raw_queries_at_the_real_width(preset, heads, ratios, step, invariant):
    handle = real(preset, ratios, step, num_query_heads=heads)
    raw, prepared = make_raw(handle)
    expected = run(triton(), handle, prepared, batch_invariant=invariant)
    for _ in range(5):
        got = run(triton(), handle, raw, batch_invariant=invariant, is_query_raw=True)
        assert_same_bits(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [20, 64])
@pytest.mark.parametrize("wave", [1, 1000])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("ratios", [SWA, CSA, HCA], ids=list(TYPES))
def test_programs_of_any_heads(ratios, heads, wave, num_heads, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    handle = real("flash", ratios, "decode", num_query_heads=num_heads)
    if attention.is_hopper(handle.positions.device):
        launch = find_launch(HopperLaunch, "attend hopper", handle.positions.device, heads)
        monkeypatch.setattr(attention, "choose_launch", lambda *arguments: launch)
    inputs = make_inputs(handle)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("step", LENGTHS)
def test_rows_outside_of_the_pool_at_the_real_width(heads, step):
    handle = real("flash", CSA, step, num_query_heads=heads)
    assert_absent_outside_of_the_pool(triton(), handle)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formats_at_the_real_width(name, dtype):
    handle = real("flash", CSA, "decode", name)
    inputs = make_inputs(handle, dtype)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("step", LENGTHS)
@pytest.mark.parametrize("ratios", [CSA, HCA], ids=["csa", "hca"])
def test_reruns_are_bitwise_equal(ratios, step):
    handle = real("flash", ratios, step)
    inputs = make_inputs(handle)
    first = run(triton(), handle, inputs)
    for _ in range(20):
        again = run(triton(), handle, inputs)
        assert torch.equal(again.output, first.output) and torch.equal(again.lse, first.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [{}, {"whole_rows": 64, "split_rows": 128}], ids=["", "short"])
@pytest.mark.parametrize(("preset", "ratios"), [("flash", SWA), ("flash", CSA), ("flash", HCA),
                                                ("pro", CSA)])  # fmt: skip
def test_batch_invariant_bits_at_the_real_width(preset, ratios, rows, monkeypatch):
    """A step's token, alone and beside two chunks: programs join splits there, or others do."""
    replace_combine(monkeypatch, **rows)
    handle = real(preset, ratios, "chunk")
    inputs = make_inputs(handle)
    token = 131  # between the chunks, behind a token of padding
    assert handle.positions[token] == 254
    alone = attend_alone(handle, inputs, token, has_chunks=False)
    for num_joining in (0, 100) if rows else (0,):
        monkeypatch.setattr(attention, "count_joining", lambda *_, n=num_joining: n)
        whole = run(triton(), handle, inputs, batch_invariant=True)
        assert torch.equal(whole.output[token], alone.output[0])
        assert torch.equal(whole.lse[token], alone.lse[0])


@pytest.mark.gpu
@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("ratios", [SWA, CSA, HCA], ids=list(TYPES))
def test_graph_replay(ratios, is_raw):
    handle = real("flash", ratios, "decode")
    inputs = make_inputs(handle)
    options = {"more_entries": 8000, "is_query_raw": is_raw}
    eager = run(triton(), handle, inputs, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(triton(), handle, inputs, **options)
    for _ in range(5000):
        captured.output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured.output, eager.output)
        assert torch.equal(captured.lse, eager.lse)


@pytest.mark.gpu
def test_lengths_do_not_compile_anew():
    kernels = attention._attend_kernel, hopper._attend_kernel

    def num_compiled() -> int:
        return sum(len(caches[0]) for k in kernels for caches in k.device_caches.values())

    handle = real("flash", HCA, "decode")
    inputs = make_inputs(handle)
    for more_entries in (0, 8000):  # whole, and split
        run(triton(), handle, inputs, more_entries=more_entries)
    compiled = num_compiled()
    for more_entries in (1, 5, 16, 900, 7000):
        run(triton(), handle, inputs, more_entries=more_entries)
    assert num_compiled() == compiled


def fill_entries(handle, low: int, high: int) -> None:
    """Any finite codes, and scale bytes from low to high."""
    entries = handle.memory.entries
    generator = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 256, entries.data.shape, generator=generator, device="cuda")
    codes = torch.where(codes % 128 == 127, codes - 1, codes).to(torch.uint8)
    entries.data[..., :448] = codes[..., :448]
    scales = torch.randint(low, high + 1, entries.scales.shape, generator=generator, device="cuda")
    entries.scales.copy_(scales.to(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("scales", [(0, 20), (110, 122), (140, 160)], ids=str)
@pytest.mark.parametrize("wave", [1, 132])
def test_any_code_and_scale(heads, scales, wave, monkeypatch):
    """Every E4M3 code, subnormal ones too, under scales from the smallest to large ones."""
    split_as_often_as(wave, monkeypatch)
    handle = real("flash", CSA, "decode", num_query_heads=heads)
    fill_entries(handle, *scales)
    inputs = make_inputs(handle)
    if scales[0] > 130:  # logits that an fp32 product holds
        inputs = inputs._replace(query=inputs.query * 2.0**-40)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("channel", [0, 65, 447])
def test_a_nan_code_is_nan_everywhere(heads, code, channel):
    handle = real("flash", HCA, "decode", num_query_heads=heads)
    inputs = make_inputs(handle)
    token = 3  # of 5,001 tokens
    before = run(triton(), handle, inputs)
    slot = int(handle.tokens.request_slots[token])
    block = int(handle.tokens.block_table[slot, 7])
    handle.memory.entries.data[block, 1, channel] = code
    got = run(triton(), handle, inputs)
    assert got.output[token].isnan().all()
    others = [i for i in range(len(inputs.query)) if i != token]
    assert torch.equal(got.output[others], before.output[others])


@pytest.mark.gpu
@pytest.mark.parametrize("wave", [1, 132])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("preset", ["flash", "pro"])
def test_a_nan_code_of_a_listed_row_is_nan_everywhere(preset, code, wave, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    handle = real(preset, CSA, "decode")
    inputs, token = make_inputs(handle), 3
    before = run(triton(), handle, inputs)
    entries, row = handle.memory.entries, int(inputs.rows[token, 77])
    entries.data[row // entries.rows_per_page, row % entries.rows_per_page, 65] = code
    got = run(triton(), handle, inputs)
    assert got.output[token].isnan().all()
    others = [i for i in range(len(inputs.query)) if i != token]
    assert torch.equal(got.output[others], before.output[others])
