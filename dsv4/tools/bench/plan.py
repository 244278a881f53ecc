"""`dsv4 bench plan`: host time of `prepare_forward`, for two numbers of layers."""

from functools import partial
from typing import Any

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import blocks_for
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.tools.bench.requests import manager_for
from dsv4.tools.bench.timing import summarize, time_call
from dsv4.tools.console import working

NUM_WARMUP_STEPS = 50  # they warm the CPU's caches


def bench_plan(*, num_requests: int, num_steps: int) -> dict[str, Any]:
    """Time decode steps of V4-Flash, with all 43 layers and with 4 of them.

    The two managers alternate step by step, so that both run under the same load. Requests have
    different lengths, so that in every step some of them need a block.
    """
    configs = {
        "43 layers": CacheConfig.v4_flash(),
        "4 layers": CacheConfig.v4_flash(compress_ratios=(0, 4, 128, 4)),
    }
    with working("measuring"):
        times, num_new_blocks = _time_plans(configs, num_requests, num_steps)
    new_blocks = {"new_blocks_per_step": num_new_blocks / num_steps / len(configs)}
    sizes = {"num_requests": num_requests, "num_steps": num_steps}
    return sizes | new_blocks | summarize(times, num_skipped=NUM_WARMUP_STEPS)


def _time_plans(
    configs: dict[str, CacheConfig], num_requests: int, num_steps: int
) -> tuple[dict[str, list[float]], int]:
    """Time each step of each config, in microseconds; count the new blocks of all of them."""
    managers = {name: _filled(config, num_requests) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in configs}
    num_new_blocks = 0
    slots = list(range(num_requests))
    for step in range(NUM_WARMUP_STEPS + num_steps):
        for name, manager in managers.items():
            before = manager.lengths.tolist()
            after = [length + 1 for length in before]
            plan, elapsed = time_call(partial(prepare_forward, manager, slots, before, after))
            plan.complete()
            times[name].append(elapsed)
            num_new_blocks += plan.num_new_blocks if step >= NUM_WARMUP_STEPS else 0
            positions = manager.device_memory.plan_buffers.host["positions"][:num_requests]
            needed = blocks_for(manager.config, manager.lengths)
            if positions.tolist() != before or (manager._books.requests.num_blocks != needed).any():
                raise RuntimeError("The plan is wrong; its time is not reported")
    return times, num_new_blocks


def _filled(config: CacheConfig, num_requests: int) -> KVCacheManager:
    """Make a manager with requests of 1, 2, 3, ... tokens."""
    lengths, num_blocks = range(1, num_requests + 1), 4 * num_requests
    manager = manager_for(
        config, num_requests, 4096, device="cpu", chunk=sum(lengths), num_blocks=num_blocks
    )
    slots = manager.open_requests(num_requests)
    prepare_forward(manager, slots, [0] * num_requests, [*lengths]).complete()
    return manager
