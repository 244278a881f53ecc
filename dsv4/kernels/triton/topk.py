"""Top-k: the best entries of each token, exactly, from scores in memory.

Scores are compared as whole numbers that are ordered as they are; ±0 are one number, and a NaN is
below all and never chosen. A program holds all keys of its row in registers. It counts those at
two pivots at a time until the k-th largest is alone between them, then lists, in ascending index,
what is above it and the first of its equals. Pivots are guesses: they decide how soon the search
ends, never where. A long row is cut into parts, each with a program of its own that lists its
best; the best of these lists are the row's.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels import Selection, TokenMap
from dsv4.kernels.index_scratch import PART_ENTRIES, num_parts
from dsv4.kernels.triton.primitives import INTERPRETED

WIDTHS = (8192, 16384, 32768)  # keys of a program; the last holds 16 lists of 2048
KEYS_PER_THREAD = 32
MAX_WARPS = 16
VECTOR = 4  # neighbours that a thread reads at once
LAUNCH_EARLY = True
SIGN_BIT = tl.constexpr(-(2**31))
INF_BITS, NAN_BITS = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
NO_KEY = tl.constexpr(-0x7F800001)  # below -inf
END_KEY = tl.constexpr(0x7F800001)  # above inf
FIRST_MARGIN = tl.constexpr(0.05)  # standard deviations from the first guess to its pivots
MARGIN = tl.constexpr(0.7)  # the same of a guess between two counts
BY_VALUE, BY_KEY, BY_THIRDS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO: tl.constexpr):
    """A token's slot, int64, and how many entries it sees; none if it is padding."""
    slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token)).to(tl.int64)
    position = tl.load(positions_ptr + token)
    return slot, tl.where(slot >= 0, (position + 1) // RATIO, 0)


@triton.jit
def order_keys(bits):
    """fp32 bits, int32, to int32 numbers in the same order; NO_KEY for NaN."""
    magnitude = bits & 0x7FFFFFFF
    keys = tl.where(bits < 0, -magnitude, bits)
    return tl.where(magnitude < END_KEY, keys, NO_KEY)


@triton.jit
def key_bits(key):
    """The fp32 bits of an order key; NaN's of NO_KEY and END_KEY."""
    return tl.where(key < 0, (-key) | SIGN_BIT, key)


@triton.jit
def key_value(key):
    """The fp32 of an order key."""
    return key_bits(key).to(tl.float32, bitcast=True)


@triton.jit
def load_bits(scores_ptr, end, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Bits of scores before `end`, then a NaN's. Up to VECTOR - 1 after it are read, not used."""
    at = tl.arange(0, WIDTH)
    bits = tl.load(scores_ptr + at, mask=at // VECTOR * VECTOR < end, other=NAN_BITS)
    return tl.where(at < end, bits, NAN_BITS)


@triton.jit
def upper_quantile(share):
    """About how many standard deviations above the mean a share of normal numbers begins."""
    tail = tl.minimum(share, 1.0 - share)
    t = tl.sqrt(-1.3862944 * tl.log2(tl.maximum(tail, 1e-6)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + (0.99229 + 0.04481 * t) * t)
    return tl.where(share < 0.5, z, -z)


@triton.jit
def first_pivots(bits, count, wanted):
    """Two keys around the wanted-th of `count` largest, if they are normal numbers."""
    is_finite = (bits & 0x7FFFFFFF) < INF_BITS
    values = tl.where(is_finite, bits, 0).to(tl.float32, bitcast=True)
    total, squares = tl.split(tl.sum(tl.join(values, values * values), axis=0))
    mean = total / count
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    guess = mean + deviation * upper_quantile(wanted.to(tl.float32) / count)
    margin = deviation * FIRST_MARGIN
    first, last = guess - margin, guess + margin
    return (order_keys(first.to(tl.int32, bitcast=True)),
            order_keys(last.to(tl.int32, bitcast=True)))  # fmt: skip


@triton.jit
def key_between(low, high, fraction, IS_BY_VALUE):
    """The key at a fraction of the way, as numbers are spaced or as keys are."""
    span = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    step = (span.to(tl.float32) * tl.minimum(tl.maximum(fraction, 0.0), 1.0)).to(tl.uint32)
    key = (low.to(tl.uint32, bitcast=True) + step).to(tl.int32, bitcast=True)
    first, last = key_value(low), key_value(high)
    value = first + (last - first) * fraction
    is_value = IS_BY_VALUE & (value == value)
    return tl.where(is_value, order_keys(value.to(tl.int32, bitcast=True)), key)


@triton.jit
def next_pivots(low, high, num_low, num_high, wanted, guess_by):
    """Two keys around the wanted-th largest, if keys are evenly spread from low to high."""
    scale = 1.0 / (num_low - num_high).to(tl.float32)
    middle = ((num_low - wanted).to(tl.float32) + 0.5) * scale
    margin = MARGIN * tl.sqrt(tl.maximum(middle * (1.0 - middle), 0.25 * scale) * scale)
    is_guess = guess_by < BY_THIRDS
    first = tl.where(is_guess, middle - margin, 0.33333334)
    last = tl.where(is_guess, middle + margin, 0.6666667)
    is_by_value = guess_by == BY_VALUE
    return key_between(low, high, first, is_by_value), key_between(low, high, last, is_by_value)


@triton.jit
def count_at_least(keys, low, high):
    """How many keys are not below `low`, and not below `high`, which is no less; under 2**16."""
    packed = tl.sum(tl.where(keys >= high, 65537, tl.where(keys >= low, 1, 0)), axis=0)
    return packed & 0xFFFF, (packed >> 16) & 0xFFFF


@triton.jit
def find_threshold(bits, keys, count, wanted, WIDTH: tl.constexpr):
    """Keys from `upper` on are among the best, and so many of those from `low` on before it.

    The two are one key apart or none, or both what is above NO_KEY where fewer than wanted are.
    """
    low, high = tl.full((), NO_KEY, tl.int32), tl.full((), END_KEY, tl.int32)
    num_low = tl.where(count > wanted, tl.full((), WIDTH, tl.int32), wanted)
    num_high = tl.full((), 0, tl.int32)
    guess_by = tl.full((), BY_VALUE, tl.int32)
    num_passes = tl.full((), 1, tl.int32)
    first, last = low, low
    if count > wanted:
        first, last = first_pivots(bits, count.to(tl.float32), wanted)
    while (num_low != wanted) & (low + 1 < high):
        if (num_passes > 5) & (num_passes % 3 == 0):
            low = tl.min(tl.where(keys >= low, keys, high), axis=0)
            high = tl.max(tl.where(keys < high, keys, low), axis=0) + 1
            guess_by = tl.full((), BY_VALUE, tl.int32)
        else:
            first = tl.minimum(tl.maximum(first, low + 1), high - 1)
            last = tl.minimum(tl.maximum(last, first), high - 1)
            num_first, num_last = count_at_least(keys, first, last)
            num_between = num_low - num_high
            has_first, has_last = num_first >= wanted, num_last >= wanted
            low = tl.where(has_last, last, tl.where(has_first, first, low))
            num_low = tl.where(has_last, num_last, tl.where(has_first, num_first, num_low))
            high = tl.where(has_first, tl.where(has_last, high, last), first)
            num_high = tl.where(has_first, tl.where(has_last, num_high, num_last), num_first)
            is_slow = (num_low - num_high) * 4 > num_between
            guess_by = tl.where(is_slow, (guess_by + 1) % 3, guess_by)
        first, last = next_pivots(low, high, num_low, num_high, wanted, guess_by)
        num_passes += 1
    is_exact = num_low == wanted
    upper = tl.maximum(tl.where(is_exact, low, high), NO_KEY + 1)
    num_equal = tl.where(is_exact, 0, wanted - num_high)
    return tl.maximum(low, NO_KEY + 1), upper, num_equal


@triton.jit
def split_quads(x, WIDTH: tl.constexpr):
    """The first of every four neighbours, the second, the third, the fourth; a thread has all."""
    even, odd = tl.split(tl.reshape(x, (WIDTH // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def count_before(counts, NUM: tl.constexpr):
    """The sum of all before each, and of all: in the lanes of a warp first, then in all warps."""
    GROUPS: tl.constexpr = NUM // 32
    lanes = tl.reshape(counts, (GROUPS, 32))
    totals = tl.sum(lanes, axis=1)
    group = tl.arange(0, GROUPS)
    is_earlier = group[None, :] < group[:, None]
    before_group = tl.sum(tl.where(is_earlier, totals[None, :], 0), axis=1)
    before = before_group[:, None] + tl.cumsum(lanes, axis=1) - lanes
    return tl.reshape(before, (NUM,)), tl.sum(totals, axis=0)


@triton.jit
def key_flags(keys, low, upper):
    """1 for what is above, 65536 for what is equal, 0 for the rest."""
    return tl.where(keys >= upper, 1, tl.where(keys >= low, 65536, 0))


@triton.jit
def store_quad(out_ptr, list_ptr, keys, flags, before, num_equal, first, WIDTH: tl.constexpr,
               HAS_LIST: tl.constexpr):  # fmt: skip
    """Store the entries of one quarter that are among the best, and their scores in a list."""
    num_equal_before = before >> 16
    is_best = (flags == 1) | ((flags > 1) & (num_equal_before < num_equal))
    place = (before & 0xFFFF) + tl.minimum(num_equal_before, num_equal)
    tl.store(out_ptr + place, first + tl.arange(0, WIDTH // 4) * 4, mask=is_best)
    if HAS_LIST:
        tl.store(list_ptr + place, key_bits(keys), mask=is_best)


@triton.jit
def store_best(out_ptr, list_ptr, scores_ptr, first, count, wanted, WIDTH: tl.constexpr,
               VECTOR: tl.constexpr, HAS_LIST: tl.constexpr):  # fmt: skip
    """Store which are the best `wanted` of `count` scores, ascending; returns how many."""
    bits = load_bits(scores_ptr, count, WIDTH, VECTOR)
    keys = order_keys(bits)
    low, upper, num_equal = find_threshold(bits, keys, count, wanted, WIDTH)
    key0, key1, key2, key3 = split_quads(keys, WIDTH)
    flags0, flags1 = key_flags(key0, low, upper), key_flags(key1, low, upper)
    flags2, flags3 = key_flags(key2, low, upper), key_flags(key3, low, upper)
    before0, total = count_before(flags0 + flags1 + flags2 + flags3, WIDTH // 4)
    before1 = before0 + flags0
    before2 = before1 + flags1
    before3 = before2 + flags2
    store_quad(out_ptr, list_ptr, key0, flags0, before0, num_equal, first, WIDTH, HAS_LIST)
    store_quad(out_ptr, list_ptr, key1, flags1, before1, num_equal, first + 1, WIDTH, HAS_LIST)
    store_quad(out_ptr, list_ptr, key2, flags2, before2, num_equal, first + 2, WIDTH, HAS_LIST)
    store_quad(out_ptr, list_ptr, key3, flags3, before3, num_equal, first + 3, WIDTH, HAS_LIST)
    return (total & 0xFFFF) + tl.minimum((total >> 16) & 0xFFFF, num_equal)


@triton.jit
def store_rows(entries_ptr, rows_ptr, slots, pages, list_ptr, num_stored, topk,
               ENTRIES_PER_BLOCK: tl.constexpr, FROM_LIST: tl.constexpr,
               BLOCK_K: tl.constexpr):  # fmt: skip
    """Store entries and their flat rows, then -1; with FROM_LIST slots are places in the list."""
    lane = tl.arange(0, BLOCK_K)
    is_stored = lane < num_stored
    entry = tl.where(is_stored, slots, -1)
    if FROM_LIST:
        entry = tl.load(list_ptr + entry, mask=is_stored, other=-1)
    block = tl.load(pages + entry // ENTRIES_PER_BLOCK, mask=is_stored, other=-1).to(tl.int64)
    row = block * ENTRIES_PER_BLOCK + entry % ENTRIES_PER_BLOCK
    tl.store(entries_ptr + lane, entry, mask=lane < topk)
    tl.store(rows_ptr + lane, tl.where(block >= 0, row, -1), mask=lane < topk)


@triton.jit(
    do_not_specialize=["scores_groups", "list_groups", "first_token", "topk", "num_slots"],
    do_not_specialize_on_alignment=["positions_ptr", "request_ids_ptr", "request_slots_ptr"],
)
def _part_kernel(
    scores_ptr, scores_groups, list_ptr, list_groups, first_token, topk, num_slots,
    positions_ptr, request_ids_ptr, request_slots_ptr,
    RATIO: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """List the best topk of a part of a token's entries: their scores, then NaN, and which."""
    if not INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _slot, count = visible_entries(first_token + row, positions_ptr, request_ids_ptr,
                                   request_slots_ptr, RATIO)  # fmt: skip
    first = part * PART
    if (count > topk) & (first < count):
        scores_ptr += row * scores_groups * VECTOR + first
        best_ptr = list_ptr + (row * list_groups * VECTOR + part * topk)
        num_stored = store_best(best_ptr + num_slots, best_ptr, scores_ptr, first,
                                tl.minimum(count - first, PART), topk, WIDTH, VECTOR,
                                True)  # fmt: skip
        lane = tl.arange(0, BLOCK_K)
        tl.store(best_ptr + lane, NAN_BITS, mask=(lane >= num_stored) & (lane < topk))


@triton.jit(
    do_not_specialize=[
        "scores_groups", "list_groups", "first_token", "topk", "num_slots", "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _topk_kernel(
    entry_idx_ptr, rows_ptr, counts_ptr, scores_ptr, scores_groups, list_ptr, list_groups,
    first_token, topk, num_slots, positions_ptr, request_ids_ptr, request_slots_ptr,
    block_table_ptr, table_stride, RATIO: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FROM_LIST: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose a token's entries; where it sees no more than topk, all, and no score is read."""
    if not INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    pages = block_table_ptr + slot * table_stride
    entries_ptr, out_rows_ptr = entry_idx_ptr + token * topk, rows_ptr + token * topk
    best_ptr = list_ptr + row * list_groups * VECTOR
    slots = tl.arange(0, BLOCK_K)
    if count > topk:
        if FROM_LIST:
            num_stored = store_best(entries_ptr, entries_ptr, best_ptr, 0,
                                    tl.cdiv(count, PART) * topk, topk, WIDTH, VECTOR,
                                    False)  # fmt: skip
        else:
            scores_ptr += row * scores_groups * VECTOR
            num_stored = store_best(entries_ptr, entries_ptr, scores_ptr, 0, count, topk, WIDTH,
                                    VECTOR, False)  # fmt: skip
        tl.debug_barrier()
        slots = tl.load(entries_ptr + slots, mask=slots < num_stored, other=0)
        tl.debug_barrier()
        store_rows(entries_ptr, out_rows_ptr, slots, pages, best_ptr + num_slots, num_stored, topk,
                   ENTRIES_PER_BLOCK, FROM_LIST, BLOCK_K)  # fmt: skip
        tl.store(counts_ptr + token, num_stored)
    else:
        store_rows(entries_ptr, out_rows_ptr, slots, pages, best_ptr, count, topk,
                   ENTRIES_PER_BLOCK, False, BLOCK_K)  # fmt: skip
        tl.store(counts_ptr + token, count)


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
        candidates: `[num_tokens, at least 2 × num_parts × topk]` int32, scratch for more than one
            part.
    """
    topk = chosen.entry_idx.shape[1]
    parts = num_parts(max_entries) if max_entries > topk else 1
    strides = (scores.stride(0), candidates.stride(0) if parts > 1 else 0)
    vector = VECTOR if not any(stride % VECTOR for stride in strides) else 1
    shared: dict[str, Any] = {
        "scores_ptr": scores.view(chosen.entry_idx.dtype), "scores_groups": strides[0] // vector,
        "list_ptr": candidates, "list_groups": strides[1] // vector,
        "first_token": first_token, "topk": topk, "num_slots": parts * topk,
        "positions_ptr": tokens.positions,
        "request_ids_ptr": tokens.request_ids, "request_slots_ptr": tokens.request_slots,
        "RATIO": ratio, "PART": PART_ENTRIES, "VECTOR": vector,
        "BLOCK_K": triton.next_power_of_2(topk), "launch_pdl": LAUNCH_EARLY,
    }  # fmt: skip
    part_width, row_width = program_widths(max_entries, topk=topk)
    if parts > 1:
        _part_kernel[(num_tokens, parts)](**shared, **_program_size(part_width))
    _topk_kernel[(num_tokens,)](
        **shared, entry_idx_ptr=chosen.entry_idx, rows_ptr=chosen.rows, counts_ptr=chosen.counts,
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        ENTRIES_PER_BLOCK=entries_per_block, FROM_LIST=parts > 1,
        **_program_size(row_width),
    )  # fmt: skip


def program_widths(max_entries: int, *, topk: int) -> tuple[int, int]:
    """How many keys a program of each launch holds, for the parts and for the row; 0 for none."""
    parts = num_parts(max_entries) if max_entries > topk else 1
    if parts == 1:
        return 0, _width_of(max_entries if max_entries > topk else 1)
    return _width_of(PART_ENTRIES), _width_of(parts * topk)


def distinct_sizes(longest: int, *, topk: int) -> list[int]:
    """The fewest entries for every choice of programs, up to the longest row."""
    sizes = {1, topk + 1, *(width + 1 for width in WIDTHS), *range(1, longest + 1, PART_ENTRIES)}
    fewest: dict[object, int] = {}
    for size in sorted(size for size in sizes if size <= longest):
        fewest.setdefault((size > topk, program_widths(size, topk=topk)), size)
    return list(fewest.values())


def _width_of(num_keys: int) -> int:
    return next(width for width in WIDTHS if width >= num_keys)


def _program_size(width: int) -> dict[str, int]:
    num_warps = max(1, min(MAX_WARPS, width // (32 * KEYS_PER_THREAD)))
    return {"WIDTH": width, "num_warps": num_warps}
