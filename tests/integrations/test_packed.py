"""An engine over an attached model answers as `generate` does, with the model's own cache."""

import pytest
import torch

pytest.importorskip("transformers")

from dsv4.engine import Engine, SamplingParams
from dsv4.integrations.transformers import PackedModel, attach
from dsv4.model.random_hf import random_hf_model

PROMPTS = [[*range(3, 90)], [*range(5, 12)], [*range(3, 90), *range(30, 50)], [7]]


@pytest.fixture(scope="module")
def model():
    return random_hf_model(seed=0)


def generate(model, prompt, num_new):
    ids = torch.tensor([prompt])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip


@pytest.mark.parametrize("overlap, num_drafts", [(False, 0), (True, 0), (False, 3)])
def test_answers_are_those_of_generate(model, overlap, num_drafts):
    cache = attach(
        model, max_requests=3, num_blocks=4, kv_format="fp32", index_format="fp32",
        max_forward_tokens=64, drafts_per_step=3,
    )  # fmt: skip
    answers = {}
    engine = Engine(
        PackedModel(model, cache), cache.manager, overlap=overlap, num_drafts=num_drafts
    )
    for number, prompt in enumerate(PROMPTS):
        answers[str(number)] = []
        engine.submit(
            prompt, SamplingParams(temperature=0, max_new_tokens=9),
            lambda output: answers[output.request_id].extend(output.token_ids),
            request_id=str(number),
        )  # fmt: skip
    while engine.step():
        pass
    for number, prompt in enumerate(PROMPTS):
        assert answers[str(number)] == generate(model, prompt, 9)
    cache.manager.check_integrity()


def test_another_models_cache_is_refused(model):
    cache = attach(random_hf_model(seed=1), max_requests=1, max_tokens=64)
    with pytest.raises(ValueError, match="expected a cache attached to this model"):
        PackedModel(model, cache)
