"""`commit` and `prepare_step`: lengths on the device store and give what host lengths do."""

import itertools
import random
import time

import numpy as np
import pytest
import torch

from dsv4 import (
    CacheConfig,
    CapturedForward,
    CheckpointPolicy,
    KVCacheManager,
    prepare_forward,
)
from dsv4.cache.graphs import captured_forward
from dsv4.cache.memory.accepted_counts import AcceptedCounts
from dsv4.errors import LiveForwardError, NoFreeSlotError, OutOfBlocksError
from dsv4.testing import Row, model_projections, model_weights, move_to, poison, run_forward
from tests.cache.life import (
    SHORT,
    WHOLE,
    KernelWorld,
    World,
    assert_stores,
    run_plan,
    short_world,
)
from tests.cache.live import assert_same, live_bytes
from tests.cache.test_captured_forward import EagerGraph, leaves

DRAFTS = 3


def run_layers(manager, plan, inputs, weights):
    """Write and attend every layer."""
    return [
        manager.acquire(idx, plan).forward(*each).output
        for idx, each in enumerate(zip(inputs, weights, strict=True))
    ]


class Twins:
    """Two managers with the same requests: `mine` leaves lengths to the device, `other` knows them.

    lengths are those of each open request, known its ids that both were told.
    """

    def __init__(self, world, **sizes):
        self.world = world
        self.mine, self.other = (world.new_manager(**sizes) for _ in range(2))
        self.lengths, self.known, self.swapped, self.num_draws = {}, {}, [], 0
        self.num_in_flight, self.ids = 0, itertools.count()
        for manager in self.managers:
            poison(manager)
            manager.device_memory.checkpoints.fill_(0xFF)

    @property
    def managers(self):
        return self.mine, self.other

    def both(self, call):
        """Call both managers: the same result, or the same error, if any at all."""
        results = []
        for manager in self.managers:
            try:
                results.append(call(manager))
            except (NoFreeSlotError, OutOfBlocksError) as error:
                results.append(type(error))
        assert results[0] == results[1]
        return None if isinstance(results[0], type) else results[0]

    def draw(self, num_tokens):
        self.num_draws += 1
        layers = model_projections(self.world.config, num_tokens, seed=1000 * self.num_draws)
        return self.world.moved(layers)

    def open(self, length):
        slot = self.both(lambda manager: manager.open_request())
        if slot is None:
            return None
        self.lengths[slot], self.known[slot] = 0, 0
        inputs = self.draw(max(length, 1))
        for manager in self.managers if length else ():
            plan = prepare_forward(manager, [slot], [0], [length])
            run_layers(manager, plan, inputs, self.world.weights)
        self.lengths[slot] = length
        return slot

    def prepare(self, slots, count):
        """Plan the same step twice; both see the same positions, and sizes of the longest."""
        mine = self.mine.prepare_step(slots, count)
        before = [self.lengths.get(slot, 0) for slot in slots]
        other = prepare_forward(self.other, slots, before, [n + count for n in before])
        self.num_in_flight += bool((mine.positions_before != other.positions_before).any())
        for name in ("positions", "positions_before", "positions_after", "request_slots"):
            assert torch.equal(getattr(mine.tokens, name), getattr(other.tokens, name)), name
        assert mine.longest >= other.longest
        other.longest = mine.longest
        return mine, other

    def step(self, slots, count):
        """Run a step in both; outputs are equal."""
        plans = self.prepare(slots, count)
        inputs = self.draw(plans[0].num_tokens)
        outputs = [
            run_layers(manager, plan, inputs, self.world.weights)
            for manager, plan in zip(self.managers, plans, strict=True)
        ]
        for got, want in zip(*outputs, strict=True):
            assert torch.equal(got, want)
        return plans

    def commit(self, plan, slots, count, accepted):
        """Keep some tokens of a step: the device is told in one manager, the host in the other."""
        plan.commit(torch.tensor(accepted, dtype=torch.int32, device=self.mine.device))
        for slot, kept in zip(slots, accepted, strict=True):
            if slot >= 0:
                self.lengths[slot] += min(max(kept, 0), count)
                self.known[slot] = min(self.known[slot], self.lengths[slot])
        real = [slot for slot in slots if slot >= 0]
        self.other.truncate(real, [self.lengths[slot] for slot in real])

    def note(self, slot, ahead=0):
        """Tell both ids that no other request has: projections do not follow from them.

        ahead are those of tokens to come.
        """
        if not self.mine._books.prefix.tree.is_on:
            return
        start, end = self.known[slot], self.lengths[slot] + ahead
        if self.mine._books.prefix.ids.num_known[slot] != start:  # the commit may forget some
            assert self.mine.num_known_ids[slot] == start
        ids = [next(self.ids) for _ in range(start, end)]
        for manager in self.managers if ids else ():
            manager.note_tokens(slot, ids, start=start)
        self.known[slot] = max(start, end)

    def cut(self, slot, length):
        self.both(lambda manager: manager.truncate(slot, length))
        self.lengths[slot] = length
        self.known[slot] = min(self.known[slot], length)

    def forget(self, slot):
        return self.lengths.pop(slot), self.known.pop(slot)

    def compare(self, *, is_roomy):
        """Requests are the same; with room for all, so is what they have published."""
        assert np.array_equal(self.mine.lengths, self.other.lengths)
        assert np.array_equal(self.mine.rollback_floor, self.other.rollback_floor)
        for manager in self.managers:
            manager.stats()
            manager.check_integrity()
        for slot, length in self.lengths.items():
            assert self.mine.lengths[slot] == length
            assert_same(*(live_bytes(manager, slot) for manager in self.managers))
            books = [manager._books.prefix for manager in self.managers]
            if is_roomy and books[0].tree.is_on:
                mine, other = (book.checkpoints_of(slot) for book in books)
                # Blocks are published later if lengths are not known. Until then a swap drops
                # their checkpoints, and a commit gives up those that were published before it.
                assert mine.keys() <= other.keys()
                for length in mine:
                    one, two = mine[length], other[length]
                    rows = [m.device_memory.checkpoints for m in self.managers]
                    assert torch.equal(rows[0][one], rows[1][two])


