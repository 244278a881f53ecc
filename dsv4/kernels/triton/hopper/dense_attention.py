"""Attention of a chunk over dense BF16 rows on Hopper, in place of `_attend_chunk_kernel`.

`kernels.triton.dense_rows` makes the rows and launches it.

A program takes one work item (`hopper.program`) after another: a token and 64 of its heads. Four
warps copy tiles of 64 rows to shared memory, a pointer a row. Two groups of warps, the sides, each
have one half of the output's channels. Tiles come in pairs, and each side computes logits and
weights of one of them. The other side reads those weights from shared memory. So the softmax of
one side runs beside the products of the other.

Accumulators shrink from tile to tile, in order, as the largest logit grows. So both sides do the
same to their halves.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.triton.hopper.decode import DIM, OPERAND, TILE, VECTOR
from dsv4.kernels.triton.hopper.many_heads import HEAD_ROWS, HEADS, LOGITS
from dsv4.kernels.triton.hopper.program import EntryPtrs, Tokens, find_work, make_barriers
from dsv4.kernels.triton.hopper.query import load_query_turn, prepare_in_place
from dsv4.kernels.triton.hopper.softmax import finite_base, log_sum_exp, output_factor, rotate_back
from dsv4.kernels.triton.launch import ATTEND_UNALIGNED
from dsv4.kernels.triton.operands import Splits

HALF = gl.constexpr(256)  # channels of a side
PIECE = gl.constexpr(64)  # channels stored at once
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY.value))
COPY_THREADS = gl.constexpr(128)
FIND = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a row a thread, for look-ups


class Shared(NamedTuple):
    """Shared memory. Tile 0 of a pair is in stage 0, and its logits are side 0's.

    weights, shrinks, largest and totals are what the sides tell each other.
    """

    query: gl.tuple  # one half of the channels each
    rows: gl.tuple  # [2, TILE, HALF], likewise
    biases: gl.shared_memory_descriptor  # [2, TILE], added to logits: 0, or -inf without a row
    weights: gl.shared_memory_descriptor  # [2, HEADS, TILE]
    shrinks: gl.shared_memory_descriptor  # [2, HEADS]
    largest: gl.shared_memory_descriptor  # [2, HEADS]
    totals: gl.shared_memory_descriptor  # [2, HEADS]
    pieces: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor  # of a stage and half, [2 × stage + half]
    is_weighed: gl.shared_memory_descriptor
    is_summed: gl.shared_memory_descriptor
    has_query: gl.shared_memory_descriptor
    is_raw_copied: gl.shared_memory_descriptor


class DenseRows(NamedTuple):
    """Rows of the forward's chunks: the window workspace's, then each chunk's entries."""

    entries: EntryPtrs  # the dense rows; their stride is from one chunk's entries to the next's
    first_entry: gl.tensor  # of the first chunk
    columns_ptr: gl.tensor  # by chunk and block, the block's column in the table, if it is there
    num_blocks: gl.tensor
    chunk_ids_ptr: gl.tensor
    after_ptr: gl.tensor
    before_ptr: gl.tensor
    starts_ptr: gl.tensor
    left_ptr: gl.tensor


class Source(NamedTuple):
    """Sources of a token's rows, see `DenseRows`."""

    position: gl.tensor
    num_rows: gl.tensor
    start: gl.tensor  # first row of its window
    first_entry: gl.tensor
    count: gl.tensor  # dense entries of its request
    list_ptr: gl.tensor
    columns_ptr: gl.tensor
    table_ptr: gl.tensor


@gluon.jit
def make_shared():
    """Allocate the shared memory."""
    query, rows = gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(2):
        query = query + (gl.allocate_shared_memory(gl.bfloat16, (1, HEADS, HALF), OPERAND),)
        rows = rows + (gl.allocate_shared_memory(gl.bfloat16, (2, TILE, HALF), OPERAND),)
    return Shared(
        query, rows,
        gl.allocate_shared_memory(gl.float32, (2, TILE), VECTOR),
        gl.allocate_shared_memory(gl.bfloat16, (2, HEADS, TILE), OPERAND),
        gl.allocate_shared_memory(gl.float32, (2, HEADS), VECTOR),
        gl.allocate_shared_memory(gl.float32, (2, HEADS), VECTOR),
        gl.allocate_shared_memory(gl.float32, (2, HEADS), VECTOR),
        gl.allocate_shared_memory(gl.bfloat16, (2, HEADS, PIECE), OPERAND),
        make_barriers(2, COPY_THREADS + 1), make_barriers(4, 1), make_barriers(2, 1),
        make_barriers(1, 2), make_barriers(1, 1), make_barriers(1, 1),
    )  # fmt: skip


