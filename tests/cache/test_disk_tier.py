"""A prefix store below a manager: hits from disk are a cold run's bytes, and all else is a miss."""

import contextlib
import dataclasses
import os
import random
import signal
from threading import Event, Timer

import numpy as np
import pytest
import torch

from dsv4 import CheckpointPolicy, KVCacheManager, PrefixStore
from dsv4.cache.prefix import disk_tier
from dsv4.cache.prefix.store import BoundStore
from dsv4.cache.prefix.store_reader import StoreReader
from dsv4.errors import OutOfBlocksError
from dsv4.testing import Row, poison
from tests.cache.life import SHORT, WHOLE, KernelWorld, assert_stores, run_layers, short_world
from tests.cache.store_processes import context

BLOCK, HALO = SHORT.config.block_tokens, SHORT.config.halo_tokens
NO_CHECKPOINTS = CheckpointPolicy(every_blocks=0, at_prompt_end=False, at_branches=False)
ROOMY = {"num_blocks": 60, "num_checkpoints": 16}  # nothing leaves the device
KEY = b"a key"  # no need of xxhash


def text(number, length=36):
    return np.random.default_rng(number).integers(0, 2, length, dtype=np.uint8).tobytes()


def make(store, world=SHORT, **sizes):
    defaults = {"num_checkpoints": 4, "host_blocks": 60, "host_slots": 2}
    manager = world.new_manager(**{**defaults, **sizes}, store=store)
    poison(manager)
    host = manager._books.host
    for storage in (manager.device_memory.checkpoints, host.blocks, host.slots):
        storage.fill_(0xFF)
    return manager


def go_on(manager, hit, tokens, world=SHORT):
    """Run what a hit has not found; what it holds is right before and after."""
    projections, end = world.projections_of(tokens), hit.num_tokens + hit.num_replayed
    if hit.num_replayed:
        run_layers(manager, world.weights, [Row(hit.slot, projections, hit.num_tokens, end)])
    assert_stores(world, manager, hit.slot, tokens[:end])
    run_layers(manager, world.weights, [Row(hit.slot, projections, end, len(tokens))])
    assert_stores(world, manager, hit.slot, tokens)
    manager.check_integrity()


def run(manager, tokens, world=SHORT):
    """Resume a prompt, run the rest, and free it; return what was found."""
    hit = manager.resume_request(list(tokens))
    go_on(manager, hit, tokens, world)
    manager.free_request(hit.slot)
    return hit


@pytest.fixture
def opened(tmp_path):
    """Opens a store in one folder, after others have written; all are closed in the end."""
    stores = []

    def open_store(**choices):
        for store in stores:
            with contextlib.suppress(RuntimeError):  # it is closed
                store.flush()
        stores.append(PrefixStore(tmp_path / "store", 1 << 30, **{"key": KEY, **choices}))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def fill(store, *prompts, world=SHORT, **sizes):
    """Run prompts with a manager of a store, and close it."""
    with make(store, world, **sizes) as manager:
        for tokens in prompts:
            run(manager, tokens, world)


def prefetched(manager, tokens, **choices):
    """Prefetch a prompt and wait; return its tokens."""
    prefetch = manager.prefetch(list(tokens), **choices)
    assert prefetch is not None and prefetch.wait() and prefetch.done()
    return prefetch.num_tokens


@contextlib.contextmanager
def reads_held(monkeypatch):
    """Reads begin and do not end; yields what lets them."""
    gate, read = Event(), StoreReader._read

    def held(self, *args):
        assert gate.wait(60)
        return read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StoreReader, "_read", held)
        try:
            yield gate
        finally:
            gate.set()


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.mark.parametrize("kind", ["short", "whole", GPU])
def test_a_restart_finds_the_prompt_with_a_cold_runs_bytes(opened, kind):
    worlds = {"short": SHORT, "whole": WHOLE}
    world = worlds.get(kind) or short_world(KernelWorld, device="cuda", backend="triton")
    block = world.config.block_tokens
    tokens = text(1, 3 * block + 4)
    with opened() as store:
        fill(store, tokens, world=world)
    with opened() as store, make(store, world) as manager:
        assert manager.match_prefix(list(tokens)).num_tokens == 0
        assert prefetched(manager, tokens) == 3 * block
        assert manager.match_prefix(list(tokens))[:3] == (3 * block, 0, 3 * block)
        assert run(manager, tokens, world)[1:] == (3 * block, 0, None)
        stats = manager.stats()
        assert stats.num_disk_tokens == stats.num_host_hit_tokens == 3 * block
        assert (stats.num_disk_damaged, stats.num_disk_skipped) == (0, 0)


