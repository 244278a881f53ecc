"""Hand-over: after any failure one side has the whole request, and the other has nothing of it."""

import random
import re
import time
from dataclasses import replace

import pytest
import torch

from dsv4 import KVCacheManager
from dsv4.distributed.channel import MESSAGE_BYTES
from dsv4.distributed.handover import Arrived, Handover, Inbox, Receiver
from dsv4.errors import (
    HandoverError,
    HandoverInDoubtError,
    LiveForwardError,
    PeerLostError,
)
from tests.cache.live import assert_same, live_bytes
from tests.distributed import processes
from tests.distributed.local import Line, LocalTransport
from tests.distributed.processes import (
    CONFIG,
    DEADLINE,
    LENGTH,
    LONG,
    LONG_MEMORY,
    LONG_SIZES,
    MEMORY_BYTES,
    MISSING,
    PACKAGES,
    connect,
    feed,
    grown,
    new_manager,
    other_process,
)
from tests.marks import quick

SENDER_POINTS, RECEIVER_POINTS = 60, 35  # messages: before each, and after each that is sent
ENGINES = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(kind in MISSING, reason=f"{MISSING.get(kind)} is not installed"),
    )
    for kind in PACKAGES
]
KINDS = ["gloo", *ENGINES]


@pytest.fixture(scope="module")
def expected():
    """The bytes of a request, and its outputs of the next 200 tokens."""
    manager = new_manager()
    slot = grown(manager)
    held = [part.clone() for part in live_bytes(manager, slot)]
    return held, [feed(manager, slot, LENGTH + n) for n in (1, 4, 200)]


@pytest.fixture(scope="module")
def exported():
    """A request as tensors, for tests that need many of them."""
    manager = new_manager()
    return manager.export_request(grown(manager))


def assert_goes_on(held, outputs, expected):
    assert_same(held, expected[0])
    for mine, want in zip(outputs, expected[1], strict=True):
        assert all(torch.equal(got, other) for got, other in zip(mine, want, strict=True))


def books(manager):
    manager.check_integrity()
    return (
        manager.lengths.tolist(), manager.is_open.tolist(), manager.num_free_slots,
        manager.num_free_blocks, manager._books.allocator.num_owners.tolist(),
        manager._books.requests.block_table.tolist(), manager._requests.incoming,
    )  # fmt: skip


