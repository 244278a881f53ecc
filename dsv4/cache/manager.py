"""`KVCacheManager`: owns the pools, the block table and the request slots."""

import operator
import os

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.integrity import check_integrity
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.capacity import Capacity, ComponentBytes, blocks_for
from dsv4.cache.memory.checkpoints import CheckpointPolicy, CheckpointPool
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.memory.layout import block_layout, layer_layouts, slot_layout
from dsv4.cache.memory.paged_cache import PagedKVPool
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.memory.state_cache import StateCachePool
from dsv4.cache.plan import ForwardPlan, PlanBuffers
from dsv4.cache.prefix.prefix_cache import PrefixCache, PrefixHit, TokenIds
from dsv4.cache.prefix.prefix_tree import PrefixTree
from dsv4.cache.saved_request import copy_request, read_saved, write_saved
from dsv4.cache.staging import IntArray, staging_for
from dsv4.cache.stats import CacheStats, collect_stats
from dsv4.cache.swap import HostPlace, SwappedRequest, release_place, reserve_place
from dsv4.config import CacheConfig
from dsv4.errors import NoFreeSlotError, OutOfBlocksError, TornForwardError
from dsv4.formats import BYTE_ALIGN
from dsv4.kernels.backends import check_backend, default_backend
from dsv4.kernels.external.limits import check_attention_backend, check_index_backend
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.rope import build_rope_table


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
        num_checkpoints: Block boundaries at which requests can be resumed; with any, full blocks
            stay for later requests with the same beginning, until their memory is needed.
        checkpoint_policy: At which boundaries checkpoints are taken.
        host_blocks, host_slots: Blocks and slots in host memory, for requests that are swapped out;
            blocks evicted from the prefix cache go there too.

    Attributes:
        schedule: One `LayerSpec` per layer.
        schemas: One `LayerCacheSchema` per layer.
        lengths: `[max_requests]`, tokens of each slot.
        is_open: `[max_requests]`, slots in use.
        is_torn: `[max_requests]`, slots whose last forward did not write every layer.
        rollback_floor: `[max_requests]`, the shortest length, beside 0, that `truncate` can give
            back: `drafts_per_step` below the longest a request has had.
        block_table: `[max_requests, max_blocks]` int32 on the device, -1 where there is none.
        prefix: What is known of requests' tokens; None without checkpoints.
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
        num_checkpoints: int = 0,
        checkpoint_policy: CheckpointPolicy | None = None,
        host_blocks: int = 0,
        host_slots: int = 0,
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
            config, max_requests, num_blocks, max_forward_tokens, max_request_tokens,
            num_checkpoints, host_blocks, host_slots,
        )  # fmt: skip
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
        self._is_settled = True
        self._waiting: set[SwappedRequest] = set()
        self.host = HostMemory(
            self.paged.storage, self.state.storage, num_blocks=host_blocks, num_slots=host_slots
        )
        self.prefix = self._new_prefix_cache(checkpoint_policy or CheckpointPolicy())

    def _new_prefix_cache(self, policy: CheckpointPolicy) -> PrefixCache | None:
        if not self.capacity.num_checkpoints:
            return None
        tree = PrefixTree(
            self.allocator, self.checkpoints.owners, self.host.block_owners,
            copy_to_host=self.host.copy_blocks_out, copy_to_device=self.host.copy_blocks_in,
        )  # fmt: skip
        return PrefixCache(
            self.config, policy, tree,
            max_requests=self.capacity.max_requests,
            blocks=self.allocator, checkpoints=self.checkpoints.owners,
            block_table=self.host_block_table, set_blocks=self.set_blocks,
        )  # fmt: skip

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
        self.checkpoints = CheckpointPool(
            self.schemas, num_checkpoints=capacity.num_checkpoints, device=device
        )
        shape = (capacity.max_requests, capacity.max_request_blocks)
        self.host_block_table: IntArray = np.full(shape, -1, dtype=np.int32)
        staging = staging_for(device)
        table = torch.from_numpy(self.host_block_table)
        self.block_table = table if staging is None else torch.full_like(table, -1, device=device)
        self.plan_buffers = PlanBuffers(
            max_requests=capacity.max_requests, max_tokens=capacity.max_forward_tokens,
            max_table_updates=capacity.max_table_updates, max_captures=capacity.max_captures,
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
        ropes = [self.rope_tables[layer.rope_base] for layer in self.schedule]
        self.memories = tuple(
            LayerMemory(*storages, rope.cos, rope.sin, layout)
            for rope, layout in zip(ropes, layouts, strict=True)
        )

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
        self.host.finish()
        return slot

    def resume_request(self, token_ids: TokenIds, *, salt: bytes = b"") -> PrefixHit:
        """Open a request on the longest known beginning of a prompt.

        Blocks and checkpoints of former requests with the same tokens and salt are its first
        `num_tokens` tokens, with the bytes that a run of its own would have given; the rest, at
        least one token, is to be run. Its ids are remembered, as far as `note_tokens` extends them
        later, and its own full blocks will be found by others. It cannot be truncated below
        `num_tokens`, except to a checkpoint or to 0.

        Args:
            token_ids: The prompt, 32-bit integers.
            salt: Whose prompt it is; other salts never share.

        Raises:
            NoFreeSlotError: Every slot is open. Nothing was changed.
        """
        prefix = self._prefix()
        request = prefix.new_request(token_ids, salt)
        self._check_free_slot()
        self.settle()
        nodes, checkpoint = prefix.find(request, self.acquire_blocks)
        slot = self.open_request()
        length = len(nodes) * self.config.block_tokens
        if nodes:
            self.checkpoints.load(checkpoint, self.state.storage, slot)
            blocks = np.array([node.block for node in nodes], dtype=np.int32)
            self._set_request(slot, blocks, length)
            self.rollback_floor[slot] = length
            request.nodes = nodes
        prefix.track(slot, request)
        return PrefixHit(slot, length)

    def note_tokens(self, slot: int, token_ids: TokenIds, *, start: int) -> None:
        """Say which tokens a request has, or is about to get, from position `start` on.

        `start` must be where the known ids end, so that none can be left out: the prompt of
        `resume_request`, 0 for other requests. `truncate` forgets the ids behind its length. Full
        blocks are published only as far as ids are known.
        """
        self.check_open(slot)
        self._prefix().note_tokens(slot, token_ids, operator.index(start))

    def _prefix(self) -> PrefixCache:
        if self.prefix is None:
            raise ValueError(
                "This manager has no prefix cache: expected num_checkpoints >= 1, got 0"
            )
        return self.prefix

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
        self.settle()
        num_blocks = int(self.num_slot_blocks[slot])
        num_full = int(self.lengths[slot]) // self.config.block_tokens
        copies = self.acquire_blocks(max(num_blocks - num_full, 0))
        shared, copied = np.split(self.host_block_table[slot, :num_blocks].copy(), [num_full])
        self.allocator.share(shared)
        fork = self.open_request()
        self._set_request(fork, np.concatenate((shared, copies)), int(self.lengths[slot]))
        self.rollback_floor[fork] = self.rollback_floor[slot]
        self.state.storage[fork].copy_(self.state.storage[slot])
        for source, target in zip(copied, copies, strict=True):
            self.paged.storage[target].copy_(self.paged.storage[source])
        if self.prefix is not None:
            self._checkpoint_fork(slot)
            self.prefix.copy(slot, fork)
        return fork

    def _checkpoint_fork(self, slot: int) -> None:
        """Save the last boundary, if the policy says so and no row of it was overwritten."""
        prefix, block_tokens = self._prefix(), self.config.block_tokens
        boundary = int(self.lengths[slot]) // block_tokens * block_tokens
        is_held = boundary >= self.rollback_floor[slot]  # rejected tokens overwrite rows too
        if prefix.policy.at_forks and boundary and is_held and slot in prefix.requests:
            self._save_checkpoint(slot, boundary)

    def _save_checkpoint(self, slot: int, boundary: int) -> None:
        checkpoint = self._prefix().take_pending(slot, boundary)
        if checkpoint is not None:
            self.checkpoints.save(checkpoint, self.state.storage, slot)

    def swap_out(self, slot: int) -> SwappedRequest:
        """Move a request to host memory and close its slot; its blocks are free.

        On a GPU the copies run beside what is queued next, which waits for them only where it
        takes new blocks or slots.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room on the host. Nothing was changed.
            TornForwardError: The last forward of the request did not write every layer.
        """
        self.check_open(slot)
        self.check_whole(np.array([slot]))
        self.settle()
        blocks = self.host_block_table[slot, : self.num_slot_blocks[slot]].copy()
        tree = None if self.prefix is None else self.prefix.tree
        place = reserve_place(self.host, tree, len(blocks))
        self.host.copy_blocks_out(blocks, place.blocks)
        self.host.copy_slot_out(slot, place.slot)
        tracked = None if self.prefix is None else self.prefix.forget(slot)
        length, floor = int(self.lengths[slot]), int(self.rollback_floor[slot])
        swapped = SwappedRequest(self, length, floor, place, tracked)
        self._waiting.add(swapped)
        self.free_request(slot)
        return swapped

    def swap_in(self, swapped: SwappedRequest) -> int:
        """Bring a request back and return its slot, which may be another one.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        place = swapped.taken_from(self)
        self._check_free_slot()
        self.settle()
        blocks = self.acquire_blocks(len(place.blocks))
        slot = self.open_request()
        self.host.copy_blocks_in(place.blocks, blocks)
        self.host.copy_slot_in(place.slot, slot)
        self._set_request(slot, blocks, swapped.length)
        self.rollback_floor[slot] = swapped.rollback_floor
        if self.prefix is not None and swapped.tracked is not None:
            self.prefix.track(slot, swapped.tracked)
        self.drop_swapped(swapped)
        return slot

    def drop_swapped(self, swapped: SwappedRequest) -> None:
        """Give up a request that was swapped out, and its room on the host."""
        release_place(self.host, swapped.taken_from(self))
        swapped.place = None
        self._waiting.remove(swapped)

    @property
    def waiting_places(self) -> list[HostPlace]:
        """Where the requests lie that are swapped out."""
        return [each.taken_from(self) for each in self._waiting]

    def acquire_blocks(self, num_blocks: int) -> IntArray:
        """Take blocks, all or nothing; what only the prefix cache holds makes room."""
        missing = num_blocks - self.allocator.num_free
        if missing > 0 and self.prefix is not None:
            tree = self.prefix.tree
            if missing > tree.num_evictable:
                raise OutOfBlocksError(
                    f"Out of blocks: {num_blocks} needed, {self.allocator.num_free} of "
                    f"{self.allocator.num_blocks} free and {tree.num_evictable} of the prefix cache"
                )
            tree.evict(missing)
        ids = self.allocator.acquire(num_blocks)
        self.host.finish()
        return ids

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
        blocks = self.acquire_blocks(len(saved.blocks))
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
        self.settle()
        self._retire_plan_of(slot)
        self._shorten(slot, 0)
        if self.prefix is not None:
            self.prefix.forget(slot)
        self.is_open[slot] = False
        self._free_slots.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the last tokens of a request, so that `length` remain.

        Any length from `rollback_floor[slot]` up can be had at any time and at no cost: no row
        that it needs has been overwritten. So can 0, after which the request is as good as new, and
        a block boundary of which there is a checkpoint. A plan that names the slot is over.

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
        self.settle()
        checkpoint = None
        if 0 < length < floor:
            checkpoint = self._checkpoint_for(slot, length)
        if length < longest:
            self._retire_plan_of(slot)
            self._shorten(slot, length)
        elif self.prefix is not None:
            self.prefix.cut(slot, length)
        if checkpoint is not None:
            self.checkpoints.load(checkpoint, self.state.storage, slot)
            self.rollback_floor[slot] = length

    def _checkpoint_for(self, slot: int, length: int) -> int:
        """The checkpoint of a length below the floor; refuses one that has none."""
        prefix, floor = self.prefix, int(self.rollback_floor[slot])
        checkpoint = None if prefix is None else prefix.checkpoint_at(slot, length)
        if checkpoint is not None:
            return checkpoint
        known = [] if prefix is None else prefix.checkpointed_lengths(slot)
        below = max([0, *(each for each in known if each < length)])
        above = min([floor, *(each for each in known if each > length)])
        exact = ", ".join(map(str, [0, *known]))
        raise ValueError(
            f"Invalid length: slot {slot} can have {exact} or {floor} to {self.lengths[slot]}, got "
            f"{length}: rows it needs may be overwritten; the nearest possible lengths are "
            f"{below} and {above}"
        )

    def _shorten(self, slot: int, length: int) -> None:
        """Give back the blocks that `length` tokens don't need; with 0, the slot is like new."""
        kept = int(self.blocks_for(np.array([length]))[0])
        columns = np.arange(kept, self.num_slot_blocks[slot])
        self.allocator.release(self.host_block_table[slot, columns])
        self.set_blocks(slot, columns, -1)
        self.num_slot_blocks[slot] = kept
        self.lengths[slot] = length
        if self.prefix is not None:
            self.prefix.cut(slot, length)
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
        return LayerCacheHandle(
            config=self.config,
            layer=self.schedule[layer_idx],
            schema=self.schemas[layer_idx],
            paged=self.paged.layer(layer_idx),
            state=self.state.layer(layer_idx),
            memory=self.memories[layer_idx],
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
        self.retire_plan()
        self._plan = plan
        self._is_settled = False

    def settle(self) -> None:
        """Take in what complete forwards have made final: checkpoints, and full blocks.

        Every method does so that could change or use them.
        """
        prefix, plan = self.prefix, self._plan
        if prefix is None:
            return
        if plan is not None and plan.is_complete and not self._is_settled:
            self._is_settled = True
            prefix.end_captures(is_done=plan.is_written)
            is_step = plan.positions_after - plan.positions_before <= self.capacity.max_step_tokens
            slots = np.where(is_step, plan.request_slots, -1)
            for slot, boundary in prefix.passed_boundaries(
                slots, plan.positions_before, plan.positions_after
            ):
                self._save_checkpoint(slot, boundary)
        prefix.publish(self.lengths, self.find_torn(np.arange(self.capacity.max_requests)))

    @property
    def has_open_forward(self) -> bool:
        """The current plan adds tokens, and not every layer has been written."""
        plan = self._plan
        return plan is not None and not plan.is_complete and plan.written_slots.size > 0

    def _retire_plan_of(self, slot: int) -> None:
        """End the current plan if it names the slot."""
        if self._plan is not None and slot in self._plan.request_slots:
            self.retire_plan()

    def retire_plan(self) -> None:
        """End the current plan; if it is not complete, its requests are torn."""
        if self._plan is None:
            return
        self.settle()
        if not self._plan.is_complete:
            slots = self._plan.written_slots
            self.is_torn[slots] = self.is_open[slots]
            if self.prefix is not None:
                self.prefix.end_captures(is_done=False)
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

    def host_memory(self) -> dict[str, ComponentBytes]:
        """Bytes of blocks and slots on the host, by component."""
        return self.capacity.host_memory()

    def stats(self) -> CacheStats:
        """How full the cache is, and what the prefix cache found and evicted."""
        self.settle()
        return collect_stats(self)

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
            "checkpoints": self.checkpoints.storage,
            **rope,
        }

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the books contradict each other."""
        check_integrity(self)

    def read_device_table(self) -> IntArray:
        """The device's block table as the next plan will find it; waits for the device."""
        table: IntArray = self.block_table.cpu().numpy().copy()
        noted = self.plan_buffers.noted_blocks
        table.reshape(-1)[noted] = self.host_block_table.reshape(-1)[noted]
        return table
