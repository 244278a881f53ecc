"""Append: a token's KV becomes a window row, its compressor projections become a tail row."""

import triton
import triton.language as tl

from dsv4.kernels.triton.primitives import (
    bf16_bits,
    encode_rows,
    fp32_bits,
    load_norm,
    load_pairs,
    mean_of_squares,
    padded,
    reciprocal_root,
    rotate_pairs,
    round_to_bf16,
    store_rotated,
    store_rows,
    wait_for_launch_before,
)


@triton.jit
def locate(token, tokens, IS_DECODE: tl.constexpr):
    """Position, slot (-1 for padding), lengths and workspace start of a token's request.

    In a decode step every request has one token, so that the token's index is its request's. The
    plan was copied to the device before the first launch; for all else the launch before is waited
    for.
    """
    (positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
     _token_starts_ptr) = tokens  # fmt: skip
    position = tl.load(positions_ptr + token)
    if IS_DECODE:
        slot = tl.load(request_slots_ptr + token).to(tl.int64)
        before = position
        after = position + 1
        start = -1
    else:
        request = tl.load(request_ids_ptr + token)
        slot = tl.load(request_slots_ptr + request).to(tl.int64)
        before = tl.load(before_ptr + request)
        after = tl.load(after_ptr + request)
        start = tl.load(starts_ptr + request)
    wait_for_launch_before(STARTS_NEXT=True)
    return position, slot, before, after, start


