"""Index: prepare query operands, score paged keys in place, choose the best entries.

The workspace sets how many tokens are taken at a time, in three or four launches.
A token that sees at most topk entries is neither prepared nor scored.

Operands of the products, by key format. Each operand is exact, and so is each product:

    fp8     E4M3 codes; the key's scale multiplies the score, the query's is part of the weight
    mxfp4   E5M2: E2M1 values times their group's scale, a query's over that of the head's largest
            group, which is part of the weight (`mxfp4_scores`)
    nvfp4   BF16: E2M1 values times their group's E4M3 scale, 6 significant bits; the square of
            the global scale is part of the weight
    bf16    BF16
    fp32    fp32

Hopper adds products of E4M3 and E5M2 with 13 bits after the leading one; fp32 has 23.

A program scores a few tokens of a chunk together if they belong to one request. It then reads
the keys once for all of them. On Hopper `chunk_scores` has a kernel of its own for most chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.index_scratch import (
    IndexScratch,
    cut_index_scratch,
    index_row_bytes,
    padded_heads,
)
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.triton.candidates import (
    choose_blocks,
    first_blocks,
    score_listed,
    store_largest,
)
from dsv4.kernels.triton.chunk_scores import (
    ChunkKeys,
    cut_chunk_keys,
    group_tokens,
    score_chunks,
    store_operands,
    tokens_at_once,
)
from dsv4.kernels.triton.decode import e2m1_values, e4m3_values
from dsv4.kernels.triton.key_tiles import (
    KeyPages,
    QueryOperands,
    ScoreSpec,
    load_first_pages,
    load_pages,
    load_row_parts,
    tile_blocks,
)
from dsv4.kernels.triton.launch import (
    WORKS,
    QueryLaunch,
    ScoreLaunch,
    find_launch,
    num_multiprocessors,
    starts_early,
)
from dsv4.kernels.triton.mxfp4_scores import mxfp4_weight_factor, score_mxfp4, store_mxfp4_query
from dsv4.kernels.triton.operands import PLAN_PTRS, row_spec
from dsv4.kernels.triton.primitives import (
    INTERPRETED,
    bf16_bits,
    bf16_value,
    encode_rows,
    hadamard,
    has_instructions_of,
    load_global_scale,
    load_rope,
    loop_bound,
    rotate_tail,
    wait_for_launch_before,
)
from dsv4.kernels.triton.topk import (
    ALL_ROWS,
    ListedLayout,
    are_groups_scored,
    choose_best,
    visible_entries,
)

MAX_COLUMNS = 128  # heads of all tokens of a product


@triton.jit
def store_query(values, scales, operand_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Store encoded query rows as operands at operand_ptr `[ROWS]`; NVFP4's even channels first."""
    channel = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    if FORMAT == "index_fp8":
        tl.store(operand_ptr[:, None] + channel, values)
    elif FORMAT == "index_fp32":
        tl.store(operand_ptr.to(tl.pointer_type(tl.int32))[:, None] + channel, values)
    elif FORMAT == "index_bf16":
        tl.store(operand_ptr.to(tl.pointer_type(tl.uint16))[:, None] + channel, values)
    else:
        HALF: tl.constexpr = BLOCK // 2
        pair_ptr = operand_ptr.to(tl.pointer_type(tl.uint16))[:, None] + tl.arange(0, HALF)[None, :]
        wide = tl.broadcast_to(e4m3_values(scales)[:, :, None], (ROWS, BLOCK // 16, 8))
        scale = tl.reshape(wide, (ROWS, HALF))  # one for a pair of channels
        codes = values.to(tl.int32)  # [ROWS, HALF]
        tl.store(pair_ptr, bf16_bits(e2m1_values(codes & 15) * scale))
        tl.store(pair_ptr + HALF, bf16_bits(e2m1_values(codes >> 4) * scale))


@triton.jit(
    do_not_specialize=["first_token", "topk", "weights_stride", "query_weights_stride"],
    do_not_specialize_on_alignment=["weights_ptr", *PLAN_PTRS],
)
def _query_kernel(
    query_ptr, token_stride, weights_ptr, weights_stride, query_operand_ptr, query_weights_ptr,
    query_weights_stride, first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr,
    cos_ptr, sin_ptr, global_scale_ptr, RATIO: tl.constexpr, KEY: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, LOG_DIM: tl.constexpr,
    OPERAND_BYTES: tl.constexpr, HAS_HADAMARD: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate, transform and quantise ROWS heads of a token's index query; scale their weights."""
    FORMAT: tl.constexpr = KEY.FORMAT
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    _slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    wait_for_launch_before(STARTS_NEXT=True)
    if count > topk:
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        is_head = head < HEADS
        channel = tl.arange(0, KEY.BLOCK)[None, :]  # [1, BLOCK]
        # Loads come before the first store, which they would wait for.
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0)
        x = tl.load(query_ptr + token * token_stride + head[:, None] * KEY.DIM + channel,
                    mask=is_head[:, None] & (channel < KEY.DIM),
                    other=0.0).to(tl.float32)  # [ROWS, BLOCK]  # fmt: skip
        rows = token + tl.zeros((ROWS,), tl.int32)
        cos, sin = load_rope((cos_ptr, sin_ptr), rows, is_head, KEY.DIM, KEY.ROTATED, KEY.BLOCK)
        x = rotate_tail(x, cos, sin, ROWS, KEY.DIM, KEY.ROTATED, KEY.BLOCK)
        if HAS_HADAMARD:
            x = hadamard(x, ROWS, KEY.DIM, LOG_DIM)
        global_scale = load_global_scale(global_scale_ptr, HAS_GLOBAL_SCALE)
        values, _rope_bits, scales = encode_rows(x, global_scale, ROWS, KEY)
        operand_row = row * BLOCK_HEADS + head
        operand_ptr = query_operand_ptr + operand_row * (KEY.BLOCK * OPERAND_BYTES)
        weight_ptr = query_weights_ptr + row * query_weights_stride + head
        if FORMAT == "index_mxfp4":
            store_mxfp4_query(values, scales, operand_ptr, weight_ptr + BLOCK_HEADS, BLOCK_HEADS,
                              ROWS, KEY.BLOCK)  # fmt: skip
        else:
            store_query(values, scales, operand_ptr, FORMAT, ROWS, KEY.BLOCK)
        weight = weight.to(tl.float32) * WEIGHT_SCALE
        if FORMAT == "index_fp8":
            weight = weight * scales
        elif FORMAT == "index_mxfp4":
            weight = weight * mxfp4_weight_factor(scales)
        elif HAS_GLOBAL_SCALE:
            weight = weight * (global_scale * global_scale)
        tl.store(weight_ptr, weight)


@triton.jit
def fp8_operand(code):
    """E4M3 codes as an operand of a product."""
    if has_instructions_of(89):
        operand = code.to(tl.float8e4nv, bitcast=True)
    elif INTERPRETED:
        operand = e4m3_values(code)
    else:
        operand = e4m3_values(code).to(tl.bfloat16)
    return operand


@triton.jit
def bf16_operand(bits):
    """The bits of BF16 as an operand of a product."""
    return bf16_value(bits) if INTERPRETED else bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def load_queries(query_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load ROWS heads as operands of a tile's products, `[channels, ROWS]`.

    NVFP4 has two halves of the channels, others one.
    """
    HALVES: tl.constexpr = 2 if FORMAT == "index_nvfp4" else 1
    WIDTH: tl.constexpr = BLOCK // HALVES
    queries = ()
    for half in tl.static_range(HALVES):
        at = tl.arange(0, ROWS)[None, :] * BLOCK + half * WIDTH + tl.arange(0, WIDTH)[:, None]
        if FORMAT == "index_fp8":
            query = fp8_operand(tl.load(query_ptr + at))
        elif FORMAT == "index_fp32":
            query = tl.load(query_ptr.to(tl.pointer_type(tl.float32)) + at)
        else:
            query = bf16_operand(tl.load(query_ptr.to(tl.pointer_type(tl.uint16)) + at))
        queries = queries + (query,)  # type: ignore[assignment]
    return queries


@triton.jit
def load_keys(key_ptr, FORMAT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load keys whose channels are whole bytes, `[TILE, BLOCK]`."""
    if FORMAT == "index_fp32":
        keys = load_row_parts(key_ptr.to(tl.pointer_type(tl.float32)), DIM, BLOCK)
    elif FORMAT == "index_bf16":
        keys = bf16_operand(load_row_parts(key_ptr.to(tl.pointer_type(tl.uint16)), DIM, BLOCK))
    elif has_instructions_of(89):
        # Loaded as numbers, keys go from memory to the product without passing registers.
        keys = load_row_parts(key_ptr.to(tl.pointer_type(tl.float8e4nv)), DIM, BLOCK)
    else:
        keys = fp8_operand(load_row_parts(key_ptr, DIM, BLOCK))
    return keys


@triton.jit
def nvfp4_products(key_ptr, key_scale_ptr, queries, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """`[TILE, heads]`: the products of even channels plus those of odd ones."""
    pair = tl.arange(0, BLOCK // 2)[None, :]
    codes = load_row_parts(key_ptr, DIM // 2, BLOCK // 2).to(tl.int32)  # [TILE, BLOCK / 2]
    scale = tl.load(key_scale_ptr[:, None] + pair // 8, mask=pair < DIM // 2, other=0)
    scale = e4m3_values(scale)  # [TILE, BLOCK / 2]
    even, odd = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    if not INTERPRETED:
        even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    products = tl.dot(even, queries[0])
    return tl.dot(odd, queries[1], products)


@triton.jit
def sum_heads(positive, weights, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
              TOKENS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """`[TILE, TOKENS]`: sum_h w_h x_h of positive `[TILE, TOKENS × BLOCK_HEADS]`."""
    weighted = tl.reshape(positive * weights[None, :], (TILE, TOKENS, BLOCK_HEADS))
    if HEADS < BLOCK_HEADS:  # an infinite key makes the products of padding heads NaN
        is_head = tl.arange(0, BLOCK_HEADS)[None, None, :] < HEADS
        weighted = tl.where(is_head, weighted, 0.0)
    return tl.sum(weighted, axis=2)


@triton.jit
def score_tiles(pages_ptr, pages, counts, scores_ptr, operands, keys, KEY: tl.constexpr,
                SPEC: tl.constexpr):  # fmt: skip
    """Score this program's tiles of a request's entries for TOKENS of its tokens.

    pages are those of the first tile, among others. counts `[TOKENS]` is the number of entries to
    score for each token; their scores start at scores_ptr `[1, TOKENS]`.
    """
    FORMAT: tl.constexpr = KEY.FORMAT
    ENTRIES_PER_BLOCK: tl.constexpr = SPEC.ENTRIES_PER_BLOCK
    TILE: tl.constexpr = SPEC.TILE
    ROWS: tl.constexpr = SPEC.TOKENS * SPEC.BLOCK_HEADS
    queries = load_queries(operands.query_ptr, FORMAT, ROWS, KEY.BLOCK)  # each [channels, ROWS]
    head = tl.arange(0, ROWS)
    weights = tl.load(
        operands.weights_ptr + head // SPEC.BLOCK_HEADS * operands.weights_stride
        + head % SPEC.BLOCK_HEADS
    )  # [ROWS]  # fmt: skip
    count = tl.max(counts, axis=0)
    first_tile, step = tl.program_id(1), tl.num_programs(1)
    first, last, _next_first, _next_last = pages
    for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                         loop_bound(step), num_stages=SPEC.STAGES):  # fmt: skip
        blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE) + tl.zeros((TILE,), tl.int32)
        first, last = load_pages(pages_ptr, tile + step, count, ENTRIES_PER_BLOCK, TILE)
        entry = tile * TILE + tl.arange(0, TILE)  # [TILE]
        # A request's pages are whole: rows beyond its entries are read and not stored.
        page_start = tl.maximum(blocks, 0).to(tl.int64) * keys.page_stride
        page_row = entry % ENTRIES_PER_BLOCK
        key_ptr = keys.data_ptr + (page_start + page_row * KEY.DATA_BYTES)
        key_scale_ptr = keys.scales_ptr + (page_start + page_row * KEY.SCALE_BYTES)
        if FORMAT == "index_nvfp4":
            products = nvfp4_products(key_ptr, key_scale_ptr, queries, KEY.DIM, KEY.BLOCK)
        else:
            values = load_keys(key_ptr, FORMAT, KEY.DIM, KEY.BLOCK)  # [TILE, BLOCK]
            products = tl.dot(values, queries[0], input_precision="ieee")  # [TILE, ROWS]
        if FORMAT == "index_fp8":  # twice the ReLU, as in `hopper.index_scores`
            positive = products + tl.abs(products)
        else:
            positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = sum_heads(positive, weights, SPEC.HEADS, SPEC.BLOCK_HEADS, SPEC.TOKENS, TILE)
        if FORMAT == "index_fp8":
            score *= tl.load(key_scale_ptr.to(tl.pointer_type(tl.float32)))[:, None] * 0.5
        score = tl.where((blocks >= 0)[:, None], score, 0.0)  # [TILE, TOKENS]
        tl.store(scores_ptr + entry[:, None], score, mask=entry[:, None] < counts[None, :])


@triton.jit
def score_tokens(row, pages_ptr, pages, counts, scores_ptr, scores_stride, operands, keys,
                 OPERAND_BYTES: tl.constexpr, KEY: tl.constexpr, SPEC: tl.constexpr):  # fmt: skip
    """Score a request's entries for TOKENS of its tokens, from `row` on, by the keys' format."""
    row = row.to(tl.int64)
    first_score = row * scores_stride + tl.arange(0, SPEC.TOKENS)[None, :] * scores_stride
    scores_ptr = scores_ptr + first_score  # [1, TOKENS]
    operands = QueryOperands(
        operands.query_ptr + row * (SPEC.BLOCK_HEADS * KEY.BLOCK * OPERAND_BYTES),
        operands.weights_ptr + row * operands.weights_stride,
        operands.weights_stride,
    )
    if KEY.FORMAT == "index_mxfp4":
        score_mxfp4(pages_ptr, pages, counts, scores_ptr, operands, keys, KEY, SPEC)
    else:
        score_tiles(pages_ptr, pages, counts, scores_ptr, operands, keys, KEY, SPEC)


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "topk", "scores_stride", "table_stride",
        "query_weights_stride", "are_chunks_scored",
    ],
    do_not_specialize_on_alignment=PLAN_PTRS,
)  # fmt: skip
def _score_kernel(
    scores_ptr, scores_stride, query_operand_ptr, query_weights_ptr, query_weights_stride, data_ptr,
    scale_ptr, page_stride, first_token, num_tokens, topk, positions_ptr, request_ids_ptr,
    request_slots_ptr, workspace_starts_ptr, block_table_ptr, table_stride, are_chunks_scored,
    RATIO: tl.constexpr, KEY: tl.constexpr, OPERAND_BYTES: tl.constexpr, TOGETHER: tl.constexpr,
    ALONE: tl.constexpr, CHUNK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Score a part of the entries that TOKENS tokens see: TOGETHER if they are of one request.

    With are_chunks_scored, groups of CHUNK_TOKENS tokens of one chunk are scored already.
    """
    TOKENS: tl.constexpr = TOGETHER.TOKENS
    start = tl.program_id(0) * TOKENS
    row = start + tl.arange(0, TOKENS)  # [TOKENS]
    token = first_token + tl.minimum(row, num_tokens - 1)
    slots, counts = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    counts = tl.where((row < num_tokens) & (counts > topk), counts, 0)  # [TOKENS]
    if CHUNK_TOKENS:
        is_scored = are_groups_scored(row, num_tokens, first_token, request_ids_ptr,
                                      workspace_starts_ptr, CHUNK_TOKENS)  # fmt: skip
        counts = tl.where(is_scored & (are_chunks_scored != 0), 0, counts)
    slot = tl.max(slots, axis=0)
    pages_ptr = block_table_ptr + slot * table_stride
    pages = load_first_pages(pages_ptr, tl.max(counts, axis=0), TOGETHER.ENTRIES_PER_BLOCK,
                             TOGETHER.TILE)  # fmt: skip
    wait_for_launch_before(STARTS_NEXT=False)
    operands = QueryOperands(query_operand_ptr, query_weights_ptr, query_weights_stride)
    keys = KeyPages(data_ptr, scale_ptr, page_stride)
    if tl.max(counts, axis=0) > 0:
        if (tl.min(slots, axis=0) == slot) & (start + TOKENS <= num_tokens):
            score_tokens(start, pages_ptr, pages, counts, scores_ptr, scores_stride, operands, keys,
                         OPERAND_BYTES, KEY, TOGETHER)  # fmt: skip
        elif TOKENS > 1:
            for idx in range(TOKENS):
                count = tl.max(tl.where(row == start + idx, counts, 0), axis=0)
                if count > 0:
                    slot = tl.max(tl.where(row == start + idx, slots, -1), axis=0)
                    pages_ptr = block_table_ptr + slot * table_stride
                    pages = load_first_pages(pages_ptr, count, ALONE.ENTRIES_PER_BLOCK,
                                             ALONE.TILE)  # fmt: skip
                    score_tokens(start + idx, pages_ptr, pages, count + tl.zeros((1,), tl.int32),
                                 scores_ptr, scores_stride, operands, keys, OPERAND_BYTES, KEY,
                                 ALONE)  # fmt: skip


def select_entries(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    max_entries: int,
    candidates: Tensor | None = None,
    chosen_scores: Tensor | None = None,
    block_scores: Tensor | None = None,
) -> Selection:
    """See `kernels.reference.indexer`."""
    num_tokens, device = len(tokens.positions), tokens.positions.device
    layout = memory.layout
    chosen = empty_selection(
        num_tokens, layout.index_topk, device, num_blocks=layout.candidate_blocks
    )
    if not num_tokens:
        return chosen
    all_tokens = range(num_tokens)
    if max_entries <= layout.index_topk and chosen_scores is None:
        unread = chosen.entry_idx
        choose_best(chosen, unread, unread, tokens, layout, all_tokens, max_entries=max_entries)
        if layout.candidate_blocks:
            chosen = chosen._replace(blocks=first_blocks(layout, tokens))
        return chosen
    if candidates is not None:
        _select_listed(
            query, head_weights, memory, tokens, candidates.contiguous(), chosen, chosen_scores,
            max_entries=max_entries,
        )  # fmt: skip
        return chosen
    chunk_keys = cut_chunk_keys(query, memory, tokens, max_entries=max_entries)
    scratch = index_scratch(query, memory, max_entries=max_entries, chunk_keys=chunk_keys)
    if chunk_keys is not None:
        store_operands(chunk_keys, memory, tokens, max_entries=max_entries)
    scored = memory if chosen_scores is None else memory.scoring_all
    for first in range(0, num_tokens, scratch.num_rows):
        part = all_tokens[first : first + scratch.num_rows]
        prepare_queries(query, head_weights, scratch, scored, tokens, part)
        score_entries(
            scratch, scored, tokens, part, num_heads=query.shape[1], max_entries=max_entries,
            chunk_keys=chunk_keys,
        )  # fmt: skip
        choose_best(
            chosen, scratch.scores, scratch.group_tops, tokens, layout, part,
            max_entries=max_entries,
            topped_rows=0 if chunk_keys is None else chunk_keys.topped_rows,
        )  # fmt: skip
        if chosen_scores is not None:
            entries = chosen.entry_idx[part.start : part.stop].long().clamp(min=0)
            scores = scratch.scores[: len(part)].gather(1, entries)
            chosen_scores[part.start : part.stop] = scores
        if layout.candidate_blocks:
            choose_blocks(chosen, scratch, layout, tokens, part, max_entries=max_entries)
        if block_scores is not None:
            store_largest(block_scores, chosen, scratch, layout, tokens, part)
    return chosen


def _select_listed(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    candidates: Tensor,
    chosen: Selection,
    chosen_scores: Tensor | None,
    *,
    max_entries: int,
) -> None:
    """Write the selection from candidate blocks `[num_tokens, blocks]`.

    With chosen_scores a list may miss blocks: its length then takes the place of the position.
    """
    size = memory.layout.candidate_size
    if chosen_scores is not None:
        ends = (candidates.amax(dim=1) + 1) * size
        missing = (ends - (tokens.positions + 1) // memory.layout.ratio).clamp(min=0)
        lengths = (candidates >= 0).sum(dim=1) * size - missing
        tokens = tokens._replace(positions=(lengths * memory.layout.ratio - 1).int())
        chosen_scores.zero_()  # a launch between: kernels may read positions before they wait
    scored = memory if chosen_scores is None else memory.scoring_all
    layout = ListedLayout(memory.layout.entries_per_block, size, candidates)
    width = min(candidates.shape[1] * size, max_entries)
    scratch = index_scratch(query, memory, max_entries=width)
    places = torch.empty_like(tokens.positions)
    listed, num_heads = tokens._replace(positions=places), query.shape[1]
    for first in range(0, len(query), scratch.num_rows):
        part = range(len(query))[first : first + scratch.num_rows]
        prepare_queries(query, head_weights, scratch, scored, tokens, part)
        score_listed(
            scratch, candidates, places, memory, tokens, part,
            _shared_arguments(scratch, scored, tokens, part, num_heads), num_heads=num_heads,
            width=width,
        )  # fmt: skip
        choose_best(
            chosen, scratch.scores, scratch.group_tops, listed, layout, part, max_entries=width,
            topped_rows=ALL_ROWS,
        )  # fmt: skip
        if chosen_scores is not None:
            span = slice(part.start, part.stop)
            entries, blocks = chosen.entry_idx[span].clamp(min=0), candidates[span]
            blocks = torch.where(blocks >= 0, blocks, torch.iinfo(torch.int32).max)
            at = torch.searchsorted(blocks, entries // size) * size + entries % size
            scores = scratch.scores[: len(part)].gather(1, at.clamp(max=width - 1))
            chosen_scores[span] = scores


def empty_selection(
    num_tokens: int, topk: int, device: torch.device, *, num_blocks: int = 0
) -> Selection:
    """Allocate the tensors that `choose_best` writes."""
    return Selection(
        torch.empty(num_tokens, topk, dtype=torch.int32, device=device),
        torch.empty(num_tokens, topk, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int32, device=device),
        torch.empty(num_tokens, num_blocks, dtype=torch.int32, device=device),
    )


def index_scratch(
    query: Tensor,
    memory: LayerMemory,
    *,
    max_entries: int,
    num_tokens: int | None = None,
    chunk_keys: ChunkKeys | None = None,
) -> IndexScratch:
    """Divide the layer's workspace for queries of that shape, or for num_tokens of them.

    chunk_keys have its front.
    """
    num_queries, num_heads, dim = query.shape
    num_tokens, storage = num_tokens or num_queries, memory.index_scratch
    row = index_row_bytes(
        memory.layout.index_format,
        num_heads=num_heads, dim=dim, topk=memory.layout.index_topk, max_entries=max_entries,
    )  # fmt: skip
    if chunk_keys is not None:
        storage = storage[chunk_keys.codes.nbytes + chunk_keys.extras.nbytes :]
        num_rows = min(num_tokens, storage.numel() // sum(row))
        num_tokens = max(1, tokens_at_once(num_rows, num_heads, storage.device))
    return cut_index_scratch(storage, row, num_tokens=num_tokens)


def prepare_queries(
    query: Tensor,
    head_weights: Tensor,
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    part: range,
) -> None:
    """Write the workspace's queries and weights of the tokens `part`."""
    num_heads, dim = query.shape[1:]
    scale = memory.global_scale
    if query.stride(2) != 1 or query.stride(1) != dim:  # tokens may be apart
        query = query.contiguous()
    launch = find_launch(QueryLaunch, "index query", query.device, len(part))
    if head_weights.stride(1) != 1:
        head_weights = head_weights.contiguous()
    block_heads = padded_heads(num_heads)
    _query_kernel[(len(part), block_heads // launch.heads)](
        query_ptr=query, token_stride=query.stride(0) if len(query) > 1 else num_heads * dim,
        weights_ptr=head_weights, weights_stride=head_weights.stride(0),
        cos_ptr=memory.rope.cos, sin_ptr=memory.rope.sin,
        global_scale_ptr=scratch.weights if scale is None else scale,
        HEADS=num_heads, BLOCK_HEADS=block_heads, LOG_DIM=dim.bit_length() - 1,
        HAS_HADAMARD=memory.layout.has_hadamard, HAS_GLOBAL_SCALE=scale is not None,
        WEIGHT_SCALE=dim**-0.5 * num_heads**-0.5,
        ROWS=launch.heads, num_warps=launch.num_warps, launch_pdl=starts_early(query.device),
        enable_fp_fusion=False,
        **_shared_arguments(scratch, memory, tokens, part, num_heads),
    )  # fmt: skip


def score_entries(
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    part: range,
    *,
    num_heads: int,
    max_entries: int,
    chunk_keys: ChunkKeys | None = None,
) -> None:
    """Write the workspace's scores of the tokens `part`, whose queries it holds.

    chunk_keys, if there are any, hold the operands of the chunks' keys.
    """
    keys = existing(memory.index_keys)
    shared = _shared_arguments(scratch, memory, tokens, part, num_heads)
    if chunk_keys is not None:
        score_chunks(chunk_keys, scratch, memory, tokens, part, shared, max_entries=max_entries)
        if chunk_keys.topped_rows == ALL_ROWS:  # and their scores
            return
    launch = score_launch(keys.format.name, tokens, num_heads)
    num_groups = -(-len(part) // launch.tokens)
    programs = launch.programs_per_sm * num_multiprocessors(keys.data.device)
    splits = min(-(-max_entries // launch.tile), max(1, programs // num_groups))
    spec = ScoreSpec(
        num_heads, padded_heads(num_heads), launch.tile, launch.tokens, launch.stages,
        launch.num_warps, keys.rows_per_page,
    )  # fmt: skip
    _score_kernel[(num_groups, splits)](
        scores_ptr=scratch.scores, scores_stride=scratch.scores.stride(0),
        data_ptr=keys.data, scale_ptr=keys.scales, page_stride=keys.data.stride(0),
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        workspace_starts_ptr=tokens.workspace_starts,
        are_chunks_scored=int(chunk_keys is not None),
        CHUNK_TOKENS=group_tokens(memory, tokens, num_heads=num_heads),
        num_tokens=len(part), TOGETHER=spec, ALONE=spec._replace(TOKENS=1),
        num_warps=launch.num_warps, maxnreg=launch.maxnreg,
        launch_pdl=starts_early(keys.data.device), **shared,
    )  # fmt: skip


def score_launch(format_name: str, tokens: TokenMap, num_heads: int) -> ScoreLaunch:
    """The launch of a forward's scores; forwards with a long chunk may have one of their own.

    That one is for products of up to MAX_COLUMNS heads.
    """
    work, device = f"score {format_name}", tokens.positions.device
    if len(tokens.chunk_ids) and f"{work} chunk" in WORKS:
        launch = find_launch(ScoreLaunch, f"{work} chunk", device)
        if launch.tokens * padded_heads(num_heads) <= MAX_COLUMNS:
            return launch
    return find_launch(ScoreLaunch, work, device, num_heads)


def _shared_arguments(
    scratch: IndexScratch, memory: LayerMemory, tokens: TokenMap, part: range, num_heads: int
) -> dict[str, Any]:
    key = row_spec("index", memory.layout.index_row, memory.layout.rope_dim)
    return {
        "query_operand_ptr": scratch.queries, "query_weights_ptr": scratch.weights,
        "query_weights_stride": scratch.weights.stride(0),
        "first_token": part.start, "topk": memory.layout.index_topk,
        "positions_ptr": tokens.positions, "request_ids_ptr": tokens.request_ids,
        "request_slots_ptr": tokens.request_slots,
        "RATIO": memory.layout.ratio, "KEY": key,
        "OPERAND_BYTES": scratch.queries.shape[1] // (padded_heads(num_heads) * key.BLOCK),
    }  # fmt: skip
