"""DeepSeek-V4.1's rows, choices and attention against mlx-lm's, in fp32 on the CPU.

Layers of mlx-lm run one-shot over random inputs. Their projections, before norms and RoPE, are the
inputs of the cache, which gets them in chunks of any size.
"""

import random

import numpy as np
import pytest
import torch

from dsv4 import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    KeyWeights,
    LayerProjections,
    LayerWeights,
)
from dsv4.kernels.reference.codec import decode, read_rows
from dsv4.rope import build_rope_table
from dsv4.testing import Row, forward_inputs, forward_layer, poison
from tests.dense import dense_layers
from tests.v41 import tiny_v41

mx = pytest.importorskip("mlx.core", reason="mlx-lm 0.32.2 and mlx-cpu 0.32.4 are not installed")
v41 = pytest.importorskip("mlx_lm.models.deepseek_v41", reason="mlx-lm 0.32.2 is not installed")

HIDDEN, Q_LOW = 64, 48
CONFIG = tiny_v41(
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 1), kv_source_layer_ids=(1, 3, 4),
    index_source_layer_ids=(1, 3, 4, 6, 7), candidate_source_layer_id=4,
    candidate_topk_blocks=5, candidate_block_size=4, index_topk=16, sliding_window=24,
)  # fmt: skip
LENGTHS = (261, 190, 77, 3)
MISSED = 1e-5  # part of the codes that may differ, each at a rounding edge


def torch_of(array):
    return torch.from_numpy(np.array(array, dtype=np.float32))


def mlx_of(tensor):
    return mx.array(tensor.numpy())


@pytest.fixture(scope="module")
def layers():
    """Make attention layers of mlx-lm with random weights."""
    yarn = CONFIG.yarn
    args = v41.ModelArgs(
        hidden_size=HIDDEN, num_hidden_layers=CONFIG.num_layers, q_lora_rank=Q_LOW,
        num_attention_heads=CONFIG.num_query_heads, head_dim=CONFIG.head_dim,
        qk_rope_head_dim=CONFIG.rope_dim, o_groups=2, o_lora_rank=16,
        sliding_window=CONFIG.sliding_window, compress_ratios=CONFIG.compress_ratios,
        kv_source_layer_ids=CONFIG.kv_source_layer_ids,
        index_source_layer_ids=CONFIG.index_source_layer_ids,
        candidate_source_layer_id=CONFIG.candidate_source_layer_id,
        candidate_topk_blocks=CONFIG.candidate_topk_blocks,
        candidate_block_size=CONFIG.candidate_block_size, index_n_heads=CONFIG.index_num_heads,
        index_head_dim=CONFIG.index_head_dim, index_topk=CONFIG.index_topk,
        rope_scaling={"factor": yarn.factor, "beta_fast": yarn.beta_fast,
                      "beta_slow": yarn.beta_slow,
                      "original_max_position_embeddings": yarn.original_max_position},
    )  # fmt: skip
    mx.random.seed(7)
    made = [v41.Attention(args, idx) for idx in range(CONFIG.num_layers)]
    for layer in made:
        layer.sinks = mx.random.normal(layer.sinks.shape)
        norms = [layer.kv_norm, layer.q_a_norm]
        norms += [layer.compressor.kv_norm] if layer.is_kv_source else []
        norms += [layer.indexer.k_norm] if layer.is_kv_source else []
        for norm in norms:
            norm.weight = 1 + 0.2 * mx.random.normal(norm.weight.shape)
    return made


@pytest.fixture(scope="module")
def weights(layers):
    """Name the tensors that the cache applies itself."""
    learned = []
    for layer in layers:
        compressor = keys = None
        if layer.is_kv_source:
            compressor = CompressorWeights(None, torch_of(layer.compressor.kv_norm.weight))
            index = layer.indexer
            keys = KeyWeights(torch_of(index.k_proj.weight), torch_of(index.k_norm.weight))
        norm, sinks = torch_of(layer.kv_norm.weight), torch_of(layer.sinks)
        learned.append(LayerWeights(norm, sinks, compressor, keys))
    return learned


