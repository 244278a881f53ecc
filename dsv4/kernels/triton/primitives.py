"""Device helpers of the kernels: the arithmetic of stored bytes, as the reference defines it.

Every function here repeats one of `kernels.reference.arithmetic` or `codec`. Its operations
round alike on a GPU, under Triton's interpreter and in PyTorch, if `enable_fp_fusion` is off.
A tile is `[ROWS, BLOCK]`: rows with their channels, padded to a power of two with zeros.

A GPU converts to BF16 and E4M3 by its own instructions. The interpreter's conversions are wrong,
so integer operations on the bits replace them there, and for E4M3 on GPUs before sm_89.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import current_target

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
EARLY_ARCH = tl.constexpr(90)  # from there on a launch may begin beside the one before
EXPONENT_FLOOR = tl.constexpr(-125.0)
ROUND_TO_WHOLE = tl.constexpr(12582912.0)
LOG2_E = tl.constexpr(1.4426950408889634)
E4M3_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)
MXFP4_AMAX_FLOOR = tl.constexpr(6.0 * 2.0**-126)
NVFP4_SCALE_FLOOR = tl.constexpr(2.0**-9)
BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.constexpr_function
def padded(count):
    """Round up to a power of two. Other packages replace Triton's own function by a plain one."""
    return 1 << (count - 1).bit_length()


@triton.constexpr_function
def has_instructions_of(arch):
    """Whether kernels are compiled for that architecture or a later one, such as 90 for sm_90."""
    return not INTERPRETED and current_target().arch >= arch


@triton.constexpr_function
def halvings(count):
    """Steps of `fold_pairs` that leave one of count values."""
    return (count - 1).bit_length()


@triton.jit
def wait_for_launch_before(STARTS_NEXT: tl.constexpr):
    """Wait for the launch before, which may still run beside this one.

    Until then a kernel may read the plan, the block table and NVFP4's scale. They are there before
    `rope.make_rope`, and its launch begins and ends beside no other. It may read nothing that a
    later kernel writes. STARTS_NEXT lets the next launch begin beside this one.
    """
    if has_instructions_of(EARLY_ARCH):
        if STARTS_NEXT:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def loop_bound(x):
    """An integer as the bound of a loop; the interpreter needs a Python int."""
    if INTERPRETED:
        return (x + tl.zeros((1,), tl.int32)).handle.data.item()
    else:
        return x


@triton.jit
def bf16_bits(x):
    """Bits of fp32 rounded to BF16, as uint16: nearest even, every NaN 0x7FFF."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FFF, rounded).to(tl.uint16)
    else:
        rounded = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x],
                                            dtype=tl.uint16, is_pure=True, pack=2)  # fmt: skip
    return rounded


@triton.jit
def fp32_bits(x):
    """Bits of fp32, as int32; every NaN is 0x7FC00000."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def bf16_value(bits):
    """fp32 value of the bits of BF16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """fp32 values of BF16 or fp32."""
    if x.dtype == tl.bfloat16 and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r",
            [x.to(tl.uint16, bitcast=True)], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def round_to_bf16(x):
    """fp32 rounded to the nearest BF16 value, still fp32."""
    if INTERPRETED:
        rounded = bf16_value(bf16_bits(x))
    else:
        rounded = tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xFFFF0000;
            }""",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return rounded


@triton.jit
def exp_of_nonpositive(x):
    """exp(x) for x <= 0, at least 2^-125; undefined for NaN."""
    exponent = tl.maximum(x * LOG2_E, EXPONENT_FLOOR)
    shifted = exponent + ROUND_TO_WHOLE
    f = exponent - (shifted - ROUND_TO_WHOLE)
    y = f * 0.0013269406044855714 + 0.009671294130384922
    y = y * f + 0.0555071122944355
    y = y * f + 0.24022246897220612
    y = y * f + 0.6931470036506653
    y = y * f + 1.0
    bits = y.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nan_unless_finite(x, y):
    """y where x is finite, else NaN."""
    return tl.where(tl.abs(x) < float("inf"), y, float("nan"))


@triton.jit
def magnitude(x):
    """|x| for a maximum that ignores NaN, as a GPU's maximum does by itself."""
    x = tl.abs(x)
    if INTERPRETED:
        x = tl.where(x == x, x, 0.0)
    return x


