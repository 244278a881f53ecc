"""One attention module of transformers on top of the cache.

Its projections are called as modules, so quantised linears and adapters stay in place; norms of
what is stored, RoPE, compression, index and attention are the cache's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.layer_checks import INPUT_DTYPES
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    LayerProjections,
    LayerWeights,
)
from dsv4.rope import RopeTable

Rotation = Tensor  # cos + i sin at each token, [num_tokens, 1, rope_dim / 2]


def learned_weights(module: Any) -> LayerWeights:
    """The tensors of a `DeepseekV4Attention` that the cache applies; shared, not copied."""
    compressor = module.compressor
    indexer = getattr(compressor, "indexer", None)
    return LayerWeights(
        module.kv_norm.weight,
        module.sinks,
        None if compressor is None else _compressor_weights(compressor),
        None if indexer is None else _compressor_weights(indexer),
    )


def rotation_at(table: RopeTable, positions: Tensor) -> Rotation:
    """What turns the queries at `positions` `[num_tokens]`."""
    return torch.complex(table.cos[positions], table.sin[positions])[:, None]


def attend(
    module: Any,
    hidden: Tensor,
    handle: LayerCacheHandle,
    weights: LayerWeights,
    rotation: Rotation,
) -> Tensor:
    """The module's output for `hidden` `[num_tokens, hidden_size]`, tokens of all rows in order."""
    inputs = _project(module, hidden, rotation, handle.config)
    attended = handle.forward(inputs, weights).output
    grouped = attended.flatten(1).unflatten(1, (module.o_a_proj.n_groups, -1))
    return _linear(module.o_b_proj, _linear(module.o_a_proj, grouped).flatten(1))


def _project(
    module: Any, hidden: Tensor, rotation: Rotation, config: CacheConfig
) -> LayerProjections:
    q_low = module.q_a_norm(_linear(module.q_a_proj, hidden))
    heads = _linear(module.q_b_proj, q_low).unflatten(-1, (-1, config.head_dim))
    normed = F.rms_norm(heads.float(), (config.head_dim,), eps=config.rms_norm_eps)
    compressor = module.compressor
    indexer = getattr(compressor, "indexer", None)
    return LayerProjections(
        _rotated(normed, rotation).to(heads.dtype),
        _linear(module.kv_proj, hidden),
        None if compressor is None else _compressor_inputs(compressor, hidden),
        None if indexer is None else _index_inputs(indexer, hidden, q_low, config),
    )


def _rotated(query: Tensor, rotation: Rotation) -> Tensor:
    """RoPE in place on adjacent pairs of the trailing channels of `query` `[..., dim]` fp32."""
    pairs = query[..., -2 * rotation.shape[-1] :].unflatten(-1, (-1, 2))
    torch.view_as_complex(pairs).mul_(rotation)
    return query


def _index_inputs(indexer: Any, hidden: Tensor, q_low: Tensor, config: CacheConfig) -> IndexInputs:
    query = _linear(indexer.q_b_proj, q_low)
    return IndexInputs(
        *_compressor_inputs(indexer, hidden),
        query.unflatten(-1, (-1, config.index_head_dim)),
        _linear(indexer.scorer.weights_proj, hidden),
    )


def _compressor_inputs(module: Any, hidden: Tensor) -> CompressorInputs:
    return CompressorInputs(_linear(module.kv_proj, hidden), _linear(module.gate_proj, hidden))


def _compressor_weights(module: Any) -> CompressorWeights:
    return CompressorWeights(module.position_bias, module.kv_norm.weight)


def _linear(module: Any, x: Tensor) -> Tensor:
    """A projection, in the dtype of its weight: some are kept in fp32."""
    dtype = module.weight.dtype
    output: Tensor = module(x.to(dtype) if dtype in INPUT_DTYPES else x)
    return output


class NoGradient(torch.autograd.Function):
    """Passes values on; a backward through the cache says why there is none."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "No gradients through a PagedCache: it stores rows without their history; "
            "train without past_key_values"
        )