@gluon.jit
def start_logits(shared, pair, SIDE: gl.constexpr):
    """Start the product of the queries and a side's tile of a pair."""
    mbarrier.wait(shared.full.index(SIDE), pair % 2)
    fence_async_shared()  # copies of threads are not yet seen by products
    zero = pair >> 24  # at runtime: constants would keep descriptor addresses in registers
    pending = gl.zeros((HEADS, TILE), gl.float32, layout=LOGITS)
    pending += shared.biases.index(SIDE).load(gl.SliceLayout(0, LOGITS))[None, :]
    for half in gl.static_range(2):
        keys = shared.rows[half].index(SIDE + zero).permute((1, 0))
        pending = warpgroup_mma(shared.query[half].index(zero), keys, pending, is_async=True)
    return pending


@gluon.jit
def shrink_rows(values, factor):
    """Multiply accumulators by a factor a head."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
    return values * factor[:, None]


@gluon.jit
def weigh(logits, largest, total, scale, shared, SIDE: gl.constexpr):
    """Weights of a side's tile, and the factor of what was summed before; tell the other side."""
    new_largest = gl.maximum(largest, gl.max(logits, axis=1) * scale)  # [HEADS]
    base = finite_base(new_largest)
    shrink = gl.exp2(largest - base)
    weights = gl.exp2(logits * scale - base[:, None])  # [HEADS, TILE]
    rounded = weights.to(gl.bfloat16)
    shared.weights.index(SIDE).store(rounded)
    shared.shrinks.index(SIDE).store(shrink)
    shared.largest.index(SIDE).store(new_largest)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(shared.is_weighed.index(SIDE), count=1)
    total = total * shrink + gl.sum(weights, axis=1)
    own = gl.convert_layout(rounded, WEIGHTS, assert_trivial=True)
    return own, shrink, new_largest, total


@gluon.jit
def add_own(acc, weights, shrink, shared, SIDE: gl.constexpr):
    """Start the product of a side's weights and its half of their tile."""
    acc = shrink_rows(acc, shrink)
    return warpgroup_mma(weights, shared.rows[SIDE].index(SIDE), acc, is_async=True)


@gluon.jit
def add_other(acc, total, pair, shared, SIDE: gl.constexpr):
    """Start the product of the other side's weights and this side's half of their tile."""
    OTHER: gl.constexpr = 1 - SIDE
    mbarrier.wait(shared.is_weighed.index(OTHER), pair % 2)
    shrink = shared.shrinks.index(OTHER).load(HEAD_ROWS)
    largest = shared.largest.index(OTHER).load(HEAD_ROWS)
    acc = shrink_rows(acc, shrink)
    zero = pair >> 24
    weights, values = shared.weights.index(OTHER + zero), shared.rows[SIDE].index(OTHER + zero)
    pending = warpgroup_mma(weights, values, acc, is_async=True)
    return pending, largest, total * shrink


@gluon.jit
def release(shared, STAGE: gl.constexpr, SIDE: gl.constexpr):
    """Let a side's half of a stage be filled again."""
    gl.thread_barrier()
    mbarrier.arrive(shared.empty.index(2 * STAGE + SIDE), count=1)


