"""`truncate`: the last tokens are forgotten as if they had never been there."""

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.errors import IntegrityError, LiveForwardError
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward

DRAFTS = 3
CONFIG = CacheConfig.tiny(drafts_per_step=DRAFTS, block_tokens=128)
WEIGHTS = model_weights(CONFIG, seed=0)
TOKENS = model_projections(CONFIG, 420, seed=10)
REJECTED = model_projections(CONFIG, 420, seed=90)


def make_manager(**sizes):
    defaults = {"max_requests": 3, "num_blocks": 8, "max_forward_tokens": 512}
    manager = KVCacheManager(CONFIG, **{**defaults, **sizes})
    poison(manager)
    return manager


def grown_manager(length, **sizes):
    manager = make_manager(**sizes)
    assert manager.open_request() == 0
    feed(manager, TOKENS, length)
    return manager


def feed(manager, layers, after, *, slot=0):
    return run_forward(manager, WEIGHTS, [Row(slot, layers, int(manager.lengths[slot]), after)])


def outputs_of(manager, steps, *, slot=0):
    """All that attention gives for a request that goes on in these steps."""
    return [
        part
        for after in steps
        for result in feed(manager, TOKENS, after, slot=slot)
        for part in result
    ]


def assert_goes_on_as_if_never_longer(manager, length, *, slot=0):
    """The request continues from `length` as one that never had more tokens."""
    assert manager.lengths[slot] == length
    manager.check_integrity()
    fresh = grown_manager(length)
    steps = [length + 1, length + 1 + DRAFTS + 1, length + 140]
    mine, expected = outputs_of(manager, steps, slot=slot), outputs_of(fresh, steps)
    for got, want in zip(mine, expected, strict=True):
        assert torch.equal(got, want)
    manager.check_integrity()


