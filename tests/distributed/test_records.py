"""Records of one store come to another over a transport, whole or not at all."""

import threading

import pytest
import torch

from dsv4 import PrefixStore
from dsv4.cache.prefix.store import RecordName
from dsv4.distributed.channel import load_xxh3
from dsv4.distributed.records import RecordExchange
from dsv4.errors import PeerLostError
from tests.cache.live import assert_same, live_bytes
from tests.distributed.local import Line, LocalTransport, as_message
from tests.distributed.processes import (
    CONFIG,
    IDS,
    KINDS,
    LATENT,
    connect,
    feed,
    new_manager,
    other_process,
)

ROW_BYTES, FINGERPRINT = 6000, "a format"
HASHES = [bytes([idx]) * 32 for idx in range(40)]
NAMES = [RecordName("block", each, ROW_BYTES) for each in HASHES]
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


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_another_process(kind, tmp_path):
    """One call serves all that one call asks for, none too."""
    with other_process(serve, kind, tmp_path) as (told, _), filled(tmp_path / "mine", 3) as store:
        exchange = RecordExchange(store, FINGERPRINT, connect(kind, tmp_path, 0), deadline=60.0)
        assert exchange.fetch(NAMES) == 34
        assert store.flush(60)
        assert_holds(store, 37)
        assert exchange.fetch(NAMES[:37]) == 0
        told.send(None)


