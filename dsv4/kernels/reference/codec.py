"""Values to bytes and back, one rule per row format of `dsv4.formats`.

Special values:

    input         fp8 family (E4M3)            fp4 family (E2M1)          bf16 / fp32 rows
    ±0            keeps its sign               keeps its sign             kept
    NaN           0x7F, and no part in amax    +6, and no part in amax    0x7FC0 / 0x7FC00000
    ±inf          ±448 × scale                 ±6 × scale                 kept
    too large     saturates                    saturates                  (BF16: rounds to inf)

In `nvfp4_16` a NaN makes its group's scale NaN, and so all its values. Values are rounded to BF16
before they are quantised, except in V4.1's rows. A group's amax is at most BF16's largest number,
so every other scale is finite. Its product with the largest code may overflow: with a
power-of-two scale, numbers above 1.93 × 2^127 (fp8) or 1.75 × 2^127 (mxfp4) decode to inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.formats import PagedRows, RowFormat
from dsv4.kernels.reference.arithmetic import float32_bits, round_to_bf16

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AMAX_FLOOR = 1e-4  # of E4M3 groups
AMAX_FLOORS = {"ue8m0_scale_floor": 1e-4 * E4M3_MAX}  # where the rule bounds the scale
MXFP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126
NVFP4_SCALE_FLOOR = 2.0**-9  # E4M3's smallest number
BF16_MAX = 3.3895313892515355e38


class EncodedRows(NamedTuple):
    """The two records of each row: `[n, data_bytes]` and `[n, scale_bytes]` uint8."""

    data: Tensor
    scales: Tensor


def encode(fmt: RowFormat, values: Tensor, *, global_scale: Tensor | None = None) -> EncodedRows:
    """Encode rows `[n, dim]` fp32 as bytes of `fmt`; `global_scale` is NVFP4's, 1 if None."""
    if fmt.value_dtype is torch.float32 and fmt.scale_rule == "none":
        return _pack(fmt, [torch.where(torch.isnan(values), torch.nan, values)], [])
    rounded = round_to_bf16(values) if fmt.rounds_first else values
    if fmt.scale_rule == "none":
        return _pack(fmt, [rounded], [])
    nope_dim = fmt.dim - fmt.rope_dim
    groups = rounded[:, :nope_dim].float().unflatten(1, (-1, fmt.group))
    is_nan = torch.isnan(groups)
    amax = torch.where(is_nan, 0.0, groups).abs().amax(dim=-1)
    if fmt.scale_rule == "e4m3_poison":
        amax = torch.where(is_nan.any(dim=-1), torch.nan, amax)
    scale, stored_scale = _make_scale(fmt, amax.clamp(max=BF16_MAX), global_scale)
    if _is_fp4(fmt):
        codes = encode_e2m1(groups / scale[:, :, None]).flatten(1)
        payload = codes[:, 0::2] | (codes[:, 1::2] << 4)
    else:
        payload = encode_e4m3(groups / scale[:, :, None]).flatten(1)
    unscaled = [rounded[:, nope_dim:]] if fmt.rope_dim else []
    return _pack(fmt, [payload, *unscaled], [stored_scale])


def decode(fmt: RowFormat, rows: EncodedRows, *, global_scale: Tensor | None = None) -> Tensor:
    """Decode rows to `[n, dim]` fp32; each value is exact in `fmt.value_dtype`."""
    fields = {}
    for field in fmt.fields:
        record = rows.data if field.section == "data" else rows.scales
        end = field.offset + field.count * field.dtype.itemsize
        fields[field.name] = record[:, field.offset : end].contiguous().view(field.dtype)
    if fmt.scale_rule == "none":
        return torch.cat([field.float() for field in fields.values()], dim=1)
    scale = _read_scale(fields["scale"], global_scale if fmt.scale_rule == "e4m3" else None)
    payload = fields[fmt.fields[0].name]
    if _is_fp4(fmt):
        values = decode_e2m1(torch.stack((payload & 15, payload >> 4), dim=-1).flatten(1))
    else:
        values = payload.float()
    restored = (values.unflatten(1, (-1, fmt.group)) * scale[:, :, None]).flatten(1)
    if fmt.value_dtype is torch.bfloat16:
        restored = round_to_bf16(restored).float()
    return torch.cat((restored, fields["rope"].float()), dim=1) if fmt.rope_dim else restored


