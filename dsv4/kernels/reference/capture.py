"""Capture: rows that a request needs at a block boundary inside a chunk, copied to a checkpoint.

A checkpoint has the layout of a slot's front, so its rows are found as a slot's are. The functions
read inputs and results of any backend's `write_layer`. Neither waits for the device.
"""

import torch
from torch import Tensor

from dsv4.formats import PagedRows, cut_tail
from dsv4.kernels.contracts import CapturePoints, EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.reference.append import tail_rows


def capture_window(captures: CapturePoints, memory: LayerMemory, tokens: TokenMap) -> None:
    """Copy the window before each boundary from the workspace, after the layer has written it.

    The workspace starts `window - 1` rows before the chunk, and a boundary lies inside the chunk.
    So the workspace holds all of these rows.
    """
    workspace, window = memory.window.workspace, memory.layout.window
    row, boundary, checkpoint = captures.points.long().unbind(1)
    positions = _positions_before(boundary, window)
    start = tokens.workspace_starts.long()[row] + (window - 1) - tokens.positions_before.long()[row]
    source = start[:, None] + positions
    ring_rows = memory.layout.ring_rows
    ring = PagedRows(
        memory.layout.kv_row, captures.checkpoints, memory.layout.ring_offset, ring_rows
    )
    target = (checkpoint[:, None], positions % ring_rows)
    ring.data[target] = workspace.data[0, source]
    ring.scales[target] = workspace.scales[0, source]


def capture_tails(
    captures: CapturePoints, memory: LayerMemory, tokens: TokenMap, writes: LayerWrites
) -> None:
    """Store the tail rows that the window after each boundary reads, before the layer is written.

    Rows older than the chunk come from the tails, which the write may overwrite. The others come
    from the projections. Layers without a series for the next window have no such rows.
    """
    layout = memory.layout
    if layout.num_series < 2:
        return
    for inputs, tail, offset, head_dim in (
        (writes.entries, memory.tail, layout.tail_offset, layout.head_dim),
        (writes.index_keys, memory.index_tail, layout.index_tail_offset, layout.index_head_dim),
    ):
        if inputs is not None and tail is not None:
            target = cut_tail(
                captures.checkpoints, offset=offset, num_rows=layout.tail_rows,
                width=layout.num_series * head_dim, dtype=tail.dtype,
            )  # fmt: skip
            _capture_tail(captures.points.long(), inputs, tail, target, tokens, layout.ratio)


def _capture_tail(
    points: Tensor, inputs: EntryInputs, tail: Tensor, target: Tensor, tokens: TokenMap, ratio: int
) -> None:
    row, boundary, checkpoint = points.unbind(1)
    positions = _positions_before(boundary, ratio)
    before = tokens.positions_before.long()[row][:, None]
    is_new = positions >= before
    token = torch.where(is_new, tokens.token_starts.long()[row][:, None] + positions - before, 0)
    slot = tokens.request_slots.long()[row][:, None]
    flat = token.flatten()
    new = tail_rows(
        inputs.kv[flat], inputs.gate[flat], inputs.weights.position_bias, positions.flatten(),
        tail.dtype,
    )  # fmt: skip
    tail_row = positions % tail.shape[1]
    for index, values in enumerate(new):
        old = tail[slot, tail_row, index]
        rows = torch.where(is_new[:, :, None], values.view_as(old), old)
        target[checkpoint[:, None], tail_row, index] = rows


def _positions_before(boundary: Tensor, count: int) -> Tensor:
    """Last positions before each boundary: `[n, count]`."""
    return boundary[:, None] - torch.arange(count, 0, -1, device=boundary.device)
