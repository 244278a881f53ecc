"""Decoding of rows on Hopper: some warps turn tiles of rows into stages in shared memory.

E4M3 becomes BF16 by way of FP16 and FP32, or by bits (BY_BITS). Each conversion is exact, and so
is the product with the scale. By bits, a code's seven low bits become those of a BF16 number
2^120 times too small. A NaN code would then be 480: its row's bias is NaN instead. Either way it
makes the row's logit and then every output NaN.

Rows are `fp8`, or `fp8_32` in the window and `nvfp4_16` as entries. A tile has one format.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

TILE = gl.constexpr(64)  # rows decoded at a time
GROUP = gl.constexpr(64)  # channels that share a scale
CODE_GROUPS = gl.constexpr(7)
DIM = gl.constexpr(512)
ROPE = gl.constexpr(64)
CHANNEL_QUARTER = gl.constexpr(128)  # channels of a buffer; stores to the same one would wait
CHANNEL_QUARTERS = gl.constexpr(4)
SIDE_QUARTERS = gl.constexpr(2)  # quarters of a side, one of the two groups of warps that multiply
DECODING_WARPS = gl.constexpr(8)

# A thread has 16 bytes of a row in each group of channels; four threads have a row.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
QUARTERS = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS))
# The same with a thread's four words apart, `[TILE, 4, 4]`.
QUADS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 4, 1], [8, 1, 1], [2, 1, 0]))
QUAD_THREADS = gl.constexpr(gl.SliceLayout(2, QUADS))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16))
OPERAND_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

DECODE = gl.constexpr("""
{
    .reg .b16 codes_0, codes_1, half_0, half_1, half_2, half_3;
    .reg .b32 low, high;
    .reg .f32 value_0, value_1, value_2, value_3;
    mov.b32 {codes_0, codes_1}, $2;
    cvt.rn.f16x2.e4m3x2 low, codes_0;
    cvt.rn.f16x2.e4m3x2 high, codes_1;
    mov.b32 {half_0, half_1}, low;
    mov.b32 {half_2, half_3}, high;
    cvt.f32.f16 value_0, half_0;
    cvt.f32.f16 value_1, half_1;
    cvt.f32.f16 value_2, half_2;
    cvt.f32.f16 value_3, half_3;
    cvt.rn.bf16x2.f32 low, value_1, value_0;
    cvt.rn.bf16x2.f32 high, value_3, value_2;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $3;
}
""")

DECODE_BITS = gl.constexpr("""
{
    .reg .b32 low, high, factor;
    mov.b32 factor, 0x7B807B80;
    prmt.b32 low, $2, 0, 0x9180;
    prmt.b32 high, $2, 0, 0xB3A2;
    shl.b32 low, low, 4;
    shl.b32 high, high, 4;
    and.b32 low, low, 0x87F087F0;
    and.b32 high, high, 0x87F087F0;
    mul.rn.bf16x2 low, low, factor;
    mul.rn.bf16x2 high, high, factor;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $3;
}
""")

# Eight E2M1 codes: bytes of BF16 numbers are looked up by magnitude, and get the codes' signs.
DECODE_E2M1 = gl.constexpr("""
{
    .reg .b32 codes, left, sign, upper, lower;
    and.b32 codes, $4, 0x77777777;
    shl.b32 left, $4, 4;
    prmt.b32 upper, 0x3F3F3F00, 0x40404040, codes;
    prmt.b32 lower, 0xC0800000, 0xC0804000, codes;
    prmt.b32 sign, $4, left, 0x1504;
    lop3.b32 upper, upper, sign, 0x80808080, 0xF8;
    prmt.b32 sign, lower, upper, 0x5140;
    mul.rn.bf16x2 $0, sign, $5;
    prmt.b32 sign, lower, upper, 0x7362;
    mul.rn.bf16x2 $1, sign, $5;
    shr.u32 codes, codes, 16;
    prmt.b32 upper, 0x3F3F3F00, 0x40404040, codes;
    prmt.b32 lower, 0xC0800000, 0xC0804000, codes;
    prmt.b32 sign, $4, left, 0x3726;
    lop3.b32 upper, upper, sign, 0x80808080, 0xF8;
    prmt.b32 sign, lower, upper, 0x5140;
    mul.rn.bf16x2 $2, sign, $5;
    prmt.b32 sign, lower, upper, 0x7362;
    mul.rn.bf16x2 $3, sign, $5;
}
""")

# Two E4M3 codes, each to a pair of BF16 numbers.
E4M3_PAIRS = gl.constexpr("""
{
    .reg .b16 codes, half_0, half_1;
    .reg .b32 halves;
    .reg .f32 value_0, value_1;
    cvt.u16.u32 codes, $2;
    cvt.rn.f16x2.e4m3x2 halves, codes;
    mov.b32 {half_0, half_1}, halves;
    cvt.f32.f16 value_0, half_0;
    cvt.f32.f16 value_1, half_1;
    cvt.rn.bf16x2.f32 $0, value_0, value_0;
    cvt.rn.bf16x2.f32 $1, value_1, value_1;
}
""")

PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


class Tiles(NamedTuple):
    """The tiles of a work item (`hopper.program`), from first to end by step."""

    first: gl.tensor
    end: gl.tensor
    step: gl.tensor


class Stages(NamedTuple):
    """Decoded tiles in shared memory, and barriers of each stage: it is full, it is empty.

    quarters hold the channels, `[STAGES, TILE, CHANNEL_QUARTER]` each; biases `[STAGES, TILE]`
    are added to the rows' logits: 0, or -inf where there is no row.
    """

    quarters: gl.tuple
    biases: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class RowSource(NamedTuple):
    """Sources of a token's rows: a ring or the workspace, a list of rows, a block table.

    Rows are relative to window_ptr and entries_ptr, which has pool_rows. scales_offset is from the
    window's data to its scales.
    """

    position: gl.tensor
    window_start: gl.tensor
    in_workspace: gl.tensor
    num_rows: gl.tensor
    list_ptr: gl.tensor
    list_stride: gl.tensor
    pool_rows: gl.tensor
    table_ptr: gl.tensor
    window_ptr: gl.tensor
    scales_offset: gl.tensor
    entries_ptr: gl.tensor
    entries_stride: gl.tensor


@gluon.jit
def decode_words(words, scale, BY_BITS: gl.constexpr):
    """Words of four E4M3 codes to words of two BF16 numbers, times a pair of BF16 scales."""
    low, high = gl.inline_asm_elementwise(
        DECODE_BITS if BY_BITS else DECODE, "=r,=r,r,r", [words, scale],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.reshape(gl.join(low, high), (TILE, GROUP // 2))


@gluon.jit
def scale_pair(scales, group: gl.constexpr):
    """The group's UE8M0 byte of each row's scales, int64, as two BF16 numbers in a word."""
    return power_pair((scales >> (8 * group)).to(gl.int32) & 0xFF)


@gluon.jit
def power_pair(byte):
    """UE8M0 bytes, int32, as two BF16 numbers in a word each."""
    bits = gl.where(byte == 0, 0x40, byte << 7)
    bits = gl.where(byte == 255, 0x7FC0, bits)
    return bits | (bits << 16)


@gluon.jit
def find_rows(tile, end, source, SPEC: gl.constexpr):
    """Find a tile's rows, `[TILE]`: rows of the window, listed rows, or blocks; -1 for none."""
    row = tile * TILE + gl.arange(0, TILE, layout=ROWS)  # [TILE]
    rows = gl.full((TILE,), -1, gl.int32, layout=ROWS)
    if tile < end:
        if tile < SPEC.WINDOW // TILE:
            at = source.position - (SPEC.WINDOW - 1) + row
            kept = gl.where(source.in_workspace, source.window_start + row, at % SPEC.RING_ROWS)
            rows = gl.where(at >= 0, kept, -1)
        elif SPEC.ENTRIES == "listed":
            entry = (row - SPEC.WINDOW).to(gl.int64)
            listed = gl.load(source.list_ptr + entry * source.list_stride,
                             mask=row < source.num_rows, other=-1)  # fmt: skip
            is_row = listed.to(gl.uint64) < source.pool_rows.to(gl.uint64)
            rows = gl.where(is_row, listed.to(gl.int32), -1)  # a device has fewer than 2^31 rows
        elif SPEC.ENTRIES == "all":
            column = (row - SPEC.WINDOW) // SPEC.ENTRY_ROWS
            rows = gl.load(source.table_ptr + column, mask=row < source.num_rows, other=-1)
    return rows


