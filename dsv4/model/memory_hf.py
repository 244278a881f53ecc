"""A DeepSeek-V4 of transformers' class whose weights are written down, not trained.

It answers questions on its context (`memory_book`), so a fault of a cache is a wrong answer. Each
layer has one task:

    0  SWA   copies the code of the token before, so that a name has two tokens
    1  CSA   records: an entry has the name's code as its key, the number's as its value
    2  HCA   chapters: an entry has the title's code as its key, the year's as its value
    3  SWA   the line being written, which is gated out of both compressors

Codes are 32 channels of ±1. Two of them agree in at most 8 channels more than they differ in, and
each sums to 0. A common part of all channels changes no product with a code, so `margin` can
replace most of a row by it.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4.model.memory_book import END, IDS, UNKNOWN, VOCABULARY

CODE = 32
# Channels of hidden states: marks of a token, then codes.
CONST, NAME, NUMBER, TITLE, YEAR, COLOUR, IS_PLAIN, IS_ANSWER = range(8)
FIRST, SECOND, BEFORE, VALUE, RESULT = (slice(8 + CODE * i, 8 + CODE * (i + 1)) for i in range(5))
# Channels of a row.
KEY, VALUES = slice(0, 2 * CODE), slice(2 * CODE, 3 * CODE)
GATE, CLOSED = 40.0, -200.0
MATCH, SINK = 40.0, 32.0  # logits of the right row, and of no row
PREVIOUS_PAIRS, PREVIOUS = 4, 80.0  # RoPE pairs that find the token before, and its logit
ANSWER = 4.0  # channels of the result
# Part of index keys that all share. The norm lengthens a key without a record: left with rounding
# errors alone, it would have scales that the index's fast products do not hold.
LEAST_COMMON = 2.0**-10
GEOMETRY = {
    "vocab_size": len(VOCABULARY), "eos_token_id": END, "pad_token_id": 0, "bos_token_id": None,
    "hidden_size": 192, "max_position_embeddings": 1 << 21,
    "num_attention_heads": 1, "head_dim": 192, "qk_rope_head_dim": 64, "q_lora_rank": 2 * CODE,
    "o_groups": 1, "o_lora_rank": CODE, "compress_ratios": [0, 4, 128, 0], "num_hidden_layers": 4,
    "index_n_heads": 2, "index_head_dim": 128, "index_topk": 16,
    "n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
    "num_hash_layers": 0, "hc_mult": 2, "hc_sinkhorn_iters": 1,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 65536,
        "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip
# V4-Flash's attention, for which the GPU kernels are made; only the first head looks things up.
FLASH_WIDTHS = {
    "num_attention_heads": 64, "head_dim": 512, "o_groups": 8, "index_n_heads": 64,
    "index_topk": 512,
}  # fmt: skip


def memory_hf_model(*, margin: float = 1.0, **overrides: Any) -> Any:
    """Make the model in eval mode, in fp32.

    Args:
        margin: Share of an entry and of an index key that is code, above 0. The rest of it is the
            same in all rows: what is left to tell them apart is small beside what is stored.
        **overrides: Other values of the config, such as `FLASH_WIDTHS`.
    """
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError as error:
        raise ImportError("transformers is needed here: pip install 'dsv4[hf]'") from error
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**GEOMETRY, **overrides})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float("norm" in name))
        _keep_streams_equal(model)
        _write_words(model)
        layers = [layer.self_attn for layer in model.model.layers]
        _write_previous_token(layers[0])
        _write_lookup(layers[1], NAME, NUMBER, margin)
        _write_indexer(layers[1].compressor.indexer, margin)
        _write_lookup(layers[2], TITLE, YEAR, margin)
        _write_line(layers[3])
    return model


@cache
def codes() -> Tensor:
    """Return 1,054 codes `[1054, 32]` of ±1: quadratic functions on the field of 32 elements.

    The code of (a, b) is (-1)^trace(a x³ + b x); those that sum to 0, then their negatives. The
    product of two of them is at most 8, and 32 of a code with itself.
    """
    powers = [1]
    for _ in range(CODE - 2):
        doubled = powers[-1] << 1
        powers.append(doubled ^ 0b100101 if doubled & CODE else doubled)  # x^5 + x^2 + 1

    def times(a: int, b: int) -> int:
        return powers[(powers.index(a) + powers.index(b)) % 31] if a and b else 0

    def sign(x: int) -> int:
        trace = x
        for _ in range(4):
            x = times(x, x)
            trace ^= x
        return 1 - 2 * trace

    cubes = [times(x, times(x, x)) for x in range(CODE)]
    signs = torch.tensor([sign(x) for x in range(CODE)])
    products = torch.tensor([[times(a, x) for x in range(CODE)] for a in range(CODE)])
    every = signs[products[:, None, cubes] ^ products[None]].flatten(0, 1).float()
    balanced = every[every.sum(dim=1) == 0]
    return torch.cat((balanced, -balanced))


def _keep_streams_equal(model: Any) -> None:
    """Make each residual stream the plain sum of embedding and outputs."""
    streams = model.config.hc_mult
    share = math.log(1 / (streams - 1)) if streams > 1 else 40.0
    for layer in model.model.layers:
        layer.attn_hc.base[:streams] = share
        layer.ffn_hc.base[:streams] = share
    model.model.hc_head.hc_base.fill_(share)


def _write_words(model: Any) -> None:
    """Write embeddings of words, and the logits: nearest number, year or colour; `<end>` after."""
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    places = {"first": FIRST, "adjective": FIRST, "thing": FIRST, "last": SECOND, "noun": SECOND,
              "number": VALUE, "year": VALUE, "colour": VALUE}  # fmt: skip
    marks = {"last": NAME, "noun": TITLE, "number": NUMBER, "year": YEAR, "colour": COLOUR}
    num_used = dict.fromkeys(map(str, places.values()), 0)
    embedding[:, CONST] = 1
    embedding[:, IS_PLAIN] = 1
    embedding[UNKNOWN, IS_ANSWER] = 1
    for kind, place in places.items():
        words = slice(IDS[kind].start, IDS[kind].stop)
        start = num_used[str(place)]
        num_used[str(place)] = stop = start + len(IDS[kind])
        embedding[words, place] = codes()[start:stop]
        if kind in marks:
            embedding[words, marks[kind]] = 1
        if place is FIRST:
            embedding[words, IS_PLAIN] = 0
        if place is VALUE:
            embedding[words, IS_ANSWER] = 1
            head[words, RESULT] = codes()[start:stop]
    head[UNKNOWN, CONST] = CODE / 2 * ANSWER
    head[END, IS_ANSWER] = 8 * CODE * ANSWER


def _write_previous_token(attention: Any) -> None:
    """Copy the first code of the token before: RoPE alone, whose angle is largest there."""
    dim, rope = attention.head_dim, attention.config.qk_rope_head_dim
    for pair in range(PREVIOUS_PAIRS):
        channel, angle = dim - rope + 2 * pair, 10000.0 ** (-2 * pair / rope)
        attention.q_b_proj.weight[channel, 0] = math.cos(angle)
        attention.q_b_proj.weight[channel + 1, 0] = -math.sin(angle)
        attention.kv_proj.weight[channel, CONST] = 1
    attention.q_a_proj.weight[0, CONST] = 1
    attention.kv_proj.weight[:CODE, FIRST] = torch.eye(CODE)
    attention.kv_proj.weight[CODE, IS_PLAIN] = math.sqrt(CODE)  # rows of equal length
    size = math.sqrt(dim / (CODE + PREVIOUS_PAIRS))
    attention.kv_norm.weight[-rope:] = PREVIOUS / math.sqrt(PREVIOUS_PAIRS) / size
    attention.sinks.fill_(CLOSED)
    _write_output(attention, slice(0, CODE), BEFORE, 1 / size)


def _write_lookup(attention: Any, key: int, value: int, margin: float) -> None:
    """Find the entry whose key is this token's two codes; its value is the result."""
    for number, source in enumerate((BEFORE, SECOND)):
        attention.q_a_proj.weight[CODE * number : CODE * (number + 1), source] = torch.eye(CODE)
    # Channels of one code differ by up to 2, so that each is rounded in its own place.
    spread = 2 ** (torch.arange(CODE) / CODE)
    attention.q_b_proj.weight[KEY] = torch.diag(1 / spread.repeat(2))
    common = torch.full((2 * CODE,), 1 - margin)
    _write_compressor(attention.compressor, key, value, margin, common)
    # The key's token has 67 units beside the value's 36, and the norm makes both one length.
    ratio, rest = math.sqrt(67 / 36), margin**2 + (1 - margin) ** 2
    size = margin * math.sqrt(attention.head_dim / (rest * (2 * CODE + CODE * ratio**2)))
    weight = MATCH * float((2 / spread**2).sum().sqrt()) / (2 * CODE * size)
    attention.compressor.kv_norm.weight[: VALUES.stop] = weight * spread.repeat(3)
    attention.sinks.fill_(SINK)
    _write_output(attention, VALUES, RESULT, ANSWER / (ratio * size * weight) / spread)


