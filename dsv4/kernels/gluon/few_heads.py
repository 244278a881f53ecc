"""Multiplying for 16 or 32 heads on Hopper: a tile's rows, then channels, are a product's rows.

A product has at least 64 rows, so that with fewer heads everything is transposed. Sides share the
work as in `gluon.many_heads`; weights go by way of shared memory, where a product wants them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.gluon.decode import DIM, PART, PARTS, SIDE_PARTS, TILE
from dsv4.kernels.gluon.softmax import (
    DENSE,
    finite_base,
    log_sum_exp,
    output_factor,
    part_offsets,
    rotate_back,
    wait_for_query,
)

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def start_logits(query, parts, biases, count, stage, LAYOUT: gl.constexpr):
    """Start the product of a tile's rows and the queries, on top of the rows' biases.

    That the query's place seems to change keeps its many addresses out of registers.
    """
    HEADS: gl.constexpr = query[0].shape[1]
    place = count >> 24  # 0
    bias = biases.index(stage).load(gl.SliceLayout(1, LAYOUT))[:, None]
    pending = gl.zeros((TILE, HEADS), gl.float32, layout=LAYOUT) + bias
    for part in gl.static_range(PARTS):
        heads = query[part].index(place).permute((1, 0))
        pending = warpgroup_mma(parts[part].index(stage), heads, pending, is_async=True)
    return pending


@gluon.jit
def add_output(acc, shrink, weights, parts, stage, SIDE: gl.constexpr):
    """Shrink a side's accumulators and add its product of a tile's rows and weights."""
    pending = gl.tuple(())
    for part in gl.static_range(SIDE_PARTS):
        channels = parts[SIDE * SIDE_PARTS + part].index(stage).permute((1, 0))
        shrunk = acc[part] * shrink[None, :]
        pending = pending + (warpgroup_mma(channels, weights, shrunk, is_async=True),)
    return warpgroup_mma_wait(0, deps=pending)


@gluon.jit
def multiply_few(tiles, memory, query, barriers, weights, scale, results,
                 NUM_HEADS: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
                 SIDE: gl.constexpr):  # fmt: skip
    """The softmax of a program's heads, and a side's half of the output's channels."""
    HEADS: gl.constexpr = query[0].shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    first, end, step = tiles
    parts, biases, full, empty = memory
    is_loaded, is_done = barriers
    weights = weights.index(SIDE).permute((1, 0))
    acc = gl.tuple(())
    for _ in gl.static_range(SIDE_PARTS):
        acc = acc + (gl.zeros((PART, HEADS), gl.float32, layout=LAYOUT),)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=gl.SliceLayout(0, LAYOUT))
    totals = gl.zeros((TILE, HEADS), gl.float32, layout=LAYOUT)
    wait_for_query(is_loaded, SIDE)
    count = 0
    for _ in range(first, end, step):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES % 2)
        pending = start_logits(query, parts, biases, count, stage, LAYOUT)
        logits = warpgroup_mma_wait(0, deps=[pending])
        new_largest = gl.maximum(largest, gl.max(logits, axis=0) * scale)
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits * scale - base[None, :])
        weights.store(tile_weights.to(gl.bfloat16))
        largest, totals = new_largest, totals * shrink[None, :] + tile_weights
        fence_async_shared()
        gl.thread_barrier()
        acc = add_output(acc, shrink, weights, parts, stage, SIDE)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    mbarrier.arrive(is_done, count=1)
    mbarrier.wait(is_done, 0)
    store_few(acc, largest, gl.sum(totals, axis=0), parts, results, first < end, NUM_HEADS,
              IS_SPLIT, SIDE)  # fmt: skip


@gluon.jit
def store_few(acc, largest, total, parts, results, has_rows, NUM_HEADS: gl.constexpr,
              IS_SPLIT: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """What a side has of the output, or of a part of it, by way of the first stage."""
    HEADS: gl.constexpr = acc[0].shape[1]
    (sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, position,
     first_head, query_row, partial_row) = results  # fmt: skip
    for part in gl.static_range(SIDE_PARTS):
        stage = parts[SIDE * SIDE_PARTS + part].index(0)
        stage._reinterpret(gl.float32, (HEADS, PART), PLAIN).permute((1, 0)).store(acc[part])
    gl.thread_barrier()
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, DENSE))
    is_head = head < NUM_HEADS
    largest = gl.convert_layout(largest, gl.SliceLayout(1, DENSE))
    total = gl.convert_layout(total, gl.SliceLayout(1, DENSE))
    if SIDE == 0:
        if IS_SPLIT:
            gl.store(stats_ptr + 2 * (partial_row + head), largest, mask=is_head)
            gl.store(stats_ptr + 2 * (partial_row + head) + 1, total, mask=is_head)
        else:
            gl.store(lse_ptr + query_row + head, log_sum_exp(largest, total), mask=is_head)
    sink = gl.load(sinks_ptr + first_head + head, mask=is_head, other=0.0)
    factor = output_factor(sink, largest, total)[:, None]
    for part in gl.static_range(SIDE * SIDE_PARTS, (SIDE + 1) * SIDE_PARTS):
        values = parts[part].index(0)._reinterpret(gl.float32, (HEADS, PART), PLAIN).load(DENSE)
        at = part_offsets(part, HEADS, DENSE)
        if IS_SPLIT:
            mask = is_head[:, None] & has_rows
            gl.store(partials_ptr + partial_row * DIM + at, values, mask=mask)
        else:
            values *= factor
            if part == PARTS - 1:
                values = gl.convert_layout(rotate_back(values, cos_ptr, sin_ptr, position), DENSE)
            gl.store(output_ptr + query_row * DIM + at, values.to(gl.bfloat16),
                     mask=is_head[:, None])  # fmt: skip
