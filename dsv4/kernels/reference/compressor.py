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
    rows: TailRows, tail: Tensor, norm_weight: Tensor, tokens: TokenMap, rope: RopeTable,
    *, eps: float,
) -> ClosedWindows:  # fmt: skip
    """Pool the 2m rows of each closing CSA window: series b of the previous window, a of its own.

    Args:
        rows: This chunk's tokens as a tail stores them, `[num_tokens, 2 × dim]`.
        tail: `[max_requests, tail_rows, 2, 2 × dim]`, rows of the tokens before this chunk.
        norm_weight: `[dim]`.
    """
    return _compress_tail(rows, tail, norm_weight, tokens, rope, AttentionType.CSA.ratio, eps)


def hca_compress_tail(
    rows: TailRows, tail: Tensor, norm_weight: Tensor, tokens: TokenMap, rope: RopeTable,
    *, eps: float,
) -> ClosedWindows:  # fmt: skip
    """Pool the m' rows of each closing HCA window; arguments as for CSA, with one series."""
    return _compress_tail(rows, tail, norm_weight, tokens, rope, AttentionType.HCA.ratio, eps)


def _compress_tail(
    rows: TailRows, tail: Tensor, norm_weight: Tensor, tokens: TokenMap, rope: RopeTable,
    ratio: int, eps: float,
) -> ClosedWindows:  # fmt: skip
    dim = norm_weight.shape[0]
    is_closing = (tokens.positions + 1) % ratio == 0
    closing = torch.nonzero(is_closing & (addressing.token_slots(tokens) >= 0)).flatten()
    if not closing.numel():
        return ClosedWindows(closing, norm_weight.new_empty(0, dim))
    # A token's last series is for its own window, the one before it for the next window.
    starts = range(0, tail.shape[-1], dim)
    windows = [
        _window_rows(rows, tail, tokens, closing, ratio, back, slice(start, start + dim))
        for back, start in zip(reversed(range(len(starts))), starts, strict=True)
    ]
    stacked = (torch.cat(parts, dim=1) for parts in zip(*windows, strict=True))
    positions = addressing.entry_rope_position(tokens.positions.long()[closing], ratio)
    normed = rms_norm(pool_rows(*stacked), norm_weight, eps)
    return ClosedWindows(closing, rotate(normed, rope.cos[positions], rope.sin[positions]))


def _window_rows(
    rows: TailRows, tail: Tensor, tokens: TokenMap, closing: Tensor,
    ratio: int, back: int, columns: slice,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """kv, gate `[n, ratio, dim]` fp32 and presence `[n, ratio]` of a window's rows.

    The window is the one that `closing` tokens close, or lies `back` windows before. This chunk's
    rows are read from `rows`, older ones from the tail.
    """
    steps_back = torch.arange(ratio - 1, -1, -1, device=closing.device) + back * ratio
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
