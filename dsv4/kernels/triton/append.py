"""Append: a token's KV becomes a window row, its compressor projections become a tail row."""

import triton
import triton.language as tl

from dsv4.kernels.triton.operands import CSA_RATIO, Place
from dsv4.kernels.triton.primitives import (
    bf16_bits,
    encode_rows,
    fp32_bits,
    load_norm,
    load_pairs,
    load_rope,
    mean_of_squares,
    padded,
    reciprocal_root,
    rotate_pairs,
    rotate_tail,
    round_to_bf16,
    scales_at,
    store_rotated,
    store_rows,
    wait_for_launch_before,
    widen,
)


@triton.jit
def locate(token, tokens, IS_DECODE: tl.constexpr):
    """`Place` of a token; its slot is -1 for padding.

    A decode step has one token per request, so a token's index is its request's. The plan was
    copied to the device before the first launch. Everything else waits for the launch before.
    """
    position = tl.load(tokens.positions_ptr + token)
    if IS_DECODE:
        slot = tl.load(tokens.request_slots_ptr + token).to(tl.int64)
        before = position
        after = position + 1
        workspace_start = -1
    else:
        request = tl.load(tokens.request_ids_ptr + token)
        slot = tl.load(tokens.request_slots_ptr + request).to(tl.int64)
        before = tl.load(tokens.before_ptr + request)
        after = tl.load(tokens.after_ptr + request)
        workspace_start = tl.load(tokens.workspace_starts_ptr + request)
    wait_for_launch_before(STARTS_NEXT=True)
    return Place(position, slot, before, after, workspace_start)