@gluon.jit
def multiply_left(acc, largest, total, pair, num_pairs, scale, shared):
    """Side 0 of pairs: the next pair's logits start behind the last product of this one.

    `pair` pairs came before, of all work items; this is returned for the next one.
    """
    logits = warpgroup_mma_wait(0, deps=[start_logits(shared, pair, 0)])
    for _ in range(1, num_pairs):
        weights, shrink, _largest, total = weigh(logits, largest, total, scale, shared, 0)
        acc = warpgroup_mma_wait(0, deps=[add_own(acc, weights, shrink, shared, 0)])
        release(shared, 0, 0)
        pending, largest, total = add_other(acc, total, pair, shared, 0)
        next_logits = start_logits(shared, pair + 1, 0)
        acc, next_logits = warpgroup_mma_wait(2, deps=[pending, next_logits])
        release(shared, 1, 0)
        logits = warpgroup_mma_wait(0, deps=[next_logits])
        pair += 1
    weights, shrink, _largest, total = weigh(logits, largest, total, scale, shared, 0)
    acc = warpgroup_mma_wait(0, deps=[add_own(acc, weights, shrink, shared, 0)])
    release(shared, 0, 0)
    pending, largest, total = add_other(acc, total, pair, shared, 0)
    acc = warpgroup_mma_wait(0, deps=[pending])
    release(shared, 1, 0)
    return acc, largest, total, pair + 1


@gluon.jit
def multiply_right(acc, largest, total, pair, num_pairs, scale, shared):
    """Side 1 of pairs: its softmax runs beside its product of the other side's weights."""
    for _ in range(num_pairs):
        logits = start_logits(shared, pair, 1)
        pending, largest, total = add_other(acc, total, pair, shared, 1)
        logits, pending = warpgroup_mma_wait(1, deps=[logits, pending])
        weights, shrink, largest, total = weigh(logits, largest, total, scale, shared, 1)
        acc = warpgroup_mma_wait(0, deps=[pending])
        release(shared, 0, 1)
        acc = warpgroup_mma_wait(0, deps=[add_own(acc, weights, shrink, shared, 1)])
        release(shared, 1, 1)
        pair += 1
    return acc, largest, total, pair


