"""`RequestTable`: the request slots, their lengths, and the host's block table."""

import numpy as np

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.capacity import Capacity, blocks_for
from dsv4.checks import check_int
from dsv4.errors import NoFreeSlotError


class RequestTable:
    """The records of all request slots, one row each.

    It holds the blocks of each slot. `BlockAllocator` counts the owners of each block.

    Attributes:
        lengths: `[max_requests]`, tokens of each slot.
        num_blocks: `[max_requests]`, blocks of each slot.
        is_open: `[max_requests]`, slots in use.
        is_torn: `[max_requests]`, slots with a forward that ended before it wrote every layer.
        rollback_floor: `[max_requests]`, the shortest length, beside 0, that a slot can return to.
        block_table: `[max_requests, max_blocks]` int32, -1 where there is none.
    """

    def __init__(self, capacity: Capacity) -> None:
        max_requests = capacity.max_requests
        self.lengths: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.num_blocks: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.is_open: BoolArray = np.zeros(max_requests, dtype=np.bool_)
        self.is_torn: BoolArray = np.zeros(max_requests, dtype=np.bool_)
        self.rollback_floor: Int64Array = np.zeros(max_requests, dtype=np.int64)
        shape = (max_requests, capacity.max_request_blocks)
        self.block_table: IntArray = np.full(shape, -1, dtype=np.int32)
        self._config = capacity.config
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._changed: list[Int64Array] = []

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that are not open; the last one is opened next."""
        return tuple(self._free_slots)

    def open_slot(self) -> int:
        """Open an empty slot and return it."""
        self.check_free_slot()
        slot = self._free_slots.pop()
        self.is_open[slot] = True
        return slot

    def close_slot(self, slot: int) -> None:
        """Close a slot that was shortened to 0."""
        self.is_open[slot] = False
        self._free_slots.append(slot)

    def blocks_of(self, slot: int) -> IntArray:
        """Copy the blocks of a slot, in order."""
        return self.block_table[slot, : self.num_blocks[slot]].copy()

    def fill_slot(self, slot: int, blocks: IntArray, *, length: int, rollback_floor: int) -> None:
        """Give an empty slot these blocks and that length."""
        self.set_blocks(slot, np.arange(len(blocks)), blocks)
        self.num_blocks[slot] = len(blocks)
        self.lengths[slot] = length
        self.rollback_floor[slot] = rollback_floor

    def append_blocks(self, slots: Int64Array, counts: Int64Array, blocks: IntArray) -> None:
        """Give each slot `counts` more blocks; `blocks` holds those of the first slot first."""
        have, first = self.num_blocks[slots], np.cumsum(counts) - counts
        columns = np.arange(len(blocks)) + np.repeat(have - first, counts)
        self.set_blocks(np.repeat(slots, counts), columns, blocks)
        self.num_blocks[slots] = have + counts

    def advance(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Give slots their lengths after a forward."""
        self.lengths[slots] = lengths
        floors = lengths - self._config.drafts_per_step
        self.rollback_floor[slots] = np.maximum(self.rollback_floor[slots], floors)

    def shorten(self, slot: int, length: int) -> IntArray:
        """Cut a slot to `length` tokens and return the blocks that it gave up.

        With 0, floor and tear are cleared too. The caller releases the blocks.
        """
        kept = int(blocks_for(self._config, np.array([length]))[0])
        dropped = self.blocks_of(slot)[kept:]
        self.set_blocks(slot, np.arange(kept, self.num_blocks[slot]), -1)
        self.num_blocks[slot] = kept
        self.lengths[slot] = length
        if not length:
            self.rollback_floor[slot] = 0
            self.is_torn[slot] = False
        return dropped

    def set_blocks(
        self, slots: int | Int64Array, columns: Int64Array, blocks: IntArray | int
    ) -> None:
        """Write block ids to the block table; the device gets them with the next plan."""
        self.block_table[slots, columns] = blocks
        self._changed.append(slots * self.block_table.shape[1] + columns)

    def changed_blocks(self) -> tuple[Int64Array, IntArray]:
        """Return the elements that the device's block table lacks: flat indices and values.

        An element that changed twice is there twice, both times with its present value.
        """
        index = np.concatenate([np.empty(0, np.int64), *self._changed])
        return index, self.block_table.reshape(-1)[index]

    def forget_changes(self) -> None:
        """Note that the device's block table is up to date."""
        self._changed.clear()

    def check_open(self, slot: int) -> None:
        """Refuse a slot that is not open."""
        check_int("slot", slot, at_least=0, at_most=len(self.is_open) - 1)
        if not self.is_open[slot]:
            raise ValueError(f"Invalid slot: slot {slot} is not open")

    def check_free_slot(self) -> None:
        """Refuse to open one more slot when every slot is open."""
        if not self._free_slots:
            raise NoFreeSlotError(f"No free slot: all {len(self.is_open)} requests are open")
