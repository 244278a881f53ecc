"""`BlockAllocator`: a free list and the number of owners of each block. Knows no tensor."""

import numpy as np

from dsv4.cache.memory.arrays import IntArray, read_only
from dsv4.checks import check_int
from dsv4.errors import IntegrityError, OutOfBlocksError


class BlockAllocator:
    """Hands out block ids, all or nothing.

    Ids come in a fixed order, so the same calls give the same ids.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks = check_int("num_blocks", num_blocks, at_least=0)
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
            raise OutOfBlocksError(
                f"Out of blocks: {num_blocks} needed, {self._num_free} of {self.num_blocks} free"
            )
        rest = self._num_free - num_blocks
        ids = self._free[rest : self._num_free][::-1].copy()
        self._num_free = rest
        self._num_owners[ids] = 1
        return ids

    def share(self, ids: IntArray) -> None:
        """Add an owner to each block; refused whole if any has none."""
        ids = self._checked(ids)
        unowned = ids[self._num_owners[ids] == 0]
        if unowned.size:
            raise ValueError(f"Invalid share: block {unowned[0]} has no owner to share it with")
        np.add.at(self._num_owners, ids, 1)
        self._num_shares += ids.size

    def release(self, ids: IntArray) -> None:
        """Give up one ownership of each block; refused whole if any is not owned."""
        ids = self._checked(ids)
        if ids.size == 0:
            return
        counts = np.bincount(ids, minlength=self.num_blocks).astype(np.int32)
        short = np.flatnonzero(counts > self._num_owners)
        if short.size:
            raise ValueError(f"Invalid release: block {short[0]} has no owner left to give it up")
        self._num_owners -= counts
        freed = ids[self._num_owners[ids] == 0]
        if freed.size:
            freed = np.unique(freed)[::-1].astype(np.int32)
            self._free[self._num_free : self._num_free + freed.size] = freed
            self._num_free += freed.size
        self._num_shares -= ids.size - freed.size

    def _checked(self, ids: IntArray) -> IntArray:
        ids = np.asarray(ids)
        if ids.size == 0:
            return ids.astype(np.int32)
        if ids.dtype.kind not in "iu":
            raise TypeError(f"Invalid dtype of block ids: expected integers, got {ids.dtype}")
        if ids.min() < 0 or ids.max() >= self.num_blocks:
            raise ValueError(
                f"Invalid block ids: expected 0 to {self.num_blocks - 1}, "
                f"got {ids.min()} to {ids.max()}"
            )
        return ids

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block is either free once or owned."""
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