@triton.jit
def locate_segment(segment, num_tokens, tokens, TILE: tl.constexpr):
    """First token of a segment, its number of tokens, and the first token's `Place`.

    A segment is one request's share of a tile of tokens. Each tile has one, for the request of
    its first token. Each request has another, empty unless the request begins inside a tile.
    A loop over a tile's requests instead would take 40 registers more.
    """
    token = segment * TILE
    request = segment - tl.cdiv(num_tokens, TILE)
    exists = True
    if request >= 0:
        token = tl.minimum(tl.load(tokens.token_starts_ptr + request), num_tokens - 1)
        exists = (token % TILE != 0) & (tl.load(tokens.request_ids_ptr + token) == request)
    place = locate(token, tokens, False)
    end = tl.minimum(token // TILE * TILE + TILE, num_tokens)
    count = tl.where(exists, tl.minimum(place.after - place.position, end - token), 0)
    return token, count, place


@triton.jit
def slot_tail(compressor, slot, SPEC: tl.constexpr):
    """Pointer to a slot's tail, of the type that it stores."""
    cache = compressor.cache
    return tail_at(cache.slots_ptr + slot * cache.slot_bytes + compressor.tail_offset, SPEC)


@triton.jit
def tail_at(byte_ptr, SPEC: tl.constexpr):
    """Pointer to the tail that begins at a byte, of the type that it stores."""
    if SPEC.TAIL_BF16:
        tail_ptr = byte_ptr.to(tl.pointer_type(tl.bfloat16))
    else:
        tail_ptr = byte_ptr.to(tl.pointer_type(tl.float32))
    return tail_ptr


@triton.jit
def load_row(compressor, token, position, column, mask, SPEC: tl.constexpr):
    """kv, and gate + bias, of tokens as a tail stores them; token and column broadcast."""
    source = token.to(tl.int64) * compressor.stride + column
    kv = widen(tl.load(compressor.kv_ptr + source, mask=mask, other=0.0))
    gate = widen(tl.load(compressor.gate_ptr + source, mask=mask, other=0.0))
    if SPEC.RATIO >= CSA_RATIO:  # V4.1 has no bias
        bias_ptr = compressor.bias_ptr + position % SPEC.RATIO * SPEC.WIDTH + column
        gate += tl.load(bias_ptr, mask=mask, other=0.0).to(tl.float32)
    if SPEC.TAIL_BF16:
        kv, gate = round_to_bf16(kv), round_to_bf16(gate)
    return kv, gate


@triton.jit
def load_stored(tail_ptr, position, column, mask, SPEC: tl.constexpr):
    """kv, and gate + bias, of earlier tokens from their slot's tail."""
    row_ptr = tail_ptr + (position % SPEC.TAIL_ROWS) * (2 * SPEC.WIDTH) + column
    kv = tl.load(row_ptr, mask=mask, other=0.0).to(tl.float32)
    return kv, tl.load(row_ptr + SPEC.WIDTH, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tail(kv, gate, tail_ptr, position, column, mask, SPEC: tl.constexpr):
    """Store kv, and gate + bias, in a slot's tail."""
    row_ptr = tail_ptr + (position % SPEC.TAIL_ROWS) * (2 * SPEC.WIDTH) + column
    if SPEC.TAIL_BF16:
        row_ptr = row_ptr.to(tl.pointer_type(tl.uint16))
        tl.store(row_ptr, bf16_bits(kv), mask=mask)
        tl.store(row_ptr + SPEC.WIDTH, bf16_bits(gate), mask=mask)
    else:
        tl.store(row_ptr, kv, mask=mask)
        row_ptr = row_ptr.to(tl.pointer_type(tl.int32))
        tl.store(row_ptr + SPEC.WIDTH, fp32_bits(gate), mask=mask)


@triton.jit
def sum_row(tail_ptr, group, column, SPEC: tl.constexpr):
    """Pointer to the largest gates of a group; sums of weights, weighted sums lie behind them."""
    sums_ptr = tail_ptr.to(tl.pointer_type(tl.uint8)) + SPEC.SUMS_OFFSET
    row = group % SPEC.SUM_RING * (3 * SPEC.WIDTH) + column
    return sums_ptr.to(tl.pointer_type(tl.float32)) + row


@triton.jit
def load_sums(tail_ptr, group, column, mask, SPEC: tl.constexpr):
    """Largest gates, sums of weights and weighted sums of groups that closed earlier."""
    row_ptr = sum_row(tail_ptr, group, column, SPEC)
    return (
        tl.load(row_ptr, mask=mask, other=0.0),
        tl.load(row_ptr + SPEC.WIDTH, mask=mask, other=0.0),
        tl.load(row_ptr + 2 * SPEC.WIDTH, mask=mask, other=0.0),
    )


@triton.jit
def store_sums(sums, tail_ptr, group, column, mask, SPEC: tl.constexpr):
    """Store a group's sums, each value in the one pattern of bits that the reference gives it."""
    largest, total, weighted = sums
    is_usable = largest < float("inf")
    row_ptr = sum_row(tail_ptr, group, column, SPEC).to(tl.pointer_type(tl.int32))
    tl.store(row_ptr, tl.where(largest == 0.0, 0, fp32_bits(largest)), mask=mask)
    tl.store(row_ptr + SPEC.WIDTH, fp32_bits(tl.where(is_usable, total, 0.0)), mask=mask)
    tl.store(row_ptr + 2 * SPEC.WIDTH, fp32_bits(tl.where(is_usable, weighted, 0.0)), mask=mask)


@triton.jit
def copy_records(source_ptr, target_ptr, is_copied, BYTES: tl.constexpr, STRIDE: tl.constexpr):
    """Copy records that lie STRIDE bytes apart, one for each of `[ROWS]` pointers.

    They go by words of 4 bytes where all records are of whole words, else by bytes.
    """
    WORD: tl.constexpr = 4 if BYTES % 4 == 0 and STRIDE % 4 == 0 else 1
    WORDS: tl.constexpr = BYTES // WORD
    word = tl.arange(0, padded(WORDS))[None, :]
    mask = is_copied[:, None] & (word < WORDS)  # [ROWS, WORDS]
    if WORD == 4:
        source_ptr = source_ptr.to(tl.pointer_type(tl.int32))
        target_ptr = target_ptr.to(tl.pointer_type(tl.int32))
    values = tl.load(source_ptr[:, None] + word, mask=mask, other=0)
    tl.store(target_ptr[:, None] + word, values, mask=mask)


@triton.jit
def copy_rows(
    from_ptr, from_rows, from_row, to_ptr, to_rows, to_row, is_copied, ROW: tl.constexpr
):  # fmt: skip
    """Copy rows `[ROWS]` of a page of from_rows to those of a page of to_rows."""
    copy_records(from_ptr + from_row * ROW.DATA_STRIDE, to_ptr + to_row * ROW.DATA_STRIDE,
                 is_copied, ROW.DATA_BYTES, ROW.DATA_STRIDE)  # fmt: skip
    if ROW.SCALE_BYTES > 0:
        to_scales_ptr = to_ptr + scales_at(to_rows, ROW)
        from_scales_ptr = from_ptr + scales_at(from_rows, ROW)
        copy_records(from_scales_ptr + from_row * ROW.SCALE_STRIDE,
                     to_scales_ptr + to_row * ROW.SCALE_STRIDE,
                     is_copied, ROW.SCALE_BYTES, ROW.SCALE_STRIDE)  # fmt: skip


@triton.jit
def copy_old_rows(old_row, place, is_copied, ring_ptr, window, SPEC: tl.constexpr):
    """Copy ring rows to the workspace.

    old_row `[ROWS]` is a row of the request's workspace: 0 is WINDOW - 1 before the chunk.
    """
    ROW: tl.constexpr = SPEC.ROW
    position = place.before - (SPEC.WINDOW - 1) + old_row
    is_copied = is_copied & (position >= 0)
    from_row = ((position + SPEC.RING_ROWS) % SPEC.RING_ROWS).to(tl.int64)
    to_row = (place.workspace_start + old_row).to(tl.int64)
    copy_rows(ring_ptr, SPEC.RING_ROWS, from_row, window.workspace_ptr,
              window.workspace_rows.to(tl.int64), to_row, is_copied, ROW)  # fmt: skip


@triton.jit
def carry_over(position, place, is_real, ring_ptr, window, SPEC: tl.constexpr):
    """Copy the ring's last WINDOW - 1 rows from before a chunk to the workspace.

    A row that a token of the chunk will overwrite is copied by that token's program. No other
    program touches it. The chunk's tokens share out the remaining rows.
    """
    RING_ROWS: tl.constexpr = SPEC.RING_ROWS
    NUM_OLD: tl.constexpr = SPEC.WINDOW - 1
    num_past = (position - place.before + 1) % RING_ROWS
    saved_row = NUM_OLD - 1 - (RING_ROWS - num_past) % RING_ROWS  # [ROWS]
    overwrites = is_real & (position >= place.after - RING_ROWS)
    copy_old_rows(saved_row, place, overwrites & (saved_row >= 0), ring_ptr, window, SPEC)
    num_tokens = place.after - place.before
    old_row = tl.maximum(num_tokens - RING_ROWS + NUM_OLD, 0) + position - place.before
    is_left = is_real & (old_row < NUM_OLD)
    while tl.max(is_left.to(tl.int32), axis=0) > 0:
        copy_old_rows(old_row, place, is_left, ring_ptr, window, SPEC)
        old_row += num_tokens
        is_left = is_real & (old_row < NUM_OLD)


@triton.jit
def write_window_rows(
    token, count, place, num_tokens, window, rope, eps,
    ROWS: tl.constexpr, SPEC: tl.constexpr, HAS_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the KV of a request's `count` tokens, at most ROWS, in its ring.

    All rows of a chunk go to the workspace, and its last ones to the ring as well.
    """
    ROW: tl.constexpr = SPEC.ROW
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, ROW.BLOCK)[None, :]
    is_read = (token + row < num_tokens)[:, None] & (channel < ROW.DIM)
    source = (token + row).to(tl.int64)[:, None] * window.stride + channel  # [ROWS, BLOCK]
    values = widen(tl.load(window.kv_ptr + source, mask=is_read, other=0.0))
    weight = load_norm(window.norm_ptr, ROWS, ROW.DIM, ROW.BLOCK)
    position = place.position + row  # [ROWS]
    is_real = (row < count) & (place.slot >= 0)
    if ROW.ROPE > 0:
        rows_ptr = window.kv_ptr + (token + row).to(tl.int64) * window.stride
        pairs = load_pairs(rows_ptr, window.norm_ptr, rope, token + row, is_real, ROW)
    else:
        cos, sin = load_rope(rope, token + row, is_real, ROW.DIM, ROW.ROTATED, ROW.BLOCK)
    factor = reciprocal_root(mean_of_squares(values, ROW.DIM) + eps)
    normed = (values * factor[:, None]) * weight
    if ROW.ROPE > 0:
        even, odd = rotate_pairs(pairs, factor)  # [ROWS, ROPE / 2]
    else:  # rotated channels are quantised as all others
        normed = rotate_tail(normed, cos, sin, ROWS, ROW.DIM, ROW.ROTATED, ROW.BLOCK)
    encoded = encode_rows(normed, 1.0, ROWS, ROW)
    ring_ptr = window.slots_ptr + place.slot * window.slot_bytes + window.ring_offset
    if HAS_CHUNKS:
        if place.workspace_start >= 0:
            if place.before > 0:
                carry_over(position, place, is_real, ring_ptr, window, SPEC)
                tl.debug_barrier()  # the old rows are read before they are overwritten
            first_row = place.workspace_start + SPEC.WINDOW - 1
            workspace_row = (first_row + position - place.before).to(tl.int64)
            data_ptr = window.workspace_ptr + workspace_row * ROW.DATA_STRIDE
            scales_ptr = window.workspace_ptr + scales_at(window.workspace_rows.to(tl.int64), ROW)
            store_rows(encoded, data_ptr, scales_ptr + workspace_row * ROW.SCALE_STRIDE, is_real,
                       ROWS, ROW, HAS_ROPE=False)  # fmt: skip
            if ROW.ROPE > 0:
                store_rotated(even, odd, data_ptr, is_real, ROW)
        is_real = is_real & (position >= place.after - SPEC.RING_ROWS)
    if tl.max(is_real.to(tl.int32), axis=0) > 0:
        ring_row = (position % SPEC.RING_ROWS).to(tl.int64)
        data_ptr = ring_ptr + ring_row * ROW.DATA_STRIDE
        scales_ptr = ring_ptr + scales_at(SPEC.RING_ROWS, ROW)
        store_rows(encoded, data_ptr, scales_ptr + ring_row * ROW.SCALE_STRIDE, is_real, ROWS, ROW,
                   HAS_ROPE=False)  # fmt: skip
        if ROW.ROPE > 0:
            store_rotated(even, odd, data_ptr, is_real, ROW)
