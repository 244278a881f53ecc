"""`dsv4 bench swap`: one long request of V4-Flash to pinned host memory and back."""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import CacheConfig
from dsv4.tools.bench.environment import require_cuda
from dsv4.tools.bench.requests import manager_for, open_requests
from dsv4.tools.bench.timing import time_to_end
from dsv4.tools.console import track

TARGET_GB_PER_S = 40.0
COMPARED_AT_ONCE = 256  # blocks


def bench_swap(*, num_tokens: int, num_rounds: int, device: str = "cuda") -> dict[str, Any]:
    """Time `swap_out` and `swap_in` of one request, `fp8` rows and `mxfp4` keys.

    Adjacent blocks are one copy, scattered blocks one copy each.
    """
    if device == "cuda":
        require_cuda("swap")
    manager = _manager(num_tokens, device)
    moves = [_measure(manager, num_tokens, num_rounds, is_scattered=each) for each in (False, True)]
    sizes = {"num_tokens": num_tokens, "num_rounds": num_rounds}
    return {**sizes, "target_gb_per_s": TARGET_GB_PER_S, "rows": [*moves[0], *moves[1]]}


def _measure(
    manager: KVCacheManager, num_tokens: int, num_rounds: int, *, is_scattered: bool
) -> list[dict[str, Any]]:
    """Time both ways of a request of random bytes.

    The device's bytes are overwritten after each swap-out and compared after each swap-in. The
    first round is not counted.
    """
    blocks = "scattered" if is_scattered else "in a row"
    if is_scattered:
        _scatter_free_blocks(manager)
    (slot,) = open_requests(manager, [num_tokens])
    manager.paged.storage.random_()
    manager.state.storage.random_()
    kept = [part.clone() for part in _stored(manager, slot)]
    out, back = [], []
    for _ in track(range(num_rounds + 1), f"blocks {blocks}", total=num_rounds + 1):
        swapped, elapsed = time_to_end(partial(manager.swap_out, slot), manager.device)
        out.append(elapsed)
        manager.paged.storage.zero_()
        manager.state.storage.zero_()
        if is_scattered:
            _scatter_free_blocks(manager)
        slot, elapsed = time_to_end(partial(manager.swap_in, swapped), manager.device)
        back.append(elapsed)
        _check_bytes(manager, slot, kept)
    manager.free_request(slot)
    size = sum(part.nbytes for part in kept)
    return [_row("swap_out", blocks, size, out[1:]), _row("swap_in", blocks, size, back[1:])]


def _manager(num_tokens: int, device: str) -> KVCacheManager:
    """Make a manager with room for one request on the device, and on the host."""
    config = CacheConfig.v4_flash(kv_format="fp8", index_format="mxfp4")
    num_blocks = -(-num_tokens // config.block_tokens)
    return manager_for(config, 1, num_tokens, device=device, host_blocks=num_blocks, host_slots=1)


def _scatter_free_blocks(manager: KVCacheManager) -> None:
    """Shuffle the free blocks, so that the next request gets scattered ones."""
    allocator = manager._books.allocator
    blocks = allocator.acquire(allocator.num_free)
    for block in np.random.default_rng(0).permutation(blocks):
        allocator.release(np.array([block]))


def _stored(manager: KVCacheManager, slot: int) -> Iterator[Tensor]:
    """Yield all bytes of a request: its slot, then its blocks in order, some at a time."""
    yield manager.state.storage[slot]
    storage = manager.paged.storage
    blocks = manager.blocks_of(slot).astype(np.int64)
    for part in torch.from_numpy(blocks).split(COMPARED_AT_ONCE):
        yield storage[part.to(storage.device)]


def _check_bytes(manager: KVCacheManager, slot: int, kept: Sequence[Tensor]) -> None:
    """Refuse to report a swap that changed the request's bytes."""
    manager.check_integrity()
    pairs = zip(_stored(manager, slot), kept, strict=True)
    if not all(torch.equal(now, before) for now, before in pairs):
        raise RuntimeError("The request came back with other bytes; nothing is reported")


def _row(way: str, blocks: str, num_bytes: int, times: Sequence[float]) -> dict[str, Any]:
    speeds = [num_bytes / us / 1e3 for us in times]
    return {
        "way": way, "blocks": blocks, "bytes": num_bytes,
        "best_ms": min(times) / 1e3, "median_ms": statistics.median(times) / 1e3,
        "best_gb_per_s": max(speeds), "median_gb_per_s": statistics.median(speeds),
    }  # fmt: skip
