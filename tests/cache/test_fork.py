"""`fork`: two requests share their past, and neither notices what the other one does."""

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.cache.memory import device_memory
from dsv4.cache.memory.staging import Staging
from dsv4.errors import LiveForwardError, NoFreeSlotError, OutOfBlocksError
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward
from tests.cache.live import live_parts

DRAFTS = 3
CONFIG = CacheConfig.tiny(drafts_per_step=DRAFTS, block_tokens=128)
WEIGHTS = model_weights(CONFIG, seed=0)
TOKENS = model_projections(CONFIG, 450, seed=10)
OTHERS = model_projections(CONFIG, 450, seed=90)


def grown_manager(length, **sizes):
    defaults = {"max_requests": 4, "num_blocks": 12, "max_forward_tokens": 512}
    manager = KVCacheManager(CONFIG, **{**defaults, **sizes})
    poison(manager)
    assert manager.open_request() == 0
    feed(manager, {0: TOKENS}, length)
    return manager


def feed(manager, layers_of, after):
    """Take some requests to the same length in one forward."""
    rows = [
        Row(slot, layers, int(manager.lengths[slot]), after) for slot, layers in layers_of.items()
    ]
    return run_forward(manager, WEIGHTS, rows)


def stored(manager, slot):
    """The bytes of all that the request can still read."""
    length, parts = int(manager.lengths[slot]), []
    for idx, schema in enumerate(manager.schemas):
        state, pages = manager.state.layer(idx), manager.paged.layer(idx)
        window = np.arange(max(0, length - CONFIG.sliding_window), length) % schema.ring_rows
        parts += [state.ring.data[slot, window], state.ring.scales[slot, window]]
        if pages is None:
            continue
        live = live_parts(CONFIG, schema, length)
        rows = live.tail % schema.tail_rows
        parts += [tail[slot, rows] for tail in (state.tail, state.index_tail) if tail is not None]
        if state.sums is not None:
            parts.append(state.sums[slot, live.groups % 8])
        entries = np.arange(length // schema.ratio)
        blocks = manager._books.requests.block_table[slot, entries // schema.entries_per_block]
        rows = entries % schema.entries_per_block
        for page in (pages.entries, pages.index_keys):
            if page is not None:
                parts += [page.data[blocks, rows], page.scales[blocks, rows]]
    return [part.clone() for part in parts]


def assert_stored_equal(got, want):
    for mine, expected in zip(got, want, strict=True):
        assert torch.equal(mine, expected)


def lone(layers, length, *, prefix=0):
    """What a request stores that has these tokens, the first ones being `TOKENS`."""
    manager = grown_manager(prefix)
    feed(manager, {0: layers}, length)
    return stored(manager, 0)


# Before, at and after closings of windows and blocks.
LENGTHS = (0, 1, 4, 5, 126, 127, 128, 130, 131, 132, 255, 256, 257, 260)


@pytest.mark.parametrize("length", LENGTHS)
def test_both_go_on_as_if_alone(length):
    manager = grown_manager(length)
    fork = manager.fork(0)
    manager.check_integrity()
    assert_stored_equal(stored(manager, fork), stored(manager, 0))
    for after in (length + 1, length + 5, length + 140):
        feed(manager, {0: TOKENS, fork: OTHERS}, after)
        manager.check_integrity()
        assert_stored_equal(stored(manager, 0), lone(TOKENS, after))
        assert_stored_equal(stored(manager, fork), lone(OTHERS, after, prefix=length))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fork_costs_its_open_block_at_most(length):
    manager = grown_manager(length)
    before, num_full = manager._books.allocator.num_free, length // CONFIG.block_tokens
    fork = manager.fork(0)
    has_open = int(manager._books.requests.num_blocks[0]) - num_full
    assert before - manager._books.allocator.num_free == has_open <= 1
    table = manager._books.requests.block_table
    assert np.array_equal(table[fork, :num_full], table[0, :num_full])
    assert has_open == 0 or table[fork, num_full] != table[0, num_full]
    assert manager.lengths[fork] == length
    assert manager.rollback_floor[fork] == manager.rollback_floor[0]


@pytest.mark.parametrize("first", ["request", "fork"])
def test_either_can_be_freed_first(first):
    manager = grown_manager(300)
    fork = manager.fork(0)
    freed, kept = (0, fork) if first == "request" else (fork, 0)
    manager.free_request(freed)
    manager.check_integrity()
    other = manager.open_request()
    feed(manager, {other: OTHERS}, 400)
    assert_stored_equal(stored(manager, kept), lone(TOKENS, 300))
    manager.free_request(kept)
    manager.free_request(other)
    assert manager._books.allocator.num_free == 12 and manager._books.allocator.num_shares == 0
    manager.check_integrity()


def rolled_back_fork(**sizes):
    """Two requests of 254 tokens whose second block, full before, is shared and open again."""
    manager = grown_manager(256, **sizes)
    fork = manager.fork(0)
    manager.truncate(0, 254)
    manager.truncate(fork, 254)
    return manager, fork


def test_a_shared_block_is_copied_before_it_is_written():
    manager, fork = rolled_back_fork()
    shared = manager._books.requests.block_table[0, 1]
    untouched = stored(manager, 0)
    plan = prepare_forward(manager, [fork], [254], [256])
    assert plan.num_new_blocks == 1
    assert (
        manager._books.requests.block_table[fork, 1]
        != shared
        == manager._books.requests.block_table[0, 1]
    )
    plan.complete()
    manager.check_integrity()
    assert_stored_equal(stored(manager, 0), untouched)


def test_a_write_that_closes_nothing_copies_nothing():
    manager, fork = rolled_back_fork()
    assert prepare_forward(manager, [fork], [254], [255]).num_new_blocks == 0
    assert manager._books.allocator.num_shares == 2


@pytest.mark.parametrize("together", [True, False])
def test_both_write_to_the_block_they_share(together):
    manager, fork = rolled_back_fork()
    before = manager._books.allocator.num_free
    if together:
        feed(manager, {0: TOKENS, fork: OTHERS}, 256)
    else:
        feed(manager, {fork: OTHERS}, 256)
        feed(manager, {0: TOKENS}, 256)
    assert before - manager._books.allocator.num_free == 1  # the last of them keeps it
    manager.check_integrity()
    assert_stored_equal(stored(manager, 0), lone(TOKENS, 256))
    assert_stored_equal(stored(manager, fork), lone(OTHERS, 256, prefix=254))


def test_several_owners_write_at_once():
    manager = grown_manager(256)
    forks = [manager.fork(0) for _ in range(3)]
    for slot in (0, *forks):
        manager.truncate(slot, 255)
    before = manager._books.allocator.num_free
    layers_of = {forks[1]: OTHERS, 0: TOKENS, forks[0]: OTHERS}
    feed(manager, layers_of, 258)
    assert before - manager._books.allocator.num_free == 3
    manager.check_integrity()
    assert_stored_equal(stored(manager, forks[2]), lone(TOKENS, 255))
    for slot, layers in layers_of.items():
        assert_stored_equal(stored(manager, slot), lone(layers, 258, prefix=255))


def books(manager):
    return (
        manager.lengths.tolist(), manager.rollback_floor.tolist(), manager.is_open.tolist(),
        manager._books.requests.block_table.tolist(), manager._books.allocator.num_owners.tolist(),
        manager.num_free_slots,
    )  # fmt: skip


def test_a_copy_that_does_not_fit_changes_nothing():
    manager, fork = rolled_back_fork(num_blocks=2)
    before, bytes_before = books(manager), manager.paged.storage.clone()
    match = "1 needed, 0 of 2 free; in this forward 0 of 1 requests grow .*, 1 copy one that they"
    with pytest.raises(OutOfBlocksError, match=match):
        prepare_forward(manager, [fork], [254], [256])
    assert books(manager) == before
    assert torch.equal(manager.paged.storage, bytes_before)
    manager.check_integrity()
    manager.free_request(0)
    feed(manager, {fork: OTHERS}, 256)
    assert_stored_equal(stored(manager, fork), lone(OTHERS, 256, prefix=254))


def test_a_fork_that_does_not_fit_changes_nothing():
    manager = grown_manager(300, num_blocks=3)
    before = books(manager)
    with pytest.raises(OutOfBlocksError, match="1 needed, 0 of 3 free"):
        manager.fork(0)
    assert books(manager) == before
    manager = grown_manager(256, max_requests=1)
    before = books(manager)
    with pytest.raises(NoFreeSlotError, match="1 needed, 0 of 1 free"):
        manager.fork(0)
    with pytest.raises(ValueError, match="from 0 to 0, got 1"):
        manager.fork(1)
    assert books(manager) == before
    manager.check_integrity()


def test_a_request_in_a_live_forward_cannot_be_forked():
    manager = grown_manager(130)
    prepare_forward(manager, [0], [130], [131])
    before = books(manager)
    with pytest.raises(LiveForwardError, match="is live"):
        manager.fork(0)
    assert books(manager) == before


def test_a_fork_can_be_rolled_back_as_far_as_the_request():
    manager = grown_manager(130)
    fork = manager.fork(0)
    with pytest.raises(ValueError, match="nearest possible lengths are 0 and 126"):
        manager.truncate(fork, 125)
    manager.truncate(fork, 126)
    feed(manager, {fork: OTHERS}, 200)
    assert_stored_equal(stored(manager, fork), lone(OTHERS, 200, prefix=126))
    assert_stored_equal(stored(manager, 0), lone(TOKENS, 130))


def test_layers_without_blocks_fork_too():
    config = CacheConfig.tiny(compress_ratios=(0, 0))
    manager = KVCacheManager(config, max_requests=2, num_blocks=0)
    slot = manager.open_request()
    prepare_forward(manager, [slot], [0], [900]).complete()
    fork = manager.fork(slot)
    assert manager.lengths[fork] == 900
    manager.check_integrity()


def test_copies_on_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(device_memory, "staging_for", lambda device: Staging)
    manager, fork = rolled_back_fork()
    feed(manager, {0: TOKENS, fork: OTHERS}, 256)
    assert torch.equal(manager.block_table, torch.from_numpy(manager._books.requests.block_table))
    feed(manager, {0: TOKENS, fork: OTHERS}, 300)
    manager.check_integrity()
    assert_stored_equal(stored(manager, 0), lone(TOKENS, 300))
    assert_stored_equal(stored(manager, fork), lone(OTHERS, 300, prefix=254))


@pytest.mark.gpu
def test_forks_on_a_gpu_wait_for_nothing():
    manager = KVCacheManager(CONFIG, max_requests=3, num_blocks=12, device="cuda")
    slot = manager.open_request()
    for pool in (manager.paged.storage, manager.state.storage):
        pool.random_(256)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare_forward(manager, [slot], [0], [256]).complete()
        forks = [manager.fork(slot) for _ in range(2)]
        for each in (slot, *forks):
            manager.truncate(each, 254)
        prepare_forward(manager, [forks[0], slot], [254, 254], [256, 256]).complete()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    manager.check_integrity()
    blocks, table = manager.paged.storage, manager._books.requests.block_table
    assert len({int(table[each, 1]) for each in (slot, *forks)}) == 3
    for each in (slot, *forks):
        assert torch.equal(blocks[table[each, 1]], blocks[table[slot, 1]])
        assert torch.equal(manager.state.storage[each], manager.state.storage[slot])
