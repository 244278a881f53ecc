"""Whatever is raised, and wherever: each call leaves all requests as before it, or as after it."""

import contextlib
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from dsv4 import CheckpointPolicy, PrefixStore, prepare_forward
from dsv4.cache.memory.journal import Journal
from dsv4.testing import Row, forward_inputs, poison
from tests.cache import life
from tests.cache.faults import KINDS, Fault, OutOfMemoryFault, Points
from tests.cache.life import SHORT, assert_stores, run_layers
from tests.marks import long

rng = np.random.default_rng(5)
BLOCK, DRAFTS = SHORT.config.block_tokens, life.DRAFTS
TEXTS = [rng.integers(0, 2, 40, dtype=np.uint8).tobytes() for _ in range(4)]


class Scene:
    """Requests in every state: shared, published, swapped, saved; few blocks are free.

    tokens are those of each open request, waiting those of the swapped one.
    """

    def __init__(self, folder, *, host_blocks=4, store=None):
        self.manager = manager = SHORT.new_manager(
            num_blocks=6, num_checkpoints=6, host_blocks=host_blocks, host_slots=2,
            undo_slots=1, checkpoint_policy=CheckpointPolicy(every_blocks=1), store=store,
        )  # fmt: skip
        poison(manager)
        self.folder, self.tokens = folder, {}
        self.path = folder / "request"
        gone = self.resume(TEXTS[0][:17])
        self.grow({gone: TEXTS[0][:17]})
        manager.free_request(gone)
        del self.tokens[gone]
        swapped = self.resume(TEXTS[1][:19])
        self.grow({swapped: TEXTS[1][:19]})
        self.first = self.resume(TEXTS[2][:21])
        self.grow({self.first: TEXTS[2][:18]})
        self.grow({self.first: TEXTS[2][:19]})
        manager.save_request(self.first, self.path)
        self.exported = manager.export_request(self.first)
        self.fork = manager.fork(self.first)
        self.tokens[self.fork] = self.tokens[self.first]
        self.swapped = manager.swap_out(swapped)
        self.waiting = self.tokens.pop(swapped)
        last = manager.open_request()
        self.tokens[last] = b""
        self.grow({last: TEXTS[3][:24]})  # what is published goes to the host
        manager.free_request(last)
        del self.tokens[last]
        self.short = manager.open_request()
        self.tokens[self.short] = b""
        self.grow({self.short: TEXTS[3][:5]})
        manager.check_integrity()

    def close(self):
        self.manager.close()

    def resume(self, text):
        slot, found, *_ = self.manager.resume_request(list(text))
        self.tokens[slot] = text[:found]
        return slot

    def rows(self, grown):
        return [
            Row(slot, SHORT.projections_of(text), len(self.tokens[slot]), len(text))
            for slot, text in grown.items()
        ]

    def grow(self, grown):
        run_layers(self.manager, SHORT.weights, self.rows(grown))
        self.tokens.update(grown)

    def more(self, slot, count, text=3):
        old = self.tokens[slot]
        return old + TEXTS[text][len(old) : len(old) + count]


class DiskScene(Scene):
    """The same above a store, from which a prompt that memory has not was just read."""

    def __init__(self, folder):
        store = PrefixStore(folder / "store", 1 << 30, key=b"a key", num_readers=1)
        sizes = {"num_checkpoints": 2, "host_blocks": 30}
        with SHORT.new_manager(**sizes, store=store) as manager:
            slot = manager.resume_request(list(TEXTS[3][:28])).slot
            row = Row(slot, SHORT.projections_of(TEXTS[3]), 0, 28)
            run_layers(manager, SHORT.weights, [row])
            manager.free_request(slot)
        store.flush()
        super().__init__(folder, host_blocks=30, store=store)
        self.store = store
        prefetch = self.manager.prefetch(list(TEXTS[3][:28]))
        assert prefetch.num_tokens == 24
        self.manager._books.prefix.tier.finish_writes()
        prefetch.wait()

    def close(self):
        super().close()
        self.store.close()


class FlightScene(Scene):
    """The same with a step in flight: the device knows how many of its tokens were accepted."""

    def __init__(self, folder):
        super().__init__(folder)
        self.verify(3, (1, 2))

    def verify(self, count, accepted):
        slots = [self.first, self.short]
        plan = self.manager.prepare_step(slots, count)
        rows = self.rows({slot: self.more(slot, count) for slot in slots})
        for idx, weights in enumerate(SHORT.weights):
            self.manager.acquire(idx, plan).forward(forward_inputs(rows, idx), weights)
        plan.commit(torch.tensor(accepted, dtype=torch.int32))
        for slot, kept in zip(slots, accepted, strict=True):
            self.tokens[slot] = self.more(slot, kept)


def opened(scene):
    slots = scene.manager.open_requests(1)
    scene.tokens.update(dict.fromkeys(slots, b""))


def resumed(scene):
    scene.resume(TEXTS[0][:20])


