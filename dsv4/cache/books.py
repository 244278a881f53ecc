"""`CacheBooks`: the records that a manager keeps on the host, beside the current plan."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.memory.arrays import Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.cache_memory import CacheMemory
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.checkpoints import CheckpointPolicy, Checkpoints
from dsv4.cache.memory.device_rows import DeviceRows
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.memory.journal import Journal
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prefix.disk_tier import DiskTier
from dsv4.cache.prefix.events import EventLog, OnEvents
from dsv4.cache.prefix.prefix_cache import PrefixCache
from dsv4.cache.prefix.prefix_tree import PrefixTree
from dsv4.cache.prefix.retention import PrefixNode
from dsv4.cache.prefix.store import PrefixStore
from dsv4.cache.request_table import RequestTable
from dsv4.cache.swap import SwappedRequests


class CacheBooks:
    """The records of requests, owners, published blocks and swapped requests.

    Attributes:
        journal: Encloses each change of the records.
        memory: The bytes that they tell of.
        block_tokens: Tokens of a block.
        requests: Lengths and blocks of the request slots.
        allocator: Owners of the blocks.
        checkpoints: The checkpoints on device and host, with their owners.
        host: Blocks and slots in host memory, with their owners.
        prefix: Known tokens of requests and published blocks; none of either without checkpoints.
        swapped: Requests that wait in host memory.
    """

    def __init__(
        self,
        capacity: Capacity,
        memory: CacheMemory,
        requests: RequestTable,
        policy: CheckpointPolicy,
        journal: Journal,
        *,
        wipe_on_free: bool,
        on_events: OnEvents | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self.journal = journal
        self.requests = requests
        self.memory, self._wipe_on_free = memory, wipe_on_free
        self.block_tokens = capacity.config.block_tokens
        self._drafts_per_step = capacity.config.drafts_per_step
        self.host = HostMemory(
            memory.blocks, memory.slots, journal,
            num_blocks=capacity.host_blocks, num_slots=capacity.host_slots, is_wiped=wipe_on_free,
        )  # fmt: skip
        self.allocator = BlockAllocator(
            capacity.num_blocks, journal, on_free=self._wiper(memory.blocks)
        )
        self.checkpoints = Checkpoints(
            memory.checkpoints, memory.fronts, self.host, journal,
            on_free=self._wiper(memory.checkpoints),
        )  # fmt: skip
        self.prefix = self._new_prefix_cache(capacity, policy, on_events, store)
        self.swapped = SwappedRequests(self.host, self.allocator, self.prefix, journal)

    def _new_prefix_cache(
        self,
        capacity: Capacity,
        policy: CheckpointPolicy,
        on_events: OnEvents | None,
        store: PrefixStore | None,
    ) -> PrefixCache:
        if store is not None and not (capacity.num_checkpoints and self.host.blocks.numel()):
            raise ValueError(
                "Invalid store: expected a manager with a prefix cache that has blocks on the "
                "host (prefix_bytes, or num_checkpoints and host_blocks), got none"
            )
        tree = PrefixTree(
            self.allocator, self.checkpoints, self.host, self.journal,
            EventLog(self.journal, on_events, capacity.config.block_tokens),
        )  # fmt: skip
        tier = None if store is None else DiskTier(store, capacity.config, tree, self.journal)
        return PrefixCache(
            capacity.config, policy, tree, self.journal,
            block_table=self.requests.block_table, set_blocks=self.requests.set_blocks, tier=tier,
        )  # fmt: skip

    def make_room(
        self, num_blocks: int, kept: Collection[PrefixNode] = (), *, note: str = ""
    ) -> None:
        """Evict blocks that only the prefix cache owns until so many are free.

        Raises:
            OutOfBlocksError: There would not be so many. Nothing was changed.
        """
        missing = num_blocks - self.allocator.num_free
        if missing > 0:
            self.prefix.tree.evict(missing, kept, note=note)

    def count_fitting(self, path: Sequence[PrefixNode]) -> int:
        """Count the first blocks of a path for which there is room on the device.

        Those on the device come before those on the host.
        """
        num_host = sum(node.block < 0 for node in path)
        room = self.allocator.num_free + self.prefix.tree.count_evictable(path) if num_host else 0
        return len(path) - max(0, num_host - room)

    def make_slot_room(self, num_blocks: int, kept: Collection[PrefixNode] = ()) -> None:
        """Make room for a new slot and so many blocks, which `take_slot` then gives.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is none. Nothing was changed.
        """
        self.requests.check_free_slots()
        self.make_room(num_blocks, kept)

    def take_slot(self, num_blocks: int) -> tuple[int, IntArray]:
        """Open a slot and take blocks for it, as part of a change."""
        return self.open_slots(1)[0], self.acquire_blocks(num_blocks)

    def open_slots(self, count: int) -> list[int]:
        """Open empty slots; their first writer waits for copies to the host."""
        slots = self.requests.open_slots_for(count)
        self.host.finish()
        return slots

    def acquire_blocks(self, num_blocks: int) -> IntArray:
        """Take blocks that `make_room` has made; their first writer waits for copies of them."""
        blocks = self.allocator.acquire(num_blocks)
        self.host.finish()
        return blocks

    def replace_blocks(self, slots: Int64Array, columns: Int64Array, blocks: IntArray) -> IntArray:
        """Give requests other blocks in place of shared ones; return the shared ones."""
        dropped = self.requests.block_table[slots, columns]
        self.requests.set_blocks(slots, columns, blocks)
        self.allocator.release(dropped)
        return dropped

    def find_checkpoint(self, slot: int, length: int) -> int:
        """Return the checkpoint of a length below the floor; refuse a length without one."""
        known, requests = self.prefix.checkpoints_of(slot), self.requests
        if length in known:
            return known[length]
        floor = int(requests.rollback_floor[slot])
        below = max([0, *(each for each in known if each < length)])
        above = min([floor, *(each for each in known if each > length)])
        exact = ", ".join(map(str, [0, *(each for each in known if each < floor)]))
        raise ValueError(
            f"Invalid length: slot {slot} can have {exact} or {floor} to {requests.lengths[slot]}, "
            f"got {length}: rows it needs may be overwritten, as drafts_per_step is "
            f"{self._drafts_per_step}; the nearest possible lengths are {below} and {above}"
        )

    def shorten(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Forget tokens of requests from these lengths on, and release blocks that hold none."""
        num_read_only = np.minimum(self.requests.num_read_only[slots], lengths // self.block_tokens)
        self.drop_blocks(slots, lengths, num_read_only)
        self.prefix.cut(slots, lengths)

    def drop_blocks(
        self, slots: Int64Array, lengths: Int64Array, num_read_only: Int64Array
    ) -> None:
        """Cut requests to these lengths and read-only blocks; their known ids stay."""
        dropped = self.requests.shorten(slots, lengths, num_read_only)
        if dropped.size:
            self.allocator.release(dropped)

    def count_freed(self, slots: Int64Array) -> int:
        """Count the blocks that are free or evictable without these requests."""
        table = self.requests.block_table[slots]
        times = np.bincount(table[table >= 0], minlength=self.allocator.num_blocks)
        others = self.allocator.num_owners - times
        others[self.prefix.tree.owned_blocks()] -= 1
        return int(((times > 0) & (others == 0)).sum())

    def empty_device(self, num_checkpoints: int) -> None:
        """Move published blocks and checkpoints to the host, as far as there is room.

        Raises:
            RuntimeError: A request is open, or one that is swapped out has blocks on the device.
        """
        tree, in_use = self.prefix.tree, np.flatnonzero(self.requests.is_open).tolist()
        used = self.allocator.num_blocks - self.allocator.num_free - tree.num_evictable
        if in_use or used:
            raise RuntimeError(
                f"Cannot sleep: expected no open request and no block in use, got slots "
                f"{in_use} and {used} blocks; free, save or swap out the requests"
            )
        if self.prefix.tier is not None:
            self.prefix.tier.finish_writes()
        tree.evict(tree.num_evictable)
        tree.make_checkpoint_room(num_checkpoints, uses=True)
        self.host.finish()

    def close_slots(self, slots: Int64Array) -> None:
        """Release the blocks of slots and close these."""
        self.prefix.forget(slots)
        nothing = np.zeros(len(slots), dtype=np.int64)
        self.drop_blocks(slots, nothing, nothing)
        self.requests.close_slots(slots)
        if self._wipe_on_free:
            self.journal.after_commit(self._wipe, self.memory.slots, slots)

    def wipe_undo(self, plan: ForwardPlan) -> None:
        """Wipe what was kept for a plan that has ended."""
        if self._wipe_on_free and plan.survival is not None:
            used = plan.survival.undo_slots
            self.journal.after_commit(self._wipe, self.memory.undo, used[used >= 0])

    def _wiper(self, rows: DeviceRows) -> Callable[[IntArray], None] | None:
        return partial(self._wipe, rows) if self._wipe_on_free else None

    def _wipe(self, rows: DeviceRows, ids: NDArray[np.integer]) -> None:
        """Overwrite rows with zeros, after copies of them to the host."""
        self.host.finish()
        rows.wipe(ids)
