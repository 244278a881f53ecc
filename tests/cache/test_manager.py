"""Requests open, grow, fail and go; the books of the manager stay right throughout."""

import functools

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.errors import IntegrityError, LiveForwardError, NoFreeSlotError
from dsv4.kernels import reference
from dsv4.kernels.backends import BACKENDS, default_backend
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward
from tests.handles import finish
from tests.marks import needs_interpreter

CONFIG = CacheConfig.tiny()
WEIGHTS = model_weights(CONFIG, seed=0)
LAYERS = model_projections(CONFIG, 140, seed=10)
OTHER_LAYERS = model_projections(CONFIG, 12, seed=20)
SWA, CSA, HCA, LAST = range(4)


def make_manager(config=CONFIG, **sizes):
    defaults = {"max_requests": 4, "num_blocks": 6, "max_forward_tokens": 1024}
    return KVCacheManager(config, **{**defaults, **sizes})


def grown_manager(*lengths, **sizes):
    """A manager whose first slots have these lengths."""
    manager = make_manager(**sizes)
    slots = [manager.open_request() for _ in lengths]
    finish(manager, prepare_forward(manager, slots, [0] * len(slots), lengths))
    return manager


def test_slots_open_in_order_and_start_empty():
    manager = make_manager()
    assert [manager.open_request() for _ in range(3)] == [0, 1, 2]
    assert manager.is_open.tolist() == [True, True, True, False]
    assert manager.lengths.tolist() == [0] * 4
    assert manager.num_free_slots == 1
    manager.check_integrity()


def test_no_free_slot_changes_nothing():
    manager = grown_manager(5, 300, max_requests=2)
    lengths, table = manager.lengths.copy(), manager._books.requests.block_table.copy()
    with pytest.raises(NoFreeSlotError, match="1 needed, 0 of 2 free"):
        manager.open_request()
    assert manager.num_free_slots == 0 and manager.is_open.all()
    assert np.array_equal(manager.lengths, lengths)
    assert np.array_equal(manager._books.requests.block_table, table)
    manager.check_integrity()


def test_a_freed_slot_gives_back_its_blocks_and_is_used_again():
    manager = grown_manager(300, 600, 5)
    assert manager._books.allocator.num_free == 0
    kept = manager._books.requests.block_table[[0, 2]].copy()
    manager.free_request(1)
    assert manager._books.allocator.num_free == 3
    assert manager._books.requests.block_table[1].tolist() == [-1] * 6
    assert np.array_equal(manager._books.requests.block_table[[0, 2]], kept)
    assert (manager.lengths[1], manager._books.requests.num_blocks[1], manager.is_open[1]) == (
        0,
        0,
        False,
    )
    manager.check_integrity()
    assert manager.open_request() == 1
    assert manager.lengths[1] == 0
    manager.check_integrity()


@pytest.mark.parametrize(
    "slot, match",
    [
        pytest.param(-1, "Invalid slot: expected an integer from 0 to 3, got -1", id="padding"),
        pytest.param(4, "Invalid slot: expected an integer from 0 to 3, got 4", id="too large"),
        pytest.param(3, r"slot 3 is not open, expected some of \[0\]", id="never opened"),
        pytest.param(1, "Invalid slot: slot 1 is not open", id="freed before"),
    ],
)
def test_a_slot_that_is_not_open_cannot_be_freed(slot, match):
    manager = grown_manager(300, 5)
    manager.free_request(1)
    with pytest.raises(ValueError, match=match):
        manager.free_request(slot)
    assert manager.is_open.tolist() == [True, False, False, False]
    assert manager.num_free_slots == 3
    manager.check_integrity()


@pytest.mark.parametrize(
    "choices, error, match",
    [
        ({"config": {}}, TypeError, "Invalid config: expected a CacheConfig, got dict"),
        ({"checkpoint_policy": "all"}, TypeError, "expected a CheckpointPolicy, got str"),
        ({"store": "folder"}, TypeError, "Invalid store: expected a PrefixStore, got str"),
        ({"on_events": 3}, TypeError, "Invalid on_events: expected a function, got 3"),
        ({"num_blocks": 0}, ValueError, "Invalid num_blocks: expected an integer >= 1, got 0"),
    ],
)
def test_arguments_are_refused_by_name(choices, error, match):
    arguments = {"config": CacheConfig.tiny(), "max_requests": 1, "num_blocks": 4} | choices
    with pytest.raises(error, match=match):
        KVCacheManager(**arguments)


