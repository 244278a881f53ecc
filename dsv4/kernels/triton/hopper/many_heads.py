"""Products for up to 64 heads on Hopper: heads are the M dimension of logits and output.

Two groups of warps, the sides, are partitions of their own, and each has one half of the channels.
Logits are the sum of both halves' products, which the sides exchange through shared memory. Both
then compute the same softmax, so that weights stay in registers.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.triton.hopper.decode import (
    CHANNEL_QUARTER,
    CHANNEL_QUARTERS,
    DIM,
    SIDE_QUARTERS,
    TILE,
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

HEADS = gl.constexpr(64)
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
HEAD_ROWS = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
# Layout of exchanged logits: the rows that a warp stores at once are in different banks.
EXCHANGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


class Exchange(NamedTuple):
    """Logits that the sides exchange, and barriers: both have written them, both have read them."""

    logits: gl.shared_memory_descriptor
    is_written: gl.shared_memory_descriptor
    is_read: gl.shared_memory_descriptor


@gluon.jit
def make_exchange():
    """Allocate the exchange of logits."""
    logits = gl.allocate_shared_memory(gl.float32, (2, HEADS, TILE), EXCHANGED)
    return Exchange(logits, make_barrier(2), make_barrier(2))


@gluon.jit
def start_logits(query, memory, count, stage, SIDE: gl.constexpr):
    """Start a side's product of the queries and a tile's rows; side 0 adds the rows' biases."""
    # A runtime zero: with a constant the compiler would keep descriptor addresses in registers.
    zero = count >> 24
    pending = gl.zeros((HEADS, TILE), gl.float32, layout=LOGITS)
    if SIDE == 0:
        pending += memory.biases.index(stage).load(gl.SliceLayout(0, LOGITS))[None, :]
    for quarter in gl.static_range(SIDE * SIDE_QUARTERS, (SIDE + 1) * SIDE_QUARTERS):
        keys = memory.quarters[quarter].index(stage).permute((1, 0))
        pending = warpgroup_mma(query[quarter].index(zero), keys, pending, is_async=True)
    return pending


@gluon.jit
def add_other(logits, exchange, count, SIDE: gl.constexpr):
    """Add the other side's logits of the tile; both sides get the same sums."""
    mbarrier.wait(exchange.is_read, (count + 1) % 2)
    exchange.logits.index(SIDE).store(logits)
    gl.thread_barrier()
    mbarrier.arrive(exchange.is_written, count=1)
    mbarrier.wait(exchange.is_written, count % 2)
    logits += exchange.logits.index(1 - SIDE).load(LOGITS)  # [HEADS, TILE]
    gl.thread_barrier()
    mbarrier.arrive(exchange.is_read, count=1)
    return logits


@gluon.jit
def add_output(acc, shrink, weights, quarters, stage, SIDE: gl.constexpr):
    """Shrink a side's accumulators and add its product of a tile's weights and rows.

    All accumulators shrink before the first product starts, so that no product waits for one.
    """
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
    shrunk, pending = gl.tuple(()), gl.tuple(())
    for nth in gl.static_range(SIDE_QUARTERS):
        shrunk = shrunk + (acc[nth] * factor,)  # [HEADS, CHANNEL_QUARTER]
    for nth in gl.static_range(SIDE_QUARTERS):
        values = quarters[SIDE * SIDE_QUARTERS + nth].index(stage)
        pending = pending + (warpgroup_mma(weights, values, shrunk[nth], is_async=True),)
    return warpgroup_mma_wait(0, deps=pending)


@gluon.jit
def start_many():
    """A side's accumulators, the largest logits and the sums before the first tile."""
    acc = gl.tuple(())
    for _ in gl.static_range(SIDE_QUARTERS):
        acc = acc + (gl.zeros((HEADS, CHANNEL_QUARTER), gl.float32, layout=OUTPUT),)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=HEAD_ROWS)
    return acc, largest, gl.zeros((HEADS,), gl.float32, layout=HEAD_ROWS)


