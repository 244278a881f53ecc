"""`Checkpoints`: the fixed state of requests at block boundaries, and its policy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.device_rows import DeviceRows
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.memory.journal import Journal
from dsv4.checks import check_bool, check_int


@dataclass(frozen=True)
class CheckpointPolicy:
    """The block boundaries at which a request is checkpointed.

    Attributes:
        every_blocks: Blocks from one checkpoint to the next; 0 for none of these. They are the
            first to go, and never make another one go.
        at_prompt_end: Checkpoint the last boundary of the prompt that `resume_request` was given,
            if that names no others.
        at_branches: Checkpoint the boundary at which a prompt leaves one that was there before.
        at_forks: Checkpoint the last boundary before a fork, if the window ring still holds it.
        in_generation: Checkpoint boundaries between generated tokens, one in each step, so that
            a conversation goes on from its answer. They too are the first to go.
    """

    every_blocks: int = 8
    at_prompt_end: bool = True
    at_branches: bool = True
    at_forks: bool = True
    in_generation: bool = True

    def __post_init__(self) -> None:
        check_int("every_blocks", self.every_blocks, at_least=0)
        for name in ("at_prompt_end", "at_branches", "at_forks", "in_generation"):
            check_bool(name, getattr(self, name))

    def may_choose(self, first: Int64Array, last: Int64Array) -> BoolArray:
        """Tell for many requests at once whether `chosen` may return any boundary."""
        if type(self).chosen is not CheckpointPolicy.chosen:
            return np.ones(len(first), dtype=np.bool_)
        if not self.every_blocks:
            return np.zeros(len(first), dtype=np.bool_)
        return last // self.every_blocks * self.every_blocks >= first

    def chosen(self, first: int, last: int) -> list[int]:
        """Return the boundaries from `first` to `last`, in blocks, that are checkpointed.

        Those of prompt ends, branches and forks come beside them.
        """
        if not self.every_blocks:
            return []
        start = -(-first // self.every_blocks) * self.every_blocks
        return list(range(start, last + 1, self.every_blocks))


class Checkpoints:
    """The checkpoints on device and host, with their owners, and the copies between them.

    Ids below `num_device` are rows of the pool. A higher one is a checkpoint on the host, in some
    blocks of the host's.

    Args:
        pool: The checkpoints on the device, each the front of a slot.
        fronts: The same bytes of the requests' slots.
        host: The host's memory.
        on_free: Called with rows of the pool that have lost their last owner.

    Attributes:
        blocks_each: Blocks of the host that one takes.
    """

    def __init__(
        self,
        pool: DeviceRows,
        fronts: DeviceRows,
        host: HostMemory,
        journal: Journal,
        on_free: Callable[[IntArray], None] | None,
    ) -> None:
        self.num_device = len(pool)
        self.blocks_each = -(-pool.num_bytes // max(1, host.blocks.shape[1]))
        num_host = len(host.blocks) // self.blocks_each if self.num_device else 0
        self._device = BlockAllocator(self.num_device, journal, on_free)
        self._on_host = BlockAllocator(num_host, journal)
        self._host_blocks: IntArray = np.zeros((num_host, self.blocks_each), dtype=np.int32)
        self._pool, self._fronts, self._host, self._journal = pool, fronts, host, journal

    @property
    def num_free(self) -> int:
        """Checkpoints on the device that nobody owns."""
        return self._device.num_free

    @property
    def num_owners(self) -> IntArray:
        """Owners of each id."""
        return np.concatenate((self._device.num_owners, self._on_host.num_owners))

    @property
    def num_bytes(self) -> int:
        """Bytes of one."""
        return self._pool.num_bytes

    def acquire(self, count: int) -> IntArray:
        """Take checkpoints on the device; their first writer waits for copies of them."""
        checkpoints = self._device.acquire(count)
        self._host.finish()
        return checkpoints

    def share(self, ids: NDArray[np.integer]) -> None:
        """Add an owner to each."""
        is_host = ids >= self.num_device
        self._device.share(ids[~is_host])
        self._on_host.share(ids[is_host] - self.num_device)

    def release(self, ids: NDArray[np.integer]) -> None:
        """Give up one ownership of each; one on the host without owner gives its blocks back."""
        is_host = ids >= self.num_device
        self._device.release(ids[~is_host])
        on_host = ids[is_host] - self.num_device
        if on_host.size:
            self._on_host.release(on_host)
            unowned = on_host[self._on_host.num_owners[on_host] == 0]
            self._host.block_owners.release(self._host_blocks[np.unique(unowned)].reshape(-1))

    def is_on_host(self, checkpoint: int) -> bool:
        return checkpoint >= self.num_device

    def move_to_host(self, checkpoint: int) -> int:
        """Copy a checkpoint with one owner to free blocks of the host; return its new id."""
        blocks = self._host.block_owners.acquire(self.blocks_each)
        self._host.copy_row_out(self._pool, checkpoint, blocks)
        self._device.release(np.array([checkpoint]))
        return self.adopt(blocks)

    def adopt(self, blocks: IntArray) -> int:
        """Make a checkpoint of blocks of the host that hold one; return its id."""
        index = int(self._on_host.acquire(1)[0])
        self._journal.set_rows(self._host_blocks, index, blocks)
        return self.num_device + index

    def cut(self, checkpoint: int, width: int) -> list[list[tuple[int, Tensor]]]:
        """Cut a checkpoint on the device as `DeviceRows.cut` does; none if it is not there."""
        is_there = 0 <= checkpoint < self.num_device
        return self._pool.cut(checkpoint, width) if is_there else []

    def save(self, checkpoint: int, slot: int) -> None:
        """Copy the front of a slot to a checkpoint on the device."""
        self._pool.copy(self._fronts, slot, checkpoint)

    def load(self, checkpoint: int, slot: int) -> None:
        """Give a slot the rows of a checkpoint."""
        if self.is_on_host(checkpoint):
            blocks = self._host_blocks[checkpoint - self.num_device]
            self._host.copy_row_in(blocks, self._fronts, slot)
        else:
            self._fronts.copy(self._pool, checkpoint, slot)

    def host_blocks(self) -> list[int]:
        """Return the blocks of the host that checkpoints have."""
        taken: list[int] = self._host_blocks[self._on_host.num_owners > 0].reshape(-1).tolist()
        return taken

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every checkpoint is either free once or owned."""
        self._device.check_integrity()
        self._on_host.check_integrity()
