"""Index: make queries ready, score paged keys where they lie, choose the best entries.

Tokens are taken as many at a time as the workspace holds, each time in three launches or four.
A token that sees no more than topk entries is neither made ready nor scored.

Operands of the products, by key format. All are exact, and so is every product:

    fp8     E4M3 codes; the key's scale multiplies the score, the query's is part of the weight
    mxfp4   BF16: E2M1 values times their group's power of two
    nvfp4   BF16: E2M1 values times their group's E4M3 scale, 6 significant bits; the square of
            the global scale is part of the weight
    bf16    BF16
    fp32    fp32

Hopper adds E4M3 products with 13 bits after the leading one, less than fp32's 23; FP8_PRODUCTS off
makes BF16 operands of the codes, at half the rate. For mxfp4, E4M3 operands in four products of 32
channels would be exact too and twice as fast, but need the two scales on every partial sum.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels import LayerMemory, Selection, TokenMap
from dsv4.kernels.index_scratch import (
    IndexScratch,
    cut_index_scratch,
    index_row_bytes,
    padded_heads,
)
from dsv4.kernels.triton.decode import e2m1_values, e4m3_values, ue8m0_values
from dsv4.kernels.triton.primitives import (
    INTERPRETED,
    bf16_bits,
    bf16_value,
    encode_rows,
    hadamard,
    load_rope,
    loop_bound,
    rotate_tail,
)
from dsv4.kernels.triton.topk import choose_best, visible_entries
from dsv4.model.rope import RopeTable

FP8_PRODUCTS = True
QUERY_HEADS = 16  # heads of a program that makes queries ready
QUERY_WARPS = 4
SCORE_ENTRIES = {"fp32": 32}  # keys a program multiplies at a time, by format
SCORE_ENTRIES_DEFAULT = 128
SCORE_WARPS = 4
SCORE_STAGES = 3
SCORE_PROGRAMS = 1056  # enough for any GPU; a token's keys are split over what is left of them


@triton.jit
def half_scales(scales, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Scale bytes `[ROWS, groups]` to fp32 `[ROWS, BLOCK / 2]`, one for each pair of channels."""
    GROUPS: tl.constexpr = BLOCK // 32 if FORMAT == "index_mxfp4" else BLOCK // 16
    values = ue8m0_values(scales) if FORMAT == "index_mxfp4" else e4m3_values(scales)
    wide = tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, BLOCK // 2 // GROUPS))
    return tl.reshape(wide, (ROWS, BLOCK // 2))


@triton.jit
def store_query(values, scales, ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Store encoded query rows as operands at ready_ptr `[ROWS]`; of FP4, even channels first."""
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
        scale = half_scales(scales, FORMAT, ROWS, BLOCK)
        codes = values.to(tl.int32)
        tl.store(pair_ptr, bf16_bits(e2m1_values(codes & 15) * scale))
        tl.store(pair_ptr + HALF, bf16_bits(e2m1_values(codes >> 4) * scale))


@triton.jit(
    do_not_specialize=["first_token", "topk", "weights_stride"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "weights_ptr",
    ],
)  # fmt: skip
def _query_kernel(
    query_ptr, token_stride, weights_ptr, weights_stride, ready_ptr, ready_weights_ptr,
    first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr, cos_ptr, sin_ptr,
    global_scale_ptr, RATIO: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    LOG_DIM: tl.constexpr, OPERAND_BYTES: tl.constexpr, HAS_HADAMARD: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr, WEIGHT_SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate, transform and quantise some heads of a token's index query; scale their weights."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    _slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
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
        store_query(values, scales, ready_ptr + ready_row * (BLOCK * OPERAND_BYTES), FORMAT, ROWS,
                    BLOCK)  # fmt: skip
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0)
        weight = weight.to(tl.float32) * WEIGHT_SCALE
        if FORMAT == "index_fp8":
            weight = weight * scales
        elif HAS_GLOBAL_SCALE:
            weight = weight * (global_scale * global_scale)
        tl.store(ready_weights_ptr + ready_row, weight)


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
def load_query(ready_ptr, FORMAT: tl.constexpr, BLOCK_HEADS: tl.constexpr, FIRST: tl.constexpr,
               COUNT: tl.constexpr, BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """COUNT stored channels of a query from FIRST on, `[COUNT, BLOCK_HEADS]`."""
    at = tl.arange(0, BLOCK_HEADS)[None, :] * BLOCK + FIRST + tl.arange(0, COUNT)[:, None]
    if FORMAT == "index_fp8":
        query = fp8_operand(tl.load(ready_ptr + at), FP8_PRODUCTS)
    elif FORMAT == "index_fp32":
        query = tl.load(ready_ptr.to(tl.pointer_type(tl.float32)) + at)
    else:
        query = bf16_operand(tl.load(ready_ptr.to(tl.pointer_type(tl.uint16)) + at))
    return query


@triton.jit
def load_halves(data_ptr, scale_ptr, is_present, FORMAT: tl.constexpr, DIM: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Even and odd channels of FP4 keys, each `[TILE, BLOCK / 2]`."""
    PAIRS: tl.constexpr = 16 if FORMAT == "index_mxfp4" else 8  # that share a scale
    pair = tl.arange(0, BLOCK // 2)[None, :]
    mask = is_present[:, None] & (pair < DIM // 2)
    codes = tl.load(data_ptr[:, None] + pair, mask=mask, other=0).to(tl.int32)
    scales = tl.load(scale_ptr[:, None] + pair // PAIRS, mask=mask, other=0)
    scale = ue8m0_values(scales) if FORMAT == "index_mxfp4" else e4m3_values(scales)
    even, odd = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    if not INTERPRETED:
        even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    return even, odd


@triton.jit
def load_keys(data_ptr, is_present, FORMAT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
              FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """Keys whose channels are whole bytes, `[TILE, BLOCK]`."""
    channel = tl.arange(0, BLOCK)[None, :]
    mask = is_present[:, None] & (channel < DIM)
    if FORMAT == "index_fp8":
        keys = fp8_operand(tl.load(data_ptr[:, None] + channel, mask=mask, other=0), FP8_PRODUCTS)
    elif FORMAT == "index_fp32":
        row_ptr = data_ptr.to(tl.pointer_type(tl.float32))
        keys = tl.load(row_ptr[:, None] + channel, mask=mask, other=0.0)
    else:
        row_ptr = data_ptr.to(tl.pointer_type(tl.uint16))
        keys = bf16_operand(tl.load(row_ptr[:, None] + channel, mask=mask, other=0))
    return keys


@triton.jit
def sum_heads(products, weights, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """`[TILE]`: sum_h w_h ReLU(q_h · k) of products `[TILE, BLOCK_HEADS]`; NaN stays NaN."""
    weighted = tl.where(products < 0.0, 0.0, products) * weights[None, :]
    if HEADS < BLOCK_HEADS:  # an infinite key makes NaN of a head that isn't there
        weighted = tl.where(tl.arange(0, BLOCK_HEADS)[None, :] < HEADS, weighted, 0.0)
    return tl.sum(weighted, axis=1)


@triton.jit(
    do_not_specialize=["first_token", "topk", "scores_stride", "table_stride"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _score_kernel(
    scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, data_ptr, scale_ptr, page_stride,
    first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr, block_table_ptr,
    table_stride, RATIO: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score every so many tiles of the entries that a token sees."""
    row = tl.program_id(0).to(tl.int64)
    slot, count = visible_entries(first_token + row, positions_ptr, request_ids_ptr,
                                  request_slots_ptr, RATIO)  # fmt: skip
    if count > topk:
        IS_FP4: tl.constexpr = FORMAT == "index_mxfp4" or FORMAT == "index_nvfp4"
        WIDTH: tl.constexpr = BLOCK // 2 if IS_FP4 else BLOCK
        ready_ptr += row * (BLOCK_HEADS * BLOCK * OPERAND_BYTES)
        query = load_query(ready_ptr, FORMAT, BLOCK_HEADS, 0, WIDTH, BLOCK, FP8_PRODUCTS)
        if IS_FP4:
            odd_query = load_query(ready_ptr, FORMAT, BLOCK_HEADS, WIDTH, WIDTH, BLOCK, False)
        weights = tl.load(ready_weights_ptr + row * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))
        for tile in range(loop_bound(tl.program_id(1)), loop_bound(tl.cdiv(count, TILE)),
                          loop_bound(tl.num_programs(1))):  # fmt: skip
            entry = tile * TILE + tl.arange(0, TILE)
            column = block_table_ptr + slot * table_stride + entry // ENTRIES_PER_BLOCK
            block = tl.load(column, mask=entry < count, other=-1).to(tl.int64)
            is_present = block >= 0
            page_start, page_row = block * page_stride, entry % ENTRIES_PER_BLOCK
            key_ptr = data_ptr + (page_start + page_row * DATA_BYTES)
            key_scale_ptr = scale_ptr + (page_start + page_row * SCALE_BYTES)
            if IS_FP4:
                even, odd = load_halves(key_ptr, key_scale_ptr, is_present, FORMAT, DIM,
                                        BLOCK)  # fmt: skip
                products = tl.dot(even, query)
                products = tl.dot(odd, odd_query, products)
            else:
                keys = load_keys(key_ptr, is_present, FORMAT, DIM, BLOCK, FP8_PRODUCTS)
                products = tl.dot(keys, query, input_precision="ieee")
            score = sum_heads(products, weights, HEADS, BLOCK_HEADS)
            if FORMAT == "index_fp8":
                score *= tl.load(key_scale_ptr.to(tl.pointer_type(tl.float32)), mask=is_present,
                                 other=0.0)  # fmt: skip
            tl.store(scores_ptr + row * scores_stride + entry, score, mask=entry < count)


def select_entries(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    topk: int,
    max_entries: int,
    has_hadamard: bool,
) -> Selection:
    """See `kernels.reference.indexer`."""
    num_tokens, device = len(tokens.positions), tokens.positions.device
    chosen = Selection(
        torch.empty(num_tokens, topk, dtype=torch.int32, device=device),
        torch.empty(num_tokens, topk, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int32, device=device),
    )
    if not num_tokens:
        return chosen
    layout = memory.layout
    sizes = {
        "max_entries": max_entries,
        "ratio": layout.ratio,
        "entries_per_block": layout.entries_per_block,
    }
    if max_entries <= topk:
        unread = chosen.entry_idx
        choose_best(chosen, unread, unread, tokens, first_token=0, num_tokens=num_tokens, **sizes)
        return chosen
    scratch = index_scratch(query, memory, topk=topk, max_entries=max_entries)
    for first in range(0, num_tokens, scratch.num_rows):
        span = {"first_token": first, "num_tokens": min(scratch.num_rows, num_tokens - first)}
        prepare_queries(
            query, head_weights, scratch, memory, tokens, rope,
            topk=topk, has_hadamard=has_hadamard, **span,
        )  # fmt: skip
        score_entries(
            scratch, memory, tokens,
            num_heads=query.shape[1], topk=topk, max_entries=max_entries, **span,
        )  # fmt: skip
        choose_best(chosen, scratch.scores, scratch.candidates, tokens, **span, **sizes)
    return chosen


def index_scratch(
    query: Tensor, memory: LayerMemory, *, topk: int, max_entries: int
) -> IndexScratch:
    """The layer's workspace as `select_entries` cuts it for queries of that shape."""
    num_tokens, num_heads, dim = query.shape
    row = index_row_bytes(
        memory.layout.index_format,
        num_heads=num_heads, dim=dim, topk=topk, max_entries=max_entries,
    )  # fmt: skip
    return cut_index_scratch(memory.index_scratch, row, num_tokens=num_tokens)


def prepare_queries(
    query: Tensor,
    head_weights: Tensor,
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    first_token: int,
    num_tokens: int,
    topk: int,
    has_hadamard: bool,
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
        cos_ptr=rope.cos, sin_ptr=rope.sin,
        global_scale_ptr=scratch.weights if scale is None else scale,
        ROPE=memory.layout.rope_dim, LOG_DIM=dim.bit_length() - 1, HAS_HADAMARD=has_hadamard,
        HAS_GLOBAL_SCALE=scale is not None, WEIGHT_SCALE=dim**-0.5 * num_heads**-0.5,
        ROWS=QUERY_HEADS, num_warps=QUERY_WARPS, enable_fp_fusion=False,
        **_shared_arguments(scratch, memory, tokens, num_heads, first_token=first_token, topk=topk),
    )  # fmt: skip


def score_entries(
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    first_token: int,
    num_tokens: int,
    num_heads: int,
    topk: int,
    max_entries: int,
) -> None:
    """Fill the workspace's scores for the tokens whose queries it holds."""
    keys = _index_keys(memory)
    tile = SCORE_ENTRIES.get(keys.format.name, SCORE_ENTRIES_DEFAULT)
    splits = min(triton.cdiv(max_entries, tile), triton.cdiv(SCORE_PROGRAMS, num_tokens))
    _score_kernel[(num_tokens, splits)](
        scores_ptr=scratch.scores, scores_stride=scratch.scores.stride(0),
        data_ptr=keys.data, scale_ptr=keys.scales, page_stride=keys.data.stride(0),
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        DATA_BYTES=keys.format.data_bytes, SCALE_BYTES=keys.format.scale_bytes,
        ENTRIES_PER_BLOCK=keys.rows_per_page, FP8_PRODUCTS=FP8_PRODUCTS, TILE=tile,
        num_warps=SCORE_WARPS, num_stages=SCORE_STAGES,
        **_shared_arguments(scratch, memory, tokens, num_heads, first_token=first_token, topk=topk),
    )  # fmt: skip


def _shared_arguments(
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    num_heads: int,
    *,
    first_token: int,
    topk: int,
) -> dict[str, Any]:
    row = memory.layout.index_row
    block, heads = triton.next_power_of_2(row.dim), padded_heads(num_heads)
    return {
        "ready_ptr": scratch.queries, "ready_weights_ptr": scratch.weights,
        "first_token": first_token, "topk": topk, "positions_ptr": tokens.positions,
        "request_ids_ptr": tokens.request_ids, "request_slots_ptr": tokens.request_slots,
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
