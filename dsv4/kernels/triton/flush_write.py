"""The write path of one layer in one launch: append, compress, flush.

A program does one of three things: it writes window rows, or entries of the main compressor, or
of the indexer's. In a step it takes one token (of an HCA layer: some of one token's channels), in
a forward with chunks what a tile of tokens has of one request.

No row is overwritten while another program may still read it. A step never overwrites a row that
another token of it reads, because rings and tails are longer by a step. Of a chunk, a ring row is
overwritten by the program that copied it to the workspace, and the tail by the program of the
chunk's first token, which pools all windows that reach back into it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import EntryInputs, LayerWrites, TokenMap, WindowInputs
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.append import (
    load_row,
    locate,
    locate_segment,
    store_tail,
    tail_of,
    write_window_rows,
)
from dsv4.kernels.triton.compressor import (
    pool_csa,
    pool_csa_inside,
    pool_csa_step,
    pool_hca,
    pool_hca_step,
)
from dsv4.kernels.triton.launch import Kind, Launch, launch_parameters
from dsv4.kernels.triton.primitives import (
    encode_rows,
    finish_rows,
    hadamard,
    load_norm,
    load_rope,
    store_rows,
    wait_for_launch_before,
)


@triton.jit
def flush_rows(
    pooled, position, slot, is_closing, norm_ptr, rope, blocks, eps, global_scale,
    ROWS: tl.constexpr, RATIO: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    ROW_ROPE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_HADAMARD: tl.constexpr, LOG_DIM: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the entries that `position` `[ROWS]` closes, where is_closing.

    ROPE channels are rotated; ROW_ROPE of them are a field of their own in the row.
    """
    blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride = blocks
    column = position // (RATIO * ENTRIES_PER_BLOCK)
    block = tl.load(block_table_ptr + slot * table_stride + column, mask=is_closing, other=-1)
    block = block.to(tl.int64)
    weight = load_norm(norm_ptr, ROWS, DIM, BLOCK)
    cos, sin = load_rope(rope, position + 1 - RATIO, is_closing, DIM, ROPE, BLOCK)
    pooled = tl.where(tl.arange(0, BLOCK)[None, :] < DIM, pooled, 0.0)
    entry = finish_rows(pooled, weight, cos, sin, eps, ROWS, DIM, ROPE, BLOCK)
    if HAS_HADAMARD:
        entry = hadamard(entry, ROWS, DIM, LOG_DIM)
    row = (position // RATIO % ENTRIES_PER_BLOCK).to(tl.int64)
    page_ptr = blocks_ptr + block * block_bytes + page_offset
    encoded = encode_rows(entry, global_scale, FORMAT, ROWS, DIM, ROW_ROPE, BLOCK)
    store_rows(encoded, page_ptr + row * DATA_BYTES,
               page_ptr + ENTRIES_PER_BLOCK * DATA_BYTES + row * SCALE_BYTES, block >= 0,
               FORMAT, ROWS, DIM, ROW_ROPE, BLOCK, True)  # fmt: skip


@triton.jit
def as_row(x):
    """A scalar as `[1]`."""
    return tl.zeros((1,), x.dtype) + x


@triton.jit
def compress_csa_token(
    token, position, slot, before, is_kept, projections, slots, norm_ptr, rope, blocks, eps,
    global_scale,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr,
    TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    ROW_ROPE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_HADAMARD: tl.constexpr, LOG_DIM: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """One token of a CSA layer: flush the window that it closes, keep its row if is_kept."""
    slots_ptr, slot_bytes, tail_offset = slots
    column = tl.arange(0, BLOCK)[None, :]
    mask = column < DIM
    next_kv, next_gate = load_row(projections, token, position, column, mask, 2 * DIM, 4,
                                  TAIL_BF16)  # fmt: skip
    kv, gate = load_row(projections, token, position, column + DIM, mask, 2 * DIM, 4, TAIL_BF16)
    tail_ptr = tail_of(slots_ptr + slot * slot_bytes + tail_offset, TAIL_BF16)
    if (slot >= 0) & (position % 4 == 3):
        if IS_DECODE:
            pooled = pool_csa_step(kv, gate, tail_ptr, position, column, mask, DIM, BLOCK,
                                   TAIL_ROWS)  # fmt: skip
        else:
            pooled = pool_csa(projections, tail_ptr, token, position, before, column, mask, DIM,
                              BLOCK, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        flush_rows(pooled, as_row(position), slot, as_row(slot) >= 0, norm_ptr, rope, blocks, eps,
                   global_scale, 1, 4, DIM, ROPE, BLOCK, ENTRIES_PER_BLOCK, FORMAT, ROW_ROPE,
                   DATA_BYTES, SCALE_BYTES, HAS_HADAMARD, LOG_DIM)  # fmt: skip
    mask = mask & is_kept
    store_tail(next_kv, next_gate, tail_ptr, position, column, mask, 2 * DIM, TAIL_ROWS, TAIL_BF16)
    store_tail(kv, gate, tail_ptr, position, column + DIM, mask, 2 * DIM, TAIL_ROWS, TAIL_BF16)


@triton.jit
def keep_last_rows(
    projections, tail_ptr, token, position, count, column, mask, WIDTH: tl.constexpr,
    RATIO: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store in the tail the last of the `count` rows from `token` on, whose position is given."""
    index = tl.maximum(count - TAIL_ROWS, 0) + tl.arange(0, AT_ONCE)[:, None]
    for _ in range(0, TAIL_ROWS, AT_ONCE):
        is_row = mask & (index < count)
        kv, gate = load_row(projections, token + index, position + index, column, is_row, WIDTH,
                            RATIO, TAIL_BF16)  # fmt: skip
        store_tail(kv, gate, tail_ptr, position + index, column, is_row, WIDTH, TAIL_ROWS,
                   TAIL_BF16)  # fmt: skip
        index += AT_ONCE


@triton.jit
def compress_csa_segment(
    segment, num_tokens, tokens, projections, slots, norm_ptr, rope, blocks, eps, global_scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, ROW_ROPE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, HAS_HADAMARD: tl.constexpr, LOG_DIM: tl.constexpr,
):  # fmt: skip
    """A chunk's segment of at most 4 × ROWS tokens of a CSA layer: windows inside it, ROWS at once.

    The program of a chunk's first token keeps the chunk's last rows.
    """
    slots_ptr, slot_bytes, tail_offset = slots
    column = tl.arange(0, BLOCK)[None, :]
    token, count, position, slot, before, after, start = locate_segment(
        segment, num_tokens, tokens, 4 * ROWS
    )
    if (count > 0) & (slot >= 0) & (start >= 0):
        ahead = 3 - position % 4 + 4 * tl.arange(0, ROWS)
        is_closing = (ahead < count) & (position + ahead - 7 >= before)
        pooled = pool_csa_inside(projections, token + ahead, is_closing, ROWS, DIM, BLOCK,
                                 TAIL_BF16)  # fmt: skip
        flush_rows(pooled, position + ahead, slot, is_closing, norm_ptr, rope, blocks, eps,
                   global_scale, ROWS, 4, DIM, ROPE, BLOCK, ENTRIES_PER_BLOCK, FORMAT,
                   ROW_ROPE, DATA_BYTES, SCALE_BYTES, HAS_HADAMARD, LOG_DIM)  # fmt: skip
        if position == before:
            tail_ptr = tail_of(slots_ptr + slot * slot_bytes + tail_offset, TAIL_BF16)
            for series in tl.static_range(2):
                keep_last_rows(projections, tail_ptr, token, position, after - before,
                               column + series * DIM, column < DIM, 2 * DIM, 4, TAIL_ROWS,
                               TAIL_BF16, 4)  # fmt: skip


@triton.jit
def finish_hca_window(
    window, position, slot, pooled_ptr, arrivals_ptr, norm_ptr, rope, blocks, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FORMAT: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """The last to arrive of the PARTS programs that leave a window's channels stores the entry.

    Which one that is does not change a bit of it.
    """
    tl.debug_barrier()  # all of the program's stores come before its arrival
    if tl.atomic_add(arrivals_ptr + window, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrivals_ptr + window, 0)
        column = tl.arange(0, BLOCK)[None, :]
        row = tl.load(pooled_ptr + window * DIM + column, mask=column < DIM, other=0.0,
                      cache_modifier=".cg")  # fmt: skip
        flush_rows(row, as_row(position), slot, as_row(slot) >= 0, norm_ptr, rope, blocks,
                   eps, 1.0, 1, 128, DIM, ROPE, BLOCK, ENTRIES_PER_BLOCK, FORMAT, ROPE, DATA_BYTES,
                   SCALE_BYTES, False, 0)  # fmt: skip


@triton.jit
def compress_hca_step(
    token, part, tokens, projections, slots, pooled_ptr, arrivals_ptr, norm_ptr, rope, blocks, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Some channels of one token of an HCA layer in a step."""
    slots_ptr, slot_bytes, tail_offset = slots
    column = part * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    mask = column < DIM
    position, slot, before, _, _ = locate(token, tokens, IS_DECODE)
    kv, gate = load_row(projections, token, position, column, mask, DIM, 128, TAIL_BF16)
    tail_ptr = tail_of(slots_ptr + slot * slot_bytes + tail_offset, TAIL_BF16)
    if (slot >= 0) & (position % 128 == 127):
        if IS_DECODE:
            window = token + token // 128
            pool_hca_step(projections, tail_ptr, token, position, part * CHANNELS, window,
                          pooled_ptr, DIM, CHANNELS, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        else:
            window = tl.load(tokens[1] + token) + token // 128
            pool_hca(projections, tail_ptr, token, position, before, part * CHANNELS, window,
                     pooled_ptr, DIM, CHANNELS, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        finish_hca_window(window, position, slot, pooled_ptr, arrivals_ptr, norm_ptr, rope, blocks,
                          eps, DIM, ROPE, BLOCK, BLOCK // CHANNELS, ENTRIES_PER_BLOCK, FORMAT,
                          DATA_BYTES, SCALE_BYTES)  # fmt: skip
    store_tail(kv, gate, tail_ptr, position, column, mask & (slot >= 0), DIM, TAIL_ROWS, TAIL_BF16)


@triton.jit
def compress_hca_segment(
    segment, part, num_tokens, tokens, projections, slots, pooled_ptr, arrivals_ptr, norm_ptr, rope,
    blocks, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """Some channels of a segment of an HCA layer in a forward with chunks, at most 128 tokens.

    The window that reaches back into the tail is done by the program of its chunk's first token,
    which then overwrites the tail.
    """
    slots_ptr, slot_bytes, tail_offset = slots
    column = part * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    mask = column < DIM
    token, count, position, slot, before, after, start = locate_segment(
        segment, num_tokens, tokens, 128
    )
    if (count > 0) & (slot >= 0):
        ahead = 127 - position % 128
        kept = count
        limit = count
        if start >= 0:
            kept = tl.where(position == before, after - before, 0)
            limit = tl.where(position + ahead - 127 < before, kept, count)
        tail_ptr = tail_of(slots_ptr + slot * slot_bytes + tail_offset, TAIL_BF16)
        if ahead < limit:
            window = tl.load(tokens[1] + token) + (token + ahead) // 128
            pool_hca(projections, tail_ptr, token + ahead, position + ahead, before,
                     part * CHANNELS, window, pooled_ptr, DIM, CHANNELS, TAIL_ROWS,
                     TAIL_BF16)  # fmt: skip
            finish_hca_window(window, position + ahead, slot, pooled_ptr, arrivals_ptr, norm_ptr,
                              rope, blocks, eps, DIM, ROPE, BLOCK, BLOCK // CHANNELS,
                              ENTRIES_PER_BLOCK, FORMAT, DATA_BYTES, SCALE_BYTES)  # fmt: skip
        if kept > 0:
            tl.debug_barrier()  # what the tail held has been read
            keep_last_rows(projections, tail_ptr, token, position, kept, column, mask, DIM, 128,
                           TAIL_ROWS, TAIL_BF16, 16)  # fmt: skip


COUNTS = ["num_tokens", "num_segments", "num_index_segments", "workspace_rows"]


@triton.jit(do_not_specialize=COUNTS)
def _write_kernel(
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
    token_starts_ptr, block_table_ptr, table_stride, num_tokens, num_segments, num_index_segments,
    cos_ptr, sin_ptr, eps, slots_ptr, slot_bytes, blocks_ptr, block_bytes,
    window_kv_ptr, window_stride, window_norm_ptr, ring_offset, workspace_ptr, workspace_rows,
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, tail_offset, page_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr, index_tail_offset,
    index_page_offset, global_scale_ptr, pooled_ptr, arrivals_ptr,
    RATIO: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    KV_FORMAT: tl.constexpr, KV_DATA: tl.constexpr, KV_SCALE: tl.constexpr,
    INDEX_DIM: tl.constexpr, INDEX_BLOCK: tl.constexpr, INDEX_FORMAT: tl.constexpr,
    INDEX_DATA: tl.constexpr, INDEX_SCALE: tl.constexpr, HAS_HADAMARD: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr, LOG_INDEX: tl.constexpr, TAIL_ROWS: tl.constexpr,
    TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, RING_ROWS: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, INDEX_ROWS: tl.constexpr, WINDOW_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_COMPRESSOR: tl.constexpr,
    HAS_INDEX: tl.constexpr, HAS_CHUNKS: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Programs in this order: the main compressor's, the indexer's, the window's."""
    program = tl.program_id(0)
    tokens = (positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
              token_starts_ptr)  # fmt: skip
    rope = (cos_ptr, sin_ptr)
    if HAS_COMPRESSOR and RATIO == 128:
        PARTS: tl.constexpr = BLOCK // CHANNELS
        projections = (kv_ptr, gate_ptr, stride, bias_ptr)
        slots = (slots_ptr, slot_bytes, tail_offset)
        blocks = (blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride)
        if program < num_segments * PARTS:
            if HAS_CHUNKS:
                compress_hca_segment(
                    program // PARTS, program % PARTS, num_tokens, tokens, projections, slots,
                    pooled_ptr, arrivals_ptr, norm_ptr, rope, blocks, eps, DIM, ROPE, BLOCK,
                    CHANNELS, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK, KV_FORMAT, KV_DATA, KV_SCALE,
                )  # fmt: skip
            else:
                compress_hca_step(
                    program // PARTS, program % PARTS, tokens, projections, slots, pooled_ptr,
                    arrivals_ptr, norm_ptr, rope, blocks, eps, DIM, ROPE, BLOCK, CHANNELS,
                    TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK, KV_FORMAT, KV_DATA, KV_SCALE,
                    IS_DECODE,
                )  # fmt: skip
        program -= num_segments * PARTS
    elif HAS_COMPRESSOR:
        projections = (kv_ptr, gate_ptr, stride, bias_ptr)
        slots = (slots_ptr, slot_bytes, tail_offset)
        blocks = (blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride)
        if program < num_segments:
            if HAS_CHUNKS:
                compress_csa_segment(
                    program, num_tokens, tokens, projections, slots, norm_ptr, rope, blocks, eps,
                    1.0, ROWS, DIM, ROPE, BLOCK, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK,
                    KV_FORMAT, ROPE, KV_DATA, KV_SCALE, False, 0,
                )  # fmt: skip
            else:
                position, slot, before, _, _ = locate(program, tokens, IS_DECODE)
                compress_csa_token(
                    program, position, slot, before, slot >= 0, projections, slots, norm_ptr, rope,
                    blocks, eps, 1.0, DIM, ROPE, BLOCK, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK,
                    KV_FORMAT, ROPE, KV_DATA, KV_SCALE, False, 0, IS_DECODE,
                )  # fmt: skip
        program -= num_segments
    if HAS_INDEX:
        scale = 1.0
        if HAS_GLOBAL_SCALE:
            scale = tl.load(global_scale_ptr)
        projections = (index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr)
        slots = (slots_ptr, slot_bytes, index_tail_offset)
        blocks = (blocks_ptr, block_bytes, index_page_offset, block_table_ptr, table_stride)
        if (program >= 0) & (program < num_index_segments):
            if HAS_CHUNKS:
                compress_csa_segment(
                    program, num_tokens, tokens, projections, slots, index_norm_ptr, rope, blocks,
                    eps, scale, INDEX_ROWS, INDEX_DIM, ROPE, INDEX_BLOCK, TAIL_ROWS, TAIL_BF16,
                    ENTRIES_PER_BLOCK, INDEX_FORMAT, 0, INDEX_DATA, INDEX_SCALE, HAS_HADAMARD,
                    LOG_INDEX,
                )  # fmt: skip
            else:
                position, slot, before, _, _ = locate(program, tokens, IS_DECODE)
                compress_csa_token(
                    program, position, slot, before, slot >= 0, projections, slots,
                    index_norm_ptr, rope, blocks, eps, scale, INDEX_DIM, ROPE, INDEX_BLOCK,
                    TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK, INDEX_FORMAT, 0, INDEX_DATA,
                    INDEX_SCALE, HAS_HADAMARD, LOG_INDEX, IS_DECODE,
                )  # fmt: skip
        program -= num_index_segments
    if HAS_WINDOW:
        if program >= 0:
            if WINDOW_ROWS == 1:
                token, count = program, 1
                position, slot, before, after, start = locate(token, tokens, IS_DECODE)
            else:
                token, count, position, slot, before, after, start = locate_segment(
                    program, num_tokens, tokens, WINDOW_ROWS
                )
            if count > 0:
                write_window_rows(
                    token, count, position, slot, before, after, start, window_kv_ptr,
                    window_stride, num_tokens, window_norm_ptr, rope, slots_ptr, slot_bytes,
                    ring_offset, workspace_ptr, workspace_rows, eps, WINDOW_ROWS, DIM, ROPE, BLOCK,
                    KV_FORMAT, KV_DATA, KV_SCALE, RING_ROWS, WINDOW, HAS_CHUNKS,
                )  # fmt: skip


@triton.jit
def _edge_kernel(
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
    token_starts_ptr, block_table_ptr, table_stride, cos_ptr, sin_ptr, eps, slots_ptr, slot_bytes,
    blocks_ptr, block_bytes,
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, tail_offset, page_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr, index_tail_offset,
    index_page_offset, global_scale_ptr,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, KV_FORMAT: tl.constexpr,
    KV_DATA: tl.constexpr, KV_SCALE: tl.constexpr, INDEX_DIM: tl.constexpr,
    INDEX_BLOCK: tl.constexpr, INDEX_FORMAT: tl.constexpr, INDEX_DATA: tl.constexpr,
    INDEX_SCALE: tl.constexpr, HAS_HADAMARD: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr,
    LOG_INDEX: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, RING_ROWS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What a CSA layer reads from tails in a forward with chunks, before they are overwritten.

    A program is one request, one of its tokens and one compressor. Of a chunk the tokens are
    those that close a window which reaches back into the tail, at most two; of other requests
    all.
    """
    request = tl.program_id(0)
    index = tl.program_id(1)
    slot = tl.load(request_slots_ptr + request).to(tl.int64)
    before = tl.load(before_ptr + request)
    count = tl.load(after_ptr + request) - before
    is_chunk = tl.load(starts_ptr + request) >= 0
    first_token = tl.load(token_starts_ptr + request)
    wait_for_launch_before(STARTS_NEXT=True)
    ahead = tl.where(is_chunk, 3 - before % 4 + 4 * index, index)
    if (slot >= 0) & (ahead < tl.where(is_chunk, tl.minimum(count, 7), count)):
        token = first_token + ahead
        rope = (cos_ptr, sin_ptr)
        if tl.program_id(2) == 0:
            compress_csa_token(
                token, before + ahead, slot, before, ~is_chunk,
                (kv_ptr, gate_ptr, stride, bias_ptr), (slots_ptr, slot_bytes, tail_offset),
                norm_ptr, rope,
                (blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride), eps, 1.0,
                DIM, ROPE, BLOCK, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK, KV_FORMAT, ROPE,
                KV_DATA, KV_SCALE, False, 0, False,
            )  # fmt: skip
        else:
            scale = 1.0
            if HAS_GLOBAL_SCALE:
                scale = tl.load(global_scale_ptr)
            compress_csa_token(
                token, before + ahead, slot, before, ~is_chunk,
                (index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr),
                (slots_ptr, slot_bytes, index_tail_offset), index_norm_ptr, rope,
                (blocks_ptr, block_bytes, index_page_offset, block_table_ptr, table_stride), eps,
                scale, INDEX_DIM, ROPE, INDEX_BLOCK, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK,
                INDEX_FORMAT, 0, INDEX_DATA, INDEX_SCALE, HAS_HADAMARD, LOG_INDEX, False,
            )  # fmt: skip


def write_layer(
    writes: LayerWrites,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    launch: Launch | None = None,
) -> None:
    """What is given of a layer; see `kernels.reference.flush_write`.

    One launch, or two for a CSA layer in a forward with chunks.
    """
    num_tokens = len(tokens.positions)
    if not num_tokens:
        return
    ratio = memory.layout.ratio if writes.entries is not None else 0
    has_chunks = len(tokens.chunk_ids) > 0
    is_decode = tokens.max_step <= 1 and num_tokens == len(tokens.request_slots)
    if launch is None:
        kind: Kind = "chunk" if has_chunks else "decode" if is_decode else "step"
        launch = launch_parameters(ratio, kind, num_tokens, memory.slots.device)
    arguments = _arguments(writes, memory, tokens)
    grid = _grid(writes, arguments, launch, tokens, ratio=ratio, has_chunks=has_chunks)
    if has_chunks and writes.index_keys is not None:
        # A chunk has at most two such windows, another request at most a step of tokens.
        most = max(2, memory.layout.tail_rows - 7)
        _edge_kernel[(len(tokens.request_slots), most, 2)](**arguments, num_warps=8)
    _write_kernel[(grid.num_programs,)](
        **arguments, **_window_arguments(writes.window, memory, tokens),
        num_tokens=num_tokens, num_segments=grid.num_segments,
        num_index_segments=grid.num_index_segments,
        pooled_ptr=memory.pooled, arrivals_ptr=memory.arrivals, RATIO=ratio or 1,
        ROWS=launch.rows, INDEX_ROWS=grid.index_rows, WINDOW_ROWS=launch.window_rows,
        CHANNELS=grid.channels, HAS_WINDOW=writes.window is not None,
        HAS_COMPRESSOR=writes.entries is not None, HAS_INDEX=writes.index_keys is not None,
        HAS_CHUNKS=has_chunks, IS_DECODE=is_decode, num_warps=launch.num_warps,
        maxnreg=launch.maxnreg,
    )  # fmt: skip


class _Grid(NamedTuple):
    num_programs: int
    num_segments: int
    num_index_segments: int
    index_rows: int
    channels: int


def _grid(
    writes: LayerWrites,
    arguments: dict[str, Any],
    launch: Launch,
    tokens: TokenMap,
    *,
    ratio: int,
    has_chunks: bool,
) -> _Grid:
    """How many programs do what."""
    block, index_block = arguments["BLOCK"], arguments["INDEX_BLOCK"]
    index_rows = launch.rows * max(1, block // index_block)
    channels = min(launch.channels, block)
    tile, index_tile = 1, 1
    if has_chunks:
        tile, index_tile = 128 if ratio == 128 else 4 * launch.rows, 4 * index_rows
    num_segments = _num_segments(tokens, tile)
    num_index_segments = _num_segments(tokens, index_tile)
    num_programs = 0
    if writes.entries is not None:
        num_programs += num_segments * (block // channels if ratio == 128 else 1)
    if writes.index_keys is not None:
        num_programs += num_index_segments
    if writes.window is not None:
        num_programs += _num_segments(tokens, launch.window_rows)
    return _Grid(num_programs, num_segments, num_index_segments, index_rows, channels)


def _num_segments(tokens: TokenMap, tile: int) -> int:
    """Segments of tiles of so many tokens, as `append.locate_segment` counts them."""
    num_tokens = len(tokens.positions)
    return num_tokens if tile == 1 else -(-num_tokens // tile) + len(tokens.request_slots)


def _arguments(writes: LayerWrites, memory: LayerMemory, tokens: TokenMap) -> dict[str, Any]:
    """What both kernels take."""
    layout, row, key = memory.layout, memory.layout.kv_row, memory.layout.index_row
    scale = memory.global_scale
    return {
        "positions_ptr": tokens.positions, "request_ids_ptr": tokens.request_ids,
        "request_slots_ptr": tokens.request_slots, "before_ptr": tokens.positions_before,
        "after_ptr": tokens.positions_after, "starts_ptr": tokens.workspace_starts,
        "token_starts_ptr": tokens.token_starts,
        "block_table_ptr": tokens.block_table, "table_stride": tokens.block_table.stride(0),
        "cos_ptr": memory.cos, "sin_ptr": memory.sin, "eps": layout.rms_norm_eps,
        "slots_ptr": memory.slots, "slot_bytes": memory.slots.shape[1],
        "blocks_ptr": memory.blocks, "block_bytes": memory.blocks.shape[1],
        **_entry_arguments("", writes.entries, tokens),
        "tail_offset": layout.tail_offset, "page_offset": layout.entries_offset,
        **_entry_arguments("index_", writes.index_keys, tokens),
        "index_tail_offset": layout.index_tail_offset, "index_page_offset": layout.index_offset,
        "global_scale_ptr": memory.pooled if scale is None else scale,
        "DIM": row.dim, "ROPE": row.rope_dim, "BLOCK": next_power_of_two(row.dim),
        "KV_FORMAT": f"kv_{row.name}", "KV_DATA": row.data_bytes, "KV_SCALE": row.scale_bytes,
        "INDEX_DIM": key.dim, "INDEX_BLOCK": next_power_of_two(key.dim),
        "INDEX_FORMAT": f"index_{key.name}", "INDEX_DATA": key.data_bytes,
        "INDEX_SCALE": key.scale_bytes, "HAS_HADAMARD": layout.has_hadamard,
        "HAS_GLOBAL_SCALE": scale is not None, "LOG_INDEX": key.dim.bit_length() - 1,
        "TAIL_ROWS": layout.tail_rows, "TAIL_BF16": layout.tail_dtype == "bfloat16",
        "ENTRIES_PER_BLOCK": layout.entries_per_block, "RING_ROWS": layout.ring_rows,
        "WINDOW": layout.window, "num_stages": 1, "launch_pdl": True, "enable_fp_fusion": False,
    }  # fmt: skip


def _window_arguments(
    window: WindowInputs | None, memory: LayerMemory, tokens: TokenMap
) -> dict[str, Any]:
    nothing = tokens.positions  # stands in for what a launch doesn't have
    kv = nothing if window is None else _rows_apart(window.kv)
    return {
        "window_kv_ptr": kv,
        "window_stride": _row_stride(kv),
        "window_norm_ptr": nothing if window is None else window.norm_weight.contiguous(),
        "ring_offset": memory.layout.ring_offset,
        "workspace_ptr": memory.workspace,
        "workspace_rows": memory.layout.workspace_rows,
    }


def _entry_arguments(prefix: str, entry: EntryInputs | None, tokens: TokenMap) -> dict[str, Any]:
    if entry is None:
        kv = gate = bias = norm_weight = tokens.positions
    else:
        kv, gate = _rows_apart(entry.kv), _rows_apart(entry.gate)
        if _row_stride(kv) != _row_stride(gate):
            kv, gate = kv.contiguous(), gate.contiguous()
        bias, norm_weight = (weight.contiguous() for weight in entry.weights)
    return {
        f"{prefix}kv_ptr": kv,
        f"{prefix}gate_ptr": gate,
        f"{prefix}stride": _row_stride(kv),
        f"{prefix}bias_ptr": bias,
        f"{prefix}norm_ptr": norm_weight,
    }


def _rows_apart(x: Tensor) -> Tensor:
    """Rows whose elements are neighbours, at any distance from each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def _row_stride(x: Tensor) -> int:
    """Distance of rows. That of a single row may be any number, and another one would compile."""
    return x.stride(0) if len(x) > 1 else x.shape[-1]
