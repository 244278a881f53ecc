"""Scores of chunks on Hopper are bitwise those of `indexer._score_kernel`, and so are selections.

On the CPU `test_hopper` runs the kernel by a model of Gluon. Its sums are not in the GPU's order,
so bits are compared on a GPU alone.
"""

import pytest
import torch

from dsv4 import CacheConfig
from dsv4.kernels.contracts import Selection
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.kernels.reference.indexer import select_topk
from dsv4.kernels.triton import chunk_scores, indexer
from dsv4.kernels.triton.chunk_scores import ChunkKeys, choose_splits, tokens_at_once
from dsv4.testing import POISON_BYTE
from tests.kernels.test_triton_indexer import (
    filled,
    random_query,
    replace_keys,
    select,
    triton,
    visible_counts,
)

FORMATS = list(chunk_scores.DTYPES)
V41 = {"kv_source_layer_ids": (0,), "index_source_layer_ids": (0,), "candidate_source_layer_id": -1}
all_heads = pytest.mark.parametrize("heads", chunk_scores.HEADS)


def handle_of(
    name: str, before, after, *, heads: int = 64, ratio: int = 4, topk: int = 8,
    device: str = "cuda", **choices,
):  # fmt: skip
    make, own = (CacheConfig.v4_flash, {}) if ratio == 4 else (CacheConfig.v41_flash, V41)
    config = make(
        compress_ratios=(ratio,), num_query_heads=1, index_format=name, index_num_heads=heads,
        index_topk=topk, **own, **choices,
    )  # fmt: skip
    return filled(config, list(before), list(after), device=device)


