"""`KVCacheManager`: owns the pools, the block table and the request slots."""

import operator
import os

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.cache.block_allocator import BlockAllocator
from dsv4.cache.capacity import Capacity, ComponentBytes, blocks_for
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.layout import block_layout, layer_layouts, slot_layout
from dsv4.cache.paged_cache import PagedKVPool
from dsv4.cache.plan import ForwardPlan, PlanBuffers
from dsv4.cache.saved_request import copy_request, read_saved, write_saved
from dsv4.cache.schema import build_schemas
from dsv4.cache.staging import IntArray, staging_for
from dsv4.cache.state_cache import StateCachePool
from dsv4.config import CacheConfig
from dsv4.errors import IntegrityError, NoFreeSlotError, TornForwardError
from dsv4.formats import BYTE_ALIGN
from dsv4.kernels import LayerMemory, check_backend, default_backend
from dsv4.kernels.peers.limits import check_attention_backend, check_index_backend
from dsv4.model.rope import build_rope_table


class KVCacheManager:
    """The cache of one model (or of one rank's layers) for up to `max_requests` requests.

    Args:
        config: Geometry, formats and block size.
        max_requests: Requests open at once, and the most rows of one forward.
        num_blocks: Blocks of `config.block_tokens` tokens, shared by all requests.
        device: Where the pools live.
        backend: Which kernels run: `triton`, the default on a GPU, or `reference`.
        attention_backend: Which kernels attend, by default those of `backend`; `flashmla` reads
            `fp8` rows in place.
        index_backend: Which kernels choose entries, by default those of `backend`; `deepgemm`
            scores `fp8` keys in place.
        max_forward_tokens: The most tokens of one forward.
        max_request_tokens: The longest request; by default all blocks', or the model's limit.
        batch_invariant: With `triton`, a request's attention has the same bits whatever it is
            batched with. Small batches are slower for it.

    Attributes:
        schedule: One `LayerSpec` per layer.
        schemas: One `LayerCacheSchema` per layer.
        lengths: `[max_requests]`, tokens of each slot.
        is_open: `[max_requests]`, slots in use.
        is_torn: `[max_requests]`, slots whose last forward did not write every layer.
        rollback_floor: `[max_requests]`, the shortest length, beside 0, that `truncate` can give
            back: `drafts_per_step` below the longest a request has had.
        block_table: `[max_requests, max_blocks]` int32 on the device, -1 where there is none.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_requests: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        backend: str | None = None,
        attention_backend: str | None = None,
        index_backend: str | None = None,
        max_forward_tokens: int = 8192,
        max_request_tokens: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if not isinstance(batch_invariant, bool):
            raise TypeError(
                f"Invalid batch_invariant: expected True or False, got {batch_invariant!r}"
            )
        if max_request_tokens is None:
            by_blocks = num_blocks * config.block_tokens
            has_blocks = config.smallest_ratio > 0
            max_request_tokens = min(config.max_position, by_blocks if has_blocks else 1 << 62)
        self.config = config
        self.device = torch.device(device)
        self.backend = default_backend(self.device) if backend is None else backend
        self.batch_invariant = batch_invariant
        check_backend(self.backend, self.device)
        if attention_backend is not None:
            check_attention_backend(
                attention_backend, config, self.device, batch_invariant=batch_invariant
            )
        if index_backend is not None:
            check_index_backend(index_backend, config, self.device)
        self._attention_backend, self._index_backend = attention_backend, index_backend
        self.capacity = Capacity(
            config, max_requests, num_blocks, max_forward_tokens, max_request_tokens
        )
        self.schedule = config.schedule
        self.schemas = build_schemas(config)
        # What a whole forward writes: every layer's window, every compressed layer's entries.
        self.num_parts = config.num_layers + sum(layer.ratio > 0 for layer in self.schedule)
        self._allocate()

        self.allocator = BlockAllocator(num_blocks)
        self.lengths: NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
        self.num_slot_blocks: NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
        self.is_open: NDArray[np.bool_] = np.zeros(max_requests, dtype=np.bool_)
        self.is_torn: NDArray[np.bool_] = np.zeros(max_requests, dtype=np.bool_)
        self.rollback_floor: NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._plan: ForwardPlan | None = None

    def _allocate(self) -> None:
        config, capacity, device = self.config, self.capacity, self.device
        align = config.page_align
        self.paged = PagedKVPool(
            self.schemas, block_layout(self.schemas, page_align=align),
            num_blocks=capacity.num_blocks,
            index_global_scale=config.index_global_scale,
            device=device,
        )  # fmt: skip
        self.state = StateCachePool(
            self.schemas, slot_layout(self.schemas, page_align=align),
            max_requests=capacity.max_requests, device=device,
        )  # fmt: skip
        shape = (capacity.max_requests, capacity.max_request_blocks)
        self.host_block_table: IntArray = np.full(shape, -1, dtype=np.int32)
        staging = staging_for(device)
        table = torch.from_numpy(self.host_block_table)
        self.block_table = table if staging is None else torch.full_like(table, -1, device=device)
        self.plan_buffers = PlanBuffers(
            max_requests=capacity.max_requests, max_tokens=capacity.max_forward_tokens,
            max_table_updates=capacity.max_table_updates,
            host_table=self.host_block_table, table=self.block_table,
            blocks=self.paged.storage, staging=staging,
        )  # fmt: skip
        rows = capacity.workspace_rows
        workspace_bytes = config.kv_row.page_bytes(rows, align=BYTE_ALIGN)
        self.workspace_storage = torch.zeros(1, workspace_bytes, dtype=torch.uint8, device=device)
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
            self.state.storage, self.paged.storage, self.workspace_storage, self.pooled,
            self.arrivals, self.index_scratch, self.partials,
            self.paged.indexer_global_scale if has_scale else None,
        )  # fmt: skip
        layouts = layer_layouts(
            config, self.schemas, self.state.layout, self.paged.layout, workspace_rows=rows
        )
        self.memories = tuple(LayerMemory(*storages, layout) for layout in layouts)

    @property
    def attention_backend(self) -> str:
        return self._attention_backend or self.backend

    @property
    def index_backend(self) -> str:
        return self._index_backend or self.backend

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def open_request(self) -> int:
        """Open an empty request and return its slot."""
        self._check_free_slot()
        slot = self._free_slots.pop()
        self.is_open[slot] = True
        return slot

    def fork(self, slot: int) -> int:
        """Open a second request with the same tokens and return its slot.

        Both share the full blocks, until one of them writes to such a block and gets a copy of
        its own. Fixed state and the block that is still being filled are copied.

        Raises:
            NoFreeSlotError: Every slot is open. Nothing was changed.
            OutOfBlocksError: There is no block for the copy. Nothing was changed.
            TornForwardError: The last forward of the request did not write every layer.
        """
        self.check_open(slot)
        self.check_whole(np.array([slot]))
        self._check_free_slot()
        num_blocks = int(self.num_slot_blocks[slot])
        num_full = int(self.lengths[slot]) // self.config.block_tokens
        copies = self.allocator.acquire(max(num_blocks - num_full, 0))
        shared, copied = np.split(self.host_block_table[slot, :num_blocks].copy(), [num_full])
        self.allocator.share(shared)
        fork = self.open_request()
        self._set_request(fork, np.concatenate((shared, copies)), int(self.lengths[slot]))
        self.rollback_floor[fork] = self.rollback_floor[slot]
        self.state.storage[fork].copy_(self.state.storage[slot])
        for source, target in zip(copied, copies, strict=True):
            self.paged.storage[target].copy_(self.paged.storage[source])
        return fork

    def save_request(self, slot: int, path: str | os.PathLike[str]) -> None:
        """Write a request to a safetensors file, whole or not at all; waits for the device."""
        self.check_open(slot)
        self.check_whole(np.array([slot]))
        blocks = self.host_block_table[slot, : self.num_slot_blocks[slot]]
        saved = copy_request(
            self.config, self.schemas, self.state, self.paged,
            slot=slot, blocks=torch.from_numpy(blocks).long(), length=int(self.lengths[slot]),
        )  # fmt: skip
        write_saved(path, saved, self.config)

    def load_request(self, path: str | os.PathLike[str]) -> int:
        """Open a request as `save_request` wrote it and return its slot.

        It goes on as the saved one would have, but cannot be truncated below its length.

        Raises:
            ValueError: The file is damaged, or of a cache whose bytes mean something else.
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        saved = read_saved(path, self.config, state=self.state, paged=self.paged)
        num_blocks = int(self.blocks_for(np.array([saved.length]))[0])
        if not 0 <= saved.rollback_floor <= saved.length or len(saved.blocks) != num_blocks:
            raise ValueError(
                f"Invalid saved request {os.fspath(path)}: expected {num_blocks} blocks and a "
                f"floor from 0 to {saved.length}, got {len(saved.blocks)} and "
                f"{saved.rollback_floor}"
            )
        if saved.length > self.capacity.max_request_tokens:
            raise ValueError(
                f"Too many tokens in one request: expected at most "
                f"{self.capacity.max_request_tokens}, got {saved.length} in {os.fspath(path)}"
            )
        self._check_free_slot()
        blocks = self.allocator.acquire(len(saved.blocks))
        slot = self.open_request()
        self._set_request(slot, blocks, saved.length)
        self.rollback_floor[slot] = saved.rollback_floor
        self.state.storage[slot] = saved.slot.to(self.device)
        self.paged.storage[torch.from_numpy(blocks).long()] = saved.blocks.to(self.device)
        return slot

    def _set_request(self, slot: int, blocks: IntArray, length: int) -> None:
        """Make an empty slot a request of that length in these blocks."""
        self.set_blocks(slot, np.arange(len(blocks)), blocks)
        self.num_slot_blocks[slot] = len(blocks)
        self.lengths[slot] = length

    def free_request(self, slot: int) -> None:
        """Close a request and give its blocks back."""
        self.check_open(slot)
        self._retire_plan_of(slot)
        self._shorten(slot, 0)
        self.is_open[slot] = False
        self._free_slots.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the last tokens of a request, so that `length` remain.

        Any length from `rollback_floor[slot]` up can be had at any time and at no cost: no row
        that it needs has been overwritten. So can 0, after which the request is as good as new.
        A plan that names the slot is over.

        Raises:
            ValueError: The request is shorter, or `length` lies below the floor.
            TornForwardError: The last forward did not write every layer, and `length` is not 0.
        """
        self.check_open(slot)
        length = operator.index(length)
        longest, floor = int(self.lengths[slot]), int(self.rollback_floor[slot])
        if not 0 <= length <= longest:
            raise ValueError(
                f"Invalid length: expected 0 to {longest}, the length of slot {slot}, got {length}"
            )
        if length:
            self.check_whole(np.array([slot]))
        if 0 < length < floor:
            raise ValueError(
                f"Invalid length: slot {slot} can have 0 or {floor} to {longest}, got {length}: "
                f"rows it needs may be overwritten; the nearest possible lengths are 0 and {floor}"
            )
        if length < longest:
            self._retire_plan_of(slot)
            self._shorten(slot, length)

    def _shorten(self, slot: int, length: int) -> None:
        """Give back the blocks that `length` tokens don't need; with 0, the slot is like new."""
        kept = int(self.blocks_for(np.array([length]))[0])
        columns = np.arange(kept, self.num_slot_blocks[slot])
        self.allocator.release(self.host_block_table[slot, columns])
        self.set_blocks(slot, columns, -1)
        self.num_slot_blocks[slot] = kept
        self.lengths[slot] = length
        if not length:
            self.rollback_floor[slot] = 0
            self.is_torn[slot] = False

    def acquire(self, layer_idx: int, plan: ForwardPlan) -> LayerCacheHandle:
        """The handle of one layer for the forward that `plan` describes."""
        if plan.owner is not self:
            raise ValueError(
                "Invalid plan: expected one that prepare_forward made for this manager, "
                "got another manager's"
            )
        plan.check_current()
        if not 0 <= layer_idx < len(self.schedule):
            raise ValueError(
                f"Invalid layer_idx: expected 0 to {len(self.schedule) - 1}, got {layer_idx}"
            )
        layer = self.schedule[layer_idx]
        return LayerCacheHandle(
            config=self.config,
            layer=layer,
            schema=self.schemas[layer_idx],
            paged=self.paged.layer(layer_idx),
            state=self.state.layer(layer_idx),
            memory=self.memories[layer_idx],
            rope=self.rope_tables[layer.rope_base],
            plan=plan,
            progress=plan.layer(layer_idx),
            backend=self.backend,
            attention_backend=self.attention_backend,
            index_backend=self.index_backend,
            batch_invariant=self.batch_invariant,
        )

    def blocks_for(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks that requests of these lengths need: those holding a closed entry."""
        return blocks_for(self.config, lengths)

    def set_blocks(
        self,
        slots: int | NDArray[np.int64],
        columns: NDArray[np.int64],
        ids: IntArray | int,
    ) -> None:
        """Write block ids to the block table; a device of its own gets them with the next plan."""
        self.host_block_table[slots, columns] = ids
        self.plan_buffers.note_blocks(slots * self.capacity.max_request_blocks + columns)

    def replace_blocks(
        self, slots: NDArray[np.int64], columns: NDArray[np.int64], ids: IntArray
    ) -> None:
        """Give up blocks of requests for copies of them, made when the next plan leaves."""
        sources = self.host_block_table[slots, columns]
        self.plan_buffers.note_copies(sources, ids)
        self.set_blocks(slots, columns, ids)
        self.allocator.release(sources)

    def start_plan(self, plan: ForwardPlan) -> None:
        """Make `plan` the current one; the one before it is over."""
        self._retire_plan()
        self._plan = plan

    @property
    def has_open_forward(self) -> bool:
        """The current plan adds tokens, and not every layer has been written."""
        plan = self._plan
        return plan is not None and not plan.is_complete and plan.written_slots.size > 0

    def _retire_plan_of(self, slot: int) -> None:
        """End the current plan if it names the slot."""
        if self._plan is not None and slot in self._plan.request_slots:
            self._retire_plan()

    def _retire_plan(self) -> None:
        if self._plan is None:
            return
        if not self._plan.is_complete:
            slots = self._plan.written_slots
            self.is_torn[slots] = self.is_open[slots]
        self._plan.retire()
        self._plan = None

    def find_torn(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `slots` have a forward behind them that did not write every layer."""
        if self._plan is None or self._plan.is_complete:
            return self.is_torn[slots]
        return self.is_torn[slots] | np.isin(slots, self._plan.written_slots)

    def _check_free_slot(self) -> None:
        if not self._free_slots:
            raise NoFreeSlotError(
                f"No free slot: all {self.capacity.max_requests} requests are open"
            )

    def check_whole(self, slots: NDArray[np.int64]) -> None:
        """Refuse slots whose last forward did not write every layer."""
        is_torn = self.find_torn(slots)
        if is_torn.any():
            raise TornForwardError(
                f"The last forward of slot {slots[is_torn][0]} did not write every layer; the slot "
                "can only be freed or truncated to 0"
            )

    def check_open(self, slot: int) -> None:
        """Refuse a slot that is not open."""
        if not 0 <= slot < self.capacity.max_requests:
            raise ValueError(
                f"Invalid slot: expected 0 to {self.capacity.max_requests - 1}, got {slot}"
            )
        if not self.is_open[slot]:
            raise ValueError(f"Invalid slot: slot {slot} is not open")

    def memory(self) -> dict[str, ComponentBytes]:
        """Bytes by component; the allocated ones add up to those of `tensors()`."""
        return self.capacity.memory()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor the manager owns."""
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
            "window_workspace": self.workspace_storage,
            **rope,
        }

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the books contradict each other."""
        self.allocator.check_integrity()
        problems = []
        columns = np.arange(self.capacity.max_request_blocks)
        is_used = columns < self.num_slot_blocks[:, None]
        table = self.host_block_table
        if ((table >= 0) != is_used).any():
            problems.append("a block table row does not match its slot's number of blocks")
        if (self.num_slot_blocks != self.blocks_for(self.lengths)).any():
            problems.append("a slot's number of blocks does not match its length")
        if (table >= self.capacity.num_blocks).any():
            raise IntegrityError(
                f"The block table names block {table.max()}; there are {self.capacity.num_blocks}"
            )
        owners = np.bincount(table[table >= 0], minlength=self.capacity.num_blocks)
        if (owners != self.allocator.num_owners).any():
            block = int(np.flatnonzero(owners != self.allocator.num_owners)[0])
            problems.append(
                f"block {block} is in {owners[block]} rows of the block table but has "
                f"{self.allocator.num_owners[block]} owners"
            )
        problems += self._misplaced_blocks()
        if self.lengths[~self.is_open].any() or self.is_torn[~self.is_open].any():
            problems.append("a slot that is not open has a length or is torn")
        if (self.lengths < 0).any():
            problems.append("a slot has a negative length")
        if sorted(self._free_slots) != np.flatnonzero(~self.is_open).tolist():
            problems.append("the free slots are not those that are not open")
        if not np.array_equal(self._read_device_table(), table):
            problems.append("the device's block table differs from the host's")
        if ((self.rollback_floor < 0) | (self.rollback_floor > self.lengths)).any():
            problems.append("a slot's rollback floor does not lie between 0 and its length")
        if problems:
            raise IntegrityError("; ".join(problems))

    def _misplaced_blocks(self) -> list[str]:
        """A shared block holds the same tokens of all its owners, so it has one column."""
        rows, columns = np.nonzero(self.host_block_table >= 0)
        ids = self.host_block_table[rows, columns]
        column_of = np.full(self.capacity.num_blocks, -1)
        column_of[ids] = columns
        wrong = ids[column_of[ids] != columns]
        return [f"block {wrong[0]} is in more than one column"] if wrong.size else []

    def _read_device_table(self) -> IntArray:
        """The device's block table as the next plan will find it; waits for the device."""
        table: IntArray = self.block_table.cpu().numpy().copy()
        noted = self.plan_buffers.noted_blocks
        table.reshape(-1)[noted] = self.host_block_table.reshape(-1)[noted]
        return table
