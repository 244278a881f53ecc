"""`Decoder`: a small model for `engine.py`, whose tokens do not depend on the batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsv4 import AttentionSubBlock, CacheConfig, ForwardPlan, KVCacheManager
from dsv4.model.random_hf import random_hf_model


class Decoder:
    """The attention layers of a DeepSeek-V4 with random weights, between embedding and head.

    Linears run in fp64 and rows are stored in fp32, so that the batch does not change a token. CSA
    comes first: what attention rounds in its last bit cannot change the choice of entries.
    """

    def __init__(self, ratios: tuple[int, ...] = (4, 0, 128), **choices: Any) -> None:
        geometry = {"num_attention_heads": 2, "sliding_window": 8, "index_topk": 4}
        self.hf = random_hf_model(seed=0, compress_ratios=list(ratios), **geometry)
        choices = {"block_tokens": 128, "drafts_per_step": 3, "kv_format": "fp32", **choices}
        self.config = CacheConfig.from_hf(self.hf.config, **choices)
        for module in self.hf.modules():
            if isinstance(module, nn.Linear):
                module.double().register_forward_pre_hook(lambda _, args: (args[0].double(),))
                module.register_forward_hook(lambda _, args, output: output.float())
        self.attention: list[Callable[..., Tensor]] = [
            AttentionSubBlock.from_hf(layer.self_attn, self.config, idx)
            for idx, layer in enumerate(self.hf.model.layers)
        ]

    @torch.no_grad()
    def __call__(self, ids: Tensor, manager: KVCacheManager, plan: ForwardPlan) -> Tensor:
        """Return the logits `[num_tokens, vocabulary]` of the plan's tokens."""
        x: Tensor = self.hf.model.embed_tokens(ids)
        for idx, layer in enumerate(self.hf.model.layers):
            x = x + self.attention[idx](layer.input_layernorm(x), manager.acquire(idx, plan))
        return self.hf.lm_head(self.hf.model.norm(x))  # type: ignore[no-any-return]
