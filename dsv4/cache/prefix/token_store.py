"""`TokenStore`: the known token ids of all request slots, in one array."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.memory.arrays import Int64Array, IntArray
from dsv4.cache.memory.journal import Journal
from dsv4.checks import check_ints

TokenIds = Sequence[int] | NDArray[np.integer]
ID_DTYPE = np.dtype("<i4")
SMALLEST_ID, LARGEST_ID = -(2**31), 2**31 - 1


class TokenStore:
    """Ids of each slot from position 0 on, with room behind them for more.

    Attributes:
        num_known: `[max_requests]`, known ids of each slot.
    """

    def __init__(self, max_requests: int, journal: Journal) -> None:
        self.num_known: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._journal = journal
        self._starts: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._room: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._ids: IntArray = np.empty(0, dtype=ID_DTYPE)
        self._end = 0

    def append(self, slots: Int64Array, ids: IntArray, counts: Int64Array) -> None:
        """Add ids behind the known ones; those of the first slot come first."""
        known = self.num_known[slots]
        after = known + counts
        is_full = after > self._room[slots]
        if is_full.any():
            self._make_room(slots[is_full], 2 * after[is_full])
        first = self._starts[slots] + known
        if len(slots) == 1:
            self._ids[first[0] : first[0] + len(ids)] = ids
        elif len(ids) == len(slots) and counts.all():  # one id each
            self._ids[first] = ids
        else:
            ends = counts.cumsum()
            self._ids[(first - ends + counts).repeat(counts) + np.arange(len(ids))] = ids
        self._journal.set_rows(self.num_known, slots, after)

    def read(self, slot: int) -> IntArray:
        """Return a view of a slot's known ids, valid until the next `append`."""
        start = int(self._starts[slot])
        return self._ids[start : start + int(self.num_known[slot])]

    def read_bytes(self, slots: Int64Array) -> tuple[memoryview, Int64Array]:
        """Return the bytes of all ids, and where those of each slot begin."""
        return self._ids.data.cast("B"), self._starts[slots] * ID_DTYPE.itemsize

    def cut(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Forget ids from these lengths on."""
        kept = np.minimum(self.num_known[slots], lengths)
        self._journal.set_rows(self.num_known, slots, kept)

    def _make_room(self, slots: Int64Array, room: Int64Array) -> None:
        """Move slots behind all others, where there is room for so many ids."""
        total = int(room.sum())
        if self._end + total > len(self._ids):
            self._compact(slots, room)
            return
        starts = self._end + np.cumsum(room) - room
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            known = self.read(slot)
            self._ids[start : start + len(known)] = known
        self._journal.set_rows(self._starts, slots, starts)
        self._journal.set_rows(self._room, slots, room)
        self._journal.set_attribute(self, "_end", self._end + total)

    def _compact(self, slots: Int64Array, room: Int64Array) -> None:
        """Move all slots to a larger array without the gaps between them."""
        rooms = np.where(self.num_known > 0, self._room, 0)
        rooms[slots] = room
        starts, end = np.cumsum(rooms) - rooms, int(rooms.sum())
        ids = np.empty(2 * end, dtype=ID_DTYPE)
        for slot in np.flatnonzero(self.num_known).tolist():
            known = self.read(slot)
            ids[starts[slot] : starts[slot] + len(known)] = known
        for name, value in ("_ids", ids), ("_starts", starts), ("_room", rooms), ("_end", end):
            self._journal.set_attribute(self, name, value)


def split_ids(
    num_slots: int, token_ids: TokenIds, starts: Int64Array, counts: object
) -> tuple[IntArray, Int64Array]:
    """Read ids of several slots and the counts of each: by default one, or all of a single slot."""
    ids = as_token_ids(token_ids)
    if counts is None:
        sizes = np.full(num_slots, len(ids) if num_slots == 1 else 1, dtype=np.int64)
    else:
        sizes = check_ints("counts", counts, at_least=0, at_most=len(ids))
    if not num_slots == len(starts) == len(sizes) or int(sizes.sum()) != len(ids):
        raise ValueError(
            "Invalid sizes: expected one start and one count for each slot, and ids for all "
            f"counts, got {num_slots} slots, {len(starts)} starts, {len(sizes)} counts with "
            f"the sum {sizes.sum()}, and {len(ids)} ids"
        )
    return ids, sizes


def as_token_ids(values: TokenIds) -> IntArray:
    """Copy token ids to little-endian int32, as they are hashed."""
    array = check_ints("token ids", values)
    if array.size and not SMALLEST_ID <= array.min() <= array.max() <= LARGEST_ID:
        raise ValueError(
            f"Invalid token ids: expected 32-bit signed integers, "
            f"got {array.min()} to {array.max()}"
        )
    return array.astype(ID_DTYPE)
