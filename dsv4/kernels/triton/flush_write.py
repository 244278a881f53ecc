"""The write path of one layer in one launch: append, compress, flush.

A program is one token (a step) or a tile of tokens (a chunk) in one role: the window row, the
main compressor, or the indexer's. Steps write rings and tails at once, since a step never
overwrites a row that another token of it still reads. Chunks leave them to `_commit_kernel`, a
second launch: there, early windows still read rows that late tokens replace.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import PagedRows, RowFormat
from dsv4.kernels import (
    CompressorWeights,
    EntryInputs,
    LayerMemory,
    LayerWrites,
    PoolingScratch,
    TokenMap,
    WindowRows,
)
from dsv4.kernels.triton.compressor import (
    finish_row,
    load_finish,
    pool_csa,
    pool_csa_step,
    pool_hca,
    pool_hca_step,
)
from dsv4.kernels.triton.launch import launch_parameters
from dsv4.kernels.triton.primitives import bf16_bits, hadamard, store_row
from dsv4.model.rope import RopeTable


@triton.jit
def locate(
    token, positions_ptr, request_ids_ptr, slots_ptr, before_ptr, after_ptr, starts_ptr,
    IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Position, slot (-1 for padding), lengths and workspace start of a token's request.

    In a decode step every request has one token, so that the token's index is its request's.
    """
    position = tl.load(positions_ptr + token)
    if IS_DECODE:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        before = position
        after = position + 1
        start = -1
    else:
        request = tl.load(request_ids_ptr + token)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        before = tl.load(before_ptr + request)
        after = tl.load(after_ptr + request)
        start = tl.load(starts_ptr + request)
    return position, slot, before, after, start


@triton.jit
def tail_of(byte_ptr, TAIL_BF16: tl.constexpr):
    """A slot's tail, from the address of its first byte."""
    if TAIL_BF16:
        tail_ptr = byte_ptr.to(tl.pointer_type(tl.bfloat16))
    else:
        tail_ptr = byte_ptr.to(tl.pointer_type(tl.float32))
    return tail_ptr


@triton.jit
def copy_words(source_ptr, target_ptr, is_copied, WORDS: tl.constexpr):
    """Copy a record of 4-byte words."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WORDS)
    word = tl.arange(0, BLOCK)
    mask = is_copied & (word < WORDS)
    values = tl.load(source_ptr.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    tl.store(target_ptr.to(tl.pointer_type(tl.int32)) + word, values, mask=mask)


@triton.jit
def store_tail_row(
    kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, is_written,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, TAIL_ROWS: tl.constexpr,
    TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """Store kv, and gate + bias, of a token in its slot's tail at tail_ptr."""
    column = tl.arange(0, BLOCK)
    mask = is_written & (column < WIDTH)
    source = token.to(tl.int64) * stride + column
    kv = tl.load(kv_ptr + source, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + source, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + position % RATIO * WIDTH + column, mask=mask, other=0.0)
    gate = gate + bias.to(tl.float32)
    target = tail_ptr + (position % TAIL_ROWS).to(tl.int64) * (2 * WIDTH) + column
    if TAIL_BF16:
        target = target.to(tl.pointer_type(tl.uint16))
        tl.store(target, bf16_bits(kv), mask=mask)
        tl.store(target + WIDTH, bf16_bits(gate), mask=mask)
    else:
        tl.store(target, kv, mask=mask)
        tl.store(target + WIDTH, gate, mask=mask)