def test_a_plan_of_another_manager_is_refused():
    manager, other = make_manager(), grown_manager(5)
    plan = prepare_forward(other, [0], [5], [6])
    with pytest.raises(ValueError, match="for this manager, got another manager's"):
        manager.acquire(0, plan)
    with pytest.raises(TypeError, match="Invalid plan: expected a ForwardPlan, got NoneType"):
        manager.acquire(0, None)
    assert other.acquire(0, plan).plan is plan


def test_a_plan_is_stale_after_the_next_one():
    manager = grown_manager(5)
    old = prepare_forward(manager, [0], [5], [6])
    finish(manager, old)
    new = prepare_forward(manager, [0], [6], [7])
    assert old.is_retired and not new.is_retired
    with pytest.raises(RuntimeError, match="Stale plan: a newer forward was prepared"):
        manager.acquire(0, old)
    assert manager.acquire(0, new).plan is new


def test_a_plan_is_stale_after_one_of_its_requests_is_freed():
    manager = grown_manager(5, 6)
    plan = prepare_forward(manager, [0], [5], [6])
    plan.complete()
    manager.free_request(1)
    assert manager.acquire(0, plan).plan is plan
    manager.free_request(0)
    with pytest.raises(RuntimeError, match="Stale plan"):
        manager.acquire(0, plan)


@pytest.mark.parametrize("layer_idx", [-1, 4])
def test_a_layer_that_is_not_there_is_refused(layer_idx):
    manager = grown_manager(5)
    plan = prepare_forward(manager, [0], [5], [6])
    with pytest.raises(
        ValueError, match=f"Invalid layer_idx: expected an integer from 0 to 3, got {layer_idx}"
    ):
        manager.acquire(layer_idx, plan)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "reference"), ("cuda:1", "triton")])
def test_the_default_backend_is_the_devices(device, backend):
    assert default_backend(torch.device(device)) == backend


@needs_interpreter
def test_the_backend_is_chosen_once(monkeypatch):
    assert make_manager().backend == "reference"
    monkeypatch.setattr("dsv4.cache.layer_backends.default_backend", lambda device: "triton")
    assert make_manager().backend == "triton"
    assert make_manager(backend="reference").backend == "reference"


def test_an_unknown_backend_lists_the_valid_ones():
    match = f"Unknown backend: expected one of {', '.join(BACKENDS)}, got 'cuda'"
    with pytest.raises(ValueError, match=match):
        make_manager(backend="cuda")


@pytest.mark.parametrize(
    "ratios, num_blocks, expected",
    [((0, 4), 3, 768), ((0, 4), 300, 65536), ((0, 0), 0, 65536)],
    ids=["all blocks", "model limit", "no blocks needed"],
)
def test_the_longest_request_by_default(ratios, num_blocks, expected):
    config = CacheConfig.tiny(compress_ratios=ratios)
    manager = KVCacheManager(config, max_requests=1, num_blocks=num_blocks)
    assert manager.capacity.max_request_tokens == expected


MEMORY_CASES = {
    "tiny": (CacheConfig.tiny(), {}),
    "no workspace": (CacheConfig.tiny(drafts_per_step=3), {"max_forward_tokens": 4}),
    "bf16": (CacheConfig.tiny(kv_format="bf16", index_format="bf16", tail_dtype="bfloat16"), {}),
    "align 16": (CacheConfig.tiny(page_align=16, index_format="nvfp4"), {"num_blocks": 7}),
    "swa": (CacheConfig.tiny(compress_ratios=(0, 0)), {"num_blocks": 0}),
    "hca": (CacheConfig.tiny(compress_ratios=(128,)), {"max_request_tokens": 1000}),
    "v4 layers": (CacheConfig((0, 4, 128)), {"num_blocks": 2}),
}
memory_cases = pytest.mark.parametrize("config, sizes", MEMORY_CASES.values(), ids=MEMORY_CASES)


