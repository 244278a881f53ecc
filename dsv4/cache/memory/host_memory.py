"""`HostMemory`: blocks and slots outside of the device, and the copies between the two.

On a GPU the host's memory is pinned and copies run on a stream of their own. They start when all
work queued before them is done. `finish` lets the current stream wait for them; the host never
waits.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.device_rows import DeviceRows
from dsv4.cache.memory.journal import Journal

Kind = Literal["blocks", "slots"]


class HostMemory:
    """Room for blocks and slots in host memory.

    Args:
        blocks, slots: The rows on the devices.
        num_blocks, num_slots: Blocks and slots on the host.
        is_wiped: Overwrite those that lose their last owner with zeros.

    Attributes:
        block_owners, slot_owners: Owners of the host's blocks and slots.
        num_bytes_out, num_bytes_in: Bytes copied to the host and back.
    """

    def __init__(
        self,
        blocks: DeviceRows,
        slots: DeviceRows,
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
        self._device = {"blocks": blocks, "slots": slots}
        self.blocks = _rows_like(blocks, num_blocks)
        self.slots = _rows_like(slots, num_slots)
        devices = [piece.storage.device for piece in blocks.pieces if num_blocks + num_slots > 0]
        self._streams = {
            device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"
        }
        self._is_copying = False

    def copy_out(
        self, kind: Kind, sources: NDArray[np.integer], targets: NDArray[np.integer]
    ) -> None:
        """Copy blocks or slots of the device to those of the host, consecutive ones at once."""
        rows = self._device[kind]
        for piece in rows.pieces:
            with self._copying(piece.storage.device):
                for mine, theirs in rows.pairs(piece, sources, getattr(self, kind), targets):
                    theirs.copy_(mine, non_blocking=True)
        self.num_bytes_out += len(sources) * rows.num_bytes

    def copy_in(
        self, kind: Kind, sources: NDArray[np.integer], targets: NDArray[np.integer]
    ) -> None:
        """Copy blocks or slots of the host to the device, before any work queued next."""
        rows = self._device[kind]
        for piece in rows.pieces:
            with self._copying(piece.storage.device):
                for mine, theirs in rows.pairs(piece, targets, getattr(self, kind), sources):
                    mine.copy_(theirs, non_blocking=True)
        self.num_bytes_in += len(sources) * rows.num_bytes
        self.finish()

    def copy_row_out(self, rows: DeviceRows, row: int, targets: IntArray) -> None:
        """Copy a row of the device of any length to some blocks of the host."""
        self.copy_away(self._beside(rows, row, targets))
        self.num_bytes_out += rows.num_bytes

    def copy_row_in(self, sources: IntArray, rows: DeviceRows, row: int) -> None:
        """Copy blocks of the host to a row of the device, before any work queued next."""
        for mine, theirs in self._beside(rows, row, sources):
            with self._copying(mine.device):
                mine.copy_(theirs, non_blocking=True)
        self.num_bytes_in += rows.num_bytes
        self.finish()

    def new_rows(self, num_rows: int) -> Tensor:
        """Allocate more memory on the host for blocks, pinned on a GPU."""
        return _rows_like(self._device["blocks"], num_rows)

    def device_block(self, block: int) -> list[tuple[int, Tensor]]:
        """Return place and bytes of each part of a block of the device."""
        return self._device["blocks"].cut(block, self._device["blocks"].num_bytes)[0]

    def copy_away(self, copies: Iterable[tuple[Tensor, Tensor]]) -> list[torch.cuda.Event]:
        """Copy rows of the device to other memory of the host; return the events at their end."""
        for source, target in copies:
            with self._copying(source.device):
                target.copy_(source, non_blocking=True)
        return self.record_copies()

    def record_copies(self) -> list[torch.cuda.Event]:
        """Return events after all copies so far; none on the CPU, where they are done."""
        return [stream.record_event() for stream in self._streams.values()]

    def release(self) -> None:
        """Give the memory back, once copies to it are done."""
        self._wait()
        self.blocks, self.slots = self.blocks[:0].clone(), self.slots[:0].clone()

    def finish(self) -> None:
        """Let work queued from here on wait for the copies; call it before reuse of their rows."""
        if self._is_copying:
            for device, stream in self._streams.items():
                torch.cuda.current_stream(device).wait_stream(stream)
        self._is_copying = False

    def _wipe(self, kind: Kind, ids: IntArray) -> None:
        """Overwrite blocks or slots of the host with zeros."""
        self._wait()
        getattr(self, kind)[torch.from_numpy(ids.astype(np.int64))] = 0

    def _wait(self) -> None:
        """Wait on the host for all copies: it writes the memory itself."""
        for stream in self._streams.values():
            stream.synchronize()

    def _copying(self, device: torch.device) -> AbstractContextManager[object]:
        """Copy on the copies' stream, after all work queued before."""
        self._is_copying = True
        stream = self._streams.get(device)
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    def _beside(
        self, rows: DeviceRows, row: int, blocks: IntArray
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a row beside their bytes in blocks of the host."""
        for parts, block in zip(rows.cut(row, self.blocks.shape[1]), blocks, strict=True):
            for place, part in parts:
                yield part, self.blocks[block, place : place + len(part)]


def _rows_like(rows: DeviceRows, num_rows: int) -> Tensor:
    """Allocate host memory for rows, pinned if some are a GPU's."""
    is_pinned = num_rows > 0 and any(piece.storage.is_cuda for piece in rows.pieces)
    return torch.empty(num_rows, rows.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
