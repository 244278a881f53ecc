"""Swapping: a request comes back from the host as if it had never been away."""

import pytest
import torch

from dsv4 import CacheConfig, prepare_forward
from dsv4.cache.memory.arrays import joined_runs
from dsv4.cache.memory.capacity import Capacity
from dsv4.errors import LiveForwardError, NoFreeSlotError, OutOfBlocksError
from tests.cache.test_prefix_cache import (
    GPU,
    IDS,
    VERIFY,
    assert_like_a_cold_run,
    assert_same,
    feed,
    live_bytes,
    make_manager,
    run_prompt,
)

BLOCKS = 4


def swap_manager(**sizes):
    defaults = {"num_checkpoints": 0, "num_blocks": BLOCKS, "host_blocks": 8, "host_slots": 2}
    manager = make_manager(VERIFY, **{**defaults, **sizes})
    manager._books.host.blocks.fill_(0xFF)
    manager._books.host.slots.fill_(0xFF)
    return manager


def books(manager):
    return (
        manager.lengths.tolist(), manager.is_open.tolist(),
        manager._books.requests.block_table.tolist(),
        manager._books.allocator.num_free, manager._books.host.block_owners.num_free,
        manager._books.host.slot_owners.num_free,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("length", [1, 127, 128, 131, 400])
def test_a_request_comes_back_as_it_was(length, device):
    manager = swap_manager(device=device)
    slot = manager.open_request()
    feed(manager, slot, length)
    before = live_bytes(manager, slot)
    swapped = manager.swap_out(slot)
    assert not manager.is_open[slot] and manager._books.allocator.num_free == BLOCKS
    others = [manager.open_request() for _ in range(2)]
    for other in others:
        feed(manager, other, 256)  # every block and the slot are written by somebody else
    if length >= 4:  # a shorter one has no block
        with pytest.raises(OutOfBlocksError):
            manager.swap_in(swapped)
    for other in others:
        manager.free_request(other)
    slot = manager.swap_in(swapped)
    assert_same(live_bytes(manager, slot), before)
    assert_like_a_cold_run(manager, slot, after=length + 20)
    assert (
        manager._books.host.block_owners.num_free == 8
        and manager._books.host.slot_owners.num_free == 2
    )


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_copies_do_not_disturb_who_comes_next(device):
    manager = swap_manager(device=device)
    first = manager.open_request()
    feed(manager, first, 400)
    before = live_bytes(manager, first)
    for _ in range(3):
        swapped = manager.swap_out(first)
        other = manager.open_request()
        feed(manager, other, 500)
        manager.free_request(other)
        first = manager.swap_in(swapped)
        assert_same(live_bytes(manager, first), before)
    if device == "cuda":
        assert manager._books.host.blocks.is_pinned() and manager._books.host.slots.is_pinned()
    block_bytes, slot_bytes = manager.paged.storage.shape[1], manager.state.storage.shape[1]
    stats = manager.stats()
    assert stats.bytes_to_host == stats.bytes_from_host == 3 * (4 * block_bytes + slot_bytes)


def test_the_floor_and_the_tokens_come_back_too():
    manager = swap_manager(num_checkpoints=2, num_blocks=8)
    slot = run_prompt(manager, 200)
    swapped = manager.swap_out(slot)
    assert manager.stats().num_swapped_requests == 1
    slot = manager.swap_in(swapped)
    assert manager.rollback_floor[slot] == 196
    manager.truncate(slot, 196)
    assert_like_a_cold_run(manager, slot, after=260)
    manager.note_tokens(slot, IDS[196:300], start=196)
    feed(manager, slot, 300)
    manager.free_request(slot)
    assert manager.stats().num_prefix_blocks == 2
    assert manager.resume_request(IDS[:300]).num_tokens == 128


def test_published_blocks_stay_and_are_found_again():
    manager = swap_manager(num_checkpoints=2, num_blocks=8)
    slot = run_prompt(manager, 300)
    swapped = manager.swap_out(slot)
    assert manager.stats().num_prefix_blocks == 2
    assert manager._books.host.block_owners.num_free == manager.capacity.host_blocks - 1
    manager.check_integrity()
    slot = manager.swap_in(swapped)
    assert manager.num_free_blocks == 8 - 3
    assert_like_a_cold_run(manager, slot, after=400)


def test_a_fork_keeps_what_was_shared():
    manager = swap_manager(num_blocks=8)
    slot = manager.open_request()
    feed(manager, slot, 300)
    fork = manager.fork(slot)
    swapped = manager.swap_out(slot)
    assert_like_a_cold_run(manager, fork, after=320)
    slot = manager.swap_in(swapped)
    assert_like_a_cold_run(manager, slot, after=320)


@pytest.mark.parametrize("is_published", [False, True], ids=["swapped first", "published first"])
def test_a_kept_block_and_a_published_one(is_published):
    """Blocks before one that a swapped request keeps go to the host, since it has none of them."""
    manager = swap_manager(num_checkpoints=4, num_blocks=4, host_blocks=10)
    slot = manager.resume_request(IDS[:250]).slot
    feed(manager, slot, 257)  # its second block is full, and not all of its ids are known
    fork = manager.fork(slot)
    swapped = [] if is_published else [manager.swap_out(fork)]
    manager.note_tokens(slot, IDS[250:270], start=250)
    feed(manager, slot, 270)
    assert manager.stats().num_prefix_blocks == 1 + is_published
    swapped += [manager.swap_out(each) for each in ([fork, slot] if is_published else [slot])]
    manager.check_integrity()
    other = manager.open_request()
    feed(manager, other, 384)
    manager.free_request(other)
    for each in swapped:
        slot = manager.swap_in(each)
        assert_like_a_cold_run(manager, slot, after=300)
        manager.free_request(slot)


@pytest.mark.parametrize("num_checkpoints", [0, 2])
def test_blocks_kept_for_a_swapped_request_are_counted(num_checkpoints):
    manager = swap_manager(num_blocks=8, num_checkpoints=num_checkpoints)
    slot = manager.open_request()
    feed(manager, slot, 300)
    fork = manager.fork(slot)
    swapped = manager.swap_out(slot)
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_request_blocks, stats.num_swapped_blocks) == (5, 3, 0)
    manager.free_request(fork)
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_request_blocks, stats.num_swapped_blocks) == (6, 0, 2)
    manager.swap_in(swapped)
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_request_blocks, stats.num_swapped_blocks) == (5, 3, 0)


