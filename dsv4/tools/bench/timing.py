"""How the benches time on a GPU: replays of captured steps, and the bytes that bound them."""

import statistics
from collections.abc import Callable

import torch

COPY_BANDWIDTH = 4.27e12  # bytes a second, device copy on an H200
REPEATS = 20  # of one layer in a captured step


def floor_us(num_bytes: int) -> float:
    """Microseconds that a copy of so many bytes would take."""
    return num_bytes / COPY_BANDWIDTH * 1e6


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


def time_same_layer(run: Callable[[int], object]) -> float:
    """Microseconds of layer 0, again and again."""

    def step() -> None:
        for _ in range(REPEATS):
            run(0)

    return replay_time(step) / REPEATS


def time_in_turn(run: Callable[[int], object], num_layers: int, *, num_turns: int = 1) -> float:
    """Microseconds of a layer where layers take turns, so that none finds its rows in the L2."""
    order = [*range(num_layers)] * num_turns

    def step() -> None:
        for layer_idx in order:
            run(layer_idx)

    return replay_time(step) / len(order)


def wait_for(device: torch.device | str) -> None:
    """Wait until all that was queued on a GPU is done; a CPU has nothing queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
