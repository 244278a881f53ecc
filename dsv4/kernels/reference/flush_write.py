"""Flush: the entries of closed windows are quantised and scattered to their pages."""

from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels import (
    CompressorWeights,
    LayerMemory,
    LayerProjections,
    LayerWeights,
    TokenMap,
)
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.append import append_swa, append_tail, tail_rows
from dsv4.kernels.reference.arithmetic import hadamard
from dsv4.kernels.reference.codec import encode, write_rows
from dsv4.kernels.reference.compressor import (
    ClosedWindows,
    csa_compress_tail,
    hca_compress_tail,
)
from dsv4.model.layer_schedule import AttentionType
from dsv4.model.rope import RopeTable


def write_layer(
    inputs: LayerProjections,
    weights: LayerWeights,
    memory: LayerMemory,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    ratio: int,
    eps: float,
    has_hadamard: bool,
) -> None:
    """All writes of a layer: append, compress, flush."""
    append_swa(inputs.kv, weights.kv_norm, tokens, memory.window, rope, eps=eps)
    if inputs.compressor is None or weights.compressor is None:
        return
    assert memory.tail is not None and memory.entries is not None, f"ratio {ratio}"
    main = (*inputs.compressor, weights.compressor, memory.tail, memory.entries)
    if inputs.indexer is None or weights.indexer is None:
        flush_hca(*main, tokens, rope, eps=eps)
        return
    assert memory.index_tail is not None and memory.index_keys is not None, f"ratio {ratio}"
    flush_csa(
        *main, inputs.indexer.kv, inputs.indexer.gate, weights.indexer, memory.index_tail,
        memory.index_keys, tokens, rope,
        eps=eps, has_hadamard=has_hadamard, global_scale=memory.global_scale,
    )  # fmt: skip


def flush_csa(
    kv: Tensor,
    gate: Tensor,
    weights: CompressorWeights,
    tail: Tensor,
    entries: PagedRows,
    index_kv: Tensor,
    index_gate: Tensor,
    index_weights: CompressorWeights,
    index_tail: Tensor,
    index_keys: PagedRows,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    eps: float,
    has_hadamard: bool,
    global_scale: Tensor | None,
) -> None:
    """Compress, quantise and store the closing CSA windows, then keep the open ones' rows.

    Args:
        kv, gate: `[num_tokens, 2 × head_dim]` fp32 or bf16, of the main compressor.
        index_kv, index_gate: `[num_tokens, 2 × index_head_dim]`, of the indexer's own.
        global_scale: NVFP4's, or None.
    """
    positions = tokens.positions.long()
    rows = tail_rows(kv, gate, weights.position_bias, positions, tail.dtype)
    index_rows = tail_rows(
        index_kv, index_gate, index_weights.position_bias, positions, index_tail.dtype
    )
    closed = csa_compress_tail(rows, tail, weights.norm_weight, tokens, rope, eps=eps)
    closed_keys = csa_compress_tail(
        index_rows, index_tail, index_weights.norm_weight, tokens, rope, eps=eps
    )
    flush_write_csa(
        closed, closed_keys, entries, index_keys, tokens,
        has_hadamard=has_hadamard, global_scale=global_scale,
    )  # fmt: skip
    append_tail(rows, tail, tokens)
    append_tail(index_rows, index_tail, tokens)


def flush_hca(
    kv: Tensor,
    gate: Tensor,
    weights: CompressorWeights,
    tail: Tensor,
    entries: PagedRows,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    eps: float,
) -> None:
    """The same for HCA windows: one series of `[num_tokens, head_dim]`, no indexer."""
    rows = tail_rows(kv, gate, weights.position_bias, tokens.positions.long(), tail.dtype)
    closed = hca_compress_tail(rows, tail, weights.norm_weight, tokens, rope, eps=eps)
    flush_write_hca(closed, entries, tokens)
    append_tail(rows, tail, tokens)


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
    """The fp32 values of index keys before they are encoded."""
    return hadamard(entries) if has_hadamard else entries


def _destination(
    closed: ClosedWindows, tokens: TokenMap, ratio: int, entries_per_block: int
) -> Tensor:
    slots = addressing.token_slots(tokens)[closed.token_idx]
    entry_idx = addressing.closed_entry(tokens.positions.long()[closed.token_idx], ratio)
    return addressing.entry_rows(tokens.block_table, slots, entry_idx, entries_per_block)
