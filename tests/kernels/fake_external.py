"""Stand-ins for FlashMLA, DeepGEMM and SGLang: the same signatures, computed in PyTorch.

They check what the real kernels check, so that a call which those refuse fails here too.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import PagedRows, index_row, kv_row
from dsv4.kernels.external.find import Decoded, DecodeInputs, PagedLogits
from dsv4.kernels.reference.arithmetic import hadamard, rms_norm
from dsv4.kernels.reference.attention import attend_dense
from dsv4.kernels.reference.codec import encode, write_rows
from dsv4.kernels.reference.gather import gather_rows
from dsv4.tools.bench.external.flashmla import PrefillInputs
from dsv4.tools.bench.external.sglang import RING_ROWS, SGLangKernels

KV_ROW = kv_row("fp8", head_dim=512, rope_dim=64)
INDEX_ROW = index_row("fp8", head_dim=128)


def as_rows(fmt, pages: Tensor) -> PagedRows:
    """Read pages by the shape and strides that an external kernel gets."""
    num_pages, rows_per_page, one, row_bytes = pages.shape
    assert pages.dtype is torch.uint8 and one == 1 and row_bytes == fmt.row_bytes
    assert pages.stride(1) == row_bytes and pages.stride(3) == 1
    assert pages.stride(0) % 16 == 0 and pages.data_ptr() % 16 == 0
    size = min(pages.stride(0), rows_per_page * row_bytes)
    runs = pages.as_strided((num_pages, size), (pages.stride(0), 1))
    return PagedRows(fmt, runs.contiguous(), 0, rows_per_page)


class FakeFlashMLA:
    """A `SparseDecode` that records its calls."""

    def __init__(self) -> None:
        self.calls: list[DecodeInputs] = []

    def __call__(self, inputs: DecodeInputs, schedule: Any) -> Decoded:
        self.calls.append(inputs)
        num_tokens, one, heads, dim = inputs.query.shape
        assert (one, dim) == (1, 512) and heads in (64, 128)
        assert inputs.query.dtype is torch.bfloat16 and inputs.query.stride(-1) == 1
        if inputs.sinks is not None:
            assert inputs.sinks.shape == (heads,) and inputs.sinks.dtype is torch.float32
        sources = [(inputs.window, inputs.window_rows, None)]
        if inputs.entries is not None:
            sources.append((inputs.entries, inputs.entry_rows, inputs.entry_counts))
        else:
            assert inputs.entry_rows is None and inputs.entry_counts is None
        values, present = zip(*(self._read(num_tokens, *source) for source in sources), strict=True)
        output, lse = attend_dense(
            inputs.query[:, 0].float(), torch.cat(values, 1).float(), torch.cat(present, 1),
            inputs.sinks,
        )  # fmt: skip
        is_empty = ~torch.cat(present, 1).any(1)
        output[is_empty], lse[is_empty] = torch.nan, torch.inf  # nobody may rely on these
        return Decoded(output.bfloat16()[:, None], lse[:, None].transpose(1, 2), "schedule")

    def _read(self, num_tokens: int, pages: Tensor, rows: Tensor, counts: Tensor | None):
        assert rows.shape[:2] == (num_tokens, 1) and rows.dtype is torch.int32
        assert rows.shape[2] % 64 == 0 and rows.stride(-1) == 1
        rows = rows[:, 0].long()
        assert (rows >= -1).all() and (rows < pages.shape[0] * pages.shape[1]).all()
        if counts is not None:
            assert counts.shape == (num_tokens,) and counts.dtype is torch.int32
            rows = torch.where(torch.arange(rows.shape[1]) < counts[:, None], rows, -1)
        return gather_rows(as_rows(KV_ROW, pages), rows), rows >= 0


class FakePrefill:
    """A `SparsePrefill` that records its calls."""

    def __init__(self) -> None:
        self.calls: list[PrefillInputs] = []

    def __call__(self, inputs: PrefillInputs) -> Decoded:
        self.calls.append(inputs)
        num_tokens, heads, dim = inputs.query.shape
        num_rows, one, width = inputs.values.shape
        assert heads in (64, 128) and dim == width == 512 and one == 1
        assert inputs.query.dtype is inputs.values.dtype is torch.bfloat16
        assert inputs.sinks is not None
        assert inputs.sinks.shape == (heads,) and inputs.sinks.dtype is torch.float32
        assert inputs.rows.shape[:2] == (num_tokens, 1) and inputs.rows.dtype is torch.int32
        assert inputs.rows.shape[2] % 128 == 0 and inputs.rows.is_contiguous()
        rows = inputs.rows[:, 0].long()
        assert (rows >= -1).all() and (rows < num_rows).all()
        if inputs.counts is not None:
            assert inputs.counts.shape == (num_tokens,) and inputs.counts.dtype is torch.int32
            assert (inputs.counts <= rows.shape[1]).all()
            rows = torch.where(torch.arange(rows.shape[1]) < inputs.counts[:, None], rows, -1)
        values = inputs.values[rows.clamp(min=0), 0].float()
        output, lse = attend_dense(inputs.query.float(), values, rows >= 0, inputs.sinks)
        return Decoded(output.bfloat16()[:, None], lse[:, :, None], None)


def fake_mqa_logits(query, keys, scales, weights, first, end) -> Tensor:
    """An `MqaLogits`; undefined scores are NaN."""
    num_tokens, heads, dim = query.shape
    assert query.dtype is keys.dtype is torch.float8_e4m3fn and dim == keys.shape[1] == 128
    assert heads in (32, 64) and query.is_contiguous() and keys.is_contiguous()
    assert weights.shape == (num_tokens, heads) and weights.dtype is scales.dtype is torch.float32
    assert scales.shape == keys.shape[:1] and first.dtype is end.dtype is torch.int32
    products = torch.einsum("thd,ed->the", query.float(), keys.float()).relu()
    scores = (products * weights[:, :, None]).sum(dim=1) * scales
    entry = torch.arange(len(keys))
    is_seen = (entry >= first[:, None]) & (entry < end[:, None])
    return torch.where(is_seen, scores, torch.nan)


class FakeDeepGEMM:
    """A `PagedLogits` that records its batch sizes; undefined scores are NaN."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def logits(self) -> PagedLogits:
        return PagedLogits(self.make_schedule, self.score, None)

    def make_schedule(self, lengths: Tensor) -> Tensor:
        assert lengths.dim() == 2 and lengths.is_contiguous() and lengths.dtype is torch.int32
        assert (lengths > 0).all()
        return lengths.sum()

    def score(self, query, pages, weights, lengths, block_table, schedule, max_entries) -> Tensor:
        num_tokens, one, heads, dim = query.shape
        self.sizes.append(num_tokens)
        assert one == 1 and heads in (32, 64) and dim == 128 and query.is_contiguous()
        assert query.dtype is torch.float8_e4m3fn and query.data_ptr() % 16 == 0
        assert weights.shape == (num_tokens, heads) and weights.dtype is torch.float32
        assert lengths.shape == (num_tokens, 1) and schedule == lengths.sum()
        assert block_table.shape[0] == num_tokens and block_table.dtype is torch.int32
        assert pages.shape[1] == 64 and weights.stride(1) == 1 and block_table.stride(1) == 1
        keys = as_rows(INDEX_ROW, pages)
        scores = torch.full((num_tokens, math.ceil(max_entries / 256) * 256), torch.nan)
        for token, length in enumerate(lengths[:, 0].tolist()):
            entry = torch.arange(length)
            blocks = block_table[token, entry // 64].long()
            assert ((blocks >= 0) & (blocks < pages.shape[0])).all()
            values = gather_rows(keys, (blocks * 64 + entry % 64)[None])[0]
            products = (query[token, 0].float() @ values.T).relu()
            scores[token, :length] = weights[token] @ products
        return scores[:, :max_entries]


class FakeSGLang:
    """An `SGLangKernels` that records its calls; undefined values are NaN."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def kernels(self) -> SGLangKernels:
        return SGLangKernels(
            self.plan_topk, self.choose_entries, self.make_query, self.store_window,
            self.plan_compress, self.pool, self.store_entries,
        )  # fmt: skip

    def plan_topk(self, lengths: Tensor) -> Tensor:
        assert lengths.dim() == 1 and lengths.dtype is torch.int32
        return lengths.clone()

    def choose_entries(self, scores, lengths, table, rows, page_rows, plan) -> None:
        self.calls.append("choose_entries")
        assert scores.dtype is torch.float32 and scores.stride(1) == 1
        assert scores.stride(0) % 4 == 0 and page_rows & (page_rows - 1) == 0
        assert table.dtype is rows.dtype is torch.int32 and table.stride(1) == 1
        assert len(scores) == len(table) == len(rows) and rows.is_contiguous()
        assert torch.equal(plan, lengths)
        for token, length in enumerate(lengths.tolist()):
            best = scores[token, :length].topk(rows.shape[1]).indices
            rows[token] = table[token, best // page_rows] * page_rows + best % page_rows

    def make_query(self, query, weights, factor, frequencies, positions):
        self.calls.append("make_query")
        batch, heads, dim = query.shape
        assert dim == 128 and query.is_contiguous() and query.dtype is torch.bfloat16
        assert weights.shape == (batch, heads) and weights.dtype is query.dtype
        values = hadamard(turn(query.float(), frequencies, positions[:, None]))
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        codes = (values / scale).to(torch.float8_e4m3fn)
        return codes, weights.float()[:, :, None] * factor * scale

    def store_window(self, kv, weight, eps, frequencies, positions, rows, pages, page_rows) -> None:
        self.calls.append("store_window")
        assert kv.shape[1] == 512 and kv.dtype is weight.dtype is torch.bfloat16
        assert rows.shape == positions.shape == kv.shape[:1] and rows.dtype is torch.int32
        values = rms_norm(kv.float(), weight.float(), eps)
        self._store(KV_ROW, turn(values, frequencies, positions), rows.long(), pages, page_rows)

    def plan_compress(self, ratio, slots, lengths):
        assert slots.dtype is lengths.dtype is torch.int64 and slots.shape == lengths.shape
        return SimpleNamespace(ratio=ratio, slots=slots, lengths=lengths)

    def pool(self, state, projections, bias, plan) -> Tensor:
        self.calls.append("pool")
        ratio, dim = plan.ratio, bias.shape[1]
        num_series = 2 if ratio == 4 else 1
        assert state.shape[1:] == (ratio, 2 * num_series * dim) and state.is_contiguous()
        assert projections.shape == (len(plan.slots), state.shape[2])
        assert bias.shape[0] == num_series * ratio
        assert state.dtype is projections.dtype is bias.dtype is torch.float32
        num_rows = RING_ROWS[ratio]
        rings = state.view(-1, num_rows, 2, num_series, dim)
        rings[plan.slots, (plan.lengths - 1) % num_rows] = projections.unflatten(
            1, (2, num_series, dim)
        )
        pooled = torch.full((len(plan.slots), dim), torch.nan)
        for token, length in enumerate(plan.lengths.tolist()):
            if length % ratio == 0:
                position = torch.arange(length - num_series * ratio, length)
                series = torch.arange(num_series * ratio) // ratio
                kv, gate = rings[plan.slots[token], position % num_rows, :, series].unbind(1)
                shares = torch.where(position[:, None] >= 0, gate + bias, -torch.inf).softmax(0)
                pooled[token] = (shares * kv).sum(0)
        return pooled

    def store_entries(
        self, pooled, plan, weight, eps, frequencies, rows, pages, page_rows, is_fp4
    ) -> None:
        self.calls.append("store_entries")
        dim = pooled.shape[1]
        assert dim == 512 or is_fp4
        assert rows.dtype is torch.int64 and pooled.dtype is weight.dtype is torch.float32
        is_closing = plan.lengths % plan.ratio == 0
        values = rms_norm(pooled[is_closing], weight, eps)
        values = turn(values, frequencies, plan.lengths[is_closing] - plan.ratio)
        fmt = index_row("mxfp4", head_dim=128) if is_fp4 else KV_ROW
        values = hadamard(values) if is_fp4 else values
        self._store(fmt, values, rows[is_closing], pages, page_rows)

    def _store(self, fmt, values, rows, pages, page_rows) -> None:
        align = 576 if fmt is KV_ROW else 1
        assert pages.dtype is torch.uint8 and pages.is_contiguous()
        assert pages.shape[1] == fmt.page_bytes(page_rows, align=align)
        assert (rows >= 0).all() and (rows < len(pages) * page_rows).all()
        paged = fmt.pages(pages, offset=0, rows_per_page=page_rows)
        write_rows(paged, rows, encode(fmt, values))


def turn(values: Tensor, frequencies: Tensor, positions: Tensor) -> Tensor:
    """Rotate the last 64 channels, pair by pair."""
    assert frequencies.dtype is torch.complex64 and frequencies.shape[1] == 32
    pairs = torch.view_as_complex(values[..., -64:].unflatten(-1, (32, 2)).contiguous())
    turned = torch.view_as_real(pairs * frequencies[positions.long()]).flatten(-2)
    return torch.cat((values[..., :-64], turned), dim=-1)
