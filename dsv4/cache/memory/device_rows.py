"""`DeviceRows`: blocks, slots or checkpoints, each layer's bytes on the device of the layer.

A row has one order of bytes, that of a cache on one device. Host memory, files and messages have
it. On several devices each holds the bytes of its layers.

    row      | L0 | L1 | L2 | K0 | K2 | pad |
    cuda:0   | L0 | L1 | K0 | pad |
    cuda:1   | L2 | K2 | pad |
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray, joined_runs
from dsv4.cache.memory.layout import RunLayout


class Span(NamedTuple):
    """Bytes of a row from `start` on, which a piece has from `offset` on."""

    start: int
    offset: int
    size: int


class Piece(NamedTuple):
    """The bytes of all rows that one device holds, `[num_rows, bytes]` uint8."""

    storage: Tensor
    spans: tuple[Span, ...]


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy a tensor to one of its shape and dtype on any device.

    On the CPU one thread copies: torch's others would go on spinning, in the way of a transfer.
    """
    is_plain = target.is_cpu and source.is_cpu and target.dtype == source.dtype
    if is_plain and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def as_buffer(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor on the CPU, which must live on meanwhile.

    Its storage can still be resized, as `sleep` does; `numpy()` would prevent that.
    """
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def find_spans(whole: RunLayout, part: RunLayout) -> tuple[Span, ...]:
    """Find the bytes of a run that some of its layers have, in as few spans as there are."""
    offsets = sorted(
        (offset, whole.offset(layer_idx, name))
        for layer_idx, names in enumerate(part.offsets)
        for name, offset in names.items()
    )
    if not offsets:  # blocks of layers without entries
        return ()
    ends = [offset for offset, _ in offsets[1:]] + [part.num_bytes - part.padding]
    spans: list[Span] = []
    for (offset, start), end in zip(offsets, ends, strict=True):
        last = spans[-1] if spans else Span(-1, 0, 0)
        if last.start + last.size == start:
            spans[-1] = last._replace(size=last.size + end - offset)
        else:
            spans.append(Span(start, offset, end - offset))
    return tuple(spans)


class DeviceRows:
    """Rows of `num_bytes` bytes in pieces, one for each device."""

    def __init__(self, pieces: Sequence[Piece], num_bytes: int) -> None:
        self.pieces, self.num_bytes = tuple(pieces), num_bytes

    @property
    def is_split(self) -> bool:
        return len(self.pieces) > 1

    def __len__(self) -> int:
        return len(self.pieces[0].storage)

    def front(self, num_bytes: int) -> "DeviceRows":
        """Return the first bytes of all rows."""
        pieces = []
        for storage, spans in self.pieces:
            kept = tuple(
                span._replace(size=min(span.size, num_bytes - span.start))
                for span in spans
                if span.start < num_bytes
            )
            size = max((span.offset + span.size for span in kept), default=0)
            pieces.append(Piece(storage[:, :size], kept))
        return DeviceRows(pieces, num_bytes)

    def cut(self, row: int, width: int) -> list[list[tuple[int, Tensor]]]:
        """Cut a row into stretches of `width` bytes: place and bytes of each part of a stretch."""
        stretches: list[list[tuple[int, Tensor]]] = [
            [] for _ in range(-(-self.num_bytes // max(1, width)))
        ]
        for storage, spans in self.pieces:
            for start, offset, size in spans:
                for first in range(start - start % width, start + size, width):
                    low, high = max(first, start), min(first + width, start + size)
                    part = storage[row, offset + low - start : offset + high - start]
                    stretches[first // width].append((low - first, part))
        return stretches

    def pairs(
        self, piece: Piece, rows: NDArray[np.integer], others: Tensor, to: NDArray[np.integer]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of a piece beside their bytes in other memory, consecutive ones at once.

        Parts of rows on a GPU come row by row: a copy of bytes with gaps would wait.
        """
        for first, count in joined_runs(rows, to):
            start, target = int(rows[first]), int(to[first])
            mine, theirs = piece.storage[start : start + count], others[target : target + count]
            for span in piece.spans:
                pair = (
                    mine[:, span.offset : span.offset + span.size],
                    theirs[:, span.start : span.start + span.size],
                )
                if self.is_split and mine.is_cuda:
                    yield from zip(*pair, strict=True)
                else:
                    yield pair

    def view(self, rows: IntArray) -> Tensor | None:
        """Return consecutive rows in place, `[n, num_bytes]`; None for others and split ones."""
        if self.is_split or not len(rows) or (np.diff(rows) != 1).any():
            return None
        return self.pieces[0].storage[int(rows[0]) : int(rows[0]) + len(rows)]

    def read(self, rows: IntArray, into: Tensor) -> None:
        """Copy rows to memory of any device, `[n, num_bytes]`."""
        for piece in self.pieces:
            for mine, theirs in self.pairs(piece, rows, into, np.arange(len(rows))):
                copy_bytes(theirs, mine)

    def write(self, rows: IntArray, values: Tensor) -> None:
        """Give rows their bytes, `[n, num_bytes]` on any device."""
        for piece in self.pieces:
            for mine, theirs in self.pairs(piece, rows, values, np.arange(len(rows))):
                copy_bytes(mine, theirs)

    def copy(self, source: "DeviceRows", row: int, to: int) -> None:
        """Copy a row of rows that lie on the same devices."""
        for mine, theirs in zip(self.pieces, source.pieces, strict=True):
            mine.storage[to].copy_(theirs.storage[row])

    def wipe(self, rows: NDArray[np.integer]) -> None:
        """Overwrite rows with zeros."""
        index = torch.from_numpy(rows.astype(np.int64))
        for storage, _ in self.pieces:
            storage[index.to(storage.device)] = 0
