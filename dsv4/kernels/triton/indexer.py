"""Index: make queries ready, score paged keys where they lie, choose the best entries.

Tokens are taken as many at a time as the workspace holds, each time in three launches or four.
A token that sees no more than topk entries is neither made ready nor scored.

Operands of the products, by key format. All are exact, and so is every product:

    fp8     E4M3 codes; the key's scale multiplies the score, the query's is part of the weight
    mxfp4   keys E4M3, E2M1 values times 2^-6; queries E5M2, E2M1 values times their group's power
            of two over that of the head's largest group, which is part of the weight. A group of
            32 channels is a product of its own, whose sum is exact; the key's scale multiplies it
    nvfp4   BF16: E2M1 values times their group's E4M3 scale, 6 significant bits; the square of
            the global scale is part of the weight
    bf16    BF16
    fp32    fp32

Hopper adds E4M3 products with 13 bits after the leading one, less than fp32's 23, but as many as 32
products of E2M1 values need. FP8_PRODUCTS off makes BF16 operands of fp8's codes, at half the rate.

E5M2 holds the groups of a head whose scales are within 2^21 of each other. What is missing for a
group below that is its rest, a power of two that multiplies its sums; almost always all rests are
1, and then nothing is multiplied.

Tokens of a chunk are scored a few at a time, if they are of one request: keys are read once for
all of them.
"""

from typing import Any, NamedTuple

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
    power_of_two,
    rotate_tail,
)
from dsv4.kernels.triton.topk import choose_best, visible_entries
from dsv4.model.rope import RopeTable

FP8_PRODUCTS = True
QUERY_HEADS = 16  # heads of a program that makes queries ready
QUERY_WARPS = 4
MIN_QUERY_EXPONENT = tl.constexpr(-23)  # of a factor that keeps E2M1 values exact in FP16
MIDDLE_SCALE = tl.constexpr(120)  # UE8M0 byte of keys whose operands are their codes' values
MIDDLE_FACTOR = tl.constexpr(2.0**7)
MXFP4_WEIGHT = tl.constexpr(2.0**-8)  # over the middle factor, and half of x + |x|
SOME_HEADS = tl.constexpr(16)  # heads at a time where products take long anyway


class ScoreCut(NamedTuple):
    """What a launch that scores is cut into.

    A program takes `tokens` tokens and multiplies `tile` keys at a time, while the next
    `stages - 1` tiles are on their way. Keys are split over programs, up to `programs` in all.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    tokens: int = 1


SCORE_CUTS = {
    "fp8": ScoreCut(tile=128, warps=4, stages=3, programs=396),
    "mxfp4": ScoreCut(tile=64, warps=4, stages=4, programs=396),
    "nvfp4": ScoreCut(tile=128, warps=4, stages=3, programs=528),
    "bf16": ScoreCut(tile=64, warps=4, stages=3, programs=528),
    "fp32": ScoreCut(tile=32, warps=8, stages=3, programs=528),
}
CHUNK_CUTS = {"fp8": ScoreCut(tile=128, warps=8, stages=3, programs=1320, tokens=2)}


@triton.jit
def nvfp4_scales(scales, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """E4M3 scales `[ROWS, BLOCK / 16]` to fp32 `[ROWS, BLOCK / 2]`, one for a pair of channels."""
    wide = tl.broadcast_to(e4m3_values(scales)[:, :, None], (ROWS, BLOCK // 16, 8))
    return tl.reshape(wide, (ROWS, BLOCK // 2))


@triton.jit
def head_exponents(scales):
    """UE8M0 bytes `[ROWS, groups]` to the exponents of the groups and `[ROWS]` of the largest."""
    exponents = scales.to(tl.int32) - 127
    return exponents, tl.max(exponents, axis=1)


@triton.jit
def store_mxfp4_query(values, scales, ready_ptr, rest_ptr, BLOCK_HEADS: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store FP16 operands in the order of `mxfp4_operand`, and the groups' rests."""
    GROUPS: tl.constexpr = BLOCK // 32
    exponents, largest = head_exponents(scales)
    wanted = exponents - largest[:, None]
    exponent = tl.maximum(wanted, MIN_QUERY_EXPONENT)
    rest = power_of_two(tl.maximum(wanted - exponent, -126))
    group = tl.arange(0, GROUPS)[None, :]
    tl.store(rest_ptr[:, None] + group * BLOCK_HEADS, rest)
    factor = power_of_two(exponent)[:, :, None]
    codes = tl.reshape(values.to(tl.int32), (ROWS, GROUPS, 16))
    byte = 16 * tl.arange(0, GROUPS)[None, :, None] + tl.arange(0, 16)[None, None, :]
    low_ptr = ready_ptr.to(tl.pointer_type(tl.float16))[:, None, None]
    low_ptr += byte // 4 % GROUPS * 32 + byte // 2 % 2 * 8 + byte // (4 * GROUPS) * 2 + byte % 2
    tl.store(low_ptr, (e2m1_values(codes & 15) * factor).to(tl.float16))
    tl.store(low_ptr + 16, (e2m1_values(codes >> 4) * factor).to(tl.float16))


