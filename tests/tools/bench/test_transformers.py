"""`dsv4 bench transformers` on a small model, and its memory by arithmetic."""

import pytest
import torch
from transformers import DynamicCache

from dsv4.cache.memory.capacity import Capacity
from dsv4.config import CacheConfig
from dsv4.integrations.transformers import attach, detach
from dsv4.model.random_hf import random_hf_model
from dsv4.tools.bench import transformers as bench
from dsv4.tools.bench.long_contexts import fill_paged, fill_transformers
from dsv4.tools.bench.tables import show
from dsv4.tools.transformers_cache import transformers_cache_bytes


@pytest.fixture(scope="module")
def model():
    return random_hf_model(seed=0, compress_ratios=[0, 4, 128], hc_sinkhorn_iters=2)


def test_the_tables(model):
    sizes = bench.Sizes(decodes=((2, 1000),), contexts=(3000,), num_steps=2)
    bench.check_attention(model)
    result = bench.measure(model, sizes)
    assert not result["errors"]
    (row,), (memory,) = result["decode"], result["memory"]
    assert row["speedup"] == {"this": row["step_us"]["transformers"] / row["step_us"]["this"]}
    assert row["ceiling"] == row["step_us"]["transformers"] / row["step_us"]["free"]
    assert row["step_us"].keys() == {"this", "transformers", "free"}
    assert all(time > 0 for time in row["step_us"].values())
    assert row["attention_us"]["this"] > 0 and row["attention_us"]["transformers"] > 0
    assert memory["ratio"] == memory["this_bytes"] / memory["transformers_bytes"]
    assert sum(memory["this"].values()) == memory["this_bytes"] + memory["workspace_bytes"]
    assert not {"generate", "forward"} & set(vars(model)) and "forward" not in vars(model.model)


def test_the_gate_refuses(model, monkeypatch):
    from dsv4.kernels.reference import attention

    monkeypatch.setattr(attention, "unrotate", lambda output, rope: output)
    with pytest.raises(RuntimeError, match="nothing is timed"):
        bench.check_attention(model)
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_gate_of_captured_steps(model, monkeypatch, is_wrong):
    """Without a GPU, both runs are launch by launch."""

    def attach_plainly(model, *, cuda_graphs=False, **choices):
        cache = attach(model, **choices)
        if cuda_graphs and is_wrong:
            attend = cache.attend
            monkeypatch.setattr(cache, "attend", lambda *inputs: attend(*inputs).flip(-1))
        return cache

    monkeypatch.setattr(bench, "attach", attach_plainly)
    if is_wrong:
        with pytest.raises(RuntimeError, match="other ids than the launches; nothing is timed"):
            bench.check_step(model)
    else:
        bench.check_step(model)
    assert "forward" not in vars(model.model)


def test_a_row_without_memory_says_so(model, monkeypatch):
    fill_transformers = bench.fill_transformers

    def fill(model, cache, batch, context):
        if context == 500:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        fill_transformers(model, cache, batch, context)

    monkeypatch.setattr(bench, "fill_transformers", fill)
    sizes = bench.Sizes(decodes=((1, 500), (1, 400)), contexts=(500, 400), num_steps=1)
    result = bench.measure(model, sizes)
    (failed, decoded), (failed_memory, memory) = result["decode"], result["memory"]
    problem = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    cases = ("batch 1, 500 tokens", "memory, 500 tokens")
    assert result["errors"] == [f"{case}, transformers: {problem}" for case in cases]
    assert failed["step_us"].keys() == {"this", "free"} and not failed["speedup"]
    assert failed_memory["this_bytes"] > 0 and "ratio" not in failed_memory
    assert decoded["speedup"]["this"] > 0 and memory["ratio"] > 0
    shown = show("transformers", result)
    assert shown.sentences == result["errors"] and len(shown.tables) == 2
    assert "forward" not in vars(model.model)


def contents(cache) -> list[dict]:
    """Return the shapes of a cache's tensors and its counts, by layer."""

    def outline(value):
        if isinstance(value, dict):
            return {name: outline(part) for name, part in value.items()}
        return tuple(value.shape) if isinstance(value, torch.Tensor) else value

    return [outline(vars(layer)) for layer in cache.layers]


@pytest.mark.parametrize("context", [100, 300, 387, 642])
def test_a_filled_cache_of_transformers_is_as_after_the_text(model, context):
    filled, run = DynamicCache(config=model.config), DynamicCache(config=model.config)
    fill_transformers(model, filled, 2, context)
    ids = torch.ones(2, context, dtype=torch.long)
    with torch.no_grad():
        for cache in (filled, run):
            if cache is run:
                model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
    assert contents(filled) == contents(run)
    assert filled.get_seq_length() == run.get_seq_length() == context + 1
    types = model.config.layer_types
    assert transformers_cache_bytes(filled, types) == transformers_cache_bytes(run, types)


def test_a_filled_paged_cache_goes_on(model):
    with attach(model, max_requests=2, max_tokens=1024, max_forward_tokens=256) as cache:
        fill_paged(cache, 2, 700)
        assert cache.lengths == [700, 700] and cache.get_seq_length() == 700
        with torch.no_grad():
            logits = model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache).logits
        assert logits.isfinite().all() and cache.lengths == [701, 701]
    detach(model)


def own_bytes(config: CacheConfig, length: int, itemsize: int) -> int:
    """Compute the bytes of one row of transformers' cache, with elements of `itemsize` bytes."""
    window = min(length, config.sliding_window - 1)
    total = 0
    for layer in config.schedule:
        ratio, dims = layer.ratio, [config.head_dim]
        total += window * config.head_dim * (1 if ratio else 2)  # SWA layers hold keys and values
        if ratio == 4:
            dims.append(config.index_head_dim)
        if ratio:
            series = 2 if ratio == 4 else 1
            total += sum(dims) * (length // ratio + 2 * series * (length % ratio))
        if ratio == 4 and length >= 4:
            total += sum(dims) * 2 * 4  # the last window's other series
    return total * itemsize


@pytest.mark.parametrize("length", [3, 127, 131, 256, 301])
def test_what_transformers_holds(model, length):
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long), past_key_values=own)
    held = transformers_cache_bytes(own, model.config.layer_types)
    config = CacheConfig.from_hf(model.config)
    assert sum(held.values()) == own_bytes(config, length, 4)
    assert held["index_keys"] == length // 4 * config.index_head_dim * 4


@pytest.mark.parametrize(("context", "limit"), [(32768, 0.54), (131072, 0.53)])
def test_memory_at_the_real_widths(context, limit):
    """Check the ratios that the bench prints on a GPU; they follow from the sizes."""
    config = CacheConfig.v4_flash(compress_ratios=tuple(bench.FLASH_WIDTHS["compress_ratios"]))
    capacity = Capacity(config, 1, context // config.block_tokens, 8192, context)
    components = {name: size.allocated for name, size in capacity.memory().items()}
    ratio = bench.stored_bytes(components) / own_bytes(config, context, 2)
    assert limit - 0.02 < ratio <= limit