@memory_cases
def test_memory_is_what_is_allocated(config, sizes):
    manager = make_manager(config, **sizes)
    memory = manager.memory()
    assert sum(part.allocated for part in memory.values()) == sum(
        tensor.nbytes for tensor in manager.tensors().values()
    )
    assert all(0 <= part.payload <= part.allocated for part in memory.values())
    assert manager.capacity.memory() == memory


@memory_cases
def test_tensors_names_every_tensor(config, sizes):
    manager = make_manager(config, **sizes)
    seen, found, todo = set(), set(), [manager]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.add(item.untyped_storage().data_ptr())
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
        elif type(item).__module__.startswith("dsv4."):
            todo += vars(item).values()
    named = {tensor.untyped_storage().data_ptr() for tensor in manager.tensors().values()}
    assert found == named


def replace_a_block(manager):
    manager._books.requests.block_table[0, 1] = manager._books.requests.block_table[1, 0]


def lose_a_block(manager):
    manager._books.requests.block_table[0, 1] = -1


def add_a_block(manager):
    manager._books.requests.block_table[1, 2] = 5


def miscount_blocks(manager):
    manager._books.requests.num_blocks[0] = 2


def change_a_length(manager):
    manager._books.requests.lengths[1] = 100


def lengthen_a_closed_slot(manager):
    manager._books.requests.lengths[3] = 2


def close_a_slot(manager):
    manager._books.requests.is_open[2] = False


def lose_a_free_slot(manager):
    manager._books.requests._free_slots.pop()


def repeat_a_free_slot(manager):
    manager._books.requests._free_slots.append(3)


def add_an_owner(manager):
    manager._books.allocator.share(manager._books.requests.block_table[0, :1])


def lose_an_owner(manager):
    manager._books.allocator._num_owners[manager._books.requests.block_table[0, 0]] = 0


def swap_two_blocks(manager):
    manager._books.requests.block_table[0, :2] = manager._books.requests.block_table[0, 1::-1]
    manager.fork(0)
    manager._books.requests.block_table[0, :2] = manager._books.requests.block_table[0, 1::-1]


def change_the_device_table(manager):
    manager.device_memory.block_table = manager.block_table.clone()
    manager.device_memory.block_table[1, 1] += 1


@pytest.mark.parametrize(
    "corrupt, match",
    [
        (replace_a_block, "block 1 is in 0 rows of the block table but has 1 owners"),
        (lose_a_block, "row does not match its slot's number of blocks"),
        (add_a_block, "row does not match its slot's number of blocks"),
        (miscount_blocks, "number of blocks does not match its length"),
        (change_a_length, "number of blocks does not match its length"),
        (lengthen_a_closed_slot, "a slot that is not open has a length"),
        (close_a_slot, "the free slots are not those that are not open"),
        (lose_a_free_slot, "the free slots are not those that are not open"),
        (repeat_a_free_slot, "the free slots are not those that are not open"),
        (add_an_owner, "block 0 is in 1 rows of the block table but has 2 owners"),
        (lose_an_owner, "Block free list: 1 blocks are both free and owned or neither"),
        (swap_two_blocks, "block . is in more than one column"),
        (change_the_device_table, "the device's block table differs from the host's"),
    ],
)
def test_integrity_finds_corruption(corrupt, match):
    manager = grown_manager(600, 300, 3)
    manager.check_integrity()
    corrupt(manager)
    with pytest.raises(IntegrityError, match=match):
        manager.check_integrity()


def test_integrity_names_every_problem():
    manager = grown_manager(600, 300, 3)
    change_a_length(manager)
    lose_a_free_slot(manager)
    with pytest.raises(IntegrityError, match="does not match its length; the free slots are not"):
        manager.check_integrity()


def fail_on_call(monkeypatch, name, call):
    """Let a kernel raise on its `call`-th call, after it has written NaN."""
    kernel, calls = getattr(reference, name), []

    def failing(**kwargs):
        calls.append(None)
        if len(calls) == call:
            if name == "write_layer":
                window = kwargs["writes"].window
                window = window._replace(kv=torch.full_like(window.kv, torch.nan))
                kwargs["writes"] = kwargs["writes"]._replace(window=window)
            kernel(**kwargs)
            raise RuntimeError(f"{name} failed")
        return kernel(**kwargs)

    monkeypatch.setattr(reference, name, failing)