def _write_compressor(
    module: Any, key: int, value: int, margin: float, common: Tensor, *, has_value: bool = True
) -> None:
    """Pool the codes of the key's token, and the code of the value's token behind it.

    In CSA the key of a value at a window's first token is the last one of the window before.
    """
    kv, gate, bias, dim = (
        module.kv_proj.weight, module.gate_proj.weight, module.position_bias, module.head_dim
    )  # fmt: skip
    for start in range(0, len(kv), dim):
        keys = slice(start, start + 2 * CODE)
        kv[start : start + CODE, BEFORE] = margin * torch.eye(CODE)
        kv[start + CODE : start + 2 * CODE, SECOND] = margin * torch.eye(CODE)
        kv[keys, CONST] = common
        for mark in (NAME, TITLE, COLOUR):
            gate[keys, mark] = GATE if mark == key else -GATE
        if has_value:
            values = slice(start + VALUES.start, start + VALUES.stop)
            kv[values, VALUE] = margin * torch.eye(CODE)
            kv[values, CONST] = 1 - margin
            for mark in (NUMBER, YEAR, COLOUR):
                gate[values, mark] = GATE if mark == value else -GATE
    if len(kv) > dim:
        bias[:-1, KEY] = CLOSED
        bias[-1, dim : dim + 2 * CODE] = CLOSED
        bias[:, VALUES] = CLOSED if has_value else 0


