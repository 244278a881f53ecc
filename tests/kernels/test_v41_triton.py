"""Triton's kernels on DeepSeek-V4.1's layers against the reference."""

from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import pad

from dsv4 import CacheConfig, KVCacheManager, warm_up
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.kernels import index_scratch
from dsv4.kernels.backends import load_backend
from dsv4.kernels.index_scratch import GROUP, IndexScratch, dense_sizes, num_group_tops
from dsv4.kernels.reference.attention import prepare_query
from dsv4.kernels.reference.gather import gather_rows
from dsv4.kernels.reference.indexer import select_blocks
from dsv4.kernels.triton import attention, candidates, dense_rows, indexer, topk
from dsv4.kernels.triton.candidates import choose_blocks
from dsv4.kernels.triton.launch import HopperLaunch, find_launch
from dsv4.testing import (
    Row,
    _map_tensors,
    forward_inputs,
    forward_layer,
    model_projections,
    model_weights,
    move_to,
    poison,
    run_forward,
    take_rows,
)
from tests.kernels.serving import write_in_parts
from tests.kernels.test_triton_attention import (
    Inputs,
    assert_same_bits,
    assert_within_bound,
    attend_alone,
    split_as_often_as,
)
from tests.kernels.test_triton_attention import run as attend
from tests.v41 import tiny_v41

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"compress_ratios": (0, 2, 2, 1, 1), "kv_source_layer_ids": (1, 3),
         "index_source_layer_ids": (1, 3, 4)}  # fmt: skip
CASES = {
    "decode": ([0, 3, 40], [1, 4, 41], {}),
    "verify": ([0, 39], [3, 42], {"drafts_per_step": 2}),
    "chunk": ([0, 37], [5, 43], {}),
    "split_pages": ([5, 40], [6, 41], {"page_arrangement": "split"}),
    "joined_v4_rows": ([5, 40], [6, 41], {"kv_format": "fp8", "page_arrangement": "joined"}),
    "one_format": ([5, 40], [6, 41], {"kv_format": "fp8_32"}),
    "odd_window": ([5, 40], [6, 41], {"sliding_window": 13}),
    "fp32_rows": ([5, 40], [6, 41], {"kv_format": "fp32"}),
}


def moved(layers):
    return [move_to(DEVICE, layer) for layer in layers]


def fill(manager, weights, before, after):
    """Write requests up to `before`; return the plan of the next forward, and its rows."""
    layers = [
        moved(model_projections(manager.config, length, seed=10 * i))
        for i, length in enumerate(after)
    ]
    slots = [manager.open_request() for _ in after]
    rows = [Row(*row) for row in zip(slots, layers, before, after, strict=True)]
    old = [row._replace(before=0, after=row.before) for row in rows if row.before]
    run_forward(manager, weights, old)
    return prepare_forward(manager, slots, before, after), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("before", "after", "choices"), CASES.values(), ids=CASES)
def test_attention_within_the_bound(before, after, choices, dtype):
    config = tiny_v41(**SMALL, **choices)
    manager = KVCacheManager(
        config, max_requests=3, num_blocks=16, device=DEVICE, backend="reference"
    )
    poison(manager)
    weights = moved(model_weights(config, seed=3))
    plan, rows = fill(manager, weights, before, after)
    chosen = {}
    for idx, learned in enumerate(weights):
        handle, inputs = manager.acquire(idx, plan), forward_inputs(rows, idx)
        handle.write(inputs, learned)
        if inputs.indexer is not None:
            chosen[idx] = handle.select_entries(
                inputs.indexer.query, inputs.indexer.head_weights,
                chosen.get(handle.layer.candidates_of),
            )  # fmt: skip
        listed = chosen[handle.layer.choice_of].rows if handle.layer.ratio else None
        given = Inputs(inputs.query.to(dtype), learned.sinks, listed)
        for invariant in (False, True):
            got = attend(load_backend("triton"), handle, given, batch_invariant=invariant)
            assert_within_bound(handle, given, got)
        raw, prepared = given, given._replace(query=prepare_query(given.query, handle.memory))
        results = [
            attend(load_backend("triton"), handle, raw, is_query_raw=True),
            attend(load_backend("triton"), handle, prepared),
        ]
        assert torch.equal(results[0].output, results[1].output)
        if idx == 3:  # every entry that a token sees
            given = given._replace(rows=None)
            assert_within_bound(handle, given, attend(load_backend("triton"), handle, given))


