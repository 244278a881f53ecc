"""Top-k: the best entries of each token, exactly, from scores in memory.

Scores are compared as whole numbers that are ordered as they are; ±0 are one number, and a NaN is
below all and never chosen. Four passes of 8 bits find the k-th largest; one more lists, in
ascending index, what is above it and the first of its equals. A long row is cut into parts, each
with a program of its own that lists its best; the best of these lists are the row's.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels import Selection, TokenMap
from dsv4.kernels.index_scratch import PART_ENTRIES, num_parts
from dsv4.kernels.triton.primitives import loop_bound

TILE = 4096  # entries a program looks at at a time
NUM_WARPS = 16
SIGN_BIT = tl.constexpr(-(2**31))
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO: tl.constexpr):
    """A token's slot, int64, and how many entries it sees; none if it is padding."""
    slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token)).to(tl.int64)
    position = tl.load(positions_ptr + token)
    return slot, tl.where(slot >= 0, (position + 1) // RATIO, 0)


@triton.jit
def order_keys(bits, is_candidate):
    """fp32 bits, int32, to uint32 numbers in the same order; 0 for what can't be chosen."""
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    keys = tl.where(bits < 0, ~bits, bits ^ SIGN_BIT)
    keys = tl.where(is_candidate & (magnitude <= INF_BITS), keys, 0)
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def load_keys(scores_ptr, list_ptr, start, end, FROM_LIST: tl.constexpr, TILE: tl.constexpr):
    """Entries and order keys of a tile: of the entries from `start` on, or of those listed there.

    What is not before `end`, or not an entry, is -1 with key 0.
    """
    at = start + tl.arange(0, TILE)
    if FROM_LIST:
        entry = tl.load(list_ptr + at, mask=at < end, other=-1)
    else:
        entry = tl.where(at < end, at, -1)
    is_entry = entry >= 0
    return entry, order_keys(tl.load(scores_ptr + entry, mask=is_entry, other=0), is_entry)


@triton.jit
def find_threshold(scores_ptr, list_ptr, first, end, wanted, FROM_LIST: tl.constexpr,
                   TILE: tl.constexpr):  # fmt: skip
    """The key of the wanted-th largest, and how many of that key are among the wanted.

    With fewer candidates than wanted it is the smallest candidate's; with none it is 0 and 0.
    """
    digit = tl.arange(0, 256)
    threshold = tl.full((), 0, tl.uint32)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros((256,), tl.int32)
        for start in range(loop_bound(first), loop_bound(end), TILE):
            _entry, keys = load_keys(scores_ptr, list_ptr, start, end, FROM_LIST, TILE)
            is_open = keys > 0
            if shift < 24:
                is_open &= (keys >> (shift + 8)) == (threshold >> (shift + 8))
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=is_open)
        above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
        if shift == 24:
            wanted = tl.minimum(wanted, tl.sum(counts, axis=0))
        is_digit = (above < wanted) & (wanted <= above + counts)
        threshold |= tl.sum(tl.where(is_digit, digit, 0), axis=0).to(tl.uint32) << shift
        wanted -= tl.sum(tl.where(is_digit, above, 0), axis=0)
    return threshold, wanted


@triton.jit
def store_entries(outputs, pages, entry, position, is_stored, HAS_ROWS: tl.constexpr,
                  ENTRIES_PER_BLOCK: tl.constexpr):  # fmt: skip
    """Store entries, and with HAS_ROWS their flat rows, at their positions in the output."""
    entries_ptr, rows_ptr = outputs
    tl.store(entries_ptr + position, entry, mask=is_stored)
    if HAS_ROWS:
        column = pages + entry // ENTRIES_PER_BLOCK
        block = tl.load(column, mask=is_stored & (entry >= 0), other=-1).to(tl.int64)
        row = block * ENTRIES_PER_BLOCK + entry % ENTRIES_PER_BLOCK
        tl.store(rows_ptr + position, tl.where(block >= 0, row, -1), mask=is_stored)