def test_a_request_starts_the_reads_and_may_wait_for_them(opened):
    fill(opened(), text(1))
    with make(opened()) as manager:
        hit = manager.resume_request(list(text(1)))
        assert hit.num_tokens == 0 and hit.prefetch.num_tokens == 32
        assert hit.prefetch.wait()
        manager.free_request(hit.slot)
        assert run(manager, text(1)).num_tokens == 32
        assert run(manager, text(1)).prefetch is None


def test_a_request_that_does_not_wait_goes_on(opened, monkeypatch):
    fill(opened(), text(1))
    with make(opened()) as manager:
        with reads_held(monkeypatch):
            hit = manager.resume_request(list(text(1)))
            go_on(manager, hit, text(1))
            manager.free_request(hit.slot)
            assert not hit.prefetch.done() and not hit.prefetch.wait(0.01)
            assert len(manager._books.prefix.tier.owned_host_blocks()) == 4 + 20
            manager.check_integrity()
        assert hit.prefetch.wait()
        manager.check_integrity()  # the blocks were published meanwhile
        assert not manager._books.prefix.tier.owned_host_blocks()
        assert manager.stats().num_disk_tokens == 0
        assert run(manager, text(1)).num_tokens == 32


def test_what_memory_has_is_not_read(opened):
    fill(opened(), text(1))
    with make(opened()) as manager:
        assert run(manager, text(1)[:15]).prefetch is None  # the halo is longer
        assert prefetched(manager, text(1)) == 32
        assert run(manager, text(1)).num_tokens == 32
        stats = manager.stats()
        assert (stats.num_disk_tokens, stats.num_host_hit_tokens) == (3 * BLOCK, 3 * BLOCK)
        assert manager.prefetch(list(text(1))) is None


def test_a_checkpoint_alone_is_read(opened):
    fill(opened(), text(1))
    with make(opened(), checkpoint_policy=NO_CHECKPOINTS) as manager:
        slot = manager.open_request()
        manager.note_tokens(slot, list(text(1)), start=0)
        row = Row(slot, SHORT.projections_of(text(1)), 0, 36)
        run_layers(manager, SHORT.weights, [row])
        manager.free_request(slot)
        assert manager.match_prefix(list(text(1)))[:2] == (32 - HALO, HALO)
        assert prefetched(manager, text(1)) == 32
        assert run(manager, text(1))[1:3] == (32, 0)


def test_blocks_without_a_checkpoint_are_a_halo(opened):
    fill(opened(), text(1), checkpoint_policy=NO_CHECKPOINTS)
    with make(opened()) as manager:
        assert prefetched(manager, text(1)) == 32 - HALO
        assert run(manager, text(1))[1:3] == (32 - HALO, HALO)


def record_path(manager, kind, tokens, num_blocks):
    tier = manager._books.prefix.tier
    digests = list(manager._books.prefix._digests(manager._books.prefix.read_prompt(tokens, b"")))
    address = tier._records._addresses(kind)(digests[num_blocks - 1])
    return tier._store._files.path(address)


def flip(path):
    data = bytearray(path.read_bytes())
    data[4096 + 7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("harm", "num_damaged"), [(flip, 1), (os.remove, 0)])
