"""Device helpers that read stored rows: bytes to values, as `kernels.reference.codec` decodes them.

A GPU converts codes by its own instructions. The interpreter's conversions from E4M3 and to BF16
are wrong, so integer operations on the bits replace them there, and for E4M3 before sm_89.
"""

import triton
import triton.language as tl

from dsv4.kernels.triton.primitives import bf16_value, has_instructions_of, padded

GROUP = tl.constexpr(64)  # channels that share a scale in fp8 rows, side by side in a tile


@triton.jit
def e4m3_values(code):
    """fp32 values of E4M3 codes, uint8; 0x7F and 0xFF are NaN."""
    if not has_instructions_of(89):
        wide = code.to(tl.int32)
        # Exponent and mantissa move to fp32's bits, where they mean a value 2^120 times smaller.
        shifted = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        values = shifted.to(tl.float32, bitcast=True) * 2.0**120
        values = tl.where((wide & 0x7F) == 0x7F, float("nan"), values)
    else:
        values = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return values


@triton.jit
def ue8m0_values(byte):
    """fp32 values of UE8M0 bytes, of any integer type: powers of two; 0 is 2^-127, 255 is NaN."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def load_channels(row_ptr, is_present, COUNT: tl.constexpr):
    """Load COUNT elements from row_ptr `[TILE]` on: `[groups, TILE, 64]`, zeros where not present.

    Groups come first, because the compiler gives the first dimension to neighbouring threads:
    a warp reads one row and not a part of several.
    """
    channel = tile_channels(COUNT)
    return tl.load(row_ptr[None, :, None] + channel,
                   mask=is_present[None, :, None] & (channel < COUNT), other=0)  # fmt: skip


@triton.jit
def store_channels(row_ptr, values, is_stored, COUNT: tl.constexpr):
    """Store `[groups, TILE, 64]` values as COUNT elements from row_ptr `[TILE]` on."""
    channel = tile_channels(COUNT)
    tl.store(row_ptr[None, :, None] + channel, values,
             mask=is_stored[None, :, None] & (channel < COUNT))  # fmt: skip


@triton.jit
def load_scales(scale_ptr, is_present, FORMAT: tl.constexpr, COUNT: tl.constexpr):
    """Load fp32 scales that broadcast against COUNT codes `[groups, TILE, 64]` of KV rows.

    scale_ptr `[TILE]` points to the rows' scale records.
    """
    if FORMAT == "kv_fp8":
        GROUPS: tl.constexpr = COUNT // GROUP
        group = tl.arange(0, padded(GROUPS))[:, None, None]
        if GROUPS <= 8:
            # One load a row, so that codes stay in the threads that loaded them.
            words = tl.load(scale_ptr.to(tl.pointer_type(tl.int64)), mask=is_present, other=0)
            scale_bytes = (words[None, :, None] >> (8 * group).to(tl.int64)) & 0xFF
        else:
            mask = is_present[None, :, None] & (group < GROUPS)
            scale_bytes = tl.load(scale_ptr[None, :, None] + group, mask=mask, other=0)
        scales = ue8m0_values(scale_bytes)
    else:
        scale_ptr = scale_ptr.to(tl.pointer_type(tl.float32))
        scales = tl.load(scale_ptr, mask=is_present, other=0.0)[None, :, None]
    return scales


@triton.jit
def load_group(data_ptr, scale_ptr, is_present, group: tl.constexpr, FORMAT: tl.constexpr,
               DIM: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    """Load one group of 64 channels of the rows at data_ptr and scale_ptr `[TILE]`, as fp32.

    The result is `[TILE, 64]`, zero where a row is not present or has no more channels.
    """
    NOPE: tl.constexpr = DIM - ROPE
    FIRST: tl.constexpr = group * GROUP
    lane = tl.arange(0, GROUP)[None, :]
    is_row, data_ptr = is_present[:, None], data_ptr[:, None]
    is_channel = is_row & (lane < DIM - FIRST)
    # The lane is added first: then groups differ by a constant and share their pointers.
    if FORMAT == "kv_fp8_32":
        codes = tl.load(data_ptr + lane + FIRST, mask=is_channel, other=0)
        scale_ptr = scale_ptr[:, None] + lane // 32
        scale = tl.load(scale_ptr + FIRST // 32, mask=is_channel, other=0)
        values = e4m3_values(codes) * ue8m0_values(scale)
    elif FORMAT == "kv_nvfp4_16":
        pairs = tl.load(data_ptr + lane // 2 + FIRST // 2, mask=is_channel, other=0).to(tl.int32)
        scale_ptr = scale_ptr[:, None] + lane // 16
        scale = tl.load(scale_ptr + FIRST // 16, mask=is_channel, other=0)
        values = e2m1_values((pairs >> 4 * (lane & 1)) & 15) * e4m3_values(scale)
    elif FORMAT == "kv_fp32":
        lane_ptr = data_ptr.to(tl.pointer_type(tl.float32)) + lane
        values = tl.load(lane_ptr + FIRST, mask=is_channel, other=0.0)
    elif FORMAT == "kv_bf16":
        lane_ptr = data_ptr.to(tl.pointer_type(tl.uint16)) + lane
        values = bf16_value(tl.load(lane_ptr + FIRST, mask=is_channel, other=0))
    elif FIRST >= NOPE:
        lane_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.uint16)) + lane
        values = bf16_value(tl.load(lane_ptr + (FIRST - NOPE), mask=is_channel, other=0))
    else:
        is_code = lane < NOPE - FIRST
        codes = tl.load(data_ptr + lane + FIRST, mask=is_row & is_code, other=0)
        if FORMAT == "kv_fp8":
            scale = ue8m0_values(tl.load(scale_ptr + group, mask=is_present, other=0))  # [TILE]
        else:
            scale_ptr = scale_ptr.to(tl.pointer_type(tl.float32))
            scale = tl.load(scale_ptr, mask=is_present, other=0.0)
        values = e4m3_values(codes) * scale[:, None]
        if FIRST + GROUP > NOPE:
            lane_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.uint16)) + lane
            is_rope = is_channel & (lane >= NOPE - FIRST)
            rope_bits = tl.load(lane_ptr + (FIRST - NOPE), mask=is_rope, other=0)
            values = tl.where(is_code, values, bf16_value(rope_bits))
    return values


@triton.jit
def load_v41_rows(data_ptr, scale_ptr, is_present, FORMAT: tl.constexpr, DIM: tl.constexpr):
    """Load all channels of `fp8_32` or `nvfp4_16` rows at data_ptr and scale_ptr `[TILE]`, as fp32.

    The result is `[groups, TILE, 64]`, or `[groups, TILE, 128]` of two channels a byte.
    """
    IS_BYTE: tl.constexpr = FORMAT == "kv_fp8_32"
    SIZE: tl.constexpr = 32 if IS_BYTE else 16  # channels of a scale
    COUNT: tl.constexpr = (GROUP if IS_BYTE else 2 * GROUP) // SIZE
    if IS_BYTE:
        values = e4m3_values(load_channels(data_ptr, is_present, DIM))
    else:
        pairs = load_channels(data_ptr, is_present, DIM // 2).to(tl.int32)
        values = tl.join(e2m1_values(pairs & 15), e2m1_values(pairs >> 4))
    GROUPS: tl.constexpr = values.shape[0]
    TILE: tl.constexpr = values.shape[1]
    nth = tl.arange(0, GROUPS)[:, None, None] * COUNT + tl.arange(0, COUNT)[None, None, :]
    mask = is_present[None, :, None] & (nth < DIM // SIZE)
    codes = tl.load(scale_ptr[None, :, None] + nth, mask=mask, other=0)  # [groups, TILE, COUNT]
    scales = ue8m0_values(codes) if IS_BYTE else e4m3_values(codes)
    values = tl.reshape(values, (GROUPS, TILE, COUNT, SIZE)) * scales[:, :, :, None]
    return tl.reshape(values, (GROUPS, TILE, COUNT * SIZE))


@triton.jit
def tile_channels(COUNT: tl.constexpr):
    """Channel numbers `[groups, 1, 64]` from 0 to at least COUNT.

    A thread takes 8 of them, 16 bytes of BF16, at any width of what it reads. So codes stay in
    their threads on their way to BF16.
    """
    GROUPS: tl.constexpr = padded(triton.cdiv(COUNT, GROUP))
    group, lane = tl.arange(0, GROUPS)[:, None, None], tl.arange(0, GROUP)[None, None, :]
    return tl.max_contiguous(group * GROUP + lane, (1, 1, 8))


@triton.jit
def e2m1_values(code):
    """fp32 values of E2M1 codes, int32 from 0 to 15."""
    magnitude = code & 7
    bits = tl.where(magnitude == 1, 126 << 23, (magnitude << 22) + (126 << 23))
    bits = tl.where(magnitude == 0, 0, bits) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)