def managers(config, **sizes):
    """Make a manager of the reference, and one of Triton's kernels."""
    made = [
        KVCacheManager(
            config, device=DEVICE, backend=backend,
            index_backend=backend if config.index_format == "mxfp4" else "reference",
            **{"max_requests": 3, "num_blocks": 16, **sizes},
        )
        for backend in ("reference", "triton")
    ]  # fmt: skip
    for manager in made:
        poison(manager)
    return made


def scaled(layers, scale):
    """Scale projections; a scale of NaN puts special values into them instead."""

    def change(tensor):
        if scale == scale:
            return tensor * scale
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e38, 1e-40])
        picks = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape) % 97
        return torch.where(
            picks < len(special), special[picks.clamp(max=6).cpu()].to(tensor), tensor
        )

    return [_map_tensors(change, layer) for layer in layers]


STEPS = {
    "steps": [[(0, 1), (1, 1)]] * 3,
    "verify": [[(0, 3), (1, 2)], [(0, 3), (1, 3)], [(0, 1), (1, 3)]],
    "chunks": [[(0, 7), (1, 18)], [(0, 1), (1, 21)], [(0, 22), (1, 1)], [(0, 5), (1, 6)]],
}
WRITES = {
    "steps": ("steps", {}, torch.float32, 1.0),
    "bf16": ("steps", {}, torch.bfloat16, 1.0),
    "verify": ("verify", {"drafts_per_step": 2}, torch.float32, 1.0),
    "chunks": ("chunks", {}, torch.float32, 1.0),
    "chunks_bf16": ("chunks", {"tail_dtype": "bfloat16"}, torch.bfloat16, 1.0),
    "split_pages": ("chunks", {"page_arrangement": "split"}, torch.float32, 1.0),
    "zeros": ("steps", {}, torch.float32, 0.0),
    "specials": ("chunks", {}, torch.float32, torch.nan),
    "v4_rows": ("chunks", {"kv_format": "fp8", "page_arrangement": "joined"}, torch.float32, 1.0),
    "fp8_keys": ("steps", {"index_format": "fp8"}, torch.float32, 1.0),
    "wide": ("steps", {"head_dim": 160, "index_head_dim": 96}, torch.float32, 1.0),
}  # fmt: skip


def write_steps(steps, choices, dtype=torch.float32, scale=1.0, norm_scale=1.0):
    """Compare what both backends store after each step; return the fixed state at last."""
    config = tiny_v41(**{**SMALL, "compress_ratios": (0, 2, 1), "kv_source_layer_ids": (1, 2),
                         "index_source_layer_ids": (1, 2), "candidate_source_layer_id": -1,
                         **choices})  # fmt: skip
    weights = moved(model_weights(config, seed=3))
    weights = [learned._replace(kv_norm=norm_scale * learned.kv_norm) for learned in weights]
    layers = [
        moved(scaled(model_projections(config, 60, seed=7 * i, dtype=dtype), scale)) for i in (1, 2)
    ]
    made = managers(config, max_requests=2)
    slots = [[manager.open_request() for _ in layers] for manager in made]
    lengths = [0, 0]
    for step in STEPS[steps]:
        after = [length + dict(step)[i] for i, length in enumerate(lengths)]
        for manager, rows in zip(made, slots, strict=True):
            plan = prepare_forward(manager, rows, lengths, after)
            given = [Row(*row) for row in zip(rows, layers, lengths, after, strict=True)]
            for idx, learned in enumerate(weights):
                handle = manager.acquire(idx, plan)
                handle.write(forward_inputs(given, idx), learned)
        lengths = after
        for name in ("paged", "state"):
            mine, theirs = (getattr(manager, name).storage for manager in made)
            assert torch.equal(mine, theirs), (name, step)
        mine, theirs = (manager.device_memory.memories[0].workspace for manager in made)
        assert torch.equal(mine, theirs), step
    return made[1].state.storage


@pytest.mark.parametrize(("steps", "choices", "dtype", "scale"), WRITES.values(), ids=WRITES)
def test_writes_store_the_same_bytes(steps, choices, dtype, scale):
    write_steps(steps, choices, dtype, scale)


