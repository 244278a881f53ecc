"""Top-k on given scores is exactly the reference's: on a GPU, or under Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager
from dsv4.kernels import index_scratch
from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.reference.addressing import entry_rows
from dsv4.kernels.reference.indexer import select_topk
from dsv4.kernels.triton import topk as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PER_BLOCK = 6  # doesn't divide anything


def token_map(counts: list[int], max_entries: int, *, device: str) -> TokenMap:
    """A token per count, in slots in descending order; with ratio 1 it sees that many entries."""
    num_slots, num_blocks = len(counts) + 1, -(-max_entries // PER_BLOCK)
    slots = torch.arange(num_slots - 1, 0, -1)
    table = torch.randperm(num_slots * num_blocks, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor(counts) - 1
    none = torch.zeros(0)
    parts = (
        slots, none, none, none, positions, torch.arange(len(counts)), none, none,
        table.view(num_slots, num_blocks), none,
    )  # fmt: skip
    return TokenMap(*(part.int().to(device) for part in parts), 1)


def choose(scores, counts: list[int], topk: int, *, first: int = 0, padding=()) -> Selection:
    """What the kernels choose; `first` tokens before them are left alone.

    Tokens at the indices `padding` have no slot.
    """
    device, max_entries = scores.device, scores.shape[1]
    tokens = token_map([1] * first + counts, max_entries, device=device)
    tokens.request_slots[list(padding)] = -1
    shape = (first + len(counts), topk)
    chosen = Selection(
        torch.full(shape, -7, dtype=torch.int32, device=device),
        torch.full(shape, -7, dtype=torch.int64, device=device),
        torch.full(shape[:1], -7, dtype=torch.int32, device=device),
        torch.empty(shape[0], 0, dtype=torch.int32, device=device),
    )
    num_tops = index_scratch.num_group_tops(max_entries, topk=topk)
    group_tops = torch.full((len(counts), num_tops), 123456, dtype=torch.int32, device=device)
    layout = SimpleNamespace(ratio=1, entries_per_block=PER_BLOCK)
    part = range(first, first + len(counts))
    kernels.choose_best(chosen, scores, group_tops, tokens, layout, part, max_entries=max_entries)
    return chosen


def assert_chosen(scores, counts: list[int], topk: int) -> None:
    """Equal to the reference's choice, rows and counts too."""
    scores = scores.to(DEVICE)
    chosen = choose(scores, counts, topk)
    expected = torch.full((len(counts), topk), -1, device=DEVICE)
    best = select_topk(scores, torch.tensor(counts, device=DEVICE), topk)
    expected[:, : best.shape[1]] = best
    assert torch.equal(chosen.entry_idx.long(), expected)
    assert torch.equal(chosen.counts.long(), (expected >= 0).sum(dim=1))
    tokens = token_map(counts, scores.shape[1], device=DEVICE)
    slots = tokens.request_slots.long()[:, None]
    rows = entry_rows(tokens.block_table, slots, expected, PER_BLOCK)
    assert torch.equal(chosen.rows, rows)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sprinkled(scores, *values: float, share: float = 0.3):
    """A share of the scores replaced by some of the values."""
    generator = torch.Generator().manual_seed(3)
    which = torch.randint(len(values), scores.shape, generator=generator)
    is_replaced = torch.rand(scores.shape, generator=generator) < share
    return torch.where(is_replaced, torch.tensor(values)[which], scores)


NAN, INF = torch.nan, torch.inf
TINY = 2.0**-149
SCORES = {
    "random": lambda x: x,
    "a few magnitudes": lambda x: x * torch.logspace(-40, 30, x.shape[1]),
    "ties": lambda x: x.mul(2).round() / 2,
    "low bits alone": lambda x: 1 + x.mul(3).round() * 2.0**-23,
    "negative": lambda x: -x.abs() - 1,
    "zeros of both signs": lambda x: sprinkled(x, 0.0, -0.0, share=0.8),
    "zeros alone": lambda x: sprinkled(x, 0.0, -0.0, share=1.1),
    "denormals": lambda x: sprinkled(x.mul(4).round() * TINY, 0.0, -0.0, TINY, -TINY),
    "NaN": lambda x: sprinkled(x, NAN, -NAN),
    "mostly NaN": lambda x: sprinkled(x, NAN, share=0.97),
    "NaN alone": lambda x: torch.full_like(x, NAN),
    "infinities": lambda x: sprinkled(x, INF, -INF),
    "mostly -inf": lambda x: sprinkled(x, -INF, share=0.98),
    "-inf and NaN": lambda x: sprinkled(x, -INF, NAN, share=0.98),
    "constant": lambda x: torch.full_like(x, -1.5),
    "ascending": lambda x: x.sort(dim=1).values,
    "descending": lambda x: x.sort(dim=1, descending=True).values,
}


LEVELS = {
    "whole": (4096, 512, 37), "groups": (128, 512, 37), "more groups than members": (512, 128, 5),
    "groups of groups": (128, 128, 5),
}  # fmt: skip


