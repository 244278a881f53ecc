"""Launch parameters by kind of work, as measured on an H200; nothing is tuned at run time."""

from typing import NamedTuple


class Launch(NamedTuple):
    """tile is tokens per compressor program, channels those of an HCA program in a decode step."""

    tile: int
    channels: int
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None


def launch_parameters(ratio: int, *, has_chunks: bool, num_tokens: int) -> Launch:
    """For a layer of that ratio, in a step or in a forward with chunks."""
    if has_chunks:
        if ratio == 128:
            # Left to itself, the assembler spills for the sake of occupancy.
            return Launch(tile=128, channels=64, num_warps=8, maxnreg=168)
        return Launch(tile=4, channels=64, num_warps=4)
    # More threads to a window are quicker alone; fewer leave room for more windows.
    is_small_csa = ratio == 4 and num_tokens <= 128
    return Launch(tile=1, channels=64, num_warps=8 if is_small_csa else 4)
