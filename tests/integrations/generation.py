"""Models, prompts, padded batches and a graph for the tests of the transformers integration."""

from typing import Any

import torch
from torch import Tensor

from dsv4.integrations.transformers import PagedCache, attach
from dsv4.model.random_hf import random_hf_model
from dsv4.testing import poison

EXACT = {"kv_format": "fp32", "index_format": "fp32"}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def small_model(seed: int, *ratios: int, **overrides: Any):
    """Make a model of few layers and few mixing iterations, to be quick.

    With weights this small one batch differs from another by about 1e-6 of the largest logit, with
    random_hf_model's own by 1e-5, which is the limit.
    """
    defaults = {"hc_sinkhorn_iters": 2, "initializer_range": 0.12}
    return random_hf_model(seed=seed, compress_ratios=list(ratios), **{**defaults, **overrides})


def poisoned(model, **choices: Any) -> PagedCache:
    """Attach a cache with fp32 rows, its memory filled with NaN."""
    sizes = {} if "num_blocks" in choices else {"max_tokens": 1024}
    cache = attach(model, **{"max_requests": 8, **sizes, **EXACT, **choices})
    poison(cache.manager)
    return cache


def prompts(seed: int, *lengths: int) -> list[Tensor]:
    """Draw random texts; token 0 is left for padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 128, (length,), generator=generator) for length in lengths]


def alone(prompt: Tensor) -> dict[str, Tensor]:
    """Make a batch of one text."""
    return {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}


def padded(texts: list[Tensor], side: str = "left") -> dict[str, Tensor]:
    """Pad texts to one batch, on one side, with token 0."""
    longest = max(len(text) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        columns = slice(longest - len(text), longest) if side == "left" else slice(len(text))
        ids[row, columns], mask[row, columns] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def share_of_scale(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference as a share of the largest value."""
    return float((mine - theirs).abs().max() / theirs.abs().max())


class RepeatedRun:
    """Repeat the work of a CUDA graph over the captured buffers, into the same output."""

    def __init__(self, device, pool=None):
        self.output = None

    def capture(self, run):
        self.run = run
        run()
        self.output = run()
        return self.output

    @torch.no_grad()
    def replay(self):
        self.output.copy_(self.run())
