"""Cached attention equals transformers' for all layer types, however the tokens arrive."""

import copy
import random

import pytest
import torch

from dsv4 import AttentionSubBlock, AttentionType, CacheConfig, KVCacheManager, prepare_forward
from dsv4.model.random_hf import random_hf_model, record_attention
from tests.model.parity import CachedRun, chunked

NUM_TOKENS = 420
EXACT = {"kv_format": "fp32", "index_format": "fp32"}


@pytest.fixture(scope="module")
def model():
    return random_hf_model(seed=0)


@pytest.fixture(scope="module")
def recorded(model):
    generator = torch.Generator().manual_seed(1)
    lengths = (NUM_TOKENS, 300, 131, 257, 66)
    return [
        record_attention(model, torch.randint(0, 128, (n,), generator=generator)) for n in lengths
    ]


def exact_config(model, **choices) -> CacheConfig:
    return CacheConfig.from_hf(model.config, **{**EXACT, **choices})


def run_alone(model, recorded, steps, **choices) -> None:
    run = CachedRun(model, exact_config(model, **choices), recorded[:1])
    run.run(steps)
    run.check()


def test_all_layer_types_are_there(model):
    kinds = {layer.attention_type for layer in exact_config(model).schedule}
    assert kinds == set(AttentionType)


@pytest.mark.parametrize("size", [2, 3, 5, 7, 11, 13, 61, 127, 128, 129, 255, 256, 257, NUM_TOKENS])
def test_chunks(model, recorded, size):
    run_alone(model, recorded, chunked(0, NUM_TOKENS, size))


def test_decode_from_the_first_token(model, recorded):
    run_alone(model, recorded, chunked(0, NUM_TOKENS, 1))


@pytest.mark.parametrize("prompt", [1, 127, 128, 250])
def test_prefill_then_decode(model, recorded, prompt):
    steps = [[(0, 0, prompt)]] + [[(0, p, p + 1)] for p in range(prompt, prompt + 40)]
    run_alone(model, recorded, steps)


@pytest.mark.parametrize("block_tokens", [128, 256, 384, 1024])
def test_block_sizes(model, recorded, block_tokens):
    run_alone(model, recorded, chunked(0, NUM_TOKENS, 37), block_tokens=block_tokens)


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_steps_of_several_tokens_are_read_from_the_ring(model, recorded, drafts):
    steps = chunked(0, NUM_TOKENS, drafts + 1)
    run_alone(model, recorded, steps, drafts_per_step=drafts)


def test_without_hadamard(model, recorded):
    run_alone(model, recorded, chunked(0, NUM_TOKENS, 100), index_hadamard=False)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_in_shuffled_order_with_reused_slots(model, recorded, seed):
    rng = random.Random(seed)
    config = exact_config(model, block_tokens=128, drafts_per_step=2)
    run = CachedRun(model, config, recorded, max_requests=3)
    waiting, lengths = list(range(len(recorded))), {}
    rng.shuffle(waiting)
    while waiting or lengths:
        while waiting and run.manager.num_free_slots:
            sequence = waiting.pop()
            run.open(sequence)
            lengths[sequence] = 0
        rows = []
        for sequence in rng.sample(sorted(lengths), k=rng.randint(1, len(lengths))):
            count = rng.choice([0, 1, 1, 1, 2, 3, 4, 17, 60, 129, 200])
            after = min(lengths[sequence] + count, len(recorded[sequence][0].hidden))
            rows.append((sequence, lengths[sequence], after))
        run.step(rows)
        for sequence, _, after in rows:
            lengths[sequence] = after
            if after == len(recorded[sequence][0].hidden):
                run.close(sequence)
                del lengths[sequence]
        run.manager.check_integrity()
    run.check()


def test_a_wider_model_with_more_entries_than_top_k():
    model = random_hf_model(
        seed=5, compress_ratios=[4, 128, 0], head_dim=128, qk_rope_head_dim=64, index_topk=24,
        index_n_heads=32, num_attention_heads=8, o_groups=4,
    )  # fmt: skip
    ids = torch.randint(0, 128, (700,), generator=torch.Generator().manual_seed(2))
    run = CachedRun(model, exact_config(model), [record_attention(model, ids)])
    run.run(chunked(0, 700, 150))
    run.check()