def _write_indexer(indexer: Any, margin: float) -> None:
    """Score an entry by its key's code; two heads of opposite sign undo the ReLU."""
    bits = torch.arange(2 * CODE)
    pairs = bits & (bits >> 1)
    signs = 1 - 2.0 * ((pairs ^ (pairs >> 2) ^ (pairs >> 4)) & 1)  # flat, as is their transform
    common = max(1 - margin, LEAST_COMMON) * signs
    _write_compressor(indexer, NAME, NUMBER, margin, common, has_value=False)
    for head, sign in enumerate((1, -1)):
        rows = slice(head * indexer.head_dim, head * indexer.head_dim + 2 * CODE)
        indexer.q_b_proj.weight[rows] = sign * torch.eye(2 * CODE)
        indexer.scorer.weights_proj.weight[head, CONST] = sign


def _write_line(attention: Any) -> None:
    """Find the window's row whose token came after this one before."""
    size = math.sqrt(attention.head_dim / (2 * CODE))
    attention.q_a_proj.weight[:CODE, FIRST] = torch.eye(CODE)
    attention.q_b_proj.weight[:CODE, :CODE] = torch.eye(CODE)
    attention.kv_proj.weight[:CODE, BEFORE] = torch.eye(CODE)
    attention.kv_proj.weight[VALUES, VALUE] = torch.eye(CODE)
    weight = MATCH / math.sqrt(CODE) / size
    attention.kv_norm.weight.fill_(weight)
    attention.sinks.fill_(SINK)
    _write_output(attention, VALUES, RESULT, ANSWER / (size * weight))


def _write_output(attention: Any, channels: slice, target: slice, gain: float | Tensor) -> None:
    attention.o_a_proj.weight[:CODE, channels] = torch.eye(CODE)
    attention.o_b_proj.weight[target, :CODE] = gain * torch.eye(CODE)
