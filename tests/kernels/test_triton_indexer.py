"""The Triton indexer chooses the reference's entries: on a GPU, or under Triton's interpreter.

Scores are sums in fp32, the reference's in fp64. With A = Σ_h |w_h| Σ_d |q_d k_d|, every product
exact and u = 2^-24, a score differs by at most

    (2 dim + heads + 16) u A

since each of the dim additions of a product loses at most 2u of what is added (tensor cores cut
off), those over heads u each, and weights, scales and the reference's own rounding less than 16 u.

Hopper adds FP8 products (E4M3 of fp8 keys, E5M2 of mxfp4) to the sum so far, 32 at a time: all are
cut off 13 bits below the largest one's leading bit, the largest loses nothing by it, and their sum
is cut off in the same way. Cutting off makes nothing larger, so every number on the way is at most
A_h = Σ_d |q_d k_d|, and 33 of them for each 32 channels lose at most 2^-13 A_h. A zero or subnormal
operand may count with the exponent of the smallest normal number, so operands are taken as no
smaller in this A_h. mxfp4 keys that E5M2 doesn't hold are added group by group, which is exact.
"""

from dataclasses import dataclass, field, replace

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import INDEX_FORMATS
from dsv4.kernels import reference
from dsv4.kernels.backends import load_backend
from dsv4.kernels.contracts import Selection
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.codec import encode, read_rows
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.kernels.reference.indexer import index_query, select_topk
from dsv4.kernels.triton import indexer, mxfp4_scores
from dsv4.kernels.triton.launch import ScoreLaunch, find_launch
from dsv4.testing import POISON_BYTE
from tests.kernels import test_triton_gather as gather

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """Lengths of each request before and after the last forward, and choices of the config."""

    name: str
    before: list[int]
    after: list[int]
    choices: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("decode around topk entries", [34, 35, 36, 39], [35, 36, 37, 40]),
    Case("no entry, one entry, many", [0, 3, 200], [1, 4, 201]),
    Case("a chunk among steps", [30, 250, 99], [51, 251, 100]),
    Case("a verify step", [33, 254, 100], [36, 257, 101], {"drafts_per_step": 2}),
    Case("blocks that don't divide", [767, 1000], [769, 1001], {"block_tokens": 384}),
    Case("heads that are no power of two", [300], [303], {"index_num_heads": 5}),
    Case("many heads", [100], [101], {"index_num_heads": 40}),
    Case("channels that are no power of two", [300], [303],
         {"index_head_dim": 96, "index_hadamard": False}),
    Case("without Hadamard", [300], [303], {"index_hadamard": False}),
    Case("one entry chosen", [50], [55], {"index_topk": 1}),
    Case("topk no power of two", [150], [155], {"index_topk": 13}),
    Case("global scale", [120], [123], {"index_format": "nvfp4", "index_global_scale": 0.37}),
    *(Case(f"steps {name}", [139, 555], [141, 556], {"index_format": name})
      for name in INDEX_FORMATS),
]  # fmt: skip


def filled(config: CacheConfig, before: list[int], after: list[int], *, device: str = DEVICE):
    """As for a gather, with a workspace of NaN, and no larger than the forward needs."""
    handle = gather.filled(
        config, before, after, device=device, max_forward_tokens=max(64, sum(after) + 1)
    )
    handle.memory.index_scratch.fill_(POISON_BYTE)
    return handle


def tiny(**choices) -> CacheConfig:
    return CacheConfig.tiny(compress_ratios=(4,), **choices)


def random_query(handle, *, dtype=torch.float32, seed: int = 7):
    """Index queries and head weights of both signs for every token."""
    generator = torch.Generator().manual_seed(seed)
    config, num_tokens = handle.config, handle.plan.num_tokens
    shape = (num_tokens, config.index_num_heads, config.index_head_dim)
    query = torch.randn(shape, generator=generator)
    weights = torch.randn(shape[:2], generator=generator)
    return query.to(handle.positions.device, dtype), weights.to(handle.positions.device, dtype)


def select(backend, handle, query, weights, *, memory=None) -> Selection:
    return backend.select_entries(
        query, weights, handle.memory if memory is None else memory, handle.tokens,
        max_entries=handle.plan.max_entries(handle.layer.ratio),
    )  # fmt: skip


def triton():
    return load_backend("triton")