def live(twins, *, seed, num_steps, is_roomy):
    """A random life of the twins."""
    choose, world = random.Random(seed), twins.world
    limit = world.max_tokens
    for _ in range(num_steps):
        lengths, event = twins.lengths, choose.random()
        fitting = [slot for slot in lengths if lengths[slot] + DRAFTS + 1 <= limit]
        if fitting and event < 0.6:
            slots = choose.sample(fitting, choose.randint(1, len(fitting)))
            if choose.random() < 0.1 and len(slots) < world.max_requests:
                slots.insert(choose.randint(0, len(slots)), -1)
            one_step(twins, slots, choose)
        elif event < 0.7:
            twins.open(choose.choice([0, 1, 3, 7, 8, 9, 15]))
        elif event < 0.75 and lengths:
            slot = choose.choice(sorted(lengths))
            twins.both(lambda manager, slot=slot: manager.free_request(slot))
            twins.forget(slot)
        elif event < 0.8 and lengths:
            slot = choose.choice(sorted(lengths))
            twins.note(slot)  # what is shared has the same ids
            fork = twins.both(lambda manager, slot=slot: manager.fork(slot))
            if fork is not None:
                lengths[fork], twins.known[fork] = lengths[slot], twins.known[slot]
        elif event < 0.85 and lengths:
            slot = choose.choice(sorted(lengths))
            twins.cut(slot, max(int(twins.other.rollback_floor[slot]), lengths[slot] - 2))
        elif event < 0.9 and lengths:
            slot = choose.choice(sorted(lengths))
            swapped = [manager.swap_out(slot) for manager in twins.managers]
            held = twins.forget(slot)
            slots = [m.swap_in(each) for m, each in zip(twins.managers, swapped, strict=True)]
            assert slots[0] == slots[1]
            twins.lengths[slots[0]], twins.known[slots[0]] = held
        elif event < 0.96:
            for manager in twins.managers:
                manager.check_integrity()
        else:
            twins.compare(is_roomy=is_roomy)
    twins.compare(is_roomy=is_roomy)
    for manager in twins.managers:
        manager.reset()
        manager.check_integrity()


