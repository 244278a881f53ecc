"""Row formats: the bytes of one stored row, and of a page of rows. Every layout is here, once.

A page of B rows has one of two arrangements, with padding up to the page's stride:

    split    | data 0 | data 1 | ... | data B-1 | scales 0 | ... | scales B-1 | padding |
    joined   | data 0 | scales 0 | data 1 | scales 1 | ... | data B-1 | scales B-1 | padding |

                    data record                                   scale record
    KV
    fp8             448 E4M3 | 64 BF16              (576 B)       7 UE8M0 | 1 zero byte   (8 B)
    fp8_entry_scale 448 E4M3 | 64 BF16              (576 B)       1 fp32                  (4 B)
    bf16            448 BF16 | 64 BF16             (1024 B)       -
    fp32            448 fp32 | 64 fp32             (2048 B)       -
    fp8_32          512 E4M3                        (512 B)       16 UE8M0, one per 32   (16 B)
    nvfp4_16        512 E2M1, low nibble first      (256 B)       32 E4M3, one per 16    (32 B)
    index key
    mxfp4           128 E2M1, low nibble first       (64 B)       4 UE8M0, one per 32     (4 B)
    nvfp4           128 E2M1, low nibble first       (64 B)       8 E4M3, one per 16      (8 B)
    fp8             128 E4M3                        (128 B)       1 fp32, a power of two  (4 B)
    bf16 / fp32     128 values                (256 / 512 B)       -

`fp8_32` and `nvfp4_16` are DeepSeek-V4.1's rows of windows and of entries, rotated channels
included. The widths above are DeepSeek-V4's (head_dim 512, 64 of them rotated; index_head_dim 128);
the same rules build the rows of smaller models. Values are turned into these bytes by
`kernels.reference.codec`; this file holds no arithmetic on values.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dsv4.layer_schedule import HCA_GROUPS

KVFormatName = Literal["fp8", "fp8_entry_scale", "bf16", "fp32", "fp8_32", "nvfp4_16"]
IndexFormatName = Literal["mxfp4", "nvfp4", "fp8", "bf16", "fp32"]
ScaleRule = Literal[
    "none", "ue8m0", "ue8m0_scale_floor", "pow2_fp32", "amax_fp32", "e4m3", "e4m3_poison"
]  # fmt: skip
PageArrangement = Literal["split", "joined"]
ScaleFloor = Literal["amax", "scale"]

KV_FORMATS: tuple[KVFormatName, ...] = ("fp8", "fp8_entry_scale", "bf16", "fp32")
V41_FORMATS: tuple[KVFormatName, ...] = ("fp8_32", "nvfp4_16")
INDEX_FORMATS: tuple[IndexFormatName, ...] = ("mxfp4", "nvfp4", "fp8", "bf16", "fp32")
ARRANGEMENTS: tuple[PageArrangement, ...] = ("split", "joined")
SCALE_FLOORS: tuple[ScaleFloor, ...] = ("amax", "scale")
BYTE_ALIGN = 16  # every page, ring and tail starts on a 16-byte boundary


def round_up(size: int, align: int) -> int:
    """Return the smallest multiple of `align` that is not below `size`."""
    return -(-size // align) * align


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Field:
    """A run of equal elements inside a row's data or scale record."""

    name: str
    section: Literal["data", "scale"]
    offset: int
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class RowFormat:
    """The layout of one stored row and the rule that makes its scales.

    Attributes:
        name: The name users choose it by.
        dim: Channels of the decoded row.
        rope_dim: Trailing channels that are never quantised to less than BF16.
        group: Channels that share a scale; 0 where there is none.
        scale_rule: The rule that makes a scale from its group (`kernels.reference.codec`).
        value_dtype: The dtype that holds every decoded value.
        fields: The records' parts, in order.
        data_bytes: Bytes of the data record.
        scale_bytes: Bytes of the scale record.
        is_joined: A row's scales lie behind its data, not behind all data of the page.
        rounds_first: Values are rounded to BF16 before they are quantised.
    """

    name: str
    dim: int
    rope_dim: int
    group: int
    scale_rule: ScaleRule
    value_dtype: torch.dtype
    fields: tuple[Field, ...]
    data_bytes: int
    scale_bytes: int
    is_joined: bool = False
    rounds_first: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, padding between pages left out."""
        return self.data_bytes + self.scale_bytes

    @property
    def record_bytes(self) -> tuple[int, int]:
        """Sizes of the data and the scale record."""
        return self.data_bytes, self.scale_bytes

    @property
    def record_strides(self) -> tuple[int, int]:
        """Bytes from a row's data and scale record to those of the next row."""
        return (self.row_bytes, self.row_bytes) if self.is_joined else self.record_bytes

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return (self.dim - self.rope_dim) // self.group if self.group else 0

    def page_bytes(self, num_rows: int, *, align: int) -> int:
        """Bytes of a page of `num_rows` rows, rounded up to `align`."""
        return round_up(num_rows * self.row_bytes, align)

    def field(self, name: str) -> Field:
        """Return the field of that name."""
        for field in self.fields:
            if field.name == name:
                return field
        names = ", ".join(field.name for field in self.fields)
        raise ValueError(f"Format {self.name} has no field {name!r}; it has {names}")

    def pages(self, storage: Tensor, *, offset: int, rows_per_page: int) -> "PagedRows":
        """Cut the pages that start at byte `offset` of each run of `storage`.

        Args:
            storage: `[num_pages, run_bytes]` uint8, contiguous.
        """
        return PagedRows(self, storage, offset, rows_per_page)


