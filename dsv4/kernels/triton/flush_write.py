"""The write path of one layer in one launch: append, compress, flush.

A program writes window rows, entries of the main compressor, or index keys. Without chunks
(`TokenMap.chunk_ids`) it takes one token, or some channels of one token of an HCA layer. With
chunks it takes a segment: one request's share of a tile of tokens.

No row is overwritten while another program may still read it:
- Rings and tails have room for the tokens of one step beyond the rows that they must hold. A step
  therefore overwrites no row that another of its tokens reads.
- A ring row is overwritten by the program that copied it to the workspace.
- A tail is overwritten by the program of its chunk's first token. Windows that reach back into the
  tail are pooled before: by `_edge_kernel` for CSA, by the same program for HCA.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two, sum_ring
from dsv4.kernels.contracts import EntryInputs, KeyWeights, LayerWrites, TokenMap, WindowInputs
from dsv4.kernels.layer_memory import LayerLayout, LayerMemory
from dsv4.kernels.triton.append import (
    load_row,
    load_stored,
    locate,
    locate_segment,
    slot_tail,
    store_sums,
    store_tail,
    write_window_rows,
)
from dsv4.kernels.triton.compressor import (
    CSA_ROWS,
    GROUP_ROWS,
    GROUPS,
    combine_pair,
    pool_csa_chunk,
    pool_csa_decode,
    pool_csa_edge,
    pool_hca,
    project_key,
    sum_group_decode,
    sum_groups,
)
from dsv4.kernels.triton.launch import Kind, Launch, launch_parameters, starts_early
from dsv4.kernels.triton.operands import (
    CSA_RATIO,
    HCA_RATIO,
    CachePtrs,
    CompressorPtrs,
    CompressorSpec,
    Place,
    TokenPtrs,
    WindowPtrs,
    WindowSpec,
    row_spec,
    token_arguments,
)
from dsv4.kernels.triton.primitives import (
    encode_rows,
    hadamard,
    load_global_scale,
    load_norm,
    load_rope,
    loop_bound,
    mean_of_squares,
    reciprocal_root,
    rotate_tail,
    scales_at,
    store_rows,
    wait_for_launch_before,
)
from dsv4.layer_schedule import AttentionType


@triton.jit
def flush_rows(
    pooled, token, position, slot, is_closing, compressor, ROWS: tl.constexpr, SPEC: tl.constexpr
):
    """Norm, rotate and store the entries of the windows that tokens `[ROWS]` at `position` close.

    Only where is_closing. pooled is `[ROWS, BLOCK]`.
    """
    ROW: tl.constexpr = SPEC.ROW
    cache = compressor.cache
    table_column = position // (SPEC.RATIO * SPEC.ENTRIES_PER_BLOCK)
    id_ptr = cache.block_table_ptr + slot * cache.table_stride + table_column
    block = tl.load(id_ptr, mask=is_closing, other=-1).to(tl.int64)  # [ROWS]
    weight = load_norm(compressor.norm_ptr, ROWS, ROW.DIM, ROW.BLOCK)
    cos, sin = load_rope(cache.rope, token, is_closing, ROW.DIM, ROW.ROTATED, ROW.BLOCK)
    pooled = tl.where(tl.arange(0, ROW.BLOCK)[None, :] < ROW.DIM, pooled, 0.0)
    factor = reciprocal_root(mean_of_squares(pooled, ROW.DIM) + compressor.eps)  # [ROWS]
    normed = (pooled * factor[:, None]) * weight
    entry = rotate_tail(normed, cos, sin, ROWS, ROW.DIM, ROW.ROTATED, ROW.BLOCK)  # [ROWS, BLOCK]
    if SPEC.HADAMARD_STEPS > 0:
        entry = hadamard(entry, ROWS, ROW.DIM, SPEC.HADAMARD_STEPS)
    row = (position // SPEC.RATIO % SPEC.ENTRIES_PER_BLOCK).to(tl.int64)
    page_ptr = cache.blocks_ptr + block * cache.block_bytes + compressor.page_offset
    encoded = encode_rows(entry, compressor.global_scale, ROWS, ROW)
    scales_ptr = page_ptr + scales_at(SPEC.ENTRIES_PER_BLOCK, ROW)
    store_rows(encoded, page_ptr + row * ROW.DATA_STRIDE, scales_ptr + row * ROW.SCALE_STRIDE,
               block >= 0, ROWS, ROW, HAS_ROPE=True)  # fmt: skip


@triton.jit
def flush_row(pooled, token, position, slot, compressor, SPEC: tl.constexpr):
    """Norm, rotate and store the entry `[1, BLOCK]` of the window that one token closes."""
    zero = tl.zeros((1,), tl.int32)
    flush_rows(pooled, zero + token, zero + position, slot, zero.to(tl.int64) + slot >= 0,
               compressor, 1, SPEC)  # fmt: skip


@triton.jit
def tokens_to_closing(position, SPEC: tl.constexpr):
    """Number of tokens from the one at `position` to the one that closes its window."""
    return SPEC.RATIO - 1 - position % SPEC.RATIO


@triton.jit
def can_write(position, slot, compressor, SPEC: tl.constexpr):
    """Whether the block of the entry that closes at `position` is not read-only."""
    table_column = position // (SPEC.RATIO * SPEC.ENTRIES_PER_BLOCK)
    return table_column >= tl.load(compressor.cache.num_read_only_ptr + slot)


@triton.jit
def compress_csa_token(
    token, place, is_kept, compressor, SPEC: tl.constexpr, IS_DECODE: tl.constexpr
):
    """Flush the CSA window that one token closes; store the token's row in the tail if is_kept.

    Of a row's two series, the first is for the next window and the second for its own.
    """
    DIM: tl.constexpr = SPEC.ROW.DIM
    position = place.position
    slot = place.slot
    column = tl.arange(0, SPEC.ROW.BLOCK)[None, :]
    mask = column < DIM  # [1, BLOCK]
    next_kv, next_gate = load_row(compressor, token, position, column, mask, SPEC)
    kv, gate = load_row(compressor, token, position, column + DIM, mask, SPEC)
    tail_ptr = slot_tail(compressor, slot, SPEC)
    if (slot >= 0) & (position % CSA_RATIO == CSA_RATIO - 1):
        if can_write(position, slot, compressor, SPEC):
            if IS_DECODE:
                pooled = pool_csa_decode(kv, gate, tail_ptr, position, column, mask, SPEC)
            else:
                pooled = pool_csa_edge(compressor, tail_ptr, token, place, column, mask, SPEC)
            flush_row(pooled, token, position, slot, compressor, SPEC)
    mask = mask & is_kept
    store_tail(next_kv, next_gate, tail_ptr, position, column, mask, SPEC)
    store_tail(kv, gate, tail_ptr, position, column + DIM, mask, SPEC)


@triton.jit
def write_latent_token(token, place, compressor, index, SPEC: tl.constexpr, INDEX: tl.constexpr):
    """Flush V4.1's entry that one token closes, and its index key; keep rows of an open pair.

    index has the key's projection in place of its own projections.
    A step stores each row in the tail. Of a chunk the first token's program stores the last rows,
    after it has read the one before the chunk.
    """
    ROW: tl.constexpr = SPEC.ROW
    column = tl.arange(0, ROW.BLOCK)[None, :]
    mask = column < ROW.DIM  # [1, BLOCK]
    position = place.position
    slot = place.slot
    if slot >= 0:
        if position % SPEC.RATIO == SPEC.RATIO - 1:
            if can_write(position, slot, compressor, SPEC):
                if SPEC.RATIO == 1:
                    source = token.to(tl.int64) * compressor.stride + column
                    pooled = tl.load(compressor.kv_ptr + source, mask=mask, other=0.0)
                    pooled = pooled.to(tl.float32)
                else:
                    kv, gate = load_row(compressor, token, position, column, mask, SPEC)
                    if position > place.before:
                        old_kv, old_gate = load_row(compressor, token - 1, position - 1, column,
                                                    mask, SPEC)  # fmt: skip
                    else:
                        tail_ptr = slot_tail(compressor, slot, SPEC)
                        old_kv, old_gate = load_stored(tail_ptr, position - 1, column, mask, SPEC)
                    pooled = combine_pair((old_kv, kv), (old_gate, gate))
                flush_row(pooled, token, position, slot, compressor, SPEC)
                weight = load_norm(compressor.norm_ptr, 1, ROW.DIM, ROW.BLOCK)
                pooled = tl.where(mask, pooled, 0.0)
                factor = reciprocal_root(mean_of_squares(pooled, ROW.DIM) + compressor.eps)  # [1]
                key = project_key((pooled * factor[:, None]) * weight, index.kv_ptr,
                                  INDEX.ROW.DIM, INDEX.ROW.BLOCK, ROW.DIM, ROW.BLOCK)  # fmt: skip
                flush_row(key, token, position, slot, index, INDEX)
        if SPEC.RATIO > 1:
            tail_ptr = slot_tail(compressor, slot, SPEC)
            if place.workspace_start < 0:
                kv, gate = load_row(compressor, token, position, column, mask, SPEC)
                store_tail(kv, gate, tail_ptr, position, column, mask, SPEC)
            elif position == place.before:
                tl.debug_barrier()  # the tail's old row is read before it is overwritten
                keep_last_rows(compressor, tail_ptr, token, position, place.after - place.before,
                               column, mask, 2, SPEC)  # fmt: skip


@triton.jit
def keep_last_rows(
    compressor, tail_ptr, token, position, count, column, mask,
    AT_ONCE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Store the last TAIL_ROWS of `count` rows in the tail; the first of them is `token`'s."""
    index = tl.maximum(count - SPEC.TAIL_ROWS, 0) + tl.arange(0, AT_ONCE)[:, None]
    for _ in range(0, SPEC.TAIL_ROWS, AT_ONCE):
        is_row = mask & (index < count)  # [AT_ONCE, columns]
        kv, gate = load_row(compressor, token + index, position + index, column, is_row, SPEC)
        store_tail(kv, gate, tail_ptr, position + index, column, is_row, SPEC)
        index += AT_ONCE


