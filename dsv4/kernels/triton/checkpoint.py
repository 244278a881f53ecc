"""Checkpoints inside a chunk: the reference's rows, in one launch for all block boundaries.

A boundary without a checkpoint is padding, so that a captured forward has any number of them.
"""

import triton
import triton.language as tl

from dsv4.kernels.contracts import CheckpointPoints, EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.append import (
    copy_rows,
    load_row,
    load_stored,
    slot_tail,
    store_tail,
    tail_at,
)
from dsv4.kernels.triton.flush_write import window_spec, write_arguments
from dsv4.kernels.triton.launch import starts_early
from dsv4.kernels.triton.operands import CSA_RATIO, CachePtrs, CompressorPtrs
from dsv4.kernels.triton.primitives import padded, wait_for_launch_before

ROWS = 8  # window rows that a program copies


@triton.jit
def load_point(points_ptr):
    """Row of the batch, boundary and checkpoint of the program's point."""
    point_ptr = points_ptr + tl.program_id(0) * 3
    return tl.load(point_ptr), tl.load(point_ptr + 1), tl.load(point_ptr + 2).to(tl.int64)


@triton.jit(do_not_specialize=["workspace_rows"])
def _checkpoint_window_kernel(
    points_ptr, before_ptr, workspace_starts_ptr, workspace_ptr, workspace_rows,
    checkpoints_ptr, checkpoint_bytes, ring_offset, WINDOW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS rows of the window before a boundary from the workspace to a checkpoint's ring."""
    ROW: tl.constexpr = WINDOW.ROW
    request, boundary, checkpoint = load_point(points_ptr)
    start = tl.load(workspace_starts_ptr + request) - tl.load(before_ptr + request)
    wait_for_launch_before(STARTS_NEXT=True)
    nth = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    position = boundary - WINDOW.WINDOW + nth  # [ROWS]
    is_copied = (checkpoint >= 0) & (nth < WINDOW.WINDOW) & (position >= 0)
    from_row = (start + (WINDOW.WINDOW - 1) + position).to(tl.int64)
    to_row = ((position + WINDOW.RING_ROWS) % WINDOW.RING_ROWS).to(tl.int64)
    ring_ptr = checkpoints_ptr + checkpoint * checkpoint_bytes + ring_offset
    copy_rows(workspace_ptr, workspace_rows.to(tl.int64), from_row, ring_ptr, WINDOW.RING_ROWS,
              to_row, is_copied, ROW)  # fmt: skip


@triton.jit
def _checkpoint_tail_row(
    token, position, before, slot, checkpoint_ptr, compressor, SPEC: tl.constexpr
):  # fmt: skip
    """Store a compressor's row of a position, from the projections or from its slot's tail."""
    column = tl.arange(0, padded(SPEC.WIDTH))
    mask = column < SPEC.WIDTH
    if position >= before:
        kv, gate = load_row(compressor, token, position, column, mask, SPEC)
    else:
        kv, gate = load_stored(slot_tail(compressor, slot, SPEC), position, column, mask, SPEC)
    target_ptr = tail_at(checkpoint_ptr + compressor.tail_offset, SPEC)
    store_tail(kv, gate, target_ptr, position, column, mask, SPEC)


@triton.jit
def _checkpoint_tails_kernel(
    points_ptr, checkpoints_ptr, checkpoint_bytes,
    positions_ptr, request_ids_ptr, request_slots_ptr, before_ptr, after_ptr, workspace_starts_ptr,
    token_starts_ptr, block_table_ptr, table_stride, num_read_only_ptr, cos_ptr, sin_ptr, eps,
    slots_ptr, slot_bytes, blocks_ptr, block_bytes,
    kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, tail_offset, page_offset,
    index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr, index_norm_ptr, index_tail_offset,
    index_page_offset, global_scale_ptr,
    MAIN: tl.constexpr, INDEX: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr,
):  # fmt: skip
    """Store a tail row of the last CSA_RATIO before a boundary, of one of two compressors."""
    request, boundary, checkpoint = load_point(points_ptr)
    position = boundary - CSA_RATIO + tl.program_id(1)
    before = tl.load(before_ptr + request)
    token = tl.load(token_starts_ptr + request) + position - before
    slot = tl.load(request_slots_ptr + request).to(tl.int64)
    wait_for_launch_before(STARTS_NEXT=True)
    if checkpoint >= 0:
        checkpoint_ptr = checkpoints_ptr + checkpoint * checkpoint_bytes
        cache = CachePtrs(slots_ptr, slot_bytes, blocks_ptr, block_bytes, block_table_ptr,
                          table_stride, num_read_only_ptr, (cos_ptr, sin_ptr))  # fmt: skip
        if tl.program_id(2) == 0:
            main = CompressorPtrs(kv_ptr, gate_ptr, stride, bias_ptr, norm_ptr, eps, tail_offset,
                                  page_offset, 1.0, cache)  # fmt: skip
            _checkpoint_tail_row(token, position, before, slot, checkpoint_ptr, main, MAIN)
        else:
            index = CompressorPtrs(index_kv_ptr, index_gate_ptr, index_stride, index_bias_ptr,
                                   index_norm_ptr, eps, index_tail_offset, index_page_offset,
                                   1.0, cache)  # fmt: skip
            _checkpoint_tail_row(token, position, before, slot, checkpoint_ptr, index, INDEX)


def checkpoint_window(boundaries: CheckpointPoints, memory: LayerMemory, tokens: TokenMap) -> None:
    """Copy the window before each boundary; see `kernels.reference.checkpoint`."""
    layout = memory.layout
    _checkpoint_window_kernel[(len(boundaries.points), triton.cdiv(layout.window, ROWS))](
        points_ptr=boundaries.points, before_ptr=tokens.positions_before,
        workspace_starts_ptr=tokens.workspace_starts, workspace_ptr=memory.workspace,
        workspace_rows=layout.workspace_rows, checkpoints_ptr=boundaries.checkpoints,
        checkpoint_bytes=boundaries.checkpoints.shape[1], ring_offset=layout.ring_offset,
        WINDOW=window_spec(layout), ROWS=ROWS, num_warps=4,
        launch_pdl=starts_early(memory.slots.device),
    )  # fmt: skip


def checkpoint_tails(
    boundaries: CheckpointPoints, memory: LayerMemory, tokens: TokenMap, writes: LayerWrites
) -> None:
    """Store tail rows before each boundary; see `kernels.reference.checkpoint`."""
    layout = memory.layout
    if layout.num_series < 2 or not isinstance(writes.index_keys, EntryInputs):
        return
    _checkpoint_tails_kernel[(len(boundaries.points), CSA_RATIO.value, 2)](
        points_ptr=boundaries.points, checkpoints_ptr=boundaries.checkpoints,
        checkpoint_bytes=boundaries.checkpoints.shape[1],
        **write_arguments(writes, memory, tokens, ratio=layout.ratio), num_warps=4,
    )  # fmt: skip
