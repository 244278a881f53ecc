"""Attention over fp8 rows on Hopper. The contract is `kernels.triton.attention._attend_kernel`'s.

A program takes a token and a block of its heads and goes over the token's rows in tiles of 64, the
window first. Half of its warps decode tiles into stages in shared memory (`gluon.decode`); the
others multiply, and keep the softmax. A product has at least 64 rows: with 64 heads these are the
heads, with fewer they are the tile's rows and then the channels, and everything is transposed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.gluon.decode import (
    DECODING_WARPS,
    DIM,
    OPERAND,
    ROPE,
    TILE,
    VECTOR,
    decode_tiles,
)


class Cut(NamedTuple):
    """Stages that fit shared memory, and registers of a thread that decodes."""

    STAGES: int
    DECODING_REGISTERS: int


CUTS = {16: Cut(3, 152), 32: Cut(2, 144), 64: Cut(2, 80)}  # by heads of a program
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))


@gluon.jit
def finite_base(largest):
    """What logits are taken relative to: 0 where there is none yet."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def output_factor(sink, largest, total):
    """What accumulators are multiplied by: 1 / (sum + sink); 0 where no row was seen."""
    with_sink = total + gl.exp2(sink.to(gl.float32) * LOG2_E - finite_base(largest))
    return gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, with_sink))


