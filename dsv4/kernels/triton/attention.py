"""Attend: one softmax over the window and the compressed entries, read in place.

A program takes one token and a block of heads and goes over the token's rows in tiles: the window
first, then the entries. A tile is decoded once and is key and value at once. Where there are few
tokens, the tiles are split among several programs; each leaves its accumulators, largest logits
and sums in `LayerMemory.partials`, and a second kernel combines them.

Precision: with a BF16 query, and rows other than fp32, both products take BF16 operands and
accumulate in fp32. The query and the decoded rows are BF16 numbers, the softmax's weights are
rounded to BF16. Otherwise all is fp32.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import AttentionResult, TokenMap
from dsv4.kernels.layer_memory import LayerLayout, LayerMemory
from dsv4.kernels.triton.decode import GROUP, load_group
from dsv4.kernels.triton.gather import (
    find_entries,
    find_listed,
    find_window,
    token_arguments,
    workspace_row,
)
from dsv4.kernels.triton.launch import architecture
from dsv4.kernels.triton.primitives import (
    INTERPRETED,
    LOG2_E,
    bf16_bits,
    load_rope,
    loop_bound,
    rotate_tail,
    round_to_bf16,
    wait_for_launch_before,
)

LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST_DOT = 16  # rows that a product must have; fewer heads are padded to it
LARGEST_BLOCK = 64  # heads of a program
INVARIANT_ROWS = 320  # rows of a split that doesn't depend on the batch: two for V4-Flash's CSA
COMBINED_AT_ONCE = 8  # parts that are read side by side
# What it costs to combine parts, in the time of a tile: at all, and for each part of 64 heads.
COMBINE_COST, PART_COST = 0.5, 1 / 64
INTERPRETED_MULTIPROCESSORS = 4  # few, since programs run one after the other


@triton.jit
def as_operand(x, IS_BF16: tl.constexpr):
    """fp32 as an operand of a product. Under the interpreter it is rounded and stays fp32."""
    if IS_BF16:
        x = round_to_bf16(x) if INTERPRETED else x.to(tl.bfloat16)
    return x


@triton.jit
def load_query(query_ptr, token, head, is_wanted, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
               IS_BF16: tl.constexpr):  # fmt: skip
    """A token's `[HEADS, 64]` by group of channels; zeros for heads and channels not there."""
    at = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * DIM
    groups = tl.tuple(())
    for group in tl.static_range((DIM + GROUP - 1) // GROUP):
        channel = group * GROUP + tl.arange(0, GROUP)[None, :]
        mask = is_wanted & (head < NUM_HEADS)[:, None] & (channel < DIM)
        part = tl.load(query_ptr + at + channel, mask=mask, other=0.0)
        if not IS_BF16 or INTERPRETED:
            part = part.to(tl.float32)
        groups = groups + (part,)
    return groups


@triton.jit
def row_pointers(data_ptr, scales_ptr, page_stride, page, row, DATA_BYTES: tl.constexpr,
                 SCALE_BYTES: tl.constexpr):  # fmt: skip
    """Pointers to the data and scale records of rows of pages."""
    start = page.to(tl.int64) * page_stride
    row = row.to(tl.int64)
    return data_ptr + (start + row * DATA_BYTES), scales_ptr + (start + row * SCALE_BYTES)


@triton.jit
def load_tile(data_ptr, scale_ptr, is_present, FORMAT: tl.constexpr, DIM: tl.constexpr,
              ROPE: tl.constexpr, IS_BF16: tl.constexpr):  # fmt: skip
    """A tile's rows, `[TILE, 64]` by group of channels, as operands."""
    groups = tl.tuple(())
    for group in tl.static_range((DIM + GROUP - 1) // GROUP):
        values = load_group(data_ptr, scale_ptr, is_present, group, FORMAT, DIM, ROPE)
        if FORMAT == "kv_fp8_entry_scale" and not IS_BF16:
            values = round_to_bf16(values)
        groups = groups + (as_operand(values, IS_BF16),)
    return groups


@triton.jit
def add_tile(state, query, values, is_present, scale, IS_BF16: tl.constexpr):
    """The softmax goes on by a tile of rows.

    state is the accumulators `[HEADS, 64]` by group, the largest logits and the sums `[HEADS]`;
    logits are in base 2.
    """
    acc, largest, total = state
    logits = tl.zeros((query[0].shape[0], values[0].shape[0]), tl.float32)
    for group in tl.static_range(len(values)):
        logits = tl.dot(query[group], tl.trans(values[group]), logits, input_precision="ieee")
    logits = tl.where(is_present[None, :], logits * scale, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, axis=1))
    base = finite_base(new_largest)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = as_operand(weights, IS_BF16)
    new_acc = tl.tuple(())
    for group in tl.static_range(len(values)):
        part = acc[group] * shrink[:, None]
        new_acc = new_acc + (tl.dot(weights, values[group], part, input_precision="ieee"),)
    return new_acc, new_largest, total


@triton.jit
def finite_base(largest):
    """What logits are taken relative to: 0 where there is none yet."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def output_factor(sinks_ptr, head, largest, total, NUM_HEADS: tl.constexpr):
    """What accumulators are multiplied by: 1 / (sum + sink); 0 where no row was seen."""
    sink = tl.load(sinks_ptr + head, mask=head < NUM_HEADS, other=0.0).to(tl.float32)
    with_sink = total + tl.exp2(sink * LOG2_E - finite_base(largest))
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, with_sink))


@triton.jit
def store_lse(lse_ptr, token, head, largest, total, NUM_HEADS: tl.constexpr):
    """Store the log-sum-exp without the sink."""
    lse = (largest + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2
    tl.store(lse_ptr + token.to(tl.int64) * NUM_HEADS + head, lse, mask=head < NUM_HEADS)


@triton.jit
def store_output(
    acc, factor, output_ptr, cos_ptr, sin_ptr, positions_ptr, token, head,
    FIRST: tl.constexpr, ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store WIDTH channels from FIRST on, times factor, rotated back at the token's position."""
    output = acc * factor[:, None]
    if FIRST + WIDTH > DIM - ROPE:
        position = tl.load(positions_ptr + token + tl.zeros((1,), tl.int32))
        LEFT: tl.constexpr = DIM - FIRST
        cos, sin = load_rope((cos_ptr, sin_ptr), position, position >= 0, LEFT, ROPE, WIDTH)
        output = rotate_tail(output, cos, -sin, ROWS, LEFT, ROPE, WIDTH)
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    at = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * DIM + channel
    mask = (head < NUM_HEADS)[:, None] & (channel < DIM)
    if output_ptr.dtype.element_ty == tl.float32:
        tl.store(output_ptr + at, output, mask=mask)
    else:
        tl.store(output_ptr.to(tl.pointer_type(tl.uint16)) + at, bf16_bits(output), mask=mask)


@triton.jit(
    do_not_specialize=[
        "rows_stride", "row_stride", "num_entries", "table_stride", "first_token", "num_splits",
        "split_step", "tile_step", "tiles_per_split",
    ],
    do_not_specialize_on_alignment=[
        "sinks_ptr", "rows_ptr", "positions_ptr", "request_ids_ptr", "request_slots_ptr",
        "before_ptr", "after_ptr", "starts_ptr", "block_table_ptr",
    ],
)  # fmt: skip
def _attend_kernel(
    query_ptr, sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, scale,
    ring_ptr, ring_scales_ptr, ring_stride, workspace_ptr, workspace_scales_ptr,
    entries_ptr, entries_scales_ptr, entries_stride, rows_ptr, rows_stride, row_stride,
    num_entries, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
    starts_ptr, block_table_ptr, table_stride,
    first_token, num_splits, split_step, tile_step, tiles_per_split,
    ENTRIES: tl.constexpr, FORMAT: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    RING_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr, IS_SPLIT: tl.constexpr,
    IS_BF16: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A token and HEADS of its heads over one split of its rows.

    ENTRIES says where the rows after the window come from: `listed`, the first num_entries of a
    token's line of rows_ptr; `all` that the token sees, at most num_entries; or `none`.
    """
    # The programs of `_combine_kernel` would fill processors that have no program yet.
    wait_for_launch_before(STARTS_NEXT=False)
    BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    part = tl.program_id(0) // BLOCKS
    token = first_token + part
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token))
    num_rows = WINDOW
    if ENTRIES == "listed":
        num_rows += num_entries
    elif ENTRIES == "all":
        num_rows += tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, num_entries)
    num_rows = tl.where(slot >= 0, num_rows, 0)
    first = split * split_step
    end = tl.minimum(first + tiles_per_split * tile_step, tl.cdiv(num_rows, TILE))

    acc = tl.tuple(())
    for _ in tl.static_range((DIM + GROUP - 1) // GROUP):
        acc = acc + (tl.zeros((HEADS, GROUP), tl.float32),)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    has_rows = first < end
    query = load_query(query_ptr, token, head, has_rows, NUM_HEADS, DIM, IS_BF16)
    # Hoisted out of the loop, the products' descriptors would not fit the registers.
    bounds = loop_bound(first), loop_bound(end), loop_bound(tile_step)
    for tile in tl.range(bounds[0], bounds[1], bounds[2], disable_licm=True):
        row = tile * TILE + tl.arange(0, TILE)
        page, page_row, is_present = find_window(
            token, row, row < WINDOW, positions_ptr, request_ids_ptr, request_slots_ptr,
            RING_ROWS, WINDOW,
        )  # fmt: skip
        data_ptr, scale_ptr = row_pointers(ring_ptr, ring_scales_ptr, ring_stride, page,
                                           page_row, DATA_BYTES, SCALE_BYTES)  # fmt: skip
        if HAS_CHUNKS:
            copied = workspace_row(token, row, positions_ptr, request_ids_ptr, before_ptr,
                                   starts_ptr, WINDOW)  # fmt: skip
            data_ptr = tl.where(copied >= 0, workspace_ptr + copied * DATA_BYTES, data_ptr)
            scale_ptr = tl.where(copied >= 0, workspace_scales_ptr + copied * SCALE_BYTES,
                                 scale_ptr)  # fmt: skip
        if ENTRIES != "none":
            entry = row - WINDOW
            is_entry = (entry >= 0) & (row < num_rows)
            if ENTRIES == "listed":
                page, page_row, has_entry = find_listed(
                    token, entry, is_entry, rows_ptr, rows_stride, row_stride, ENTRY_ROWS
                )
            else:
                request = tl.load(request_ids_ptr + token)
                page, page_row, has_entry = find_entries(
                    request, entry, is_entry, request_slots_ptr, after_ptr, block_table_ptr,
                    table_stride, RATIO, ENTRY_ROWS,
                )  # fmt: skip
            entry_ptr, entry_scale_ptr = row_pointers(
                entries_ptr, entries_scales_ptr, entries_stride, page, page_row, DATA_BYTES,
                SCALE_BYTES,
            )  # fmt: skip
            data_ptr = tl.where(entry >= 0, entry_ptr, data_ptr)
            scale_ptr = tl.where(entry >= 0, entry_scale_ptr, scale_ptr)
            is_present = is_present | has_entry
        values = load_tile(data_ptr, scale_ptr, is_present, FORMAT, DIM, ROPE, IS_BF16)
        acc, largest, total = add_tile(
            (acc, largest, total), query, values, is_present, scale, IS_BF16
        )

    if IS_SPLIT:
        at = (part.to(tl.int64) * num_splits + split) * NUM_HEADS + head
        is_head = head < NUM_HEADS
        tl.store(stats_ptr + 2 * at, largest, mask=is_head)
        tl.store(stats_ptr + 2 * at + 1, total, mask=is_head)
        for group in tl.static_range(len(acc)):
            channel = group * GROUP + tl.arange(0, GROUP)[None, :]
            tl.store(partials_ptr + at[:, None] * DIM + channel, acc[group],
                     mask=has_rows & is_head[:, None] & (channel < DIM))  # fmt: skip
    else:
        store_lse(lse_ptr, token, head, largest, total, NUM_HEADS)
        factor = output_factor(sinks_ptr, head, largest, total, NUM_HEADS)
        for group in tl.static_range(len(acc)):
            store_output(acc[group], factor, output_ptr, cos_ptr, sin_ptr, positions_ptr, token,
                         head, group * GROUP, HEADS, NUM_HEADS, DIM, ROPE, GROUP)  # fmt: skip


@triton.jit(
    do_not_specialize=["first_token", "num_splits"],
    do_not_specialize_on_alignment=["sinks_ptr", "positions_ptr"],
)
def _combine_kernel(
    sinks_ptr, output_ptr, lse_ptr, cos_ptr, sin_ptr, partials_ptr, stats_ptr, positions_ptr,
    first_token, num_splits,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of a token: its parts are merged, SPLITS at a time, in the order of the splits."""
    wait_for_launch_before(STARTS_NEXT=True)
    part, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    channel = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((1, BLOCK), tl.float32)
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for start in range(0, loop_bound(num_splits), SPLITS):
        split = start + tl.arange(0, SPLITS)
        is_split = split < num_splits
        at = (part.to(tl.int64) * num_splits + split) * NUM_HEADS + head
        part_largest = tl.load(stats_ptr + 2 * at, mask=is_split, other=float("-inf"))
        part_total = tl.load(stats_ptr + 2 * at + 1, mask=is_split, other=0.0)
        part_acc = tl.load(partials_ptr + at[:, None] * DIM + channel,
                           mask=is_split[:, None] & (channel < DIM), other=0.0)  # fmt: skip
        # Of a split without rows nothing was stored; asked before it is loaded, it would wait.
        part_acc = tl.where(part_largest[:, None] != float("-inf"), part_acc, 0.0)
        new_largest = tl.maximum(largest, tl.max(part_largest, axis=0))
        base = finite_base(new_largest)
        grow = tl.exp2(part_largest - base)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(part_total * grow, axis=0)
        acc = acc * shrink[:, None] + tl.sum(part_acc * grow[:, None], axis=0)[None, :]
        largest = new_largest
    token, head = first_token + part, head + tl.zeros((1,), tl.int32)
    store_lse(lse_ptr, token, head, largest, total, NUM_HEADS)
    factor = output_factor(sinks_ptr, head, largest, total, NUM_HEADS)
    store_output(acc, factor, output_ptr, cos_ptr, sin_ptr, positions_ptr, token, head, 0, 1,
                 NUM_HEADS, DIM, ROPE, BLOCK)  # fmt: skip


class AttendLaunch(NamedTuple):
    """How a program is cut: heads and rows it takes at once; and whether it is Hopper's own."""

    heads: int
    tile: int
    num_warps: int
    is_gluon: bool = False


class Splits(NamedTuple):
    """How a token's tiles are dealt to its splits.

    Split s has the tiles s × split_step, then each tile_step further, at most tiles_per_split.
    """

    num_splits: int
    split_step: int
    tile_step: int
    tiles_per_split: int


def attend(
    query: Tensor,
    sinks: Tensor | None,
    memory: LayerMemory,
    selected_rows: Tensor | None,
    tokens: TokenMap,
    *,
    max_entries: int,
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
    if batch_invariant:
        longest = tokens.block_table.shape[1] * memory.layout.entries_per_block
        most_tiles = count_tiles(memory, launch, longest if num_listed is None else num_listed)
        splits = invariant_splits(num_tiles, most_tiles, launch, memory)
    else:
        splits = choose_splits(num_tokens, num_heads, num_tiles, launch, memory)
    results = {"sinks_ptr": sinks, "output_ptr": output, "lse_ptr": lse, "cos_ptr": memory.cos,
               "sin_ptr": memory.sin}  # fmt: skip
    rows = _row_arguments(memory, selected_rows, tokens, max_entries)
    if splits is None:
        whole = Splits(1, 0, 1, num_tiles)
        _launch(query, memory, launch, whole, 0, num_tokens, **results, **rows, IS_SPLIT=False)
        return AttentionResult(output, lse)
    step = memory.partials.shape[0] // splits.num_splits
    for first in range(0, num_tokens, step):
        count = min(step, num_tokens - first)
        _launch(query, memory, launch, splits, first, count, **results, **rows, IS_SPLIT=True)
        _combine(memory, splits, tokens, first, count, **results)
    return AttentionResult(output, lse)


def attend_launch(num_heads: int, dtype: torch.dtype, memory: LayerMemory) -> AttendLaunch:
    """How programs are cut; the same for every batch, so that it changes no bits.

    Blocks of 64 heads need 576 columns of Blackwell's tensor memory, which has 512.
    """
    if not _is_bf16(dtype, memory):
        return AttendLaunch(heads=SMALLEST_DOT, tile=16, num_warps=8)
    is_hopper = architecture(memory.partials.device) == "sm_90"
    if is_hopper and not INTERPRETED and _has_gluon_kernel(memory.layout):
        heads = next((heads for heads in (8, 16) if num_heads <= heads), LARGEST_BLOCK)
        return AttendLaunch(heads, tile=64, num_warps=4, is_gluon=True)
    largest = LARGEST_BLOCK if is_hopper else LARGEST_BLOCK // 2
    heads = min(largest, max(SMALLEST_DOT, next_power_of_two(num_heads)))
    return AttendLaunch(heads, tile=64 if heads == LARGEST_BLOCK else 32, num_warps=8)


def _has_gluon_kernel(layout: LayerLayout) -> bool:
    """Whether `kernels.triton.hopper` takes such rows."""
    row = layout.kv_row
    is_taken = layout.kv_format == "fp8" and (row.dim, row.rope_dim) == (512, 64)
    return is_taken and layout.window % 64 == 0


def split_room(num_tokens: int, num_heads: int, launch: AttendLaunch, memory: LayerMemory) -> int:
    """How many splits of each token the device can run at once, and leave their parts."""
    programs = num_tokens * -(-num_heads // launch.heads)
    per_multiprocessor = 1 if launch.is_gluon else LARGEST_BLOCK // launch.heads
    wave = _num_multiprocessors(memory.partials.device) * per_multiprocessor
    return min(wave // programs, memory.partials.shape[0] // num_tokens)


def choose_splits(
    num_tokens: int, num_heads: int, num_tiles: int, launch: AttendLaunch, memory: LayerMemory
) -> Splits | None:
    """How rows are split, by sizes that the host knows; None where they aren't.

    The fewer tiles a split has, the sooner it is done, and the more parts there are to combine.
    """
    room = min(split_room(num_tokens, num_heads, launch, memory), num_tiles)
    part_cost = PART_COST * num_tokens * num_heads / LARGEST_BLOCK
    costs = [float(num_tiles)]
    costs += [-(-num_tiles // n) + COMBINE_COST + n * part_cost for n in range(2, room + 1)]
    num_splits = costs.index(min(costs)) + 1
    if num_splits == 1:
        return None
    return Splits(num_splits, 1, num_splits, -(-num_tiles // num_splits))


def invariant_splits(
    num_tiles: int, most_tiles: int, launch: AttendLaunch, memory: LayerMemory
) -> Splits | None:
    """How rows are split if not by the batch: by the most tiles that any token can ever have."""
    per_split = max(INVARIANT_ROWS // launch.tile, -(-most_tiles // memory.partials.shape[0]))
    if most_tiles <= per_split:
        return None
    return Splits(-(-num_tiles // per_split), per_split, 1, per_split)


def count_tiles(memory: LayerMemory, launch: AttendLaunch, num_entries: int) -> int:
    """The tiles of a token's window and so many entries, of a layer that has any."""
    num_rows = memory.layout.window + (num_entries if memory.layout.ratio else 0)
    return -(-num_rows // launch.tile)


def _is_bf16(dtype: torch.dtype, memory: LayerMemory) -> bool:
    return dtype is torch.bfloat16 and memory.layout.kv_format != "fp32"


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _row_arguments(
    memory: LayerMemory, selected_rows: Tensor | None, tokens: TokenMap, max_entries: int
) -> dict[str, Any]:
    """Where the rows of the window and the entries are, and which of them."""
    window, entries, layout = memory.window, memory.entries, memory.layout
    pages = window.ring if entries is None else entries  # stands in for what isn't there
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
        "num_entries": num_entries, **token_arguments(tokens, pages.data),
        "ENTRIES": "none" if entries is None else kind, "RING_ROWS": layout.ring_rows,
        "ENTRY_ROWS": pages.rows_per_page, "RATIO": max(layout.ratio, 1),
        "WINDOW": window.window, "HAS_CHUNKS": len(tokens.chunk_ids) > 0,
    }  # fmt: skip


def _launch(
    query: Tensor,
    memory: LayerMemory,
    launch: AttendLaunch,
    splits: Splits,
    first_token: int,
    num_tokens: int,
    **arguments: Any,
) -> None:
    row, num_heads = memory.layout.kv_row, query.shape[1]
    partials, stats = memory.cut_partials
    grid = (num_tokens * -(-num_heads // launch.heads), splits.num_splits)
    arguments |= {
        "query_ptr": query, "partials_ptr": partials, "stats_ptr": stats,
        "scale": row.dim**-0.5 * LOG2_E.value, "first_token": first_token, **splits._asdict(),
        "NUM_HEADS": num_heads,
    }  # fmt: skip
    if launch.is_gluon:
        _launch_on_hopper(grid, launch, arguments, query.device)
        return
    _attend_kernel[grid](
        **arguments, FORMAT=f"kv_{row.name}", DIM=row.dim,
        ROPE=row.rope_dim, DATA_BYTES=row.data_bytes, SCALE_BYTES=row.scale_bytes,
        IS_BF16=_is_bf16(query.dtype, memory), HEADS=launch.heads,
        TILE=launch.tile, num_warps=launch.num_warps, num_stages=1, launch_pdl=True,
        enable_fp_fusion=False,
    )  # fmt: skip


def _launch_on_hopper(
    grid: tuple[int, int], launch: AttendLaunch, arguments: dict[str, Any], device: torch.device
) -> None:
    """A program for each token and block of heads, or as many as run at once for a chunk's."""
    from dsv4.kernels.triton.hopper import attention, chunk

    options = {"num_warps": launch.num_warps, "launch_pdl": True}
    num_works, num_splits = grid
    if launch.heads == LARGEST_BLOCK and arguments["HAS_CHUNKS"] and num_splits == 1:
        programs = min(num_works, _num_multiprocessors(device))
        chunk._attend_chunk_kernel[(programs,)](
            **arguments, num_works=num_works, **chunk.CUT._asdict(), **options
        )
    else:
        cut = attention.CUTS[launch.heads]
        attention._attend_kernel[grid](**arguments, HEADS=launch.heads, **cut._asdict(), **options)


def _combine(
    memory: LayerMemory,
    splits: Splits,
    tokens: TokenMap,
    first_token: int,
    num_tokens: int,
    **results: Any,
) -> None:
    row, num_heads = memory.layout.kv_row, results["lse_ptr"].shape[1]
    partials, stats = memory.cut_partials
    _combine_kernel[(num_tokens * num_heads,)](
        **results, partials_ptr=partials, stats_ptr=stats, positions_ptr=tokens.positions,
        first_token=first_token, num_splits=splits.num_splits, NUM_HEADS=num_heads, DIM=row.dim,
        ROPE=row.rope_dim, BLOCK=next_power_of_two(row.dim), SPLITS=COMBINED_AT_ONCE,
        num_warps=4, launch_pdl=True, enable_fp_fusion=False,
    )  # fmt: skip
