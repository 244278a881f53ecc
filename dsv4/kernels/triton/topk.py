"""Top-k: the best entries of each token, exactly, from scores in memory.

Scores are compared as fp32 numbers are: ±0 are one number, and a NaN is never chosen. A program
holds all scores of its row in registers. It counts those at two pivots at a time until the k-th
largest is found, then lists, in ascending index, what is not below it, and of its equals the first
where all are too many. Pivots are guesses: they decide how soon the search ends, never where;
between them they are whole numbers ordered as scores are. A count is of a thread's scores first,
as fp32, whose sums run beside the comparisons, then of a warp's, then of all warps' in each warp.
Of a long row the largest of each group of 8 are made first, and of each 8 of these, until they fit
a program. The best k entries are in the best k groups, since k groups that come before another one
have k entries that come before all of its: the program goes down from groups to their members, k
of them at a time.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.index_scratch import GROUP, group_levels, narrow_width, padded_entries
from dsv4.kernels.triton.primitives import wait_for_launch_before

MIN_WIDTH = 1024  # scores of a program
KEYS_PER_THREAD = 32
MIN_WARPS, MAX_WARPS = 8, 16
VECTOR = 4  # neighbours that a thread reads at once
CHUNK = 4096  # scores of which a program makes the largest of groups
CHUNK_WARPS = 4
GROUP_SIZE = tl.constexpr(GROUP)
SIGN_BIT = tl.constexpr(-(2**31))
INF_BITS, NAN_BITS = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
NO_KEY = tl.constexpr(-0x7F800001)  # below -inf
END_KEY = tl.constexpr(0x7F800001)  # above inf
FIRST_MARGIN = tl.constexpr(0.05)  # standard deviations from the first guess to its pivots
MARGIN = tl.constexpr(0.7)  # the same of a guess between two counts
STEP = tl.constexpr(0.1)  # standard deviations of groups that a level's pivots are apart
NEAR, FAR = tl.constexpr(0.7), tl.constexpr(1.4)  # pivots, of the way to a guess beyond two counts
MAX_GUESSES = tl.constexpr(12)  # passes after which what is left is cut in thirds


@triton.constexpr_function
def program_warps(width):
    """Warps of a program that holds so many scores."""
    return max(MIN_WARPS, min(MAX_WARPS, width // (32 * KEYS_PER_THREAD)))


@triton.constexpr_function
def num_threads(width):
    """Threads of a program that hold its scores, four or more each."""
    return min(width // 4, 32 * program_warps(width))


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
def bits_before(bits, at, end, VECTOR: tl.constexpr):
    """A NaN's bits from `end` on, where it cuts a vector; whole vectors after it are a NaN's."""
    if end % VECTOR != 0:
        bits = tl.where(at < end, bits, NAN_BITS)
    return bits


@triton.jit
def load_bits(scores_ptr, end, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Bits of scores before `end`, then a NaN's. Up to VECTOR - 1 after it are read, not used."""
    at = tl.arange(0, WIDTH)
    bits = tl.load(scores_ptr + at, mask=at // VECTOR * VECTOR < end, other=NAN_BITS)
    return bits_before(bits, at, end, VECTOR)


@triton.jit
def upper_quantile(share):
    """About how many standard deviations above the mean a share of normal numbers begins."""
    tail = tl.minimum(share, 1.0 - share)
    t = tl.sqrt(-1.3862944 * tl.log2(tl.maximum(tail, 1e-6)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + (0.99229 + 0.04481 * t) * t)
    return tl.where(share < 0.5, z, -z)


@triton.jit
def value_key(value):
    """The order key of an fp32."""
    return order_keys(value.to(tl.int32, bitcast=True))


@triton.jit
def split_quads(x, WIDTH: tl.constexpr):
    """The first of every four neighbours, the second, the third, the fourth; a thread has all."""
    even, odd = tl.split(tl.reshape(x, (WIDTH // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def sum_lanes(x, NUM: tl.constexpr):
    """The sums of each warp: of a thread first, then of its lanes."""
    THREADS: tl.constexpr = num_threads(NUM * 4)
    threads = tl.sum(tl.reshape(x, (NUM // THREADS, THREADS)), axis=0)
    return tl.sum(tl.reshape(threads, (THREADS // 32, 32)), axis=1)


@triton.jit
def sum_both(a, b, NUM: tl.constexpr):
    """The sums of two, in each warp, then of all warps, which takes one barrier."""
    warps = tl.join(sum_lanes(a, NUM), sum_lanes(b, NUM))
    each = warps[None, :, :] + tl.zeros((1, warps.shape[0], 2), tl.float32)
    return tl.split(tl.sum(tl.sum(each, axis=1), axis=0))


@triton.jit
def first_pivots(scores, count, wanted, WIDTH: tl.constexpr):
    """Two keys around the wanted-th of `count` largest, if they are normal numbers.

    Every fourth is asked. Returns their standard deviation too.
    """
    sample, _second, _third, _fourth = split_quads(scores, WIDTH)
    scale = 1.0 / tl.cdiv(count, 4).to(tl.float32)
    is_finite = tl.abs(sample) < float("inf")
    values = tl.where(is_finite, sample, 0.0)
    mean, square = sum_both(values, values * values, WIDTH // 4)
    mean, square = mean * scale, square * scale
    deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
    guess = mean + deviation * upper_quantile(tl.minimum(wanted / count.to(tl.float32), 1.0))
    margin = deviation * FIRST_MARGIN
    is_guess = tl.abs(guess) < float("inf")
    first = tl.where(is_guess, value_key(guess - margin), NO_KEY // 3)
    last = tl.where(is_guess, value_key(guess + margin), END_KEY // 3)
    return first, last, deviation


@triton.jit
def key_between(low, high, fraction, is_by_value):
    """The key at a fraction of the way, as numbers are spaced or as keys are."""
    span = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    step = (span.to(tl.float32) * tl.minimum(tl.maximum(fraction, 0.0), 1.0)).to(tl.uint32)
    key = (low.to(tl.uint32, bitcast=True) + step).to(tl.int32, bitcast=True)
    first, last = key_value(low), key_value(high)
    value = first + (last - first) * fraction
    is_value = is_by_value & (value == value)
    return tl.where(is_value, order_keys(value.to(tl.int32, bitcast=True)), key)


@triton.jit
def pivots_between(low, high, num_low, num_high, wanted, is_by_thirds):
    """Two keys around the wanted-th largest, if what is left is evenly spaced from low to high."""
    num_before = (num_low - wanted).to(tl.float32) + 0.5
    num_after = (wanted - num_high).to(tl.float32) - 0.5
    num_left = num_before + num_after
    root = tl.rsqrt(num_left)
    middle = num_before * root * root
    variance = tl.maximum(num_before * num_after, 0.25 * num_left)
    margin = MARGIN * tl.sqrt(variance) * (root * root * root)
    first = tl.where(is_by_thirds, 0.33333334, middle - margin)
    last = tl.where(is_by_thirds, 0.6666667, middle + margin)
    is_by_value = not is_by_thirds
    return key_between(low, high, first, is_by_value), key_between(low, high, last, is_by_value)


@triton.jit
def pivots_beyond(low, high, num_low, num_high, first, last, num_first, num_last, wanted):
    """Two keys around the wanted-th largest, if counts go on as from `first` to `last`."""
    is_below = low == NO_KEY
    start = tl.where(is_below, high, low)
    num_start = tl.where(is_below, num_high, num_low).to(tl.float32)
    ratio = tl.maximum(num_first.to(tl.float32), 0.5) / tl.maximum(num_last.to(tl.float32), 0.5)
    steps = tl.log2(tl.maximum(num_start, 0.5) / wanted) / tl.maximum(tl.log2(ratio), 0.05)
    way = steps * (last - first + 1).to(tl.float32)
    down = NO_KEY - start.to(tl.float32)
    up = END_KEY - start.to(tl.float32)
    near = start + tl.minimum(tl.maximum(way * NEAR, down), up).to(tl.int32)
    far = start + tl.minimum(tl.maximum(way * FAR, down), up).to(tl.int32)
    return tl.minimum(near, far), tl.maximum(near, far)


@triton.jit
def by_thread(x, WIDTH: tl.constexpr):
    """The same in three dimensions, of which a thread has all of the first and the last."""
    NUM: tl.constexpr = num_threads(WIDTH)
    return tl.reshape(x, (WIDTH // 4 // NUM, NUM, 4))


@triton.jit
def in_each_warp(x):
    """A number of each warp, int32, in a row that every warp has: one barrier, no second sum."""
    return x[None, :] + tl.zeros((1, x.shape[0]), tl.int32)


@triton.jit
def num_at_least(scores, low, WIDTH: tl.constexpr):
    """How many scores of each thread are not below `low`, fp32."""
    ones = by_thread(tl.where(scores >= low, 1.0, 0.0), WIDTH)
    return tl.sum(tl.sum(ones, axis=2), axis=0)


@triton.jit
def count_at_least(scores, low, high, WIDTH: tl.constexpr):
    """How many scores are not below `low`, and not below `high`, which is no less."""
    pairs = num_at_least(scores, high, WIDTH) * 65536.0 + num_at_least(scores, low, WIDTH)
    warps = tl.sum(tl.reshape(pairs.to(tl.int32), (pairs.shape[0] // 32, 32)), axis=1)
    packed = tl.sum(tl.sum(in_each_warp(warps), axis=1), axis=0)
    return packed & 0xFFFF, (packed >> 16) & 0xFFFF


@triton.jit
def largest_of(keys):
    """The largest of a key of each thread."""
    warps = tl.max(tl.reshape(keys, (keys.shape[0] // 32, 32)), axis=1)
    return tl.max(tl.max(in_each_warp(warps), axis=1), axis=0)


@triton.jit
def largest_before(scores, high, WIDTH: tl.constexpr):
    """The largest key before `high`; that of -inf if there is none."""
    left = tl.where(scores <= key_value(high - 1), scores, float("-inf"))
    return largest_of(value_key(tl.max(tl.max(by_thread(left, WIDTH), axis=2), axis=0)))


@triton.jit
def smallest_from(scores, low, WIDTH: tl.constexpr):
    """The smallest key from `low` on; that of inf if there is none."""
    left = tl.where(scores >= key_value(low), scores, float("inf"))
    return -largest_of(-value_key(tl.min(tl.min(by_thread(left, WIDTH), axis=2), axis=0)))


@triton.jit
def find_threshold(scores, first, last, count, wanted, WIDTH: tl.constexpr):
    """The key from which on `wanted` are, or the wanted-th largest's, which others may share.

    That of -inf where fewer are.
    """
    low, high = tl.full((), NO_KEY, tl.int32), tl.full((), END_KEY, tl.int32)
    num_low = tl.where(count > wanted, tl.full((), WIDTH, tl.int32), wanted)
    num_high = tl.full((), 0, tl.int32)
    num_slow, num_passes = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    is_found = tl.full((), False, tl.int1)
    while not is_found:
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        last = tl.minimum(tl.maximum(last, first), high - 1)
        num_first, num_last = count_at_least(scores, key_value(first), key_value(last), WIDTH)
        num_between = num_low - num_high
        has_first, has_last = num_first >= wanted, num_last >= wanted
        low = tl.where(has_last, last, tl.where(has_first, first, low))
        num_low = tl.where(has_last, num_last, tl.where(has_first, num_first, num_low))
        high = tl.where(has_first, tl.where(has_last, high, last), first)
        num_high = tl.where(has_first, tl.where(has_last, num_high, num_last), num_first)
        is_slow = (num_low - num_high) * 4 > num_between
        num_slow = tl.where(is_slow, num_slow + 1, tl.minimum(num_slow, 0))
        num_passes += 1
        is_found = (num_low == wanted) | (low + 1 >= high)
        if not is_found:
            is_open = (low == NO_KEY) | (high == END_KEY)
            if num_high + 1 == wanted:
                low = largest_before(scores, high, WIDTH)
                is_found = tl.full((), True, tl.int1)
            elif is_open & (num_passes < 3):
                first, last = pivots_beyond(low, high, num_low, num_high, first, last, num_first,
                                            num_last, wanted)  # fmt: skip
            elif (num_slow > 1) & (not is_open) & (num_passes < MAX_GUESSES):
                low = smallest_from(scores, low, WIDTH)
                high = largest_before(scores, high, WIDTH) + 1
                num_slow = tl.full((), -1, tl.int32)
                first, last = low + 1, high - 1
            else:
                is_by_thirds = is_open | (num_passes >= MAX_GUESSES)
                first, last = pivots_between(low, high, num_low, num_high, wanted, is_by_thirds)
    return tl.maximum(low, NO_KEY + 1)


@triton.jit
def count_before(counts, NUM: tl.constexpr):
    """The sum of all before each, and of all: in the lanes of a warp first, then in all warps.

    Two halves are summed at once, as halves of one number.
    """
    LANES: tl.constexpr = min(32, NUM // 2)
    GROUPS: tl.constexpr = NUM // 2 // LANES
    first, second = tl.split(tl.trans(tl.reshape(counts, (2, NUM // 2))))
    lanes = tl.reshape(second * 65536 + first, (GROUPS, LANES))
    totals = tl.sum(lanes, axis=1)
    group = tl.arange(0, GROUPS)
    is_earlier = group[None, :] < group[:, None]
    before_group = tl.sum(tl.where(is_earlier, totals[None, :], 0), axis=1)
    before = tl.reshape(before_group[:, None] + tl.cumsum(lanes, axis=1) - lanes, (NUM // 2,))
    total = tl.sum(tl.sum(in_each_warp(totals), axis=1), axis=0)
    num_first = total & 0xFFFF
    halves = tl.join(before & 0xFFFF, (before >> 16) + num_first)
    return tl.reshape(tl.trans(halves), (NUM,)), num_first + (total >> 16)


@triton.jit
def is_at_least(scores, low):
    """1 for what is not below, 0 for the rest."""
    return tl.where(scores >= low, 1, 0)


@triton.jit
def count_quads(scores, low, WIDTH: tl.constexpr):
    """How many scores not below `low` come before each quad, and how many there are."""
    quads = tl.sum(tl.reshape(tl.where(scores >= low, 1.0, 0.0), (WIDTH // 4, 4)), axis=1)
    return count_before(quads.to(tl.int32), WIDTH // 4)


@triton.jit
def keep_first_equals(scores, low, wanted, WIDTH: tl.constexpr):
    """NaN for those with this key after so many of them that the wanted are full."""
    upper = key_value(low + 1)
    num_above, _same = count_at_least(scores, upper, upper, WIDTH)
    is_equal = scores == key_value(low)
    quads = tl.reshape(tl.where(is_equal, 1, 0), (WIDTH // 4, 4))
    before, _total = count_before(tl.sum(quads, axis=1), WIDTH // 4)
    rank = tl.reshape(before[:, None] + tl.cumsum(quads, axis=1), (WIDTH,))
    return tl.where(is_equal & (rank > wanted - num_above), float("nan"), scores)


@triton.jit
def page_row(block, entry, ENTRIES_PER_BLOCK: tl.constexpr):
    """The flat row of an entry in a block, int64; -1 without a block."""
    row = block.to(tl.int64) * ENTRIES_PER_BLOCK + entry % ENTRIES_PER_BLOCK
    return tl.where(block >= 0, row, -1)


@triton.jit
def store_quarter(list_ptr, rows_ptr, entry, row, is_best, place, HAS_ROWS: tl.constexpr):
    """Store those of one quarter that are among the best, and their rows."""
    tl.store(list_ptr + place, entry, mask=is_best)
    if HAS_ROWS:
        tl.store(rows_ptr + place, row, mask=is_best)


@triton.jit
def store_best(list_ptr, rows_ptr, scores, entry, block0, block1, block2, block3, low, wanted,
               WIDTH: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
               HAS_ROWS: tl.constexpr):  # fmt: skip
    """Store which are the best, ascending; returns how many. `entry` is each quad's first."""
    floor = key_value(low)
    place0, total = count_quads(scores, floor, WIDTH)
    if total > wanted:
        scores = keep_first_equals(scores, low, wanted, WIDTH)
        place0, total = count_quads(scores, floor, WIDTH)
    scores0, scores1, scores2, scores3 = split_quads(scores, WIDTH)
    place1 = place0 + is_at_least(scores0, floor)
    place2 = place1 + is_at_least(scores1, floor)
    place3 = place2 + is_at_least(scores2, floor)
    row0 = page_row(block0, entry, ENTRIES_PER_BLOCK)
    if ENTRIES_PER_BLOCK % 4 == 0:
        row1, row2, row3 = row0 | 1, row0 | 2, row0 | 3
    else:
        row1 = page_row(block1, entry + 1, ENTRIES_PER_BLOCK)
        row2 = page_row(block2, entry + 2, ENTRIES_PER_BLOCK)
        row3 = page_row(block3, entry + 3, ENTRIES_PER_BLOCK)
    store_quarter(list_ptr, rows_ptr, entry, row0, scores0 >= floor, place0, HAS_ROWS)
    store_quarter(list_ptr, rows_ptr, entry + 1, row1, scores1 >= floor, place1, HAS_ROWS)
    store_quarter(list_ptr, rows_ptr, entry + 2, row2, scores2 >= floor, place2, HAS_ROWS)
    store_quarter(list_ptr, rows_ptr, entry + 3, row3, scores3 >= floor, place3, HAS_ROWS)
    return total


@triton.jit
def level_size(num_padded, level: tl.constexpr, VECTOR: tl.constexpr):
    """Groups of a level; whole vectors, which loads are to know."""
    return num_padded // (GROUP_SIZE**level * VECTOR) * VECTOR


@triton.jit
def load_members(level_ptr, list_ptr, num_listed, end, WIDTH: tl.constexpr,
                 VECTOR: tl.constexpr):  # fmt: skip
    """Bits of the members of listed groups, NaN's from `end` on; and each quad's first member."""
    lane = tl.arange(0, WIDTH // GROUP_SIZE)
    group = tl.load(list_ptr + lane, mask=lane < num_listed, other=0)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    is_listed = (lane < num_listed)[:, None]
    bits = tl.load(level_ptr + at, mask=is_listed & (at // VECTOR * VECTOR < end), other=NAN_BITS)
    bits = bits_before(bits, at, end, VECTOR)
    first, _second, _third, _fourth = split_quads(tl.reshape(at, (WIDTH,)), WIDTH)
    return tl.reshape(bits, (WIDTH,)), first


@triton.jit
def load_blocks(pages, entry, end, ENTRIES_PER_BLOCK: tl.constexpr):
    """The blocks of each quad's four entries, all one where blocks are cut between quads."""
    block0 = tl.load(pages + entry // ENTRIES_PER_BLOCK, mask=entry < end, other=-1)
    if ENTRIES_PER_BLOCK % 4 == 0:
        return block0, block0, block0, block0
    else:
        last = entry + 3
        block1 = tl.load(pages + (entry + 1) // ENTRIES_PER_BLOCK, mask=entry + 1 < end, other=-1)
        block2 = tl.load(pages + (entry + 2) // ENTRIES_PER_BLOCK, mask=entry + 2 < end, other=-1)
        block3 = tl.load(pages + last // ENTRIES_PER_BLOCK, mask=last < end, other=-1)
        return block0, block1, block2, block3


@triton.jit
def store_tops(tops_ptr, keys, chunk, num_tops, SIZE: tl.constexpr):
    """Store the bits of the largest key of each of a chunk's groups; returns these keys."""
    tops = tl.max(tl.reshape(keys, (SIZE, GROUP_SIZE)), axis=1)
    at = chunk * SIZE + tl.arange(0, SIZE)
    tl.store(tops_ptr + at, key_bits(tops), mask=at < num_tops)
    return tops


@triton.jit(
    do_not_specialize=["scores_groups", "tops_groups", "first_token", "topk", "num_padded"],
    do_not_specialize_on_alignment=["positions_ptr", "request_ids_ptr", "request_slots_ptr"],
)
def _group_kernel(
    scores_ptr, scores_groups, tops_ptr, tops_groups, first_token, topk, num_padded,
    positions_ptr, request_ids_ptr, request_slots_ptr,
    RATIO: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the largest score of each group, of each group of groups and so on; NaN for none."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _slot, count = visible_entries(first_token + row, positions_ptr, request_ids_ptr,
                                   request_slots_ptr, RATIO)  # fmt: skip
    wait_for_launch_before(STARTS_NEXT=True)
    first = chunk * CHUNK
    if (count > topk) & (first < count):
        scores_ptr += row * scores_groups * VECTOR + first
        tops_ptr += row * tops_groups * VECTOR
        keys = order_keys(load_bits(scores_ptr, count - first, CHUNK, VECTOR))
        for level in tl.static_range(LEVELS):
            num_padded = num_padded // GROUP_SIZE
            keys = store_tops(tops_ptr, keys, chunk, num_padded, CHUNK // GROUP_SIZE ** (level + 1))
            tops_ptr += num_padded


@triton.jit(
    do_not_specialize=[
        "scores_groups", "tops_groups", "first_token", "topk", "num_padded", "max_entries",
        "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _topk_kernel(
    entry_idx_ptr, rows_ptr, counts_ptr, scores_ptr, scores_groups, tops_ptr, tops_groups,
    first_token, topk, num_padded, max_entries, positions_ptr, request_ids_ptr, request_slots_ptr,
    block_table_ptr, table_stride, RATIO: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Choose a token's entries; where it sees no more than topk, all, and no score is read."""
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    request = tl.load(request_ids_ptr + token)
    num_seen = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, max_entries)
    wait_for_launch_before(STARTS_NEXT=True)
    entries_ptr, rows_ptr = entry_idx_ptr + token * topk, rows_ptr + token * topk
    lane = tl.arange(0, BLOCK_K)
    if num_seen > topk:
        scores_ptr += row * scores_groups * VECTOR
        SHRINK: tl.constexpr = GROUP_SIZE**LEVELS
        count = tl.cdiv(num_seen, SHRINK)
        level_ptr = scores_ptr
        if LEVELS > 0:
            level_ptr = tops_ptr + row * tops_groups * VECTOR
            for level in tl.static_range(1, LEVELS):
                level_ptr += level_size(num_padded, level, VECTOR)
        bits = load_bits(level_ptr, count, WIDTH, VECTOR)
        slot = tl.load(request_slots_ptr + request).to(tl.int64)
        pages = block_table_ptr + slot * table_stride
        entry = tl.arange(0, WIDTH // 4) * 4
        scores = bits.to(tl.float32, bitcast=True)
        first, last, deviation = first_pivots(scores, count, topk, WIDTH)
        for level in tl.static_range(LEVELS):
            low = find_threshold(scores, first, last, count, topk, WIDTH)
            num_listed = store_best(entries_ptr, rows_ptr, scores, entry, entry, entry, entry,
                                    entry, low, topk, WIDTH, ENTRIES_PER_BLOCK,
                                    False)  # fmt: skip
            first, last = low, value_key(key_value(low) + STEP * deviation)
            if level == LEVELS - 1:
                level_ptr = scores_ptr
            else:
                level_ptr -= level_size(num_padded, LEVELS - 1 - level, VECTOR)
            tl.debug_barrier()
            count = num_listed * GROUP_SIZE
            end = tl.cdiv(num_seen, GROUP_SIZE ** (LEVELS - 1 - level))
            bits, entry = load_members(level_ptr, entries_ptr, num_listed, end, WIDTH, VECTOR)
            tl.debug_barrier()
            scores = bits.to(tl.float32, bitcast=True)
            if low == NO_KEY + 1:
                first, last, deviation = first_pivots(scores, count, topk, WIDTH)
        end = tl.where(slot >= 0, num_seen, 0)
        block0, block1, block2, block3 = load_blocks(pages, entry, end, ENTRIES_PER_BLOCK)
        low = find_threshold(scores, first, last, count, topk, WIDTH)
        low = tl.where(slot >= 0, low, END_KEY)
        num_stored = store_best(entries_ptr, rows_ptr, scores, entry, block0, block1, block2,
                                block3, low, topk, WIDTH, ENTRIES_PER_BLOCK, True)  # fmt: skip
        is_empty = (lane >= num_stored) & (lane < topk)
        tl.store(entries_ptr + lane, -1, mask=is_empty)
        tl.store(rows_ptr + lane, tl.full((BLOCK_K,), -1, tl.int64), mask=is_empty)
        tl.store(counts_ptr + token, num_stored)
    else:
        slot = tl.load(request_slots_ptr + request).to(tl.int64)
        count = tl.where(slot >= 0, num_seen, 0)
        pages = block_table_ptr + slot * table_stride
        block = tl.load(pages + lane // ENTRIES_PER_BLOCK, mask=lane < count, other=-1)
        tl.store(entries_ptr + lane, tl.where(lane < count, lane, -1), mask=lane < topk)
        tl.store(rows_ptr + lane, page_row(block, lane, ENTRIES_PER_BLOCK), mask=lane < topk)
        tl.store(counts_ptr + token, count)


def choose_best(
    chosen: Selection,
    scores: Tensor,
    group_tops: Tensor,
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
        group_tops: `[num_tokens, at least num_group_tops]` int32, scratch for rows that do not
            fit a program.
    """
    topk = chosen.entry_idx.shape[1]
    levels, width = program_shape(max_entries, topk=topk)
    strides = (scores.stride(0), group_tops.stride(0) if levels else 0)
    vector = VECTOR if not any(stride % VECTOR for stride in strides) else 1
    shared: dict[str, Any] = {
        "scores_ptr": scores.view(chosen.entry_idx.dtype), "scores_groups": strides[0] // vector,
        "tops_ptr": group_tops, "tops_groups": strides[1] // vector,
        "first_token": first_token, "topk": topk,
        "num_padded": padded_entries(max_entries, levels=levels),
        "positions_ptr": tokens.positions,
        "request_ids_ptr": tokens.request_ids, "request_slots_ptr": tokens.request_slots,
        "RATIO": ratio, "LEVELS": levels, "VECTOR": vector, "launch_pdl": True,
    }  # fmt: skip
    if levels:
        grid = (num_tokens, -(-max_entries // CHUNK))
        _group_kernel[grid](**shared, CHUNK=CHUNK, num_warps=CHUNK_WARPS)
    _topk_kernel[(num_tokens,)](
        **shared, entry_idx_ptr=chosen.entry_idx, rows_ptr=chosen.rows, counts_ptr=chosen.counts,
        max_entries=max_entries,
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        ENTRIES_PER_BLOCK=entries_per_block, WIDTH=width,
        BLOCK_K=next_power_of_two(topk),
        num_warps=program_warps(width),
    )  # fmt: skip


def program_shape(max_entries: int, *, topk: int) -> tuple[int, int]:
    """Levels of groups above the scores, and how many scores a program holds."""
    if max_entries <= topk:
        return 0, MIN_WIDTH
    levels = group_levels(max_entries, topk=topk)
    if levels:
        return levels, narrow_width(topk)
    return 0, max(MIN_WIDTH, next_power_of_two(max_entries))


def distinct_sizes(longest: int, *, topk: int) -> list[int]:
    """The fewest entries for every choice of programs, up to the longest row."""
    powers = [2**n + 1 for n in range(longest.bit_length())]
    fewest: dict[object, int] = {}
    for size in sorted(size for size in {1, topk + 1, *powers} if size <= longest):
        fewest.setdefault((size > topk, program_shape(size, topk=topk)), size)
    return list(fewest.values())
