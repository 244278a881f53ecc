"""The prefix store: what is found equals what was put, and all else is a miss."""

import copy
import errno
import os
import random
import signal
import socket
import sqlite3
import sys
import time
from itertools import product
from threading import Event, Timer

import pytest
import torch

from dsv4.cache.prefix import store_files, store_writer
from dsv4.cache.prefix.store import PrefixStore
from dsv4.cache.prefix.store_files import DamagedRecordError, RecordFiles, file_bytes
from tests.cache.store_processes import (
    FILE_BYTES,
    NUM_BYTES,
    NUM_RECORDS,
    context,
    name,
    payload,
    read,
    write_and_read,
    write_until_killed,
)
from tests.marks import quick

pytest.importorskip("xxhash", reason="the extra `store` is not installed")
MANY = 1 << 30
KEY = b"a key of some bytes"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def opened(path):
    """Opens the store; all that were opened are closed."""
    stores = []

    def open_store(max_bytes=MANY, **choices):
        stores.append(PrefixStore(path, max_bytes, **choices))
        return stores[-1].bind("fingerprint")

    yield open_store
    for store in stores:
        store.close()


def put(bound, *numbers, kind="block"):
    for number in numbers:
        bound.put(kind, name(number), [memoryview(payload(number))], num_tokens=number)


def contains(bound, *numbers):
    return bound.contains("block", [name(number) for number in numbers])


def file_of(bound, number, kind="block"):
    return bound.store._files.path(bound._addresses(kind)(name(number)))


def files_in(path):
    return sorted(file for file in (path / "rows").glob("*/*"))


def refuse(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_records_come_back_after_a_restart(opened, path):
    bound = opened()
    put(bound, *range(40))
    put(bound, 3, kind="checkpoint")
    bound.store.close()
    again = opened()
    assert contains(again, *range(41)) == [True] * 40 + [False]
    assert read(again, range(41)) == [True] * 40 + [False]
    into = [bytearray(NUM_BYTES) for _ in range(3)]
    handle = again.read("checkpoint", [name(i) for i in (2, 3, 4)], into)
    assert (handle.found, handle.num_tokens) == ([False, True, False], [-1, 3, -1])
    counts = again.store.statistics()
    assert (counts.num_records, counts.num_bytes) == (41, 41 * FILE_BYTES)
    assert (counts.hits, counts.misses, counts.damaged) == (41, 3, 0)
    assert sum(file.stat().st_size for file in files_in(path)) == counts.num_bytes


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 70_000])
@pytest.mark.parametrize("key", [None, KEY])
def test_tensors_of_any_length(opened, num_bytes, key):
    bound = opened(key=key)
    rows = torch.randint(256, (2, num_bytes + 3), dtype=torch.uint8)[:, :num_bytes]
    for i in range(2):
        bound.put("block", name(i), rows[i])
    bound.store.flush()
    into = torch.zeros(2, num_bytes + 5, dtype=torch.uint8)
    assert bound.read("block", [name(0), name(1)], into[:, 1 : num_bytes + 1]).found == [True] * 2
    assert into[:, 1 : num_bytes + 1].equal(rows)
    assert not into[:, 0].any() and not into[:, num_bytes + 1 :].any()


