"""`Part`: the rows of one kind in one layer of a saved request, in the order of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.schema import LayerCacheSchema, build_schemas
from dsv4.cache.saved_request import (
    SavedRequest,
    closed_groups,
    first_tail_position,
    first_window_position,
)
from dsv4.config import CacheConfig
from dsv4.formats import PagedRows, RowFormat, sum_ring
from dsv4.kernels.layer_memory import LayerLayout
from dsv4.kernels.reference.codec import EncodedRows, decode, read_rows
from dsv4.layer_schedule import GROUP_ROWS

CHUNK_ROWS = 4096  # rows decoded at a time


@dataclass(frozen=True)
class Part:
    """Rows of one kind in one layer.

    Attributes:
        name: `window`, `entries`, `index keys`, `tail`, `index tail` or `sums`.
        rows: The stored rows: pages in a row format, or a tail `[rows, 2, width]`, which holds kv,
            and gate + bias, or the sums `[rows, 3, width]` of groups.
        first: Number of the first row: a position, or the index of an entry or a group.
        num_rows: Number of rows.
        ring_rows: Size of the ring that holds the rows; 0 if they lie in order.
        ratio: Tokens per row: 1 for window and tails.
        overlap: Earlier tokens that also went into a row.
        global_scale: That of index keys in NVFP4.
    """

    name: str
    rows: PagedRows | Tensor
    first: int
    num_rows: int
    ring_rows: int = 0
    ratio: int = 1
    overlap: int = 0
    global_scale: Tensor | None = None

    @property
    def row_format(self) -> RowFormat | None:
        """The format of the rows; None for tails."""
        return self.rows.format if isinstance(self.rows, PagedRows) else None

    def chunks(self) -> Iterator[Tensor]:
        """Yield the numbers of all rows, CHUNK_ROWS at a time."""
        end = self.first + self.num_rows
        for start in range(self.first, end, CHUNK_ROWS):
            yield torch.arange(start, min(start + CHUNK_ROWS, end))

    def flat_rows(self, numbers: Tensor) -> Tensor:
        """Translate row numbers to stored rows."""
        return numbers % self.ring_rows if self.ring_rows else numbers

    def read(self, numbers: Tensor) -> tuple[Tensor, EncodedRows | None]:
        """Read the values of rows, `[n, dim]` fp32, and their bytes; None for tails."""
        flat_rows = self.flat_rows(numbers)
        if isinstance(self.rows, Tensor):
            return self.rows[flat_rows].flatten(1).float(), None
        encoded = read_rows(self.rows, flat_rows)
        return decode(self.rows.format, encoded, global_scale=self.global_scale), encoded

    def tokens(self, number: int) -> tuple[int, int]:
        """Return the first and the last token of a row."""
        start = number * self.ratio
        return max(0, start - self.overlap), start + self.ratio - 1


def layer_parts(config: CacheConfig, saved: SavedRequest) -> list[list[Part]]:
    """List the parts of each layer of a saved request."""
    schemas = build_schemas(config)
    layouts = cache_layout(config, schemas).layers
    return [
        list(_parts(config, saved, schema, layout))
        for schema, layout in zip(schemas, layouts, strict=True)
    ]


def _parts(
    config: CacheConfig, saved: SavedRequest, schema: LayerCacheSchema, layout: LayerLayout
) -> Iterator[Part]:
    slot, length, ratio = saved.slot[None], saved.length, schema.ratio
    first = first_window_position(layout.window, length)
    ring = layout.cut_ring(slot)
    yield Part("window", ring, first, length - first, ring_rows=layout.ring_rows)
    scale = config.index_global_scale
    key_scale = None if scale is None else torch.tensor(scale)
    for name, pages, global_scale in (
        ("entries", layout.cut_entries(saved.blocks), None),
        ("index keys", layout.cut_index_keys(saved.blocks), key_scale),
    ):
        if pages is not None and layout.owns_entries:
            yield Part(
                name, pages, 0, length // ratio, ratio=ratio, overlap=schema.tail_buffer_size_b,
                global_scale=global_scale,
            )  # fmt: skip
    for name, tail in (
        ("tail", layout.cut_tail(slot)),
        ("index tail", layout.cut_index_tail(slot)),
    ):
        if tail is not None:
            first = first_tail_position(schema, length)
            yield Part(name, tail[0], first, length - first, ring_rows=schema.tail_rows)
    sums = layout.cut_sums(slot)
    if sums is not None:
        groups, rows = closed_groups(length), sum_ring(schema.sum_rows)
        yield Part("sums", sums[0], groups.start, len(groups), ring_rows=rows, ratio=GROUP_ROWS)
