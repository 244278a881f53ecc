"""`HostMemory`: blocks and slots outside of the device, and the copies between the two.

On a GPU the host's memory is pinned and copies run on a stream of their own. They start when all
work queued before them is done. `finish` lets the current stream wait for them; the host never
waits.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray, joined_runs
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.journal import Journal


class HostMemory:
    """Room for blocks and slots in host memory.

    Args:
        blocks, slots: The device's storages, `[num, bytes]` uint8.
        num_blocks, num_slots: Blocks and slots on the host.
        is_wiped: Overwrite those that lose their last owner with zeros.

    Attributes:
        block_owners, slot_owners: Owners of the host's blocks and slots.
        num_bytes_out, num_bytes_in: Bytes copied to the host and back.
    """

    def __init__(
        self,
        blocks: Tensor,
        slots: Tensor,
        journal: Journal,
        *,
        num_blocks: int,
        num_slots: int,
        is_wiped: bool = False,
    ) -> None:
        wipe = self._wipe if is_wiped else None
        self.block_owners = BlockAllocator(num_blocks, journal, wipe and partial(wipe, "blocks"))
        self.slot_owners = BlockAllocator(num_slots, journal, wipe and partial(wipe, "slots"))
        self.num_bytes_out = self.num_bytes_in = 0
        self._device_blocks, self._device_slots = blocks, slots
        self.blocks = _rows_like(blocks, num_blocks)
        self.slots = _rows_like(slots, num_slots)
        has_stream = blocks.is_cuda and num_blocks + num_slots > 0
        self._stream = torch.cuda.Stream(blocks.device) if has_stream else None
        self._is_copying = False

    def copy_blocks_out(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks of the device to blocks of the host."""
        self.num_bytes_out += self._copy(self._device_blocks, sources, self.blocks, targets)

    def copy_blocks_in(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks of the host to blocks of the device, before any work queued next."""
        self.num_bytes_in += self._copy(self.blocks, sources, self._device_blocks, targets)
        self.finish()

    def copy_slot_out(self, source: int, target: int) -> None:
        """Copy a slot of the device to one of the host."""
        rows = np.array([source]), np.array([target])
        self.num_bytes_out += self._copy(self._device_slots, rows[0], self.slots, rows[1])

    def copy_slot_in(self, source: int, target: int) -> None:
        """Copy a slot of the host to one of the device, before any work queued next."""
        rows = np.array([source]), np.array([target])
        self.num_bytes_in += self._copy(self.slots, rows[0], self._device_slots, rows[1])
        self.finish()

    def copy_row_out(self, row: Tensor, targets: IntArray) -> None:
        """Copy a row of the device of any length, `[bytes]`, to some blocks of the host."""
        with self._copying():
            for piece, target in zip(row.split(self.blocks.shape[1]), targets, strict=True):
                self.blocks[target, : len(piece)].copy_(piece, non_blocking=True)
        self.num_bytes_out += len(row)

    def copy_row_in(self, sources: IntArray, row: Tensor) -> None:
        """Copy blocks of the host to a row of the device, before any work queued next."""
        with self._copying():
            for piece, source in zip(row.split(self.blocks.shape[1]), sources, strict=True):
                piece.copy_(self.blocks[source, : len(piece)], non_blocking=True)
        self.num_bytes_in += len(row)
        self.finish()

    def new_rows(self, num_rows: int) -> Tensor:
        """Allocate more memory on the host for blocks, pinned on a GPU."""
        return _rows_like(self._device_blocks, num_rows)

    def device_block(self, block: int) -> Tensor:
        """Return a block of the device, `[bytes]`."""
        return self._device_blocks[block]

    def copy_away(self, copies: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy rows of the device to other memory of the host; return the event at their end."""
        with self._copying():
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        return self.record_copies()

    def record_copies(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far; None on the CPU, where they are done."""
        return None if self._stream is None else self._stream.record_event()

    def release(self) -> None:
        """Give the memory back, once copies to it are done."""
        self._wait()
        self.blocks, self.slots = self.blocks[:0].clone(), self.slots[:0].clone()

    def finish(self) -> None:
        """Let work queued from here on wait for the copies; call it before reuse of their rows."""
        if self._is_copying and self._stream is not None:
            torch.cuda.current_stream(self._device_blocks.device).wait_stream(self._stream)
        self._is_copying = False

    def _wipe(self, name: str, ids: IntArray) -> None:
        """Overwrite rows of `blocks` or `slots` with zeros."""
        self._wait()
        getattr(self, name)[torch.from_numpy(ids.astype(np.int64))] = 0

    def _wait(self) -> None:
        """Wait on the host for all copies: it writes the memory itself."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copying(self) -> AbstractContextManager[object]:
        """Copy on the copies' stream, after all work queued before."""
        self._is_copying = True
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device_blocks.device))
        return torch.cuda.stream(self._stream)

    def _copy(
        self,
        source: Tensor,
        source_rows: NDArray[np.integer],
        target: Tensor,
        target_rows: NDArray[np.integer],
    ) -> int:
        """Copy rows, consecutive ones at once, and return their bytes."""
        with self._copying():
            for first, count in joined_runs(source_rows, target_rows):
                start, to = int(source_rows[first]), int(target_rows[first])
                target[to : to + count].copy_(source[start : start + count], non_blocking=True)
        return len(source_rows) * source.shape[1]


def _rows_like(storage: Tensor, num_rows: int) -> Tensor:
    """Allocate host memory for rows of a storage, pinned if that is a GPU's."""
    is_pinned = storage.is_cuda and num_rows > 0
    return torch.empty(num_rows, storage.shape[1], dtype=torch.uint8, pin_memory=is_pinned)
