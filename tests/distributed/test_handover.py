"""Hand-over: after any failure one side has the whole request, and the other has nothing of it."""

import contextlib
import functools
import itertools
import json
import random
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from dsv4 import KVCacheManager
from dsv4.distributed import channel, handover
from dsv4.distributed.channel import MESSAGE_BYTES
from dsv4.distributed.handover import Arrived, Handover, Inbox, Receiver, _reason
from dsv4.distributed.transport import NO_LIMIT
from dsv4.errors import (
    HandoverError,
    HandoverInDoubtError,
    LiveForwardError,
    PeerLostError,
)
from tests.cache.live import assert_same, live_bytes
from tests.distributed import processes
from tests.distributed.local import Group, Line, LocalTransport, as_message, hand_over
from tests.distributed.processes import (
    CONFIG,
    DEADLINE,
    ENGINES,
    HAS_CHECKS,
    KINDS,
    LATENT,
    LENGTH,
    LONG,
    LONG_MEMORY,
    LONG_SIZES,
    MANY,
    MEMORY_BYTES,
    KilledAt,
    connect,
    feed,
    grown,
    new_manager,
    other_process,
)
from tests.marks import quick


def go_on(manager, slot):
    """The bytes of a request, and its outputs of the next 200 tokens."""
    held = [part.clone() for part in live_bytes(manager, slot)]
    return held, [feed(manager, slot, LENGTH + n) for n in (1, 4, 200)]