class Server:
    """The other side, in a thread: its store, and the error that it ends with."""

    def __init__(self, store, *, damaged=None):
        self.line, self.error = Line(), None
        self.line.damaged = damaged
        self.mine, theirs = (LocalTransport(self.line, rank, 64 << 10) for rank in (0, 1))
        self._exchange = RecordExchange(store, FINGERPRINT, theirs, deadline=20.0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._exchange.serve()
        except Exception as error:
            self.error = error

    def end(self):
        self.line.is_cut = True
        self._thread.join(20)
        assert not self._thread.is_alive()


def exchanged(mine, theirs, names=None, *, damaged=None, fingerprint=FINGERPRINT):
    server = Server(theirs, damaged=damaged)
    try:
        exchange = RecordExchange(mine, fingerprint, server.mine, deadline=20.0)
        return exchange.fetch(NAMES[:9] if names is None else names)
    finally:
        server.end()
        assert server.error is None or damaged is not None


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


def test_a_fetch_that_fails_keeps_what_came_before(tmp_path):
    """32 are asked for at a time, here in pieces of two."""
    with filled(tmp_path / "a", 0) as mine, filled(tmp_path / "b") as theirs:
        second = 3 + 16 + 1 + 3  # messages of the first ask, its pieces and checks
        with pytest.raises(PeerLostError, match="records that have another xxh3"):
            exchanged(mine, theirs, NAMES, damaged=second)
        assert mine.flush(60)
        assert_holds(mine, 32)
        assert exchanged(mine, theirs, NAMES) == 8
        assert mine.flush(60)
        assert_holds(mine, 40)


def test_a_wrong_length_takes_no_record_away(tmp_path):
    """A store removes what is damaged, but not because a peer asks for other bytes."""
    with filled(tmp_path / "a", 0) as mine, filled(tmp_path / "b") as theirs:
        for num_bytes in (ROW_BYTES - 1, 100, 0):
            wrong = [each._replace(num_bytes=num_bytes) for each in NAMES[:9]]
            assert exchanged(mine, theirs, wrong) == 0
        assert_holds(theirs, 40)
        assert theirs.statistics().damaged == 0


ASK = {"kind": "ask", "addresses": ["00" * 32], "row_bytes": ROW_BYTES, "is_last": True}


@pytest.mark.parametrize(
    "change",
    [{"addresses": ["zz" * 32]}, {"addresses": ["ab"]}, {"addresses": ["00" * 32] * 33},
     {"addresses": [5]}, {"addresses": None}, {"row_bytes": -5}, {"row_bytes": 10**9},
     {"row_bytes": 2**70}, {"row_bytes": "1"}, {"row_bytes": 1.5}, {"is_last": 1},
     {"kind": "found"}],
    ids=str,
)  # fmt: skip
def test_questions_that_are_none(change, tmp_path):
    with filled(tmp_path / "b", 5) as store:
        line = Line()
        exchange = RecordExchange(store, FINGERPRINT, LocalTransport(line, 1, 64 << 10))
        line.queues[0].append(as_message({**ASK, **change}))
        with pytest.raises(PeerLostError):
            exchange.serve()


REGION = ["records", 0, 1, ROW_BYTES]


@pytest.mark.parametrize(
    "change",
    [{"tokens": [2**70]}, {"tokens": [2**40]}, {"tokens": [-2]}, {"tokens": [1, 2]}, {"tokens": []},
     {"tokens": None}, {"tokens": [1.0]}, {"tokens": [True]}, {"region": None}, {"region": [1]},
     {"region": ["blocks", *REGION[1:]]}, {"region": [*REGION[:3], 1]}, {"checks": [5]},
     {"checks": None}, {"checks": []}],
    ids=str,
)  # fmt: skip
def test_answers_that_are_none(change, tmp_path):
    row = torch.zeros(ROW_BYTES, dtype=torch.uint8)
    parts = {"tokens": [7], "region": REGION, "checks": [load_xxh3()(row.numpy()).hex()], **change}
    with filled(tmp_path / "a", 0) as store:
        line = Line()
        exchange = RecordExchange(store, FINGERPRINT, LocalTransport(line, 0, 64 << 10), deadline=1)
        for kind, name in (("found", "tokens"), ("region", "region"), ("checks", "checks")):
            line.queues[1].append(as_message({"kind": kind, name: parts[name]}))
            if kind == "region":
                line.queues[1].append(row)
        with pytest.raises(PeerLostError):
            exchange.fetch(NAMES[:1])
        assert store.flush(60)
        assert not any(store.bind(FINGERPRINT).contains("block", HASHES))


def test_a_memory_too_small_for_records(tmp_path):
    with filled(tmp_path / "a", 0) as store:
        exchange = RecordExchange(store, FINGERPRINT, LocalTransport(Line(), 0, 16 << 10))
        with pytest.raises(ValueError, match="Invalid memory of a transport"):
            exchange.fetch(NAMES[:1])


@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["v4", "v41"])
def test_a_prompt_of_one_manager_is_known_in_another(config, tmp_path):
    """Its blocks and checkpoint come by name from the store that it was published to."""

    def opened(name):
        store = PrefixStore(tmp_path / name, 1 << 24, key=b"a key")
        return store, new_manager(config, store=store, host_blocks=20)

    (theirs, first), (mine, second) = opened("a"), opened("b")
    slot = first.resume_request(IDS, salt=b"mine", checkpoint_at=[640]).slot
    for length in (150, 300, 450, 600, 650):
        feed(first, slot, length)
    expected = [feed(first, slot, length) for length in (651, 700)], live_bytes(first, slot)
    first.stats()  # publishes
    first._books.prefix.tier.finish_writes()
    assert theirs.flush(60)

    line = Line()
    ends = [LocalTransport(line, rank, 128 << 10) for rank in (0, 1)]
    meanings = config.format_fingerprint
    serving = threading.Thread(target=RecordExchange(theirs, meanings, ends[1]).serve, daemon=True)
    serving.start()
    exchange = RecordExchange(mine, meanings, ends[0])
    assert exchange.fetch(second.name_records(IDS, salt=b"mine")) > 5
    serving.join(20)
    assert mine.flush(60)

    assert second.prefetch(IDS) is None  # another salt
    assert second.prefetch(IDS, salt=b"mine").wait(60)
    hit = second.resume_request(IDS, salt=b"mine")
    assert hit.num_tokens == 640
    feed(second, hit.slot, 650)
    outputs = [feed(second, hit.slot, length) for length in (651, 700)]
    for got, want in zip(outputs, expected[0], strict=True):
        assert all(map(torch.equal, got, want))
    assert_same(live_bytes(second, hit.slot), expected[1])
    for each in (first, second, theirs, mine):
        each.close()
    with pytest.raises(ValueError, match="This manager has no store"):
        new_manager().name_records(IDS)
