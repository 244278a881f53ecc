"""Gather: stored rows, dequantised and dense."""

import torch
from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels.contracts import Gathered, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, WindowRows, existing
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import workspace_rows
from dsv4.kernels.reference.codec import decode, read_rows


def gather_rows(pages: PagedRows, rows: Tensor, *, global_scale: Tensor | None = None) -> Tensor:
    """Values `[..., dim]` fp32 of flat rows `[...]`; zeros for negative ones.

    Each distinct row is read and decoded once.
    """
    distinct, inverse = torch.unique(rows.clamp(min=-1), return_inverse=True)
    has_missing = int(distinct.numel() > 0 and bool(distinct[0] < 0))
    encoded = read_rows(pages, distinct[has_missing:])
    values = decode(pages.format, encoded, global_scale=global_scale)
    if has_missing:
        values = torch.cat((values.new_zeros(1, values.shape[1]), values))
    return values[inverse]


def rows_in(pages: PagedRows, rows: Tensor) -> Tensor:
    """Replace rows that the pages don't have by -1."""
    return torch.where((rows >= 0) & (rows < pages.num_rows), rows, -1)


def gather_compressed_kv(memory: LayerMemory, rows: Tensor) -> Gathered:
    """Gather the entries at flat rows `[num_tokens, k]`, such as a selection's.

    Rows outside of the pool are missing, as negative ones are.
    """
    entries = existing(memory.entries)
    rows = rows_in(entries, rows.long().contiguous())
    return Gathered(gather_rows(entries, rows).to(entries.format.value_dtype), rows >= 0)


def gather_all_compressed_kv(
    memory: LayerMemory, tokens: TokenMap, *, max_entries: int
) -> Gathered:
    """Gather all closed entries of each request, `[batch, max_entries, dim]`."""
    slots, after = tokens.request_slots.long(), tokens.positions_after.long()
    counts = addressing.visible_entries(after - 1, memory.layout.ratio)
    rows = _first_rows(existing(memory.entries), tokens, slots, counts, max_entries)
    return gather_compressed_kv(memory, rows)


def gather_swa_kv(memory: LayerMemory, tokens: TokenMap) -> Gathered:
    """Gather the window of each token, `[num_tokens, window, dim]`, itself last."""
    window = memory.window
    values, is_present = window_values_of(window, tokens, slice(None))
    return Gathered(values.to(window.ring.format.value_dtype), is_present)


def visible_entry_rows(
    entries: PagedRows, tokens: TokenMap, part: slice, *, ratio: int, max_entries: int
) -> Tensor:
    """Flat rows `[part, max_entries]` of all entries that each query of `part` sees; then -1."""
    slots = addressing.token_slots(tokens)[part]
    counts = addressing.visible_entries(tokens.positions.long()[part], ratio)
    return _first_rows(entries, tokens, slots, counts, max_entries)


def window_values_of(window: WindowRows, tokens: TokenMap, part: slice) -> tuple[Tensor, Tensor]:
    """Window values, fp32, and presence for the tokens of `part`, from ring or workspace."""
    slots = addressing.token_slots(tokens)
    positions = addressing.window_positions(tokens.positions.long(), window.window)
    from_workspace = workspace_rows(tokens, positions, window.window)[part]
    from_ring = addressing.ring_rows(slots[:, None], positions, window.ring.rows_per_page)[part]
    is_copied = from_workspace >= 0
    values = gather_rows(window.ring, torch.where(is_copied, -1, from_ring))
    if not is_copied.any():
        return values, from_ring >= 0
    copied = gather_rows(window.workspace, from_workspace)
    return torch.where(is_copied[:, :, None], copied, values), from_ring >= 0


def _first_rows(
    entries: PagedRows, tokens: TokenMap, slots: Tensor, counts: Tensor, max_entries: int
) -> Tensor:
    entry_idx = torch.arange(max_entries, device=slots.device)
    entry_idx = torch.where(entry_idx < counts[:, None], entry_idx, -1)
    return addressing.entry_rows(
        tokens.block_table, slots[:, None], entry_idx, entries.rows_per_page
    )
