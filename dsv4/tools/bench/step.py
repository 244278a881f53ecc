"""`dsv4 bench step`: host time of captured steps and their plans, and the GPU's time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dsv4.cache.graphs.captured_forward import CapturedForward
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import LayerProjections
from dsv4.testing import model_weights, move_to, take_rows
from dsv4.tools.bench.decode import bench_decode, decode_inputs
from dsv4.tools.bench.environment import require_cuda
from dsv4.tools.bench.mixed import bench_mixed
from dsv4.tools.bench.requests import acquire_layers, extend, manager_for
from dsv4.tools.bench.timing import summarize, time_call
from dsv4.tools.console import working

DEVICE = "cuda"
NUM_WARMUP_STEPS = 20
TARGET_US = 300.0
LONGEST_START = 256  # a block of tokens, so that in every step some request needs a block


def bench_step(*, num_requests: int = 256, num_steps: int = 400) -> dict[str, Any]:
    """Time `prepare_forward` and `replay` of V4-Flash's writes, 43 layers, one token a request.

    The host waits for the device between steps, never inside one, so that the queue stays short.
    `bench_decode` then times whole steps on the GPU, at long contexts, and `bench_mixed` those with
    chunks, eager and captured.
    """
    require_cuda("step")
    with working("host time"):
        _check_bytes()
        host = _time_host(num_requests, num_steps)
    return {
        "num_requests": num_requests,
        "num_layers": CacheConfig.v4_flash().num_layers,
        "num_steps": num_steps,
        **host,
        "target_us": TARGET_US,
        "decode": bench_decode(),
        **bench_mixed(),
    }


def _time_host(num_requests: int, num_steps: int) -> dict[str, Any]:
    """Time the host's part of each step: the plan, the replay, and both."""
    config = CacheConfig.v4_flash()
    longest = LONGEST_START + NUM_WARMUP_STEPS + num_steps
    manager = manager_for(config, num_requests, longest, device=DEVICE, backend="triton")
    for idx in range(num_requests):
        extend(manager, manager.open_request(), idx % LONGEST_START + 1)
    inputs = decode_inputs(config, num_requests, DEVICE)
    forward = CapturedForward(manager, _write_step(config, inputs), batch=num_requests)
    slots = list(range(num_requests))
    times: dict[str, list[float]] = {"prepare_forward": [], "replay": [], "both": []}
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        before = manager.lengths.tolist()
        after = [length + 1 for length in before]
        torch.cuda.synchronize()
        plan, planned = time_call(partial(prepare_forward, manager, slots, before, after))
        _, replayed = time_call(partial(forward.replay, plan))
        for part, elapsed in zip(times, (planned, replayed, planned + replayed), strict=True):
            times[part].append(elapsed)
    manager.check_integrity()
    return summarize({name: values[NUM_WARMUP_STEPS:] for name, values in times.items()})


def _write_step(
    config: CacheConfig, inputs: Sequence[LayerProjections]
) -> Callable[[Sequence[LayerCacheHandle]], None]:
    """Make a step that writes the inputs of every layer."""
    weights = [move_to(DEVICE, layer) for layer in model_weights(config, seed=0)]

    def step(handles: Sequence[LayerCacheHandle]) -> None:
        for handle, layer, weight in zip(handles, inputs, weights, strict=True):
            handle.write(layer, weight)

    return step


def _check_bytes() -> None:
    """Refuse to time a replay whose stored bytes differ from an eager step's."""
    config = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), num_query_heads=1)
    batch, captured_batch, length = 3, 5, 126
    sizes: dict[str, Any] = {
        "max_requests": captured_batch, "num_blocks": 8, "device": DEVICE, "backend": "triton",
    }  # fmt: skip
    captured, eager = KVCacheManager(config, **sizes), KVCacheManager(config, **sizes)
    inputs = decode_inputs(config, captured_batch, DEVICE)
    forward = CapturedForward(captured, _write_step(config, inputs), batch=captured_batch)
    write = _write_step(config, [take_rows(layer, slice(0, batch)) for layer in inputs])
    runs: tuple[tuple[KVCacheManager, Callable[[ForwardPlan], object]], ...] = (
        (captured, forward.replay),
        (eager, lambda plan: write(acquire_layers(eager, plan))),
    )
    for manager, run in runs:
        slots = [manager.open_request() for _ in range(batch)]
        prepare_forward(manager, slots, [0] * batch, [length] * batch).complete()
        for before in range(length, length + 6):
            run(prepare_forward(manager, slots, [before] * batch, [before + 1] * batch))
    for name in ("slots", "blocks"):
        if not torch.equal(captured.tensors()[name], eager.tensors()[name]):
            raise RuntimeError(f"A replay's {name} differ from an eager step's; nothing is timed")