@pytest.mark.parametrize(
    ("kind", "number", "num_found"),
    [("block", 1, 0), ("block", 3, 2), ("block", 4, 3), ("checkpoint 0", 4, 4),
     ("checkpoint 19", 4, 4)],
)  # fmt: skip
def test_a_record_that_is_not_whole_is_never_used(
    opened, harm, num_damaged, kind, number, num_found
):
    fill(opened(), text(1))
    with make(opened()) as manager:
        harm(record_path(manager, kind, list(text(1)), number))
        prefetch = manager.prefetch(list(text(1)))
        is_removed = harm is os.remove  # the store may have noticed before it was asked
        assert is_removed or prefetch.num_tokens == 32
        assert prefetch is None or prefetch.wait()
        hit = run(manager, text(1))
        assert hit.num_tokens + hit.num_replayed == (num_found * BLOCK if num_found > 1 else 0)
        stats = manager.stats()
        assert stats.num_disk_damaged == num_damaged
        expected = num_found * BLOCK
        assert stats.num_disk_tokens == expected or (is_removed and num_found == 1)


def test_others_find_nothing(opened):
    fill(opened(), text(1))
    formats = dataclasses.replace(SHORT.config, kv_format="bf16")
    with make(opened()) as manager:
        assert manager.prefetch(list(text(1)), salt=b"another") is None
        assert manager.prefetch(list(text(2))) is None
        assert manager.prefetch(list(text(1))) is not None
    for choices in ({"model_id": "another"}, {"key": b"another"}):
        with make(opened(**choices)) as manager:
            assert manager.prefetch(list(text(1))) is None
    sizes = {"max_requests": 2, "num_blocks": 9, "num_checkpoints": 1, "host_blocks": 60}
    with KVCacheManager(formats, **sizes, store=opened()) as manager:
        assert manager.prefetch(list(text(1))) is None


def test_salts_stay_apart(opened):
    with make(opened()) as manager:
        slot = manager.resume_request(list(text(1)), salt=b"mine").slot
        run_layers(manager, SHORT.weights, [Row(slot, SHORT.projections_of(text(1)), 0, 36)])
        manager.free_request(slot)
    with make(opened()) as manager:
        assert manager.prefetch(list(text(1))) is None
        assert prefetched(manager, text(1), salt=b"mine") == 32


@pytest.mark.parametrize(("host_blocks", "num_tokens"), [(24, 32), (23, 17), (3, 9), (1, None)])
def test_a_small_host_takes_what_fits(opened, host_blocks, num_tokens):
    fill(opened(), text(1))
    with make(opened(), host_blocks=host_blocks) as manager:
        prefetch = manager.prefetch(list(text(1)))
        assert (prefetch and prefetch.num_tokens) == num_tokens
        manager.check_integrity()
        if prefetch is not None:
            prefetch.wait()
            assert run(manager, text(1)).num_tokens == num_tokens


def test_what_is_worth_more_stays_on_the_host(opened):
    fill(opened(), text(1), text(2))
    with make(opened(), host_blocks=24) as manager:
        prefetched(manager, text(1))
        for _ in range(3):  # found again and again
            manager.free_request(manager.resume_request(list(text(1)[:33])).slot)
            manager._books.prefix.tree.evict(4)
        assert manager.prefetch(list(text(2))) is None
        assert manager.match_prefix(list(text(1))).num_tokens == 32
        manager.check_integrity()


def test_what_is_worth_less_makes_room(opened):
    fill(opened(), text(1), text(2), text(3))
    with make(opened(), host_blocks=26) as manager:
        for number in (1, 2, 3):
            assert prefetched(manager, text(number)) == 32
            assert manager.match_prefix(list(text(number))).num_tokens == 32
            manager.check_integrity()
        assert run(manager, text(3)).num_tokens == 32


def test_a_swapped_request_displaces_a_prefetch(opened, monkeypatch):
    fill(opened(), text(1))
    with make(opened(), host_blocks=24) as manager:
        slot = manager.open_request()
        row = Row(slot, SHORT.projections_of(text(2)), 0, 36)
        run_layers(manager, SHORT.weights, [row])
        with reads_held(monkeypatch) as gate:
            prefetch = manager.prefetch(list(text(1)))
            assert manager.prefetch(list(text(1))) is prefetch
            Timer(0.1, gate.set).start()
            swapped = manager.swap_out(slot)
        assert prefetch.done()
        manager.check_integrity()
        slot = manager.swap_in(swapped)
        assert_stores(SHORT, manager, slot, text(2))


