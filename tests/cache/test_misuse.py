"""Misuse that would read or store the wrong rows in silence is refused instead."""

import numpy as np
import pytest
import torch

from dsv4 import (
    BlockAllocator,
    CacheConfig,
    IntegrityError,
    KVCacheManager,
    LiveForwardError,
    prepare_forward,
)
from dsv4.kernels import reference
from dsv4.rope import build_rope_table
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward, take_rows

CONFIG = CacheConfig.tiny()
WEIGHTS = model_weights(CONFIG, seed=0)
SEQUENCE = model_projections(CONFIG, 40, seed=1)
SWA, CSA, HCA = 0, 1, 2


@pytest.fixture
def manager():
    manager = KVCacheManager(CONFIG, max_requests=4, num_blocks=8, max_forward_tokens=512)
    poison(manager)
    return manager


def forward(manager, slot, before=0, after=8):
    return run_forward(manager, WEIGHTS, [Row(slot, SEQUENCE, before, after)])


READS = {
    "request_slots": lambda handle: handle.request_slots,
    "positions": lambda handle: handle.positions,
    "block_table": lambda handle: handle.block_table,
    "block_lens": lambda handle: handle.block_lens,
    "tail_len": lambda handle: handle.tail_len,
    "gather_all": lambda handle: handle.gather_all_compressed_kv(),
    "gather": lambda handle: handle.gather_compressed_kv(torch.zeros(1, 1, dtype=torch.int64)),
    "swa_view": lambda handle: handle.read_swa_view(),
    "classical_view": lambda handle: handle.read_classical_view(),
    "indexer_view": lambda handle: handle.read_indexer_view(),
}


@pytest.mark.parametrize("read", READS)
def test_a_handle_of_an_older_plan_reads_nothing(manager, read):
    slot, other = manager.open_request(), manager.open_request()
    plan = prepare_forward(manager, [slot], [0], [8])
    handles = [manager.acquire(idx, plan) for idx in range(CONFIG.num_layers)]
    for idx, handle in enumerate(handles):
        handle.forward(take_rows(SEQUENCE[idx], slice(0, 8)), WEIGHTS[idx])
    READS[read](handles[CSA])
    forward(manager, other)
    with pytest.raises(RuntimeError, match="Stale plan"):
        READS[read](handles[CSA])


@pytest.mark.parametrize("read", ["gather_all", "gather"])
def test_entries_are_not_read_before_they_are_written(manager, read):
    plan = prepare_forward(manager, [manager.open_request()], [0], [8])
    with pytest.raises(RuntimeError, match="call flush_compression first"):
        READS[read](manager.acquire(CSA, plan))


def written_csa(manager):
    plan = prepare_forward(manager, [manager.open_request()], [0], [8])
    handle, inputs = manager.acquire(CSA, plan), take_rows(SEQUENCE[CSA], slice(0, 8))
    handle.forward(inputs, WEIGHTS[CSA])
    return handle, inputs, handle.select_entries(inputs.indexer.query, inputs.indexer.head_weights)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda rows: rows[:3], ValueError, r"selection.rows: expected \[8, 8\], got \[3, 8\]"),
        (lambda rows: rows.repeat(1, 2), ValueError, r"expected \[8, 8\], got \[8, 16\]"),
        (lambda rows: rows.float(), TypeError, "selection.rows: expected int64, got torch.float32"),
        (lambda rows: rows.to("meta"), ValueError, "Invalid device of selection.rows"),
    ],
    ids=["short", "wide", "float", "device"],
)
def test_a_selection_of_another_shape_is_refused(manager, change, error, message):
    handle, inputs, selection = written_csa(manager)
    changed = selection._replace(rows=change(selection.rows))
    with pytest.raises(error, match=message):
        handle.attend(inputs.query, WEIGHTS[CSA].sinks, changed)


def test_any_negative_row_is_missing(manager):
    handle, _, _ = written_csa(manager)
    gathered = handle.gather_compressed_kv(torch.tensor([[-1, -5, 0]]))
    assert gathered.is_present.tolist() == [[False, False, True]]
    assert (gathered.values[0, :2] == 0).all() and gathered.values.isfinite().all()
    with pytest.raises(TypeError, match=r"rows: expected int64 or int32, got torch\.float32"):
        handle.gather_compressed_kv(torch.tensor([[0.7]]))


def test_a_failed_write_leaves_no_layer_reading(manager, monkeypatch):
    plan = prepare_forward(manager, [manager.open_request()], [0], [8])
    first, second = manager.acquire(SWA, plan), manager.acquire(CSA, plan)
    first.write_swa(SEQUENCE[SWA].kv[:8], WEIGHTS[SWA].kv_norm)
    write = reference.write_layer

    def fail(*args, **kwargs):
        write(*args, **kwargs)
        raise MemoryError

    monkeypatch.setattr(reference, "write_layer", fail)
    with pytest.raises(MemoryError):
        second.write_swa(SEQUENCE[CSA].kv[:8], WEIGHTS[CSA].kv_norm)
    with pytest.raises(RuntimeError, match="Cancelled plan"):
        first.gather_swa_kv()


