"""Multiplying for up to 64 heads on Hopper: heads are the rows of both products.

Two groups of warps, the sides, are partitions of their own, and each has one half of the channels.
Logits are the sum of both halves' products, which the sides exchange by way of shared memory. Both
then take the softmax, so that weights stay in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.triton.hopper.decode import DIM, PART, PARTS, SIDE_PARTS, TILE
from dsv4.kernels.triton.hopper.program import make_barrier
from dsv4.kernels.triton.hopper.softmax import (
    DENSE,
    finite_base,
    log_sum_exp,
    output_factor,
    part_offsets,
    rotate_back,
    wait_for_query,
)

HEADS = gl.constexpr(64)
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
HEAD_ROWS = gl.constexpr(gl.SliceLayout(1, LOGITS.value))
# Of logits on their way: the rows that a warp stores at once are in different banks.
EXCHANGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def make_exchange():
    """Memory for logits on their way, and barriers: both sides have written, have taken them."""
    exchanged = gl.allocate_shared_memory(gl.float32, (2, HEADS, TILE), EXCHANGED)
    return exchanged, make_barrier(2), make_barrier(2)


@gluon.jit
def start_logits(query, parts, biases, count, stage, SIDE: gl.constexpr):
    """Start a side's product of the queries and a tile's rows; one is on top of the rows' biases.

    That the query's place seems to change keeps its many addresses out of registers.
    """
    place = count >> 24  # 0
    pending = gl.zeros((HEADS, TILE), gl.float32, layout=LOGITS)
    if SIDE == 0:
        pending += biases.index(stage).load(gl.SliceLayout(0, LOGITS))[None, :]
    for part in gl.static_range(SIDE * SIDE_PARTS, (SIDE + 1) * SIDE_PARTS):
        keys = parts[part].index(stage).permute((1, 0))
        pending = warpgroup_mma(query[part].index(place), keys, pending, is_async=True)
    return pending


@gluon.jit
def add_other(logits, between, count, SIDE: gl.constexpr):
    """Add the other side's logits of the tile to a side's own; both get the same sums."""
    exchanged, is_written, is_taken = between
    mbarrier.wait(is_taken, (count + 1) % 2)
    exchanged.index(SIDE).store(logits)
    gl.thread_barrier()
    mbarrier.arrive(is_written, count=1)
    mbarrier.wait(is_written, count % 2)
    logits += exchanged.index(1 - SIDE).load(LOGITS)
    gl.thread_barrier()
    mbarrier.arrive(is_taken, count=1)
    return logits


@gluon.jit
def add_output(acc, shrink, weights, parts, stage, SIDE: gl.constexpr):
    """Shrink a side's accumulators and add its product of a tile's weights and rows.

    All of them shrink before the first product starts, so that no product waits for one.
    """
    factor = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
    shrunk, pending = gl.tuple(()), gl.tuple(())
    for part in gl.static_range(SIDE_PARTS):
        shrunk = shrunk + (acc[part] * factor,)
    for part in gl.static_range(SIDE_PARTS):
        values = parts[SIDE * SIDE_PARTS + part].index(stage)
        pending = pending + (warpgroup_mma(weights, values, shrunk[part], is_async=True),)
    return warpgroup_mma_wait(0, deps=pending)


@gluon.jit
def multiply_many(tiles, count, memory, query, between, scale, STAGES: gl.constexpr,
                  SIDE: gl.constexpr):  # fmt: skip
    """The softmax of 64 heads, and a side's half of the output's channels.

    Tiles are counted from `count` on.
    """
    first, end, step = tiles
    parts, biases, full, empty = memory
    acc = gl.tuple(())
    for _ in gl.static_range(SIDE_PARTS):
        acc = acc + (gl.zeros((HEADS, PART), gl.float32, layout=OUTPUT),)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=HEAD_ROWS)
    total = gl.zeros((HEADS,), gl.float32, layout=HEAD_ROWS)
    wait_for_query()
    for _ in range(first, end, step):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES % 2)
        pending = start_logits(query, parts, biases, count, stage, SIDE)
        logits = add_other(warpgroup_mma_wait(0, deps=[pending]), between, count, SIDE)
        new_largest = gl.maximum(largest, gl.max(logits, axis=1) * scale)
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits * scale - base[:, None])
        largest, total = new_largest, total * shrink + gl.sum(tile_weights, axis=1)
        weights = gl.convert_layout(tile_weights.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
        acc = add_output(acc, shrink, weights, parts, stage, SIDE)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    return acc, largest, total, count


@gluon.jit
def store_many(acc, largest, total, query, results, where, has_rows, NUM_HEADS: gl.constexpr,
               IS_SPLIT: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """What a side has of the output, or of a part of it."""
    sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr = results
    position, first_head, row, part_row = where
    head = gl.arange(0, HEADS, layout=HEAD_ROWS)
    is_head = first_head + head < NUM_HEADS
    if IS_SPLIT:
        if SIDE == 0:
            gl.store(stats_ptr + 2 * (part_row + head), largest, mask=is_head)
            gl.store(stats_ptr + 2 * (part_row + head) + 1, total, mask=is_head)
        for part in gl.static_range(SIDE_PARTS):
            at = part_offsets(SIDE * SIDE_PARTS + part, HEADS, OUTPUT)
            is_there = has_rows & (first_head * DIM + at < NUM_HEADS * DIM)
            gl.store(partials_ptr + part_row * DIM + at, acc[part], mask=is_there)
    else:
        if SIDE == 0:
            gl.store(lse_ptr + row + head, log_sum_exp(largest, total), mask=is_head)
        sink = gl.load(sinks_ptr + first_head + head, mask=is_head, other=0.0)
        factor = output_factor(sink, largest, total)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
        # By way of shared memory, where a side's half of the query was, rows are stored whole.
        for part in gl.static_range(SIDE_PARTS):
            values = acc[part] * factor[:, None]
            if SIDE * SIDE_PARTS + part == PARTS - 1:
                values = rotate_back(values, cos_ptr, sin_ptr, position)
            query[SIDE * SIDE_PARTS + part].index(0).store(values.to(gl.bfloat16))
        gl.thread_barrier()
        for part in gl.static_range(SIDE_PARTS):
            at = part_offsets(SIDE * SIDE_PARTS + part, HEADS, DENSE)
            values = query[SIDE * SIDE_PARTS + part].index(0).load(DENSE)
            is_there = first_head * DIM + at < NUM_HEADS * DIM
            gl.store(output_ptr + row * DIM + at, values, mask=is_there)
