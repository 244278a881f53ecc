"""Chunks' rows made dense: rows as BF16, once per layer, and attention over them on Hopper.

The rows take the front of `LayerMemory.index_scratch`, which the index no longer needs: those of
the window workspace, then the closed entries of each chunk's request. `hopper.dense_attention`
attends over them. Listed rows are rows of the pool. A map by block says at which column of the
request's table a block may be, and the table itself whether it is. So the map is never cleared.

Work items are left to `_attend_chunk_kernel`, which reads rows in place, if they are not of chunks,
if they list rows that are not the request's own, or if their window is not among the dense rows.
That happens where a forward's tokens are not all of its chunks' tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.contracts import TokenMap
from dsv4.kernels.index_scratch import DENSE_HEADS as HEADS
from dsv4.kernels.index_scratch import DenseSizes, dense_sizes
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.gather import find_entries, gather_records
from dsv4.kernels.triton.launch import DenseLaunch, find_launch, num_multiprocessors, starts_early
from dsv4.kernels.triton.operands import PLAN_PTRS, row_spec, token_arguments
from dsv4.kernels.triton.primitives import wait_for_launch_before

ROW_TILE = 8  # rows of a program that makes them dense
MIN_READS = 3  # reads of a row that pay for its copy
MIN_WAVES = 2  # of programs


class DenseRows(NamedTuple):
    """Dense rows, the map of blocks, and the work items that are left."""

    rows: Tensor  # [num_rows, 512] BF16
    columns: Tensor  # [num_chunks × num_blocks] int32
    left: Tensor  # [1 + num_works] int32: their number first
    sizes: DenseSizes


@triton.jit(do_not_specialize=["num_window_tiles", "num_tiles", "chunk_stride", "num_blocks",
                               "table_stride", "num_chunks", "window_rows"],
            do_not_specialize_on_alignment=[*PLAN_PTRS, "chunk_ids_ptr", "columns_ptr",
                                            "left_ptr"])  # fmt: skip
def _dense_rows_kernel(
    dense_ptr, columns_ptr, left_ptr, num_window_tiles, num_tiles, chunk_stride, num_blocks,
    num_chunks, window_rows, workspace_ptr, workspace_scales_ptr, entries_ptr, entries_scales_ptr,
    entries_stride, positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr,
    workspace_starts_ptr, block_table_ptr, table_stride, chunk_ids_ptr,
    ROW: tl.constexpr, ENTRY: tl.constexpr, WINDOW: tl.constexpr, RATIO: tl.constexpr,
    ENTRY_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decode TILE rows of the window workspace, or of the entries of a chunk's request."""
    program = tl.program_id(0)
    wait_for_launch_before(STARTS_NEXT=True)
    if program == 0:
        tl.store(left_ptr, 0)
    nth = tl.maximum(program - num_window_tiles, 0)
    is_window = program < num_window_tiles
    chunk = tl.where(is_window, num_chunks - 1, nth // tl.maximum(num_tiles, 1))
    request = tl.load(chunk_ids_ptr + chunk)
    start = tl.load(workspace_starts_ptr + request)
    # The workspace ends with the last chunk's rows. Chunks of padding, which have none, come last.
    while is_window & (start < 0) & (chunk > 0):
        chunk -= 1
        request = tl.load(chunk_ids_ptr + chunk)
        start = tl.load(workspace_starts_ptr + request)
    end = start + tl.load(after_ptr + request)
    end = tl.minimum(end + WINDOW - 1 - tl.load(before_ptr + request), window_rows)
    num_entries = tl.minimum(tl.load(after_ptr + request) // RATIO, chunk_stride)
    end = tl.where(is_window, end, num_entries)
    tile = tl.where(is_window, program, nth % tl.maximum(num_tiles, 1))
    row = tile * TILE + tl.arange(0, TILE)  # [TILE]
    is_output = row < end
    page, page_row, has_entry = find_entries(
        request, row, is_output & (not is_window), request_slots_ptr, after_ptr, block_table_ptr,
        table_stride, RATIO, ENTRY_ROWS,
    )  # fmt: skip
    is_first = has_entry & (page_row == 0)
    column_ptr = columns_ptr + chunk.to(tl.int64) * num_blocks + page
    tl.store(column_ptr, row // ENTRY_ROWS, mask=is_first)
    page_start = tl.where(is_window, 0, page.to(tl.int64) * entries_stride)
    at = tl.where(is_window, row, page_row).to(tl.int64)
    data_ptr = tl.where(is_window, workspace_ptr, entries_ptr)
    scale_ptr = tl.where(is_window, workspace_scales_ptr, entries_scales_ptr)
    out_row = row + tl.where(is_window, 0, window_rows + chunk * chunk_stride)
    data_stride = tl.where(is_window, ROW.DATA_STRIDE, ENTRY.DATA_STRIDE)
    scale_stride = tl.where(is_window, ROW.SCALE_STRIDE, ENTRY.SCALE_STRIDE)
    data_ptr += page_start + at * data_stride
    scale_ptr += page_start + at * scale_stride
    is_present, out_row = is_output & (has_entry | is_window), out_row.to(tl.int64)
    if is_window or ROW.FORMAT == ENTRY.FORMAT:
        gather_records(data_ptr, scale_ptr, dense_ptr, out_row, is_present, is_output, ROW)
    else:
        gather_records(data_ptr, scale_ptr, dense_ptr, out_row, is_present, is_output, ENTRY)


def choose_dense(
    num_tokens: int, num_heads: int, num_rows: int, memory: LayerMemory, *, num_chunks: int,
    max_entries: int,
) -> DenseSizes | None:  # fmt: skip
    """Choose whether rows are made dense for tokens that read num_rows each, by their sizes.

    None where rows have no room, where too few reads pay for them, and for a few waves of programs,
    which two more launches would delay.
    """
    layout, device = memory.layout, memory.index_scratch.device
    num_works = num_tokens * num_heads // HEADS
    if not num_chunks or num_heads % HEADS or num_works < MIN_WAVES * num_multiprocessors(device):
        return None
    sizes = dense_sizes(
        num_tokens=num_tokens, num_chunks=num_chunks, window=layout.window,
        max_entries=max_entries if layout.ratio else 0, num_blocks=memory.blocks.shape[0],
        entries_per_block=layout.entries_per_block, num_heads=num_heads, dim=layout.head_dim,
    )  # fmt: skip
    num_made = sizes.window_rows + num_chunks * sizes.chunk_stride
    has_room = sizes.num_bytes <= memory.index_scratch.numel()
    return sizes if has_room and num_tokens * num_rows >= MIN_READS * num_made else None


def cut_dense_rows(storage: Tensor, sizes: DenseSizes, *, dim: int) -> DenseRows:
    """Cut dense rows from the front of a scratch."""
    rows, columns, left = storage[: sizes.num_bytes].split(
        (sizes.rows_bytes, sizes.columns_bytes, sizes.left_bytes)
    )
    return DenseRows(
        rows.view(torch.bfloat16).view(-1, dim), columns.view(torch.int32),
        left.view(torch.int32), sizes,
    )  # fmt: skip


def make_dense_rows(dense: DenseRows, memory: LayerMemory, tokens: TokenMap) -> None:
    """Decode the rows of every chunk's window and request."""
    layout, window, sizes = memory.layout, memory.window, dense.sizes
    pages = window.ring if memory.entries is None else memory.entries
    num_window_tiles = -(-sizes.window_rows // ROW_TILE)
    num_tiles = -(-sizes.chunk_stride // ROW_TILE)
    _dense_rows_kernel[(num_window_tiles + num_tiles * len(tokens.chunk_ids),)](
        dense_ptr=dense.rows, columns_ptr=dense.columns, left_ptr=dense.left,
        num_window_tiles=num_window_tiles, num_tiles=num_tiles, chunk_stride=sizes.chunk_stride,
        num_blocks=sizes.num_blocks, num_chunks=len(tokens.chunk_ids),
        window_rows=sizes.window_rows, workspace_ptr=window.workspace.data,
        workspace_scales_ptr=window.workspace.scales, entries_ptr=pages.data,
        entries_scales_ptr=pages.scales, entries_stride=pages.data.stride(0),
        chunk_ids_ptr=tokens.chunk_ids, **token_arguments(tokens),
        ROW=row_spec("kv", layout.kv_row, layout.rope_dim),
        ENTRY=row_spec("kv", layout.entry_row, layout.rope_dim), WINDOW=layout.window,
        RATIO=max(layout.ratio, 1), ENTRY_ROWS=pages.rows_per_page, TILE=ROW_TILE, num_warps=4,
        launch_pdl=starts_early(dense.rows.device), enable_fp_fusion=False,
    )  # fmt: skip


def attend_dense(
    query: Tensor, output: Tensor, sizes: DenseSizes, memory: LayerMemory, tokens: TokenMap,
    arguments: dict[str, Any], *, scale: float,
) -> Tensor:  # fmt: skip
    """Make rows dense and attend over them; return the number of work items left, then them.

    arguments are those of the kernels that read rows in place.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from dsv4.kernels.triton.hopper import dense_attention

    num_tokens, num_heads, dim = query.shape
    dense = cut_dense_rows(memory.index_scratch, sizes, dim=dim)
    make_dense_rows(dense, memory, tokens)
    operand = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    launch = find_launch(DenseLaunch, "attend hopper dense", query.device)
    num_works = num_tokens * num_heads // HEADS
    names = (
        "sinks_ptr", "lse_ptr", "cos_ptr", "sin_ptr", "rows_ptr", "rows_stride", "row_stride",
        "pool_rows", "num_entries", "SPEC", "QUERY_EPS",
    )  # fmt: skip
    dense_attention._attend_dense_kernel[(min(num_works, num_multiprocessors(query.device)),)](
        query_desc=TensorDescriptor.from_tensor(query.view(-1, dim), [HEADS, dim // 2], operand),
        output_desc=TensorDescriptor.from_tensor(output.view(-1, dim), [HEADS, HEADS], operand),
        **{name: arguments[name] for name in names}, scale=scale, dense_ptr=dense.rows,
        first_entry=sizes.window_rows, chunk_stride=sizes.chunk_stride,
        columns_ptr=dense.columns, num_blocks=sizes.num_blocks, chunk_ids_ptr=tokens.chunk_ids,
        left_ptr=dense.left, num_works=num_works, **token_arguments(tokens), NUM_HEADS=num_heads,
        COPYING_REGISTERS=launch.copying_registers,
        MULTIPLYING_REGISTERS=launch.multiplying_registers, num_warps=launch.num_warps,
        launch_pdl=starts_early(query.device),
    )  # fmt: skip
    return dense.left
