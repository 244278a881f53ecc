"""Scores of MXFP4 index keys: queries as operands, and the products.

Operands are E5M2, and every product is exact. A key's operand is its E2M1 value times its group's
scale, looked up among the 8 magnitudes that the scale makes of the codes. A query's operand is its
E2M1 value times its group's power of two, relative to the head's largest group. The largest
group's power of two is part of the head's weight. One product over all channels is then the sum to
score. On Hopper it has 13 bits, as for fp8.

E5M2 holds keys' scales between 2^-20 and 2^6, and groups of a head within 2^21 of each other.
A key's operand beyond that range is NaN. Code 0 is 0 with any scale, also with NaN, which no key
is written with. A query's group beyond it keeps its residual scale, a power of two, and makes
the head's weight NaN. Scores that come out NaN are computed again group by group, much slower.
A group's sums are exact, and are multiplied by its residual scale and its scale.
"""

import triton
import triton.language as tl

from dsv4.kernels.triton.decode import e2m1_values, ue8m0_values
from dsv4.kernels.triton.key_tiles import load_pages, pages_of_tile, tile_blocks
from dsv4.kernels.triton.primitives import INTERPRETED, loop_bound, power_of_two

MIN_E5M2_EXPONENT = tl.constexpr(-15)  # smallest exponent that keeps E2M1 values exact in E5M2
QUERY_EXPONENT = tl.constexpr(6)  # exponent of the factor of a head's largest group
QUERY_FACTOR_INVERSE = tl.constexpr(2.0**-6)
MIDDLE_SCALE = tl.constexpr(120)  # UE8M0 byte, 2^-7; a key's operands are its codes' values
SCALE_REACH = tl.constexpr(13)  # how far from the middle a scale's exponent may be
# Factor of a score before its weight: 2 by the ReLU, 2^7 by key operands, 2^6 by query operands.
SCORE_FACTOR = tl.constexpr(2.0 * 2.0**7 * 2.0**6)
SLOW_HEADS = tl.constexpr(16)  # heads multiplied at a time by `score_by_groups`


@triton.jit
def head_exponents(scales):
    """UE8M0 bytes `[ROWS, groups]` to exponents of the groups and `[ROWS]` of the largest."""
    exponents = scales.to(tl.int32) - 127  # [ROWS, groups]
    return exponents, tl.max(exponents, axis=1)


@triton.jit
def mxfp4_weight_factor(scales):
    """`[ROWS]`: the factor of a head's weight that undoes the factors of operands and sums."""
    _exponents, largest = head_exponents(scales)
    return power_of_two(largest) * (1.0 / SCORE_FACTOR)


@triton.jit
def e5m2_code(x):
    """fp32 numbers that E5M2 holds to their codes, the upper bytes of FP16's."""
    return (x.to(tl.float16).to(tl.uint16, bitcast=True) >> 8).to(tl.uint8)


@triton.jit
def e5m2_operand(codes):
    """E5M2 codes as an operand of a product."""
    if INTERPRETED:
        operand = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        operand = codes.to(tl.float8e5, bitcast=True)
    return operand


