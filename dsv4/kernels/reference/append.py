"""Append: a token's KV becomes a window row, its compressor projections become tail rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.contracts import TokenMap
from dsv4.kernels.layer_memory import WindowRows
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.arithmetic import rms_norm, rotate, round_to
from dsv4.kernels.reference.codec import EncodedRows, encode, read_rows, write_rows
from dsv4.rope import RopeRows


class TailRows(NamedTuple):
    """kv, and gate + bias, of each token as a tail stores them: `[num_tokens, width]`."""

    kv: Tensor
    gate: Tensor


def append_swa(
    kv: Tensor,
    norm_weight: Tensor,
    tokens: TokenMap,
    window: WindowRows,
    rope: RopeRows,
    *,
    eps: float,
) -> None:
    """Norm, rotate and store each token's KV in its request's ring.

    A request with a workspace start has its chunk's rows in the workspace as well. Before them
    come the older rows that its first queries see and that the ring is about to lose.

    Args:
        kv: `[num_tokens, head_dim]` fp32 or bf16, before the norm.
        norm_weight: `[head_dim]`.
    """
    slots, positions = addressing.token_slots(tokens), tokens.positions.long()
    normed = rms_norm(kv.float(), norm_weight, eps)
    values = rotate(normed, *rope.take(slice(len(kv))))
    encoded = encode(window.ring.format, values)
    _fill_workspace(encoded, tokens, window)
    rows = addressing.ring_rows(slots, positions, window.ring.rows_per_page)
    rows = torch.where(addressing.is_kept(tokens, window.ring.rows_per_page), rows, -1)
    write_rows(window.ring, rows, encoded)


def tail_rows(
    kv: Tensor, gate: Tensor, position_bias: Tensor | None, positions: Tensor, dtype: torch.dtype
) -> TailRows:
    """Projections as a tail stores them, with the bias of the position in its window, if any.

    The compressor pools these rows, from the tail or from the same chunk. So an entry does not
    depend on how its tokens were cut into chunks.
    """
    biased = gate.float()
    if position_bias is not None:
        biased = biased + position_bias.float()[positions % position_bias.shape[0]]
    biased = torch.where(biased.isnan(), torch.nan, biased)  # one NaN, whatever the device adds
    return TailRows(round_to(kv, dtype), round_to(biased, dtype))


def append_tail(rows: TailRows, tail: Tensor, tokens: TokenMap) -> None:
    """Store the last rows of each chunk in the tails, `[max_requests, tail_rows, 2, width]`."""
    slots, positions = addressing.token_slots(tokens), tokens.positions.long()
    is_stored = (slots >= 0) & addressing.is_kept(tokens, tail.shape[1])
    slot, row = slots[is_stored], positions[is_stored] % tail.shape[1]
    tail[slot, row, 0] = rows.kv[is_stored]
    tail[slot, row, 1] = rows.gate[is_stored]


def _fill_workspace(encoded: EncodedRows, tokens: TokenMap, window: WindowRows) -> None:
    starts = tokens.workspace_starts.long()
    if not (starts >= 0).any():
        return
    num_old = window.window - 1
    old_row = torch.arange(num_old, device=starts.device)
    before = tokens.positions_before.long()
    from_rows = addressing.ring_rows(
        tokens.request_slots.long()[:, None],
        before[:, None] - num_old + old_row,
        window.ring.rows_per_page,
    )
    to_rows = torch.where(starts[:, None] >= 0, starts[:, None] + old_row, -1)
    is_copied = (from_rows >= 0) & (to_rows >= 0)
    write_rows(window.workspace, to_rows[is_copied], read_rows(window.ring, from_rows[is_copied]))
    write_rows(window.workspace, workspace_rows(tokens, tokens.positions, window.window), encoded)


def workspace_rows(tokens: TokenMap, positions: Tensor, window: int) -> Tensor:
    """Rows of `positions` `[num_tokens, ...]` in the workspace of each token's request.

    -1 where the request has no workspace or the position does not exist.
    """
    ids = tokens.request_ids.long()
    shape = (-1,) + (1,) * (positions.dim() - 1)
    starts = tokens.workspace_starts.long()[ids].reshape(shape)
    before = tokens.positions_before.long()[ids].reshape(shape)
    rows = starts + (window - 1) + positions - before
    return torch.where((starts >= 0) & (positions >= 0), rows, -1)
