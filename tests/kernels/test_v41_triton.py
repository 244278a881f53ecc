"""Triton's kernels on DeepSeek-V4.1's layers against the reference."""

from types import SimpleNamespace

import pytest
import torch

from dsv4 import KVCacheManager, warm_up
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.kernels.backends import load_backend
from dsv4.kernels.index_scratch import IndexScratch
from dsv4.kernels.reference.attention import prepare_query
from dsv4.kernels.reference.indexer import select_blocks
from dsv4.kernels.triton import indexer
from dsv4.kernels.triton.candidates import choose_blocks
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
)
from tests.kernels.test_triton_attention import Inputs, assert_within_bound
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
    "small_values": ("steps", {"scale_floor": "scale"}, torch.float32, 1e-3),
    "zeros": ("steps", {}, torch.float32, 0.0),
    "specials": ("chunks", {}, torch.float32, torch.nan),
    "v4_rows": ("chunks", {"kv_format": "fp8", "page_arrangement": "joined"}, torch.float32, 1.0),
    "fp8_keys": ("steps", {"index_format": "fp8"}, torch.float32, 1.0),
    "wide": ("steps", {"head_dim": 160, "index_head_dim": 96}, torch.float32, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "choices", "dtype", "scale"), WRITES.values(), ids=WRITES)
def test_writes_store_the_same_bytes(steps, choices, dtype, scale):
    config = tiny_v41(**{**SMALL, "compress_ratios": (0, 2, 1), "kv_source_layer_ids": (1, 2),
                         "index_source_layer_ids": (1, 2), "candidate_source_layer_id": -1,
                         **choices})  # fmt: skip
    weights = moved(model_weights(config, seed=3))
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
        mine, theirs = (manager.device_memory.workspace for manager in made)
        assert torch.equal(mine, theirs), step


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
    config = tiny_v41(**SMALL)
    weights = moved(model_weights(config, seed=3))
    for learned in weights:
        if learned.indexer is not None:
            learned.indexer.norm_weight[32:] *= key_scale
    choices = []
    for backend in ("reference", "triton"):
        manager = KVCacheManager(
            config, device=DEVICE, backend="reference", index_backend=backend, max_requests=3,
            num_blocks=24,
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
    assert mine[3].blocks.shape[1] == 4 and theirs[4].blocks.shape[1] == 0


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize(("size", "num_blocks", "longest"), [(8, 40, 70001), (3, 4, 50)])
def test_blocks_by_their_largest_score(size, num_blocks, longest, has_room):
    """Blocks that no program holds at once, equal scores, NaN, and no token at all."""
    manager = KVCacheManager(tiny_v41(), max_requests=2, num_blocks=1, device=DEVICE)
    tokens = prepare_forward(manager, [manager.open_request(), -1], [0, 0], [4, 1]).tokens
    counts = torch.tensor([longest, longest - size + 1, size * num_blocks, 1, 0], device=DEVICE)
    tokens = tokens._replace(positions=counts.int() - 1)
    scores = torch.randn(5, longest + 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores[1] = scores[1].round()
    scores[0, ::5] = torch.nan
    scores[0, : 3 * size] = torch.nan
    room = torch.empty(5, 2 * (-(-longest // size)) if has_room else 0, dtype=torch.int32)
    scratch = IndexScratch(scores, scores, scores, room.to(DEVICE))
    layout = SimpleNamespace(candidate_size=size, candidate_blocks=num_blocks, ratio=1)
    chosen = indexer.empty_selection(5, 8, scores.device, num_blocks=num_blocks)
    choose_blocks(chosen, scratch, layout, tokens, range(5), max_entries=longest)
    expected = select_blocks(scores[:, :longest], counts, num_blocks, size)
    assert torch.equal(chosen.blocks[:, : expected.shape[1]].long(), expected)
