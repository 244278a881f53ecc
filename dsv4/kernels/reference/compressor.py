"""Compress: the windows that close in this forward become entries."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.contracts import TokenMap
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import TailRows
from dsv4.kernels.reference.arithmetic import pool_rows, rms_norm, rotate
from dsv4.layer_schedule import AttentionType
from dsv4.rope import RopeTable


class ClosedWindows(NamedTuple):
    """Closing tokens of windows, token_idx `[n]`, and their values, entries `[n, dim]` fp32."""

    token_idx: Tensor
    entries: Tensor


def csa_compress_tail(
    rows: TailRows,
    tail: Tensor,
    norm_weight: Tensor,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    eps: float,
) -> ClosedWindows:
    """Pool the 2m rows of each closing CSA window: series b of the previous window, a of its own.

    Args:
        rows: This chunk's tokens as a tail stores them, `[num_tokens, 2 × dim]`.
        tail: `[max_requests, tail_rows, 2, 2 × dim]`, rows of the tokens before this chunk.
        norm_weight: `[dim]`.
    """
    ratio, dim = AttentionType.CSA.ratio, tail.shape[-1] // 2
    closing = _closing_tokens(tokens, ratio)
    if not closing.numel():
        return ClosedWindows(closing, norm_weight.new_empty(0, dim))
    previous = _window_rows(rows, tail, tokens, closing, 2 * ratio, ratio, slice(0, dim))
    current = _window_rows(rows, tail, tokens, closing, ratio, ratio, slice(dim, 2 * dim))
    stacked = [torch.cat(pair, dim=1) for pair in zip(previous, current, strict=True)]
    return _finish(stacked, closing, norm_weight, tokens, rope, ratio=ratio, eps=eps)


def hca_compress_tail(
    rows: TailRows,
    tail: Tensor,
    norm_weight: Tensor,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    eps: float,
) -> ClosedWindows:
    """Pool the m' rows of each closing HCA window; arguments as for CSA, with one series."""
    ratio = AttentionType.HCA.ratio
    closing = _closing_tokens(tokens, ratio)
    if not closing.numel():
        return ClosedWindows(closing, norm_weight.new_empty(0, tail.shape[-1]))
    pooled = _window_rows(rows, tail, tokens, closing, ratio, ratio, slice(None))
    return _finish(list(pooled), closing, norm_weight, tokens, rope, ratio=ratio, eps=eps)


def finish_entries(
    pooled: Tensor, norm_weight: Tensor, rope_positions: Tensor, rope: RopeTable, *, eps: float
) -> Tensor:
    """Norm pooled rows `[n, dim]` and rotate them at their window's first position."""
    normed = rms_norm(pooled, norm_weight, eps)
    return rotate(normed, rope.cos[rope_positions], rope.sin[rope_positions])


def _closing_tokens(tokens: TokenMap, ratio: int) -> Tensor:
    is_closing = addressing.closes_window(tokens.positions, ratio)
    return torch.nonzero(is_closing & (addressing.token_slots(tokens) >= 0)).flatten()


def _window_rows(
    rows: TailRows,
    tail: Tensor,
    tokens: TokenMap,
    closing: Tensor,
    distance: int,
    count: int,
    columns: slice,
) -> tuple[Tensor, Tensor, Tensor]:
    """kv, gate `[n, count, dim]` fp32 and presence `[n, count]` of rows before a closing token.

    The rows start `distance - 1` tokens before it. This chunk's rows are read from `rows`, older
    ones from the tail.
    """
    steps_back = torch.arange(distance - 1, distance - 1 - count, -1, device=closing.device)
    positions = tokens.positions.long()[closing][:, None] - steps_back
    before = tokens.positions_before.long()[tokens.request_ids.long()[closing]][:, None]
    in_chunk = positions >= before
    chunk_row = torch.where(in_chunk, closing[:, None] - steps_back, 0)
    slots = addressing.token_slots(tokens)[closing][:, None]
    tail_row = positions % tail.shape[1]
    kv, gate = (
        torch.where(
            in_chunk[:, :, None],
            values[:, columns][chunk_row],
            tail[:, :, index, columns][slots, tail_row],
        ).float()
        for index, values in enumerate(rows)
    )
    return kv, gate, positions >= 0


def _finish(
    stacked: list[Tensor],
    closing: Tensor,
    norm_weight: Tensor,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    ratio: int,
    eps: float,
) -> ClosedWindows:
    kv, gate, is_present = stacked
    positions = addressing.entry_rope_position(tokens.positions.long()[closing], ratio)
    pooled = pool_rows(kv, gate, is_present)
    return ClosedWindows(closing, finish_entries(pooled, norm_weight, positions, rope, eps=eps))
