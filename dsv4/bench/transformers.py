"""`dsv4 bench transformers`: decode steps of a transformers model, this cache against its own.

A model of V4-Flash's attention widths with a few layers and small experts, in BF16. What is timed
is a step of the whole model as `generate` makes it: one token a row, then a wait for the device.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from dsv4.bench.environment import environment, require_cuda
from dsv4.bench.timing import wait_for
from dsv4.console import track, working
from dsv4.integrations.transformers import PagedCache, attach, detach
from dsv4.integrations.transformers.own_cache import own_cache_bytes
from dsv4.model.random_hf import random_hf_model

FLASH_WIDTHS: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "compress_ratios": [4, 128, 4, 128], "max_position_embeddings": 1 << 20,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
        "beta_fast": 32, "beta_slow": 1,
    },
    "initializer_range": 0.02,
}  # fmt: skip
STORED = ("csa_entries", "index_keys", "hca_entries", "block_padding", "window", "csa_tails",
          "index_tails", "hca_tails", "slot_padding", "block_table")  # fmt: skip
GATE_TOKENS = 300
GATE_SHARE = 1e-3  # of the largest logit, in fp32
NUM_WARMUP_STEPS = 5


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        decodes: Pairs of batch and context length whose steps are timed.
        contexts: Context lengths of one row whose memory is compared.
        prefill_tokens: Tokens of one forward while a context is filled.
        num_steps: Steps that are timed; the median counts.
    """

    decodes: Sequence[tuple[int, int]] = ((8, 32768), (1, 32768))
    contexts: Sequence[int] = (32768, 131072)
    prefill_tokens: int = 1024
    num_steps: int = 30


def bench_transformers(*, num_steps: int = 30) -> dict[str, Any]:
    """Both caches' decode steps, and the bytes they hold, on a GPU."""
    require_cuda("transformers")
    with working("checking"):
        with torch.device("cuda"):
            model = random_hf_model(seed=0, **FLASH_WIDTHS)
        check_logits(model)
    result = measure(model.to(torch.bfloat16), Sizes(num_steps=num_steps))
    return {"bench": "transformers", **result, "environment": environment()}


def check_logits(model: Any) -> None:
    """Refuse to time a cache whose logits are not transformers'."""
    ids = _random_ids(model, 2, GATE_TOKENS)
    with _attached(model, 2, GATE_TOKENS, kv_format="fp32", index_format="fp32") as cache:
        with torch.no_grad():
            mine = [model(part, past_key_values=cache).logits for part in ids.split(250, dim=1)]
            theirs = model(ids, use_cache=False).logits
        share = float((torch.cat(mine, dim=1) - theirs).abs().max() / theirs.abs().max())
    if not share <= GATE_SHARE:
        raise RuntimeError(
            f"The cache's logits differ from transformers' by {share:.1e} of the largest; "
            "nothing is timed"
        )


def measure(model: Any, sizes: Sizes) -> dict[str, Any]:
    """The tables: one row per decode, one per context; `fp8` rows and `mxfp4` keys."""
    return {
        "layers": list(model.config.layer_types),
        "num_steps": sizes.num_steps,
        "decode": [
            _measure_decode(model, batch, context, sizes)
            for batch, context in track(sizes.decodes, "decode steps", total=len(sizes.decodes))
        ],
        "memory": [
            _measure_memory(model, context, sizes)
            for context in track(sizes.contexts, "memory", total=len(sizes.contexts))
        ],
    }


def _measure_decode(model: Any, batch: int, context: int, sizes: Sizes) -> dict[str, Any]:
    num_tokens = context + 3 * (NUM_WARMUP_STEPS + sizes.num_steps)
    with _attached(model, batch, num_tokens) as cache:
        _fill(model, cache, batch, context, sizes)
        mine = _time_steps(model, cache, batch, sizes)
        free = _time_free_steps(model, cache, batch, sizes)
    own = DynamicCache(config=model.config)
    _fill(model, own, batch, context, sizes)
    theirs = _time_steps(model, own, batch, sizes)
    return {
        "batch": batch,
        "context": context,
        "step_us": {"this": mine.step_us, "transformers": theirs.step_us, "free": free},
        "attention_us": {"this": mine.attention_us, "transformers": theirs.attention_us},
        "tokens_per_second": {
            "this": batch * 1e6 / mine.step_us, "transformers": batch * 1e6 / theirs.step_us,
        },
        "speedup": theirs.step_us / mine.step_us,
        "ceiling": theirs.step_us / free,
        "attention_speedup": theirs.attention_us / mine.attention_us,
    }  # fmt: skip


