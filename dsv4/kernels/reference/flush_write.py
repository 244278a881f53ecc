"""Flush: the entries of closed windows are quantised and scattered to their pages."""

import torch
from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels.contracts import EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import TailRows, append_swa, append_tail, tail_rows
from dsv4.kernels.reference.arithmetic import hadamard
from dsv4.kernels.reference.codec import encode, write_rows
from dsv4.kernels.reference.compressor import ClosedWindows, csa_compress_tail, hca_compress_tail
from dsv4.layer_schedule import AttentionType


def write_layer(writes: LayerWrites, memory: LayerMemory, tokens: TokenMap) -> None:
    """Append, compress and flush the inputs of a layer that `writes` has.

    Windows that close in this forward are compressed, quantised and stored. Then the tails take
    the rows of the open windows; HCA has kept the sums of closed groups.
    """
    if writes.window is not None:
        append_swa(
            *writes.window, tokens, memory.window, memory.rope, eps=memory.layout.rms_norm_eps
        )
    if writes.entries is not None and writes.index_keys is not None:
        _write_csa(writes.entries, writes.index_keys, memory, tokens)
    elif writes.entries is not None:
        _write_hca(writes.entries, memory, tokens)


def _write_csa(
    main: EntryInputs, index: EntryInputs, memory: LayerMemory, tokens: TokenMap
) -> None:
    rope, eps = memory.entry_rope, memory.layout.rms_norm_eps
    inputs, tails = (main, index), (existing(memory.tail), existing(memory.index_tail))
    rows = [_tail_rows(*part, tokens) for part in zip(inputs, tails, strict=True)]
    closed, closed_keys = (
        csa_compress_tail(new, tail, part.weights.norm_weight, tokens, rope, eps=eps)
        for part, tail, new in zip(inputs, tails, rows, strict=True)
    )
    flush_write_csa(
        closed, closed_keys, existing(memory.entries), existing(memory.index_keys), tokens,
        has_hadamard=memory.layout.has_hadamard, global_scale=memory.global_scale,
    )  # fmt: skip
    for new, tail in zip(rows, tails, strict=True):
        append_tail(new, tail, tokens)


def _write_hca(main: EntryInputs, memory: LayerMemory, tokens: TokenMap) -> None:
    tail, weight = existing(memory.tail), main.weights.norm_weight
    sums = existing(memory.layout.cut_sums(memory.slots))
    rows = _tail_rows(main, tail, tokens)
    closed = hca_compress_tail(
        rows, tail, sums, weight, tokens, memory.entry_rope, eps=memory.layout.rms_norm_eps
    )
    flush_write_hca(closed, existing(memory.entries), tokens)
    append_tail(rows, tail, tokens)


def _tail_rows(inputs: EntryInputs, tail: Tensor, tokens: TokenMap) -> TailRows:
    bias, positions = inputs.weights.position_bias, tokens.positions.long()
    return tail_rows(inputs.kv, inputs.gate, bias, positions, tail.dtype)


def flush_write_csa(
    closed: ClosedWindows,
    closed_keys: ClosedWindows,
    entries: PagedRows,
    index_keys: PagedRows,
    tokens: TokenMap,
    *,
    has_hadamard: bool,
    global_scale: Tensor | None,
) -> None:
    """Store CSA entries and their index keys at entry `position // m`."""
    if not closed.token_idx.numel():
        return
    ratio = AttentionType.CSA.ratio
    rows = _destination(closed, tokens, ratio, entries.rows_per_page)
    write_rows(entries, rows, encode(entries.format, closed.entries))
    keys = hadamard(closed_keys.entries) if has_hadamard else closed_keys.entries
    write_rows(index_keys, rows, encode(index_keys.format, keys, global_scale=global_scale))


def flush_write_hca(closed: ClosedWindows, entries: PagedRows, tokens: TokenMap) -> None:
    """Store HCA entries at entry `position // m'`."""
    if not closed.token_idx.numel():
        return
    rows = _destination(closed, tokens, AttentionType.HCA.ratio, entries.rows_per_page)
    write_rows(entries, rows, encode(entries.format, closed.entries))


def _destination(
    closed: ClosedWindows, tokens: TokenMap, ratio: int, entries_per_block: int
) -> Tensor:
    slots = addressing.token_slots(tokens)[closed.token_idx]
    entry_idx = tokens.positions.long()[closed.token_idx] // ratio
    is_read_only = entry_idx // entries_per_block < tokens.num_read_only[slots]
    entry_idx = torch.where(is_read_only, -1, entry_idx)
    return addressing.entry_rows(tokens.block_table, slots, entry_idx, entries_per_block)
