"""An engine over an attached model answers as `generate` does, with the model's own cache."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

from dsv4.engine import Engine, SamplingParams
from dsv4.integrations.transformers import PackedModel, attach
from dsv4.model.random_hf import random_hf_model

PROMPTS = [[*range(3, 90)], [*range(5, 12)], [*range(3, 90), *range(30, 50)], [7]]
NUM_NEW = 9


@pytest.fixture(scope="module")
def models():
    return {}


@pytest.fixture
def model(models, device):
    if device not in models:
        models[device] = random_hf_model(seed=0).to(device)
        models[device].set_experts_implementation("batched_mm")
    return models[device]


def generate(model, prompt):
    ids = torch.tensor([prompt], device=model.device)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip


@pytest.mark.parametrize("cuda_graphs, mixed_tokens", [(False, None), (True, None), (True, 64)])
@pytest.mark.parametrize("overlap, num_drafts", [(False, 0), (True, 0), (False, 3), (True, 3)])
def test_answers_are_those_of_generate(model, overlap, num_drafts, cuda_graphs, mixed_tokens):
    cache = attach(
        model, max_requests=3, num_blocks=4, kv_format="fp32", index_format="fp32",
        max_forward_tokens=64, drafts_per_step=3,
    )  # fmt: skip
    answers, texts = {}, [[*prompt, *generate(model, prompt)] for prompt in PROMPTS]

    def guess(ids, count, _):
        """The answer, with every fifth token wrong; nothing for the last prompt's."""
        text = next(text for text in texts if text[: len(ids)] == ids)
        wrong = [(token + (place % 5 == 0)) % 128 for place, token in enumerate(text)]
        return wrong[len(ids) :][:count] if text is not texts[-1] else []

    packed = PackedModel(model, cache, cuda_graphs=cuda_graphs, mixed_tokens=mixed_tokens)
    engine = Engine(packed, cache.manager, overlap=overlap, num_drafts=num_drafts)
    for number, prompt in enumerate(PROMPTS):
        answers[str(number)] = []
        engine.submit(
            prompt, SamplingParams(temperature=0, max_new_tokens=NUM_NEW),
            lambda output: answers[output.request_id].extend(output.token_ids),
            request_id=str(number),
        )  # fmt: skip
    with (
        patch("dsv4.engine.scheduler.propose_drafts", guess),
        patch.object(cache.manager, "prepare_step", wraps=cache.manager.prepare_step) as steps,
    ):
        while engine.step():
            pass
    assert (steps.call_count > 1) == (overlap and num_drafts > 0)
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert [*prompt, *answers[str(number)]] == text
    cache.manager.check_integrity()
    sizes = {tokens for _, tokens in packed.captured_sizes}
    assert sizes == (({1, 1 + num_drafts}) if cuda_graphs else set())
    assert {tokens for _, tokens in packed.mixed_sizes} == ({64} if mixed_tokens else set())


def test_ids_beyond_the_vocabulary_stop_nobody(model):
    cache = attach(model, max_requests=2, max_tokens=64)
    engine, outputs = Engine(PackedModel(model, cache), cache.manager), []
    params = SamplingParams(temperature=0, max_new_tokens=2)
    engine.submit([5, 6, 7], params, outputs.append)
    size = model.config.vocab_size
    with pytest.raises(ValueError, match=f"Invalid prompt: expected 0 to {size - 1}"):
        engine.submit([size], params, outputs.append)
    while engine.step():
        pass
    assert outputs[-1].finish_reason == "length" and engine.is_idle


def test_another_models_cache_is_refused(model):
    cache = attach(random_hf_model(seed=1), max_requests=1, max_tokens=64)
    with pytest.raises(ValueError, match="expected a cache attached to this model"):
        PackedModel(model, cache)


def test_experts_that_cannot_be_captured_are_refused():
    model = random_hf_model(seed=1)
    model.set_experts_implementation("eager")
    cache = attach(model, max_requests=1, max_tokens=64)
    with pytest.raises(ValueError, match="expected 'batched_mm'"):
        PackedModel(model, cache, cuda_graphs=True)
