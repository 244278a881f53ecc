"""Index: make queries ready, score paged keys where they lie, choose the best entries.

Tokens are taken as many at a time as the workspace holds, each time in three launches or four.
A token that sees no more than topk entries is neither made ready nor scored.

Operands of the products, by key format. All are exact, and so is every product:

    fp8     E4M3 codes; the key's scale multiplies the score, the query's is part of the weight
    mxfp4   E5M2: E2M1 values times their group's scale, a query's over that of the head's largest
            group, which is part of the weight (`mxfp4_scores`)
    nvfp4   BF16: E2M1 values times their group's E4M3 scale, 6 significant bits; the square of
            the global scale is part of the weight
    bf16    BF16
    fp32    fp32

Hopper adds products of E4M3 and E5M2 with 13 bits after the leading one, less than fp32's 23.
FP8_PRODUCTS off makes BF16 operands of fp8's codes, at half the rate.

Tokens of a chunk are scored a few at a time, if they are of one request: keys are read once for
all of them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import PagedRows, next_power_of_two
from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.index_scratch import (
    IndexScratch,
    cut_index_scratch,
    index_row_bytes,
    padded_heads,
)
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.decode import e2m1_values, e4m3_values
from dsv4.kernels.triton.key_tiles import load_pages, load_row_parts, tile_blocks
from dsv4.kernels.triton.mxfp4_scores import mxfp4_weight_factor, score_mxfp4, store_mxfp4_query
from dsv4.kernels.triton.primitives import (
    INTERPRETED,
    bf16_bits,
    bf16_value,
    encode_rows,
    hadamard,
    load_rope,
    loop_bound,
    rotate_tail,
    wait_for_launch_before,
)
from dsv4.kernels.triton.topk import choose_best, visible_entries

FP8_PRODUCTS = True
QUERY_HEADS = 16  # heads of a program that makes queries ready
QUERY_WARPS = 4


class ScoreCut(NamedTuple):
    """What a launch that scores is cut into.

    A program takes `tokens` tokens and multiplies `tile` keys at a time, while the next
    `stages - 1` tiles are on their way (of mxfp4 always one). Keys are split over programs, up to
    `programs` in all. maxnreg bounds the registers of a thread.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    tokens: int = 1
    maxnreg: int | None = None


SCORE_CUTS = {
    "fp8": ScoreCut(tile=128, warps=4, stages=3, programs=396),
    "mxfp4": ScoreCut(tile=64, warps=4, stages=2, programs=660, maxnreg=104),
    "nvfp4": ScoreCut(tile=128, warps=4, stages=3, programs=528),
    "bf16": ScoreCut(tile=64, warps=4, stages=3, programs=528),
    "fp32": ScoreCut(tile=32, warps=8, stages=3, programs=528),
}
CHUNK_CUTS = {"fp8": ScoreCut(tile=128, warps=8, stages=3, programs=1320, tokens=2)}


