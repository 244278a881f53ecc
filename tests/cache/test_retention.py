"""Where checkpoints are taken, and what the prefix cache keeps."""

import numpy as np
import pytest

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager
from dsv4.cache.prefix.retention import WITHOUT_USES, PrefixNode, Retention
from dsv4.testing import Row, model_projections, model_weights, run_forward

CONFIG = CacheConfig.tiny(
    compress_ratios=(0, 4), block_tokens=8, sliding_window=8, index_topk=4, num_query_heads=1,
    drafts_per_step=0,
)  # fmt: skip
WEIGHTS, TOKENS = model_weights(CONFIG, seed=0), model_projections(CONFIG, 400, seed=1)
NO_HALO = 1 << 20
ONLY_ENDS = CheckpointPolicy(every_blocks=0, at_branches=False)


@pytest.fixture(autouse=True)
def no_halo(monkeypatch):
    """Leave replays to their own tests: a hit is a checkpoint's."""
    monkeypatch.setattr(CacheConfig, "halo_tokens", NO_HALO)


def make_manager(**sizes):
    sizes = {"num_blocks": 200, "num_checkpoints": 50, **sizes}
    return KVCacheManager(CONFIG, max_requests=4, max_request_tokens=400, **sizes)


def ask(manager, ids, **choices):
    """Run a prompt and free it; returns the tokens that were found."""
    hit = manager.resume_request(ids, **choices)
    run_forward(manager, WEIGHTS, [Row(hit.slot, TOKENS, hit.num_tokens, len(ids))])
    manager.free_request(hit.slot)
    manager.check_integrity()
    return hit.num_tokens


def text(seed, num_blocks):
    """Ids of whole blocks."""
    return np.random.default_rng(seed).integers(0, 1000, num_blocks * 8).tolist()


def test_prompts_that_part_are_found_from_the_third_on():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=0))
    shared = text(0, 4)[:30]
    found = [ask(manager, [*shared, *text(seed, 2)]) for seed in range(1, 6)]
    assert found == [0, 0, 24, 24, 24]


def test_a_prompt_that_goes_on_is_no_branch():
    manager = make_manager(checkpoint_policy=CheckpointPolicy(every_blocks=0))
    ids = text(0, 9)
    assert [ask(manager, ids[: 8 * n + 1]) for n in (2, 4, 6)] == [0, 16, 32]
    assert manager.stats().num_prefix_checkpoints == 3


def test_a_branch_of_lost_blocks_is_known():
    manager = make_manager(num_blocks=6, checkpoint_policy=CheckpointPolicy(every_blocks=0))
    first = text(0, 5)
    ask(manager, [*first, 1])
    ask(manager, text(1, 6))  # nothing of the first is left
    assert ask(manager, [*first[:16], *text(2, 2), 1]) == 0
    assert ask(manager, [*first[:16], *text(3, 2), 1]) == 16


def test_the_caller_names_boundaries():
    manager = make_manager(checkpoint_policy=ONLY_ENDS)
    ids = text(0, 6)
    ask(manager, [*ids, 1], checkpoint_at=[21, 30])
    assert manager.stats().num_prefix_checkpoints == 2
    assert ask(manager, [*ids[:26], *text(1, 2)], checkpoint_at=[0]) == 24
    assert ask(manager, [*ids[:20], *text(2, 2)], checkpoint_at=[0]) == 16
    with pytest.raises(ValueError, match=r"Invalid checkpoint_at: expected .* got 50"):
        manager.resume_request(ids, checkpoint_at=[50])


@pytest.mark.parametrize(("in_generation", "found"), [(True, 24), (False, 16)])
def test_a_conversation_goes_on_from_its_answer(in_generation, found):
    policy = CheckpointPolicy(every_blocks=0, in_generation=in_generation)
    manager = make_manager(checkpoint_policy=policy)
    prompt, answer = text(0, 2), text(1, 2)[:13]
    slot = manager.resume_request(prompt).slot
    run_forward(manager, WEIGHTS, [Row(slot, TOKENS, 0, 16)])
    for length, token in enumerate(answer, start=16):
        manager.note_tokens(slot, [token], start=length)
        run_forward(manager, WEIGHTS, [Row(slot, TOKENS, length, length + 1)])
    manager.free_request(slot)
    hit = manager.resume_request([*prompt, *answer, 1, 2, 3])
    assert (hit.num_tokens, hit.num_replayed) == (found, 24 - found)


def test_a_conversation_outlives_single_prompts():
    """Its turns count; prompts that were asked once go first, though they were used later."""
    manager = make_manager(num_blocks=12, checkpoint_policy=ONLY_ENDS)
    talk = text(0, 4)
    for num_blocks in (2, 3, 4):
        ask(manager, [*talk[: 8 * num_blocks], 1])
    for seed in range(1, 8):
        ask(manager, [*text(seed, 3), 1])
    assert ask(manager, [*talk, 2]) == 32


