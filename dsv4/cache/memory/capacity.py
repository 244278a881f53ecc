"""`Capacity`: the sizes of a manager, and their exact bytes before anything is allocated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsv4.cache.memory.arrays import Int64Array
from dsv4.cache.memory.layout import RunLayout, block_layout, checkpoint_bytes, slot_layout
from dsv4.cache.memory.schema import LayerCacheSchema, build_schemas
from dsv4.checks import check_int
from dsv4.config import CacheConfig
from dsv4.formats import BYTE_ALIGN
from dsv4.kernels.index_scratch import (
    DENSE_HEADS,
    DENSE_LIMIT,
    DENSE_WORKS,
    dense_sizes,
    has_dense_rows,
    index_scratch_bytes,
)
from dsv4.layer_schedule import AttentionType
from dsv4.rope import ROW_STEPS

INT32_BYTES = 4
FP32_BYTES = 4
# The room for split attention is the same on every GPU, whatever its launches: parts of 256
# programs with at most 64 heads each, about twice what an H200 runs at once.
HEAD_BLOCK = 64
SPLIT_PROGRAMS = 256


class ComponentBytes(NamedTuple):
    """Bytes of one component: those that carry data, and those allocated."""

    payload: int
    allocated: int


def blocks_for(config: CacheConfig, lengths: Int64Array) -> Int64Array:
    """Count the blocks that requests of these lengths need: those with a closed entry."""
    ratio, block_tokens = config.smallest_ratio, config.block_tokens
    if not ratio:
        return np.zeros_like(lengths)
    compressed = lengths & -ratio  # ratios are powers of two
    blocks: Int64Array = (compressed + (block_tokens - 1)) // block_tokens
    return blocks


def longest_in(config: CacheConfig, num_blocks: int) -> int:
    """Return the most tokens of a request in so many blocks, or of any that the model takes."""
    least = 1 if config.smallest_ratio else 0
    by_blocks = check_int("num_blocks", num_blocks, at_least=least) * config.block_tokens
    return min(config.max_position, by_blocks) if config.smallest_ratio else config.max_position


def count_host_blocks(config: CacheConfig, num_bytes: int) -> int:
    """Count the blocks in so many bytes of host memory for the prefix cache."""
    block_bytes = block_layout(
        build_schemas(config), page_align=config.page_align, at_least=config.least_block_bytes
    ).num_bytes
    return check_int("prefix_bytes", num_bytes, at_least=0) // max(1, block_bytes)


@dataclass(frozen=True)
class Capacity:
    """The sizes a manager is built with.

    Attributes:
        max_requests: Requests open at once, and rows of one forward.
        num_blocks: Blocks of `config.block_tokens` tokens, shared by all requests.
        max_forward_tokens: Tokens of one forward.
        max_request_tokens: Tokens of one request.
        num_checkpoints: Block boundaries at which the prefix cache can resume a request.
        host_blocks, host_slots: Blocks and slots in host memory, for requests that are swapped
            out. Blocks that the prefix cache evicts go there too.
        undo_slots: Copies of fixed state from before a chunk, for forwards that are cancelled.
    """

    config: CacheConfig
    max_requests: int
    num_blocks: int
    max_forward_tokens: int
    max_request_tokens: int
    num_checkpoints: int = 0
    host_blocks: int = 0
    host_slots: int = 0
    undo_slots: int = 1

    def __post_init__(self) -> None:
        for name, least in (
            ("max_requests", 1), ("num_blocks", 0), ("max_forward_tokens", 1),
            ("max_request_tokens", 1), ("num_checkpoints", 0), ("host_blocks", 0),
            ("host_slots", 0), ("undo_slots", 0),
        ):  # fmt: skip
            value = check_int(name, getattr(self, name), at_least=least)
            object.__setattr__(self, name, value)
        if self.max_request_tokens > self.config.max_position:
            raise ValueError(
                f"Invalid max_request_tokens: expected at most {self.config.max_position} "
                f"(max_position), got {self.max_request_tokens}"
            )
        if self.num_checkpoints and not self.config.smallest_ratio:
            raise ValueError(
                "Invalid num_checkpoints: expected 0 for a model without compressed layers, "
                f"got {self.num_checkpoints}"
            )

    @property
    def longest_request(self) -> int:
        """The most tokens of a request that has all blocks for itself."""
        ratio = self.config.smallest_ratio
        if not ratio:
            return self.max_request_tokens
        by_blocks = self.num_blocks * self.config.block_tokens + ratio - 1
        return min(self.max_request_tokens, by_blocks)

    @property
    def max_request_blocks(self) -> int:
        """Columns of the block table."""
        if not self.config.smallest_ratio:
            return 0
        return -(-self.max_request_tokens // self.config.block_tokens)

    @property
    def table_columns(self) -> int:
        """Columns of the block table, and of the one by rank where the context is split."""
        num_ranks = self.config.num_ranks
        return self.max_request_blocks * (1 if num_ranks == 1 else 1 + num_ranks)

    @property
    def context_rows(self) -> int:
        """Rows of HCA entries that a forward lists where the context is split."""
        config = self.config
        if config.num_ranks == 1 or AttentionType.HCA.ratio not in config.compress_ratios:
            return 0
        return self.max_forward_tokens * self.most_entries(AttentionType.HCA.ratio)

    def most_entries(self, ratio: int) -> int:
        """Count the entries of the longest request that a rank stores for a layer of that ratio."""
        return self.config.own_entries(self.max_request_tokens // ratio, ratio, rank=0)

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of one request in a step.

        Its window ring still serves all of them, and has the rows of the length before it.
        """
        return self.config.drafts_per_step + 1

    @property
    def num_undo_slots(self) -> int:
        """Copies of fixed state that chunks of one forward can need; 0 if none is long enough."""
        max_chunks = self.max_forward_tokens // (self.max_step_tokens + 1)
        return min(self.undo_slots, self.max_requests, max_chunks)

    @property
    def workspace_rows(self) -> int:
        """Window rows of the largest forward with chunks: requests with more tokens than a step."""
        tokens = self.max_forward_tokens
        if tokens <= self.max_step_tokens:
            return 0
        max_chunks = min(self.max_requests, tokens // (self.max_step_tokens + 1))
        return tokens + max_chunks * (self.config.sliding_window - 1)

    @property
    def pooling_windows(self) -> int:
        """HCA windows that can close in one forward."""
        return self.max_requests + self.max_forward_tokens // AttentionType.HCA.ratio

    @property
    def index_scratch_bytes(self) -> int:
        """Bytes of the scratch that the index uses, and after it attention of chunks.

        Attention takes as many as the longest request's rows need, up to DENSE_LIMIT.
        """
        return max(self.index_bytes, min(self.dense_bytes, DENSE_LIMIT))

    @property
    def dense_bytes(self) -> int:
        """Bytes of the longest request's rows, dense; 0 if attention never makes them."""
        config, ratios = self.config, [layer.ratio for layer in self.config.schedule if layer.ratio]
        is_made = has_dense_rows(
            config.kv_format, head_dim=config.head_dim, rope_dim=config.rope_dim,
            num_heads=config.num_query_heads,
        )  # fmt: skip
        num_works = self.max_forward_tokens * config.num_query_heads // DENSE_HEADS
        if not is_made or not self.workspace_rows or num_works < DENSE_WORKS:
            return 0
        entries = self.most_entries(min(ratios)) if ratios else 0
        return dense_sizes(
            num_tokens=self.max_forward_tokens, num_chunks=1, window=config.sliding_window,
            max_entries=entries, num_blocks=self.num_blocks, num_heads=config.num_query_heads,
            entries_per_block=config.entries_per_block(min(ratios, default=0)) or 1,
            dim=config.head_dim,
        ).num_bytes  # fmt: skip

    @property
    def index_bytes(self) -> int:
        """Bytes that the index needs; 0 if no token sees more entries than are selected."""
        config, ratio = self.config, self.config.smallest_ratio
        if AttentionType.CSA not in {layer.attention_type for layer in config.schedule}:
            return 0
        if self.max_request_tokens // ratio <= config.index_topk:
            return 0
        return index_scratch_bytes(
            config.index_format,
            num_heads=config.index_num_heads,
            dim=config.index_head_dim,
            topk=config.index_topk,
            max_entries=self.most_entries(ratio),
            max_tokens=self.max_forward_tokens,
        )

    @property
    def attention_partials(self) -> int:
        """Partial results that attention, split over rows, leaves to be combined."""
        return max(1, SPLIT_PROGRAMS // -(-self.config.num_query_heads // HEAD_BLOCK))

    @property
    def partial_elements(self) -> int:
        """fp32 elements of a partial result: accumulators, largest logits and sums."""
        return self.config.num_query_heads * (self.config.head_dim + 2)

    @property
    def max_table_updates(self) -> int:
        """The most elements of the block table that one upload of a plan brings."""
        return self.max_requests + self.max_forward_tokens // self.config.block_tokens + 1

    @property
    def max_forward_checkpoints(self) -> int:
        """Block boundaries inside chunks that one forward can checkpoint."""
        boundaries = self.max_requests + self.max_forward_tokens // self.config.block_tokens
        return min(self.num_checkpoints, boundaries)

    @property
    def plan_elements(self) -> int:
        """int32 elements of a plan's buffers.

        14 per request, 5 of the row that is always padding, 2 per token, 3 per table update,
        3 per checkpoint.
        """
        rows = 14 * self.max_requests + 5
        noted = 3 * (self.max_table_updates + self.max_forward_checkpoints)
        return rows + 2 * self.max_forward_tokens + noted

    def memory(self, part_of: Sequence[int] | None = None) -> dict[str, ComponentBytes]:
        """Count the bytes of every tensor of a manager of these sizes, by component.

        Args:
            part_of: The device of each layer, numbered from 0; by default there is one.
        """
        schemas, parts = build_schemas(self.config), part_of or (0,) * self.config.num_layers
        counted = [
            self._memory_of(tuple(s for s, own in zip(schemas, parts, strict=True) if own == part))
            for part in range(max(parts, default=0) + 1)
        ]
        return {
            name: ComponentBytes(*map(sum, zip(*(each[name] for each in counted), strict=True)))
            for name in counted[0]
        }

    def _memory_of(self, schemas: tuple[LayerCacheSchema, ...]) -> dict[str, ComponentBytes]:
        """Count the bytes on the device of some layers."""
        config = self.config
        csa = [s for s in schemas if s.attention_type is AttentionType.CSA]
        hca = [s for s in schemas if s.attention_type is AttentionType.HCA]
        blocks = self._block_layout(schemas)
        slots = slot_layout(schemas, page_align=config.page_align)
        num_blocks, max_requests, row = self.num_blocks, self.max_requests, config.kv_row
        owners = [s for s in csa if s.layer.owns_entries]

        def entries(layers: list[LayerCacheSchema]) -> ComponentBytes:
            rows = ((s.entries_per_block * s.entry_row.row_bytes, s.page_bytes) for s in layers)
            return _times(num_blocks, rows)

        def exact(count: int, sizes: Iterable[int]) -> ComponentBytes:
            return _times(count, ((size, size) for size in sizes))

        keys = ((s.entries_per_block * s.index_row.row_bytes, s.index_page_bytes) for s in owners)
        rings = ((s.ring_rows * row.row_bytes, s.ring_bytes) for s in schemas)
        workspace = row.page_bytes(self.workspace_rows, align=BYTE_ALIGN)
        pooled = config.head_dim * FP32_BYTES + INT32_BYTES
        rope_row, num_tokens = config.rope_dim * FP32_BYTES, self.max_forward_tokens
        partials = self.attention_partials * self.partial_elements * FP32_BYTES
        rows = {"context_rows": exact(self.context_rows, [INT32_BYTES])}
        return {
            "csa_entries": entries(owners),
            "index_keys": _times(num_blocks, keys),
            "hca_entries": entries(hca),
            "block_padding": _times(num_blocks, [(0, blocks.padding)]),
            "window": _times(max_requests, rings),
            "csa_tails": exact(max_requests, (s.tail_bytes for s in csa)),
            "index_tails": exact(max_requests, (s.index_tail_bytes for s in csa)),
            "hca_tails": exact(max_requests, (s.tail_bytes + s.sum_bytes for s in hca)),
            "slot_padding": _times(max_requests, [(0, slots.padding)]),
            "undo_slots": _runs(self.num_undo_slots, slots),
            "block_table": exact(max_requests, [self.table_columns * INT32_BYTES]),
            "plan_buffers": exact(self.plan_elements, [INT32_BYTES]),
            "pooling_scratch": exact(self.pooling_windows, [pooled]),
            "index_scratch": exact(1, [self.index_scratch_bytes]),
            "attention_partials": exact(1, [partials]),
            "window_workspace": ComponentBytes(self.workspace_rows * row.row_bytes, workspace),
            "rope_rows": exact(len(ROW_STEPS), [num_tokens * rope_row, rope_row // 2]),
            "index_global_scale": exact(1, [FP32_BYTES]),
            "checkpoints": self._checkpoints(schemas),
            **(rows if config.num_ranks > 1 else {}),
        }

    def host_memory(self) -> dict[str, ComponentBytes]:
        """Count the bytes of blocks and slots in host memory."""
        schemas, align = build_schemas(self.config), self.config.page_align
        return {
            "host_blocks": _runs(self.host_blocks, self._block_layout(schemas)),
            "host_slots": _runs(self.host_slots, slot_layout(schemas, page_align=align)),
        }

    def _block_layout(self, schemas: tuple[LayerCacheSchema, ...]) -> RunLayout:
        config = self.config
        return block_layout(
            schemas, page_align=config.page_align, at_least=config.least_block_bytes
        )

    def _checkpoints(self, schemas: tuple[LayerCacheSchema, ...]) -> ComponentBytes:
        """Count checkpoints: a boundary needs one window of each ring and tail, a slot has more."""
        window = self.config.sliding_window
        tail_rows = [(s, s.tail_buffer_size_b) for s in schemas if s.tail_buffer_size_b]
        payload = sum(window * s.kv_row.row_bytes for s in schemas) + sum(
            (s.tail_bytes + s.index_tail_bytes) * rows // s.tail_rows for s, rows in tail_rows
        )
        return _times(self.num_checkpoints, [(payload, checkpoint_bytes(schemas))])


def _times(count: int, sizes: Iterable[tuple[int, int]]) -> ComponentBytes:
    """Count `count` times the sum of some sizes: payload and allocated bytes."""
    payload, allocated = map(sum, zip((0, 0), *sizes, strict=True))
    return ComponentBytes(count * payload, count * allocated)


def _runs(count: int, layout: RunLayout) -> ComponentBytes:
    return _times(count, [(layout.num_bytes - layout.padding, layout.num_bytes)])