@triton.jit
def mean_of_squares(x, DIM: tl.constexpr):
    """Mean of x² of a tile's rows, `[ROWS]` fp64: the same number in any order of addition."""
    largest = tl.maximum(tl.max(magnitude(x), axis=1), 0.0)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.int64)
    # Adding it drops all bits of a square below 2^(2 × exponent - 40).
    magic = ((2 * exponent + 12 + 1023) << 52) | (1 << 51)
    magic = magic.to(tl.float64, bitcast=True)[:, None]
    wide = x.to(tl.float64)
    # A product of two fp32 numbers is exact in fp64, so that fma rounds as two operations do.
    total = tl.sum(tl.fma(wide, wide, magic) - magic, axis=1)
    return total * (1.0 / DIM) if DIM & (DIM - 1) == 0 else total / DIM


@triton.jit
def fold_pairs(x, STEPS: tl.constexpr):
    """Add neighbours of the last axis of `[ROWS, N]`, STEPS times: `[ROWS, N >> STEPS]`."""
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = even + odd
    return x


@triton.jit
def query_factor(squares, EPS: tl.constexpr, DIM: tl.constexpr):
    """The factor of a query's norm, by the sum of its squares; 1 where EPS is below 0."""
    if EPS < 0:
        factor = tl.where(squares == squares, 1.0, 1.0)
    else:
        factor = tl.div_rn(1.0, tl.sqrt_rn(squares * (1.0 / DIM) + EPS))
    return factor


@triton.jit
def reciprocal_root(x):
    """1 / sqrt(x) of fp64 `[ROWS]`, in fp64, rounded once to fp32.

    A refined estimate is less than 2^-50 off. It rounds as the exact operations do, unless it
    lies within 2^-46 of the middle between two fp32 numbers. Then, and for numbers out of fp32's
    range, the exact operations run.
    """
    estimate = tl.rsqrt(x.to(tl.float32)).to(tl.float64)
    error = 1.0 - (x * estimate) * estimate
    refined = estimate + estimate * (error * (0.5 + 0.375 * error))
    below_fp32 = refined.to(tl.int64, bitcast=True) & 0x1FFFFFFF
    is_near_middle = tl.abs(below_fp32 - 0x10000000) < 64
    is_hard = is_near_middle | ~((x > 1e-30) & (x < 1e30))
    if tl.max(is_hard.to(tl.int32), axis=0) > 0:
        refined = 1.0 / tl.sqrt(x)
    return refined.to(tl.float32)


@triton.jit
def load_global_scale(global_scale_ptr, HAS_GLOBAL_SCALE: tl.constexpr):
    """Load NVFP4's global scale of index keys; 1 where there is none."""
    scale = 1.0
    if HAS_GLOBAL_SCALE:
        scale = tl.load(global_scale_ptr)
    return scale


