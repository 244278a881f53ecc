"""`AttentionSubBlock`: a whole attention layer of DeepSeek-V4 on top of the cache.

It owns the projections and the norms of the queries; everything that lives from one token to
the next goes through the `LayerCacheHandle`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.config import LAYER_TYPE_NAMES, CacheConfig
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    LayerProjections,
    LayerWeights,
)
from dsv4.kernels.reference.arithmetic import rotate
from dsv4.layer_schedule import AttentionType, LayerSpec
from dsv4.rope import RopeTable


@dataclass(frozen=True)
class CompressorModule:
    """Projections and learned tensors of a compressor: the layer's main one, or the indexer's."""

    kv_proj: Tensor
    gate_proj: Tensor
    weights: CompressorWeights


@dataclass(frozen=True)
class IndexerModule:
    """The indexer: its own compressor, its queries and its head weights."""

    compressor: CompressorModule
    q_b_proj: Tensor
    weights_proj: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """All tensors of an attention layer, `[out, in]` as `torch.nn.Linear` keeps them.

    o_a_proj is `[groups × o_lora_rank, heads × head_dim / groups]`, block-diagonal by groups.
    """

    q_a_proj: Tensor
    q_a_norm: Tensor
    q_b_proj: Tensor
    kv_proj: Tensor
    kv_norm: Tensor
    sinks: Tensor
    o_a_proj: Tensor
    o_b_proj: Tensor
    num_output_groups: int
    compressor: CompressorModule | None = None
    indexer: IndexerModule | None = None


class AttentionSubBlock:
    """Queries, cache and output projection of one layer; call it with a layer's handle."""

    def __init__(self, weights: AttentionWeights, config: CacheConfig, layer: LayerSpec) -> None:
        has_compressor = layer.attention_type is not AttentionType.SWA
        has_indexer = layer.attention_type is AttentionType.CSA
        if (weights.compressor is not None, weights.indexer is not None) != (
            has_compressor,
            has_indexer,
        ):
            raise ValueError(
                f"Invalid weights of layer {layer.layer_idx} ({layer.attention_type.name}): "
                f"expected compressor: {has_compressor}, indexer: {has_indexer}"
            )
        self.weights = weights
        self.config = config
        self.layer = layer

    @classmethod
    def from_hf(cls, module: Any, config: CacheConfig, layer_idx: int) -> "AttentionSubBlock":
        """From a transformers `DeepseekV4Attention`; its tensors are shared, not copied."""
        if not 0 <= layer_idx < config.num_layers:
            raise ValueError(
                f"Invalid layer_idx: expected 0 to {config.num_layers - 1}, got {layer_idx}"
            )
        layer = config.schedule[layer_idx]
        ratio = LAYER_TYPE_NAMES[module.layer_type]
        if ratio != layer.ratio:
            raise ValueError(
                f"Invalid module for layer {layer_idx}: expected {layer.attention_type.name}, "
                f"got {AttentionType.from_ratio(ratio).name}"
            )
        indexer = None
        if layer.attention_type is AttentionType.CSA:
            source = module.compressor.indexer
            indexer = IndexerModule(
                _compressor(source), source.q_b_proj.weight, source.scorer.weights_proj.weight
            )
        weights = AttentionWeights(
            q_a_proj=module.q_a_proj.weight,
            q_a_norm=module.q_a_norm.weight,
            q_b_proj=module.q_b_proj.weight,
            kv_proj=module.kv_proj.weight,
            kv_norm=module.kv_norm.weight,
            sinks=module.sinks,
            o_a_proj=module.o_a_proj.weight,
            o_b_proj=module.o_b_proj.weight,
            num_output_groups=module.o_a_proj.n_groups,
            compressor=None if module.compressor is None else _compressor(module.compressor),
            indexer=indexer,
        )
        return cls(weights, config, layer)

    @torch.no_grad()
    def __call__(self, hidden: Tensor, handle: LayerCacheHandle) -> Tensor:
        """The layer's attention output.

        Args:
            hidden: `[num_tokens, hidden_size]`, the attention input (after the layer's input
                norm), tokens of all requests one after the other.
            handle: This layer's handle for this forward.

        Returns:
            `[num_tokens, hidden_size]`; rows of padding tokens are 0.
        """
        self._check(hidden, handle)
        inputs = self.project(hidden, handle.positions.long(), handle.rope)
        attended = handle.forward(inputs, self.cache_weights).output
        return self.project_output(attended)

    @property
    def cache_weights(self) -> LayerWeights:
        """The learned tensors that the cache applies."""
        weights = self.weights
        return LayerWeights(
            weights.kv_norm,
            weights.sinks,
            None if weights.compressor is None else weights.compressor.weights,
            None if weights.indexer is None else weights.indexer.compressor.weights,
        )

    @torch.no_grad()
    def project(self, hidden: Tensor, positions: Tensor, rope: RopeTable) -> LayerProjections:
        """What the cache needs of `hidden` `[num_tokens, hidden_size]` at `positions`."""
        weights = self.weights
        q_low = _rms_norm(_linear(hidden, weights.q_a_proj), self.config.rms_norm_eps)
        q_low = (q_low * weights.q_a_norm.float()).to(hidden.dtype)
        compressor = None
        if weights.compressor is not None:
            compressor = _compressor_inputs(hidden, weights.compressor)
        return LayerProjections(
            self._query(q_low, positions, rope),
            _linear(hidden, weights.kv_proj),
            compressor,
            self._index_inputs(hidden, q_low),
        )

    def _query(self, q_low: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
        heads = _linear(q_low, self.weights.q_b_proj).unflatten(-1, (-1, self.config.head_dim))
        normed = _rms_norm(heads, self.config.rms_norm_eps)
        cos, sin = rope.cos[positions], rope.sin[positions]
        return rotate(normed, cos[:, None], sin[:, None]).to(q_low.dtype)

    def _index_inputs(self, hidden: Tensor, q_low: Tensor) -> IndexInputs | None:
        indexer = self.weights.indexer
        if indexer is None:
            return None
        query = _linear(q_low, indexer.q_b_proj)
        return IndexInputs(
            *_compressor_inputs(hidden, indexer.compressor),
            query.unflatten(-1, (-1, self.config.index_head_dim)),
            _linear(hidden, indexer.weights_proj),
        )

    @torch.no_grad()
    def project_output(self, attended: Tensor) -> Tensor:
        """`[num_tokens, hidden_size]` from the heads' outputs `[num_tokens, heads, head_dim]`."""
        groups = self.weights.num_output_groups
        grouped = attended.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
        by_group = self.weights.o_a_proj.unflatten(0, (groups, -1)).transpose(1, 2)
        low = torch.bmm(grouped, by_group.to(grouped.dtype)).transpose(0, 1).flatten(1)
        return _linear(low, self.weights.o_b_proj)

    def _check(self, hidden: Tensor, handle: LayerCacheHandle) -> None:
        if handle.layer != self.layer or handle.config != self.config:
            raise ValueError(
                f"Invalid handle: expected layer {self.layer.layer_idx} of this block's config, "
                f"got layer {handle.layer.layer_idx}"
                + ("" if handle.config == self.config else " of another config")
            )
        expected = (handle.plan.num_tokens, self.weights.q_a_proj.shape[1])
        if tuple(hidden.shape) != expected:
            raise ValueError(
                f"Invalid shape of hidden: expected {list(expected)}, got {list(hidden.shape)}"
            )


def _compressor(module: Any) -> CompressorModule:
    return CompressorModule(
        module.kv_proj.weight,
        module.gate_proj.weight,
        CompressorWeights(module.position_bias, module.kv_norm.weight),
    )


def _compressor_inputs(hidden: Tensor, compressor: CompressorModule) -> CompressorInputs:
    return CompressorInputs(
        _linear(hidden, compressor.kv_proj), _linear(hidden, compressor.gate_proj)
    )


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    # Some checkpoints keep single projections in fp32.
    return F.linear(x.to(weight.dtype), weight)


def _rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without a weight, fp32 result."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
