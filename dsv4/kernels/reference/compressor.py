"""Compress: the windows that close in this forward become entries."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.formats import sum_ring
from dsv4.kernels.contracts import TokenMap
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import TailRows
from dsv4.kernels.reference.arithmetic import (
    combine_groups,
    pool_rows,
    rms_norm,
    rotate,
    sum_groups,
)
from dsv4.layer_schedule import GROUP_ROWS, HCA_GROUPS, AttentionType
from dsv4.rope import RopeRows


class ClosedWindows(NamedTuple):
    """Closing tokens of windows, token_idx `[n]`, and their values, entries `[n, dim]` fp32."""

    token_idx: Tensor
    entries: Tensor


def csa_compress_tail(
    rows: TailRows, tail: Tensor, norm_weight: Tensor, tokens: TokenMap, rope: RopeRows,
    *, eps: float,
) -> ClosedWindows:  # fmt: skip
    """Pool the 2m rows of each closing CSA window: series b of the previous window, a of its own.

    Args:
        rows: This chunk's tokens as a tail stores them, `[num_tokens, 2 × dim]`.
        tail: `[max_requests, tail_rows, 2, 2 × dim]`, rows of the tokens before this chunk.
        norm_weight: `[dim]`.
    """
    dim, ratio = norm_weight.shape[0], AttentionType.CSA.ratio
    closing = _closing_tokens(tokens, ratio)
    # A token's last series is for its own window, the one before it for the next window.
    windows = [
        _window_rows(rows, tail, tokens, closing, ratio, back, columns)
        for back, columns in ((1, slice(0, dim)), (0, slice(dim, 2 * dim)))
    ]
    pooled = pool_rows(*(torch.cat(parts, dim=1) for parts in zip(*windows, strict=True)))
    return _close_windows(pooled, closing, norm_weight, rope, eps)


def latent_windows(
    rows: TailRows | None, kv: Tensor, tail: Tensor | None, norm_weight: Tensor, tokens: TokenMap,
    *, ratio: int, eps: float,
) -> ClosedWindows:  # fmt: skip
    """Pool and norm V4.1's windows that close, without RoPE.

    Args:
        rows, tail: As for CSA with one series; None where an entry has one token.
        kv: `[num_tokens, dim]`, the projections.
    """
    closing = _closing_tokens(tokens, ratio)
    if rows is None or tail is None:
        pooled = kv[closing].float()
    else:
        pooled = pool_rows(*_window_rows(rows, tail, tokens, closing, ratio, 0, slice(None)))
    return ClosedWindows(closing, rms_norm(pooled, norm_weight, eps))


def rotate_entries(closed: ClosedWindows, rope: RopeRows) -> ClosedWindows:
    """Rotate entries at their windows' first tokens, by the rows of the closing ones."""
    rotated = rotate(closed.entries, *rope.take(closed.token_idx))
    return ClosedWindows(closed.token_idx, rotated)


def hca_compress_tail(
    rows: TailRows, tail: Tensor, sums: Tensor, norm_weight: Tensor, tokens: TokenMap,
    rope: RopeRows, *, eps: float,
) -> ClosedWindows:  # fmt: skip
    """Pool the groups of each closing HCA window; arguments as for CSA, with one series.

    Groups that closed before are read from sums, `[max_requests, sum_rows, 3, dim]`. It then takes
    the last groups of each chunk, but not the last one of a window, as the window closes with it.
    """
    ratio, ring = AttentionType.HCA.ratio, sum_ring(sums.shape[1])
    ending, closing = (_closing_tokens(tokens, span) for span in (GROUP_ROWS, ratio))
    new = sum_groups(*_window_rows(rows, tail, tokens, ending, GROUP_ROWS, 0, slice(None)))[:, 0]
    slots, ids = addressing.token_slots(tokens), tokens.request_ids.long()
    steps_back = torch.arange(ratio - GROUP_ROWS, -1, -GROUP_ROWS, device=closing.device)
    ends = tokens.positions.long()[closing][:, None] - steps_back  # [n, groups]
    is_new = ends >= tokens.positions_before.long()[ids[closing]][:, None]
    number = torch.searchsorted(ending, closing[:, None] - steps_back * is_new)
    row = torch.where(is_new, 0, ends // GROUP_ROWS % ring)
    windows = torch.where(is_new[:, :, None, None], new[number], sums[slots[closing][:, None], row])
    group = tokens.positions.long()[ending] // GROUP_ROWS
    is_last = group >= tokens.positions_after.long()[ids[ending]] // GROUP_ROWS - ring
    is_kept = is_last & ((group + 1) % HCA_GROUPS != 0)
    sums[slots[ending][is_kept], group[is_kept] % ring] = new[is_kept]
    pooled = combine_groups(windows)
    return _close_windows(pooled, closing, norm_weight, rope, eps)


def _closing_tokens(tokens: TokenMap, ratio: int) -> Tensor:
    """Indices of the tokens that close a window or group of `ratio` tokens."""
    is_closing = (tokens.positions + 1) % ratio == 0
    return torch.nonzero(is_closing & (addressing.token_slots(tokens) >= 0)).flatten()


def _close_windows(
    pooled: Tensor, closing: Tensor, norm_weight: Tensor, rope: RopeRows, eps: float
) -> ClosedWindows:
    return rotate_entries(ClosedWindows(closing, rms_norm(pooled, norm_weight, eps)), rope)


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
