"""Device helpers of the kernels: the arithmetic of stored bytes, as the reference defines it.

Every function here repeats one of `kernels.reference.arithmetic` or `codec` in operations that
round alike on a GPU, under Triton's interpreter and in PyTorch. They need `enable_fp_fusion` off.
Conversions to BF16 and E4M3 go over the integer bits, for the interpreter's own are wrong.
"""

import triton
import triton.language as tl

EXP_FLOOR = tl.constexpr(-87.0)
ROUND_TO_WHOLE = tl.constexpr(12582912.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)
E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)
MXFP4_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-126)
NVFP4_SCALE_FLOOR = tl.constexpr(2.0**-9)
BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def bf16_bits(x):
    """fp32 to the bits of BF16, as uint16: nearest even, every NaN 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def round_to_bf16(x):
    """fp32 rounded to the nearest BF16 value, still fp32."""
    return (bf16_bits(x).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def exp_of_nonpositive(x):
    """exp(x) for x <= 0; what is below -87 counts as -87, NaN stays NaN."""
    x = tl.maximum(x, EXP_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    shifted = x * LOG2_E + ROUND_TO_WHOLE
    n = shifted - ROUND_TO_WHOLE
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    y = r * 0.001394116086885333 + 0.008375167846679688
    y = y * r + 0.04166635125875473
    y = y * r + 0.16666415333747864
    y = y * r + 0.5
    y = y * r + 1.0
    y = y * r + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return y * power


@triton.jit
def rms_factor(x, DIM: tl.constexpr, eps):
    """1 / sqrt(mean(x²) + eps) of a row `[BLOCK]`, zero beyond DIM: fp64, rounded once."""
    largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=0)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.int64)
    magic = ((2 * exponent + 12 + 1023) << 52) | (1 << 51)
    magic = magic.to(tl.float64, bitcast=True)
    wide = x.to(tl.float64)
    total = tl.sum((wide * wide + magic) - magic, axis=0)
    return (1.0 / tl.sqrt(total / DIM + eps)).to(tl.float32)


@triton.jit
def load_rope(cos_ptr, sin_ptr, position, DIM: tl.constexpr, ROPE: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """cos and sin `[BLOCK / 2]` of a position; 1 and 0 where a pair is not rotated."""
    pair = tl.arange(0, BLOCK // 2) - (DIM - ROPE) // 2
    is_turned = (pair >= 0) & (pair < ROPE // 2)
    address = position.to(tl.int64) * (ROPE // 2) + pair
    cos = tl.load(cos_ptr + address, mask=is_turned, other=1.0)
    return cos, tl.load(sin_ptr + address, mask=is_turned, other=0.0)


@triton.jit
def rotate_tail(x, cos, sin, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """RoPE on the trailing ROPE of DIM channels of a row `[BLOCK]`."""
    pair = tl.arange(0, BLOCK // 2) - (DIM - ROPE) // 2
    is_turned = (pair >= 0) & (pair < ROPE // 2)
    even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    new_even = tl.where(is_turned, even * cos - odd * sin, even)
    new_odd = tl.where(is_turned, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(new_even, new_odd), (BLOCK,))


@triton.jit
def hadamard(x, DIM: tl.constexpr, LOG_DIM: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of a row `[DIM]`: strides 1, 2, 4, ..."""
    for step in tl.static_range(LOG_DIM):
        pairs = tl.permute(tl.reshape(x, (DIM // (2 << step), 2, 1 << step)), (0, 2, 1))
        low, high = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (DIM,))
    return x * (DIM**-0.5)


@triton.jit
def e4m3_code(x):
    """fp32 to E4M3 codes, as uint8: nearest even, saturating; NaN is 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    wide = magnitude.to(tl.int32, bitcast=True)
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the codes are multiples of 2^-9; adding 1.5 × 2^23 rounds to whole ones.
    subnormal = (magnitude * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """A positive finite E4M3 code, int32, to fp32."""
    normal = ((code << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e2m1_code(x):
    """fp32 to E2M1 codes, as int32: nearest, ties to even, saturating; NaN is +6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x != x, 7, code | sign)


@triton.jit
def ceil_log2_over_448(amax):
    """ceil(log2(amax / 448)), exactly; 448 = 1.75 × 2^8."""
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def ceil_log2_over_6(amax):
    """ceil(log2(amax / 6)), exactly; 6 = 1.5 × 2^2."""
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 - 2 + ((bits & 0x7FFFFF) > 0x400000).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def group_amax(x, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """`[BLOCK / GROUP, GROUP]` values and `[BLOCK / GROUP]` largest magnitudes, NaN left out."""
    groups = tl.reshape(x, (BLOCK // GROUP, GROUP))
    amax = tl.max(tl.where(groups == groups, tl.abs(groups), 0.0), axis=1)
    return groups, tl.minimum(amax, BF16_MAX)


@triton.jit
def store_row(x, data_ptr, scale_ptr, is_written, FORMAT: tl.constexpr, DIM: tl.constexpr,
              ROPE: tl.constexpr, BLOCK: tl.constexpr, global_scale):  # fmt: skip
    """Encode a row `[BLOCK]` fp32 and store its two records; nothing if not `is_written`.

    data_ptr and scale_ptr are uint8 pointers to the row's records. FORMAT is a row format's name,
    prefixed with kv_ or index_.
    """
    channel = tl.arange(0, BLOCK)
    NOPE: tl.constexpr = DIM - ROPE
    if FORMAT == "kv_fp32" or FORMAT == "index_fp32":
        canonical = tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + channel, canonical,
                 mask=is_written & (channel < DIM))  # fmt: skip
    elif FORMAT == "kv_bf16" or FORMAT == "index_bf16":
        tl.store(data_ptr.to(tl.pointer_type(tl.uint16)) + channel, bf16_bits(x),
                 mask=is_written & (channel < DIM))  # fmt: skip
    elif FORMAT == "kv_fp8" or FORMAT == "kv_fp8_entry_scale":
        bits = bf16_bits(x)
        rounded = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        is_nope = channel < NOPE
        rope_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.uint16))
        tl.store(rope_ptr + channel - NOPE, bits,
                 mask=is_written & (channel >= NOPE) & (channel < DIM))  # fmt: skip
        if FORMAT == "kv_fp8":
            groups, amax = group_amax(rounded, 64, BLOCK)
            exponent = ceil_log2_over_448(tl.maximum(amax, AMAX_FLOOR))
            scaled = groups * power_of_two(-exponent)[:, None]
            group = tl.arange(0, BLOCK // 64)
            # The records' last bytes are padding and always 0.
            SCALES: tl.constexpr = (NOPE // 64 + 7) // 8 * 8
            byte = tl.where(group < NOPE // 64, exponent + 127, 0).to(tl.uint8)
            tl.store(scale_ptr + group, byte, mask=is_written & (group < SCALES))
            if SCALES > BLOCK // 64:
                rest = tl.arange(0, 8)
                tl.store(scale_ptr + rest, tl.zeros((8,), tl.uint8),
                         mask=is_written & (rest >= BLOCK // 64))  # fmt: skip
            code = tl.reshape(e4m3_code(scaled), (BLOCK,))
        else:
            safe = tl.where(is_nope & (rounded == rounded), tl.abs(rounded), 0.0)
            amax = tl.minimum(tl.max(safe, axis=0), BF16_MAX)
            scale = tl.div_rn(tl.maximum(amax, AMAX_FLOOR), E4M3_MAX)
            tl.store(scale_ptr.to(tl.pointer_type(tl.float32)), scale, mask=is_written)
            code = e4m3_code(tl.div_rn(rounded, tl.broadcast_to(scale, (BLOCK,))))
        tl.store(data_ptr + channel, code, mask=is_written & is_nope)
    elif FORMAT == "index_fp8":
        rounded = round_to_bf16(x)
        amax = tl.max(tl.where(rounded == rounded, tl.abs(rounded), 0.0), axis=0)
        amax = tl.maximum(tl.minimum(amax, BF16_MAX), AMAX_FLOOR)
        exponent = ceil_log2_over_448(amax)
        tl.store(scale_ptr.to(tl.pointer_type(tl.float32)), power_of_two(exponent),
                 mask=is_written)  # fmt: skip
        code = e4m3_code(rounded * power_of_two(-exponent))
        tl.store(data_ptr + channel, code, mask=is_written & (channel < DIM))
    else:
        GROUP: tl.constexpr = 32 if FORMAT == "index_mxfp4" else 16
        rounded = round_to_bf16(x)
        groups, amax = group_amax(rounded, GROUP, BLOCK)
        group = tl.arange(0, BLOCK // GROUP)
        if FORMAT == "index_mxfp4":
            exponent = ceil_log2_over_6(tl.maximum(amax, MXFP4_AMAX_FLOOR))
            stored = (exponent + 127).to(tl.uint8)
            scaled = groups * power_of_two(-exponent)[:, None]
        else:
            limit = tl.broadcast_to(6.0 * global_scale, (BLOCK // GROUP,))
            stored = e4m3_code(tl.maximum(tl.div_rn(amax, limit), NVFP4_SCALE_FLOOR))
            scale = e4m3_value(stored.to(tl.int32)) * global_scale
            scaled = tl.div_rn(groups, tl.broadcast_to(scale[:, None], (BLOCK // GROUP, GROUP)))
        tl.store(scale_ptr + group, stored, mask=is_written & (group < DIM // GROUP))
        low, high = tl.split(tl.reshape(e2m1_code(scaled), (BLOCK // 2, 2)))
        pair = tl.arange(0, BLOCK // 2)
        tl.store(data_ptr + pair, (low | (high << 4)).to(tl.uint8),
                 mask=is_written & (pair < DIM // 2))  # fmt: skip