@triton.jit
def locate_segment(segment, num_tokens, tokens, TILE: tl.constexpr):
    """The first token of a segment, how many it has, and what `locate` says of the first.

    A segment is what a tile of tokens has of one request. There is one for each tile, of its first
    token's request, then one for each request, which is empty unless the request begins inside a
    tile. A loop over a tile's requests instead would take 40 registers more.
    """
    request_ids_ptr, token_starts_ptr = tokens[1], tokens[6]
    token = segment * TILE
    request = segment - tl.cdiv(num_tokens, TILE)
    is_there = True
    if request >= 0:
        token = tl.minimum(tl.load(token_starts_ptr + request), num_tokens - 1)
        is_there = (token % TILE != 0) & (tl.load(request_ids_ptr + token) == request)
    position, slot, before, after, start = locate(token, tokens, False)
    end = tl.minimum(token // TILE * TILE + TILE, num_tokens)
    count = tl.where(is_there, tl.minimum(after - position, end - token), 0)
    return token, count, position, slot, before, after, start


@triton.jit
def tail_of(byte_ptr, TAIL_BF16: tl.constexpr):
    """A slot's tail, from the address of its first byte."""
    if TAIL_BF16:
        tail_ptr = byte_ptr.to(tl.pointer_type(tl.bfloat16))
    else:
        tail_ptr = byte_ptr.to(tl.pointer_type(tl.float32))
    return tail_ptr


@triton.jit
def as_stored(x, TAIL_BF16: tl.constexpr):
    """fp32 values as a tail keeps them."""
    if TAIL_BF16:
        x = round_to_bf16(x)
    return x


@triton.jit
def load_row(projections, token, position, column, mask, WIDTH: tl.constexpr, RATIO: tl.constexpr,
             TAIL_BF16: tl.constexpr):  # fmt: skip
    """kv, and gate + bias, of tokens as a tail keeps them; token and column broadcast."""
    kv_ptr, gate_ptr, stride, bias_ptr = projections
    source = token.to(tl.int64) * stride + column
    kv = tl.load(kv_ptr + source, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + source, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + position % RATIO * WIDTH + column, mask=mask, other=0.0)
    return as_stored(kv, TAIL_BF16), as_stored(gate + bias.to(tl.float32), TAIL_BF16)


@triton.jit
def load_stored(tail_ptr, position, column, mask, WIDTH: tl.constexpr, TAIL_ROWS: tl.constexpr):
    """kv, and gate + bias, of earlier tokens from their slot's tail."""
    at = tail_ptr + (position % TAIL_ROWS) * (2 * WIDTH) + column
    kv = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return kv, tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tail(kv, gate, tail_ptr, position, column, mask, WIDTH: tl.constexpr,
               TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr):  # fmt: skip
    """Store kv, and gate + bias, in a slot's tail."""
    target = tail_ptr + (position % TAIL_ROWS) * (2 * WIDTH) + column
    if TAIL_BF16:
        target = target.to(tl.pointer_type(tl.uint16))
        tl.store(target, bf16_bits(kv), mask=mask)
        tl.store(target + WIDTH, bf16_bits(gate), mask=mask)
    else:
        tl.store(target, kv, mask=mask)
        target = target.to(tl.pointer_type(tl.int32))
        tl.store(target + WIDTH, fp32_bits(gate), mask=mask)


@triton.jit
def copy_records(source_ptr, target_ptr, is_copied, BYTES: tl.constexpr):
    """Copy records of 4-byte words, one for each of `[ROWS]` pointers."""
    WORDS: tl.constexpr = BYTES // 4
    word = tl.arange(0, padded(WORDS))[None, :]
    mask = is_copied[:, None] & (word < WORDS)
    source_ptr = source_ptr.to(tl.pointer_type(tl.int32))[:, None]
    values = tl.load(source_ptr + word, mask=mask, other=0)
    tl.store(target_ptr.to(tl.pointer_type(tl.int32))[:, None] + word, values, mask=mask)


@triton.jit
def copy_old_rows(
    old, before, start, is_copied, ring_ptr, workspace_ptr, workspace_rows,
    DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, RING_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Copy ring rows to the workspace: `old` `[ROWS]` counts from WINDOW - 1 before the chunk."""
    position = before - (WINDOW - 1) + old
    is_copied = is_copied & (position >= 0)
    from_row = ((position + RING_ROWS) % RING_ROWS).to(tl.int64)
    to_row = (start + old).to(tl.int64)
    copy_records(ring_ptr + from_row * DATA_BYTES, workspace_ptr + to_row * DATA_BYTES,
                 is_copied, DATA_BYTES)  # fmt: skip
    if SCALE_BYTES > 0:
        scales_ptr = workspace_ptr + workspace_rows.to(tl.int64) * DATA_BYTES
        copy_records(ring_ptr + RING_ROWS * DATA_BYTES + from_row * SCALE_BYTES,
                     scales_ptr + to_row * SCALE_BYTES, is_copied, SCALE_BYTES)  # fmt: skip


@triton.jit
def carry_over(
    position, before, after, start, is_real, ring_ptr, workspace_ptr, workspace_rows,
    DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, RING_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """The ring's last WINDOW - 1 rows from before a chunk go to the workspace.

    A row that a token of the chunk will overwrite is copied by that token's own program, which
    is the only one to touch it; the others are shared out over the chunk's tokens.
    """
    past = (position - before + 1) % RING_ROWS
    own = WINDOW - 2 - (RING_ROWS - past) % RING_ROWS
    is_last = is_real & (position >= after - RING_ROWS)
    copy_old_rows(own, before, start, is_last & (own >= 0), ring_ptr, workspace_ptr,
                  workspace_rows, DATA_BYTES, SCALE_BYTES, RING_ROWS, WINDOW)  # fmt: skip
    old = tl.maximum(after - before - RING_ROWS + WINDOW - 1, 0) + position - before
    is_left = is_real & (old < WINDOW - 1)
    while tl.max(is_left.to(tl.int32), axis=0) > 0:
        copy_old_rows(old, before, start, is_left, ring_ptr, workspace_ptr, workspace_rows,
                      DATA_BYTES, SCALE_BYTES, RING_ROWS, WINDOW)  # fmt: skip
        old += after - before
        is_left = is_real & (old < WINDOW - 1)


@triton.jit
def write_window_rows(
    token, count, position, slot, before, after, start, kv_ptr, kv_stride, num_tokens, norm_ptr,
    rope, slots_ptr, slot_bytes, ring_offset, workspace_ptr, workspace_rows, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    RING_ROWS: tl.constexpr, WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the KV of a request's `count` tokens, at most ROWS, in its ring.

    Of a chunk all rows go to the workspace, and its last ones to the ring as well.
    """
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)[None, :]
    is_read = (token + row < num_tokens)[:, None] & (channel < DIM)
    source = (token + row).to(tl.int64)[:, None] * kv_stride + channel
    values = tl.load(kv_ptr + source, mask=is_read, other=0.0).to(tl.float32)
    weight = load_norm(norm_ptr, ROWS, DIM, BLOCK)
    position = position + row
    is_real = (row < count) & (slot >= 0)
    PAIRS: tl.constexpr = padded(ROPE // 2)
    rows_ptr = kv_ptr + (token + row).to(tl.int64) * kv_stride
    pairs = load_pairs(rows_ptr, norm_ptr, rope, position, is_real, DIM, ROPE, PAIRS)
    factor = reciprocal_root(mean_of_squares(values, DIM) + eps)
    even, odd = rotate_pairs(pairs, factor)
    normed = (values * factor[:, None]) * weight
    encoded = encode_rows(normed, 1.0, FORMAT, ROWS, DIM, ROPE, BLOCK)
    ring_ptr = slots_ptr + slot * slot_bytes + ring_offset
    if HAS_CHUNKS:
        if start >= 0:
            if before > 0:
                carry_over(position, before, after, start, is_real, ring_ptr, workspace_ptr,
                           workspace_rows, DATA_BYTES, SCALE_BYTES, RING_ROWS, WINDOW)  # fmt: skip
                tl.debug_barrier()  # the old rows are read before they are overwritten
            at = (start + WINDOW - 1 + position - before).to(tl.int64)
            data_ptr = workspace_ptr + at * DATA_BYTES
            scales_ptr = workspace_ptr + workspace_rows.to(tl.int64) * DATA_BYTES
            store_rows(encoded, data_ptr, scales_ptr + at * SCALE_BYTES, is_real, FORMAT, ROWS,
                       DIM, ROPE, BLOCK, False)  # fmt: skip
            store_rotated(even, odd, data_ptr, is_real, FORMAT, DIM, ROPE, PAIRS)
        is_real = is_real & (position >= after - RING_ROWS)
    if tl.max(is_real.to(tl.int32), axis=0) > 0:
        at = (position % RING_ROWS).to(tl.int64)
        data_ptr = ring_ptr + at * DATA_BYTES
        store_rows(encoded, data_ptr, ring_ptr + RING_ROWS * DATA_BYTES + at * SCALE_BYTES,
                   is_real, FORMAT, ROWS, DIM, ROPE, BLOCK, False)  # fmt: skip
        store_rotated(even, odd, data_ptr, is_real, FORMAT, DIM, ROPE, PAIRS)
