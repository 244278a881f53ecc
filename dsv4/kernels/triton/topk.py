"""Top-k: the best entries of each token, exactly, from scores in memory.

Scores are compared as fp32 numbers: ±0 are one number, and a NaN is never chosen. A program holds
all scores of its row in registers. It counts the scores at or above two pivots at a time until it
finds the k-th largest. It then lists, in ascending index, every score above that one, and its
equals from the first on until k are listed.

Pivots are guesses: they decide when the search ends, never its result. A pivot is an order key, an
int32 that orders as its score does. A count sums over each thread first, then over each warp, and
at last every warp sums over all warps. A thread counts in fp32, because fp32 sums run beside the
comparisons.

A row that does not fit a program is reduced first, to the largest of each group of 8 scores, its
top. Tops are reduced in the same way until they fit. The best k entries lie in the k groups with
the best tops: any other group comes after k tops, which are entries too. The program goes down from
groups to their members, k groups at a time. Some kernels store the first tops with their scores:
those of chunks on Hopper (`chunk_scores`), and those of `candidates`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.index_scratch import GROUP, group_levels, narrow_width, padded_entries
from dsv4.kernels.layer_memory import LayerLayout
from dsv4.kernels.triton.launch import GroupLaunch, TopkLaunch, find_launch, starts_early
from dsv4.kernels.triton.operands import PLAN_PTRS
from dsv4.kernels.triton.primitives import wait_for_launch_before

ALL_ROWS = -1  # have first tops, see `choose_best`
MIN_WIDTH = 1024  # the fewest scores of a program: four for each thread of 8 warps
VECTOR = 4  # neighbours that a thread reads at once, where strides allow it; else 1
GROUP_SIZE = tl.constexpr(GROUP)
SIGN_BIT = tl.constexpr(-(2**31))
NAN_BITS = tl.constexpr(0x7FC00000)
NO_KEY = tl.constexpr(-0x7F800001)  # below -inf
END_KEY = tl.constexpr(0x7F800001)  # above inf
FIRST_MARGIN = tl.constexpr(0.05)  # standard deviations from the first guess to its pivots
MARGIN = tl.constexpr(0.7)  # standard deviations from a guess between two counts to its pivots
STEP = tl.constexpr(0.1)  # standard deviations of tops between the first two pivots of members
NEAR, FAR = tl.constexpr(0.7), tl.constexpr(1.4)  # pivots around a guess, in shares of its distance
MAX_GUESSES = tl.constexpr(12)  # passes before the interval is cut in thirds instead


class RowShape(NamedTuple):
    """The scores that a program holds, and the threads that hold them, four or more each."""

    WIDTH: tl.constexpr
    THREADS: tl.constexpr


class Interval(NamedTuple):
    """Two order keys, and the number of scores that are not below each of them."""

    low: tl.tensor
    high: tl.tensor
    num_low: tl.tensor
    num_high: tl.tensor


@triton.constexpr_function
def row_shape(WIDTH, WARPS):
    """So many scores of a program, and its threads that hold them."""
    return RowShape(WIDTH, min(WIDTH // 4, 32 * WARPS))


class ListedLayout(NamedTuple):
    """A list of scores for each token: a kernel writes its length less 1 as the token's position.

    The choice is of places in the list, without rows. With blocks `[num_tokens, blocks]` of `size`
    entries, the list is of their entries, and the choice too.
    """

    entries_per_block: int = 4
    size: int = 0
    blocks: Tensor | None = None
    ratio: int = 1


@triton.jit
def visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO: tl.constexpr):
    """A token's slot, int64, and the number of entries that it sees; 0 for padding."""
    slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token)).to(tl.int64)
    position = tl.load(positions_ptr + token)
    return slot, tl.where(slot >= 0, (position + 1) // RATIO, 0)


@triton.jit
def are_groups_scored(row, num_rows, first_token, request_ids_ptr, workspace_starts_ptr,
                      group_tokens):  # fmt: skip
    """Whether `hopper.index_scores` scores a row, or each of several.

    It does if the row's group_tokens neighbours are of one chunk.
    """
    first = row // group_tokens * group_tokens
    token = first_token + tl.minimum(first, num_rows - 1)
    request = tl.load(request_ids_ptr + token)
    last = first_token + tl.minimum(first + group_tokens - 1, num_rows - 1)
    last = tl.load(request_ids_ptr + last)
    return (request == last) & (tl.load(workspace_starts_ptr + request) >= 0)


@triton.jit
def order_keys(bits):
    """fp32 bits, int32, to int32 numbers in the same order; NO_KEY for NaN."""
    magnitude = bits & 0x7FFFFFFF
    keys = tl.where(bits < 0, -magnitude, bits)
    return tl.where(magnitude < END_KEY, keys, NO_KEY)


@triton.jit
def key_bits(key):
    """The fp32 bits of an order key; NO_KEY and END_KEY give a NaN's."""
    return tl.where(key < 0, (-key) | SIGN_BIT, key)


@triton.jit
def key_value(key):
    """The fp32 of an order key."""
    return key_bits(key).to(tl.float32, bitcast=True)


@triton.jit
def value_key(value):
    """The order key of an fp32."""
    return order_keys(value.to(tl.int32, bitcast=True))


@triton.jit
def bits_before(bits, at, end, VECTOR: tl.constexpr):
    """Replace the bits from `end` on by NaN's; loads already do so in all vectors but `end`'s."""
    if end % VECTOR != 0:
        bits = tl.where(at < end, bits, NAN_BITS)
    return bits


@triton.jit
def load_bits(scores_ptr, end, WIDTH: tl.constexpr, VECTOR: tl.constexpr):
    """Load the bits of scores before `end`, `[WIDTH]`; NaN from there on.

    Up to VECTOR - 1 scores after `end` are read and not used.
    """
    at = tl.arange(0, WIDTH)
    bits = tl.load(scores_ptr + at, mask=at // VECTOR * VECTOR < end, other=NAN_BITS)
    return bits_before(bits, at, end, VECTOR)


@triton.jit
def upper_quantile(share):
    """Estimate where the largest `share` of normal numbers begins: deviations above the mean."""
    tail = tl.minimum(share, 1.0 - share)
    t = tl.sqrt(-1.3862944 * tl.log2(tl.maximum(tail, 1e-6)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + (0.99229 + 0.04481 * t) * t)
    return tl.where(share < 0.5, z, -z)


@triton.jit
def split_quads(x, WIDTH: tl.constexpr):
    """The first to fourth of every four neighbours, `[WIDTH / 4]` each, all in one thread."""
    even, odd = tl.split(tl.reshape(x, (WIDTH // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def sum_lanes(x, THREADS: tl.constexpr):
    """The sum of each warp, `[warps]`: over a thread first, then over lanes."""
    threads = tl.sum(tl.reshape(x, (x.shape[0] // THREADS, THREADS)), axis=0)  # [THREADS]
    return tl.sum(tl.reshape(threads, (THREADS // 32, 32)), axis=1)


@triton.jit
def sum_both(a, b, THREADS: tl.constexpr):
    """The sums of two tensors: over each warp, then over all warps, which takes one barrier."""
    warps = tl.join(sum_lanes(a, THREADS), sum_lanes(b, THREADS))  # [warps, 2]
    each = warps[None, :, :] + tl.zeros((1, warps.shape[0], 2), tl.float32)
    return tl.split(tl.sum(tl.sum(each, axis=1), axis=0))


@triton.jit
def first_pivots(scores, count, wanted, SHAPE: tl.constexpr):
    """Two keys around the wanted-th largest of `count` scores, if they are normal numbers.

    The estimate takes every fourth score. Returns their standard deviation too.
    """
    sample = split_quads(scores, SHAPE.WIDTH)[0]  # [WIDTH / 4]
    scale = 1.0 / tl.cdiv(count, 4).to(tl.float32)
    is_finite = tl.abs(sample) < float("inf")
    values = tl.where(is_finite, sample, 0.0)
    mean, square = sum_both(values, values * values, SHAPE.THREADS)
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
    """The key at a fraction of the way from low to high, by value or by key."""
    span = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    step = (span.to(tl.float32) * tl.minimum(tl.maximum(fraction, 0.0), 1.0)).to(tl.uint32)
    key = (low.to(tl.uint32, bitcast=True) + step).to(tl.int32, bitcast=True)
    first, last = key_value(low), key_value(high)
    value = first + (last - first) * fraction
    is_value = is_by_value & (value == value)
    return tl.where(is_value, order_keys(value.to(tl.int32, bitcast=True)), key)


@triton.jit
def pivots_between(interval, wanted, is_by_thirds):
    """Two keys around the wanted-th largest, if scores in the interval are evenly spaced."""
    num_before = (interval.num_low - wanted).to(tl.float32) + 0.5
    num_after = (wanted - interval.num_high).to(tl.float32) - 0.5
    num_left = num_before + num_after
    root = tl.rsqrt(num_left)
    middle = num_before * root * root
    variance = tl.maximum(num_before * num_after, 0.25 * num_left)
    margin = MARGIN * tl.sqrt(variance) * (root * root * root)
    first = tl.where(is_by_thirds, 0.33333334, middle - margin)
    last = tl.where(is_by_thirds, 0.6666667, middle + margin)
    is_by_value = not is_by_thirds
    low, high = interval.low, interval.high
    return key_between(low, high, first, is_by_value), key_between(low, high, last, is_by_value)


@triton.jit
def pivots_beyond(interval, pivots, wanted):
    """Two keys around the wanted-th largest, in an interval with one open end.

    They assume that counts go on as between the last two pivots.
    """
    is_below = interval.low == NO_KEY
    start = tl.where(is_below, interval.high, interval.low)
    num_start = tl.where(is_below, interval.num_high, interval.num_low).to(tl.float32)
    num_first = tl.maximum(pivots.num_low.to(tl.float32), 0.5)
    ratio = num_first / tl.maximum(pivots.num_high.to(tl.float32), 0.5)
    steps = tl.log2(tl.maximum(num_start, 0.5) / wanted) / tl.maximum(tl.log2(ratio), 0.05)
    way = steps * (pivots.high - pivots.low + 1).to(tl.float32)
    down = NO_KEY - start.to(tl.float32)
    up = END_KEY - start.to(tl.float32)
    near = start + tl.minimum(tl.maximum(way * NEAR, down), up).to(tl.int32)
    far = start + tl.minimum(tl.maximum(way * FAR, down), up).to(tl.int32)
    return tl.minimum(near, far), tl.maximum(near, far)


@triton.jit
def by_thread(x, SHAPE: tl.constexpr):
    """`[quads, THREADS, 4]` of `[WIDTH]`: a thread has all of the first and last dimension."""
    return tl.reshape(x, (SHAPE.WIDTH // 4 // SHAPE.THREADS, SHAPE.THREADS, 4))


@triton.jit
def in_each_warp(x):
    """A number of each warp, int32, as a row that every warp has: one barrier, no second sum."""
    return x[None, :] + tl.zeros((1, x.shape[0]), tl.int32)


@triton.jit
def count_by_thread(scores, floor, SHAPE: tl.constexpr):
    """The number of scores of each thread that are not below the score `floor`, `[THREADS]`."""
    ones = by_thread(tl.where(scores >= floor, 1.0, 0.0), SHAPE)
    return tl.sum(tl.sum(ones, axis=2), axis=0)


@triton.jit
def count_at_least(scores, floor, upper, SHAPE: tl.constexpr):
    """The numbers of scores not below the score `floor`, and not below `upper` >= `floor`.

    Both are summed at once, as halves of one number.
    """
    pairs = count_by_thread(scores, upper, SHAPE) * 65536.0 + count_by_thread(scores, floor, SHAPE)
    warps = tl.sum(tl.reshape(pairs.to(tl.int32), (pairs.shape[0] // 32, 32)), axis=1)
    packed = tl.sum(tl.sum(in_each_warp(warps), axis=1), axis=0)
    return packed & 0xFFFF, (packed >> 16) & 0xFFFF


@triton.jit
def largest_of(keys):
    """The largest of `[THREADS]` keys."""
    warps = tl.max(tl.reshape(keys, (keys.shape[0] // 32, 32)), axis=1)
    return tl.max(tl.max(in_each_warp(warps), axis=1), axis=0)


@triton.jit
def largest_before(scores, high, SHAPE: tl.constexpr):
    """The largest key of a score below the key `high`; -inf's if there is none."""
    left = tl.where(scores <= key_value(high - 1), scores, float("-inf"))
    return largest_of(value_key(tl.max(tl.max(by_thread(left, SHAPE), axis=2), axis=0)))


@triton.jit
def smallest_from(scores, low, SHAPE: tl.constexpr):
    """The smallest key of a score not below the key `low`; inf's if there is none."""
    left = tl.where(scores >= key_value(low), scores, float("inf"))
    return -largest_of(-value_key(tl.min(tl.min(by_thread(left, SHAPE), axis=2), axis=0)))


@triton.jit
def find_threshold(scores, first, last, count, wanted, SHAPE: tl.constexpr):
    """A key that exactly `wanted` scores are not below, found from the pivots `first` and `last`.

    Where equal scores rule that out, it is the wanted-th largest's key, which more scores are not
    below. It is -inf's if there are fewer scores. The wanted-th largest is always at or above low,
    and below high.
    """
    low, high = tl.full((), NO_KEY, tl.int32), tl.full((), END_KEY, tl.int32)
    # With no more scores than wanted, the search ends after one pass.
    num_low = tl.where(count > wanted, tl.full((), SHAPE.WIDTH, tl.int32), wanted)
    num_high = tl.full((), 0, tl.int32)
    num_slow, num_passes = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    is_found = tl.full((), False, tl.int1)
    while not is_found:
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        last = tl.minimum(tl.maximum(last, first), high - 1)
        num_first, num_last = count_at_least(scores, key_value(first), key_value(last), SHAPE)
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
            if num_high + 1 == wanted:  # one score is missing: the next below high
                low = largest_before(scores, high, SHAPE)
                is_found = tl.full((), True, tl.int1)
            elif is_open & (num_passes < 3):
                pivots = Interval(first, last, num_first, num_last)
                first, last = pivots_beyond(Interval(low, high, num_low, num_high), pivots, wanted)
            elif (num_slow > 1) & (not is_open) & (num_passes < MAX_GUESSES):
                # Two slow passes: shrink the interval to the scores inside it.
                low = smallest_from(scores, low, SHAPE)
                high = largest_before(scores, high, SHAPE) + 1
                num_slow = tl.full((), -1, tl.int32)
                first, last = low + 1, high - 1
            else:
                is_by_thirds = is_open | (num_passes >= MAX_GUESSES)
                interval = Interval(low, high, num_low, num_high)
                first, last = pivots_between(interval, wanted, is_by_thirds)
    return tl.maximum(low, NO_KEY + 1)


@triton.jit
def count_before(counts, NUM: tl.constexpr):
    """Exclusive prefix sums of `[NUM]` counts, and their total: over lanes, then over warps.

    The first and the second half are summed at once, as halves of one number.
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
def count_quads(scores, floor, WIDTH: tl.constexpr):
    """The number of scores not below the score `floor` before each quad, and in all."""
    quads = tl.sum(tl.reshape(tl.where(scores >= floor, 1.0, 0.0), (WIDTH // 4, 4)), axis=1)
    return count_before(quads.to(tl.int32), WIDTH // 4)


@triton.jit
def keep_first_equals(scores, low, wanted, SHAPE: tl.constexpr):
    """Replace by NaN the last scores that equal the key `low`, so that `wanted` are left."""
    WIDTH: tl.constexpr = SHAPE.WIDTH
    upper = key_value(low + 1)
    num_above, _same = count_at_least(scores, upper, upper, SHAPE)
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
def store_best(list_ptr, rows_ptr, scores, entry, blocks, low, wanted, SHAPE: tl.constexpr,
               ENTRIES_PER_BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr):  # fmt: skip
    """Store the entries with scores not below the key `low`, at most `wanted`; return how many.

    They are stored in ascending order. `entry` is the first of each quad, `[WIDTH / 4]`.
    """
    WIDTH: tl.constexpr = SHAPE.WIDTH
    floor = key_value(low)
    place, total = count_quads(scores, floor, WIDTH)  # [WIDTH / 4]
    if total > wanted:
        scores = keep_first_equals(scores, low, wanted, SHAPE)
        place, total = count_quads(scores, floor, WIDTH)
    quads = split_quads(scores, WIDTH)
    places = tl.tuple((place,))
    for nth in tl.static_range(3):
        places = places + (places[nth] + tl.where(quads[nth] >= floor, 1, 0),)
    rows = tl.tuple((page_row(blocks[0], entry, ENTRIES_PER_BLOCK),))
    for nth in tl.static_range(1, 4):
        if ENTRIES_PER_BLOCK % 4 == 0:
            rows = rows + (rows[0] | nth,)
        else:
            rows = rows + (page_row(blocks[nth], entry + nth, ENTRIES_PER_BLOCK),)
    for nth in tl.static_range(4):
        listed, is_best = entry + nth, quads[nth] >= floor
        tl.store(list_ptr + places[nth], listed, mask=is_best)
        if HAS_ROWS:
            tl.store(rows_ptr + places[nth], rows[nth], mask=is_best)
    return total


@triton.jit
def level_size(num_padded, level: tl.constexpr, VECTOR: tl.constexpr):
    """The number of groups of a level, so written that the compiler sees a multiple of VECTOR."""
    return num_padded // (GROUP_SIZE**level * VECTOR) * VECTOR


@triton.jit
def load_members(level_ptr, list_ptr, num_listed, end, WIDTH: tl.constexpr,
                 VECTOR: tl.constexpr):  # fmt: skip
    """Load the bits of listed groups' members, NaN from `end` on.

    Returns the index of each quad's first member too.
    """
    lane = tl.arange(0, WIDTH // GROUP_SIZE)
    group = tl.load(list_ptr + lane, mask=lane < num_listed, other=0)
    at = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]  # [groups, GROUP_SIZE]
    is_listed = (lane < num_listed)[:, None]
    bits = tl.load(level_ptr + at, mask=is_listed & (at // VECTOR * VECTOR < end), other=NAN_BITS)
    bits = bits_before(bits, at, end, VECTOR)
    return tl.reshape(bits, (WIDTH,)), split_quads(tl.reshape(at, (WIDTH,)), WIDTH)[0]


@triton.jit
def list_groups(list_ptr, rows_ptr, scores, first, last, entry, count, wanted,
                SHAPE: tl.constexpr):  # fmt: skip
    """List the `wanted` best groups where a token's entries will be: their last key, how many."""
    low = find_threshold(scores, first, last, count, wanted, SHAPE)
    blocks = (entry, entry, entry, entry)
    return low, store_best(list_ptr, rows_ptr, scores, entry, blocks, low, wanted, SHAPE, 4, False)


@triton.jit
def load_blocks(pages, entry, end, ENTRIES_PER_BLOCK: tl.constexpr):
    """Load the blocks of each quad's four entries; one is enough where no block ends in a quad."""
    block = tl.load(pages + entry // ENTRIES_PER_BLOCK, mask=entry < end, other=-1)
    blocks = tl.tuple((block,))
    for nth in tl.static_range(1, 4):
        if ENTRIES_PER_BLOCK % 4 != 0:
            at = entry + nth
            block = tl.load(pages + at // ENTRIES_PER_BLOCK, mask=at < end, other=-1)
        blocks = blocks + (block,)
    return blocks


@triton.jit
def largest_of_groups(keys):
    """The largest key of each group."""
    return tl.max(tl.reshape(keys, (keys.shape[0] // GROUP_SIZE, GROUP_SIZE)), axis=1)


@triton.jit
def store_tops(tops_ptr, scores, first, end):
    """Store the tops of groups of scores, from the entry `first` on; those from `end` on are none.

    A group without a number gets NaN, one that begins at `end` or after it nothing.
    """
    entry = first + tl.arange(0, scores.shape[0])
    keys = value_key(tl.where(entry < end, scores, float("nan")))
    group = first // GROUP_SIZE + tl.arange(0, scores.shape[0] // GROUP_SIZE)
    bits = key_bits(largest_of_groups(keys))
    tl.store(tops_ptr + group, bits, mask=group * GROUP_SIZE < end)


@triton.jit(
    do_not_specialize=[
        "scores_vectors", "tops_vectors", "first_token", "num_rows", "topk", "num_padded",
        "topped_rows",
    ],
    do_not_specialize_on_alignment=PLAN_PTRS,
)  # fmt: skip
def _group_kernel(
    scores_ptr, scores_vectors, tops_ptr, tops_vectors, first_token, num_rows, topk, num_padded,
    topped_rows, positions_ptr, request_ids_ptr, request_slots_ptr, workspace_starts_ptr,
    RATIO: tl.constexpr, LEVELS: tl.constexpr, IS_LISTED: tl.constexpr, CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Store the largest score of each group, then of each group of groups; NaN for none.

    scores_vectors and tops_vectors are the row strides in vectors, as in `_topk_kernel`.
    topped_rows are those whose first level is stored, as in `choose_best`.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if IS_LISTED:  # the launch before writes the positions
        wait_for_launch_before(STARTS_NEXT=True)
    _slot, count = visible_entries(first_token + row, positions_ptr, request_ids_ptr,
                                   request_slots_ptr, RATIO)  # fmt: skip
    wait_for_launch_before(STARTS_NEXT=True)
    first = chunk * CHUNK
    if (count > topk) & (first < count):
        scores_ptr += row * scores_vectors * VECTOR + first
        tops_ptr += row * tops_vectors * VECTOR
        is_topped = topped_rows < 0
        if topped_rows > 0:
            is_topped = are_groups_scored(row, num_rows, first_token, request_ids_ptr,
                                          workspace_starts_ptr, topped_rows)  # fmt: skip
        num_padded = num_padded // GROUP_SIZE
        group = chunk * (CHUNK // GROUP_SIZE)
        at = group + tl.arange(0, CHUNK // GROUP_SIZE)
        if is_topped:
            end = tl.cdiv(count, GROUP_SIZE) - group
            keys = order_keys(load_bits(tops_ptr + group, end, CHUNK // GROUP_SIZE, VECTOR))
        else:
            keys = order_keys(load_bits(scores_ptr, count - first, CHUNK, VECTOR))
            keys = largest_of_groups(keys)
            tl.store(tops_ptr + at, key_bits(keys), mask=at < num_padded)
        for _ in tl.static_range(LEVELS - 1):
            tops_ptr += num_padded
            num_padded = num_padded // GROUP_SIZE
            keys = largest_of_groups(keys)
            at = chunk * keys.shape[0] + tl.arange(0, keys.shape[0])
            tl.store(tops_ptr + at, key_bits(keys), mask=at < num_padded)


@triton.jit(
    do_not_specialize=[
        "scores_vectors", "tops_vectors", "first_token", "topk", "num_padded", "max_entries",
        "table_stride", "num_blocks",
    ],
    do_not_specialize_on_alignment=[*PLAN_PTRS, "blocks_ptr"],
)  # fmt: skip
def _topk_kernel(
    entry_idx_ptr, rows_ptr, counts_ptr, scores_ptr, scores_vectors, tops_ptr, tops_vectors,
    first_token, topk, num_padded, max_entries, positions_ptr, request_ids_ptr, request_slots_ptr,
    block_table_ptr, table_stride, blocks_ptr, num_blocks, RATIO: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, LEVELS: tl.constexpr, IS_LISTED: tl.constexpr,
    SIZE: tl.constexpr, FIRST_WIDTH: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Choose a token's entries. If it sees at most topk, choose all and read no score.

    FIRST_WIDTH holds the last level of groups, or all scores, and WIDTH the members of groups.
    """
    FIRST: tl.constexpr = row_shape(FIRST_WIDTH, WARPS)
    SHAPE: tl.constexpr = row_shape(WIDTH, WARPS)
    HAS_ROWS: tl.constexpr = not IS_LISTED
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    if IS_LISTED:
        wait_for_launch_before(STARTS_NEXT=True)
    request = tl.load(request_ids_ptr + token)
    num_seen = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, max_entries)
    wait_for_launch_before(STARTS_NEXT=True)
    entries_ptr, rows_ptr = entry_idx_ptr + token * topk, rows_ptr + token * topk
    lane = tl.arange(0, BLOCK_K)
    if num_seen > topk:
        scores_ptr += row * scores_vectors * VECTOR
        SHRINK: tl.constexpr = GROUP_SIZE**LEVELS
        count = tl.cdiv(num_seen, SHRINK)
        level_ptr = scores_ptr
        if LEVELS > 0:
            level_ptr = tops_ptr + row * tops_vectors * VECTOR
            for level in tl.static_range(1, LEVELS):
                level_ptr += level_size(num_padded, level, VECTOR)
        bits = load_bits(level_ptr, count, FIRST_WIDTH, VECTOR)
        slot = tl.load(request_slots_ptr + request).to(tl.int64)
        pages = block_table_ptr + slot * table_stride
        entry = tl.arange(0, FIRST_WIDTH // 4) * 4
        scores = bits.to(tl.float32, bitcast=True)
        first, last, deviation = first_pivots(scores, count, topk, FIRST)
        for level in tl.static_range(LEVELS):
            low, num_listed = list_groups(entries_ptr, rows_ptr, scores, first, last, entry, count,
                                          topk, SHAPE if level else FIRST)  # fmt: skip
            first, last = low, value_key(key_value(low) + STEP * deviation)
            if level == LEVELS - 1:
                level_ptr = scores_ptr
            else:
                level_ptr -= level_size(num_padded, LEVELS - 1 - level, VECTOR)
            tl.debug_barrier()  # the list is stored before it is read
            count = num_listed * GROUP_SIZE
            end = tl.cdiv(num_seen, GROUP_SIZE ** (LEVELS - 1 - level))
            bits, entry = load_members(level_ptr, entries_ptr, num_listed, end, WIDTH, VECTOR)
            tl.debug_barrier()  # the list is read before it is overwritten
            scores = bits.to(tl.float32, bitcast=True)
            if low == NO_KEY + 1:  # fewer than topk groups have a score: low is no guess
                first, last, deviation = first_pivots(scores, count, topk, SHAPE)
        end = tl.where(slot >= 0, num_seen, 0)
        blocks = (entry, entry, entry, entry)
        if HAS_ROWS:
            blocks = load_blocks(pages, entry, end, ENTRIES_PER_BLOCK)
        low = find_threshold(scores, first, last, count, topk, SHAPE)
        low = tl.where(slot >= 0, low, END_KEY)
        num_stored = store_best(entries_ptr, rows_ptr, scores, entry, blocks, low, topk, SHAPE,
                                ENTRIES_PER_BLOCK, HAS_ROWS)  # fmt: skip
        is_empty = (lane >= num_stored) & (lane < topk)
        tl.store(entries_ptr + lane, -1, mask=is_empty)
        if HAS_ROWS:
            tl.store(rows_ptr + lane, tl.full((BLOCK_K,), -1, tl.int64), mask=is_empty)
        tl.store(counts_ptr + token, num_stored)
    else:
        slot = tl.load(request_slots_ptr + request).to(tl.int64)
        count = tl.where(slot >= 0, num_seen, 0)
        tl.store(entries_ptr + lane, tl.where(lane < count, lane, -1), mask=lane < topk)
        if HAS_ROWS:
            pages = block_table_ptr + slot * table_stride
            block = tl.load(pages + lane // ENTRIES_PER_BLOCK, mask=lane < count, other=-1)
            tl.store(rows_ptr + lane, page_row(block, lane, ENTRIES_PER_BLOCK), mask=lane < topk)
        tl.store(counts_ptr + token, count)
    if SIZE > 0:
        tl.debug_barrier()  # all places are stored before they become entries
        pages = block_table_ptr + tl.load(request_slots_ptr + request).to(tl.int64) * table_stride
        place = tl.load(entries_ptr + lane, mask=lane < topk, other=-1)
        block = tl.load(blocks_ptr + token * num_blocks + place // SIZE, mask=place >= 0, other=-1)
        entry = tl.where(block >= 0, block * SIZE + place % SIZE, -1)
        is_listed = (entry >= 0) & (entry // ENTRIES_PER_BLOCK < table_stride)
        page = tl.load(pages + entry // ENTRIES_PER_BLOCK, mask=is_listed, other=-1)
        tl.debug_barrier()  # all places are read before they are overwritten
        tl.store(entries_ptr + lane, entry, mask=lane < topk)
        tl.store(rows_ptr + lane, page_row(page, entry, ENTRIES_PER_BLOCK), mask=lane < topk)


def choose_best(
    chosen: Selection,
    scores: Tensor,
    group_tops: Tensor,
    tokens: TokenMap,
    layout: LayerLayout | ListedLayout,
    part: range,
    *,
    max_entries: int,
    topped_rows: int = 0,
) -> None:
    """Write the selection of the tokens `part`.

    Args:
        chosen: The selection of all tokens.
        scores: `[num_tokens, at least max_entries]` fp32, contiguous rows of these tokens.
            The row of a token that sees at most topk entries is not read.
        group_tops: `[num_tokens, at least num_group_tops]` int32, scratch for rows that do not
            fit a program; see `kernels.index_scratch`.
        max_entries: The most entries that any token of the forward sees.
        topped_rows: The rows whose first level of group_tops is stored: ALL_ROWS, or those of so
            many neighbours that are of one chunk.
    """
    topk, device = chosen.entry_idx.shape[1], scores.device
    levels, first_width, width = program_shape(max_entries, topk=topk)
    strides = (scores.stride(0), group_tops.stride(0) if levels else 0)
    vector = VECTOR if not any(stride % VECTOR for stride in strides) else 1
    listed = layout if isinstance(layout, ListedLayout) else None
    blocks = tokens.block_table if listed is None or listed.blocks is None else listed.blocks
    shared: dict[str, Any] = {
        "scores_ptr": scores.view(chosen.entry_idx.dtype), "scores_vectors": strides[0] // vector,
        "tops_ptr": group_tops, "tops_vectors": strides[1] // vector,
        "first_token": part.start, "topk": topk,
        "num_padded": padded_entries(max_entries, levels=levels),
        "positions_ptr": tokens.positions,
        "request_ids_ptr": tokens.request_ids, "request_slots_ptr": tokens.request_slots,
        "RATIO": layout.ratio, "LEVELS": levels, "IS_LISTED": listed is not None,
        "VECTOR": vector, "launch_pdl": starts_early(device),
    }  # fmt: skip
    if levels > int(topped_rows == ALL_ROWS):
        group = find_launch(GroupLaunch, "top-k groups", device)
        grid = (len(part), -(-max_entries // group.scores))
        _group_kernel[grid](
            **shared, num_rows=len(part), workspace_starts_ptr=tokens.workspace_starts,
            CHUNK=group.scores, topped_rows=topped_rows, num_warps=group.num_warps,
        )  # fmt: skip
    num_warps = find_launch(TopkLaunch, "top-k", device, first_width).num_warps
    _topk_kernel[(len(part),)](
        **shared, entry_idx_ptr=chosen.entry_idx, rows_ptr=chosen.rows, counts_ptr=chosen.counts,
        max_entries=max_entries,
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        blocks_ptr=blocks, num_blocks=blocks.shape[1], SIZE=0 if listed is None else listed.size,
        ENTRIES_PER_BLOCK=layout.entries_per_block, FIRST_WIDTH=first_width, WIDTH=width,
        BLOCK_K=next_power_of_two(topk), WARPS=num_warps, num_warps=num_warps,
    )  # fmt: skip


def program_shape(max_entries: int, *, topk: int) -> tuple[int, int, int]:
    """The levels of groups above the scores, and the scores that a program holds.

    First it holds the last level, or the scores themselves, and then members of groups.
    """
    if max_entries <= topk:
        return 0, MIN_WIDTH, MIN_WIDTH
    levels = group_levels(max_entries, topk=topk)
    num_first = -(-max_entries // GROUP**levels)
    width = narrow_width(topk) if levels else max(MIN_WIDTH, next_power_of_two(num_first))
    return levels, max(width, next_power_of_two(num_first)), width


def distinct_sizes(longest: int, *, topk: int) -> list[int]:
    """The fewest entries that give each shape of programs, up to the longest row."""
    powers = [2**n + 1 for n in range(longest.bit_length())]
    fewest: dict[object, int] = {}
    for size in sorted(size for size in {1, topk + 1, *powers} if size <= longest):
        fewest.setdefault((size > topk, program_shape(size, topk=topk)), size)
    return list(fewest.values())