@gluon.jit
def log_sum_exp(largest, total):
    """The log-sum-exp without the sink."""
    return (largest + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN_2


@gluon.jit
def rotate_back(values, cos_ptr, sin_ptr, position):
    """Rotate the trailing channels of `[heads, DIM]` back at a position."""
    HEADS: gl.constexpr = values.shape[0]
    even, odd = gl.split(gl.reshape(values, (HEADS, DIM // 2, 2)))
    pair = gl.arange(0, DIM // 2, layout=gl.SliceLayout(0, even.type.layout)) - (DIM - ROPE) // 2
    offset = position.to(gl.int64) * (ROPE // 2) + pair
    cos = gl.load(cos_ptr + offset, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(sin_ptr + offset, mask=pair >= 0, other=0.0)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.reshape(turned, (HEADS, DIM))


@gluon.jit
def dense_offsets(HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of `[HEADS, DIM]` in rows that lie one after the other."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    return head * DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def multiply_tiles(tiles, memory, query, weights, scale, results, NUM_HEADS: gl.constexpr,
                   STAGES: gl.constexpr, IS_SPLIT: gl.constexpr):  # fmt: skip
    """Products and softmax of 64 heads over every tile, and what becomes of them."""
    HEADS: gl.constexpr = 64
    first, end, step = tiles
    stages, biases, full, empty = memory
    acc = gl.zeros((HEADS, DIM), gl.float32, layout=OUTPUT)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, LOGITS))
    total = gl.zeros((HEADS,), gl.float32, layout=gl.SliceLayout(1, LOGITS))
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    count = 0
    for _ in range(first, end, step):
        stage, phase = count % STAGES, count // STAGES % 2
        now = stages.index(stage)
        mbarrier.wait(full.index(stage), phase)
        logits = gl.zeros((HEADS, TILE), gl.float32, layout=LOGITS)
        pending = warpgroup_mma(query, now.permute((1, 0)), logits, use_acc=False, is_async=True)
        bias = biases.index(stage).load(gl.SliceLayout(0, LOGITS))
        logits = warpgroup_mma_wait(0, deps=[pending])
        logits = logits * scale + bias[None, :]
        new_largest = gl.maximum(largest, gl.max(logits, axis=1))
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits - base[:, None])
        weights.store(tile_weights.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
        pending = warpgroup_mma(weights, now, acc, is_async=True)
        total = total * shrink + gl.sum(tile_weights, axis=1)
        largest = new_largest
        acc = warpgroup_mma_wait(0, deps=[pending])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1

    (sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, position,
     first_head, query_row, partial_row) = results  # fmt: skip
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LOGITS))
    if IS_SPLIT:
        gl.store(stats_ptr + 2 * (partial_row + head), largest)
        gl.store(stats_ptr + 2 * (partial_row + head) + 1, total)
        at = partials_ptr + partial_row * DIM + dense_offsets(HEADS, OUTPUT)
        gl.store(at, acc, mask=first < end)
    else:
        gl.store(lse_ptr + query_row + head, log_sum_exp(largest, total))
        factor = output_factor(gl.load(sinks_ptr + first_head + head), largest, total)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, OUTPUT))[:, None]
        # By way of shared memory, where the query is not needed any more, rows are stored whole.
        query.store(rotate_back(acc, cos_ptr, sin_ptr, position).to(gl.bfloat16))
        gl.thread_barrier()
        gl.store(output_ptr + query_row * DIM + dense_offsets(HEADS, DENSE), query.load(DENSE))


@gluon.jit
def multiply_few(tiles, memory, query, weights, scale, results, NUM_HEADS: gl.constexpr,
                 STAGES: gl.constexpr, IS_SPLIT: gl.constexpr):  # fmt: skip
    """The same for 16 or 32 heads, of which NUM_HEADS are there: logits are `[TILE, heads]`."""
    HEADS: gl.constexpr = query.shape[0]
    LOGITS_T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEADS // 2, 16])
    OUTPUT_T: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEADS, 16])
    first, end, step = tiles
    stages, biases, full, empty = memory
    acc = gl.zeros((DIM, HEADS), gl.float32, layout=OUTPUT_T)
    largest = gl.full((HEADS,), float("-inf"), gl.float32, layout=gl.SliceLayout(0, LOGITS_T))
    totals = gl.zeros((TILE, HEADS), gl.float32, layout=LOGITS_T)
    fence_async_shared()
    gl.thread_barrier()
    count = 0
    for _ in range(first, end, step):
        stage, phase = count % STAGES, count // STAGES % 2
        now = stages.index(stage)
        mbarrier.wait(full.index(stage), phase)
        logits = gl.zeros((TILE, HEADS), gl.float32, layout=LOGITS_T)
        pending = warpgroup_mma(now, query.permute((1, 0)), logits, use_acc=False, is_async=True)
        bias = biases.index(stage).load(gl.SliceLayout(1, LOGITS_T))
        logits = warpgroup_mma_wait(0, deps=[pending])
        logits = logits * scale + bias[:, None]
        new_largest = gl.maximum(largest, gl.max(logits, axis=0))
        base = finite_base(new_largest)
        shrink = gl.exp2(largest - base)
        tile_weights = gl.exp2(logits - base[None, :])
        weights.permute((1, 0)).store(tile_weights.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(0, OUTPUT_T))[None, :]
        pending = warpgroup_mma(now.permute((1, 0)), weights.permute((1, 0)), acc, is_async=True)
        totals = totals * shrink[None, :] + tile_weights
        largest = new_largest
        acc = warpgroup_mma_wait(0, deps=[pending])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1

    (sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, position,
     first_head, query_row, partial_row) = results  # fmt: skip
    staged = stages.index(0)._reinterpret(gl.float32, (HEADS, DIM), PLAIN)
    staged.permute((1, 0)).store(acc)
    gl.thread_barrier()
    values = staged.load(DENSE)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, DENSE))
    is_head = head < NUM_HEADS
    largest = gl.convert_layout(largest, gl.SliceLayout(1, DENSE))
    total = gl.convert_layout(gl.sum(totals, axis=0), gl.SliceLayout(1, DENSE))
    at, mask = dense_offsets(HEADS, DENSE), is_head[:, None]
    if IS_SPLIT:
        gl.store(stats_ptr + 2 * (partial_row + head), largest, mask=is_head)
        gl.store(stats_ptr + 2 * (partial_row + head) + 1, total, mask=is_head)
        gl.store(partials_ptr + partial_row * DIM + at, values, mask=mask & (first < end))
    else:
        gl.store(lse_ptr + query_row + head, log_sum_exp(largest, total), mask=is_head)
        sink = gl.load(sinks_ptr + first_head + head, mask=is_head, other=0.0)
        values = values * output_factor(sink, largest, total)[:, None]
        values = gl.convert_layout(rotate_back(values, cos_ptr, sin_ptr, position), DENSE)
        gl.store(output_ptr + query_row * DIM + at, values.to(gl.bfloat16), mask=mask)


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
):  # fmt: skip
    """A token and HEADS of its heads over one split of its rows."""
    BLOCKS: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    part = gl.program_id(0) // BLOCKS
    first_head = gl.program_id(0) % BLOCKS * HEADS
    token, split = first_token + part, gl.program_id(1)
    request = gl.load(request_ids_ptr + token)
    slot = gl.load(request_slots_ptr + request).to(gl.int64)
    position = gl.load(positions_ptr + token)
    num_rows = WINDOW
    if ENTRIES == "listed":
        num_rows += num_entries
    elif ENTRIES == "all":
        num_rows += gl.minimum((position + 1) // RATIO, num_entries)
    num_rows = gl.where(slot >= 0, num_rows, 0)
    first = split * split_step
    end = gl.minimum(first + tiles_per_split * tile_step, gl.cdiv(num_rows, TILE))

    query = gl.allocate_shared_memory(gl.bfloat16, (HEADS, DIM), OPERAND)
    stages = gl.allocate_shared_memory(gl.bfloat16, (STAGES, TILE, DIM), OPERAND)
    weights = gl.allocate_shared_memory(gl.bfloat16, (HEADS, TILE), OPERAND)
    biases = gl.allocate_shared_memory(gl.float32, (STAGES, TILE), VECTOR)
    query_row = token.to(gl.int64) * NUM_HEADS + first_head
    at = dense_offsets(HEADS, DENSE)
    if HEADS == 64:
        async_copy.async_copy_global_to_shared(query, query_ptr + query_row * DIM + at)
        async_copy.commit_group()
    else:
        is_head = at < NUM_HEADS * DIM
        query.store(gl.load(query_ptr + query_row * DIM + at, mask=is_head, other=0.0))

    window_ptr = ring_ptr + slot * ring_stride
    window_scales = ring_scales_ptr.to(gl.int64) - ring_ptr.to(gl.int64)
    window_start = gl.to_tensor(0)
    in_workspace = gl.to_tensor(False)
    if HAS_CHUNKS:
        window_start = gl.load(starts_ptr + request)
        in_workspace = window_start >= 0
        window_start += position - gl.load(before_ptr + request)
        window_ptr = gl.where(in_workspace, workspace_ptr, window_ptr)
        workspace_scales = workspace_scales_ptr.to(gl.int64) - workspace_ptr.to(gl.int64)
        window_scales = gl.where(in_workspace, workspace_scales, window_scales)
    where = (position, window_start, in_workspace, num_rows,
             rows_ptr + token.to(gl.int64) * rows_stride, row_stride,
             block_table_ptr + slot * table_stride)  # fmt: skip
    bases = window_ptr, window_scales.to(gl.int32), entries_ptr, entries_stride

    full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.thread_barrier()
    tiles = first, end, tile_step
    memory = stages, biases, full, empty
    results = (sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr,
               position, first_head, query_row,
               (part.to(gl.int64) * num_splits + split) * NUM_HEADS + first_head)  # fmt: skip
    gl.warp_specialize(
        [
            (
                multiply_tiles if HEADS == 64 else multiply_few,
                (tiles, memory, query, weights, scale, results, NUM_HEADS, STAGES, IS_SPLIT),
            ),
            (
                decode_tiles,
                (
                    tiles,
                    memory,
                    where,
                    bases,
                    ENTRIES,
                    WINDOW,
                    RING_ROWS,
                    ENTRY_ROWS,
                    STAGES,
                    HEADS < 64,
                ),
            ),
        ],
        [DECODING_WARPS],
        [DECODING_REGISTERS],
    )
