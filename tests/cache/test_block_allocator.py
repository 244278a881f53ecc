"""Block ids: all or nothing, in a fixed order, and never lost."""

import ast
import random
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, checks, prepare_forward
from dsv4.cache.memory import arrays, block_allocator, journal
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.schema import build_schemas
from dsv4.errors import IntegrityError, OutOfBlocksError


def books(allocator):
    return allocator.num_free, allocator.num_owners.tolist(), allocator._free.tolist()


def test_a_new_allocator_has_every_block_free():
    allocator = BlockAllocator(5)
    assert allocator.num_blocks == allocator.num_free == 5
    assert allocator.num_owners.tolist() == [0] * 5
    allocator.check_integrity()


def test_acquired_ids_are_distinct_and_owned_once():
    allocator = BlockAllocator(7)
    ids = np.concatenate([allocator.acquire(3), allocator.acquire(0), allocator.acquire(4)])
    assert ids.dtype == np.int32
    assert sorted(ids) == list(range(7))
    assert allocator.num_free == 0
    assert allocator.num_owners.tolist() == [1] * 7
    allocator.check_integrity()


def test_acquired_ids_are_a_copy():
    allocator = BlockAllocator(4)
    allocator.acquire(2)[:] = 3
    assert allocator.acquire(2).tolist() == [2, 3]


@pytest.mark.parametrize("num_taken, num_asked", [(0, 6), (3, 3), (5, 1)])
def test_too_many_take_none(num_taken, num_asked):
    allocator = BlockAllocator(5)
    allocator.acquire(num_taken)
    before = books(allocator)
    match = f"{num_asked} needed, {5 - num_taken} of 5 free"
    with pytest.raises(OutOfBlocksError, match=match):
        allocator.acquire(num_asked)
    assert books(allocator) == before
    assert allocator.acquire(5 - num_taken).size == 5 - num_taken


def test_an_empty_allocator_gives_nothing():
    allocator = BlockAllocator(0)
    assert allocator.acquire(0).size == 0
    with pytest.raises(OutOfBlocksError, match="1 needed, 0 of 0 free"):
        allocator.acquire(1)
    allocator.check_integrity()


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="Invalid num_blocks: expected an integer >= 0, got -1"):
        BlockAllocator(-1)
    allocator = BlockAllocator(3)
    before = books(allocator)
    with pytest.raises(ValueError, match="Invalid num_blocks: expected an integer >= 0, got -2"):
        allocator.acquire(-2)
    assert books(allocator) == before


def test_the_same_calls_give_the_same_ids():
    def run():
        allocator, rng, given = BlockAllocator(50), random.Random(3), []
        for _ in range(200):
            if rng.random() < 0.5 and allocator.num_free >= 4:
                given.append(allocator.acquire(rng.randint(0, 4)))
            elif given:
                allocator.release(given.pop(rng.randrange(len(given))))
        return [ids.tolist() for ids in given], books(allocator)

    assert run() == run()


def test_release_order_does_not_change_the_next_ids():
    def run(order):
        allocator = BlockAllocator(6)
        ids = allocator.acquire(6)
        allocator.release(ids[order])
        return allocator.acquire(4).tolist()

    assert run([4, 1, 3, 0]) == run([0, 1, 3, 4])


@pytest.mark.parametrize(
    "ids, match",
    [
        pytest.param([5], "block 5 has no owner", id="never acquired"),
        pytest.param([1], "block 1 has no owner", id="released before"),
        pytest.param([0, 2, 1], "block 1 has no owner", id="one of several"),
        pytest.param([0, 2, 0], "block 0 has no owner", id="twice in one call"),
        pytest.param([0, 8], "expected 0 to 7, got 0 to 8", id="too large"),
        pytest.param([-1, 0], "expected 0 to 7, got -1 to 0", id="sentinel"),
    ],
)
def test_a_wrong_release_changes_nothing(ids, match):
    allocator = BlockAllocator(8)
    assert allocator.acquire(4).tolist() == [0, 1, 2, 3]
    allocator.release(np.array([1], dtype=np.int32))
    before = books(allocator)
    with pytest.raises(ValueError, match=match):
        allocator.release(np.array(ids, dtype=np.int32))
    assert books(allocator) == before
    allocator.check_integrity()


