"""`dsv4 bench engine`: requests that share a prompt, through the engine and through `generate`.

The model is that of `dsv4 bench transformers`. `generate` gets the prompts as one padded batch with
transformers' own cache; where that does not fit, as several batches, of which one is timed.
"""

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from dsv4.cache.memory.capacity import blocks_for
from dsv4.config import CacheConfig
from dsv4.engine import Engine, Output, SamplingParams
from dsv4.integrations.transformers import PackedModel
from dsv4.tools.bench.timing import time_to_end
from dsv4.tools.bench.transformers import attached, flash_model
from dsv4.tools.console import working

STEP_TOKENS = 8192
TARGET = 8.0  # times the tokens a second of generate


def bench_engine(
    *, num_requests: int, num_shared: int, num_own: int, num_new: int
) -> dict[str, Any]:
    """Serve requests of `num_shared + num_own` tokens that come at once, on a GPU."""
    model = flash_model("engine")
    model.set_experts_implementation("grouped_mm")
    return measure(model, num_requests, num_shared, num_own, num_new)


def measure(
    model: Any, num_requests: int, num_shared: int, num_own: int, num_new: int
) -> dict[str, Any]:
    """Time both, and compare what a client sees."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, model.config.vocab_size, num_shared).tolist()
    prompts = [
        shared + rng.integers(1, model.config.vocab_size, num_own).tolist()
        for _ in range(num_requests)
    ]
    with working("serving with the engine"):
        ours = _serve(model, prompts, num_new)
    torch.cuda.empty_cache()
    with working("generating with transformers' own cache"):
        theirs = _generate(model, prompts, num_new)
    rows = [{"name": "this engine", **ours}, {"name": "transformers' generate", **theirs}]
    return {
        "num_requests": num_requests, "num_shared": num_shared, "num_own": num_own,
        "num_new": num_new, "rows": rows, "target": TARGET,
        "faster": ours["tokens_per_s"] / theirs["tokens_per_s"],
    }  # fmt: skip


def _serve(model: Any, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    num_tokens = len(prompts[0]) + num_new
    config = CacheConfig.from_hf(model.config)
    num_blocks = len(prompts) * int(blocks_for(config, np.array([num_tokens]))[0])
    with attached(
        model, len(prompts), num_blocks=num_blocks, max_forward_tokens=STEP_TOKENS,
        prefix_bytes=1 << 28, num_checkpoints=16,
    ) as cache:  # fmt: skip
        engine = Engine(PackedModel(model, cache), cache.manager)
        others = [[token ^ 1 for token in prompt] for prompt in prompts]
        _run(engine, others, 4)  # compiles, and captures the largest batch
        counts = dict(engine.counts)
        result = _run(engine, prompts, num_new)
        steps = engine.counts["steps"] - counts["steps"]
        found = engine.counts["cached_tokens"] - counts.get("cached_tokens", 0)
        return {**result, "steps": steps, "found_tokens": found}


def _run(engine: Engine, prompts: list[list[int]], num_new: int) -> dict[str, float]:
    """Serve prompts to their end; seconds, tokens a second, and the last first token."""
    first: dict[str, float] = {}
    start = time.perf_counter()

    def note(output: Output) -> None:
        first.setdefault(output.request_id, time.perf_counter() - start)

    params = SamplingParams(temperature=0, max_new_tokens=num_new)
    for prompt in prompts:
        engine.submit(prompt, params, note)
    while engine.step():
        pass
    seconds = time.perf_counter() - start
    return _row(seconds, seconds, len(prompts), num_new, min(first.values()), max(first.values()))


def _row(
    seconds: float, batch_s: float, batch: int, num_new: int, first_s: float, last_s: float
) -> dict[str, float]:
    """The row of a table; one batch of `batch` requests takes `batch_s`."""
    return {
        "seconds": seconds, "tokens_per_s": batch * num_new / batch_s, "first_token_s": first_s,
        "last_first_token_s": last_s, "batch": float(batch),
    }  # fmt: skip


@torch.no_grad()
def _generate(model: Any, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
    """Time `generate` on the largest batch that fits; the others would take as long."""
    batch = len(prompts)
    while True:
        ids = torch.tensor(prompts[:batch], device=model.device)
        try:
            first = _time_generate(model, ids, 1)
            seconds = _time_generate(model, ids, num_new)
            break
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch = -(-batch // 2)
        torch.cuda.empty_cache()
    num_batches = -(-len(prompts) // batch)
    last = first + seconds * (num_batches - 1)
    return _row(seconds * num_batches, seconds, batch, num_new, first, last)


def _time_generate(model: Any, ids: torch.Tensor, num_new: int) -> float:
    call = partial(
        model.generate, ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new,
        min_new_tokens=num_new, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return time_to_end(call, ids.device)[1] / 1e6
