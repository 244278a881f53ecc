"""`dsv4 bench transformers`: decode steps of a transformers model, with this cache and its own.

The model has V4-Flash's attention widths, a few layers and small experts, in BF16. A timed step
runs the whole model as `generate` does: one token a row, then a wait for the device.
`long_contexts` makes contexts long without running the model over them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from dsv4.integrations.transformers import PagedCache, attach, detach
from dsv4.model.random_hf import random_hf_model, record_attention
from dsv4.tools.bench.environment import require_cuda
from dsv4.tools.bench.long_contexts import fill_paged, fill_transformers
from dsv4.tools.bench.timing import time_to_end, wait_for
from dsv4.tools.console import track, working
from dsv4.tools.planner.memory_plan import REQUEST_COMPONENTS, TOKEN_COMPONENTS
from dsv4.tools.transformers_cache import transformers_cache_bytes

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
GATE_TOKENS = 140
GATE_STEPS = 16
# Error of a layer's output as a share of its norm: fp8 rows and mxfp4 keys give 0.01 to 0.06 on
# small models, a wrong row or rotation several tenths.
GATE_ERROR = 0.1
NUM_WARMUP_STEPS = 5

_Result = TypeVar("_Result")


class Sizes(NamedTuple):
    """Sizes of a measurement.

    Attributes:
        decodes: Pairs of batch and context length whose steps are timed.
        contexts: Context lengths of one row whose memory is compared.
        num_steps: Timed steps; the result is their median.
    """

    decodes: Sequence[tuple[int, int]] = ((8, 32768), (1, 32768))
    contexts: Sequence[int] = (32768, 131072)
    num_steps: int = 30


# Median times of the whole step, and of all its attention modules together, None if not apart.
StepTimes = tuple[float, float | None]


def bench_transformers(*, num_steps: int) -> dict[str, Any]:
    """Time decode steps with both caches, and count the bytes of each, on a GPU."""
    model = flash_model("transformers")
    with working("comparing attention with transformers'"):
        check_attention(model)
        check_step(model)
    return measure(model, Sizes(num_steps=num_steps))


def flash_model(bench: str) -> Any:
    """Make a random model of V4-Flash's widths, on a GPU."""
    require_cuda(bench)
    with working("making the model"), torch.device("cuda"):
        return random_hf_model(seed=0, **FLASH_WIDTHS).to(torch.bfloat16)


@torch.no_grad()
def check_attention(model: Any) -> None:
    """Refuse to time a cache whose attention differs from transformers'.

    The cache gets the inputs of every module in a run without a cache, token by token. Its outputs
    must equal those of that run, up to the rounding of stored rows.
    """
    recorded = record_attention(model, _random_ids(model, 1, GATE_TOKENS)[0])
    attentions = [layer.self_attn for layer in model.model.layers]
    outputs: list[list[Tensor]] = [[] for _ in attentions]
    with attached(model, 1, max_tokens=GATE_TOKENS) as cache:
        for token in range(GATE_TOKENS):
            with cache.forward(1, 1, None):
                for idx, attention in enumerate(attentions):
                    hidden = recorded[idx].hidden[None, token : token + 1]
                    outputs[idx].append(cache.attend(idx, attention, hidden)[0])
    for idx, layer in enumerate(recorded):
        expected = layer.output.float()
        error = float((torch.cat(outputs[idx]).float() - expected).norm() / expected.norm())
        if not error <= GATE_ERROR:
            raise RuntimeError(
                f"The attention of layer {idx} differs from transformers' by {error:.1e} of its "
                "norm; nothing is timed"
            )


def check_step(model: Any) -> None:
    """Refuse to time a captured step whose ids differ from those of steps launch by launch."""
    prompt, ids = _random_ids(model, 2, GATE_TOKENS), []
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"do_sample": False, "max_new_tokens": GATE_STEPS, "pad_token_id": 0}
    for choices in ({}, {"cuda_graphs": "step"}):
        with attached(model, 2, max_tokens=GATE_TOKENS + GATE_STEPS, **choices) as cache:
            ids.append(model.generate(**inputs, **options, past_key_values=cache).tolist())
    if ids[0] != ids[1]:
        raise RuntimeError("A captured step gives other ids than the launches; nothing is timed")


def measure(model: Any, sizes: Sizes) -> dict[str, Any]:
    """Measure one row per decode and one per context, with `fp8` rows and `mxfp4` keys.

    A failed run, for lack of memory or otherwise, is listed in `errors` and missing in its row.
    """
    errors: list[str] = []
    return {
        "layers": list(model.config.layer_types), "num_steps": sizes.num_steps,
        "decode": [_measure_decode(model, *each, sizes, errors) for each in sizes.decodes],
        "memory": [_measure_memory(model, context, errors) for context in sizes.contexts],
        "errors": errors,
    }  # fmt: skip


def _measure_decode(
    model: Any, batch: int, context: int, sizes: Sizes, errors: list[str]
) -> dict[str, Any]:
    runs: dict[str, Callable[[], StepTimes]] = {
        "this": lambda: _time_paged(model, batch, context, sizes),
        "transformers": lambda: _time_steps(
            model, _filled_dynamic_cache(model, batch, context), batch, sizes
        ),
        "free": lambda: _time_free_steps(model, batch, sizes),
    }
    if model.device.type == "cuda":
        runs["graphs"] = lambda: _time_paged(model, batch, context, sizes, cuda_graphs=True)
        runs["step"] = lambda: _time_paged(model, batch, context, sizes, cuda_graphs="step")
    times = _run_all(runs, f"batch {batch}, {context:,} tokens", errors)
    row: dict[str, Any] = {
        "batch": batch, "context": context,
        "step_us": {name: step for name, (step, _) in times.items()},
        "attention_us": {name: us for name, (_, us) in times.items() if us is not None},
        "tokens_per_second": {name: batch * 1e6 / step for name, (step, _) in times.items()},
    }  # fmt: skip
    for factor, part in (("speedup", "step_us"), ("attention_speedup", "attention_us")):
        baseline = row[part].get("transformers")
        ours = {name: row[part][name] for name in ("this", "graphs", "step") if name in row[part]}
        row[factor] = {name: baseline / us for name, us in ours.items() if baseline is not None}
    if {"transformers", "free"} <= times.keys():
        row["ceiling"] = times["transformers"][0] / times["free"][0]
    return row


