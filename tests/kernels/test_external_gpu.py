"""The real FlashMLA and DeepGEMM, on a GPU: within the bounds, in graphs, on poisoned pools.

`DSV4_PEERS` names a folder with their unpacked packages, or vLLM's.
"""

import pytest
import torch

from dsv4 import CacheConfig, CapturedForward, KVCacheManager, prepare_forward, warm_up
from dsv4.kernels.backends import load_backend
from dsv4.kernels.external import deepgemm, find
from dsv4.testing import model_projections, model_weights, move_to, poison, take_rows
from tests.kernels import test_external as external_tests
from tests.kernels import test_triton_attention as attention_tests
from tests.kernels import test_triton_indexer as index_tests

pytestmark = pytest.mark.gpu
LARGEST_ERROR = 2.0**-7  # of the output's norm: weights and output are rounded to BF16


def load(name):
    """Load the real kernel; skip the test, with the reason, if it is not installed."""
    try:
        return find.load_flash_mla() if name == "flashmla" else find.load_deep_gemm()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture
def flash_mla():
    return load("flashmla")


@pytest.fixture
def deep_gemm():
    return load("deepgemm")


CASES = [
    *external_tests.CASES,
    external_tests.Case("128 heads", external_tests.CSA, [500, 3], [501, 4], heads=128),
    external_tests.Case(
        "Flash's own list", external_tests.CSA, [3000], [3001], 64, choices={"index_topk": 512}
    ),
    external_tests.Case(
        "many entries", external_tests.HCA, [3000, 200, 127], [3001, 201, 128], heads=64
    ),
]


def filled(case):
    """Fill a case as `Case.filled`, with blocks for longer requests."""
    choices = {"index_topk": 64, **case.choices}
    config = CacheConfig.v4_flash(
        compress_ratios=case.ratios, num_query_heads=case.heads, **choices
    )
    return index_tests.filled(config, case.before, case.after)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashmla_attends_within_the_bound(case, flash_mla):
    handle = filled(case)
    inputs = attention_tests.make_inputs(handle)
    got = attention_tests.run(load_backend("flashmla"), handle, inputs)
    assert got.output.isfinite().all(), "nothing of the poison is read"
    external_tests.assert_attended(handle, inputs, got)
    ours = attention_tests.run(load_backend("triton"), handle, inputs)
    error = (got.output.float() - ours.output.float()).norm()
    assert error <= LARGEST_ERROR * ours.output.float().norm()


@pytest.mark.parametrize("sink", [None, -torch.inf, torch.inf, 30.0])
def test_flashmla_sinks(sink, flash_mla):
    handle = filled(external_tests.Case("", external_tests.CSA, [126], [127]))
    inputs = attention_tests.make_inputs(handle)
    given = None if sink is None else torch.full_like(inputs.sinks, sink)
    got = attention_tests.run(load_backend("flashmla"), handle, inputs._replace(sinks=given))
    known = torch.full_like(inputs.sinks, -torch.inf) if sink is None else given
    external_tests.assert_attended(handle, inputs._replace(sinks=known), got)


def test_flashmla_padding_is_nothing(flash_mla):
    handle = filled(external_tests.Case("", external_tests.HCA, [127, 5], [128, 6], heads=64))
    inputs = attention_tests.make_inputs(handle)
    inputs.query[1] = torch.nan
    got = attention_tests.run(load_backend("flashmla"), handle, inputs)
    assert (got.output[1] == 0).all() and (got.lse[1] == -torch.inf).all()
    assert got.output.isfinite().all()


def test_flashmla_takes_raw_queries(flash_mla):
    handle = filled(external_tests.Case("", external_tests.CSA, [3000, 200], [3001, 230], heads=64))
    raw, prepared = attention_tests.make_raw(handle)
    expected = attention_tests.run(load_backend("flashmla"), handle, prepared)
    got = attention_tests.run(load_backend("flashmla"), handle, raw, is_query_raw=True)
    attention_tests.assert_same_bits(got, expected)


def test_flashmla_reruns_are_the_same_bits(flash_mla):
    handle = filled(external_tests.Case("", external_tests.HCA, [3000, 200], [3001, 201], heads=64))
    inputs = attention_tests.make_inputs(handle)
    first = attention_tests.run(load_backend("flashmla"), handle, inputs)
    for _ in range(20):
        again = attention_tests.run(load_backend("flashmla"), handle, inputs)
        assert torch.equal(again.output, first.output) and torch.equal(again.lse, first.lse)