@gluon.jit
def multiply_many(tiles, count, memory, query, exchange, scale, STAGES: gl.constexpr,
                  SIDE: gl.constexpr):  # fmt: skip
    """Compute the softmax of 64 heads, and a side's half of the output's channels.

    Tiles are counted from `count` on.
    """
    acc, largest, total = start_many()
    wait_for_query()
    for _ in range(tiles.first, tiles.end, tiles.step):
        stage = count % STAGES
        mbarrier.wait(memory.full.index(stage), count // STAGES % 2)
        pending = start_logits(query, memory, count, stage, SIDE)
        logits = add_other(warpgroup_mma_wait(0, deps=[pending]), exchange, count, SIDE)
        new_largest = gl.maximum(largest, gl.max(logits, axis=1) * scale)  # [HEADS]
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits * scale - base[:, None])  # [HEADS, TILE]
        largest, total = new_largest, total * shrink + gl.sum(tile_weights, axis=1)
        weights = gl.convert_layout(tile_weights.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
        acc = add_output(acc, shrink, weights, memory.quarters, stage, SIDE)
        gl.thread_barrier()
        mbarrier.arrive(memory.empty.index(stage), count=1)
        count += 1
    return acc, largest, total, count


@gluon.jit
def store_part(acc, part_ptr, SIDE: gl.constexpr):
    """Store a side's accumulators of the splits so far."""
    for nth in gl.static_range(SIDE_QUARTERS):
        gl.store(part_ptr + quarter_offsets(SIDE * SIDE_QUARTERS + nth, HEADS, OUTPUT), acc[nth])


@gluon.jit
def join_part(acc, largest, total, before, part_ptr, SIDE: gl.constexpr):
    """Join a split to those before it, as `_combine_kernel` does.

    before are the largest logits and the sums of those, whose accumulators are at part_ptr.
    """
    new_largest = gl.maximum(before[0], largest)
    base = finite_base(new_largest)
    shrink, grow = gl.exp2(before[0] - base), gl.exp2(largest - base)
    total = before[1] * shrink + total * grow
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
    grow = gl.convert_layout(grow, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
    joined = gl.tuple(())
    for nth in gl.static_range(SIDE_QUARTERS):
        at = quarter_offsets(SIDE * SIDE_QUARTERS + nth, HEADS, OUTPUT)
        joined = joined + (gl.load(part_ptr + at) * shrink + acc[nth] * grow,)
    return joined, new_largest, total


@gluon.jit
def store_many(acc, largest, total, query, results, out_loc, has_rows, NUM_HEADS: gl.constexpr,
               IS_SPLIT: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Store a side's half of the output's channels, or of a split's partial output."""
    first_head, row, part_row = out_loc.first_head, out_loc.row, out_loc.part_row
    head = gl.arange(0, HEADS, layout=HEAD_ROWS)  # [HEADS]
    is_head = first_head + head < NUM_HEADS
    if IS_SPLIT:
        if SIDE == 0:
            gl.store(results.stats_ptr + 2 * (part_row + head), largest, mask=is_head)
            gl.store(results.stats_ptr + 2 * (part_row + head) + 1, total, mask=is_head)
        for nth in gl.static_range(SIDE_QUARTERS):
            at = quarter_offsets(SIDE * SIDE_QUARTERS + nth, HEADS, OUTPUT)
            is_there = has_rows & (first_head * DIM + at < NUM_HEADS * DIM)
            gl.store(results.partials_ptr + part_row * DIM + at, acc[nth], mask=is_there)
    else:
        if SIDE == 0:
            gl.store(results.lse_ptr + row + head, log_sum_exp(largest, total), mask=is_head)
        sink = gl.load(results.sinks_ptr + first_head + head, mask=is_head, other=0.0)
        factor = output_factor(sink, largest, total)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
        # The output passes through the query's shared memory, so that rows are stored whole.
        for nth in gl.static_range(SIDE_QUARTERS):
            values = acc[nth] * factor[:, None]  # [HEADS, CHANNEL_QUARTER]
            if SIDE * SIDE_QUARTERS + nth == CHANNEL_QUARTERS - 1:
                values = rotate_back(values, results.cos_ptr, results.sin_ptr, out_loc.token_idx)
            query[SIDE * SIDE_QUARTERS + nth].index(0).store(values.to(gl.bfloat16))
        gl.thread_barrier()
        for nth in gl.static_range(SIDE_QUARTERS):
            at = quarter_offsets(SIDE * SIDE_QUARTERS + nth, HEADS, DENSE)
            values = query[SIDE * SIDE_QUARTERS + nth].index(0).load(DENSE)
            is_there = first_head * DIM + at < NUM_HEADS * DIM
            gl.store(results.output_ptr + row * DIM + at, values, mask=is_there)
