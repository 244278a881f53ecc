"""Attention over stored rows on Hopper, in place of `_attend_kernel` of `kernels.triton.attention`.

`attend_launch` there chooses between them, and `_launch_on_hopper` launches these.

A program takes a token and a block of its heads, and reads the token's rows in tiles of 64, the
window first. Half of its warps decode tiles into stages in shared memory (`hopper.decode`). The
others multiply, and compute the softmax (`hopper.many_heads`, `hopper.few_heads`). They are two
groups of warps, the sides.

In forwards with chunks, a program of 64 heads takes one work item (`hopper.program`) after another.
The next item's rows are loaded and decoded while the last one's output is stored. Where bits must
not depend on the batch, a work item is split even so, and its program joins the splits in turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.triton.hopper.decode import DECODING_WARPS, DIM, TILE, Tiles, decode_tiles
from dsv4.kernels.triton.hopper.few_heads import make_sides, merge_sides, multiply_few
from dsv4.kernels.triton.hopper.many_heads import (
    HEADS,
    join_part,
    make_exchange,
    multiply_many,
    start_many,
    store_many,
    store_part,
)
from dsv4.kernels.triton.hopper.program import (
    EntryPtrs,
    ResultPtrs,
    Tokens,
    WindowPtrs,
    count_splits,
    find_work,
    make_memory,
    place_rows,
)
from dsv4.kernels.triton.hopper.query import load_raw_query, make_query_sums
from dsv4.kernels.triton.hopper.softmax import load_query
from dsv4.kernels.triton.launch import ATTEND_SIZES, ATTEND_UNALIGNED
from dsv4.kernels.triton.operands import Splits


@gluon.jit
def load_or_prepare(query, query_ptr, sums, results, out_loc, nth, NUM_HEADS: gl.constexpr,
                    QUERY_EPS: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Bring a side's half of the query to shared memory, for the nth work item."""
    if QUERY_EPS is None:
        load_query(query, query_ptr, out_loc, NUM_HEADS, SIDE)
    else:
        rope = results.cos_ptr, results.sin_ptr
        load_raw_query(query, query_ptr, sums, rope, out_loc, nth, NUM_HEADS, QUERY_EPS, SIDE)


