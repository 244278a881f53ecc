"""`Capacity`: the sizes of a manager, and their exact bytes before anything is allocated."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsv4.cache.memory.arrays import Int64Array
from dsv4.cache.memory.layout import RunLayout, block_layout, checkpoint_bytes, slot_layout
from dsv4.cache.memory.schema import LayerCacheSchema, build_schemas
from dsv4.checks import check_int
from dsv4.config import CacheConfig
from dsv4.formats import BYTE_ALIGN
from dsv4.kernels.index_scratch import index_scratch_bytes
from dsv4.layer_schedule import AttentionType

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
        """Bytes of the index's workspace; 0 if no token sees more entries than are selected."""
        config = self.config
        if AttentionType.CSA not in {layer.attention_type for layer in config.schedule}:
            return 0
        return index_scratch_bytes(
            config.index_format,
            num_heads=config.index_num_heads,
            dim=config.index_head_dim,
            topk=config.index_topk,
            max_entries=self.max_request_tokens // AttentionType.CSA.ratio,
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
    def rope_bases(self) -> tuple[str, ...]:
        """The RoPE tables that the schedule uses."""
        return tuple(sorted({layer.rope_base for layer in self.config.schedule}))

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

        11 per request, 5 of the row that is always padding, 2 per token, 3 per table update,
        3 per checkpoint.
        """
        rows = 11 * self.max_requests + 5
        noted = 3 * (self.max_table_updates + self.max_forward_checkpoints)
        return rows + 2 * self.max_forward_tokens + noted

    def memory(self) -> dict[str, ComponentBytes]:
        """Count the bytes of every tensor of a manager of these sizes, by component."""
        schemas = build_schemas(self.config)
        align = self.config.page_align
        return {
            **self._block_components(schemas, block_layout(schemas, page_align=align)),
            **self._slot_components(schemas, slot_layout(schemas, page_align=align)),
            "undo_slots": self._slots(self.num_undo_slots, schemas),
            **self._shared_components(),
            "checkpoints": self._checkpoints(schemas),
        }

    def host_memory(self) -> dict[str, ComponentBytes]:
        """Count the bytes of blocks and slots in host memory."""
        schemas = build_schemas(self.config)
        layout = block_layout(schemas, page_align=self.config.page_align)
        payload = layout.num_bytes - layout.padding
        return {
            "host_blocks": self._times(self.host_blocks, payload, layout.num_bytes),
            "host_slots": self._slots(self.host_slots, schemas),
        }

    def _slots(self, count: int, schemas: tuple[LayerCacheSchema, ...]) -> ComponentBytes:
        layout = slot_layout(schemas, page_align=self.config.page_align)
        return self._times(count, layout.num_bytes - layout.padding, layout.num_bytes)

    def _checkpoints(self, schemas: tuple[LayerCacheSchema, ...]) -> ComponentBytes:
        """Count checkpoints: a boundary needs one window of each ring and tail, a slot has more."""
        window = self.config.sliding_window
        tail_rows = [(s, s.tail_buffer_size_b) for s in schemas if s.tail_buffer_size_b]
        payload = sum(window * s.kv_row.row_bytes for s in schemas) + sum(
            (s.tail_bytes + s.index_tail_bytes) * rows // s.tail_rows for s, rows in tail_rows
        )
        return self._times(self.num_checkpoints, payload, checkpoint_bytes(schemas))

    def _block_components(
        self, schemas: tuple[LayerCacheSchema, ...], layout: RunLayout
    ) -> dict[str, ComponentBytes]:
        def total(kind: AttentionType) -> ComponentBytes:
            chosen = [s for s in schemas if s.attention_type is kind]
            payload = sum(s.entries_per_block * s.kv_row.row_bytes for s in chosen)
            return self._times(self.num_blocks, payload, sum(s.page_bytes for s in chosen))

        csa = [s for s in schemas if s.indexer_head_dim]
        key_payload = sum(s.entries_per_block * s.index_row.row_bytes for s in csa)
        key_bytes = sum(s.index_page_bytes for s in csa)
        return {
            "csa_entries": total(AttentionType.CSA),
            "index_keys": self._times(self.num_blocks, key_payload, key_bytes),
            "hca_entries": total(AttentionType.HCA),
            "block_padding": self._times(self.num_blocks, 0, layout.padding),
        }

    def _slot_components(
        self, schemas: tuple[LayerCacheSchema, ...], layout: RunLayout
    ) -> dict[str, ComponentBytes]:
        def tails(kind: AttentionType) -> ComponentBytes:
            size = sum(s.tail_bytes for s in schemas if s.attention_type is kind)
            return self._times(self.max_requests, size, size)

        ring_payload = sum(s.ring_rows * s.kv_row.row_bytes for s in schemas)
        index_tails = sum(s.index_tail_bytes for s in schemas)
        return {
            "window": self._times(
                self.max_requests, ring_payload, sum(s.ring_bytes for s in schemas)
            ),
            "csa_tails": tails(AttentionType.CSA),
            "index_tails": self._times(self.max_requests, index_tails, index_tails),
            "hca_tails": tails(AttentionType.HCA),
            "slot_padding": self._times(self.max_requests, 0, layout.padding),
        }

    def _shared_components(self) -> dict[str, ComponentBytes]:
        row = self.config.kv_row
        tables = self.max_requests * self.max_request_blocks * INT32_BYTES
        rope = len(self.rope_bases) * self.max_request_tokens * self.config.rope_dim * FP32_BYTES
        plan = self.plan_elements * INT32_BYTES
        partials = self.attention_partials * self.partial_elements * FP32_BYTES
        scratch = self.pooling_windows * (self.config.head_dim * FP32_BYTES + INT32_BYTES)
        index_scratch = self.index_scratch_bytes
        return {
            "block_table": ComponentBytes(tables, tables),
            "plan_buffers": ComponentBytes(plan, plan),
            "pooling_scratch": ComponentBytes(scratch, scratch),
            "index_scratch": ComponentBytes(index_scratch, index_scratch),
            "attention_partials": ComponentBytes(partials, partials),
            "window_workspace": ComponentBytes(
                self.workspace_rows * row.row_bytes,
                row.page_bytes(self.workspace_rows, align=BYTE_ALIGN),
            ),
            "rope_tables": ComponentBytes(rope, rope),
            "index_global_scale": ComponentBytes(FP32_BYTES, FP32_BYTES),
        }

    @staticmethod
    def _times(count: int, payload: int, allocated: int) -> ComponentBytes:
        return ComponentBytes(count * payload, count * allocated)