def empty_keys(handle, *, device: str) -> ChunkKeys:
    stride = -(-handle.plan.max_entries(4) // 64) * 64
    num_keys = stride * len(handle.tokens.chunk_ids)
    name = handle.config.index_format
    codes = torch.full((num_keys, 128), POISON_BYTE, dtype=torch.uint8, device=device)
    extras = torch.full((num_keys,), -9.0, device=device)
    return ChunkKeys(codes.view(chunk_scores.DTYPES[name]), extras, stride, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_keys_become_operands(name):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    handle = handle_of(name, [40, 300, 99], [290, 301, 117], device=device)
    keys = handle.memory.index_keys
    if name == "mxfp4":
        replace_keys(keys, 107, 133)
        first, second = handle.tokens.request_slots[handle.tokens.chunk_ids.long()].tolist()
        block = handle.tokens.block_table[first, 1]
        keys.data[block, 5, 32:48], keys.scales[block, 5, 2] = 0x80, 0  # zeros, some negative
        keys.scales[handle.tokens.block_table[second, 0], 3, 2] = 134
    else:
        keys.field("scale").uniform_()
    chunk_keys = empty_keys(handle, device=device)
    max_entries = handle.plan.max_entries(4)
    chunk_scores.store_operands(chunk_keys, handle.memory, handle.tokens, max_entries=max_entries)
    last = [*handle.tokens.token_starts.tolist()[1:], handle.plan.num_tokens]
    assert handle.tokens.chunk_ids.tolist() == [0, 3] and max_entries == 75
    for nth, (request, count) in enumerate([(0, 72), (3, 29)]):
        token = slice(last[request] - 1, last[request])
        rows = visible_entry_rows(keys, handle.tokens, token, ratio=4, max_entries=count)
        want = gather_rows(keys, rows)[0]
        first = nth * chunk_keys.stride
        got = chunk_keys.codes[first : first + count].float()
        extras = chunk_keys.extras[first : first + count]
        if name == "fp8":
            assert torch.equal(got * extras[:, None], want)
            continue
        got = got.unflatten(-1, (4, 2, 4, 4)).permute(0, 3, 1, 2, 4).flatten(1) * 2.0**-7
        is_held = torch.ones(count, dtype=torch.bool, device=device)
        if nth == 1:
            is_held[3] = False
            assert got[3, 64:96].isnan().any()
        assert torch.equal(got[is_held], want[is_held])
        flags = chunk_keys.extras[first // 64 :][: -(-count // 64)]
        assert flags.tolist() == ([0.0, 0.0] if nth == 0 else [1.0])


@pytest.mark.parametrize("num_programs", [4, 132])
def test_splits_have_every_tile(num_programs):
    for num_groups in (1, 2, 66, 131, 132, 133, 1056):
        for num_tiles in (1, 7, 8, 9, 128, 513, 1024):
            splits, tiles = choose_splits(num_groups, num_tiles, num_programs)
            assert splits >= 1 and (splits - 1) * tiles < num_tiles <= splits * tiles


def test_whole_waves_of_programs():
    cpu = torch.device("cpu")  # with 4 multiprocessors
    assert [tokens_at_once(n, 64, cpu) for n in (1, 7, 8, 9, 23, 24)] == [1, 7, 8, 8, 16, 24]
    assert [tokens_at_once(n, 32, cpu) for n in (7, 15, 16, 17, 47)] == [7, 15, 16, 16, 32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "after", "num_rows", "is_apart"),
    [("fp8", 330, 64, True), ("fp8", 301, 64, False), ("bf16", 330, 64, False),
     ("fp8", 330, 1, False)],
)  # fmt: skip
def test_where_chunks_are_scored_apart(name, after, num_rows, is_apart):
    """Keys of 2 bytes, a step, and a workspace of few rows are left to the other kernel."""
    handle = handle_of(name, [300], [after])
    query, _weights = random_query(handle)
    row = 64 * 128 * 2 + 64 * 4 + 82 * 4
    memory = handle.memory._replace(index_scratch=handle.memory.index_scratch[: num_rows * row])
    keys = chunk_scores.cut_chunk_keys(query, memory, handle.tokens, max_entries=82)
    assert (keys is not None) == is_apart


def both_scores(handle, query, weights, *, num_rows: int | None = None) -> list[torch.Tensor]:
    """Scores by groups of chunk tokens, and by the kernel of steps; NaN where nothing is scored."""
    max_entries, found = handle.plan.max_entries(handle.layer.ratio), []
    arguments = {"num_heads": query.shape[1], "max_entries": max_entries}
    for is_apart in (True, False):
        handle.memory.index_scratch.fill_(POISON_BYTE)
        keys = None
        if is_apart:
            keys = chunk_scores.cut_chunk_keys(
                query, handle.memory, handle.tokens, max_entries=max_entries
            )
            assert keys is not None
            chunk_scores.store_operands(keys, handle.memory, handle.tokens, max_entries=max_entries)
        scratch = indexer.index_scratch(
            query, handle.memory, max_entries=max_entries, num_tokens=num_rows, chunk_keys=keys
        )
        parts = []
        for first in range(0, len(query), scratch.num_rows):
            part = range(len(query))[first : first + scratch.num_rows]
            scratch.scores.fill_(torch.nan)
            indexer.prepare_queries(query, weights, scratch, handle.memory, handle.tokens, part)
            indexer.score_entries(
                scratch, handle.memory, handle.tokens, part, **arguments, chunk_keys=keys
            )
            parts.append(scratch.scores[: len(part), :max_entries].clone())
        found.append(torch.cat(parts))
    counts = visible_counts(handle)
    counts = torch.where(counts > handle.config.index_topk, counts, 0)
    is_seen = torch.arange(max_entries, device=query.device) < counts[:, None]
    return [torch.where(is_seen, scores, 0.0) for scores in found]


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(0).view(torch.int32), b.nan_to_num(0).view(torch.int32))


def both_selections(handle, query, weights, monkeypatch) -> tuple[Selection, Selection]:
    handle.memory.index_scratch.fill_(POISON_BYTE)
    apart = select(triton(), handle, query, weights)
    with monkeypatch.context() as patch:
        patch.setattr(indexer, "cut_chunk_keys", lambda *_, **__: None)
        together = select(triton(), handle, query, weights)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    return apart, together


CHUNKS = [
    ([0], [130]),  # tokens that see nothing, few, and more than topk
    ([1019], [1031]),  # 254 to 257 entries
    ([4091], [4098]),
    ([250], [251 + 4 * 64]),
    ([3000, 7, 1500], [3065, 8, 1571]),  # odd chunks and a step
    ([700, 200, 300, 4000], [733, 260, 333, 4001]),
    ([500, 501], [502, 577]),
    ([900, 40, 700, 30, 800], [906, 42, 703, 34, 805]),  # 2 to 6 tokens
]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", CHUNKS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_scores_are_those_of_steps(heads, name, lengths, monkeypatch):
    handle = handle_of(name, *lengths, heads=heads)
    query, weights = random_query(handle)
    apart, alone = both_scores(handle, query, weights)
    assert (alone != 0).any()
    assert_same_bits(apart, alone)
    both_selections(handle, query, weights, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 3, 5, 31, 64, 65, 263, 264, 265, 529, 8191, 8192, 8193])
@all_heads
def test_chunks_of_any_length(heads, num_tokens, monkeypatch):
    handle = handle_of("fp8", [2000], [2000 + num_tokens], heads=heads)
    query, weights = random_query(handle)
    assert_same_bits(*both_scores(handle, query, weights))
    both_selections(handle, query, weights, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@all_heads
def test_parts_of_a_chunk(heads, num_rows):
    handle = handle_of("mxfp4", [900, 40], [1003, 177], heads=heads)
    query, weights = random_query(handle)
    assert_same_bits(*both_scores(handle, query, weights, num_rows=num_rows))


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1, 2])
def test_ratios_of_v41(ratio, monkeypatch):
    handle = handle_of("mxfp4", [600, 40], [667, 177], heads=32, ratio=ratio)
    query, weights = random_query(handle)
    assert_same_bits(*both_scores(handle, query, weights))
    both_selections(handle, query, weights, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "last"), [(107, 133), (106, 134), (0, 220)])
@all_heads
def test_keys_that_e5m2_does_not_hold(heads, first, last):
    handle = handle_of("mxfp4", [2000, 60], [2033, 61], heads=heads)
    replace_keys(handle.memory.index_keys, first, last)
    apart, alone = both_scores(handle, *random_query(handle))
    assert not alone.isnan().any()
    assert_same_bits(apart, alone)


