"""Attention over fp8 rows on Hopper. The contract is `kernels.triton.attention._attend_kernel`'s.

A program takes a token and a block of its heads and goes over the token's rows in tiles of 64, the
window first. Half of its warps decode tiles into stages in shared memory (`gluon.decode`); the
others multiply, and keep the softmax (`gluon.many_heads`, `gluon.few_heads`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.gluon.decode import (
    DECODING_WARPS,
    DIM,
    OPERAND,
    PART,
    PARTS,
    TILE,
    VECTOR,
    decode_tiles,
)
from dsv4.kernels.gluon.few_heads import multiply_few
from dsv4.kernels.gluon.many_heads import EXCHANGED, multiply_many
from dsv4.kernels.gluon.softmax import DENSE, load_query


class Cut(NamedTuple):
    """Stages that fit shared memory, and registers of a thread that decodes or multiplies."""

    STAGES: int
    DECODING_REGISTERS: int
    MULTIPLYING_REGISTERS: int


# By heads of a program.
CUTS = {16: Cut(3, 128, 128), 64: Cut(2, 64, 192)}


@gluon.jit
def make_barrier(COUNT: gl.constexpr):
    """A barrier for so many arrivals."""
    barrier = gl.allocate_shared_memory(gl.int64, (1,), mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def memory_between(HEADS: gl.constexpr):
    """What the sides share: logits on their way with two barriers, or a memory for each side."""
    if HEADS == 64:
        exchanged = gl.allocate_shared_memory(gl.float32, (2, HEADS, TILE), EXCHANGED)
        return exchanged, make_barrier(2), make_barrier(2)
    else:
        return side_memory(HEADS), side_memory(HEADS)


@gluon.jit
def side_memory(HEADS: gl.constexpr):
    """For a side of few heads: weights of a tile; the largest logits and sums that it ends with."""
    weights = gl.allocate_shared_memory(gl.bfloat16, (HEADS, TILE), OPERAND)
    largest = gl.allocate_shared_memory(gl.float32, (HEADS,), VECTOR)
    total = gl.allocate_shared_memory(gl.float32, (HEADS,), VECTOR)
    return weights, largest, total


@gluon.jit
def multiply(tiles, memory, query, barriers, between, scale, results, NUM_HEADS: gl.constexpr,
             STAGES: gl.constexpr, IS_SPLIT: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """A side's work, as it is shared for so many heads."""
    HEADS: gl.constexpr = query[0].shape[1]
    if HEADS == 64:
        multiply_many(tiles, memory, query, barriers[0], between, scale, results, NUM_HEADS,
                      STAGES, IS_SPLIT, SIDE)  # fmt: skip
    else:
        multiply_few(tiles, memory, query, barriers, between, scale, results, NUM_HEADS, STAGES,
                     IS_SPLIT, SIDE)  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "rows_stride", "row_stride", "num_entries", "table_stride", "first_token", "num_splits",
        "split_step", "tile_step", "tiles_per_split",
    ],
    do_not_specialize_on_alignment=[
        "sinks_ptr", "rows_ptr", "positions_ptr", "request_ids_ptr", "request_slots_ptr",
        "before_ptr", "after_ptr", "starts_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _attend_kernel(
    query_ptr, sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, scale,
    ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
    entries_ptr, entries_scales_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
    num_entries, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
    starts_ptr, block_table_ptr, table_stride,
    first_token, num_splits, split_step, tile_step, tiles_per_split,
    ENTRIES: gl.constexpr, NUM_HEADS: gl.constexpr, RING_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr, RATIO: gl.constexpr, WINDOW: gl.constexpr,
    HAS_CHUNKS: gl.constexpr, IS_SPLIT: gl.constexpr, HEADS: gl.constexpr,
    STAGES: gl.constexpr, DECODING_REGISTERS: gl.constexpr,
    MULTIPLYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """A token and HEADS of its heads over one split of its rows."""
    gdc_wait()
    BLOCKS: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    nth = gl.program_id(0) // BLOCKS
    first_head = gl.program_id(0) % BLOCKS * HEADS
    token, split = first_token + nth, gl.program_id(1)
    request = gl.load(request_ids_ptr + token)
    slot = gl.load(request_slots_ptr + request).to(gl.int64)
    position = gl.load(positions_ptr + token)
    num_rows = WINDOW
    if ENTRIES == "listed":
        num_rows += num_entries
    elif ENTRIES == "all":
        num_rows += gl.minimum((position + 1) // RATIO, num_entries)
    num_rows = gl.where(slot >= 0, num_rows, 0)
    first = split * split_step
    end = gl.minimum(first + tiles_per_split * tile_step, gl.cdiv(num_rows, TILE))

    query, parts = gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(PARTS):
        query = query + (gl.allocate_shared_memory(gl.bfloat16, (1, HEADS, PART), OPERAND),)
        parts = parts + (gl.allocate_shared_memory(gl.bfloat16, (STAGES, TILE, PART), OPERAND),)
    biases = gl.allocate_shared_memory(gl.float32, (STAGES, TILE), VECTOR)
    query_row = token.to(gl.int64) * NUM_HEADS + first_head
    is_head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, DENSE)) < NUM_HEADS
    load_query(query, query_ptr + query_row * DIM, is_head)

    window_ptr = ring_ptr + slot * ring_stride
    window_scales = ring_scales_ptr.to(gl.int64) - ring_ptr.to(gl.int64)
    window_start = gl.to_tensor(0)
    in_workspace = gl.to_tensor(False)
    if HAS_CHUNKS:
        window_start = gl.load(starts_ptr + request)
        in_workspace = window_start >= 0
        window_start += position - gl.load(before_ptr + request)
        window_ptr = gl.where(in_workspace, workspace_ptr, window_ptr)
        workspace_scales = workspace_scales_ptr.to(gl.int64) - workspace_ptr.to(gl.int64)
        window_scales = gl.where(in_workspace, workspace_scales, window_scales)
    where = (position, window_start, in_workspace, num_rows,
             rows_ptr + token.to(gl.int64) * rows_stride, row_stride,
             block_table_ptr + slot * table_stride)  # fmt: skip
    bases = window_ptr, window_scales.to(gl.int32), entries_ptr, entries_stride

    full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 if HEADS == 64 else 1)
    tiles = first, end, tile_step
    memory = parts, biases, full, empty
    results = (sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr,
               position, first_head, query_row,
               (nth.to(gl.int64) * num_splits + split) * NUM_HEADS + first_head)  # fmt: skip
    barriers = make_barrier(1), make_barrier(2)
    between = memory_between(HEADS)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply, (tiles, memory, query, barriers, between, scale, results, NUM_HEADS, STAGES,
                        IS_SPLIT, 0)),
            (multiply, (tiles, memory, query, barriers, between, scale, results, NUM_HEADS, STAGES,
                        IS_SPLIT, 1)),
            (decode_tiles, (tiles, memory, where, bases, ENTRIES, WINDOW, RING_ROWS, ENTRY_ROWS,
                            STAGES, DECODING_REGISTERS >= 128)),
        ],
        [4, DECODING_WARPS],
        [MULTIPLYING_REGISTERS, DECODING_REGISTERS],
    )  # fmt: skip
