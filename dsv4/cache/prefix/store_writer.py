"""`StoreWriter`: the thread that changes a prefix store: writes, notes of use, eviction, sweeping.

Nobody waits for it. Its queue is bounded in bytes; what does not fit, or cannot be written, is
dropped and counted.
"""

import sqlite3
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import NamedTuple

from dsv4.cache.prefix.store_files import RecordFiles, file_bytes
from dsv4.cache.prefix.store_index import StoreIndex

# Room for a whole batch is made before its first file is written.
BATCH_BYTES = 32 << 20
_USES_PER_BATCH = 1000
_SECONDS_BETWEEN_USES = 5.0


class QueuedRecord(NamedTuple):
    """A record on its way to the disk, with its number among all things queued."""

    number: int
    address: bytes
    payload: Sequence[memoryview]
    num_tokens: int
    num_bytes: int


class Batch(NamedTuple):
    """Things that are settled together; all things up to a number are, once these are."""

    records: list[QueuedRecord]
    used: list[bytes]
    removed: list[bytes]
    number: int


class StoreWriter:
    """A queue and its thread.

    Args:
        max_bytes: Bytes of all files that the index may count.
        queue_bytes: Bytes that may wait to be written.

    Attributes:
        num_written, num_dropped: Records of this process.
    """

    def __init__(
        self, index: StoreIndex, files: RecordFiles, *, max_bytes: int, queue_bytes: int
    ) -> None:
        self.num_written = self.num_dropped = 0
        self._index, self._files = index, files
        self._max_bytes, self._queue_bytes = max_bytes, queue_bytes
        self._changed = Condition()
        self._records: deque[QueuedRecord] = deque()
        self._waiting: set[bytes] = set()  # addresses in the queue or in a batch
        self._num_waiting_bytes = 0
        self._used: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._num_queued, self._num_settled = 1, 0  # the first thing is the sweep
        self._needs_flush = self._is_closing = self._has_ended = False
        self._thread = Thread(target=self._run, name="dsv4-prefix-store", daemon=True)
        self._thread.start()

    def put(
        self, address: bytes, payload: Sequence[memoryview], num_tokens: int, *, copy: bool
    ) -> None:
        """Queue a record, or drop it; one that waits already is not queued again."""
        num_bytes = sum(part.nbytes for part in payload)
        with self._changed:
            if address in self._waiting:
                return
            is_full = self._num_waiting_bytes + num_bytes > self._queue_bytes
            if is_full or file_bytes(num_bytes) > self._max_bytes or self._is_closing:
                self.num_dropped += 1
                return
            if copy:
                payload = [memoryview(b"".join(payload))]
            self._num_queued += 1
            record = QueuedRecord(self._num_queued, address, payload, num_tokens, num_bytes)
            self._records.append(record)
            self._waiting.add(address)
            self._num_waiting_bytes += num_bytes
            self._changed.notify_all()

    def note_use(self, address: bytes) -> None:
        """Queue a new time of last use."""
        with self._changed:
            self._used[address] = None
            self._num_queued += 1

    def note_removal(self, address: bytes) -> None:
        """Queue the removal of a row whose file is gone."""
        with self._changed:
            self._removed[address] = None
            self._num_queued += 1
            self._changed.notify_all()

    def flush(self, timeout: float | None) -> bool:
        """Wait until all that is queued now is settled; say whether it is."""
        with self._changed:
            target = self._num_queued
            self._needs_flush = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._num_settled >= target or self._has_ended, timeout=timeout
            )
            return self._num_settled >= target

    def close(self) -> None:
        """Settle what is queued, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            with suppress(OSError, sqlite3.Error):
                self._sweep()
            self._finish(Batch([], [], [], number=1))
            while (batch := self._take()) is not None:
                self._settle(batch)
                self._finish(batch)
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _sweep(self) -> None:
        """Remove rows without files, and old files without rows."""
        self._files.remove_unfinished()
        for first in range(256):
            # Rows first: a file is there before its row.
            rows = self._index.find_beginning(first)
            files = self._files.find(first)
            if rows - files:
                self._index.forget(rows - files, self._files.is_lost)
            self._files.remove_orphans(files - rows)

    def _is_due(self) -> bool:
        has_many = len(self._used) >= _USES_PER_BATCH
        is_asked = self._needs_flush or self._is_closing
        return bool(self._records or self._removed or has_many or is_asked)

    def _take(self) -> Batch | None:
        """Wait for a batch; None when nothing is left of a writer that closes."""
        with self._changed:
            self._changed.wait_for(self._is_due, timeout=_SECONDS_BETWEEN_USES)
            records, used, removed = self._take_records(), list(self._used), list(self._removed)
            self._used.clear()
            self._removed.clear()
            self._needs_flush = False
            if self._is_closing and not (records or used or removed):
                return None
            number = self._records[0].number - 1 if self._records else self._num_queued
            return Batch(records, used, removed, number)

    def _take_records(self) -> list[QueuedRecord]:
        records: list[QueuedRecord] = []
        room = min(BATCH_BYTES, self._max_bytes)
        while self._records:
            room -= file_bytes(self._records[0].num_bytes)
            if records and room < 0:
                break
            records.append(self._records.popleft())
        return records

    def _settle(self, batch: Batch) -> None:
        new = batch.records
        written: list[QueuedRecord] = []
        try:
            if batch.removed:
                self._index.forget(batch.removed, self._files.is_lost)
            known = self._index.find([record.address for record in new])
            if batch.used or known:
                self._index.note_uses([*batch.used, *known])
            new = [record for record in new if record.address not in known]
            if new:
                needed = sum(file_bytes(record.num_bytes) for record in new)
                for address in self._index.make_room(needed, self._max_bytes):
                    self._files.remove(address)
                written = [record for record in new if self._write(record)]
                self._index.add(
                    (record.address, file_bytes(record.num_bytes)) for record in written
                )
        except sqlite3.Error:  # busy for too long, a full disk, a damaged index
            for record in written:
                self._files.remove(record.address)
            written = []
        with self._changed:
            self.num_written += len(written)
            self.num_dropped += len(new) - len(written)

    def _write(self, record: QueuedRecord) -> bool:
        try:
            self._files.write(record.address, record.payload, record.num_tokens)
        except OSError:
            return False
        return True

    def _finish(self, batch: Batch) -> None:
        with self._changed:
            for record in batch.records:
                self._waiting.discard(record.address)
                self._num_waiting_bytes -= record.num_bytes
            self._num_settled = batch.number
            self._changed.notify_all()
