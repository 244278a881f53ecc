"""Candidate blocks, in V4.1: a layer publishes the best of them, later ones score their keys alone.

A token's *list* is the entries of its blocks, ascending. All blocks but the newest are full, so the
place of an entry in the list gives its block. Top-k chooses places, and makes entries of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two, round_up
from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.index_scratch import (
    GROUP,
    IndexScratch,
    group_levels,
    num_group_tops,
    padded_heads,
)
from dsv4.kernels.layer_memory import LayerLayout, LayerMemory, existing
from dsv4.kernels.triton.key_tiles import QueryOperands, ScoreSpec
from dsv4.kernels.triton.launch import ScoreLaunch, find_launch, num_multiprocessors, starts_early
from dsv4.kernels.triton.mxfp4_scores import (
    code_tables,
    group_scores,
    key_operand,
    load_operands,
    load_scales,
    load_words,
    sum_heads,
)
from dsv4.kernels.triton.operands import PLAN_PTRS
from dsv4.kernels.triton.primitives import loop_bound, wait_for_launch_before
from dsv4.kernels.triton.topk import (
    ALL_ROWS,
    ListedLayout,
    choose_best,
    store_tops,
    visible_entries,
)

LARGEST_SCORES = 4096  # scores, or tops, of a program that finds the largest of blocks


@triton.jit(
    do_not_specialize=["scores_stride", "largest_stride", "first_token", "topk"],
    do_not_specialize_on_alignment=[*PLAN_PTRS, "places_ptr"],
)
def _largest_kernel(
    scores_ptr, scores_stride, largest_ptr, largest_stride, tops_ptr, places_ptr, first_token, topk,
    positions_ptr, request_ids_ptr, request_slots_ptr, RATIO: tl.constexpr, SIZE: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_TOPS: tl.constexpr,
):  # fmt: skip
    """Store the largest score of BLOCKS blocks of a token, infinity for its newest, and tops.

    A block has MEMBERS of the scores: its entries', or one that is already the largest. A token of
    at most topk blocks has no need of them. places_ptr gets the place of its last block.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS
    token = first_token + row
    _slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    wait_for_launch_before(STARTS_NEXT=True)
    num_blocks = tl.cdiv(count, SIZE)
    if tl.program_id(1) == 0:
        tl.store(places_ptr + token, num_blocks - 1)
    if (num_blocks > topk) & (first < num_blocks):
        block = first + tl.arange(0, BLOCKS)
        member = tl.arange(0, BLOCK_MEMBERS)[None, :]
        at = block[:, None] * MEMBERS + member  # [BLOCKS, BLOCK_MEMBERS]
        end = num_blocks if MEMBERS == 1 else count
        scores = tl.load(scores_ptr + row * scores_stride + at,
                         mask=(member < MEMBERS) & (at < end), other=float("-inf"))  # fmt: skip
        largest = tl.max(tl.where(scores == scores, scores, float("-inf")), axis=1)
        largest = tl.where(block == num_blocks - 1, float("inf"), largest)
        tl.store(largest_ptr + row * largest_stride + block, largest, mask=block < num_blocks)
        if HAS_TOPS:
            store_tops(tops_ptr + row * largest_stride, largest, first, num_blocks)