def test_a_record_of_many_parts_and_of_another_dtype(opened):
    bound = opened()
    data = payload(0)
    bound.put("block", name(0), [memoryview(data)[i : i + 3] for i in range(0, len(data), 3)])
    values = torch.arange(NUM_BYTES // 2, dtype=torch.float32).bfloat16()
    bound.put("block", name(1), values)
    parts = [memoryview(payload(2))[i : i + 4] for i in range(0, len(data), 4)]
    bound.put("block", name(2), parts, copy=False)
    bound.store.flush()
    assert read(bound, [0, 2]) == [True, True]
    into = torch.empty_like(values)
    assert bound.read("block", [name(1)], into.view(torch.uint8)[None]).found == [True]
    assert into.equal(values)


def test_nothing_to_read(opened):
    handle = opened().read("block", [], [])
    assert handle.done() and handle.wait() and handle.found == []


def test_other_names_never_meet(path):
    """Parts are told apart too: no two ways to cut the same text are one name."""
    models, fingerprints, kinds, hashes = ["", "a", "ab"], ["", "b", "c"], ["c", "bc"], [b"", b"c"]
    names = list(product(models, [None, KEY], fingerprints, kinds, hashes))
    seen = set()
    for model_id, key, fingerprint, kind, chain_hash in names:
        with PrefixStore(path, MANY, model_id=model_id, key=key) as store:
            bound = store.bind(fingerprint)
            seen.add(bound._addresses(kind)(chain_hash))
    assert len(seen) == len(names)
    with PrefixStore(path, MANY, model_id="a") as one, PrefixStore(path, MANY) as other:
        put(one.bind("x"), 0)
        one.flush()
        assert contains(one.bind("x"), 0) == [True]
        for bound in (one.bind("y"), other.bind("x")):
            assert contains(bound, 0) == read(bound, [0]) == [False]


DAMAGE = {
    "tag": lambda data: data[:5] + bytes([data[5] ^ 1]) + data[6:],
    "rest of the tag": lambda data: data[:31] + b"\1" + data[32:],
    "magic": lambda data: data[:32] + b"x" + data[33:],
    "address": lambda data: data[:45] + bytes([data[45] ^ 128]) + data[46:],
    "length": lambda data: data[:72] + bytes([data[72] ^ 1]) + data[73:],
    "tokens": lambda data: data[:80] + bytes([data[80] ^ 1]) + data[81:],
    "zeros of the head": lambda data: data[:4095] + b"\1" + data[4096:],
    "first of the payload": lambda data: data[:4096] + bytes([data[4096] ^ 1]) + data[4097:],
    "last of the payload": lambda data: data[:9095] + bytes([data[9095] ^ 1]) + data[9096:],
    "padding": lambda data: data[:-1] + b"\1",
    "cut by a byte": lambda data: data[:-1],
    "cut by a page": lambda data: data[:-4096],
    "cut to its head": lambda data: data[:4096],
    "empty": lambda data: b"",
    "longer by a byte": lambda data: data + b"\0",
    "longer by a page": lambda data: data + bytes(4096),
    "zeros": lambda data: bytes(len(data)),
}


def check_refused(bound, file):
    """A record is refused, counted, removed, and can be put again."""
    assert read(bound, [1, 2]) == [False, True]
    bound.store.flush()
    counts = bound.store.statistics()
    assert (counts.hits, counts.misses, counts.damaged, counts.num_records) == (1, 1, 1, 1)
    assert not os.path.lexists(file)
    assert contains(bound, 1, 2) == [False, True]
    put(bound, 1)
    bound.store.flush()
    assert read(bound, [1, 2]) == [True, True]


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_refused(opened, damage, key):
    bound = opened(key=key)
    put(bound, 1, 2)
    bound.store.flush()
    file = file_of(bound, 1)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    check_refused(bound, file)


def _socket(file, _):
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(file.parent)  # the name of a socket is short
        try:
            server.bind(file.name[:8])
            os.rename(file.name[:8], file.name)
        finally:
            os.chdir(here)


OTHERS = {
    "folder": lambda file, _: file.mkdir(),
    "full folder": lambda file, _: (file.mkdir(), (file / "x").write_bytes(b"x")),
    "link to a copy": lambda file, copied: file.symlink_to(copied),
    "link to nothing": lambda file, _: file.symlink_to("nothing"),
    "pipe": lambda file, _: os.mkfifo(file),
    "socket": _socket,
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_thing_in_a_records_place_is_refused(opened, other, tmp_path):
    bound = opened()
    put(bound, 1, 2)
    bound.store.flush()
    file = file_of(bound, 1)
    copied = file.rename(tmp_path / "copy")
    OTHERS[other](file, copied)
    check_refused(bound, file)
    assert copied.exists()


def test_another_record_in_a_records_place_is_refused(opened):
    bound = opened()
    put(bound, 1, 2)
    bound.store.flush()
    file_of(bound, 1).write_bytes(file_of(bound, 2).read_bytes())
    check_refused(bound, file_of(bound, 1))


@pytest.mark.parametrize("step", quick([1, 61], kept=[61]))
def test_no_byte_of_a_record_can_change(tmp_path, step):
    files, address = RecordFiles(tmp_path, None), name(0)
    files.write(address, [memoryview(payload(0))], 7)
    file, scratch = files.path(address), memoryview(bytearray(FILE_BYTES))
    assert files.read(address, scratch) == (payload(0), 7)
    data = file.read_bytes()
    for position in range(0, len(data), step):
        with file.open("r+b") as changed:
            changed.seek(position)
            changed.write(bytes([data[position] ^ 16]))
        with pytest.raises(DamagedRecordError):
            files.read(address, scratch)
        file.write_bytes(data)


@pytest.mark.parametrize("key", [None, b"another key"])
def test_a_record_without_the_key_is_forged(opened, path, key):
    bound = opened(key=KEY)
    put(bound, 1, 2)
    bound.store.flush()
    forger = RecordFiles(path, key)
    forger.write(bound._addresses("block")(name(1)), [memoryview(bytes(NUM_BYTES))], 1)
    check_refused(bound, file_of(bound, 1))


def test_a_record_of_another_length_is_refused(opened):
    bound = opened()
    for number, length in ((1, NUM_BYTES + 1), (2, 20_000)):
        bound.put("block", name(number), [memoryview(bytes(length))])
    bound.store.flush()
    assert read(bound, [1, 2]) == [False, False]
    assert bound.store.statistics().damaged == 2


def test_a_lost_file_is_a_miss(opened):
    bound = opened()
    put(bound, 1, 2)
    bound.store.flush()
    file_of(bound, 1).unlink()
    assert contains(bound, 1, 2) == [True, True]
    assert read(bound, [1, 2]) == [False, True]
    bound.store.flush()
    assert contains(bound, 1, 2) == [False, True]
    counts = bound.store.statistics()
    assert (counts.misses, counts.damaged, counts.num_bytes) == (1, 0, FILE_BYTES)


def test_a_read_error_is_a_miss_and_removes_nothing(opened, monkeypatch):
    bound = opened()
    put(bound, 1)
    bound.store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        assert read(bound, [1]) == [False]
    assert bound.store.statistics().damaged == 0
    assert read(bound, [1]) == [True]


def test_no_direct_reads(opened, monkeypatch):
    bound, real = opened(), os.open
    put(bound, 1)
    bound.store.flush()
    refused = []

    def buffered(file, flags, *mode):
        if flags & os.O_DIRECT:
            refused.append(file)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, flags, *mode)

    monkeypatch.setattr(os, "open", buffered)
    assert read(bound, [1]) == [True] and len(refused) == 1


def test_short_reads_and_writes_go_on(opened, monkeypatch):
    bound, preadv, writev = opened(), os.preadv, os.writev
    calls = []

    def short_read(handle, views, position):
        calls.append(position)
        return preadv(handle, [views[0][:4096]], position)

    monkeypatch.setattr(os, "preadv", short_read)
    monkeypatch.setattr(os, "writev", lambda handle, views: writev(handle, [views[0][:1001]]))
    put(bound, 1)
    bound.store.flush()
    assert read(bound, [1]) == [True]
    assert calls == [0, 4096, 8192]


def test_a_file_that_is_cut_while_it_is_read_is_refused(opened, monkeypatch):
    bound = opened()
    put(bound, 1, 2)
    bound.store.flush()
    file, preadv = file_of(bound, 1), os.preadv

    def cut(handle, views, position):
        if os.path.exists(file) and os.path.samestat(os.fstat(handle), os.stat(file)):
            os.truncate(file, 4096)
        return preadv(handle, views, position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", cut)
        assert read(bound, [1]) == [False]
    assert bound.store.statistics().damaged == 1 and not file.exists()


def test_the_least_recently_used_record_goes_first(opened, path):
    bound = opened(4 * FILE_BYTES)
    put(bound, 0, 1, 2, 3)
    bound.store.flush()
    assert read(bound, [0]) == [True]
    bound.store.close()
    again = opened(4 * FILE_BYTES)
    put(again, 1)  # known: a use
    again.store.flush()
    put(again, 4, 5)
    again.store.flush()
    assert contains(again, *range(6)) == [True, True, False, False, True, True]
    assert again.store.statistics().written == 2 and len(files_in(path)) == 4
    again.store.close()
    smaller = opened(2 * FILE_BYTES)
    put(smaller, 6)
    smaller.store.flush()
    assert contains(smaller, *range(7)) == [False] * 5 + [True, True]


@pytest.mark.parametrize("batch_bytes", [1, 3 * FILE_BYTES, 1 << 25])
def test_the_files_never_exceed_max_bytes(opened, path, monkeypatch, batch_bytes):
    monkeypatch.setattr(store_writer, "BATCH_BYTES", batch_bytes)
    max_bytes = 5 * FILE_BYTES + 100
    sizes, replace = [], os.replace

    def measured(source, target):
        replace(source, target)
        sizes.append(sum(file.stat().st_size for file in files_in(path)))

    monkeypatch.setattr(os, "replace", measured)
    bound = opened(max_bytes)
    for first in range(0, 20, 4):
        put(bound, *range(first, first + 4))
        bound.store.flush()
    assert len(sizes) == 20 and max(sizes) == 5 * FILE_BYTES
    assert contains(bound, *range(20)) == [False] * 15 + [True] * 5


def test_a_batch_larger_than_the_store_stays_within_it(opened, path):
    bound = opened(2 * FILE_BYTES)
    put(bound, *range(9))
    bound.store.flush()
    counts = bound.store.statistics()
    assert counts.num_bytes <= 2 * FILE_BYTES and counts.num_records == len(files_in(path))
    bound.put("block", name(10), [memoryview(bytes(3 * FILE_BYTES))])
    assert bound.store.statistics().dropped == counts.dropped + 1


@pytest.fixture
def gate(monkeypatch):
    """Holds reads and writes of files until it is set."""
    event = Event()
    for method in ("read", "write"):
        real = getattr(RecordFiles, method)

        def held(*args, real=real):
            assert event.wait(60)
            return real(*args)

        monkeypatch.setattr(RecordFiles, method, held)
    yield event
    event.set()


def test_a_full_queue_drops(opened, gate):
    bound = opened(queue_bytes=3 * NUM_BYTES)
    put(bound, 0, 1, 2, 3, 4)
    put(bound, 0, 1)  # queued already
    assert bound.store.statistics().dropped == 2
    assert not bound.store.flush(timeout=0.01)
    gate.set()
    assert bound.store.flush()
    assert contains(bound, *range(5)) == [True] * 3 + [False] * 2
    put(bound, 3, 4)
    bound.store.flush()
    counts = bound.store.statistics()
    assert (counts.written, counts.dropped) == (5, 2)


def test_rows_may_change_once_they_are_put(opened, gate):
    bound = opened()
    rows = torch.frombuffer(bytearray(payload(1)), dtype=torch.uint8)
    bound.put("block", name(1), rows)
    bound.put("block", name(2), rows, copy=False)
    rows.copy_(torch.frombuffer(bytearray(payload(2)), dtype=torch.uint8))
    gate.set()
    bound.store.flush()
    assert read(bound, [1, 2]) == [True, True]


def test_close_writes_what_is_queued(opened, gate):
    bound = opened()
    put(bound, *range(50))
    Timer(0.05, gate.set).start()
    bound.store.close()
    assert contains(opened(), *range(50)) == [True] * 50


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_reads_that_are_given_up(opened, gate, monkeypatch, end):
    bound = opened(num_readers=1)
    gate.set()
    put(bound, 1, 2, 3)
    bound.store.flush()
    gate.clear()
    begun, real = Event(), RecordFiles.read
    monkeypatch.setattr(RecordFiles, "read", lambda *args: (begun.set(), real(*args))[1])
    buffers = [bytearray(NUM_BYTES) for _ in range(3)]
    handle = bound.read("block", [name(1), name(2), name(3)], buffers)
    later = bound.read("block", [name(1)], [bytearray(NUM_BYTES)])
    assert begun.wait(60) and not handle.done() and not handle.wait(0)
    Timer(0.05, gate.set).start()
    handle.cancel() if end == "cancel" else bound.store.close()
    assert handle.done() and handle.found == [True, False, False]
    assert buffers == [payload(1), bytes(NUM_BYTES), bytes(NUM_BYTES)]
    assert later.found == [end == "cancel"]


def test_an_interrupted_wait_can_be_repeated(opened, gate):
    bound = opened()
    gate.set()
    put(bound, *range(20))
    bound.store.flush()
    gate.clear()

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    buffers = [bytearray(NUM_BYTES) for _ in range(20)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        handle = bound.read("block", [name(number) for number in range(20)], buffers)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            handle.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    gate.set()
    assert handle.found == [True] * 20
    assert buffers == [payload(number) for number in range(20)]


@pytest.mark.parametrize("call", ["writev", "replace", "open", "mkdir"])
def test_a_full_disk_drops_records_and_the_store_goes_on(opened, path, monkeypatch, call):
    bound = opened()
    put(bound, 0)
    bound.store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        put(bound, 1, 2)
        bound.store.flush()
        counts = bound.store.statistics()
    assert (counts.dropped, counts.written, counts.num_records) == (2, 1, 1)
    assert not list((path / "unfinished").iterdir()) and len(files_in(path)) == 1
    put(bound, 1)
    bound.store.flush()
    assert read(bound, [0, 1, 2]) == [True, True, False]


def test_a_disk_that_fills_within_a_record_leaves_nothing(opened, path, monkeypatch):
    bound, writev = opened(), os.writev
    left = [10_000]

    def fill(handle, views):
        if left[0] == 0:
            refuse()
        written = writev(handle, [views[0][: left[0]]])
        left[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fill)
        put(bound, 1)
        bound.store.flush()
    assert left == [0] and bound.store.statistics().dropped == 1
    assert not list((path / "unfinished").iterdir()) and not files_in(path)


def test_a_full_disk_of_the_index_drops_its_records(opened, path):
    bound = opened()
    put(bound, 0)
    bound.store.flush()
    connection = bound.store._index._writer
    (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {num_pages}")
    put(bound, *range(1, 300))
    bound.store.flush()
    counts = bound.store.statistics()
    assert counts.dropped > 0 and counts.written + counts.dropped == 300
    assert counts.num_records == counts.written == len(files_in(path))
    connection.execute("PRAGMA max_page_count = 1000000")
    put(bound, *range(300))
    bound.store.flush()
    assert read(bound, range(300)) == [True] * 300


def test_a_lost_index_is_a_miss(opened):
    bound = opened()
    put(bound, 0)
    bound.store.flush()
    bound.store._index._writer.execute("DROP TABLE records")
    assert contains(bound, 0) == [False]
    put(bound, 1)
    assert bound.store.flush() and bound.store.statistics().dropped == 1


def _kill_once(path, max_bytes, seed):
    choose = random.Random(seed)
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=write_until_killed, args=(path, max_bytes, told))
    process.start()
    told.close()
    last = -1
    for _ in range(choose.choice([0, 1, 9, choose.randrange(40)])):
        last = heard.recv()
    time.sleep(choose.random() * 0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while heard.poll():
        try:
            last = heard.recv()
        except EOFError:
            break
    return last


@pytest.mark.parametrize("seed", quick(range(60), kept=range(6)))
def test_a_store_is_whole_after_sigkill(path, seed):
    max_bytes = [MANY, 6 * FILE_BYTES][seed % 2]
    for life in range(2):
        last = _kill_once(path, max_bytes, 2 * seed + life)
        with PrefixStore(path, max_bytes) as store:
            bound = store.bind("fingerprint")
            bound.store.flush()
            numbers = [*range(NUM_RECORDS), 1000]
            known = contains(bound, *numbers)
            # All up to the last flush that was told of, where nothing is evicted.
            if max_bytes == MANY:
                assert all(known[: (last + 1) // 8 * 8])
            # A file whose row was not written yet may be found too.
            found = read(bound, numbers)
            assert [a and b for a, b in zip(found, known, strict=True)] == known
            counts = bound.store.statistics()
            assert counts.damaged == 0 and counts.num_records == sum(known)
            assert counts.num_bytes == counts.num_records * FILE_BYTES <= max_bytes
            put(bound, 1000)
            bound.store.flush()
            assert contains(bound, 1000) == read(bound, [1000]) == [True]


@pytest.mark.parametrize("max_bytes", [MANY, 40 * FILE_BYTES])
def test_processes_share_a_folder(path, max_bytes):
    heard, told = context.Pipe(duplex=False)
    choose = random.Random(0)
    processes = []
    for first in (0, 60, 30):
        numbers = choose.sample(range(first, first + 100), 100)
        args = (path, max_bytes, numbers, told)
        processes.append(context.Process(target=write_and_read, args=args))
        processes[-1].start()
    counts = [heard.recv() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert counts == [(0, 0)] * 3
    with PrefixStore(path, max_bytes) as store:
        bound = store.bind("fingerprint")
        bound.store.flush()
        known = contains(bound, *range(160))
        assert read(bound, range(160)) == known
        assert store.statistics().num_records == sum(known)
        assert store.statistics().num_bytes == sum(known) * FILE_BYTES
        if max_bytes == MANY:
            assert all(known)
        else:  # each of two others may have made room for 16 records at the same time
            assert sum(known) <= 40 + 2 * 16


def test_a_lost_record_that_is_back_keeps_its_row(opened, path):
    """One process misses a record while another one puts it again."""
    one, other = opened(), opened()
    put(one, 0)
    one.store.flush()
    address = one._addresses("block")(name(0))
    file_of(one, 0).unlink()
    assert read(other, [0]) == [False]
    other.store.flush()
    put(one, 0)
    one.store.flush()
    other.store._writer.note_removal(address)
    other.store.flush()
    assert contains(other, 0) == [True]


def test_files_without_a_row_go_once_they_are_old(opened, path):
    bound = opened()
    put(bound, 0, 1, 2)
    bound.store.flush()
    lost = file_of(bound, 2)
    bound.store.close()
    lost.unlink()
    rows = path / "rows" / "ab"
    rows.mkdir(exist_ok=True)
    old, young = rows / ("ab" + "0" * 62), rows / ("ab" + "1" * 62)
    foreign = rows / "notes.txt"
    unfinished = [path / "unfinished" / name for name in ("old", "young")]
    for file in (old, young, foreign, *unfinished):
        file.write_bytes(b"x")
    past = time.time() - store_files.ORPHAN_SECONDS - 60
    for file in (old, foreign, unfinished[0]):
        os.utime(file, (past, past))
    for file in files_in(path):
        if file not in (old, young, foreign):
            os.utime(file, (past, past))
    again = opened()
    again.store.flush()
    assert [file.exists() for file in (old, young, foreign, *unfinished)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert contains(again, 0, 1, 2) == [True, True, False]
    assert read(again, [0, 1]) == [True, True]
    assert again.store.statistics().num_records == 2


def test_the_folder_is_its_owners_alone(opened, path):
    put(opened(), 0)
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", "index.sqlite"]])
def test_a_folder_that_was_killed_while_it_was_made(opened, path, left):
    path.mkdir()
    for file in left:
        (path / file).touch()
    bound = opened()
    put(bound, 0)
    bound.store.flush()
    assert read(bound, [0]) == [True]


def test_other_folders_and_files_are_refused(path):
    path.write_text("a file")
    with pytest.raises(ValueError, match="expected a folder, got the file"):
        PrefixStore(path, MANY)
    path.unlink()
    path.mkdir()
    (path / "notes.txt").touch()
    with pytest.raises(ValueError, match="expected an empty folder or a store's"):
        PrefixStore(path, MANY)
    assert os.listdir(path) == ["notes.txt"]
    index = path / "index.sqlite"
    index.write_bytes(b"no database " * 100)
    with pytest.raises(ValueError, match=r"Invalid index of a prefix store .* not a database"):
        PrefixStore(path, MANY)
    index.unlink()
    with sqlite3.connect(index) as connection:
        connection.execute("CREATE TABLE records(a)")
    connection.close()
    with pytest.raises(ValueError, match="it is another program's"):
        PrefixStore(path, MANY)


def test_another_version_is_refused(opened, path):
    opened().store.close()
    with sqlite3.connect(path / "index.sqlite") as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(ValueError, match="expected version 1, got 2"):
        PrefixStore(path, MANY)


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ({"max_bytes": 0}, "Invalid max_bytes"),
        ({"queue_bytes": 0}, "Invalid queue_bytes"),
        ({"num_readers": 0}, "Invalid num_readers"),
        ({"key": b""}, "Invalid key: expected 1 to 64 bytes"),
        ({"key": b"x" * 65}, "Invalid key: expected 1 to 64 bytes"),
        ({"key": "text"}, "Invalid key: expected 1 to 64 bytes"),
    ],
)
def test_choices_are_checked(path, choices, match):
    with pytest.raises(ValueError, match=match):
        PrefixStore(path, **{"max_bytes": MANY, **choices})
    assert not path.exists()


def test_buffers_are_checked(opened):
    bound = opened()
    with pytest.raises(ValueError, match="expected 2 buffers, got 1"):
        bound.read("block", [name(0), name(1)], [bytearray(4)])
    with pytest.raises(ValueError, match="expected writable buffers"):
        bound.read("block", [name(0)], [bytes(4)])
    for into in (torch.zeros(1, 4), torch.zeros(4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"expected uint8 \[n, num_bytes\] on the CPU"):
            bound.read("block", [name(0)], into)
    for rows in ([], [memoryview(b"")], torch.zeros(0)):
        with pytest.raises(ValueError, match="at least one byte"):
            bound.put("block", name(0), rows)
    with pytest.raises(ValueError, match="expected them contiguous"):
        bound.put("block", name(0), torch.zeros(4, 4)[:, 0])
    with pytest.raises(ValueError, match="Invalid num_tokens"):
        bound.put("block", name(0), torch.zeros(4), num_tokens=-1)


def test_a_closed_store_is_refused(opened):
    bound = opened()
    bound.store.close()
    bound.store.close()
    calls = [
        lambda: put(bound, 0),
        lambda: contains(bound, 0),
        lambda: bound.read("block", [], []),
        bound.store.flush,
        bound.store.statistics,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="is closed"):
            call()


def test_a_store_is_neither_copied_nor_used_after_a_fork(opened, monkeypatch):
    bound = opened()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.copy(bound.store)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for call in (
        lambda: put(bound, 0),
        lambda: contains(bound, 0),
        bound.store.flush,
        bound.store.close,
    ):
        with pytest.raises(RuntimeError, match="opened before a fork"):
            call()
    monkeypatch.undo()


def test_only_a_key_does_without_xxhash(opened, path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"pip install 'dsv4\[store\]'"):
        PrefixStore(path, MANY)
    assert not path.exists()
    bound = opened(key=KEY)
    put(bound, 0)
    bound.store.flush()
    assert read(bound, [0]) == [True]


def test_bytes_of_a_file():
    assert [file_bytes(n) for n in (1, 4096, 4097, NUM_BYTES)] == [8192, 8192, 12288, FILE_BYTES]
