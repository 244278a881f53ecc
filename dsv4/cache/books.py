"""`CacheBooks`: the records that a manager keeps on the host, beside the current plan."""

from dsv4.cache.memory.arrays import Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.memory.device_memory import DeviceMemory
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.prefix.prefix_cache import PrefixCache
from dsv4.cache.prefix.prefix_tree import PrefixTree
from dsv4.cache.request_table import RequestTable
from dsv4.cache.swap import SwappedRequests
from dsv4.errors import OutOfBlocksError


class CacheBooks:
    """The records of requests, owners, published blocks and swapped requests.

    Attributes:
        requests: Lengths and blocks of the request slots.
        allocator: Owners of the blocks.
        checkpoints: Owners of the checkpoints.
        host: Blocks and slots in host memory, with their owners.
        prefix: Known tokens of requests and published blocks; None without checkpoints.
        swapped: Requests that wait in host memory.
    """

    def __init__(
        self,
        capacity: Capacity,
        memory: DeviceMemory,
        requests: RequestTable,
        policy: CheckpointPolicy,
    ) -> None:
        self.requests = requests
        self.allocator = BlockAllocator(capacity.num_blocks)
        self.checkpoints = memory.checkpoints.owners
        self.host = HostMemory(
            memory.paged.storage, memory.state.storage,
            num_blocks=capacity.host_blocks, num_slots=capacity.host_slots,
        )  # fmt: skip
        self.prefix = self._new_prefix_cache(capacity, policy)
        self.swapped = SwappedRequests(self.host, None if self.prefix is None else self.prefix.tree)

    def _new_prefix_cache(self, capacity: Capacity, policy: CheckpointPolicy) -> PrefixCache | None:
        if not capacity.num_checkpoints:
            return None
        tree = PrefixTree(
            self.allocator, self.checkpoints, self.host.block_owners,
            copy_to_host=self.host.copy_blocks_out, copy_to_device=self.host.copy_blocks_in,
        )  # fmt: skip
        return PrefixCache(
            capacity.config, policy, tree,
            max_requests=capacity.max_requests,
            blocks=self.allocator, checkpoints=self.checkpoints,
            block_table=self.requests.block_table, set_blocks=self.requests.set_blocks,
        )  # fmt: skip

    def open_slot(self) -> int:
        """Open an empty slot; its first writer waits for copies to the host."""
        slot = self.requests.open_slot()
        self.host.finish()
        return slot

    def acquire_blocks(self, num_blocks: int) -> IntArray:
        """Take blocks, all or nothing; evict blocks that only the prefix cache owns if needed."""
        missing = num_blocks - self.allocator.num_free
        if missing > 0 and self.prefix is not None:
            tree = self.prefix.tree
            if missing > tree.num_evictable:
                raise OutOfBlocksError(
                    f"Out of blocks: {num_blocks} needed, {self.allocator.num_free} of "
                    f"{self.allocator.num_blocks} free and {tree.num_evictable} of the prefix cache"
                )
            tree.evict(missing)
        blocks = self.allocator.acquire(num_blocks)
        self.host.finish()
        return blocks

    def open_in_blocks(
        self, num_blocks: int, length: int, rollback_floor: int
    ) -> tuple[int, IntArray]:
        """Open a request of that length in new blocks; the caller fills slot and blocks."""
        self.requests.check_free_slot()
        blocks = self.acquire_blocks(num_blocks)
        slot = self.open_slot()
        self.requests.fill_slot(slot, blocks, length=length, rollback_floor=rollback_floor)
        return slot, blocks

    def replace_blocks(self, slots: Int64Array, columns: Int64Array, blocks: IntArray) -> IntArray:
        """Give requests other blocks in place of shared ones; return the shared ones."""
        dropped = self.requests.block_table[slots, columns]
        self.requests.set_blocks(slots, columns, blocks)
        self.allocator.release(dropped)
        return dropped

    def find_checkpoint(self, slot: int, length: int) -> int:
        """Return the checkpoint of a length below the floor; refuse a length without one."""
        prefix, requests = self.prefix, self.requests
        checkpoint = None if prefix is None else prefix.checkpoint_at(slot, length)
        if checkpoint is not None:
            return checkpoint
        floor = int(requests.rollback_floor[slot])
        known = [] if prefix is None else prefix.checkpointed_lengths(slot)
        below = max([0, *(each for each in known if each < length)])
        above = min([floor, *(each for each in known if each > length)])
        exact = ", ".join(map(str, [0, *known]))
        raise ValueError(
            f"Invalid length: slot {slot} can have {exact} or {floor} to {requests.lengths[slot]}, "
            f"got {length}: rows it needs may be overwritten; the nearest possible lengths are "
            f"{below} and {above}"
        )

    def shorten(self, slot: int, length: int) -> None:
        """Forget a request's tokens from `length` on, and release blocks that hold no others."""
        self.allocator.release(self.requests.shorten(slot, length))
        if self.prefix is not None:
            self.prefix.cut(slot, length)

    def close_slot(self, slot: int) -> None:
        """Release a slot's blocks and close it."""
        self.shorten(slot, 0)
        if self.prefix is not None:
            self.prefix.forget(slot)
        self.requests.close_slot(slot)
