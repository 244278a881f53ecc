"""`StoreIndex`: the SQLite index of a prefix store: addresses, bytes and times of last use.

Several processes may have it open. One thread changes it, any thread asks it. It fsyncs at the
checkpoints of its log alone: what a crash of the machine loses of it are records.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from dsv4.cache.prefix.store_files import ADDRESS_BYTES

VERSION = 1
_APPLICATION_ID = 0x44535634  # "DSV4"
_BUSY_SECONDS = 20.0
_ADDRESSES_PER_QUERY = 500
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE records(
    address BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL, last_used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX by_last_used ON records(last_used);
CREATE TABLE totals(num_records INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON records BEGIN
    UPDATE totals SET num_records = num_records + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER removed AFTER DELETE ON records BEGIN
    UPDATE totals SET num_records = num_records - 1, num_bytes = num_bytes - OLD.num_bytes;
END;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class StoreIndex:
    """An open index.

    Args:
        path: The database; it is made where there is none. One process at a time may open it.

    Raises:
        ValueError: It is another program's, another version's, or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._writer = _connect(path)
            try:
                _check_schema(self._writer, path)
                self._reader = _connect(path)
            except BaseException:
                self._writer.close()
                raise
        except sqlite3.DatabaseError as error:
            raise ValueError(f"Invalid index of a prefix store {path}: {error}") from error
        self._reading = Lock()
        self._time = 0

    def find(self, addresses: Sequence[bytes]) -> set[bytes]:
        """Return those addresses that have a record."""
        found: set[bytes] = set()
        with self._reading:
            for start in range(0, len(addresses), _ADDRESSES_PER_QUERY):
                part = addresses[start : start + _ADDRESSES_PER_QUERY]
                marks = ",".join("?" * len(part))
                query = f"SELECT address FROM records WHERE address IN ({marks})"
                found.update(address for (address,) in self._reader.execute(query, part))
        return found

    def find_beginning(self, first: int) -> set[bytes]:
        query = "SELECT address FROM records WHERE address BETWEEN ? AND ?"
        bounds = bytes([first]), bytes([first]) + b"\xff" * ADDRESS_BYTES
        with self._reading:
            return {address for (address,) in self._reader.execute(query, bounds)}

    def totals(self) -> tuple[int, int]:
        """Return the records of all processes, and the bytes of their files."""
        with self._reading:
            num_records, num_bytes = self._reader.execute("SELECT * FROM totals").fetchone()
            return num_records, num_bytes

    def make_room(self, num_bytes: int, max_bytes: int) -> list[bytes]:
        """Forget the least recently used records until so many bytes fit; return them."""
        evicted: list[bytes] = []
        with self._transaction():
            (total,) = self._writer.execute("SELECT num_bytes FROM totals").fetchone()
            excess = total + num_bytes - max_bytes
            if excess > 0:
                query = "SELECT address, num_bytes FROM records ORDER BY last_used"
                with closing(self._writer.execute(query)) as rows:
                    for address, size in rows:
                        evicted.append(address)
                        excess -= size
                        if excess <= 0:
                            break
                self._delete(evicted)
        return evicted

    def forget(self, addresses: Iterable[bytes], is_lost: Callable[[bytes], bool]) -> None:
        """Forget those records that are lost, unless another process adds them just now."""
        with self._transaction():
            self._delete([address for address in addresses if is_lost(address)])

    def note_uses(self, addresses: Iterable[bytes]) -> None:
        """Give records a new time of last use."""
        update = "UPDATE records SET last_used = ? WHERE address = ?"
        with self._transaction():
            self._writer.executemany(update, [(self._tick(), address) for address in addresses])

    def add(self, records: Iterable[tuple[bytes, int]]) -> None:
        """Add records whose files are there: addresses and bytes."""
        insert = "INSERT OR IGNORE INTO records VALUES (?, ?, ?)"
        with self._transaction():
            rows = [(address, num_bytes, self._tick()) for address, num_bytes in records]
            self._writer.executemany(insert, rows)

    def close(self) -> None:
        with self._reading:
            self._reader.close()
        self._writer.close()

    def _delete(self, addresses: Sequence[bytes]) -> None:
        rows = [(address,) for address in addresses]
        self._writer.executemany("DELETE FROM records WHERE address = ?", rows)

    def _tick(self) -> int:
        """A time that processes share, and that grows with every call."""
        self._time = max(self._time + 1, time.time_ns())
        return self._time

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (application_id, version, num_tables) == (0, 0, 0):  # new, or killed before its schema
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(_SCHEMA)
    elif application_id != _APPLICATION_ID:
        raise ValueError(f"Invalid index of a prefix store {path}: it is another program's")
    elif version != VERSION:
        raise ValueError(
            f"Invalid index of a prefix store {path}: expected version {VERSION}, got {version}"
        )