def assert_goes_on(manager, slot):
    """No forward is live, and the request continues from 7 tokens as if nothing had happened."""
    assert manager.live_plan is None and manager.lengths[slot] == 7
    other = manager.open_request()
    run_forward(manager, WEIGHTS, [Row(other, OTHER_LAYERS, 0, 11)])
    manager.check_integrity()
    for mine, expected in zip(two_forwards(manager, slot), fresh_results(), strict=True):
        assert torch.equal(mine.output, expected.output)
    manager.check_integrity()


def two_forwards(manager, slot):
    rows = [Row(slot, LAYERS, 7, 130), Row(slot, LAYERS, 130, 132)]
    return [result for row in rows for result in run_forward(manager, WEIGHTS, [row])]


@functools.cache
def fresh_results():
    manager = make_manager()
    poison(manager)
    slot = manager.open_request()
    run_forward(manager, WEIGHTS, [Row(slot, LAYERS, 0, 7)])
    return two_forwards(manager, slot)


@pytest.mark.parametrize("after", [8, 140], ids=["step", "chunk"])
@pytest.mark.parametrize(
    "name, call",
    [("write_layer", 1), ("write_layer", 4), ("select_entries", 1), ("attend", 1), ("attend", 3)],
)
def test_a_kernel_that_raises_cancels_the_forward(monkeypatch, name, call, after):
    manager = make_manager()
    slot = manager.open_request()
    run_forward(manager, WEIGHTS, [Row(slot, LAYERS, 0, 7)])
    with monkeypatch.context() as patch:
        fail_on_call(patch, name, call)
        with pytest.raises(RuntimeError, match=f"{name} failed"):
            run_forward(manager, WEIGHTS, [Row(slot, LAYERS, 7, after)])
    assert_goes_on(manager, slot)


def write_window(manager, plan, layer_idx):
    rows = slice(plan.positions_before[0], plan.positions_after[0])
    handle = manager.acquire(layer_idx, plan)
    handle.write_swa(LAYERS[layer_idx].kv[rows], WEIGHTS[layer_idx].kv_norm)


def write_nothing(manager, plan):
    pass


def write_all_but_the_last_layer(manager, plan):
    for layer_idx in (SWA, CSA, HCA):
        rows = slice(plan.positions_before[0], plan.positions_after[0])
        write_window(manager, plan, layer_idx)
        if layer_idx != SWA:
            flush(manager, plan, layer_idx, rows)


def write_windows_only(manager, plan):
    for layer_idx in range(4):
        write_window(manager, plan, layer_idx)


def flush(manager, plan, layer_idx, rows):
    inputs, weights = LAYERS[layer_idx], WEIGHTS[layer_idx]
    index = inputs.indexer
    manager.acquire(layer_idx, plan).flush_compression(
        *(part[rows] for part in inputs.compressor), weights.compressor,
        index_kv=index and index.kv[rows],
        index_gate=index and index.gate[rows],
        index_weights=weights.indexer,
    )  # fmt: skip


@pytest.mark.parametrize("write", [write_nothing, write_all_but_the_last_layer, write_windows_only])
def test_a_forward_that_leaves_something_out_is_live_until_it_is_cancelled(write):
    manager = make_manager()
    slot = manager.open_request()
    run_forward(manager, WEIGHTS, [Row(slot, LAYERS, 0, 7)])
    plan = prepare_forward(manager, [slot], [7], [140])
    write(manager, plan)
    assert not plan.is_complete and manager.live_plan is plan
    with pytest.raises(LiveForwardError, match=r"of slots \[0\] is live: .*cancel"):
        prepare_forward(manager, [slot], [140], [141])
    assert manager.live_plan is plan
    plan.cancel()
    plan.cancel()
    assert plan.is_cancelled
    assert_goes_on(manager, slot)


def test_a_request_freed_inside_its_forward_is_kept_until_that_ends():
    manager = grown_manager(300)
    plan = prepare_forward(manager, [0], [300], [600])
    manager.free_request(0)
    manager.check_integrity()
    assert manager.open_slots == [] and manager.num_free_slots == 3
    assert manager.num_free_blocks == 3
    with pytest.raises(ValueError, match="slot 0 is not open"):
        manager.truncate(0, 0)
    plan.cancel()
    assert manager.num_free_blocks == 6 and manager.num_free_slots == 4
    manager.check_integrity()
    assert manager.open_request() == 0
    finish(manager, prepare_forward(manager, [0], [0], [5]))


