"""`Subject`: the demo's model and prompts, random or from a checkpoint folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.checks import check_int
from dsv4.model.random_hf import random_hf_model

PROMPT_LENGTHS = (300, 130, 37, 5)
RANDOM_MODEL = {
    "hidden_size": 128, "num_attention_heads": 8, "compress_ratios": [0, 4, 128, 4],
    "index_topk": 24, "initializer_range": 0.12,
}  # fmt: skip
DEFAULT_PROMPTS = ("The quick brown fox", "Once upon a time, in a land far away, there lived")


@dataclass(frozen=True)
class Subject:
    """A model in eval mode and texts for it.

    Attributes:
        prompts: Token ids, one tensor `[num_tokens]` per text.
        tokenizer: Decodes new tokens; None for a random model.
    """

    name: str
    model: Any
    prompts: list[Tensor]
    tokenizer: Any = None

    @property
    def is_exact(self) -> bool:
        """Whether the model computes in fp32, so that both caches give the same token ids."""
        return bool(self.model.dtype == torch.float32)

    def decode(self, ids: Tensor) -> str:
        """Decode new tokens to text; for a random model, to their ids."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in ids.tolist())
        return str(self.tokenizer.decode(ids))


def random_subject(*, seed: int, device: str) -> Subject:
    """Make a model of transformers' class with random weights, and random prompts."""
    check_int("seed", seed, at_least=0, at_most=2**62)
    model = random_hf_model(seed=seed, **RANDOM_MODEL).to(device)
    generator = torch.Generator().manual_seed(seed + 1)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(1, vocabulary, (n,), generator=generator) for n in PROMPT_LENGTHS]
    return Subject("random weights", model, [prompt.to(device) for prompt in prompts])


def load_subject(path: str, texts: Sequence[str], *, device: str) -> Subject:
    """Load a checkpoint folder in its stored dtype."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"Invalid model folder: expected a config.json in {path}, found none")
    try:
        from transformers import AutoTokenizer, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ImportError("transformers is needed here: pip install 'dsv4[hf]'") from error
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = DeepseekV4ForCausalLM.from_pretrained(path, dtype="auto")
    prompts = [
        tokenizer(text, return_tensors="pt").input_ids[0].to(device)
        for text in texts or DEFAULT_PROMPTS
    ]
    return Subject(path, model.to(device).eval(), prompts, tokenizer)
