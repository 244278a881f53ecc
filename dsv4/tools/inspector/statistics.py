"""Statistics of a part's rows: ranges, zero and saturated codes, errors, non-finite values."""

from collections import defaultdict
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import RowFormat
from dsv4.kernels.reference.codec import EncodedRows
from dsv4.tools.inspector.parts import Part

E4M3_LARGEST = 0x7E  # 448, without its sign
E2M1_LARGEST = 7  # 6, without its sign


def describe_part(part: Part, exact: Part | None = None) -> dict[str, Any]:
    """Compute the statistics of a part; `exact` holds the same rows before quantisation."""
    sums: defaultdict[str, float] = defaultdict(float)
    ends: list[float] = []  # least and largest finite values of the chunks
    errors = [0.0]  # the largest of the chunks
    bad_rows: dict[int, tuple[int, int]] = {}
    for numbers in part.chunks():
        values, encoded = part.read(numbers)
        is_finite = values.isfinite()
        ends += [float(end) for end in values[is_finite].aminmax()] if is_finite.any() else []
        for row in (~is_finite).any(dim=1).nonzero().flatten().tolist():
            num_bad = int(values[row].isnan().sum()), int(values[row].isinf().sum())
            bad_rows[int(numbers[row])] = num_bad
        codes, largest = _codes(part.row_format, encoded) or (values, None)
        sums["counted"] += codes.numel()
        sums["zero"] += codes.numel() - int(codes.count_nonzero())
        if largest is not None:
            sums["codes"] += codes.numel()
            sums["saturated"] += int((codes == largest).count_nonzero())
        if exact is not None:  # where both are finite
            before = exact.read(numbers)[0]
            is_known = is_finite & before.isfinite()
            before = before[is_known].double()
            error = (values[is_known].double() - before).abs()
            sums["squared_error"] += float((error * error).sum())
            sums["squared_values"] += float((before * before).sum())
            errors += [float(error.max())] if error.numel() else []
    squared = _share(sums["squared_error"], sums["squared_values"])
    return {
        "part": part.name,
        "format": None if part.row_format is None else part.row_format.name,
        "rows": part.num_rows,
        "first_row": part.first if part.num_rows else None,
        "minimum": min(ends, default=None),
        "maximum": max(ends, default=None),
        "zero_rate": _share(sums["zero"], sums["counted"]),
        "saturation_rate": _share(sums["saturated"], sums["codes"]),
        "nan": sum(nan for nan, _ in bad_rows.values()),
        "inf": sum(inf for _, inf in bad_rows.values()),
        # The RMS error divided by the RMS of the exact values; without those, None.
        "relative_rms_error": None if squared is None else squared**0.5,
        "largest_error": max(errors) if exact is not None and part.num_rows else None,
        "problems": _problems(part, bad_rows),
    }


def _codes(row_format: RowFormat | None, encoded: EncodedRows | None) -> tuple[Tensor, int] | None:
    """Return the FP8 or FP4 codes of rows, without signs, and the largest; others have none."""
    if row_format is None or encoded is None or not row_format.group:
        return None
    quantised = row_format.fields[0]
    size = quantised.count * quantised.dtype.itemsize
    codes = encoded.data[:, quantised.offset : quantised.offset + size]
    if quantised.dtype is torch.uint8:
        return torch.cat((codes & 7, (codes >> 4) & 7), dim=1), E2M1_LARGEST
    return codes & 0x7F, E4M3_LARGEST


def _share(count: float, of: float) -> float | None:
    return count / of if of else None


def _problems(part: Part, bad_rows: dict[int, tuple[int, int]]) -> list[dict[str, int]]:
    """List runs of adjacent rows that hold NaN or inf, with the tokens of each run."""
    # Adjacent numbers differ from their places in the list by the same.
    groups = groupby(enumerate(sorted(bad_rows)), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [
        {
            "first_row": run[0],
            "last_row": run[-1],
            "first_token": part.tokens(run[0])[0],
            "last_token": part.tokens(run[-1])[1],
            "nan": sum(bad_rows[number][0] for number in run),
            "inf": sum(bad_rows[number][1] for number in run),
        }
        for run in runs
    ]
