"""Flush: the entries of closed windows are quantised and scattered to their pages."""

from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels.contracts import EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import TailRows, append_swa, append_tail, tail_rows
from dsv4.kernels.reference.arithmetic import hadamard
from dsv4.kernels.reference.codec import encode, write_rows
from dsv4.kernels.reference.compressor import ClosedWindows, csa_compress_tail, hca_compress_tail
from dsv4.layer_schedule import AttentionType


def write_layer(writes: LayerWrites, memory: LayerMemory, tokens: TokenMap) -> None:
    """Append, compress and flush the inputs of a layer that `writes` has.

    Windows that close in this forward are compressed, quantised and stored. Then the tails take
    the rows of the open windows.
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
    rope, eps = memory.rope, memory.layout.rms_norm_eps
    tail, index_tail = memory.tail, memory.index_tail
    assert tail is not None and index_tail is not None, memory.layout
    entries, index_keys = memory.entries, memory.index_keys
    assert entries is not None and index_keys is not None, memory.layout
    rows = _tail_rows(main, tail, tokens)
    index_rows = _tail_rows(index, index_tail, tokens)
    closed = csa_compress_tail(rows, tail, main.weights.norm_weight, tokens, rope, eps=eps)
    closed_keys = csa_compress_tail(
        index_rows, index_tail, index.weights.norm_weight, tokens, rope, eps=eps
    )
    flush_write_csa(
        closed, closed_keys, entries, index_keys, tokens,
        has_hadamard=memory.layout.has_hadamard, global_scale=memory.global_scale,
    )  # fmt: skip
    append_tail(rows, tail, tokens)
    append_tail(index_rows, index_tail, tokens)


def _write_hca(main: EntryInputs, memory: LayerMemory, tokens: TokenMap) -> None:
    tail, entries = memory.tail, memory.entries
    assert tail is not None and entries is not None, memory.layout
    rows = _tail_rows(main, tail, tokens)
    closed = hca_compress_tail(
        rows, tail, main.weights.norm_weight, tokens, memory.rope, eps=memory.layout.rms_norm_eps
    )
    flush_write_hca(closed, entries, tokens)
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
    keys = index_key_values(closed_keys.entries, has_hadamard=has_hadamard)
    write_rows(index_keys, rows, encode(index_keys.format, keys, global_scale=global_scale))


def flush_write_hca(closed: ClosedWindows, entries: PagedRows, tokens: TokenMap) -> None:
    """Store HCA entries at entry `position // m'`."""
    if not closed.token_idx.numel():
        return
    rows = _destination(closed, tokens, AttentionType.HCA.ratio, entries.rows_per_page)
    write_rows(entries, rows, encode(entries.format, closed.entries))


def index_key_values(entries: Tensor, *, has_hadamard: bool) -> Tensor:
    """Values of index keys before they are encoded, in fp32."""
    return hadamard(entries) if has_hadamard else entries


def _destination(
    closed: ClosedWindows, tokens: TokenMap, ratio: int, entries_per_block: int
) -> Tensor:
    slots = addressing.token_slots(tokens)[closed.token_idx]
    entry_idx = addressing.closed_entry(tokens.positions.long()[closed.token_idx], ratio)
    return addressing.entry_rows(tokens.block_table, slots, entry_idx, entries_per_block)
