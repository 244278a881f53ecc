"""Flush: the entries of closed windows are quantised and scattered to their pages."""

import torch
from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels.contracts import EntryInputs, KeyWeights, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import TailRows, append_swa, append_tail, tail_rows
from dsv4.kernels.reference.arithmetic import hadamard, project, rms_norm
from dsv4.kernels.reference.codec import encode, write_rows
from dsv4.kernels.reference.compressor import (
    ClosedWindows,
    csa_compress_tail,
    hca_compress_tail,
    latent_windows,
    rotate_entries,
)
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
    main, keys = writes.entries, writes.index_keys
    if main is not None and isinstance(keys, KeyWeights):
        _write_shared(main, keys, memory, tokens)
    elif main is not None and isinstance(keys, EntryInputs):
        _write_csa(main, keys, memory, tokens)
    elif main is not None:
        _write_hca(main, memory, tokens)


def _write_shared(
    main: EntryInputs, weights: KeyWeights, memory: LayerMemory, tokens: TokenMap
) -> None:
    """Store V4.1's entries, and index keys made of the same latents before RoPE."""
    layout, rope, tail = memory.layout, memory.entry_rope, memory.tail
    rows = None if tail is None else _tail_rows(main, tail, tokens)
    ratio, eps, norm_weight = layout.ratio, layout.rms_norm_eps, main.weights.norm_weight
    latent = latent_windows(rows, main.kv, tail, norm_weight, tokens, ratio=ratio, eps=eps)
    keys = rms_norm(project(latent.entries, weights.projection), weights.norm_weight, eps)
    flush_write_csa(
        rotate_entries(latent, rope),
        rotate_entries(latent._replace(entries=keys), rope),
        existing(memory.entries), existing(memory.index_keys), tokens, ratio=ratio,
        has_hadamard=layout.has_hadamard, global_scale=memory.global_scale,
    )  # fmt: skip
    if rows is not None and tail is not None:
        append_tail(rows, tail, tokens)


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
    return tail_rows(inputs.kv, existing(inputs.gate), bias, positions, tail.dtype)


def flush_write_csa(
    closed: ClosedWindows,
    closed_keys: ClosedWindows,
    entries: PagedRows,
    index_keys: PagedRows,
    tokens: TokenMap,
    *,
    has_hadamard: bool,
    global_scale: Tensor | None,
    ratio: int = AttentionType.CSA.ratio,
) -> None:
    """Store CSA entries and their index keys at entry `position // m`."""
    if not closed.token_idx.numel():
        return
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
