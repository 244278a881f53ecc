"""Statistics of a part's rows: ranges, zero and saturated codes, errors, non-finite values."""

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import RowFormat
from dsv4.kernels.reference.codec import EncodedRows
from dsv4.tools.inspector.parts import Part

E4M3_LARGEST = 0x7E  # 448, without its sign
E2M1_LARGEST = 7  # 6, without its sign


@dataclass
class Tally:
    """Sums over the rows of a part, for its statistics."""

    minimum: float = math.inf
    maximum: float = -math.inf
    num_values: int = 0
    num_zero_values: int = 0
    num_codes: int = 0
    num_zero_codes: int = 0
    num_saturated: int = 0
    squared_error: float = 0.0
    squared_values: float = 0.0
    largest_error: float = 0.0
    bad_rows: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add_values(self, numbers: Tensor, values: Tensor) -> None:
        """Count the values `[n, dim]` of the rows with these numbers."""
        self.num_values += values.numel()
        self.num_zero_values += values.numel() - int(values.count_nonzero())
        is_finite = values.isfinite()
        if not is_finite.all():
            nan, inf = values.isnan().sum(dim=1), values.isinf().sum(dim=1)
            for row in torch.nonzero(nan + inf).flatten().tolist():
                self.bad_rows[int(numbers[row])] = (int(nan[row]), int(inf[row]))
            values = values[is_finite]
        if values.numel():
            low, high = (float(end) for end in values.aminmax())
            self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)

    def add_codes(self, codes: Tensor, largest: int) -> None:
        """Count codes, given without their signs."""
        self.num_codes += codes.numel()
        self.num_zero_codes += codes.numel() - int(codes.count_nonzero())
        self.num_saturated += int((codes == largest).count_nonzero())

    def add_errors(self, values: Tensor, exact: Tensor) -> None:
        """Add the errors of values against those before quantisation, where both are finite."""
        is_known = values.isfinite() & exact.isfinite()
        exact = exact[is_known].double()
        error = (values[is_known].double() - exact).abs()
        self.squared_error += float((error * error).sum())
        self.squared_values += float((exact * exact).sum())
        if error.numel():
            self.largest_error = max(self.largest_error, float(error.max()))


def describe_part(part: Part, exact: Part | None = None) -> dict[str, Any]:
    """Compute the statistics of a part; `exact` holds the same rows before quantisation."""
    tally = Tally()
    for numbers in part.chunks():
        values, encoded = part.read(numbers)
        tally.add_values(numbers, values)
        if encoded is not None and part.row_format is not None:
            _add_codes(tally, part.row_format, encoded)
        if exact is not None:
            tally.add_errors(values, exact.read(numbers)[0])
    zeros = (tally.num_zero_codes, tally.num_codes) if tally.num_codes else (
        tally.num_zero_values, tally.num_values
    )  # fmt: skip
    squared = _share(tally.squared_error, tally.squared_values)
    has_range = tally.minimum <= tally.maximum
    return {
        "part": part.name,
        "format": None if part.row_format is None else part.row_format.name,
        "rows": part.num_rows,
        "first_row": part.first if part.num_rows else None,
        "minimum": tally.minimum if has_range else None,
        "maximum": tally.maximum if has_range else None,
        "zero_rate": _share(*zeros),
        "saturation_rate": _share(tally.num_saturated, tally.num_codes),
        "nan": sum(nan for nan, _ in tally.bad_rows.values()),
        "inf": sum(inf for _, inf in tally.bad_rows.values()),
        # The RMS error divided by the RMS of the exact values; without those, None.
        "relative_rms_error": None if squared is None else squared**0.5,
        "largest_error": tally.largest_error if exact is not None and part.num_rows else None,
        "problems": _problems(part, tally.bad_rows),
    }


def _add_codes(tally: Tally, row_format: RowFormat, encoded: EncodedRows) -> None:
    """Count the FP8 or FP4 codes of rows, without signs; other formats have none."""
    if not row_format.group:
        return
    quantised = row_format.fields[0]
    size = quantised.count * quantised.dtype.itemsize
    codes = encoded.data[:, quantised.offset : quantised.offset + size]
    if quantised.dtype is torch.uint8:
        tally.add_codes(torch.cat((codes & 7, (codes >> 4) & 7), dim=1), E2M1_LARGEST)
    else:
        tally.add_codes(codes & 0x7F, E4M3_LARGEST)


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
