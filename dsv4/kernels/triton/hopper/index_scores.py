"""Index scores of a chunk on Hopper, in place of `_score_kernel` of `kernels.triton.indexer`.

`kernels.triton.chunk_scores` launches it, over keys that it has made dense operands.

A work item is a group of tokens of one request, 2 of 64 heads or 4 of 32, and a range of its keys.
One warp copies the group's queries and tiles of 256 keys to shared memory. Four groups of warps
each multiply 64 keys of a tile by the 128 heads. While one group sums over heads, the products of
others run.

A thread has a quarter of the heads of two keys for each token. It adds them in ascending order,
then the four threads that share the keys add theirs: lanes 0 and 2, 1 and 3, then both.
`_score_kernel` adds in the same order, so scores are the same bits. The exchange leaves one score
of each pair of tokens to each of the four.

Top-k begins here: two warps follow the others, read the scores that are stored and store the
largest of every 8, the tops of `kernels.triton.topk`. They find the scores in the L2 cache. To find
them in registers would take the groups that multiply more time than a pass over memory.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from dsv4.kernels.index_scratch import GROUP
from dsv4.kernels.triton.hopper.program import make_barriers
from dsv4.kernels.triton.operands import PLAN_PTRS

DIM = gl.constexpr(128)
COLUMNS = gl.constexpr(128)  # heads of all tokens of a work item
ROWS = gl.constexpr(64)  # keys of a product
SIDES = gl.constexpr(4)  # groups of warps that multiply
TILE = gl.constexpr(256)  # keys of all sides
STAGES = gl.constexpr(4)  # tiles in shared memory
REGISTERS = gl.constexpr(112)  # of a thread that multiplies; with 120 the first side spills more
GROUP_SIZE = gl.constexpr(GROUP)  # entries of a top
TOP_WARPS = gl.constexpr(2)  # that store tops, a lane those of 8 keys for each pair of tokens
TOP_REGISTERS = gl.constexpr(32)  # with 40 the first side spills more
TOPS_BEHIND = gl.constexpr(2)  # tiles whose stages are freed before the tops in front of them
TILES_STORED = gl.constexpr(8)  # barriers of stored tiles; at least STAGES + TOPS_BEHIND
VECTOR = gl.constexpr(4)  # scores that are read at once
GROUPS = gl.constexpr(4)  # groups of channels that have scales in mxfp4
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))


@gluon.constexpr_function
def scores_layout(PAIRS):
    """Pair of tokens, warp, row of 8, lane of 4: the scores of a side, PAIRS a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0, 0, 0]] if PAIRS == 2 else [],
        lane_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        warp_bases=[[0, 1, 0, 0], [0, 2, 0, 0]],
        block_bases=[],
        shape=[PAIRS, 4, 8, 4],
    )


@gluon.constexpr_function
def along(AXIS, LAYOUT):
    """The layout of one of four axes."""
    for axis in (3, 2, 1, 0):
        if axis != AXIS:
            LAYOUT = gl.SliceLayout(axis, LAYOUT)
    return LAYOUT


class Works(NamedTuple):
    """The work items of a launch, and the plan's arrays.

    key_stride is the operands from one chunk to the next. Items have split_tiles tiles each, and
    those of one range of keys follow each other.
    """

    first_token: gl.tensor
    num_tokens: gl.tensor
    topk: gl.tensor
    positions_ptr: gl.tensor
    request_ids_ptr: gl.tensor
    request_slots_ptr: gl.tensor
    chunk_ids_ptr: gl.tensor
    num_chunks: gl.tensor
    key_stride: gl.tensor
    num_items: gl.tensor
    num_groups: gl.tensor
    split_tiles: gl.tensor


class Item(NamedTuple):
    """A work item: the row of its first token, its request's first key, its tiles."""

    row: gl.tensor
    first_key: gl.tensor
    first: gl.tensor
    end: gl.tensor