@triton.jit
def store_query(values, scales, ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Store encoded query rows as operands at ready_ptr `[ROWS]`; of NVFP4, even channels first."""
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
        scale = nvfp4_scales(scales, ROWS, BLOCK)
        codes = values.to(tl.int32)
        tl.store(pair_ptr, bf16_bits(e2m1_values(codes & 15) * scale))
        tl.store(pair_ptr + HALF, bf16_bits(e2m1_values(codes >> 4) * scale))


@triton.jit(
    do_not_specialize=["first_token", "topk", "weights_stride", "ready_weights_stride"],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "weights_ptr",
    ],
)  # fmt: skip
def _query_kernel(
    query_ptr, token_stride, weights_ptr, weights_stride, ready_ptr, ready_weights_ptr,
    ready_weights_stride, first_token, topk, positions_ptr, request_ids_ptr, request_slots_ptr,
    cos_ptr, sin_ptr, global_scale_ptr, RATIO: tl.constexpr, FORMAT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, LOG_DIM: tl.constexpr, OPERAND_BYTES: tl.constexpr,
    HAS_HADAMARD: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr, WEIGHT_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
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
        operand_ptr = ready_ptr + ready_row * (BLOCK * OPERAND_BYTES)
        weight_ptr = ready_weights_ptr + row * ready_weights_stride + head
        if FORMAT == "index_mxfp4":
            store_mxfp4_query(values, scales, operand_ptr, weight_ptr + BLOCK_HEADS, BLOCK_HEADS,
                              ROWS, BLOCK)  # fmt: skip
        else:
            store_query(values, scales, operand_ptr, FORMAT, ROWS, BLOCK)
        weight = tl.load(weights_ptr + token * weights_stride + head, mask=is_head, other=0.0)
        weight = weight.to(tl.float32) * WEIGHT_SCALE
        if FORMAT == "index_fp8":
            weight = weight * scales
        elif FORMAT == "index_mxfp4":
            _exponents, largest = head_exponents(scales)
            weight = weight * power_of_two(largest) * MXFP4_WEIGHT
        elif HAS_GLOBAL_SCALE:
            weight = weight * (global_scale * global_scale)
        tl.store(weight_ptr, weight)


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
def load_query(ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
               COUNT: tl.constexpr, BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """COUNT stored channels of ROWS heads from FIRST on, `[COUNT, ROWS]`."""
    at = tl.arange(0, ROWS)[None, :] * BLOCK + FIRST + tl.arange(0, COUNT)[:, None]
    if FORMAT == "index_fp8":
        query = fp8_operand(tl.load(ready_ptr + at), FP8_PRODUCTS)
    elif FORMAT == "index_mxfp4":
        query = tl.load(ready_ptr.to(tl.pointer_type(tl.float16)) + at)
        if INTERPRETED:
            query = query.to(tl.float32)
    elif FORMAT == "index_fp32":
        query = tl.load(ready_ptr.to(tl.pointer_type(tl.float32)) + at)
    else:
        query = bf16_operand(tl.load(ready_ptr.to(tl.pointer_type(tl.uint16)) + at))
    return query


@triton.jit
def load_queries(ready_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                 FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """The operands of a tile's products: of each half of NVFP4, or one."""
    PARTS: tl.constexpr = 2 if FORMAT == "index_nvfp4" else 1
    WIDTH: tl.constexpr = BLOCK // PARTS
    queries = ()
    for part in tl.static_range(PARTS):
        query = load_query(ready_ptr, FORMAT, ROWS, part * WIDTH, WIDTH, BLOCK, FP8_PRODUCTS)
        queries = queries + (query,)  # type: ignore[assignment]
    return queries


@triton.constexpr_function
def pages_of_tile(ENTRIES_PER_BLOCK, TILE):
    """Pages that a tile lies in if they are 1 or 2, else 0."""
    if ENTRIES_PER_BLOCK % TILE == 0:
        return 1
    return 2 if 2 * ENTRIES_PER_BLOCK == TILE else 0


@triton.jit
def load_pages(pages_ptr, tile, count, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Blocks of a tile's first and last page, or both times of each entry; -1 where there is none.

    The pages of the next tile are asked for a tile ahead, so that its keys needn't wait for them.
    """
    PAGES: tl.constexpr = pages_of_tile(ENTRIES_PER_BLOCK, TILE)
    entry = tile * TILE
    if PAGES == 0:
        entry += tl.arange(0, TILE)
    first = tl.load(pages_ptr + entry // ENTRIES_PER_BLOCK, mask=entry < count, other=-1)
    last = first
    if PAGES == 2:
        entry += ENTRIES_PER_BLOCK
        last = tl.load(pages_ptr + entry // ENTRIES_PER_BLOCK, mask=entry < count, other=-1)
    return first, last


@triton.jit
def tile_blocks(first, last, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """`[TILE]`: the block of each entry of a tile."""
    if pages_of_tile(ENTRIES_PER_BLOCK, TILE) == 2:
        blocks = tl.where(tl.arange(0, TILE) < ENTRIES_PER_BLOCK, first, last)
    else:
        blocks = first + tl.zeros((TILE,), tl.int32)
    return blocks


@triton.jit
def load_row_parts(row_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """`[TILE, BLOCK]`: COUNT elements from row_ptr `[TILE]` on, then zeros."""
    at = tl.arange(0, BLOCK)[None, :]
    if COUNT == BLOCK:
        values = tl.load(row_ptr[:, None] + at)
    else:
        values = tl.load(row_ptr[:, None] + at, mask=at < COUNT, other=0)
    return values


@triton.jit
def load_keys(key_ptr, FORMAT: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
              FP8_PRODUCTS: tl.constexpr):  # fmt: skip
    """Keys whose channels are whole bytes, `[TILE, BLOCK]`."""
    if FORMAT == "index_fp32":
        keys = load_row_parts(key_ptr.to(tl.pointer_type(tl.float32)), DIM, BLOCK)
    elif FORMAT == "index_bf16":
        keys = bf16_operand(load_row_parts(key_ptr.to(tl.pointer_type(tl.uint16)), DIM, BLOCK))
    elif INTERPRETED or not FP8_PRODUCTS:
        keys = fp8_operand(load_row_parts(key_ptr, DIM, BLOCK), FP8_PRODUCTS)
    else:
        # Loaded as numbers, they go from memory to the product without passing registers.
        keys = load_row_parts(key_ptr.to(tl.pointer_type(tl.float8e4nv)), DIM, BLOCK)
    return keys


@triton.jit
def nvfp4_products(key_ptr, key_scale_ptr, queries, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """`[TILE, heads]`: products of even channels and of odd ones."""
    pair = tl.arange(0, BLOCK // 2)[None, :]
    codes = load_row_parts(key_ptr, DIM // 2, BLOCK // 2).to(tl.int32)
    scale = tl.load(key_scale_ptr[:, None] + pair // 8, mask=pair < DIM // 2, other=0)
    scale = e4m3_values(scale)
    even, odd = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
    if not INTERPRETED:
        even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    products = tl.dot(even, queries[0])
    return tl.dot(odd, queries[1], products)


@triton.jit
def load_scale_bytes(key_scale_ptr, USED: tl.constexpr, GROUPS: tl.constexpr):
    """`[TILE, GROUPS, 1]`: USED scale bytes from key_scale_ptr `[TILE]` on, then those of 1."""
    group = tl.arange(0, GROUPS)[None, :, None]
    if USED == 4:
        # Whole words can be on their way while others are multiplied; bytes can't.
        words = tl.load(key_scale_ptr.to(tl.pointer_type(tl.int32)))[:, None, None]
        scales = (words >> (8 * group)) & 0xFF
    else:
        scale_ptr = key_scale_ptr[:, None, None] + group
        scales = tl.load(scale_ptr, mask=group < USED, other=127).to(tl.int32)
    return scales


@triton.jit
def code_tables(scales):
    """Upper bytes of FP16 for the magnitudes 0 to 1.5, and 2 to 6, times 2^(scale - MIDDLE_SCALE).

    Those of scales that don't fit are NaN, but for 0.
    """
    fits = (scales >= MIDDLE_SCALE - 13) & (scales <= MIDDLE_SCALE + 13)
    exponent = scales - MIDDLE_SCALE
    low = tl.where(fits, exponent * 0x04040400 + 0x3E3C3800, 0x7F7F7F00)
    high = tl.where(fits, exponent * 0x04040404 + 0x46444240, 0x7F7F7F7F)
    return low, high


@triton.jit
def code_half(words, low_table, high_table, INDEX: tl.constexpr):
    """FP16 bits of one of the 8 codes of words, as `e2m1_halves` finds them."""
    code = words >> (4 * INDEX)
    table = tl.where((code & 4) == 0, low_table, high_table)
    byte = (table >> (8 * (code & 3))) & 0x7F
    return (byte | ((code & 8) << 4)) << 8


@triton.jit
def e2m1_halves(words, low_table, high_table):
    """Words of 8 E2M1 codes to FP16 bits, 2 in a word: codes 0 and 2, 1 and 3, 4 and 6, 5 and 7.

    A permutation of the tables' bytes by 4 codes without their signs is 4 magnitudes; signs are
    brought to the same bytes, and bytes then to the upper halves of FP16.
    """
    if INTERPRETED:
        halves = ()
        for first in tl.static_range(4):
            FIRST: tl.constexpr = first // 2 * 4 + first % 2
            lower = code_half(words, low_table, high_table, FIRST)
            upper = code_half(words, low_table, high_table, FIRST + 2)
            halves = halves + (lower | (upper << 16),)  # type: ignore[assignment]
    else:
        halves = tl.inline_asm_elementwise(
            """{
            .reg .b32 codes, moved, signs, first, second;
            and.b32 codes, $4, 0x77777777;
            prmt.b32 first, $5, $6, codes;
            shr.u32 codes, codes, 16;
            prmt.b32 second, $5, $6, codes;
            shl.b32 moved, $4, 4;
            prmt.b32 signs, moved, $4, 0x5140;
            lop3.b32 first, signs, 0x80808080, first, 0xEA;
            prmt.b32 signs, moved, $4, 0x7362;
            lop3.b32 second, signs, 0x80808080, second, 0xEA;
            prmt.b32 $0, first, 0, 0x2404;
            prmt.b32 $1, first, 0, 0x3414;
            prmt.b32 $2, second, 0, 0x2404;
            prmt.b32 $3, second, 0, 0x3414;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r", [words, low_table, high_table],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return halves


@triton.jit
def split_halves(words):
    """`[..., 2]`: the lower and the upper half of words as FP16."""
    halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
    return halves.to(tl.float32) if INTERPRETED else halves


@triton.constexpr_function
def strips(TILE, WARPS):
    """Rows of a tile as a product takes them: 8 for each warp, and 8 more, 16 × WARPS at a time."""
    return (TILE // (16 * WARPS), 2, WARPS, 8) if TILE >= 16 * WARPS else (1, 1, 1, TILE)


@triton.jit
def mxfp4_operand(words, tables, BLOCK: tl.constexpr, TILE: tl.constexpr,
                  WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, BLOCK]` FP16: codes `[TILE, BLOCK / 8]`, 8 in a word, times their groups' scales.

    Rows and channels are in an order that leaves each where its thread loaded it: neighbours of a
    thread hold a quarter of a row each, and of a product's 16 channels every 4 of the 16 bytes.
    `entry_order` brings rows back; channels are stored alike in `store_mxfp4_query`.
    """
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    low_table, high_table = tables
    words = tl.reshape(words, (TILE, BLOCK // 32, 4))
    first, second, third, fourth = e2m1_halves(words, low_table, high_table)
    lower = tl.join(split_halves(first), split_halves(second))
    upper = tl.join(split_halves(third), split_halves(fourth))
    codes = tl.reshape(tl.join(lower, upper), (TILE, 4, BLOCK // 32, 2, 2, 2))
    channels = tl.permute(codes, (0, 2, 4, 5, 1, 3))
    rows = tl.reshape(channels, (SHAPE[0], SHAPE[1], SHAPE[2], SHAPE[3], BLOCK))
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), (TILE, BLOCK))


@triton.jit
def entry_order(score, TILE: tl.constexpr, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Scores `[TILE, TOKENS]` of `mxfp4_operand`'s rows in the order of entries."""
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    rows = tl.reshape(score, (SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[3], TOKENS))
    return tl.reshape(tl.permute(rows, (0, 2, 1, 3, 4)), (TILE, TOKENS))


@triton.jit
def mxfp4_products(key_ptr, key_scale_ptr, query, DIM: tl.constexpr, BLOCK: tl.constexpr,
                   TILE: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, ROWS]`: products of keys whose scales fit their operands; of others, NaN."""
    words = load_row_parts(key_ptr.to(tl.pointer_type(tl.int32)), DIM // 8, BLOCK // 8)
    scales = load_scale_bytes(key_scale_ptr, DIM // 32, BLOCK // 32)
    return tl.dot(mxfp4_operand(words, code_tables(scales), BLOCK, TILE, WARPS), query)


@triton.jit
def mxfp4_group_products(key_ptr, key_scale_ptr, query, rest_ptr, BLOCK_HEADS: tl.constexpr,
                         DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
                         WARPS: tl.constexpr):  # fmt: skip
    """`[TILE, SOME_HEADS]`: those of any keys, the sum of groups' products times their scales."""
    SHAPE: tl.constexpr = strips(TILE, WARPS)
    words = load_row_parts(key_ptr.to(tl.pointer_type(tl.int32)), DIM // 8, BLOCK // 8)
    products = tl.zeros((TILE, SOME_HEADS), tl.float32)
    for group in tl.range(DIM // 32, num_stages=1):
        is_group = tl.arange(0, BLOCK // 32)[None, :, None] == group
        low_table, high_table = code_tables(tl.where(is_group, MIDDLE_SCALE, 0))
        tables = (tl.where(is_group, low_table, 0), tl.where(is_group, high_table, 0))
        part = tl.dot(mxfp4_operand(words, tables, BLOCK, TILE, WARPS), query)
        part *= tl.load(rest_ptr + group * BLOCK_HEADS)[None, :]
        scale = ue8m0_values(tl.load(key_scale_ptr + group)) * MIDDLE_FACTOR
        scale = tl.permute(tl.reshape(scale, SHAPE), (0, 2, 1, 3))
        products += part * tl.reshape(scale, (TILE,))[:, None]
    return products


@triton.jit
def sum_heads(products, weights, FORMAT: tl.constexpr, HEADS: tl.constexpr,
              BLOCK_HEADS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """`[TILE, TOKENS]`: sum_h w_h ReLU(q_h · k) of products `[TILE, TOKENS × BLOCK_HEADS]`.

    NaN stays NaN. For MXFP4, whose products are finite, it is twice that.
    """
    if FORMAT == "index_mxfp4":
        positive = products + tl.abs(products)  # twice as many a clock as maxima
    else:
        positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    weighted = tl.reshape(positive * weights[None, :], (TILE, TOKENS, BLOCK_HEADS))
    if HEADS < BLOCK_HEADS:  # an infinite key makes NaN of a head that isn't there
        is_head = tl.arange(0, BLOCK_HEADS)[None, None, :] < HEADS
        weighted = tl.where(is_head, weighted, 0.0)
    return tl.sum(weighted, axis=2)


@triton.jit
def key_pointers(memory, entry, blocks, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
                 ENTRIES_PER_BLOCK: tl.constexpr):  # fmt: skip
    """`[TILE]` pointers to the entries' data and scales.

    The pages of a request are whole: what lies beyond its entries is read and not stored.
    """
    data_ptr, scale_ptr, page_stride = memory
    page_start = tl.maximum(blocks, 0).to(tl.int64) * page_stride
    page_row = entry % ENTRIES_PER_BLOCK
    data_ptr += page_start + page_row * DATA_BYTES
    return data_ptr, scale_ptr + (page_start + page_row * SCALE_BYTES)


@triton.jit
def score_tokens(
    row, slot, counts, scratch, memory, block_table, FORMAT: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Score every so many tiles of a request's entries for TOKENS tokens of it, from `row` on.

    counts `[TOKENS]` is how many entries each token is scored for.
    """
    scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, ready_weights_stride = scratch
    block_table_ptr, table_stride = block_table
    row = row.to(tl.int64)
    scores_ptr += row * scores_stride + tl.arange(0, TOKENS)[None, :] * scores_stride
    ready_ptr += row * (BLOCK_HEADS * BLOCK * OPERAND_BYTES)
    ready_weights_ptr += row * ready_weights_stride
    pages_ptr = block_table_ptr + slot * table_stride
    ROWS: tl.constexpr = TOKENS * BLOCK_HEADS
    queries = load_queries(ready_ptr, FORMAT, ROWS, BLOCK, FP8_PRODUCTS)
    head = tl.arange(0, ROWS)
    weight_ptr = ready_weights_ptr + head // BLOCK_HEADS * ready_weights_stride + head % BLOCK_HEADS
    weights = tl.load(weight_ptr)
    rest_ptr = weight_ptr + BLOCK_HEADS
    if FORMAT == "index_mxfp4":
        for group in tl.static_range(BLOCK // 32):
            rest = tl.load(rest_ptr + group * BLOCK_HEADS)
            weights = tl.where(rest < 1.0, float("nan"), weights)
    count = tl.max(counts, axis=0)
    is_left = tl.zeros((TILE, TOKENS), tl.int32)
    first_tile, step = tl.program_id(1), tl.num_programs(1)
    first, last = load_pages(pages_ptr, first_tile, count, ENTRIES_PER_BLOCK, TILE)
    for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                         loop_bound(step), num_stages=STAGES):  # fmt: skip
        blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
        first, last = load_pages(pages_ptr, tile + step, count, ENTRIES_PER_BLOCK, TILE)
        entry = tile * TILE + tl.arange(0, TILE)
        key_ptr, key_scale_ptr = key_pointers(memory, entry, blocks, DATA_BYTES, SCALE_BYTES,
                                              ENTRIES_PER_BLOCK)  # fmt: skip
        if FORMAT == "index_mxfp4":
            products = mxfp4_products(key_ptr, key_scale_ptr, queries[0], DIM, BLOCK, TILE, WARPS)
        elif FORMAT == "index_nvfp4":
            products = nvfp4_products(key_ptr, key_scale_ptr, queries, DIM, BLOCK)
        else:
            keys = load_keys(key_ptr, FORMAT, DIM, BLOCK, FP8_PRODUCTS)
            products = tl.dot(keys, queries[0], input_precision="ieee")
        score = sum_heads(products, weights, FORMAT, HEADS, BLOCK_HEADS, TOKENS, TILE)
        if FORMAT == "index_fp8":
            score *= tl.load(key_scale_ptr.to(tl.pointer_type(tl.float32)))[:, None]
        elif FORMAT == "index_mxfp4":
            score = entry_order(score, TILE, TOKENS, WARPS)
        score = tl.where((blocks >= 0)[:, None], score, 0.0)
        is_stored = entry[:, None] < counts[None, :]
        tl.store(scores_ptr + entry[:, None], score, mask=is_stored)
        if FORMAT == "index_mxfp4":
            is_left |= ((score != score) & is_stored).to(tl.int32)
    if FORMAT == "index_mxfp4":
        if tl.max(tl.max(is_left, axis=1), axis=0) != 0:
            tl.debug_barrier()
            ready = (ready_ptr, ready_weights_ptr, ready_weights_stride)
            for tile in tl.range(loop_bound(first_tile), loop_bound(tl.cdiv(count, TILE)),
                                 loop_bound(step), num_stages=1):  # fmt: skip
                score_left(
                    tile, counts, scores_ptr, ready, memory, pages_ptr, BLOCK_HEADS, DIM, BLOCK,
                    DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, TILE, TOKENS, WARPS,
                )  # fmt: skip


@triton.jit
def score_left(
    tile, counts, scores_ptr, ready, memory, pages_ptr, BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Score anew the MXFP4 keys of a tile whose scores are NaN, whatever the groups' scales."""
    ready_ptr, ready_weights_ptr, ready_weights_stride = ready
    entry = tile * TILE + tl.arange(0, TILE)
    scores_ptr += entry[:, None]
    old = tl.load(scores_ptr, mask=entry[:, None] < counts[None, :], other=0.0)
    if tl.max(tl.max((old != old).to(tl.int32), axis=1), axis=0) != 0:
        first, last = load_pages(pages_ptr, tile, tl.max(counts, axis=0), ENTRIES_PER_BLOCK, TILE)
        blocks = tile_blocks(first, last, ENTRIES_PER_BLOCK, TILE)
        key_ptr, key_scale_ptr = key_pointers(memory, entry, blocks, DATA_BYTES, SCALE_BYTES,
                                              ENTRIES_PER_BLOCK)  # fmt: skip
        score = tl.zeros((TILE, TOKENS), tl.float32)
        for start in tl.range(0, TOKENS * BLOCK_HEADS, SOME_HEADS, num_stages=1):
            token = start // BLOCK_HEADS
            query = load_query(ready_ptr + start * (2 * BLOCK), "index_mxfp4", SOME_HEADS, 0, BLOCK,
                               BLOCK, False)  # fmt: skip
            weight_ptr = ready_weights_ptr + token * ready_weights_stride + start % BLOCK_HEADS
            weight_ptr += tl.arange(0, SOME_HEADS)
            products = mxfp4_group_products(key_ptr, key_scale_ptr, query, weight_ptr + BLOCK_HEADS,
                                            BLOCK_HEADS, DIM, BLOCK, TILE, WARPS)  # fmt: skip
            part = sum_heads(products, tl.load(weight_ptr), "index_mxfp4", SOME_HEADS, SOME_HEADS,
                             1, TILE)  # fmt: skip
            score += tl.where(tl.arange(0, TOKENS)[None, :] == token, part, 0.0)
        tl.store(scores_ptr, entry_order(score, TILE, TOKENS, WARPS), mask=old != old)


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "topk", "scores_stride", "table_stride",
        "ready_weights_stride",
    ],
    do_not_specialize_on_alignment=[
        "positions_ptr", "request_ids_ptr", "request_slots_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _score_kernel(
    scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, ready_weights_stride, data_ptr,
    scale_ptr, page_stride, first_token, num_tokens, topk, positions_ptr, request_ids_ptr,
    request_slots_ptr, block_table_ptr, table_stride, RATIO: tl.constexpr, FORMAT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND_BYTES: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FP8_PRODUCTS: tl.constexpr, TILE: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Score a part of the entries that TOKENS tokens see: together, if they are of one request."""
    start = tl.program_id(0) * TOKENS
    row = start + tl.arange(0, TOKENS)
    token = first_token + tl.minimum(row, num_tokens - 1)
    slots, counts = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    counts = tl.where((row < num_tokens) & (counts > topk), counts, 0)
    slot = tl.max(slots, axis=0)
    scratch = (scores_ptr, scores_stride, ready_ptr, ready_weights_ptr, ready_weights_stride)
    memory = (data_ptr, scale_ptr, page_stride)
    block_table = (block_table_ptr, table_stride)
    if tl.max(counts, axis=0) > 0:
        if (tl.min(slots, axis=0) == slot) & (start + TOKENS <= num_tokens):
            score_tokens(
                start, slot, counts, scratch, memory, block_table, FORMAT, HEADS, BLOCK_HEADS, DIM,
                BLOCK, OPERAND_BYTES, DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, FP8_PRODUCTS,
                TILE, TOKENS, STAGES, WARPS,
            )  # fmt: skip
        elif TOKENS > 1:
            for idx in range(TOKENS):
                count = tl.max(tl.where(row == start + idx, counts, 0), axis=0)
                if count > 0:
                    slot = tl.max(tl.where(row == start + idx, slots, -1), axis=0)
                    score_tokens(
                        start + idx, slot, count + tl.zeros((1,), tl.int32), scratch, memory,
                        block_table, FORMAT, HEADS, BLOCK_HEADS, DIM, BLOCK, OPERAND_BYTES,
                        DATA_BYTES, SCALE_BYTES, ENTRIES_PER_BLOCK, FP8_PRODUCTS, TILE, 1, STAGES,
                        WARPS,
                    )  # fmt: skip


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
    chosen = empty_selection(num_tokens, topk, device)
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
        choose_best(chosen, scratch.scores, scratch.group_tops, tokens, **span, **sizes)
    return chosen


def empty_selection(num_tokens: int, topk: int, device: torch.device) -> Selection:
    """Room for what `choose_best` writes."""
    return Selection(
        torch.empty(num_tokens, topk, dtype=torch.int32, device=device),
        torch.empty(num_tokens, topk, dtype=torch.int64, device=device),
        torch.empty(num_tokens, dtype=torch.int32, device=device),
    )


def index_scratch(
    query: Tensor,
    memory: LayerMemory,
    *,
    topk: int,
    max_entries: int,
    num_tokens: int | None = None,
) -> IndexScratch:
    """The layer's workspace, cut for queries of that shape, or for another number of them."""
    num_queries, num_heads, dim = query.shape
    row = index_row_bytes(
        memory.layout.index_format,
        num_heads=num_heads, dim=dim, topk=topk, max_entries=max_entries,
    )  # fmt: skip
    return cut_index_scratch(memory.index_scratch, row, num_tokens=num_tokens or num_queries)


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
    cut = score_cut(keys.format.name, tokens)
    num_groups = triton.cdiv(num_tokens, cut.tokens)
    splits = min(triton.cdiv(max_entries, cut.tile), max(1, cut.programs // num_groups))
    _score_kernel[(num_groups, splits)](
        scores_ptr=scratch.scores, scores_stride=scratch.scores.stride(0),
        data_ptr=keys.data, scale_ptr=keys.scales, page_stride=keys.data.stride(0),
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        DATA_BYTES=keys.format.data_bytes, SCALE_BYTES=keys.format.scale_bytes,
        ENTRIES_PER_BLOCK=keys.rows_per_page, FP8_PRODUCTS=FP8_PRODUCTS, num_tokens=num_tokens,
        TILE=cut.tile, TOKENS=cut.tokens, STAGES=cut.stages, WARPS=cut.warps,
        num_warps=cut.warps,
        **_shared_arguments(scratch, memory, tokens, num_heads, first_token=first_token, topk=topk),
    )  # fmt: skip


def score_cut(format_name: str, tokens: TokenMap) -> ScoreCut:
    """What scores of a forward are cut into: one with a long chunk, or any other."""
    cut = SCORE_CUTS[format_name]
    return CHUNK_CUTS.get(format_name, cut) if len(tokens.chunk_ids) else cut


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
        "ready_weights_stride": scratch.weights.stride(0),
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