INDEX_CASES = [
    *external_tests.INDEX_CASES,
    index_tests.Case("40 requests", [260 + 5 * n for n in range(40)],
                     [261 + 5 * n for n in range(40)]),
    index_tests.Case("a longer chunk", [3000], [3200]),
]  # fmt: skip


@pytest.mark.parametrize("case", INDEX_CASES, ids=str)
def test_deepgemm_chooses_the_same_entries(case, deep_gemm):
    handle = index_tests.filled(
        external_tests.flash(index_topk=64, **case.choices), case.before, case.after
    )
    query, weights = index_tests.random_query(handle)
    got = index_tests.select(load_backend("deepgemm"), handle, query, weights)
    index_tests.assert_selected(got, handle, query, weights)


def test_deepgemm_scores_are_within_the_bound(deep_gemm):
    handle = index_tests.filled(external_tests.flash(index_topk=64), [2000, 700], [2001, 701])
    query, weights = index_tests.random_query(handle)
    scratch = index_tests.prepared(handle, query, weights)
    max_entries = handle.plan.max_entries(4)
    inputs = deepgemm.score_inputs(
        scratch, handle.memory, handle.tokens, range(len(query)),
        num_heads=64, max_entries=max_entries,
    )  # fmt: skip
    scores = deepgemm.score_entries(deep_gemm, inputs, max_entries=max_entries)
    expected, bound = index_tests.exact_scores(handle, query, weights)
    for token, count in enumerate(index_tests.visible_counts(handle).tolist()):
        if count > 64:
            error = (scores[token, :count].double() - expected[token, :count]).abs()
            assert (error <= bound[token, :count]).all()


def served(config, *, backends: dict[str, str], lengths: list[int]):
    """Make a manager with requests of these lengths, without their last tokens."""
    manager = KVCacheManager(
        config, max_requests=4, num_blocks=32, device="cuda", max_forward_tokens=4096,
        **backends,
    )  # fmt: skip
    poison(manager)
    slots = [manager.open_request() for _ in lengths]
    weights = [move_to("cuda", layer) for layer in model_weights(config, seed=0)]
    plan = prepare_forward(manager, slots, [0] * len(lengths), lengths)
    inputs = model_projections(config, plan.num_tokens, seed=1, dtype=torch.bfloat16)
    for layer_idx, layer in enumerate(inputs):
        manager.acquire(layer_idx, plan).forward(move_to("cuda", layer), weights[layer_idx])
    return manager, slots, weights


def test_both_in_a_captured_forward(flash_mla, deep_gemm):
    """A replay attends the entries chosen by DeepGEMM's scores, as our own kernels do."""
    config = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), index_format="fp8", index_topk=64)
    lengths = [400, 1000, 3]
    backends = {"attention_backend": "flashmla", "index_backend": "deepgemm"}
    captured, slots, weights = served(config, backends=backends, lengths=lengths)
    warm_up(captured, weights)
    inputs = [
        move_to("cuda", layer)
        for layer in model_projections(config, 4, seed=2, dtype=torch.bfloat16)
    ]
    forward = CapturedForward(
        captured,
        lambda handles: [
            handle.forward(layer, weight)
            for handle, layer, weight in zip(handles, inputs, weights, strict=True)
        ],
        batch=4,
    )
    mine = {"index_backend": "deepgemm"}
    eager, eager_slots, _ = served(config, backends=mine, lengths=lengths)
    for step in range(5):
        before = [length + step for length in lengths]
        after = [length + 1 for length in before]
        replayed = forward.replay(prepare_forward(captured, slots, before, after))
        plan = prepare_forward(eager, eager_slots, before, after)
        for layer_idx, layer in enumerate(inputs):
            part = take_rows(layer, slice(0, 3))
            want = eager.acquire(layer_idx, plan).forward(part, weights[layer_idx])
            output = replayed[layer_idx].output[:3].float()
            error = (output - want.output.float()).norm()
            assert error <= LARGEST_ERROR * want.output.float().norm(), (step, layer_idx)
            assert torch.allclose(replayed[layer_idx].lse[:3], want.lse, rtol=0, atol=1e-3)
    assert torch.equal(captured.tensors()["blocks"], eager.tensors()["blocks"])