class Stages(NamedTuple):
    """Operands in shared memory, and barriers of each stage: it is full, it is empty."""

    operands: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class ScorePtrs(NamedTuple):
    """The scores, their tops, weights of heads, and scales of keys; strides are of rows."""

    scores_ptr: gl.tensor
    scores_stride: gl.tensor
    tops_ptr: gl.tensor
    tops_stride: gl.tensor
    weights_ptr: gl.tensor
    weights_stride: gl.tensor
    scales_ptr: gl.tensor


@gluon.jit
def make_stages(descriptor, NUM_ROWS: gl.constexpr, COUNT: gl.constexpr, NUM: gl.constexpr,
                NUM_READERS: gl.constexpr):  # fmt: skip
    """Allocate NUM buffers of COUNT stages each, which readers free together."""
    operands = gl.tuple(())
    for _ in gl.static_range(NUM):
        operands = operands + (
            gl.allocate_shared_memory(descriptor.dtype, (COUNT, NUM_ROWS, DIM), descriptor.layout),
        )
    return Stages(operands, make_barriers(COUNT, 1), make_barriers(COUNT, NUM_READERS))


@gluon.jit
def find_item(item, works, RATIO: gl.constexpr, HEADS: gl.constexpr):
    """Find a work item; it has no tiles unless its tokens are of one chunk, and see enough."""
    TOKENS: gl.constexpr = COLUMNS // HEADS
    row = item % works.num_groups * TOKENS
    token = works.first_token + row
    last = works.first_token + gl.minimum(row + TOKENS - 1, works.num_tokens - 1)
    request = gl.load(works.request_ids_ptr + token)
    is_scored = gl.load(works.request_ids_ptr + last) == request
    is_scored &= gl.load(works.request_slots_ptr + request) >= 0
    count = (gl.load(works.positions_ptr + last) + 1) // RATIO
    chunk = gl.to_tensor(0)
    while gl.load(works.chunk_ids_ptr + chunk, mask=chunk < works.num_chunks, other=request) != (
        request
    ):
        chunk += 1
    is_scored &= (count > works.topk) & (chunk < works.num_chunks)
    first = item // works.num_groups * works.split_tiles
    end = gl.minimum(first + works.split_tiles, gl.cdiv(count, TILE))
    return Item(row, chunk * works.key_stride, first, gl.where(is_scored, end, first))


