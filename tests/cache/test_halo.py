"""Known blocks without a checkpoint: a replay brings the fixed state back."""

import numpy as np
import pytest
import torch
from decoder import Decoder

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager
from tests.marks import needs_interpreter

NO_CHECKPOINTS = CheckpointPolicy(at_prompt_end=False, at_forks=False)
RATIOS = (4, 128, 0, 4, 0, 128, 4, 0)
BLOCK = 128
KNOWN, LENGTH = 4 * BLOCK, 4 * BLOCK + 40


def model_of(num_layers, sliding_window=4):
    return Decoder(
        RATIOS[:num_layers], block_tokens=BLOCK, index_topk=256, sliding_window=sliding_window
    )


def new_manager(config, **sizes):
    sizes = {
        "max_requests": 3, "num_blocks": 12, "num_checkpoints": 2, "backend": "reference",
        "checkpoint_policy": NO_CHECKPOINTS, **sizes,
    }  # fmt: skip
    return KVCacheManager(config, **sizes)


def run(model, manager, slot, ids, ends):
    """Run a request to several lengths; returns the logits from `KNOWN` on."""
    logits = []
    for end in ends:
        before = int(manager.lengths[slot])
        plan = manager.prepare_forward([slot], [before], [end])
        logits.append(model(torch.tensor(ids[before:end]).to(manager.device), manager, plan))
    return torch.cat(logits)[-(LENGTH - KNOWN) :]


def published(model, ids, **sizes):
    """A manager that knows the blocks of a prompt, and has no checkpoint."""
    manager = new_manager(model.config, **sizes)
    slot = manager.resume_request(ids).slot
    run(model, manager, slot, ids, [len(ids)])
    manager.free_request(slot)
    return manager


@pytest.fixture(scope="module", params=range(1, len(RATIOS) + 1))
def case(request):
    """A model, a prompt, its logits, their scale, and how far other chunks move them."""
    model = model_of(request.param)
    ids = np.random.default_rng(request.param).integers(0, 128, LENGTH)
    cold = []
    for ends in ([LENGTH], [77, 300, LENGTH]):
        manager = new_manager(model.config)
        cold.append(run(model, manager, manager.open_request(), ids, ends))
    scale = float(cold[0].abs().max())
    return model, ids, cold[0], scale, float((cold[1] - cold[0]).abs().max())


def resumed(model, manager, ids):
    """Resume at a halo whose ring and tails hold garbage."""
    hit = manager.resume_request(ids)
    assert (hit.num_tokens, hit.num_replayed) == (
        KNOWN - model.config.halo_tokens, model.config.halo_tokens,
    )  # fmt: skip
    manager.state.storage[hit.slot] = 0x4F  # 3e9 as fp32: a row that is read shows
    return hit.slot


