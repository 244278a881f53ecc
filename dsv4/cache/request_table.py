"""`RequestTable`: the request slots, their lengths, and the host's block table."""

import secrets
from typing import NamedTuple

import numpy as np

from dsv4.cache.incoming import IncomingRequest
from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray, ragged
from dsv4.cache.memory.capacity import Capacity, blocks_for
from dsv4.cache.memory.journal import Journal
from dsv4.checks import check_int, check_one_or_more
from dsv4.errors import NoFreeSlotError


class Extent(NamedTuple):
    """How far a request reaches; see `RequestTable`."""

    length: int
    rollback_floor: int
    num_read_only: int = 0


class RequestTable:
    """The records of all request slots, one row each.

    It holds the blocks of each slot. `BlockAllocator` counts the owners of each block.

    Attributes:
        lengths: `[max_requests]`, tokens of each slot.
        num_blocks: `[max_requests]`, blocks of each slot.
        is_open: `[max_requests]`, slots in use.
        is_closing: `[max_requests]`, slots that were freed inside a forward and wait for its end.
        is_hidden: `[max_requests]`, slots in use that the user does not see: those that are
            closing, and those of incoming requests.
        incoming: The requests that are on their way, by slot.
        rollback_floor: `[max_requests]`, the shortest length, beside 0, that a slot can return to.
            It lies above the length of a request that replays.
        num_read_only: `[max_requests]`, first blocks of each slot that it reads and never writes.
            A request that is shorter replays their tokens.
        nonces: `[max_requests]`, random numbers that tell requests apart; see `renew`.
        block_table: `[max_requests, max_blocks]` int32, -1 where there is none.
    """

    def __init__(self, capacity: Capacity, journal: Journal) -> None:
        max_requests = capacity.max_requests
        self.lengths: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.num_blocks: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.is_open: BoolArray = np.zeros(max_requests, dtype=np.bool_)
        self.is_closing: BoolArray = np.zeros(max_requests, dtype=np.bool_)
        self.is_hidden: BoolArray = np.zeros(max_requests, dtype=np.bool_)
        self.incoming: dict[int, IncomingRequest] = {}
        self.rollback_floor: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.num_read_only: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self.nonces: Int64Array = np.zeros(max_requests, dtype=np.int64)
        shape = (max_requests, capacity.max_request_blocks)
        self.block_table: IntArray = np.full(shape, -1, dtype=np.int32)
        self._config, self._max_step_tokens = capacity.config, capacity.max_step_tokens
        self._journal = journal
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._changed: list[Int64Array] = []

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that are not open; the last one is opened next."""
        return tuple(self._free_slots)

    @property
    def open_slots(self) -> Int64Array:
        """Slots that are open and not hidden, in rising order."""
        return np.flatnonzero(self.is_open & ~self.is_hidden)

    def open_slots_for(self, count: int) -> list[int]:
        """Open empty slots and return them."""
        self.check_free_slots(count)
        start = len(self._free_slots) - count
        slots = self._free_slots[start:][::-1]
        self._journal.note_tail(self._free_slots, start)
        self._journal.set_rows(self.is_open, slots, True)
        self.renew(np.array(slots, dtype=np.int64))
        del self._free_slots[start:]
        return slots

    def renew(self, slots: Int64Array) -> None:
        """Give new requests their nonces, and those that lost tokens which were final."""
        self._journal.set_rows(self.nonces, slots, [secrets.randbits(63) for _ in slots])

    def close_slots(self, slots: Int64Array) -> None:
        """Close slots that were shortened to 0; the first is opened next."""
        self._journal.note_tail(self._free_slots, len(self._free_slots))
        self._journal.set_rows(self.is_open, slots, False)
        self._journal.set_rows(self.is_closing, slots, False)
        self._journal.set_rows(self.is_hidden, slots, False)
        for slot in self.incoming.keys() & set(slots.tolist()):
            if (stop := self.incoming[slot].stop) is not None:
                stop()
            self._journal.drop_item(self.incoming, slot)
        self._free_slots += slots[::-1].tolist()

    def mark_closing(self, slots: Int64Array) -> None:
        """Take slots from the user, but keep them until the current forward has ended."""
        self._journal.set_rows(self.is_closing, slots, True)
        self._journal.set_rows(self.is_hidden, slots, True)

    def reserve(
        self, slot: int, blocks: IntArray, num_tokens: int, label: object
    ) -> IncomingRequest:
        """Keep an empty slot with these blocks for a request of up to so many tokens."""
        incoming = IncomingRequest(slot, num_tokens, blocks, int(self.nonces[slot]), label)
        self.fill_slot(slot, blocks, Extent(num_tokens, num_tokens))
        self._journal.set_item(self.incoming, slot, incoming)
        self._journal.set_rows(self.is_hidden, slot, True)
        return incoming

    def reveal(self, incoming: IncomingRequest) -> None:
        """Make the request of a kept slot an ordinary one."""
        self._journal.drop_item(self.incoming, incoming.slot)
        self._journal.set_rows(self.is_hidden, incoming.slot, False)
        self._journal.set_attribute(incoming, "is_accepted", True)

    def check_incoming(self, incoming: IncomingRequest) -> None:
        """Refuse room that is not kept, or no more."""
        if not isinstance(incoming, IncomingRequest):
            raise TypeError(
                "Invalid incoming request: expected one that reserve_request returned, "
                f"got {type(incoming).__name__}"
            )
        if self.incoming.get(incoming.slot) is not incoming:
            raise ValueError(
                "Invalid incoming request: expected one that this manager keeps room for, "
                "got one that was accepted or dropped, or another manager's"
            )

    def blocks_of(self, slot: int) -> IntArray:
        """Copy the blocks of a slot, in order."""
        return self.block_table[slot, : self.num_blocks[slot]].copy()

    def written_from(self, slots: Int64Array) -> Int64Array:
        """Return the first position of each slot whose entries may be written."""
        return self.num_read_only[slots] * self._config.block_tokens

    def num_full_blocks(self, slots: Int64Array) -> Int64Array:
        """Count the blocks of each slot that it will not write, unless it is cut."""
        return np.maximum(
            self.lengths[slots] // self._config.block_tokens, self.num_read_only[slots]
        )

    def extent_of(self, slot: int) -> Extent:
        """Return how far a slot's request reaches."""
        arrays = (self.lengths, self.rollback_floor, self.num_read_only)
        return Extent(*(int(array[slot]) for array in arrays))

    def fill_slot(self, slot: int, blocks: IntArray, extent: Extent) -> None:
        """Give an empty slot these blocks and lengths."""
        self.set_blocks(slot, np.arange(len(blocks)), blocks)
        self._journal.set_rows(self.num_blocks, slot, len(blocks))
        arrays = (self.lengths, self.rollback_floor, self.num_read_only)
        for array, value in zip(arrays, extent, strict=True):
            self._journal.set_rows(array, slot, value)

    def append_blocks(self, slots: Int64Array, counts: Int64Array, blocks: IntArray) -> None:
        """Give each slot `counts` more blocks; `blocks` holds those of the first slot first."""
        have = self.num_blocks[slots]
        rows, columns = ragged(slots, have, counts)
        self.set_blocks(rows, columns, blocks)
        self._journal.set_rows(self.num_blocks, slots, have + counts)

    def advance(
        self, slots: Int64Array, lengths: Int64Array, uncertain: Int64Array | int = 0
    ) -> None:
        """Give slots their lengths after a forward, of which some tokens may not be there."""
        self._journal.set_rows(self.lengths, slots, lengths)
        self.raise_floors(slots, lengths - uncertain)

    def raise_floors(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Note that slots have been written up to these lengths."""
        lowest = lengths - self._max_step_tokens
        self.set_floors(slots, np.maximum(self.rollback_floor[slots], lowest))

    def set_floors(self, slots: Int64Array, floors: Int64Array) -> None:
        """Give slots the shortest lengths that they can return to."""
        self._journal.set_rows(self.rollback_floor, slots, floors)

    def shorten(
        self, slots: Int64Array, lengths: Int64Array, num_read_only: Int64Array
    ) -> IntArray:
        """Cut slots to these lengths and return the blocks that they gave up.

        Read-only blocks are kept as they are given. A floor above its length falls to it. The
        caller releases the blocks.
        """
        kept = np.maximum(blocks_for(self._config, lengths), num_read_only)
        have = self.num_blocks[slots]
        dropped: IntArray = np.empty(0, dtype=np.int32)
        if (have > kept).any():
            rows, columns = ragged(slots, kept, have - kept)
            dropped = self.block_table[rows, columns]
            self.set_blocks(rows, columns, -1)
            self._journal.set_rows(self.num_blocks, slots, kept)
        self._journal.set_rows(self.lengths, slots, lengths)
        self.set_floors(slots, np.minimum(self.rollback_floor[slots], lengths))
        self._journal.set_rows(self.num_read_only, slots, num_read_only)
        return dropped

    def set_blocks(
        self, slots: int | Int64Array, columns: Int64Array, blocks: IntArray | int
    ) -> None:
        """Write block ids to the block table; the device gets them with the next plan."""
        changed = slots * self.block_table.shape[1] + columns
        old = self.block_table[slots, columns]
        self._journal.note(self._set_back, slots, columns, old, changed)
        self._changed.append(changed)
        self.block_table[slots, columns] = blocks

    def _set_back(
        self, slots: int | Int64Array, columns: Int64Array, blocks: IntArray, changed: Int64Array
    ) -> None:
        self._changed.append(changed)  # the device may have got the other ids
        self.block_table[slots, columns] = blocks

    def changed_blocks(self) -> tuple[Int64Array, IntArray]:
        """Return the elements that the device's block table lacks: flat indices and values.

        An element that changed twice is there twice, both times with its present value.
        """
        index = np.concatenate([np.empty(0, np.int64), *self._changed])
        return index, self.block_table.reshape(-1)[index]

    def forget_changes(self) -> None:
        """Note that the device's block table is up to date."""
        self._journal.set_attribute(self, "_changed", [])

    def check_all_open(self, slots: object) -> Int64Array:
        """Return one open slot, or several, named once each, as an array; refuse any others."""
        array = check_one_or_more("slot", slots, at_least=0, at_most=len(self.is_open) - 1)
        self.check_open(array, "slot")
        return array

    def check_open(self, slots: Int64Array, name: str) -> None:
        """Refuse slots, all in range, that are not open or are named twice."""
        is_open = self.is_open[slots] > self.is_hidden[slots]
        if not is_open.all():
            raise ValueError(
                f"Invalid {name}: slot {slots[~is_open][0]} is not open, expected some of "
                f"{self.open_slots.tolist()}"
            )
        if len(slots) > 1 and np.bincount(slots).max() > 1:
            slot = int(np.bincount(slots).argmax())
            raise ValueError(f"Invalid {name}: slot {slot} is named more than once")

    def check_cut(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Refuse lengths that open slots cannot be cut to, as they are shorter."""
        if len(slots) != len(lengths):
            raise ValueError(
                f"Invalid sizes: expected one length for each slot, got {len(slots)} slots and "
                f"{len(lengths)} lengths"
            )
        present = self.lengths[slots]
        is_wrong = (lengths < 0) | (lengths > present)
        if is_wrong.any():
            row = int(is_wrong.argmax())
            check_int(
                "length", int(lengths[row]), at_least=0, at_most=int(present[row]),
                limit=f"the length of slot {slots[row]}",
            )  # fmt: skip

    def check_free_slots(self, count: int = 1) -> None:
        """Refuse to open more slots than are free."""
        if len(self._free_slots) < count:
            raise NoFreeSlotError(count, len(self._free_slots), total=len(self.is_open))