def _run_all(
    runs: dict[str, Callable[[], _Result]], what: str, errors: list[str]
) -> dict[str, _Result]:
    """Collect the results by name; an error is noted, and the other runs go on."""
    results = {}
    for name, run in track(runs.items(), what):
        try:
            results[name] = run()
        except RuntimeError as error:  # an out-of-memory error too
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            errors.append(f"{what}, {name}: {line}")
        torch.cuda.empty_cache()
    return results


def _measure_memory(model: Any, context: int, errors: list[str]) -> dict[str, Any]:
    """Count the bytes of one row: those that last from step to step, and the workspaces."""

    def count_this() -> dict[str, int]:
        with attached(model, 1, max_tokens=context) as cache:
            return {name: size.allocated for name, size in cache.memory().items()}

    def count_transformers() -> dict[str, int]:
        cache = _filled_dynamic_cache(model, 1, context)
        return transformers_cache_bytes(cache, model.config.layer_types)

    runs = {"this": count_this, "transformers": count_transformers}
    sizes = _run_all(runs, f"memory, {context:,} tokens", errors)
    row: dict[str, Any] = {"context": context, **sizes}
    if "this" in sizes:
        row["this_bytes"] = stored_bytes(sizes["this"])
        row["workspace_bytes"] = sum(sizes["this"].values()) - row["this_bytes"]
    if "transformers" in sizes:
        row["transformers_bytes"] = sum(sizes["transformers"].values())
    if len(sizes) == 2:
        row["ratio"] = row["this_bytes"] / row["transformers_bytes"]
    return row


def _time_paged(model: Any, batch: int, context: int, sizes: Sizes, **choices: Any) -> StepTimes:
    """Time this cache, launch by launch, with graphs of the modules, or of the whole step."""
    num_tokens = context + 2 * (NUM_WARMUP_STEPS + sizes.num_steps)
    with attached(model, batch, max_tokens=num_tokens, **choices) as cache:
        fill_paged(cache, batch, context)
        return _time_steps(model, cache, batch, sizes)


def _filled_dynamic_cache(model: Any, batch: int, context: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    fill_transformers(model, cache, batch, context)
    return cache


def stored_bytes(components: dict[str, int]) -> int:
    """Count the bytes of a manager that last from one step to the next."""
    return sum(components[name] for name in (*TOKEN_COMPONENTS, *REQUEST_COMPONENTS))


@torch.no_grad()
def _time_steps(model: Any, cache: Any, batch: int, sizes: Sizes) -> StepTimes:
    """Time whole steps first, then the attention modules within steps."""
    ids = _random_ids(model, batch, 1)

    def step() -> None:
        model(ids, past_key_values=cache)

    step_us = _median_us(step, model.device, sizes.num_steps)
    times = []
    with _attention_clock(model) as read_us:
        for _ in range(NUM_WARMUP_STEPS + sizes.num_steps):
            step()
            times.append(read_us())
    # A graph of a step calls no module.
    return step_us, float(np.median(times[NUM_WARMUP_STEPS:])) or None


@torch.no_grad()
def _time_free_steps(model: Any, batch: int, sizes: Sizes) -> StepTimes:
    """Time steps whose attention modules return at once, as if a cache cost nothing."""
    ids = _random_ids(model, batch, 1)
    output = torch.zeros(batch, 1, model.config.hidden_size, dtype=model.dtype, device=ids.device)

    def step() -> None:
        model(ids, attention_mask={"sliding_attention": None}, use_cache=False)

    with ExitStack() as patches:
        for layer in model.model.layers:
            free = mock.patch.object(layer.self_attn, "forward", lambda *_, **__: (output, None))
            patches.enter_context(free)
        return _median_us(step, model.device, sizes.num_steps), 0.0


@contextmanager
def _attention_clock(model: Any) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the microseconds in attention modules since its last call."""
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

    with ExitStack() as hooks:  # a hook is a context that removes it
        for layer in model.model.layers:
            hooks.enter_context(layer.self_attn.register_forward_pre_hook(mark))
            hooks.enter_context(layer.self_attn.register_forward_hook(mark))
        yield read_us


def _median_us(step: Callable[[], Any], device: torch.device, num_steps: int) -> float:
    times = [time_to_end(step, device)[1] for _ in range(NUM_WARMUP_STEPS + num_steps)]
    return float(np.median(times[NUM_WARMUP_STEPS:]))


@contextmanager
def attached(model: Any, batch: int, **choices: Any) -> Iterator[PagedCache]:
    """Attach a cache for plain decoding, without rows for rollbacks."""
    cache = attach(model, max_requests=batch, drafts_per_step=0, **choices)
    try:
        with cache:
            yield cache
    finally:
        detach(model)


def _random_ids(model: Any, batch: int, num_tokens: int) -> Tensor:
    return torch.randint(1, model.config.vocab_size, (batch, num_tokens), device=model.device)
