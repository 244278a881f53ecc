"""Flush, called every forward with no host-side branch: rows that close nothing are no-ops."""

from torch import Tensor

from dsv4.config import CacheConfig
from dsv4.kernels import ops
from dsv4.kernels.contracts import CompressorWeights, EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.rope import RopeTable


def maybe_flush_csa(
    kv: Tensor,
    gate: Tensor,
    weights: CompressorWeights,
    index_kv: Tensor,
    index_gate: Tensor,
    index_weights: CompressorWeights,
    memory: LayerMemory,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    config: CacheConfig,
    backend: str,
) -> None:
    """Append a CSA layer's projections to its tails and flush the windows they close.

    Args:
        kv, gate: `[num_tokens, 2 × head_dim]` fp32 or bf16.
        index_kv, index_gate: `[num_tokens, 2 × index_head_dim]` fp32 or bf16.
    """
    writes = LayerWrites(
        entries=EntryInputs(kv, gate, weights),
        index_keys=EntryInputs(index_kv, index_gate, index_weights),
    )
    ops.write_layer(
        writes, memory, tokens, rope,
        eps=config.rms_norm_eps, has_hadamard=config.index_hadamard, backend=backend,
    )  # fmt: skip


def maybe_flush_hca(
    kv: Tensor,
    gate: Tensor,
    weights: CompressorWeights,
    memory: LayerMemory,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    config: CacheConfig,
    backend: str,
) -> None:
    """Append an HCA layer's projections to its tail and flush the windows they close.

    Args:
        kv, gate: `[num_tokens, head_dim]` fp32 or bf16.
    """
    ops.write_layer(
        LayerWrites(entries=EntryInputs(kv, gate, weights)), memory, tokens, rope,
        eps=config.rms_norm_eps, has_hadamard=config.index_hadamard, backend=backend,
    )  # fmt: skip