class Sequence:
    """One sequence: inputs of every layer, and what mlx-lm makes of them in one shot."""

    def __init__(self, layers, num_tokens, seed):
        mx.random.seed(seed)
        self.num_tokens, self.projections = num_tokens, []
        self.rows, self.queries, self.hidden = [], [], []
        shared, window = {}, CONFIG.sliding_window
        rows = v41._window_indices(previous=0, length=num_tokens, window=window)[None]
        for layer in layers:
            x = mx.random.normal((1, num_tokens, HIDDEN))
            cache = v41.LayerCache(num_tokens)
            layer(x, start_pos=0, window_idx=rows, cache=cache, shared=shared)
            q_low = layer.q_a_norm(layer.q_a_proj(x))
            self.projections.append(self._inputs(layer, x, q_low))
            made = {"window": cache.window, "entries": cache.compress_kv, "keys": cache.index_k}
            exact = self._exact(layer, x)
            self.rows.append({
                name: (torch_of(rows)[0], torch_of(exact[name])[0])
                for name, rows in made.items() if rows is not None
            })  # fmt: skip
            self.queries.append(q_low)
            self.hidden.append(x)

    @staticmethod
    def _exact(layer, x):
        """Compute the values that mlx-lm rounds to its rows."""

        def rotated(values, **where):
            return v41._apply_rope(values, layer.rope, rope_dim=layer.rope_dim, **where)

        exact = {"window": rotated(layer.kv_norm(layer.kv_proj(x)))}
        latent, _ = layer.compressor(x, 0, v41.LayerCache(1)) if layer.is_kv_source else (None, 0)
        if latent is not None:
            keys = layer.indexer.k_norm(layer.indexer.k_proj(latent))
            exact["entries"] = rotated(latent, scale=layer.ratio)
            exact["keys"] = rotated(keys, scale=layer.ratio)
        return exact

    @staticmethod
    def _inputs(layer, x, q_low):
        heads = layer.q_b_proj(q_low).reshape(1, -1, layer.num_heads, layer.head_dim)
        compressor = index = None
        if layer.is_kv_source:
            made = layer.compressor
            gate = torch_of(made.gate_proj(x))[0] if layer.ratio > 1 else None
            compressor = CompressorInputs(torch_of(made.kv_proj(x))[0], gate)
        if layer.is_index_source:
            wide = torch_of(layer.indexer.q_b_proj(q_low))[0]
            split = wide.unflatten(-1, (-1, CONFIG.index_head_dim))
            index = IndexInputs(None, None, split, torch_of(layer.indexer.weights_proj(x))[0])
        return LayerProjections(
            torch_of(heads)[0], torch_of(layer.kv_proj(x))[0], compressor, index
        )


@pytest.fixture(scope="module")
def sequences(layers):
    return [Sequence(layers, length, seed) for seed, length in enumerate(LENGTHS)]