@gluon.jit
def row_pointers(tile, rows, source, SPEC: gl.constexpr):
    """Pointers to the data, in words, and to the scales of a tile's rows, `[TILE]`."""
    ROW: gl.constexpr = SPEC.ROW
    ENTRY: gl.constexpr = SPEC.ENTRY
    data_stride, scale_stride = ROW.DATA_STRIDE, ROW.SCALE_STRIDE
    base_ptr, scales_offset = source.window_ptr, source.scales_offset
    start, row = gl.zeros_like(rows).to(gl.int64), rows.to(gl.int64)
    if SPEC.ENTRIES != "none":
        is_window = tile < SPEC.WINDOW // TILE
        if SPEC.ENTRIES == "listed":
            listed = rows.to(gl.uint32)
            page, entry_row = listed // SPEC.ENTRY_ROWS, listed % SPEC.ENTRY_ROWS
        else:
            entry = tile * TILE - SPEC.WINDOW + gl.arange(0, TILE, layout=ROWS)
            page, entry_row = rows, entry % SPEC.ENTRY_ROWS
        start = gl.where(is_window, start, page.to(gl.int64) * source.entries_stride)
        row = gl.where(is_window, row, entry_row.to(gl.int64))
        base_ptr = gl.where(is_window, base_ptr, source.entries_ptr)
        IS_JOINED: gl.constexpr = ENTRY.DATA_STRIDE > ENTRY.DATA_BYTES
        ROWS_BEFORE: gl.constexpr = 1 if IS_JOINED else SPEC.ENTRY_ROWS
        scales_offset = gl.where(is_window, scales_offset, ROWS_BEFORE * ENTRY.DATA_BYTES)
        data_stride = gl.where(is_window, data_stride, ENTRY.DATA_STRIDE)
        scale_stride = gl.where(is_window, scale_stride, ENTRY.SCALE_STRIDE)
    data_ptr = base_ptr + (start + row * data_stride)
    scale_ptr = base_ptr + scales_offset + (start + row * scale_stride)
    SCALES: gl.constexpr = gl.int64 if ROW.FORMAT == "kv_fp8" else gl.int32
    return (data_ptr.to(gl.pointer_type(gl.int32), bitcast=True),
            scale_ptr.to(gl.pointer_type(SCALES), bitcast=True))  # fmt: skip


