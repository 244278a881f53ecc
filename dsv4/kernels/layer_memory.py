"""`LayerMemory`: the storages of one layer, and the places of its rows in them."""

import json
import math
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from dsv4.formats import (
    IndexFormatName,
    KVFormatName,
    PageArrangement,
    PagedRows,
    RowFormat,
    ScaleFloor,
    index_row,
    kv_row,
)
from dsv4.rope import RopeRows

_Part = TypeVar("_Part")


def existing(part: _Part | None) -> _Part:
    """Return a part that this type of layer has; the handle checked the type."""
    assert part is not None, "checked by the handle"
    return part


class WindowRows(NamedTuple):
    """Rows of the sliding window.

    The workspace has the last `window - 1` rows from before a chunk, then the chunk's own.
    """

    ring: PagedRows  # one page per slot
    workspace: PagedRows  # one page for the requests with a `workspace_start`
    window: int


@dataclass(frozen=True)
class LayerLayout:
    """Places of a layer's rows in the raw storages, and its constants, as numbers and names.

    An offset is the first byte in a slot or block, -1 for none.
    """

    ratio: int  # tokens per entry; 0 for SWA
    window: int  # tokens of the sliding window
    ring_offset: int  # in a slot
    ring_rows: int
    workspace_rows: int
    entries_offset: int  # of the pages in a block
    index_offset: int
    entries_per_block: int  # rows of a page
    tail_offset: int  # in a slot
    index_tail_offset: int
    tail_rows: int
    sums_offset: int  # of HCA sums in a slot
    sum_rows: int  # groups with sums
    num_series: int  # projections with gates that a token carries: CSA 2, HCA 1, SWA 0
    head_dim: int  # width of a KV row
    rope_dim: int  # width of its rotated part
    index_head_dim: int  # width of an index key
    index_topk: int  # entries that a token selects
    has_hadamard: bool  # index queries and keys are transformed after RoPE
    rms_norm_eps: float  # of every norm that the cache applies
    kv_format: KVFormatName
    index_format: IndexFormatName
    tail_dtype: Literal["float32", "bfloat16"]
    entry_format: KVFormatName
    page_arrangement: PageArrangement
    scale_floor: ScaleFloor
    owns_entries: bool  # it writes entries and keys; the pages of others are their owner's
    has_latent_keys: bool  # index keys are made of the entry before RoPE
    norms_query: bool  # raw queries are normed per head before RoPE; V4.1's are not
    candidate_blocks: int  # blocks that the layer publishes, 0 for none
    candidate_size: int  # entries of such a block
    row_steps: tuple[int, ...]  # tokens of the windows that RoPE rows are for, see `rope.row_steps`
    # All of the above in one string, which `from_key` reads back.
    key: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_steps", tuple(self.row_steps))
        object.__setattr__(self, "key", json.dumps(astuple(self)[:-1]))

    @staticmethod
    @cache
    def from_key(key: str) -> "LayerLayout":
        """Layout whose `key` this is."""
        return LayerLayout(*json.loads(key))

    @property
    def query_eps(self) -> float:
        """The epsilon of a raw query's norm; below 0 where there is no norm."""
        return self.rms_norm_eps if self.norms_query else -1.0

    @cached_property
    def kv_row(self) -> RowFormat:
        """Row format of a window token."""
        return self._kv_row(self.kv_format)

    @cached_property
    def entry_row(self) -> RowFormat:
        """Row format of a compressed entry."""
        return self._kv_row(self.entry_format)

    def _kv_row(self, name: KVFormatName) -> RowFormat:
        return kv_row(
            name, head_dim=self.head_dim, rope_dim=self.rope_dim,
            arrangement=self.page_arrangement, scale_floor=self.scale_floor,
        )  # fmt: skip

    @cached_property
    def index_row(self) -> RowFormat:
        """Row format of an index key."""
        return index_row(
            self.index_format, head_dim=self.index_head_dim, rounds_first=not self.has_latent_keys
        )

    def cut_ring(self, slots: Tensor) -> PagedRows:
        """Cut the window ring out of slots `[max_requests, slot_bytes]`, one page each."""
        return PagedRows(self.kv_row, slots, self.ring_offset, self.ring_rows)

    def cut_entries(self, blocks: Tensor) -> PagedRows | None:
        """Cut the compressed entries out of blocks `[num_blocks, block_bytes]`; None for SWA."""
        return self._cut_pages(blocks, self.entries_offset, self.entry_row)

    def cut_index_keys(self, blocks: Tensor) -> PagedRows | None:
        """Cut the index keys out of blocks; None unless CSA."""
        return self._cut_pages(blocks, self.index_offset, self.index_row)

    def cut_tail(self, slots: Tensor) -> Tensor | None:
        """Cut the tails `[max_requests, tail_rows, 2, num_series × head_dim]`; None for SWA."""
        return self._cut_tail(slots, self.tail_offset, self.head_dim)

    def cut_index_tail(self, slots: Tensor) -> Tensor | None:
        """Cut the tails of the indexer; None unless CSA."""
        return self._cut_tail(slots, self.index_tail_offset, self.index_head_dim)

    def cut_sums(self, slots: Tensor) -> Tensor | None:
        """Cut the sums of groups `[max_requests, sum_rows, 3, head_dim]`; None unless HCA."""
        shape = (self.sum_rows, 3, self.head_dim)
        return self._cut_state(slots, self.sums_offset, shape, torch.float32)

    def _cut_pages(self, blocks: Tensor, offset: int, row: RowFormat) -> PagedRows | None:
        return None if offset < 0 else PagedRows(row, blocks, offset, self.entries_per_block)

    def _cut_tail(self, slots: Tensor, offset: int, head_dim: int) -> Tensor | None:
        shape = (self.tail_rows, 2, self.num_series * head_dim)  # kv and gate of a token
        return self._cut_state(slots, offset, shape, getattr(torch, self.tail_dtype))

    @staticmethod
    def _cut_state(
        slots: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        if offset < 0:
            return None
        end = offset + math.prod(shape) * dtype.itemsize
        state: Tensor = slots[:, offset:end].view(dtype).unflatten(1, shape)
        return state


class LayerStorages(NamedTuple):
    """Raw storages, and the layout of one layer in them.

    pooled has the channels of HCA windows that several programs pool. A forward closes at most one
    window every 128 tokens and one more for each request. The window that a token closes is number
    request + token // 128. The index uses index_scratch, then attention of chunks. A row of
    partials is one split of a token: accumulators, then largest logits and sums.
    """

    slots: Tensor  # [max_requests, slot_bytes] uint8, the fixed state of requests
    blocks: Tensor  # [num_blocks, block_bytes] uint8, the pages of all layers
    workspace: Tensor  # [1, bytes] uint8, window rows of chunks
    pooled: Tensor  # [windows, head_dim] fp32
    arrivals: Tensor  # [windows] int32, programs that have stored channels; 0 between launches
    index_scratch: Tensor  # [bytes] uint8, divided by the module `index_scratch`
    partials: Tensor  # [num_partials, heads × (head_dim + 2)] fp32
    global_scale: Tensor | None  # [] fp32, NVFP4's
    frequencies: Tensor  # [4, rope_dim / 2] fp32, those of a token's rows, see `rope.ROW_STEPS`
    rope_rows: Tensor  # [4, 2, max_tokens, rope_dim / 2] fp32, cos and sin of the forward's tokens
    layout: LayerLayout


class LayerMemory(LayerStorages):
    """Storages of a layer, and views of its rows in them, each made once."""

    @cached_property
    def window(self) -> WindowRows:
        """The ring and the workspace."""
        layout = self.layout
        return WindowRows(
            layout.cut_ring(self.slots),
            PagedRows(layout.kv_row, self.workspace, 0, layout.workspace_rows),
            layout.window,
        )

    @cached_property
    def entries(self) -> PagedRows | None:
        """Pages of compressed entries; None for SWA."""
        return self.layout.cut_entries(self.blocks)

    @cached_property
    def window_alone(self) -> "LayerMemory":
        """The same memory as one without entries, to attend the window alone."""
        return self._replace(layout=replace(self.layout, entries_offset=-1))

    @cached_property
    def index_keys(self) -> PagedRows | None:
        """Pages of index keys; None unless CSA."""
        return self.layout.cut_index_keys(self.blocks)

    @property
    def tail(self) -> Tensor | None:
        """`[max_requests, tail_rows, 2, num_series × head_dim]`; None for SWA."""
        return self.layout.cut_tail(self.slots)

    @property
    def index_tail(self) -> Tensor | None:
        """Tail of the indexer, of `index_head_dim`; None unless CSA."""
        return self.layout.cut_index_tail(self.slots)

    @cached_property
    def rope(self) -> RopeRows:
        """cos and sin at the forward's tokens, row i for token i."""
        return RopeRows(*self.rope_rows[int(self.layout.ratio > 0)])

    @cached_property
    def entry_rope(self) -> RopeRows:
        """cos and sin of entries, row i for the one that token i closes; for SWA of no use."""
        layout = self.layout
        row = layout.row_steps.index(layout.ratio, 1) if layout.ratio else 0
        return RopeRows(*self.rope_rows[row])

    @cached_property
    def scoring_all(self) -> "LayerMemory":
        """The same for an index that also scores tokens which see at most `index_topk` entries."""
        return LayerMemory(*self[:-1], replace(self.layout, index_topk=0))

    @cached_property
    def cut_partials(self) -> tuple[Tensor, Tensor]:
        """Two flat views of partials: all accumulators; all largest logits and sums."""
        flat, dim = self.partials.view(-1), self.layout.head_dim
        num_accumulators = flat.shape[0] // (dim + 2) * dim
        return flat[:num_accumulators], flat[num_accumulators:]
