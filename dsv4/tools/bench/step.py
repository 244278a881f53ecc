"""`dsv4 bench step`: host time of captured steps and their plans, and the GPU's time."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dsv4.cache.graphs.captured_forward import CapturedForward
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.tools.bench.decode import bench_decode
from dsv4.tools.bench.environment import require_cuda
from dsv4.tools.bench.mixed import bench_mixed, check_replays
from dsv4.tools.bench.requests import ModelCase, manager_for, model_inputs, open_requests
from dsv4.tools.bench.timing import judge, summarize, time_call
from dsv4.tools.console import working
from dsv4.tools.planner.command import PRESETS

DEVICE = "cuda"
NUM_WARMUP_STEPS = 20
TARGET_US = 300.0
DECODE_TARGETS_US = {  # of all layers, by model, tokens of each request, and batch
    ("v4-flash", 1 << 15, 1): 590.0, ("v4-flash", 1 << 15, 32): 1350.0,
    ("v4-flash", 1 << 20, 1): 1000.0, ("v4-flash", 1 << 20, 32): 8000.0,
}  # fmt: skip
LONGEST_START = 256  # a block of tokens, so that in every step some request needs a block


def bench_step(*, num_requests: int, num_steps: int, model: str) -> dict[str, Any]:
    """Time `prepare_forward` and `replay` of a model's writes, all layers, one token a request.

    The host waits for the device between steps, never inside one, so that the queue stays short.
    `bench_decode` then times whole steps on the GPU, at long contexts, and `bench_mixed` those with
    chunks, eager and captured, of V4-Flash alone.
    """
    require_cuda("step")
    config = PRESETS[model]()
    with working("host time"):
        check_replays(CacheConfig.v4_flash(compress_ratios=(0, 4, 128)))
        host = _time_host(config, num_requests, num_steps)
    decode = [
        row | judge(row["total_us"], DECODE_TARGETS_US.get((model, row["tokens"], row["batch"])))
        for row in bench_decode(config)
    ]
    return {
        "model": model, "num_requests": num_requests, "num_layers": config.num_layers,
        "num_steps": num_steps, **host, "target_us": TARGET_US, "decode": decode,
        **(bench_mixed() if model == "v4-flash" else {"mixed": [], "pool_bytes": 0}),
    }  # fmt: skip


def _time_host(config: CacheConfig, num_requests: int, num_steps: int) -> dict[str, Any]:
    """Time the host's part of each step: the plan, the replay, and both."""
    longest = LONGEST_START + NUM_WARMUP_STEPS + num_steps
    manager = manager_for(config, num_requests, longest, device=DEVICE, backend="triton")
    slots = open_requests(manager, [idx % LONGEST_START + 1 for idx in range(num_requests)])
    case = ModelCase(manager, slots, *model_inputs(config, num_requests, DEVICE))

    def write(handles: Sequence[LayerCacheHandle]) -> None:
        for handle in handles:
            handle.write(*case.layer(handle))

    forward = CapturedForward(manager, write, batch=num_requests)
    times: dict[str, list[float]] = {"prepare_forward": [], "replay": [], "both": []}
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        lengths = manager.lengths
        before, after = lengths.tolist(), (lengths + 1).tolist()
        torch.cuda.synchronize()
        plan, planned = time_call(partial(prepare_forward, manager, slots, before, after))
        _, replayed = time_call(partial(forward.replay, plan))
        for part, elapsed in zip(times, (planned, replayed, planned + replayed), strict=True):
            times[part].append(elapsed)
    manager.check_integrity()
    return summarize(times, num_skipped=NUM_WARMUP_STEPS)
