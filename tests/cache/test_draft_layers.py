"""Draft (MTP) layers in a manager of their own: one token a forward, several forwards a step."""

from dataclasses import replace

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.testing import (
    Row,
    forward_inputs,
    model_projections,
    model_weights,
    poison,
    run_forward,
)
from tests.cache.live import assert_same, live_bytes

DRAFTS = 3
WITH_MTP = CacheConfig.tiny(
    num_query_heads=1, head_dim=80, rope_dim=16, sliding_window=8, block_tokens=128,
    drafts_per_step=DRAFTS, include_mtp=True,
)  # fmt: skip
PROMPTS = (1, 7, 125)  # before wraps of the ring, windows that close, and a full block
ACCEPTED = ((3, 0, 1), (0, 3, 2), (2, 2, 0), (3, 3, 3))  # drafts that were right, step by step
MAX_TOKENS = 150


class DraftLayers:
    """The draft layers of three requests, and the projections of their right and wrong tokens."""

    def __init__(self, ratios):
        self.config = replace(WITH_MTP, compress_ratios=ratios, num_mtp_layers=len(ratios))
        self.weights = model_weights(self.config, seed=0)
        self.right, self.wrong = (
            [model_projections(self.config, MAX_TOKENS, seed=seed + 100 * i) for i in range(3)]
            for seed in (1000, 2000)
        )

    def new_manager(self):
        manager = KVCacheManager(self.config, max_requests=3, num_blocks=6)
        poison(manager)
        assert manager.open_requests(3) == [0, 1, 2]
        return manager

    def rows(self, manager, layers, after):
        before = manager.lengths.tolist()
        return [Row(slot, layers[slot], before[slot], after[slot]) for slot in range(3)]

    def run(self, manager, layers, after):
        return run_forward(manager, self.weights, self.rows(manager, layers, after))

    def propose(self, manager, num_right):
        """Run DRAFTS forwards of one token each; the first ones of a request are right."""
        for nth in range(DRAFTS):
            before = manager.lengths.tolist()
            layers = [
                self.right[slot] if nth < num_right[slot] else self.wrong[slot] for slot in range(3)
            ]
            self.run(manager, layers, [length + 1 for length in before])

    def assert_equal(self, manager, other):
        """Both have the same lengths and bytes."""
        assert manager.lengths.tolist() == other.lengths.tolist()
        manager.check_integrity()
        for slot in range(3):
            assert_same(live_bytes(manager, slot), live_bytes(other, slot))

    def assert_same_outputs(self, manager, other):
        """Both give the same output for the next token, which they then have."""
        after = [length + 1 for length in manager.lengths.tolist()]
        mine, expected = (self.run(each, self.right, after) for each in (manager, other))
        for got, want in zip(mine, expected, strict=True):
            assert torch.equal(got.output, want.output) and torch.equal(got.lse, want.lse)


@pytest.fixture(scope="module", params=[(0,), (4, 0), (128, 4)], ids=str)
def layers(request):
    return DraftLayers(request.param)


def test_the_config_of_draft_layers_is_cut_out_of_the_models():
    num_mtp = WITH_MTP.num_mtp_layers
    config = replace(WITH_MTP, compress_ratios=WITH_MTP.compress_ratios[-num_mtp:])
    assert [layer.is_mtp for layer in config.schedule] == [True] * num_mtp
    manager = KVCacheManager(config, max_requests=1, num_blocks=0)  # window layers have no blocks
    plan = prepare_forward(manager, [manager.open_request()], [0], [300])
    plan.complete()
    assert manager.lengths.tolist() == [300] and plan.num_new_blocks == 0


def test_rejected_drafts_leave_no_trace(layers):
    """Accepted tokens were written one a forward, others were forgotten in one batch."""
    manager, never = layers.new_manager(), layers.new_manager()
    for each in (manager, never):
        layers.run(each, layers.right, PROMPTS)
    for accepted in ACCEPTED:
        before = manager.lengths
        layers.propose(manager, accepted)
        kept = before + accepted
        manager.truncate([0, 1, 2], kept)
        layers.run(never, layers.right, kept)
        layers.assert_equal(manager, never)
        layers.assert_same_outputs(manager, never)


def test_drafts_can_all_be_run_again(layers):
    """Rows of a draft layer's own guesses are replaced by those of the verified tokens."""
    manager, never = layers.new_manager(), layers.new_manager()
    for each in (manager, never):
        layers.run(each, layers.right, PROMPTS)
    for accepted in ACCEPTED:
        before = manager.lengths
        layers.propose(manager, (0, 0, 0))
        manager.truncate([0, 1, 2], before)
        for each in (manager, never):
            layers.run(each, layers.right, before + accepted + 1)
        layers.assert_equal(manager, never)
    layers.assert_same_outputs(manager, never)


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_a_draft_forward_cancelled_in_the_middle(layers, num_layers):
    """The forwards before it stay, until they are truncated."""
    num_layers = min(num_layers, layers.config.num_layers)
    manager, never = layers.new_manager(), layers.new_manager()
    for each in (manager, never):
        layers.run(each, layers.right, PROMPTS)
    drafted = [length + 1 for length in PROMPTS]
    layers.run(manager, layers.wrong, drafted)
    rows = layers.rows(manager, layers.wrong, [length + 1 for length in drafted])
    plan = prepare_forward(manager, [0, 1, 2], drafted, [row.after for row in rows])
    for idx in range(num_layers):
        manager.acquire(idx, plan).write(forward_inputs(rows, idx), layers.weights[idx])
    if plan.is_complete:
        manager.truncate([0, 1, 2], drafted)
    else:
        plan.cancel()
    assert manager.lengths.tolist() == drafted
    manager.truncate([0, 1, 2], PROMPTS)
    layers.assert_equal(manager, never)
    layers.assert_same_outputs(manager, never)


def test_the_models_layers_and_the_draft_layers_have_plans_of_their_own(layers):
    """A live plan of one manager neither blocks nor changes the other's requests."""
    config = replace(WITH_MTP, compress_ratios=(0, 4), num_mtp_layers=0)
    main = KVCacheManager(config, max_requests=3, num_blocks=6)
    drafts = layers.new_manager()
    slots = main.open_requests(3)
    assert slots == drafts.open_slots
    verified = prepare_forward(main, slots, [0] * 3, PROMPTS)
    layers.run(drafts, layers.right, PROMPTS)
    layers.propose(drafts, (0, 0, 0))
    assert verified.is_live and drafts.live_plan is None
    verified.complete()
    drafts.truncate(slots, PROMPTS)
    assert drafts.lengths.tolist() == main.lengths.tolist() == list(PROMPTS)
