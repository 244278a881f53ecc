"""What a program on Hopper begins with: its memory, and what it works on.

A work is a token and a block of its heads, over one split of the token's rows.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4.kernels.triton.hopper.decode import OPERAND, PART, PARTS, TILE, VECTOR


class Cut(NamedTuple):
    """Stages that fit shared memory, and registers of a thread that decodes or multiplies."""

    STAGES: int
    DECODING_REGISTERS: int
    MULTIPLYING_REGISTERS: int


@gluon.jit
def make_barrier(COUNT: gl.constexpr):
    """A barrier for so many arrivals."""
    barrier = gl.allocate_shared_memory(gl.int64, (1,), mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def make_memory(HEADS: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Memory for the query, and for the stages, which so many read before they are filled again."""
    query, parts = gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(PARTS):
        query = query + (gl.allocate_shared_memory(gl.bfloat16, (1, HEADS, PART), OPERAND),)
        parts = parts + (gl.allocate_shared_memory(gl.bfloat16, (STAGES, TILE, PART), OPERAND),)
    biases = gl.allocate_shared_memory(gl.float32, (STAGES, TILE), VECTOR)
    full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return query, (parts, biases, full, empty)


@gluon.jit
def find_work(work, tokens, splits, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
              ENTRIES: gl.constexpr, WINDOW: gl.constexpr, RATIO: gl.constexpr):  # fmt: skip
    """A work's tiles, as first, end and step; its token; and where its results go.

    The token is its number, request, slot, position and number of rows. Results are at a position,
    from a head on, at a row of all heads and one of partial results.
    """
    first_token, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr = tokens
    num_splits, split_step, tile_step, tiles_per_split = splits
    BLOCKS: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    nth, split = work // BLOCKS, gl.program_id(1)
    token, first_head = first_token + nth, work % BLOCKS * HEADS
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
    row = token.to(gl.int64) * NUM_HEADS + first_head
    part = (nth.to(gl.int64) * num_splits + split) * NUM_HEADS + first_head
    tiles = first, end, tile_step
    return tiles, (token, request, slot, position, num_rows), (position, first_head, row, part)


@gluon.jit
def place_rows(token, window, entries, HAS_CHUNKS: gl.constexpr):
    """What tells where a token's rows are, and the pointers that it counts from."""
    (ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr, before_ptr,
     starts_ptr) = window  # fmt: skip
    (entries_ptr, entries_stride, rows_ptr, rows_stride, row_stride, block_table_ptr,
     table_stride) = entries  # fmt: skip
    token, request, slot, position, num_rows = token
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
    return where, (window_ptr, window_scales.to(gl.int32), entries_ptr, entries_stride)