@triton.jit
def store_best(
    outputs, pages, scores_ptr, list_ptr, first, end, wanted, FROM_LIST: tl.constexpr,
    HAS_ROWS: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the best `wanted` in ascending index; returns how many there were."""
    threshold, num_equal = find_threshold(scores_ptr, list_ptr, first, end, wanted, FROM_LIST,
                                          TILE)  # fmt: skip
    num_stored = tl.full((), 0, tl.int32)
    num_seen = tl.full((), 0, tl.int32)
    for start in range(loop_bound(first), loop_bound(end), TILE):
        entry, keys = load_keys(scores_ptr, list_ptr, start, end, FROM_LIST, TILE)
        is_equal = ((keys == threshold) & (keys > 0)).to(tl.int32)
        is_early = num_seen + tl.cumsum(is_equal, axis=0) <= num_equal
        is_best = (keys > threshold) | ((is_equal > 0) & is_early)
        place = num_stored + tl.cumsum(is_best.to(tl.int32), axis=0) - 1
        store_entries(outputs, pages, entry, place, is_best, HAS_ROWS, ENTRIES_PER_BLOCK)
        num_seen += tl.sum(is_equal, axis=0)
        num_stored += tl.sum(is_best.to(tl.int32), axis=0)
    return num_stored


@triton.jit(
    do_not_specialize=["scores_stride", "list_stride", "first_token", "topk"],
    do_not_specialize_on_alignment=["positions_ptr", "request_ids_ptr", "request_slots_ptr"],
)
def _part_kernel(
    scores_ptr, scores_stride, list_ptr, list_stride, first_token, topk,
    positions_ptr, request_ids_ptr, request_slots_ptr,
    RATIO: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """List the best topk of a part of a token's entries, then -1."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _slot, count = visible_entries(first_token + row, positions_ptr, request_ids_ptr,
                                   request_slots_ptr, RATIO)  # fmt: skip
    first = part * PART
    if (count > topk) & (first < count):
        scores_ptr += row * scores_stride
        out_ptr = list_ptr + row * list_stride + part * topk
        num_stored = store_best((out_ptr, out_ptr), out_ptr, scores_ptr, out_ptr, first,
                                tl.minimum(first + PART, count), topk, False, False, 1,
                                TILE)  # fmt: skip
        lane = tl.arange(0, BLOCK_K)
        tl.store(out_ptr + lane, -1, mask=(lane >= num_stored) & (lane < topk))


@triton.jit(
    do_not_specialize=["scores_stride", "list_stride", "first_token", "topk", "table_stride"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _topk_kernel(
    entry_idx_ptr, rows_ptr, counts_ptr, scores_ptr, scores_stride, list_ptr, list_stride,
    first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr, block_table_ptr,
    table_stride, RATIO: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, FROM_LIST: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose a token's entries; where it sees no more than topk, all, and no score is read."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    outputs = (entry_idx_ptr + token * topk, rows_ptr + token * topk)
    pages = block_table_ptr + slot * table_stride
    lane = tl.arange(0, BLOCK_K)
    num_stored = count
    if count <= topk:
        store_entries(outputs, pages, lane, lane, lane < count, True, ENTRIES_PER_BLOCK)
    else:
        scores_ptr += row * scores_stride
        list_ptr += row * list_stride
        end = count
        if FROM_LIST:
            end = tl.cdiv(count, PART) * topk
        num_stored = store_best(outputs, pages, scores_ptr, list_ptr, 0, end, topk, FROM_LIST,
                                True, ENTRIES_PER_BLOCK, TILE)  # fmt: skip
    none = tl.full((BLOCK_K,), -1, tl.int32)
    store_entries(outputs, pages, none, lane, (lane >= num_stored) & (lane < topk), True,
                  ENTRIES_PER_BLOCK)  # fmt: skip
    tl.store(counts_ptr + token, num_stored)


def choose_best(
    chosen: Selection,
    scores: Tensor,
    candidates: Tensor,
    tokens: TokenMap,
    *,
    first_token: int,
    num_tokens: int,
    max_entries: int,
    ratio: int,
    entries_per_block: int,
) -> None:
    """Write the selection of num_tokens tokens from first_token on.

    Args:
        chosen: Of all tokens.
        scores: `[num_tokens, at least max_entries]` fp32, rows of these tokens, contiguous.
            Nothing is read of a token that sees no more than topk entries.
        candidates: `[num_tokens, num_parts × topk]` int32, scratch for more than one part.
    """
    topk = chosen.entry_idx.shape[1]
    parts = num_parts(max_entries) if max_entries > topk else 1
    shared: dict[str, Any] = {
        "scores_ptr": scores.view(chosen.entry_idx.dtype), "scores_stride": scores.stride(0),
        "list_ptr": candidates, "list_stride": candidates.stride(0),
        "first_token": first_token, "topk": topk, "positions_ptr": tokens.positions,
        "request_ids_ptr": tokens.request_ids, "request_slots_ptr": tokens.request_slots,
        "RATIO": ratio, "PART": PART_ENTRIES, "TILE": TILE,
        "BLOCK_K": triton.next_power_of_2(topk), "num_warps": NUM_WARPS,
    }  # fmt: skip
    if parts > 1:
        _part_kernel[(num_tokens, parts)](**shared)
    _topk_kernel[(num_tokens,)](
        **shared, entry_idx_ptr=chosen.entry_idx, rows_ptr=chosen.rows, counts_ptr=chosen.counts,
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        ENTRIES_PER_BLOCK=entries_per_block, FROM_LIST=parts > 1,
    )  # fmt: skip
