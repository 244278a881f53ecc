"""Multiplying for 8 or 16 heads on Hopper: a tile's rows, then channels, are a product's rows.

A product has at least 64 rows, so that with fewer heads everything is transposed. Two groups of
warps, the sides, are partitions of their own: each takes every second tile, with a softmax of its
own, and they meet once, at the end. There each leaves what it has in the stage of its last tile,
which nobody else needs any more, and merges one half of the channels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.triton.hopper.decode import DIM, OPERAND, PART, PARTS, SIDE_PARTS, TILE, VECTOR
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

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def make_sides(HEADS: gl.constexpr):
    """Both sides' memories; and barriers: the query is loaded, both have left what they have."""
    return (side_memory(HEADS), side_memory(HEADS)), make_barrier(2), make_barrier(2)


@gluon.jit
def side_memory(HEADS: gl.constexpr):
    """Weights of a tile; the largest logits and sums that a side ends with."""
    weights = gl.allocate_shared_memory(gl.bfloat16, (HEADS, TILE), OPERAND)
    largest = gl.allocate_shared_memory(gl.float32, (HEADS,), VECTOR)
    total = gl.allocate_shared_memory(gl.float32, (HEADS,), VECTOR)
    return weights, largest, total


@gluon.jit
def multiply_few(tiles, memory, query, between, scale, STAGES: gl.constexpr,
                 SIDE: gl.constexpr):  # fmt: skip
    """A side's tiles, for all of a program's heads; returns how many both have."""
    HEADS: gl.constexpr = query[0].shape[1]
    LOGITS_T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    first, end, step = tiles
    parts, biases, full, empty = memory
    sides, is_loaded, is_done = between
    weights, largest_memory, total_memory = sides[SIDE]
    weights = weights.permute((1, 0))
    num_tiles = gl.where(end > first, gl.cdiv(end - first, step), 0)
    acc = gl.tuple(())
    for _ in gl.static_range(PARTS):
        acc = acc + (gl.zeros((PART, HEADS), gl.float32, layout=LOGITS_T),)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=gl.SliceLayout(0, LOGITS_T))
    totals = gl.zeros((TILE, HEADS), gl.float32, layout=LOGITS_T)
    wait_for_query()
    mbarrier.arrive(is_loaded, count=1)
    mbarrier.wait(is_loaded, 0)
    for count in range(SIDE, num_tiles, 2):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES % 2)
        bias = biases.index(stage).load(gl.SliceLayout(1, LOGITS_T))
        pending = gl.zeros((TILE, HEADS), gl.float32, layout=LOGITS_T) + bias[:, None]
        place = count >> 24  # 0; that it seems to change keeps many addresses out of registers
        for part in gl.static_range(PARTS):
            heads = query[part].index(place).permute((1, 0))
            pending = warpgroup_mma(parts[part].index(stage), heads, pending, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[pending])
        new_largest = gl.maximum(largest, gl.max(logits, axis=0) * scale)
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits * scale - base[None, :])
        weights.store(tile_weights.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        new_acc = gl.tuple(())
        for part in gl.static_range(PARTS):
            channels = parts[part].index(stage).permute((1, 0))
            shrunk = acc[part] * shrink[None, :]
            new_acc = new_acc + (warpgroup_mma(channels, weights, shrunk, is_async=True),)
        totals = totals * shrink[None, :] + tile_weights
        largest = new_largest
        acc = warpgroup_mma_wait(0, deps=new_acc)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)

    largest_memory.store(largest)
    total_memory.store(gl.sum(totals, axis=0))
    for part in gl.static_range(PARTS):
        left_values(parts[part], num_tiles, HEADS, STAGES, SIDE).permute((1, 0)).store(acc[part])
    gl.thread_barrier()
    mbarrier.arrive(is_done, count=1)
    mbarrier.wait(is_done, 0)
    return num_tiles


@gluon.jit
def left_values(part, num_tiles, HEADS: gl.constexpr, STAGES: gl.constexpr, SIDE: gl.constexpr):
    """Where a side leaves a part of its accumulators, `[HEADS, PART]`: its last tile's stage."""
    last = (num_tiles + 1 - SIDE) // 2 * 2 - 2 + SIDE  # below 0 if it has none
    stage = (last + 2 * STAGES) % STAGES
    return part.index(stage)._reinterpret(gl.float32, (HEADS, PART), PLAIN)


@gluon.jit
def merge_sides(parts, num_tiles, between, results, where, NUM_HEADS: gl.constexpr,
                HEADS: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr,
                SIDE: gl.constexpr):  # fmt: skip
    """Merge a half of the channels of both sides."""
    sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr = results
    position, first_head, row, part_row = where
    sides, _is_loaded, _is_done = between
    HEAD: gl.constexpr = gl.SliceLayout(1, DENSE)
    head = gl.arange(0, HEADS, layout=HEAD)
    is_head = head < NUM_HEADS
    largest_0, largest_1 = sides[0][1].load(HEAD), sides[1][1].load(HEAD)
    largest = gl.maximum(largest_0, largest_1)
    base = finite_base(largest)
    grow_0, grow_1 = gl.exp2(largest_0 - base), gl.exp2(largest_1 - base)
    total = sides[0][2].load(HEAD) * grow_0 + sides[1][2].load(HEAD) * grow_1
    if SIDE == 0:
        if IS_SPLIT:
            gl.store(stats_ptr + 2 * (part_row + head), largest, mask=is_head)
            gl.store(stats_ptr + 2 * (part_row + head) + 1, total, mask=is_head)
        else:
            gl.store(lse_ptr + row + head, log_sum_exp(largest, total), mask=is_head)
    if not IS_SPLIT:
        sink = gl.load(sinks_ptr + first_head + head, mask=is_head, other=0.0)
        factor = output_factor(sink, largest, total)
        grow_0, grow_1 = grow_0 * factor, grow_1 * factor
    for part in gl.static_range(SIDE * SIDE_PARTS, (SIDE + 1) * SIDE_PARTS):
        left = left_values(parts[part], num_tiles, HEADS, STAGES, 0).load(DENSE)
        right = left_values(parts[part], num_tiles, HEADS, STAGES, 1).load(DENSE)
        values = left * grow_0[:, None] + right * grow_1[:, None]
        at = part_offsets(part, HEADS, DENSE)
        if IS_SPLIT:
            mask = is_head[:, None] & (num_tiles > 0)
            gl.store(partials_ptr + part_row * DIM + at, values, mask=mask)
        else:
            if part == PARTS - 1:
                values = gl.convert_layout(rotate_back(values, cos_ptr, sin_ptr, position), DENSE)
            out = values.to(gl.bfloat16)
            gl.store(output_ptr + row * DIM + at, out, mask=is_head[:, None])
