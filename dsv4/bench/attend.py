"""`dsv4 bench attend`: attention of one layer in a decode step, by graph replay."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.bench.compare import FlashMLACalls, load_peer
from dsv4.bench.environment import environment
from dsv4.bench.write import COPY_BANDWIDTH, replay_time
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.formats import PagedRows
from dsv4.kernels import AttentionResult, load_backend
from dsv4.kernels.peers.find import SparseDecode, load_flash_mla
from dsv4.kernels.reference.codec import encode, write_rows

DEVICE = "cuda"
NUM_LAYERS = 8  # pools to rotate over: more than an L2 of any GPU holds
BATCHES = (1, 8, 32, 64, 128, 256)
CHUNK = 8192  # tokens of a plan that brings requests to their length
ENCODED_AT_ONCE = 1 << 16
ROW_BYTES, DIM, BF16_BYTES = 584, 512, 2
LARGEST_ERROR = 2.0**-7  # of the output's norm: weights and output are rounded to BF16
REPEATS = 20


class AttendShape(NamedTuple):
    """A model's layer: requests of `length` tokens attend `num_entries` entries each."""

    name: str
    preset: Callable[..., CacheConfig]
    ratio: int
    heads: int
    length: int
    num_entries: int
    batches: tuple[int, ...] = BATCHES


SHAPES = (
    AttendShape("Flash CSA", CacheConfig.v4_flash, 4, 64, 4096, 512),
    AttendShape("Flash CSA, 8 heads", CacheConfig.v4_flash, 4, 8, 4096, 512),
    AttendShape("Pro CSA", CacheConfig.v4_pro, 4, 128, 8192, 1024),
    AttendShape("Flash HCA at 1M", CacheConfig.v4_flash, 128, 64, 1 << 20, 8192, (1, 8, 32, 64)),
    AttendShape("Flash SWA", CacheConfig.v4_flash, 0, 64, 200, 0),
)


class AttendCase(NamedTuple):
    """One step of a batch, with queries, and selected rows where there are any, by layer."""

    shape: AttendShape
    handles: list[LayerCacheHandle]
    query: Tensor
    sinks: Tensor
    rows: list[Tensor | None]


def bench_attend(*, compare: bool = False) -> dict[str, Any]:
    """Microseconds: the same layer again and again, and 8 layers in turn.

    With `compare` FlashMLA's beside them, on the same queries and bytes, where it can be had.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("dsv4 bench attend needs a CUDA device, and there is none")
    decode, problem = load_peer(load_flash_mla) if compare else (None, "")
    results = []
    for shape in SHAPES:
        manager, slots = _filled_manager(shape)
        for batch in shape.batches:
            case = _case(shape, manager, slots[:batch])
            _check_output(case)
            row = _measure(case, batch)
            if decode is not None:
                row |= _measure_flashmla(case, flashmla_calls(case, decode), row)
            results.append(row)
        del manager, case
    peers = {"peers": {"FlashMLA": problem or "compared"}} if compare else {}
    return {"bench": "attend", "rows": results, **peers, "environment": environment()}


def flashmla_calls(case: AttendCase, decode: SparseDecode) -> FlashMLACalls:
    """FlashMLA's calls of a case."""
    return FlashMLACalls(
        decode, case.handles, case.query, case.sinks, case.rows,
        max_entries=case.shape.num_entries,
    )  # fmt: skip


def _measure_flashmla(
    case: AttendCase, calls: FlashMLACalls, ours: dict[str, Any]
) -> dict[str, Any]:
    check_result(case, calls.result(0), "FlashMLA's output")

    def same_layer() -> None:
        for _ in range(REPEATS):
            calls.run(0)

    def in_turn() -> None:
        for layer_idx in range(len(case.handles)):
            calls.run(layer_idx)

    rotating = replay_time(in_turn) / len(case.handles)
    return {
        "flashmla_warm_us": replay_time(same_layer) / REPEATS,
        "flashmla_us": rotating,
        "ratio": ours["rotating_us"] / rotating,
    }


