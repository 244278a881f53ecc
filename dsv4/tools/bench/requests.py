"""Requests of any length for the benches: plans alone make them, and rows are random."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.formats import PagedRows
from dsv4.kernels.contracts import AttentionResult, LayerProjections, LayerWeights, Selection
from dsv4.kernels.reference.codec import encode, write_rows
from dsv4.layer_schedule import LayerSpec
from dsv4.model.attention import forward_layer
from dsv4.testing import model_weights, move_to, random_projections, take_rows

ENCODED_AT_ONCE = 1 << 15  # rows
FINITE_BYTES = 0x70  # bytes below this are finite in E4M3, UE8M0 and BF16 alike


@dataclass(frozen=True)
class ModelCase:
    """Requests of a model, and each layer's inputs and weights."""

    manager: KVCacheManager
    slots: list[int]
    inputs: list[LayerProjections]
    weights: list[LayerWeights]

    def layer(self, handle: LayerCacheHandle) -> tuple[LayerProjections, LayerWeights]:
        """Inputs and weights of a handle's layer."""
        return self.inputs[handle.layer.layer_idx], self.weights[handle.layer.layer_idx]

    def next_step(self, num_tokens: int = 1) -> list[LayerCacheHandle]:
        """Plan the next tokens of each request; returns every layer's handle."""
        return acquire_layers(self.manager, plan_tokens(self.manager, self.slots, num_tokens))

    def forward(
        self, handles: Sequence[LayerCacheHandle], num_tokens: int | None = None
    ) -> list[AttentionResult]:
        """Write, select and attend the first inputs, or all, layer by layer."""
        layers = [(handle, *self.layer(handle)) for handle in handles]
        rows, chosen = slice(0, num_tokens), dict[int, Selection]()
        return [
            forward_layer(handle, take_rows(each, rows), weights, chosen)
            for handle, each, weights in layers
        ]


def model_inputs(
    config: CacheConfig, num_tokens: int, device: str
) -> tuple[list[LayerProjections], list[LayerWeights]]:
    """Draw BF16 projections, which layers of one kind share, and weights of every layer."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Any, **_: Any) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    first = {layer_kind(layer): layer for layer in reversed(config.schedule)}
    by_kind = {
        kind: random_projections(config, layer, num_tokens, seed=0, dtype=torch.bfloat16, draw=draw)
        for kind, layer in first.items()
    }
    inputs = [by_kind[layer_kind(layer)] for layer in config.schedule]
    return inputs, [move_to(device, layer) for layer in model_weights(config, seed=0)]


def layer_kind(layer: LayerSpec) -> tuple[int, bool, bool, bool]:
    """Return the ratio of a layer and what it does: layers of one kind take the same time."""
    return layer.ratio, layer.owns_entries, layer.owns_choice, layer.candidates_of >= 0


def manager_for(
    config: CacheConfig, num_requests: int, length: int, *, device: str, chunk: int = 8192,
    **options: Any,
) -> KVCacheManager:  # fmt: skip
    """Make a manager with room for requests of a length and forwards of `chunk` tokens."""
    options = {"num_blocks": num_requests * -(-length // config.block_tokens)} | options
    return KVCacheManager(
        config, max_requests=num_requests, device=device, max_forward_tokens=chunk,
        max_request_tokens=length, **options,
    )  # fmt: skip


def open_requests(manager: KVCacheManager, lengths: Sequence[int]) -> list[int]:
    """Open requests of these lengths without writing anything; returns their slots."""
    slots = manager.open_requests(len(lengths))
    for slot, length in zip(slots, lengths, strict=True):
        extend(manager, slot, length)
    return slots


def extend(manager: KVCacheManager, slot: int, length: int) -> None:
    """Bring a request to a length without writing anything."""
    step = manager.capacity.max_forward_tokens
    for start in range(int(manager.lengths[slot]), length, step):
        prepare_forward(manager, [slot], [start], [min(start + step, length)]).complete()


def plan_tokens(manager: KVCacheManager, slots: Sequence[int], num_tokens: int = 1) -> ForwardPlan:
    """Plan the next `num_tokens` tokens of each request."""
    before = manager.lengths[list(slots)].tolist()
    return prepare_forward(manager, slots, before, [length + num_tokens for length in before])


def acquire_layers(manager: KVCacheManager, plan: ForwardPlan) -> list[LayerCacheHandle]:
    """Acquire the handles of all layers."""
    return [manager.acquire(layer_idx, plan) for layer_idx in range(len(manager.schedule))]


def fill_rows(pages: PagedRows | None, num_rows: int | None = None) -> None:
    """Fill the first rows, or all, with normal numbers; a layer without such pages has None."""
    if pages is None:
        return
    num_rows = pages.num_rows if num_rows is None else num_rows
    device = pages.storage.device
    for start in range(0, num_rows, ENCODED_AT_ONCE):
        rows = torch.arange(start, min(start + ENCODED_AT_ONCE, num_rows), device=device)
        values = torch.randn(len(rows), pages.format.dim, device=device)
        write_rows(pages, rows, encode(pages.format, values))