# Before, at and after closings of CSA windows, HCA windows and blocks, and wraps of the rings.
LENGTHS = (3, 4, 5, 7, 8, 11, 126, 127, 128, 129, 130, 131, 132, 135, 254, 255, 256, 257, 259)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_rejected", [1, 2, 3, 4])
def test_rejected_drafts_leave_no_trace(length, num_rejected):
    manager = grown_manager(length)
    feed(manager, REJECTED, length + num_rejected)
    manager.truncate(0, length)
    assert_goes_on_as_if_never_longer(manager, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_last_tokens_of_a_chunk_can_be_forgotten(length):
    manager = make_manager()
    manager.open_request()
    mixed = [
        type(mine)(*(join(a, b, length) for a, b in zip(mine, other, strict=True)))
        for mine, other in zip(TOKENS, REJECTED, strict=True)
    ]
    feed(manager, mixed, length + DRAFTS + 1)
    manager.truncate(0, length)
    assert_goes_on_as_if_never_longer(manager, length)


def join(kept, dropped, length):
    if kept is None:
        return None
    if isinstance(kept, tuple):
        return type(kept)(*(join(a, b, length) for a, b in zip(kept, dropped, strict=True)))
    return torch.cat((kept[:length], dropped[length:]))


@pytest.mark.parametrize("length", [4, 127, 129, 256])
def test_two_truncates_in_a_row(length):
    manager = grown_manager(length)
    feed(manager, REJECTED, length + DRAFTS)
    manager.truncate(0, length + 1)
    manager.truncate(0, length)
    assert_goes_on_as_if_never_longer(manager, length)


@pytest.mark.parametrize("length", [4, 125, 126, 127, 129, 254, 256])
def test_verify_steps_one_after_the_other(length):
    manager = grown_manager(length)
    for _ in range(5):
        now = int(manager.lengths[0])
        feed(manager, REJECTED, now + DRAFTS + 1)
        manager.truncate(0, now)
        feed(manager, TOKENS, now + 1)
    assert_goes_on_as_if_never_longer(manager, length + 5)


def test_a_truncate_does_not_lower_the_floor():
    manager = grown_manager(130)
    assert manager.rollback_floor[0] == 126
    manager.truncate(0, 128)
    assert manager.rollback_floor[0] == 126
    feed(manager, TOKENS, 129)
    assert manager.rollback_floor[0] == 126
    feed(manager, TOKENS, 131)
    assert manager.rollback_floor[0] == 127


@pytest.mark.parametrize("length", [1, 125])
def test_below_the_floor_is_refused_with_the_nearest_lengths(length):
    manager = grown_manager(130)
    before = state_of(manager)
    match = (
        f"Invalid length: slot 0 can have 0 or 126 to 130, got {length}: .* nearest possible "
        "lengths are 0 and 126"
    )
    with pytest.raises(ValueError, match=match):
        manager.truncate(0, length)
    assert state_of(manager) == before
    manager.truncate(0, 126)
    assert_goes_on_as_if_never_longer(manager, 126)


@pytest.mark.parametrize("length", [-1, 131])
def test_a_length_that_is_not_there_is_refused(length):
    manager = grown_manager(130)
    before = state_of(manager)
    match = rf"expected an integer from 0 to 130 \(the length of slot 0\), got {length}"
    with pytest.raises(ValueError, match=match):
        manager.truncate(0, length)
    with pytest.raises(TypeError, match=r"expected an integer, got 128\.0"):
        manager.truncate(0, 128.0)
    with pytest.raises(ValueError, match="slot 1 is not open"):
        manager.truncate(1, 0)
    assert state_of(manager) == before


def state_of(manager):
    return (
        manager.lengths.tolist(), manager.rollback_floor.tolist(), manager.num_free_blocks,
        manager._books.requests.block_table.tolist(),
    )  # fmt: skip


def test_to_nothing_at_any_time():
    manager = grown_manager(300)
    manager.truncate(0, 0)
    assert manager._books.allocator.num_free == 8 and manager.rollback_floor[0] == 0
    assert_goes_on_as_if_never_longer(manager, 0)


def test_blocks_beyond_the_length_are_given_back():
    manager = grown_manager(259)
    feed(manager, REJECTED, 260)
    assert manager._books.requests.num_blocks[0] == 3
    manager.truncate(0, 259)
    assert manager._books.requests.num_blocks[0] == 2 and manager._books.allocator.num_free == 6
    manager.check_integrity()
    other = manager.open_request()
    feed(manager, REJECTED, 300, slot=other)
    assert_goes_on_as_if_never_longer(manager, 259)


def test_no_token_to_forget_leaves_the_plan():
    manager = grown_manager(130)
    plan = prepare_forward(manager, [0], [130], [130])
    manager.truncate(0, 130)
    assert not plan.is_retired
    manager.truncate(0, 129)
    with pytest.raises(RuntimeError, match=r"Stale plan: .* freed, truncated or committed"):
        manager.acquire(0, plan)


def test_a_plan_of_others_goes_on():
    manager = grown_manager(130)
    other = manager.open_request()
    plan = prepare_forward(manager, [other], [0], [3])
    manager.truncate(0, 128)
    assert manager.acquire(0, plan).plan is plan


@pytest.mark.parametrize("length", [0, 130, 132])
def test_a_request_in_a_live_forward_is_not_truncated(length):
    manager = grown_manager(130)
    plan = prepare_forward(manager, [0], [130], [132])
    with pytest.raises(LiveForwardError, match="is live"):
        manager.truncate(0, length)
    assert manager.live_plan is plan
    plan.cancel()
    assert_goes_on_as_if_never_longer(manager, 130)


def test_drafts_of_zero_allow_one_token():
    config = CacheConfig.tiny()
    manager = KVCacheManager(config, max_requests=1, num_blocks=1)
    slot = manager.open_request()
    prepare_forward(manager, [slot], [0], [9]).complete()
    with pytest.raises(ValueError, match="can have 0 or 8 to 9"):
        manager.truncate(slot, 7)


def test_integrity_knows_the_floor():
    manager = grown_manager(130)
    manager._books.requests.rollback_floor[0] = 131
    with pytest.raises(IntegrityError, match="rollback floor does not lie between 0"):
        manager.check_integrity()


def test_a_ring_of_one_row_less_would_be_found():
    """The rows that a rollback needs are the oldest of the ring: losing one shows."""
    manager = grown_manager(256)
    feed(manager, REJECTED, 256 + DRAFTS + 1)
    manager.truncate(0, 256)
    oldest = (256 - CONFIG.sliding_window + 1) % (CONFIG.sliding_window + DRAFTS)
    manager.state.layer(0).ring.data[0, oldest] = 0xFF
    got, want = feed(manager, TOKENS, 257)[0], feed(grown_manager(256), TOKENS, 257)[0]
    assert not torch.equal(got.output, want.output)


def test_a_cancelled_plan_does_not_depend_on_the_callers_arrays():
    manager = grown_manager(130)
    slots, before, after = np.array([0]), np.array([130]), np.array([132])
    plan = prepare_forward(manager, slots, before, after)
    for array in (slots, before, after):
        array[:] = 1
    plan.cancel()
    assert_goes_on_as_if_never_longer(manager, 130)
