"""Products for 8 or 16 heads on Hopper: rows, then channels, are the M dimension.

A product's M is at least 64, so that with fewer heads everything is transposed. Two groups of
warps, the sides, are partitions of their own. Each takes every second tile, with its own softmax,
and they meet once, at the end. There each side stores its accumulators in the stage of its last
tile, which is free by then. Each then merges one half of the channels.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.triton.hopper.decode import (
    CHANNEL_QUARTER,
    CHANNEL_QUARTERS,
    DIM,
    OPERAND,
    SIDE_QUARTERS,
    TILE,
    VECTOR,
)
from dsv4.kernels.triton.hopper.program import make_barrier
from dsv4.kernels.triton.hopper.softmax import (
    DENSE,
    finite_base,
    log_sum_exp,
    output_factor,
    quarter_offsets,
    rotate_back,
    wait_for_query,
)

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# Rows of a split as they lie in memory: a warp stores a head's fp32 channels side by side.
SPLIT_ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


class Sides(NamedTuple):
    """Memory of each side: a tile's weights, the largest logits and sums that it ends with.

    And barriers: the query is loaded, both sides are done.
    """

    weights: gl.tuple
    largest: gl.tuple
    totals: gl.tuple
    is_loaded: gl.shared_memory_descriptor
    is_done: gl.shared_memory_descriptor


@gluon.jit
def make_sides(HEADS: gl.constexpr):
    """Allocate the memory of both sides and their barriers."""
    weights, largest, totals = gl.tuple(()), gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(2):
        weights = weights + (gl.allocate_shared_memory(gl.bfloat16, (HEADS, TILE), OPERAND),)
        largest = largest + (gl.allocate_shared_memory(gl.float32, (HEADS,), VECTOR),)
        totals = totals + (gl.allocate_shared_memory(gl.float32, (HEADS,), VECTOR),)
    return Sides(weights, largest, totals, make_barrier(2), make_barrier(2))


@gluon.jit
def multiply_few(tiles, memory, query, exchange, scale, STAGES: gl.constexpr,
                 SIDE: gl.constexpr):  # fmt: skip
    """Multiply a side's tiles, for all of a program's heads; return the tiles of both sides."""
    HEADS: gl.constexpr = query[0].shape[1]
    LOGITS_T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    weights = exchange.weights[SIDE].permute((1, 0))
    num_tiles = gl.where(tiles.end > tiles.first, gl.cdiv(tiles.end - tiles.first, tiles.step), 0)
    acc = gl.tuple(())
    for _ in gl.static_range(CHANNEL_QUARTERS):
        acc = acc + (gl.zeros((CHANNEL_QUARTER, HEADS), gl.float32, layout=LOGITS_T),)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=gl.SliceLayout(0, LOGITS_T))
    totals = gl.zeros((TILE, HEADS), gl.float32, layout=LOGITS_T)
    wait_for_query()
    mbarrier.arrive(exchange.is_loaded, count=1)
    mbarrier.wait(exchange.is_loaded, 0)
    for count in range(SIDE, num_tiles, 2):
        stage = count % STAGES
        mbarrier.wait(memory.full.index(stage), count // STAGES % 2)
        bias = memory.biases.index(stage).load(gl.SliceLayout(1, LOGITS_T))  # [TILE]
        pending = gl.zeros((TILE, HEADS), gl.float32, layout=LOGITS_T) + bias[:, None]
        # Index by a runtime zero, so that the compiler does not hoist descriptor addresses
        # into registers.
        zero = count >> 24
        for quarter in gl.static_range(CHANNEL_QUARTERS):
            heads = query[quarter].index(zero).permute((1, 0))
            keys = memory.quarters[quarter].index(stage)
            pending = warpgroup_mma(keys, heads, pending, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[pending])  # [TILE, HEADS]
        new_largest = gl.maximum(largest, gl.max(logits, axis=0) * scale)  # [HEADS]
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits * scale - base[None, :])  # [TILE, HEADS]
        weights.store(tile_weights.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        new_acc = gl.tuple(())
        for quarter in gl.static_range(CHANNEL_QUARTERS):
            channels = memory.quarters[quarter].index(stage).permute((1, 0))
            shrunk = acc[quarter] * shrink[None, :]  # [CHANNEL_QUARTER, HEADS]
            new_acc = new_acc + (warpgroup_mma(channels, weights, shrunk, is_async=True),)
        totals = totals * shrink[None, :] + tile_weights
        largest = new_largest
        acc = warpgroup_mma_wait(0, deps=new_acc)
        gl.thread_barrier()
        mbarrier.arrive(memory.empty.index(stage), count=1)

    exchange.largest[SIDE].store(largest)
    exchange.totals[SIDE].store(gl.sum(totals, axis=0))
    for quarter in gl.static_range(CHANNEL_QUARTERS):
        left = left_values(memory.quarters[quarter], num_tiles, HEADS, STAGES, SIDE)
        left.permute((1, 0)).store(acc[quarter])
    gl.thread_barrier()
    mbarrier.arrive(exchange.is_done, count=1)
    mbarrier.wait(exchange.is_done, 0)
    return num_tiles


@gluon.jit
def left_values(quarter, num_tiles, HEADS: gl.constexpr, STAGES: gl.constexpr,
                SIDE: gl.constexpr):  # fmt: skip
    """The place of a side's accumulators of a quarter, `[HEADS, CHANNEL_QUARTER]`.

    It is in the stage of the side's last tile.
    """
    last = (num_tiles + 1 - SIDE) // 2 * 2 - 2 + SIDE  # below 0 if the side has no tile
    stage = (last + 2 * STAGES) % STAGES
    return quarter.index(stage)._reinterpret(gl.float32, (HEADS, CHANNEL_QUARTER), PLAIN)


@gluon.jit
def merge_sides(quarters, num_tiles, exchange, results, out_loc, NUM_HEADS: gl.constexpr,
                HEADS: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
                SIDE: gl.constexpr):  # fmt: skip
    """Merge both sides' results of one half of the channels, and store them."""
    LAYOUT: gl.constexpr = SPLIT_ROWS if IS_SPLIT else DENSE
    HEAD: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    head = gl.arange(0, HEADS, layout=HEAD)  # [HEADS]
    is_head = out_loc.first_head + head < NUM_HEADS
    largest_0, largest_1 = exchange.largest[0].load(HEAD), exchange.largest[1].load(HEAD)
    largest = gl.maximum(largest_0, largest_1)
    base = finite_base(largest)
    grow_0, grow_1 = gl.exp2(largest_0 - base), gl.exp2(largest_1 - base)
    total = exchange.totals[0].load(HEAD) * grow_0 + exchange.totals[1].load(HEAD) * grow_1
    part_row, row = out_loc.part_row, out_loc.row
    if SIDE == 0:
        if IS_SPLIT:
            gl.store(results.stats_ptr + 2 * (part_row + head), largest, mask=is_head)
            gl.store(results.stats_ptr + 2 * (part_row + head) + 1, total, mask=is_head)
        else:
            gl.store(results.lse_ptr + row + head, log_sum_exp(largest, total), mask=is_head)
    if not IS_SPLIT:
        sink = gl.load(results.sinks_ptr + out_loc.first_head + head, mask=is_head, other=0.0)
        factor = output_factor(sink, largest, total)
        grow_0, grow_1 = grow_0 * factor, grow_1 * factor
    for quarter in gl.static_range(SIDE * SIDE_QUARTERS, (SIDE + 1) * SIDE_QUARTERS):
        left = left_values(quarters[quarter], num_tiles, HEADS, STAGES, 0).load(LAYOUT)
        right = left_values(quarters[quarter], num_tiles, HEADS, STAGES, 1).load(LAYOUT)
        values = left * grow_0[:, None] + right * grow_1[:, None]  # [HEADS, CHANNEL_QUARTER]
        at = quarter_offsets(quarter, HEADS, LAYOUT)
        if IS_SPLIT:
            mask = is_head[:, None] & (num_tiles > 0)
            gl.store(results.partials_ptr + part_row * DIM + at, values, mask=mask)
        else:
            if quarter == CHANNEL_QUARTERS - 1:
                values = rotate_back(values, results.cos_ptr, results.sin_ptr, out_loc.token_idx)
                values = gl.convert_layout(values, DENSE)
            out = values.to(gl.bfloat16)
            gl.store(results.output_ptr + row * DIM + at, out, mask=is_head[:, None])
