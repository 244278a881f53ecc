"""Requests of any length for the benches: plans alone make them, and rows are random."""

from collections.abc import Sequence
from typing import Any

import torch

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.formats import PagedRows
from dsv4.kernels.reference.codec import encode, write_rows

ENCODED_AT_ONCE = 1 << 15  # rows
FINITE_BYTES = 0x70  # bytes below this are finite in E4M3, UE8M0 and BF16 alike


def manager_for(
    config: CacheConfig, num_requests: int, length: int, *, device: str, chunk: int = 8192,
    **options: Any,
) -> KVCacheManager:  # fmt: skip
    """Make a manager with room for requests of a length and forwards of `chunk` tokens."""
    return KVCacheManager(
        config, max_requests=num_requests,
        num_blocks=num_requests * -(-length // config.block_tokens), device=device,
        max_forward_tokens=chunk, max_request_tokens=length, **options,
    )  # fmt: skip


def open_requests(manager: KVCacheManager, num_requests: int, length: int) -> list[int]:
    """Open requests of a length without writing anything; returns their slots."""
    slots = [manager.open_request() for _ in range(num_requests)]
    for slot in slots:
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
