"""Stored rows, selections and outputs equal the uncached oracle's, however tokens arrive."""

import random

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager
from dsv4.formats import INDEX_FORMATS, KV_FORMATS, PagedRows
from dsv4.kernels import reference
from dsv4.kernels.reference.codec import EncodedRows, read_rows
from dsv4.rope import build_rope_table
from dsv4.testing import Row, model_projections, model_weights, poison, run_forward
from tests.dense import DenseLayer, dense_layers
from tests.v41 import random_v41_choices, tiny_v41

LENGTHS = (389, 260, 131, 5, 1)


def oracle(manager: KVCacheManager, weights, sequence) -> list[DenseLayer]:
    ropes = {
        base: build_rope_table(
            manager.config, base, num_positions=len(sequence[0].kv), device=manager.device
        )
        for base in ("main", "compress")
    }
    return dense_layers(manager.config, sequence, weights, ropes)


def assert_rows_equal(pages: PagedRows, rows: torch.Tensor, expected: EncodedRows, what: str):
    stored = read_rows(pages, rows)
    assert torch.equal(stored.data, expected.data), what
    assert torch.equal(stored.scales, expected.scales), what


def check_stored(manager: KVCacheManager, slot: int, length: int, layers: list[DenseLayer]):
    """Live entries, keys, window rows and tail rows of a slot equal the oracle's, byte for byte."""
    for layer_idx, dense in enumerate(layers):
        schema, state = manager.schemas[layer_idx], manager.state.layer(layer_idx)
        live = torch.arange(max(0, length - schema.ring_rows), length)
        rows = slot * schema.ring_rows + live % schema.ring_rows
        expected = EncodedRows(dense.window.data[live], dense.window.scales[live])
        assert_rows_equal(state.ring, rows, expected, f"window of layer {layer_idx}")
        if not schema.ratio:
            continue
        pages, num_entries = manager.paged.layer(layer_idx), length // schema.ratio
        per_block = schema.entries_per_block
        entry = torch.arange(num_entries)
        blocks = manager.block_table[slot].long()[entry // per_block]
        rows = blocks * per_block + entry % per_block
        for stored, expected, what in (
            (pages.entries, dense.entries, "entries"),
            (pages.index_keys, dense.index_keys, "index keys"),
        ):
            if stored is not None:
                expected = EncodedRows(expected.data[:num_entries], expected.scales[:num_entries])
                assert_rows_equal(stored, rows, expected, f"{what} of layer {layer_idx}")
        if not schema.tail_rows:
            continue
        live = torch.arange(max(0, length - schema.tail_rows), length)
        for tail, expected in (
            (state.tail, dense.tails),
            (state.index_tail, dense.index_tails),
        ):
            if tail is not None:
                stored = tail[slot, live % schema.tail_rows]
                assert torch.equal(stored[:, 0], expected.kv[live])
                assert torch.equal(stored[:, 1], expected.gate[live])


def run_randomly(
    config: CacheConfig, *, seed: int, dtype=torch.float32, tolerance=2e-6, num_blocks=24
) -> None:
    """Run all sequences through few slots in random chunks; check after every forward."""
    rng = random.Random(seed)
    manager = KVCacheManager(config, max_requests=3, num_blocks=num_blocks)
    poison(manager)
    weights = model_weights(config, seed=100)
    sequences = [
        model_projections(config, n, seed=1000 * (i + 1), dtype=dtype)
        for i, n in enumerate(LENGTHS)
    ]
    layers = [oracle(manager, weights, sequence) for sequence in sequences]
    waiting, open_rows = list(range(len(LENGTHS))), {}
    rng.shuffle(waiting)
    while waiting or open_rows:
        while waiting and manager.num_free_slots:
            open_rows[waiting.pop()] = (manager.open_request(), 0)
        rows, chosen = [], rng.sample(sorted(open_rows), k=rng.randint(1, len(open_rows)))
        for sequence in chosen:
            slot, before = open_rows[sequence]
            count = rng.choice([0, 1, 1, 2, 3, 4, 5, 31, 64, 127, 128, 129, 300])
            after = min(before + count, LENGTHS[sequence])
            rows.append(Row(slot, sequences[sequence], before, after))
        results = run_forward(manager, weights, rows)
        start = 0
        for sequence, row in zip(chosen, rows, strict=True):
            check_stored(manager, row.slot, row.after, layers[sequence])
            end = start + row.after - row.before
            for result, dense in zip(results, layers[sequence], strict=True):
                expected = dense.output[row.before : row.after].float()
                error = (result.output[start:end].float() - expected).abs()
                limit = tolerance * dense.output.float().abs().max()
                assert (error <= limit).all(), f"{error.max():.3g} > {limit:.3g}"
            start = end
            open_rows[sequence] = (row.slot, row.after)
            if row.after == LENGTHS[sequence]:
                manager.free_request(row.slot)
                del open_rows[sequence]
        manager.check_integrity()


V41_CHOICES = {
    "trained": {}, "split": {"page_arrangement": "split"}, "scale_floor": {"scale_floor": "scale"},
    "fp32": {"kv_format": "fp32", "index_format": "fp32"}, "bf16_tails": {"tail_dtype": "bfloat16"},
    "v4_rows": {"kv_format": "fp8", "index_format": "fp8"}, "drafts": {"drafts_per_step": 3},
    "own_choices": {"index_source_layer_ids": (), "candidate_source_layer_id": -1},
    "own_entries": {"kv_source_layer_ids": (), "index_source_layer_ids": (),
                    "candidate_source_layer_id": -1},
    "big_blocks": {"candidate_topk_blocks": 2, "candidate_block_size": 7},
}  # fmt: skip


@pytest.mark.parametrize("choices", V41_CHOICES.values(), ids=V41_CHOICES)
def test_v41(choices):
    run_randomly(tiny_v41(**choices), seed=len(choices), num_blocks=64)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_kv_formats(kv_format):
    run_randomly(CacheConfig.tiny(kv_format=kv_format), seed=1)


@pytest.mark.parametrize("index_format", INDEX_FORMATS)
def test_index_formats(index_format):
    run_randomly(CacheConfig.tiny(index_format=index_format), seed=2)


def test_nvfp4_with_a_global_scale():
    run_randomly(CacheConfig.tiny(index_format="nvfp4", index_global_scale=0.01), seed=3)


@pytest.mark.parametrize("block_tokens", [128, 384, 512])
def test_block_sizes(block_tokens):
    run_randomly(CacheConfig.tiny(block_tokens=block_tokens), seed=4)


@pytest.mark.parametrize("drafts", [1, 5])
def test_drafts(drafts):
    run_randomly(CacheConfig.tiny(drafts_per_step=drafts), seed=5)


def test_bf16_tails():
    run_randomly(CacheConfig.tiny(tail_dtype="bfloat16"), seed=6)


def test_bf16_inputs():
    # Outputs are BF16: half an ulp of rounding on either side.
    run_randomly(CacheConfig.tiny(), seed=7, dtype=torch.bfloat16, tolerance=2**-8)


def test_without_hadamard_and_with_a_small_page_align():
    run_randomly(CacheConfig.tiny(index_hadamard=False, page_align=16), seed=8)


@pytest.mark.parametrize("ratios", [(0,), (4,), (128,), (0, 0, 128)], ids=str)
def test_schedules_of_few_types(ratios):
    run_randomly(CacheConfig.tiny(compress_ratios=ratios), seed=9)


def test_selection_equals_the_oracle(monkeypatch):
    config = CacheConfig.tiny(compress_ratios=(4,))
    manager = KVCacheManager(config, max_requests=2, num_blocks=8)
    weights, sequence = model_weights(config, seed=0), model_projections(config, 300, seed=1)
    (dense,) = oracle(manager, weights, sequence)
    chosen, select_entries = [], reference.select_entries

    def recorded(**kwargs):
        chosen.append(select_entries(**kwargs))
        return chosen[-1]

    monkeypatch.setattr(reference, "select_entries", recorded)
    slot = manager.open_request()
    for start, end in ((0, 100), (100, 101), (101, 300)):
        run_forward(manager, weights, [Row(slot, sequence, start, end)])
    assert torch.equal(torch.cat([s.entry_idx for s in chosen]).long(), dense.selected)
    counts = ((torch.arange(300) + 1) // 4).clamp(max=config.index_topk)
    assert torch.equal(torch.cat([s.counts for s in chosen]).long(), counts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 60))
def test_many_random_runs(seed):
    rng = random.Random(seed)
    config = CacheConfig.tiny(
        kv_format=rng.choice(KV_FORMATS),
        index_format=rng.choice(INDEX_FORMATS),
        index_hadamard=rng.random() < 0.5,
        tail_dtype=rng.choice(["float32", "bfloat16"]),
        block_tokens=rng.choice([128, 256, 384]),
        page_align=rng.choice([16, 576]),
        drafts_per_step=rng.choice([0, 1, 4]),
    )
    run_randomly(config, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 80))
def test_many_random_runs_of_v41(seed):
    rng = random.Random(seed)
    choices = {
        **rng.choice(list(V41_CHOICES.values())), **random_v41_choices(rng),
        "index_format": rng.choice(INDEX_FORMATS), "kv_format": rng.choice(KV_FORMATS),
        "block_tokens": rng.choice([8, 16, 48]), "sliding_window": rng.choice([5, 16, 40]),
        "drafts_per_step": rng.choice([0, 1, 4]), "index_topk": 4,
    }  # fmt: skip
    run_randomly(tiny_v41(**choices), seed=seed, num_blocks=128)
