"""Records of one store come to another over a transport, whole or not at all."""

import threading

import pytest
import torch

from dsv4 import PrefixStore
from dsv4.distributed.records import RecordExchange
from dsv4.errors import PeerLostError
from tests.distributed.local import Line, LocalTransport
from tests.distributed.processes import TRANSPORTS, connect, other_process

ROW_BYTES, FINGERPRINT = 6000, "a format"
HASHES = [bytes([idx]) * 32 for idx in range(40)]
ROWS = torch.randint(
    0, 256, (40, ROW_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


def filled(folder, count=40, **options):
    store = PrefixStore(folder, 1 << 22, **{"key": b"a key", **options})
    records = store.bind(FINGERPRINT)
    for idx in range(count):
        records.put("block", HASHES[idx], ROWS[idx], 128 * idx)
    assert store.flush(60)
    return store


def assert_holds(store, count):
    rows = torch.zeros_like(ROWS)
    read = store.bind(FINGERPRINT).read("block", HASHES, rows)
    assert read.wait(60)
    assert read.found == [idx < count for idx in range(40)]
    assert torch.equal(rows[:count], ROWS[:count])
    assert read.num_tokens[:count] == [128 * idx for idx in range(count)]


def serve(kind, folder, told):
    with filled(folder / "theirs", 37) as store:
        exchange = RecordExchange(store, FINGERPRINT, connect(kind, folder, 1))
        for _ in range(2):
            exchange.serve()
        told.recv()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_records_of_another_process(kind, tmp_path):
    with other_process(serve, kind, tmp_path) as (told, _), filled(tmp_path / "mine", 3) as store:
        exchange = RecordExchange(store, FINGERPRINT, connect(kind, tmp_path, 0), deadline=60.0)
        assert exchange.fetch("block", HASHES, ROW_BYTES) == 34
        assert store.flush(60)
        assert_holds(store, 37)
        told.send(None)


def exchanged(mine, theirs, *, damaged=None, fingerprint=FINGERPRINT):
    line = Line()
    line.damaged = damaged
    ends = [LocalTransport(line, rank, 64 << 10) for rank in (0, 1)]
    server = RecordExchange(theirs, FINGERPRINT, ends[1])
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        return RecordExchange(mine, fingerprint, ends[0], deadline=20.0).fetch(
            "block", HASHES[:9], ROW_BYTES
        )
    finally:
        thread.join(20)


@pytest.mark.parametrize(
    "options", [{"fingerprint": "another"}, {"key": b"another"}, {"model_id": "another"}]
)
def test_records_of_others_are_not_found(options, tmp_path):
    fingerprint = options.pop("fingerprint", FINGERPRINT)
    with filled(tmp_path / "a", 0) as mine, filled(tmp_path / "b", **options) as theirs:
        assert exchanged(mine, theirs, fingerprint=fingerprint) == 0


def test_damaged_records_are_not_kept(tmp_path):
    with filled(tmp_path / "a", 0) as mine, filled(tmp_path / "b") as theirs:
        with pytest.raises(PeerLostError, match="records that have another xxh3"):
            exchanged(mine, theirs, damaged=3)  # after ask, found and region
        assert mine.flush(60)
        assert_holds(mine, 0)
        assert exchanged(mine, theirs) == 9
        assert mine.flush(60)
        assert_holds(mine, 9)
