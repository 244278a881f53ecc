"""`PrefixStore`: a folder of prefix records, by hash, that survives a restart.

Records are blocks and checkpoints as bytes; the store knows nothing of either. A record that is
found equals the one that was put. Everything else is a miss: a lost file, a damaged one, a full
disk.
"""

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.prefix.store_files import MAX_KEY_BYTES, RecordFiles
from dsv4.cache.prefix.store_index import StoreIndex
from dsv4.cache.prefix.store_reader import ByteArray, ReadHandle, StoreReader
from dsv4.cache.prefix.store_writer import StoreWriter
from dsv4.checks import check_int

Hasher = Any  # hashlib does not name the type of its objects
FilePath = str | os.PathLike[str]

_INDEX, _LOCK = "index.sqlite", "lock"


@dataclass(frozen=True)
class StoreStatistics:
    """Counts of a store.

    Attributes:
        num_records, num_bytes: Records of all processes, and the bytes of their files.
        hits: Reads of this process that found a record.
        misses: Reads that did not, those of damaged records too.
        damaged: Records that were refused and removed.
        written: Records that this process wrote.
        dropped: Records that found no room in the queue, in the store or on the disk.
    """

    num_records: int
    num_bytes: int
    hits: int
    misses: int
    damaged: int
    dropped: int
    written: int


class PrefixStore:
    """A folder of prefix records (blocks and checkpoints) that survives restarts.

    Several processes of one host may have it open. Any of them may be killed at any moment.

    Args:
        path: A store's folder, an empty one, or none yet; it is made for its owner alone.
        max_bytes: Bytes of all files. The least recently used records are removed before others
            are written. Each further process can exceed it by 32 MiB, or by one larger record.
            The index and files of killed processes come on top.
        model_id: A name for the weights; records of other models are never found.
        key: Up to 64 secret bytes. Records then have an HMAC-SHA-256 tag, and those of another key
            are never found. Without it a checksum, xxh3-128, finds damage alone.
        queue_bytes: Bytes that may wait to be written.
        num_readers: Threads that read.

    Raises:
        ValueError: The folder is not a store's, or of another version.
        ImportError: There is no key, and xxhash is not installed.
    """

    def __init__(
        self,
        path: FilePath,
        max_bytes: int,
        *,
        model_id: str = "",
        key: bytes | None = None,
        queue_bytes: int = 256 << 20,
        num_readers: int = 8,
    ) -> None:
        self.max_bytes = check_int("max_bytes", max_bytes, at_least=1)
        queue_bytes = check_int("queue_bytes", queue_bytes, at_least=1)
        num_readers = check_int("num_readers", num_readers, at_least=1)
        self._identity = _identity(model_id, key)
        self.path = Path(path)
        self._files = RecordFiles(self.path, key)
        with _opened_folder(self.path):
            self._index = StoreIndex(self.path / _INDEX)
        self._writer = StoreWriter(
            self._index, self._files, max_bytes=self.max_bytes, queue_bytes=queue_bytes
        )
        self._reader = StoreReader(self._files, self._writer, num_threads=num_readers)
        self._process = os.getpid()
        self._is_closed = False

    def bind(self, fingerprint: str) -> "BoundStore":
        """Return the records of one format; `config.format_fingerprint` names a cache's."""
        return BoundStore(self, hashlib.sha256(self._identity + _part(fingerprint.encode())))

    def read(self, addresses: Sequence[bytes], into: Tensor) -> ReadHandle:
        """Start to read records by their addresses, which `BoundStore.addresses` returns.

        A record of another length stays, and is not found: a peer may have asked for it.
        """
        self._check()
        return self._reader.start(bytes, list(addresses), _buffers(into), keeps_damaged=True)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is queued is written or dropped; say whether it is."""
        self._check()
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write what is queued, skip reads that have not begun, and close the store."""
        if self._is_closed:
            return
        self._check()
        self._is_closed = True
        self._reader.close()
        self._writer.close()
        self._index.close()

    def statistics(self) -> StoreStatistics:
        self._check()
        return StoreStatistics(
            *self._index.totals(),
            hits=self._reader.num_hits,
            misses=self._reader.num_misses,
            damaged=self._reader.num_damaged,
            dropped=self._writer.num_dropped,
            written=self._writer.num_written,
        )

    @property
    def num_damaged(self) -> int:
        """Records that this process refused and removed."""
        return self._reader.num_damaged

    def __enter__(self) -> "PrefixStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("A PrefixStore cannot be copied or pickled: open its folder again")

    def _check(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"The prefix store {self.path} is closed")
        if self._process != os.getpid():
            raise RuntimeError(
                f"The prefix store {self.path} was opened before a fork: open it in each process"
            )


class RecordName(NamedTuple):
    """A record of one format: its kind, the hash of all tokens up to its end, and its bytes."""

    kind: str
    chain_hash: bytes
    num_bytes: int


