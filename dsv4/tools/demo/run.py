"""Generate with a batch of prompts through this cache and through transformers' own.

transformers runs the prompts one after the other, because its cache is wrong on padded batches.
The result shows how wrong.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from dsv4.checks import check_int
from dsv4.formats import IndexFormatName, KVFormatName
from dsv4.integrations.transformers import PagedCache, attach
from dsv4.tools.bench.timing import wait_for
from dsv4.tools.demo.subject import Subject
from dsv4.tools.transformers_cache import transformers_cache_bytes

EXACT_TOLERANCE = 1e-4  # of the largest logit, for fp32 rows
TAILS = ("csa_tails", "index_tails", "hca_tails")
ROWS = ("csa_entries", "index_keys", "hca_entries", "window")
MAX_FORWARD_TOKENS = 8192
Tick = Callable[[], None]


def num_ticks(subject: Subject, num_new: int) -> int:
    """Count the calls of `tick` in `run_demo`."""
    return num_new * (len(subject.prompts) + 3)


def run_demo(
    subject: Subject,
    *,
    kv_format: KVFormatName = "fp8",
    index_format: IndexFormatName = "mxfp4",
    num_new: int = 48,
    tick: Tick = lambda: None,
) -> dict[str, Any]:
    """Generate with both caches; compare their tokens, logits, memory and speed.

    Args:
        subject: Model and prompts.
        kv_format, index_format: Formats of the second run of this cache; the first has fp32 rows.
        num_new: Tokens to generate for each prompt.
        tick: Called after every step of every run.
    """
    _check_room(subject, num_new)
    _warm_up(subject)
    baseline = _run_alone(subject, num_new, tick)
    exact = _run_paged(subject, baseline["ids"], "fp32", "fp32", num_new, tick)
    chosen = _run_paged(subject, baseline["ids"], kv_format, index_format, num_new, tick)
    batch = _run_own_batch(subject, num_new, tick)
    logits = baseline["logits"]
    exact_error, chosen_error = (_errors(run["logits"], logits) for run in (exact, chosen))
    divergence = _first_differences(exact["ids"], baseline["ids"])
    return {
        "demo": "generate",
        "model": subject.name,
        "device": str(subject.model.device),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "prompts": [len(prompt) for prompt in subject.prompts],
        "new_tokens": num_new,
        "kv_format": kv_format,
        "index_format": index_format,
        "texts": [subject.decode(ids) for ids in baseline["ids"]],
        "texts_of_formats": [subject.decode(ids) for ids in chosen["ids"]],
        "first_difference": {
            "fp32": divergence,
            "formats": _first_differences(chosen["ids"], baseline["ids"]),
            "transformers_padded": _first_differences(batch["ids"], baseline["ids"]),
        },
        "logit_error": {"fp32": exact_error, "formats": chosen_error},
        "memory": {"formats": chosen["memory"], "fp32": exact["memory"], "own": baseline["memory"]},
        "tokens_per_second": {
            "fp32": exact["speed"], "formats": chosen["speed"],
            "transformers_alone": baseline["speed"], "transformers_padded": batch["speed"],
        },
        "ok": not subject.is_exact
        or (divergence == [None] * len(divergence) and max(exact_error) <= EXACT_TOLERANCE),
    }  # fmt: skip


def _check_room(subject: Subject, num_new: int) -> None:
    """Refuse more new tokens than the model has positions for."""
    longest = max(len(prompt) for prompt in subject.prompts)
    room = subject.model.config.max_position_embeddings - longest
    limit = f"the model's positions, less a prompt of {longest}"
    check_int("new tokens", num_new, at_least=1, at_most=room, limit=limit)


def _warm_up(subject: Subject, **cache: PagedCache) -> None:
    """Compile and load everything that a GPU needs, before anything is timed."""
    if subject.model.device.type == "cuda":
        _generate(subject, subject.prompts, 2, lambda: None, **cache)


def _generate(
    subject: Subject, prompts: list[Tensor], num_new: int, tick: Tick, **cache: PagedCache
) -> tuple[Any, float]:
    """Generate greedily with a padded batch; return the result and the seconds that it took."""
    wait_for(subject.model.device)
    start = time.perf_counter()
    result = subject.model.generate(
        **_padded(prompts), **cache, do_sample=False, max_new_tokens=num_new,
        min_new_tokens=num_new, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        streamer=_Ticker(tick),
    )  # fmt: skip
    wait_for(subject.model.device)
    return result, time.perf_counter() - start


def _run_alone(subject: Subject, num_new: int, tick: Tick) -> dict[str, Any]:
    """Generate with transformers' own cache, one prompt after the other."""
    ids, logits, memory, seconds = [], [], dict[str, int](), 0.0
    for prompt in subject.prompts:
        result, elapsed = _generate(subject, [prompt], num_new, tick)
        seconds += elapsed
        ids.append(result.sequences[0, len(prompt) :])
        logits.append(torch.stack([step[0] for step in result.logits]))
        sizes = transformers_cache_bytes(result.past_key_values, subject.model.config.layer_types)
        memory = {name: memory.get(name, 0) + size for name, size in sizes.items()}
    speed = len(subject.prompts) * num_new / seconds
    return {"ids": ids, "logits": torch.stack(logits), "memory": memory, "speed": speed}


