"""Hopper's kernels on the CPU, by the model of Gluon in `tests.gluon`.

The same kernels run on a GPU in other tests. Here programs are switched at random, every barrier
counts, and an access outside of a tensor is an error.
"""

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig
from dsv4.kernels import index_scratch
from dsv4.kernels.reference.indexer import select_blocks, select_topk
from dsv4.kernels.triton import attention, dense_rows
from dsv4.kernels.triton.launch import HopperLaunch, find_launch
from dsv4.testing import POISON_BYTE
from tests import gluon
from tests.kernels.test_chunk_scores import (
    FORMATS,
    HOSTILE,
    all_heads,
    both_scores,
    handle_of,
    hostile_case,
)
from tests.kernels.test_dense_rows import assert_a_nan_is_seen_by_those_that_attend_it
from tests.kernels.test_triton_attention import (
    TYPES,
    assert_same_bits,
    assert_within_bound,
    make_inputs,
    make_raw,
    replace_combine,
    run,
    split_as_often_as,
    triton,
)
from tests.kernels.test_triton_gather import filled
from tests.kernels.test_triton_indexer import (
    exact_scores,
    random_query,
    replace_keys,
    select,
    visible_counts,
)
from tests.kernels.test_v41_triton import wide, wide_query
from tests.marks import quick

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter runs the launches beside these"
)
STEPS = {
    "decode": ([0, 254, 700], [1, 255, 701]),
    "chunk": ([0, 254, 400], [3, 255, 406]),
}
around_a_tile = pytest.mark.parametrize("num_tokens", quick([63, 64, 65], [65]))
every_type = pytest.mark.parametrize("ratios", TYPES.values(), ids=TYPES)


@pytest.fixture(autouse=True)
def hopper(monkeypatch, request):
    """Run launches for Hopper here; let few programs make rows dense."""
    monkeypatch.setattr(dense_rows, "MIN_WAVES", 0)
    monkeypatch.setattr(dense_rows, "MIN_READS", 0)
    with gluon.on_cpu(monkeypatch, seed=len(request.node.name)):
        yield


def flash(ratios: tuple[int, ...], step: str, **choices):
    return filled(CacheConfig.v4_flash(compress_ratios=ratios, **choices), *STEPS[step])


def use_heads(heads: int, monkeypatch) -> None:
    """Give programs of steps so many heads."""
    launch = find_launch(HopperLaunch, "attend hopper", torch.device("cpu"), heads)
    monkeypatch.setattr(attention, "choose_launch", lambda *_: launch)


@every_type
@pytest.mark.parametrize("wave", [1, 1000])
@pytest.mark.parametrize(("num_heads", "heads"), [(64, 64), (64, 8), (20, 16), (20, 64), (128, 64)])
def test_steps(ratios, wave, num_heads, heads, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    use_heads(heads, monkeypatch)
    handle = flash(ratios, "decode", num_query_heads=num_heads)
    raw, prepared = make_raw(handle)
    got = run(triton(), handle, prepared)
    assert_within_bound(handle, prepared, got)
    assert_same_bits(run(triton(), handle, raw, is_query_raw=True), got)


@every_type
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("num_heads", [64, 128, 20, 8])
def test_chunks(ratios, is_dense, num_heads, monkeypatch):
    handle = flash(ratios, "chunk", num_query_heads=num_heads)
    raw, prepared = make_raw(handle)
    launches, make = [], dense_rows.make_dense_rows
    monkeypatch.setattr(
        dense_rows, "make_dense_rows", lambda *given: (launches.append(given), make(*given))
    )
    if not is_dense:
        monkeypatch.setattr(dense_rows, "MIN_WAVES", 1 << 20)
    got = run(triton(), handle, prepared)
    assert len(launches) == (is_dense and num_heads % 64 == 0)
    assert_within_bound(handle, prepared, got)
    assert_same_bits(run(triton(), handle, raw, is_query_raw=True), got)


@every_type
@around_a_tile
def test_chunks_around_tiles(ratios, num_tokens):
    """Windows, entries of 4 tokens and of 128 begin in, at and behind tiles of 64 rows."""
    config = CacheConfig.v4_flash(compress_ratios=ratios)
    handle = filled(config, [0, 200], [num_tokens, 201])
    inputs = make_inputs(handle)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


@pytest.mark.parametrize(
    ("ratios", "token_pos"), [*zip(TYPES.values(), (254, 252, 128), strict=True)], ids=TYPES
)
def test_a_nan_row_of_a_dense_chunk(ratios, token_pos):
    handle = filled(CacheConfig.v4_flash(compress_ratios=ratios), [250, 90], [261, 93])
    assert_a_nan_is_seen_by_those_that_attend_it(handle, token_pos)


def test_rows_of_other_requests_are_read_in_place():
    """Dense rows are a request's own; a list may name any rows of the pool."""
    handle = flash((4,), "chunk")
    inputs = make_inputs(handle)
    inputs.rows[2, :40] = inputs.rows[-1, :40]
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("scales", [(0, 20), (110, 122), (140, 160)], ids=str)
def test_any_code_and_scale(heads, scales, monkeypatch):
    use_heads(heads, monkeypatch)
    split_as_often_as(1, monkeypatch)
    handle = flash((4,), "decode")
    entries, draw = handle.memory.entries, torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, entries.data.shape, generator=draw)
    entries.data[..., :448] = torch.where(codes % 128 == 127, codes - 1, codes)[..., :448].byte()
    drawn = torch.randint(scales[0], scales[1] + 1, entries.scales.shape, generator=draw)
    entries.scales.copy_(drawn.byte())
    inputs = make_inputs(handle)
    if scales[0] > 130:  # logits that an fp32 product holds
        inputs = inputs._replace(query=inputs.query * 2.0**-40)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