def _measure_memory(model: Any, context: int, sizes: Sizes) -> dict[str, Any]:
    """Bytes of one row: what lasts from step to step, and apart from it the workspaces."""
    with _attached(model, 1, context) as cache:
        components = {name: size.allocated for name, size in cache.memory().items()}
    stored = stored_bytes(components)
    own = DynamicCache(config=model.config)
    _fill(model, own, 1, context, sizes)
    theirs = own_cache_bytes(own, model.config.layer_types)
    return {
        "context": context,
        "this_bytes": stored,
        "transformers_bytes": sum(theirs.values()),
        "ratio": stored / sum(theirs.values()),
        "workspace_bytes": sum(components.values()) - stored,
        "this": components,
        "transformers": theirs,
    }


def stored_bytes(components: dict[str, int]) -> int:
    """What of a manager's memory lasts from one step to the next."""
    return sum(components[name] for name in STORED)


@dataclass(frozen=True)
class StepTimes:
    """Medians over the steps: the whole step, and its attention modules together."""

    step_us: float
    attention_us: float


@torch.no_grad()
def _time_steps(model: Any, cache: Any, batch: int, sizes: Sizes) -> StepTimes:
    """Whole steps first; then, with clocks at the modules, the attention in them."""
    ids = _random_ids(model, batch, 1)

    def step() -> None:
        model(ids, past_key_values=cache)

    step_us = _median_us(step, model.device, sizes.num_steps)
    with _attention_clock(model) as read_us:
        for _ in range(NUM_WARMUP_STEPS):
            step()
        read_us()
        times = []
        for _ in range(sizes.num_steps):
            step()
            times.append(read_us())
    return StepTimes(step_us, float(np.median(times)))


@torch.no_grad()
def _time_free_steps(model: Any, cache: PagedCache, batch: int, sizes: Sizes) -> float:
    """Steps whose attention modules return at once: what a cache without any cost would give."""
    detach(model)
    ids = _random_ids(model, batch, 1)
    output = torch.zeros(batch, 1, model.config.hidden_size, dtype=model.dtype, device=ids.device)
    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.forward = lambda *args, **kwargs: (output, None)
    try:
        return _median_us(
            lambda: model(ids, attention_mask={"sliding_attention": None}, use_cache=False),
            model.device, sizes.num_steps,
        )  # fmt: skip
    finally:
        for attention in attentions:
            del attention.forward


@contextmanager
def _attention_clock(model: Any) -> Iterator[Callable[[], float]]:
    """Between, a call gives the microseconds spent in attention modules since the last one."""
    is_cuda = model.device.type == "cuda"
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    def read_us() -> float:
        wait_for(model.device)
        pairs = list(zip(marks[::2], marks[1::2], strict=True))
        marks.clear()
        if is_cuda:
            return 1e3 * float(sum(start.elapsed_time(end) for start, end in pairs))
        return 1e6 * float(sum(end - start for start, end in pairs))

    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.self_attn.register_forward_pre_hook(mark))
        hooks.append(layer.self_attn.register_forward_hook(mark))
    try:
        yield read_us
    finally:
        for hook in hooks:
            hook.remove()


def _median_us(step: Callable[[], Any], device: torch.device, num_steps: int) -> float:
    times = []
    for _ in range(NUM_WARMUP_STEPS + num_steps):
        wait_for(device)
        start = time.perf_counter()
        step()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return float(np.median(times[NUM_WARMUP_STEPS:])) * 1e6


@torch.no_grad()
def _fill(model: Any, cache: Any, batch: int, context: int, sizes: Sizes) -> None:
    """Random texts of that length, in forwards small enough for transformers' own cache."""
    columns = max(sizes.prefill_tokens // batch, 1)
    for start in range(0, context, columns):
        ids = _random_ids(model, batch, min(columns, context - start))
        model(ids, past_key_values=cache, logits_to_keep=1)


@contextmanager
def _attached(model: Any, batch: int, num_tokens: int, **formats: Any) -> Iterator[PagedCache]:
    """A cache for plain decoding: no drafts are kept for a rollback."""
    cache = attach(model, max_requests=batch, max_tokens=num_tokens, drafts_per_step=0, **formats)
    with cache:
        yield cache
    if "forward" in vars(model.model):
        detach(model)


def _random_ids(model: Any, batch: int, num_tokens: int) -> Tensor:
    return torch.randint(1, model.config.vocab_size, (batch, num_tokens), device=model.device)