def test_swapped_requests_push_evicted_blocks_from_the_host():
    manager = swap_manager(num_checkpoints=2, host_blocks=4)
    slot = run_prompt(manager, 300)
    manager.free_request(slot)
    slot = manager.open_request()
    feed(manager, slot, 400)
    assert manager.stats().num_prefix_host_blocks == 2
    swapped = manager.swap_out(slot)
    assert manager.stats().num_prefix_host_blocks == 0
    manager.check_integrity()
    manager.drop_swapped(swapped)
    manager.check_integrity()
    assert manager._books.host.block_owners.num_free == 4


def test_without_room_nothing_changes():
    manager = swap_manager(host_blocks=2, host_slots=1, num_blocks=8)
    slots = [manager.open_request() for _ in range(2)]
    for slot in slots:
        feed(manager, slot, 300)
    before = books(manager)
    with pytest.raises(OutOfBlocksError, match="Out of host blocks: 3 needed, 2 of 2 free"):
        manager.swap_out(slots[0])
    assert books(manager) == before
    manager.truncate(slots[0], 0)
    swapped = manager.swap_out(slots[0])
    with pytest.raises(NoFreeSlotError, match="0 of 1 free; swap a request in, or drop one"):
        manager.swap_out(slots[1])
    for _ in range(2):
        manager.open_request()
    before = books(manager)
    with pytest.raises(NoFreeSlotError):
        manager.swap_in(swapped)
    assert books(manager) == before
    manager.check_integrity()


def test_a_swapped_request_is_taken_once_and_by_its_owner():
    manager, other = swap_manager(), swap_manager()
    slot = manager.open_request()
    feed(manager, slot, 130)
    swapped = manager.swap_out(slot)
    with pytest.raises(ValueError, match="got another manager's"):
        other.swap_in(swapped)
    manager.swap_in(swapped)
    for call in (manager.swap_in, manager.drop_swapped):
        with pytest.raises(ValueError, match="got one that is back or dropped"):
            call(swapped)


def test_a_request_in_a_live_forward_is_not_swapped():
    manager = swap_manager()
    slot = manager.open_request()
    prepare_forward(manager, [slot], [0], [10])
    with pytest.raises(LiveForwardError):
        manager.swap_out(slot)


def test_a_lost_host_block_is_found():
    manager = swap_manager()
    slot = manager.open_request()
    feed(manager, slot, 130)
    swapped = manager.swap_out(slot)
    manager._books.host.block_owners.release(swapped.place.blocks)
    with pytest.raises(RuntimeError, match="host block 0 is used 1 times but has 0 owners"):
        manager.check_integrity()


def test_neighbours_are_copied_at_once():
    sources = torch.tensor([3, 4, 5, 9, 8, 7]).numpy()
    targets = torch.tensor([0, 1, 2, 3, 4, 5]).numpy()
    assert joined_runs(sources, targets) == [(0, 3), (3, 1), (4, 1), (5, 1)]
    assert joined_runs(sources[:0], targets[:0]) == []


def test_host_memory_is_in_the_plan():
    sizes = Capacity(CacheConfig.v4_flash(), 1, 1, 1, 1, host_blocks=3, host_slots=2).host_memory()
    assert sizes["host_blocks"] == (3 * 912192, 3 * 1584 * 576)
    slot_bytes = 43 * 74880 + 21 * 8 * 2 * (1024 + 256) * 4 + 20 * (16 * 2 + 7 * 3) * 512 * 4
    assert sizes["host_slots"] == (2 * slot_bytes, 2 * -(-slot_bytes // 576) * 576)
