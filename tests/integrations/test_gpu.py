"""The integration on a GPU: the same ids, and decode steps that never wait for the device.

Models are in fp32 with fp32 rows where ids are compared; PyTorch multiplies fp32 matrices without
TF32 unless told otherwise.
"""

import pytest
import torch

from dsv4.integrations.transformers import attach, detach
from dsv4.model.random_hf import random_hf_model
from dsv4.tools.bench import transformers as bench
from dsv4.tools.bench.transformers import FLASH_WIDTHS, Sizes
from dsv4.tools.demo.run import random_subject, run_demo
from tests.integrations.generation import (
    GREEDY,
    alone,
    padded,
    poisoned,
    prompts,
    share_of_scale,
    small_model,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LENGTHS = (140, 7, 33)


@pytest.fixture(scope="module")
def model():
    return small_model(3, 4, 128, 0).to(DEVICE)


@pytest.fixture
def cache(model):
    with poisoned(model, max_tokens=256) as cache:
        yield cache
        cache.manager.check_integrity()


def on_device(inputs):
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def test_a_padded_batch_equals_its_prompts_alone(model, cache):
    texts, options = prompts(1, *LENGTHS), {**GREEDY, "max_new_tokens": 20}
    mine = model.generate(**on_device(padded(texts)), **options, past_key_values=cache)
    for row, text in enumerate(texts):
        theirs = model.generate(**on_device(alone(text)), **options)
        assert mine[row, max(LENGTHS) :].tolist() == theirs[0, len(text) :].tolist()


def test_logits_are_transformers(model, cache):
    (text,) = prompts(2, 200)
    ids = text[None].to(DEVICE)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        parts = [ids[:, :150], *ids[:, 150:].split(1, dim=1)]
        mine = [model(part, past_key_values=cache).logits for part in parts]
    assert share_of_scale(torch.cat(mine, dim=1), expected) <= 1e-5


def test_beam_search_equals_one_without_any_cache(model, cache):
    options = {**GREEDY, "num_beams": 4, "max_new_tokens": 16}
    texts = prompts(3, 130, 9)
    batch = model.generate(**on_device(padded(texts)), **options, past_key_values=cache)
    for row, text in enumerate(texts):
        theirs = model.generate(**on_device(alone(text)), **options, use_cache=False)
        assert batch[row, 130:].tolist() == theirs[0, len(text) :].tolist()


def test_assisted_decoding_equals_greedy(model, cache):
    repeated = on_device(alone(prompts(4, 21)[0].repeat(6)))
    options = {**GREEDY, "max_new_tokens": 30}
    greedy = model.generate(**repeated, **options)
    mine = model.generate(**repeated, **options, past_key_values=cache, prompt_lookup_num_tokens=5)
    assert mine.tolist() == greedy.tolist()


def test_detach_restores_the_model():
    model, untouched = (small_model(6, 4, 128).to(DEVICE) for _ in range(2))
    text = on_device(alone(prompts(5, 100)[0]))
    cache = attach(model, max_requests=8, max_tokens=256)
    model.generate(**text, **GREEDY, max_new_tokens=4, past_key_values=cache)
    cache.close()
    detach(model)
    names = [[set(vars(module)) for module in m.modules()] for m in (model, untouched)]
    assert names[0] == names[1]
    mine, theirs = (m.generate(**text, **GREEDY, max_new_tokens=8) for m in (model, untouched))
    assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["launches", "graphs"])
def test_attention_of_decode_steps_never_waits(model, cuda_graphs):
    hidden = torch.randn(2, 1, model.config.hidden_size, device=DEVICE)
    ids = torch.ones(2, 130, dtype=torch.long, device=DEVICE)
    with poisoned(model, max_tokens=256, cuda_graphs=cuda_graphs) as cache, torch.no_grad():
        model(ids, past_key_values=cache)

        def step():
            with cache.forward(2, 1, None):
                for idx, layer in enumerate(model.model.layers):
                    cache.attend(idx, layer.self_attn, hidden)

        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(6):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cache.lengths == [137, 137]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{"num_beams": 4}, {"do_sample": True}], ids=["beams", "sample"]
)
def test_default_formats_generate(model, dtype, options):
    texts = on_device(padded(prompts(1, 140, 7)))
    chosen = small_model(3, 4, 128, 0).to(DEVICE, dtype)
    with attach(chosen, max_requests=8, max_tokens=256) as cache:
        out = chosen.generate(
            **texts, **{**GREEDY, **options}, max_new_tokens=12, past_key_values=cache
        )
        assert out.shape == (2, 152)
        cache.manager.check_integrity()


@pytest.fixture(scope="module")
def wide_model():
    """Heads as V4-Flash has them, on a narrow model."""
    narrow = {
        **FLASH_WIDTHS, "hidden_size": 256, "q_lora_rank": 128, "o_lora_rank": 64,
        "hc_sinkhorn_iters": 2,
    }  # fmt: skip
    return random_hf_model(seed=0, **narrow).to(DEVICE, torch.bfloat16)


def test_attention_of_real_heads_is_near_transformers(wide_model):
    bench.check_attention(wide_model)


def test_a_captured_step_of_real_heads_gives_the_same_ids(wide_model):
    bench.check_step(wide_model)


def test_the_bench_on_a_narrow_model(wide_model):
    sizes = Sizes(decodes=((2, 4096),), contexts=(4096,), num_steps=3)
    result = bench.measure(wide_model, sizes)
    (row,), (memory,) = result["decode"], result["memory"]
    assert not result["errors"]
    assert row["speedup"].keys() == {"this", "graphs", "step"} and memory["ratio"] > 0
    assert row["attention_speedup"].keys() == {"this", "graphs"}


def test_the_demo():
    result = run_demo(random_subject(seed=0, device=str(DEVICE)), num_new=8)
    assert result["ok"] and result["device"].startswith(DEVICE.type)
    assert result["first_difference"]["fp32"] == [None] * 4