@pytest.mark.parametrize(
    ("layer_idx", "change", "error"),
    [
        (CSA, lambda p: p._replace(query=p.query.half()), TypeError),
        (CSA, lambda p: p._replace(indexer=p.indexer._replace(query=p.query)), ValueError),
        (HCA, lambda p: p._replace(compressor=None), ValueError),
        (SWA, lambda p: p._replace(compressor=(p.kv, p.kv)), ValueError),
        (CSA, lambda p: p._replace(indexer=None), ValueError),
    ],
    ids=["query", "index_query", "no_compressor", "swa_compressor", "no_index"],
)
def test_forward_writes_nothing_before_all_inputs_are_checked(manager, layer_idx, change, error):
    plan = prepare_forward(manager, [manager.open_request()], [0], [8])
    inputs = take_rows(SEQUENCE[layer_idx], slice(0, 8))
    before = [manager.state.storage.clone(), manager.paged.storage.clone()]
    with pytest.raises(error, match="Invalid"):
        manager.acquire(layer_idx, plan).forward(change(inputs), WEIGHTS[layer_idx])
    assert torch.equal(before[0], manager.state.storage)
    assert torch.equal(before[1], manager.paged.storage)
    manager.acquire(layer_idx, plan).forward(inputs, WEIGHTS[layer_idx])


def test_an_input_that_is_no_tensor(manager):
    plan = prepare_forward(manager, [manager.open_request()], [0], [8])
    with pytest.raises(TypeError, match="Invalid kv: expected a tensor, got NoneType"):
        manager.acquire(SWA, plan).write_swa(None, WEIGHTS[SWA].kv_norm)


def test_a_second_plan_of_a_live_forward_says_what_to_do(manager):
    slot = manager.open_request()
    prepare_forward(manager, [slot], [0], [8])
    with pytest.raises(LiveForwardError, match=r"run all of its layers, .* or plan.cancel\(\)"):
        prepare_forward(manager, [slot], [0], [8])


def test_a_row_without_tokens_is_not_written(manager):
    slot, other = manager.open_request(), manager.open_request()
    plan = prepare_forward(manager, [slot, other], [0, 0], [0, 8])
    for each in (slot, other):
        with pytest.raises(LiveForwardError):
            manager.fork(each)
    manager.free_request(slot)  # its row reads nothing, but is named
    assert manager.live_plan is plan
    plan.cancel()
    assert manager.lengths[other] == 0
    slot = manager.open_request()
    prepare_forward(manager, [slot], [0], [0])
    forward(manager, slot)


def test_unsigned_slots_do_not_wrap_into_padding(manager):
    huge = np.array([2**64 - 1], dtype=np.uint64)
    with pytest.raises(
        ValueError, match="expected 64-bit signed integers, got 18446744073709551615"
    ):
        prepare_forward(manager, huge, [0], [8])


CORRUPTIONS = {
    "block id too large": lambda m: m._books.requests.block_table.__setitem__((0, 0), 99),
    "negative length": lambda m: m._books.requests.lengths.__setitem__(1, -1),
    "closing while closed": lambda m: m._books.requests.is_closing.__setitem__(3, True),
    "another type": lambda m: setattr(m._books.requests, "is_open", np.zeros(4)),
    "a slot that is no int": lambda m: m._books.requests._free_slots.__setitem__(0, np.int64(3)),
    "free list names no block": lambda m: m._books.allocator._free.__setitem__(0, 9),
    "free list negative": lambda m: m._books.allocator._free.__setitem__(0, -1),
    "negative owners": lambda m: m._books.allocator._num_owners.__setitem__(7, -1),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_integrity(manager, corruption):
    forward(manager, manager.open_request())
    manager.check_integrity()
    CORRUPTIONS[corruption](manager)
    with pytest.raises(IntegrityError):
        manager.check_integrity()


def test_release_takes_whole_ids_only():
    allocator = BlockAllocator(4)
    allocator.acquire(2)
    with pytest.raises(ValueError, match="expected 0 to 3, got 4294967296"):
        allocator.release(np.array([2**32]))
    with pytest.raises(TypeError, match="expected integers, got float64"):
        allocator.release(np.array([1.7]))
    assert allocator.num_free == 2


def test_reset_slot_refuses_the_padding_slot(manager):
    with pytest.raises(ValueError, match="from 0 to 3, got -1"):
        manager.state.reset_slot(-1)


def test_an_unknown_rope_base():
    with pytest.raises(ValueError, match="expected 'main' or 'compress', got 'mian'"):
        build_rope_table(CONFIG, "mian", num_positions=4, device=torch.device("cpu"))


def test_derived_lengths(manager):
    slot = manager.open_request()
    forward(manager, slot, 0, 30)
    plan = prepare_forward(manager, [-1, slot], [0, 30], [1, 31])
    handle = manager.acquire(CSA, plan)
    assert handle.tail_len.tolist() == [0, 3]
    assert handle.swa_head.tolist() == [0, 31]
    assert handle.swa_pos[1, :32].tolist() == [*range(31), -1]
    assert manager.acquire(SWA, plan).tail_len.tolist() == [0, 0]