def _measure(case: AttendCase, batch: int) -> dict[str, Any]:
    def same_layer() -> None:
        for _ in range(REPEATS):
            _attend(case, 0)

    def in_turn(*, batch_invariant: bool) -> Callable[[], None]:
        def step() -> None:
            for layer_idx in range(len(case.handles)):
                _attend(case, layer_idx, batch_invariant=batch_invariant)

        return step

    num_layers, heads = len(case.handles), case.shape.heads
    num_rows = batch * (case.handles[0].window.window + case.shape.num_entries)
    num_bytes = num_rows * ROW_BYTES + batch * 2 * heads * DIM * BF16_BYTES
    rotating = replay_time(in_turn(batch_invariant=False)) / num_layers
    return {
        "layer": case.shape.name,
        "batch": batch,
        "warm_us": replay_time(same_layer) / REPEATS,
        "rotating_us": rotating,
        "invariant_us": replay_time(in_turn(batch_invariant=True)) / num_layers,
        "tflops": 4 * heads * num_rows * DIM / rotating / 1e6,
        "floor_us": num_bytes / COPY_BANDWIDTH * 1e6,
    }


def _filled_manager(shape: AttendShape) -> tuple[KVCacheManager, list[int]]:
    """Requests a few tokens short of the shape's length, and rows of normal numbers."""
    config = shape.preset(compress_ratios=(shape.ratio,) * NUM_LAYERS, num_query_heads=shape.heads)
    most = max(shape.batches)
    manager = KVCacheManager(
        config, max_requests=most, num_blocks=most * -(-shape.length // config.block_tokens),
        device=DEVICE, max_forward_tokens=CHUNK, max_request_tokens=shape.length,
    )  # fmt: skip
    slots = [manager.open_request() for _ in range(most)]
    length = shape.length - len(shape.batches)  # each case takes its requests a token further
    for slot in slots:
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            prepare_forward(manager, [slot], [start], [end]).complete()
    for memory in manager.memories:
        for pages in (memory.window.ring, memory.entries):
            if pages is not None:
                _fill(pages)
    return manager, slots


def _fill(pages: PagedRows) -> None:
    num_rows = pages.data.shape[0] * pages.rows_per_page
    for start in range(0, num_rows, ENCODED_AT_ONCE):
        rows = torch.arange(start, min(start + ENCODED_AT_ONCE, num_rows), device=DEVICE)
        write_rows(pages, rows, encode(pages.format, torch.randn(len(rows), DIM, device=DEVICE)))


def _case(shape: AttendShape, manager: KVCacheManager, slots: list[int]) -> AttendCase:
    """One more token of each request."""
    batch, before = len(slots), [int(manager.lengths[slot]) for slot in slots]
    plan = prepare_forward(manager, slots, before, [length + 1 for length in before])
    plan.complete()
    handles = [manager.acquire(layer_idx, plan) for layer_idx in range(NUM_LAYERS)]
    query = torch.randn(batch, shape.heads, DIM, device=DEVICE, dtype=torch.bfloat16)
    rows: list[Tensor | None] = [None] * NUM_LAYERS
    if shape.ratio == 4:
        num_rows = batch * (shape.length // 4)
        listed = (batch, shape.num_entries)
        rows = [torch.randint(num_rows, listed, device=DEVICE) for _ in handles]
    return AttendCase(shape, handles, query, torch.zeros(shape.heads, device=DEVICE), rows)


def _attend(
    case: AttendCase, layer_idx: int, *, backend: str = "triton", batch_invariant: bool = False
) -> AttentionResult:
    handle = case.handles[layer_idx]
    return load_backend(backend).attend(
        case.query, case.sinks, handle.memory, case.rows[layer_idx], handle.tokens, handle.rope,
        max_entries=case.shape.num_entries, batch_invariant=batch_invariant,
    )  # fmt: skip


def _check_output(case: AttendCase) -> None:
    """Refuse to time kernels that are further from the reference than their precision is."""
    for batch_invariant in (False, True):
        check_result(case, _attend(case, 0, batch_invariant=batch_invariant), "the output")


def check_result(case: AttendCase, got: AttentionResult, what: str) -> None:
    """Refuse a result of the first layer that is not the reference's."""
    expected = _attend(case, 0, backend="reference")
    error = (got.output.float() - expected.output.float()).norm()
    is_close = error <= LARGEST_ERROR * expected.output.float().norm()
    if not is_close or not torch.allclose(got.lse, expected.lse, rtol=0, atol=1e-3):
        raise RuntimeError(
            f"{case.shape.name}: {what} differs from the reference's; nothing is timed"
        )