@dataclass(frozen=True)
class PagedRows:
    """Rows of one format in strided pages; a flat index is page × rows_per_page + row.

    Attributes:
        format: The layout of a row.
        storage: `[num_pages, run_bytes]` uint8, contiguous, the runs that the pages are cut from.
        offset: First byte of a page in its run.
        rows_per_page: Rows of a page.
    """

    format: RowFormat
    storage: Tensor
    offset: int
    rows_per_page: int

    @property
    def num_rows(self) -> int:
        """Rows of all pages."""
        return self.storage.shape[0] * self.rows_per_page

    @cached_property
    def data(self) -> Tensor:
        """`[num_pages, rows_per_page, data_bytes]` uint8."""
        return self._section(0, self.format.data_bytes, self.format.record_strides[0])

    @cached_property
    def scales(self) -> Tensor:
        """`[num_pages, rows_per_page, scale_bytes]` uint8."""
        rows_before = 1 if self.format.is_joined else self.rows_per_page
        start, stride = rows_before * self.format.data_bytes, self.format.record_strides[1]
        return self._section(start, self.format.scale_bytes, stride)

    def _section(self, start: int, size: int, stride: int) -> Tensor:
        num_pages, run_bytes = self.storage.shape
        return self.storage.as_strided(
            (num_pages, self.rows_per_page, size),
            (run_bytes, stride, 1),
            self.storage.storage_offset() + self.offset + start,
        )

    def field(self, name: str) -> Tensor:
        """Return a typed view `[num_pages, rows_per_page, count]` of one field, sharing memory."""
        field = self.format.field(name)
        section = self.data if field.section == "data" else self.scales
        end = field.offset + field.count * field.dtype.itemsize
        return section[..., field.offset : end].view(field.dtype)


def sum_ring(sum_rows: int) -> int:
    """Return the ring that has the sums of HCA group g in row g mod ring.

    The last group of a window is never stored, so 7 rows serve as a ring of 8.
    """
    return max(sum_rows, HCA_GROUPS)


class _Encoding(NamedTuple):
    """The way a format stores channels.

    Attributes:
        codes: dtype of the channels; uint8 holds two of them.
        value_dtype: The dtype that holds every decoded value.
        rope: dtype of the rotated channels where they are a field of their own.
        scale: dtype of a group's scale; None where there is none.
        group: Channels that share a scale; 0 for all of them.
        scale_align: The scale record is rounded up to it.
    """

    codes: torch.dtype
    value_dtype: torch.dtype
    rope: torch.dtype | None = None
    scale: torch.dtype | None = None
    scale_rule: ScaleRule = "none"
    group: int = 0
    scale_align: int = 1