def test_padding_rows_touch_nothing_and_give_zero(model, recorded):
    config = exact_config(model)
    manager = KVCacheManager(config, max_requests=4, num_blocks=8)
    slot = manager.open_request()
    plan = prepare_forward(manager, [-1, slot, -1], [0, 0, 5], [3, 140, 6])
    storages = (manager.paged.storage, manager.state.storage)
    for layer_idx, layer in enumerate(model.model.layers):
        hidden, expected, _ = recorded[0][layer_idx]
        nan = torch.full((4, hidden.shape[1]), torch.nan)
        padded = torch.cat((nan[:3], hidden[:140], nan[3:]))
        block = AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
        output = block(padded, manager.acquire(layer_idx, plan))
        assert (output[:3] == 0).all() and (output[-1] == 0).all()
        assert (output[3:143] - expected[:140]).abs().max() <= 5e-6 * expected.abs().max()
    assert all(not torch.isnan(storage.view(torch.float32)).any() for storage in storages)


class Int8Linear(torch.nn.Module):
    """A quantised linear: int8 weights with one scale a row."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = (linear.weight.detach() / self.scale).round().to(torch.int8)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale)


def quantise(module) -> None:
    """Replace all linears but the grouped one."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, Int8Linear(child))


@pytest.mark.parametrize("layer_idx", [0, 1, 2], ids=["SWA", "CSA", "HCA"])
def test_quantised_linears(model, recorded, layer_idx):
    attention = copy.deepcopy(model.model.layers[layer_idx].self_attn)
    quantise(attention)
    plain = copy.deepcopy(model.model.layers[layer_idx].self_attn)
    for name, module in attention.named_modules():
        if isinstance(module, Int8Linear):
            plain.get_submodule(name).weight.data = module.weight * module.scale
    config, outputs = exact_config(model), []
    for source in (attention, plain):
        manager = KVCacheManager(config, max_requests=1, num_blocks=4)
        block = AttentionSubBlock.from_hf(source, config, layer_idx)
        plan = prepare_forward(manager, [manager.open_request()], [0], [150])
        hidden = recorded[0][layer_idx].hidden[:150]
        outputs.append(block(hidden, manager.acquire(layer_idx, plan)))
    assert torch.equal(*outputs)


class Fp8Linear(torch.nn.Module):
    """A linear of FP8 weights with a scale, plain or grouped, whose forward applies the scale."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        self.n_groups = getattr(linear, "n_groups", None)
        scale = linear.weight.detach().abs().amax() / 448
        self.weight = (linear.weight.detach() / scale).to(torch.float8_e4m3fn)
        self.weight_scale_inv = scale

    @property
    def scaled(self):
        return self.weight.float() * self.weight_scale_inv

    def forward(self, x):
        if self.n_groups is None:
            return torch.nn.functional.linear(x, self.scaled)
        weight = self.scaled.unflatten(0, (self.n_groups, -1))
        return torch.einsum("tgi,goi->tgo", x, weight)


class Hidden(torch.nn.Module):
    """A linear whose weight is out of reach, as some quantised ones are."""

    def __init__(self, linear):
        super().__init__()
        self.in_features = linear.in_features
        self.n_groups = getattr(linear, "n_groups", None)
        self.parts = [linear]

    def forward(self, x):
        return self.parts[0](x)


def replace_linears(module, build) -> list[str]:
    """Replace every linear, the grouped one too; return their names."""
    names = [n for n, child in module.named_modules() if isinstance(child, torch.nn.Linear)]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, build(module.get_submodule(name)))
    return names


def outputs_of(attention, config, layer_idx, hidden):
    manager = KVCacheManager(config, max_requests=1, num_blocks=4)
    block = AttentionSubBlock.from_hf(attention, config, layer_idx)
    plan = prepare_forward(manager, [manager.open_request()], [0], [len(hidden)])
    return block(hidden, manager.acquire(layer_idx, plan))


@pytest.mark.parametrize("layer_idx", [0, 1, 2], ids=["SWA", "CSA", "HCA"])
def test_every_linear_is_called(model, recorded, layer_idx):
    """Outputs follow a module's scale, and need no weight."""
    config, hidden = exact_config(model), recorded[0][layer_idx].hidden[:150]
    plain = copy.deepcopy(model.model.layers[layer_idx].self_attn)
    quantised = copy.deepcopy(plain)
    names = replace_linears(quantised, Fp8Linear)
    assert "o_a_proj" in names and len(names) >= 5
    for name in names:
        plain.get_submodule(name).weight.data = quantised.get_submodule(name).scaled
    expected = outputs_of(plain, config, layer_idx, hidden)
    got = outputs_of(quantised, config, layer_idx, hidden)
    assert (got - expected).abs().max() <= 5e-6 * expected.abs().max()
    replace_linears(plain, Hidden)
    assert torch.equal(outputs_of(plain, config, layer_idx, hidden), expected)