@pytest.fixture(params=LEVELS.values(), ids=LEVELS)
def topk(request, monkeypatch):
    """How many are chosen, of rows taken whole or from groups."""
    whole, narrow, topk = request.param
    monkeypatch.setattr(index_scratch, "WHOLE_ENTRIES", whole)
    monkeypatch.setattr(index_scratch, "NARROW_ENTRIES", narrow)
    return topk


@pytest.mark.parametrize("name", SCORES)
def test_scores(name, topk):
    scores = SCORES[name](normal(10, 1101))
    scores[:, 1090:] = 99.0  # beyond some of the counts, better than the rest
    assert_chosen(scores, [1101, 1090, 513, 300, 65, 63, topk, topk - 1, 1, 0], topk)


@pytest.mark.parametrize("name", ["random", "ties", "NaN"])
def test_best_are_neighbours(name, topk):
    scores = SCORES[name](normal(2, 1101)) - torch.arange(1101) // 8
    assert_chosen(scores, [1101, 999], topk)
    assert_chosen(scores.flip(1), [1101, 999], topk)


@pytest.mark.parametrize("num_best", [1, 2, 16, 17, 64, 100, 300])
def test_topk(num_best, topk):
    counts = [num_best - 1, num_best, num_best + 1, 1307, 306, 0]
    assert_chosen(normal(6, 1307), counts, num_best)


def test_levels():
    sizes = (8192, 8193, 65536, 65537, 524288, 524289)
    levels = [index_scratch.group_levels(n, topk=512) for n in sizes]
    assert levels == [0, 1, 1, 2, 2, 3]
    assert index_scratch.group_levels(16384, topk=2048) == 0
    assert index_scratch.num_group_tops(262144, topk=512) == 32768 + 4096


def test_blocks_of_whole_quads(topk, monkeypatch):
    monkeypatch.setitem(globals(), "PER_BLOCK", 12)
    assert_chosen(normal(2, 1101), [1101, 999], topk)


def test_random_bits(topk):
    bits = torch.randint(-(2**31), 2**31, (4, 1333), generator=torch.Generator().manual_seed(0))
    assert_chosen(bits.int().view(torch.float32), [1333, 200, 97, 96], topk)


def test_what_is_not_visible_is_not_chosen():
    scores = torch.full((2, 40), INF)
    scores[:, :9] = NAN
    assert_chosen(scores, [9, 8], 8)


def test_few_entries_need_no_scores():
    chosen = choose(torch.full((3, 20), NAN, device=DEVICE), [8, 5, 0], 8)
    assert chosen.entry_idx[0].tolist() == list(range(8))
    assert chosen.entry_idx[1].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert chosen.counts.tolist() == [8, 5, 0]


def test_padding_chooses_nothing(topk):
    scores = normal(2, 1101).to(DEVICE)
    alone = choose(scores, [1101, 1101], topk)
    chosen = choose(scores, [1101, 1101], topk, padding=[1])
    assert torch.equal(chosen.entry_idx[0], alone.entry_idx[0])
    assert chosen.counts.tolist() == [topk, 0]
    assert (chosen.entry_idx[1] == -1).all() and (chosen.rows[1] == -1).all()


def test_tokens_before_the_first_are_left_alone():
    scores = normal(2, 50).to(DEVICE)
    chosen = choose(scores, [50, 3], 8, first=3)
    alone = choose(scores, [50, 3], 8)
    assert torch.equal(chosen.entry_idx[3:], alone.entry_idx)
    assert torch.equal(chosen.counts[3:], alone.counts)
    assert all((part[:3] == -7).all() for part in chosen)


@pytest.mark.parametrize("width", [5000, 10_000, 40_000])
def test_default_sizes(width):
    assert_chosen(normal(2, width), [width, 4097], 512)


@pytest.mark.parametrize("width", [32768, 40_000])
def test_the_most_that_are_counted(width):
    """A program's scores are 32,768, all equal: a count has 16 bits."""
    assert_chosen(torch.full((1, width), -1.5), [width], index_scratch.MAX_TOPK)


@pytest.mark.parametrize("name", ["index_topk", "candidate_topk_blocks"])
def test_more_than_are_counted_are_refused(name):
    make = CacheConfig.v4_flash if name == "index_topk" else CacheConfig.v41_flash
    sizes = {"max_requests": 1, "num_blocks": 1, "max_forward_tokens": 1}
    config = make(**{name: index_scratch.MAX_TOPK + 1})
    with pytest.raises(ValueError, match=rf"Invalid {name} of .* at most 4096, got 4097"):
        KVCacheManager(config, backend="triton", device=DEVICE, **sizes)
    KVCacheManager(config, backend="reference", device=DEVICE, **sizes).close()


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [512, 1024, 2048])
@pytest.mark.parametrize("name", SCORES)
def test_long_rows(name, topk):
    scores = SCORES[name](normal(6, 262144))
    assert_chosen(scores, [262144, 262143, 16385, 8192, topk + 1, topk], topk)


@pytest.mark.gpu
def test_reruns_are_equal():
    scores = SCORES["ties"](normal(64, 100_000)).cuda()
    counts = [100_000 - 1000 * n for n in range(64)]
    first = choose(scores, counts, 512)
    for _ in range(20):
        again = choose(scores, counts, 512)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