class BoundStore:
    """The records of one format in a store; made by `PrefixStore.bind`.

    A record is known by its kind, such as "block", and by the hash of all tokens up to its end.
    """

    def __init__(self, store: PrefixStore, root: Hasher) -> None:
        self.store = store
        self._root = root

    def addresses(self, kind: str, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of records, which no other model, key or format has."""
        return list(map(self._addresses(kind), hashes))

    def contains(self, kind: str, hashes: Sequence[bytes]) -> list[bool]:
        """Say which records are there; those still in the queue are not."""
        self.store._check()
        addresses = self.addresses(kind, hashes)
        try:
            known = self.store._index.find(addresses)
        except sqlite3.Error:  # busy for too long, a damaged index
            known = set()
        return [address in known for address in addresses]

    def put(
        self,
        kind: str,
        chain_hash: bytes,
        rows: Tensor | Sequence[memoryview],
        num_tokens: int = 0,
        *,
        copy: bool = True,
    ) -> None:
        """Queue a record to be written; drop it if the queue is full. Never waits for the disk.

        Args:
            rows: A contiguous tensor on the CPU, or buffers that together are the record.
            num_tokens: A number that `ReadHandle.num_tokens` gives back.
            copy: Take a copy now. Otherwise `rows` must not change until they are written.
        """
        payload = _payload(rows)
        num_tokens = check_int("num_tokens", num_tokens, at_least=0, at_most=2**63 - 1)
        self.store._check()
        address = self._addresses(kind)(chain_hash)
        self.store._writer.put(address, payload, num_tokens, copy=copy)

    def read(
        self, kind: str, hashes: Sequence[bytes], into: Tensor | Sequence[memoryview]
    ) -> ReadHandle:
        """Start to read records into a buffer each.

        Args:
            into: uint8 `[n, num_bytes]` on the CPU, or `n` writable buffers. A record of
                another length counts as damaged.
        """
        self.store._check()
        hashes, buffers = list(hashes), _buffers(into)
        if len(buffers) != len(hashes):
            raise ValueError(f"Invalid into: expected {len(hashes)} buffers, got {len(buffers)}")
        return self.store._reader.start(self._addresses(kind), hashes, buffers)

    def _addresses(self, kind: str) -> Callable[[bytes], bytes]:
        root = self._root.copy()
        root.update(_part(kind.encode()))

        def address(chain_hash: bytes) -> bytes:
            hasher = root.copy()
            hasher.update(chain_hash)
            digest: bytes = hasher.digest()
            return digest

        return address


def _part(data: bytes) -> bytes:
    """Put a length before bytes, so that parts in a row are told apart."""
    return len(data).to_bytes(8, "little") + data


def _identity(model_id: str, key: bytes | None) -> bytes:
    """Return the beginning of all that is hashed to an address."""
    if key is None:
        key_name = b""
    elif isinstance(key, bytes) and 0 < len(key) <= MAX_KEY_BYTES:
        key_name = hashlib.blake2b(b"dsv4 HMAC-SHA-256", key=key, digest_size=32).digest()
    else:
        raise ValueError(f"Invalid key: expected 1 to {MAX_KEY_BYTES} bytes")
    return b"".join(map(_part, (b"dsv4 prefix record", model_id.encode(), key_name)))


@contextmanager
def _opened_folder(path: Path) -> Iterator[None]:
    """Make a store's folder where there is none, and keep other processes out of it for now."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"Invalid path of a prefix store: expected a folder, got the file {path}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = os.listdir(path)
    has_others = any(name != _LOCK and not name.startswith(_INDEX) for name in names)
    if has_others and _INDEX not in names:
        raise ValueError(
            f"Invalid path of a prefix store: expected an empty folder or a store's, got {path}"
        )
    handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _payload(rows: Tensor | Sequence[memoryview]) -> list[memoryview]:
    if isinstance(rows, Tensor):
        if rows.device.type != "cpu" or not rows.is_contiguous():
            raise ValueError(
                f"Invalid rows: expected them contiguous on the CPU, got {rows.device}"
            )
        rows = [rows.detach().reshape(-1).view(torch.uint8).numpy().data]
    payload = [memoryview(part).cast("B") for part in rows]
    if not any(part.nbytes for part in payload):
        raise ValueError("Invalid rows: expected at least one byte, got none")
    return payload


def _buffers(into: Tensor | Sequence[memoryview]) -> Sequence[ByteArray]:
    if isinstance(into, Tensor):
        is_bytes = into.dtype == torch.uint8 and into.device.type == "cpu" and into.dim() == 2
        if not is_bytes:
            raise ValueError(
                "Invalid into: expected uint8 [n, num_bytes] on the CPU, got "
                f"{into.dtype} {list(into.shape)} on {into.device}"
            )
        return list(into.numpy())
    buffers = [np.asarray(memoryview(buffer).cast("B")) for buffer in into]
    if not all(buffer.flags.writeable for buffer in buffers):
        raise ValueError("Invalid into: expected writable buffers, got one that is not")
    return buffers