@pytest.mark.parametrize("steps", ["steps", "chunks"])
def test_floors_of_small_values(steps):
    """The norm's weight makes rows small, whose scales the two rules bound differently."""
    stored = [
        write_steps(steps, {"scale_floor": floor}, norm_scale=1e-3) for floor in ("amax", "scale")
    ]
    assert not torch.equal(*stored)


def test_gathers_and_refusals():
    config = tiny_v41()
    with pytest.raises(ValueError, match="'triton' has no kernels for DeepSeek-V4"):
        KVCacheManager(
            tiny_v41(index_format="fp8"), max_requests=1, num_blocks=1, device=DEVICE,
            backend="triton",
        )  # fmt: skip
    weights, layers = moved(model_weights(config, seed=3)), model_projections(config, 40, seed=1)
    gathered = []
    for manager in managers(config):
        row = Row(manager.open_request(), moved(layers), 0, 40)
        results = run_forward(manager, weights, [row])
        assert all(bool(result.output.isfinite().all()) for result in results)
        plan = prepare_forward(manager, [row.slot], [40], [41])
        handle = manager.acquire(6, plan)
        handle.progress.has_window = plan.layer(3).has_entries = True
        gathered += [(handle.gather_swa_kv(), handle.gather_all_compressed_kv())]
    for mine, theirs in zip(*gathered, strict=True):
        assert torch.equal(mine.is_present, theirs.is_present)
        pairs = [each.values[each.is_present].nan_to_num(99.0) for each in (mine, theirs)]
        assert torch.equal(*pairs)  # the next token's row is poison


def test_warm_up_touches_no_request():
    config = tiny_v41(**SMALL)
    manager = managers(config, max_requests=2, max_forward_tokens=24)[1]
    weights = moved(model_weights(config, seed=3))
    row = Row(manager.open_request(), moved(model_projections(config, 20, seed=1)), 0, 20)
    run_forward(manager, weights, [row])
    before = [manager.tensors()[name].clone() for name in ("blocks", "slots")]
    warm_up(manager, weights, dtype=torch.float32)
    after = [manager.tensors()[name] for name in ("blocks", "slots")]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


INDEX_STEPS = {
    "decode": ([0, 3, 61], [1, 4, 62], 1.0),
    "huge_keys": ([0, 61], [1, 62], 1e9),
    "chunk": ([0, 37], [14, 62], 1.0),
    "few": ([0, 1], [3, 5], 1.0),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "key_scale"), INDEX_STEPS.values(), ids=INDEX_STEPS)
def test_choices_and_candidates(before, after, key_scale):
    """Kernels choose as the reference does; random scores do not tie.

    E5M2 does not hold keys that are huge in half of their channels.
    """
    assert_chosen_alike(tiny_v41(**SMALL), before, after, key_scale=key_scale)


@pytest.mark.parametrize("key_scale", [1.0, 1e9])
def test_candidates_in_groups(key_scale, monkeypatch):
    """The list of candidates, and all entries, are longer than a program of the top-k."""
    for limit in ("WHOLE_ENTRIES", "NARROW_ENTRIES"):
        monkeypatch.setattr(index_scratch, limit, 128)
    config = tiny_v41(**SMALL, candidate_topk_blocks=20, candidate_block_size=8)
    assert_chosen_alike(config, [0, 180], [1, 182], key_scale=key_scale)


def assert_chosen_alike(config, before, after, *, key_scale: float) -> None:
    weights = moved(model_weights(config, seed=3))
    for learned in weights:
        if learned.indexer is not None:
            learned.indexer.norm_weight[32:] *= key_scale
    choices = []
    for backend in ("reference", "triton"):
        manager = KVCacheManager(
            config, device=DEVICE, backend="reference", index_backend=backend, max_requests=3,
            num_blocks=24 + max(after) // config.block_tokens,
        )  # fmt: skip
        poison(manager)
        plan, rows = fill(manager, weights, before, after)
        chosen = {}
        for idx, learned in enumerate(weights):
            inputs = forward_inputs(rows, idx)
            forward_layer(manager.acquire(idx, plan), inputs, learned, chosen)
        choices.append(chosen)
    mine, theirs = choices
    assert set(mine) == set(theirs) == {1, 3, 4}
    for idx, expected in mine.items():
        for name, got in theirs[idx]._asdict().items():
            assert torch.equal(got, getattr(expected, name)), (idx, name)
    assert mine[3].blocks.shape[1] == config.candidate_topk_blocks
    assert theirs[4].blocks.shape[1] == 0


