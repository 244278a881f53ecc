"""Checkpoints inside a chunk: rows that a request needs at a block boundary, copied in time.

A checkpoint has the layout of a slot's front, so its rows are cut as a slot's are. Both functions
read the inputs and results of `write_layer`. Points without a checkpoint are padding.
"""

import torch
from torch import Tensor

from dsv4.kernels.contracts import CheckpointPoints, EntryInputs, LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.reference.append import tail_rows


def checkpoint_window(boundaries: CheckpointPoints, memory: LayerMemory, tokens: TokenMap) -> None:
    """Copy the window before each boundary from the workspace, after the layer has written it.

    The workspace starts `window - 1` rows before the chunk, and a boundary lies inside the chunk:
    it holds all rows.
    """
    workspace, window = memory.window.workspace, memory.layout.window
    row, boundary, checkpoint = _real_points(boundaries).unbind(1)
    positions = _positions_before(boundary, window)
    start = tokens.workspace_starts.long()[row] + (window - 1) - tokens.positions_before.long()[row]
    source = start[:, None] + positions
    ring = memory.layout.cut_ring(boundaries.checkpoints)
    target = (checkpoint[:, None], positions % memory.layout.ring_rows)
    ring.data[target] = workspace.data[0, source]
    ring.scales[target] = workspace.scales[0, source]


def checkpoint_tails(
    boundaries: CheckpointPoints, memory: LayerMemory, tokens: TokenMap, writes: LayerWrites
) -> None:
    """Store the tail rows that the window after each boundary reads, before the layer is written.

    Rows older than the chunk come from the tails, which the write may overwrite, the others from
    the projections. Layers without a series for the next window have no such rows.
    """
    layout = memory.layout
    if layout.num_series < 2:
        return
    points, checkpoints = _real_points(boundaries), boundaries.checkpoints
    for inputs, tail, target in (
        (writes.entries, memory.tail, layout.cut_tail(checkpoints)),
        (writes.index_keys, memory.index_tail, layout.cut_index_tail(checkpoints)),
    ):
        if isinstance(inputs, EntryInputs) and tail is not None and target is not None:
            _checkpoint_tail(points, inputs, tail, target, tokens, layout.ratio)


def _checkpoint_tail(
    points: Tensor, inputs: EntryInputs, tail: Tensor, target: Tensor, tokens: TokenMap, ratio: int
) -> None:
    row, boundary, checkpoint = points.unbind(1)
    positions = _positions_before(boundary, ratio)
    before = tokens.positions_before.long()[row][:, None]
    is_new = positions >= before
    token = torch.where(is_new, tokens.token_starts.long()[row][:, None] + positions - before, 0)
    slot = tokens.request_slots.long()[row][:, None]
    flat = token.flatten()
    gate, bias = existing(inputs.gate), inputs.weights.position_bias
    new = tail_rows(inputs.kv[flat], gate[flat], bias, positions.flatten(), tail.dtype)
    tail_row = positions % tail.shape[1]
    for index, values in enumerate(new):
        old = tail[slot, tail_row, index]
        rows = torch.where(is_new[:, :, None], values.view_as(old), old)
        target[checkpoint[:, None], tail_row, index] = rows


def _real_points(boundaries: CheckpointPoints) -> Tensor:
    points = boundaries.points.long()
    return points[points[:, 2] >= 0]


def _positions_before(boundary: Tensor, count: int) -> Tensor:
    """Return `[n, count]`, the last positions before each boundary."""
    return boundary[:, None] - torch.arange(count, 0, -1, device=boundary.device)