@triton.jit
def load_norm(norm_ptr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load a norm's weight as a tile of equal rows, so that each thread loads what it needs."""
    channel = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    return tl.load(norm_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)


@triton.jit
def load_rope(rope, row, is_wanted, DIM: tl.constexpr, ROPE: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Load cos, sin `[ROWS, BLOCK / 2]` of RoPE rows; 1, 0 where a pair isn't rotated."""
    cos_ptr, sin_ptr = rope
    pair = tl.arange(0, BLOCK // 2)[None, :] - (DIM - ROPE) // 2
    mask = (pair >= 0) & (pair < ROPE // 2) & is_wanted[:, None]
    address = row.to(tl.int64)[:, None] * (ROPE // 2) + pair
    cos = tl.load(cos_ptr + address, mask=mask, other=1.0)
    return cos, tl.load(sin_ptr + address, mask=mask, other=0.0)


@triton.jit
def load_pairs(x_ptr, norm_ptr, rope, row, is_wanted, ROW: tl.constexpr):
    """Load the operands of `rotate_pairs` for rows at x_ptr `[ROWS]`, each `[ROWS, ROPE / 2]`.

    They are the even and the odd ones of the trailing ROPE channels, their norm weights, cos and
    sin.
    """
    cos_ptr, sin_ptr = rope
    pair = tl.arange(0, padded(ROW.ROPE // 2))[None, :]
    mask = is_wanted[:, None] & (pair < ROW.ROPE // 2)
    channel = ROW.DIM - ROW.ROPE + 2 * pair
    even = tl.load(x_ptr[:, None] + channel, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr[:, None] + channel + 1, mask=mask, other=0.0).to(tl.float32)
    even_weight = tl.load(norm_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    odd_weight = tl.load(norm_ptr + channel + 1, mask=mask, other=0.0).to(tl.float32)
    address = row.to(tl.int64)[:, None] * (ROW.ROPE // 2) + pair
    cos = tl.load(cos_ptr + address, mask=mask, other=1.0)
    sin = tl.load(sin_ptr + address, mask=mask, other=0.0)
    return even, odd, even_weight, odd_weight, cos, sin


@triton.jit
def rotate_pairs(pairs, factor):
    """Norm rows by `factor` `[ROWS]` and rotate them; even and odd channels."""
    even, odd, even_weight, odd_weight, cos, sin = pairs
    even = (even * factor[:, None]) * even_weight
    odd = (odd * factor[:, None]) * odd_weight
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def store_rotated(even, odd, data_ptr, is_written, ROW: tl.constexpr):
    """Store rotated channels in the rows' records at data_ptr `[ROWS]`."""
    NOPE: tl.constexpr = ROW.DIM - ROW.ROPE
    pair = tl.arange(0, padded(ROW.ROPE // 2))[None, :]
    mask = is_written[:, None] & (pair < ROW.ROPE // 2)  # [ROWS, ROPE / 2]
    if ROW.FORMAT == "kv_fp32":
        rope_ptr = (data_ptr + 4 * NOPE).to(tl.pointer_type(tl.int32))[:, None] + 2 * pair
        tl.store(rope_ptr, fp32_bits(even), mask=mask)
        tl.store(rope_ptr + 1, fp32_bits(odd), mask=mask)
    else:
        FIRST_BYTE: tl.constexpr = 2 * NOPE if ROW.FORMAT == "kv_bf16" else NOPE
        rope_ptr = (data_ptr + FIRST_BYTE).to(tl.pointer_type(tl.int32))[:, None] + pair
        both = bf16_bits(even).to(tl.int32) | (bf16_bits(odd).to(tl.int32) << 16)
        tl.store(rope_ptr, both, mask=mask)


@triton.jit
def rotate_tail(x, cos, sin, ROWS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Rotate the trailing ROPE of DIM channels of a tile."""
    pair = tl.arange(0, BLOCK // 2)[None, :] - (DIM - ROPE) // 2
    is_rotated = (pair >= 0) & (pair < ROPE // 2)
    even, odd = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))  # [ROWS, BLOCK / 2]
    new_even = tl.where(is_rotated, even * cos - odd * sin, even)
    new_odd = tl.where(is_rotated, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(new_even, new_odd), (ROWS, BLOCK))


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG_DIM: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of a tile's rows: strides 1, 2, 4, ..."""
    is_low = tl.arange(0, 2)[None, None, :, None] == 0
    for step in tl.static_range(LOG_DIM):
        pairs = tl.reshape(x, (ROWS, DIM // (2 << step), 2, 1 << step))
        sums = tl.sum(pairs, axis=2)[:, :, None, :]
        differences = tl.sum(tl.where(is_low, pairs, -pairs), axis=2)[:, :, None, :]
        x = tl.reshape(tl.where(is_low, sums, differences), (ROWS, DIM))
    return x * (DIM**-0.5)


@triton.jit
def e4m3_code(x):
    """E4M3 codes of fp32, as uint8: nearest even, saturating; NaN is 0x7F."""
    if not has_instructions_of(89):
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
        wide = magnitude.to(tl.int32, bitcast=True)
        normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2^-6 the codes are multiples of 2^-9; adding 1.5 × 2^23 rounds to whole ones.
        subnormal = (magnitude * 512.0 + ROUND_TO_WHOLE).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(magnitude < 0.015625, subnormal, normal) | ((bits >> 24) & 0x80)
        code = tl.where(x != x, 0x7F, code).to(tl.uint8)
    else:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return code


@triton.jit
def e2m1_code(x):
    """E2M1 codes of fp32, as int32: nearest, ties to even, saturating; NaN is +6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return tl.where(x != x, 7, code | sign)


@triton.jit
def ceil_log2_ratio(amax, LARGEST: tl.constexpr):
    """ceil(log2(amax / LARGEST)), exactly, for LARGEST 448 = 1.75 × 2^8 or 6 = 1.5 × 2^2."""
    EXPONENT: tl.constexpr = 8 if LARGEST == 448 else 2
    MANTISSA: tl.constexpr = 0x600000 if LARGEST == 448 else 0x400000
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 - EXPONENT + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def group_amax(x, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Group values, `[ROWS, BLOCK / GROUP, GROUP]`, with each group's amax; NaN is ignored."""
    groups = tl.reshape(x, (ROWS, BLOCK // GROUP, GROUP))
    return groups, tl.minimum(tl.maximum(tl.max(magnitude(groups), axis=2), 0.0), BF16_MAX)


@triton.jit
def scales_at(num_rows, ROW: tl.constexpr):
    """First byte of the scale records in a page of so many rows."""
    return num_rows * ROW.DATA_BYTES if ROW.DATA_STRIDE == ROW.DATA_BYTES else ROW.DATA_BYTES


@triton.jit
def encode_rows(x, global_scale, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Encode a tile's rows: values, BF16 bits for the RoPE field, scales.

    A part that the format doesn't have is 0.
    """
    FORMAT: tl.constexpr = ROW.FORMAT
    BLOCK: tl.constexpr = ROW.BLOCK
    NOPE: tl.constexpr = ROW.DIM - ROW.ROPE
    rope_bits = 0
    scales = 0
    if FORMAT == "kv_fp32" or FORMAT == "index_fp32":
        values = fp32_bits(x)
    elif FORMAT == "kv_bf16" or FORMAT == "index_bf16":
        values = bf16_bits(x)
    elif FORMAT == "kv_fp8":
        rope_bits = bf16_bits(x)
        groups, amax = group_amax(round_to_bf16(x), 64, ROWS, BLOCK)
        exponent = ceil_log2_ratio(tl.maximum(amax, AMAX_FLOOR), 448)
        values = tl.reshape(e4m3_code(groups * power_of_two(-exponent)[:, :, None]), (ROWS, BLOCK))
        is_scale = tl.arange(0, BLOCK // 64)[None, :] < NOPE // 64
        scales = tl.where(is_scale, exponent + 127, 0).to(tl.uint8)
    elif FORMAT == "kv_fp8_32":
        groups, amax = group_amax(x, 32, ROWS, BLOCK)
        FLOOR: tl.constexpr = 448 * AMAX_FLOOR if ROW.BOUNDS_SCALE else AMAX_FLOOR
        exponent = ceil_log2_ratio(tl.maximum(amax, FLOOR), 448)
        values = tl.reshape(e4m3_code(groups * power_of_two(-exponent)[:, :, None]), (ROWS, BLOCK))
        scales = (exponent + 127).to(tl.uint8)
    elif FORMAT == "kv_fp8_entry_scale":
        rope_bits = bf16_bits(x)
        rounded = round_to_bf16(x)
        is_nope = tl.arange(0, BLOCK)[None, :] < NOPE
        amax = tl.max(tl.where(is_nope, magnitude(rounded), 0.0), axis=1)
        scales = tl.div_rn(tl.maximum(tl.minimum(amax, BF16_MAX), AMAX_FLOOR), E4M3_MAX)
        values = e4m3_code(tl.div_rn(rounded, tl.broadcast_to(scales[:, None], (ROWS, BLOCK))))
    elif FORMAT == "index_fp8":
        rounded = round_to_bf16(x) if ROW.ROUNDS else x
        amax = tl.minimum(tl.maximum(tl.max(magnitude(rounded), axis=1), 0.0), BF16_MAX)
        exponent = ceil_log2_ratio(tl.maximum(amax, AMAX_FLOOR), 448)
        scales = power_of_two(exponent)
        values = e4m3_code(rounded * power_of_two(-exponent)[:, None])
    else:
        GROUP: tl.constexpr = 32 if FORMAT == "index_mxfp4" else 16
        groups, amax = group_amax(round_to_bf16(x) if ROW.ROUNDS else x, GROUP, ROWS, BLOCK)
        if FORMAT == "index_mxfp4":
            exponent = ceil_log2_ratio(tl.maximum(amax, MXFP4_AMAX_FLOOR), 6)
            scales = (exponent + 127).to(tl.uint8)
            scaled = groups * power_of_two(-exponent)[:, :, None]
        else:
            limit = tl.full((ROWS, BLOCK // GROUP), 6.0, tl.float32) * global_scale
            scales = e4m3_code(tl.maximum(tl.div_rn(amax, limit), NVFP4_SCALE_FLOOR))
            wide = scales.to(tl.int32)
            normal = ((wide << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
            scale = tl.where(wide < 8, wide.to(tl.float32) * 0.001953125, normal) * global_scale
            scaled = tl.div_rn(groups, tl.broadcast_to(scale[:, :, None],
                                                       (ROWS, BLOCK // GROUP, GROUP)))  # fmt: skip
        codes = e2m1_code(scaled)
        if FORMAT == "kv_nvfp4_16":
            is_nan = tl.max((groups != groups).to(tl.int32), axis=2) > 0  # poisons its group
            scales = tl.where(is_nan, 0x7F, scales.to(tl.int32)).to(tl.uint8)
            codes = tl.where(is_nan[:, :, None], 7, codes)
        low, high = tl.split(tl.reshape(codes, (ROWS, BLOCK // 2, 2)))
        values = (low | (high << 4)).to(tl.uint8)
    return values, rope_bits, scales


@triton.jit
def store_rows(encoded, data_ptr, scale_ptr, is_written, ROWS: tl.constexpr, ROW: tl.constexpr,
               HAS_ROPE: tl.constexpr):  # fmt: skip
    """Store the records of encoded rows where `is_written` `[ROWS]`.

    data_ptr and scale_ptr `[ROWS]` are uint8 pointers to the rows' records. Without HAS_ROPE,
    `store_rotated` stores the rotated channels.
    """
    FORMAT: tl.constexpr = ROW.FORMAT
    DIM: tl.constexpr = ROW.DIM
    BLOCK: tl.constexpr = ROW.BLOCK
    NOPE: tl.constexpr = DIM - ROW.ROPE
    WIDTH: tl.constexpr = DIM if HAS_ROPE else NOPE
    values, rope_bits, scales = encoded
    is_written = is_written[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    if FORMAT == "kv_fp32" or FORMAT == "index_fp32":
        tl.store(data_ptr.to(tl.pointer_type(tl.int32))[:, None] + channel, values,
                 mask=is_written & (channel < WIDTH))  # fmt: skip
    elif FORMAT == "kv_bf16" or FORMAT == "index_bf16":
        tl.store(data_ptr.to(tl.pointer_type(tl.uint16))[:, None] + channel, values,
                 mask=is_written & (channel < WIDTH))  # fmt: skip
    elif (FORMAT == "kv_fp8" or FORMAT == "kv_fp8_entry_scale" or FORMAT == "index_fp8"
          or FORMAT == "kv_fp8_32"):  # fmt: skip
        tl.store(data_ptr[:, None] + channel, values, mask=is_written & (channel < NOPE))
        if HAS_ROPE and ROW.ROPE > 0:
            rope_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.uint16))[:, None]
            tl.store(rope_ptr + channel - NOPE, rope_bits,
                     mask=is_written & (channel >= NOPE) & (channel < DIM))  # fmt: skip
    else:
        pair = tl.arange(0, BLOCK // 2)[None, :]
        tl.store(data_ptr[:, None] + pair, values, mask=is_written & (pair < DIM // 2))
    if FORMAT == "kv_fp8":
        # A record's last bytes are padding and always 0.
        BYTES: tl.constexpr = (NOPE // 64 + 7) // 8 * 8
        group = tl.arange(0, BLOCK // 64)[None, :]
        tl.store(scale_ptr[:, None] + group, scales, mask=is_written & (group < BYTES))
        if BYTES > BLOCK // 64:
            byte = tl.arange(0, 8)[None, :]
            tl.store(scale_ptr[:, None] + byte, tl.zeros((ROWS, 8), tl.uint8),
                     mask=is_written & (byte >= BLOCK // 64))  # fmt: skip
    elif FORMAT == "kv_fp8_entry_scale" or FORMAT == "index_fp8":
        tl.store(scale_ptr.to(tl.pointer_type(tl.float32))[:, None], scales[:, None],
                 mask=is_written)  # fmt: skip
    elif FORMAT != "kv_fp32" and FORMAT != "index_fp32" and FORMAT != "kv_bf16" and (
        FORMAT != "index_bf16"
    ):  # fmt: skip
        SIZE: tl.constexpr = 32 if FORMAT == "index_mxfp4" or FORMAT == "kv_fp8_32" else 16
        GROUPS: tl.constexpr = BLOCK // SIZE
        USED: tl.constexpr = DIM // SIZE
        group = tl.arange(0, GROUPS)[None, :]
        tl.store(scale_ptr[:, None] + group, scales, mask=is_written & (group < USED))