@pytest.mark.parametrize("layer_idx", [-1, 4, True, 1.0, "1", None], ids=repr)
def test_layer_indices_that_are_none(model, layer_idx):
    attention = model.model.layers[1].self_attn
    with pytest.raises(ValueError, match="Invalid layer_idx: expected an integer from 0 to 3"):
        AttentionSubBlock.from_hf(attention, exact_config(model), layer_idx)


def test_arguments_of_other_types(model):
    attention, config = model.model.layers[1].self_attn, exact_config(model)
    with pytest.raises(TypeError, match="Invalid config: expected a CacheConfig, got Deepseek"):
        AttentionSubBlock.from_hf(attention, model.config, 1)
    with pytest.raises(TypeError, match=r"Invalid module: expected a layer_type, .* got a Linear"):
        AttentionSubBlock.from_hf(torch.nn.Linear(2, 2), config, 1)
    with pytest.raises(TypeError, match="Invalid layer: expected a LayerSpec, got int"):
        AttentionSubBlock(attention, config, 1)
    with pytest.raises(TypeError, match=r"Invalid module: expected .*, compressor .* got a Linear"):
        AttentionSubBlock(torch.nn.Linear(2, 2), config, config.schedule[1])
    block = AttentionSubBlock.from_hf(attention, config, 1)
    with pytest.raises(TypeError, match="Invalid handle: expected a LayerCacheHandle, got int"):
        block(torch.zeros(5, 64), 3)
    manager = KVCacheManager(config, max_requests=1, num_blocks=4)
    plan = prepare_forward(manager, [manager.open_request()], [0], [5])
    with pytest.raises(TypeError, match="Invalid hidden: expected a tensor, got list"):
        block([1.0], manager.acquire(1, plan))


def test_refusals(model):
    config = exact_config(model)
    attention = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="expected CSA, got SWA"):
        AttentionSubBlock.from_hf(attention, config, 1)
    with pytest.raises(ValueError, match="expected an integer from 0 to 3, got 4"):
        AttentionSubBlock.from_hf(attention, config, 4)
    block = AttentionSubBlock.from_hf(attention, config, 0)
    manager = KVCacheManager(config, max_requests=1, num_blocks=4)
    plan = prepare_forward(manager, [manager.open_request()], [0], [5])
    with pytest.raises(
        ValueError, match=r"Invalid shape of hidden: expected \[5, 64\], got \[4, 64\]"
    ):
        block(torch.zeros(4, 64), manager.acquire(0, plan))
    for dtype in (torch.float16, torch.int64):
        with pytest.raises(TypeError, match=f"expected float32 or bfloat16, got {dtype}"):
            block(torch.zeros(5, 64, dtype=dtype), manager.acquire(0, plan))
    with pytest.raises(ValueError, match="expected layer 0 of this block's config, got layer 1"):
        block(torch.zeros(5, 64), manager.acquire(1, plan))
    other = KVCacheManager(exact_config(model, block_tokens=128), max_requests=1, num_blocks=4)
    plan = prepare_forward(other, [other.open_request()], [0], [5])
    with pytest.raises(ValueError, match="of another config"):
        block(torch.zeros(5, 64), other.acquire(0, plan))
    with pytest.raises(ValueError, match="expected compressor: True, indexer: True"):
        AttentionSubBlock(attention, config, config.schedule[1])