def test_turns_are_remembered_after_blocks_are_lost():
    manager = make_manager(num_blocks=6, checkpoint_policy=ONLY_ENDS)
    talk = text(0, 4)
    ask(manager, [*talk[:16], 1])
    ask(manager, [*talk[:24], 1])
    ask(manager, text(1, 6))
    assert manager.match_prefix(talk).num_tokens == 0
    slot = manager.resume_request([*talk, 1]).slot
    assert manager._books.prefix.requests[slot].uses == {4: 3}


def test_a_superseded_end_comes_back_if_the_later_one_is_lost():
    retention = make_manager(checkpoint_policy=ONLY_ENDS)
    talk = text(0, 4)
    ask(retention, [*talk[:16], 1])
    ask(retention, [*talk[:32], 1])
    tree = retention._books.prefix.tree
    early, late = sorted(tree._on_device, key=lambda node: node.depth)
    assert (early.num_uses, late.num_uses) == (0, 2)
    with retention._journal:
        tree._drop_checkpoint(late)
    assert early.num_uses == 2


def test_sparse_checkpoints_make_no_other_go():
    manager = make_manager(num_checkpoints=2, checkpoint_policy=CheckpointPolicy(every_blocks=1))
    ids, other = text(0, 3), text(1, 4)
    ask(manager, [*ids, 1])
    ask(manager, [*other, 1])
    assert [ask(manager, [*each, 2]) for each in (ids, other)] == [24, 32]


def test_checkpoints_go_to_the_host_and_come_back():
    manager = make_manager(num_checkpoints=1, host_blocks=100, checkpoint_policy=ONLY_ENDS)
    prompts = [text(seed, 3) for seed in range(4)]
    for ids in prompts:
        ask(manager, [*ids, 1])
    stats = manager.stats()
    assert (stats.num_prefix_checkpoints, stats.num_prefix_host_checkpoints) == (4, 3)
    assert stats.prefix_host_bytes == 3 * manager.device_memory.checkpoints.shape[1]
    assert [ask(manager, [*ids, 2]) for ids in prompts] == [24] * 4


def test_one_pool_on_the_host_holds_what_is_worth_most():
    """Blocks and checkpoints displace each other by worth: conversations stay."""
    each = make_manager(num_checkpoints=1)._books.checkpoints.blocks_each
    manager = make_manager(
        num_blocks=8, num_checkpoints=2, host_blocks=2 * (each + 6), checkpoint_policy=ONLY_ENDS
    )
    talk = text(0, 6)
    for num_blocks in (3, 4, 5, 6):
        ask(manager, [*talk[: 8 * num_blocks], 1])
    for seed in range(1, 9):
        ask(manager, [*text(seed, 6), 1])
    assert ask(manager, [*talk, 2]) == 48


def test_prefix_bytes_are_all_that_is_set():
    block_bytes = make_manager().paged.layout.num_bytes
    manager = KVCacheManager(
        CONFIG, max_requests=2, num_blocks=8, prefix_bytes=30 * block_bytes + 5
    )
    assert (manager.capacity.host_blocks, manager.capacity.num_checkpoints) == (30, 8)
    assert ask(manager, [*text(0, 5), 1]) == 0
    assert ask(manager, [*text(0, 5), 2]) == 40
    with pytest.raises(ValueError, match=r"Invalid prefix_bytes: expected .* got -1"):
        KVCacheManager(CONFIG, max_requests=2, num_blocks=8, prefix_bytes=-1)


def node(depth, parent=None, *, checkpoint=-1, num_uses=0, last_used=0):
    made = PrefixNode(
        bytes([depth]), parent, depth, checkpoint=checkpoint, num_uses=num_uses,
        last_used=last_used, added=-1000,
    )  # fmt: skip
    if parent is not None:
        parent.children[made.digest] = made
    return made


def test_worth_is_uses_times_gain_over_cost():
    retention = Retention(checkpoint_blocks=6, num_blocks=10)
    first = node(1, checkpoint=0, num_uses=2)
    second = node(2, first)
    third = node(3, second, checkpoint=1, num_uses=4, last_used=7)
    half_life = retention.half_life
    # The third's own blocks are two; the first's block is needed without it.
    assert retention.key_of(third) == 7 + half_life * np.log2(4 * 2 / (2 + 6))
    assert retention.key_of(first) == half_life * np.log2(2 * 1 / 6)
    assert retention.key_of(second) == -WITHOUT_USES
    third.num_uses = 0
    assert retention.key_of(third) == 7 - WITHOUT_USES


def test_the_half_life_is_the_mean_age_of_reuses():
    retention = Retention(checkpoint_blocks=6, num_blocks=10)
    retention.clock = 1000
    for _ in range(1000):
        retention.note_reuse(900)
    assert 99 < retention.half_life < 101


def test_ghosts_are_bounded():
    retention = Retention(checkpoint_blocks=6, num_blocks=2)
    nodes = [node(depth) for depth in range(1, 12)]
    for each in nodes:
        retention.remember(each)
    assert not retention.follow([nodes[2].digest])
    assert len(retention.follow([each.digest for each in nodes[3:]])) == 8
