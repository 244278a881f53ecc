"""`AttentionSubBlock` of DeepSeek-V4.1's named tensors against plain products and the oracle."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear

from dsv4 import AttentionSubBlock, CacheConfig, KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    KeyWeights,
    LayerProjections,
    LayerWeights,
)
from dsv4.kernels.reference.arithmetic import rotate
from dsv4.model.attention import GATE_TENSOR, INDEX_TENSORS, KV_TENSORS, TENSORS, project
from dsv4.rope import build_rope_table
from tests.dense import dense_layers
from tests.v41 import tiny_v41

CONFIG = tiny_v41()
HIDDEN, Q_LOW, GROUPS, RANK, NUM_TOKENS = 48, 40, 2, 12, 70
HEADS, DIM, INDEX = CONFIG.num_query_heads, CONFIG.head_dim, CONFIG.index_head_dim
SHAPES = {
    "wq_a.weight": (Q_LOW, HIDDEN), "q_norm.weight": (Q_LOW,),
    "wq_b.weight": (HEADS * DIM, Q_LOW), "wkv.weight": (DIM, HIDDEN), "kv_norm.weight": (DIM,),
    "attn_sink": (HEADS,), "wo_a.weight": (GROUPS * RANK, HEADS * DIM // GROUPS),
    "wo_b.weight": (HIDDEN, GROUPS * RANK), "compressor.wkv.weight": (DIM, HIDDEN),
    "compressor.norm.weight": (DIM,), "indexer.wk.weight": (INDEX, DIM),
    "indexer.k_norm.weight": (INDEX,), "compressor.wgate.weight": (DIM, HIDDEN),
    "indexer.wq_b.weight": (CONFIG.index_num_heads * INDEX, Q_LOW),
    "indexer.weights_proj.weight": (CONFIG.index_num_heads, HIDDEN),
}  # fmt: skip


def make_tensors(layer, dtype=torch.float32):
    """Draw the tensors that a layer has, and no others."""
    generator = torch.Generator().manual_seed(layer.layer_idx)
    names = [*TENSORS, *(KV_TENSORS if layer.owns_entries else ())]
    names += [GATE_TENSOR] if layer.owns_entries and layer.ratio > 1 else []
    names += INDEX_TENSORS if layer.owns_choice else ()
    drawn = {name: torch.randn(SHAPES[name], generator=generator) / 6 for name in names}
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def expected_layers(layers, hidden):
    """Project by plain products, and run the oracle without a cache, its outputs in fp32."""
    ropes = {
        base: build_rope_table(CONFIG, base, num_positions=NUM_TOKENS, device=torch.device("cpu"))
        for base in ("main", "compress")
    }
    inputs, weights = [], []
    for spec, named, x in zip(CONFIG.schedule, layers, hidden, strict=True):
        low = linear(x, named["wq_a.weight"])
        normed = low.float() * torch.rsqrt(low.float().square().mean(-1, keepdim=True) + 1e-20)
        low = normed.to(low.dtype) * named["q_norm.weight"]
        query = linear(low, named["wq_b.weight"]).view(NUM_TOKENS, HEADS, DIM).float()
        cos, sin = (rows[:, None] for rows in ropes[spec.rope_base])
        compressor = index = pooling = keys = None
        if spec.owns_entries:
            wkv, gate = named["compressor.wkv.weight"], None
            if spec.ratio > 1:  # a pair is projected in fp32
                gate = linear(x.float(), named[GATE_TENSOR].float())
            pooled = linear(x.float(), wkv.float()) if spec.ratio > 1 else linear(x, wkv)
            compressor = CompressorInputs(pooled, gate)
            pooling = CompressorWeights(None, named["compressor.norm.weight"])
            keys = KeyWeights(named["indexer.wk.weight"], named["indexer.k_norm.weight"])
        if spec.owns_choice:
            wide = linear(low, named["indexer.wq_b.weight"]).view(NUM_TOKENS, -1, INDEX)
            head_weights = linear(x, named["indexer.weights_proj.weight"])
            index = IndexInputs(None, None, wide, head_weights)
        kv = linear(x, named["wkv.weight"])
        inputs.append(LayerProjections(rotate(query, cos, sin), kv, compressor, index))
        learned = LayerWeights(named["kv_norm.weight"], named["attn_sink"], pooling, keys)
        weights.append(learned)
    outputs = []
    for named, made in zip(layers, dense_layers(CONFIG, inputs, weights, ropes), strict=True):
        grouped = made.output.float().reshape(NUM_TOKENS, GROUPS, -1)
        blocks = named["wo_a.weight"].float().view(GROUPS, RANK, -1)
        mixed = torch.cat([grouped[:, g] @ blocks[g].T for g in range(GROUPS)], dim=1)
        outputs.append(linear(mixed, named["wo_b.weight"].float()))
    return outputs


def relative_errors(size, dtype=torch.float32):
    """Run all tokens in chunks of a size; return each layer's error, relative to its outputs."""
    generator = torch.Generator().manual_seed(99)
    layers = [make_tensors(layer, dtype) for layer in CONFIG.schedule]
    hidden = [torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype) for _ in layers]
    blocks = [AttentionSubBlock.from_tensors(t, CONFIG, idx) for idx, t in enumerate(layers)]
    manager = KVCacheManager(CONFIG, max_requests=1, num_blocks=16)
    slot, outputs = manager.open_request(), [[] for _ in layers]
    for start in range(0, NUM_TOKENS, size):
        end = min(start + size, NUM_TOKENS)
        plan, chosen = prepare_forward(manager, [slot], [start], [end]), {}
        for idx, block in enumerate(blocks):
            handle = manager.acquire(idx, plan)
            outputs[idx].append(block(hidden[idx][start:end], handle, chosen))
        assert set(chosen) == set(CONFIG.index_source_layer_ids)
    pairs = zip(outputs, expected_layers(layers, hidden), strict=True)
    assert {output.dtype for each in outputs for output in each} == {dtype}
    return [
        float((torch.cat(got).float() - expected).norm() / expected.norm())
        for got, expected in pairs
    ]


