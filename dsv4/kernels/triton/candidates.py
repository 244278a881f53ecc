"""Choices among candidate blocks, in V4.1: only the keys of a token's blocks are read and scored.

A program scores a tile of one token's listed entries. It makes the operands of the query itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.index_scratch import cut_index_scratch, index_row_bytes, padded_heads
from dsv4.kernels.layer_memory import LayerLayout, LayerMemory, existing
from dsv4.kernels.reference import addressing
from dsv4.kernels.triton.decode import e2m1_values, ue8m0_values
from dsv4.kernels.triton.launch import starts_early
from dsv4.kernels.triton.operands import PLAN_PTRS, row_spec
from dsv4.kernels.triton.primitives import (
    INTERPRETED,
    encode_rows,
    hadamard,
    load_rope,
    rotate_tail,
    wait_for_launch_before,
)
from dsv4.kernels.triton.topk import ListedLayout, choose_best

TILE = 64  # entries of a program


@triton.jit
def mxfp4_operand(codes, scales):
    """Values of codes times scales as an operand: BF16, which holds them exactly."""
    values = e2m1_values(codes) * ue8m0_values(scales)
    return values if INTERPRETED else values.to(tl.bfloat16)


@triton.jit(
    do_not_specialize=["first_token", "blocks_stride", "weights_stride", "table_stride"],
    do_not_specialize_on_alignment=["weights_ptr", "listed_ptr", *PLAN_PTRS[1:3]],
)
def _score_listed_kernel(
    query_ptr, token_stride, weights_ptr, weights_stride, blocks_ptr, blocks_stride, listed_ptr,
    scores_ptr, scores_stride, first_token, request_ids_ptr, request_slots_ptr,
    cos_ptr, sin_ptr, data_ptr, scales_ptr, page_stride, block_table_ptr, table_stride,
    KEY: tl.constexpr, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, LOG_DIM: tl.constexpr,
    HAS_HADAMARD: tl.constexpr, SIZE: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Score TILE of the entries in a token's blocks; listed_ptr has their number."""
    DIM: tl.constexpr = KEY.DIM
    BLOCK: tl.constexpr = KEY.BLOCK
    wait_for_launch_before(STARTS_NEXT=True)
    nth = tl.program_id(0).to(tl.int64)
    token = first_token + nth
    count = tl.load(listed_ptr + token)
    if tl.program_id(1) * TILE < count:
        slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token)).to(tl.int64)
        head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)[None, :]
        is_head = head < HEADS
        x = tl.load(query_ptr + token * token_stride + head[:, None] * DIM + channel,
                    mask=is_head[:, None] & (channel < DIM), other=0.0).to(tl.float32)  # fmt: skip
        row = token + tl.zeros((BLOCK_HEADS,), tl.int32)
        cos, sin = load_rope((cos_ptr, sin_ptr), row, is_head, DIM, KEY.ROTATED, BLOCK)
        x = rotate_tail(x, cos, sin, BLOCK_HEADS, DIM, KEY.ROTATED, BLOCK)
        if HAS_HADAMARD:
            x = hadamard(x, BLOCK_HEADS, DIM, LOG_DIM)
        pairs, _rope_bits, scales = encode_rows(x, 1.0, BLOCK_HEADS, KEY)
        pairs = pairs.to(tl.int32)
        codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (BLOCK_HEADS, BLOCK))
        wide = tl.broadcast_to(scales.to(tl.int32)[:, :, None], (BLOCK_HEADS, BLOCK // 32, 32))
        query = mxfp4_operand(codes, tl.reshape(wide, (BLOCK_HEADS, BLOCK)))
        query = tl.where((channel < DIM) & is_head[:, None], query, 0.0)
        listed = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
        is_listed = listed < count
        block = tl.load(blocks_ptr + token * blocks_stride + listed // SIZE, mask=is_listed,
                        other=0)  # fmt: skip
        entry = block * SIZE + listed % SIZE
        page = tl.load(block_table_ptr + slot * table_stride + entry // ENTRIES_PER_BLOCK,
                       mask=is_listed, other=-1).to(tl.int64)  # fmt: skip
        row = (entry % ENTRIES_PER_BLOCK).to(tl.int64)
        mask = (page >= 0)[:, None] & (channel < DIM)
        pair_ptr = data_ptr + (page * page_stride + row * KEY.DATA_STRIDE)
        scale_ptr = scales_ptr + (page * page_stride + row * KEY.SCALE_STRIDE)
        pairs = tl.load(pair_ptr[:, None] + channel // 2, mask=mask, other=0).to(tl.int32)
        scales = tl.load(scale_ptr[:, None] + channel // 32, mask=mask, other=0)
        keys = mxfp4_operand((pairs >> 4 * (channel & 1)) & 15, scales)  # [TILE, BLOCK]
        products = tl.dot(keys, tl.trans(query), input_precision="ieee")  # [TILE, BLOCK_HEADS]
        positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        weights = tl.load(weights_ptr + token * weights_stride + head, mask=is_head,
                          other=0.0).to(tl.float32)  # fmt: skip
        weighted = tl.where(is_head[None, :], positive * (weights * WEIGHT_SCALE)[None, :], 0.0)
        tl.store(scores_ptr + nth * scores_stride + listed, tl.sum(weighted, axis=1),
                 mask=is_listed)  # fmt: skip


def visible_counts(layout: LayerLayout, tokens: TokenMap) -> Tensor:
    """Count the entries that each token sees, `[num_tokens]` int64; 0 for padding."""
    counts = addressing.visible_entries(tokens.positions.long(), layout.ratio)
    return torch.where(addressing.token_slots(tokens) >= 0, counts, 0)


def first_blocks(layout: LayerLayout, counts: Tensor) -> Tensor:
    """List the first candidate blocks that tokens see, ascending, then -1."""
    blocks = torch.arange(layout.candidate_blocks, device=counts.device).expand(len(counts), -1)
    return torch.where(blocks * layout.candidate_size < counts[:, None], blocks, -1).int()


def select_listed(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    candidates: Tensor,
    chosen: Selection,
    *,
    max_entries: int,
) -> Selection:
    """Select entries of candidate blocks `[num_tokens, blocks]`; `chosen` is scratch."""
    layout, keys, num_tokens = memory.layout, existing(memory.index_keys), len(tokens.positions)
    size, (heads, dim) = layout.candidate_size, query.shape[1:]
    query, head_weights = query.contiguous(), head_weights.contiguous()
    counts, candidates = visible_counts(layout, tokens), candidates.contiguous()
    # All blocks but the newest are full.
    older = (candidates >= 0).sum(dim=1) - 1
    newest = (counts - 1).clamp(min=0) // size
    num_listed = torch.where(counts > 0, older * size + counts - newest * size, 0).int()
    width = min(candidates.shape[1] * size, max_entries)
    sizes = index_row_bytes(
        layout.index_format, num_heads=heads, dim=dim, topk=layout.index_topk, max_entries=width
    )
    scratch = cut_index_scratch(memory.index_scratch, sizes, num_tokens=num_tokens)
    listed_tokens = tokens._replace(positions=num_listed - 1)
    as_listed = ListedLayout(1, layout.entries_per_block)
    for first in range(0, num_tokens, scratch.num_rows):
        part = range(num_tokens)[first : first + scratch.num_rows]
        _score_listed_kernel[(len(part), -(-width // TILE))](
            query_ptr=query, token_stride=heads * dim, weights_ptr=head_weights,
            weights_stride=heads, blocks_ptr=candidates, blocks_stride=candidates.shape[1],
            listed_ptr=num_listed, scores_ptr=scratch.scores,
            scores_stride=scratch.scores.stride(0), first_token=first,
            request_ids_ptr=tokens.request_ids, request_slots_ptr=tokens.request_slots,
            cos_ptr=memory.rope.cos, sin_ptr=memory.rope.sin,
            data_ptr=keys.data, scales_ptr=keys.scales, page_stride=keys.data.stride(0),
            block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
            KEY=row_spec("index", layout.index_row, layout.rope_dim), HEADS=heads,
            BLOCK_HEADS=padded_heads(heads), LOG_DIM=dim.bit_length() - 1,
            HAS_HADAMARD=layout.has_hadamard, SIZE=size,
            ENTRIES_PER_BLOCK=layout.entries_per_block, WEIGHT_SCALE=dim**-0.5 * heads**-0.5,
            TILE=TILE, num_warps=4, launch_pdl=starts_early(keys.data.device),
            enable_fp_fusion=False,
        )  # fmt: skip
        choose_best(
            chosen, scratch.scores, scratch.group_tops, listed_tokens, as_listed, part,
            max_entries=width,
        )  # fmt: skip
    listed = chosen.entry_idx.long()
    entries = candidates.long().gather(1, listed.clamp(min=0) // size) * size + listed % size
    entries = torch.where(listed >= 0, entries, -1)
    slots = addressing.token_slots(tokens)[:, None]
    rows = addressing.entry_rows(tokens.block_table, slots, entries, layout.entries_per_block)
    return Selection(entries.int(), rows, chosen.counts, chosen.blocks)
