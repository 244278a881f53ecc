"""Cases of `dsv4 bench tune`: sizes, candidates, the forwards that time them, and their check."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels import reference
from dsv4.kernels.contracts import LayerProjections, LayerWeights, LayerWrites
from dsv4.kernels.triton import flush_write, gather
from dsv4.kernels.triton.launch import KINDS, AnyLaunch, GatherLaunch, Kind, Launch, work_name
from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench.gather import NUM_LAYERS as NUM_GATHER_LAYERS
from dsv4.tools.bench.gather import NUM_REQUESTS, are_same, compressed_handles, random_rows
from dsv4.tools.bench.write import (
    NUM_LAYERS,
    NUM_PREFILL_LAYERS,
    WriteCase,
    stores_same_bytes,
    write_case,
    write_config,
)

WRITES: dict[str, tuple[AttentionType, Kind]] = {
    work_name(layer.ratio, kind): (layer, kind) for layer in AttentionType for kind in KINDS
}
# Tokens of a forward, or rows of a gather.
SIZES = {
    "decode": (1, 32, 128, 256),
    "step": (16, 128),
    "chunk": (512, 8192),
    "gather": (NUM_REQUESTS * 512, NUM_REQUESTS * 8192),
}
STEP_TOKENS = {"decode": 1, "step": 2}
# Lengths of the first request and of the others after a step, and the weight of their time. A
# window closes at 256. For HCA: in no request, in one (as in most steps of a server), in all.
STEP_LENGTHS = {
    AttentionType.SWA: {(254, 254): 1.0},
    AttentionType.CSA: {(256, 256): 1.0},
    AttentionType.HCA: {(254, 254): 1.0, (256, 254): 1.0, (256, 256): 0.25},
}
# Lengths before and after the checked forward: at, before and after the end of a window.
CHECKED_LENGTHS = {
    "decode": ([127, 2, 4], [128, 3, 5]),
    "step": ([126, 2, 127], [128, 4, 129]),
    "chunk": ([0, 125, 6], [131, 257, 9]),
}
CANDIDATES: dict[str, tuple[AnyLaunch, ...]] = {
    "swa decode": tuple(Launch(n) for n in (1, 2, 4)),
    "csa decode": tuple(Launch(n) for n in (2, 4, 8)),
    "hca decode": (Launch(2), *(Launch(4, channels=channels) for channels in (32, 64, 128))),
    "swa step": (Launch(4), Launch(8)),
    "csa step": (Launch(4), Launch(8)),
    "hca step": (Launch(4), Launch(8)),
    "swa chunk": tuple(
        Launch(n, window_rows=window_rows) for window_rows, n in ((1, 1), (2, 2), (4, 4), (8, 4))
    ),
    "csa chunk": (
        Launch(4, rows=1, window_rows=4),
        Launch(4, rows=1, window_rows=4, maxnreg=72),
        Launch(4, rows=1, window_rows=4, maxnreg=96),
        Launch(4, rows=1, window_rows=8, maxnreg=96),
        Launch(4, rows=2, window_rows=4),
    ),
    "hca chunk": tuple(
        Launch(n, channels=channels, window_rows=window_rows)
        for channels, window_rows, n in ((32, 4, 4), (64, 4, 4), (64, 8, 8))
    ),
    "gather": tuple(
        GatherLaunch(tile, n) for tile, n in ((1, 1), (2, 1), (4, 1), (8, 2), (8, 4), (16, 4))
    ),
}


class Case(NamedTuple):
    """Layers that `run` executes with a launch; `weight` multiplies a layer's time."""

    run: Callable[[Any], None]
    num_layers: int
    weight: float


def work_sizes(work: str) -> tuple[int, ...]:
    """Return the sizes at which a work is timed, ascending."""
    return SIZES[WRITES[work][1] if work in WRITES else work]


