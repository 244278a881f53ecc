"""Addresses that follow from a position: rows, windows, entries, visibility.

Nothing keeps a counter: a rollback is a shorter length, a reset is position 0.
"""

import torch
from torch import Tensor

from dsv4.kernels.contracts import TokenMap


def token_slots(tokens: TokenMap) -> Tensor:
    """Request slot of each token, `[num_tokens]` int64; -1 for padding."""
    return tokens.request_slots.long()[tokens.request_ids.long()]


def ring_rows(slots: Tensor, positions: Tensor, rows_per_slot: int) -> Tensor:
    """Flat row of a token in the rings; -1 where the slot or the position does not exist."""
    rows = slots * rows_per_slot + positions % rows_per_slot
    return torch.where((slots >= 0) & (positions >= 0), rows, -1)


def is_kept(tokens: TokenMap, num_rows: int) -> Tensor:
    """Whether a ring of `num_rows` rows keeps a token to the chunk's end: `[num_tokens]` bool."""
    after = tokens.positions_after.long()[tokens.request_ids.long()]
    return tokens.positions >= after - num_rows


def window_positions(positions: Tensor, window: int) -> Tensor:
    """Positions in each query's window, itself last: `[num_tokens, window]`; < 0 is none."""
    return positions[:, None] - torch.arange(window - 1, -1, -1, device=positions.device)


def entry_rope_position(positions: Tensor, ratio: int) -> Tensor:
    """Position at which the entry of each token's window is rotated: the window's first token."""
    return positions // ratio * ratio


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """Number of entries that a query sees: all closed ones, also one that the query closes."""
    return (positions + 1) // ratio


def entry_rows(
    block_table: Tensor, slots: Tensor, entry_idx: Tensor, entries_per_block: int
) -> Tensor:
    """Flat rows of entries in a layer's pages; -1 for a padding slot or a negative entry.

    Args:
        slots: Request slots, broadcast against `entry_idx`.
        entry_idx: Entry indices within the request, -1 for none.
    """
    slots, entry_idx = torch.broadcast_tensors(slots, entry_idx)
    is_real = (slots >= 0) & (entry_idx >= 0)
    real_idx = torch.where(is_real, entry_idx, 0)
    blocks = block_table[torch.where(is_real, slots, 0), real_idx // entries_per_block].long()
    rows = blocks * entries_per_block + real_idx % entries_per_block
    return torch.where(is_real & (blocks >= 0), rows, -1)
