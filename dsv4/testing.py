"""What tests, the demo and the benches share: random layers, poison, and a cached forward."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    AttentionResult,
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    LayerProjections,
    LayerWeights,
)
from dsv4.layer_schedule import AttentionType

_Nested = TypeVar("_Nested")
Draw = Callable[..., Tensor]  # takes a shape and a generator, as `torch.randn` does

POISON_BYTE = 0xFF  # NaN in E4M3, UE8M0, BF16 and fp32 alike


class Row(NamedTuple):
    """One request of a forward: its slot, its sequence's projections by layer, its lengths."""

    slot: int
    layers: Sequence[LayerProjections]
    before: int
    after: int


def poison(manager: KVCacheManager) -> None:
    """Fill pools and workspaces with NaN, so that a read of what was never written shows."""
    manager.paged.storage.fill_(POISON_BYTE)
    manager.state.storage.fill_(POISON_BYTE)
    manager.workspace_storage.fill_(POISON_BYTE)
    manager.partials.fill_(torch.nan)


def random_weights(
    config: CacheConfig, kind: AttentionType, *, seed: int, draw: Draw = torch.randn
) -> LayerWeights:
    """Learned tensors of a layer, fp32, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, spread: float = 0.5) -> Tensor:
        return mean + spread * draw(shape, generator=generator)

    def compressor(dim: int) -> CompressorWeights:
        width = _num_series(kind) * dim
        return CompressorWeights(normal(kind.ratio, width), normal(dim, mean=1.0, spread=0.2))

    return LayerWeights(
        normal(config.head_dim, mean=1.0, spread=0.2),
        normal(config.num_query_heads, spread=1.0),
        None if kind is AttentionType.SWA else compressor(config.head_dim),
        compressor(config.index_head_dim) if kind is AttentionType.CSA else None,
    )


def random_projections(
    config: CacheConfig,
    kind: AttentionType,
    num_tokens: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    draw: Draw = torch.randn,
) -> LayerProjections:
    """Normal projections of one sequence, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return draw((num_tokens, *shape), generator=generator).to(dtype)

    def compressor(dim: int) -> CompressorInputs:
        width = _num_series(kind) * dim
        return CompressorInputs(normal(width), normal(width))

    query, kv = normal(config.num_query_heads, config.head_dim), normal(config.head_dim)
    if kind is AttentionType.SWA:
        return LayerProjections(query, kv)
    main = compressor(config.head_dim)
    if kind is AttentionType.HCA:
        return LayerProjections(query, kv, main)
    index = IndexInputs(
        *compressor(config.index_head_dim),
        normal(config.index_num_heads, config.index_head_dim),
        normal(config.index_num_heads),
    )
    return LayerProjections(query, kv, main, index)


def model_weights(
    config: CacheConfig, *, seed: int, draw: Draw = torch.randn
) -> list[LayerWeights]:
    """Random weights of every layer of the schedule."""
    return [
        random_weights(config, layer.attention_type, seed=seed + layer.layer_idx, draw=draw)
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
    """Random projections of one sequence by every layer of the schedule."""
    return [
        random_projections(
            config,
            layer.attention_type,
            num_tokens,
            seed=seed + layer.layer_idx,
            dtype=dtype,
            draw=draw,
        )
        for layer in config.schedule
    ]


def move_to(device: str, value: _Nested) -> _Nested:
    """A named tuple with every tensor in it, however deep, on a device."""
    if isinstance(value, Tensor):
        return cast(_Nested, value.to(device))
    if not isinstance(value, tuple):
        return value
    return type(value)(*(move_to(device, part) for part in value))


def take_rows(inputs: LayerProjections, rows: slice) -> LayerProjections:
    """The projections of some of the tokens."""
    compressor, indexer = inputs.compressor, inputs.indexer
    return LayerProjections(
        inputs.query[rows],
        inputs.kv[rows],
        None if compressor is None else CompressorInputs(*(part[rows] for part in compressor)),
        None if indexer is None else IndexInputs(*(part[rows] for part in indexer)),
    )


def join_rows(parts: Sequence[LayerProjections]) -> LayerProjections:
    """Projections of several requests, one after the other."""

    def joined(field: str) -> list[Tensor] | None:
        groups = [getattr(part, field) for part in parts]
        if groups[0] is None:
            return None
        return [torch.cat(tensors) for tensors in zip(*groups, strict=True)]

    compressor, indexer = joined("compressor"), joined("indexer")
    return LayerProjections(
        torch.cat([part.query for part in parts]),
        torch.cat([part.kv for part in parts]),
        None if compressor is None else CompressorInputs(*compressor),
        None if indexer is None else IndexInputs(*indexer),
    )


def run_forward(
    manager: KVCacheManager, weights: Sequence[LayerWeights], rows: Sequence[Row]
) -> list[AttentionResult]:
    """One forward of some requests through every layer; each layer's result over all tokens."""
    plan = prepare_forward(
        manager,
        [row.slot for row in rows],
        [row.before for row in rows],
        [row.after for row in rows],
    )
    return [
        manager.acquire(layer_idx, plan).forward(forward_inputs(rows, layer_idx), layer_weights)
        for layer_idx, layer_weights in enumerate(weights)
    ]


def forward_inputs(rows: Sequence[Row], layer_idx: int) -> LayerProjections:
    """A layer's projections of all tokens of a forward."""
    return join_rows(
        [take_rows(row.layers[layer_idx], slice(row.before, row.after)) for row in rows]
    )


def _num_series(kind: AttentionType) -> int:
    return 2 if kind is AttentionType.CSA else 1