@triton.jit
def store_mxfp4_query(values, scales, operand_ptr, residual_ptr, BLOCK_HEADS: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store E5M2 codes in the order of `key_operand`'s channels, and the residual scales."""
    GROUPS: tl.constexpr = BLOCK // 32
    exponents, largest = head_exponents(scales)
    wanted = exponents - largest[:, None] + QUERY_EXPONENT
    exponent = tl.maximum(wanted, MIN_E5M2_EXPONENT)  # [ROWS, GROUPS]
    factor = power_of_two(exponent)[:, :, None]
    codes = tl.reshape(values.to(tl.int32), (ROWS, GROUPS, 16))
    is_zero = tl.max(codes & 0x77, axis=2) == 0
    residual_scale = tl.where(is_zero, 1.0, power_of_two(tl.maximum(wanted - exponent, -126)))
    group = tl.arange(0, GROUPS)[None, :]
    tl.store(residual_ptr[:, None] + group * BLOCK_HEADS, residual_scale)
    even = e5m2_code(e2m1_values(codes & 15) * factor)  # [ROWS, GROUPS, 16]
    odd = e5m2_code(e2m1_values(codes >> 4) * factor)
    operand = tl.reshape(tl.join(even, odd), (ROWS, 4, GROUPS, 2, 2, 2))
    operand = tl.reshape(tl.permute(operand, (0, 2, 3, 1, 4, 5)), (ROWS, BLOCK))
    tl.store(operand_ptr[:, None] + tl.arange(0, BLOCK)[None, :], operand)


@triton.jit
def load_query_codes(query_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the stored codes of ROWS heads, `[BLOCK, ROWS]`."""
    at = tl.arange(0, ROWS)[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]
    return tl.load(query_ptr + at)


@triton.jit
def key_pages(keys, blocks, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Pointers to the data and scales of pages: of one page, or `[TILE, 1]`."""
    page_start = tl.maximum(blocks, 0).to(tl.int64) * keys.page_stride
    if pages_of_tile(ENTRIES_PER_BLOCK, TILE) != 1:
        page_start = page_start[:, None]
    return keys.data_ptr + page_start, keys.scales_ptr + page_start


@triton.jit
def load_words(data_page, page_row, DATA_BYTES: tl.constexpr, DIM: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK / 8]`: words of 8 codes. page_row `[TILE, 1]` is the entry's row in its page.

    Rows beyond a request's entries are read too, since its pages are whole.
    """
    word = tl.arange(0, BLOCK // 8)[None, :]
    word_ptr = data_page.to(tl.pointer_type(tl.int32)) + (page_row * (DATA_BYTES // 4) + word)
    return tl.load(word_ptr, mask=word < DIM // 8, other=0)


@triton.jit
def load_scales(scale_page, page_row, is_entry, SCALE_BYTES: tl.constexpr, DIM: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK / 32]`: scale bytes; MIDDLE_SCALE where there is no entry or group."""
    group = tl.arange(0, BLOCK // 32)[None, :]
    # One byte per thread puts a scale into the thread that has its group's codes.
    group_ptr = tl.multiple_of(scale_page + (page_row * SCALE_BYTES + group), (1, 1))
    is_group = is_entry & (group < DIM // 32)
    return tl.load(group_ptr, mask=is_group, other=MIDDLE_SCALE).to(tl.int32)


@triton.jit
def code_tables(scales):
    """E5M2 codes of the magnitudes 0 to 1.5, and 2 to 6, times their scales, 4 in a word.

    Scales that don't fit make NaN of every magnitude but 0.
    """
    exponent = scales - MIDDLE_SCALE
    fits = (exponent >= -SCALE_REACH) & (exponent <= SCALE_REACH)
    low = tl.where(fits, exponent * 0x04040400 + 0x3E3C3800, 0x7F7F7F00)
    high = tl.where(fits, exponent * 0x04040404 + 0x46444240, 0x7F7F7F7F)
    return low, high


@triton.jit
def operand_words(words, low_table, high_table):
    """Words of 8 codes to E5M2 codes, 4 in a word: of codes 0 to 3, and of codes 4 to 7.

    Codes without signs select bytes of the tables. Signs are then moved to the same bytes.
    """
    if INTERPRETED:
        halves = ()
        for half in tl.static_range(2):
            packed = tl.zeros(words.shape, tl.int32)
            for index in tl.static_range(4):
                code = words >> (4 * (4 * half + index))
                table = tl.where((code & 4) == 0, low_table, high_table)
                byte = (table >> (8 * (code & 3))) & 0x7F
                packed |= (byte | ((code & 8) << 4)) << (8 * index)
            halves = halves + (packed,)  # type: ignore[assignment]
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
    """`[..., 2, 2]`: the bytes of words as operands, 0 and 1, then 2 and 3."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    return e5m2_operand(tl.join(even, odd))


@triton.constexpr_function
def strips(TILE, WARPS):
    """Shape of a tile's entries as loaded: 8 for each warp, then 8 more for each."""
    return (TILE // (16 * WARPS), 2, WARPS, 8) if TILE >= 16 * WARPS else (1, 1, 1, TILE)


@triton.jit
def key_operand(words, tables, BLOCK: tl.constexpr, TILE: tl.constexpr,
                WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK]` E5M2: codes in words `[TILE, BLOCK / 8]`, by tables `[TILE, BLOCK / 32]`.

    The order of rows and channels leaves each value in the thread that loaded it. A product takes
    16 channels at once: each of 4 threads has 4 of them, from its own quarter of a row. A warp has
    16 rows, its first 8 and its second 8.
    """
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    low_table, high_table = tables
    words = tl.reshape(words, (TILE, BLOCK // 32, 4))
    halves = operand_words(words, low_table[:, :, None], high_table[:, :, None])
    codes = tl.join(word_operands(halves[0]), word_operands(halves[1]))  # [..., 2, 2, 2]
    codes = tl.reshape(codes, (TILE, 4, BLOCK // 32, 2, 2, 2))
    channels = tl.permute(codes, (0, 2, 5, 1, 3, 4))
    rows = tl.reshape(channels, (SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], BLOCK))
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), (TILE, BLOCK))


@triton.jit
def sum_heads(products, weights, BLOCK_HEADS: tl.constexpr, TOKENS: tl.constexpr,
              TILE: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, TOKENS]`, in the order of entries: sum_h w_h x_h of `key_operand`'s rows.

    Padding heads weigh 0. Their products are 0, or NaN where all products of the key are.
    """
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    weighted = tl.reshape(products * weights[None, :], (TILE, TOKENS, BLOCK_HEADS))
    score = tl.sum(weighted, axis=2)
    rows = tl.reshape(score, (SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[3], TOKENS))
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), (TILE, TOKENS))


@triton.jit
def load_tile_words(keys, blocks, entry, count, KEY: tl.constexpr, SPEC: tl.constexpr):
    """Load the words `[TILE, BLOCK / 8]` and scales `[TILE, BLOCK / 32]` of a tile's keys."""
    page_row = entry % SPEC.ENTRIES_PER_BLOCK  # [TILE, 1]
    data_page, scale_page = key_pages(keys, blocks, SPEC.ENTRIES_PER_BLOCK, SPEC.TILE)
    words = load_words(data_page, page_row, KEY.DATA_BYTES, KEY.DIM, KEY.BLOCK)
    scales = load_scales(scale_page, page_row, entry < count, KEY.SCALE_BYTES, KEY.DIM, KEY.BLOCK)
    return words, scales


@triton.jit
def load_operands(operands, BLOCK: tl.constexpr, SPEC: tl.constexpr):
    """Load queries `[BLOCK, heads]` and the heads' weights, NaN for those E5M2 does not hold."""
    BLOCK_HEADS: tl.constexpr = SPEC.BLOCK_HEADS
    ROWS: tl.constexpr = SPEC.TOKENS * BLOCK_HEADS
    query = e5m2_operand(load_query_codes(operands.query_ptr, ROWS, BLOCK))
    head = tl.arange(0, ROWS)
    weight_ptr = (
        operands.weights_ptr + head // BLOCK_HEADS * operands.weights_stride + head % BLOCK_HEADS
    )
    weights = tl.load(weight_ptr)  # [ROWS]
    group = tl.arange(0, BLOCK // 32)[:, None]
    residual_scales = tl.load(weight_ptr[None, :] + (group + 1) * BLOCK_HEADS)
    weights = tl.where(tl.min(residual_scales, axis=0) < 1.0, float("nan"), weights)
    return query, weights


@triton.jit
def score_mxfp4(pages_ptr, pages, counts, scores_ptr, operands, keys, KEY: tl.constexpr,
                SPEC: tl.constexpr):  # fmt: skip
    """Score this program's tiles of a request's entries for TOKENS of its tokens.

    pages are those of the first two tiles. counts `[TOKENS]` is the number of entries to score for
    each token; their scores start at scores_ptr `[1, TOKENS]`. Keys of the next tile wait in
    registers, which takes fewer instructions than shared memory.
    """
    ENTRIES_PER_BLOCK: tl.constexpr = SPEC.ENTRIES_PER_BLOCK
    TILE: tl.constexpr = SPEC.TILE
    TOKENS: tl.constexpr = SPEC.TOKENS
    query, weights = load_operands(operands, KEY.BLOCK, SPEC)
    count = tl.max(counts, axis=0)
    highest = tl.zeros((TILE, TOKENS), tl.float32)
    first_tile, step = tl.program_id(1), tl.num_programs(1)
    entry = first_tile * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    first, last, next_first, next_last = pages
    blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
    words, scales = load_tile_words(keys, blocks, entry, count, KEY, SPEC)
    first, last = next_first, next_last
    for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                         loop_bound(step), num_stages=1):  # fmt: skip
        next_blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
        first, last = load_pages(pages_ptr, tile + 2 * step, count, ENTRIES_PER_BLOCK, TILE)
        entry = tile * TILE + tl.arange(0, TILE)[:, None]
        next_entry = entry + step * TILE
        next_words, next_scales = load_tile_words(keys, next_blocks, next_entry, count, KEY, SPEC)
        key = key_operand(words, code_tables(scales), KEY.BLOCK, TILE, SPEC.WARPS)
        products = tl.dot(key, query)  # [TILE, TOKENS × BLOCK_HEADS]
        # Twice the ReLU, and NaN of NaN; a GPU adds twice as many numbers as it compares.
        positive = products + tl.abs(products)
        score = sum_heads(positive, weights, SPEC.BLOCK_HEADS, TOKENS, TILE, SPEC.WARPS)
        is_page = blocks >= 0
        if pages_of_tile(ENTRIES_PER_BLOCK, TILE) != 1:
            is_page = is_page[:, None]
        score = tl.where(is_page, score, 0.0)  # [TILE, TOKENS]
        tl.store(scores_ptr + entry, score, mask=entry < counts[None, :])
        highest = tl.maximum(highest, score, propagate_nan=tl.PropagateNan.ALL)
        blocks = next_blocks
        words = next_words
        scales = next_scales
    if tl.max(tl.max((highest != highest).to(tl.int32), axis=1), axis=0) != 0:
        tl.debug_barrier()
        for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                             loop_bound(step), num_stages=1):  # fmt: skip
            score_by_groups(tile, pages_ptr, counts, scores_ptr, operands, keys, KEY, SPEC)


@triton.jit
def score_by_groups(tile, pages_ptr, counts, scores_ptr, operands, keys, KEY: tl.constexpr,
                    SPEC: tl.constexpr):  # fmt: skip
    """Compute a tile's NaN scores again, with any scales of keys and queries."""
    TILE: tl.constexpr = SPEC.TILE
    entry = tile * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    old = tl.load(scores_ptr + entry, mask=entry < counts[None, :], other=0.0)  # [TILE, TOKENS]
    if tl.max(tl.max((old != old).to(tl.int32), axis=1), axis=0) != 0:
        count = tl.max(counts, axis=0)
        first, last = load_pages(pages_ptr, tile, count, SPEC.ENTRIES_PER_BLOCK, TILE)
        blocks = tile_blocks(first, last, SPEC.ENTRIES_PER_BLOCK, TILE)
        data_page, scale_page = key_pages(keys, blocks, SPEC.ENTRIES_PER_BLOCK, TILE)
        page_row = entry % SPEC.ENTRIES_PER_BLOCK
        score = group_scores(data_page, scale_page, page_row, operands, KEY, SPEC)
        tl.store(scores_ptr + entry, score, mask=old != old)


@triton.jit
def group_scores(data_page, scale_page, page_row, operands, KEY: tl.constexpr,
                 SPEC: tl.constexpr):  # fmt: skip
    """`[TILE, TOKENS]`: scores of the keys at page_row `[TILE, 1]`, a group of channels at once."""
    BLOCK: tl.constexpr = KEY.BLOCK
    BLOCK_HEADS: tl.constexpr = SPEC.BLOCK_HEADS
    TILE: tl.constexpr = SPEC.TILE
    TOKENS: tl.constexpr = SPEC.TOKENS
    words = load_words(data_page, page_row, KEY.DATA_BYTES, KEY.DIM, BLOCK)
    tables = code_tables(tl.full((1, BLOCK // 32), MIDDLE_SCALE, tl.int32))
    key = key_operand(words, tables, BLOCK, TILE, SPEC.WARPS)  # [TILE, BLOCK]
    scale_ptr = scale_page + page_row * KEY.SCALE_BYTES  # [TILE, 1]
    score = tl.zeros((TILE, TOKENS), tl.float32)
    for start in tl.range(0, TOKENS * BLOCK_HEADS, SLOW_HEADS, num_stages=1):
        token = start // BLOCK_HEADS
        codes = load_query_codes(operands.query_ptr + start * BLOCK, SLOW_HEADS, BLOCK)
        weight_ptr = operands.weights_ptr + token * operands.weights_stride + start % BLOCK_HEADS
        weight_ptr += tl.arange(0, SLOW_HEADS)
        products = group_products(key, scale_ptr, codes, weight_ptr + BLOCK_HEADS, KEY, SPEC)
        positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        weights = tl.load(weight_ptr) * SCORE_FACTOR
        part = sum_heads(positive, weights, SLOW_HEADS, 1, TILE, SPEC.WARPS)  # [TILE, 1]
        score += tl.where(tl.arange(0, TOKENS)[None, :] == token, part, 0.0)
    return score


@triton.jit
def group_products(key, scale_ptr, query_codes, residual_ptr, KEY: tl.constexpr,
                   SPEC: tl.constexpr):  # fmt: skip
    """`[TILE, SLOW_HEADS]`: the sum of the groups' products, each exact, times their scales.

    key holds operands without their scales. scale_ptr `[TILE, 1]` points to the keys' first scales,
    residual_ptr to the heads' first residual scales. Products of a group are multiples of 2^-2 and
    together below 2^11, times the query's factor: 13 bits hold them.
    """
    TILE: tl.constexpr = SPEC.TILE
    SHAPE: tl.constexpr = strips(TILE, SPEC.WARPS)
    products = tl.zeros((TILE, SLOW_HEADS), tl.float32)
    for group in tl.range(KEY.DIM // 32, num_stages=1):
        channel = tl.arange(0, KEY.BLOCK)  # in the order of `key_operand`
        word = channel % 16 // 4 * (KEY.BLOCK // 32) + channel // 32
        group_codes = tl.where((word // 4)[:, None] == group, query_codes, 0)
        part = tl.dot(key, e5m2_operand(group_codes))  # [TILE, SLOW_HEADS]
        residual_scale = tl.load(residual_ptr + group * SPEC.BLOCK_HEADS)
        part *= (residual_scale * QUERY_FACTOR_INVERSE)[None, :]
        scale = tl.reshape(ue8m0_values(tl.load(scale_ptr + group)), SHAPE)
        products += part * tl.reshape(tl.permute(scale, (0, 2, 1, 3)), (TILE, 1))
    return products
