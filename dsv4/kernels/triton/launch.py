"""Launch parameters by kind of work, as measured on an H200; nothing is tuned at run time."""

from typing import Literal, NamedTuple

import torch

Kind = Literal["decode", "step", "chunk"]


class Launch(NamedTuple):
    """How one launch of the write path is cut into programs.

    channels are those of an HCA program; rows the entries that a CSA program pools at once in a
    forward with chunks; window_rows the window rows of a program.
    """

    num_warps: int
    channels: int = 64
    rows: int = 1
    window_rows: int = 1
    maxnreg: int | None = None


def launch_parameters(ratio: int, kind: Kind, num_tokens: int, device: torch.device) -> Launch:
    """For a layer of that ratio, in a forward of that kind."""
    if kind == "chunk":
        return Launch(num_warps=4, window_rows=4)
    # More threads to a window are quicker alone; fewer leave room for more windows.
    return Launch(num_warps=4)
