"""`RecordFiles`: the files of a prefix store, one a record; written whole, and checked when read.

| bytes | |
|---|---|
| 0 to 31 | tag of all bytes that follow: xxh3-128 and zeros, or HMAC-SHA-256 with a key |
| 32 to 87 | magic, address, bytes of the payload, tokens |
| 88 to 4095 | zeros |
| 4096 on | the payload, and zeros up to a whole page |

Whole pages can be read past the page cache, for half of the CPU time. Nothing is mapped: a map of a
file that another process cuts would end this process.
"""

import errno
import hmac
import os
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
TAG_BYTES = 32
ADDRESS_BYTES = 32
MAX_KEY_BYTES = 64  # a block of SHA-256
# Another process may have written a file and not yet its row of the index.
ORPHAN_SECONDS = 600.0
_FIELDS = struct.Struct("<8s32sQQ")
_MAGIC = b"dsv4 pr1"
_MAX_BUFFERS = 512  # of one writev; Linux takes 1,024
# A link is not followed, and a pipe is not waited for.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL


class DamagedRecordError(Exception):
    """A file that is not the record its name says."""


def file_bytes(num_bytes: int) -> int:
    """Bytes of the file of a record."""
    return PAGE_BYTES + num_bytes + -num_bytes % PAGE_BYTES


def make_hasher(key: bytes | None) -> Callable[[], Any]:
    """Return what starts a tag: xxh3-128, or HMAC-SHA-256 with a key."""
    if key is not None:
        return hmac.new(key, digestmod="sha256").copy
    try:
        from xxhash import xxh3_128
    except ImportError as error:
        raise ImportError("PrefixStore needs xxhash: pip install 'dsv4[store]'") from error
    return xxh3_128


class RecordFiles:
    """The files below a folder, by address.

    Args:
        folder: The store's.
        key: Makes tags that only its owners can make; None for tags against damage alone.
    """

    def __init__(self, folder: Path, key: bytes | None) -> None:
        self._rows, self._unfinished = folder / "rows", folder / "unfinished"
        self._hasher = make_hasher(key)
        self._name, self._numbers = secrets.token_hex(8), count()

    def path(self, address: bytes) -> Path:
        name = address.hex()
        return self._rows / name[:2] / name

    def is_lost(self, address: bytes) -> bool:
        return not os.path.lexists(self.path(address))

    def write(self, address: bytes, payload: Sequence[memoryview], num_tokens: int) -> None:
        """Write a record, whole or not at all."""
        num_bytes = sum(part.nbytes for part in payload)
        fields = _FIELDS.pack(_MAGIC, address, num_bytes, num_tokens)
        head = memoryview(fields.ljust(PAGE_BYTES - TAG_BYTES, b"\0"))
        parts = [head, *payload, memoryview(bytes(-num_bytes % PAGE_BYTES))]
        target = self.path(address)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._unfinished.mkdir(mode=0o700, exist_ok=True)
        name = self._unfinished / f"{self._name}-{next(self._numbers)}"
        handle = os.open(name, _WRITE_FLAGS, 0o600)
        try:
            try:
                _write_all(handle, [memoryview(self._tag(parts)), *parts])
            finally:
                os.close(handle)
            os.replace(name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def read(self, address: bytes, scratch: memoryview) -> tuple[memoryview, int]:
        """Read a record, and return its payload in scratch memory, and its tokens.

        Args:
            scratch: The `file_bytes` of a record of the length that is expected, page-aligned.

        Raises:
            DamagedRecordError: The file is not the whole record, or its tag is wrong.
            OSError: It cannot be read; `FileNotFoundError` where there is none.
        """
        path = self.path(address)
        try:
            _read_all(path, scratch, os.O_DIRECT)
        except FileNotFoundError:
            raise
        except OSError:  # this file system may read through the page cache alone
            _read_all(path, scratch, 0)
        magic, found, num_bytes, num_tokens = _FIELDS.unpack_from(scratch, TAG_BYTES)
        if (magic, found, file_bytes(num_bytes)) != (_MAGIC, address, len(scratch)):
            raise DamagedRecordError
        if not hmac.compare_digest(scratch[:TAG_BYTES], self._tag([scratch[TAG_BYTES:]])):
            raise DamagedRecordError
        return scratch[PAGE_BYTES : PAGE_BYTES + num_bytes], num_tokens

    def remove(self, address: bytes) -> None:
        """Remove what lies at an address, if anything."""
        _remove(self.path(address))

    def find(self, first: int) -> set[bytes]:
        """Return the addresses that begin with a byte and have a file."""
        folder = self._rows / f"{first:02x}"
        with suppress(FileNotFoundError):
            return {bytes.fromhex(name) for name in os.listdir(folder) if _is_address(name)}
        return set()

    def remove_orphans(self, addresses: Iterable[bytes]) -> None:
        """Remove files that are too old to be on their way into the index."""
        for address in addresses:
            _remove_old(self.path(address))

    def remove_unfinished(self) -> None:
        """Remove what killed processes left half written."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._unfinished):
                _remove_old(self._unfinished / name)

    def _tag(self, parts: Iterable[memoryview]) -> bytes:
        hasher = self._hasher()
        for part in parts:
            hasher.update(part)  # gives up the GIL
        digest: bytes = hasher.digest()
        return digest.ljust(TAG_BYTES, b"\0")


def _write_all(handle: int, views: list[memoryview]) -> None:
    while views:
        num_written = os.writev(handle, views[:_MAX_BUFFERS])
        while views and num_written >= views[0].nbytes:
            num_written -= views.pop(0).nbytes
        if num_written:
            views[0] = views[0][num_written:]


def _read_all(path: Path, into: memoryview, flags: int) -> None:
    """Fill memory from a file that has exactly its bytes."""
    try:
        handle = os.open(path, _READ_FLAGS | flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise DamagedRecordError from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size != len(into):
            raise DamagedRecordError
        position = 0
        while position < len(into):
            num_read = os.preadv(handle, [into[position:]], position)
            if num_read == 0:  # cut since its size was read
                raise DamagedRecordError
            position += num_read
    finally:
        os.close(handle)


def _is_address(name: str) -> bool:
    return len(name) == 2 * ADDRESS_BYTES and not set(name) - set("0123456789abcdef")


def _remove_old(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.lstat().st_mtime > ORPHAN_SECONDS:
            _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # it stays, and is refused again
