"""`LayerCacheSchema`: the stored parts of one layer. Every byte size derives from it."""

from dataclasses import dataclass

import torch

from dsv4.config import CacheConfig
from dsv4.formats import BYTE_ALIGN, RowFormat, round_up
from dsv4.layer_schedule import GROUP_ROWS, HCA_GROUPS, AttentionType, LayerSpec


@dataclass(frozen=True)
class LayerCacheSchema:
    """The stored parts of one layer.

    Attributes:
        layer: The layer's place in the schedule: what it owns.
        entries_per_block: Compressed entries a block holds for this layer, the rank's own; 0 for
            SWA.
        entry_head_dim: Width of a KV row.
        rope_dim: Width of its rotated part.
        indexer_head_dim: Width of an index key; 0 unless CSA.
        tail_buffer_size_a: Tokens of the window being filled: CSA 4, HCA 128, SWA 0; 0 for an
            entry of one token, and for a layer that owns no entries.
        tail_buffer_size_b: Rows the next window reads again: CSA 4, else 0.
        ring_rows: Rows of the window ring: the window plus the drafts of a step.
        tail_rows: Rows of the tail ring: CSA a + b, HCA one group, plus the drafts of a step; 0
            without a tail.
        sum_rows: Closed HCA groups whose sums are kept, else 0.
        tail_dtype: dtype of a tail row; sums are fp32.
        kv_row, entry_row: Formats of a window row and of an entry.
        index_row: Format of an index key.
        page_align: KV pages and rings are rounded up to it.
    """

    layer: LayerSpec
    entries_per_block: int
    entry_head_dim: int
    rope_dim: int
    indexer_head_dim: int
    tail_buffer_size_a: int
    tail_buffer_size_b: int
    ring_rows: int
    tail_rows: int
    sum_rows: int
    tail_dtype: torch.dtype
    kv_row: RowFormat
    entry_row: RowFormat
    index_row: RowFormat
    page_align: int

    @property
    def attention_type(self) -> AttentionType:
        return self.layer.attention_type

    @property
    def ratio(self) -> int:
        return self.layer.ratio

    @property
    def num_series(self) -> int:
        """Projections a token carries: CSA 2 (this window's and the next one's), HCA 1."""
        return (self.tail_buffer_size_a > 0) + (self.tail_buffer_size_b > 0)

    @property
    def ring_bytes(self) -> int:
        return self.kv_row.page_bytes(self.ring_rows, align=self.page_align)

    @property
    def page_bytes(self) -> int:
        if not self.layer.owns_entries:
            return 0
        return self.entry_row.page_bytes(self.entries_per_block, align=self.page_align)

    @property
    def index_page_bytes(self) -> int:
        if not self.indexer_head_dim or not self.layer.owns_entries:
            return 0
        return self.index_row.page_bytes(self.entries_per_block, align=BYTE_ALIGN)

    @property
    def tail_bytes(self) -> int:
        return self._tail_bytes(self.entry_head_dim)

    @property
    def index_tail_bytes(self) -> int:
        return 0 if self.layer.has_latent_keys else self._tail_bytes(self.indexer_head_dim)

    @property
    def sum_bytes(self) -> int:
        return round_up(self.sum_rows * 3 * self.entry_head_dim * 4, BYTE_ALIGN)

    def _tail_bytes(self, head_dim: int) -> int:
        # A row holds kv and gate of every series.
        elements = self.tail_rows * 2 * self.num_series * head_dim
        return round_up(elements * self.tail_dtype.itemsize, BYTE_ALIGN)


def build_schema(config: CacheConfig, layer: LayerSpec) -> LayerCacheSchema:
    """Build the schema of one layer of the schedule."""
    ratio, is_csa = layer.ratio, layer.attention_type is AttentionType.CSA
    tail_a = ratio if layer.owns_entries and ratio > 1 else 0
    tail_b = ratio if is_csa and not layer.has_latent_keys else 0
    open_rows = min(ratio, GROUP_ROWS) + tail_b
    # A step of one group at most replaces no sums that the length before it needs.
    num_closed = -(-(config.drafts_per_step + 1) // GROUP_ROWS)
    sum_rows = HCA_GROUPS - 1 + (num_closed if num_closed > 1 else 0)
    return LayerCacheSchema(
        layer=layer,
        entries_per_block=config.entries_per_block(ratio),
        entry_head_dim=config.head_dim,
        rope_dim=config.rope_dim,
        indexer_head_dim=config.index_head_dim if is_csa else 0,
        tail_buffer_size_a=tail_a,
        tail_buffer_size_b=tail_b,
        ring_rows=config.sliding_window + config.drafts_per_step,
        tail_rows=open_rows + config.drafts_per_step if tail_a else 0,
        sum_rows=sum_rows if layer.attention_type is AttentionType.HCA else 0,
        tail_dtype=config.tail_torch_dtype,
        kv_row=config.kv_row,
        entry_row=config.entry_row,
        index_row=config.index_row,
        page_align=config.page_align,
    )


def build_schemas(config: CacheConfig) -> tuple[LayerCacheSchema, ...]:
    """Build one schema per layer."""
    return tuple(build_schema(config, layer) for layer in config.schedule)
