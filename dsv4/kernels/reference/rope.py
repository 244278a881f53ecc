"""RoPE rows of a forward's tokens, which all of its layers read."""

import torch
from torch import Tensor

from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.reference import addressing
from dsv4.rope import rope_at


def make_rope(memory: LayerMemory, positions: Tensor) -> None:
    """Compute cos and sin at tokens, and at the first positions of their windows.

    Args:
        memory: Any layer's; all of them share the rows.
        positions: `[num_tokens]` int32.
    """
    starts = [addressing.entry_rope_position(positions, step) for step in memory.layout.row_steps]
    rows = torch.stack(rope_at(torch.stack(starts), memory.frequencies[:, None]), dim=1)
    memory.rope_rows[:, :, : len(positions)] = rows