def one_step(twins, slots, choose):
    count = choose.randint(1, DRAFTS + 1)
    if choose.random() < 0.1:
        plans = twins.prepare(slots, count)
        inputs = twins.draw(plans[0].num_tokens)
        for manager, plan in zip(twins.managers, plans, strict=True):
            manager.acquire(0, plan).forward(inputs[0], twins.world.weights[0])
            plan.cancel()
        return
    real = [slot for slot in slots if slot >= 0]
    if choose.random() < 0.3:
        for slot in real:
            twins.note(slot, ahead=1)
    try:
        plan, _ = twins.step(slots, count)
    except OutOfBlocksError:
        assert twins.mine.live_plan is None and twins.other.live_plan is None
        return
    if choose.random() < 0.3:  # calls that publish
        for manager in twins.managers:
            manager.stats()
            manager.check_integrity()
    if choose.random() < 0.15:  # a request is freed or forked before the commit
        slot = choose.choice(real)
        twins.note(slot, ahead=count)  # what is shared has the same ids
        if choose.random() < 0.5:
            twins.both(lambda manager: manager.free_request(slot))
            twins.forget(slot)
            slots = [-1 if each == slot else each for each in slots]
            real.remove(slot)
        elif (fork := twins.both(lambda manager: manager.fork(slot))) is not None:
            twins.lengths[fork] = twins.lengths[slot] + count
            twins.known[fork] = twins.known[slot]
    if real and choose.random() < 0.15:  # every token stays, or the host says which
        for slot in real:
            twins.lengths[slot] += count
        if choose.random() < 0.5:
            twins.cut(real[0], twins.lengths[real[0]] - choose.randint(0, count))
    else:
        accepted = [choose.choice([*range(count + 1), -5, 99]) for _ in slots]
        twins.commit(plan, slots, count, accepted)
    if choose.random() < 0.5:
        for slot in real:
            twins.note(slot, ahead=choose.randint(0, 1))


ROOMY = {"num_blocks": 60, "num_checkpoints": 40, "host_blocks": 40, "host_slots": 2,
         "checkpoint_policy": CheckpointPolicy(every_blocks=1)}  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_lives_with_short_blocks(seed):
    twins = Twins(SHORT, **ROOMY)
    live(twins, seed=seed, num_steps=200, is_roomy=True)
    assert twins.num_in_flight > 10


@pytest.mark.parametrize("seed", range(2))
def test_lives_with_all_kinds_of_layers(seed):
    twins = Twins(WHOLE, **ROOMY)
    for length in (120, 250):
        twins.open(length)
    live(twins, seed=seed, num_steps=90, is_roomy=True)
    assert twins.num_in_flight > 5


@pytest.mark.parametrize("seed", range(4))
def test_lives_without_a_prefix_cache(seed):
    twins = Twins(SHORT, num_blocks=60, host_blocks=40, host_slots=2)
    live(twins, seed=seed, num_steps=80, is_roomy=True)


def flight(world=SHORT, *, length=13, count=3, accepted=1, **sizes):
    """Twins with one request whose last step is in flight."""
    twins = Twins(world, **{**ROOMY, **sizes})
    slot = twins.open(length)
    plan, _ = twins.step([slot], count)
    twins.commit(plan, [slot], count, [accepted])
    return twins, slot


def forbid_waits(patch, manager):
    """Let the host fail where it would wait for counts."""

    def fail(counts):
        raise AssertionError("the host waits")

    patch.setattr(AcceptedCounts, "wait", fail)
    return manager


def test_the_host_waits_for_the_step_before_the_last(monkeypatch):
    twins, slot = flight()
    with monkeypatch.context() as patch:
        manager = forbid_waits(patch, twins.mine)
        plan = manager.prepare_step([slot], 2)
        assert manager.num_free_slots == 3 and manager.stats().num_free_blocks
        opened = manager.open_request()
        manager.free_request(opened)
        run_layers(manager, plan, twins.draw(2), SHORT.weights)
        assert plan.positions_before.tolist() == [16], "the longest that it can be"
        with pytest.raises(AssertionError, match="the host waits"):
            plan.commit(torch.tensor([1], dtype=torch.int32))
    plan.commit(torch.tensor([1], dtype=torch.int32))
    assert plan.positions_before.tolist() == [14] and plan.positions_after.tolist() == [16]
    with monkeypatch.context() as patch:
        forbid_waits(patch, twins.mine)
        twins.mine.note_tokens(slot, range(14), start=0)
    assert twins.mine.lengths[slot] == 15


