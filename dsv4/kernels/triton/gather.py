"""Gather: stored rows, dequantised and dense, in one launch.

A program takes a tile of a request's or token's output rows, finds their records and decodes
them. Rows that don't exist become zeros, and nothing is read for them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.kernels.contracts import Gathered, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.triton.decode import (
    e4m3_values,
    load_channels,
    load_scales,
    load_v41_rows,
    store_channels,
)
from dsv4.kernels.triton.launch import GatherLaunch, gather_launch
from dsv4.kernels.triton.operands import PLAN_PTRS, row_spec, token_arguments
from dsv4.kernels.triton.primitives import bf16_bits


@triton.jit
def find_listed(outer, inner, is_output, rows_ptr, outer_stride, inner_stride, pool_rows,
                ROWS_PER_PAGE: tl.constexpr):  # fmt: skip
    """Page, row and presence of rows that a tensor lists; those outside of the pool are absent."""
    row_ptr = rows_ptr + outer.to(tl.int64) * outer_stride + inner.to(tl.int64) * inner_stride
    flat = tl.load(row_ptr, mask=is_output, other=-1).to(tl.int64)  # [TILE]
    unsigned = flat.to(tl.uint64)  # divides in one instruction
    page, row = unsigned // ROWS_PER_PAGE, unsigned % ROWS_PER_PAGE
    return page.to(tl.int32), row.to(tl.int32), unsigned < pool_rows.to(tl.uint64)


@triton.jit
def find_entries(
    request, entry, is_output, request_slots_ptr, after_ptr, block_table_ptr, table_stride,
    RATIO: tl.constexpr, ROWS_PER_PAGE: tl.constexpr,
):  # fmt: skip
    """Page, row and presence of a request's entries."""
    slot = tl.load(request_slots_ptr + request).to(tl.int64)
    count = tl.load(after_ptr + request) // RATIO
    is_closed = is_output & (slot >= 0) & (entry < count)
    column_ptr = block_table_ptr + slot * table_stride + entry // ROWS_PER_PAGE
    block = tl.load(column_ptr, mask=is_closed, other=-1)  # [TILE]
    return block, entry % ROWS_PER_PAGE, block >= 0


@triton.jit
def find_window(
    token, offset, is_output, positions_ptr, request_ids_ptr, request_slots_ptr,
    ROWS_PER_PAGE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Page, row and presence of a token's window rows in the rings."""
    position = tl.load(positions_ptr + token) - (WINDOW - 1) + offset
    slot = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token))
    return slot, position % ROWS_PER_PAGE, is_output & (slot >= 0) & (position >= 0)


@triton.jit
def workspace_row(
    token, offset, positions_ptr, request_ids_ptr, before_ptr, workspace_starts_ptr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Workspace rows of a token's window; -1 if its request has no workspace."""
    request = tl.load(request_ids_ptr + token)
    start = tl.load(workspace_starts_ptr + request)
    ahead = tl.load(positions_ptr + token) - tl.load(before_ptr + request)
    return tl.where(start >= 0, start + ahead + offset, -1).to(tl.int64)


@triton.jit
def gather_records(
    data_ptr, scale_ptr, values_ptr, out_row, is_present, is_output, ROW: tl.constexpr
):
    """Decode the records at data_ptr and scale_ptr `[TILE]` into dense rows.

    Every load comes before the first store: the compiler would move none across it.
    """
    FORMAT: tl.constexpr = ROW.FORMAT
    DIM: tl.constexpr = ROW.DIM
    NOPE: tl.constexpr = DIM - ROW.ROPE
    if FORMAT == "kv_fp32":
        values = load_channels(data_ptr.to(tl.pointer_type(tl.int32)), is_present, DIM)
        to_ptr = values_ptr.to(tl.pointer_type(tl.int32)) + out_row * DIM
        store_channels(to_ptr, values, is_output, DIM)
    else:
        to_ptr = values_ptr.to(tl.pointer_type(tl.uint16)) + out_row * DIM
        if FORMAT == "kv_bf16":
            values = load_channels(data_ptr.to(tl.pointer_type(tl.uint16)), is_present, DIM)
            store_channels(to_ptr, values, is_output, DIM)
        elif FORMAT == "kv_fp8_32" or FORMAT == "kv_nvfp4_16":
            values = load_v41_rows(data_ptr, scale_ptr, is_present, FORMAT, DIM)
            WIDTH: tl.constexpr = values.shape[2]
            group = tl.arange(0, values.shape[0])[:, None, None]
            channel = group * WIDTH + tl.arange(0, WIDTH)[None, None, :]
            tl.store(to_ptr[None, :, None] + channel, bf16_bits(values),
                     mask=is_output[None, :, None] & (channel < DIM))  # fmt: skip
        else:
            codes = load_channels(data_ptr, is_present, NOPE)
            scales = load_scales(scale_ptr, is_present, FORMAT, NOPE)
            rope_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.uint16))
            rope_bits = load_channels(rope_ptr, is_present, ROW.ROPE)
            restored = bf16_bits(e4m3_values(codes) * scales)  # [groups, TILE, 64]
            store_channels(to_ptr, restored, is_output, NOPE)
            store_channels(to_ptr + NOPE, rope_bits, is_output, ROW.ROPE)


