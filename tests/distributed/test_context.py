"""Ranks that divide a context equal one that has it alone, also when one of them dies."""

import signal
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager, PrefixStore, warm_up
from dsv4.cache.graphs.captured_forward import CapturedForward
from dsv4.cache.graphs.captured_layers import CapturedLayers
from dsv4.distributed import context
from dsv4.kernels.reference.indexer import select_topk
from dsv4.testing import Row, model_projections, model_weights
from dsv4.tools.planner.memory_plan import MemoryPlan
from tests.cache.life import run_layers
from tests.distributed import ranks
from tests.distributed.local import Group
from tests.v41 import tiny_v41

SHORT_FORWARDS = ((70, 20), (9, 40), (3, 3), (1, 1), (1, 0))
PAST_A_ROUND = ((550, 20), (3, 3), (1, 1))  # rank 0 of four has its second block


@pytest.mark.parametrize(
    ("num_ranks", "call"),
    [(2, ()), (4, ()), (4, (ranks.small_config, "cpu", torch.float32, PAST_A_ROUND)),
     *((num_ranks, (ranks.latent_config, "cpu", torch.float32, SHORT_FORWARDS))
       for num_ranks in (2, 4))],
)  # fmt: skip
def test_the_ranks_equal_one(num_ranks, call):
    farthest, digests = zip(*ranks.run_ranks(num_ranks, ranks.compare, *call), strict=True)
    assert max(farthest) < 1e-5
    assert len(set(digests)) == 1  # all ranks go on with the same bits


@pytest.mark.slow
def test_an_engine_serves_from_two_ranks():
    expected = ranks.serve(0, None)
    assert ranks.run_ranks(2, ranks.serve) == [expected, expected]


