"""Generate with a batch of prompts through this cache and through transformers' own.

transformers runs the prompts one after the other, because its cache is wrong on padded batches.
The result shows how wrong.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dsv4.checks import check_checkpoint, check_int
from dsv4.integrations.transformers import PagedCache, attach
from dsv4.model.random_hf import random_hf_model
from dsv4.tools.bench.timing import time_to_end
from dsv4.tools.transformers_cache import transformers_cache_bytes

EXACT_TOLERANCE = 1e-4  # of the largest logit, for fp32 rows
TAILS = ("csa_tails", "index_tails", "hca_tails")
ROWS = ("csa_entries", "index_keys", "hca_entries", "window")
MAX_FORWARD_TOKENS = 8192
PROMPT_LENGTHS = (300, 130, 37, 5)
RANDOM_MODEL = {
    "hidden_size": 128, "num_attention_heads": 8, "compress_ratios": [0, 4, 128, 4],
    "index_topk": 24, "initializer_range": 0.12,
}  # fmt: skip
DEFAULT_PROMPTS = ("The quick brown fox", "Once upon a time, in a land far away, there lived")
Run = dict[str, Any]  # ids and logits of each prompt, memory, speed


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


def run_demo(
    subject: Subject, *, kv_format: Any = "fp8", index_format: Any = "mxfp4", num_new: int = 48
) -> dict[str, Any]:
    """Generate with both caches; compare their tokens, logits, memory and speed.

    This cache runs twice: first with fp32 rows, then in the given formats.
    """
    longest = max(len(prompt) for prompt in subject.prompts)
    room = subject.model.config.max_position_embeddings - longest
    limit = f"the model's positions, less a prompt of {longest}"
    check_int("new tokens", num_new, at_least=1, at_most=room, limit=limit)
    _warm_up(subject)
    alone = _run_alone(subject, num_new)
    runs = {
        "fp32": _run_paged(subject, alone["ids"], ("fp32", "fp32"), num_new),
        "formats": _run_paged(subject, alone["ids"], (kv_format, index_format), num_new),
        "transformers_padded": _generate(subject, subject.prompts, num_new),
    }
    firsts = {name: _first_differences(run["ids"], alone["ids"]) for name, run in runs.items()}
    exact, chosen = runs["fp32"], runs["formats"]
    errors = _errors(exact, alone), _errors(chosen, alone)
    is_equal = all(first is None for first in firsts["fp32"]) and max(errors[0]) <= EXACT_TOLERANCE
    return {
        "demo": "generate", "model": subject.name, "device": str(subject.model.device),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "prompts": [len(prompt) for prompt in subject.prompts], "new_tokens": num_new,
        "kv_format": kv_format, "index_format": index_format,
        "texts": [subject.decode(ids) for ids in alone["ids"]],
        "texts_of_formats": [subject.decode(ids) for ids in chosen["ids"]],
        "first_difference": firsts,
        "logit_error": {"fp32": errors[0], "formats": errors[1]},
        "memory": {"formats": chosen["memory"], "fp32": exact["memory"], "own": alone["memory"]},
        "tokens_per_second": {
            name: run["speed"] for name, run in (runs | {"transformers_alone": alone}).items()
        },
        "ok": is_equal or subject.model.dtype != torch.float32,
    }  # fmt: skip


def _warm_up(subject: Subject, **cache: PagedCache) -> None:
    """Compile and load everything that a GPU needs, before anything is timed."""
    if subject.model.device.type == "cuda":
        _generate(subject, subject.prompts, 2, **cache)


def _generate(subject: Subject, prompts: list[Tensor], num_new: int, **cache: PagedCache) -> Run:
    """Generate greedily with a padded batch."""
    call = partial(
        subject.model.generate, **_padded(prompts), **cache, do_sample=False, pad_token_id=0,
        max_new_tokens=num_new, min_new_tokens=num_new, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    result, elapsed = time_to_end(call, subject.model.device)
    return {
        "ids": list(result.sequences[:, -num_new:]), "logits": torch.stack(result.logits, dim=1),
        "cache": result.past_key_values, "speed": 1e6 * len(prompts) * num_new / elapsed,
    }  # fmt: skip


def _run_alone(subject: Subject, num_new: int) -> Run:
    """Generate with transformers' own cache, one prompt after the other."""
    runs = [_generate(subject, [prompt], num_new) for prompt in subject.prompts]
    layer_types = subject.model.config.layer_types
    sizes = [transformers_cache_bytes(run["cache"], layer_types) for run in runs]
    return {
        "ids": [run["ids"][0] for run in runs],
        "logits": torch.cat([run["logits"] for run in runs]),
        "memory": {name: sum(size[name] for size in sizes) for name in sizes[0]},
        "speed": len(runs) / sum(1 / run["speed"] for run in runs),
    }


@torch.no_grad()
def _run_paged(
    subject: Subject, expected: list[Tensor], formats: tuple[Any, Any], num_new: int
) -> Run:
    """Generate with this cache on the padded batch; then compute logits of the expected texts."""
    batch, num_tokens = len(subject.prompts), max(map(len, subject.prompts)) + num_new
    cache = attach(
        subject.model, max_requests=batch, max_tokens=num_tokens, kv_format=formats[0],
        index_format=formats[1], drafts_per_step=0,
        max_forward_tokens=min(batch * num_tokens, MAX_FORWARD_TOKENS),
    )  # fmt: skip
    with cache:
        _warm_up(subject, past_key_values=cache)
        cache.reset()
        run = _generate(subject, subject.prompts, num_new, past_key_values=cache)
        cache.reset()
        texts = [torch.cat(text)[:-1] for text in zip(subject.prompts, expected, strict=True)]
        result = subject.model(**_padded(texts), past_key_values=cache, logits_to_keep=num_new)
        return {**run, "logits": result.logits, "memory": _memory(cache)}


def _memory(cache: PagedCache) -> dict[str, int]:
    """Return the allocated bytes by component; tables and workspaces hold no rows or tails."""
    sizes = {name: size.allocated for name, size in cache.memory().items()}
    states = sum(sizes.pop(name) for name in TAILS)
    rows = {name: sizes.pop(name) for name in ROWS}
    return {**rows, "states": states, "tables and workspaces": sum(sizes.values())}


def _padded(texts: list[Tensor]) -> dict[str, Tensor]:
    """Pad texts on the left to a batch."""
    ids, mask = (
        pad_sequence(each, batch_first=True, padding_side="left")
        for each in (texts, [torch.ones_like(text) for text in texts])
    )
    return {"input_ids": ids, "attention_mask": mask}


def _errors(run: Run, expected: Run) -> list[float]:
    """Return the largest difference at each step, as a share of the largest logit."""
    exact = expected["logits"].float()
    errors = (run["logits"].float() - exact).abs().amax(dim=(0, 2)) / exact.abs().max()
    return [float(error) for error in errors]


def _first_differences(ids: list[Tensor], expected: list[Tensor]) -> list[int | None]:
    """Find the first new token of each prompt that differs, or None."""
    steps = [(new != old).nonzero() for new, old in zip(ids, expected, strict=True)]
    return [int(each[0]) if len(each) else None for each in steps]