@gluon.jit
def prefetch_rows(data_ptr, BYTES: gl.constexpr):
    """Prefetch rows of so many bytes to L2; each of a row's four threads asks for a quarter."""
    at = data_ptr.to(gl.int64, bitcast=True)
    at = gl.convert_layout(at, gl.SliceLayout(1, QUARTERS), assert_trivial=True)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, QUARTERS))[None, :]
    for part in gl.static_range(BYTES // 256):
        gl.inline_asm_elementwise(
            PREFETCH, "=r,l", [at[:, None] + quarter * (BYTES // 4) + part * 64], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def load_codes(data_ptr, is_present, group: gl.constexpr):
    """Load a group's codes, `[TILE, 16]` words of four; zeros where there is no row."""
    word = gl.arange(0, GROUP // 4, layout=gl.SliceLayout(0, WORDS))[None, :]
    mask = is_present[:, None] & (word >= 0)
    return gl.load(data_ptr[:, None] + word + group * (GROUP // 4), mask=mask, other=0)


@gluon.jit
def load_rotated(data_ptr, is_present):
    """Load the rotated channels, `[TILE, 32]` words of two."""
    word = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, WIDE))[None, :]
    data_ptr = gl.convert_layout(data_ptr, gl.SliceLayout(1, WIDE), assert_trivial=True)
    is_present = gl.convert_layout(is_present, gl.SliceLayout(1, WIDE), assert_trivial=True)
    mask = is_present[:, None] & (word >= 0)
    return gl.load(data_ptr[:, None] + word + CODE_GROUPS * (GROUP // 4), mask=mask, other=0)


@gluon.jit
def store_groups(quarter, left, right):
    """Store two groups of channels side by side in a quarter's buffer."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))  # [TILE, 2, 32]
    words = quarter._reinterpret(gl.int32, (TILE, GROUP), OPERAND_WORDS)
    words.store(gl.reshape(both, (TILE, GROUP)))


@gluon.jit
def decode_group(codes, scales, group: gl.constexpr, BY_BITS: gl.constexpr):
    """Decode a group of channels to words of two BF16 numbers, `[TILE, 32]`."""
    scale, words = gl.broadcast(scale_pair(scales, group)[:, None], codes[group])
    return gl.convert_layout(decode_words(words, scale, BY_BITS), WIDE, assert_trivial=True)


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def row_biases(codes, is_present, BY_BITS: gl.constexpr):
    """Biases of a tile's logits: 0, or -inf without a row; by bits NaN with a NaN code."""
    biases = gl.where(is_present, 0.0, float("-inf"))
    if BY_BITS:
        seen = gl.zeros_like(codes[0])
        for group in gl.static_range(CODE_GROUPS):
            seen |= (codes[group] & 0x7F7F7F7F) + 0x01010101  # a NaN code sets its highest bit
        has_nan = (gl.reduce(seen, 1, _either) & -0x7F7F7F80) != 0
        biases = gl.where(has_nan, float("nan"), biases)
    return biases


@gluon.jit
def load_tile(tile, data_ptr, scale_ptr, is_present, SPEC: gl.constexpr):
    """Load a tile's rows: codes by group, rotated channels and scales, or see `load_mixed`."""
    codes = gl.tuple(())
    if SPEC.ROW.FORMAT == "kv_fp8":
        for group in gl.static_range(CODE_GROUPS):
            codes = codes + (load_codes(data_ptr, is_present, group),)
        scales = gl.load(scale_ptr, mask=is_present, other=0)
        loaded = codes + (load_rotated(data_ptr, is_present), scales)
    else:
        loaded = load_mixed(tile, data_ptr, scale_ptr, is_present, SPEC)
    return loaded


@gluon.jit
def load_mixed(tile, data_ptr, scale_ptr, is_present, SPEC: gl.constexpr):
    """Load rows of the window, `fp8_32`, or entries, `nvfp4_16`: codes, `[TILE, 4, 4]` words.

    Entries have half of the codes. A thread then has four words of scales, `[TILE, 4]`: those of
    its channels in a quarter each, with a neighbour's.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, QUAD_THREADS)
    data_ptr = gl.convert_layout(data_ptr, BY_ROW, assert_trivial=True)[:, None]
    scale_ptr = gl.convert_layout(scale_ptr, BY_ROW, assert_trivial=True)[:, None]
    is_present = gl.convert_layout(is_present, BY_ROW, assert_trivial=True)[:, None]
    thread = gl.arange(0, 4, layout=gl.SliceLayout(0, QUAD_THREADS))[None, :]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUADS)))[None, None, :]
    code_ptr = (data_ptr + 4 * thread)[:, :, None] + word  # [TILE, 4, 4]
    is_row = is_present & (thread >= 0)
    is_code = is_row[:, :, None] & (word >= 0)
    is_window = SPEC.ENTRIES == "none" or tile < SPEC.WINDOW // TILE
    scale_ptr += gl.where(is_window, 0, thread // 2)
    step = gl.where(is_window, 1, 2)
    loaded = gl.tuple(())
    for group in gl.static_range(DIM // GROUP):
        mask = is_code if group < DIM // GROUP // 2 else is_code & is_window
        loaded = loaded + (gl.load(code_ptr + group * (GROUP // 4), mask=mask, other=0),)
    for quarter in gl.static_range(CHANNEL_QUARTERS):
        loaded = loaded + (gl.load(scale_ptr + quarter * step, mask=is_row, other=0),)
    return loaded


@gluon.jit
def store_fp8_32(loaded, quarters, stage):
    """Decode and store a tile of `fp8_32` rows."""
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, QUAD_THREADS))[None, :] // 2 * 8
    for quarter in gl.static_range(CHANNEL_QUARTERS):
        scales = loaded[DIM // GROUP + quarter] >> shift  # [TILE, 4], bytes 0 and 2
        both = gl.tuple(())
        for half in gl.static_range(2):
            pair = power_pair(scales >> (16 * half) & 0xFF)[:, :, None]
            pair, codes = gl.broadcast(pair, loaded[2 * quarter + half])
            both = both + (decode_words(codes, pair, False),)
        store_groups(quarters[quarter].index(stage), both[0], both[1])


@gluon.jit
def store_nvfp4_16(loaded, quarters, stage):
    """Decode and store a tile of `nvfp4_16` rows."""
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, QUAD_THREADS))[None, :] % 2 * 16
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUADS)))[None, None, :]
    for quarter in gl.static_range(CHANNEL_QUARTERS):
        left, right = gl.inline_asm_elementwise(
            E4M3_PAIRS, "=r,=r,r", [loaded[DIM // GROUP + quarter] >> shift],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        scale = gl.where(word < 2, left[:, :, None], right[:, :, None])  # [TILE, 4, 4]
        a, b, c, d = gl.inline_asm_elementwise(
            DECODE_E2M1, "=r,=r,=r,=r,r,r", [loaded[quarter], scale],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        values = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), (TILE, GROUP))
        words = quarters[quarter].index(stage)._reinterpret(gl.int32, (TILE, GROUP), OPERAND_WORDS)
        words.store(values)


@gluon.jit
def store_tile(tile, loaded, is_present, memory, stage, SPEC: gl.constexpr,
               BY_BITS: gl.constexpr):  # fmt: skip
    """Decode a loaded tile and store it, with its rows' biases, in a stage."""
    if SPEC.ROW.FORMAT == "kv_fp8":
        biases = row_biases(loaded, is_present, BY_BITS)
        scales = loaded[CODE_GROUPS + 1]
        for pair in gl.static_range(3):
            left = decode_group(loaded, scales, 2 * pair, BY_BITS)
            right = decode_group(loaded, scales, 2 * pair + 1, BY_BITS)
            store_groups(memory.quarters[pair].index(stage), left, right)
        left = decode_group(loaded, scales, 6, BY_BITS)
        store_groups(memory.quarters[3].index(stage), left, loaded[CODE_GROUPS])
    else:
        biases = row_biases(loaded, is_present, False)
        if SPEC.ENTRIES == "none" or tile < SPEC.WINDOW // TILE:
            store_fp8_32(loaded, memory.quarters, stage)
        else:
            store_nvfp4_16(loaded, memory.quarters, stage)
    memory.biases.index(stage).store(biases)


@gluon.jit
def decode_tiles(tiles, count, memory, source, SPEC: gl.constexpr, STAGES: gl.constexpr,
                 IS_EARLY: gl.constexpr, BY_BITS: gl.constexpr):  # fmt: skip
    """Decode the tiles of a work item into the stages in turn; return the tiles counted so far.

    `count` tiles came before. IS_EARLY loads the next tile before this one is decoded, which takes
    registers for both. Otherwise it is loaded after, and listed rows are prefetched to L2.
    """
    IS_LISTED: gl.constexpr = SPEC.ENTRIES == "listed"
    first, end, step = tiles.first, tiles.end, tiles.step
    rows = find_rows(first, end, source, SPEC)
    data_ptr, scale_ptr = row_pointers(first, rows, source, SPEC)
    loaded = load_tile(first, data_ptr, scale_ptr, rows >= 0, SPEC)
    next_rows = find_rows(first + step, end, source, SPEC)
    for tile in range(first, end, step):
        stage = count % STAGES
        is_present = rows >= 0
        if IS_EARLY or IS_LISTED:
            data_ptr, scale_ptr = row_pointers(tile + step, gl.maximum(next_rows, 0), source, SPEC)
            after_next = find_rows(tile + 2 * step, end, source, SPEC)
        next_loaded = loaded
        if IS_EARLY:
            next_loaded = load_tile(tile + step, data_ptr, scale_ptr, next_rows >= 0, SPEC)
        elif IS_LISTED:
            prefetch_rows(data_ptr, SPEC.ENTRY.DATA_STRIDE)
        mbarrier.wait(memory.empty.index(stage), (count // STAGES + 1) % 2)
        store_tile(tile, loaded, is_present, memory, stage, SPEC, BY_BITS)
        fence_async_shared()  # it waits for loads too, so late loads come after it
        if not IS_EARLY:
            if not IS_LISTED:
                data_ptr, scale_ptr = row_pointers(tile + step, next_rows, source, SPEC)
            next_loaded = load_tile(tile + step, data_ptr, scale_ptr, next_rows >= 0, SPEC)
            if not IS_LISTED:
                after_next = find_rows(tile + 2 * step, end, source, SPEC)
        loaded = next_loaded
        rows, next_rows = next_rows, after_next
        gl.thread_barrier()
        mbarrier.arrive(memory.full.index(stage), count=1)
        count += 1
    return count
