"""`dsv4 bench attend`: attention of one layer, in a step and in a chunk, by graph replay.

The chunk is the last tokens of a long request. CSA attends the window and selected
entries, HCA the window and all visible entries. Our time includes that of making rows dense;
FlashMLA's prefill kernel reads a BF16 copy that is not timed.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.config import CacheConfig
from dsv4.kernels.external.find import SparseDecode, load_flash_mla
from dsv4.kernels.reference import addressing
from dsv4.tools.bench import timing
from dsv4.tools.bench.attend_case import DIM, AttendCase, attend, attend_case, check_result
from dsv4.tools.bench.environment import load_external, require_cuda
from dsv4.tools.bench.external import flashmla
from dsv4.tools.bench.external.flashmla import SparsePrefill, load_flash_mla_prefill
from dsv4.tools.bench.requests import fill_rows, manager_for, open_requests, plan_tokens
from dsv4.tools.console import track

DEVICE = "cuda"
NUM_LAYERS = 8  # rotating pools: more than the L2 of any GPU holds
BATCHES = (1, 8, 32, 64, 128, 256)
BF16_BYTES = 2
CONTEXT, CHUNK = 131_072, 8192  # tokens of the request, and of its last chunk
CHECKED_QUERIES = 16  # of a chunk
NUM_REPLAYS = 5  # of a chunk


def v41_layers(*, compress_ratios: tuple[int, ...], **choices: Any) -> CacheConfig:
    """Layers of V4.1-Flash that own all that they read."""
    own = tuple(range(len(compress_ratios)))
    return CacheConfig.v41_flash(
        compress_ratios=compress_ratios, kv_source_layer_ids=own, index_source_layer_ids=own,
        candidate_source_layer_id=-1, **choices,
    )  # fmt: skip


class AttendShape(NamedTuple):
    """A model's layer: requests of `length` tokens attend `num_entries` entries each.

    A step has num_tokens of each request, all but one of them drafts. Targets by batch are
    rotating us, and times a step of FLASH; invariant_target is times the default's time.
    """

    name: str
    preset: Callable[..., CacheConfig]
    ratio: int
    heads: int
    length: int
    num_entries: int
    batches: tuple[int, ...] = BATCHES
    num_tokens: int = 1
    targets_us: Mapping[int, float] = {}
    of_flash_targets: Mapping[int, float] = {}
    invariant_target: float | None = None


FLASH, V41 = "Flash CSA", "V4.1-Flash"  # 128 + 512 rows of 64 heads in each
SHAPES = (
    AttendShape(FLASH, CacheConfig.v4_flash, 4, 64, 4096, 512,
                targets_us={1: 7.5, 128: 39.0, 256: 75.0}, invariant_target=1.25),
    AttendShape(f"{FLASH}, 4 tokens each", CacheConfig.v4_flash, 4, 64, 4096, 512, (8, 32), 4,
                of_flash_targets={32: 2.5}),
    AttendShape("Flash CSA, 8 heads", CacheConfig.v4_flash, 4, 8, 4096, 512),
    AttendShape("Pro CSA", CacheConfig.v4_pro, 4, 128, 8192, 1024,
                targets_us={128: 110.0}, invariant_target=1.25),
    AttendShape("Flash HCA at 32K", CacheConfig.v4_flash, 128, 64, 1 << 15, 256, (1,),
                targets_us={1: 6.5}),
    AttendShape("Flash HCA at 1M", CacheConfig.v4_flash, 128, 64, 1 << 20, 8192, (1, 8, 32, 64),
                targets_us={1: 15.0, 64: 190.0}, invariant_target=1.5),
    AttendShape("Flash SWA", CacheConfig.v4_flash, 0, 64, 200, 0,
                targets_us={1: 6.0}, invariant_target=1.25),
    AttendShape(V41, v41_layers, 2, 64, 2048, 512,
                of_flash_targets={1: 1.0, 32: 1.0, 128: 0.95, 256: 0.95}),
)  # fmt: skip


class PrefillShape(NamedTuple):
    """A model's layer; each query attends num_selected entries, with 0 all that are visible."""

    name: str
    preset: Callable[..., CacheConfig]
    ratio: int
    num_selected: int
    target_tflops: float


PREFILL_SHAPES = (
    PrefillShape("Flash CSA", CacheConfig.v4_flash, 4, 512, 490.0),
    PrefillShape("Flash HCA", CacheConfig.v4_flash, 128, 0, 530.0),
    PrefillShape("Pro CSA", CacheConfig.v4_pro, 4, 1024, 480.0),
)


def bench_attend(*, compare: bool) -> dict[str, Any]:
    """Time steps, one layer warm and 8 layers rotating; then a prefill chunk.

    `compare` times FlashMLA too, on the same queries: its decode on the same bytes, its prefill
    on a dense copy.
    """
    require_cuda("attend")
    (decode, prefill), peers = load_external(
        compare, {"FlashMLA": load_flash_mla, "FlashMLA's prefill": load_flash_mla_prefill}
    )
    total = sum(len(shape.batches) for shape in SHAPES)
    rows = list(track(_measure_steps(decode), "decode steps", total=total))
    shapes = track(PREFILL_SHAPES, "prefill chunks")
    return {"rows": rows, "prefill": [_measure_prefill(each, prefill) for each in shapes], **peers}