def _run_own_batch(subject: Subject, num_new: int, tick: Tick) -> dict[str, Any]:
    """Generate with transformers' own cache on the padded batch."""
    result, seconds = _generate(subject, subject.prompts, num_new, tick)
    speed = len(subject.prompts) * num_new / seconds
    return {"ids": list(result.sequences[:, -num_new:]), "speed": speed}


def _run_paged(
    subject: Subject,
    expected: list[Tensor],
    kv_format: KVFormatName,
    index_format: IndexFormatName,
    num_new: int,
    tick: Tick,
) -> dict[str, Any]:
    """Generate with this cache on the padded batch; then compute logits of the expected texts."""
    batch, longest = len(subject.prompts), max(len(prompt) for prompt in subject.prompts)
    cache = attach(
        subject.model,
        max_requests=batch,
        max_tokens=longest + num_new,
        max_forward_tokens=min(batch * (longest + num_new), MAX_FORWARD_TOKENS),
        kv_format=kv_format,
        index_format=index_format,
        drafts_per_step=0,
    )
    with cache:
        _warm_up(subject, past_key_values=cache)
        cache.reset()
        result, seconds = _generate(subject, subject.prompts, num_new, tick, past_key_values=cache)
        cache.reset()
        return {
            "ids": list(result.sequences[:, -num_new:]),
            "logits": _forced_logits(subject, cache, expected),
            "memory": _memory(cache),
            "speed": len(subject.prompts) * num_new / seconds,
        }


@torch.no_grad()
def _forced_logits(subject: Subject, cache: PagedCache, expected: list[Tensor]) -> Tensor:
    """Compute the logits before each expected token, `[batch, num_new, vocabulary]`."""
    texts = [torch.cat(text) for text in zip(subject.prompts, expected, strict=True)]
    num_new = len(expected[0])
    batch = _padded([text[:-1] for text in texts])
    result = subject.model(**batch, past_key_values=cache, logits_to_keep=num_new)
    logits: Tensor = result.logits.float()
    return logits


def _memory(cache: PagedCache) -> dict[str, int]:
    """Return the allocated bytes by component; tables and workspaces hold no rows or tails."""
    sizes = {name: size.allocated for name, size in cache.memory().items()}
    rows = {name: sizes[name] for name in ROWS}
    states = sum(sizes[name] for name in TAILS)
    others = sum(sizes.values()) - sum(rows.values()) - states
    return {**rows, "states": states, "tables and workspaces": others}


def _padded(texts: list[Tensor]) -> dict[str, Tensor]:
    """Pad texts on the left to a batch."""
    longest = max(len(text) for text in texts)
    ids = texts[0].new_zeros(len(texts), longest)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = text
        mask[row, longest - len(text) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _errors(logits: Tensor, expected: Tensor) -> list[float]:
    """Return the largest difference at each step, as a share of the largest logit."""
    expected = expected.float()
    errors = (logits - expected).abs().amax(dim=(0, 2)) / expected.abs().max()
    return [float(error) for error in errors]


def _first_differences(ids: list[Tensor], expected: list[Tensor]) -> list[int | None]:
    """Find the first new token of each prompt that differs, or None."""
    firsts: list[int | None] = []
    for new, expected_new in zip(ids, expected, strict=True):
        steps = (new != expected_new).nonzero()
        firsts.append(int(steps[0]) if len(steps) else None)
    return firsts


class _Ticker(BaseStreamer):
    """Call `tick` for every step that `generate` reports, but not for the prompt."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self._tick()
        self._has_prompt = True

    def end(self) -> None:
        self._has_prompt = False