class Run:
    """All sequences through a cache; collects outputs and choices of each layer by token."""

    def __init__(self, weights, sequences, next_rows):
        self.manager = KVCacheManager(CONFIG, max_requests=len(LENGTHS), num_blocks=64)
        poison(self.manager)
        self.slots = [self.manager.open_request() for _ in LENGTHS]
        lengths = [0] * len(LENGTHS)
        self.outputs = [[[] for _ in range(CONFIG.num_layers)] for _ in LENGTHS]
        self.chosen = [[[] for _ in range(CONFIG.num_layers)] for _ in LENGTHS]
        self.blocks = [[] for _ in LENGTHS]
        while any(length < most for length, most in zip(lengths, LENGTHS, strict=True)):
            picked = next_rows(lengths)
            rows = [
                Row(self.slots[i], sequences[i].projections, lengths[i], after)
                for i, after in picked
            ]
            plan = prepare_forward(
                self.manager, *([getattr(row, name) for row in rows]
                                for name in ("slot", "before", "after"))
            )  # fmt: skip
            choices = {}
            for idx, learned in enumerate(weights):
                handle = self.manager.acquire(idx, plan)
                inputs = forward_inputs(rows, idx)
                result = forward_layer(handle, inputs, learned, choices, is_query_raw=True)
                start = 0
                for (i, after), row in zip(picked, rows, strict=True):
                    end = start + after - row.before
                    self.outputs[i][idx].append(result.output[start:end])
                    if idx in choices:
                        self.chosen[i][idx].append(choices[idx].entry_idx[start:end])
                    if idx == CONFIG.candidate_source_layer_id:
                        self.blocks[i].append(choices[idx].blocks[start:end])
                    start = end
            for i, after in picked:
                lengths[i] = after

    def stored(self, i, idx, part):
        """Values of a sequence's entries or index keys."""
        schema, pages = self.manager.schemas[idx], self.manager.paged.layer(idx)
        rows, entry = getattr(pages, part), torch.arange(LENGTHS[i] // schema.ratio)
        blocks = self.manager.block_table[self.slots[i]].long()[entry // rows.rows_per_page]
        flat = blocks * rows.rows_per_page + entry % rows.rows_per_page
        return decode(rows.format, read_rows(rows, flat))

    def window(self, i, idx):
        """Positions that the ring still holds, and their values."""
        ring, length = self.manager.state.layer(idx).ring, LENGTHS[i]
        live = torch.arange(max(0, length - ring.rows_per_page), length)
        rows = self.slots[i] * ring.rows_per_page + live % ring.rows_per_page
        return live, decode(ring.format, read_rows(ring, rows))


def one_shot(lengths):
    return [(i, most) for i, most in enumerate(LENGTHS)]


def decode_all(lengths):
    pairs = enumerate(zip(lengths, LENGTHS, strict=True))
    return [(i, length + 1) for i, (length, most) in pairs if length < most]


def chunks_of(size):
    def next_rows(lengths):
        pairs = enumerate(zip(lengths, LENGTHS, strict=True))
        return [(i, min(length + size, most)) for i, (length, most) in pairs if length < most]

    return next_rows


def ragged(seed):
    rng = random.Random(seed)

    def next_rows(lengths):
        open_rows = [i for i, length in enumerate(lengths) if length < LENGTHS[i]]
        picked = rng.sample(open_rows, rng.randint(1, len(open_rows)))
        return [(i, min(LENGTHS[i], lengths[i] + rng.choice([1, 2, 3, 31, 128]))) for i in picked]

    return next_rows


WAYS = {
    "one_shot": one_shot, "decode": decode_all, "chunks_2": chunks_of(2), "chunks_3": chunks_of(3),
    "chunks_64": chunks_of(64), "chunks_129": chunks_of(129), "chunks_257": chunks_of(257),
    "ragged_1": ragged(1), "ragged_2": ragged(2),
}  # fmt: skip


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def run(request, weights, sequences):
    return Run(weights, sequences, request.param)


def count_misses(got, expected, exact):
    """Count codes that differ; the exact value of each must lie halfway between both."""
    is_wrong = got != expected
    middle = (got + expected)[is_wrong].double() / 2
    assert ((exact[is_wrong] - middle).abs() <= 1e-6 * middle.abs()).all()
    return int(is_wrong.sum())


@pytest.fixture(scope="module")
def oracles(weights, sequences):
    """Compute the rows of all tokens without a cache; `test_dense` has their bytes in one."""
    ropes = {
        base: build_rope_table(CONFIG, base, num_positions=max(LENGTHS), device=torch.device("cpu"))
        for base in ("main", "compress")
    }
    return [dense_layers(CONFIG, sequence.projections, weights, ropes) for sequence in sequences]


def test_stored_codes(run, sequences, oracles):
    wrong = total = 0
    for i, sequence in enumerate(sequences):
        for layer, rows in zip(CONFIG.schedule, sequence.rows, strict=True):
            idx = layer.layer_idx
            live, window = run.window(i, idx)
            oracle = decode(CONFIG.kv_row, oracles[i][idx].window)
            assert torch.equal(window, oracle[live])
            mine = {"window": oracle}
            if "entries" in rows:
                mine["entries"] = run.stored(i, idx, "entries")
                mine["keys"] = run.stored(i, idx, "index_keys")
            assert set(mine) == set(rows)
            for name, got in mine.items():
                wrong += count_misses(got, *rows[name])
                total += got.numel()
    assert total > 400_000 and wrong <= MISSED * total, (wrong, total)


def rows_of(run, i, idx):
    """Values of all entries that a layer reads, those of its owner; None for SWA."""
    layer = CONFIG.schedule[idx]
    if not layer.ratio or LENGTHS[i] < layer.ratio:
        return None
    return run.stored(i, layer.entries_of, "entries")


def test_attention_over_the_same_rows(run, layers, sequences, oracles):
    """The cache's rows and choices, mlx-lm's softmax, sink and rotation back."""
    for i, sequence in enumerate(sequences):
        num_tokens, window = sequence.num_tokens, CONFIG.sliding_window
        seen = v41._window_indices(previous=0, length=num_tokens, window=window)[None]
        for idx, layer in enumerate(layers):
            window_rows = decode(CONFIG.kv_row, oracles[i][idx].window)
            kvs, indices = [mlx_of(window_rows[None])], [seen]
            entries = rows_of(run, i, idx)
            if entries is not None:
                chosen = torch.cat(run.chosen[i][CONFIG.schedule[idx].choice_of])
                kvs.append(mlx_of(entries[None]))
                indices.append(mlx_of(chosen[None]))
            raw = mlx_of(sequence.projections[idx].query[None])
            query = v41._apply_rope(raw, layer.rope, rope_dim=layer.rope_dim)
            attended = v41._sparse_attention(
                query, kvs, indices, sinks=layer.sinks, scale=layer.head_dim**-0.5
            )
            expected = torch_of(
                v41._apply_rope(attended, layer.rope, rope_dim=layer.rope_dim, inverse=True)
            )[0]
            error = (torch.cat(run.outputs[i][idx]) - expected).abs().max()
            assert error <= 5e-6 * expected.abs().max(), (i, idx, float(error))


def test_choices(run, layers, sequences):
    """Of equal keys, mlx-lm chooses the same entries, but for scores that tie."""
    masked = 0
    for i, sequence in enumerate(sequences):
        candidates = None
        for idx, layer in enumerate(layers):
            if not layer.is_index_source or LENGTHS[i] < layer.ratio:
                continue
            owner = CONFIG.schedule[idx].entries_of
            keys = mlx_of(run.stored(i, owner, "index_keys")[None])
            wanted, published = layer.indexer(
                sequence.hidden[idx], sequence.queries[idx], index_k=keys, candidates=candidates,
                rope=layer.rope, start_pos=0,
            )  # fmt: skip
            got, wanted = torch.cat(run.chosen[i][idx]), torch.from_numpy(np.array(wanted))[0]
            for token in range(sequence.num_tokens):
                mine = set(got[token].tolist()) - {-1}
                theirs = set(wanted[token].tolist()) - {-1}
                if mine != theirs:
                    assert_ties(layer, sequence, idx, keys, token, mine ^ theirs)
            if layer.indexer.is_candidate_source:
                candidates = published
                check_blocks(torch.cat(run.blocks[i]), np.array(published)[0])
                visible = np.arange(sequence.num_tokens) + 1
                masked += int((np.array(published)[0].sum(axis=1) < visible).sum())
    assert masked > 100  # tokens whose candidates are not all entries


def assert_ties(layer, sequence, idx, keys, token, differing):
    """Entries that only one side chose have scores within a few roundings of each other."""
    index, dim = layer.indexer, CONFIG.index_head_dim
    query = index.q_b_proj(sequence.queries[idx]).reshape(1, -1, CONFIG.index_num_heads, dim)
    query = v41._apply_rope(query, layer.rope, rope_dim=CONFIG.rope_dim)
    query = torch_of(v41._fake_quant_fp4(query, block_size=32))[0, token].double()
    weights = torch_of(index.weights_proj(sequence.hidden[idx]))[0, token].double()
    products = torch_of(keys)[0][sorted(differing)].double() @ query.T
    scores = (products.relu() * weights).sum(dim=1)
    assert float(scores.max() - scores.min()) <= 1e-5 * float(products.abs().max())


def check_blocks(blocks, published):
    """Blocks that the cache publishes are those of mlx-lm's mask."""
    size = CONFIG.candidate_block_size
    for token, mask in enumerate(published):
        expected = sorted({entry // size for entry in np.nonzero(mask[: token + 1])[0].tolist()})
        assert [block for block in blocks[token].tolist() if block >= 0] == expected