WAITING = {
    "truncate": lambda manager, slot: manager.truncate(slot, 14),
    "fork": lambda manager, slot: manager.fork(slot),
    "swap_out": lambda manager, slot: manager.swap_out(slot),
    "free_request": lambda manager, slot: manager.free_request(slot),
    "prepare_forward": lambda manager, slot: prepare_forward(manager, [slot], [14], [15]).cancel(),
    "blocks_needed": lambda manager, slot: manager.blocks_needed(slot, 15),
    "reset": lambda manager, slot: manager.reset(),
    "lengths": lambda manager, slot: manager.lengths,
    "rollback_floor": lambda manager, slot: manager.rollback_floor,
    "settle": lambda manager, slot: manager.settle(),
}


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
def test_calls_that_need_lengths_wait_for_them(call, monkeypatch):
    twins, slot = flight()
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the host waits"):
        call(forbid_waits(patch, twins.mine), slot)
    twins.mine.check_integrity()
    assert twins.mine._requests.lengths[slot] == 16, "nothing has changed"
    call(twins.mine, slot)
    assert twins.mine._forward.committed.step is None
    twins.mine.check_integrity()


def test_a_saved_request_has_its_accepted_tokens(tmp_path):
    twins, slot = flight()
    twins.mine.save_request(slot, tmp_path / "one")
    twins.other.save_request(slot, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_request_of_an_earlier_step_is_freed_without_a_wait(monkeypatch):
    twins = Twins(SHORT, **ROOMY)
    first, second = twins.open(5), twins.open(9)
    for slots in ([first, second], [first]):
        plan, _ = twins.step(slots, 2)
        twins.commit(plan, slots, 2, [1] * len(slots))
    with monkeypatch.context() as patch:
        forbid_waits(patch, twins.mine).free_request(second)
    twins.other.free_request(second)
    twins.forget(second)
    twins.compare(is_roomy=True)


@pytest.mark.parametrize("accepted, is_possible", [(3, False), (1, True)])
def test_near_the_longest_request_the_host_waits(accepted, is_possible):
    twins, slot = flight(length=34, accepted=accepted)
    if is_possible:
        twins.step([slot], 4)
        assert twins.mine._forward.committed.step is None
        twins.lengths[slot] += 4
    else:
        with pytest.raises(ValueError, match="expected at most 40, got 41"):
            twins.mine.prepare_step([slot], 4)
    twins.compare(is_roomy=True)


@pytest.mark.parametrize("accepted, is_possible", [(3, False), (1, True)])
def test_with_few_blocks_the_host_waits(accepted, is_possible):
    twins, slot = flight(length=13, accepted=accepted, num_blocks=2)
    if is_possible:  # 18 tokens close the entries of two blocks, 20 those of three
        twins.step([slot], 4)
        twins.lengths[slot] += 4
    else:
        with pytest.raises(OutOfBlocksError):
            twins.mine.prepare_step([slot], 4)
    assert twins.mine._forward.committed.step is None
    twins.compare(is_roomy=True)


def test_the_blocks_of_another_request_in_flight_are_waited_for():
    twins = Twins(SHORT, num_blocks=5)
    first, second = twins.open(17), twins.open(19)
    plan, _ = twins.step([first], 4)  # 21 tokens would take a third block, 18 do not
    twins.commit(plan, [first], 4, [1])
    assert twins.mine.num_free_blocks == 0
    plan, _ = twins.step([second], 1)
    twins.commit(plan, [second], 1, [1])
    twins.compare(is_roomy=True)


def test_blocks_of_the_longest_length_are_given_back():
    twins, slot = flight(length=13, accepted=1)
    plan, _ = twins.prepare([slot], 4)
    assert plan.num_new_blocks == 1 and len(twins.mine._requests.blocks_of(slot)) == 3
    plan.cancel()
    assert len(twins.mine.blocks_of(slot)) == 2


@pytest.mark.parametrize("together", [False, True])
def test_a_shared_block_is_copied_if_it_may_be_written(together):
    """The first step closes no window, so only the second one copies the block."""
    twins = Twins(SHORT, **ROOMY)
    slot = twins.open(16)
    fork = twins.both(lambda manager: manager.fork(slot))
    twins.lengths[fork], twins.known[fork] = 16, 0
    for each in (slot, fork):
        twins.cut(each, 13)
    slots = [slot, fork] if together else [slot]
    plan, _ = twins.step(slots, 2)
    assert plan.num_new_blocks == 0
    twins.commit(plan, slots, 2, [1, 2][: len(slots)])
    plan, _ = twins.step(slots, 1)
    assert plan.num_new_blocks == 1, "at 15 tokens none is written, at 16 there is one"
    twins.commit(plan, slots, 1, [1, 1][: len(slots)])
    twins.compare(is_roomy=True)
    plan, _ = twins.step(slots, 4)
    twins.commit(plan, slots, 4, [4, 0][: len(slots)])
    twins.compare(is_roomy=True)


def test_only_known_lengths_are_published():
    twins, slot = flight(length=16, count=4, accepted=4)
    for manager in twins.managers:
        manager.note_tokens(slot, range(20), start=0)
    published = [
        manager.stats() and len(manager._books.prefix.tree.nodes) for manager in twins.managers
    ]
    assert published == [1, 2], "16 tokens are known to be there, 4 more may be drafts"
    twins.mine.settle()
    twins.mine.stats()
    assert len(twins.mine._books.prefix.tree.nodes) == 2


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_request_freed_inside_of_a_step_that_follows(is_cancelled):
    twins, slot = flight()
    twins.open(5)
    plans = twins.prepare([slot, 1], 2)
    inputs = twins.draw(4)
    for manager, plan in zip(twins.managers, plans, strict=True):
        manager.free_request(slot)
        if is_cancelled:
            plan.cancel()
        else:
            run_layers(manager, plan, inputs, SHORT.weights)
    twins.forget(slot)
    if not is_cancelled:
        twins.lengths[1] += 2
        plans[0].commit(torch.tensor([0, 1], dtype=torch.int32))
        twins.lengths[1] -= 1
        twins.other.truncate(1, twins.lengths[1])
    assert twins.mine.open_slots == [1]
    twins.compare(is_roomy=True)


@pytest.mark.parametrize("accepted", range(5))
def test_a_block_published_before_the_commit_is_copied_behind_it(accepted):
    """Its last token may be rejected, so the next step writes to a copy of it."""
    twins = Twins(SHORT, **ROOMY)
    slot = twins.open(15)
    twins.note(slot, ahead=1)
    plan, _ = twins.step([slot], 4)
    for manager in twins.managers:
        manager.stats()
    assert len(twins.mine._books.prefix.tree.nodes) == 2
    published = twins.mine.blocks_of(slot)[1]
    before = twins.mine.paged.storage[published].clone()
    twins.commit(plan, [slot], 4, [accepted])
    plan, _ = twins.step([slot], 4)
    twins.mine.check_integrity()
    assert torch.equal(twins.mine.paged.storage[published], before)
    twins.commit(plan, [slot], 4, [3])
    twins.compare(is_roomy=True)


def test_a_step_that_follows_publishes_no_token_in_doubt():
    """A noted id of a token that was rejected never names the bytes of the one in its place."""
    manager = SHORT.new_manager(**ROOMY)
    slot = manager.resume_request([0] * 15).slot
    run_forward(manager, SHORT.weights, [Row(slot, SHORT.projections_of(bytes(15)), 0, 15)])
    manager.note_tokens(slot, [1], start=15)
    for last, accepted in ((1, 0), (0, 4)):
        tokens = bytes(15) + bytes([last, 0, 0, 0])
        plan = manager.prepare_step([slot], 4)
        run_plan(manager, plan, SHORT.weights, [Row(slot, SHORT.projections_of(tokens), 15, 19)])
        manager.stats()
        plan.commit(torch.tensor([accepted]))
    manager.settle()
    tokens = bytes(15) + bytes([1, 0, 0, 0])
    hit = manager.resume_request(list(tokens))
    rows = [Row(hit.slot, SHORT.projections_of(tokens), hit.num_tokens, 19)]
    run_forward(manager, SHORT.weights, rows)
    assert_stores(SHORT, manager, hit.slot, tokens)


@pytest.mark.parametrize("accepted", [0, 1, 6])
def test_a_fork_of_a_step_longer_than_a_block(accepted):
    """It shares more than one block with the step, and none of them is written."""
    config = CacheConfig.tiny(
        compress_ratios=(0, 4), block_tokens=4, drafts_per_step=5, sliding_window=8, index_topk=4
    )
    twins = Twins(World(config, max_tokens=64, num_blocks=60), num_blocks=60)
    slot = twins.open(6)
    plan, _ = twins.step([slot], 6)
    fork = twins.both(lambda manager: manager.fork(slot))
    before = [part.clone() for part in live_bytes(twins.mine, fork)]
    twins.commit(plan, [slot], 6, [accepted])
    twins.step([slot], 6)
    assert_same(live_bytes(twins.mine, fork), before)


def test_counts_of_64_bits_do_not_wrap():
    twins, slot = flight(accepted=1)
    for number, kept in ((2**31, 2), (1 - 2**32, 0)):
        plan, _ = twins.step([slot], 2)
        twins.lengths[slot] += kept
        twins.other.truncate(slot, twins.lengths[slot])
        plan.commit(torch.tensor([number]))
        assert twins.mine.lengths[slot] == twins.lengths[slot]
    twins.compare(is_roomy=True)


def test_ids_noted_behind_a_commit_stay():
    twins, slot = flight(length=4, count=3, accepted=2)
    for manager in twins.managers:
        manager.note_tokens(slot, range(7), start=0)
    assert twins.mine.lengths[slot] == 6 and twins.mine.num_known_ids[slot] == 7
    plan, _ = twins.step([slot], 3)
    twins.commit(plan, [slot], 3, [0])
    twins.mine.settle()
    assert twins.mine.num_known_ids[slot] == 6, "the token to come was rejected"


CHANGES = {
    "freed inside": lambda manager, slot: None,
    "freed": lambda manager, slot: manager.free_request(slot),
    "freed and opened again": lambda manager, slot: (
        manager.free_request(slot), manager.open_request()),
    "truncated": lambda manager, slot: manager.truncate(slot, 6),
    "swapped out": lambda manager, slot: manager.swap_out(slot),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_request_that_changes_between_a_step_and_its_commit(name):
    """It is left as it is, and the others are committed."""
    twins = Twins(SHORT, **ROOMY)
    first, second = twins.open(5), twins.open(9)
    plans, inputs = twins.prepare([first, second], 2), twins.draw(4)
    for manager, plan in zip(twins.managers, plans, strict=True):
        if name == "freed inside":
            manager.free_request(first)
        run_layers(manager, plan, inputs, SHORT.weights)
        manager.stats()
        CHANGES[name](manager, first)
    is_open = bool(twins.other.is_open[first])
    twins.lengths[first] = int(twins.other.lengths[first])
    if not is_open:
        twins.forget(first)
    plans[0].commit(torch.tensor([1, 0], dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"Stale plan: .* committed"):
        plans[0].commit(torch.tensor([1, 0], dtype=torch.int32))
    twins.other.truncate(second, 9)
    twins.compare(is_roomy=True)
    plan, _ = twins.step([second], 2)
    twins.commit(plan, [second], 2, [1])
    twins.compare(is_roomy=True)


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_request_that_changes_behind_a_step_in_flight(is_truncated):
    """Its checkpoint is taken before, though another request's length is not known."""
    twins = Twins(SHORT, **ROOMY)
    first, second = twins.open(13), twins.open(7)
    twins.note(second)
    plan, _ = twins.step([first], 2)
    twins.commit(plan, [first], 2, [1])
    twins.step([second], 2)
    twins.lengths[second] = 9
    assert twins.mine._forward.committed.step is not None
    if is_truncated:
        twins.cut(second, 7)
    else:
        twins.both(lambda manager: manager.free_request(second))
        twins.forget(second)
        assert twins.open(3) == second
        twins.note(second)
    assert not twins.mine._books.prefix.requests[second].pending
    twins.compare(is_roomy=True)
    assert not twins.mine._books.prefix.requests[second].pending


def test_refusals_change_nothing():
    twins, slot = flight()
    manager = twins.mine
    plan, other = twins.prepare([slot], 2)
    right = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="Cannot commit a forward whose layers are not all"):
        plan.commit(right)
    with pytest.raises(LiveForwardError):
        manager.prepare_step([slot], 2)
    inputs = twins.draw(2)
    run_layers(manager, plan, inputs, SHORT.weights)
    for wrong, error, match in (
        ([1], TypeError, "accepted: expected a tensor, got list"),
        (right.float(), TypeError, "dtype of accepted: expected int32 or int64"),
        (torch.ones(2, dtype=torch.int32), ValueError, r"shape of accepted: expected \[1\]"),
        (right.to("meta"), ValueError, "device of accepted: expected cpu, got meta"),
    ):
        with pytest.raises(error, match=match):
            plan.commit(wrong)
    plan.commit(right)
    with pytest.raises(RuntimeError, match="Stale plan"):
        plan.commit(right)
    run_layers(twins.other, other, inputs, SHORT.weights)
    twins.lengths[slot] += 1
    twins.other.truncate(slot, twins.lengths[slot])
    for slots, count, match in (
        ([slot], 0, r"Invalid num_tokens: expected an integer from 1 to 4 \(drafts_per_step"),
        ([slot], 5, "Invalid num_tokens"),
        ([2], 1, "slot 2 is not open"),
        ([slot, slot], 1, "named more than once"),
        ([4], 1, "Invalid request_slots: expected -1 to 3"),
    ):
        with pytest.raises(ValueError, match=match):
            manager.prepare_step(slots, count)
    twins.compare(is_roomy=True)


def test_a_chunk_is_not_committed():
    twins = Twins(SHORT, **ROOMY)
    slot = twins.mine.open_request()
    plan = prepare_forward(twins.mine, [slot], [0], [5])
    run_layers(twins.mine, plan, twins.draw(5), SHORT.weights)
    with pytest.raises(ValueError, match=r"Cannot commit a forward with a chunk: .* got 5"):
        plan.commit(torch.tensor([1], dtype=torch.int32))
    twins.mine.truncate(slot, 2)


def test_a_replay_is_not_committed():
    manager = SHORT.new_manager(**{**ROOMY, "checkpoint_policy": CheckpointPolicy()})
    text = bytes(40)
    slot = manager.resume_request(list(text)).slot
    row = Row(slot, SHORT.projections_of(text), 0, 40)
    run_forward(manager, SHORT.weights, [row])
    manager.free_request(slot)
    hit = manager.resume_request([*text[:36], 1])
    assert hit.num_replayed
    plan = manager.prepare_step([hit.slot], 2)
    plan.complete()
    with pytest.raises(ValueError, match=f"Cannot commit a replay: .* at {hit.num_tokens}"):
        plan.commit(torch.tensor([1], dtype=torch.int32))
    manager.truncate(hit.slot, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_lives_on_a_gpu(seed):
    twins = Twins(short_world(KernelWorld, device="cuda", backend="triton"), **ROOMY)
    live(twins, seed=seed, num_steps=150, is_roomy=True)
    assert twins.num_in_flight > 10


NUM_TOKENS, NUM_ROWS = 9, 6


class Verification:
    """A captured verification step of all requests, with attention, and its outputs."""

    def __init__(self, device="cuda", max_length=8192, **choices):
        config = CacheConfig.tiny(drafts_per_step=NUM_TOKENS - 1, **choices)
        self.manager = KVCacheManager(
            config, max_requests=NUM_ROWS, num_blocks=NUM_ROWS * 40, max_forward_tokens=512,
            max_request_tokens=max_length, device=device, num_checkpoints=12,
            checkpoint_policy=CheckpointPolicy(every_blocks=1),
        )  # fmt: skip
        poison(self.manager)
        layers = model_weights(config, seed=0), model_projections(config, 54, seed=1)
        self.weights, self.inputs = ([move_to(device, each) for each in part] for part in layers)
        self.generator = torch.Generator(device).manual_seed(2)
        self.forward = CapturedForward(
            self.manager, self.attend, batch=NUM_ROWS, tokens_per_request=NUM_TOKENS
        )
        self.slots, self.outputs = self.manager.open_requests(NUM_ROWS), []
        self.known = np.zeros(NUM_ROWS, dtype=np.int64)

    def attend(self, handles):
        results = [
            handle.forward(*each).output.flatten()
            for handle, *each in zip(handles, self.inputs, self.weights, strict=True)
        ]
        return torch.cat(results)

    def replay(self, plan):
        for tensor in leaves(self.inputs):
            tensor.normal_(generator=self.generator)
        self.forward.replay(plan)
        self.outputs.append(self.forward.outputs.clone())

    def note(self, lengths):
        """Tell the ids of tokens that the host knows to be there."""
        ids = [
            slot * 100_000 + position
            for slot, start, end in zip(self.slots, self.known, lengths, strict=True)
            for position in range(start, end)
        ]
        self.manager.note_tokens(self.slots, ids, start=self.known, counts=lengths - self.known)
        self.known = lengths.astype(np.int64)

    def step_on_the_device(self, accepted):
        plan = self.manager.prepare_step(self.slots, NUM_TOKENS)
        self.replay(plan)
        plan.commit(accepted)
        self.note(plan.positions_before)

    def step_on_the_host(self, accepted):
        before = self.manager.lengths
        self.replay(prepare_forward(self.manager, self.slots, before, before + NUM_TOKENS))
        self.manager.truncate(self.slots, before + accepted.cpu().numpy())
        self.note(before)

    def assert_equals(self, other):
        for got, want in zip(self.outputs, other.outputs, strict=True):
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))
        assert np.array_equal(self.manager.lengths, other.manager.lengths)
        assert np.array_equal(self.manager.rollback_floor, other.manager.rollback_floor)
        books = [each.manager._books.prefix for each in (self, other)]
        for slot in self.slots:
            assert_same(*(live_bytes(each.manager, slot) for each in (self, other)))
            lengths = [list(book.checkpoints_of(slot)) for book in books]
            assert lengths[0] == lengths[1]
        self.manager.check_integrity()


def draw_accepted(num_steps, device):
    generator, size = torch.Generator(device).manual_seed(7), (num_steps, NUM_ROWS)
    return torch.randint(0, NUM_TOKENS + 1, size, generator=generator, device=device)


def test_captured_steps_are_planned_without_lengths(monkeypatch):
    monkeypatch.setattr(captured_forward, "CudaGraph", EagerGraph)
    mine, other = (Verification("cpu", max_length=300) for _ in range(2))
    for accepted in draw_accepted(30, "cpu"):
        mine.step_on_the_device(accepted)
        other.step_on_the_host(accepted)
    mine.assert_equals(other)
    assert mine.manager.lengths.max() > 128


@pytest.mark.gpu
def test_a_thousand_verification_steps_without_a_round_trip(monkeypatch):
    mine, other, seconds = Verification(), Verification(), []
    waits, wait = [], torch.cuda.Event.synchronize
    monkeypatch.setattr(
        torch.cuda.Event, "synchronize", lambda event: (waits.append(event), wait(event))
    )
    for each, mode in ((mine, "error"), (other, "default")):
        accepted = draw_accepted(1000, "cuda").unbind()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter())
        torch.cuda.set_sync_debug_mode(mode)
        step = each.step_on_the_device if each is mine else each.step_on_the_host
        try:
            for counts in accepted:
                step(counts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if each is mine:
            assert set(waits) == {mine.manager._forward.committed._accepted._arrived}
            assert len(waits) == 999
        torch.cuda.synchronize()
        seconds.append(time.perf_counter())
    on_device, on_host = (1000 * (b - a) for a, b in (seconds[:2], seconds[2:]))
    print(f"a step takes {on_device:.0f} us with lengths on the device, {on_host:.0f} on the host")
    mine.assert_equals(other)
