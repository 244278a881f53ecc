"""Clocks of the benches: replays of captured steps, summaries, and the time of a copy."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

COPY_BANDWIDTH = 4.27e12  # bytes a second, device copy on an H200
REPEATS = 20  # runs of a warm layer in one captured step


def floor_us(num_bytes: int) -> float:
    """Microseconds that a copy of `num_bytes` takes."""
    return num_bytes / COPY_BANDWIDTH * 1e6


def summarize(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Median and 90th percentile of times in microseconds, by name."""
    return {
        "median_us": {name: statistics.median(values) for name, values in times.items()},
        "p90_us": {name: float(np.percentile(values, 90)) for name, values in times.items()},
    }


def replay_time(step: Callable[[], object], *, num_replays: int = 20) -> float:
    """Median microseconds of a captured step."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(num_replays + 3):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times[3:]))


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


def wait_for(device: torch.device | str) -> None:
    """Wait until a GPU has finished its queue; a CPU has none."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
