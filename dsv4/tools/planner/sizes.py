"""Parse and format sizes: `1M` and `128k` tokens, `141GB`, `80GiB` or `h200` of memory.

Context lengths use powers of two, as the models' names do: 128k is 131072 tokens and 1M is
1048576. Units of memory differ: GB is 10^9 bytes, GiB is 2^30.
"""

import re
from fractions import Fraction

_NUMBER = r"\s*([0-9]+(?:[_,][0-9]{3})*(?:\.[0-9]+)?)\s*([a-z]*)\s*"
_TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_DECIMAL_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTE_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
GB = 10**9
# As marketed, in units of 10^9 bytes. A driver reports up to 7 % more.
GPU_BYTES: dict[str, int] = {
    "a100-40gb": 40 * GB, "a100": 80 * GB, "h100": 80 * GB, "h20": 96 * GB, "h200": 141 * GB,
    "b200": 180 * GB, "b300": 288 * GB, "l40s": 48 * GB, "rtx-pro-6000": 96 * GB,
}  # fmt: skip


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: `1048576`, `1M`, `128k`, `1.5k`."""
    value = _parse(text, _TOKEN_UNITS)
    if value is None or value < 1:
        raise ValueError(f"expected a number of tokens such as 4096, 128k or 1M, got {text!r}")
    return value


def parse_bytes(text: str) -> int:
    """Parse a size of memory with its unit: `141GB`, `80GiB`, `512 MiB`; `0` needs none."""
    value = 0 if text.strip() == "0" else _parse(text, _BYTE_UNITS)
    if value is None:
        raise ValueError(f"expected a size such as 80GiB or 141GB, got {text!r}")
    return value


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


def _parse(text: str, units: dict[str, int]) -> int | None:
    """Parse a whole number with a unit; None if `text` is not one."""
    match = re.fullmatch(_NUMBER, text.lower())
    if match is None or match[2] not in units:
        return None
    value = Fraction(re.sub("[_,]", "", match[1])) * units[match[2]]
    return int(value) if value.denominator == 1 else None


def short_tokens(tokens: int) -> str:
    """Format tokens as a short text that `parse_tokens` reads back."""
    for unit in ("m", "k"):
        if tokens and tokens % _TOKEN_UNITS[unit] == 0:
            return f"{tokens // _TOKEN_UNITS[unit]}{unit.replace('m', 'M')}"
    return str(tokens)


def short_bytes(num_bytes: int) -> str:
    """Format bytes as a short text that `parse_bytes` reads back."""
    if not num_bytes:
        return "0"
    for name in ("TiB", "GiB", "MiB", "TB", "GB", "MB", "KiB", "kB"):
        if num_bytes % _BYTE_UNITS[name.lower()] == 0:
            return f"{num_bytes // _BYTE_UNITS[name.lower()]}{name}"
    return f"{num_bytes}B"


def format_bytes(num_bytes: int) -> str:
    """Format bytes for reading, in the largest binary unit that they fill."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.3f} {name}"
    return f"{num_bytes} B"