@pytest.mark.parametrize("size", [1, 2, 33])
def test_chunks_of_named_tensors(size):
    """A projection of other rows at a time may differ in its last bit, and so may a code."""
    assert max(relative_errors(size)) < 2e-2


# All rows at once have the oracle's projections, bit by bit, and so its codes and choices. What is
# left in fp32 is the order of three sums of at most 192 terms, some √192 · 2^-25 = 4e-7 each if
# roundings are random, and less as they are summed in parts. In BF16 it is one rounding each of
# attention's output and of two projections.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3 * 2**-9}


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items(), ids=["fp32", "bf16"])
def test_a_prompt_of_named_tensors(dtype, bound):
    errors = relative_errors(NUM_TOKENS, dtype)
    assert max(errors) < bound, errors


@pytest.mark.slow
def test_compiled_blocks_are_the_eager_ones():
    layers = [make_tensors(layer) for layer in CONFIG.schedule]
    blocks = [AttentionSubBlock.from_tensors(t, CONFIG, idx) for idx, t in enumerate(layers)]
    hidden = torch.randn(23, HIDDEN, generator=torch.Generator().manual_seed(1))

    def stack(x, handles):
        chosen = {}
        for block, handle in zip(blocks, handles, strict=True):
            x = x + block(x, handle, chosen)
        return x

    def run(step):
        manager = KVCacheManager(CONFIG, max_requests=1, num_blocks=16)
        slot, outputs = manager.open_request(), []
        for before, after in ((0, 20), (20, 21), (21, 22), (22, 23)):
            plan = prepare_forward(manager, [slot], [before], [after])
            handles = [manager.acquire(idx, plan) for idx in range(len(blocks))]
            outputs.append(step(hidden[before:after], handles))
            assert plan.is_complete
        return torch.cat(outputs), manager.paged.storage

    counter = CompileCounterWithBackend("aot_eager")
    got = run(torch.compile(stack, backend=counter, fullgraph=True))
    assert all(torch.equal(*pair) for pair in zip(got, run(stack), strict=True))
    assert counter.frame_count <= 4  # a chunk, a step, and lengths that become symbols


def test_small_low_ranks_are_normed():
    """V4's epsilon would leave a low rank of 1e-6 small, and so its query."""
    tensors = make_tensors(CONFIG.schedule[0])
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    queries = []
    for scale in (1.0, 1e-6):
        given = {**tensors, "wq_a.weight": scale * tensors["wq_a.weight"]}
        block = AttentionSubBlock.from_tensors(given, CONFIG, 0)
        queries.append(project(block.module, hidden, CONFIG).query)
    torch.testing.assert_close(*queries)


def test_tensors_are_refused_by_name():
    tensors = make_tensors(CONFIG.schedule[1])
    del tensors[GATE_TENSOR]
    with pytest.raises(ValueError, match=r"layer 1: .* without compressor\.wgate\.weight"):
        AttentionSubBlock.from_tensors(tensors, CONFIG, 1)
    with pytest.raises(ValueError, match=r"expected DeepSeek-V4\.1's; from_hf makes V4's"):
        AttentionSubBlock.from_tensors(tensors, CacheConfig.tiny(), 0)


WRONG_TENSORS = {
    "wider": (lambda w: torch.cat([w, w[..., :1]], dim=-1), ValueError, "shape of"),
    "transposed": (lambda w: w.T if w.ndim > 1 else w[None], ValueError, "shape of"),
    "fp16": (torch.Tensor.half, TypeError, "dtype of"),
    "fp8": (lambda w: w.to(torch.float8_e4m3fn), TypeError, "dtype of"),
    "numpy": (torch.Tensor.numpy, TypeError, ""),
    "none": (lambda w: None, TypeError, ""),
    "elsewhere": (lambda w: w.to("meta"), ValueError, "device of"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("change", "error", "what"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensors_are_refused(name, change, error, what):
    """Refusals come before a cache, and name the tensor, or one whose width must be the same."""
    tensors = make_tensors(CONFIG.schedule[1])
    assert set(tensors) == set(SHAPES)
    tensors[name] = change(tensors[name])
    is_measure = name in ("wq_a.weight", "wo_a.weight") and what in ("shape of", "device of")
    with pytest.raises(error, match=f"Invalid {what} ?{'' if is_measure else name}"):
        AttentionSubBlock.from_tensors(tensors, CONFIG, 1)


def test_tensors_of_other_layers_are_ignored():
    tensors = {**dict.fromkeys(SHAPES), **make_tensors(CONFIG.schedule[3]), "wq_a.scale": None}
    AttentionSubBlock.from_tensors(tensors, CONFIG, 3)  # of ratio 1: no gate
    with pytest.raises(TypeError, match="Invalid tensors: expected a Mapping, got list"):
        AttentionSubBlock.from_tensors(list(tensors), CONFIG, 3)


def test_layers_that_share_need_what_was_chosen():
    block = AttentionSubBlock.from_tensors(make_tensors(CONFIG.schedule[0]), CONFIG, 0)
    manager = KVCacheManager(CONFIG, max_requests=1, num_blocks=1)
    plan = prepare_forward(manager, [manager.open_request()], [0], [1])
    with pytest.raises(TypeError, match="need chosen: expected a dict"):
        block(torch.zeros(1, HIDDEN), manager.acquire(0, plan))
