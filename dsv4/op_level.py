"""The op level: a layer's steps on the caller's own tensors, block table and slot map.

It is for engines that keep their own records of requests. Nothing here checks a plan, owns a block
or keeps a length: what a `KVCacheManager` refuses, an op does.
"""

import torch
from torch import Tensor

from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.capacity import Capacity, blocks_for
from dsv4.cache.memory.device_memory import DeviceMemory
from dsv4.cache.memory.layout import CacheLayout, cache_layout
from dsv4.cache.memory.schema import build_schemas
from dsv4.kernels.contracts import LayerWrites, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.ops import (
    attend,
    gather_all_compressed_kv,
    gather_compressed_kv,
    gather_swa_kv,
    make_rope,
    select_entries,
    write_layer,
)

__all__ = [
    "BlockAllocator",
    "CacheLayout",
    "Capacity",
    "LayerMemory",
    "LayerWrites",
    "TokenMap",
    "attend",
    "blocks_for",
    "gather_all_compressed_kv",
    "gather_compressed_kv",
    "gather_swa_kv",
    "layer_memories",
    "layout_of",
    "make_rope",
    "select_entries",
    "write_layer",
]


def layout_of(capacity: Capacity) -> CacheLayout:
    """Return the layout of blocks and slots: `blocks.num_bytes` and `slots.num_bytes` of each."""
    return cache_layout(
        capacity.config, build_schemas(capacity.config), workspace_rows=capacity.workspace_rows
    )


def layer_memories(capacity: Capacity, *, blocks: Tensor, slots: Tensor) -> tuple[LayerMemory, ...]:
    """Return the memory of each layer, on the caller's blocks and slots.

    Workspaces and RoPE rows are allocated on the same device, once for all layers. Layers that
    share them must run one after the other, `make_rope` before them. In V4.1 a layer that makes no
    entries has the pages of its kv source.

    Args:
        capacity: The sizes; its checkpoints, host memory and undo slots are not used.
        blocks: `[num_blocks, block_bytes]` uint8, contiguous.
        slots: `[max_requests, slot_bytes]` uint8, contiguous, on the same device.
    """
    no_table = torch.empty(0, 0, dtype=torch.int32).numpy()
    given = {"blocks": blocks, "slots": slots}
    return DeviceMemory(capacity, layout_of(capacity), no_table, blocks.device, given).memories