@every_type
@pytest.mark.parametrize("heads", [8, 64])
def test_a_nan_code_is_nan_everywhere(ratios, heads, monkeypatch):
    use_heads(heads, monkeypatch)
    split_as_often_as(1, monkeypatch)
    handle = flash(ratios, "decode")
    inputs, token = make_inputs(handle), 2  # at position 254, behind a token of padding
    before = run(triton(), handle, inputs)
    ring = handle.memory.window.ring.data
    ring[int(handle.tokens.request_slots[token]), 200 % ring.shape[1], 65] = 0xFF
    got = run(triton(), handle, inputs)
    others = [i for i in range(len(inputs.query)) if i != token]
    assert got.output[token].isnan().all()
    assert torch.equal(got.output[others], before.output[others])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("arrangement", ["joined", "split"])
def test_rows_of_v41(arrangement, layer, heads, step, monkeypatch):
    use_heads(heads, monkeypatch)
    steps = {name: (*lengths, {}) for name, lengths in STEPS.items()}
    handle = wide(layer, step, steps=steps, backend="reference", page_arrangement=arrangement)
    inputs = wide_query(handle)
    assert_within_bound(handle, inputs, run(triton(), handle, inputs))


CHUNKS = [
    ([300, 7, 1500], [313, 8, 1507]), ([0], [45]), ([8200], [8205]),
    ([200, 210, 220, 90, 80], [202, 213, 224, 95, 86]),
]  # fmt: skip


def assert_scores_of_chunks(handle, *, num_rows: int | None = None) -> None:
    """Of groups and of single tokens, keys that E5M2 does not hold among them."""
    if handle.config.index_format == "mxfp4":
        replace_keys(handle.memory.index_keys, 104, 133)
    query, weights = random_query(handle)
    scores, bound = exact_scores(handle, query, weights)
    for got in both_scores(handle, query, weights, num_rows=num_rows):
        is_scored = got != 0
        assert is_scored.any() and ((got - scores).abs() <= bound)[is_scored].all()


