"""`Part`: the rows of one kind in one layer of a saved request, in the order of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.memory.layout import RunLayout, block_layout, slot_layout
from dsv4.cache.memory.schema import LayerCacheSchema, build_schemas
from dsv4.cache.saved_request import SavedRequest
from dsv4.config import CacheConfig
from dsv4.formats import PagedRows, RowFormat, cut_tail
from dsv4.kernels.reference.codec import EncodedRows, decode, read_rows
from dsv4.layer_schedule import AttentionType

CHUNK_ROWS = 4096  # rows decoded at a time


@dataclass(frozen=True)
class FormatRows:
    """Rows in a row format, in pages."""

    pages: PagedRows
    global_scale: Tensor | None = None

    def encoded(self, flat_rows: Tensor) -> EncodedRows:
        """Read the bytes of rows."""
        return read_rows(self.pages, flat_rows)

    def values(self, flat_rows: Tensor) -> Tensor:
        """Read the values of rows, `[n, dim]` fp32."""
        return self.decoded(self.encoded(flat_rows))

    def decoded(self, encoded: EncodedRows) -> Tensor:
        """Decode the bytes of rows to `[n, dim]` fp32."""
        return decode(self.pages.format, encoded, global_scale=self.global_scale)


@dataclass(frozen=True)
class PlainRows:
    """Rows of a tail `[rows, 2, width]`: kv, and gate + bias."""

    tail: Tensor

    def values(self, flat_rows: Tensor) -> Tensor:
        """Read the values of rows, `[n, 2 × width]` fp32."""
        return self.tail[flat_rows].flatten(1).float()


@dataclass(frozen=True)
class Part:
    """Rows of one kind in one layer.

    Attributes:
        name: `window`, `entries`, `index keys`, `tail` or `index tail`.
        rows: The stored rows.
        first: Number of the first row: a position, or an entry's index.
        num_rows: Number of rows.
        ring_rows: Size of the ring that holds the rows; 0 if they lie in order.
        ratio: Tokens per row: 1 for window and tails.
        overlap: Earlier tokens that also went into a row.
    """

    name: str
    rows: FormatRows | PlainRows
    first: int
    num_rows: int
    ring_rows: int = 0
    ratio: int = 1
    overlap: int = 0

    @property
    def row_format(self) -> RowFormat | None:
        """The format of the rows; None for tails."""
        return self.rows.pages.format if isinstance(self.rows, FormatRows) else None

    def chunks(self) -> Iterator[Tensor]:
        """Yield the numbers of all rows, CHUNK_ROWS at a time."""
        end = self.first + self.num_rows
        for start in range(self.first, end, CHUNK_ROWS):
            yield torch.arange(start, min(start + CHUNK_ROWS, end))

    def flat_rows(self, numbers: Tensor) -> Tensor:
        """Translate row numbers to stored rows."""
        return numbers % self.ring_rows if self.ring_rows else numbers

    def tokens(self, number: int) -> tuple[int, int]:
        """Return the first and the last token of a row."""
        start = number * self.ratio
        return max(0, start - self.overlap), start + self.ratio - 1


def layer_parts(config: CacheConfig, saved: SavedRequest) -> list[list[Part]]:
    """List the parts of each layer of a saved request."""
    schemas = build_schemas(config)
    slots = slot_layout(schemas, page_align=config.page_align)
    blocks = block_layout(schemas, page_align=config.page_align)
    return [
        [
            _window(config, saved, schema, slots, idx),
            *_entries(config, saved, schema, blocks, idx),
            *_tails(saved, schema, slots, idx),
        ]
        for idx, schema in enumerate(schemas)
    ]


def first_tail_position(schema: LayerCacheSchema, length: int) -> int:
    """Return the oldest token whose tail row a request of that length needs."""
    return max(0, length // schema.ratio * schema.ratio - schema.tail_buffer_size_b)


def _window(
    config: CacheConfig, saved: SavedRequest, schema: LayerCacheSchema, slots: RunLayout, idx: int
) -> Part:
    offset = slots.offsets[idx]["ring"]
    pages = schema.kv_row.pages(saved.slot[None], offset=offset, rows_per_page=schema.ring_rows)
    first = max(0, saved.length - config.sliding_window)
    return Part(
        "window", FormatRows(pages), first, saved.length - first, ring_rows=schema.ring_rows
    )


def _entries(
    config: CacheConfig, saved: SavedRequest, schema: LayerCacheSchema, blocks: RunLayout, idx: int
) -> Iterator[Part]:
    if not schema.ratio:
        return
    scale = config.index_global_scale
    kinds = [("entries", "entries", schema.kv_row)]
    if schema.indexer_head_dim:
        kinds.append(("index keys", "index_keys", schema.index_row))
    for name, offset_name, row_format in kinds:
        has_scale = name == "index keys" and scale is not None
        pages = row_format.pages(
            saved.blocks, offset=blocks.offsets[idx][offset_name],
            rows_per_page=schema.entries_per_block,
        )  # fmt: skip
        rows = FormatRows(pages, torch.tensor(scale) if has_scale else None)
        yield Part(
            name, rows, 0, saved.length // schema.ratio,
            ratio=schema.ratio, overlap=schema.tail_buffer_size_b,
        )  # fmt: skip


def _tails(
    saved: SavedRequest, schema: LayerCacheSchema, slots: RunLayout, idx: int
) -> Iterator[Part]:
    if not schema.ratio:
        return
    first = first_tail_position(schema, saved.length)
    kinds = [("tail", "tail", schema.entry_head_dim)]
    if schema.attention_type is AttentionType.CSA:
        kinds.append(("index tail", "index_tail", schema.indexer_head_dim))
    for name, offset_name, head_dim in kinds:
        tail = cut_tail(
            saved.slot[None], offset=slots.offsets[idx][offset_name], num_rows=schema.tail_rows,
            width=schema.num_series * head_dim, dtype=schema.tail_dtype,
        )[0]  # fmt: skip
        rows = PlainRows(tail)
        yield Part(name, rows, first, saved.length - first, ring_rows=schema.tail_rows)