@triton.jit(
    do_not_specialize=[
        "query_weights_stride", "scores_stride", "tops_stride", "first_token", "topk", "num_blocks",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[*PLAN_PTRS, "places_ptr", "blocks_ptr"],
)  # fmt: skip
def _score_listed_kernel(
    scores_ptr, scores_stride, tops_ptr, tops_stride, query_operand_ptr, query_weights_ptr,
    query_weights_stride, blocks_ptr, num_blocks, places_ptr, data_ptr, scale_ptr, page_stride,
    first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr, block_table_ptr,
    table_stride, RATIO: tl.constexpr, KEY: tl.constexpr, OPERAND_BYTES: tl.constexpr,
    SIZE: tl.constexpr, SPEC: tl.constexpr, HAS_TOPS: tl.constexpr,
):  # fmt: skip
    """Score a part of a token's list, with tops. places_ptr gets the place of its last entry."""
    TILE: tl.constexpr = SPEC.TILE
    ENTRIES_PER_BLOCK: tl.constexpr = SPEC.ENTRIES_PER_BLOCK
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    wait_for_launch_before(STARTS_NEXT=True)
    visible = tl.cdiv(count, SIZE)
    count -= (visible - tl.minimum(visible, num_blocks)) * SIZE  # entries of the list
    if tl.program_id(1) == 0:
        tl.store(places_ptr + token, count - 1)
    if (count > topk) & (tl.program_id(1) * TILE < count):
        operands = QueryOperands(
            query_operand_ptr + row * (SPEC.BLOCK_HEADS * KEY.BLOCK * OPERAND_BYTES),
            query_weights_ptr + row * query_weights_stride, query_weights_stride,
        )  # fmt: skip
        query, weights = load_operands(operands, KEY.BLOCK, SPEC)
        pages_ptr = block_table_ptr + slot * table_stride
        blocks_ptr += token * num_blocks
        scores_ptr += row * scores_stride
        for tile in tl.range(loop_bound(tl.program_id(1)), loop_bound(tl.cdiv(count, TILE)),
                             loop_bound(tl.num_programs(1)), num_stages=1):  # fmt: skip
            place = tile * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
            block = tl.load(blocks_ptr + place // SIZE, mask=place < count, other=-1)
            entry = block * SIZE + place % SIZE
            column = entry // ENTRIES_PER_BLOCK
            # Blocks are a caller's tensor: those that its request's table lacks have no page.
            is_listed = (entry >= 0) & (column < table_stride)
            page = tl.load(pages_ptr + column, mask=is_listed, other=-1)
            key_row = tl.where(is_listed, entry % ENTRIES_PER_BLOCK, 0)
            page_start = tl.maximum(page, 0).to(tl.int64) * page_stride
            data_page, scale_page = data_ptr + page_start, scale_ptr + page_start
            words = load_words(data_page, key_row, KEY.DATA_BYTES, KEY.DIM, KEY.BLOCK)
            scales = load_scales(scale_page, key_row, page >= 0, KEY.SCALE_BYTES, KEY.DIM,
                                 KEY.BLOCK)  # fmt: skip
            key = key_operand(words, code_tables(scales), KEY.BLOCK, TILE, SPEC.WARPS)
            products = tl.dot(key, query)  # [TILE, BLOCK_HEADS]
            positive = products + tl.abs(products)
            score = sum_heads(positive, weights, SPEC.BLOCK_HEADS, 1, TILE, SPEC.WARPS)
            if tl.max(tl.reshape((score != score).to(tl.int32), (TILE,)), axis=0) != 0:
                again = group_scores(data_page, scale_page, key_row, operands, KEY, SPEC)
                score = tl.where(score == score, score, again)
            score = tl.where(page >= 0, score, 0.0)
            tl.store(scores_ptr + place, score, mask=place < count)
            if HAS_TOPS:
                store_tops(tops_ptr + row * tops_stride, tl.reshape(score, (TILE,)), tile * TILE,
                           count)  # fmt: skip


def first_blocks(layout: LayerLayout, tokens: TokenMap) -> Tensor:
    """List the first candidate blocks that tokens see, ascending, then -1."""
    is_padding = tokens.request_slots[tokens.request_ids.long()] < 0
    counts = (tokens.positions.long() + 1).masked_fill(is_padding, 0) // layout.ratio
    blocks = torch.arange(layout.candidate_blocks, device=counts.device).expand(len(counts), -1)
    return torch.where(blocks * layout.candidate_size < counts[:, None], blocks, -1).int()


def choose_blocks(
    chosen: Selection, scratch: IndexScratch, layout: LayerLayout, tokens: TokenMap, part: range,
    *, max_entries: int,
) -> None:  # fmt: skip
    """Write the candidate blocks of the tokens `part`, by their scores in the workspace.

    The largest scores of blocks take the place of top-k's groups. Groups of as many entries as a
    block have them already: their tops are rewritten where they lie, if there is room.
    """
    size, most = layout.candidate_size, -(-max_entries // layout.candidate_size)
    width, topk = round_up(most, 4), layout.candidate_blocks
    needed, room = width + num_group_tops(most, topk=topk), scratch.group_tops
    if room.shape[1] < needed:
        room = room.new_empty(len(part), round_up(needed, 4))
    places = torch.empty_like(tokens.positions)
    are_groups = size == GROUP and group_levels(max_entries, topk=layout.index_topk) > 0
    scores = scratch.group_tops.view(torch.float32) if are_groups else scratch.scores
    members = 1 if are_groups else size
    num_blocks = max(GROUP, LARGEST_SCORES // next_power_of_two(members))
    _largest_kernel[(len(part), -(-most // num_blocks))](
        scores_ptr=scores, scores_stride=scores.stride(0),
        largest_ptr=room.view(torch.float32), largest_stride=room.stride(0),
        tops_ptr=room[:, width:], HAS_TOPS=needed > width, places_ptr=places,
        first_token=part.start, topk=topk, positions_ptr=tokens.positions,
        request_ids_ptr=tokens.request_ids, request_slots_ptr=tokens.request_slots,
        RATIO=layout.ratio, SIZE=size, MEMBERS=members, BLOCKS=num_blocks,
        BLOCK_MEMBERS=next_power_of_two(members), num_warps=4,
        launch_pdl=starts_early(scores.device),
    )  # fmt: skip
    counts = torch.empty_like(places)  # of no use; some warps still read places when others write
    choose_best(
        chosen._replace(entry_idx=chosen.blocks, counts=counts), room[:, :width], room[:, width:],
        tokens._replace(positions=places), ListedLayout(), part, max_entries=most,
        topped_rows=ALL_ROWS,
    )  # fmt: skip


def store_largest(
    block_scores: Tensor, chosen: Selection, scratch: IndexScratch, layout: LayerLayout,
    tokens: TokenMap, part: range,
) -> None:  # fmt: skip
    """Store the largest scores of the chosen blocks of the tokens `part`, also of the newest."""
    span, size = slice(part.start, part.stop), layout.candidate_size
    blocks = chosen.blocks[span, :, None].long()
    entries = blocks * size + torch.arange(size, device=blocks.device)  # [tokens, blocks, size]
    counts = (tokens.positions[span, None, None] + 1) // layout.ratio
    is_seen = (blocks >= 0) & (entries < counts)
    places = torch.where(is_seen, entries, 0).flatten(1)
    scores = scratch.scores[: len(part)].gather(1, places).view_as(entries)
    is_number = is_seen & (scores == scores)
    block_scores[span] = torch.where(is_number, scores, -torch.inf).amax(dim=2)


def score_listed(
    scratch: IndexScratch, candidates: Tensor, places: Tensor, memory: LayerMemory,
    tokens: TokenMap, part: range, shared: dict[str, Any], *, num_heads: int, width: int,
) -> None:  # fmt: skip
    """Write the workspace's scores of the lists of the tokens `part`, whose queries it holds."""
    keys = existing(memory.index_keys)
    launch = find_launch(ScoreLaunch, f"score {keys.format.name}", keys.data.device, num_heads)
    programs = launch.programs_per_sm * num_multiprocessors(keys.data.device)
    splits = min(-(-width // launch.tile), max(1, programs // len(part)))
    spec = ScoreSpec(num_heads, padded_heads(num_heads), launch.tile, 1, launch.stages,
                     launch.num_warps, keys.rows_per_page)  # fmt: skip
    _score_listed_kernel[(len(part), splits)](
        scores_ptr=scratch.scores, scores_stride=scratch.scores.stride(0),
        tops_ptr=scratch.group_tops, tops_stride=scratch.group_tops.stride(0),
        HAS_TOPS=scratch.has_tops, blocks_ptr=candidates,
        num_blocks=candidates.shape[1], places_ptr=places, data_ptr=keys.data,
        scale_ptr=keys.scales, page_stride=keys.data.stride(0),
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        SIZE=memory.layout.candidate_size, SPEC=spec, num_warps=launch.num_warps,
        maxnreg=launch.maxnreg, launch_pdl=starts_early(keys.data.device), **shared,
    )  # fmt: skip
