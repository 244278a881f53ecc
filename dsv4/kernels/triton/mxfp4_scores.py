"""Scores of MXFP4 index keys: queries as their operands, and the products.

Operands are E5M2, and every product is exact. A key's are its E2M1 values times their group's
scale: looked up in the 8 magnitudes that a scale makes of the codes. A query's are E2M1 values
times their group's power of two over that of the head's largest group, which is part of the weight.
One product over all channels is then the sum that is scored; on Hopper it has 13 bits, as for fp8.

E5M2 holds keys' scales between 2^-20 and 2^6, and groups of a head within 2^21 of each other.
Beyond, an operand of a key is NaN (of code 0 it is 0 with any scale, also with NaN, which no key is
written with), and what is missing for a query's group is its rest, a power of two, which makes the
head's weight NaN. Scores that come out NaN are then made anew, group by group, and much slower: a
group's sums are exact, and multiplied by its rest and its scale.
"""

import triton
import triton.language as tl

from dsv4.kernels.triton.decode import e2m1_values, ue8m0_values
from dsv4.kernels.triton.key_tiles import load_pages, pages_of_tile, tile_blocks
from dsv4.kernels.triton.primitives import INTERPRETED, loop_bound, power_of_two

MIN_E5M2_EXPONENT = tl.constexpr(-15)  # of a factor that keeps E2M1 values exact in E5M2
QUERY_EXPONENT = tl.constexpr(6)  # of the factor of a head's largest group
SMALLER = tl.constexpr(2.0**-6)  # the inverse of that factor
MIDDLE_SCALE = tl.constexpr(120)  # UE8M0 byte, 2^-7, of keys whose operands are their codes' values
SCALE_REACH = tl.constexpr(13)  # how far from the middle a scale's exponent may be
TOO_LARGE = tl.constexpr(2.0 * 2.0**7 * 2.0**6)  # the ReLU, operands of keys and of queries
SOME_HEADS = tl.constexpr(16)  # that are multiplied at a time where it takes long anyway


@triton.jit
def head_exponents(scales):
    """UE8M0 bytes `[ROWS, groups]` to the exponents of the groups and `[ROWS]` of the largest."""
    exponents = scales.to(tl.int32) - 127
    return exponents, tl.max(exponents, axis=1)


@triton.jit
def mxfp4_weight_factor(scales):
    """`[ROWS]`: what a head's weight is multiplied by, since operands and sums are too large."""
    _exponents, largest = head_exponents(scales)
    return power_of_two(largest) * (1.0 / TOO_LARGE)


@triton.jit
def e5m2_code(x):
    """fp32 numbers that E5M2 holds to their codes: the upper halves of FP16's."""
    return (x.to(tl.float16).to(tl.uint16, bitcast=True) >> 8).to(tl.uint8)


@triton.jit
def e5m2_operand(codes):
    """E5M2 codes as what is multiplied."""
    if INTERPRETED:
        operand = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        operand = codes.to(tl.float8e5, bitcast=True)
    return operand


