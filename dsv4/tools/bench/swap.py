"""`dsv4 bench swap`: one long request of V4-Flash to pinned host memory and back."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.config import CacheConfig
from dsv4.tools.bench.environment import environment, require_cuda
from dsv4.tools.bench.requests import manager_for, open_requests
from dsv4.tools.bench.timing import wait_for
from dsv4.tools.console import track

TARGET_GB_PER_S = 40.0
COMPARED_AT_ONCE = 256  # blocks

_Result = TypeVar("_Result")


class Move(NamedTuple):
    """A request's way to the host or back: what was copied, and how long until it was there."""

    num_bytes: int
    seconds: float


def bench_swap(
    *, num_tokens: int = 1 << 20, num_rounds: int = 10, device: str = "cuda"
) -> dict[str, Any]:
    """GB/s of `swap_out` and `swap_in` of one request, `fp8` rows and `mxfp4` keys.

    Its blocks lie in a row, which is one copy, or scattered, which is a copy for each.
    """
    if device == "cuda":
        require_cuda("swap")
    manager = _manager(num_tokens, device)
    return {
        "bench": "swap",
        "num_tokens": num_tokens,
        "num_rounds": num_rounds,
        "target_gb_per_s": TARGET_GB_PER_S,
        "rows": [
            row
            for is_scattered in (False, True)
            for row in _measure(manager, num_tokens, num_rounds, is_scattered=is_scattered)
        ],
        "environment": environment(),
    }


def _measure(
    manager: KVCacheManager, num_tokens: int, num_rounds: int, *, is_scattered: bool
) -> list[dict[str, Any]]:
    """Both ways of a request that was never computed: it is random bytes.

    The device's bytes are overwritten while it is away, and compared when it is back. A first
    round does not count.
    """
    blocks = "scattered" if is_scattered else "in a row"
    if is_scattered:
        _scatter_free_blocks(manager)
    (slot,) = open_requests(manager, 1, num_tokens)
    manager.paged.storage.random_()
    manager.state.storage.random_()
    kept = [part.clone() for part in _stored(manager, slot)]
    out, back = [], []
    for _ in track(range(num_rounds + 1), f"blocks {blocks}", total=num_rounds + 1):
        swapped, move = _time(manager, partial(manager.swap_out, slot))
        out.append(move)
        manager.paged.storage.zero_()
        manager.state.storage.zero_()
        if is_scattered:
            _scatter_free_blocks(manager)
        slot, move = _time(manager, partial(manager.swap_in, swapped))
        back.append(move)
        _check_bytes(manager, slot, kept)
    manager.free_request(slot)
    return [_row("swap_out", blocks, out[1:]), _row("swap_in", blocks, back[1:])]


def _manager(num_tokens: int, device: str) -> KVCacheManager:
    """Room for one request on the device, and on the host."""
    config = CacheConfig.v4_flash(kv_format="fp8", index_format="mxfp4")
    num_blocks = -(-num_tokens // config.block_tokens)
    return manager_for(config, 1, num_tokens, device=device, host_blocks=num_blocks, host_slots=1)


def _scatter_free_blocks(manager: KVCacheManager) -> None:
    """Let a request that takes all free blocks find them in a random order."""
    blocks = manager.allocator.acquire(manager.allocator.num_free)
    for block in np.random.default_rng(0).permutation(blocks):
        manager.allocator.release(np.array([block]))


def _time(manager: KVCacheManager, move: Callable[[], _Result]) -> tuple[_Result, Move]:
    """A move with nothing else queued, until its copies are done."""
    before = _num_copied(manager)
    wait_for(manager.device)
    start = time.perf_counter()
    result = move()
    wait_for(manager.device)
    seconds = time.perf_counter() - start
    return result, Move(_num_copied(manager) - before, seconds)


def _num_copied(manager: KVCacheManager) -> int:
    stats = manager.stats()
    return stats.bytes_to_host + stats.bytes_from_host


def _stored(manager: KVCacheManager, slot: int) -> Iterator[Tensor]:
    """All bytes of a request: its slot, and its blocks in order, some at a time."""
    yield manager.state.storage[slot]
    storage = manager.paged.storage
    blocks = manager.host_block_table[slot, : manager.num_slot_blocks[slot]].astype(np.int64)
    for part in torch.from_numpy(blocks).split(COMPARED_AT_ONCE):
        yield storage[part.to(storage.device)]


def _check_bytes(manager: KVCacheManager, slot: int, kept: Sequence[Tensor]) -> None:
    """Refuse to report on a request that did not come back as it was."""
    manager.check_integrity()
    pairs = zip(_stored(manager, slot), kept, strict=True)
    if not all(torch.equal(now, before) for now, before in pairs):
        raise RuntimeError("The request came back with other bytes; nothing is reported")


def _row(way: str, blocks: str, moves: Sequence[Move]) -> dict[str, Any]:
    speeds = [move.num_bytes / move.seconds / 1e9 for move in moves]
    return {
        "way": way,
        "blocks": blocks,
        "bytes": moves[0].num_bytes,
        "best_ms": min(move.seconds for move in moves) * 1e3,
        "median_ms": statistics.median(move.seconds for move in moves) * 1e3,
        "best_gb_per_s": max(speeds),
        "median_gb_per_s": statistics.median(speeds),
    }
