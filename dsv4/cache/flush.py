"""Flush, called every forward with no host-side branch: rows that close nothing are no-ops."""

from torch import Tensor

from dsv4.cache.paged_cache import LayerPages
from dsv4.cache.state_cache import LayerState
from dsv4.config import CacheConfig
from dsv4.kernels import Backend, CompressorWeights, TokenMap
from dsv4.model.rope import RopeTable


def maybe_flush_csa(
    kv: Tensor,
    gate: Tensor,
    weights: CompressorWeights,
    index_kv: Tensor,
    index_gate: Tensor,
    index_weights: CompressorWeights,
    pages: LayerPages,
    state: LayerState,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    config: CacheConfig,
    backend: Backend,
) -> None:
    """Append a CSA layer's projections to its tails and flush the windows they close.

    Args:
        kv, gate: `[num_tokens, 2 × head_dim]` fp32 or bf16.
        index_kv, index_gate: `[num_tokens, 2 × index_head_dim]` fp32 or bf16.
    """
    assert state.tail is not None and state.index_tail is not None, "a CSA layer has two tails"
    assert pages.index_keys is not None, "a CSA layer has index keys"
    backend.flush_csa(
        kv, gate, weights, state.tail, pages.entries,
        index_kv, index_gate, index_weights, state.index_tail, pages.index_keys,
        tokens, rope,
        eps=config.rms_norm_eps,
        has_hadamard=config.index_hadamard,
        global_scale=global_scale_of(config, pages),
    )  # fmt: skip


def maybe_flush_hca(
    kv: Tensor,
    gate: Tensor,
    weights: CompressorWeights,
    pages: LayerPages,
    state: LayerState,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    config: CacheConfig,
    backend: Backend,
) -> None:
    """Append an HCA layer's projections to its tail and flush the windows they close.

    Args:
        kv, gate: `[num_tokens, head_dim]` fp32 or bf16.
    """
    assert state.tail is not None, "an HCA layer has a tail"
    backend.flush_hca(
        kv, gate, weights, state.tail, pages.entries, tokens, rope, eps=config.rms_norm_eps
    )


def global_scale_of(config: CacheConfig, pages: LayerPages) -> Tensor | None:
    """NVFP4's global scale where one was set."""
    return None if config.index_global_scale is None else pages.indexer_global_scale
