"""`Subject`: a model and prompts to generate with, random or from a checkpoint folder."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.checks import check_checkpoint, check_int
from dsv4.model.random_hf import random_hf_model

PROMPT_LENGTHS = (300, 130, 37, 5)
RANDOM_MODEL = {
    "hidden_size": 128, "num_attention_heads": 8, "compress_ratios": [0, 4, 128, 4],
    "index_topk": 24, "initializer_range": 0.12,
}  # fmt: skip
DEFAULT_PROMPTS = ("The quick brown fox", "Once upon a time, in a land far away, there lived")


class Subject(NamedTuple):
    """A model in eval mode, token ids `[num_tokens]` of each prompt, and a way to print new ids."""

    name: str
    model: Any
    prompts: list[Tensor]
    decode: Callable[[Tensor], str]


def random_subject(*, seed: int, device: str) -> Subject:
    """Make a model of transformers' class with random weights, and random prompts."""
    check_int("seed", seed, at_least=0, at_most=2**62)
    model = random_hf_model(seed=seed, **RANDOM_MODEL).to(device)
    generator, size = torch.Generator().manual_seed(seed + 1), model.config.vocab_size
    prompts = [torch.randint(1, size, (n,), generator=generator) for n in PROMPT_LENGTHS]
    on_device = [prompt.to(device) for prompt in prompts]
    return Subject("random weights", model, on_device, lambda ids: " ".join(map(str, ids.tolist())))


def load_subject(path: str, texts: Sequence[str], *, device: str) -> Subject:
    """Load a checkpoint folder in its stored dtype."""
    check_checkpoint(path)
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = DeepseekV4ForCausalLM.from_pretrained(path, dtype="auto")
    ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts or DEFAULT_PROMPTS]
    prompts = [each.to(device) for each in ids]
    return Subject(path, model.to(device).eval(), prompts, lambda new: str(tokenizer.decode(new)))