@triton.jit(
    do_not_specialize=[
        "num_inner", "num_tiles", "outer_stride", "inner_stride", "pool_rows", "table_stride",
    ],
    do_not_specialize_on_alignment=["rows_ptr", *PLAN_PTRS],
)  # fmt: skip
def _gather_kernel(
    values_ptr, present_ptr, num_inner, num_tiles, data_ptr, scales_ptr, page_stride,
    rows_ptr, outer_stride, inner_stride, pool_rows,
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, workspace_starts_ptr,
    block_table_ptr, table_stride, workspace_ptr, workspace_scales_ptr,
    SOURCE: tl.constexpr, ROW: tl.constexpr, ROWS_PER_PAGE: tl.constexpr, RATIO: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gather TILE of the num_inner output rows of a token or request.

    SOURCE names where rows come from: a tensor that lists them, a request's entries, or a token's
    window.
    """
    program = tl.program_id(0)
    outer = program // num_tiles
    inner = program % num_tiles * TILE + tl.arange(0, TILE)  # [TILE]
    is_output = inner < num_inner
    if SOURCE == "listed":
        page, row, is_present = find_listed(outer, inner, is_output, rows_ptr, outer_stride,
                                            inner_stride, pool_rows, ROWS_PER_PAGE)  # fmt: skip
    elif SOURCE == "entries":
        page, row, is_present = find_entries(outer, inner, is_output, request_slots_ptr, after_ptr,
                                             block_table_ptr, table_stride, RATIO,
                                             ROWS_PER_PAGE)  # fmt: skip
    else:
        page, row, is_present = find_window(outer, inner, is_output, positions_ptr,
                                            request_ids_ptr, request_slots_ptr, ROWS_PER_PAGE,
                                            WINDOW)  # fmt: skip
    page_start = page.to(tl.int64) * page_stride
    data_ptr = data_ptr + (page_start + row.to(tl.int64) * ROW.DATA_STRIDE)
    scale_ptr = scales_ptr + (page_start + row.to(tl.int64) * ROW.SCALE_STRIDE)
    if HAS_CHUNKS:
        row = workspace_row(outer, inner, positions_ptr, request_ids_ptr, before_ptr,
                            workspace_starts_ptr, WINDOW)  # fmt: skip
        data_ptr = tl.where(row >= 0, workspace_ptr + row * ROW.DATA_STRIDE, data_ptr)
        scale_ptr = tl.where(row >= 0, workspace_scales_ptr + row * ROW.SCALE_STRIDE, scale_ptr)
    out_row = outer.to(tl.int64) * num_inner + inner
    gather_records(data_ptr, scale_ptr, values_ptr, out_row, is_present, is_output, ROW)
    tl.store(present_ptr + out_row, is_present.to(tl.uint8), mask=is_output)


def gather_listed(
    pages: PagedRows, rows: Tensor, *, launch: GatherLaunch | None = None
) -> Gathered:
    """Gather the rows with flat indices `rows` `[..., k]` int32 or int64; others are missing."""
    listed = rows.reshape(-1, rows.shape[-1]) if rows.numel() else rows
    return _launch(
        pages, tuple(rows.shape), launch=launch, SOURCE="listed",
        rows_ptr=listed, outer_stride=listed.stride(0), inner_stride=listed.stride(-1),
    )  # fmt: skip


def gather_compressed_kv(
    memory: LayerMemory, rows: Tensor, *, launch: GatherLaunch | None = None
) -> Gathered:
    """See `kernels.reference.gather`."""
    return gather_listed(existing(memory.entries), rows, launch=launch)


def gather_all_compressed_kv(
    memory: LayerMemory, tokens: TokenMap, *, max_entries: int
) -> Gathered:
    """See `kernels.reference.gather`."""
    shape = (len(tokens.request_slots), max_entries)
    ratio = memory.layout.ratio
    return _launch(
        existing(memory.entries), shape, SOURCE="entries", RATIO=ratio, **token_arguments(tokens)
    )


def gather_swa_kv(memory: LayerMemory, tokens: TokenMap) -> Gathered:
    """See `kernels.reference.gather`."""
    window = memory.window
    return _launch(
        window.ring, (len(tokens.positions), window.window), **token_arguments(tokens),
        SOURCE="window", WINDOW=window.window, HAS_CHUNKS=len(tokens.chunk_ids) > 0,
        workspace_ptr=window.workspace.data, workspace_scales_ptr=window.workspace.scales,
    )  # fmt: skip


def _launch(
    pages: PagedRows, shape: tuple[int, ...], *, launch: GatherLaunch | None = None, **source: Any
) -> Gathered:
    """Gather rows of the shape `[..., num_inner]`; `source` has the kernel's arguments for them."""
    row, device = pages.format, pages.data.device
    values = torch.empty(*shape, row.dim, dtype=row.value_dtype, device=device)
    is_present = torch.empty(shape, dtype=torch.bool, device=device)
    if not is_present.numel():
        return Gathered(values, is_present)
    if launch is None:
        launch = gather_launch(is_present.numel(), device)
    num_tiles = -(-shape[-1] // launch.tile)
    nothing = pages.data  # stands in for what this source doesn't have
    arguments = {
        "rows_ptr": nothing, "outer_stride": 0, "inner_stride": 0, "pool_rows": pages.num_rows,
        "workspace_ptr": nothing, "workspace_scales_ptr": nothing,
        "RATIO": 1, "WINDOW": 1, "HAS_CHUNKS": False,
        **dict.fromkeys(PLAN_PTRS, nothing), "table_stride": 0, **source,
    }  # fmt: skip
    _gather_kernel[(is_present.numel() // shape[-1] * num_tiles,)](
        values_ptr=values, present_ptr=is_present.view(torch.uint8), num_inner=shape[-1],
        num_tiles=num_tiles, data_ptr=pages.data, scales_ptr=pages.scales,
        page_stride=pages.data.stride(0), **arguments,
        ROW=row_spec("kv", row, row.rope_dim), ROWS_PER_PAGE=pages.rows_per_page,
        TILE=launch.tile, num_warps=launch.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return Gathered(values, is_present)