def build_cases(work: str, size: int, *, is_rotating: bool, device: str = "cuda") -> Iterator[Case]:
    """Build the cases of a work and size: rotating layers, or a single one."""
    if work not in WRITES:
        yield _gather_case(size, num_layers=NUM_GATHER_LAYERS if is_rotating else 1)
        return
    layer, kind = WRITES[work]
    if kind == "chunk":
        config = write_config(layer, num_layers=NUM_PREFILL_LAYERS if is_rotating else 1)
        yield _case_of(write_case(config, [0], [size], device=device), 1.0)
        return
    count = STEP_TOKENS[kind]
    config = write_config(
        layer, num_layers=NUM_LAYERS if is_rotating else 1, drafts_per_step=count - 1
    )
    for (first, other), weight in STEP_LENGTHS[layer].items():
        after = [first, *[other] * (size // count - 1)]
        case = write_case(config, [length - count for length in after], after, device=device)
        yield _case_of(case, weight)


def problem_of(work: str, launch: AnyLaunch, *, device: str = "cuda") -> str | None:
    """Say why a launch is unusable: it does not compile, does not run, or spills registers.

    The launch is compiled for every size. One that stores other bytes than the reference is a
    defect, and raises.
    """
    known = _spills()
    for size in work_sizes(work):
        for case in build_cases(work, size, is_rotating=False, device=device):
            try:
                case.run(launch)
                if device == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    num_spilled = sum(spilled for kernel, spilled in _spills().items() if kernel not in known)
    if num_spilled:
        return f"spills {num_spilled} registers"
    if not _has_same_bytes(work, launch, device):
        raise RuntimeError(f"{work}, {launch}: the bytes differ from the reference's")
    return None


def _spills() -> dict[int, int]:
    """Count the spilled registers of each kernel that this process has launched."""
    functions = itertools.chain(vars(flush_write).values(), vars(gather).values())
    caches = [
        device_cache[0]
        for function in functions
        if isinstance(function, triton.JITFunction)
        for device_cache in function.device_caches.values()
    ]
    return {id(kernel): kernel.n_spills for cache in caches for kernel in cache.values()}


def _case_of(case: WriteCase, weight: float) -> Case:
    def run(launch: Launch) -> None:
        for layer in case:
            write_with(launch, *layer)

    return Case(run, len(case), weight)


def write_with(
    launch: Launch, handle: LayerCacheHandle, inputs: LayerProjections, weights: LayerWeights
) -> None:
    """Write a layer with a launch, without the handle's checks."""
    flush_write.write_layer(
        LayerWrites.of(inputs, weights), handle.memory, handle.tokens, launch=launch
    )


def _gather_case(num_rows: int, *, num_layers: int) -> Case:
    handles = compressed_handles(num_layers=num_layers)
    shape = (NUM_REQUESTS, num_rows // NUM_REQUESTS)
    layers = [(handle.memory, random_rows(shape)) for handle in handles]

    def run(launch: GatherLaunch) -> None:
        outputs = [gather.gather_compressed_kv(*layer, launch=launch) for layer in layers]
        del outputs  # only now, so that no layer writes into another's output

    return Case(run, num_layers, 1.0)


def _has_same_bytes(work: str, launch: AnyLaunch, device: str) -> bool:
    if isinstance(launch, GatherLaunch):
        memory = compressed_handles(num_layers=1)[0].memory
        rows = random_rows((NUM_REQUESTS, 61))
        rows[:, ::3] = -1
        expected = reference.gather_compressed_kv(memory, rows)
        return are_same(gather.gather_compressed_kv(memory, rows, launch=launch), expected)
    assert isinstance(launch, Launch), launch
    layer, kind = WRITES[work]
    config = write_config(layer, drafts_per_step=STEP_TOKENS.get(kind, 1) - 1)
    write = partial(write_with, launch)
    return stores_same_bytes(config, write, *CHECKED_LENGTHS[kind], device=device)