@pytest.mark.gpu
@all_heads
def test_queries_that_e5m2_does_not_hold(heads):
    handle = handle_of("mxfp4", [2000], [2033], heads=heads, index_hadamard=False)
    query, weights = random_query(handle)
    query[5, :, :32] *= 2.0**-40
    apart, alone = both_scores(handle, query, weights)
    assert not alone.isnan().any()
    assert_same_bits(apart, alone)


def hostile_scales(kind: str, shape: torch.Size, topk: int) -> torch.Tensor:
    """Scales of keys that are otherwise equal: they order the scores."""
    count = shape.numel()
    steps = torch.arange(count) / count + 0.5
    lognormal = torch.randn(count, generator=torch.Generator().manual_seed(3)).mul(2).exp()
    repeated = steps.clone()
    repeated[torch.randperm(count, generator=torch.Generator().manual_seed(4))[: topk + 1]] = 2.0
    scales = {
        "equal": torch.ones(count), "nan": torch.full((count,), torch.nan),
        "zero": torch.zeros(count), "ascending": steps, "descending": steps.flip(0),
        "lognormal": lognormal, "repeated": repeated,
    }  # fmt: skip
    return scales[kind].reshape(shape)


HOSTILE = ["equal", "nan", "zero", "ascending", "descending", "lognormal", "repeated"]


def hostile_case(name: str, kind: str, before: int, after: int, *, topk: int = 8, **choices):
    """A chunk, its queries and weights; keys differ by their scales alone.

    Scales of mxfp4 are powers of two, so that many are equal. None is NaN: weights are instead.
    """
    handle = handle_of(name, [before], [after], topk=topk, **choices)
    keys = handle.memory.index_keys
    keys.data[:] = keys.data[0, 0].clone()
    query, weights = random_query(handle)
    if name == "fp8":
        scales = keys.field("scale")
        scales.copy_(hostile_scales(kind, scales.shape, topk))
        return handle, query, weights.abs()
    rows = hostile_scales("equal" if kind == "nan" else kind, keys.scales.shape[:2], topk)
    powers = 127 + (8 * rows.log2()).round().clamp(-23, 23)
    keys.scales.copy_(powers[..., None].expand(keys.scales.shape))
    return handle, query, weights.fill_(torch.nan) if kind == "nan" else weights.abs()


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [8, 512])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_hostile_scores(heads, name, kind, topk, monkeypatch):
    handle, query, weights = hostile_case(name, kind, 9000, 9135, heads=heads, topk=topk)
    apart, alone = both_scores(handle, query, weights)
    assert_same_bits(apart, alone)
    chosen, _same = both_selections(handle, query, weights, monkeypatch)
    best = select_topk(alone, visible_counts(handle), topk)
    assert torch.equal(chosen.entry_idx.long(), best)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_tops(name, kind, monkeypatch):
    """Rows of one level of groups, whose tops are stored with the scores."""
    handle, query, weights = hostile_case(name, kind, 40000, 40077, topk=512)
    chosen, _same = both_selections(handle, query, weights, monkeypatch)
    _apart, alone = both_scores(handle, query, weights)
    best = select_topk(alone, visible_counts(handle), 512)
    assert torch.equal(chosen.entry_idx.long(), best)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths",
    [([40000], [40133]), ([300000], [300021]), ([300000, 7, 41000, 900], [300009, 8, 41066, 910])],
    ids=str,
)
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_tops_of_groups(heads, name, lengths, monkeypatch):
    """One and two levels; chunks, a step, a group of tokens of two requests, scores again."""
    handle = handle_of(name, *lengths, heads=heads, topk=512)
    query, weights = random_query(handle)
    weights[10, 3] = torch.nan
    if name == "mxfp4":
        replace_keys(handle.memory.index_keys, 104, 133)
    both_selections(handle, query, weights, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_keys_and_weights_that_are_nan(heads, name, monkeypatch):
    handle = handle_of(name, [2000], [2065], heads=heads)
    query, weights = random_query(handle)
    weights[10, 3], weights[11, 5] = torch.nan, torch.inf
    query[20, 7, 9] = torch.nan
    if name == "fp8":
        handle.memory.index_keys.data[:, 5, 17] = 0x7F
    apart, alone = both_scores(handle, query, weights)
    assert alone[10].isnan().any()
    assert_same_bits(apart, alone)
    both_selections(handle, query, weights, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@all_heads
def test_long_chunks_again_and_again(heads, name):
    handle = handle_of(name, [30000], [30700], heads=heads, topk=512)
    query, weights = random_query(handle, dtype=torch.bfloat16)
    first, alone = both_scores(handle, query, weights)
    assert_same_bits(first, alone)
    chosen = select(triton(), handle, query, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = select(triton(), handle, query, weights)
    for _ in range(10):
        handle.memory.index_scratch.fill_(POISON_BYTE)
        for part in captured:
            part.fill_(-9)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, chosen, strict=True))
