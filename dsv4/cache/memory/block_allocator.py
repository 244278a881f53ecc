"""`BlockAllocator`: a free list and the number of owners of each block. Knows no tensor."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.memory.arrays import IntArray, read_only
from dsv4.cache.memory.journal import Journal
from dsv4.checks import check_int, check_ints
from dsv4.errors import IntegrityError, OutOfBlocksError


class BlockAllocator:
    """Hands out block ids, all or nothing.

    Ids come in a fixed order, so the same calls give the same ids.

    Args:
        journal: Notes how to undo each change.
        on_free: Called with blocks that have lost their last owner, once that is certain.
    """

    def __init__(
        self,
        num_blocks: int,
        journal: Journal | None = None,
        on_free: Callable[[IntArray], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks = check_int("num_blocks", num_blocks, at_least=0)
        self._journal = Journal() if journal is None else journal
        self._on_free = on_free
        # A stack: the free ids are _free[:_num_free], the next one to go is the last.
        self._free = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks
        self._num_owners = np.zeros(num_blocks, dtype=np.int32)
        self._num_shares = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return self._num_free

    @property
    def num_owners(self) -> IntArray:
        """Owners of each block, `[num_blocks]`; a read-only view."""
        return read_only(self._num_owners)

    @property
    def num_shares(self) -> int:
        """Owners that blocks have beyond their first; 0 if no block is shared."""
        return self._num_shares

    def acquire(self, num_blocks: int) -> IntArray:
        """Take `num_blocks` blocks, or raise `OutOfBlocksError` and take none."""
        num_blocks = check_int("num_blocks", num_blocks, at_least=0)
        if num_blocks > self._num_free:
            raise OutOfBlocksError(needed=num_blocks, free=self._num_free, total=self.num_blocks)
        rest = self._num_free - num_blocks
        ids = self._free[rest : self._num_free][::-1].copy()
        self._journal.set_rows(self._num_owners, ids, 1)
        self._journal.set_attribute(self, "_num_free", rest)
        return ids

    def share(self, ids: NDArray[np.integer]) -> None:
        """Add an owner to each block; refused whole if any has none."""
        ids = self._checked(ids)
        if ids.size == 0:
            return
        owners = self._num_owners[ids]
        if not owners.all():
            raise ValueError(
                f"Invalid share: block {ids[owners == 0][0]} has no owner to share it with"
            )
        self._journal.set_attribute(self, "_num_shares", self._num_shares + ids.size)
        unique, times = np.unique(ids, return_counts=True)
        self._journal.set_rows(self._num_owners, unique, self._num_owners[unique] + times)

    def release(self, ids: NDArray[np.integer]) -> None:
        """Give up one ownership of each block; refused whole if any is not owned."""
        ids = self._checked(ids)
        if ids.size == 0:
            return
        unique, times = np.unique(ids, return_counts=True)
        left = self._num_owners[unique] - times
        if left.min() < 0:
            raise ValueError(
                f"Invalid release: block {unique[left < 0][0]} has no owner left to give it up"
            )
        freed = unique[left == 0][::-1]
        start, end = self._num_free, self._num_free + freed.size
        num_shares = self._num_shares - (ids.size - freed.size)
        self._journal.set_rows(self._num_owners, unique, left)
        self._journal.set_rows(self._free, slice(start, end), freed)
        self._journal.set_attribute(self, "_num_free", end)
        self._journal.set_attribute(self, "_num_shares", num_shares)
        if self._on_free is not None and freed.size:
            self._journal.after_commit(self._on_free, freed)

    def _checked(self, ids: NDArray[np.integer]) -> IntArray:
        valid = check_ints("block ids", ids, at_least=0, at_most=self.num_blocks - 1)
        return valid.astype(np.int32)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block is either free once or owned."""
        if type(self._num_free) is not int or not 0 <= self._num_free <= self.num_blocks:
            raise IntegrityError(
                f"Block free list: expected 0 to {self.num_blocks} free blocks, "
                f"got {self._num_free!r}"
            )
        free = self._free[: self._num_free]
        if free.size and (free.min() < 0 or free.max() >= self.num_blocks):
            raise IntegrityError(
                f"Block free list: expected ids 0 to {self.num_blocks - 1}, "
                f"got {free.min()} to {free.max()}"
            )
        times_free = np.bincount(free, minlength=self.num_blocks)
        wrong = np.flatnonzero((times_free == 1) != (self._num_owners == 0))
        if wrong.size or times_free.max(initial=0) > 1:
            raise IntegrityError(
                f"Block free list: {wrong.size} blocks are both free and owned or neither, "
                f"the first is {wrong[0] if wrong.size else int(times_free.argmax())}"
            )
        num_shares = int(np.maximum(self._num_owners - 1, 0).sum())
        if num_shares != self._num_shares:
            raise IntegrityError(
                f"Shared blocks: their owners beyond the first are {num_shares}, "
                f"counted were {self._num_shares}"
            )
