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
from typing import Literal

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
    if arrangement not in ARRANGEMENTS:
        known = ", ".join(ARRANGEMENTS)
        raise ValueError(f"Unknown page_arrangement: expected one of {known}, got {arrangement!r}")
    if scale_floor not in SCALE_FLOORS:
        known = ", ".join(SCALE_FLOORS)
        raise ValueError(f"Unknown scale_floor: expected one of {known}, got {scale_floor!r}")
    row = _kv_row(name, head_dim, rope_dim, scale_floor)
    return replace(row, is_joined=arrangement == "joined" and row.scale_bytes > 0)


def _kv_row(name: KVFormatName, head_dim: int, rope_dim: int, scale_floor: ScaleFloor) -> RowFormat:
    nope_dim = head_dim - rope_dim
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    if name in ("bf16", "fp32"):
        dtype = bf16 if name == "bf16" else torch.float32
        return _row(
            name, head_dim, rope_dim, dtype, [("nope", dtype, nope_dim), ("rope", dtype, rope_dim)]
        )
    data = [("nope", fp8, nope_dim), ("rope", bf16, rope_dim)]
    if name == "fp8":
        _check_groups(name, "head_dim - rope_dim", nope_dim, 64)
        scale = (torch.float8_e8m0fnu, nope_dim // 64)
        return _row(
            name, head_dim, rope_dim, bf16, data,
            group=64, scale_rule="ue8m0", scale=scale, scale_align=8,
        )  # fmt: skip
    if name == "fp8_entry_scale":
        return _row(
            name, head_dim, rope_dim, bf16, data,
            group=nope_dim, scale_rule="amax_fp32", scale=(torch.float32, 1),
        )  # fmt: skip
    if name == "fp8_32":
        _check_groups(name, "head_dim", head_dim, 32)
        return _row(
            name, head_dim, 0, bf16, [("kv", fp8, head_dim)], group=32, rounds_first=False,
            scale_rule="ue8m0" if scale_floor == "amax" else "ue8m0_scale_floor",
            scale=(torch.float8_e8m0fnu, head_dim // 32),
        )  # fmt: skip
    if name == "nvfp4_16":
        _check_groups(name, "head_dim", head_dim, 16)
        return _row(
            name, head_dim, 0, bf16, [("kv", torch.uint8, head_dim // 2)], group=16,
            rounds_first=False, scale_rule="e4m3_poison", scale=(fp8, head_dim // 16),
        )  # fmt: skip
    known = ", ".join((*KV_FORMATS, *V41_FORMATS))
    raise ValueError(f"Unknown KV format: expected one of {known}, got {name!r}")


def index_row(name: IndexFormatName, *, head_dim: int, rounds_first: bool = True) -> RowFormat:
    """Build the row of one index key of `head_dim` channels; rotation does not split it."""
    row = _index_row(name, head_dim)
    return replace(row, rounds_first=rounds_first or row.scale_rule == "none")


def _index_row(name: IndexFormatName, head_dim: int) -> RowFormat:
    fp32 = torch.float32
    if name in ("bf16", "fp32"):
        dtype = torch.bfloat16 if name == "bf16" else fp32
        return _row(name, head_dim, 0, dtype, [("key", dtype, head_dim)])
    if name == "fp8":
        return _row(
            name, head_dim, 0, fp32, [("key", torch.float8_e4m3fn, head_dim)],
            group=head_dim, scale_rule="pow2_fp32", scale=(fp32, 1),
        )  # fmt: skip
    if name in ("mxfp4", "nvfp4"):
        group = 32 if name == "mxfp4" else 16
        rule: ScaleRule = "ue8m0" if name == "mxfp4" else "e4m3"
        scale_dtype = torch.float8_e8m0fnu if name == "mxfp4" else torch.float8_e4m3fn
        _check_groups(name, "index_head_dim", head_dim, group)
        return _row(
            name, head_dim, 0, fp32, [("key", torch.uint8, head_dim // 2)],
            group=group, scale_rule=rule, scale=(scale_dtype, head_dim // group),
        )  # fmt: skip
    known = ", ".join(INDEX_FORMATS)
    raise ValueError(f"Unknown index format: expected one of {known}, got {name!r}")


KV_FORMATS: tuple[KVFormatName, ...] = ("fp8", "fp8_entry_scale", "bf16", "fp32")
V41_FORMATS: tuple[KVFormatName, ...] = ("fp8_32", "nvfp4_16")
ARRANGEMENTS: tuple[PageArrangement, ...] = ("split", "joined")
SCALE_FLOORS: tuple[ScaleFloor, ...] = ("amax", "scale")
INDEX_FORMATS: tuple[IndexFormatName, ...] = ("mxfp4", "nvfp4", "fp8", "bf16", "fp32")


def _row(
    name: str,
    dim: int,
    rope_dim: int,
    value_dtype: torch.dtype,
    data: list[tuple[str, torch.dtype, int]],
    *,
    group: int = 0,
    scale_rule: ScaleRule = "none",
    scale: tuple[torch.dtype, int] | None = None,
    scale_align: int = 1,
    rounds_first: bool = True,
) -> RowFormat:
    fields, offset, scale_bytes = [], 0, 0
    for field_name, dtype, count in data:
        fields.append(Field(field_name, "data", offset, dtype, count))
        offset += count * dtype.itemsize
    if scale is not None:
        fields.append(Field("scale", "scale", 0, *scale))
        scale_bytes = round_up(scale[0].itemsize * scale[1], scale_align)
    return RowFormat(
        name, dim, rope_dim, group, scale_rule, value_dtype, tuple(fields), offset, scale_bytes,
        rounds_first=rounds_first,
    )  # fmt: skip


def _check_groups(name: str, what: str, dim: int, group: int) -> None:
    if dim % group:
        raise ValueError(f"Format {name} needs {what} divisible by {group}, got {dim}")