@triton.jit
def store_mxfp4_query(values, scales, ready_ptr, rest_ptr, BLOCK_HEADS: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store E5M2 codes in the order of `key_operand`'s channels, and the groups' rests."""
    GROUPS: tl.constexpr = BLOCK // 32
    exponents, largest = head_exponents(scales)
    wanted = exponents - largest[:, None] + QUERY_EXPONENT
    exponent = tl.maximum(wanted, MIN_E5M2_EXPONENT)
    factor = power_of_two(exponent)[:, :, None]
    codes = tl.reshape(values.to(tl.int32), (ROWS, GROUPS, 16))
    is_zero = tl.max(codes & 0x77, axis=2) == 0
    rest = tl.where(is_zero, 1.0, power_of_two(tl.maximum(wanted - exponent, -126)))
    group = tl.arange(0, GROUPS)[None, :]
    tl.store(rest_ptr[:, None] + group * BLOCK_HEADS, rest)
    even = e5m2_code(e2m1_values(codes & 15) * factor)
    odd = e5m2_code(e2m1_values(codes >> 4) * factor)
    ready = tl.reshape(tl.join(even, odd), (ROWS, 4, GROUPS, 2, 2, 2))
    ready = tl.reshape(tl.permute(ready, (0, 2, 3, 1, 4, 5)), (ROWS, BLOCK))
    tl.store(ready_ptr[:, None] + tl.arange(0, BLOCK)[None, :], ready)


@triton.jit
def load_query_codes(ready_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Stored codes of ROWS heads, `[BLOCK, ROWS]`."""
    at = tl.arange(0, ROWS)[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]
    return tl.load(ready_ptr + at)


@triton.jit
def key_pages(memory, blocks, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Pointers to the data and the scales of the pages, of one or `[TILE, 1]`."""
    data_ptr, scale_ptr, page_stride = memory
    page_start = tl.maximum(blocks, 0).to(tl.int64) * page_stride
    if pages_of_tile(ENTRIES_PER_BLOCK, TILE) != 1:
        page_start = page_start[:, None]
    return data_ptr + page_start, scale_ptr + page_start


@triton.jit
def load_words(data_page, page_row, DATA_BYTES: tl.constexpr, DIM: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK / 8]`: words of 8 codes. page_row `[TILE, 1]` is the entry's row in its page.

    What lies beyond a request's entries is read too, since its pages are whole.
    """
    word = tl.arange(0, BLOCK // 8)[None, :]
    word_ptr = data_page.to(tl.pointer_type(tl.int32)) + (page_row * (DATA_BYTES // 4) + word)
    return tl.load(word_ptr, mask=word < DIM // 8, other=0)


@triton.jit
def load_scales(scale_page, page_row, is_entry, SCALE_BYTES: tl.constexpr, DIM: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK / 32]`: scale bytes; where there is no entry or group, any that fits."""
    group = tl.arange(0, BLOCK // 32)[None, :]
    # One byte a thread, so that it is where the codes of its group are.
    group_ptr = tl.multiple_of(scale_page + (page_row * SCALE_BYTES + group), (1, 1))
    is_group = is_entry & (group < DIM // 32)
    return tl.load(group_ptr, mask=is_group, other=MIDDLE_SCALE).to(tl.int32)


@triton.jit
def code_tables(scales):
    """E5M2 codes of the magnitudes 0 to 1.5, and 2 to 6, times their scales, 4 in a word.

    Those of scales that don't fit are NaN, but for 0.
    """
    exponent = scales - MIDDLE_SCALE
    fits = (exponent >= -SCALE_REACH) & (exponent <= SCALE_REACH)
    low = tl.where(fits, exponent * 0x04040400 + 0x3E3C3800, 0x7F7F7F00)
    high = tl.where(fits, exponent * 0x04040404 + 0x46444240, 0x7F7F7F7F)
    return low, high


@triton.jit
def code_bits(words, low_table, high_table, INDEX: tl.constexpr):
    """The E5M2 code of one of the 8 codes of words, as `operand_words` finds it."""
    code = words >> (4 * INDEX)
    table = tl.where((code & 4) == 0, low_table, high_table)
    byte = (table >> (8 * (code & 3))) & 0x7F
    return byte | ((code & 8) << 4)


@triton.jit
def operand_words(words, low_table, high_table):
    """Words of 8 codes to E5M2 codes, 4 in a word: those of codes 0 to 3, and 4 to 7.

    4 codes without their signs choose bytes of the tables; signs are brought to the same bytes.
    """
    if INTERPRETED:
        halves = ()
        for half in tl.static_range(2):
            found = tl.zeros(words.shape, tl.int32)
            for index in tl.static_range(4):
                code = code_bits(words, low_table, high_table, 4 * half + index)
                found |= code << (8 * index)
            halves = halves + (found,)  # type: ignore[assignment]
    else:
        halves = tl.inline_asm_elementwise(
            """{
            .reg .b32 codes, moved, signs, first, second;
            and.b32 codes, $2, 0x77777777;
            prmt.b32 first, $3, $4, codes;
            shr.u32 codes, codes, 16;
            prmt.b32 second, $3, $4, codes;
            shl.b32 moved, $2, 4;
            prmt.b32 signs, moved, $2, 0x5140;
            lop3.b32 $0, signs, 0x80808080, first, 0xEA;
            prmt.b32 signs, moved, $2, 0x7362;
            lop3.b32 $1, signs, 0x80808080, second, 0xEA;
            }""",
            "=&r,=&r,r,r,r", [words, low_table, high_table],
            dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    return halves


@triton.jit
def word_operands(words):
    """`[..., 2, 2]`: the bytes of words as operands, 0 and 1, 2 and 3."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    return e5m2_operand(tl.join(even, odd))


@triton.constexpr_function
def strips(TILE, WARPS):
    """Entries of a tile as they are loaded: 8 for each warp, and 8 more for each."""
    return (TILE // (16 * WARPS), 2, WARPS, 8) if TILE >= 16 * WARPS else (1, 1, 1, TILE)


@triton.jit
def key_operand(words, tables, BLOCK: tl.constexpr, TILE: tl.constexpr,
                WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK]` E5M2: codes in words `[TILE, BLOCK / 8]`, by tables `[TILE, BLOCK / 32]`.

    Rows and channels come in an order that leaves them in the thread that loaded them. Of 16
    channels that are multiplied at once each of 4 threads has 4, from its own quarter of a row;
    a warp has 16 rows, its 8 and its 8 more.
    """
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    low_table, high_table = tables
    words = tl.reshape(words, (TILE, BLOCK // 32, 4))
    halves = operand_words(words, low_table[:, :, None], high_table[:, :, None])
    codes = tl.join(word_operands(halves[0]), word_operands(halves[1]))
    codes = tl.reshape(codes, (TILE, 4, BLOCK // 32, 2, 2, 2))
    channels = tl.permute(codes, (0, 2, 5, 1, 3, 4))
    rows = tl.reshape(channels, (SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], BLOCK))
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), (TILE, BLOCK))


@triton.jit
def sum_heads(products, weights, BLOCK_HEADS: tl.constexpr, TOKENS: tl.constexpr,
              TILE: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, TOKENS]`, in the order of entries: sum_h w_h x_h of `key_operand`'s rows.

    Heads that aren't there weigh 0, and their products are 0, or NaN as all of the key are.
    """
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    weighted = tl.reshape(products * weights[None, :], (TILE, TOKENS, BLOCK_HEADS))
    score = tl.sum(weighted, axis=2)
    rows = tl.reshape(score, (SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[3], TOKENS))
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), (TILE, TOKENS))


@triton.jit
def score_mxfp4(
    pages_ptr, counts, scores_ptr, ready, memory, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Score every so many tiles of a request's entries for TOKENS tokens of it.

    counts `[TOKENS]` is how many entries each is scored for, scores_ptr `[1, TOKENS]` where their
    scores start. Keys of the next tile wait in registers, which costs fewer instructions than
    shared memory.
    """
    ready_ptr, ready_weights_ptr, ready_weights_stride = ready
    query = e5m2_operand(load_query_codes(ready_ptr, TOKENS * BLOCK_HEADS, BLOCK))
    head = tl.arange(0, TOKENS * BLOCK_HEADS)
    weight_ptr = ready_weights_ptr + head // BLOCK_HEADS * ready_weights_stride + head % BLOCK_HEADS
    weights = tl.load(weight_ptr)
    group = tl.arange(0, BLOCK // 32)[:, None]
    rests = tl.load(weight_ptr[None, :] + (group + 1) * BLOCK_HEADS)
    weights = tl.where(tl.min(rests, axis=0) < 1.0, float("nan"), weights)
    count = tl.max(counts, axis=0)
    highest = tl.zeros((TILE, TOKENS), tl.float32)
    first_tile, step = tl.program_id(1), tl.num_programs(1)
    entry = first_tile * TILE + tl.arange(0, TILE)[:, None]
    first, last = load_pages(pages_ptr, first_tile, count, ENTRIES_PER_BLOCK, TILE)
    blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
    data_page, scale_page = key_pages(memory, blocks, ENTRIES_PER_BLOCK, TILE)
    page_row = entry % ENTRIES_PER_BLOCK
    words = load_words(data_page, page_row, DATA_BYTES, DIM, BLOCK)
    scales = load_scales(scale_page, page_row, entry < count, SCALE_BYTES, DIM, BLOCK)
    first, last = load_pages(pages_ptr, first_tile + step, count, ENTRIES_PER_BLOCK, TILE)
    for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                         loop_bound(step), num_stages=1):  # fmt: skip
        next_blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
        first, last = load_pages(pages_ptr, tile + 2 * step, count, ENTRIES_PER_BLOCK, TILE)
        entry = tile * TILE + tl.arange(0, TILE)[:, None]
        next_entry = entry + step * TILE
        page_row = next_entry % ENTRIES_PER_BLOCK
        data_page, scale_page = key_pages(memory, next_blocks, ENTRIES_PER_BLOCK, TILE)
        next_words = load_words(data_page, page_row, DATA_BYTES, DIM, BLOCK)
        next_scales = load_scales(scale_page, page_row, next_entry < count, SCALE_BYTES, DIM, BLOCK)
        products = tl.dot(key_operand(words, code_tables(scales), BLOCK, TILE, WARPS), query)
        # Twice the ReLU, and NaN of NaN; a GPU compares half as many numbers as it adds.
        positive = products + tl.abs(products)
        score = sum_heads(positive, weights, BLOCK_HEADS, TOKENS, TILE, WARPS)
        is_page = blocks >= 0
        if pages_of_tile(ENTRIES_PER_BLOCK, TILE) != 1:
            is_page = is_page[:, None]
        score = tl.where(is_page, score, 0.0)
        tl.store(scores_ptr + entry, score, mask=entry < counts[None, :])
        highest = tl.maximum(highest, score, propagate_nan=tl.PropagateNan.ALL)
        blocks = next_blocks
        words = next_words
        scales = next_scales
    if tl.max(tl.max((highest != highest).to(tl.int32), axis=1), axis=0) != 0:
        tl.debug_barrier()
        for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                             loop_bound(step), num_stages=1):  # fmt: skip
            score_by_groups(
                tile, pages_ptr, counts, scores_ptr, ready, memory, BLOCK_HEADS, DIM, BLOCK,
                DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, TILE, TOKENS, WARPS,
            )  # fmt: skip


@triton.jit
def score_by_groups(
    tile, pages_ptr, counts, scores_ptr, ready, memory, BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Make the scores of a tile anew that are NaN, with any scales of keys and queries."""
    ready_ptr, ready_weights_ptr, ready_weights_stride = ready
    entry = tile * TILE + tl.arange(0, TILE)[:, None]
    old = tl.load(scores_ptr + entry, mask=entry < counts[None, :], other=0.0)
    if tl.max(tl.max((old != old).to(tl.int32), axis=1), axis=0) != 0:
        first, last = load_pages(pages_ptr, tile, tl.max(counts, axis=0), ENTRIES_PER_BLOCK, TILE)
        blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
        data_page, scale_page = key_pages(memory, blocks, ENTRIES_PER_BLOCK, TILE)
        page_row = entry % ENTRIES_PER_BLOCK
        words = load_words(data_page, page_row, DATA_BYTES, DIM, BLOCK)
        tables = code_tables(tl.full((1, BLOCK // 32), MIDDLE_SCALE, tl.int32))
        keys = key_operand(words, tables, BLOCK, TILE, WARPS)
        scale_ptr = scale_page + page_row * SCALE_BYTES
        score = tl.zeros((TILE, TOKENS), tl.float32)
        for start in tl.range(0, TOKENS * BLOCK_HEADS, SOME_HEADS, num_stages=1):
            token = start // BLOCK_HEADS
            codes = load_query_codes(ready_ptr + start * BLOCK, SOME_HEADS, BLOCK)
            weight_ptr = ready_weights_ptr + token * ready_weights_stride + start % BLOCK_HEADS
            weight_ptr += tl.arange(0, SOME_HEADS)
            products = group_products(keys, scale_ptr, codes, weight_ptr + BLOCK_HEADS, BLOCK_HEADS,
                                      DIM, BLOCK, TILE, WARPS)  # fmt: skip
            positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            weights = tl.load(weight_ptr) * TOO_LARGE
            part = sum_heads(positive, weights, SOME_HEADS, 1, TILE, WARPS)
            score += tl.where(tl.arange(0, TOKENS)[None, :] == token, part, 0.0)
        tl.store(scores_ptr + entry, score, mask=old != old)


@triton.jit
def group_products(keys, scale_ptr, query_codes, rest_ptr, BLOCK_HEADS: tl.constexpr,
                   DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
                   WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, SOME_HEADS]`: the sum of the groups' products, each exact, times their scales.

    keys are operands without their scales. scale_ptr `[TILE, 1]` points to the keys' first scales,
    rest_ptr to the heads' first rests. Products of a group are multiples of 2^-2 and together
    below 2^11, times the query's factor: 13 bits hold them.
    """
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    products = tl.zeros((TILE, SOME_HEADS), tl.float32)
    for group in tl.range(DIM // 32, num_stages=1):
        own_codes = tl.where(channel_groups(BLOCK)[:, None] == group, query_codes, 0)
        part = tl.dot(keys, e5m2_operand(own_codes))
        part *= (tl.load(rest_ptr + group * BLOCK_HEADS) * SMALLER)[None, :]
        scale = tl.reshape(ue8m0_values(tl.load(scale_ptr + group)), SHAPE)
        products += part * tl.reshape(tl.permute(scale, (0, 2, 1, 3)), (TILE, 1))
    return products


@triton.jit
def channel_groups(BLOCK: tl.constexpr):
    """`[BLOCK]`: the group of each channel, in the order of `key_operand`."""
    channel = tl.arange(0, BLOCK)
    word = channel % 16 // 4 * (BLOCK // 32) + channel // 32
    return word // 4
