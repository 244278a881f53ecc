"""Launch parameters, fixed by architecture and kind of work; nothing is tuned at run time."""

from typing import NamedTuple


class Launch(NamedTuple):
    """tile is tokens per compressor program; the rest is Triton's."""

    tile: int
    num_warps: int
    num_stages: int


def launch_parameters(ratio: int, *, has_chunks: bool) -> Launch:
    """For a layer of that ratio, in a step or in a forward with chunks."""
    if ratio == 128:
        return Launch(tile=128 if has_chunks else 1, num_warps=16, num_stages=1)
    return Launch(tile=4 if has_chunks else 1, num_warps=4, num_stages=1)