@triton.jit
def nvfp4_scales(scales, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """E4M3 scales `[ROWS, BLOCK / 16]` to fp32 `[ROWS, BLOCK / 2]`, one for a pair of channels."""
    wide = tl.broadcast_to(e4m3_values(scales)[:, :, None], (ROWS, BLOCK // 16, 8))
    return tl.reshape(wide, (ROWS, BLOCK // 2))


@triton.jit
def store_query(values, scales, ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Store encoded query rows as operands at ready_ptr `[ROWS]`; of NVFP4, even channels first."""
    channel = tl.arange(0, BLOCK)[None, :]
    if FORMAT == "index_fp8":
        tl.store(ready_ptr[:, None] + channel, values)
    elif FORMAT == "index_fp32":
        tl.store(ready_ptr.to(tl.pointer_type(tl.int32))[:, None] + channel, values)
    elif FORMAT == "index_bf16":
        tl.store(ready_ptr.to(tl.pointer_type(tl.uint16))[:, None] + channel, values)
    else:
        HALF: tl.constexpr = BLOCK // 2
        pair_ptr = ready_ptr.to(tl.pointer_type(tl.uint16))[:, None] + tl.arange(0, HALF)[None, :]
        scale = nvfp4_scales(scales, ROWS, BLOCK)
        codes = values.to(tl.int32)
        tl.store(pair_ptr, bf16_bits(e2m1_values(codes & 15) * scale))
        tl.store(pair_ptr + HALF, bf16_bits(e2m1_values(codes >> 4) * scale))


@triton.jit(
    do_not_specialize=["first_token", "topk", "weights_stride", "ready_weights_stride"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "weights_ptr",
    ],
)  # fmt: skip
def _query_kernel(
    query_ptr, token_stride, weights_ptr, weights_stride, ready_ptr, ready_weights_ptr,
    ready_weights_stride, first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr,
    cos_ptr, sin_ptr, global_scale_ptr, RATIO: tl.constexpr, FORMAT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_DIM: tl.constexpr, OPERAND_BYTES: tl.constexpr,
    HAS_HADAMARD: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr, WEIGHT_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate, transform and quantise some heads of a token's index query; scale their weights."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    _slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    wait_for_launch_before(STARTS_NEXT=True)
    if count > topk:
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_head = head < HEADS
        channel = tl.arange(0, BLOCK)[None, :]
        x = tl.load(query_ptr + token * token_stride + head[:, None] * DIM + channel,
                    mask=is_head[:, None] & (channel < DIM), other=0.0).to(tl.float32)  # fmt: skip
        position = tl.load(positions_ptr + token) + tl.zeros((ROWS,), tl.int32)
        cos, sin = load_rope((cos_ptr, sin_ptr), position, is_head, DIM, ROPE, BLOCK)
        x = rotate_tail(x, cos, sin, ROWS, DIM, ROPE, BLOCK)
        if HAS_HADAMARD:
            x = hadamard(x, ROWS, DIM, LOG_DIM)
        global_scale = 1.0
        if HAS_GLOBAL_SCALE:
            global_scale = tl.load(global_scale_ptr)
        values, _own, scales = encode_rows(x, global_scale, FORMAT, ROWS, DIM, 0, BLOCK)
        ready_row = row * BLOCK_HEADS + head
        operand_ptr = ready_ptr + ready_row * (BLOCK * OPERAND_BYTES)
        weight_ptr = ready_weights_ptr + row * ready_weights_stride + head
        if FORMAT == "index_mxfp4":
            store_mxfp4_query(values, scales, operand_ptr, weight_ptr + BLOCK_HEADS, BLOCK_HEADS,
                              ROWS, BLOCK)  # fmt: skip
        else:
            store_query(values, scales, operand_ptr, FORMAT, ROWS, BLOCK)
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0)
        weight = weight.to(tl.float32) * WEIGHT_SCALE
        if FORMAT == "index_fp8":
            weight = weight * scales
        elif FORMAT == "index_mxfp4":
            weight = weight * mxfp4_weight_factor(scales)
        elif HAS_GLOBAL_SCALE:
            weight = weight * (global_scale * global_scale)
        tl.store(weight_ptr, weight)


@triton.jit
def fp8_operand(code, FP8_PRODUCTS: tl.constexpr):
    """E4M3 codes as what is multiplied."""
    if INTERPRETED:
        operand = e4m3_values(code)
    elif FP8_PRODUCTS:
        operand = code.to(tl.float8e4nv, bitcast=True)
    else:
        operand = code.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    return operand


@triton.jit
def bf16_operand(bits):
    """The bits of BF16 as what is multiplied."""
    return bf16_value(bits) if INTERPRETED else bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def load_query(ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
               COUNT: tl.constexpr, BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """COUNT stored channels of ROWS heads from FIRST on, `[COUNT, ROWS]`."""
    at = tl.arange(0, ROWS)[None, :] * BLOCK + FIRST + tl.arange(0, COUNT)[:, None]
    if FORMAT == "index_fp8":
        query = fp8_operand(tl.load(ready_ptr + at), FP8_PRODUCTS)
    elif FORMAT == "index_fp32":
        query = tl.load(ready_ptr.to(tl.pointer_type(tl.float32)) + at)
    else:
        query = bf16_operand(tl.load(ready_ptr.to(tl.pointer_type(tl.uint16)) + at))
    return query


@triton.jit
def load_queries(ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                 FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """The operands of a tile's products: of each half of NVFP4, or one."""
    PARTS: tl.constexpr = 2 if FORMAT == "index_nvfp4" else 1
    WIDTH: tl.constexpr = BLOCK // PARTS
    queries = ()
    for part in tl.static_range(PARTS):
        query = load_query(ready_ptr, FORMAT, ROWS, part * WIDTH, WIDTH, BLOCK, FP8_PRODUCTS)
        queries = queries + (query,)  # type: ignore[assignment]
    return queries


@triton.jit
def load_keys(key_ptr, FORMAT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
              FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """Keys whose channels are whole bytes, `[TILE, BLOCK]`."""
    if FORMAT == "index_fp32":
        keys = load_row_parts(key_ptr.to(tl.pointer_type(tl.float32)), DIM, BLOCK)
    elif FORMAT == "index_bf16":
        keys = bf16_operand(load_row_parts(key_ptr.to(tl.pointer_type(tl.uint16)), DIM, BLOCK))
    elif INTERPRETED or not FP8_PRODUCTS:
        keys = fp8_operand(load_row_parts(key_ptr, DIM, BLOCK), FP8_PRODUCTS)
    else:
        # Loaded as numbers, they go from memory to the product without passing registers.
        keys = load_row_parts(key_ptr.to(tl.pointer_type(tl.float8e4nv)), DIM, BLOCK)
    return keys


@triton.jit
def nvfp4_products(key_ptr, key_scale_ptr, queries, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """`[TILE, heads]`: products of even channels and of odd ones."""
    pair = tl.arange(0, BLOCK // 2)[None, :]
    codes = load_row_parts(key_ptr, DIM // 2, BLOCK // 2).to(tl.int32)
    scale = tl.load(key_scale_ptr[:, None] + pair // 8, mask=pair < DIM // 2, other=0)
    scale = e4m3_values(scale)
    even, odd = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    if not INTERPRETED:
        even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    products = tl.dot(even, queries[0])
    return tl.dot(odd, queries[1], products)


@triton.jit
def sum_heads(products, weights, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
              TOKENS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """`[TILE, TOKENS]`: sum_h w_h ReLU(q_h · k) of products `[TILE, TOKENS × BLOCK_HEADS]`.

    NaN stays NaN.
    """
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    weighted = tl.reshape(positive * weights[None, :], (TILE, TOKENS, BLOCK_HEADS))
    if HEADS < BLOCK_HEADS:  # an infinite key makes NaN of a head that isn't there
        is_head = tl.arange(0, BLOCK_HEADS)[None, None, :] < HEADS
        weighted = tl.where(is_head, weighted, 0.0)
    return tl.sum(weighted, axis=2)


@triton.jit
def score_tiles(
    pages_ptr, counts, scores_ptr, ready, memory, FORMAT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Score every so many tiles of a request's entries for TOKENS tokens of it.

    counts `[TOKENS]` is how many entries each is scored for, scores_ptr `[1, TOKENS]` where their
    scores start.
    """
    ready_ptr, ready_weights_ptr, ready_weights_stride = ready
    data_ptr, scale_ptr, page_stride = memory
    ROWS: tl.constexpr = TOKENS * BLOCK_HEADS
    queries = load_queries(ready_ptr, FORMAT, ROWS, BLOCK, FP8_PRODUCTS)
    head = tl.arange(0, ROWS)
    weight_ptr = ready_weights_ptr + head // BLOCK_HEADS * ready_weights_stride + head % BLOCK_HEADS
    weights = tl.load(weight_ptr)
    count = tl.max(counts, axis=0)
    first_tile, step = tl.program_id(1), tl.num_programs(1)
    first, last = load_pages(pages_ptr, first_tile, count, ENTRIES_PER_BLOCK, TILE)
    for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                         loop_bound(step), num_stages=STAGES):  # fmt: skip
        blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE) + tl.zeros((TILE,), tl.int32)
        first, last = load_pages(pages_ptr, tile + step, count, ENTRIES_PER_BLOCK, TILE)
        entry = tile * TILE + tl.arange(0, TILE)
        # The pages of a request are whole: what lies beyond its entries is read and not stored.
        page_start = tl.maximum(blocks, 0).to(tl.int64) * page_stride
        page_row = entry % ENTRIES_PER_BLOCK
        key_ptr = data_ptr + (page_start + page_row * DATA_BYTES)
        key_scale_ptr = scale_ptr + (page_start + page_row * SCALE_BYTES)
        if FORMAT == "index_nvfp4":
            products = nvfp4_products(key_ptr, key_scale_ptr, queries, DIM, BLOCK)
        else:
            keys = load_keys(key_ptr, FORMAT, DIM, BLOCK, FP8_PRODUCTS)
            products = tl.dot(keys, queries[0], input_precision="ieee")
        score = sum_heads(products, weights, HEADS, BLOCK_HEADS, TOKENS, TILE)
        if FORMAT == "index_fp8":
            score *= tl.load(key_scale_ptr.to(tl.pointer_type(tl.float32)))[:, None]
        score = tl.where((blocks >= 0)[:, None], score, 0.0)
        tl.store(scores_ptr + entry[:, None], score, mask=entry[:, None] < counts[None, :])


@triton.jit
def score_tokens(
    row, slot, counts, scratch, memory, block_table, FORMAT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Score a request's entries for TOKENS tokens of it, from `row` on, by the keys' format."""
    scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, ready_weights_stride = scratch
    block_table_ptr, table_stride = block_table
    row = row.to(tl.int64)
    scores_ptr += row * scores_stride + tl.arange(0, TOKENS)[None, :] * scores_stride
    ready_ptr += row * (BLOCK_HEADS * BLOCK * OPERAND_BYTES)
    ready_weights_ptr += row * ready_weights_stride
    pages_ptr = block_table_ptr + slot * table_stride
    ready = (ready_ptr, ready_weights_ptr, ready_weights_stride)
    if FORMAT == "index_mxfp4":
        score_mxfp4(
            pages_ptr, counts, scores_ptr, ready, memory, BLOCK_HEADS, DIM, BLOCK, DATA_BYTES,
            SCALE_BYTES, ENTRIES_PER_BLOCK, TILE, TOKENS, WARPS,
        )  # fmt: skip
    else:
        score_tiles(
            pages_ptr, counts, scores_ptr, ready, memory, FORMAT, HEADS, BLOCK_HEADS, DIM, BLOCK,
            DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, FP8_PRODUCTS, TILE, TOKENS, STAGES,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "topk", "scores_stride", "table_stride",
        "ready_weights_stride",
    ],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _score_kernel(
    scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, ready_weights_stride, data_ptr,
    scale_ptr, page_stride, first_token, num_tokens, topk, positions_ptr, request_ids_ptr,
    request_slots_ptr, block_table_ptr, table_stride, RATIO: tl.constexpr, FORMAT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Score a part of the entries that TOKENS tokens see: together, if they are of one request."""
    start = tl.program_id(0) * TOKENS
    row = start + tl.arange(0, TOKENS)
    token = first_token + tl.minimum(row, num_tokens - 1)
    slots, counts = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    counts = tl.where((row < num_tokens) & (counts > topk), counts, 0)
    slot = tl.max(slots, axis=0)
    wait_for_launch_before(STARTS_NEXT=False)
    scratch = (scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, ready_weights_stride)
    memory = (data_ptr, scale_ptr, page_stride)
    block_table = (block_table_ptr, table_stride)
    if tl.max(counts, axis=0) > 0:
        if (tl.min(slots, axis=0) == slot) & (start + TOKENS <= num_tokens):
            score_tokens(
                start, slot, counts, scratch, memory, block_table, FORMAT, HEADS, BLOCK_HEADS, DIM,
                BLOCK, OPERAND_BYTES, DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, FP8_PRODUCTS,
                TILE, TOKENS, STAGES, WARPS,
            )  # fmt: skip
        elif TOKENS > 1:
            for idx in range(TOKENS):
                count = tl.max(tl.where(row == start + idx, counts, 0), axis=0)
                if count > 0:
                    slot = tl.max(tl.where(row == start + idx, slots, -1), axis=0)
                    score_tokens(
                        start + idx, slot, count + tl.zeros((1,), tl.int32), scratch, memory,
                        block_table, FORMAT, HEADS, BLOCK_HEADS, DIM, BLOCK, OPERAND_BYTES,
                        DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, FP8_PRODUCTS, TILE, 1, STAGES,
                        WARPS,
                    )  # fmt: skip


def select_entries(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    max_entries: int,
) -> Selection:
    """See `kernels.reference.indexer`."""
    num_tokens, device = len(tokens.positions), tokens.positions.device
    layout = memory.layout
    chosen = empty_selection(num_tokens, layout.index_topk, device)
    if not num_tokens:
        return chosen
    sizes = {
        "max_entries": max_entries,
        "ratio": layout.ratio,
        "entries_per_block": layout.entries_per_block,
    }
    if max_entries <= layout.index_topk:
        unread = chosen.entry_idx
        choose_best(chosen, unread, unread, tokens, first_token=0, num_tokens=num_tokens, **sizes)
        return chosen
    scratch = index_scratch(query, memory, max_entries=max_entries)
    for first in range(0, num_tokens, scratch.num_rows):
        span = {"first_token": first, "num_tokens": min(scratch.num_rows, num_tokens - first)}
        prepare_queries(query, head_weights, scratch, memory, tokens, **span)
        score_entries(
            scratch, memory, tokens, num_heads=query.shape[1], max_entries=max_entries, **span
        )
        choose_best(chosen, scratch.scores, scratch.group_tops, tokens, **span, **sizes)
    return chosen


def empty_selection(num_tokens: int, topk: int, device: torch.device) -> Selection:
    """Room for what `choose_best` writes."""
    return Selection(
        torch.empty(num_tokens, topk, dtype=torch.int32, device=device),
        torch.empty(num_tokens, topk, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int32, device=device),
    )


def index_scratch(
    query: Tensor, memory: LayerMemory, *, max_entries: int, num_tokens: int | None = None
) -> IndexScratch:
    """The layer's workspace, cut for queries of that shape, or for another number of them."""
    num_queries, num_heads, dim = query.shape
    row = index_row_bytes(
        memory.layout.index_format,
        num_heads=num_heads, dim=dim, topk=memory.layout.index_topk, max_entries=max_entries,
    )  # fmt: skip
    return cut_index_scratch(memory.index_scratch, row, num_tokens=num_tokens or num_queries)


def prepare_queries(
    query: Tensor,
    head_weights: Tensor,
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    first_token: int,
    num_tokens: int,
) -> None:
    """Fill the workspace's queries and weights for num_tokens tokens from first_token on."""
    num_heads, dim = query.shape[1:]
    scale = memory.global_scale
    query = _rows_apart(query)
    if head_weights.stride(1) != 1:
        head_weights = head_weights.contiguous()
    _query_kernel[(num_tokens, padded_heads(num_heads) // QUERY_HEADS)](
        query_ptr=query, token_stride=query.stride(0) if len(query) > 1 else num_heads * dim,
        weights_ptr=head_weights, weights_stride=head_weights.stride(0),
        cos_ptr=memory.cos, sin_ptr=memory.sin,
        global_scale_ptr=scratch.weights if scale is None else scale,
        ROPE=memory.layout.rope_dim, LOG_DIM=dim.bit_length() - 1,
        HAS_HADAMARD=memory.layout.has_hadamard, HAS_GLOBAL_SCALE=scale is not None,
        WEIGHT_SCALE=dim**-0.5 * num_heads**-0.5,
        ROWS=QUERY_HEADS, num_warps=QUERY_WARPS, launch_pdl=True, enable_fp_fusion=False,
        **_shared_arguments(scratch, memory, tokens, num_heads, first_token=first_token),
    )  # fmt: skip


def score_entries(
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    first_token: int,
    num_tokens: int,
    num_heads: int,
    max_entries: int,
) -> None:
    """Fill the workspace's scores for the tokens whose queries it holds."""
    keys = _index_keys(memory)
    cut = score_cut(keys.format.name, tokens)
    num_groups = -(-num_tokens // cut.tokens)
    splits = min(-(-max_entries // cut.tile), max(1, cut.programs // num_groups))
    _score_kernel[(num_groups, splits)](
        scores_ptr=scratch.scores, scores_stride=scratch.scores.stride(0),
        data_ptr=keys.data, scale_ptr=keys.scales, page_stride=keys.data.stride(0),
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        DATA_BYTES=keys.format.data_bytes, SCALE_BYTES=keys.format.scale_bytes,
        ENTRIES_PER_BLOCK=keys.rows_per_page, FP8_PRODUCTS=FP8_PRODUCTS, num_tokens=num_tokens,
        TILE=cut.tile, TOKENS=cut.tokens, STAGES=cut.stages, WARPS=cut.warps,
        num_warps=cut.warps, maxnreg=cut.maxnreg, launch_pdl=True,
        **_shared_arguments(scratch, memory, tokens, num_heads, first_token=first_token),
    )  # fmt: skip


def score_cut(format_name: str, tokens: TokenMap) -> ScoreCut:
    """What scores of a forward are cut into: one with a long chunk, or any other."""
    cut = SCORE_CUTS[format_name]
    return CHUNK_CUTS.get(format_name, cut) if len(tokens.chunk_ids) else cut


def _shared_arguments(
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    num_heads: int,
    *,
    first_token: int,
) -> dict[str, Any]:
    row = memory.layout.index_row
    block, heads = next_power_of_two(row.dim), padded_heads(num_heads)
    return {
        "ready_ptr": scratch.queries, "ready_weights_ptr": scratch.weights,
        "ready_weights_stride": scratch.weights.stride(0),
        "first_token": first_token, "topk": memory.layout.index_topk,
        "positions_ptr": tokens.positions, "request_ids_ptr": tokens.request_ids,
        "request_slots_ptr": tokens.request_slots,
        "RATIO": memory.layout.ratio, "FORMAT": f"index_{row.name}", "HEADS": num_heads,
        "BLOCK_HEADS": heads, "DIM": row.dim, "BLOCK": block,
        "OPERAND_BYTES": scratch.queries.shape[1] // (heads * block),
    }  # fmt: skip


def _index_keys(memory: LayerMemory) -> PagedRows:
    assert memory.index_keys is not None, "checked by the handle"
    return memory.index_keys


def _rows_apart(query: Tensor) -> Tensor:
    """Queries whose heads and channels are neighbours, at any distance from each other."""
    is_packed = query.stride(2) == 1 and query.stride(1) == query.shape[2]
    return query if is_packed else query.contiguous()
