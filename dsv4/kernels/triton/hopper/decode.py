"""Decoding of fp8 rows by warps of their own, on Hopper: tiles of rows to stages in shared memory.

E4M3 becomes BF16 by the conversions there are, by way of FP16 and FP32, all of them exact, and so
is the product with the scale. A NaN code stays one, and makes a NaN of the row's logit and with it
of every output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

TILE = gl.constexpr(64)  # rows decoded at a time
GROUP = gl.constexpr(64)  # channels that share a scale
CODE_GROUPS = gl.constexpr(7)
DIM = gl.constexpr(512)
ROPE = gl.constexpr(64)
PART = gl.constexpr(128)  # channels of a buffer; stores to one buffer would wait for each other
PARTS = gl.constexpr(4)
SIDE_PARTS = gl.constexpr(2)  # of the channels of a group of warps that multiplies
DATA_BYTES = gl.constexpr(576)
SCALE_BYTES = gl.constexpr(8)
DECODING_WARPS = gl.constexpr(8)

# A thread has a row's 16 bytes of each group of channels; four threads have a row.
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
QUARTERS = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [8, 1], [1, 0]))
ROWS = gl.constexpr(gl.SliceLayout(1, WORDS))
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

PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; prefetch.global.L2 [$1 + 64]; mov.u32 $0, 0;")


@gluon.jit
def decode_words(words, scale):
    """Four E4M3 codes a word to two words of two BF16 numbers each, times a scale, twice BF16."""
    low, high = gl.inline_asm_elementwise(
        DECODE, "=r,=r,r,r", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), (TILE, GROUP // 2))


@gluon.jit
def scale_pair(scales, group: gl.constexpr):
    """The group's UE8M0 byte of each row's scales, int64, as two BF16 numbers in a word."""
    byte = (scales >> (8 * group)).to(gl.int32) & 0xFF
    bits = gl.where(byte == 0, 0x40, byte << 7)
    bits = gl.where(byte == 255, 0x7FC0, bits)
    return bits | (bits << 16)


@gluon.jit
def find_rows(tile, end, where, ENTRIES: gl.constexpr, WINDOW: gl.constexpr,
              RING_ROWS: gl.constexpr, ENTRY_ROWS: gl.constexpr):  # fmt: skip
    """What tells where a tile's rows are: a row of the window's memory, a listed row, a block.

    -1 where there is none.
    """
    position, window_start, in_workspace, num_rows, list_ptr, list_stride, table_ptr = where
    row = tile * TILE + gl.arange(0, TILE, layout=ROWS)
    found = gl.full((TILE,), -1, gl.int32, layout=ROWS)
    if tile < end:
        if tile < WINDOW // TILE:
            at = position - (WINDOW - 1) + row
            kept = gl.where(in_workspace, window_start + row, at % RING_ROWS)
            found = gl.where(at >= 0, kept, -1)
        elif ENTRIES == "listed":
            entry = (row - WINDOW).to(gl.int64)
            listed = gl.load(list_ptr + entry * list_stride, mask=row < num_rows, other=-1)
            found = listed.to(gl.int32)  # a device's rows are fewer than 2^31
        elif ENTRIES == "all":
            column = (row - WINDOW) // ENTRY_ROWS
            found = gl.load(table_ptr + column, mask=row < num_rows, other=-1)
    return found


@gluon.jit
def row_pointers(tile, found, bases, ENTRIES: gl.constexpr, WINDOW: gl.constexpr,
                 ENTRY_ROWS: gl.constexpr):  # fmt: skip
    """Pointers to the data, in words, and to the scales of a tile's rows."""
    base_ptr, scales_offset, entries_ptr, entries_stride = bases
    start, row = gl.zeros_like(found).to(gl.int64), found.to(gl.int64)
    if ENTRIES != "none":
        is_window = tile < WINDOW // TILE
        if ENTRIES == "listed":
            listed = found.to(gl.uint32)
            page, entry_row = listed // ENTRY_ROWS, listed % ENTRY_ROWS
        else:
            entry = tile * TILE - WINDOW + gl.arange(0, TILE, layout=ROWS)
            page, entry_row = found, entry % ENTRY_ROWS
        start = gl.where(is_window, start, page.to(gl.int64) * entries_stride)
        row = gl.where(is_window, row, entry_row.to(gl.int64))
        base_ptr = gl.where(is_window, base_ptr, entries_ptr)
        scales_offset = gl.where(is_window, scales_offset, ENTRY_ROWS * DATA_BYTES)
    data_ptr = base_ptr + (start + row * DATA_BYTES)
    scale_ptr = base_ptr + scales_offset + (start + row * SCALE_BYTES)
    return (data_ptr.to(gl.pointer_type(gl.int32), bitcast=True),
            scale_ptr.to(gl.pointer_type(gl.int64), bitcast=True))  # fmt: skip