_UINT8, _BF16, _FP32 = torch.uint8, torch.bfloat16, torch.float32
_E4M3, _UE8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_KV_ENCODINGS: dict[str, _Encoding] = {
    "fp8": _Encoding(_E4M3, _BF16, _BF16, _UE8M0, "ue8m0", 64, scale_align=8),
    "fp8_entry_scale": _Encoding(_E4M3, _BF16, _BF16, _FP32, "amax_fp32"),
    "bf16": _Encoding(_BF16, _BF16, _BF16),
    "fp32": _Encoding(_FP32, _FP32, _FP32),
    "fp8_32": _Encoding(_E4M3, _BF16, None, _UE8M0, "ue8m0", 32),
    "nvfp4_16": _Encoding(_UINT8, _BF16, None, _E4M3, "e4m3_poison", 16),
}
_INDEX_ENCODINGS: dict[str, _Encoding] = {
    "mxfp4": _Encoding(_UINT8, _FP32, None, _UE8M0, "ue8m0", 32),
    "nvfp4": _Encoding(_UINT8, _FP32, None, _E4M3, "e4m3", 16),
    "fp8": _Encoding(_E4M3, _FP32, None, _FP32, "pow2_fp32"),
    "bf16": _Encoding(_BF16, _BF16),
    "fp32": _Encoding(_FP32, _FP32),
}


def kv_row(
    name: KVFormatName,
    *,
    head_dim: int,
    rope_dim: int,
    arrangement: PageArrangement = "split",
    scale_floor: ScaleFloor = "amax",
) -> RowFormat:
    """Build the row of one KV vector: `head_dim - rope_dim` channels, then the rotated ones.

    Args:
        scale_floor: Whether `fp8_32` bounds amax or the scale, amax / 448, to at least 1e-4.
    """
    _check_known("page_arrangement", arrangement, ARRANGEMENTS)
    _check_known("scale_floor", scale_floor, SCALE_FLOORS)
    _check_known("KV format", name, (*KV_FORMATS, *V41_FORMATS))
    encoding = _KV_ENCODINGS[name]
    if name == "fp8_32" and scale_floor == "scale":
        encoding = encoding._replace(scale_rule="ue8m0_scale_floor")
    width, field = ("head_dim", "kv") if encoding.rope is None else ("head_dim - rope_dim", "nope")
    row = _row(name, encoding, head_dim, rope_dim, width=width, field=field)
    is_joined = arrangement == "joined" and row.scale_bytes > 0
    return replace(row, is_joined=is_joined, rounds_first=name not in V41_FORMATS)


def index_row(name: IndexFormatName, *, head_dim: int, rounds_first: bool = True) -> RowFormat:
    """Build the row of one index key of `head_dim` channels; rotation does not split it."""
    _check_known("index format", name, INDEX_FORMATS)
    row = _row(name, _INDEX_ENCODINGS[name], head_dim, 0, width="index_head_dim", field="key")
    return replace(row, rounds_first=rounds_first or row.scale_rule == "none")


def _row(
    name: str, encoding: _Encoding, dim: int, rope_dim: int, *, width: str, field: str
) -> RowFormat:
    """Build a row whose channels before the rotated ones, `width` many, are the field `field`."""
    codes, value_dtype, rope, scale, scale_rule, group, scale_align = encoding
    rope_dim = 0 if rope is None else rope_dim
    coded = dim - rope_dim
    if group and coded % group:
        raise ValueError(f"Format {name} needs {width} divisible by {group}, got {coded}")
    fields = [Field(field, "data", 0, codes, coded // 2 if codes == _UINT8 else coded)]
    data_bytes, scale_bytes = fields[0].count * codes.itemsize, 0
    if rope is not None:
        fields.append(Field("rope", "data", data_bytes, rope, rope_dim))
        data_bytes += rope_dim * rope.itemsize
    if scale is not None:
        group = group or coded
        fields.append(Field("scale", "scale", 0, scale, coded // group))
        scale_bytes = round_up(scale.itemsize * (coded // group), scale_align)
    return RowFormat(
        name, dim, rope_dim, group, scale_rule, value_dtype, tuple(fields), data_bytes, scale_bytes
    )


def _check_known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"Unknown {what}: expected one of {', '.join(known)}, got {value!r}")
