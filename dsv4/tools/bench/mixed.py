"""Host time of mixed steps of V4-Flash's 43 layers: decode rows beside chunks, eager and captured.

Times are from the plan to the last launch. A step's time is from the plan to the end of its work on
the GPU. The host waits for the device between steps, so its own time is in both.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dsv4.cache.graphs.captured_forward import CapturedForward, GraphPool
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import AttentionResult
from dsv4.tools.bench import requests
from dsv4.tools.bench.decode import fill_storages
from dsv4.tools.bench.timing import judge, time_call, time_on_gpu
from dsv4.tools.console import track

DEVICE = "cuda"
NUM_DECODE = 31  # requests of one token
MAX_CHUNKS = 2
CHUNKS = ((32,), (97,), (480,), (240, 240))
SIZES = (512, 128)  # tokens of the graphs
FIRST_LENGTH, MAX_LENGTH = (1 << 13) - 2, 1 << 16  # the first requests close HCA windows
NUM_STEPS, NUM_WARMUP_STEPS = 20, 4
MODES = ("eager", "captured")
TARGET_US = 500  # of the host, captured

is_same = torch.equal  # on a CPU bits may depend on where a tensor begins


@dataclass(frozen=True)
class MixedCase(requests.ModelCase):
    """Requests, inputs of the largest step, and graphs by the tokens that they take."""

    pool: GraphPool
    graphs: dict[int, CapturedForward] = field(default_factory=dict)


def bench_mixed() -> dict[str, Any]:
    """Time mixed steps, and count the memory of their graphs."""
    case = mixed_case(CacheConfig.v4_flash(), MAX_LENGTH)
    for chunks, mode in itertools.product(CHUNKS, MODES):
        for _ in range(NUM_WARMUP_STEPS):
            run_mixed(case, chunks, mode)
    rows = [_measure(case, counts) for counts in track(CHUNKS, "mixed steps")]
    return {"mixed": rows, "mixed_target_us": TARGET_US, "pool_bytes": case.pool.num_bytes}


def mixed_case(config: CacheConfig, max_length: int, **options: Any) -> MixedCase:
    """Open requests of random rows, and capture a graph of each size in one pool."""
    num_requests = NUM_DECODE + MAX_CHUNKS
    manager = requests.manager_for(config, num_requests, max_length, device=DEVICE, **options)
    slots = requests.open_requests(manager, range(FIRST_LENGTH, FIRST_LENGTH + num_requests))
    fill_storages(manager)
    inputs = requests.model_inputs(config, max(SIZES), DEVICE)
    case = MixedCase(manager, slots, *inputs, GraphPool(DEVICE))
    for size in SIZES:
        case.graphs[size] = CapturedForward(
            manager, partial(case.forward, num_tokens=size), batch=num_requests,
            max_chunks=MAX_CHUNKS, num_tokens=size, pool=case.pool,
        )  # fmt: skip
    return case


def run_mixed(case: MixedCase, chunks: Sequence[int], mode: str) -> list[AttentionResult]:
    """Plan and run one step; the results of a graph have rows of padding too."""
    counts = [1] * NUM_DECODE + [*chunks] + [0] * (MAX_CHUNKS - len(chunks))
    before = case.manager.lengths[case.slots]
    plan = prepare_forward(case.manager, case.slots, before, before + counts)
    if mode == "captured":
        size = min(size for size in SIZES if size >= plan.num_tokens)
        results: list[AttentionResult] = case.graphs[size].replay(plan)
        return results
    return case.forward(requests.acquire_layers(case.manager, plan), plan.num_tokens)


def _measure(case: MixedCase, chunks: tuple[int, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"decode": NUM_DECODE, "chunks": " + ".join(map(str, chunks))}
    for mode in MODES:
        host, steps = [], []
        for _ in range(NUM_STEPS):
            torch.cuda.synchronize()
            call = partial(time_call, partial(run_mixed, case, chunks, mode))
            (_, elapsed), step = time_on_gpu(call)
            host.append(elapsed)
            steps.append(step)
        row[f"{mode}_us"] = statistics.median(host)
        row[f"{mode}_step_us"] = statistics.median(steps)
    return row | judge(row["captured_us"], TARGET_US)


def check_replays(config: CacheConfig) -> None:
    """Refuse to time replays whose bytes or outputs differ from those of eager steps."""
    cases = [mixed_case(config, 2 * FIRST_LENGTH, batch_invariant=True) for _ in MODES]
    for name in ("slots", "blocks"):
        cases[1].manager.tensors()[name].copy_(cases[0].manager.tensors()[name])
    for chunks in CHUNKS:
        results = [run_mixed(case, chunks, mode) for case, mode in zip(cases, MODES, strict=True)]
        for (theirs, _), (mine, _) in zip(*results, strict=True):
            if not is_same(mine[: len(theirs)], theirs):
                raise RuntimeError("A replay's output differs from an eager step's; none is timed")
    for name in ("slots", "blocks"):
        if not torch.equal(*(case.manager.tensors()[name] for case in cases)):
            raise RuntimeError(f"A replay's {name} differ from an eager step's; none is timed")