def test_a_failed_write_cannot_be_repeated(monkeypatch):
    manager = make_manager()
    slot = manager.open_request()
    plan = prepare_forward(manager, [slot], [0], [7])
    with monkeypatch.context() as patch:
        fail_on_call(patch, "write_layer", 1)
        with pytest.raises(RuntimeError, match="write_layer failed"):
            write_window(manager, plan, SWA)
    with pytest.raises(RuntimeError, match="Cancelled plan"):
        write_window(manager, plan, SWA)
    with pytest.raises(RuntimeError, match="Cancelled plan"):
        plan.complete()
    assert not plan.is_complete and manager.lengths[slot] == 0


def test_a_forward_run_without_handles_is_declared_complete():
    manager = grown_manager(5)
    plan = prepare_forward(manager, [0], [5], [6])
    write_window(manager, plan, SWA)
    assert not plan.is_complete
    plan.complete()
    assert plan.is_complete
    finish(manager, prepare_forward(manager, [0], [6], [7]))


def test_a_stale_forward_cannot_be_declared_complete():
    manager = grown_manager(5, 6)
    stale = prepare_forward(manager, [0], [5], [6])
    finish(manager, stale)
    finish(manager, prepare_forward(manager, [1], [6], [7]))
    with pytest.raises(RuntimeError, match="Stale plan"):
        stale.complete()
    stale.cancel()
    assert manager.lengths[:2].tolist() == [6, 7]


def test_a_complete_forward_cannot_be_cancelled():
    manager = grown_manager(5)
    plan = prepare_forward(manager, [0], [5], [6])
    finish(manager, plan)
    with pytest.raises(RuntimeError, match="Cannot cancel a complete forward"):
        plan.cancel()
    assert manager.lengths[0] == 6


def test_a_read_that_fails_after_every_write_cancels_nothing(monkeypatch):
    manager = make_manager()
    slot = manager.open_request()
    with monkeypatch.context() as patch:
        fail_on_call(patch, "attend", 4)
        with pytest.raises(RuntimeError, match="attend failed"):
            run_forward(manager, WEIGHTS, [Row(slot, LAYERS, 0, 5)])
    run_forward(manager, WEIGHTS, [Row(slot, LAYERS, 5, 6)])


def test_a_cancelled_forward_cancels_all_of_its_requests_and_no_others():
    manager = grown_manager(5, 6, 7)
    plan = prepare_forward(manager, [2, -1, 0], [7, 0, 5], [8, 1, 6])
    manager.truncate(1, 6)
    with pytest.raises(LiveForwardError):
        manager.truncate(2, 7)
    plan.cancel()
    assert manager.lengths[:3].tolist() == [5, 6, 7]
    finish(manager, prepare_forward(manager, [0, 1, 2], [5, 6, 7], [6, 7, 8]))


def test_freeing_one_request_of_a_live_forward_touches_no_other():
    manager = grown_manager(5, 6)
    plan = prepare_forward(manager, [0, 1], [5, 6], [6, 7])
    manager.free_request(0)
    slot = manager.open_request()
    assert slot not in (0, 1)
    finish(manager, plan)
    assert manager.open_slots == [1, slot] and manager.lengths[1] == 7
    finish(manager, prepare_forward(manager, [slot, 1], [0, 7], [300, 8]))
    assert manager.open_request() == 0
    manager.check_integrity()


def test_freeing_one_request_of_a_finished_forward_touches_no_other():
    manager = grown_manager(5, 6)
    manager.free_request(0)
    finish(manager, prepare_forward(manager, [1], [6], [7]))


def test_schedule_and_schemas_have_one_item_per_layer():
    manager = make_manager()
    assert [layer.ratio for layer in manager.schedule] == [0, 4, 128, 4]
    assert [schema.entries_per_block for schema in manager.schemas] == [0, 64, 2, 64]
    handle = manager.acquire(HCA, prepare_forward(manager, [], [], []))
    assert handle.schema is manager.schemas[HCA] and handle.layer is manager.schedule[HCA]
