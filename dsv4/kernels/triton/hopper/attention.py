"""Attention over fp8 rows on Hopper. The contract is `kernels.triton.attention._attend_kernel`'s.

A program takes a token and a block of its heads and goes over the token's rows in tiles of 64, the
window first. Half of its warps decode tiles into stages in shared memory (`hopper.decode`); the
others multiply, and keep the softmax (`hopper.many_heads`, `hopper.few_heads`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.triton.hopper.decode import DECODING_WARPS, decode_tiles
from dsv4.kernels.triton.hopper.few_heads import make_sides, merge_sides, multiply_few
from dsv4.kernels.triton.hopper.many_heads import make_exchange, multiply_many, store_many
from dsv4.kernels.triton.hopper.program import Cut, find_work, make_memory, place_rows
from dsv4.kernels.triton.hopper.softmax import load_query

# By heads of a program.
CUTS = {8: Cut(3, 128, 128), 16: Cut(3, 128, 128), 64: Cut(2, 64, 192)}


@gluon.jit
def multiply(tiles, memory, query_ptr, query, between, scale, results, where,
             NUM_HEADS: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
             SIDE: gl.constexpr):  # fmt: skip
    """A side's work, as it is shared for so many heads."""
    HEADS: gl.constexpr = query[0].shape[1]
    load_query(query, query_ptr, where, NUM_HEADS, SIDE)
    if HEADS == 64:
        acc, largest, total, _count = multiply_many(tiles, gl.to_tensor(0), memory, query, between,
                                                    scale, STAGES, SIDE)  # fmt: skip
        has_rows = tiles[0] < tiles[1]
        store_many(acc, largest, total, query, results, where, has_rows, NUM_HEADS, IS_SPLIT,
                   SIDE)  # fmt: skip
    else:
        num_tiles = multiply_few(tiles, memory, query, between, scale, STAGES, SIDE)
        merge_sides(memory[0], num_tiles, between, results, where, NUM_HEADS, HEADS, STAGES,
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
    """A token and HEADS of its heads over one split of its rows.

    The plan was copied to the device before the first launch; what it says is read while the
    launch before may still run.
    """
    tokens = first_token, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr
    splits = num_splits, split_step, tile_step, tiles_per_split
    window = (ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
              before_ptr, starts_ptr)  # fmt: skip
    entries = (entries_ptr, entries_stride, rows_ptr, rows_stride, row_stride, block_table_ptr,
               table_stride)  # fmt: skip
    results = sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr
    tiles, token, where = find_work(gl.program_id(0), tokens, splits, NUM_HEADS, HEADS, ENTRIES,
                                    WINDOW, RATIO)  # fmt: skip
    rows, bases = place_rows(token, window, entries, HAS_CHUNKS)
    query, memory = make_memory(HEADS, STAGES, 2 if HEADS == 64 else 1)
    between = make_exchange() if HEADS == 64 else make_sides(HEADS)
    gdc_wait()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply, (tiles, memory, query_ptr, query, between, scale, results, where, NUM_HEADS,
                        STAGES, IS_SPLIT, 0)),
            (multiply, (tiles, memory, query_ptr, query, between, scale, results, where, NUM_HEADS,
                        STAGES, IS_SPLIT, 1)),
            (decode_tiles, (tiles, gl.to_tensor(0), memory, rows, bases, ENTRIES, WINDOW,
                            RING_ROWS, ENTRY_ROWS, STAGES, DECODING_REGISTERS >= 128)),
        ],
        [4, DECODING_WARPS],
        [MULTIPLYING_REGISTERS, DECODING_REGISTERS],
    )  # fmt: skip