def test_an_attached_model_answers_from_two_ranks():
    """A rank has half of the blocks, each of twice the tokens."""
    said, num_blocks = ranks.answer(0, None)
    assert num_blocks == 3 * 4
    assert ranks.run_ranks(2, ranks.answer) == [(said, num_blocks // 2)] * 2


V4_ROWS = {"head_dim": 512, "rope_dim": 64, "num_query_heads": 64, "index_num_heads": 64,
           "index_head_dim": 128}  # fmt: skip


# Few layers each: cases are compiled side by side.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make_config", "ratios", "choices"),
    [(ranks.small_config, (0, 4), {}), (ranks.small_config, (128,), {}),
     (ranks.latent_config, None, {}), (ranks.small_config, (4,), V4_ROWS),
     (ranks.small_config, (128,), V4_ROWS)],
    ids=["csa", "hca", "v41", "csa-wide", "hca-wide"],
)  # fmt: skip
def test_the_ranks_equal_one_on_a_gpu(make_config, ratios, choices):
    """A chunk, verification and decode.

    BF16 rounds five times, by up to 2^-8 each: weights and outputs of one rank and of a part, and
    the parts' sum.
    """
    dtype, limit = (torch.bfloat16, 5 * 2.0**-8) if choices else (torch.float32, 1e-5)
    chunk = (70, 20) if ratios is None else (420, 20)
    choices = choices if ratios is None else {"compress_ratios": ratios, **choices}
    parts = ranks.run_ranks(
        2, ranks.compare, make_config, device="cuda", dtype=dtype,
        forwards=(chunk, (3, 3), (1, 1)), **choices,
    )  # fmt: skip
    farthest, digests = zip(*parts, strict=True)
    assert max(farthest) < limit
    assert len(set(digests)) == 1


@pytest.mark.parametrize("make_config", [ranks.small_config, ranks.latent_config])
def test_captured_steps_of_ranks(make_config):
    """Groups that exchange on the GPU can be captured; here the step runs again."""
    assert max(ranks.run_ranks(2, ranks.replay, make_config)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("make_config", [ranks.small_config, ranks.latent_config])
def test_captured_steps_of_a_rank_on_a_gpu(make_config):
    """NCCL wants a GPU for each rank, so the other one's parts are this one's here."""
    assert ranks.replay(0, Group(), make_config, device="cuda") < 1e-5


def refuse_graphs(rank, group, device):
    manager = KVCacheManager(CacheConfig.tiny(), max_requests=1, num_blocks=2,
                             process_group=group, device=device)  # fmt: skip
    with pytest.raises(ValueError, match="CUDA graphs over NCCL alone"):
        CapturedForward(manager, lambda handles: None, batch=1)
    with pytest.raises(ValueError, match="layers one by one in a split context"):
        CapturedLayers(manager, lambda handle: None, batch=1, max_length=1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_over_gloo_are_refused(device):
    ranks.run_ranks(2, refuse_graphs, device=device)


def test_merge_follows_the_rule_of_one_rank():
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 2.0, torch.nan])
    for num_entries, topk in ((40, 6), (12, 12), (5, 9), (64, 1)):
        scores = values[torch.randint(0, 6, (50, num_entries), generator=generator)]
        counts = torch.randint(0, num_entries + 1, (50,), generator=generator)
        entries = torch.arange(num_entries).expand(50, -1)
        entries = torch.where(entries < counts[:, None], entries, -1).int()
        order = torch.randperm(num_entries, generator=generator)
        pairs = context._pairs(entries[:, order], scores[:, order])
        merged = context._merge(pairs[None], counts, topk)
        want = select_topk(scores, counts, topk)
        assert torch.equal(merged[:, : want.shape[1]], want)
        assert (merged[:, want.shape[1] :] == -1).all()


@pytest.mark.parametrize(
    ("num_ranks", "make_config", "max_tokens", "sizes"),
    [(2, ranks.short_config, 40, (6, 30)), (4, ranks.short_config, 80, (3, 25)),
     (2, ranks.whole_config, 640, (2, 20)), (2, ranks.shared_config, 40, (6, 30))],
)  # fmt: skip
def test_lives(num_ranks, make_config, max_tokens, sizes):
    steps = ranks.run_ranks(num_ranks, ranks.live, make_config, max_tokens, *sizes)
    assert len(set(steps)) == 1
    assert steps[0] >= sizes[0]


EVENTS = {"decode", "verify", "chunk", "checkpoint", "replay", *ranks.COUNTED[:-1]}


@pytest.mark.parametrize(
    ("num_ranks", "make_config", "sizes"),
    [(2, ranks.short_config, (40, 4, 70)),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         (2, ranks.shared_config, (40, 4, 70)), (2, ranks.whole_config, (640, 16, 80)),
         (4, ranks.whole_config, (1280, 8, 60)), (4, ranks.short_config, (80, 8, 90)),
         (4, ranks.shared_config, (80, 8, 90)),
     ))],
)  # fmt: skip
def test_schedules(num_ranks, make_config, sizes):
    """Everything happens to requests that no rank has alone."""
    counts = ranks.run_ranks(num_ranks, ranks.schedule, make_config, *sizes)
    assert all(each == counts[0] for each in counts)
    assert set(counts[0]) == EVENTS and min(counts[0].values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_lives(num_ranks):
    ranks.run_ranks(num_ranks, ranks.live, ranks.short_config, 20 * num_ranks, 25, 50)


def alone():
    config = ranks.deep_config()
    manager = KVCacheManager(config, max_requests=1, num_blocks=20, max_forward_tokens=64)
    slot, tokens = manager.open_request(), model_projections(config, 60, seed=1)
    layers = run_layers(manager, model_weights(config, seed=0), [Row(slot, tokens, 0, 44)])
    return [layer.output for layer in layers]


# Two messages in each exchange. There is one of sizes, then there are two of each CSA layer in each
# forward: candidates and results.
@pytest.mark.parametrize(
    ("num_ranks", "number", "sign", "seconds"),
    [*((2, number, signal.SIGKILL, 30.0) for number in range(18)), (3, 13, signal.SIGKILL, 4.0),
     (3, 17, signal.SIGKILL, 4.0), (2, 11, signal.SIGSTOP, 2.0)],
)  # fmt: skip
def test_a_lost_rank(tmp_path, num_ranks, number, sign, seconds):
    call = (tmp_path, 1, number, sign, seconds)
    survivors = ranks.run_ranks(num_ranks, ranks.lose_a_rank, *call, killed={1})
    for waited, length, outputs in survivors:
        assert waited < seconds + 5.0
        assert length == (-1 if number < 2 else 0 if number < 10 else 40)
        for mine, theirs in zip(outputs, alone(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5 * float(theirs.abs().max()))


def test_a_rank_that_fails_alone():
    """Its next forward meets the others in the one that it has left."""
    assert ranks.run_ranks(2, ranks.fail_alone) == [4, 4]


@pytest.mark.parametrize("number", range(4))
def test_a_rank_that_fails_in_an_exchange(number, tmp_path):
    """The second part of an exchange has another size than the next exchange's first."""
    assert ranks.run_ranks(2, ranks.fail_in_an_exchange, tmp_path, number) == [0, 0]


@pytest.mark.parametrize(
    ("num_ranks", "make_config", "lengths"),
    [(2, ranks.short_config, (0, 3, 4, 5, 8, 9, 12, 13, 40)),
     (4, ranks.short_config, (7, 8, 17, 32, 41)),
     (2, ranks.whole_config, (1, 127, 128, 300, 600)), (2, ranks.shared_config, (2, 9, 33))],
)  # fmt: skip
def test_a_whole_request_goes_on_split(num_ranks, make_config, lengths, tmp_path):
    """Its share is, to the byte, what a rank has of a request that was split from the start."""
    call = (make_config, lengths, tmp_path)
    assert max(ranks.run_ranks(num_ranks, ranks.promote, *call)) < 1e-5


def test_a_rank_refuses_whole_requests_of_others():
    config = ranks.short_config()
    alone = KVCacheManager(config, max_requests=1, num_blocks=8)
    split = KVCacheManager(config, max_requests=1, num_blocks=8, process_group=Group())
    slot = alone.open_request()
    alone.prepare_forward([slot], [0], [20]).complete()
    saved = alone.export_request(slot)
    other = replace(config, rope_theta=20000.0)
    for wrong, match in (
        (replace(saved, fingerprint=other.format_fingerprint), "with the fingerprint"),
        (replace(saved, blocks=saved.blocks[:-1]), "expected 5 blocks"), (None, "export_request"),
        (replace(saved, prefix_root="no"), "hex digits"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=match):
            split.import_request(wrong)
    with pytest.raises(ValueError, match="with the fingerprint"):
        alone.import_request(split.export_request(split.import_request(saved)))


@pytest.mark.parametrize(("how", "lengths"), [("slots", [40, 40]), ("blocks", [0, 0])])
def test_ranks_that_run_other_requests(how, lengths):
    """Their messages are as long, and nothing else would tell."""
    assert ranks.run_ranks(2, ranks.go_apart, how) == [lengths] * 2


@pytest.mark.parametrize(
    "choices",
    [({}, {"wipe_on_free": True}), ({}, {"checkpoint_policy": CheckpointPolicy(every_blocks=1)}),
     ({}, {"host_blocks": 1}), ({"batch_invariant": True, "backend": "triton"}, {})],
    ids=str,
)  # fmt: skip
def test_ranks_of_other_choices_are_refused(choices):
    ranks.run_ranks(2, ranks.choose_apart, choices)


@pytest.mark.parametrize(
    ("problem", "choices"),
    [("backend 'flashmla'", {"attention_backend": "flashmla"}),
     ("backend 'deepgemm'", {"index_backend": "deepgemm"}),
     ("a store", {"store": Mock(spec=PrefixStore)}), ("a rank of", {"process_group": object()})],
)  # fmt: skip
def test_refusals(problem, choices):
    sizes = {"max_requests": 1, "num_blocks": 2, "process_group": Group()}
    with pytest.raises(ValueError, match=problem):
        KVCacheManager(CacheConfig.tiny(), **{**sizes, **choices})


def test_warm_up_of_a_rank():
    """Its scratch holds its own entries of one token, and no more."""
    config = CacheConfig.tiny(compress_ratios=(4, 128), block_tokens=128)
    manager = KVCacheManager(config, max_requests=1, num_blocks=130, max_forward_tokens=1,
                             process_group=Group(1), backend="triton")  # fmt: skip
    warm_up(manager, model_weights(config, seed=0))


def test_a_short_request_has_the_same_bits_beside_a_long_one():
    """Also on a rank, where results are joined for the long one alone."""
    config = ranks.small_config(compress_ratios=(128,))
    weights, outputs = model_weights(config, seed=0), []
    tokens = model_projections(config, 130, seed=1)
    for others in (0, 1):
        manager = KVCacheManager(
            config, max_requests=2, num_blocks=4, process_group=Group(), backend="triton",
            batch_invariant=True,
        )  # fmt: skip
        manager.open_requests(2)
        rows = [Row(0, tokens, 0, 3), *[Row(1, tokens, 0, 130)] * others]
        outputs.append([layer.output[:3] for layer in run_layers(manager, weights, rows)])
    assert all(map(torch.equal, *outputs))


def test_candidate_blocks_of_two_ranks_are_refused():
    config = tiny_v41(candidate_block_size=3)
    with pytest.raises(ValueError, match="16 entries, got candidate_block_size 3"):
        KVCacheManager(config, max_requests=1, num_blocks=1, process_group=Group())


@pytest.mark.parametrize(
    ("make_config", "num_ranks", "num_stages", "num_tokens"),
    [(CacheConfig.tiny, 2, 1, 3 * 512), (CacheConfig.tiny, 3, 2, 1000),
     (ranks.latent_config, 4, 1, 130), (ranks.short_config, 5, 2, 64),
     (lambda: CacheConfig.v4_flash(include_mtp=True), 2, 4, 3000)],
)  # fmt: skip
def test_a_plan_has_the_bytes_of_every_rank(make_config, num_ranks, num_stages, num_tokens):
    config, totals = make_config(), set()
    for rank in range(num_ranks):
        of_three = replace(config, num_query_heads=3 * config.num_query_heads)
        plan = MemoryPlan(
            of_three.split_context(rank, num_ranks), 2, num_tokens, gpu_bytes=10**12, num_ranks=3,
            num_stages=num_stages, max_forward_tokens=300, num_checkpoints=1,
        )  # fmt: skip
        for layers, num_bytes in plan.stages.items():
            manager = KVCacheManager(
                config.cut_layers(*layers) if num_stages > 1 else config, max_requests=2,
                num_blocks=plan.capacity.num_blocks, max_request_tokens=num_tokens,
                max_forward_tokens=300, num_checkpoints=1, process_group=Group(rank, num_ranks),
            )  # fmt: skip
            assert num_bytes == sum(tensor.nbytes for tensor in manager.tensors().values())
            assert manager.memory() == manager.capacity.memory()
        totals.add(tuple(plan.stages.items()))
    assert len(totals) == 1


def test_a_rank_stores_its_share():
    config = CacheConfig.tiny()
    sizes = {"max_requests": 2, "num_blocks": 6}
    manager = KVCacheManager(config, **sizes, process_group=Group())
    one = KVCacheManager(config, **sizes)
    assert manager.paged.storage.shape == one.paged.storage.shape
    assert manager.capacity.longest_request == 2 * one.capacity.longest_request
    allocated = sum(size.allocated for size in manager.memory().values())
    assert allocated == sum(tensor.nbytes for tensor in manager.tensors().values())
    assert manager.config.format_fingerprint != one.config.format_fingerprint
    stored = CacheConfig.from_stored_fields(manager.config.stored_fields)
    assert stored.format_fingerprint == manager.config.format_fingerprint