@gluon.jit
def multiply(tiles, memory, query_ptr, query, sums, exchange, scale, results, out_loc,
             NUM_HEADS: gl.constexpr, QUERY_EPS: gl.constexpr, STAGES: gl.constexpr,
             IS_SPLIT: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Multiply and store one side's share, with 64 heads or with fewer.

    exchange is the shared memory between the sides: an `Exchange` with 64 heads, else `Sides`.
    """
    HEADS: gl.constexpr = query[0].shape[1]
    load_or_prepare(query, query_ptr, sums, results, out_loc, gl.to_tensor(0), NUM_HEADS,
                    QUERY_EPS, SIDE)  # fmt: skip
    if HEADS == 64:
        acc, largest, total, _count = multiply_many(tiles, gl.to_tensor(0), memory, query, exchange,
                                                    scale, STAGES, SIDE)  # fmt: skip
        has_rows = tiles.first < tiles.end
        store_many(acc, largest, total, query, results, out_loc, has_rows, NUM_HEADS, IS_SPLIT,
                   SIDE)  # fmt: skip
    else:
        num_tiles = multiply_few(tiles, memory, query, exchange, scale, STAGES, SIDE)
        merge_sides(memory.quarters, num_tiles, exchange, results, out_loc, NUM_HEADS, HEADS,
                    STAGES, IS_SPLIT, SIDE)  # fmt: skip


@gluon.jit(
    do_not_specialize=[*ATTEND_SIZES, "starts_next"],
    do_not_specialize_on_alignment=ATTEND_UNALIGNED,
)
def _attend_kernel(
    query_ptr, sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, scale,
    ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
    entries_ptr, entries_scales_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
    pool_rows, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr,
    after_ptr, workspace_starts_ptr, block_table_ptr, table_stride,
    first_token, num_splits, split_step, tile_step, tiles_per_split, starts_next,
    SPEC: gl.constexpr, NUM_HEADS: gl.constexpr, QUERY_EPS: gl.constexpr,
    IS_SPLIT: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
    DECODING_REGISTERS: gl.constexpr, MULTIPLYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend for one token and HEADS of its heads, over one split of the token's rows.

    The plan is on the device before the first launch. It is read while the previous launch may
    still run. starts_next lets the next launch begin beside this one. entries_scales_ptr and
    after_ptr are not read: arguments are those of the Triton kernel.
    """
    if starts_next != 0:
        gdc_launch_dependents()
    tokens = Tokens(first_token, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr)
    splits = Splits(num_splits, split_step, tile_step, tiles_per_split)
    window = WindowPtrs(ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr,
                        workspace_scales_ptr, before_ptr, workspace_starts_ptr)  # fmt: skip
    entries = EntryPtrs(entries_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
                        pool_rows, block_table_ptr, table_stride)  # fmt: skip
    results = ResultPtrs(sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr)
    tiles, token, out_loc = find_work(gl.program_id(0), gl.program_id(1), tokens, splits, NUM_HEADS,
                                      HEADS, SPEC)  # fmt: skip
    row_source = place_rows(token, window, entries, SPEC)
    # With 64 heads both sides read every tile, with fewer each takes every second one.
    query, memory = make_memory(HEADS, STAGES, 2 if HEADS == 64 else 1)
    exchange = make_exchange() if HEADS == 64 else make_sides(HEADS)
    # Conversions are quicker, but spill registers with so many heads of listed rows.
    SPILLING: gl.constexpr = 128 if IS_SPLIT else 64
    BY_BITS: gl.constexpr = (
        SPEC.ENTRIES == "listed" and NUM_HEADS == SPILLING and HEADS == 64 and QUERY_EPS is None
    )
    sums = make_query_sums(HEADS)
    gdc_wait()  # the rows may be the previous launch's
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply, (tiles, memory, query_ptr, query, sums, exchange, scale, results, out_loc,
                        NUM_HEADS, QUERY_EPS, STAGES, IS_SPLIT, 0)),
            (multiply, (tiles, memory, query_ptr, query, sums, exchange, scale, results, out_loc,
                        NUM_HEADS, QUERY_EPS, STAGES, IS_SPLIT, 1)),
            (decode_tiles, (tiles, gl.to_tensor(0), memory, row_source, SPEC, STAGES,
                            DECODING_REGISTERS >= 128, BY_BITS)),
        ],
        [4, DECODING_WARPS],
        [MULTIPLYING_REGISTERS, DECODING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def nth_work(nth, left_ptr, HAS_LEFT: gl.constexpr):
    """The nth work item: of those that are left, after their number, or of all."""
    work = nth
    if HAS_LEFT:
        work = gl.load(left_ptr + 1 + nth)
    return work


@gluon.jit
def multiply_splits(work, count, tokens, splits, memory, query, exchange, scale, partials_ptr,
                    NUM_HEADS: gl.constexpr, SPEC: gl.constexpr, STAGES: gl.constexpr,
                    SIDE: gl.constexpr):  # fmt: skip
    """Multiply one side's share of a work item, split by split, and join each to those before.

    Accumulators so far wait in the program's part of the partials, which its threads alone read.
    """
    part_ptr = partials_ptr + gl.program_id(0).to(gl.int64) * (HEADS * DIM)
    _tiles, token, _out_loc = find_work(work, 0, tokens, splits, NUM_HEADS, HEADS, SPEC)
    num_splits = count_splits(token, splits)
    acc, largest, total = start_many()
    for split in range(num_splits):
        tiles, _token, _out_loc = find_work(work, split, tokens, splits, NUM_HEADS, HEADS, SPEC)
        before = largest, total
        acc, largest, total, count = multiply_many(tiles, count, memory, query, exchange, scale,
                                                   STAGES, SIDE)  # fmt: skip
        if split > 0:
            acc, largest, total = join_part(acc, largest, total, before, part_ptr, SIDE)
        if split + 1 < num_splits:
            store_part(acc, part_ptr, SIDE)
    return acc, largest, total, count


@gluon.jit
def multiply_in_turn(num_works, left_ptr, tokens, splits, memory, query_ptr, query, sums, exchange,
                     scale, results, NUM_HEADS: gl.constexpr, QUERY_EPS: gl.constexpr,
                     SPEC: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
                     HAS_LEFT: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Multiply and store one side's share of one work item after another.

    An item is found again before its results are stored, which leaves registers to the products.
    """
    count, num_done = gl.to_tensor(0), gl.to_tensor(0)
    for nth in range(gl.program_id(0), num_works, gl.num_programs(0)):
        work = nth_work(nth, left_ptr, HAS_LEFT)
        tiles, _token, out_loc = find_work(work, gl.program_id(1), tokens, splits, NUM_HEADS, HEADS,
                                           SPEC)  # fmt: skip
        load_or_prepare(query, query_ptr, sums, results, out_loc, num_done, NUM_HEADS, QUERY_EPS,
                        SIDE)  # fmt: skip
        if IS_SPLIT:
            acc, largest, total, count = multiply_splits(
                work, count, tokens, splits, memory, query, exchange, scale, results.partials_ptr,
                NUM_HEADS, SPEC, STAGES, SIDE,
            )  # fmt: skip
        else:
            acc, largest, total, count = multiply_many(tiles, count, memory, query, exchange, scale,
                                                       STAGES, SIDE)  # fmt: skip
        _tiles, _token, out_loc = find_work(work, gl.program_id(1), tokens, splits, NUM_HEADS,
                                            HEADS, SPEC)  # fmt: skip
        store_many(acc, largest, total, query, results, out_loc, True, NUM_HEADS, False, SIDE)
        gl.thread_barrier()
        num_done += 1


@gluon.jit
def decode_in_turn(num_works, left_ptr, tokens, splits, memory, window, entries,
                   NUM_HEADS: gl.constexpr, SPEC: gl.constexpr, STAGES: gl.constexpr,
                   IS_SPLIT: gl.constexpr, HAS_LEFT: gl.constexpr):  # fmt: skip
    """Decode the rows of one work item after another, split by split."""
    count = gl.to_tensor(0)
    for nth in range(gl.program_id(0), num_works, gl.num_programs(0)):
        work = nth_work(nth, left_ptr, HAS_LEFT)
        tiles, token, _out_loc = find_work(work, gl.program_id(1), tokens, splits, NUM_HEADS, HEADS,
                                           SPEC)  # fmt: skip
        row_source = place_rows(token, window, entries, SPEC)
        if IS_SPLIT:  # they follow each other
            tiles = Tiles(tiles.first, gl.cdiv(token.num_rows, TILE), tiles.step)
        count = decode_tiles(tiles, count, memory, row_source, SPEC, STAGES, False, False)


@gluon.jit(
    do_not_specialize=[*ATTEND_SIZES, "num_works"],
    do_not_specialize_on_alignment=[*ATTEND_UNALIGNED, "left_ptr"],
)
def _attend_chunk_kernel(
    query_ptr, sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, scale,
    ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
    entries_ptr, entries_scales_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
    pool_rows, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr,
    after_ptr, workspace_starts_ptr, block_table_ptr, table_stride,
    first_token, num_works, left_ptr, num_splits, split_step, tile_step, tiles_per_split,
    SPEC: gl.constexpr, NUM_HEADS: gl.constexpr, QUERY_EPS: gl.constexpr,
    IS_SPLIT: gl.constexpr, HAS_LEFT: gl.constexpr, STAGES: gl.constexpr,
    DECODING_REGISTERS: gl.constexpr, MULTIPLYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend for tokens and 64 of their heads each, one after another, over all of their rows.

    IS_SPLIT joins the splits of each, one after another. HAS_LEFT takes only the work items that
    `_attend_dense_kernel` has left.
    """
    gdc_wait()
    if HAS_LEFT:
        num_works = gl.load(left_ptr)
    tokens = Tokens(first_token, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr)
    splits = Splits(num_splits, split_step, tile_step, tiles_per_split)
    window = WindowPtrs(ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr,
                        workspace_scales_ptr, before_ptr, workspace_starts_ptr)  # fmt: skip
    entries = EntryPtrs(entries_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
                        pool_rows, block_table_ptr, table_stride)  # fmt: skip
    results = ResultPtrs(sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr)
    query, memory = make_memory(HEADS, STAGES, 2)
    exchange, sums = make_exchange(), make_query_sums(HEADS)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply_in_turn, (num_works, left_ptr, tokens, splits, memory, query_ptr, query, sums,
                                exchange, scale, results, NUM_HEADS, QUERY_EPS, SPEC, STAGES,
                                IS_SPLIT, HAS_LEFT, 0)),
            (multiply_in_turn, (num_works, left_ptr, tokens, splits, memory, query_ptr, query, sums,
                                exchange, scale, results, NUM_HEADS, QUERY_EPS, SPEC, STAGES,
                                IS_SPLIT, HAS_LEFT, 1)),
            (decode_in_turn, (num_works, left_ptr, tokens, splits, memory, window, entries,
                              NUM_HEADS, SPEC, STAGES, IS_SPLIT, HAS_LEFT)),
        ],
        [4, DECODING_WARPS],
        [MULTIPLYING_REGISTERS, DECODING_REGISTERS],
    )  # fmt: skip