@gluon.jit
def prefetch_rows(data_ptr):
    """Have rows brought to L2: each of a row's four threads asks for a quarter."""
    at = data_ptr.to(gl.int64, bitcast=True)
    at = gl.convert_layout(at, gl.SliceLayout(1, QUARTERS), assert_trivial=True)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, QUARTERS))[None, :]
    gl.inline_asm_elementwise(
        PREFETCH, "=r,l", [at[:, None] + quarter * (DATA_BYTES // 4)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_codes(data_ptr, is_present, group: gl.constexpr):
    """A group's codes, four a word; zeros where there is no row."""
    word = gl.arange(0, GROUP // 4, layout=gl.SliceLayout(0, WORDS))[None, :]
    mask = is_present[:, None] & (word >= 0)
    return gl.load(data_ptr[:, None] + word + group * (GROUP // 4), mask=mask, other=0)


@gluon.jit
def load_rotated(data_ptr, is_present):
    """The rotated channels, two a word."""
    word = gl.arange(0, ROPE // 2, layout=gl.SliceLayout(0, WIDE))[None, :]
    data_ptr = gl.convert_layout(data_ptr, gl.SliceLayout(1, WIDE), assert_trivial=True)
    is_present = gl.convert_layout(is_present, gl.SliceLayout(1, WIDE), assert_trivial=True)
    mask = is_present[:, None] & (word >= 0)
    return gl.load(data_ptr[:, None] + word + CODE_GROUPS * (GROUP // 4), mask=mask, other=0)


@gluon.jit
def store_groups(part, left, right):
    """Store two groups of channels side by side."""
    both = gl.permute(gl.join(left, right), (0, 2, 1))
    part._reinterpret(gl.int32, (TILE, GROUP), OPERAND_WORDS).store(gl.reshape(both, (TILE, GROUP)))


@gluon.jit
def decode_group(codes, scales, group: gl.constexpr):
    """A group of channels as words of two BF16 numbers."""
    scale, words = gl.broadcast(scale_pair(scales, group)[:, None], codes[group])
    return gl.convert_layout(decode_words(words, scale), WIDE, assert_trivial=True)


@gluon.jit
def load_tile(data_ptr, scale_ptr, is_present):
    """Codes by group, rotated channels and scales of a tile's rows."""
    codes = gl.tuple(())
    for group in gl.static_range(CODE_GROUPS):
        codes = codes + (load_codes(data_ptr, is_present, group),)
    scales = gl.load(scale_ptr, mask=is_present, other=0)
    return codes, load_rotated(data_ptr, is_present), scales


@gluon.jit
def decode_tiles(tiles, count, memory, where, bases, ENTRIES: gl.constexpr, WINDOW: gl.constexpr,
                 RING_ROWS: gl.constexpr, ENTRY_ROWS: gl.constexpr,
                 STAGES: gl.constexpr, IS_EARLY: gl.constexpr):  # fmt: skip
    """Decode every tile of a token into the stages in turn, counted from `count` on.

    The next tile is loaded before one is decoded, where there are registers for both, or after it.

    A row's bias is added to its logits: 0, -inf where there is none.
    """
    first, end, step = tiles
    parts, biases, full, empty = memory
    IS_LISTED: gl.constexpr = ENTRIES == "listed"
    found = find_rows(first, end, where, ENTRIES, WINDOW, RING_ROWS, ENTRY_ROWS)
    data_ptr, scale_ptr = row_pointers(first, found, bases, ENTRIES, WINDOW, ENTRY_ROWS)
    codes, rotated, scales = load_tile(data_ptr, scale_ptr, found >= 0)
    later = find_rows(first + step, end, where, ENTRIES, WINDOW, RING_ROWS, ENTRY_ROWS)
    for tile in range(first, end, step):
        stage = count % STAGES
        is_present, now_later = found >= 0, later
        if IS_EARLY or IS_LISTED:
            data_ptr, scale_ptr = row_pointers(
                tile + step, gl.maximum(later, 0), bases, ENTRIES, WINDOW, ENTRY_ROWS
            )
            later = find_rows(tile + 2 * step, end, where, ENTRIES, WINDOW, RING_ROWS, ENTRY_ROWS)
        next_codes, next_rotated, next_scales = codes, rotated, scales
        if IS_EARLY:
            next_codes, next_rotated, next_scales = load_tile(data_ptr, scale_ptr, now_later >= 0)
        elif IS_LISTED:
            prefetch_rows(data_ptr)
        mbarrier.wait(empty.index(stage), (count // STAGES + 1) % 2)
        for pair in gl.static_range(3):
            left = decode_group(codes, scales, 2 * pair)
            right = decode_group(codes, scales, 2 * pair + 1)
            store_groups(parts[pair].index(stage), left, right)
        store_groups(parts[3].index(stage), decode_group(codes, scales, 6), rotated)
        biases.index(stage).store(gl.where(is_present, 0.0, float("-inf")))
        fence_async_shared()  # it waits for loads
        if not IS_EARLY:
            if not IS_LISTED:
                data_ptr, scale_ptr = row_pointers(
                    tile + step, later, bases, ENTRIES, WINDOW, ENTRY_ROWS
                )
            next_codes, next_rotated, next_scales = load_tile(data_ptr, scale_ptr, now_later >= 0)
            if not IS_LISTED:
                later = find_rows(tile + 2 * step, end, where, ENTRIES, WINDOW, RING_ROWS,
                                  ENTRY_ROWS)  # fmt: skip
        codes, rotated, scales, found = next_codes, next_rotated, next_scales, now_later
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)
        count += 1
    return count
