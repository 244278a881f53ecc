"""The start of a program on Hopper: its operands, its shared memory, and its work items.

A work item is a token and a block of its heads, over one split of the token's rows.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4.kernels.triton.hopper.decode import (
    CHANNEL_QUARTER,
    CHANNEL_QUARTERS,
    OPERAND,
    TILE,
    VECTOR,
    RowSource,
    Stages,
    Tiles,
)


class Tokens(NamedTuple):
    """The tokens of a launch: the first one, the most entries of one, the plan's arrays."""

    first_token: gl.tensor
    num_entries: gl.tensor
    positions_ptr: gl.tensor
    request_ids_ptr: gl.tensor
    request_slots_ptr: gl.tensor


class WindowPtrs(NamedTuple):
    """Memory of the window's rows: the rings, and the workspace of chunks."""

    ring_ptr: gl.tensor
    ring_scales_ptr: gl.tensor
    ring_stride: gl.tensor
    workspace_ptr: gl.tensor
    workspace_scales_ptr: gl.tensor
    before_ptr: gl.tensor
    workspace_starts_ptr: gl.tensor


class EntryPtrs(NamedTuple):
    """Memory of the entries, pool_rows of them, the lists of selected rows, the block table."""

    entries_ptr: gl.tensor
    entries_stride: gl.tensor
    rows_ptr: gl.tensor
    rows_stride: gl.tensor
    row_stride: gl.tensor
    pool_rows: gl.tensor
    block_table_ptr: gl.tensor
    table_stride: gl.tensor


class ResultPtrs(NamedTuple):
    """Memory of the results, and of the sinks and RoPE rows that they depend on."""

    sinks_ptr: gl.tensor
    output_ptr: gl.tensor
    lse_ptr: gl.tensor
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    partials_ptr: gl.tensor
    stats_ptr: gl.tensor


class Token(NamedTuple):
    """A token's index in the batch, its request, slot, position and number of rows."""

    token_idx: gl.tensor
    request: gl.tensor
    slot: gl.tensor
    position: gl.tensor
    num_rows: gl.tensor


class OutLoc(NamedTuple):
    """The place of a work item's results."""

    token_idx: gl.tensor
    first_head: gl.tensor
    row: gl.tensor  # of the first head in the output
    part_row: gl.tensor  # the same in the partials


@gluon.jit
def make_barrier(COUNT: gl.constexpr):
    """Allocate a barrier for COUNT arrivals."""
    barrier = gl.allocate_shared_memory(gl.int64, (1,), mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=COUNT)
    return barrier


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers, each for so many ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, (COUNT, 1), mbarrier.MBarrierLayout())
    for nth in gl.static_range(COUNT):
        mbarrier.init(barriers.index(nth), count=ARRIVALS)
    return barriers


@gluon.jit
def make_memory(HEADS: gl.constexpr, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Allocate the query and the stages; READERS sides read a stage before it is filled again."""
    query, quarters = gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(CHANNEL_QUARTERS):
        query = query + (
            gl.allocate_shared_memory(gl.bfloat16, (1, HEADS, CHANNEL_QUARTER), OPERAND),
        )
        quarters = quarters + (
            gl.allocate_shared_memory(gl.bfloat16, (STAGES, TILE, CHANNEL_QUARTER), OPERAND),
        )
    biases = gl.allocate_shared_memory(gl.float32, (STAGES, TILE), VECTOR)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, READERS)
    return query, Stages(quarters, biases, full, empty)


@gluon.jit
def find_work(work, split, tokens, splits, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr,
              SPEC: gl.constexpr):  # fmt: skip
    """Find a work item's tiles, its token, and the place of its results."""
    BLOCKS: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    nth_token = work // BLOCKS
    token_idx, first_head = tokens.first_token + nth_token, work % BLOCKS * HEADS
    request = gl.load(tokens.request_ids_ptr + token_idx)
    slot = gl.load(tokens.request_slots_ptr + request).to(gl.int64)
    position = gl.load(tokens.positions_ptr + token_idx)
    num_rows = SPEC.WINDOW
    if SPEC.ENTRIES == "listed":
        num_rows += tokens.num_entries
    elif SPEC.ENTRIES == "all":
        num_rows += gl.minimum((position + 1) // SPEC.RATIO, tokens.num_entries)
    num_rows = gl.where(slot >= 0, num_rows, 0)
    first = split * splits.split_step
    end = first + splits.tiles_per_split * splits.tile_step
    end = gl.minimum(end, gl.cdiv(num_rows, TILE))
    row = token_idx.to(gl.int64) * NUM_HEADS + first_head
    part_row = (nth_token.to(gl.int64) * splits.num_splits + split) * NUM_HEADS + first_head
    tiles = Tiles(first, end, splits.tile_step)
    token = Token(token_idx, request, slot, position, num_rows)
    return tiles, token, OutLoc(token_idx, first_head, row, part_row)


@gluon.jit
def count_splits(token, splits):
    """Count the splits of a token that have rows, of those that follow each other; at least 1."""
    return gl.maximum(gl.cdiv(gl.cdiv(token.num_rows, TILE), splits.tiles_per_split), 1)


@gluon.jit
def place_rows(token, window, entries, SPEC: gl.constexpr):
    """Find the sources of a token's rows."""
    window_ptr = window.ring_ptr + token.slot * window.ring_stride
    window_scales = window.ring_scales_ptr.to(gl.int64) - window.ring_ptr.to(gl.int64)
    window_start = gl.to_tensor(0)
    in_workspace = gl.to_tensor(False)
    if SPEC.HAS_CHUNKS:
        window_start = gl.load(window.workspace_starts_ptr + token.request)
        in_workspace = window_start >= 0
        window_start += token.position - gl.load(window.before_ptr + token.request)
        window_ptr = gl.where(in_workspace, window.workspace_ptr, window_ptr)
        workspace_scales = window.workspace_scales_ptr.to(gl.int64)
        workspace_scales -= window.workspace_ptr.to(gl.int64)
        window_scales = gl.where(in_workspace, workspace_scales, window_scales)
    return RowSource(
        token.position, window_start, in_workspace, token.num_rows,
        entries.rows_ptr + token.token_idx.to(gl.int64) * entries.rows_stride, entries.row_stride,
        entries.pool_rows, entries.block_table_ptr + token.slot * entries.table_stride,
        window_ptr, window_scales.to(gl.int32), entries.entries_ptr, entries.entries_stride,
    )  # fmt: skip
