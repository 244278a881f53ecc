"""Decode steps of all attention layers at long contexts, without projections, by graph replay.

Plans alone make the contexts long, and random rows fill the pools. The lengths of the requests
differ by one token, so that in each step a quarter of them closes a CSA window of V4. Before each
timed step a large fill flushes the L2 and keeps the GPU busy until the graph is launched.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.graphs.captured_forward import CapturedForward
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import Capacity
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import AttentionResult, Selection
from dsv4.tools.bench import requests, timing
from dsv4.tools.bench.attend_case import check_result, layer_case
from dsv4.tools.bench.write import write_layer
from dsv4.tools.console import track

LENGTHS = (1 << 15, 1 << 20)
BATCHES = (1, 32)
NUM_STEPS = 20  # timed steps, a multiple of CSA's window
NUM_WARMUP_STEPS = 4
PREFILL_TOKENS = 1 << 16  # tokens of a plan that extends a request
DISTINCT_BLOCKS = 256  # blocks of random rows; all others are copies
SPARE_BYTES = 8 << 30  # GPU memory for graphs, inputs and the fill
FILL_BYTES = 1 << 30


@dataclass(frozen=True)
class DecodeCase(requests.ModelCase):
    """Requests of a batch.

    Without memory for all blocks has_own_blocks is False: the requests share one request's blocks,
    except for their last ones.
    """

    has_own_blocks: bool


def bench_decode(config: CacheConfig) -> list[dict[str, Any]]:
    """Time one step of a model's layers: the whole step, and each part."""
    sizes = [(length, batch) for length in LENGTHS for batch in BATCHES]
    return [_measure(config, *size) for size in track(sizes, "decode steps")]


def _measure(config: CacheConfig, length: int, batch: int) -> dict[str, Any]:
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    case = decode_case(config, length, batch, device="cuda", free_bytes=free_bytes)
    row: dict[str, Any] = {
        "tokens": length, "batch": batch, "has_own_blocks": case.has_own_blocks,
        "num_layers": config.num_layers, "total_us": _time_steps(case), **_time_parts(case),
    }  # fmt: skip
    del case
    torch.cuda.empty_cache()
    return row


def decode_case(
    config: CacheConfig, length: int, batch: int, *, device: str, free_bytes: int
) -> DecodeCase:
    """Open requests that have at most `length` tokens after all steps of the bench."""
    blocks, chunk = -(-length // config.block_tokens), min(length, PREFILL_TOKENS)
    capacity = Capacity(config, batch, batch * blocks, chunk, length)
    has_own_blocks = sum(size.allocated for size in capacity.memory().values()) <= free_bytes
    manager = requests.manager_for(
        config, batch, length, device=device, chunk=chunk,
        num_blocks=batch * blocks if has_own_blocks else blocks + 2 * batch,
    )  # fmt: skip
    shortest = length - batch - NUM_STEPS - NUM_WARMUP_STEPS - 1
    slots = [manager.open_request()]
    requests.extend(manager, slots[0], shortest)
    for _ in range(1, batch):
        slots.append(manager.open_request() if has_own_blocks else manager.fork(slots[0]))
    for idx, slot in enumerate(slots):
        requests.extend(manager, slot, shortest + idx)
    fill_storages(manager)
    return DecodeCase(manager, slots, *requests.model_inputs(config, batch, device), has_own_blocks)


def fill_storages(manager: KVCacheManager) -> None:
    """Fill all slots and blocks with random rows and tails."""
    for memory in manager.device_memory.memories:
        requests.fill_rows(memory.window.ring)
        for tail in (memory.tail, memory.index_tail):
            if tail is not None:
                tail.normal_()
        for pages in (memory.entries, memory.index_keys):
            if pages is not None:
                num_rows = min(DISTINCT_BLOCKS * pages.rows_per_page, pages.num_rows)
                requests.fill_rows(pages, num_rows)
    _copy_blocks(manager.paged.storage)


def _copy_blocks(storage: Tensor) -> None:
    """Copy the first blocks over all others."""
    num_filled, num_blocks = min(DISTINCT_BLOCKS, len(storage)), len(storage)
    while num_filled < num_blocks:
        count = min(num_filled, num_blocks - num_filled)
        storage[num_filled : num_filled + count].copy_(storage[:count])
        num_filled += count


def _time_steps(case: DecodeCase) -> float:
    """Mean microseconds of a captured step, each after a fill of the L2."""
    forward = CapturedForward(case.manager, case.forward, batch=len(case.slots))
    fill = torch.empty(FILL_BYTES, dtype=torch.uint8, device=case.manager.device)
    times = []
    for _ in range(NUM_WARMUP_STEPS + NUM_STEPS):
        plan = requests.plan_tokens(case.manager, case.slots)
        fill.zero_()
        results, elapsed = timing.time_on_gpu(partial(forward.replay, plan))
        times.append(elapsed)
    if not all(bool(result.output.isfinite().all()) for result in results):
        raise RuntimeError("A step gave an output that is not finite; nothing is reported")
    return statistics.fmean(times[NUM_WARMUP_STEPS:])


def _time_parts(case: DecodeCase) -> dict[str, float]:
    """Time the writes, the index and the attention of all layers, each on its own."""
    handles = case.next_step()
    case.forward(handles)
    selections = select_layers(handles, case)
    check_attention(handles, case, selections)

    def write() -> None:
        for handle in handles:
            write_layer(handle, *case.layer(handle))

    def attend() -> None:
        for handle, selection in zip(handles, selections, strict=True):
            _attend(handle, case, selection)

    return {
        "write_us": timing.replay_time(write),
        "index_us": timing.replay_time(lambda: select_layers(handles, case)),
        "attention_us": timing.replay_time(attend),
    }


def select_layers(
    handles: Sequence[LayerCacheHandle], case: requests.ModelCase
) -> list[Selection | None]:
    """Select entries in every layer that chooses; returns the choice that each layer attends."""
    chosen: dict[int, Selection] = {}
    for handle in handles:
        layer, index = handle.layer, case.layer(handle)[0].indexer
        if index is not None:
            candidates = chosen.get(layer.candidates_of)
            chosen[layer.layer_idx] = handle.select_entries(
                index.query, index.head_weights, candidates
            )
    return [chosen.get(handle.layer.choice_of) for handle in handles]


def _attend(
    handle: LayerCacheHandle, case: DecodeCase, selection: Selection | None
) -> AttentionResult:
    inputs, weights = case.layer(handle)
    return handle.attend(inputs.query, weights.sinks, selection)


def check_attention(
    handles: Sequence[LayerCacheHandle], case: DecodeCase, selections: Sequence[Selection | None]
) -> None:
    """Refuse to time attention that differs from the reference's in a layer of any kind."""
    pairs = zip(reversed(handles), reversed(selections), strict=True)
    first = {requests.layer_kind(handle.layer): (handle, selection) for handle, selection in pairs}
    for handle, selection in first.values():
        layer = layer_case(handle, *case.layer(handle), selection)
        check_result(layer, _attend(handle, case, selection), "the output")