@pytest.fixture(scope="module")
def expected():
    manager = new_manager()
    return go_on(manager, grown(manager))


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
        options = {
            "num_tokens": LENGTH, "request_id": "one", "has_checks": HAS_CHECKS, **options
        }  # fmt: skip
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

    def begin(self):
        """Exchange the first messages of a request that is complete."""
        self.handover.finish()
        for _ in range(2):
            self.handover.poll()
            self.taker.poll()

    def assert_receiver_alone(self, expected):
        assert self.sender.open_slots == [] and len(self.receiver.open_slots) == 1
        self.sender.check_integrity()
        self.receiver.check_integrity()
        assert_same(live_bytes(self.receiver, self.receiver.open_slots[0]), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_arrives_while_it_is_prefilled(kind, tmp_path, expected):
    arrive_while_prefilled(CONFIG, kind, tmp_path, expected)


def test_a_request_of_v41_arrives_while_it_is_prefilled(tmp_path):
    manager = new_manager(LATENT)
    arrive_while_prefilled(LATENT, "gloo", tmp_path, go_on(manager, grown(manager)))


def arrive_while_prefilled(config, kind, tmp_path, expected):
    manager = new_manager(config)
    with other_process(processes.send, kind, tmp_path, config=config) as (told, _):
        receiver = Receiver(Inbox(manager), connect(kind, tmp_path, 1), deadline=DEADLINE)
        (arrived,) = receiver.wait()
        assert arrived == Arrived("one", manager.open_slots[0])
        receiver.poll()
        assert told.recv() == []
        assert_goes_on(*go_on(manager, arrived.slot), expected)
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
    """A request of 100,000 tokens, and its life from there on, on a device."""

    @functools.cache
    def make(device):
        manager = new_manager(**LONG_SIZES, device=device)
        slot = processes.write_long(manager)
        other = manager.fork(slot)
        life = processes.life_of_long(manager, other)
        manager.free_request(other)
        return manager, slot, life

    return make


@pytest.mark.parametrize(
    ("kind", "device"),
    [*(pytest.param(*kind.values, "cpu", marks=[*kind.marks, pytest.mark.slow])
       for kind in (pytest.param("gloo"), *ENGINES)),
     pytest.param("gloo", "cuda", marks=pytest.mark.gpu),
     pytest.param("nixl", "cuda", marks=[*ENGINES[0].marks, pytest.mark.gpu])],
)  # fmt: skip
def test_a_long_request_goes_on_in_another_process(kind, device, tmp_path, long_request):
    manager, slot, life = long_request(device)
    with other_process(processes.receive_long, kind, tmp_path, device=device) as (told, _):
        memory = processes.memory_of(kind, device)
        transport = connect(kind, tmp_path, 0, memory_bytes=LONG_MEMORY, **memory)
        handover = Handover(
            manager, manager.fork(slot), transport, "long", num_tokens=LONG, deadline=DEADLINE,
            has_checks=HAS_CHECKS,
        )  # fmt: skip
        handover.finish()
        handover.wait()
        assert manager.open_slots == [slot]
        assert told.recv() == life
        assert len(set(life)) == 3


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


def test_the_end_of_an_idle_connection_is_known(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        mine, other = pool.map(lambda rank: connect("gloo", tmp_path, rank), (0, 1))
    pending = other.receive(other.memory[:10])
    mine.close()
    with pytest.raises(PeerLostError):
        pending.wait(DEADLINE)


@pytest.fixture(scope="module")
def points(exported):
    """Where sender and receiver can be killed: before each message, and after each that is sent."""
    pair, line = Pair(exported), Line()
    ends = [KilledAt(LocalTransport(line, rank, MEMORY_BYTES), MANY) for rank in (0, 1)]
    pair.handover = Handover(pair.sender, pair.slot, ends[0], "one", num_tokens=LENGTH)
    pair.taker = Receiver(pair.inbox, ends[1])
    assert pair.run()[0] == [None, None]
    sender, receiver = (MANY - end.left for end in ends)
    return sender, receiver - 1  # it waits for another offer at last


def choose_point(seed, points):
    """The last ones, where the request changes hands, and then any."""
    most = points[seed % 2]
    return most - 1 - seed // 2 if seed < 8 else random.Random(seed).randrange(most)


@pytest.mark.parametrize("seed", quick(range(200), range(20)))
def test_one_side_is_killed(seed, tmp_path, expected, exported, points):
    killed_at = choose_point(seed, points)
    kill(("gloo", tmp_path), killed_at, expected, exported, is_sender=seed % 2 == 0)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("seed", quick(range(20), range(2)))
def test_one_side_is_killed_under_an_engine(kind, seed, tmp_path, expected, exported, points):
    killed_at = choose_point(seed, points)
    kill((kind, tmp_path), killed_at, expected, exported, is_sender=seed % 2 == 0)


@pytest.fixture(scope="module")
def wide():
    """What a request of large pieces can read."""
    manager = processes.wide_manager()
    return live_bytes(manager, processes.wide_request(manager))


@pytest.mark.parametrize("seed", quick(range(40), range(4)))
def test_one_side_is_killed_inside_a_piece(seed, tmp_path, wide):
    """At any time of some hundredths of a second, in which pieces of 24 MB arrive in place."""
    manager, is_sender = processes.wide_manager(), seed % 2 == 0
    killing = threading.Timer(random.Random(seed).uniform(0.0, 0.08), lambda: process.kill())
    target = processes.send_wide if is_sender else processes.receive_wide
    slot = None if is_sender else processes.wide_request(manager)
    before = books(manager)
    with other_process(target, tmp_path) as (told, process):
        transport = connect("gloo", tmp_path, int(is_sender), processes.WIDE_MEMORY)
        try:
            if is_sender:
                receiver = Receiver(Inbox(manager), transport, deadline=10.0)
                arrived = []
                while not (arrived or manager._requests.incoming):  # one poll may bring it all
                    arrived = receiver.poll(0.001)
                killing.start()
                slot = (arrived or receiver.wait())[0].slot
                assert_same(live_bytes(manager, slot), wide)
            else:
                handover = Handover(
                    manager, slot, transport, "one", num_tokens=processes.WIDE_TOKENS,
                    deadline=10.0,
                )  # fmt: skip
                handover.finish()
                while not told.poll():
                    handover.poll(0.001)
                killing.start()
                handover.wait()
                assert manager.open_slots == []
        except PeerLostError:
            assert books(manager) == before
            if not is_sender:
                assert_same(live_bytes(manager, slot), wide)
        killing.join()


def kill(where, killed_at, expected, exported, *, is_sender):
    """Kill the other process, the sender or the receiver, at a message; look at this one."""
    manager = new_manager()
    before = books(manager)
    if is_sender:
        options = {"killed_at": killed_at, "saved": exported}
        with other_process(processes.send_saved, *where, **options) as (_, process):
            receiver = Receiver(Inbox(manager), connect(*where, 1), deadline=DEADLINE)
            receiver._channel.get = has_deadline(receiver._channel.get)
            try:
                slot = receiver.wait()[0].slot
                assert_same(live_bytes(manager, slot), expected[0])
            except PeerLostError:
                assert books(manager) == before
            assert_killed(process)
        return
    slot = manager.import_request(exported)
    before = books(manager)
    with other_process(processes.receive, *where, killed_at=killed_at) as (_, process):
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
        assert_killed(process)


def assert_killed(process):
    process.join(DEADLINE)
    assert process.exitcode == -signal.SIGKILL


def has_deadline(get):
    """Let a receiver that waits for an offer give up too: its peer may be dead."""
    return lambda *expected, **options: get(*expected)


def test_blocks_leave_while_the_prefill_runs(expected, exported):
    """All that are final have arrived when the request is complete."""
    sender = new_manager()
    pairs, seen = [], []

    def on_chunk(slot):
        if not pairs:
            pairs.append(Pair(exported, sender=sender))
        (pair,) = pairs
        for _ in range(30):
            pair.handover.poll()
            pair.taker.poll()
        (incoming,) = pair.receiver._requests.incoming.values()
        count = sender.final_tokens(slot) // CONFIG.block_tokens
        rows = torch.empty(2, count, sender.blocks.num_bytes, dtype=torch.uint8)
        sender.blocks.read(sender.blocks_of(slot)[:count], rows[0])
        pair.receiver.blocks.read(incoming.blocks[:count], rows[1])
        assert torch.equal(*rows)
        crossed = sum(size for size in pair.line.sizes if size != MESSAGE_BYTES)
        assert crossed == count * sender.blocks.num_bytes
        seen.append(count)

    grown(sender, on_chunk=on_chunk)
    assert seen == [1, 2, 3, 4, 5]
    (pair,) = pairs
    assert pair.run()[0] == [None, None]
    pair.assert_receiver_alone(expected)


@pytest.mark.parametrize(("config", "rank"), [(CONFIG, 0), (CONFIG, 1), (LATENT, 1)])
def test_a_rank_hands_over_to_the_same_rank_alone(config, rank):
    """Its own bytes, of which some leave early."""
    sender, receiver, other, stays = (
        new_manager(config, process_group=Group(each)) for each in (rank, rank, 1 - rank, rank)
    )
    pairs = []

    def on_chunk(slot):
        if not pairs:
            (error, _), _ = Pair(None, sender=sender, receiver=other).run()
            assert "expected the fingerprint" in str(error)
            pairs.append(Pair(None, sender=sender, receiver=receiver))
        for _ in range(30):
            pairs[0].handover.poll()
            pairs[0].taker.poll()

    grown(sender, on_chunk=on_chunk)
    assert pairs[0].handover._num_sent
    errors, ((_, slot),) = pairs[0].run()
    assert errors == [None, None] and sender.open_slots == []
    assert_goes_on(*go_on(receiver, slot), go_on(stays, grown(stays)))
    receiver.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_connection_keeps_no_core_busy(kind, tmp_path):
    with ThreadPoolExecutor() as pool:
        ends = [*pool.map(lambda rank: connect(kind, tmp_path, rank), (0, 1))]
    begun = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun < 0.25  # of all threads
    for end in ends:
        end.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_does_not_come_is_lost(kind, tmp_path):
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=r"has not come for 0\.5 s"):
        connect(kind, tmp_path, 0, deadline=0.5)
    assert time.monotonic() - begin < 20.0


def test_an_idle_receiver_stays(tmp_path):
    """The deadline of a connection is not that of messages, which have no limit of their own."""
    assert timedelta(days=10000) < NO_LIMIT
    deadline = 3.0
    with other_process(processes.send_late, tmp_path, deadline + 1.0) as (told, _):
        assert told.recv() == "up"
        end = connect("gloo", tmp_path, 1, deadline=deadline)
        begin, pending = time.monotonic(), end.receive(end.memory)
        told.send("go")
        while not pending.wait(0.1):
            assert time.monotonic() - begin < DEADLINE
        assert time.monotonic() - begin > deadline


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


def test_signs_of_life_during_a_long_prefill(exported, monkeypatch):
    now = itertools.count()  # a second each time someone looks
    clock = SimpleNamespace(monotonic=lambda: next(now))
    for module in (channel, handover):
        monkeypatch.setattr(module, "time", clock)
    pair = Pair(exported, deadline=40.0)
    for _ in range(200):
        pair.handover.poll()
        pair.taker.poll()
    assert next(now) > 5 * 40
    assert pair.run()[0] == [None, None]


@pytest.mark.parametrize(
    "sizes, match",
    [
        ({"num_blocks": 5}, "expected at most 640, got 650"),
        ({"max_request_tokens": 640}, "expected at most 640, got 650"),
        ({"config": replace(CONFIG, rope_theta=20000.0)}, "expected the fingerprint"),
        ({"config": replace(CONFIG, drafts_per_step=2)}, "expected the fingerprint"),
        ({"process_group": Group()}, "expected the fingerprint"),
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
    pair.begin()
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
    pair.begin()
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


def go_back_and_grow(manager, slot):
    manager.truncate(slot, 0)
    for length in (150, 300, 450, 600, LENGTH):
        feed(manager, slot, length)


def replace_request(manager, slot):
    manager.free_request(slot)
    assert manager.open_request() == slot
    for length in (150, 300, 450, 600, LENGTH):
        feed(manager, slot, length)


@pytest.mark.parametrize("change", [go_back_and_grow, replace_request])
def test_a_request_of_the_same_length_is_another_one(change, exported):
    """Nothing of it arrives, neither alone nor behind blocks of the first one."""
    pair = Pair(exported)
    while not pair.handover._num_sent:
        pair.handover.poll()
        pair.taker.poll()
    change(pair.sender, pair.slot)
    with pytest.raises(HandoverError, match="was freed or changed"):
        pair.handover.finish()
    (error, _), arrived = pair.run(is_finished=True)
    assert "was freed or changed" in str(error) and not arrived
    assert pair.sender.lengths[pair.slot] == LENGTH and pair.receiver.open_slots == []


def test_a_request_freed_by_its_owner_is_given_up(exported):
    pair = Pair(exported)
    pair.begin()
    pair.sender.free_request(pair.slot)
    (error, _), arrived = pair.run(is_finished=True)
    assert "was freed or changed" in str(error) and not arrived


def test_a_request_that_adopts_blocks_arrives(expected, exported):
    """Its blocks become those of another with the same bytes, after they were sent."""
    sender = new_manager()
    other, slot = (sender.import_request(exported) for _ in range(2))
    pair = Pair(exported, sender=sender)
    pair.slot = slot
    pair.connect()
    while not pair.handover._num_sent:
        pair.handover.poll()
        pair.taker.poll()
    before = sender.blocks_of(slot)[:5].tolist()
    sender.stats()  # publishes
    assert sender.blocks_of(slot)[:5].tolist() == sender.blocks_of(other)[:5].tolist() != before
    assert pair.run()[0] == [None, None]
    sender.free_request(other)
    pair.assert_receiver_alone(expected)


class Place:
    """A manager with its inbox, which can send too."""

    def __init__(self, **sizes):
        self.manager = new_manager(**sizes)
        self.inbox = Inbox(self.manager)

    def send_to(self, other, slot, request_id="one"):
        """Hand a request over; return what has arrived."""
        return hand_over(self.manager, slot, other.inbox, request_id)


def test_a_request_comes_back_and_goes_again(expected, exported):
    """The same id names it on all its ways, and each time one side has it."""
    first, second = Place(), Place()
    slot = first.manager.import_request(exported)
    for _ in range(2):
        ((_, slot),) = first.send_to(second, slot)
        assert first.manager.open_slots == [] and second.manager.open_slots == [slot]
        ((_, slot),) = second.send_to(first, slot)
        assert second.manager.open_slots == [] and first.manager.open_slots == [slot]
    assert_same(live_bytes(first.manager, slot), expected[0])


def test_a_request_without_known_ids_arrives():
    """The prefix cache follows it, and knows no id of it."""
    first, second = Place(), Place()
    slot = first.manager.resume_request(range(200)).slot
    first.manager.truncate(slot, 0)
    first.manager.prepare_forward([slot], [0], [150]).complete()
    ((_, slot),) = first.send_to(second, slot)
    assert second.manager.lengths[slot] == 150 and second.manager.num_known_ids[slot] == 0


def test_another_request_with_an_old_id_is_taken_or_refused(exported):
    first, second = Place(), Place(host_slots=1, host_blocks=8)
    ((_, slot),) = first.send_to(second, first.manager.import_request(exported))
    other = first.manager.open_request()
    feed(first.manager, other, 150)
    with pytest.raises(HandoverError, match="another request has the id 'one' here"):
        first.send_to(second, other)
    assert first.manager.lengths[other] == 150 and second.manager.open_slots == [slot]
    swapped = second.manager.swap_out(slot)
    for is_back in (False, True):  # in another slot
        with pytest.raises(HandoverError, match="another request has the id 'one' here"):
            first.send_to(second, other)
        if not is_back:
            empty = second.manager.open_request()
            slot = second.manager.swap_in(swapped)
            second.manager.free_request(empty)
    second.manager.free_request(slot)
    ((_, slot),) = first.send_to(second, other)
    assert first.manager.open_slots == [] and second.manager.lengths[slot] == 150


def test_a_reason_fits_a_message():
    assert len(json.dumps(_reason('\U0001f600"\\' * 2000))) < MESSAGE_BYTES // 2


@pytest.mark.parametrize("end", ["whole", "refused", "lost"])
def test_an_interrupted_arrival_is_whole(exported, end, monkeypatch):
    """At any line the request is here and reported, or neither here nor remembered.

    Then no room is kept for it. Inside of `reserve` that holds at every line of the package, and in
    `poll` until nothing is left to be reported.
    """
    reserve = Inbox.reserve.__code__
    traced = {each.__code__ for each in (Inbox.accept, Receiver._receive, Receiver.poll)}
    if end == "refused":
        monkeypatch.setattr(Receiver, "_request", lambda *_: "no request")
    for point in itertools.count():
        pair = Pair(exported, num_messages=4 if end == "lost" else None)
        points = iter(range(point, -1, -1))

        def on_line(frame, event, _, pair=pair, points=points):
            is_counted = frame.f_code is not Receiver.poll.__code__ or pair.taker._arriving
            if event == "line" and is_counted and next(points, None) == 0:
                raise KeyboardInterrupt
            return on_line

        def is_inside(frame):
            while frame is not None and frame.f_code is not reserve:
                frame = frame.f_back
            return frame is not None

        pair.handover.finish()
        sys.settrace(lambda frame, *_, on_line=on_line: (
            on_line if frame.f_code in traced
            or (is_inside(frame) and "dsv4" in frame.f_code.co_filename) else None
        ))  # fmt: skip
        arrived = []
        try:
            for _ in range(30):
                with contextlib.suppress(HandoverError):
                    pair.handover.poll()
                with contextlib.suppress(HandoverError):
                    arrived += pair.taker.poll()
            is_interrupted = False
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(None)
        is_here = bool(pair.receiver.open_slots)
        assert is_here == any(map(pair.inbox.find, pair.inbox.taken))
        if is_interrupted:
            with contextlib.suppress(PeerLostError, KeyboardInterrupt):
                arrived += pair.taker.poll()
        assert is_here == bool(arrived) and (is_here or pair.sender.open_slots)
        assert pair.receiver.incoming_requests == ()
        if not is_interrupted:
            break
    assert is_here == (end == "whole") and point >= 30


def in_doubt(exported, **sizes):
    """A pair after the answer to the commit was lost: both have the request."""
    whole = Pair(exported)
    whole.run()
    sender = new_manager(**sizes)
    pair = Pair(exported, sender=sender, num_messages=len(whole.line.sizes) - 1)
    (error, _), arrived = pair.run()
    assert isinstance(error, HandoverInDoubtError) and len(arrived) == 1
    return pair


def test_a_request_in_doubt_is_known_after_it_was_swapped(expected, exported):
    pair = in_doubt(exported, host_blocks=8, host_slots=1)
    other = pair.sender.open_request()
    pair.slot = pair.sender.swap_in(pair.sender.swap_out(pair.slot))
    pair.connect()
    (error, _), again = pair.run()
    assert error is None and not again
    pair.sender.free_request(other)
    pair.assert_receiver_alone(expected)


def test_a_late_commit_forgets_no_arrival(expected, exported):
    """The request has come by another connection before the first one's commit is read."""
    pair = Pair(exported)
    pair.handover.finish()
    while not pair.handover._is_in_doubt:
        assert not pair.taker.poll()
        pair.handover.poll()
    late, num_messages = pair.taker, len(pair.line.sizes)
    pair.handover.close()
    pair.connect(num_messages=num_messages)  # without the answer to the commit
    (error, _), arrived = pair.run()
    assert isinstance(error, HandoverInDoubtError) and len(arrived) == 1
    with pytest.raises(PeerLostError, match="one that this manager keeps room for"):
        late.poll()
    pair.connect()
    (error, _), again = pair.run()
    assert error is None and not again
    pair.assert_receiver_alone(expected)


def test_blocks_that_can_change_after_a_cancel_are_not_final():
    """A live chunk raises the floor, and its cancel brings back the lower one."""
    manager = new_manager()
    slot = manager.open_request()
    feed(manager, slot, 258)
    nonce, final = manager.request_nonce(slot), manager.final_tokens(slot)
    plan = manager.prepare_forward([slot], [258], [290])
    assert manager.final_tokens(slot) == final < 256
    plan.cancel()
    manager.truncate(slot, final)
    assert manager.request_nonce(slot) == nonce


def test_a_request_in_doubt_that_ran_on_is_not_freed(exported):
    pair = in_doubt(exported)
    feed(pair.sender, pair.slot, LENGTH + 1)
    pair.connect(num_tokens=LENGTH + 1)
    (error, _), _ = pair.run()
    assert "has request 'one' with 650 tokens, and it has 651 here" in str(error)
    assert pair.sender.lengths[pair.slot] == LENGTH + 1


@pytest.mark.parametrize("num_tokens", [645, 640, 100])
def test_a_request_longer_than_it_was_said_to_be(num_tokens, expected, exported):
    """The sender refuses it; a receiver does so too, before it is ready."""
    pair = Pair(exported)
    pair.connect(num_tokens=num_tokens)
    for _ in range(9):
        pair.handover.poll()
        pair.taker.poll()
    with pytest.raises(ValueError, match=f"num_tokens .{num_tokens}. tokens, got 650"):
        pair.handover.finish()
    if num_tokens == 645:
        pair.handover._num_tokens = LENGTH
        (error, _), arrived = pair.run()
        assert "at most the 645 tokens that room is kept for, got 650" in str(error)
        assert not arrived and not isinstance(error, PeerLostError)
    pair.handover.close()
    pair.taker.close()
    pair.assert_sender_alone(expected)


BLOCK_BYTES = new_manager().blocks.num_bytes
END = {"kind": "end", "length": "0", "rollback_floor": "0", "prefix_root": ""}


def hostile_receiver(*messages):
    """A receiver that gets these messages, and what it answers; it is as before."""
    manager, line = new_manager(), Line()
    before = books(manager)
    receiver = Receiver(Inbox(manager), LocalTransport(line, 1, MEMORY_BYTES), deadline=0.05)
    offer = {
        "kind": "offer", "id": "x", "nonce": 1, "num_tokens": LENGTH, "has_checks": False,
        "fingerprint": CONFIG.format_fingerprint, "piece_bytes": receiver._channel.piece_bytes,
    }  # fmt: skip
    first, *rest = messages
    offer = {name: value for name, value in {**offer, **first}.items() if value is not None}
    line.queues[0].extend(map(as_message, [offer, *rest]))
    try:
        for _ in range(3):
            receiver.poll()
    finally:
        answers = [json.loads(bytes(each.numpy()))["kind"] for each in line.queues[1]]
        receiver.close()
        assert books(manager) == before
    return answers


@pytest.mark.parametrize(
    "messages",
    [
        *([{name: None}] for name in ("id", "nonce", "fingerprint", "num_tokens", "has_checks")),
        [{"id": ["a"]}], [{"id": 5}], [{"nonce": 2**70}], [{"nonce": True}], [{"has_checks": 1}],
        [{"num_tokens": 650.0}], [{"num_tokens": float("inf")}], [{"num_tokens": 10**300}],
        [{}, {"kind": "region"}], [{}, {"kind": "region", "region": [1]}],
        *([{}, {"kind": "region", "region": region}] for region in (
            ["what", 0, 1, 5], [["x"], 0, 1, 5], ["records", 0, 1, BLOCK_BYTES],
            ["blocks", 0, -3, BLOCK_BYTES], ["blocks", 0, 10**18, BLOCK_BYTES],
            ["blocks", 0, 10**30, BLOCK_BYTES], ["blocks", 0, 1.5, BLOCK_BYTES],
            ["blocks", 0, "1", BLOCK_BYTES], ["blocks", 0, 1, BLOCK_BYTES - 1],
            ["blocks", -1, 1, BLOCK_BYTES], ["blocks", 0, True, BLOCK_BYTES],
        )),
        [{}, {"kind": "end"}], [{}, {**END, "length": 5}], [{}, {**END, "prefix_root": 5}],
        [{}, b'{"kind": "end", "length": 1e999, "rollback_floor": "0", "prefix_root": ""}'],
        [{}, {"kind": "commit"}], [{}, b"\xff\xfe"], [{}, b"[" * 4000], [{}, b"[1]"],
        [{}, {"kind": ["end"]}],
    ],
    ids=str,
)  # fmt: skip
def test_a_receiver_loses_a_peer_that_sends_no_messages(messages):
    with pytest.raises(PeerLostError):
        hostile_receiver(*messages)


@pytest.mark.parametrize(
    "messages",
    [[{"num_tokens": -1}], [{"num_tokens": 2**62}], [{"id": ""}], [{"id": "x" * 300}],
     [{"fingerprint": "\u4e2d" * 500}], [{}, END], [{}, {**END, "length": "9" * 4000}],
     [{}, {**END, "length": "-1"}]],
    ids=str,
)  # fmt: skip
def test_a_receiver_refuses_what_it_cannot_take(messages):
    assert hostile_receiver(*messages)[-1] == "refuse"


@pytest.mark.parametrize(
    "answer", [{"kind": "refuse"}, {"kind": "refuse", "why": 5}, {"kind": "have"},
               {"kind": "have", "length": "650"}, {"kind": "ready"}, {"kind": 5}, b"no"],
    ids=str,
)  # fmt: skip
def test_a_sender_loses_a_peer_that_sends_no_messages(answer, expected, exported):
    pair = Pair(exported)
    pair.handover.finish()
    pair.line.queues[1].append(as_message(answer))
    with pytest.raises(PeerLostError):
        while not pair.handover.poll():
            pass
    pair.assert_sender_alone(expected)


def test_pieces_after_the_checks_are_checked_too(expected, exported):
    """A sender that checks its first pieces alone is refused."""
    pair = Pair(exported)
    send_rest, channel = pair.handover._send_rest, pair.handover._channel

    def check_early(rest):
        yield from channel.put("checked")
        yield from channel.send_checks()
        pair.handover._check = None
        yield from send_rest(rest)

    pair.handover._send_rest = check_early
    (error, _), arrived = pair.run()
    assert "some pieces have another xxh3" in str(error) and not arrived
    pair.assert_sender_alone(expected)


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
