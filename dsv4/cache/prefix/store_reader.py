"""`StoreReader`: the threads that read records of a prefix store into the caller's memory.

A record is read into a thread's own pages, checked there, and then copied: direct reads need
aligned memory, and nothing that fails its check reaches the caller.
"""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from threading import Lock, local

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.prefix.store_files import DamagedRecordError, RecordFiles, file_bytes
from dsv4.cache.prefix.store_writer import StoreWriter

ByteArray = NDArray[np.uint8]


class ReadHandle:
    """Reads that are under way; made by `BoundStore.read`.

    The buffers must stay until they are done. One whose record is not found stays as it was.
    """

    def __init__(self, num_records: int) -> None:
        self.is_cancelled = False
        self._num_tokens = [-1] * num_records  # -1: not found
        self._futures: list[Future[None]] = []

    def done(self) -> bool:
        """Say whether all reads are over."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all reads; say whether they are over."""
        # `wait` alone would wait for a thread to pass by a cancelled one.
        return not wait([f for f in self._futures if not f.cancelled()], timeout).not_done

    def cancel(self) -> None:
        """Skip reads that have not begun, and wait for the others."""
        self.is_cancelled = True
        for future in self._futures:
            future.cancel()
        self.wait()

    @property
    def found(self) -> list[bool]:
        """Whether each record was found and is whole; waits for the reads."""
        return [number >= 0 for number in self.num_tokens]

    @property
    def num_tokens(self) -> list[int]:
        """The `num_tokens` each record was put with, -1 if not found; waits for the reads."""
        self.wait()
        for future in self._futures:
            if not future.cancelled():
                future.result()  # raises an error of our own
        return self._num_tokens.copy()


class StoreReader:
    """A pool of threads, and the counts of what they found.

    Attributes:
        num_hits, num_misses, num_damaged: Reads; a damaged record is a miss too.
    """

    def __init__(self, files: RecordFiles, writer: StoreWriter, *, num_threads: int) -> None:
        self.num_hits = self.num_misses = self.num_damaged = 0
        self._files, self._writer = files, writer
        self._counting = Lock()
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="dsv4-prefix-read")
        self._is_closed = False
        self._local = local()

    def start(
        self,
        address: Callable[[bytes], bytes],
        hashes: Sequence[bytes],
        into: Sequence[ByteArray],
        *,
        keeps_damaged: bool = False,
    ) -> ReadHandle:
        """Start to read records; the threads turn hashes into addresses."""
        handle, numbers = ReadHandle(len(into)), count()

        def read_some() -> None:
            while (i := next(numbers)) < len(into) and not (handle.is_cancelled or self._is_closed):
                number = self._read(address(hashes[i]), into[i], keeps_damaged)
                handle._num_tokens[i] = number

        num_threads = min(len(into), self._num_threads)
        handle._futures = [self._threads.submit(read_some) for _ in range(num_threads)]
        return handle

    def close(self) -> None:
        """Skip reads that have not begun, and end the threads."""
        self._is_closed = True
        self._threads.shutdown()  # what is queued sees the flag

    def _read(self, address: bytes, into: ByteArray, keeps_damaged: bool) -> int:
        """Read one record, and return its tokens; -1 if it was not found."""
        num_tokens, is_damaged = -1, False
        try:
            payload, number = self._files.read(address, self._pages(file_bytes(into.nbytes)))
            if len(payload) != into.nbytes:
                raise DamagedRecordError
            np.copyto(into, np.frombuffer(payload, dtype=np.uint8))  # without the GIL
            num_tokens = number
            self._writer.note_use(address)
        except DamagedRecordError:
            is_damaged = not keeps_damaged
            if is_damaged:
                self._files.remove(address)
                self._writer.note_removal(address)
        except FileNotFoundError:
            self._writer.note_removal(address)
        except OSError:
            pass  # the record may be whole: too many open files, say
        with self._counting:
            self.num_hits += num_tokens >= 0
            self.num_misses += num_tokens < 0
            self.num_damaged += is_damaged
        return num_tokens

    def _pages(self, num_bytes: int) -> memoryview:
        """Return memory of this thread, aligned to a page."""
        pages: memoryview | None = getattr(self._local, "pages", None)
        if pages is None or len(pages) < num_bytes:
            pages = self._local.pages = memoryview(mmap.mmap(-1, num_bytes))
        return pages[:num_bytes]
