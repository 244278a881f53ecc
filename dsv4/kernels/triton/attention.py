"""Attend: one softmax over the window and the compressed entries, read in place.

A program takes one token and a block of heads, and reads the token's rows in tiles: the window
first, then the entries. A tile is decoded once and is both key and value. With few tokens, several
programs share a token's tiles. Each stores its accumulators, largest logits and sums in
`LayerMemory.partials`, and a second kernel combines them.

Precision: with a BF16 query, and rows other than fp32, both products take BF16 operands and
accumulate in fp32. The query and the decoded rows are BF16 numbers; the softmax's weights are
rounded to BF16. Otherwise all is fp32.
"""

from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import AttentionResult, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.decode import GROUP, load_group
from dsv4.kernels.triton.dense_rows import attend_dense, choose_dense
from dsv4.kernels.triton.gather import (
    find_entries,
    find_listed,
    find_window,
    workspace_row,
)
from dsv4.kernels.triton.launch import (
    ATTEND_SIZES,
    ATTEND_UNALIGNED,
    AttendLaunch,
    CombineLaunch,
    HopperLaunch,
    find_launch,
    is_hopper,
    num_multiprocessors,
    starts_early,
    work_steps,
)
from dsv4.kernels.triton.operands import SourceSpec, Splits, row_spec, token_arguments
from dsv4.kernels.triton.primitives import (
    INTERPRETED,
    LOG2_E,
    bf16_bits,
    fold_pairs,
    halvings,
    load_rope,
    loop_bound,
    query_factor,
    rotate_tail,
    round_to_bf16,
    wait_for_launch_before,
)

LN_2 = tl.constexpr(0.6931471805599453)
HOPPER_FORMATS = {("fp8", "fp8"), ("fp8_32", "nvfp4_16")}  # of windows and entries
HEAD_BLOCK = 64  # heads of the largest program, and of a split that `part_cost` is for


class RowSource(NamedTuple):
    """Memory of rows in pages. page_stride is the bytes from one page to the next."""

    data_ptr: tl.tensor
    scales_ptr: tl.tensor
    page_stride: tl.tensor


class ListedRows(NamedTuple):
    """Rows that a tensor lists by token, and the rows of the pool."""

    rows_ptr: tl.tensor
    rows_stride: tl.tensor
    row_stride: tl.tensor
    pool_rows: tl.tensor


class AttendedTokens(NamedTuple):
    """The plan's tensors that attention finds rows by, as `TokenMap` describes them."""

    positions_ptr: tl.tensor
    request_ids_ptr: tl.tensor
    request_slots_ptr: tl.tensor
    before_ptr: tl.tensor
    after_ptr: tl.tensor
    workspace_starts_ptr: tl.tensor
    block_table_ptr: tl.tensor
    table_stride: tl.tensor


class SoftmaxState(NamedTuple):
    """Accumulators `[HEADS, 64]` by group of channels; largest logits and sums `[HEADS]`."""

    acc: tl.tuple
    largest: tl.tensor
    total: tl.tensor


class OutputPtrs(NamedTuple):
    """Pointers of the output, and of the sinks and the RoPE rows that it depends on."""

    output_ptr: tl.tensor
    lse_ptr: tl.tensor
    sinks_ptr: tl.tensor
    cos_ptr: tl.tensor
    sin_ptr: tl.tensor


@triton.jit
def as_operand(x, IS_BF16: tl.constexpr):
    """Round fp32 to an operand of a product; under the interpreter it stays fp32."""
    if IS_BF16:
        x = round_to_bf16(x) if INTERPRETED else x.to(tl.bfloat16)
    return x