def test_releasing_nothing_changes_nothing():
    allocator = BlockAllocator(3)
    allocator.acquire(2)
    before = books(allocator)
    allocator.release(np.empty(0, dtype=np.int32))
    assert books(allocator) == before


def test_a_block_is_free_when_its_last_owner_gives_it_up():
    allocator = BlockAllocator(4)
    allocator.acquire(3)
    allocator.share(np.array([1, 1], dtype=np.int32))
    assert allocator.num_shares == 2
    allocator.release(np.array([1, 2], dtype=np.int32))
    assert (allocator.num_owners.tolist(), allocator.num_free) == ([1, 2, 0, 0], 2)
    allocator.release(np.array([1, 1], dtype=np.int32))
    assert (allocator.num_owners.tolist(), allocator.num_free) == ([1, 0, 0, 0], 3)
    assert allocator.num_shares == 0
    allocator.check_integrity()


@pytest.mark.parametrize("num_steps", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_random_operations_lose_no_block(num_steps):
    num_blocks, rng = 41, random.Random(0)
    allocator = BlockAllocator(num_blocks)
    held, free = [], set(range(num_blocks))
    num_refused = 0
    for step in range(num_steps):
        if rng.random() < 0.52:
            count = rng.randint(0, 6)
            if count > len(free):
                num_refused += 1
                with pytest.raises(OutOfBlocksError):
                    allocator.acquire(count)
                continue
            ids = allocator.acquire(count).tolist()
            assert len(ids) == count and free.issuperset(ids)
            free.difference_update(ids)
            held += ids
        else:
            if step % 16 == 0:
                rng.shuffle(held)
            cut = max(0, len(held) - rng.randint(0, 6))
            given, held = held[cut:], held[:cut]
            allocator.release(np.array(given, dtype=np.int32))
            free.update(given)
        assert allocator.num_free == len(free)
        if step % 10_000 == 0:
            allocator.check_integrity()
            assert set(np.flatnonzero(allocator.num_owners == 0).tolist()) == free
    assert num_refused > 1000
    allocator.release(np.array(held, dtype=np.int32))
    assert allocator.num_free == num_blocks
    allocator.check_integrity()
    assert sorted(allocator.acquire(num_blocks)) == list(range(num_blocks))


def free_an_owned_block(allocator):
    allocator._free[allocator._num_free - 1] = 0


def free_a_block_twice(allocator):
    allocator._free[0] = allocator._free[1]


def lose_a_free_block(allocator):
    allocator._num_free -= 1


def lose_an_owner(allocator):
    allocator._num_owners[0] = 0


def invent_an_owner(allocator):
    allocator._num_owners[5] = 1


def free_an_owned_block_twice(allocator):
    allocator._free[:2] = 0
    allocator._num_owners[4:] = 1


@pytest.mark.parametrize(
    "corrupt, first",
    [
        (free_an_owned_block, 0), (free_a_block_twice, 4), (lose_a_free_block, 2),
        (lose_an_owner, 0), (invent_an_owner, 5), (free_an_owned_block_twice, 0),
    ],
)  # fmt: skip
def test_integrity_finds_corruption(corrupt, first):
    allocator = BlockAllocator(6)
    assert allocator.acquire(2).tolist() == [0, 1]
    allocator.check_integrity()
    corrupt(allocator)
    with pytest.raises(IntegrityError, match=f"both free and owned or neither, .* {first}$"):
        allocator.check_integrity()


def test_owners_are_read_only_and_live():
    allocator = BlockAllocator(3)
    owners = allocator.num_owners
    with pytest.raises(ValueError, match="read-only"):
        owners[0] = 1
    allocator.acquire(2)
    assert owners.tolist() == [1, 1, 0]


def imports_of(module):
    tree = ast.parse(Path(module.__file__).read_text())
    names = {
        name.split(".")[0] if not name.startswith("dsv4") else name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    return names - set(sys.stdlib_module_names)


def test_the_allocator_imports_no_tensor_library():
    own = {"dsv4.errors", "dsv4.checks", "dsv4.cache.memory.arrays", "dsv4.cache.memory.journal"}
    assert imports_of(block_allocator) == own | {"numpy"}
    for module in (arrays, checks):
        assert imports_of(module) == {"numpy"}
    assert imports_of(journal) == {"numpy", "dsv4.errors"}


def test_only_owned_blocks_are_shared():
    allocator = BlockAllocator(4)
    ids = allocator.acquire(2)
    before = books(allocator)
    with pytest.raises(ValueError, match="Invalid share: block 2 has no owner to share it with"):
        allocator.share(np.array([ids[0], 2], dtype=np.int32))
    with pytest.raises(ValueError, match="Invalid block ids: expected 0 to 3, got -1 to -1"):
        allocator.share(np.array([-1]))
    allocator.share(np.empty(0, dtype=np.int32))
    assert books(allocator) == before and allocator.num_shares == 0


def test_a_lost_share_is_found():
    allocator = BlockAllocator(4)
    allocator.share(allocator.acquire(2))
    allocator.check_integrity()
    allocator._num_owners[1] = 1
    with pytest.raises(IntegrityError, match="beyond the first are 1, counted were 2"):
        allocator.check_integrity()


class Watched(np.ndarray):
    """An array that is read and written by index alone, and counts its elements that are."""

    num_touched = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        assert method == "at", f"{ufunc.__name__} goes over the whole pool"
        return ufunc.at(self.view(np.ndarray), *inputs[1:])

    def __array_function__(self, function, types, args, options):
        raise AssertionError(f"{function.__name__} goes over the whole pool")

    def __getitem__(self, index):
        elements = self.view(np.ndarray)[index]
        Watched.num_touched += np.size(elements)
        return elements

    def __setitem__(self, index, values):
        plain = self.view(np.ndarray)
        Watched.num_touched += np.size(plain[index])
        plain[index] = values


@pytest.mark.parametrize("num_blocks", [1 << 10, 1 << 16])
def test_a_call_touches_no_more_blocks_than_it_names(num_blocks, monkeypatch):
    """Counts and memory are the same for any pool."""
    monkeypatch.setattr(Watched, "num_touched", 0)
    allocator = BlockAllocator(num_blocks, journal.Journal())
    allocator._num_owners = allocator._num_owners.view(Watched)
    allocator._free = allocator._free.view(Watched)
    tracemalloc.start()
    with allocator._journal:
        ids = allocator.acquire(8)
        allocator.share(ids[:4])
        allocator.release(ids)
        allocator.release(ids[:4])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert allocator.num_free == num_blocks
    # Read, noted and written at most: once for the ids, twice for the free list.
    assert Watched.num_touched <= 3 * (8 + 4 + 8 + 4) + 2 * (8 + 4 + 4)
    assert peak < 1 << 15, "half a byte for each block of the larger pool"


def test_freeing_a_request_takes_no_memory_of_the_pools_size():
    num_blocks = 1 << 17
    config = CacheConfig.tiny(compress_ratios=(128,), block_tokens=128, drafts_per_step=3)
    block_bytes = cache_layout(config, build_schemas(config)).blocks.num_bytes
    manager = KVCacheManager(
        config, max_requests=2, num_blocks=num_blocks, max_request_tokens=4096,
        storage={"blocks": torch.empty(num_blocks, block_bytes, dtype=torch.uint8)},
    )  # fmt: skip
    slot, other = manager.open_requests(2)
    prepare_forward(manager, [slot, other], [0, 0], [1026, 1026]).complete()
    tracemalloc.start()
    manager.truncate([slot, other], [1023, 1023])
    manager.free_request(slot)
    manager.free_request(other)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manager.num_free_blocks == num_blocks
    assert peak < 1 << 16, "half a byte for each block"