def _measure_steps(decode: SparseDecode | None) -> Iterator[dict[str, Any]]:
    flash_us: dict[int, float] = {}  # by batch
    for shape in SHAPES:
        manager, slots = _filled_manager(shape)
        for batch in shape.batches:
            case = attend_case(
                shape.name, manager, plan_tokens(manager, slots[:batch], shape.num_tokens),
                num_entries=shape.num_entries, is_selected=0 < shape.ratio < 128,
            )  # fmt: skip
            for batch_invariant in (False, True):
                check_result(case, attend(case, 0, batch_invariant=batch_invariant), "the output")
            row = _measure(case, batch)
            row |= timing.judge(row["rotating_us"], shape.targets_us.get(batch))
            row |= timing.judge(row["invariant_ratio"], shape.invariant_target, "invariant_")
            if shape.name == FLASH:
                flash_us[batch] = row["rotating_us"]
            if shape.of_flash_targets:
                row["of_flash"] = row["rotating_us"] / flash_us[batch]
                target = shape.of_flash_targets.get(batch)
                row |= timing.judge(row["of_flash"], target, "of_flash_")
            if decode is not None and shape.name != V41:
                row |= _measure_flashmla(case, decode, row)
            yield row
        del manager, case


def _measure_flashmla(
    case: AttendCase, decode: SparseDecode, ours: dict[str, Any]
) -> dict[str, Any]:
    run = flashmla.decode_calls(decode, case)
    check_result(case, flashmla.rotate_back(run(0), case, is_workspace=False), "FlashMLA's output")
    rotating = timing.time_rotating(run, len(case.handles))
    warm = {"flashmla_warm_us": timing.time_warm(run)}
    return warm | timing.beside(ours["rotating_us"], "flashmla_us", rotating)


def _measure(case: AttendCase, batch: int) -> dict[str, Any]:
    heads, handle, num_queries = case.query.shape[1], case.handles[0], len(case.query)
    window, config = handle.window.window, handle.config
    num_rows = num_queries * (window + case.num_entries)
    num_bytes = num_queries * (
        window * config.kv_row.row_bytes + case.num_entries * config.entry_row.row_bytes
        + 2 * heads * DIM * BF16_BYTES
    )  # fmt: skip
    times = timing.time_layers(partial(attend, case), len(case.handles), num_bytes)
    invariant = partial(attend, case, batch_invariant=True)
    invariant_us = timing.time_rotating(invariant, len(case.handles))
    return {
        "layer": case.name, "batch": batch, **times, "invariant_us": invariant_us,
        "invariant_ratio": invariant_us / times["rotating_us"],
        "tflops": 4 * heads * num_rows * DIM / times["rotating_us"] / 1e6,
    }  # fmt: skip


def _filled_manager(shape: AttendShape) -> tuple[KVCacheManager, list[int]]:
    """Open requests a few tokens short of the shape's length, and fill all rows."""
    config = shape.preset(
        compress_ratios=(shape.ratio,) * NUM_LAYERS, num_query_heads=shape.heads,
        drafts_per_step=shape.num_tokens - 1,
    )  # fmt: skip
    most = max(shape.batches)
    manager = manager_for(config, most, shape.length, device=DEVICE)
    # Each case extends its requests.
    length = shape.length - shape.num_tokens * len(shape.batches)
    slots = open_requests(manager, [length] * most)
    for memory in manager.device_memory.memories:
        fill_rows(memory.window.ring)
        fill_rows(memory.entries)
    return manager, slots


def _measure_prefill(shape: PrefillShape, prefill: SparsePrefill | None) -> dict[str, Any]:
    """Time a chunk, and FlashMLA's prefill beside it if it is given."""
    case = prefill_case(shape, device=DEVICE)
    checked = torch.linspace(0, CHUNK - 1, CHECKED_QUERIES, device=DEVICE).long()
    check_result(case, attend(case, 0), "the output of a chunk", queries=checked)
    num_rows = count_visible(case)
    num_flops = 4 * case.query.shape[1] * num_rows * DIM
    us = timing.replay_time(lambda: attend(case, 0), num_replays=NUM_REPLAYS)
    row: dict[str, Any] = {
        "layer": shape.name, "context": CONTEXT, "tokens": CHUNK, "rows": num_rows,
        "us": us, "tflops": num_flops / us / 1e6,
    }  # fmt: skip
    row |= timing.judge(row["tflops"], shape.target_tflops, is_least=True)
    if prefill is None:
        return row
    run = flashmla.checked_prefill(prefill, case, checked)
    flashmla_us = timing.replay_time(run, num_replays=NUM_REPLAYS)
    row["flashmla_tflops"] = num_flops / flashmla_us / 1e6
    return row | timing.beside(us, "flashmla_us", flashmla_us)


def prefill_case(shape: PrefillShape, *, device: str) -> AttendCase:
    """Plan the chunk in one layer whose rows are normal numbers."""
    config = shape.preset(compress_ratios=(shape.ratio,))
    manager = manager_for(config, 1, CONTEXT, device=device, chunk=CHUNK)
    slots = open_requests(manager, [CONTEXT - CHUNK])
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
