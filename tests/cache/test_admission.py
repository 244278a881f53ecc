"""`blocks_needed` is exact: a forward fits into that many blocks, and not into one less."""

import numpy as np
import pytest

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.errors import NoFreeSlotError, OutOfBlocksError

BLOCK = 8
CONFIG = CacheConfig.tiny(
    compress_ratios=(0, 4), block_tokens=BLOCK, sliding_window=8, drafts_per_step=3
)


def make_manager():
    return KVCacheManager(CONFIG, max_requests=5, num_blocks=24, num_checkpoints=4, undo_slots=5)


def grow(manager, slot, count):
    before = int(manager.lengths[slot])
    prepare_forward(manager, [slot], [before], [before + count]).complete()


def note(manager, slot, num_tokens):
    """Tell all ids up to a length: those of every request are the same."""
    known = int(manager._books.prefix.ids.num_known[slot])
    if known < num_tokens:
        manager.note_tokens(slot, np.arange(known, num_tokens), start=known)


def random_change(manager, rng):
    slots = manager.open_slots
    slot = int(rng.choice(slots)) if slots else None
    kind = rng.integers(7)
    try:
        if slot is None or kind == 0:
            manager.open_request()
        elif kind == 1:
            manager.fork(slot)
        elif kind == 2:
            low, high = manager.rollback_floor[slot], manager.lengths[slot]
            manager.truncate(slot, rng.integers(low, high + 1))
        elif kind == 3:
            note(manager, slot, int(manager.lengths[slot]))
        elif kind == 4 and len(slots) > 2:
            manager.free_request(slot)
        else:
            grow(manager, slot, int(rng.integers(1, 2 * BLOCK)))
    except (NoFreeSlotError, OutOfBlocksError):
        manager.free_request(slot if slot is not None else manager.open_slots[0])


def assert_exact(manager, slots, after):
    """Prepare the forward with one free block less than it needs, then with just as many."""
    before = manager.lengths[slots]
    needed = manager.blocks_needed(slots, after)
    books, stats = manager._books, manager.stats()
    spare = stats.num_free_blocks + stats.num_evictable_blocks - needed
    num_held = min(spare + 1, spare + needed)
    books.make_room(spare + needed)
    held = books.allocator.acquire(max(num_held, 0))
    if needed:
        with pytest.raises(OutOfBlocksError) as error:
            prepare_forward(manager, slots, before, after)
        assert error.value.needed == needed
        assert error.value.free == (needed - 1 if spare >= 0 else spare + needed)
    books.allocator.release(held[max(spare, 0) :])
    if spare >= 0:
        assert manager.num_free_blocks == needed
        plan = prepare_forward(manager, slots, before, after)
        assert plan.num_new_blocks == needed and manager.num_free_blocks == 0
        plan.cancel()
    books.allocator.release(held[: max(spare, 0)])
    manager.check_integrity()
    return needed


@pytest.mark.parametrize("seed", range(20))
def test_the_number_is_exact_in_any_state(seed):
    manager, rng = make_manager(), np.random.default_rng(seed)
    for _ in range(40):
        random_change(manager, rng)
        open_slots = manager.open_slots
        slots = rng.permutation(open_slots)[: rng.integers(1, len(open_slots) + 1)]
        assert_exact(manager, slots, manager.lengths[slots] + rng.integers(0, 12, len(slots)))


def test_a_block_that_is_about_to_be_adopted_is_shared_no_more():
    manager = make_manager()
    first, second = manager.open_requests(2)
    for slot in (first, second):
        grow(manager, slot, BLOCK + 2)
    fork = manager.fork(second)
    manager.truncate(fork, BLOCK - 2)  # into the block that it shares
    note(manager, first, BLOCK + 4)
    grow(manager, first, 2)
    assert manager.blocks_needed(fork, BLOCK) == 1
    note(manager, second, BLOCK + 4)
    grow(manager, second, 2)  # it will give its block up for the one that is published
    assert assert_exact(manager, np.array([fork]), np.array([BLOCK])) == 0
