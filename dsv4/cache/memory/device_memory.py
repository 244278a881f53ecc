"""`DeviceMemory`: allocates a manager's tensors on a device, and tells layers where rows lie."""

from collections.abc import Mapping
from functools import partial

import torch

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.layout import CacheLayout, byte_rows
from dsv4.cache.memory.paged_cache import PagedKVPool
from dsv4.cache.memory.plan_buffers import PlanBuffers
from dsv4.cache.memory.staging import staging_for
from dsv4.cache.memory.state_cache import StateCachePool
from dsv4.formats import BYTE_ALIGN
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.rope import ROW_STEPS, row_frequencies

SCRATCH = ("pooled", "arrivals", "index_scratch", "partials", "frequencies", "rope_rows")


class DeviceMemory:
    """All tensors of a manager on one device, allocated once.

    Args:
        capacity: Sizes of every tensor.
        layout: Offsets of every layer's rows.
        host_block_table: `[max_requests, max_blocks]`; on the CPU the device's is the same memory.
        storage: The caller's memory for blocks, slots, checkpoints or undo_slots.
        checkpoint_bytes: Bytes of one checkpoint.
        first: The memory on the manager's first device, which plans are made in.

    Attributes:
        device: The device.
        layout: Offsets of every layer's rows.
        paged, state: The pools of blocks and of slots.
        checkpoints: `[num_checkpoints, bytes]` uint8, each the front of a slot.
        undo: `[undo_slots, slot_bytes]` uint8, slots as they were before a chunk.
        block_table: `[max_requests, max_blocks]` int32, -1 where there is none.
        rank_table: `[max_requests, max_blocks × ranks]` int32: each block is one of every rank of a
            split context, -1 where it is another's. With one rank it is the block table.
        context_rows: `[rows]` int32, HCA rows that the current plan's tokens list on a rank.
        plan_buffers: The arrays of the current plan.
        memories: One `LayerMemory` per layer, with workspaces and RoPE rows that all of them share.
    """

    def __init__(
        self,
        capacity: Capacity,
        layout: CacheLayout,
        host_block_table: IntArray,
        device: torch.device,
        storage: Mapping[str, torch.Tensor] | None = None,
        *,
        checkpoint_bytes: int = 0,
        first: "DeviceMemory | None" = None,
    ) -> None:
        given = dict(storage or {})
        unknown = set(given) - {"blocks", "slots", "checkpoints", "undo_slots"}
        if unknown:
            raise ValueError(
                "Invalid storage: expected some of blocks, slots, checkpoints and undo_slots, "
                f"got {sorted(unknown)}"
            )
        self._given, self.device, self.layout = frozenset(given), device, layout
        config = capacity.config
        self.paged = PagedKVPool(
            layout, num_blocks=capacity.num_blocks, device=device, storage=given.get("blocks"),
            index_global_scale=config.index_global_scale,
        )  # fmt: skip
        self.state = StateCachePool(
            layout, max_requests=capacity.max_requests, device=device, storage=given.get("slots"),
        )  # fmt: skip
        self.checkpoints = byte_rows(
            "checkpoints", capacity.num_checkpoints, checkpoint_bytes, device,
            given.get("checkpoints"),
        )  # fmt: skip
        self.undo = byte_rows(
            "undo_slots", capacity.num_undo_slots, layout.slots.num_bytes, device,
            given.get("undo_slots"),
        )  # fmt: skip
        staging, table = staging_for(device), torch.from_numpy(host_block_table)
        self.block_table = table if staging is None else torch.full_like(table, -1, device=device)
        self.rank_table = self.block_table
        if config.num_ranks > 1:
            columns = self.block_table.shape[1] * config.num_ranks
            self.rank_table = self.block_table.new_full((capacity.max_requests, columns), -1)
        self.context_rows = torch.empty(capacity.context_rows, dtype=torch.int32, device=device)
        self.plan_buffers: PlanBuffers = PlanBuffers(
            capacity, self.block_table, self.rank_table, self.paged.storage, staging,
            first=None if first is None else first.plan_buffers,
        )  # fmt: skip
        zeros, windows = partial(torch.zeros, device=device), capacity.pooling_windows
        workspace_bytes = config.kv_row.page_bytes(capacity.workspace_rows, align=BYTE_ALIGN)
        rope_shape = (len(ROW_STEPS), 2, capacity.max_forward_tokens, config.rope_dim // 2)
        has_scale = config.index_global_scale is not None
        memory = LayerMemory(
            slots=self.state.storage,
            blocks=self.paged.storage,
            workspace=zeros(1, workspace_bytes, dtype=torch.uint8),
            pooled=zeros(windows, config.head_dim),
            arrivals=zeros(windows, dtype=torch.int32),
            index_scratch=torch.empty(
                capacity.index_scratch_bytes, dtype=torch.uint8, device=device
            ),
            partials=zeros(capacity.attention_partials, capacity.partial_elements),
            global_scale=self.paged.indexer_global_scale if has_scale else None,
            frequencies=row_frequencies(config).to(device),
            rope_rows=zeros(rope_shape),
            layout=layout.layers[0],
        )
        self.memories = tuple(LayerMemory(*memory[:-1], layer) for layer in layout.layers)

    @property
    def _pools(self) -> dict[str, torch.Tensor]:
        """The tensors that hold requests."""
        names = ("blocks", "slots", "checkpoints", "undo_slots")
        return {name: self.tensors()[name] for name in names if name not in self._given}

    def release(self) -> None:
        """Give the memory of the pools back; their tensors keep their shapes, without memory."""
        for tensor in self._pools.values():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take memory for the pools again, zeroed; its addresses may be others."""
        for tensor in self._pools.values():
            if not tensor.untyped_storage().nbytes():
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        memory = self.memories[0]
        of_rank = {"rank_table": self.rank_table, "context_rows": self.context_rows}
        return {
            "blocks": self.paged.storage,
            "slots": self.state.storage,
            "undo_slots": self.undo,
            "index_global_scale": self.paged.indexer_global_scale,
            "block_table": self.block_table,
            "plan_buffers": self.plan_buffers.packed,
            "window_workspace": memory.workspace,
            "checkpoints": self.checkpoints,
            **{name: getattr(memory, name) for name in SCRATCH},
            **({} if self.rank_table is self.block_table else of_rank),
        }
