"""Clocks of the benches: calls, replays of captured steps, summaries, and the time of a copy."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

COPY_BANDWIDTH = 4.27e12  # bytes a second, device copy on an H200
REPEATS = 20  # runs of a warm layer in one captured step

_Result = TypeVar("_Result")


def floor_us(num_bytes: int) -> float:
    """Microseconds that a copy of `num_bytes` takes."""
    return num_bytes / COPY_BANDWIDTH * 1e6


def summarize(
    times: Mapping[str, Sequence[float]], *, num_skipped: int = 0
) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of times in microseconds, by name; the first may not count."""
    kept = {name: values[num_skipped:] for name, values in times.items()}
    return {
        "median_us": {name: statistics.median(values) for name, values in kept.items()},
        "p90_us": {name: float(np.percentile(values, 90)) for name, values in kept.items()},
    }


def time_call(call: Callable[[], _Result]) -> tuple[_Result, float]:
    """Return the result of a call, and its microseconds on the host."""
    start = time.perf_counter()
    result = call()
    return result, (time.perf_counter() - start) * 1e6


def time_to_end(call: Callable[[], _Result], device: torch.device | str) -> tuple[_Result, float]:
    """Return the result of a call, and the microseconds until a device has done its work."""

    def call_and_wait() -> _Result:
        result = call()
        wait_for(device)
        return result

    wait_for(device)
    return time_call(call_and_wait)


def time_on_gpu(call: Callable[[], _Result]) -> tuple[_Result, float]:
    """Return the result of a call, and the microseconds of its work on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    return result, start.elapsed_time(end) * 1e3


def replay_time(step: Callable[[], object], *, num_replays: int = 20) -> float:
    """Median microseconds of a captured step."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = [time_on_gpu(graph.replay)[1] for _ in range(num_replays + 3)]
    return float(statistics.median(times[3:]))


def time_layers(
    run: Callable[[int], object], num_layers: int, num_bytes: int, *, num_turns: int = 1
) -> dict[str, float]:
    """Microseconds of a layer, warm and rotating, and those of a copy of what it must move."""
    rotating = time_rotating(run, num_layers, num_turns=num_turns)
    return {"warm_us": time_warm(run), "rotating_us": rotating, "floor_us": floor_us(num_bytes)}


def beside(ours_us: float, key: str, theirs_us: float) -> dict[str, float]:
    """Microseconds of an external kernel, and our ratio to it."""
    return {key: theirs_us, "ratio": ours_us / theirs_us}


def judge(
    value: float, target: float | None, what: str = "", *, is_least: bool = False
) -> dict[str, Any]:
    """Return a number's target and verdict, as `{what}target` and `{what}verdict`.

    The target is the most that meets it, or with is_least the least. A number without one has
    neither.
    """
    if target is None:
        return {}
    is_met = value >= target if is_least else value <= target
    return {f"{what}target": target, f"{what}verdict": "met" if is_met else "missed"}


def time_warm(run: Callable[[int], object]) -> float:
    """Microseconds of layer 0, repeated; its rows stay in the L2."""
    return time_rotating(run, 1, num_turns=REPEATS)


def time_rotating(run: Callable[[int], object], num_layers: int, *, num_turns: int = 1) -> float:
    """Microseconds per layer; the layers rotate, so that none finds its rows in the L2."""
    order = [*range(num_layers)] * num_turns

    def step() -> None:
        for layer_idx in order:
            run(layer_idx)

    return replay_time(step) / len(order)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let one thread of the CPU compute: small work would wait for others longer."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def wait_for(device: torch.device | str) -> None:
    """Wait until a GPU has finished its queue; a CPU has none."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
