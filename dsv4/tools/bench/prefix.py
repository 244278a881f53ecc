"""`dsv4 bench prefix`: host time of a prefix hit, and of the hash of a new block."""

from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.prefix_tree import hash_blocks, root_digest
from dsv4.cache.prefix.token_store import ID_DTYPE
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.tools.bench.requests import manager_for
from dsv4.tools.bench.timing import one_thread, summarize, time_call

HIT_TARGET_US = 1000.0
HASH_TARGET_US = 20.0


@one_thread()
def bench_prefix(*, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Resume V4-Flash requests on a cached prompt, repeatedly.

    Plans alone make the prompt, since the content of blocks costs no host time. The device copies
    the fixed state of a hit. On the CPU that copy is part of the time of a hit, so hits are also
    timed without it. One thread copies, since waiting for others takes longer.
    """
    config = CacheConfig.v4_flash()
    ids = np.random.default_rng(0).integers(0, 129280, num_tokens)
    sizes = {"num_blocks": num_tokens // config.block_tokens + 2, "num_checkpoints": 1}
    manager = manager_for(config, 2, num_tokens, device="cpu", chunk=num_tokens, **sizes)
    # Publish the prompt, with a checkpoint at its last block boundary.
    slot, *_ = manager.resume_request(ids)
    num_hit_tokens = num_tokens // config.block_tokens * config.block_tokens
    prepare_forward(manager, [slot], [0], [num_hit_tokens - 1]).complete()
    prepare_forward(manager, [slot], [num_hit_tokens - 1], [num_hit_tokens]).complete()
    manager.free_request(slot)
    times: dict[str, list[float]] = {"hit": [], "hit_without_copy": [], "hash_of_a_block": []}
    for _ in range(num_rounds):
        times["hit"].append(_time_hit(manager, ids, num_hit_tokens))
        # On a GPU the copy of the fixed state costs the host nothing.
        with mock.patch.object(manager._books.checkpoints, "load", lambda *_: None):
            times["hit_without_copy"].append(_time_hit(manager, ids, num_hit_tokens))
        times["hash_of_a_block"].append(_time_hash(ids))
    return {
        "num_tokens": num_tokens, "num_hit_tokens": num_hit_tokens,
        "checkpoint_bytes": manager.device_memory.checkpoints.shape[1],
        "best_us": {name: min(values) for name, values in times.items()}, **summarize(times),
        "target_us": {"hit_without_copy": HIT_TARGET_US, "hash_of_a_block": HASH_TARGET_US},
    }  # fmt: skip


def _time_hit(manager: KVCacheManager, ids: np.ndarray[Any, Any], expected: int) -> float:
    (slot, num_tokens, *_), elapsed = time_call(partial(manager.resume_request, ids))
    if num_tokens != expected:
        raise RuntimeError(f"Expected a hit of {expected} tokens, got {num_tokens}")
    manager.free_request(slot)
    return elapsed


def _time_hash(ids: np.ndarray[Any, Any]) -> float:
    """Time the hash of one more block of a request."""
    known = ids[: 2 * 256].astype(ID_DTYPE).data.cast("B")
    digests = hash_blocks(root_digest("", b""), known, 256 * ID_DTYPE.itemsize)
    next(digests)
    return time_call(partial(next, digests))[1]
