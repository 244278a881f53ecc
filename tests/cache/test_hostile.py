"""Arguments and callers that mean harm, or are careless: refused or converted, never half taken."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

from dsv4 import BlockAllocator, CacheConfig, CheckpointPolicy, KVCacheManager, prepare_forward
from dsv4.errors import LostCacheError, NoFreeSlotError, OutOfBlocksError
from dsv4.testing import Row, model_projections, model_weights, run_forward, take_rows

CONFIG = CacheConfig.tiny(drafts_per_step=3, block_tokens=128)
WEIGHTS = model_weights(CONFIG, seed=0)
TOKENS = model_projections(CONFIG, 420, seed=10)
IDS = np.arange(420)
SWA, CSA = 0, 1


def make_manager(**sizes):
    defaults = {"max_requests": 3, "num_blocks": 8, "max_forward_tokens": 512, "num_checkpoints": 4}
    return KVCacheManager(CONFIG, **{**defaults, **sizes})


def feed(manager, slot, after):
    row = Row(slot, TOKENS, int(manager.lengths[slot]), after)
    return run_forward(manager, WEIGHTS, [row])


@pytest.mark.parametrize("kind", [torch.tensor, np.int64, np.array, np.uint16])
def test_a_slot_of_another_type_is_the_same_slot(kind):
    manager = make_manager()
    slot, *_ = manager.resume_request(IDS[:300], salt=b"first")
    feed(manager, slot, 300)
    manager.free_request(kind(slot))
    assert not manager._books.prefix.requests
    assert manager.open_request() == slot
    feed(manager, slot, 290)
    manager.note_tokens(kind(slot), IDS[:290] + 1000, start=kind(0))
    manager.check_integrity()
    assert manager.match_prefix(IDS[:300] + 1000, salt=b"first").num_tokens == 0
    manager.truncate(kind(slot), kind(289))
    assert manager.lengths[slot] == 289 and manager.fork(kind(slot)) == 1


@pytest.mark.parametrize(
    "slot", [True, np.True_, torch.tensor(True), 1.0, "0", None, [0.0], [[0]], [0, 0], -1, 3]
)
def test_a_slot_that_is_none_is_refused(slot):
    manager = make_manager()
    manager.open_requests(2)
    for call in (manager.free_requests, manager.blocks_of, lambda s: manager.truncate(s, [0])):
        with pytest.raises((ValueError, TypeError), match="Invalid"):
            call(slot)
    assert manager.open_slots == [0, 1]
    manager.check_integrity()


def test_a_layer_named_by_a_tensor_is_written_once():
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [8])
    rows = take_rows(TOKENS[SWA], slice(0, 8))
    manager.acquire(torch.tensor(SWA), plan).write(rows, WEIGHTS[SWA])
    for layer_idx in (SWA, torch.tensor(SWA), np.int32(SWA)):
        with pytest.raises(RuntimeError, match="already written"):
            manager.acquire(layer_idx, plan).write(rows, WEIGHTS[SWA])


def test_an_allocator_counts_in_ints():
    allocator = BlockAllocator(8)
    ids = allocator.acquire(torch.tensor(5))
    assert type(allocator.num_free) is int and allocator.num_free == 3
    with pytest.raises(OutOfBlocksError):
        allocator.acquire(torch.tensor(4))
    allocator.release(torch.from_numpy(ids))
    with pytest.raises(ValueError, match="got True"):
        allocator.acquire(True)
    allocator.check_integrity()


class RaisingPolicy(CheckpointPolicy):
    def chosen(self, first, last):
        raise RuntimeError("no policy today")


def test_a_policy_that_raises_changes_nothing():
    manager = make_manager(checkpoint_policy=RaisingPolicy())
    slot, *_ = manager.resume_request(IDS[:300])
    with pytest.raises(RuntimeError, match="no policy"):
        feed(manager, slot, 300)
    assert manager.lengths[slot] == 0 and manager.live_plan is None
    feed(manager, slot, 127)
    with pytest.raises(RuntimeError, match="no policy"):
        feed(manager, slot, 128)
    assert manager.lengths[slot] == 127 and manager.num_free_blocks == 7
    manager.check_integrity()


@pytest.mark.parametrize("after", [2**62, 2**63 - 1])
def test_padding_rows_do_not_overflow(after):
    manager = make_manager()
    slot = manager.open_request()
    with pytest.raises(ValueError, match="Too many tokens in one request"):
        prepare_forward(manager, [slot, -1, -1], [0, 0, 0], [5, after, after])
    assert manager.lengths[slot] == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_and_a_swapped_request_are_not_copied(copied):
    manager = make_manager(host_blocks=4, host_slots=1)
    slot = manager.open_request()
    feed(manager, slot, 20)
    swapped = manager.swap_out(slot)
    for each in (manager, swapped):
        with pytest.raises(TypeError, match="Cannot copy or pickle"):
            copied(each)


def test_a_selection_of_another_layer_or_forward_is_refused():
    manager = make_manager()
    slot = manager.open_request()
    csa = [layer.layer_idx for layer in manager.schedule if layer.ratio == 4]
    selections = []
    for start in (0, 8):
        plan = prepare_forward(manager, [slot], [start], [start + 8])
        for idx in range(CONFIG.num_layers):
            inputs = take_rows(TOKENS[idx], slice(start, start + 8))
            handle = manager.acquire(idx, plan)
            handle.write(inputs, WEIGHTS[idx])
            if idx in csa:
                index = inputs.indexer
                selections.append(handle.select_entries(index.query, index.head_weights))
                handle.attend(inputs.query, WEIGHTS[idx].sinks, selections[-1])
                for other in selections[:-1]:
                    with pytest.raises(ValueError, match="its own select_entries"):
                        handle.attend(inputs.query, WEIGHTS[idx].sinks, other)


def test_a_loaded_request_keeps_its_salt(tmp_path):
    manager = make_manager()
    slot, *_ = manager.resume_request(IDS[:300], salt=b"mine")
    feed(manager, slot, 300)
    manager.save_request(slot, tmp_path / "file")
    other = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=1))
    loaded = other.load_request(tmp_path / "file")
    feed(other, loaded, 400)
    other.note_tokens(loaded, IDS[300:400], start=300)
    other.stats()
    assert other.match_prefix(IDS[:420]).num_tokens == 0
    assert other.match_prefix(IDS[:420], salt=b"mine").num_tokens == 384


def test_the_memory_goes_with_the_manager():
    manager = make_manager(host_blocks=2, host_slots=1)
    slot, *_ = manager.resume_request(IDS[:300])
    feed(manager, slot, 300)
    prepare_forward(manager, [slot], [300], [301])
    memory = weakref.ref(manager.paged.storage)
    gc.disable()
    try:
        del manager
        assert memory() is None
    finally:
        gc.enable()


def test_a_closed_manager_has_no_memory_and_takes_no_calls():
    with make_manager() as manager:
        slot = manager.open_request()
        plan = prepare_forward(manager, [slot], [0], [5])
        handle = manager.acquire(SWA, plan)
    for pool in (manager.paged, manager.state):
        assert not pool.storage.untyped_storage().nbytes()
    for call in (manager.open_request, manager.stats, lambda: manager.free_request(slot)):
        with pytest.raises(RuntimeError, match="This manager is closed"):
            call()
    with pytest.raises(RuntimeError, match="Stale plan"):
        handle.write(take_rows(TOKENS[SWA], slice(0, 5)), WEIGHTS[SWA])


def test_sleep_gives_the_memory_back_and_wake_takes_it_again():
    manager = make_manager(host_blocks=4, host_slots=1)
    slot, *_ = manager.resume_request(IDS[:300])
    feed(manager, slot, 300)
    with pytest.raises(RuntimeError, match=r"Cannot sleep: .* got slots \[0\]"):
        manager.sleep()
    assert manager.stats().num_prefix_blocks == 2
    swapped = manager.swap_out(slot)
    manager.sleep()
    assert not manager.paged.storage.untyped_storage().nbytes()
    with pytest.raises(RuntimeError, match="asleep: call wake"):
        manager.swap_in(swapped)
    manager.wake()
    slot = manager.swap_in(swapped)
    fresh = make_manager()
    other = fresh.open_request()
    feed(fresh, other, 300)
    for mine, expected in zip(feed(manager, slot, 310), feed(fresh, other, 310), strict=True):
        assert torch.equal(mine.output, expected.output)
    manager.check_integrity()


def test_storage_from_outside():
    sizes = make_manager().tensors()
    given = {name: torch.full_like(sizes[name], 0xFF) for name in ("blocks", "slots")}
    manager = make_manager(storage=given)
    assert manager.paged.storage is given["blocks"] and manager.state.storage is given["slots"]
    slot = manager.open_request()
    feed(manager, slot, 300)
    manager.check_integrity()
    manager.close()
    assert given["blocks"].untyped_storage().nbytes()
    for name, wrong in (("blocks", given["slots"]), ("slots", given["slots"].int()), ("x", None)):
        with pytest.raises(ValueError, match="Invalid storage"):
            make_manager(storage={name: wrong})


def test_what_is_given_back_is_wiped():
    manager = make_manager(wipe_on_free=True, host_blocks=4, host_slots=1, num_checkpoints=0)
    host = manager._books.host
    host.blocks.zero_(), host.slots.zero_()
    slot = manager.open_request()
    feed(manager, slot, 20)
    plan = prepare_forward(manager, [slot], [20], [300])
    manager.acquire(SWA, plan).write(take_rows(TOKENS[SWA], slice(20, 300)), WEIGHTS[SWA])
    plan.cancel()
    slot = manager.swap_in(manager.swap_out(slot))
    feed(manager, slot, 300)
    manager.free_request(slot)
    for each in (manager.paged.storage, manager.state.storage, manager.device_memory.undo,
                 host.blocks, host.slots):  # fmt: skip
        assert not each.any()


def test_admission_without_trying():
    manager = make_manager(num_blocks=4, max_requests=2)
    slot, *_ = manager.resume_request(IDS[:300])
    assert manager.blocks_needed(slot, 300) == 3
    feed(manager, slot, 300)
    fork = manager.fork(slot)
    before = manager.stats()
    match = manager.match_prefix(IDS[:300])
    assert match == (256, 0, 0, 0) and manager.stats() == before
    manager.truncate([slot, fork], [298, 299])
    needed = manager.blocks_needed([slot, fork], [301, 390])
    assert needed == 1 and manager.num_free_blocks == 0
    with pytest.raises(OutOfBlocksError) as error:
        prepare_forward(manager, [slot, fork], [298, 299], [301, 390])
    assert (error.value.needed, error.value.free, error.value.evictable) == (1, 0, 0)
    with pytest.raises(NoFreeSlotError) as full:
        manager.open_requests(2)
    assert (full.value.needed, full.value.free) == (2, 0)
    for call in (lambda: manager.resume_request(np.arange(600)),
                 lambda: manager.open_request(num_tokens=600)):  # fmt: skip
        with pytest.raises(ValueError, match="expected at most 512, got 600"):
            call()


def test_a_failed_device_loses_the_manager(monkeypatch):
    manager = make_manager(num_checkpoints=0)
    slot = manager.open_request()
    feed(manager, slot, 20)
    plan = prepare_forward(manager, [slot], [20], [200])

    def fail(*args):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(manager._memory, "load_undo", fail)
    with pytest.raises(LostCacheError, match="what the cache holds is lost"):
        plan.cancel()
    for call in (manager.open_request, manager.check_integrity, lambda: manager.lengths):
        with pytest.raises(LostCacheError):
            call()
