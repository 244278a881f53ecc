"""Memory sizes of GPUs, by name."""

from dsv4.tools.planner.sizes import parse_bytes

GB = 10**9

# As marketed, in units of 10^9 bytes. A driver reports up to 7 % more.
GPU_BYTES: dict[str, int] = {
    "a100-40gb": 40 * GB,
    "a100": 80 * GB,
    "h100": 80 * GB,
    "h20": 96 * GB,
    "h200": 141 * GB,
    "b200": 180 * GB,
    "b300": 288 * GB,
    "l40s": 48 * GB,
    "rtx-pro-6000": 96 * GB,
}


def parse_gpu(text: str) -> int:
    """Parse the name of a GPU, or a size, to bytes."""
    name = text.strip().lower()
    if name in GPU_BYTES:
        return GPU_BYTES[name]
    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if size < 1:
        raise ValueError(
            f"expected a size such as 80GiB or 141GB, or one of {', '.join(GPU_BYTES)}, "
            f"got {text!r}"
        )
    return size
