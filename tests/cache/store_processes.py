"""Processes that write to a prefix store, for the tests that kill them or run several at once."""

import hashlib
import multiprocessing
import signal

import numpy as np

from dsv4.cache.prefix.store import PrefixStore

NUM_BYTES = 5000
FILE_BYTES = 3 * 4096
NUM_RECORDS = 60

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


def name(number: int) -> bytes:
    """The hash of a record."""
    return hashlib.sha256(str(number).encode()).digest()


def payload(number: int) -> bytes:
    """The bytes of a record."""
    return np.random.default_rng(number).bytes(NUM_BYTES)


def read(bound, numbers):
    """Read records; return which were found, and check those that were."""
    into = [bytearray(NUM_BYTES) for _ in numbers]
    found = bound.read("block", [name(number) for number in numbers], into).found
    for is_found, number, buffer in zip(found, numbers, into, strict=True):
        assert bytes(buffer) == (payload(number) if is_found else bytes(NUM_BYTES)), number
    return found


def write_until_killed(path, max_bytes, told) -> None:
    """Write records, and tell of each; some are read, so that their uses are noted."""
    bound = PrefixStore(path, max_bytes).bind("fingerprint")
    for number in range(NUM_RECORDS):
        bound.put("block", name(number), [memoryview(payload(number))])
        if number % 8 == 7:
            bound.store.flush()
            read(bound, [number - 3])
        told.send(number)
    signal.pause()


def write_and_read(path, max_bytes, numbers, told) -> None:
    """Write records while others do the same, and tell what was counted."""
    with PrefixStore(path, max_bytes) as store:
        bound = store.bind("fingerprint")
        for i, number in enumerate(numbers):
            bound.put("block", name(number), [memoryview(payload(number))])
            if i % 16 == 15:
                bound.store.flush()
                read(bound, numbers[: i + 1])
        bound.store.flush()
        counts = bound.store.statistics()
        told.send((counts.damaged, counts.dropped))