@gluon.jit
def store_output(acc, largest, total, nth_work, output_desc, results, shared, out_loc,
                 SIDE: gl.constexpr):  # fmt: skip
    """Add the sides' sums, and store a side's half of the output."""
    sinks_ptr, lse_ptr, cos_ptr, sin_ptr = results
    shared.totals.index(SIDE).store(total)
    gl.thread_barrier()
    mbarrier.arrive(shared.is_summed.index(0), count=1)
    head = gl.arange(0, HEADS, layout=HEAD_ROWS)
    sink = gl.load(sinks_ptr + out_loc.first_head + head)
    mbarrier.wait(shared.is_summed.index(0), nth_work % 2)
    total += shared.totals.index(1 - SIDE).load(HEAD_ROWS)
    if SIDE == 0:
        gl.store(lse_ptr + out_loc.row + head, log_sum_exp(largest, total))
    acc = shrink_rows(acc, output_factor(sink, largest, total))
    halves = gl.split(gl.permute(gl.reshape(acc, (HEADS, 2, 2 * PIECE)), (0, 2, 1)))
    piece = shared.pieces.index(SIDE)
    for half in gl.static_range(2):
        both = gl.split(gl.permute(gl.reshape(halves[half], (HEADS, 2, PIECE)), (0, 2, 1)))
        for nth in gl.static_range(2):
            values, at = both[nth], SIDE * HALF + half * 2 * PIECE + nth * PIECE
            if SIDE * HALF + half * 2 * PIECE + nth * PIECE == DIM - PIECE:
                values = rotate_back(values, cos_ptr, sin_ptr, out_loc.token_idx)
            tma.store_wait(0)
            gl.thread_barrier()
            piece.store(values.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(output_desc, [out_loc.row.to(gl.int32), at], piece)


@gluon.jit
def multiply(num_works, tokens, rows, shared, output_desc, results, scale, NUM_HEADS: gl.constexpr,
             SPEC: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Multiply and store one side's share of one work item after another."""
    pair, nth_work = gl.to_tensor(0), gl.to_tensor(0)
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        num_pairs, _token, _out_loc = find_pairs(work, tokens, rows, NUM_HEADS, SPEC)
        if num_pairs > 0:
            acc = gl.zeros((HEADS, HALF), gl.float32, layout=OUTPUT)
            largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=HEAD_ROWS)
            total = gl.zeros((HEADS,), gl.float32, layout=HEAD_ROWS)
            mbarrier.wait(shared.has_query.index(0), nth_work % 2)
            if SIDE == 0:
                acc, largest, total, pair = multiply_left(acc, largest, total, pair, num_pairs,
                                                          scale, shared)  # fmt: skip
            else:
                acc, largest, total, pair = multiply_right(acc, largest, total, pair, num_pairs,
                                                           scale, shared)  # fmt: skip
            _pairs, _token, out_loc = find_pairs(work, tokens, rows, NUM_HEADS, SPEC)
            store_output(acc, largest, total, nth_work, output_desc, results, shared, out_loc, SIDE)
            nth_work += 1
    tma.store_wait(0)


@gluon.jit
def find_pairs(work, tokens, rows, NUM_HEADS: gl.constexpr, SPEC: gl.constexpr):
    """Find the pairs of tiles of a work item; none if its window is not among the dense rows."""
    whole = Splits(gl.to_tensor(1), gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(1 << 24))
    tiles, token, out_loc = find_work(work, gl.program_id(1), tokens, whole, NUM_HEADS, HEADS, SPEC)
    start = gl.load(rows.starts_ptr + token.request)
    end = start + token.position - gl.load(rows.before_ptr + token.request) + SPEC.WINDOW
    is_dense = (start >= 0) & (end <= rows.first_entry)
    return gl.where(is_dense, gl.cdiv(tiles.end, 2), 0), token, out_loc


@gluon.jit
def load_list(tile, source, rows, SPEC: gl.constexpr):
    """Load a tile's listed rows, `[TILE]`; -1 for none, and for rows outside of the pool."""
    row = tile * TILE + gl.arange(0, TILE, layout=FIND)
    listed = gl.full((TILE,), -1, gl.int32, layout=FIND)
    if tile >= SPEC.WINDOW // TILE:
        entry = (row - SPEC.WINDOW).to(gl.int64)
        entry_ptr = source.list_ptr + entry * rows.entries.row_stride
        flat = gl.load(entry_ptr, mask=row < source.num_rows, other=-1)
        is_row = flat.to(gl.uint64) < rows.entries.pool_rows.to(gl.uint64)
        listed = gl.where(is_row, flat.to(gl.int32), -1)
    return listed


@gluon.jit
def load_columns(listed, source, SPEC: gl.constexpr):
    """Load the columns that the blocks of listed rows may have in the request's table."""
    block = listed.to(gl.uint32) // SPEC.ENTRY_ROWS
    return gl.load(source.columns_ptr + block.to(gl.int64), mask=listed >= 0, other=-1)


@gluon.jit
def load_blocks(listed, columns, source, SPEC: gl.constexpr):
    """Load the blocks at these columns of the table; -1 where the map or the list has none."""
    is_column = (columns >= 0) & (columns < gl.cdiv(source.count, SPEC.ENTRY_ROWS))
    return gl.load(source.table_ptr + columns, mask=is_column & (listed >= 0), other=-1)


@gluon.jit
def find_source(token, rows, SPEC: gl.constexpr):
    """Find the sources of a token's rows."""
    entries = rows.entries
    start = gl.load(rows.starts_ptr + token.request)
    start += token.position - gl.load(rows.before_ptr + token.request)
    chunk = gl.to_tensor(0)
    if SPEC.ENTRIES != "none":
        while gl.load(rows.chunk_ids_ptr + chunk) != token.request:
            chunk += 1
    count = gl.load(rows.after_ptr + token.request) // SPEC.RATIO
    return Source(
        token.position, token.num_rows, start, rows.first_entry + chunk * entries.entries_stride,
        gl.minimum(count, entries.entries_stride),
        entries.rows_ptr + token.token_idx.to(gl.int64) * entries.rows_stride,
        rows.columns_ptr + chunk.to(gl.int64) * rows.num_blocks,
        entries.block_table_ptr + token.slot * entries.table_stride,
    )  # fmt: skip


@gluon.jit
def place_rows(tile, source, SPEC: gl.constexpr, LAYOUT: gl.constexpr):
    """Place a tile's rows of the window, and of all entries if the token sees them in order.

    Returns `[TILE]` rows among the dense ones, -1 for none.
    """
    row = tile * TILE + gl.arange(0, TILE, layout=LAYOUT)
    is_there = source.position - (SPEC.WINDOW - 1) + row >= 0
    place = gl.where((row < SPEC.WINDOW) & is_there, source.start + row, -1)
    if SPEC.ENTRIES == "all":
        is_entry = (row >= SPEC.WINDOW) & (row < source.num_rows)
        place = gl.where(is_entry, source.first_entry + row - SPEC.WINDOW, place)
    return place


@gluon.jit
def copy_tile(place, pair, rows, shared, STAGE: gl.constexpr):
    """Copy the rows at `[TILE]` places to a stage, zeros where there is none."""
    channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))[None, :]
    is_present = place >= 0
    bias = gl.where(is_present, 0.0, float("-inf"))
    place = gl.convert_layout(place, COPY_ROWS)
    source_ptr = rows.entries.entries_ptr + gl.maximum(place, 0).to(gl.int64) * DIM
    mask = (place >= 0)[:, None] & (channel >= 0)
    for half in gl.static_range(2):
        mbarrier.wait(shared.empty.index(2 * STAGE + half), (pair + 1) % 2)
        async_copy.async_copy_global_to_shared(
            shared.rows[half].index(STAGE), source_ptr[:, None] + (half * HALF + channel), mask=mask
        )
    full = shared.full.index(STAGE)
    async_copy.mbarrier_arrive(full, increment_count=False)
    shared.biases.index(STAGE).store(bias)
    gl.thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def copy_query(query_desc, row, pair, is_copied, shared):
    """Copy a work item's query, once the logits of the item before are made: it weighs them."""
    mbarrier.wait(shared.is_weighed.index(1), (pair + 1) % 2)
    mbarrier.expect(is_copied, HEADS * DIM * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(query_desc, [row.to(gl.int32), half * HALF], is_copied,
                                        shared.query[half].index(0))  # fmt: skip


@gluon.jit
def prepare_query(rope, token_idx, nth_work, shared, QUERY_EPS: gl.constexpr):
    """Prepare the raw query of the nth work item, when it is copied."""
    turn = load_query_turn(rope, token_idx)
    mbarrier.wait(shared.is_raw_copied.index(0), nth_work % 2)
    prepare_in_place(shared.query, turn, QUERY_EPS)
    mbarrier.arrive(shared.has_query.index(0), count=1)


@gluon.jit
def copy_tiles(num_works, tokens, rows, shared, query_desc, rope, NUM_HEADS: gl.constexpr,
               QUERY_EPS: gl.constexpr, SPEC: gl.constexpr):  # fmt: skip
    """Copy the rows and the query of one work item after another; list items that are left.

    Each look-up of a listed row needs the one before. They are made one to three tiles ahead.
    """
    IS_LISTED: gl.constexpr = SPEC.ENTRIES == "listed"
    LAYOUT: gl.constexpr = FIND if IS_LISTED else COPY_ROWS
    is_copied = shared.has_query if QUERY_EPS is None else shared.is_raw_copied
    pair, nth_work = gl.to_tensor(0), gl.to_tensor(0)
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        num_pairs, token, out_loc = find_pairs(work, tokens, rows, NUM_HEADS, SPEC)
        is_left = num_pairs == 0
        if num_pairs > 0:
            source = find_source(token, rows, SPEC)
            if IS_LISTED:
                zero = num_pairs >> 24  # at runtime: the compiler fails on a constant
                listed = load_list(zero, source, rows, SPEC)
                listed_1 = load_list(zero + 1, source, rows, SPEC)
                listed_2 = load_list(zero + 2, source, rows, SPEC)
                columns = load_columns(listed, source, SPEC)
                columns_1 = load_columns(listed_1, source, SPEC)
                blocks = load_blocks(listed, columns, source, SPEC)
                foreign = gl.zeros_like(listed)
            for nth in range(num_pairs):
                for stage in gl.static_range(2):
                    tile = 2 * nth + stage
                    if IS_LISTED:
                        listed_3 = load_list(tile + 3, source, rows, SPEC)
                        columns_2 = load_columns(listed_2, source, SPEC)
                        blocks_1 = load_blocks(listed_1, columns_1, source, SPEC)
                        wanted = (listed.to(gl.uint32) // SPEC.ENTRY_ROWS).to(gl.int32)
                        entry = (columns - wanted) * SPEC.ENTRY_ROWS + listed
                        is_own = (blocks == wanted) & (entry < source.count)
                    place = place_rows(tile, source, SPEC, LAYOUT)
                    if IS_LISTED:
                        place = gl.where(is_own & (listed >= 0), source.first_entry + entry, place)
                        foreign |= ((listed >= 0) & (is_own == 0)).to(gl.int32)
                    copy_tile(place, pair, rows, shared, stage)
                    if nth == 0:
                        if stage == 0:
                            copy_query(query_desc, out_loc.row, pair, is_copied.index(0), shared)
                        elif QUERY_EPS is not None:
                            prepare_query(rope, out_loc.token_idx, nth_work, shared, QUERY_EPS)
                    if IS_LISTED:
                        listed, listed_1, listed_2 = listed_1, listed_2, listed_3
                        columns, columns_1, blocks = columns_1, columns_2, blocks_1
                pair += 1
            nth_work += 1
            if IS_LISTED:
                is_left = gl.max(foreign, axis=0) > 0
        if is_left:
            nth_left = gl.atomic_add(rows.left_ptr, 1)
            gl.store(rows.left_ptr + 1 + nth_left, work)


@gluon.jit(
    do_not_specialize=[
        "rows_stride", "row_stride", "pool_rows", "num_entries", "table_stride", "num_works",
        "first_entry", "chunk_stride", "num_blocks",
    ],
    do_not_specialize_on_alignment=[*ATTEND_UNALIGNED, "chunk_ids_ptr", "columns_ptr", "left_ptr"],
)  # fmt: skip
def _attend_dense_kernel(
    query_desc, output_desc, sinks_ptr, lse_ptr, cos_ptr, sin_ptr, scale,
    dense_ptr, first_entry, chunk_stride, columns_ptr, num_blocks, chunk_ids_ptr, left_ptr,
    rows_ptr, rows_stride, row_stride, pool_rows, num_entries, positions_ptr, request_ids_ptr,
    request_slots_ptr, before_ptr, after_ptr, workspace_starts_ptr, block_table_ptr, table_stride,
    num_works,
    SPEC: gl.constexpr, NUM_HEADS: gl.constexpr, QUERY_EPS: gl.constexpr,
    COPYING_REGISTERS: gl.constexpr, MULTIPLYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend for tokens of chunks and 64 of their heads each, one after another.

    Work items that it leaves to another kernel are listed at left_ptr, after their number.
    """
    gdc_wait()
    tokens = Tokens(gl.to_tensor(0), num_entries, positions_ptr, request_ids_ptr, request_slots_ptr)
    entries = EntryPtrs(dense_ptr, chunk_stride, rows_ptr, rows_stride, row_stride, pool_rows,
                        block_table_ptr, table_stride)  # fmt: skip
    rows = DenseRows(entries, first_entry, columns_ptr, num_blocks, chunk_ids_ptr, after_ptr,
                     before_ptr, workspace_starts_ptr, left_ptr)  # fmt: skip
    results = sinks_ptr, lse_ptr, cos_ptr, sin_ptr
    shared = make_shared()
    fence_async_shared()  # for copies, which arrive at the barriers
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply, (num_works, tokens, rows, shared, output_desc, results, scale, NUM_HEADS,
                        SPEC, 0)),
            (multiply, (num_works, tokens, rows, shared, output_desc, results, scale, NUM_HEADS,
                        SPEC, 1)),
            (copy_tiles, (num_works, tokens, rows, shared, query_desc, (cos_ptr, sin_ptr),
                          NUM_HEADS, QUERY_EPS, SPEC)),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, COPYING_REGISTERS],
    )  # fmt: skip
