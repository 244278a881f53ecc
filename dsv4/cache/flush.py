"""Flush, called every forward with no host-side branch: rows that close nothing are no-ops."""

from dsv4.kernels import ops
from dsv4.kernels.contracts import EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory


def maybe_flush_csa(
    entries: EntryInputs,
    index_keys: EntryInputs,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    backend: str,
) -> None:
    """Append a CSA layer's projections to its tails and flush the windows they close.

    Args:
        entries: kv, gate `[num_tokens, 2 × head_dim]` fp32 or bf16, and the compressor's weights.
        index_keys: kv, gate `[num_tokens, 2 × index_head_dim]`, and the indexer's weights.
    """
    writes = LayerWrites(entries=entries, index_keys=index_keys)
    ops.write_layer(writes, memory, tokens, backend=backend)


def maybe_flush_hca(
    entries: EntryInputs, memory: LayerMemory, tokens: TokenMap, *, backend: str
) -> None:
    """Append an HCA layer's projections to its tail and flush the windows they close.

    Args:
        entries: kv, gate `[num_tokens, head_dim]` fp32 or bf16, and the compressor's weights.
    """
    ops.write_layer(LayerWrites(entries=entries), memory, tokens, backend=backend)


def maybe_flush(
    writes: LayerWrites, memory: LayerMemory, tokens: TokenMap, *, backend: str
) -> None:
    """Flush the entries of a layer that owns some, if `writes` has any."""
    if writes.entries is None:
        return
    if isinstance(writes.index_keys, EntryInputs):
        maybe_flush_csa(writes.entries, writes.index_keys, memory, tokens, backend=backend)
    elif writes.index_keys is None:
        maybe_flush_hca(writes.entries, memory, tokens, backend=backend)
    else:
        ops.write_layer(writes, memory, tokens, backend=backend)