def resumed_from_the_host(scene):
    scene.resume(TEXTS[1][:19])


def prefetched(scene):
    scene.manager._books.prefix.tier.cancel_prefetches()
    assert scene.manager.prefetch(list(TEXTS[3][:28])).wait()


def adopted(scene):
    scene.manager.stats()
    assert scene.manager.match_prefix(list(TEXTS[3][:28])).num_tokens == 24


def resumed_from_disk(scene):
    scene.resume(TEXTS[3][:28])


def step(scene):
    """All at once: a chunk, a copy of a shared block, new blocks, an eviction."""
    more = {scene.short: scene.more(scene.short, 9), scene.first: scene.more(scene.first, 2),
            scene.fork: scene.more(scene.fork, 4)}  # fmt: skip
    scene.grow(more)


def chunk_from_a_checkpoint(scene):
    scene.manager.truncate(scene.first, 2 * BLOCK)
    scene.tokens[scene.first] = scene.tokens[scene.first][: 2 * BLOCK]
    scene.grow({scene.first: scene.more(scene.first, 7)})


def settled(scene):
    scene.manager.stats()


def truncated(scene):
    slots = [scene.first, scene.fork]
    scene.manager.truncate(slots, [17, 16])
    scene.tokens.update(
        {slot: scene.tokens[slot][:length] for slot, length in zip(slots, (17, 16), strict=True)}
    )


def truncated_to_a_checkpoint(scene):
    scene.manager.truncate(scene.first, BLOCK)
    scene.tokens[scene.first] = scene.tokens[scene.first][:BLOCK]


def emptied(scene):
    scene.manager.truncate(scene.first, 0)
    scene.tokens[scene.first] = b""


def forked(scene):
    fork = scene.manager.fork(scene.short)
    scene.tokens[fork] = scene.tokens[scene.short]


def freed(scene):
    scene.manager.free_requests([scene.first, scene.short])
    del scene.tokens[scene.first], scene.tokens[scene.short]


def swapped_out(scene):
    scene.manager.swap_out(scene.first)
    del scene.tokens[scene.first]


def swapped_in(scene):
    slot = scene.manager.swap_in(scene.swapped)
    scene.tokens[slot] = scene.waiting


def dropped(scene):
    scene.manager.drop_swapped(scene.swapped)


def saved(scene):
    scene.manager.save_request(scene.fork, scene.folder / "another")


def loaded(scene):
    slot = scene.manager.load_request(scene.path)
    scene.tokens[slot] = TEXTS[2][:19]


def imported(scene):
    scene.manager.export_request(scene.fork)
    slot = scene.manager.import_request(scene.exported)
    scene.tokens[slot] = TEXTS[2][:19]


def reserved(scene):
    scene.manager.drop_incoming(scene.manager.reserve_request(2 * BLOCK))


def accepted(scene):
    manager, saved = scene.manager, scene.exported
    incoming = manager.reserve_request(saved.length + 1)
    manager.write_incoming(incoming, 0, saved.blocks)
    slot = manager.accept_request(incoming, saved)
    scene.tokens[slot] = TEXTS[2][:19]


def noted(scene):
    ids = [*TEXTS[2][21:24], *TEXTS[2][21:23], *TEXTS[3][:5]]
    scene.manager.note_tokens(
        [scene.first, scene.fork, scene.short], ids, start=[21, 21, 0], counts=[3, 2, 5]
    )


def reset(scene):
    scene.manager.reset()
    scene.tokens.clear()


def cancelled(scene):
    """A chunk that an undo slot brings back, after some of its layers."""
    rows = scene.rows(
        {scene.short: scene.more(scene.short, 9), scene.fork: scene.more(scene.fork, 1)}
    )
    lengths = zip(*((row.slot, row.before, row.after) for row in rows), strict=True)
    plan = prepare_forward(scene.manager, *map(list, lengths))
    scene.manager.acquire(0, plan).forward(forward_inputs(rows, 0), SHORT.weights[0])
    plan.cancel()


def freed_inside_a_forward(scene):
    rows = scene.rows(
        {scene.short: scene.more(scene.short, 9), scene.fork: scene.more(scene.fork, 1)}
    )
    lengths = zip(*((row.slot, row.before, row.after) for row in rows), strict=True)
    plan = prepare_forward(scene.manager, *map(list, lengths))
    scene.manager.free_request(scene.short)
    plan.cancel()
    del scene.tokens[scene.short]


def committed(scene):
    """A step behind one in flight: blocks of the longest length are given back."""
    scene.verify(4, (0, 3))
    scene.manager.settle()


CALLS = {each.__name__: each for each in (
    opened, resumed, resumed_from_the_host, step, chunk_from_a_checkpoint, settled, truncated,
    truncated_to_a_checkpoint, emptied, forked, freed, swapped_out, swapped_in, dropped, saved,
    loaded, imported, reserved, accepted, noted, reset, cancelled, freed_inside_a_forward,
    committed, prefetched, adopted, resumed_from_disk,
)}  # fmt: skip