def test_a_prefetch_that_lost_its_beginning_is_released(opened, monkeypatch):
    fill(opened(), text(1))
    with make(opened()) as manager:
        hit = manager.resume_request(list(text(1)[:20]))
        assert hit.prefetch.wait()  # it owns no blocks once it is adopted
        go_on(manager, hit, text(1)[:20])
        manager.free_request(hit.slot)
        with reads_held(monkeypatch):
            prefetch = manager.prefetch(list(text(1)))
            tree = manager._books.prefix.tree
            tree.evict(2)
            tree.make_host_room(60 - 22)
            assert not tree.nodes
        prefetch.wait()
        manager.check_integrity()
        assert not tree.nodes and not manager._books.host.block_owners.num_owners.any()
        assert run(manager, text(1)).num_tokens == 0


def test_prefetches_that_share_blocks(opened, monkeypatch):
    other = text(1)[:20] + text(9, 16)
    fill(opened(), text(1), other)
    with make(opened(), host_blocks=90) as manager:
        with reads_held(monkeypatch):
            first, second = (manager.prefetch(list(each)) for each in (text(1), other))
            assert first is not second
            assert manager.prefetch(list(text(1) + text(2, 4))) is first
            assert len(manager._books.prefix.tier.owned_host_blocks()) == 48
            manager.check_integrity()
        assert first.wait() and second.wait()
        manager.check_integrity()
        assert manager.stats().num_disk_tokens == 32 + 16
        for tokens in (text(1), other):
            assert run(manager, tokens).num_tokens == 32


@pytest.mark.parametrize("ending", ["close", "sleep"])
def test_a_manager_ends_while_records_are_read(opened, monkeypatch, ending):
    fill(opened(), text(1))
    manager = make(opened())
    with reads_held(monkeypatch) as gate:
        prefetch = manager.prefetch(list(text(1)))
        if ending == "close":
            gate.set()
        getattr(manager, ending)()
    assert prefetch.wait()
    if ending == "sleep":
        manager.wake()
        assert run(manager, text(1)).num_tokens == 32
        manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        manager.prefetch(list(text(1)))


def test_sleep_writes_what_waits(opened, monkeypatch):
    monkeypatch.setattr(disk_tier, "MAX_STAGING_ROWS", 1)  # a checkpoint fits in any case
    manager = make(opened(), host_blocks=1, **ROOMY)
    for number in range(3):
        run(manager, text(number))
    manager.sleep()
    assert manager._books.prefix.tier.counts.num_given == 3 * 24
    manager.close()
    with make(opened(), host_blocks=90) as manager:
        assert [prefetched(manager, text(number)) for number in range(3)] == [32] * 3


def test_few_staging_rows_delay_writes_and_lose_none(opened, monkeypatch):
    monkeypatch.setattr(disk_tier, "STAGING_BYTES", 1)
    fill(opened(), *map(text, range(3)), **ROOMY)
    with make(opened(), host_blocks=90) as manager:
        assert manager._books.prefix.tier._staging.shape[0] == 20
        for number in range(3):
            assert prefetched(manager, text(number)) == 32
            assert run(manager, text(number)).num_tokens == 32


def test_blocks_that_leave_the_device_first_are_skipped(opened, monkeypatch):
    put, gate = BoundStore.put, Event()

    def held(self, *args, **choices):
        assert gate.wait(60)
        put(self, *args, **choices)

    monkeypatch.setattr(BoundStore, "put", held)
    monkeypatch.setattr(disk_tier, "MAX_STAGING_ROWS", 1)
    with make(opened(), num_blocks=5) as manager:
        try:
            for number in range(4):
                run(manager, text(number))
        finally:
            gate.set()
        manager._books.prefix.tier.finish_writes()
        assert manager.stats().num_disk_skipped > 0
    with make(opened()) as manager:
        prefetched(manager, text(0))
        assert run(manager, text(0)).num_tokens > 0