@pytest.mark.parametrize("lengths", CHUNKS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_scores_of_chunks(heads, name, lengths):
    assert_scores_of_chunks(handle_of(name, *lengths, heads=heads, device="cpu"))


@around_a_tile
@pytest.mark.parametrize("name", FORMATS)
def test_scores_of_chunks_around_tiles(name, num_tokens):
    """The last tokens see 62 to 65 entries, a tile."""
    assert_scores_of_chunks(handle_of(name, [199], [199 + num_tokens], device="cpu"))


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_scores(name, kind):
    handle, query, weights = hostile_case(name, kind, 300, 307, device="cpu")
    exact, bound = exact_scores(handle, query, weights)
    scores, _alone = both_scores(handle, query, weights)
    is_seen = torch.arange(scores.shape[1]) < visible_counts(handle)[:, None]
    assert torch.equal(scores[is_seen].isnan(), exact[is_seen].isnan())
    assert (scores[is_seen].isnan() if kind == "nan" else scores[is_seen].isfinite()).all()
    assert kind == "nan" or ((scores - exact).abs() <= bound)[is_seen].all()
    chosen = select(triton(), handle, query, weights)
    assert torch.equal(chosen.entry_idx.long(), select_topk(scores, visible_counts(handle), 8))


@pytest.mark.parametrize(
    "lengths", [([610], [623]), ([4400, 7, 610, 90], [4409, 8, 615, 92])], ids=str
)
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_tops_of_groups(heads, name, lengths, monkeypatch):
    """One and two levels; chunks, a step, a group of tokens of two requests, scores again."""
    for limit in ("WHOLE_ENTRIES", "NARROW_ENTRIES"):
        monkeypatch.setattr(index_scratch, limit, 128)
    handle = handle_of(name, *lengths, heads=heads, device="cpu")
    query, weights = random_query(handle)
    weights[3, 3] = torch.nan
    if name == "mxfp4":
        replace_keys(handle.memory.index_keys, 104, 133)
    scores, _alone = both_scores(handle, query, weights)
    handle.memory.index_scratch.fill_(POISON_BYTE)
    chosen = select(triton(), handle, query, weights)
    assert torch.equal(chosen.entry_idx.long(), select_topk(scores, visible_counts(handle), 8))


@pytest.mark.parametrize("name", FORMATS)
def test_candidate_blocks_from_tops(name, monkeypatch):
    """Blocks of 8 entries take the tops of a chunk's groups where they lie."""
    for limit in ("WHOLE_ENTRIES", "NARROW_ENTRIES"):
        monkeypatch.setattr(index_scratch, limit, 128)
    config = CacheConfig.v41_flash(
        compress_ratios=(1,), kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
        candidate_source_layer_id=0, candidate_topk_blocks=4, candidate_block_size=8,
        num_query_heads=1, index_format=name, index_num_heads=32, index_topk=8,
    )  # fmt: skip
    handle = filled(config, [1030, 3], [1037, 4], device="cpu")
    query, weights = random_query(handle)
    weights[3, 3] = torch.nan
    scores, _alone = both_scores(handle, query, weights)
    handle.memory.index_scratch.fill_(POISON_BYTE)
    chosen = select(triton(), handle, query, weights)
    best = select_blocks(scores, visible_counts(handle), 4, 8)
    assert torch.equal(chosen.blocks.long(), best)


@pytest.mark.parametrize("num_rows", [1, 6, 7, 9])
@pytest.mark.parametrize("name", FORMATS)
def test_groups_that_a_part_cuts(name, num_rows):
    handle = handle_of(name, [300, 90], [313, 96], heads=32, device="cpu")
    assert_scores_of_chunks(handle, num_rows=num_rows)


@pytest.mark.parametrize("lengths", [([300, 7, 500], [313, 8, 506]), ([0], [45])], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_scores_of_v41(ratio, name, lengths):
    assert_scores_of_chunks(handle_of(name, *lengths, heads=32, ratio=ratio, device="cpu"))


@all_heads
def test_the_order_of_heads(heads):
    """A thread adds a quarter of them, then four theirs: lanes 0 and 2, 1 and 3, then both."""
    index_scores = gluon.LOADED[f"{gluon.HOPPER}.index_scores"]
    draw = np.random.default_rng(0)
    products = draw.normal(size=(64, 128)).astype(np.float32)
    weights = draw.normal(size=128).astype(np.float32)
    got = index_scores.sum_heads.fn(gluon.Value(products), gluon.Value(weights), heads).data
    key, token = (place.data for place in index_scores.score_places.fn(heads))
    num_tokens = 128 // heads
    parts = ((products + abs(products)) * weights).reshape(64, num_tokens, heads // 8, 4, 2)
    lanes = np.zeros((64, num_tokens, 4), np.float32)
    for nth in range(heads // 4):
        lanes += parts[:, :, nth // 2, :, nth % 2]
    want = (lanes[..., 0] + lanes[..., 2]) + (lanes[..., 1] + lanes[..., 3])
    key, token = np.broadcast_arrays(key, token)
    assert len({*zip(key.flat, token.flat, strict=True)}) == want.size
    assert np.array_equal(got, want[key, token])


language = gluon.LANGUAGE


def fill_late(stage, barrier):
    stage.store(language.zeros((4,), gluon.float32))
    gluon.arrive(barrier)


def read_early(stage, barrier, is_patient):
    if is_patient:
        gluon.wait(barrier, 0)
    stage.load()


@pytest.mark.parametrize("count", [1, 2])
def test_a_barrier_that_nobody_ends_is_a_deadlock(count):
    gluon.launch.begin_program((0, 0), (1, 1))
    stage = gluon.allocate_shared_memory(gluon.float32, (4,))
    barrier = gluon.allocate_shared_memory(gluon.int64, (1,))
    gluon.init(barrier, count=count)
    partitions = [(fill_late, (stage, barrier)), (read_early, (stage, barrier, True))]
    if count == 1:
        gluon.warp_specialize(partitions, [4], [64])
    else:
        with pytest.raises(AssertionError, match=r"a deadlock of \['read_early'\]"):
            gluon.warp_specialize(partitions, [4], [64])


def test_a_product_reads_late_and_is_not_read_early():
    gluon.launch.begin_program((0, 0), (1, 1))
    stage = gluon.allocate_shared_memory(gluon.bfloat16, (4, 4))
    ones = language.full((4, 4), 1.0, gluon.bfloat16)
    stage.store(ones)
    pending = gluon.warpgroup_mma(ones, stage, language.zeros((4, 4), gluon.float32), is_async=True)
    with pytest.raises(AssertionError, match="before it is waited for"):
        _ = pending + 1
    stage.store(ones + ones)
    assert (gluon.warpgroup_mma_wait(0, deps=[pending]).data == 8).all()


def test_accesses_outside_of_tensors_are_refused():
    tensor = torch.arange(8, dtype=torch.int32)
    gluon.launch.begin([tensor])
    pointer, place = gluon.as_argument(tensor), language.arange(0, 16)
    loaded = gluon.load(pointer + place, mask=place < 8, other=-1).data
    assert loaded.tolist() == [*range(8), *[-1] * 8]
    with pytest.raises(AssertionError, match="outside of the launch's tensors"):
        gluon.load(pointer + place, mask=place < 9, other=0)
    with pytest.raises(AssertionError, match="misaligned access of 4 bytes"):
        gluon.load((pointer.to(gluon.int64) + 2).to(gluon.Pointer(gluon.int32)))


@every_type
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("num_heads", [64, 20])
def test_one_program_joins_splits_as_several_do(ratios, step, num_heads, monkeypatch):
    """The bits are those of splits that other programs combine, with one program and with more."""
    replace_combine(monkeypatch, whole_rows=64, split_rows=128)
    handle = flash(ratios, step, num_query_heads=num_heads)
    raw, prepared = make_raw(handle)
    results = []
    for num_joining in (0, 1, 3):
        monkeypatch.setattr(attention, "count_joining", lambda *_, n=num_joining: n)
        is_raw = num_joining > 1
        query = raw if is_raw else prepared
        results.append(run(triton(), handle, query, batch_invariant=True, is_query_raw=is_raw))
        assert_same_bits(results[-1], results[0])
    assert_within_bound(handle, prepared, results[0])


def test_joined_splits_keep_nan(monkeypatch):
    """Logits of NaN leave a split without a largest one, and its sum NaN."""
    replace_combine(monkeypatch, whole_rows=64, split_rows=128)
    handle = flash(TYPES["csa"], "decode")
    query = make_raw(handle)[1]
    query.query[0] = float("nan")
    for num_joining in (0, 1):
        monkeypatch.setattr(attention, "count_joining", lambda *_, n=num_joining: n)
        output = run(triton(), handle, query, batch_invariant=True).output
        assert output[0].isnan().all() and output[1:].isfinite().all()
