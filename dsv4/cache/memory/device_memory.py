"""`DeviceMemory`: allocates every tensor of a manager, and tells each layer where its rows lie."""

import torch

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.checkpoints import CheckpointPool
from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.paged_cache import PagedKVPool
from dsv4.cache.memory.plan_buffers import PlanBuffers
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.cache.memory.staging import staging_for
from dsv4.cache.memory.state_cache import StateCachePool
from dsv4.formats import BYTE_ALIGN
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.rope import build_rope_table


class DeviceMemory:
    """All tensors of a manager, allocated once.

    Args:
        capacity: Sizes of every tensor.
        schemas: One per layer.
        host_block_table: `[max_requests, max_blocks]`; on the CPU the device's is the same memory.

    Attributes:
        layout: Offsets of every layer's rows.
        paged, state, checkpoints: The pools of blocks, of slots and of checkpoints.
        block_table: `[max_requests, max_blocks]` int32, -1 where there is none.
        plan_buffers: The arrays of the current plan.
        workspace: `[1, bytes]` uint8, window rows of chunks.
        pooled, arrivals, index_scratch, partials: Scratch of kernels, see `LayerStorages`.
        rope_tables: The RoPE tables in use, by the name of their base.
        memories: One `LayerMemory` per layer.
    """

    def __init__(
        self,
        capacity: Capacity,
        schemas: tuple[LayerCacheSchema, ...],
        host_block_table: IntArray,
        device: torch.device,
    ) -> None:
        config, rows = capacity.config, capacity.workspace_rows
        self.layout = cache_layout(config, schemas, workspace_rows=rows)
        self.paged = PagedKVPool(
            self.layout, num_blocks=capacity.num_blocks,
            index_global_scale=config.index_global_scale, device=device,
        )  # fmt: skip
        self.state = StateCachePool(self.layout, max_requests=capacity.max_requests, device=device)
        self.checkpoints = CheckpointPool(
            schemas, num_checkpoints=capacity.num_checkpoints, device=device
        )
        staging, table = staging_for(device), torch.from_numpy(host_block_table)
        self.block_table = table if staging is None else torch.full_like(table, -1, device=device)
        self.plan_buffers = PlanBuffers(
            max_requests=capacity.max_requests, max_tokens=capacity.max_forward_tokens,
            max_table_updates=capacity.max_table_updates,
            max_checkpoints=capacity.max_forward_checkpoints,
            block_table=self.block_table, blocks=self.paged.storage, staging=staging,
        )  # fmt: skip
        workspace_bytes = config.kv_row.page_bytes(rows, align=BYTE_ALIGN)
        self.workspace = torch.zeros(1, workspace_bytes, dtype=torch.uint8, device=device)
        self.pooled = torch.zeros(capacity.pooling_windows, config.head_dim, device=device)
        self.arrivals = torch.zeros(capacity.pooling_windows, dtype=torch.int32, device=device)
        scratch_bytes = capacity.index_scratch_bytes
        self.index_scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        partials_shape = (capacity.attention_partials, capacity.partial_elements)
        self.partials = torch.zeros(partials_shape, device=device)
        self.rope_tables = {
            base: build_rope_table(
                config, base, num_positions=capacity.max_request_tokens, device=device
            )
            for base in capacity.rope_bases
        }
        has_scale = config.index_global_scale is not None
        storages = (
            self.state.storage, self.paged.storage, self.workspace, self.pooled,
            self.arrivals, self.index_scratch, self.partials,
            self.paged.indexer_global_scale if has_scale else None,
        )  # fmt: skip
        ropes = [self.rope_tables[layer.rope_base] for layer in config.schedule]
        self.memories = tuple(
            LayerMemory(*storages, rope.cos, rope.sin, layout)
            for rope, layout in zip(ropes, self.layout.layers, strict=True)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        rope = {
            f"rope_{base}_{name}": getattr(table, name)
            for base, table in self.rope_tables.items()
            for name in ("cos", "sin")
        }
        return {
            "blocks": self.paged.storage,
            "slots": self.state.storage,
            "index_global_scale": self.paged.indexer_global_scale,
            "block_table": self.block_table,
            "plan_buffers": self.plan_buffers.packed,
            "pooled": self.pooled,
            "arrivals": self.arrivals,
            "index_scratch": self.index_scratch,
            "partials": self.partials,
            "window_workspace": self.workspace,
            "checkpoints": self.checkpoints.storage,
            **rope,
        }
