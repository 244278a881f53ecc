"""Requests live in any order of steps, and always hold what an uncached model would give them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from dsv4.cache.prefix.prefix_cache import PrefixCache
from dsv4.errors import IntegrityError
from tests.cache.life import (
    DRAFTS,
    SHORT,
    WHOLE,
    Life,
    V41Life,
    WholeLife,
    assert_stores,
    machine_in,
    on_kernels,
    random_world,
)

COMMON = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=50, **COMMON)
TestV41Life = V41Life.TestCase
TestV41Life.settings = settings(max_examples=40, stateful_step_count=50, **COMMON)
TestWholeLife = WholeLife.TestCase
TestWholeLife.settings = settings(max_examples=20, stateful_step_count=30, **COMMON)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Life, V41Life])
def test_many_lives(machine):
    chosen = settings(max_examples=300, stateful_step_count=50, **COMMON)
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_worlds(seed):
    """Worlds that `make soak` draws, of both models."""
    world = random_world(seed)
    chosen = settings(max_examples=10, stateful_step_count=50, **COMMON)
    run_state_machine_as_test(machine_in(world), settings=chosen)


def test_random_worlds_are_of_both_models():
    worlds = [random_world(seed) for seed in range(6)]
    assert {world.config.has_latent_keys for world in worlds} == {False, True}


def swap_blocks(manager):
    table = manager._books.requests.block_table
    table[0, :2] = table[0, [1, 0]]


def lose_a_window_row(manager):
    ring = manager.state.layer(2).ring
    ring.data[0, (manager.lengths[0] - 3) % ring.rows_per_page] = 0


def lose_a_tail_row(manager):
    tail_rows = manager.schemas[1].tail_rows
    manager.state.layer(1).tail[0, (manager.lengths[0] - 1) % tail_rows] = 0


def lose_an_entry(manager):
    manager.paged.layer(2).entries.data[manager._books.requests.block_table[0, 1], 0] = 0


def lose_an_index_key(manager):
    manager.paged.layer(1).index_keys.data[manager._books.requests.block_table[0, 1], 0] = 0


def grown_machine(kind, length):
    machine = kind()
    machine.start()
    machine.open()
    assert machine.grow({0: length}, seed=0)
    machine.every_request_is_right()
    return machine


@pytest.mark.parametrize(("kind", "length"), [(WholeLife, 298), (V41Life, 37)], ids=["v4", "v41"])
@pytest.mark.parametrize(
    "corrupt", [swap_blocks, lose_a_window_row, lose_a_tail_row, lose_an_entry, lose_an_index_key]
)
def test_the_comparison_finds_corruption(corrupt, kind, length):
    machine = grown_machine(kind, length)
    corrupt(machine.manager)
    with pytest.raises(AssertionError):
        assert_stores(machine.world, machine.manager, 0, machine.tokens[0])


def lose_a_reference(manager):
    manager._books.allocator.release(manager._books.requests.block_table[0, :1])


def lose_a_checkpoint(manager):
    manager._books.checkpoints.release(np.array(manager._books.prefix.tree.owned_checkpoints()[:1]))


def publish_another_block(manager):
    node = manager._books.prefix.requests[0].nodes[0]
    node.block, manager._books.prefix.requests[0].nodes[1].block = (
        manager._books.prefix.requests[0].nodes[1].block, node.block,
    )  # fmt: skip


def lose_a_node(manager):
    manager._books.prefix.tree.nodes.popitem()


@pytest.mark.parametrize("kind", [Life, V41Life])
@pytest.mark.parametrize(
    "corrupt", [lose_a_reference, lose_a_checkpoint, publish_another_block, lose_a_node]
)
def test_the_books_find_corruption(corrupt, kind):
    machine = kind()
    machine.start()
    machine.open()
    assert machine.grow({0: 1}, seed=0) and machine.grow({0: 29}, seed=0)
    machine.manager.stats()
    machine.every_request_is_right()
    assert len(machine.manager._books.prefix.requests[0].nodes) == 3
    assert machine.manager._books.prefix.tree.num_checkpoints == 3
    corrupt(machine.manager)
    with pytest.raises(IntegrityError):
        machine.manager.check_integrity()


def keep_pending(self, slot, num_blocks):
    del self.requests[slot].nodes[num_blocks:]
    self._update(slot)


@pytest.mark.parametrize("kind", [Life, V41Life])
@pytest.mark.parametrize("is_broken", [False, True], ids=["sound", "broken"])
def test_a_checkpoint_of_rejected_tokens_is_found(monkeypatch, is_broken, kind):
    if is_broken:
        monkeypatch.setattr(PrefixCache, "give_up", keep_pending)
    machine = kind()
    machine.start()
    machine.open()
    assert machine.grow({0: 14}, seed=0)
    assert machine.grow({0: 1 + DRAFTS}, seed=1)  # passes 16, where it is captured
    machine.manager.stats()
    rejected = machine.tokens[0][15]
    machine.shorten(0, 15)
    seed = next(
        seed
        for seed in itertools.count()
        if np.random.default_rng(seed).integers(0, 2, 4, dtype=np.uint8)[0] != rejected
    )
    assert machine.grow({0: 1 + DRAFTS}, seed=seed)
    tokens = machine.tokens[0]
    machine.manager.stats()
    slot, num_tokens, *_ = machine.manager.resume_request(list(tokens[:18]))
    assert num_tokens == 16
    if is_broken:
        with pytest.raises(AssertionError):
            assert_stores(machine.world, machine.manager, slot, tokens[:16])
    else:
        assert_stores(machine.world, machine.manager, slot, tokens[:16])


@pytest.mark.parametrize(("rejected", "saved"), [(0, [8]), (2, [])])
def test_a_fork_saves_no_boundary_that_rejected_tokens_reached(rejected, saved):
    machine = Life()
    machine.start(every_blocks=0)
    machine.open()
    assert machine.grow({0: 11 + rejected}, seed=0)
    machine.shorten(0, 11)
    machine.fork(0)
    assert list(machine.manager._books.prefix.checkpoints_of(0)) == saved
    machine.shorten(0, 8)
    machine.every_request_is_right()


def test_a_block_that_its_last_user_never_published_can_go():
    machine = Life()
    machine.start(every_blocks=0, host_blocks=0)
    machine.open()
    assert machine.grow({0: 8}, seed=0)
    machine.fork(0)  # slot 1 shares a block that only slot 0 will publish
    machine.open()
    assert machine.grow({0: 4}, seed=0) and machine.grow({2: 12}, seed=5)
    machine.free(0)
    machine.free(1)
    tree = machine.manager._books.prefix.tree
    assert tree.num_evictable == 1 and tree.num_blocks == 2
    tree.evict(1)  # meets the shared block first
    machine.free(0)
    assert tree.num_evictable == 1
    tree.evict(1)
    machine.manager.check_integrity()
    assert not tree.nodes and machine.manager._books.allocator.num_free == SHORT.num_blocks


def test_a_life_goes_on_after_a_restart():
    machine = machine_in(SHORT)()
    machine.start(host_blocks=30, has_store=True)
    machine.resume(0, 0, more=9, seed=0)
    machine.prefill(0, share=9, seed=0, is_noted=True)
    machine.every_request_is_right()
    machine.restart(choice=0, more=3, seed=0)
    (tokens,) = machine.tokens.values()
    assert machine.num_disk_tokens == 32 == len(tokens)
    machine.every_request_is_right()
    machine.teardown()


def test_ids_decide_a_sequence():
    first, second = (WHOLE.oracle_of(bytes(ids)) for ids in ([0, 1, 1, 0], [0, 1, 0, 0]))
    for mine, other in zip(first.layers, second.layers, strict=True):
        assert torch.equal(mine.output[:2], other.output[:2])
        assert not torch.equal(mine.output[2], other.output[2])


@pytest.mark.parametrize("kind", [Life, V41Life])
def test_another_choice_of_entries_is_found(kind):
    machine = kind()
    machine.start()
    machine.open()
    assert machine.grow({0: 30}, seed=0)
    others = torch.Generator().manual_seed(0)
    machine.manager.paged.layer(1).index_keys.data.random_(0, 256, generator=others)
    with pytest.raises(AssertionError, match="other entries were chosen"):
        machine.grow({0: 1}, seed=0)


@pytest.mark.parametrize("kind", [Life, V41Life])
def test_kernels_are_compared_with_a_fresh_request(kind):
    machine = on_kernels(kind, "cuda" if torch.cuda.is_available() else "cpu")()
    machine.start()
    machine.open()
    assert machine.grow({0: 17}, seed=0) and machine.grow({0: 2}, seed=1)
    machine.every_request_is_right()
    lose_a_tail_row(machine.manager)
    with pytest.raises(AssertionError):
        machine.every_request_is_right()


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [Life, V41Life, WholeLife])
def test_life_on_a_gpu(machine):
    chosen = settings(max_examples=10, stateful_step_count=30, **COMMON)
    run_state_machine_as_test(on_kernels(machine, "cuda"), settings=chosen)