@pytest.mark.parametrize("ends", [[LENGTH], [KNOWN, LENGTH], [KNOWN - 1, KNOWN + 3, LENGTH]])
def test_a_replay_gives_the_logits_of_a_cold_run(case, ends):
    model, ids, expected, scale, chunking = case
    manager = published(model, ids)
    blocks = manager.paged.storage.clone()
    slot = resumed(model, manager, ids)
    assert manager.rollback_floor[slot] == KNOWN
    found = run(model, manager, slot, ids, ends)
    assert (found - expected).abs().max() <= max(2 * chunking, 4e-6 * scale)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    known = manager.blocks_of(slot)[: KNOWN // BLOCK]
    assert torch.equal(manager.paged.storage[known], blocks[known])
    manager.check_integrity()


def test_a_window_less_is_too_few(case, monkeypatch):
    model, ids, expected, scale, _ = case
    if model.config.num_layers == 1:
        pytest.skip("one layer has a window alone")
    manager = published(model, ids)
    # An error fades from layer to layer: to show in a deep model it must begin in a later one.
    num_windows = max(1, model.config.num_layers - 4)
    fewer = model.config.halo_tokens - num_windows * model.config.sliding_window
    monkeypatch.setattr(CacheConfig, "halo_tokens", fewer)
    slot = resumed(model, manager, ids)
    found = run(model, manager, slot, ids, [LENGTH])
    assert not (found - expected).abs().max() <= 1e-4 * scale


def test_entries_written_on_the_way_are_wrong(case):
    model, ids, expected, scale, _ = case
    if model.config.num_layers == 1:
        pytest.skip("the first layer's entries follow from its tokens alone")
    manager = published(model, ids)
    slot = resumed(model, manager, ids)
    start = int(manager.lengths[slot])
    plan = manager.prepare_forward([slot], [start], [KNOWN])
    plan.tokens.num_read_only.zero_()
    model(torch.tensor(ids[start:KNOWN]), manager, plan)
    found = run(model, manager, slot, ids, [LENGTH])
    assert not (found - expected).abs().max() <= 1e-4 * scale


@pytest.fixture(scope="module")
def small():
    """A model of three layers, a prompt and its logits."""
    model, ids = model_of(3), np.random.default_rng(0).integers(0, 128, LENGTH)
    manager = new_manager(model.config)
    return model, ids, run(model, manager, manager.open_request(), ids, [LENGTH])


def assert_close(found, expected):
    assert (found - expected).abs().max() <= 4e-6 * expected.abs().max()


@pytest.mark.parametrize("undo_slots", [0, 1])
def test_a_cancelled_replay_starts_again(small, undo_slots):
    model, ids, expected = small
    manager = published(model, ids, undo_slots=undo_slots)
    slot = resumed(model, manager, ids)
    start = int(manager.lengths[slot])
    middle = KNOWN - 3
    run(model, manager, slot, ids, [middle])
    plan = manager.prepare_forward([slot], [middle], [LENGTH])
    assert plan.surviving_lengths.tolist() == [middle if undo_slots else start]
    with pytest.raises(KeyError), plan:
        model.attention[0](torch.randn(LENGTH - middle, 64), manager.acquire(0, plan))
        raise KeyError
    manager.check_integrity()
    assert manager.lengths[slot] == (middle if undo_slots else start)
    assert manager.rollback_floor[slot] == KNOWN
    assert_close(run(model, manager, slot, ids, [LENGTH]), expected)


def test_a_cancelled_replay_goes_back_to_a_checkpoint_at_its_start(small, monkeypatch):
    model, ids, expected = small
    monkeypatch.setattr(CacheConfig, "halo_tokens", BLOCK)
    manager = new_manager(model.config)
    slot = manager.resume_request(ids, checkpoint_at=(KNOWN - BLOCK,)).slot
    run(model, manager, slot, ids, [LENGTH])
    manager.free_request(slot)
    slot = resumed(model, manager, ids)
    manager.prepare_forward([slot], [KNOWN - BLOCK], [LENGTH]).cancel()
    manager.check_integrity()
    assert_close(run(model, manager, slot, ids, [LENGTH]), expected)


def test_a_request_is_forked_and_swapped_inside_a_replay(small):
    model, ids, expected = small
    manager = published(model, ids, host_blocks=6, host_slots=1)
    slot = resumed(model, manager, ids)
    run(model, manager, slot, ids, [KNOWN - 5])
    assert manager.blocks_to_fork(slot) == 0
    fork = manager.fork(slot)
    swapped = manager.swap_out(slot)
    manager.check_integrity()
    assert_close(run(model, manager, fork, ids, [LENGTH]), expected)
    manager.free_request(fork)
    slot = manager.swap_in(swapped)
    manager.check_integrity()
    assert manager.lengths[slot] == KNOWN - 5
    assert_close(run(model, manager, slot, ids, [KNOWN, LENGTH]), expected)


def test_inside_a_replay_a_request_is_not_cut_or_saved(small, tmp_path):
    model, ids, expected = small
    manager = published(model, ids)
    slot = resumed(model, manager, ids)
    run(model, manager, slot, ids, [KNOWN - 5])
    with pytest.raises(ValueError, match=rf"slot {slot} can have 0 or {KNOWN} to {KNOWN - 5}"):
        manager.truncate(slot, KNOWN - 6)
    with pytest.raises(ValueError, match=f"has replayed its {KNOWN} known tokens, got one at"):
        manager.save_request(slot, tmp_path / "request")
    manager.truncate(slot, KNOWN - 5)  # its length
    manager.truncate(slot, 0)
    manager.check_integrity()
    assert manager.blocks_of(slot).size == 0
    assert_close(run(model, manager, slot, ids, [LENGTH]), expected)


def test_only_the_end_of_a_replay_is_checkpointed():
    model, ids = model_of(3, sliding_window=60), np.random.default_rng(1).integers(0, 128, LENGTH)
    assert model.config.halo_tokens > BLOCK
    manager = published(model, ids)
    manager._books.prefix.policy = CheckpointPolicy(every_blocks=1, at_prompt_end=False)
    run(model, manager, resumed(model, manager, ids), ids, [KNOWN - BLOCK, KNOWN - 5, LENGTH])
    assert manager.stats().num_prefix_checkpoints == 1
    hit = manager.resume_request(ids)
    assert (hit.num_tokens, hit.num_replayed) == (KNOWN, 0)
    cold = new_manager(model.config)
    expected = run(model, cold, cold.open_request(), ids, [LENGTH])
    assert_close(run(model, manager, hit.slot, ids, [LENGTH]), expected)


def test_blocks_behind_a_checkpoint_are_replayed(small):
    model, ids, _ = small
    manager = new_manager(model.config, checkpoint_policy=CheckpointPolicy())
    for length in (3 * BLOCK, LENGTH):
        slot = manager.resume_request(ids[:length]).slot
        run(model, manager, slot, ids, [length])
        manager.free_request(slot)
        manager._books.prefix.policy = NO_CHECKPOINTS
    hit = manager.resume_request(ids)
    assert (hit.num_tokens, hit.num_replayed) == (KNOWN - model.config.halo_tokens, 10)
    manager.free_request(hit.slot)
    assert manager.match_prefix(ids) == (hit.num_tokens, hit.num_replayed, 0, 4)


@pytest.mark.parametrize(
    ("ratios", "block_tokens", "device"),
    [
        pytest.param((4, 0), 8, "cpu", marks=needs_interpreter),
        pytest.param((4, 128), 128, "cpu", marks=[needs_interpreter, pytest.mark.interpreted]),
        pytest.param((4, 128), 128, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_kernels_write_no_entry_of_a_replay(ratios, block_tokens, device):
    model = Decoder(ratios, block_tokens=block_tokens, sliding_window=4)
    model.hf.to(device)
    known = 2 * block_tokens
    ids = np.random.default_rng(2).integers(0, 128, known + 9)
    manager = published(model, ids, backend="triton", device=device)
    blocks = manager.paged.storage.clone()
    slot = manager.resume_request(ids).slot
    assert manager.lengths[slot] == known - model.config.halo_tokens
    manager.state.storage[slot] = 0x4F
    found = run(model, manager, slot, ids, [known - 5, known - 4, known + 2, len(ids)])[-6:]
    cold = new_manager(model.config, backend="triton", device=device)
    expected = run(model, cold, cold.open_request(), ids, [len(ids)])[-6:]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    ids_of_blocks = manager.blocks_of(slot)[:2]
    assert torch.equal(manager.paged.storage[ids_of_blocks], blocks[ids_of_blocks])


def test_a_long_prompt_is_resumed_for_a_halo():
    assert CacheConfig.v4_flash().halo_tokens == 5462
    config = CacheConfig.tiny(compress_ratios=(0, 4), num_query_heads=1, max_position=1 << 17)
    ids = np.random.default_rng(0).integers(0, 1 << 17, 100_000)
    manager = new_manager(config, num_blocks=400, max_forward_tokens=len(ids))
    slot = manager.resume_request(ids).slot
    manager.prepare_forward([slot], [0], [len(ids)]).complete()
    manager.free_request(slot)
    hit = manager.resume_request(ids)
    known = len(ids) // config.block_tokens * config.block_tokens
    assert (hit.num_tokens, hit.num_replayed) == (known - 255, 255)
    assert manager.stats().num_prefix_checkpoints == 0