def read_rows(pages: PagedRows, rows: Tensor) -> EncodedRows:
    """Read the bytes of the rows with flat indices `rows` `[n]`, all of them valid."""
    page, row = rows // pages.rows_per_page, rows % pages.rows_per_page
    return EncodedRows(pages.data[page, row], pages.scales[page, row])


def write_rows(pages: PagedRows, rows: Tensor, encoded: EncodedRows) -> None:
    """Store encoded rows at flat indices `rows` `[n]`; -1 is skipped."""
    is_real = rows >= 0
    rows = rows[is_real]
    page, row = rows // pages.rows_per_page, rows % pages.rows_per_page
    pages.data[page, row] = encoded.data[is_real]
    pages.scales[page, row] = encoded.scales[is_real]


def encode_e4m3(x: Tensor) -> Tensor:
    """E4M3 bytes of fp32: nearest even, saturating at ±448; NaN is 0x7F."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(x), 0x7F, codes)


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes of fp32: nearest, ties to the even code, saturating at ±6; NaN is +6."""
    a = x.abs()
    code = (
        (a > 0.25).byte() + (a >= 0.75) + (a > 1.25) + (a >= 1.75)
        + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    )  # fmt: skip
    code = code | (torch.signbit(x).byte() << 3)
    return torch.where(torch.isnan(x), 7, code)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of E2M1 codes."""
    table = torch.tensor(
        E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device
    )
    return table[codes.int()]


def ceil_log2_ratio(amax: Tensor, largest: float) -> Tensor:
    """ceil(log2(amax / largest)) as int32, exactly, for normal amax and largest 448 or 6."""
    bits = float32_bits(amax)
    exponent = (bits >> 23) - 127
    mantissa = bits & 0x7FFFFF
    if largest == E4M3_MAX:  # 1.75 × 2^8
        return exponent - 8 + (mantissa > 0x600000).int()
    return exponent - 2 + (mantissa > 0x400000).int()  # 6 = 1.5 × 2^2


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def _is_fp4(fmt: RowFormat) -> bool:
    return fmt.name in ("mxfp4", "nvfp4", "nvfp4_16")


def _make_scale(fmt: RowFormat, amax: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale to divide by, `[n, groups]` fp32, and the same as it is stored."""
    if fmt.scale_rule == "amax_fp32":
        scale = amax.clamp(min=AMAX_FLOOR) / E4M3_MAX
        return scale, scale
    if fmt.scale_rule in ("e4m3", "e4m3_poison"):
        factor = E2M1_MAX if global_scale is None else E2M1_MAX * global_scale
        stored = encode_e4m3((amax / factor).clamp(min=NVFP4_SCALE_FLOOR))
        return _read_scale(stored.view(torch.float8_e4m3fn), global_scale), stored
    largest, floor = (E2M1_MAX, MXFP4_AMAX_FLOOR) if _is_fp4(fmt) else (
        E4M3_MAX, AMAX_FLOORS.get(fmt.scale_rule, AMAX_FLOOR)
    )  # fmt: skip
    exponent = ceil_log2_ratio(amax.clamp(min=floor), largest)
    scale = power_of_two(exponent)
    return scale, scale if fmt.scale_rule == "pow2_fp32" else (exponent + 127).byte()


def _read_scale(stored: Tensor, global_scale: Tensor | None) -> Tensor:
    scale = stored.float()
    return scale if global_scale is None else scale * global_scale


def _pack(fmt: RowFormat, data: list[Tensor], scales: list[Tensor]) -> EncodedRows:
    record = torch.cat([_bytes_of(field) for field in data], dim=1)
    stored = record.new_zeros(record.shape[0], fmt.scale_bytes)
    for scale in scales:
        scale_bytes = _bytes_of(scale)
        stored[:, : scale_bytes.shape[1]] = scale_bytes
    return EncodedRows(record, stored)


def _bytes_of(x: Tensor) -> Tensor:
    """Bytes of rows `[n, width]` of any dtype; n may be 0."""
    return x.flatten().view(torch.uint8).view(x.shape[0], x.shape[1] * x.element_size())
