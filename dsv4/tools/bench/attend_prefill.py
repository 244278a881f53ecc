"""Attention of a prefill chunk, the last tokens of a long request of V4-Flash, by graph replay.

CSA attends the window and selected entries, HCA the window and all visible entries. Our kernels
read both in place; FlashMLA's prefill kernel reads a dense BF16 copy.
"""

from typing import Any, NamedTuple

import torch

from dsv4.config import CacheConfig
from dsv4.kernels.reference import addressing
from dsv4.tools.bench import timing
from dsv4.tools.bench.attend_case import DIM, AttendCase, attend, attend_case, check_result
from dsv4.tools.bench.external.flashmla import rotate_back
from dsv4.tools.bench.external.flashmla_prefill import SparsePrefill, prefill_inputs
from dsv4.tools.bench.requests import fill_rows, manager_for, open_requests, plan_tokens
from dsv4.tools.console import track

CONTEXT, CHUNK = 131_072, 8192  # tokens of the request, and of its last chunk
CHECKED_QUERIES = 16
NUM_REPLAYS = 5


class PrefillShape(NamedTuple):
    """A type of layer; each query attends num_selected entries, with 0 all that are visible."""

    name: str
    ratio: int
    num_selected: int
    target_tflops: float


SHAPES = (PrefillShape("Flash CSA", 4, 512, 300.0), PrefillShape("Flash HCA", 128, 0, 350.0))


def bench_prefill(flashmla: SparsePrefill | None, *, device: str) -> list[dict[str, Any]]:
    """Time a chunk of each type of layer, and FlashMLA's prefill beside it if it is given."""
    shapes = track(SHAPES, "prefill chunks")
    return [_measure(shape, flashmla, device) for shape in shapes]


def _measure(shape: PrefillShape, flashmla: SparsePrefill | None, device: str) -> dict[str, Any]:
    case = prefill_case(shape, device=device)
    checked = torch.linspace(0, CHUNK - 1, CHECKED_QUERIES, device=device).long()
    check_result(case, attend(case, 0), "the output of a chunk", queries=checked)
    num_rows = count_visible(case)
    num_flops = 4 * case.query.shape[1] * num_rows * DIM
    us = timing.replay_time(lambda: attend(case, 0), num_replays=NUM_REPLAYS)
    row = {
        "layer": shape.name, "context": CONTEXT, "tokens": CHUNK, "rows": num_rows,
        "us": us, "tflops": num_flops / us / 1e6, "target_tflops": shape.target_tflops,
    }  # fmt: skip
    if flashmla is None:
        return row
    inputs = prefill_inputs(case)
    result = rotate_back(flashmla(inputs), case, is_workspace=True)
    check_result(case, result, "FlashMLA's output of a chunk", queries=checked)
    flashmla_us = timing.replay_time(lambda: flashmla(inputs), num_replays=NUM_REPLAYS)
    return row | {
        "flashmla_us": flashmla_us,
        "flashmla_tflops": num_flops / flashmla_us / 1e6,
        "ratio": us / flashmla_us,
    }


def prefill_case(shape: PrefillShape, *, device: str) -> AttendCase:
    """Plan the chunk in one layer whose rows are normal numbers."""
    config = CacheConfig.v4_flash(compress_ratios=(shape.ratio,))
    manager = manager_for(config, 1, CONTEXT, device=device, chunk=CHUNK)
    slots = open_requests(manager, 1, CONTEXT - CHUNK)
    (memory,) = manager.device_memory.memories
    for pages in (memory.window.ring, memory.window.workspace, memory.entries):
        fill_rows(pages)
    num_entries = shape.num_selected or CONTEXT // shape.ratio
    plan = plan_tokens(manager, slots, CHUNK)
    return attend_case(
        shape.name, manager, plan, num_entries=num_entries, is_selected=shape.num_selected > 0
    )


def count_visible(case: AttendCase) -> int:
    """Count the rows that all queries attend together."""
    handle = case.handles[0]
    positions = handle.positions.long()
    windows = (positions + 1).clamp(max=handle.window.window)
    entries = addressing.visible_entries(positions, handle.layer.ratio)
    return int((windows + entries.clamp(max=case.num_entries)).sum())
