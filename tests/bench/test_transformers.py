"""`dsv4 bench transformers` on a small model, and the memory it is about, by arithmetic."""

import pytest
import torch
from transformers import DynamicCache

from dsv4.bench import transformers as bench
from dsv4.cache.capacity import Capacity
from dsv4.config import CacheConfig
from dsv4.integrations.transformers.own_cache import own_cache_bytes
from dsv4.model.random_hf import random_hf_model


@pytest.fixture(scope="module")
def model():
    return random_hf_model(seed=0, compress_ratios=[0, 4, 128], hc_sinkhorn_iters=2)


def test_the_tables(model):
    sizes = bench.Sizes(decodes=((2, 140),), contexts=(300,), prefill_tokens=150, num_steps=2)
    bench.check_logits(model)
    result = bench.measure(model, sizes)
    (row,), (memory,) = result["decode"], result["memory"]
    assert row["speedup"] == row["step_us"]["transformers"] / row["step_us"]["this"]
    assert row["ceiling"] == row["step_us"]["transformers"] / row["step_us"]["free"]
    assert all(time > 0 for name in ("step_us", "attention_us") for time in row[name].values())
    assert memory["ratio"] == memory["this_bytes"] / memory["transformers_bytes"]
    assert sum(memory["this"].values()) == memory["this_bytes"] + memory["workspace_bytes"]
    assert not {"generate", "forward"} & set(vars(model)) and "forward" not in vars(model.model)


def test_the_gate_refuses(model, monkeypatch):
    from dsv4.kernels.reference import attention

    monkeypatch.setattr(attention, "unrotate", lambda output, positions, rope: output)
    with pytest.raises(RuntimeError, match="nothing is timed"):
        bench.check_logits(model)


def own_bytes(config: CacheConfig, length: int, item: int) -> int:
    """transformers' cache of one row in elements of so many bytes, by arithmetic."""
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
    return total * item


@pytest.mark.parametrize("length", [3, 127, 131, 256, 301])
def test_what_transformers_holds(model, length):
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, length, dtype=torch.long), past_key_values=own)
    held = own_cache_bytes(own, model.config.layer_types)
    config = CacheConfig.from_hf(model.config)
    assert sum(held.values()) == own_bytes(config, length, 4)
    assert held["index_keys"] == length // 4 * config.index_head_dim * 4


@pytest.mark.parametrize(("context", "limit"), [(32768, 0.58), (131072, 0.54)])
def test_memory_at_the_real_widths(context, limit):
    """The ratios that the bench prints on a GPU: all of it follows from the sizes."""
    config = CacheConfig.v4_flash(compress_ratios=tuple(bench.FLASH_WIDTHS["compress_ratios"]))
    capacity = Capacity(config, 1, context // config.block_tokens, 8192, context)
    components = {name: size.allocated for name, size in capacity.memory().items()}
    ratio = bench.stored_bytes(components) / own_bytes(config, context, 2)
    assert limit - 0.02 < ratio <= limit