def test_a_closed_store_is_a_miss(opened):
    fill(opened(), text(1))
    store = opened()
    with make(store) as manager:
        store.close()
        assert run(manager, text(1)) == (0, 0, 0, None)
        assert manager.prefetch(list(text(1))) is None
        run(manager, text(2))
        manager._books.prefix.tier.finish_writes()
        assert manager.stats().num_disk_skipped > 0 == manager.stats().num_disk_given
        assert run(manager, text(2)).num_tokens == 32


@pytest.mark.parametrize(
    "sizes", [{}, {"num_checkpoints": 2}, {"host_blocks": 5}], ids=["none", "device", "host"]
)
def test_a_store_needs_a_prefix_cache_on_the_host(opened, sizes):
    with pytest.raises(ValueError, match="Invalid store: expected a manager with a prefix cache"):
        SHORT.new_manager(**sizes, store=opened())


def test_a_manager_that_is_dropped_ends_its_thread(opened):
    manager = make(opened())
    thread = manager._books.prefix.tier._thread
    run(manager, text(1))
    del manager
    import gc

    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def run_until_killed(path, told):
    """Run prompts, and tell of each; the manager is never closed."""
    with torch.inference_mode():
        manager = make(PrefixStore(path, 1 << 30, key=KEY))
        for number in range(40):
            run(manager, text(number))
            told.send(number)
    signal.pause()


def check_kill(path, seed):
    """Kill a process that writes; what another finds is right."""
    chosen = random.Random(seed)
    end, told = context.Pipe(duplex=False)
    child = context.Process(target=run_until_killed, args=(path, told))
    child.start()
    told.close()
    for _ in range(chosen.randint(1, 12)):
        end.recv()
    end.poll(chosen.random() * 0.01)
    child.kill()
    child.join()
    num_found = 0
    with PrefixStore(path, 1 << 30, key=KEY) as store, make(store) as manager:
        for number in range(14):
            prefetch = manager.prefetch(list(text(number)))
            if prefetch is not None:
                prefetch.wait()
                num_found += run(manager, text(number)).num_tokens > 0
        assert manager.stats().num_disk_damaged == 0
    return num_found


def test_a_killed_process_leaves_whole_records(tmp_path):
    found = [check_kill(tmp_path / "store", seed) for seed in range(3)]
    assert found[-1] > 0  # processes before it wrote too


@pytest.mark.slow
def test_many_killed_processes_leave_whole_records(tmp_path):
    for seed in range(100, 160):
        check_kill(tmp_path / str(seed % 7), seed)


def run_beside_another(path, numbers, told):
    """Run prompts that another process runs too, with what either has written."""
    with PrefixStore(path, 1 << 30, key=KEY) as store, make(store, **ROOMY) as manager:
        for number in numbers:
            prefetch = manager.prefetch(list(text(number)))
            if prefetch is not None:
                prefetch.wait()
            run(manager, text(number))
        told.send(manager.stats().num_disk_damaged)


def test_two_processes_share_a_folder(tmp_path, opened):
    end, told = context.Pipe(duplex=False)
    orders = [list(range(12)) * 2, list(range(11, -1, -1)) * 2]
    children = [
        context.Process(target=run_beside_another, args=(tmp_path / "store", order, told))
        for order in orders
    ]
    for child in children:
        child.start()
    told.close()
    assert [end.recv(), end.recv()] == [0, 0]
    for child in children:
        child.join()
        assert child.exitcode == 0
    with make(opened(), host_blocks=300) as manager:
        assert [prefetched(manager, text(number)) for number in range(12)] == [32] * 12


def test_no_room_for_a_swap_is_said_after_prefetches_are_gone(opened):
    fill(opened(), text(1))
    with make(opened(), host_blocks=3, num_checkpoints=4) as manager:
        slot = manager.open_request()
        row = Row(slot, SHORT.projections_of(text(2)), 0, 36)
        run_layers(manager, SHORT.weights, [row])
        assert manager.prefetch(list(text(1))) is not None
        with pytest.raises(OutOfBlocksError, match="host blocks"):
            manager.swap_out(slot)
        manager.check_integrity()
        assert_stores(SHORT, manager, slot, text(2))
