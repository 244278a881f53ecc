"""Attention of forwards with chunks on Hopper, in programs of 64 heads.

Unlike in `hopper.attention`, a program takes one work item (`hopper.program`) after another. The
next item's rows are loaded and decoded while the last one's output is stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.triton.hopper.decode import DECODING_WARPS, SourceSpec, decode_tiles
from dsv4.kernels.triton.hopper.many_heads import HEADS, make_exchange, multiply_many, store_many
from dsv4.kernels.triton.hopper.program import (
    EntryPtrs,
    ResultPtrs,
    Splits,
    Tokens,
    WindowPtrs,
    find_work,
    make_memory,
    place_rows,
)
from dsv4.kernels.triton.hopper.softmax import load_query
from dsv4.kernels.triton.launch import ATTEND_SIZES, ATTEND_UNALIGNED


@gluon.jit
def multiply_in_turn(num_works, tokens, splits, memory, query_ptr, query, exchange, scale, results,
                     NUM_HEADS: gl.constexpr, SPEC: gl.constexpr, STAGES: gl.constexpr,
                     SIDE: gl.constexpr):  # fmt: skip
    """Multiply and store one side's share of one work item after another.

    An item is found again before its results are stored, which leaves registers to the products.
    """
    count = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        tiles, _token, out_loc = find_work(work, tokens, splits, NUM_HEADS, HEADS, SPEC)
        load_query(query, query_ptr, out_loc, NUM_HEADS, SIDE)
        acc, largest, total, count = multiply_many(tiles, count, memory, query, exchange, scale,
                                                   STAGES, SIDE)  # fmt: skip
        _tiles, _token, out_loc = find_work(work, tokens, splits, NUM_HEADS, HEADS, SPEC)
        store_many(acc, largest, total, query, results, out_loc, True, NUM_HEADS, False, SIDE)
        gl.thread_barrier()


@gluon.jit
def decode_in_turn(num_works, tokens, splits, memory, window, entries, NUM_HEADS: gl.constexpr,
                   SPEC: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Decode the rows of one work item after another."""
    count = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_works, gl.num_programs(0)):
        tiles, token, _out_loc = find_work(work, tokens, splits, NUM_HEADS, HEADS, SPEC)
        row_source, bases = place_rows(token, window, entries, SPEC)
        count = decode_tiles(tiles, count, memory, row_source, bases, SPEC, STAGES, False)


@gluon.jit(
    do_not_specialize=[*ATTEND_SIZES, "num_works"],
    do_not_specialize_on_alignment=ATTEND_UNALIGNED,
)
def _attend_chunk_kernel(
    query_ptr, sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, scale,
    ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
    entries_ptr, entries_scales_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
    num_entries, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
    workspace_starts_ptr, block_table_ptr, table_stride,
    first_token, num_works, num_splits, split_step, tile_step, tiles_per_split,
    ENTRIES: gl.constexpr, NUM_HEADS: gl.constexpr, RING_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr, RATIO: gl.constexpr, WINDOW: gl.constexpr,
    HAS_CHUNKS: gl.constexpr, IS_SPLIT: gl.constexpr, STAGES: gl.constexpr,
    DECODING_REGISTERS: gl.constexpr, MULTIPLYING_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attend for tokens and 64 of their heads each, one after another, over all of their rows."""
    gdc_wait()
    SPEC: gl.constexpr = SourceSpec(WINDOW, RING_ROWS, HAS_CHUNKS, ENTRIES, RATIO, ENTRY_ROWS)
    tokens = Tokens(first_token, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr)
    splits = Splits(num_splits, split_step, tile_step, tiles_per_split)
    window = WindowPtrs(ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr,
                        workspace_scales_ptr, before_ptr, workspace_starts_ptr)  # fmt: skip
    entries = EntryPtrs(entries_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
                        block_table_ptr, table_stride)  # fmt: skip
    results = ResultPtrs(sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr)
    query, memory = make_memory(HEADS, STAGES, 2)
    exchange = make_exchange()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply_in_turn, (num_works, tokens, splits, memory, query_ptr, query, exchange,
                                scale, results, NUM_HEADS, SPEC, STAGES, 0)),
            (multiply_in_turn, (num_works, tokens, splits, memory, query_ptr, query, exchange,
                                scale, results, NUM_HEADS, SPEC, STAGES, 1)),
            (decode_in_turn, (num_works, tokens, splits, memory, window, entries, NUM_HEADS, SPEC,
                              STAGES)),
        ],
        [4, DECODING_WARPS],
        [MULTIPLYING_REGISTERS, DECODING_REGISTERS],
    )  # fmt: skip
