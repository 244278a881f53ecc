"""A small DeepSeek-V4 of transformers' class with random weights, for tests and the demo."""

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "max_position_embeddings": 65536,
    "num_attention_heads": 4, "head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 32,
    "o_groups": 2, "o_lora_rank": 16, "compress_ratios": [0, 4, 128, 4],
    "index_n_heads": 16,  # fewer make exact ties at the top-k cut common
    "index_head_dim": 64, "index_topk": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "num_hash_layers": 0, "initializer_range": 0.3,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip


class RecordedLayer(NamedTuple):
    """Input and output of a layer's attention for one sequence, `[num_tokens, hidden_size]`.

    index_scores is `[num_tokens, entries]` in a CSA layer, else None.
    """

    hidden: Tensor
    output: Tensor
    index_scores: Tensor | None


def random_hf_model(*, seed: int, **overrides: Any) -> Any:
    """Make a `DeepseekV4ForCausalLM` of the geometry SMALL, in eval mode.

    Sinks, position biases and norm weights are random too; transformers makes them constant.
    """
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ImportError("transformers is needed here: pip install 'dsv4[hf]'") from error
    geometry = {**SMALL, **overrides}
    geometry["num_hidden_layers"] = len(geometry["compress_ratios"])
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**geometry)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("position_bias", "sinks")):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.normal_(1.0, 0.3)
    return model


def record_attention(model: Any, input_ids: Tensor) -> list[RecordedLayer]:
    """Run one sequence `[num_tokens]` through the model without a cache; record each layer."""
    hidden: list[Tensor] = []
    outputs: list[Tensor] = []
    scores: dict[int, Tensor] = {}

    def on_attention(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        hidden.append((args[0] if args else kwargs["hidden_states"])[0])
        outputs.append(result[0][0])

    def on_scores(layer_idx: int, module: Any, args: Any, result: Tensor) -> None:
        scores[layer_idx] = result[0]

    with ExitStack() as hooks, torch.no_grad():  # a hook is a context that removes it
        for layer_idx, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            hooks.enter_context(attention.register_forward_hook(on_attention, with_kwargs=True))
            if attention.layer_type == "compressed_sparse_attention":
                scorer = attention.compressor.indexer.scorer
                hooks.enter_context(scorer.register_forward_hook(partial(on_scores, layer_idx)))
        model(input_ids[None], use_cache=False)
    return [
        RecordedLayer(*layer, scores.get(layer_idx))
        for layer_idx, layer in enumerate(zip(hidden, outputs, strict=True))
    ]