@triton.jit
def write_window_row(
    kv_ptr, kv_stride, norm_ptr, cos_ptr, sin_ptr, slots_ptr, slot_bytes, ring_offset,
    workspace_ptr, workspace_rows, token, position, slot, before, after, start, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, RING_ROWS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store a token's KV in its ring, or, of a chunk, in the workspace.

    The tokens of a chunk also carry over the ring's last WINDOW - 1 rows, between them.
    """
    channel = tl.arange(0, BLOCK)
    weight, cos, sin = load_finish(norm_ptr, cos_ptr, sin_ptr, position, DIM, ROPE, BLOCK)
    values = tl.load(
        kv_ptr + token.to(tl.int64) * kv_stride + channel,
        mask=(slot >= 0) & (channel < DIM), other=0.0,
    ).to(tl.float32)  # fmt: skip
    values = finish_row(values, weight, cos, sin, eps, DIM, ROPE, BLOCK)
    ring_ptr = slots_ptr + slot * slot_bytes + ring_offset
    row = (position % RING_ROWS).to(tl.int64)
    data_ptr = ring_ptr + row * DATA_BYTES
    scale_ptr = ring_ptr + RING_ROWS * DATA_BYTES + row * SCALE_BYTES
    if HAS_CHUNKS:
        if start >= 0:
            scales_ptr = workspace_ptr + workspace_rows.to(tl.int64) * DATA_BYTES
            own = (start + WINDOW - 1 + position - before).to(tl.int64)
            data_ptr = workspace_ptr + own * DATA_BYTES
            scale_ptr = scales_ptr + own * SCALE_BYTES
            old = position - before
            while old < WINDOW - 1:
                old_position = before - (WINDOW - 1) + old
                from_row = ((old_position + RING_ROWS) % RING_ROWS).to(tl.int64)
                to_row = (start + old).to(tl.int64)
                copy_words(ring_ptr + from_row * DATA_BYTES, workspace_ptr + to_row * DATA_BYTES,
                           old_position >= 0, DATA_BYTES // 4)  # fmt: skip
                if SCALE_BYTES > 0:
                    copy_words(ring_ptr + RING_ROWS * DATA_BYTES + from_row * SCALE_BYTES,
                               scales_ptr + to_row * SCALE_BYTES, old_position >= 0,
                               SCALE_BYTES // 4)  # fmt: skip
                old += after - before
    store_row(values, data_ptr, scale_ptr, slot >= 0, FORMAT, DIM, ROPE, BLOCK, 1.0)


@triton.jit
def load_block(
    block_table_ptr, table_stride, slot, position,
    RATIO: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """The block of the entry that `position` closes."""
    column = position // (RATIO * ENTRIES_PER_BLOCK)
    return tl.load(block_table_ptr + slot * table_stride + column).to(tl.int64)


@triton.jit
def write_entry(
    entry, blocks_ptr, block_bytes, page_offset, block, position, global_scale,
    RATIO: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """Store the entry that `position` closes in its block."""
    row = (position // RATIO % ENTRIES_PER_BLOCK).to(tl.int64)
    page_ptr = blocks_ptr + block * block_bytes + page_offset
    store_row(entry, page_ptr + row * DATA_BYTES,
              page_ptr + ENTRIES_PER_BLOCK * DATA_BYTES + row * SCALE_BYTES, block >= 0,
              FORMAT, DIM, ROPE, BLOCK, global_scale)  # fmt: skip


@triton.jit
def compress_token(
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset, blocks_ptr,
    block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr, sin_ptr,
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
    token, eps, global_scale,
    RATIO: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, ROW_ROPE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, HAS_HADAMARD: tl.constexpr, LOG_DIM: tl.constexpr,
    IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Flush the window that a token closes, then keep the token's row unless it is a chunk's.

    ROPE channels are rotated; ROW_ROPE of them are a field of their own in the row.
    """
    position, slot, before, _, start = locate(
        token, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
        starts_ptr, IS_DECODE,
    )  # fmt: skip
    tail_ptr = tail_of(slots_ptr + slot * slot_bytes + tail_offset, TAIL_BF16)
    SERIES: tl.constexpr = 2 if RATIO == 4 else 1
    if (slot >= 0) & ((position + 1) % RATIO == 0):
        block = load_block(block_table_ptr, table_stride, slot, position, RATIO, ENTRIES_PER_BLOCK)
        weight, cos, sin = load_finish(norm_ptr, cos_ptr, sin_ptr, position + 1 - RATIO, DIM, ROPE,
                                       BLOCK)  # fmt: skip
        if IS_DECODE and RATIO == 4:
            pooled = pool_csa_step(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position,
                                   DIM, BLOCK, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        elif RATIO == 4:
            pooled = pool_csa(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, before,
                              DIM, BLOCK, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        else:
            pooled = pool_hca(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, before,
                              DIM, BLOCK, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        entry = finish_row(pooled, weight, cos, sin, eps, DIM, ROPE, BLOCK)
        if HAS_HADAMARD:
            entry = hadamard(entry, DIM, LOG_DIM)
        write_entry(entry, blocks_ptr, block_bytes, page_offset, block, position, global_scale,
                    RATIO, ENTRIES_PER_BLOCK, FORMAT, DIM, ROW_ROPE, BLOCK, DATA_BYTES,
                    SCALE_BYTES)  # fmt: skip
    store_tail_row(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position,
                   (slot >= 0) & (start < 0), SERIES * DIM, SERIES * BLOCK, RATIO, TAIL_ROWS,
                   TAIL_BF16)  # fmt: skip


@triton.jit
def compress_hca_part(
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset, blocks_ptr,
    block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr, sin_ptr,
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
    pooled_ptr, arrivals_ptr, token, part, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """One decode token of an HCA layer: its window's rows are pooled by several programs.

    Each leaves its channels in pooled_ptr `[max_requests, DIM]`; the last one to arrive norms
    and stores the entry. Which one that is does not change a bit of it.
    """
    PARTS: tl.constexpr = BLOCK // CHANNELS
    position, slot, _, _, _ = locate(
        token, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
        starts_ptr, True,
    )  # fmt: skip
    tail_ptr = tail_of(slots_ptr + slot * slot_bytes + tail_offset, TAIL_BF16)
    if part == 0:
        store_tail_row(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, slot >= 0,
                       DIM, BLOCK, 128, TAIL_ROWS, TAIL_BF16)  # fmt: skip
    if (slot >= 0) & ((position + 1) % 128 == 0):
        pooled = pool_hca_step(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position,
                               part * CHANNELS, DIM, CHANNELS, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        channel = part * CHANNELS + tl.arange(0, CHANNELS)
        tl.store(pooled_ptr + token * DIM + channel, pooled, mask=channel < DIM)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        if tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrivals_ptr + token, 0)
            column = tl.arange(0, BLOCK)
            row = tl.load(pooled_ptr + token * DIM + column, mask=column < DIM, other=0.0,
                          cache_modifier=".cg")  # fmt: skip
            weight, cos, sin = load_finish(norm_ptr, cos_ptr, sin_ptr, position - 127, DIM, ROPE,
                                           BLOCK)  # fmt: skip
            block = load_block(block_table_ptr, table_stride, slot, position, 128,
                               ENTRIES_PER_BLOCK)  # fmt: skip
            entry = finish_row(row, weight, cos, sin, eps, DIM, ROPE, BLOCK)
            write_entry(entry, blocks_ptr, block_bytes, page_offset, block, position, 1.0, 128,
                        ENTRIES_PER_BLOCK, FORMAT, DIM, ROPE, BLOCK, DATA_BYTES,
                        SCALE_BYTES)  # fmt: skip


@triton.jit
def compress_tile(
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset, blocks_ptr,
    block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr, sin_ptr,
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
    tile, num_tokens, eps, global_scale,
    RATIO: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
    ENTRIES_PER_BLOCK: tl.constexpr, FORMAT: tl.constexpr, ROW_ROPE: tl.constexpr,
    DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, HAS_HADAMARD: tl.constexpr,
    LOG_DIM: tl.constexpr, TILE: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """One compressor over the TILE tokens from tile × TILE on, those with something to do."""
    if TILE == 1:
        compress_token(
            kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset,
            blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr, sin_ptr,
            positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
            tile, eps, global_scale, RATIO, DIM, ROPE, BLOCK, TAIL_ROWS, TAIL_BF16,
            ENTRIES_PER_BLOCK, FORMAT, ROW_ROPE, DATA_BYTES, SCALE_BYTES, HAS_HADAMARD, LOG_DIM,
            IS_DECODE,
        )  # fmt: skip
    else:
        offset = tl.arange(0, TILE)
        token = tile * TILE + offset
        is_token = token < num_tokens
        request = tl.load(request_ids_ptr + token, mask=is_token, other=0)
        position = tl.load(positions_ptr + token, mask=is_token, other=0)
        slot = tl.load(request_slots_ptr + request, mask=is_token, other=-1)
        start = tl.load(starts_ptr + request, mask=is_token, other=0)
        has_work = (slot >= 0) & ((start < 0) | ((position + 1) % RATIO == 0))
        last = tl.min(tl.where(has_work, offset, TILE), axis=0)
        while last < TILE:
            compress_token(
                kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset,
                blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr,
                sin_ptr, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
                starts_ptr, tile * TILE + last, eps, global_scale, RATIO, DIM, ROPE, BLOCK,
                TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK, FORMAT, ROW_ROPE, DATA_BYTES,
                SCALE_BYTES, HAS_HADAMARD, LOG_DIM, False,
            )  # fmt: skip
            last = tl.min(tl.where(has_work & (offset > last), offset, TILE), axis=0)


@triton.jit(do_not_specialize=["table_stride", "num_tokens", "num_tiles", "workspace_rows"])
def _write_kernel(
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr,
    block_table_ptr, table_stride, num_tokens, num_tiles, cos_ptr, sin_ptr, eps,
    slots_ptr, slot_bytes, blocks_ptr, block_bytes, workspace_ptr, workspace_rows,
    window_kv_ptr, window_stride, window_norm_ptr, ring_offset,
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, tail_offset, page_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr,
    index_tail_offset, index_page_offset, global_scale_ptr, pooled_ptr, arrivals_ptr,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    KV_FORMAT: tl.constexpr, KV_DATA: tl.constexpr, KV_SCALE: tl.constexpr,
    INDEX_DIM: tl.constexpr, INDEX_BLOCK: tl.constexpr, INDEX_FORMAT: tl.constexpr,
    INDEX_DATA: tl.constexpr, INDEX_SCALE: tl.constexpr, HAS_HADAMARD: tl.constexpr,
    LOG_INDEX: tl.constexpr,
    RATIO: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr,
    TAIL_BF16: tl.constexpr, RING_ROWS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    HAS_CHUNKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_COMPRESSOR: tl.constexpr,
    HAS_INDEX: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr, IS_DECODE: tl.constexpr,
    CHANNELS: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """All of a layer's writes. Programs: main tiles, index tiles, then one per window row.

    In a decode step an HCA token has a program for every CHANNELS of its window.
    """
    program = tl.program_id(0)
    SPLITS: tl.constexpr = BLOCK // CHANNELS if IS_SPLIT else 1
    MAIN: tl.constexpr = SPLITS if HAS_COMPRESSOR else 0
    INDEX: tl.constexpr = 1 if HAS_INDEX else 0
    if IS_SPLIT:
        if program < SPLITS * num_tiles:
            compress_hca_part(
                kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset,
                blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr,
                sin_ptr, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
                starts_ptr, pooled_ptr, arrivals_ptr, program // SPLITS, program % SPLITS, eps,
                DIM, ROPE, BLOCK, CHANNELS, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK, KV_FORMAT,
                KV_DATA, KV_SCALE,
            )  # fmt: skip
    elif HAS_COMPRESSOR:
        if program < num_tiles:
            compress_tile(
                kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, slots_ptr, slot_bytes, tail_offset,
                blocks_ptr, block_bytes, page_offset, block_table_ptr, table_stride, cos_ptr,
                sin_ptr, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
                starts_ptr, program, num_tokens, eps, 1.0,
                RATIO, DIM, ROPE, BLOCK, TAIL_ROWS, TAIL_BF16, ENTRIES_PER_BLOCK,
                KV_FORMAT, ROPE, KV_DATA, KV_SCALE, False, 0, TILE, IS_DECODE,
            )  # fmt: skip
    if HAS_INDEX:
        scale = 1.0
        if HAS_GLOBAL_SCALE:
            scale = tl.load(global_scale_ptr)
        if (program >= num_tiles) & (program < 2 * num_tiles):
            compress_tile(
                index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr,
                slots_ptr, slot_bytes, index_tail_offset, blocks_ptr, block_bytes,
                index_page_offset, block_table_ptr, table_stride, cos_ptr, sin_ptr,
                positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
                starts_ptr, program - num_tiles, num_tokens, eps, scale,
                RATIO, INDEX_DIM, ROPE, INDEX_BLOCK, TAIL_ROWS, TAIL_BF16,
                ENTRIES_PER_BLOCK, INDEX_FORMAT, 0, INDEX_DATA, INDEX_SCALE, HAS_HADAMARD,
                LOG_INDEX, TILE, IS_DECODE,
            )  # fmt: skip
    if HAS_WINDOW:
        token = program - (MAIN + INDEX) * num_tiles
        if token >= 0:
            position, slot, before, after, start = locate(
                token, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
                starts_ptr, IS_DECODE,
            )  # fmt: skip
            if slot >= 0:
                write_window_row(
                    window_kv_ptr, window_stride, window_norm_ptr, cos_ptr, sin_ptr, slots_ptr,
                    slot_bytes, ring_offset, workspace_ptr, workspace_rows, token, position, slot,
                    before, after, start, eps, DIM, ROPE, BLOCK, KV_FORMAT, KV_DATA, KV_SCALE,
                    RING_ROWS, WINDOW, HAS_CHUNKS,
                )  # fmt: skip


@triton.jit(do_not_specialize=["workspace_rows"])
def _commit_kernel(
    chunks_ptr, request_slots_ptr, before_ptr, after_ptr, starts_ptr, token_starts_ptr,
    slots_ptr, slot_bytes, workspace_ptr, workspace_rows, ring_offset,
    kv_ptr, gate_ptr, stride, bias_ptr, tail_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_tail_offset,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, INDEX_WIDTH: tl.constexpr,
    INDEX_WIDTH_BLOCK: tl.constexpr, RATIO: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr, RING_ROWS: tl.constexpr,
    WINDOW: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_COMPRESSOR: tl.constexpr, HAS_INDEX: tl.constexpr,
):  # fmt: skip
    """The last rows of each chunk go to its ring and tails, one program per chunk and row."""
    request = tl.load(chunks_ptr + tl.program_id(0))
    back = tl.program_id(1)
    slot = tl.load(request_slots_ptr + request).to(tl.int64)
    before = tl.load(before_ptr + request)
    position = tl.load(after_ptr + request) - 1 - back
    start = tl.load(starts_ptr + request)
    if (slot >= 0) & (position >= before):
        slot_ptr = slots_ptr + slot * slot_bytes
        if HAS_WINDOW:
            ring_ptr = slot_ptr + ring_offset
            from_row = (start + WINDOW - 1 + position - before).to(tl.int64)
            to_row = (position % RING_ROWS).to(tl.int64)
            is_kept = back < RING_ROWS
            copy_words(workspace_ptr + from_row * DATA_BYTES, ring_ptr + to_row * DATA_BYTES,
                       is_kept, DATA_BYTES // 4)  # fmt: skip
            if SCALE_BYTES > 0:
                scales_ptr = workspace_ptr + workspace_rows.to(tl.int64) * DATA_BYTES
                copy_words(scales_ptr + from_row * SCALE_BYTES,
                           ring_ptr + RING_ROWS * DATA_BYTES + to_row * SCALE_BYTES, is_kept,
                           SCALE_BYTES // 4)  # fmt: skip
        if HAS_COMPRESSOR:
            if back < TAIL_ROWS:
                token = tl.load(token_starts_ptr + request) + position - before
                tail_ptr = tail_of(slot_ptr + tail_offset, TAIL_BF16)
                index_tail_ptr = tail_of(slot_ptr + index_tail_offset, TAIL_BF16)
                store_tail_row(kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, True,
                               WIDTH, WIDTH_BLOCK, RATIO, TAIL_ROWS, TAIL_BF16)  # fmt: skip
                if HAS_INDEX:
                    store_tail_row(index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr,
                                   index_tail_ptr, token, position, True, INDEX_WIDTH,
                                   INDEX_WIDTH_BLOCK, RATIO, TAIL_ROWS, TAIL_BF16)  # fmt: skip


class WindowWrite(NamedTuple):
    """A layer's window rows to write: kv `[num_tokens, head_dim]`, its norm, and where."""

    kv: Tensor
    norm_weight: Tensor
    rows: WindowRows


class CompressorWrite(NamedTuple):
    """A compressor's projections, its learned tensors, its tail and its pages."""

    kv: Tensor
    gate: Tensor
    weights: CompressorWeights
    tail: Tensor
    pages: PagedRows


def launch_write(
    tokens: TokenMap,
    rope: RopeTable,
    *,
    eps: float,
    ratio: int = 0,
    window: WindowWrite | None = None,
    main: CompressorWrite | None = None,
    index: CompressorWrite | None = None,
    has_hadamard: bool = False,
    global_scale: Tensor | None = None,
    scratch: PoolingScratch | None = None,
) -> None:
    """Write what is given of one layer: one launch, and a second if the plan has chunks."""
    num_tokens, num_chunks = len(tokens.positions), len(tokens.chunk_ids)
    if not num_tokens:
        return
    launch = launch_parameters(ratio, has_chunks=num_chunks > 0, num_tokens=num_tokens)
    num_tiles = triton.cdiv(num_tokens, launch.tile)
    if window is not None:
        row, slots = window.rows.ring.format, window.rows.ring.storage
    else:
        assert main is not None, "a launch writes something"
        row, slots = main.pages.format, _slots_of(main.tail)
    block = triton.next_power_of_2(row.dim)
    is_decode = tokens.max_step <= 1 and num_tokens == len(tokens.request_slots)
    channels = min(launch.channels, block)
    is_split = is_decode and ratio == 128 and scratch is not None
    splits = block // channels if is_split else 1
    num_programs = num_tiles * (splits * (main is not None) + (index is not None))
    num_programs += num_tokens if window is not None else 0
    nothing = tokens.positions  # stands in for what this launch doesn't have
    index_row = index.pages.format if index is not None else row
    scale = slots if global_scale is None else global_scale
    parts = {
        "slots_ptr": slots,
        "slot_bytes": slots.shape[1],
        **_window_arguments(window, nothing),
        **_compressor_arguments("", main, nothing),
        **_compressor_arguments("index_", index, nothing),
    }
    sizes = {
        "RATIO": ratio or 1,
        "TAIL_ROWS": main.tail.shape[1] if main is not None else 1,
        "TAIL_BF16": main is not None and main.tail.dtype is torch.bfloat16,
        "RING_ROWS": window.rows.ring.rows_per_page if window is not None else 1,
        "WINDOW": window.rows.window if window is not None else 1,
        "HAS_WINDOW": window is not None,
        "HAS_COMPRESSOR": main is not None,
        "HAS_INDEX": index is not None,
    }
    blocks = main.pages.storage if main is not None else nothing
    _write_kernel[(num_programs,)](
        positions_ptr=tokens.positions, request_ids_ptr=tokens.request_ids,
        request_slots_ptr=tokens.request_slots, before_ptr=tokens.positions_before,
        after_ptr=tokens.positions_after, starts_ptr=tokens.workspace_starts,
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        num_tokens=num_tokens, num_tiles=num_tiles, cos_ptr=rope.cos, sin_ptr=rope.sin, eps=eps,
        blocks_ptr=blocks, block_bytes=blocks.shape[-1], global_scale_ptr=scale, **parts,
        HAS_GLOBAL_SCALE=global_scale is not None, IS_DECODE=is_decode,
        CHANNELS=channels, IS_SPLIT=is_split,
        pooled_ptr=nothing if scratch is None else scratch.pooled,
        arrivals_ptr=nothing if scratch is None else scratch.arrivals,
        DIM=row.dim, ROPE=2 * rope.cos.shape[1], BLOCK=block,
        KV_FORMAT=f"kv_{row.name}", KV_DATA=row.data_bytes, KV_SCALE=row.scale_bytes,
        INDEX_DIM=index_row.dim, INDEX_BLOCK=triton.next_power_of_2(index_row.dim),
        INDEX_FORMAT=f"index_{index_row.name}", INDEX_DATA=index_row.data_bytes,
        INDEX_SCALE=index_row.scale_bytes, HAS_HADAMARD=has_hadamard,
        LOG_INDEX=index_row.dim.bit_length() - 1,
        ENTRIES_PER_BLOCK=main.pages.rows_per_page if main is not None else 1,
        TILE=launch.tile, HAS_CHUNKS=num_chunks > 0, **sizes,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.maxnreg,
        enable_fp_fusion=False,
    )  # fmt: skip
    if num_chunks:
        _launch_commit(tokens, row, index_row, parts, sizes)


def _launch_commit(
    tokens: TokenMap,
    row: RowFormat,
    index_row: RowFormat,
    parts: dict[str, Any],
    sizes: dict[str, Any],
) -> None:
    """Move the last rows of each chunk to its ring and tails."""
    series = 2 if sizes["RATIO"] == 4 else 1
    unused = (
        "norm_ptr", "page_offset", "index_norm_ptr", "index_page_offset", "window_kv_ptr",
        "window_stride", "window_norm_ptr",
    )  # fmt: skip
    num_rows = max(sizes["RING_ROWS"], sizes["TAIL_ROWS"])
    _commit_kernel[(len(tokens.chunk_ids), num_rows)](
        chunks_ptr=tokens.chunk_ids, request_slots_ptr=tokens.request_slots,
        before_ptr=tokens.positions_before, after_ptr=tokens.positions_after,
        starts_ptr=tokens.workspace_starts, token_starts_ptr=tokens.token_starts,
        **{name: value for name, value in parts.items() if name not in unused},
        WIDTH=series * row.dim, WIDTH_BLOCK=series * triton.next_power_of_2(row.dim),
        INDEX_WIDTH=2 * index_row.dim,
        INDEX_WIDTH_BLOCK=2 * triton.next_power_of_2(index_row.dim),
        DATA_BYTES=row.data_bytes, SCALE_BYTES=row.scale_bytes, **sizes,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def write_layer(
    writes: LayerWrites,
    memory: LayerMemory,
    tokens: TokenMap,
    rope: RopeTable,
    *,
    eps: float,
    has_hadamard: bool,
) -> None:
    """What is given of a layer, in one launch; see `kernels.reference.flush_write`."""
    window = main = index = None
    if writes.window is not None:
        window = WindowWrite(*writes.window, memory.window)
    if writes.entries is not None:
        main = _compressor_write(writes.entries, memory.tail, memory.entries)
    if writes.index_keys is not None:
        index = _compressor_write(writes.index_keys, memory.index_tail, memory.index_keys)
    launch_write(
        tokens, rope, eps=eps, ratio=memory.layout.ratio if main is not None else 0,
        window=window, main=main, index=index, has_hadamard=has_hadamard,
        global_scale=memory.global_scale, scratch=memory.scratch,
    )  # fmt: skip


def _window_arguments(window: WindowWrite | None, nothing: Tensor) -> dict[str, Any]:
    if window is None:
        return {
            "window_kv_ptr": nothing, "window_stride": 0, "window_norm_ptr": nothing,
            "ring_offset": 0, "workspace_ptr": nothing, "workspace_rows": 0,
        }  # fmt: skip
    kv = _rows_apart(window.kv)
    return {
        "window_kv_ptr": kv, "window_stride": kv.stride(0),
        "window_norm_ptr": window.norm_weight.contiguous(),
        "ring_offset": window.rows.ring.offset,
        "workspace_ptr": window.rows.workspace.storage,
        "workspace_rows": window.rows.workspace.rows_per_page,
    }  # fmt: skip


def _compressor_arguments(
    prefix: str, write: CompressorWrite | None, nothing: Tensor
) -> dict[str, Any]:
    if write is None:
        values: tuple[Any, ...] = (nothing, nothing, 0, nothing, nothing, 0, 0)
    else:
        kv, gate = _rows_apart(write.kv), _rows_apart(write.gate)
        if kv.stride(0) != gate.stride(0):
            kv, gate = kv.contiguous(), gate.contiguous()
        values = (
            kv, gate, kv.stride(0), write.weights.position_bias.contiguous(),
            write.weights.norm_weight.contiguous(),
            write.tail.storage_offset() * write.tail.element_size(), write.pages.offset,
        )  # fmt: skip
    names = (
        "kv_ptr", "gate_ptr", "stride", "bias_ptr", "norm_ptr", "tail_offset", "page_offset",
    )  # fmt: skip
    return {prefix + name: value for name, value in zip(names, values, strict=True)}


def _compressor_write(
    inputs: EntryInputs, tail: Tensor | None, pages: PagedRows | None
) -> CompressorWrite:
    assert tail is not None and pages is not None, "checked by the handle"
    return CompressorWrite(*inputs, tail, pages)


def _slots_of(tail: Tensor) -> Tensor:
    """The runs `[max_requests, slot_bytes]` that a tail is cut from."""
    slot_bytes = tail.stride(0) * tail.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tail.device)
    return flat.set_(tail.untyped_storage(), 0, (tail.shape[0], slot_bytes), (slot_bytes, 1))


def _rows_apart(x: Tensor) -> Tensor:
    """Rows whose elements are neighbours, at any distance from each other."""
    return x if x.stride(1) == 1 else x.contiguous()