@triton.jit
def load_query(query_ptr, token, head, is_wanted, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
               IS_BF16: tl.constexpr):  # fmt: skip
    """Load a token's query, `[HEADS, 64]` by group of channels; zeros beyond heads and channels."""
    at = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * DIM  # [HEADS, 1]
    groups = tl.tuple(())
    for group in tl.static_range((DIM + GROUP - 1) // GROUP):
        channel = group * GROUP + tl.arange(0, GROUP)[None, :]  # [1, 64]
        mask = is_wanted & (head < NUM_HEADS)[:, None] & (channel < DIM)
        values = tl.load(query_ptr + at + channel, mask=mask, other=0.0)  # [HEADS, 64]
        if not IS_BF16 or INTERPRETED:
            values = values.to(tl.float32)
        groups = groups + (values,)
    return groups


@triton.jit
def rotate_group(x, rope, row, LEFT: tl.constexpr, ROTATED: tl.constexpr):
    """Rotate a group of channels by RoPE row `[1]`; LEFT are a row's channels from its first on."""
    cos, sin = load_rope(rope, row, row >= 0, LEFT, ROTATED, GROUP)
    return rotate_tail(x, cos, sin, x.shape[0], LEFT, ROTATED, GROUP)


@triton.jit
def hide_join(x):
    """Return fp32 x; the compiler does not see that it was joined of even and odd channels.

    Triton orders the channels of a product by how its operands came to be, halves joined or not.
    In another order, sums of a raw query would have other bits than those of a prepared one.
    """
    if not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def prepare_query(groups, rope, row, EPS: tl.constexpr, ROW: tl.constexpr,
                  IS_ROUNDED: tl.constexpr, IS_BF16: tl.constexpr):  # fmt: skip
    """Norm and rotate a raw query, `[HEADS, 64]` by group of channels, by RoPE row `[1]`.

    IS_ROUNDED rounds it to BF16 even where it is an fp32 operand.
    """
    sums = tl.tuple(())
    for group in tl.static_range(len(groups)):
        wide = groups[group].to(tl.float32)
        sums = sums + (fold_pairs(wide * wide, halvings(GROUP)),)  # [HEADS, 1]
    for _ in tl.static_range(halvings(len(groups))):
        folded = tl.tuple(())
        for pair in tl.static_range((len(sums) + 1) // 2):
            if 2 * pair + 1 < len(sums):
                folded = folded + (sums[2 * pair] + sums[2 * pair + 1],)
            else:
                folded = folded + (sums[2 * pair],)
        sums = folded
    factor = query_factor(sums[0], EPS, ROW.DIM)
    prepared = tl.tuple(())
    for group in tl.static_range(len(groups)):
        x = groups[group].to(tl.float32) * factor  # [HEADS, 64]
        if (group + 1) * GROUP > ROW.DIM - ROW.ROTATED:
            x = hide_join(rotate_group(x, rope, row, ROW.DIM - group * GROUP, ROW.ROTATED))
        if IS_ROUNDED and not IS_BF16:
            x = round_to_bf16(x)
        prepared = prepared + (as_operand(x, IS_BF16),)
    return prepared


@triton.jit
def row_pointers(source, page, row, ROW: tl.constexpr):
    """Pointers to the data and scale records of rows in pages, `[TILE]`."""
    start = page.to(tl.int64) * source.page_stride
    row = row.to(tl.int64)
    data_ptr = source.data_ptr + (start + row * ROW.DATA_STRIDE)
    return data_ptr, source.scales_ptr + (start + row * ROW.SCALE_STRIDE)


@triton.jit
def load_tile(data_ptr, scale_ptr, is_present, ROW: tl.constexpr, IS_BF16: tl.constexpr):
    """Load a tile's rows as operands, `[TILE, 64]` by group of channels."""
    FORMAT: tl.constexpr = ROW.FORMAT
    groups = tl.tuple(())
    for group in tl.static_range((ROW.DIM + GROUP - 1) // GROUP):
        values = load_group(data_ptr, scale_ptr, is_present, group, FORMAT, ROW.DIM, ROW.ROPE)
        if FORMAT == "kv_fp8_entry_scale" and not IS_BF16:
            values = round_to_bf16(values)
        groups = groups + (as_operand(values, IS_BF16),)
    return groups


@triton.jit
def add_tile(state, query, values, is_present, scale, IS_BF16: tl.constexpr):
    """Add a tile of rows to the softmax. Logits are in base 2."""
    logits = tl.zeros((query[0].shape[0], values[0].shape[0]), tl.float32)  # [HEADS, TILE]
    for group in tl.static_range(len(values)):
        logits = tl.dot(query[group], tl.trans(values[group]), logits, input_precision="ieee")
    logits = tl.where(is_present[None, :], logits * scale, float("-inf"))
    new_largest = tl.maximum(state.largest, tl.max(logits, axis=1))  # [HEADS]
    base = finite_base(new_largest)
    weights = tl.exp2(logits - base[:, None])  # [HEADS, TILE]
    shrink = tl.exp2(state.largest - base)  # [HEADS]
    total = state.total * shrink + tl.sum(weights, axis=1)
    weights = as_operand(weights, IS_BF16)
    new_acc = tl.tuple(())
    for group in tl.static_range(len(values)):
        shrunk = state.acc[group] * shrink[:, None]  # [HEADS, 64]
        new_acc = new_acc + (tl.dot(weights, values[group], shrunk, input_precision="ieee"),)
    return SoftmaxState(new_acc, new_largest, total)


@triton.jit
def finite_base(largest):
    """The largest logit, which others are relative to; 0 where there is none yet."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def output_factor(sink, largest, total):
    """The factor of accumulators, 1 / (sum + sink), `[HEADS]`; 0 where no row was seen."""
    with_sink = total + tl.exp2(sink * LOG2_E - finite_base(largest))
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, with_sink))


@triton.jit
def load_sinks(sinks_ptr, head, NUM_HEADS: tl.constexpr):
    """Load the sinks of heads."""
    return tl.load(sinks_ptr + head, mask=head < NUM_HEADS, other=0.0).to(tl.float32)


@triton.jit
def load_turn(out, token, is_wanted, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
              ROPE: tl.constexpr):  # fmt: skip
    """Load cos, sin by which WIDTH channels from FIRST on are rotated back; 0 if none is."""
    turn = 0.0, 0.0
    if FIRST + WIDTH > DIM - ROPE:
        row = token + tl.zeros((1,), tl.int32)
        turn = load_rope((out.cos_ptr, out.sin_ptr), row, is_wanted & (row >= 0), DIM - FIRST, ROPE,
                         WIDTH)  # fmt: skip
    return turn


@triton.jit
def store_lse(lse_ptr, token, head, largest, total, NUM_HEADS: tl.constexpr):
    """Store the log-sum-exp without the sink."""
    lse = (largest + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2
    tl.store(lse_ptr + token.to(tl.int64) * NUM_HEADS + head, lse, mask=head < NUM_HEADS)


@triton.jit
def store_channels(acc, factor, turn, out, token, head, FIRST: tl.constexpr,
                   NUM_HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr):  # fmt: skip
    """Store accumulators `[HEADS, WIDTH]` of channels from FIRST on, times factor.

    Rotated channels are rotated back by `load_turn`'s cos and sin.
    """
    ROWS: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    output = acc * factor[:, None]
    if FIRST + WIDTH > DIM - ROPE:
        output = rotate_tail(output, turn[0], -turn[1], ROWS, DIM - FIRST, ROPE, WIDTH)
    channel = FIRST + tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    at = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * DIM + channel  # [HEADS, WIDTH]
    mask = (head < NUM_HEADS)[:, None] & (channel < DIM)
    if out.output_ptr.dtype.element_ty == tl.float32:
        tl.store(out.output_ptr + at, output, mask=mask)
    else:
        tl.store(out.output_ptr.to(tl.pointer_type(tl.uint16)) + at, bf16_bits(output), mask=mask)


@triton.jit
def attend_tile(
    state, query, tile, token, num_rows, scale, ring, workspace, entries, listed, tokens,
    ROW: tl.constexpr, SPEC: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    IS_BF16: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add one tile of a token's rows to the softmax: of its window, of its entries, or of both.

    Without a window in it, entries start with the first tile behind the window's.
    """
    FIRST_ENTRY: tl.constexpr = SPEC.WINDOW if HAS_WINDOW else triton.cdiv(SPEC.WINDOW, TILE) * TILE
    row = tile * TILE + tl.arange(0, TILE)  # [TILE]
    if HAS_WINDOW:
        page, page_row, is_present = find_window(
            token, row, row < SPEC.WINDOW, tokens.positions_ptr, tokens.request_ids_ptr,
            tokens.request_slots_ptr, SPEC.RING_ROWS, SPEC.WINDOW,
        )  # fmt: skip
        data_ptr, scale_ptr = row_pointers(ring, page, page_row, ROW)
        if SPEC.HAS_CHUNKS:
            copied = workspace_row(token, row, tokens.positions_ptr, tokens.request_ids_ptr,
                                   tokens.before_ptr, tokens.workspace_starts_ptr,
                                   SPEC.WINDOW)  # fmt: skip
            data_ptr = tl.where(copied >= 0, workspace.data_ptr + copied * ROW.DATA_STRIDE,
                                data_ptr)  # fmt: skip
            scale_ptr = tl.where(copied >= 0, workspace.scales_ptr + copied * ROW.SCALE_STRIDE,
                                 scale_ptr)  # fmt: skip
    if HAS_ENTRIES:
        entry = row - FIRST_ENTRY
        is_entry = (entry >= 0) & (row < num_rows)
        if SPEC.ENTRIES == "listed":
            page, page_row, has_entry = find_listed(
                token, entry, is_entry, listed.rows_ptr, listed.rows_stride, listed.row_stride,
                listed.pool_rows, SPEC.ENTRY_ROWS,
            )  # fmt: skip
        else:
            request = tl.load(tokens.request_ids_ptr + token)
            page, page_row, has_entry = find_entries(
                request, entry, is_entry, tokens.request_slots_ptr, tokens.after_ptr,
                tokens.block_table_ptr, tokens.table_stride, SPEC.RATIO, SPEC.ENTRY_ROWS,
            )  # fmt: skip
        entry_ptr, entry_scale_ptr = row_pointers(entries, page, page_row, ROW)
        if HAS_WINDOW:
            data_ptr = tl.where(entry >= 0, entry_ptr, data_ptr)
            scale_ptr = tl.where(entry >= 0, entry_scale_ptr, scale_ptr)
            is_present = is_present | has_entry
        else:
            data_ptr, scale_ptr, is_present = entry_ptr, entry_scale_ptr, has_entry
    values = load_tile(data_ptr, scale_ptr, is_present, ROW, IS_BF16)
    return add_tile(state, query, values, is_present, scale, IS_BF16)


@triton.jit(do_not_specialize=ATTEND_SIZES, do_not_specialize_on_alignment=ATTEND_UNALIGNED)
def _attend_kernel(
    query_ptr, sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, scale,
    ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
    entries_ptr, entries_scales_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
    pool_rows, num_entries, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr,
    after_ptr, workspace_starts_ptr, block_table_ptr, table_stride,
    first_token, num_splits, split_step, tile_step, tiles_per_split,
    SPEC: tl.constexpr, NUM_HEADS: tl.constexpr, QUERY_EPS: tl.constexpr, IS_SPLIT: tl.constexpr,
    IS_MIXED: tl.constexpr, IS_BF16: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend for one token and HEADS of its heads, over one split of the token's rows.

    IS_MIXED says that rows of the window and entries differ. QUERY_EPS is `LayerLayout.query_eps`
    for a raw query, None for one that is prepared.
    """
    # The programs of `_combine_kernel` would fill processors that have no program yet.
    wait_for_launch_before(STARTS_NEXT=False)
    ROW: tl.constexpr = SPEC.ROW
    ENTRY: tl.constexpr = SPEC.ENTRY
    ring = RowSource(ring_ptr, ring_scales_ptr, ring_stride)
    entries = RowSource(entries_ptr, entries_scales_ptr, entries_stride)
    out = OutputPtrs(output_ptr, lse_ptr, sinks_ptr, cos_ptr, sin_ptr)
    BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    nth = tl.program_id(0) // BLOCKS  # of this launch's tokens
    token = first_token + nth
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)  # [HEADS]
    split = tl.program_id(1)
    slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token))
    WINDOW_TILES: tl.constexpr = triton.cdiv(SPEC.WINDOW, TILE)
    num_rows = WINDOW_TILES * TILE if IS_MIXED else SPEC.WINDOW
    if SPEC.ENTRIES == "listed":
        num_rows += num_entries
    elif SPEC.ENTRIES == "all":
        num_rows += tl.minimum((tl.load(positions_ptr + token) + 1) // SPEC.RATIO, num_entries)
    num_rows = tl.where(slot >= 0, num_rows, 0)
    first = split * split_step
    end = tl.minimum(first + tiles_per_split * tile_step, tl.cdiv(num_rows, TILE))

    acc = tl.tuple(())
    for _ in tl.static_range((ROW.DIM + GROUP - 1) // GROUP):
        acc = acc + (tl.zeros((HEADS, GROUP), tl.float32),)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    state = SoftmaxState(acc, largest, total)
    has_rows = first < end
    query = load_query(query_ptr, token, head, has_rows, NUM_HEADS, ROW.DIM, IS_BF16)
    if QUERY_EPS is not None:
        rope_row = token + tl.zeros((1,), tl.int32)
        IS_ROUNDED: tl.constexpr = query_ptr.dtype.element_ty == tl.bfloat16
        query = prepare_query(query, (cos_ptr, sin_ptr), rope_row, QUERY_EPS, ROW, IS_ROUNDED,
                              IS_BF16)  # fmt: skip
    tokens = AttendedTokens(positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr,
                            after_ptr, workspace_starts_ptr, block_table_ptr,
                            table_stride)  # fmt: skip
    workspace = RowSource(workspace_ptr, workspace_scales_ptr, ring_stride)
    listed = ListedRows(rows_ptr, rows_stride, row_stride, pool_rows)
    # Hoisted out of the loop, the products' descriptors would not fit the registers.
    if SPEC.ENTRIES == "none" or not IS_MIXED:
        for tile in tl.range(loop_bound(first), loop_bound(end), loop_bound(tile_step),
                             disable_licm=True):  # fmt: skip
            state = attend_tile(state, query, tile, token, num_rows, scale, ring, workspace,
                                entries, listed, tokens, ROW, SPEC, True, SPEC.ENTRIES != "none",
                                IS_BF16, TILE)  # fmt: skip
    else:
        # Tiles of one format each: the window's come first.
        window_end = tl.minimum(end, WINDOW_TILES)
        for tile in tl.range(loop_bound(first), loop_bound(window_end), loop_bound(tile_step),
                             disable_licm=True):  # fmt: skip
            state = attend_tile(state, query, tile, token, num_rows, scale, ring, workspace,
                                entries, listed, tokens, ROW, SPEC, True, False, IS_BF16,
                                TILE)  # fmt: skip
        first += tl.cdiv(tl.maximum(WINDOW_TILES - first, 0), tile_step) * tile_step
        for tile in tl.range(loop_bound(first), loop_bound(end), loop_bound(tile_step),
                             disable_licm=True):  # fmt: skip
            state = attend_tile(state, query, tile, token, num_rows, scale, ring, workspace,
                                entries, listed, tokens, ENTRY, SPEC, False, True, IS_BF16,
                                TILE)  # fmt: skip

    if IS_SPLIT:
        at = (nth.to(tl.int64) * num_splits + split) * NUM_HEADS + head  # [HEADS]
        is_head = head < NUM_HEADS
        tl.store(stats_ptr + 2 * at, state.largest, mask=is_head)
        tl.store(stats_ptr + 2 * at + 1, state.total, mask=is_head)
        for group in tl.static_range(len(state.acc)):
            channel = group * GROUP + tl.arange(0, GROUP)[None, :]
            tl.store(partials_ptr + at[:, None] * ROW.DIM + channel, state.acc[group],
                     mask=has_rows & is_head[:, None] & (channel < ROW.DIM))  # fmt: skip
    else:
        store_lse(lse_ptr, token, head, state.largest, state.total, NUM_HEADS)
        sink = load_sinks(sinks_ptr, head, NUM_HEADS)
        factor = output_factor(sink, state.largest, state.total)
        for group in tl.static_range(len(state.acc)):
            turn = load_turn(out, token, True, group * GROUP, GROUP, ROW.DIM, ROW.ROTATED)
            store_channels(state.acc[group], factor, turn, out, token, head, group * GROUP,
                           NUM_HEADS, ROW.DIM, ROW.ROTATED)  # fmt: skip


@triton.jit
def load_part(partials_ptr, stats_ptr, at, channel, is_there, DIM: tl.constexpr):
    """Load a split's accumulators `[1, BLOCK]`, largest logit and sum `[1]`."""
    is_there = is_there & (at >= 0)
    largest = tl.load(stats_ptr + 2 * at, mask=is_there, other=float("-inf"))
    total = tl.load(stats_ptr + 2 * at + 1, mask=is_there, other=0.0)
    acc = tl.load(partials_ptr + at[:, None] * DIM + channel,
                  mask=is_there[:, None] & (channel < DIM), other=0.0)  # fmt: skip
    return acc, largest, total


@triton.jit
def join_part(acc, largest, total, part_acc, part_largest, part_total):
    """Join a split to those before it; one without rows, which stored nothing, changes nothing.

    A sum of NaN may be beside the largest logit of no row.
    """
    is_there = (part_largest != float("-inf")) | (part_total != 0.0)
    new_largest = tl.maximum(largest, part_largest)
    base = finite_base(new_largest)
    shrink, grow = tl.exp2(largest - base), tl.exp2(part_largest - base)  # [1]
    total = tl.where(is_there, total * shrink + part_total * grow, total)
    joined = acc * shrink[:, None] + part_acc * grow[:, None]
    return tl.where(is_there[:, None], joined, acc), new_largest, total


@triton.jit(
    do_not_specialize=["first_token", "num_splits"],
    do_not_specialize_on_alignment=["sinks_ptr"],
)
def _combine_kernel(
    sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, first_token,
    num_splits,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, IN_TURN: tl.constexpr,
):  # fmt: skip
    """Combine BLOCK channels of the splits of a token's head, SPLITS at a time, in their order.

    IN_TURN joins them one by one, as `hopper.many_heads.join_part` does.
    """
    wait_for_launch_before(STARTS_NEXT=True)
    nth, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    first = tl.program_id(1) * BLOCK
    LAST: tl.constexpr = (DIM - 1) // BLOCK * BLOCK
    token = first_token + nth
    out = OutputPtrs(output_ptr, lse_ptr, sinks_ptr, cos_ptr, sin_ptr)
    # What the end needs is loaded beside the splits.
    heads = head + tl.zeros((1,), tl.int32)  # [1]
    sink = load_sinks(sinks_ptr, heads, NUM_HEADS)
    turn = load_turn(out, token, first == LAST, LAST, BLOCK, DIM, ROPE)
    channel = first + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    acc = tl.zeros((1, BLOCK), tl.float32)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for start in range(0, loop_bound(num_splits), SPLITS):
        if IN_TURN:
            accs, maxima, sums = tl.tuple(()), tl.tuple(()), tl.tuple(())
            for ahead in tl.static_range(SPLITS):  # all are loaded before the first is joined
                at = (nth.to(tl.int64) * num_splits + start + ahead) * NUM_HEADS + head
                part = load_part(partials_ptr, stats_ptr, at + tl.zeros((1,), tl.int64), channel,
                                 start + ahead < num_splits, DIM)  # fmt: skip
                accs, maxima, sums = accs + (part[0],), maxima + (part[1],), sums + (part[2],)
            for ahead in tl.static_range(SPLITS):
                acc, largest, total = join_part(acc, largest, total, accs[ahead], maxima[ahead],
                                                sums[ahead])  # fmt: skip
        else:
            split = start + tl.arange(0, SPLITS)  # [SPLITS]
            is_split = split < num_splits
            at = (nth.to(tl.int64) * num_splits + split) * NUM_HEADS + head
            split_largest = tl.load(stats_ptr + 2 * at, mask=is_split, other=float("-inf"))
            split_total = tl.load(stats_ptr + 2 * at + 1, mask=is_split, other=0.0)
            is_part = is_split[:, None]
            if DIM % BLOCK != 0:
                is_part = is_part & (channel < DIM)
            split_acc = tl.load(partials_ptr + at[:, None] * DIM + channel, mask=is_part,
                                other=0.0)  # [SPLITS, BLOCK]  # fmt: skip
            # A split without rows stored no accumulators. A mask by its largest logit would make
            # this load wait for that one.
            split_acc = tl.where(split_largest[:, None] != float("-inf"), split_acc, 0.0)
            new_largest = tl.maximum(largest, tl.max(split_largest, axis=0))
            base = finite_base(new_largest)
            grow = tl.exp2(split_largest - base)  # [SPLITS]
            shrink = tl.exp2(largest - base)  # [1]
            total = total * shrink + tl.sum(split_total * grow, axis=0)
            acc = acc * shrink[:, None] + tl.sum(split_acc * grow[:, None], axis=0)[None, :]
            largest = new_largest
    factor = output_factor(sink, largest, total)
    if first == LAST:
        store_lse(lse_ptr, token, heads, largest, total, NUM_HEADS)
        store_channels(acc, factor, turn, out, token, heads, LAST, NUM_HEADS, DIM, ROPE)
    else:
        out = OutputPtrs(output_ptr + first, lse_ptr, sinks_ptr, cos_ptr, sin_ptr)
        store_channels(acc, factor, turn, out, token, heads, 0, NUM_HEADS, DIM, 0)


ProgramLaunch = AttendLaunch | HopperLaunch


def attend(
    query: Tensor,
    sinks: Tensor | None,
    memory: LayerMemory,
    selected_rows: Tensor | None,
    tokens: TokenMap,
    *,
    max_entries: int,
    is_query_raw: bool = False,
    batch_invariant: bool = False,
) -> AttentionResult:
    """See `kernels.reference.attention`."""
    num_tokens, num_heads, _ = query.shape
    query = query.contiguous()
    output = torch.empty_like(query)
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=query.device)
    if not num_tokens:
        return AttentionResult(output, lse)
    if sinks is None:
        sinks = torch.full((num_heads,), -torch.inf, device=query.device)
    launch = attend_launch(num_heads, query.dtype, memory)
    num_listed = None if selected_rows is None else selected_rows.shape[1]
    num_tiles = count_tiles(memory, launch, max_entries if num_listed is None else num_listed)
    num_joining = 0
    if batch_invariant:
        most_tiles = count_most_tiles(memory, launch, tokens.block_table, num_listed)
        splits = invariant_splits(num_tiles, most_tiles, launch, memory)
        num_joining = count_joining(num_tokens, num_heads, num_tiles, splits, launch, memory)
    else:
        if not len(tokens.chunk_ids):
            launch = choose_launch(num_tokens, num_heads, num_tiles, launch, memory)
        splits = choose_splits(num_tokens, num_heads, num_tiles, launch, memory)
    cos, sin = memory.rope
    results: dict[str, Any] = {
        "sinks_ptr": sinks, "output_ptr": output, "lse_ptr": lse, "cos_ptr": cos, "sin_ptr": sin,
    }  # fmt: skip
    rows = _row_arguments(memory, selected_rows, tokens, max_entries)
    rows["QUERY_EPS"] = memory.layout.query_eps if is_query_raw else None
    # Then a program may join its splits, or another combines them: both round alike.
    is_joined = batch_invariant and splits is not None and can_join(launch)
    rows["enable_fp_fusion"] = not is_joined
    if splits is None or num_joining:
        whole, left = Splits(1, 0, 1, num_tiles), None
        sizes = None
        if not batch_invariant and is_hopper_chunk(launch, tokens) and query.data_ptr() % 16 == 0:
            sizes = choose_dense(
                num_tokens, num_heads, num_tiles * launch.tile, memory,
                num_chunks=len(tokens.chunk_ids), max_entries=max_entries,
            )  # fmt: skip
        if sizes is not None:
            left = attend_dense(
                query, output, sizes, memory, tokens, results | rows, scale=softmax_scale(memory)
            )
        _launch(query, memory, launch, splits or whole, 0, num_tokens, **results, **rows,
                IS_SPLIT=num_joining > 0, left=left, num_joining=num_joining)  # fmt: skip
        return AttentionResult(output, lse)
    step = memory.partials.shape[0] // splits.num_splits
    # The order of sums must not depend on the batch's longest request.
    combine = combine_launch(query.device, 1 if batch_invariant else splits.num_splits)
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        _launch(query, memory, launch, splits, first, count, **results, **rows, IS_SPLIT=True)
        _combine(memory, combine, splits, first, count, in_turn=is_joined, **results)
    return AttentionResult(output, lse)


def attend_launch(num_heads: int, dtype: torch.dtype, memory: LayerMemory) -> ProgramLaunch:
    """The launch of a layer's attention; the same for every batch, so that it changes no bits."""
    device, layout = memory.partials.device, memory.layout
    if not _is_bf16(dtype, memory):
        return find_launch(AttendLaunch, "attend fp32", device)
    formats = layout.kv_format, layout.entry_format
    is_aligned = layout.page_arrangement == "split" or formats != ("fp8", "fp8")
    is_fit = formats in HOPPER_FORMATS and is_aligned and layout.window % 64 == 0
    is_fit = is_fit and (layout.head_dim, layout.rope_dim) == (512, 64)
    if is_hopper(device) and is_fit:
        return find_launch(HopperLaunch, "attend hopper", device, num_heads)
    return find_launch(AttendLaunch, "attend bf16", device, num_heads)


def is_hopper_chunk(launch: ProgramLaunch, tokens: TokenMap) -> bool:
    """Whether programs on Hopper take work items of 64 heads in turn, unless rows are split."""
    is_wide = isinstance(launch, HopperLaunch) and launch.heads == HEAD_BLOCK
    return is_wide and len(tokens.chunk_ids) > 0


def softmax_scale(memory: LayerMemory) -> float:
    """The factor of a product that makes it a logit in base 2."""
    return float(memory.layout.head_dim**-0.5 * LOG2_E.value)


def choose_launch(
    num_tokens: int, num_heads: int, num_tiles: int, launch: ProgramLaunch, memory: LayerMemory
) -> ProgramLaunch:
    """Choose the heads of a program on Hopper, at most those of `launch`.

    Programs of few heads end sooner. But more of them decode the same rows.
    """
    if not isinstance(launch, HopperLaunch):
        return launch
    steps = work_steps("attend hopper", memory.partials.device)
    launches = [step.launch for step in steps if step.launch.heads <= launch.heads]
    costs = [min(split_costs(num_tokens, num_heads, num_tiles, each, memory)) for each in launches]
    chosen: HopperLaunch = launches[costs.index(min(costs))]
    return chosen


def choose_splits(
    num_tokens: int, num_heads: int, num_tiles: int, launch: ProgramLaunch, memory: LayerMemory
) -> Splits | None:
    """Choose how rows are split, by sizes that the host knows; None for a single split."""
    costs = split_costs(num_tokens, num_heads, num_tiles, launch, memory)
    num_splits = costs.index(min(costs)) + 1
    if num_splits == 1:
        return None
    return Splits(num_splits, 1, num_splits, -(-num_tiles // num_splits))


def split_costs(
    num_tokens: int, num_heads: int, num_tiles: int, launch: ProgramLaunch, memory: LayerMemory
) -> tuple[float, ...]:
    """The costs of 1, 2 and more splits, in 1/64 of the time of a tile of 64 heads."""
    device, num_parts = memory.partials.device, memory.partials.shape[0]
    sizes = num_multiprocessors(device), num_parts // num_tokens, combine_launch(device)
    return _split_costs(num_tokens, num_heads, num_tiles, launch, *sizes)


@cache
def _split_costs(
    num_tokens: int,
    num_heads: int,
    num_tiles: int,
    launch: ProgramLaunch,
    wave: int,
    num_parts: int,
    combine: CombineLaunch,
) -> tuple[float, ...]:
    """More splits have fewer tiles each and end sooner, but more has to be combined."""
    start, tile = 0, 64
    if isinstance(launch, HopperLaunch):
        start, tile = launch.start_cost, launch.tile_cost
    else:
        wave *= HEAD_BLOCK // launch.heads
    programs = num_tokens * -(-num_heads // launch.heads)
    part_cost = combine.part_cost * num_tokens * num_heads / HEAD_BLOCK
    whole = -(-programs // wave) * (start + tile * num_tiles)
    return whole, *(
        start + tile * -(-num_tiles // n) + combine.combine_cost + n * part_cost
        for n in range(2, min(wave // programs, num_parts, num_tiles) + 1)
    )


def invariant_splits(
    num_tiles: int, most_tiles: int, launch: ProgramLaunch, memory: LayerMemory
) -> Splits | None:
    """Split rows independently of the batch, by the most tiles that any token can ever have.

    Splits are long, or a token has only one: each join takes as long as some tiles.
    """
    combine = combine_launch(memory.partials.device)
    if most_tiles * launch.tile <= combine.whole_rows:
        return None
    per_split = max(combine.split_rows // launch.tile, -(-most_tiles // memory.partials.shape[0]))
    return Splits(-(-num_tiles // per_split), per_split, 1, per_split)


def can_join(launch: ProgramLaunch) -> TypeGuard[HopperLaunch]:
    """Whether a program can join the splits of its token itself."""
    return isinstance(launch, HopperLaunch) and launch.heads == HEAD_BLOCK


def count_joining(
    num_tokens: int,
    num_heads: int,
    num_tiles: int,
    splits: Splits | None,
    launch: ProgramLaunch,
    memory: LayerMemory,
) -> int:
    """Count the programs that each join the splits of their tokens; 0 if others combine them."""
    device, combine = memory.partials.device, combine_launch(memory.partials.device)
    if splits is None or not can_join(launch):
        return 0
    part = HEAD_BLOCK * memory.layout.head_dim
    wave, works = num_multiprocessors(device), num_tokens * -(-num_heads // HEAD_BLOCK)
    joining = min(works, wave, memory.cut_partials[0].numel() // part)
    if not joining:
        return 0
    start, tile = launch.start_cost, launch.tile_cost
    num_splits, in_turn = splits.num_splits, start + tile * num_tiles
    in_turn = -(-works // joining) * (in_turn + combine.join_cost * (num_splits - 1))
    apart = -(-works * num_splits // wave) * (start + tile * splits.tiles_per_split)
    apart += combine.combine_cost + combine.part_cost * works * num_splits
    return joining if in_turn < apart else 0


def combine_launch(device: torch.device, num_splits: int = 1) -> CombineLaunch:
    """The launch that combines so many splits; the constants by which rows are split."""
    return find_launch(CombineLaunch, "combine", device, num_splits)


def count_tiles(memory: LayerMemory, launch: ProgramLaunch, num_entries: int) -> int:
    """The tiles of a token's window and so many entries, of a layer that has any."""
    layout = memory.layout
    window = layout.window
    if layout.entry_format != layout.kv_format:  # tiles of one format each
        window = -(-window // launch.tile) * launch.tile
    return -(-(window + (num_entries if layout.ratio else 0)) // launch.tile)


def count_most_tiles(
    memory: LayerMemory, launch: ProgramLaunch, block_table: Tensor, num_listed: int | None
) -> int:
    """The most tiles that any token can ever have: of a listed number of entries, or of all."""
    if num_listed is None:
        num_listed = block_table.shape[1] * memory.layout.entries_per_block
    return count_tiles(memory, launch, num_listed)


def _is_bf16(dtype: torch.dtype, memory: LayerMemory) -> bool:
    formats = (memory.layout.kv_format, memory.layout.entry_format)
    return dtype is torch.bfloat16 and "fp32" not in formats


def _row_arguments(
    memory: LayerMemory, selected_rows: Tensor | None, tokens: TokenMap, max_entries: int
) -> dict[str, Any]:
    """Kernel arguments that say which rows of the window and the entries are read, and where."""
    window, entries, layout = memory.window, memory.entries, memory.layout
    pages = window.ring if entries is None else entries  # any pages where there are no entries
    rows, num_entries = pages.data, max_entries
    if selected_rows is not None:
        rows, num_entries = selected_rows, selected_rows.shape[1]
    kind = "all" if selected_rows is None else "listed"
    return {
        "ring_ptr": window.ring.data, "ring_scales_ptr": window.ring.scales,
        "ring_stride": window.ring.data.stride(0), "workspace_ptr": window.workspace.data,
        "workspace_scales_ptr": window.workspace.scales, "entries_ptr": pages.data,
        "entries_scales_ptr": pages.scales, "entries_stride": pages.data.stride(0),
        "rows_ptr": rows, "rows_stride": rows.stride(0), "row_stride": rows.stride(1),
        "pool_rows": pages.num_rows, "num_entries": num_entries, **token_arguments(tokens),
        "SPEC": SourceSpec(
            WINDOW=layout.window, RING_ROWS=layout.ring_rows, HAS_CHUNKS=len(tokens.chunk_ids) > 0,
            ENTRIES="none" if entries is None else kind, RATIO=max(layout.ratio, 1),
            ENTRY_ROWS=pages.rows_per_page,
            ROW=row_spec("kv", layout.kv_row, layout.rope_dim),
            ENTRY=row_spec("kv", layout.entry_row, layout.rope_dim),
        ),
    }  # fmt: skip


def _launch(
    query: Tensor,
    memory: LayerMemory,
    launch: ProgramLaunch,
    splits: Splits,
    first_token: int,
    num_tokens: int,
    left: Tensor | None = None,
    num_joining: int = 0,
    **arguments: Any,
) -> None:
    layout, num_heads = memory.layout, query.shape[1]
    partials, stats = memory.cut_partials
    grid = (num_tokens * -(-num_heads // launch.heads), 1 if num_joining else splits.num_splits)
    arguments |= {
        "query_ptr": query, "partials_ptr": partials, "stats_ptr": stats,
        "scale": softmax_scale(memory), "first_token": first_token, **splits._asdict(),
        "NUM_HEADS": num_heads,
    }  # fmt: skip
    if isinstance(launch, HopperLaunch):
        _launch_on_hopper(grid, launch, arguments, query.device, left, num_joining)
        return
    arguments["enable_fp_fusion"] = False
    _attend_kernel[grid](
        **arguments, IS_MIXED=layout.entry_format != layout.kv_format,
        IS_BF16=_is_bf16(query.dtype, memory), HEADS=launch.heads,
        TILE=launch.tile, num_warps=launch.num_warps, num_stages=1,
        launch_pdl=starts_early(query.device),
    )  # fmt: skip


def _launch_on_hopper(
    grid: tuple[int, int],
    launch: HopperLaunch,
    arguments: dict[str, Any],
    device: torch.device,
    left: Tensor | None,
    num_joining: int,
) -> None:
    """Launch a program per token and block of heads, or for chunks as many as run at once.

    left lists the work items of chunks that are left to do, after their number. num_joining
    programs, if there are any, take one work item after another and join its splits.
    """
    from dsv4.kernels.triton.hopper import attention

    num_works, num_splits = grid
    is_whole = not arguments["IS_SPLIT"]  # one split of a longer row is not
    is_chunk = launch.heads == HEAD_BLOCK and arguments["SPEC"].HAS_CHUNKS and is_whole
    is_chunk = is_chunk or num_joining > 0
    if is_chunk and arguments["SPEC"].ROW.FORMAT == "kv_fp8":  # others need registers to decode
        launch = find_launch(HopperLaunch, "attend hopper chunk", device)
    arguments |= {
        "STAGES": launch.stages, "DECODING_REGISTERS": launch.decoding_registers,
        "MULTIPLYING_REGISTERS": launch.multiplying_registers, "num_warps": launch.num_warps,
        "launch_pdl": starts_early(device),
    }  # fmt: skip
    if is_chunk:
        programs = num_joining or min(num_works, num_multiprocessors(device))
        attention._attend_chunk_kernel[(programs,)](
            **arguments, num_works=num_works, HAS_LEFT=left is not None,
            left_ptr=arguments["request_ids_ptr"] if left is None else left,
        )  # fmt: skip
    else:
        # Programs that combine would otherwise share the few processors that are idle first.
        is_roomy = 3 * num_works * num_splits <= 2 * num_multiprocessors(device)
        starts_next = is_whole or (launch.heads < HEAD_BLOCK and is_roomy)
        attention._attend_kernel[grid](
            **arguments, HEADS=launch.heads, starts_next=int(starts_next)
        )


def _combine(
    memory: LayerMemory,
    launch: CombineLaunch,
    splits: Splits,
    first_token: int,
    num_tokens: int,
    *,
    in_turn: bool,
    **results: Any,
) -> None:
    layout, num_heads = memory.layout, results["lse_ptr"].shape[1]
    partials, stats = memory.cut_partials
    is_cut = layout.head_dim % launch.channels == 0 and layout.rope_dim <= launch.channels
    block = launch.channels if is_cut else next_power_of_two(layout.head_dim)
    _combine_kernel[(num_tokens * num_heads, -(-layout.head_dim // block))](
        **results, partials_ptr=partials, stats_ptr=stats, first_token=first_token,
        num_splits=splits.num_splits, NUM_HEADS=num_heads, DIM=layout.head_dim,
        ROPE=layout.rope_dim, BLOCK=block, SPLITS=launch.splits, IN_TURN=in_turn,
        num_warps=launch.num_warps,
        launch_pdl=starts_early(partials.device), enable_fp_fusion=False,
    )  # fmt: skip