DISK_CALLS = {prefetched, adopted, resumed_from_disk}


def scene_of(call, folder):
    folder.mkdir()
    if call is committed:
        return FlightScene(folder)
    return DiskScene(folder) if call in DISK_CALLS else Scene(folder)


def holds(scene, tokens):
    """Whether the open requests are these, judged by slots and lengths."""
    manager = scene.manager
    lengths = {slot: int(manager.lengths[slot]) for slot in manager.open_slots}
    return lengths == {slot: len(text) for slot, text in tokens.items()}


def check(scene, states):
    """The requests are one of the states, their bytes are right, and all can go on."""
    manager = scene.manager
    if manager.live_plan is not None:
        manager.live_plan.cancel()
    manager.check_integrity()
    states = [state for state in states if holds(scene, state)]
    assert states, (manager.open_slots, manager.lengths.tolist())
    state = states[0]
    for slot, text in state.items():
        assert_stores(SHORT, manager, slot, text)
    scene.tokens = dict(state)
    for slot, text in state.items():
        if manager.stats().num_evictable_blocks + manager.num_free_blocks and len(text) < 36:
            scene.grow({slot: text + TEXTS[0][:1]})
            assert_stores(SHORT, manager, slot, text + TEXTS[0][:1])
            manager.truncate(slot, len(text))
            scene.tokens[slot] = text
    manager.check_integrity()


def middle_states(call, scene):
    """States between the calls that a scene's function makes one after the other."""
    if call is chunk_from_a_checkpoint:
        return [{**scene.tokens, scene.first: scene.tokens[scene.first][: 2 * BLOCK]}]
    if call is freed_inside_a_forward:
        rest = {slot: text for slot, text in scene.tokens.items() if slot != scene.short}
        return [rest]
    if call is committed:
        return [{**scene.tokens, **{s: scene.more(s, 4) for s in (scene.first, scene.short)}}]
    return []


def inject(call, kind, folder, choose):
    """Run a call once for each chosen point, with a fault there; returns how many there were."""
    counter = itertools.count()

    def new_scene():
        return scene_of(call, folder / str(next(counter)))

    first = new_scene()
    call(first)  # what the texts project to is computed once
    first.close()
    twin = new_scene()
    middle = middle_states(call, twin)
    points = Points()
    before = dict(twin.tokens)
    with KINDS[kind](points):
        call(twin)
    states = [before, *middle, dict(twin.tokens)]
    check(twin, [states[-1]])
    twin.close()
    chosen = choose(points.count)
    for point in chosen:
        scene = new_scene()
        # A fault may leave a `no_grad` without its end.
        raised = pytest.raises((Fault, OutOfMemoryFault))
        with torch.set_grad_enabled(True), raised, KINDS[kind](Points(point)):
            call(scene)
        check(scene, states)
        scene.close()
    return len(chosen)


def some(count, share=47):
    """Every so many-th point, and the last ones, where a commit is."""
    return sorted({*range(0, count, share), *range(max(0, count - 3), count)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_at_some_points(name, kind, tmp_path, record_property):
    num_points = inject(CALLS[name], kind, tmp_path, some)
    record_property("points", num_points)


@pytest.mark.slow
@pytest.mark.parametrize("share", long([7, 1], [7]))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_a_fault_at_many_points(name, kind, share, tmp_path, record_property, capsys):
    """Every seventh, and every one."""
    num_points = inject(CALLS[name], kind, tmp_path, partial(some, share=share))
    record_property("points", num_points)
    with capsys.disabled():
        print(f" {name}, {kind}: {num_points} points", end="")


@pytest.mark.parametrize("name", CALLS)
def test_an_undo_that_breaks_off_is_finished_by_the_next_call(name, tmp_path, monkeypatch):
    """The second fault hits each step of the undo in turn."""
    for broken in range(0, 40, 3):
        scene = scene_of(CALLS[name], tmp_path / str(broken))
        before = dict(scene.tokens)
        middle = middle_states(CALLS[name], scene)
        with monkeypatch.context() as patch:
            break_finish(patch, broken)
            with contextlib.suppress(Fault, OutOfMemoryFault):
                CALLS[name](scene)
        check(scene, [before, *middle, dict(scene.tokens)])
        scene.close()


def break_finish(patch, broken):
    """Let the first change of the books fail when it is done, and its undo after some steps."""
    leave, is_armed = Journal.__exit__, [True]

    def failing_exit(journal, kind, error, traceback):
        change = journal._change
        if not is_armed or change is None or not change.undo:
            return leave(journal, kind, error, traceback)
        is_armed.clear()
        steps = list(reversed(change.undo))[: broken or len(change.undo)]
        for undo, args in steps:
            undo(*args)
        raise Fault("inside an undo")

    patch.setattr(Journal, "__exit__", failing_exit)