@triton.jit
def keep_last_sums(compressor, tail_ptr, token, place, count, column, mask, SPEC: tl.constexpr):
    """Store the sums of the last groups that `count` rows close; the first row is `token`'s.

    The last group of a window is not stored, as the window closes with it.
    """
    first = tl.maximum(place.position // GROUP_ROWS, place.after // GROUP_ROWS - SPEC.SUM_RING)
    end = (place.position + count) // GROUP_ROWS
    for start in range(loop_bound(first), loop_bound(end), GROUPS):
        group = start + tl.arange(0, GROUPS)[:, None]
        is_kept = mask & (group < end) & (group % GROUPS != GROUPS - 1)  # [GROUPS, CHANNELS]
        last = group * GROUP_ROWS + GROUP_ROWS - 1
        sums = sum_groups(compressor, tail_ptr, token + last - place.position, last, place.before,
                          column, is_kept, False, SPEC)  # fmt: skip
        store_sums(sums, tail_ptr, group, column, is_kept, SPEC)


@triton.jit
def compress_csa_segment(
    segment, num_tokens, tokens, compressor, ROWS: tl.constexpr, SPEC: tl.constexpr
):
    """Flush the CSA windows that a chunk's segment closes and that lie in the chunk, at most ROWS.

    The program of a chunk's first token stores the chunk's last rows in the tail. `_edge_kernel`
    flushes all other windows.
    """
    DIM: tl.constexpr = SPEC.ROW.DIM
    column = tl.arange(0, SPEC.ROW.BLOCK)[None, :]
    token, count, place = locate_segment(segment, num_tokens, tokens, CSA_RATIO * ROWS)
    position = place.position
    if (count > 0) & (place.slot >= 0) & (place.workspace_start >= 0):
        ahead = tokens_to_closing(position, SPEC) + tl.arange(0, ROWS) * CSA_RATIO  # [ROWS]
        is_closing = (ahead < count) & (position + ahead - (CSA_ROWS - 1) >= place.before)
        is_closing &= can_write(position + ahead, place.slot, compressor, SPEC)
        pooled = pool_csa_chunk(compressor, token + ahead, is_closing, ROWS, SPEC)
        flush_rows(pooled, token + ahead, position + ahead, place.slot, is_closing, compressor,
                   ROWS, SPEC)  # fmt: skip
        if position == place.before:
            tail_ptr = slot_tail(compressor, place.slot, SPEC)
            for series in tl.static_range(2):
                keep_last_rows(compressor, tail_ptr, token, position, place.after - place.before,
                               column + series * DIM, column < DIM, 4, SPEC)  # fmt: skip


@triton.jit
def finish_hca_window(
    pooled, split, window, token, position, slot, exchange, compressor,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Store pooled CHANNELS of an HCA window; the last of its programs to arrive flushes its entry.

    The entry's bits do not depend on which program is last. exchange are the pointers to pooled
    channels and to arrivals.
    """
    DIM: tl.constexpr = SPEC.ROW.DIM
    pooled_ptr, arrivals_ptr = exchange
    channel = split * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(pooled_ptr + window * DIM + channel, pooled, mask=channel < DIM)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    if tl.atomic_add(arrivals_ptr + window, 1, sem="acq_rel") == SPEC.ROW.BLOCK // CHANNELS - 1:
        tl.store(arrivals_ptr + window, 0)
        column = tl.arange(0, SPEC.ROW.BLOCK)[None, :]
        whole = tl.load(pooled_ptr + window * DIM + column, mask=column < DIM, other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        flush_row(whole, token, position, slot, compressor, SPEC)


@triton.jit
def compress_hca_token(
    token, split, tokens, compressor, exchange,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Sum CHANNELS of the HCA group that a token closes, and store the sums or pool the window.

    The token's row goes to the tail.
    """
    column = split * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    mask = column < SPEC.ROW.DIM  # [1, CHANNELS]
    place = locate(token, tokens, IS_DECODE)
    position = place.position
    slot = place.slot
    kv, gate = load_row(compressor, token, position, column, mask, SPEC)
    tail_ptr = slot_tail(compressor, slot, SPEC)
    if (slot >= 0) & (position % GROUP_ROWS == GROUP_ROWS - 1):
        if IS_DECODE:
            sums = sum_group_decode(kv, gate, tail_ptr, position, column, mask, SPEC)
        else:
            sums = sum_groups(compressor, tail_ptr, token, position, place.before, column, mask,
                              False, SPEC)  # fmt: skip
        if position % HCA_RATIO != HCA_RATIO - 1:
            store_sums(sums, tail_ptr, position // GROUP_ROWS, column, mask, SPEC)
        elif can_write(position, slot, compressor, SPEC):
            # The row of `pooled`: another one for every closing window.
            request = token if IS_DECODE else tl.load(tokens.request_ids_ptr + token)
            ends = (tl.arange(0, GROUPS)[:, None] - (GROUPS - 1)) * GROUP_ROWS
            if IS_DECODE or SPEC.SUM_RING == GROUPS:  # a step closes at most one group
                new = sums
            else:
                new = sum_groups(compressor, tail_ptr, token + ends, position + ends, place.before,
                                 column, mask, False, SPEC)  # fmt: skip
            pooled = pool_hca(new, tail_ptr, position + ends, place.before, column, mask, CHANNELS,
                              SPEC)  # fmt: skip
            finish_hca_window(pooled, split, request + token // HCA_RATIO, token, position, slot,
                              exchange, compressor, CHANNELS, SPEC)  # fmt: skip
    store_tail(kv, gate, tail_ptr, position, column, mask & (slot >= 0), SPEC)


@triton.jit
def compress_hca_segment(
    segment, split, num_tokens, tokens, compressor, exchange,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Pool CHANNELS of the HCA window that a segment of at most HCA_RATIO tokens closes.

    The program of a chunk's first token pools the window that reaches back into the tail, and
    then overwrites the tail: its sums, then its rows.
    """
    column = split * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    mask = column < SPEC.ROW.DIM  # [1, CHANNELS]
    token, count, place = locate_segment(segment, num_tokens, tokens, HCA_RATIO)
    position = place.position
    before = place.before
    if (count > 0) & (place.slot >= 0):
        ahead = tokens_to_closing(position, SPEC)
        num_kept = count  # rows that this program stores in the tail
        num_reached = count  # tokens that this program pools for, if they close a window
        if place.workspace_start >= 0:
            # The chunk's first program pools the window with rows in the tail, wherever it closes.
            num_kept = tl.where(position == before, place.after - before, 0)
            num_reached = tl.where(position + ahead - (HCA_RATIO - 1) < before, num_kept, count)
        tail_ptr = slot_tail(compressor, place.slot, SPEC)
        is_closing = ahead < num_reached
        if is_closing:
            is_closing = can_write(position + ahead, place.slot, compressor, SPEC)
        if is_closing:
            window = tl.load(tokens.request_ids_ptr + token) + (token + ahead) // HCA_RATIO
            last = tl.arange(0, GROUPS)[:, None] * GROUP_ROWS + GROUP_ROWS - 1
            ends = ahead - (HCA_RATIO - 1) + last
            if position + ahead - (HCA_RATIO - 1) >= before:  # addresses of new rows are shorter
                sums = sum_groups(compressor, tail_ptr, (token + ends).to(tl.int64), last, 0,
                                  column, mask, True, SPEC)  # fmt: skip
            else:
                sums = sum_groups(compressor, tail_ptr, token + ends, position + ends, before,
                                  column, mask, False, SPEC)  # fmt: skip
            pooled = pool_hca(sums, tail_ptr, position + ends, before, column, mask, CHANNELS,
                              SPEC)  # fmt: skip
            finish_hca_window(pooled, split, window, token + ahead, position + ahead, place.slot,
                              exchange, compressor, CHANNELS, SPEC)  # fmt: skip
        if num_kept > 0:
            tl.debug_barrier()  # the tail's old sums are read before they are overwritten
            keep_last_sums(compressor, tail_ptr, token, place, num_kept, column, mask, SPEC)
            tl.debug_barrier()  # the tail's old rows are read before they are overwritten
            keep_last_rows(compressor, tail_ptr, token, position, num_kept, column, mask, 16, SPEC)


COUNTS = ["num_tokens", "num_segments", "num_index_segments", "workspace_rows"]


@triton.jit(do_not_specialize=COUNTS)
def _write_kernel(
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, workspace_starts_ptr,
    token_starts_ptr, block_table_ptr, table_stride, num_read_only_ptr, num_tokens, num_segments,
    num_index_segments, window_cos_ptr, window_sin_ptr, cos_ptr, sin_ptr, eps, slots_ptr,
    slot_bytes, blocks_ptr, block_bytes,
    window_kv_ptr, window_stride, window_norm_ptr, ring_offset, workspace_ptr, workspace_rows,
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, tail_offset, page_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr, index_tail_offset,
    index_page_offset, global_scale_ptr, pooled_ptr, arrivals_ptr,
    WINDOW: tl.constexpr, MAIN: tl.constexpr, INDEX: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr,
    ROWS: tl.constexpr, INDEX_ROWS: tl.constexpr, WINDOW_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_COMPRESSOR: tl.constexpr,
    HAS_INDEX: tl.constexpr, HAS_CHUNKS: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Write a layer's rows.

    The main compressor's programs come first, then the indexer's, then the window's.
    """
    program = tl.program_id(0)
    tokens = TokenPtrs(positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
                       workspace_starts_ptr, token_starts_ptr)  # fmt: skip
    cache = CachePtrs(slots_ptr, slot_bytes, blocks_ptr, block_bytes, block_table_ptr,
                      table_stride, num_read_only_ptr, (cos_ptr, sin_ptr))  # fmt: skip
    main = CompressorPtrs(kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, eps, tail_offset,
                          page_offset, 1.0, cache)  # fmt: skip
    if HAS_COMPRESSOR and MAIN.RATIO == HCA_RATIO:
        CHANNEL_SPLITS: tl.constexpr = MAIN.ROW.BLOCK // CHANNELS
        exchange = (pooled_ptr, arrivals_ptr)
        if program < num_segments * CHANNEL_SPLITS:
            if HAS_CHUNKS:
                compress_hca_segment(program // CHANNEL_SPLITS, program % CHANNEL_SPLITS,
                                     num_tokens, tokens, main, exchange, CHANNELS,
                                     MAIN)  # fmt: skip
            else:
                compress_hca_token(program // CHANNEL_SPLITS, program % CHANNEL_SPLITS, tokens,
                                   main, exchange, CHANNELS, MAIN, IS_DECODE)  # fmt: skip
        program -= num_segments * CHANNEL_SPLITS
    elif HAS_COMPRESSOR and MAIN.RATIO < CSA_RATIO:
        if program < num_segments:
            place = locate(program, tokens, IS_DECODE)
            global_scale = load_global_scale(global_scale_ptr, HAS_GLOBAL_SCALE)
            index = CompressorPtrs(index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr,
                                   index_norm_ptr, eps, index_tail_offset, index_page_offset,
                                   global_scale, cache)  # fmt: skip
            write_latent_token(program, place, main, index, MAIN, INDEX)
        program -= num_segments
    elif HAS_COMPRESSOR:
        if program < num_segments:
            if HAS_CHUNKS:
                compress_csa_segment(program, num_tokens, tokens, main, ROWS, MAIN)
            else:
                place = locate(program, tokens, IS_DECODE)
                compress_csa_token(program, place, place.slot >= 0, main, MAIN, IS_DECODE)
        program -= num_segments
    if HAS_INDEX:
        global_scale = load_global_scale(global_scale_ptr, HAS_GLOBAL_SCALE)
        index = CompressorPtrs(index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr,
                               index_norm_ptr, eps, index_tail_offset, index_page_offset,
                               global_scale, cache)  # fmt: skip
        if (program >= 0) & (program < num_index_segments):
            if HAS_CHUNKS:
                compress_csa_segment(program, num_tokens, tokens, index, INDEX_ROWS, INDEX)
            else:
                place = locate(program, tokens, IS_DECODE)
                compress_csa_token(program, place, place.slot >= 0, index, INDEX, IS_DECODE)
        program -= num_index_segments
    if HAS_WINDOW:
        if program >= 0:
            if WINDOW_ROWS == 1:
                token, count = program, 1
                place = locate(token, tokens, IS_DECODE)
            else:
                token, count, place = locate_segment(program, num_tokens, tokens, WINDOW_ROWS)
            if count > 0:
                window = WindowPtrs(window_kv_ptr, window_stride, window_norm_ptr, slots_ptr,
                                    slot_bytes, ring_offset, workspace_ptr,
                                    workspace_rows)  # fmt: skip
                write_window_rows(token, count, place, num_tokens, window,
                                  (window_cos_ptr, window_sin_ptr), eps, WINDOW_ROWS, WINDOW,
                                  HAS_CHUNKS)  # fmt: skip


@triton.jit
def _edge_kernel(
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, workspace_starts_ptr,
    token_starts_ptr, block_table_ptr, table_stride, num_read_only_ptr, cos_ptr, sin_ptr, eps,
    slots_ptr, slot_bytes, blocks_ptr, block_bytes,
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, tail_offset, page_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr, index_tail_offset,
    index_page_offset, global_scale_ptr,
    MAIN: tl.constexpr, INDEX: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr,
):  # fmt: skip
    """Flush the CSA windows that read tails in a forward with chunks, before `_write_kernel`.

    A program takes one request, one of its tokens and one compressor. Of a chunk's tokens, it
    takes those that close a window with rows in the tail: at most two. Of other requests it takes
    every token, and stores its row in the tail too.
    """
    request = tl.program_id(0)
    nth = tl.program_id(1)
    slot = tl.load(request_slots_ptr + request).to(tl.int64)
    before = tl.load(before_ptr + request)
    count = tl.load(after_ptr + request) - before
    workspace_start = tl.load(workspace_starts_ptr + request)
    is_chunk = workspace_start >= 0
    first_token = tl.load(token_starts_ptr + request)
    wait_for_launch_before(STARTS_NEXT=True)
    ahead = tl.where(is_chunk, tokens_to_closing(before, MAIN) + nth * CSA_RATIO, nth)
    if (slot >= 0) & (ahead < tl.where(is_chunk, tl.minimum(count, CSA_ROWS - 1), count)):
        token = first_token + ahead
        place = Place(before + ahead, slot, before, before + count, workspace_start)
        cache = CachePtrs(slots_ptr, slot_bytes, blocks_ptr, block_bytes, block_table_ptr,
                          table_stride, num_read_only_ptr, (cos_ptr, sin_ptr))  # fmt: skip
        if tl.program_id(2) == 0:
            main = CompressorPtrs(kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, eps, tail_offset,
                                  page_offset, 1.0, cache)  # fmt: skip
            compress_csa_token(token, place, ~is_chunk, main, MAIN, False)
        else:
            global_scale = load_global_scale(global_scale_ptr, HAS_GLOBAL_SCALE)
            index = CompressorPtrs(index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr,
                                   index_norm_ptr, eps, index_tail_offset, index_page_offset,
                                   global_scale, cache)  # fmt: skip
            compress_csa_token(token, place, ~is_chunk, index, INDEX, False)


def write_layer(
    writes: LayerWrites, memory: LayerMemory, tokens: TokenMap, *, launch: Launch | None = None
) -> None:
    """Store a layer's rows; see `kernels.reference.flush_write`.

    Takes one launch, or two for a CSA layer in a forward with chunks.
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
    arguments = write_arguments(writes, memory, tokens, ratio=ratio)
    num_programs, segments = _grid(writes, memory, tokens, launch, ratio=ratio)
    has_index = isinstance(writes.index_keys, EntryInputs)
    if has_chunks and has_index:
        # A chunk has at most two windows with rows in the tail, other requests a step of tokens.
        max_windows = max(2, memory.layout.tail_rows - (CSA_ROWS.value - 1))
        _edge_kernel[(len(tokens.request_slots), max_windows, 2)](**arguments, num_warps=8)
    _write_kernel[(num_programs,)](
        **arguments, **_window_arguments(writes.window, memory, tokens), **segments,
        num_tokens=num_tokens, pooled_ptr=memory.pooled, arrivals_ptr=memory.arrivals,
        ROWS=launch.rows, WINDOW_ROWS=launch.window_rows, HAS_WINDOW=writes.window is not None,
        HAS_COMPRESSOR=writes.entries is not None, HAS_INDEX=has_index,
        HAS_CHUNKS=has_chunks, IS_DECODE=is_decode, num_warps=launch.num_warps,
        maxnreg=launch.maxnreg,
    )  # fmt: skip


def _grid(
    writes: LayerWrites, memory: LayerMemory, tokens: TokenMap, launch: Launch, *, ratio: int
) -> tuple[int, dict[str, int]]:
    """The number of programs, and arguments: segments, and rows and channels of a program."""
    block = next_power_of_two(memory.layout.head_dim)
    index_block = next_power_of_two(memory.layout.index_head_dim)
    index_rows = launch.rows * max(1, block // index_block)
    channels = min(launch.channels, block)
    is_hca = ratio == AttentionType.HCA.ratio
    tile, index_tile = 1, 1
    if len(tokens.chunk_ids) and not memory.layout.has_latent_keys:
        csa_ratio = AttentionType.CSA.ratio
        tile, index_tile = ratio if is_hca else csa_ratio * launch.rows, csa_ratio * index_rows
    num_segments = _num_segments(tokens, tile)
    num_index_segments = _num_segments(tokens, index_tile)
    num_programs = 0
    if writes.entries is not None:
        num_programs += num_segments * (block // channels if is_hca else 1)
    if isinstance(writes.index_keys, EntryInputs):
        num_programs += num_index_segments
    if writes.window is not None:
        num_programs += _num_segments(tokens, launch.window_rows)
    return num_programs, {
        "num_segments": num_segments, "num_index_segments": num_index_segments,
        "INDEX_ROWS": index_rows, "CHANNELS": channels,
    }  # fmt: skip


def _num_segments(tokens: TokenMap, tile: int) -> int:
    """Number of segments with tiles of `tile` tokens, as `append.locate_segment` counts them."""
    num_tokens = len(tokens.positions)
    return num_tokens if tile == 1 else -(-num_tokens // tile) + len(tokens.request_slots)


def write_arguments(
    writes: LayerWrites, memory: LayerMemory, tokens: TokenMap, *, ratio: int
) -> dict[str, Any]:
    """Arguments that the kernels of writes, of edges and of checkpoints' tails share."""
    layout = memory.layout
    scale = memory.global_scale
    cos, sin = memory.entry_rope
    main = CompressorSpec(
        ROW=row_spec("kv", layout.entry_row, layout.rope_dim),
        RATIO=ratio or 1,  # kernels divide by it, also those of an SWA layer
        WIDTH=layout.num_series * layout.head_dim,
        TAIL_ROWS=layout.tail_rows,
        TAIL_BF16=layout.tail_dtype == "bfloat16",
        SUM_RING=sum_ring(layout.sum_rows),
        SUMS_OFFSET=layout.sums_offset - layout.tail_offset if layout.sum_rows else 0,
        ENTRIES_PER_BLOCK=layout.entries_per_block,
        HADAMARD_STEPS=0,
    )
    index = main._replace(
        ROW=row_spec("index", layout.index_row, layout.rope_dim),
        WIDTH=layout.num_series * layout.index_head_dim,
        HADAMARD_STEPS=layout.index_head_dim.bit_length() - 1 if layout.has_hadamard else 0,
    )
    return {
        **token_arguments(tokens), "token_starts_ptr": tokens.token_starts,
        "num_read_only_ptr": tokens.num_read_only,
        "cos_ptr": cos, "sin_ptr": sin, "eps": layout.rms_norm_eps,
        "slots_ptr": memory.slots, "slot_bytes": memory.slots.shape[1],
        "blocks_ptr": memory.blocks, "block_bytes": memory.blocks.shape[1],
        **_entry_arguments("", writes.entries, tokens),
        "tail_offset": layout.tail_offset, "page_offset": layout.entries_offset,
        **_entry_arguments("index_", writes.index_keys, tokens),
        "index_tail_offset": layout.index_tail_offset, "index_page_offset": layout.index_offset,
        "global_scale_ptr": memory.pooled if scale is None else scale,
        "MAIN": main, "INDEX": index, "HAS_GLOBAL_SCALE": scale is not None,
        "num_stages": 1, "launch_pdl": starts_early(memory.slots.device),
        "enable_fp_fusion": False,
    }  # fmt: skip


def _window_arguments(
    window: WindowInputs | None, memory: LayerMemory, tokens: TokenMap
) -> dict[str, Any]:
    kv = norm_weight = tokens.positions  # any pointer: a launch without a window reads none
    if window is not None:
        kv, norm_weight = _contiguous_rows(window.kv), window.norm_weight.contiguous()
    layout = memory.layout
    return {
        "window_cos_ptr": memory.rope.cos, "window_sin_ptr": memory.rope.sin,
        "window_kv_ptr": kv, "window_stride": _row_stride(kv), "window_norm_ptr": norm_weight,
        "ring_offset": layout.ring_offset, "workspace_ptr": memory.workspace,
        "workspace_rows": layout.workspace_rows,
        "WINDOW": window_spec(layout),
    }  # fmt: skip


def window_spec(layout: LayerLayout) -> WindowSpec:
    """Constants of a layer's window."""
    row = row_spec("kv", layout.kv_row, layout.rope_dim)
    return WindowSpec(row, layout.window, layout.ring_rows)


def _entry_arguments(
    prefix: str, entry: EntryInputs | KeyWeights | None, tokens: TokenMap
) -> dict[str, Any]:
    kv = gate = bias = norm_weight = tokens.positions  # any pointer: nothing is read
    if isinstance(entry, KeyWeights):
        kv, norm_weight = (weight.contiguous() for weight in entry)
    elif entry is not None:
        kv = _contiguous_rows(entry.kv)
        gate = kv if entry.gate is None else _contiguous_rows(entry.gate)
        if _row_stride(kv) != _row_stride(gate):
            kv, gate = kv.contiguous(), gate.contiguous()
        norm_weight = entry.weights.norm_weight.contiguous()
        learned = entry.weights.position_bias
        bias = norm_weight if learned is None else learned.contiguous()
    return {
        f"{prefix}kv_ptr": kv, f"{prefix}gate_ptr": gate, f"{prefix}stride": _row_stride(kv),
        f"{prefix}bias_ptr": bias, f"{prefix}norm_ptr": norm_weight,
    }  # fmt: skip


def _contiguous_rows(x: Tensor) -> Tensor:
    """Copy x unless each of its rows is contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _row_stride(x: Tensor) -> int:
    """Elements from one row to the next.

    A single row may have any stride. Its width stands for it, so that no stride compiles again.
    """
    return x.stride(0) if len(x) > 1 else x.shape[-1]