def prepared(handle, query, weights):
    """The workspace after queries were made ready and scored."""
    max_entries = handle.plan.max_entries(4)
    scratch = indexer.index_scratch(query, handle.memory, max_entries=max_entries)
    part = range(len(query))
    assert scratch.num_rows == len(query)
    indexer.prepare_queries(query, weights, scratch, handle.memory, handle.tokens, part)
    indexer.score_entries(
        scratch, handle.memory, handle.tokens, part,
        num_heads=query.shape[1], max_entries=max_entries,
    )  # fmt: skip
    return scratch


def visible_counts(handle) -> torch.Tensor:
    slots = addressing.token_slots(handle.tokens)
    return torch.where(slots >= 0, (handle.positions.long() + 1) // handle.layer.ratio, 0)


def reference_query(handle, query):
    return index_query(
        query, handle.memory.index_keys.format, handle.rope,
        has_hadamard=handle.config.index_hadamard, global_scale=handle.memory.global_scale,
    )  # fmt: skip


def exact_scores(handle, query, weights):
    """fp64 scores of the quantised queries and keys, and the bound of their error."""
    keys, config, ratio = handle.memory.index_keys, handle.config, handle.layer.ratio
    rows = visible_entry_rows(
        keys, handle.tokens, slice(None), ratio=ratio, max_entries=handle.plan.max_entries(ratio)
    )
    values = gather_rows(keys, rows, global_scale=handle.memory.global_scale).double()
    ready = reference_query(handle, query).double()
    heads, dim = ready.shape[1:]
    scaled = weights.double() * (dim**-0.5 * heads**-0.5)
    products = torch.einsum("ned,nhd->neh", values, ready).relu()
    sizes = torch.einsum("ned,nhd->neh", values.abs(), ready.abs())
    size = torch.einsum("neh,nh->ne", sizes, scaled.abs())
    bound = (2 * dim + heads + 16) * 2.0**-24 * size
    if DEVICE == "cuda" and config.index_format in ("fp8", "mxfp4"):
        bound += fp8_loss(keys, rows, values, ready, scaled)
    return torch.einsum("neh,nh->ne", products, scaled), bound


def fp8_loss(keys, rows, values, ready, scaled):
    """What scores lose by sums with 13 bits after the leading one, `[tokens, entries]`."""
    dim = values.shape[-1]
    sizes = torch.einsum("ned,nhd->neh", *fp8_sizes(keys.format.name, values, ready))
    loss = (dim + dim // 32) * 2.0**-13 * torch.einsum("neh,nh->ne", sizes, scaled.abs())
    return loss if keys.format.name == "fp8" else loss * is_held(keys, rows)


def fp8_sizes(name, values, ready):
    """Magnitudes of keys and queries, no smaller than their operands' smallest normal number.

    That is 2^-6 of E4M3, where a row's largest value is 224 at least; and 2^-14 of E5M2, where keys
    of mxfp4 are multiplied by 2^7, and a query's largest value is at least 3 times 2^6.
    """
    largest_key, largest_query = (x.abs().amax(-1, keepdim=True) for x in (values, ready))
    if name == "fp8":
        key_floor, query_floor = largest_key * (2.0**-6 / 224), largest_query * (2.0**-6 / 224)
    else:
        key_floor = torch.full_like(largest_key, 2.0**-21)
        query_floor = largest_query * (2.0**-20 / 3)
    return torch.maximum(values.abs(), key_floor), torch.maximum(ready.abs(), query_floor)


def is_held(keys, rows):
    """Whether E5M2 operands hold the mxfp4 keys at `rows`: each group's scale, or its zeros."""
    stored = read_rows(keys, rows.clamp(min=0).flatten())
    is_zero = (stored.data.unflatten(1, (-1, 16)) & 0x77 == 0).all(-1)
    fits = ((stored.scales >= 107) & (stored.scales <= 133)) | is_zero
    return fits.all(-1).view(rows.shape)


def assert_selected(got: Selection, handle, query, weights) -> float:
    """The reference's entries, but for those whose scores are too close to tell.

    Returns:
        The share of tokens with the very same entries.
    """
    expected = select(reference, handle, query, weights)
    assert [part.dtype for part in got] == [part.dtype for part in expected]
    assert torch.equal(got.counts, expected.counts)
    scores, bound = exact_scores(handle, query, weights)
    same = 0
    for token, (mine, theirs) in enumerate(zip(got.entry_idx, expected.entry_idx, strict=True)):
        count = got.counts[token]
        assert (mine[:count].diff() > 0).all() and (mine[count:] == -1).all()
        chosen, wanted = set(mine[:count].tolist()), set(theirs[:count].tolist())
        if chosen == wanted:
            same += 1
            continue
        assert visible_counts(handle)[token] > handle.config.index_topk
        extra, missing = sorted(chosen - wanted), sorted(wanted - chosen)
        assert max(extra) < visible_counts(handle)[token]
        highest = (scores - bound)[token, missing].max()
        assert (scores + bound)[token, extra].min() >= highest, "a worse entry was chosen"
    slots = addressing.token_slots(handle.tokens)[:, None]
    rows = addressing.entry_rows(
        handle.tokens.block_table, slots, got.entry_idx.long(),
        handle.memory.index_keys.rows_per_page,
    )  # fmt: skip
    assert torch.equal(got.rows, rows)
    return same / max(1, len(got.counts))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selection(case):
    handle = filled(tiny(**case.choices), case.before, case.after)
    query, weights = random_query(handle)
    got = select(triton(), handle, query, weights)
    assert assert_selected(got, handle, query, weights) >= 0.9


@pytest.mark.parametrize("name", INDEX_FORMATS)
def test_scores_are_within_their_bound(name):
    handle = filled(tiny(index_format=name), [555, 139], [557, 141])
    query, weights = random_query(handle)
    scratch = prepared(handle, query, weights)
    scores, bound = exact_scores(handle, query, weights)
    counts = visible_counts(handle)
    assert (counts > handle.config.index_topk).sum() == 4
    for token, count in enumerate(counts.tolist()):
        if count > handle.config.index_topk:
            error = (scratch.scores[token, :count].double() - scores[token, :count]).abs()
            assert (error <= bound[token, :count]).all()
        else:
            assert scratch.scores[token].isnan().all(), "nothing was scored"


@pytest.mark.parametrize("name", INDEX_FORMATS)
def test_topk_is_exact_on_the_same_scores(name):
    handle = filled(tiny(index_format=name), [300, 41], [303, 42])
    query, weights = random_query(handle)
    scores = prepared(handle, query, weights).scores.clone()
    got = select(triton(), handle, query, weights)
    best = select_topk(scores, visible_counts(handle), handle.config.index_topk)
    assert torch.equal(got.entry_idx.long(), best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INDEX_FORMATS)
def test_queries_are_the_references(name, dtype):
    scale = {"index_global_scale": 0.5} if name == "nvfp4" else {}
    handle = filled(tiny(index_format=name, **scale), [300], [303])
    query, weights = random_query(handle, dtype=dtype)
    scratch = prepared(handle, query, weights)
    is_scored = visible_counts(handle) > handle.config.index_topk
    want = reference_query(handle, query)[is_scored]
    heads, dim = query.shape[1:]
    dtypes = {"fp8": torch.float8_e4m3fn, "fp32": torch.float32, "mxfp4": torch.float8_e5m2}
    got = scratch.queries.view(dtypes.get(name, torch.bfloat16)).float()
    got = got.view(len(query), heads, dim)[is_scored]
    scaled = weights.float()[is_scored] * (dim * heads) ** -0.5
    folded = scratch.weights[is_scored][:, :heads] / scaled
    if name == "mxfp4":
        rests = scratch.weights[is_scored][:, heads:].unflatten(1, (dim // 32, heads))
        got = got.unflatten(-1, (dim // 32, 2, 4, 4))  # as `key_operand` orders channels
        got = got.permute(0, 1, 4, 2, 3, 5).reshape(*got.shape[:2], dim // 32, 32)
        got = (got * rests.transpose(1, 2)[..., None]).flatten(-2) * 2.0**8
    if name == "nvfp4":
        got = got.unflatten(-1, (2, dim // 2)).transpose(-1, -2).flatten(-2) * 0.5
    if name in ("fp8", "mxfp4"):
        got = got * folded.log2().round().exp2()[:, :, None]
    assert torch.equal(got, want)
    assert torch.allclose(folded.log2(), folded.log2().round(), atol=1e-5), "powers of two alone"


def test_groups_of_very_different_size():
    """Groups of a query beyond what E5M2 holds side by side are exact all the same."""
    handle = filled(tiny(index_format="mxfp4", index_hadamard=False), [300], [301])
    query, weights = random_query(handle)
    query[:, :, :32] *= 2.0**-40
    query[:, 3:5, :32] *= 2.0**-60
    keys = handle.memory.index_keys
    keys.data[:, ::2, :16] = 0x7A
    keys.data[:, ::2, 16:] = 0
    keys.scales[:, :, 0] = 127 + 50
    scores, bound = exact_scores(handle, query, weights)
    scratch = prepared(handle, query, weights)
    assert (scratch.weights[:, query.shape[1] :] < 1).any(), "some residual scale is left"
    count = visible_counts(handle)[0]
    error = (scratch.scores[0, :count].double() - scores[0, :count]).abs()
    assert (scores[0, :count] != 0).any() and (error <= bound[0, :count]).all()


def test_scale_bytes_at_the_ends():
    """UE8M0 has no zero: byte 0 is 2^-127; and byte 255 is NaN."""
    handle = filled(tiny(index_format="mxfp4"), [300], [301])
    query, weights = random_query(handle)
    query *= 2.0**60
    keys = handle.memory.index_keys
    keys.scales.random_(0, 3)
    page = handle.tokens.block_table[handle.request_slots[0], 0]
    keys.scales[page, 5, 1] = 255
    scores, bound = exact_scores(handle, query, weights)
    count = visible_counts(handle)[0]
    got = prepared(handle, query, weights).scores[0, :count].double()
    assert got.isnan().nonzero().flatten().tolist() == [5]
    error = (got - scores[0, :count]).abs()
    assert (error <= bound[0, :count])[got == got].all() and (got[got == got] != 0).any()


def key_scores(handle, query, weights):
    """Scores of the first token, those in fp64, and their bound."""
    scores, bound = exact_scores(handle, query, weights)
    count = visible_counts(handle)[0]
    got = prepared(handle, query, weights).scores[0, :count].double()
    return got, scores[0, :count], bound[0, :count]


@pytest.fixture
def scored_again(monkeypatch):
    """The tiles that were scored group by group; on a GPU nobody sees them."""
    tiles = []

    def count_and_score(tile, *arguments):
        tiles.append(tile)
        original(tile, *arguments)

    original = mxfp4_scores.score_by_groups
    if DEVICE == "cpu":
        monkeypatch.setattr(mxfp4_scores, "score_by_groups", count_and_score)
    return tiles


def with_scales(first, last):
    """A request whose mxfp4 keys have every code, and scale bytes from first to last."""
    handle = filled(tiny(index_format="mxfp4"), [300], [301])
    replace_keys(handle.memory.index_keys, first, last)
    return handle


def replace_keys(keys, first, last):
    """Random codes, and scale bytes from first to last."""
    generator = torch.Generator().manual_seed(5)
    keys.scales.copy_(torch.randint(first, last + 1, keys.scales.shape, generator=generator))
    keys.data.copy_(torch.randint(0, 256, keys.data.shape, generator=generator))


@pytest.mark.parametrize(
    ("first", "last"),
    [(106, 108), (132, 134), (106, 134), (59, 61), (189, 191), (0, 220)],  # larger scores overflow
)
def test_keys_that_operands_hold_and_others(first, last, scored_again):
    handle = with_scales(first, last)
    query, weights = random_query(handle)
    got, want, bound = key_scores(handle, query, weights)
    assert (want != 0).all() and ((got - want).abs() <= bound).all()
    assert scored_again or DEVICE == "cuda"


@pytest.mark.parametrize(("first", "last"), [(107, 107), (107, 133), (133, 133)])
def test_keys_that_operands_hold_are_scored_once(first, last, scored_again):
    handle = with_scales(first, last)
    query, weights = random_query(handle)
    got, want, bound = key_scores(handle, query, weights)
    assert (want != 0).all() and ((got - want).abs() <= bound).all()
    assert not scored_again


@pytest.mark.parametrize("byte", [0, 1, 106, 134, 220])
def test_a_group_of_zeros_may_have_any_scale(byte, scored_again):
    """They are multiplied as they are, as 0."""
    handle = with_scales(107, 133)
    query, weights = random_query(handle)
    keys = handle.memory.index_keys
    keys.data[:, :, :16] = 0x80
    keys.data[:, ::2] = 0
    keys.scales[:, :, 0] = byte
    keys.scales[:, ::2] = byte
    got, want, bound = key_scores(handle, query, weights)
    assert (got[::2] == 0).all() and (want[1::2] != 0).all()
    assert ((got - want).abs() <= bound).all()
    assert not scored_again


@pytest.mark.parametrize("codes", [0x11, 0x7A])
@pytest.mark.parametrize(("first", "last"), [(107, 133), (30, 220)])
def test_a_nan_scale_makes_its_key_nan(first, last, codes):
    """And no other key."""
    handle = with_scales(first, last)
    query, weights = random_query(handle)
    keys = handle.memory.index_keys
    page = handle.tokens.block_table[handle.request_slots[0], 0]
    keys.scales[page, 5, 1] = 255
    keys.data[page, 5, 16:] = codes
    got, want, bound = key_scores(handle, query, weights)
    assert got.isnan().nonzero().flatten().tolist() == [5]
    others = torch.arange(len(got), device=got.device) != 5
    assert ((got - want).abs() <= bound)[others].all() and (got[others] != 0).any()


@pytest.mark.parametrize(("octaves", "is_held"), [(0, True), (21, True), (22, False), (99, False)])
def test_groups_of_a_query_that_operands_hold_and_others(octaves, is_held, scored_again):
    """The first group is so much smaller than the second, which keeps its scale when it rotates."""
    handle = filled(tiny(index_format="mxfp4", index_hadamard=False), [300], [301])
    query, weights = random_query(handle)
    query[:, :, 32:] = 0
    query[:, :, 32] = 6
    query[:, :, :32] = (torch.arange(32, device=DEVICE) % 6 + 1) * 2.0**-octaves
    query[:, :, 0] = -6 * 2.0**-octaves
    keys = handle.memory.index_keys
    keys.data[:, ::2, 16:] = 0
    got, want, bound = key_scores(handle, query, weights)
    assert (want[::2] != 0).any() and ((got - want).abs() <= bound).all()
    assert bool(scored_again) != is_held or DEVICE == "cuda"


@pytest.mark.parametrize("choices", [{}, {"index_head_dim": 96}, {"index_num_heads": 5}], ids=str)
def test_zeros_of_a_query_need_no_scale(choices, scored_again):
    """Groups of zeros have the smallest scale there is, and so have padding channels and heads."""
    handle = filled(tiny(index_format="mxfp4", index_hadamard=False, **choices), [300], [301])
    query, weights = random_query(handle)
    query[:, ::2, :32] = 0
    query[:, 1] = 0
    got, want, bound = key_scores(handle, query, weights)
    assert (want != 0).any() and ((got - want).abs() <= bound).all()
    assert not scored_again


@pytest.mark.parametrize("is_worst", [False, True])
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_sums_with_13_bits_lose_what_the_bound_says(name, is_worst):
    """Hopper's additions, done here; at worst a half of the products is lost beside one of them."""
    handle = filled(tiny(index_format=name), [300], [301])
    keys = handle.memory.index_keys
    if name == "mxfp4":
        replace_keys(keys, 107, 133)
    query, weights = random_query(handle)
    rows = visible_entry_rows(keys, handle.tokens, slice(0, 1), ratio=4, max_entries=75)
    values, ready = gather_rows(keys, rows).double(), reference_query(handle, query)[:1].double()
    if is_worst:
        values[:], ready[:], weights[:] = 0, 1, 1
        values[:, :, 0], values[:, :, 32:] = 1, 1.5 * 2.0**-14
    scaled = weights[:1].double()
    products = values[:, :, None] * ready[:, None]
    key_sizes, query_sizes = fp8_sizes(name, values, ready)
    exponents = leading_bit(key_sizes)[:, :, None] + leading_bit(query_sizes)[:, None]
    sums = added_with_13_bits(products, exponents)
    error = ((products.sum(-1).relu() - sums.relu()) * scaled[:, None]).sum(-1)
    loss = fp8_loss(keys, rows, values, ready, scaled)
    assert (error.abs() <= loss).all() and (error != 0).any()
    assert not is_worst or (error > loss / 3).all()


def leading_bit(x):
    """The exponents of numbers: 0 of 1, and of 0 a small one."""
    return torch.where(x == 0, -99, torch.frexp(x).exponent - 1)


def added_with_13_bits(products, exponents):
    """Sums over the last dimension, 32 products at a time, which are aligned by their exponents."""
    total = products.new_zeros(products.shape[:-1])
    for start in range(0, products.shape[-1], 32):
        addends = torch.cat((products[..., start : start + 32], total[..., None]), dim=-1)
        largest = torch.maximum(exponents[..., start : start + 32].amax(-1), leading_bit(total))
        unit = torch.exp2(largest.double() - 13)
        added = (torch.trunc(addends / unit[..., None]) * unit[..., None]).sum(-1)
        unit = torch.exp2(leading_bit(added).double() - 13)
        total = torch.trunc(added / unit) * unit
    return total


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_tokens_of_a_chunk_are_scored_as_they_are_alone(name, monkeypatch):
    """Groups of 4 tokens: of one request, of two, with padding, and cut short."""
    handle = filled(tiny(index_format=name), [30, 300, 99], [37, 309, 100])
    query, weights = random_query(handle)
    launch = find_launch(ScoreLaunch, f"score {name}", torch.device(DEVICE))
    scores = []
    for tokens in (1, 4):
        changed = launch._replace(tokens=tokens)
        monkeypatch.setattr(indexer, "score_launch", lambda *_, changed=changed: changed)
        handle.memory.index_scratch.fill_(POISON_BYTE)
        scores.append(prepared(handle, query, weights).scores.nan_to_num(-9e9))
    assert len(handle.tokens.chunk_ids) and len(query) % 4 == 2
    assert torch.equal(*scores)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_tokens_in_turn(num_rows):
    handle = filled(tiny(), [30, 300, 99], [37, 302, 100])
    query, weights = random_query(handle)
    whole = select(triton(), handle, query, weights)
    row = indexer.index_row_bytes(
        "mxfp4", num_heads=16, dim=64, topk=8, max_entries=handle.plan.max_entries(4)
    )
    small = torch.full((num_rows * sum(row) + 15,), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
    memory = handle.memory._replace(index_scratch=small)
    parts = select(triton(), handle, query, weights, memory=memory)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def test_few_entries_score_nothing():
    handle = filled(tiny(), [3, 31], [4, 32])
    query, weights = random_query(handle)
    memory = handle.memory._replace(index_scratch=torch.empty(0, dtype=torch.uint8))
    got = select(triton(), handle, query, weights, memory=memory)
    assert all(
        torch.equal(a, b)
        for a, b in zip(got, select(reference, handle, query, weights), strict=True)
    )


def test_nan_and_infinite_queries():
    handle = filled(tiny(index_format="bf16"), [300, 200, 100], [301, 201, 101])
    query, weights = random_query(handle)
    query[0, 3, 5] = torch.nan
    weights[2, 1] = torch.inf
    weights[3, 0] = torch.nan
    got, want = (select(b, handle, query, weights) for b in (triton(), reference))
    assert got.counts.tolist() == want.counts.tolist()
    assert got.counts[0] == got.counts[3] == 0, "every score is NaN"
    assert torch.equal(got.entry_idx[2], want.entry_idx[2])


def test_a_nan_key_is_never_chosen():
    handle = filled(tiny(index_format="bf16", index_hadamard=False), [120], [121])
    keys = handle.memory.index_keys
    page = handle.tokens.block_table[handle.request_slots[0], 0]
    keys.field("key")[page, 4] = torch.nan
    keys.field("key")[page, 6, 0] = torch.inf
    query, weights = random_query(handle)
    got, want = (select(b, handle, query, weights) for b in (triton(), reference))
    assert 4 not in got.entry_idx[0].tolist()
    assert torch.equal(got.entry_idx[0], want.entry_idx[0])


def test_strided_inputs():
    handle = filled(tiny(), [300], [303])
    query, weights = random_query(handle)
    want = select(triton(), handle, query, weights)
    wide = torch.full((len(query), 20, 70), torch.nan, device=DEVICE)
    wide[:, :16, :64] = query
    rows = torch.full((len(query), 1040), torch.nan, device=DEVICE)
    rows[:, 16:] = query.flatten(1)
    for strided in (wide[:, :16, :64], rows[:, 16:].unflatten(1, (16, 64))):
        got = select(triton(), handle, strided, weights.t().contiguous().t())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_tokens():
    config = tiny()
    manager = KVCacheManager(config, max_requests=2, num_blocks=2, device=DEVICE)
    plan = prepare_forward(manager, [], [], [])
    handle = manager.acquire(0, plan)
    got = select(triton(), handle, *random_query(handle))
    assert [tuple(part.shape) for part in got] == [(0, 8), (0, 8), (0,), (0, 0)]


def test_the_handle_uses_it():
    handle = filled(tiny(), [139], [141])
    query, weights = random_query(handle)
    parts = replace(handle.parts, backend="triton", index_backend="triton")
    got = replace(handle, parts=parts).select_entries(query, weights)
    assert_selected(got, handle, query, weights)


def test_stored_rows_are_read_in_place():
    """A key rewritten in its page is scored as it is now."""
    handle = filled(tiny(index_format="fp32", index_hadamard=False), [400], [401])
    query, weights = random_query(handle)
    weights = weights.abs()
    keys = handle.memory.index_keys
    best = reference_query(handle, query)[0].sum(dim=0, keepdim=True) * 100
    page = handle.tokens.block_table[handle.request_slots[0], 1]
    keys.data[page, 3] = encode(keys.format, best).data[0]
    got = select(triton(), handle, query, weights)
    assert keys.rows_per_page + 3 in got.entry_idx[0].tolist()


def real_handle(name: str, *, before=(2040, 5, 9000, 4095), after=(2070, 6, 9001, 4098)):
    config = CacheConfig.v4_flash(
        compress_ratios=(4,), num_query_heads=1, index_format=name, drafts_per_step=2
    )
    return filled(config, list(before), list(after), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", INDEX_FORMATS)
def test_selection_at_the_real_width(name, dtype):
    handle = real_handle(name)
    query, weights = random_query(handle, dtype=dtype)
    got = select(triton(), handle, query, weights)
    assert_selected(got, handle, query, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INDEX_FORMATS)
def test_scores_at_the_real_width(name):
    handle = real_handle(name)
    query, weights = random_query(handle)
    scores, bound = exact_scores(handle, query, weights)
    got = prepared(handle, query, weights).scores
    for token, count in enumerate(visible_counts(handle).tolist()):
        if count > handle.config.index_topk:
            error = (got[token, :count].double() - scores[token, :count]).abs()
            assert (error <= bound[token, :count]).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "last"), [(107, 133), (106, 134), (0, 220)])
def test_scales_at_the_real_width(first, last):
    handle = real_handle("mxfp4", before=[9000], after=[9001])
    replace_keys(handle.memory.index_keys, first, last)
    got, want, bound = key_scores(handle, *random_query(handle))
    assert (want != 0).all() and ((got - want).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", INDEX_FORMATS)
def test_reruns_are_bitwise_equal(name):
    handle = real_handle(name)
    query, weights = random_query(handle)
    scores = prepared(handle, query, weights).scores.clone().nan_to_num(0)
    first = select(triton(), handle, query, weights)
    for _ in range(20):
        handle.memory.index_scratch.fill_(POISON_BYTE)
        again = prepared(handle, query, weights).scores.nan_to_num(0)
        assert torch.equal(again, scores)
        chosen = select(triton(), handle, query, weights)
        assert all(torch.equal(a, b) for a, b in zip(chosen, first, strict=True))


@pytest.mark.gpu
def test_replays_of_a_graph():
    handle = real_handle("mxfp4")
    query, weights = random_query(handle)
    want = select(triton(), handle, query, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = select(triton(), handle, query, weights)
    for _ in range(3):
        for part in got:
            part.fill_(-9)
        handle.memory.index_scratch.fill_(POISON_BYTE)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_a_token_is_scored_alike_in_any_batch():
    handle = real_handle("fp8")
    query, weights = random_query(handle)
    whole = select(triton(), handle, query, weights)
    row = indexer.index_row_bytes(
        "fp8", num_heads=64, dim=128, topk=512, max_entries=handle.plan.max_entries(4)
    )
    memory = handle.memory._replace(index_scratch=handle.memory.index_scratch[: 3 * sum(row)])
    parts = select(triton(), handle, query, weights, memory=memory)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
