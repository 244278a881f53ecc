"""Helpers of tests and benches: random layers, poison, and a cached forward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from dsv4.cache.layer_checks import make_projections
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    AttentionResult,
    CompressorWeights,
    KeyWeights,
    LayerProjections,
    LayerWeights,
    Selection,
)
from dsv4.layer_schedule import AttentionType, LayerSpec
from dsv4.model.attention import forward_layer

_Nested = TypeVar("_Nested")
Draw = Callable[..., Tensor]  # takes a shape and a generator, as `torch.randn` does

POISON_BYTE = 0xFF  # NaN in E4M3, UE8M0, BF16 and fp32 alike


class Row(NamedTuple):
    """One request of a forward: slot, projections of its sequence by layer, lengths."""

    slot: int
    layers: Sequence[LayerProjections]
    before: int
    after: int


def poison(manager: KVCacheManager) -> None:
    """Fill pools and workspaces with NaN, so that a read of unwritten memory shows."""
    for part in manager.memory_parts:
        memory = part.memories[0]
        for storage in (memory.blocks, memory.slots, memory.workspace):
            storage.fill_(POISON_BYTE)
        memory.partials.fill_(torch.nan)
        memory.rope_rows.fill_(torch.nan)


def random_weights(
    config: CacheConfig, kind: AttentionType | LayerSpec, *, seed: int, draw: Draw = torch.randn
) -> LayerWeights:
    """Draw the learned tensors of a layer, fp32, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    layer = kind if isinstance(kind, LayerSpec) else LayerSpec(0, kind)

    def normal(*shape: int, mean: float = 0.0, spread: float = 0.5) -> Tensor:
        return mean + spread * draw(shape, generator=generator)

    def compressor(dim: int) -> CompressorWeights:
        num_series = 2 if layer.attention_type is AttentionType.CSA else 1
        bias = None if layer.has_latent_keys else normal(layer.ratio, num_series * dim)
        return CompressorWeights(bias, normal(dim, mean=1.0, spread=0.2))

    def keys(dim: int) -> CompressorWeights | KeyWeights | None:
        if layer.attention_type is not AttentionType.CSA or not layer.owns_entries:
            return None
        if not layer.has_latent_keys:
            return compressor(dim)
        return KeyWeights(normal(dim, config.head_dim), normal(dim, mean=1.0, spread=0.2))

    return LayerWeights(
        normal(config.head_dim, mean=1.0, spread=0.2),
        normal(config.num_query_heads, spread=1.0),
        compressor(config.head_dim) if layer.owns_entries else None,
        keys(config.index_head_dim),
    )


def random_projections(
    config: CacheConfig,
    kind: AttentionType | LayerSpec,
    num_tokens: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    draw: Draw = torch.randn,
) -> LayerProjections:
    """Draw normal projections of one sequence from a seed."""
    generator = torch.Generator().manual_seed(seed)
    layer = kind if isinstance(kind, LayerSpec) else LayerSpec(0, kind)

    def normal(name: str, shape: tuple[int, ...]) -> Tensor:
        return draw(shape, generator=generator).to(dtype)

    return make_projections(config, layer, num_tokens, normal)


def model_weights(
    config: CacheConfig, *, seed: int, draw: Draw = torch.randn
) -> list[LayerWeights]:
    """Draw weights of every layer of the schedule."""
    return [
        random_weights(config, layer, seed=seed + layer.layer_idx, draw=draw)
        for layer in config.schedule
    ]


def model_projections(
    config: CacheConfig,
    num_tokens: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    draw: Draw = torch.randn,
) -> list[LayerProjections]:
    """Draw projections of one sequence for every layer of the schedule."""
    return [
        random_projections(
            config, layer, num_tokens, seed=seed + layer.layer_idx, dtype=dtype, draw=draw
        )
        for layer in config.schedule
    ]


def move_to(device: str, value: _Nested) -> _Nested:
    """Copy a nested named tuple of tensors to a device."""
    return cast(_Nested, _map_tensors(lambda tensor: tensor.to(device), value))


def take_rows(inputs: LayerProjections, rows: slice | Tensor) -> LayerProjections:
    """Take the projections of some of the tokens."""
    return cast(LayerProjections, _map_tensors(lambda tensor: tensor[rows], inputs))


def join_rows(requests: Sequence[LayerProjections]) -> LayerProjections:
    """Join the projections of several requests, one after the other."""
    return cast(LayerProjections, _map_tensors(lambda *tensors: torch.cat(tensors), *requests))


def _map_tensors(function: Callable[..., Tensor], *values: Any) -> Any:
    """Apply a function to each field's tensors of nested named tuples; None stays None."""
    if values[0] is None or isinstance(values[0], Tensor):
        return None if values[0] is None else function(*values)
    return type(values[0])(
        *(_map_tensors(function, *fields) for fields in zip(*values, strict=True))
    )


def run_forward(
    manager: KVCacheManager, weights: Sequence[LayerWeights], rows: Sequence[Row]
) -> list[AttentionResult]:
    """Run one forward of requests through every layer; return each layer's result."""
    plan = prepare_forward(
        manager,
        [row.slot for row in rows],
        [row.before for row in rows],
        [row.after for row in rows],
    )
    chosen: dict[int, Selection] = {}
    return [
        forward_layer(manager.acquire(idx, plan), forward_inputs(rows, idx), layer_weights, chosen)
        for idx, layer_weights in enumerate(weights)
    ]


def forward_inputs(rows: Sequence[Row], layer_idx: int) -> LayerProjections:
    """Join a layer's projections of all tokens of a forward."""
    return join_rows(
        [take_rows(row.layers[layer_idx], slice(row.before, row.after)) for row in rows]
    )
