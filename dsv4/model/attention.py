"""`AttentionSubBlock`: a whole attention layer of DeepSeek-V4 on top of the cache.

The projections run here. They are called as modules, so quantised linears and adapters stay in
place. Attention itself, and everything that lives from one token to the next, goes through the
`LayerCacheHandle`.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.layer_checks import INPUT_DTYPES
from dsv4.checks import check_int, check_type
from dsv4.config import LAYER_TYPE_NAMES, CacheConfig
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    LayerProjections,
    LayerWeights,
)
from dsv4.layer_schedule import AttentionType, LayerSpec

# The parts of a module that every type of layer has.
PARTS = ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "sinks", "o_a_proj", "o_b_proj",
         "compressor")  # fmt: skip


class AttentionSubBlock:
    """Queries, cache and output projection of one layer; call it with a layer's handle.

    Args:
        module: A transformers `DeepseekV4Attention`, or a module whose parts have the same names.
        config: The cache's.
        layer: The layer of `config.schedule` that the module is.
    """

    def __init__(self, module: Any, config: CacheConfig, layer: LayerSpec) -> None:
        check_type("config", config, CacheConfig)
        check_type("layer", layer, LayerSpec)
        missing = [name for name in PARTS if not hasattr(module, name)]
        if missing:
            raise TypeError(
                f"Invalid module: expected {', '.join(PARTS)} as a DeepseekV4Attention has them, "
                f"got a {type(module).__name__} without {', '.join(missing)}"
            )
        needed = (
            layer.attention_type is not AttentionType.SWA,
            layer.attention_type is AttentionType.CSA,
        )
        if (module.compressor is not None, _indexer(module) is not None) != needed:
            raise ValueError(
                f"Invalid module of layer {layer.layer_idx} ({layer.attention_type.name}): "
                f"expected compressor: {needed[0]}, indexer: {needed[1]}"
            )
        self.module = module
        self.config = config
        self.layer = layer

    @classmethod
    def from_hf(cls, module: Any, config: CacheConfig, layer_idx: int) -> "AttentionSubBlock":
        """Wrap a transformers `DeepseekV4Attention`; its tensors are shared, not copied."""
        check_type("config", config, CacheConfig)
        layer_idx = check_int("layer_idx", layer_idx, at_least=0, at_most=config.num_layers - 1)
        layer = config.schedule[layer_idx]
        name = getattr(module, "layer_type", None)
        if name not in LAYER_TYPE_NAMES:
            raise TypeError(
                f"Invalid module: expected a layer_type, one of {', '.join(LAYER_TYPE_NAMES)}, "
                f"got a {type(module).__name__} with {name!r}"
            )
        ratio = LAYER_TYPE_NAMES[name]
        if ratio != layer.ratio:
            raise ValueError(
                f"Invalid module for layer {layer_idx}: expected {layer.attention_type.name}, "
                f"got {AttentionType.from_ratio(ratio).name}"
            )
        return cls(module, config, layer)

    @torch.no_grad()
    def __call__(self, hidden: Tensor, handle: LayerCacheHandle) -> Tensor:
        """Compute the layer's attention output.

        Args:
            hidden: `[num_tokens, hidden_size]`, the attention input (after the layer's input
                norm), tokens of all requests one after the other.
            handle: This layer's handle for this forward.

        Returns:
            `[num_tokens, hidden_size]`; rows of padding tokens are 0.
        """
        self._check(hidden, handle)
        return attend(self.module, hidden, handle, learned_weights(self.module))

    def _check(self, hidden: Tensor, handle: LayerCacheHandle) -> None:
        check_type("handle", handle, LayerCacheHandle)
        check_type("hidden", hidden, Tensor)
        if handle.layer != self.layer or handle.config != self.config:
            raise ValueError(
                f"Invalid handle: expected layer {self.layer.layer_idx} of this block's config, "
                f"got layer {handle.layer.layer_idx}"
                + ("" if handle.config == self.config else " of another config")
            )
        expected = (handle.plan.num_tokens, self.module.q_a_proj.in_features)
        if tuple(hidden.shape) != expected:
            raise ValueError(
                f"Invalid shape of hidden: expected {list(expected)}, got {list(hidden.shape)}"
            )


def learned_weights(module: Any) -> LayerWeights:
    """Return the tensors of an attention module that the cache applies; shared, not copied."""
    compressor, indexer = module.compressor, _indexer(module)
    return LayerWeights(
        module.kv_norm.weight,
        module.sinks,
        None if compressor is None else _compressor_weights(compressor),
        None if indexer is None else _compressor_weights(indexer),
    )


def attend(module: Any, hidden: Tensor, handle: LayerCacheHandle, weights: LayerWeights) -> Tensor:
    """Return a module's output for `hidden` `[num_tokens, hidden_size]`, tokens in order."""
    inputs = project(module, hidden, handle.config)
    attended = handle.forward(inputs, weights, is_query_raw=True).output
    if not len(attended):  # transformers' grouped linear cannot reshape 0 rows
        return torch.empty_like(hidden)
    grouped = attended.flatten(1).unflatten(1, (module.o_a_proj.n_groups, -1))
    return _linear(module.o_b_proj, _linear(module.o_a_proj, grouped).flatten(1))


def project(module: Any, hidden: Tensor, config: CacheConfig) -> LayerProjections:
    """Project `hidden` `[num_tokens, hidden_size]` to a handle's inputs, with a raw query."""
    q_low = module.q_a_norm(_linear(module.q_a_proj, hidden))
    compressor, indexer = module.compressor, _indexer(module)
    return LayerProjections(
        _linear(module.q_b_proj, q_low).unflatten(-1, (-1, config.head_dim)),
        _linear(module.kv_proj, hidden),
        None if compressor is None else _compressor_inputs(compressor, hidden),
        None if indexer is None else _index_inputs(indexer, hidden, q_low, config),
    )


def _index_inputs(indexer: Any, hidden: Tensor, q_low: Tensor, config: CacheConfig) -> IndexInputs:
    query = _linear(indexer.q_b_proj, q_low)
    return IndexInputs(
        *_compressor_inputs(indexer, hidden),
        query.unflatten(-1, (-1, config.index_head_dim)),
        _linear(indexer.scorer.weights_proj, hidden),
    )


def _indexer(module: Any) -> Any:
    return getattr(module.compressor, "indexer", None)


def _compressor_inputs(compressor: Any, hidden: Tensor) -> CompressorInputs:
    return CompressorInputs(
        _linear(compressor.kv_proj, hidden), _linear(compressor.gate_proj, hidden)
    )


def _compressor_weights(compressor: Any) -> CompressorWeights:
    return CompressorWeights(compressor.position_bias, compressor.kv_norm.weight)


def _linear(module: Any, x: Tensor) -> Tensor:
    """Call a projection in the dtype of its weight; some checkpoints keep single ones in fp32.

    A quantised one, or one whose weight is out of reach, takes `x` as it is.
    """
    dtype = getattr(getattr(module, "weight", None), "dtype", None)
    output: Tensor = module(x.to(dtype) if dtype in INPUT_DTYPES else x)
    return output