@gluon.jit
def copy_operands(key_desc, query_desc, keys, queries, works, RATIO: gl.constexpr,
                  HEADS: gl.constexpr):  # fmt: skip
    """Copy the queries and keys of one work item after another."""
    num_tiles, num_items = gl.to_tensor(0), gl.to_tensor(0)
    for nth in range(gl.program_id(0), works.num_items, gl.num_programs(0)):
        item = find_item(nth, works, RATIO, HEADS)
        if item.first < item.end:
            stage = num_items % 2
            mbarrier.wait(queries.empty.index(stage), num_items // 2 % 2 ^ 1)
            full = queries.full.index(stage)
            mbarrier.expect(full, COLUMNS * DIM)
            tma.async_copy_global_to_shared(
                query_desc, [item.row * HEADS, 0], full, queries.operands[0].index(stage)
            )
            num_items += 1
            for tile in range(item.first, item.end):
                stage = num_tiles % STAGES
                mbarrier.wait(keys.empty.index(stage), num_tiles // STAGES % 2 ^ 1)
                full = keys.full.index(stage)
                mbarrier.expect(full, TILE * DIM)
                for side in gl.static_range(SIDES):
                    first_key = item.first_key + tile * TILE + side * ROWS
                    tma.async_copy_global_to_shared(
                        key_desc, [first_key, 0], full, keys.operands[side].index(stage)
                    )
                num_tiles += 1


@gluon.jit
def from_lane(x, IS_NEXT: gl.constexpr):
    """The value of the lane whose number differs in bit 0, or else in bit 1."""
    if IS_NEXT:
        other = gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "=r,r", [x],
                                          dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    else:
        other = gl.inline_asm_elementwise("shfl.sync.bfly.b32 $0, $1, 2, 31, -1;", "=r,r", [x],
                                          dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip
    return other


@gluon.jit
def sum_heads(products, weights, HEADS: gl.constexpr):
    """Sum w_h 2 ReLU(x_h) of products `[ROWS, COLUMNS]`; NaN stays NaN.

    Returns the scores as `scores_layout` places them: lane q of 4 has the token q % 2 of each pair,
    and the upper or lower 8 rows of a warp by q // 2.
    """
    PAIRS: gl.constexpr = COLUMNS // HEADS // 2
    weighted = (products + gl.abs(products)) * weights[None, :]
    # warp, half, row, pair, token, heads: HEADS / 8 × lane × 2
    parts = gl.reshape(weighted, (4, 2, 8, PAIRS, 2, HEADS // 8, 4, 2))
    parts = gl.permute(parts, (3, 0, 2, 6, 1, 4, 5, 7))
    parts = gl.reshape(parts, (PAIRS, 4, 8, 4, 2, 2, HEADS // 4))
    first, second = gl.split(gl.sum(parts, axis=6))
    first_upper, first_lower = gl.split(first)
    second_upper, second_lower = gl.split(second)
    lane = gl.arange(0, 4, layout=along(3, first_upper.type.layout))[None, None, None, :]
    is_lower, is_second = lane >= 2, lane % 2 == 1
    first = gl.where(is_lower, first_lower, first_upper)
    first += from_lane(gl.where(is_lower, first_upper, first_lower), False)
    second = gl.where(is_lower, second_lower, second_upper)
    second += from_lane(gl.where(is_lower, second_upper, second_lower), False)
    score = gl.where(is_second, second, first)
    score += from_lane(gl.where(is_second, first, second), True)
    return gl.convert_layout(score, scores_layout(PAIRS), assert_trivial=True)


@gluon.jit
def score_places(HEADS: gl.constexpr):
    """The key among a side's and the token of each score, as `sum_heads` returns them."""
    PAIRS: gl.constexpr = COLUMNS // HEADS // 2
    LAYOUT: gl.constexpr = scores_layout(PAIRS)
    pair = gl.arange(0, PAIRS, layout=along(0, LAYOUT))[:, None, None, None]
    warp = gl.arange(0, 4, layout=along(1, LAYOUT))[None, :, None, None]
    row = gl.arange(0, 8, layout=along(2, LAYOUT))[None, None, :, None]
    lane = gl.arange(0, 4, layout=along(3, LAYOUT))[None, None, None, :]
    return warp * 16 + lane // 2 * 8 + row, pair * 2 + lane % 2


@gluon.jit
def load_weights(ptrs, first_row, last_token, IS_MXFP4: gl.constexpr, HEADS: gl.constexpr):
    """Load the weights of all tokens' heads; NaN for a query that E5M2 does not hold."""
    head = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, PRODUCTS))
    token = head // HEADS
    if HEADS == 32:  # three rows beyond the part may be outside of the workspace
        token = gl.minimum(token, last_token)
    weight_ptr = ptrs.weights_ptr + first_row * ptrs.weights_stride
    weight_ptr += token * ptrs.weights_stride + head % HEADS
    weights = gl.load(weight_ptr)
    if IS_MXFP4:
        for group in gl.static_range(1, GROUPS + 1):
            is_held = gl.load(weight_ptr + group * HEADS) >= 1.0
            weights = gl.where(is_held, weights, float("nan"))
    return weights


@gluon.jit
def multiply(keys, queries, stored, ptrs, works, RATIO: gl.constexpr, IS_MXFP4: gl.constexpr,
             HEADS: gl.constexpr, HAS_TOPS: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Score one side's keys of one work item after another."""
    num_tiles, num_items = gl.to_tensor(0), gl.to_tensor(0)
    place, token = score_places(HEADS)
    for nth in range(gl.program_id(0), works.num_items, gl.num_programs(0)):
        item = find_item(nth, works, RATIO, HEADS)
        if item.first < item.end:
            first_row = item.row.to(gl.int64)
            last_token = works.num_tokens - 1 - item.row
            weights = load_weights(ptrs, first_row, last_token, IS_MXFP4, HEADS)
            out_ptr = ptrs.scores_ptr + first_row * ptrs.scores_stride + token * ptrs.scores_stride
            is_token = item.row + token < works.num_tokens
            query_stage = num_items % 2
            mbarrier.wait(queries.full.index(query_stage), num_items // 2 % 2)
            query = queries.operands[0].index(query_stage).permute((1, 0))
            for tile in range(item.first, item.end):
                entry = tile * TILE + SIDE * ROWS + place
                is_entry = entry < ptrs.scores_stride
                if not IS_MXFP4:  # before the wait: later, the compiler loads after the product
                    scale = gl.load(ptrs.scales_ptr + (item.first_key + entry), mask=is_entry,
                                    other=0.0)  # fmt: skip
                stage = num_tiles % STAGES
                mbarrier.wait(keys.full.index(stage), num_tiles // STAGES % 2)
                zero = gl.zeros((ROWS, COLUMNS), gl.float32, layout=PRODUCTS)
                pending = warpgroup_mma(
                    keys.operands[SIDE].index(stage), query, zero, use_acc=False, is_async=True
                )
                products = warpgroup_mma_wait(0, deps=[pending])
                gl.thread_barrier()
                mbarrier.arrive(keys.empty.index(stage), count=1)
                if HAS_TOPS:  # the scores of all tiles before are stored
                    mbarrier.arrive(stored.index(num_tiles % TILES_STORED), count=1)
                score = sum_heads(products, weights, HEADS)
                if not IS_MXFP4:
                    score *= scale * 0.5
                gl.store(out_ptr + entry, score, mask=is_entry & is_token)
                num_tiles += 1
            gl.thread_barrier()
            mbarrier.arrive(queries.empty.index(query_stage), count=1)
            num_items += 1
    if HAS_TOPS:
        gl.thread_barrier()
        mbarrier.arrive(stored.index(num_tiles % TILES_STORED), count=1)


@gluon.jit
def find_tops(keys, stored, ptrs, works, RATIO: gl.constexpr, HEADS: gl.constexpr,
              HAS_TOPS: gl.constexpr):  # fmt: skip
    """Store the tops of one work item after another; NaN for a group without a number."""
    PAIRS: gl.constexpr = COLUMNS // HEADS // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [TOP_WARPS, 1], [1, 0])
    nth_group = gl.arange(0, 2 * TILE // GROUP_SIZE, layout=gl.SliceLayout(1, LAYOUT))  # of a pair
    token, first = nth_group // (TILE // GROUP_SIZE), nth_group % (TILE // GROUP_SIZE) * GROUP_SIZE
    member = gl.arange(0, GROUP_SIZE, layout=gl.SliceLayout(0, LAYOUT))
    num_tiles = gl.to_tensor(0)
    if HAS_TOPS:
        for stage in gl.static_range(TOPS_BEHIND):
            mbarrier.arrive(keys.empty.index(stage), count=1)
        for nth in range(gl.program_id(0), works.num_items, gl.num_programs(0)):
            item = find_item(nth, works, RATIO, HEADS)
            if item.first < item.end:
                stride = ptrs.scores_stride // VECTOR * VECTOR  # so the compiler sees a multiple
                row = item.row.to(gl.int64) + token
                scores_ptr = ptrs.scores_ptr + row * stride
                tops_ptr = ptrs.tops_ptr + row * ptrs.tops_stride
                counts = gl.tuple(())
                for pair in gl.static_range(PAIRS):
                    nth_token = item.row + token + 2 * pair
                    position = gl.load(works.positions_ptr + works.first_token + nth_token,
                                       mask=nth_token < works.num_tokens, other=-1)  # fmt: skip
                    counts = counts + ((position + 1) // RATIO,)
                for tile in range(item.first, item.end):
                    entry = tile * TILE + first
                    after = num_tiles + 1
                    mbarrier.wait(stored.index(after % TILES_STORED), after // TILES_STORED % 2)
                    scores = gl.tuple(())
                    for pair in gl.static_range(PAIRS):  # all loads come before the first store
                        at = pair * 2 * stride + entry[:, None] + member[None, :]
                        mine = gl.load(scores_ptr[:, None] + at,
                                       mask=(entry < counts[pair])[:, None])  # fmt: skip
                        scores = scores + (mine,)
                    for pair in gl.static_range(PAIRS):
                        is_seen = entry[:, None] + member[None, :] < counts[pair][:, None]
                        top = gl.max(gl.where(is_seen, scores[pair], float("nan")), axis=1)
                        at_top = pair * 2 * ptrs.tops_stride + entry // GROUP_SIZE
                        gl.store(tops_ptr + at_top, top, mask=entry < counts[pair])
                    gl.thread_barrier()
                    later = num_tiles + TOPS_BEHIND
                    mbarrier.arrive(keys.empty.index(later % STAGES), count=1)
                    num_tiles += 1


@gluon.jit(
    do_not_specialize=[
        "scores_stride", "tops_stride", "weights_stride", "first_token", "num_tokens", "topk",
        "num_chunks", "key_stride", "num_items", "num_groups", "split_tiles",
    ],
    do_not_specialize_on_alignment=[*PLAN_PTRS, "chunk_ids_ptr"],
)  # fmt: skip
def _score_kernel(
    key_desc, query_desc, scores_ptr, scores_stride, tops_ptr, tops_stride, weights_ptr,
    weights_stride, scales_ptr, first_token, num_tokens, topk, positions_ptr, request_ids_ptr,
    request_slots_ptr, chunk_ids_ptr, num_chunks, key_stride, num_items, num_groups, split_tiles,
    RATIO: gl.constexpr, IS_MXFP4: gl.constexpr, HEADS: gl.constexpr, HAS_TOPS: gl.constexpr,
):  # fmt: skip
    """Score keys for groups of tokens, one work item after another; store tops if HAS_TOPS."""
    works = Works(first_token, num_tokens, topk, positions_ptr, request_ids_ptr, request_slots_ptr,
                  chunk_ids_ptr, num_chunks, key_stride, num_items, num_groups,
                  split_tiles)  # fmt: skip
    ptrs = ScorePtrs(scores_ptr, scores_stride, tops_ptr, tops_stride, weights_ptr, weights_stride,
                     scales_ptr)  # fmt: skip
    READERS: gl.constexpr = SIDES + 1 if HAS_TOPS else SIDES
    LAST_REGISTERS: gl.constexpr = TOP_REGISTERS if HAS_TOPS else 24
    keys = make_stages(key_desc, ROWS, STAGES, SIDES, READERS)
    queries = make_stages(query_desc, COLUMNS, 2, 1, SIDES)
    stored = make_barriers(TILES_STORED, SIDES)
    gdc_wait()
    fence_async_shared()  # for copies, which arrive at the barriers
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply, (keys, queries, stored, ptrs, works, RATIO, IS_MXFP4, HEADS, HAS_TOPS, 0)),
            (multiply, (keys, queries, stored, ptrs, works, RATIO, IS_MXFP4, HEADS, HAS_TOPS, 1)),
            (multiply, (keys, queries, stored, ptrs, works, RATIO, IS_MXFP4, HEADS, HAS_TOPS, 2)),
            (multiply, (keys, queries, stored, ptrs, works, RATIO, IS_MXFP4, HEADS, HAS_TOPS, 3)),
            (copy_operands, (key_desc, query_desc, keys, queries, works, RATIO, HEADS)),
            (find_tops, (keys, stored, ptrs, works, RATIO, HEADS, HAS_TOPS)),
        ],
        [4, 4, 4, 1, TOP_WARPS],
        [REGISTERS, REGISTERS, REGISTERS, 24, LAST_REGISTERS],
    )