class Pair:
    """A sender and a receiver in one process."""

    def __init__(self, exported, *, sender=None, receiver=None, **line):
        self.sender = sender or new_manager()
        self.receiver = receiver or new_manager()
        self.exported = exported
        if not self.sender.open_slots:
            self.sender.import_request(exported)
        self.slot = self.sender.open_slots[0]
        self.before = books(self.sender), books(self.receiver)
        self.inbox = Inbox(self.receiver)
        self.connect(**line)

    def connect(self, num_messages=None, deadline=DEADLINE, **options):
        self.line = Line(num_messages)
        ends = [LocalTransport(self.line, rank, MEMORY_BYTES) for rank in (0, 1)]
        options = {"num_tokens": LENGTH, "request_id": "one", **options}
        request_id = options.pop("request_id")
        self.handover = Handover(
            self.sender, self.slot, ends[0], request_id, deadline=deadline, **options
        )
        self.taker = Receiver(self.inbox, ends[1], deadline=deadline)

    def run(self, *, is_finished=False):
        """Run both sides to their ends; return the errors of sender and receiver."""
        if not is_finished:
            self.handover.finish()
        errors, arrived, is_done = [None, None], [], False
        while not is_done and not all(errors):
            if errors[0] is None:
                try:
                    is_done = self.handover.poll()
                except HandoverError as error:
                    errors[0] = error
            if errors[1] is None:
                try:
                    arrived += self.taker.poll()
                except HandoverError as error:
                    errors[1] = error
            if errors[0] is not None and not isinstance(errors[0], PeerLostError):
                break  # the line is not cut
        return errors, arrived

    def assert_sender_alone(self, expected):
        assert (books(self.sender), books(self.receiver)) == self.before
        assert_same(live_bytes(self.sender, self.slot), expected[0])

    def assert_receiver_alone(self, expected):
        assert self.sender.open_slots == [] and len(self.receiver.open_slots) == 1
        self.sender.check_integrity()
        self.receiver.check_integrity()
        assert_same(live_bytes(self.receiver, self.receiver.open_slots[0]), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_arrives_while_it_is_prefilled(kind, tmp_path, expected):
    manager = new_manager()
    with other_process(processes.send, kind, tmp_path) as (told, _):
        receiver = Receiver(Inbox(manager), connect(kind, tmp_path, 1), deadline=DEADLINE)
        (arrived,) = receiver.wait()
        assert arrived == Arrived("one", manager.open_slots[0])
        receiver.poll()
        assert told.recv() == []
        held = [part.clone() for part in live_bytes(manager, arrived.slot)]
        outputs = [feed(manager, arrived.slot, LENGTH + n) for n in (1, 4, 200)]
        assert_goes_on(held, outputs, expected)
        assert manager._books.prefix.ids.read(arrived.slot).tolist() == list(range(700))
        manager.check_integrity()
        told.send("end")


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_with_it(kind, tmp_path, expected, exported):
    with other_process(processes.receive, kind, tmp_path) as (told, _):
        transport = connect(kind, tmp_path, 0)
        for request_id in ("one", "two"):
            manager = new_manager()
            slot = manager.import_request(exported)
            handover = Handover(
                manager, slot, transport, request_id, num_tokens=LENGTH, deadline=DEADLINE
            )
            handover.finish()
            handover.wait()
            assert manager.open_slots == [] and handover.poll()
            arrived, held, outputs = told.recv()
            assert arrived.request_id == request_id
            assert_goes_on(held, outputs, expected)
            told.send("next")


@pytest.fixture(scope="module")
def long_request():
    """A manager with a request of 100,000 tokens, and its life from there on."""
    manager = new_manager(**LONG_SIZES)
    slot = processes.write_long(manager)
    other = manager.fork(slot)
    life = processes.life_of_long(manager, other)
    manager.free_request(other)
    return manager, slot, life


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_request_goes_on_in_another_process(kind, tmp_path, long_request):
    manager, slot, life = long_request
    with other_process(processes.receive_long, kind, tmp_path) as (told, _):
        transport = connect(kind, tmp_path, 0, memory_bytes=LONG_MEMORY)
        handover = Handover(
            manager, manager.fork(slot), transport, "long", num_tokens=LONG, deadline=DEADLINE
        )
        handover.finish()
        handover.wait()
        assert manager.open_slots == [slot]
        before, outputs, after = told.recv()
        assert_same(before, life[0])
        assert len(outputs) == 200 * CONFIG.num_layers
        assert_same(outputs, life[1])
        assert_same(after, life[2])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_after_the_end_of_a_connection(kind, tmp_path):
    num_bytes = 128 << 20
    with other_process(processes.send_one, kind, tmp_path, num_bytes):
        transport = connect(kind, tmp_path, 1, memory_bytes=num_bytes)
        transport.memory.zero_()
        pending = transport.receive(transport.memory)
        first = transport.memory[:1].numpy()
        while not first[0]:  # the first bytes are there
            pending.wait(0)
        transport.close()
        held = transport.memory.clone()
        time.sleep(0.2)
        assert torch.equal(transport.memory, held)


@pytest.mark.parametrize("seed", quick(range(200), range(20)))
def test_one_side_is_killed(seed, tmp_path, expected, exported):
    is_sender = seed % 2 == 0
    killed_at = random.Random(seed).randrange(SENDER_POINTS if is_sender else RECEIVER_POINTS)
    kill(("gloo", tmp_path), killed_at, expected, exported, is_sender=is_sender)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("seed", quick(range(20), range(2)))
def test_one_side_is_killed_under_an_engine(kind, seed, tmp_path, expected, exported):
    is_sender = seed % 2 == 0
    killed_at = random.Random(seed).randrange(SENDER_POINTS if is_sender else RECEIVER_POINTS)
    kill((kind, tmp_path), killed_at, expected, exported, is_sender=is_sender)


def kill(where, killed_at, expected, exported, *, is_sender):
    """Kill the other process, the sender or the receiver, at a message; look at this one."""
    manager = new_manager()
    before = books(manager)
    if is_sender:
        options = {"killed_at": killed_at, "saved": exported}
        with other_process(processes.send_saved, *where, **options):
            receiver = Receiver(Inbox(manager), connect(*where, 1), deadline=DEADLINE)
            receiver._channel.get = has_deadline(receiver._channel.get)
            try:
                slot = receiver.wait()[0].slot
                assert_same(live_bytes(manager, slot), expected[0])
            except PeerLostError:
                assert books(manager) == before
        return
    slot = manager.import_request(exported)
    before = books(manager)
    with other_process(processes.receive, *where, killed_at=killed_at):
        handover = Handover(
            manager, slot, connect(*where, 0), "one", num_tokens=LENGTH, deadline=DEADLINE
        )
        handover.finish()
        try:
            handover.wait()
            assert manager.open_slots == []
        except PeerLostError:
            assert books(manager) == before
            assert_same(live_bytes(manager, slot), expected[0])


def has_deadline(get):
    """Let a receiver that waits for an offer give up too: its peer may be dead."""
    return lambda *expected, **options: get(*expected)


def test_every_message_can_be_the_last(expected, exported):
    """The line breaks at each message in turn; a second connection then ends the hand-over."""
    whole = Pair(exported)
    assert whole.run() == ([None, None], [Arrived("one", 0)])
    whole.assert_receiver_alone(expected)
    num_in_doubt = 0
    for number in range(len(whole.line.sizes)):
        pair = Pair(exported, num_messages=number)
        (error, other), arrived = pair.run()
        assert isinstance(error, PeerLostError) and (isinstance(other, PeerLostError) or arrived)
        if isinstance(error, HandoverInDoubtError):
            num_in_doubt += 1
            assert_same(live_bytes(pair.sender, pair.slot), expected[0])
        else:
            assert not arrived
            pair.assert_sender_alone(expected)
        with pytest.raises(PeerLostError):
            pair.handover.poll()
        pair.connect()
        (error, _), again = pair.run()
        assert error is None and len(arrived) + len(again) == 1
        pair.assert_receiver_alone(expected)
    assert num_in_doubt == 2  # the commit was lost, or the answer to it


@pytest.mark.parametrize("has_checks", [True, False])
def test_a_damaged_piece_is_refused(has_checks, expected, exported):
    whole = Pair(exported)
    whole.connect(has_checks=has_checks)
    whole.run()
    pieces = [i for i, size in enumerate(whole.line.sizes) if size != MESSAGE_BYTES]
    assert len(pieces) >= 4
    for number in pieces:
        pair = Pair(exported)
        pair.connect(has_checks=has_checks)
        pair.line.damaged = number
        (error, _), arrived = pair.run()
        assert (error is not None) == has_checks and bool(arrived) != has_checks
        if has_checks:
            assert "have another xxh3" in str(error)
            pair.assert_sender_alone(expected)


def test_a_late_peer_is_lost(expected, exported):
    pair = Pair(exported, deadline=0.05)
    pair.handover.finish()
    with pytest.raises(PeerLostError, match=r"is late: it said nothing for 0\.05 s"):
        pair.handover.wait()
    pair = Pair(exported, deadline=0.05)
    pair.handover.poll()  # the offer alone
    pair.taker.poll()
    assert pair.receiver._requests.incoming
    with pytest.raises(PeerLostError, match="is late"):
        pair.taker.wait()
    pair.assert_sender_alone(expected)


def test_signs_of_life_during_a_long_prefill(exported):
    pair = Pair(exported, deadline=0.2)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pair.handover.poll()
        pair.taker.poll()
    assert pair.run()[0] == [None, None]


@pytest.mark.parametrize(
    "sizes, match",
    [
        ({"num_blocks": 5}, "expected at most 640, got 650"),
        ({"max_request_tokens": 640}, "expected at most 640, got 650"),
        ({"config": replace(CONFIG, rope_theta=20000.0)}, "expected the fingerprint"),
        ({"config": replace(CONFIG, drafts_per_step=2)}, "expected the fingerprint"),
    ],
)
def test_a_receiver_that_cannot_take_it_refuses(sizes, match, expected, exported):
    sizes = {"max_requests": 3, "num_blocks": 12, "num_checkpoints": 2, **sizes}
    config = sizes.pop("config", CONFIG)
    pair = Pair(exported, receiver=KVCacheManager(config, **sizes))
    (error, _), arrived = pair.run()
    assert not arrived and not isinstance(error, PeerLostError)
    assert re.match(f"The receiver refused request 'one': .*{match}", str(error))
    pair.assert_sender_alone(expected)


def test_a_full_receiver_refuses_and_another_request_fits_later(expected, exported):
    full = new_manager(num_blocks=6)
    other = full.import_request(exported)
    pair = Pair(exported, receiver=full)
    (error, _), _ = pair.run()
    assert "Out of blocks" in str(error)
    pair.assert_sender_alone(expected)
    full.free_request(other)
    pair.connect()
    assert pair.run()[0] == [None, None]
    pair.assert_receiver_alone(expected)


def test_a_second_connection_replaces_the_first(expected, exported):
    pair = Pair(exported)
    pair.handover.finish()
    for _ in range(2):
        pair.handover.poll()
        pair.taker.poll()
    old = pair.taker
    assert len(pair.receiver._requests.incoming) == 1
    pair.connect()
    assert pair.run()[0] == [None, None]
    pair.assert_receiver_alone(expected)
    old.close()
    pair.assert_receiver_alone(expected)


def test_both_managers_can_sleep_after_it(exported):
    pair = Pair(exported)
    assert pair.run()[0] == [None, None]
    pair.receiver.reset()
    for manager in (pair.sender, pair.receiver):
        manager.sleep()
        manager.wake()
        manager.import_request(exported)
        manager.close()


def test_a_manager_that_closes_ends_its_hand_over(exported):
    pair = Pair(exported)
    pair.handover.finish()
    for _ in range(2):
        pair.handover.poll()
        pair.taker.poll()
    pair.receiver.close()
    assert pair.line.is_cut
    with pytest.raises(PeerLostError):
        while not pair.handover.poll():
            pass


def test_nobody_sees_a_request_on_its_way(exported):
    pair = Pair(exported)
    pair.handover.poll()
    pair.taker.poll()
    manager = pair.receiver
    (slot,) = manager._requests.incoming
    assert manager.open_slots == [] and not manager.is_open.any() and not manager.lengths.any()
    with pytest.raises(ValueError, match=f"slot {slot} is not open"):
        manager.free_request(slot)
    with pytest.raises(RuntimeError, match="Cannot sleep"):
        manager.sleep()
    manager.reset()
    assert manager.num_free_slots == 3 and manager.num_free_blocks == 12
    (error, other), _ = pair.run()
    assert isinstance(error, PeerLostError) or isinstance(other, PeerLostError)
    assert manager.open_slots == []


def test_a_request_that_changes_is_given_up(exported):
    pair = Pair(exported)
    pair.handover.finish()
    feed(pair.sender, pair.slot, LENGTH + 1)
    (error, _), _ = pair.run(is_finished=True)
    assert "was freed or changed" in str(error)
    assert pair.sender.lengths[pair.slot] == LENGTH + 1 and pair.receiver.open_slots == []


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")], ids=str)
def test_devices(devices, expected, exported):
    sender, receiver = (new_manager(device=device, backend="reference") for device in devices)
    pair = Pair(exported, sender=sender, receiver=receiver)
    assert pair.run()[0] == [None, None]
    assert sender.open_slots == []
    assert_same([part.cpu() for part in live_bytes(receiver, 0)], expected[0])
    receiver.check_integrity()


def test_misuse(exported):
    pair = Pair(exported)
    with pytest.raises(RuntimeError, match=r"call finish\(\) first"):
        pair.handover.wait()
    plan = pair.sender.prepare_forward([pair.slot], [LENGTH], [LENGTH + 1])
    with pytest.raises(LiveForwardError):
        pair.handover.finish()
    plan.cancel()
    with pytest.raises(ValueError, match="Invalid request_id: expected 1 to 256 characters, got 0"):
        pair.connect(request_id="")
    with pytest.raises(ValueError, match="Invalid memory of a transport: expected 4 pieces"):
        Handover(pair.sender, pair.slot, LocalTransport(Line(), 0, 16000), "one", num_tokens=LENGTH)