@pytest.mark.parametrize("kept", [[], [0, 2], [1, 2, 3]])
def test_scores_of_choices(kept):
    """Kernels give the scores of what they choose, also from lists that miss blocks."""
    config = tiny_v41(**SMALL)
    weights = moved(model_weights(config, seed=3))
    manager = KVCacheManager(
        config, device=DEVICE, backend="reference", max_requests=3, num_blocks=24
    )
    poison(manager)
    plan, rows = fill(manager, weights, [0, 50, 61], [3, 53, 62])
    chosen = {}
    for idx, learned in enumerate(weights):
        inputs = forward_inputs(rows, idx)
        forward_layer(manager.acquire(idx, plan), inputs, learned, chosen)
    for idx, given in ((3, None), (4, chosen[3].blocks)):
        if given is not None:
            given = pad(given[:, kept], (0, 4 - len(kept)), value=-1)
        results = []
        for backend in ("reference", "triton"):
            handle, index = manager.acquire(idx, plan), forward_inputs(rows, idx).indexer
            scores = torch.full((len(index.query), 8), torch.nan, device=DEVICE)
            largest = torch.full((len(index.query), 4), torch.nan, device=DEVICE)
            got = load_backend(backend).select_entries(
                index.query, index.head_weights, handle.memory, plan.tokens,
                max_entries=plan.max_entries(1), candidates=given, chosen_scores=scores,
                block_scores=largest if idx == 3 else None,
            )  # fmt: skip
            largest = largest[:, : got.blocks.shape[1]].masked_fill(got.blocks < 0, 0.0)
            results.append((got, scores.masked_fill(got.entry_idx < 0, 0.0), largest))
        (mine, *ours), (theirs, *others) = results
        for name, each in theirs._asdict().items():
            assert torch.equal(each, getattr(mine, name)), (idx, name)
        for each, expected in zip(others, ours, strict=True):
            assert torch.allclose(each, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beyond", [0, 10**6, 2**31 // 3 - 1])
def test_blocks_beyond_the_table_have_no_page(beyond):
    """The next column of a request's table is the first of another's."""
    config = tiny_v41(**SMALL)
    weights = moved(model_weights(config, seed=3))
    manager = KVCacheManager(
        config, device=DEVICE, backend="reference", max_requests=3, num_blocks=24
    )
    plan, rows = fill(manager, weights, [61, 61], [62, 62])
    chosen = {}
    for idx, learned in enumerate(weights):
        inputs = forward_inputs(rows, idx)
        forward_layer(manager.acquire(idx, plan), inputs, learned, chosen)
    blocks, size = chosen[3].blocks.clone(), config.candidate_block_size
    num_columns = plan.tokens.block_table.shape[1]
    blocks[:, -1] = -(-num_columns * config.block_tokens // size) + beyond
    index = forward_inputs(rows, 4).indexer
    got = load_backend("triton").select_entries(
        index.query, index.head_weights, manager.acquire(4, plan).memory, plan.tokens,
        max_entries=plan.max_entries(1), candidates=blocks,
    )  # fmt: skip
    is_beyond = got.entry_idx >= num_columns * config.block_tokens
    assert beyond > 10**6 or is_beyond.any()
    assert (got.rows[is_beyond] == -1).all()
    inside = (got.entry_idx >= 0) & ~is_beyond
    assert (got.rows[inside] >= 0).all()


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize(
    ("size", "num_blocks", "longest"), [(8, 40, 70001), (8, 4, 500), (3, 4, 50)]
)
def test_blocks_by_their_largest_score(size, num_blocks, longest, has_room, monkeypatch):
    """Blocks that no program holds at once, equal scores, NaN, and no token at all.

    Blocks of 8 entries are top-k's groups, whose tops are there if it has any. Its counts are apart
    from what its warps read at any time.
    """
    choose_best = Mock(wraps=candidates.choose_best)
    monkeypatch.setattr(candidates, "choose_best", choose_best)
    manager = KVCacheManager(tiny_v41(), max_requests=2, num_blocks=1, device=DEVICE)
    tokens = prepare_forward(manager, [manager.open_request(), -1], [0, 0], [4, 1]).tokens
    counts = torch.tensor([longest, longest - size + 1, size * num_blocks, 1, 0], device=DEVICE)
    tokens = tokens._replace(positions=counts.int() - 1)
    scores = torch.randn(5, longest + 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores[1] = scores[1].round()
    scores[1, size * num_blocks // 2 :] = torch.nan  # fewer blocks have a score than are wanted
    scores[0, ::5] = torch.nan
    scores[0, : 3 * size] = torch.nan
    width = max(num_group_tops(longest, topk=8), 2 * (-(-longest // size)))
    room = torch.empty(5, width, dtype=torch.int32, device=DEVICE)
    chosen = indexer.empty_selection(5, 8, scores.device, num_blocks=num_blocks)
    every = range(5)
    topk.choose_best(chosen, scores, room, tokens, topk.ListedLayout(), every, max_entries=longest)
    if not has_room:  # beside the tops of the entries
        room = room[:, : -(-longest // GROUP)]
    scratch = IndexScratch(scores, scores, scores, room)
    layout = SimpleNamespace(
        candidate_size=size, candidate_blocks=num_blocks, ratio=1, index_topk=8
    )
    choose_blocks(chosen, scratch, layout, tokens, every, max_entries=longest)
    expected = select_blocks(scores[:, :longest], counts, num_blocks, size)
    written, _, _, read, *_ = choose_best.call_args.args
    assert written.counts.data_ptr() != read.positions.data_ptr()
    assert torch.equal(chosen.blocks[:, : expected.shape[1]].long(), expected)


WIDE_STEPS = {
    "decode": ([0, 254, 5000, 700], [1, 255, 5001, 701], {}),
    "verify": ([0, 254, 5000], [3, 257, 5003], {"drafts_per_step": 2}),
    "chunk": ([0, 254, 5000], [130, 255, 5040], {}),
}


@cache
def wide_inputs(num_tokens: int):
    """Projections and weights of the two groups of `wide`, without queries."""
    config = wide_config(num_query_heads=1, index_num_heads=1)
    projections = model_projections(config, num_tokens, seed=1)
    return moved(projections), moved(model_weights(config, seed=0))


def wide_config(**choices):
    """Layers of V4.1-Flash: no entries, ratio 2 and one that shares its entries, ratio 1."""
    own = {"compress_ratios": (0, 2, 2, 1), "kv_source_layer_ids": (1, 3),
           "index_source_layer_ids": (1, 3), "candidate_source_layer_id": -1}  # fmt: skip
    return CacheConfig.v41_flash(**own, **choices)


def wide(layer: int, step: str, *, steps=WIDE_STEPS, backend: str = "triton", **choices):
    """A handle of a layer with written rows, between poison and tokens of padding."""
    before, after, more = steps[step]
    manager = KVCacheManager(
        wide_config(**choices, **more), max_requests=8, num_blocks=64, device=DEVICE,
        max_forward_tokens=8192, backend=backend,
    )  # fmt: skip
    poison(manager)
    slots = [manager.open_request() for _ in before]
    projections, weights = wide_inputs(sum(after) + 2)
    owner = manager.config.schedule[layer].entries_of
    layers = sorted({owner, layer} - {-1})
    for starts, ends in (([0] * len(before), before), (before, after)):
        plan = prepare_forward(manager, [-1, *slots, -1], [0, *starts, 0], [1, *ends, 1])
        handles = [manager.acquire(idx, plan) for idx in layers]
        for idx, handle in zip(layers, handles, strict=True):
            rows = take_rows(projections[idx], slice(0, plan.num_tokens))
            write_in_parts(handle, rows, weights[idx])
        plan.complete()
    return handles[-1]


def wide_query(handle, *, seed: int = 0) -> Inputs:
    """Random queries and sinks, and of a layer with entries, rows of 512 visible ones or -1."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    config, tokens = handle.config, handle.tokens
    shape = handle.plan.num_tokens, config.num_query_heads, config.head_dim
    query = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
    sinks, rows = torch.randn(shape[1], generator=generator, device=DEVICE), None
    if handle.layer.ratio:
        visible = (tokens.positions.long() + 1)[:, None] // handle.layer.ratio
        drawn = torch.rand(shape[0], 512, generator=generator, device=DEVICE)
        entry, per_block = (drawn * 1.2 * visible).long(), handle.memory.layout.entries_per_block
        slots = tokens.request_slots[tokens.request_ids].long()[:, None]
        is_entry = (entry < visible) & (slots >= 0)
        column = torch.where(is_entry, entry // per_block, 0)
        blocks = tokens.block_table[slots.clamp(min=0), column].long()
        rows = torch.where(is_entry, blocks * per_block + entry % per_block, -1)
    return Inputs(query, sinks, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("step", WIDE_STEPS)
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_the_real_width(layer, heads, step):
    handle = wide(layer, step, num_query_heads=heads)
    inputs = wide_query(handle)
    if attention.is_hopper(handle.positions.device):
        launch = attention.attend_launch(heads, torch.bfloat16, handle.memory)
        assert isinstance(launch, HopperLaunch)
    for given in [inputs] if layer != 3 else [inputs, inputs._replace(rows=None)]:
        for invariant in (False, True):
            results = [
                attend(load_backend("triton"), handle, given, batch_invariant=invariant)
                for _ in range(3)
            ]
            assert_within_bound(handle, given, results[0])
            for again in results[1:]:
                assert_same_bits(again, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("wave", [1, 1000])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("arrangement", ["joined", "split"])
def test_programs_of_any_heads(arrangement, heads, wave, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    handle = wide(2, "decode", page_arrangement=arrangement)
    if attention.is_hopper(handle.positions.device):
        launch = find_launch(HopperLaunch, "attend hopper", handle.positions.device, heads)
        monkeypatch.setattr(attention, "choose_launch", lambda *arguments: launch)
    inputs = wide_query(handle)
    assert_within_bound(handle, inputs, attend(load_backend("triton"), handle, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("step", WIDE_STEPS)
@pytest.mark.parametrize("heads", [8, 64])
def test_raw_queries_at_the_real_width(heads, step):
    handle = wide(2, step, num_query_heads=heads)
    raw = wide_query(handle)
    prepared = raw._replace(query=prepare_query(raw.query, handle.memory))
    for invariant in (False, True):
        got, want = (
            attend(load_backend("triton"), handle, given, batch_invariant=invariant,
                   is_query_raw=given is raw)
            for given in (raw, prepared)
        )  # fmt: skip
        assert_same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_batch_invariant_bits_at_the_real_width(layer):
    """A request of a decode step, alone and beside a chunk."""
    handle, token = wide(layer, "chunk"), 131
    inputs = wide_query(handle)
    whole = attend(load_backend("triton"), handle, inputs, batch_invariant=True)
    alone = attend_alone(handle, inputs, token)
    assert torch.equal(alone.output[0], whole.output[token])
    assert torch.equal(alone.lse[0], whole.lse[token])


def fill_codes(handle) -> None:
    """Any finite codes and scales: entries of E2M1 under E4M3, a ring of E4M3 under UE8M0."""
    generator = torch.Generator("cuda").manual_seed(0)

    def fill(tensor, low: int, high: int) -> None:
        drawn = torch.randint(low, high, tensor.shape, generator=generator, device="cuda")
        drawn = torch.where(drawn % 128 == 127, drawn - 1, drawn)
        tensor.copy_(drawn.to(torch.uint8))

    memory = handle.memory
    memory.entries.data.copy_(
        torch.randint(0, 256, memory.entries.data.shape, generator=generator, device="cuda")
    )
    fill(memory.entries.scales, 0, 256)
    fill(memory.window.ring.data, 0, 256)
    fill(memory.window.ring.scales, 100, 132)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("wave", [1, 132])
def test_any_code_and_scale(heads, wave, monkeypatch):
    split_as_often_as(wave, monkeypatch)
    handle = wide(2, "decode", num_query_heads=heads)
    fill_codes(handle)
    inputs = wide_query(handle)
    inputs = inputs._replace(query=inputs.query * 2.0**-12)
    assert_within_bound(handle, inputs, attend(load_backend("triton"), handle, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("wave", [1, 132])
@pytest.mark.parametrize("where", ["window code", "window scale", "entry scale"])
def test_nan_is_nan_everywhere(where, wave, heads, monkeypatch):
    """A NaN code or scale of a row that a token reads, in one group of channels."""
    split_as_often_as(wave, monkeypatch)
    handle = wide(2, "decode", num_query_heads=heads)
    inputs, token = wide_query(handle), 3  # of 5,001 tokens
    before = attend(load_backend("triton"), handle, inputs)
    ring, entries = handle.memory.window.ring, handle.memory.entries
    if where == "entry scale":
        row = int(inputs.rows[token][inputs.rows[token] >= 0][77])
        entries.scales[row // entries.rows_per_page, row % entries.rows_per_page, 31] = 0xFF
    else:
        slot = int(handle.tokens.request_slots[token])
        ring_row = 4950 % ring.rows_per_page
        if where == "window code":
            ring.data[slot, ring_row, 511] = 0x7F
        else:
            ring.scales[slot, ring_row, 3] = 255
    got = attend(load_backend("triton"), handle, inputs)
    assert got.output[token].isnan().all()
    others = [i for i in range(len(inputs.query)) if i != token]
    assert torch.equal(got.output[others], before.output[others])


@pytest.mark.gpu
def test_graph_replay_at_the_real_width():
    handle = wide(2, "decode")
    inputs = wide_query(handle)
    for is_raw in (False, True):
        eager = attend(load_backend("triton"), handle, inputs, is_query_raw=is_raw)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(load_backend("triton"), handle, inputs, is_query_raw=is_raw)
        for _ in range(500):
            captured.output.fill_(torch.nan)
            graph.replay()
            assert_same_bits(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_chunks_over_dense_rows(layer, is_raw, monkeypatch):
    """Rows of two formats become BF16, and tokens of steps beside the chunks read theirs."""
    handle = wide(layer, "chunk")
    inputs = raw = wide_query(handle)
    if is_raw:
        inputs = raw._replace(query=prepare_query(raw.query, handle.memory))
    monkeypatch.setattr(dense_rows, "MIN_WAVES", 0)
    monkeypatch.setattr(dense_rows, "MIN_READS", 0)
    calls, make = [], dense_rows.make_dense_rows
    monkeypatch.setattr(
        dense_rows, "make_dense_rows", lambda *given: (calls.append(given), make(*given))
    )
    got = attend(load_backend("triton"), handle, raw, is_query_raw=is_raw)
    assert len(calls) == attention.is_hopper(handle.positions.device)
    assert_within_bound(handle, inputs, got)
    assert_same_bits(attend(load_backend("triton"), handle, raw, is_query_raw=is_raw), got)


@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("arrangement", ["joined", "split"])
def test_rows_become_dense(arrangement, layer):
    """Window rows of the workspace, then the entries of each chunk, which another layer owns."""
    config = tiny_v41(**SMALL, page_arrangement=arrangement)
    manager = KVCacheManager(
        config, max_requests=2, num_blocks=16, device=DEVICE, backend="reference"
    )
    poison(manager)
    weights = moved(model_weights(config, seed=3))
    plan, rows = fill(manager, weights, [0, 37], [5, 60])
    for idx, learned in enumerate(weights):
        handle = manager.acquire(idx, plan)
        handle.write(forward_inputs(rows, idx), learned)
        if idx == layer:
            break
    memory, tokens, ratio = handle.memory, handle.tokens, handle.layer.ratio
    counts = [length // ratio if ratio else 0 for length in (5, 60)]
    sizes = dense_sizes(
        num_tokens=28, num_chunks=2, window=16, max_entries=max(counts), num_blocks=16,
        entries_per_block=memory.layout.entries_per_block, num_heads=64, dim=96,
    )  # fmt: skip
    storage = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=DEVICE)
    dense = dense_rows.cut_dense_rows(storage, sizes, dim=96)
    dense_rows.make_dense_rows(dense, memory, tokens)
    flat = torch.arange(28 + 2 * 15, device=DEVICE)
    wanted = gather_rows(memory.window.workspace, flat)
    torch.testing.assert_close(
        dense.rows[: len(flat)].to(wanted), wanted, rtol=0, atol=0, equal_nan=True
    )
    for chunk, count in enumerate(counts if ratio else ()):
        entry, per_block = torch.arange(count, device=DEVICE), memory.layout.entries_per_block
        blocks = tokens.block_table[rows[chunk].slot, entry // per_block].long()
        wanted = gather_rows(memory.entries, blocks * per_block + entry % per_block)
        first = sizes.window_rows + chunk * sizes.chunk_stride
        assert torch.equal(dense.rows[first : first + count].to(wanted), wanted)
