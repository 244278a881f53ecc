"""`dsv4 bench host`: what a step of an engine costs on the host, beside the kernels."""

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.layout import cache_layout
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.kernels import reference
from dsv4.kernels.contracts import Selection
from dsv4.testing import model_projections, model_weights
from dsv4.tools.bench.requests import manager_for, plan_tokens
from dsv4.tools.bench.timing import summarize, time_call
from dsv4.tools.console import working

DRAFTS = 3
VOCABULARY = 129280
TARGETS_US = {
    "prepare": 300.0, "accept": 300.0, "note_and_publish": 300.0, "step": 700.0,
    "step_that_closes_blocks": 1500.0, "step_of_one_request": 150.0, "layers": 450.0,
}  # fmt: skip
NOTHING = torch.zeros(1, 1, dtype=torch.int64)
STUBS: dict[str, Any] = {  # kernels that do nothing
    "make_rope": lambda **_: None,
    "write_layer": lambda **_: None,
    "select_entries": lambda **_: (NOTHING,) * len(Selection._fields),
    "attend": lambda **_: (NOTHING, NOTHING),
}


def bench_host(*, num_requests: int, num_steps: int) -> dict[str, Any]:
    """Time the calls of an engine's step for V4-Flash with a prefix cache, drafts included.

    A step plans 1 + 3 tokens of each request, forgets the rejected ones, notes the accepted ids
    and publishes full blocks. `layers` is `acquire` and `forward` of all 43 layers, with kernels
    that do nothing.
    """
    with working("measuring"):
        times = _time_steps(num_requests, num_steps)
    mean = {name: float(np.mean(values)) for name, values in times.items()}
    return {
        "num_requests": num_requests, "num_steps": num_steps, "drafts": DRAFTS, "mean_us": mean,
        **summarize(times), "target_us": TARGETS_US if num_requests == 256 else {},
    }  # fmt: skip


def _time_steps(num_requests: int, num_steps: int) -> dict[str, list[float]]:
    manager = _manager(num_requests, num_steps)
    times: dict[str, list[float]] = {name: [] for name in TARGETS_US}
    slots = np.arange(num_requests)
    lengths, rng = manager.config.block_tokens + slots, np.random.default_rng(0)
    for length in lengths.tolist():
        manager.resume_request(rng.integers(0, VOCABULARY, length))
    manager.prepare_forward(slots, np.zeros_like(slots), lengths).complete()
    for step in range(num_steps + 50):
        parts = _step(manager, slots, seed=step)
        if step >= 50:  # the first steps warm the CPU's caches
            for name, elapsed in zip(times, (*parts, sum(parts)), strict=False):
                times[name].append(elapsed)
    for step in range(20):
        closing = _step_to_a_boundary(manager, slots, seed=step)
        times["step_that_closes_blocks"].append(closing)
    manager.free_requests(slots[1:])
    for step in range(num_steps):
        times["step_of_one_request"].append(sum(_step(manager, slots[:1], seed=step)))
    with mock.patch.multiple(reference, **STUBS), torch.inference_mode():
        times["layers"] = _time_layers(manager, slots[:1], num_steps)
    return times


def _manager(num_requests: int, num_steps: int) -> KVCacheManager:
    config = CacheConfig.v4_flash(drafts_per_step=DRAFTS)
    most = (2 * num_steps + 100) * (DRAFTS + 1) + 50 * config.block_tokens
    num_blocks = num_requests * (most // config.block_tokens + 2)
    layout = cache_layout(config, build_schemas(config))
    untouched = {  # no kernel will touch it, so it costs no memory
        "blocks": torch.empty(num_blocks, layout.blocks.num_bytes, dtype=torch.uint8),
        "slots": torch.empty(num_requests, layout.slots.num_bytes, dtype=torch.uint8),
    }
    chunk = num_requests * 2 * config.block_tokens
    sizes = {"chunk": chunk, "num_blocks": num_blocks, "num_checkpoints": 8}
    manager = manager_for(config, num_requests, most, device="cpu", storage=untouched, **sizes)
    # On a GPU the copies of fixed state cost the host nothing.
    manager._books.checkpoints.save = lambda *_: None  # type: ignore[method-assign]
    return manager


def _step(
    manager: KVCacheManager, slots: Any, *, seed: int, counts: Any = None
) -> tuple[float, float, float]:
    """Run a step; return microseconds to plan it, to accept drafts, to note and publish.

    `counts` are the tokens that each request keeps, by default drawn.
    """
    rng = np.random.default_rng(seed)
    before = manager.lengths[slots]
    counts = rng.integers(1, DRAFTS + 2, len(slots)) if counts is None else counts
    ids = rng.integers(0, VOCABULARY, int(counts.sum()))
    after, kept = before + DRAFTS + 1, before + counts
    plan, planned = time_call(partial(prepare_forward, manager, slots, before, after))
    plan.complete()
    _, accepted = time_call(partial(manager.truncate, slots, kept))
    _, noted = time_call(partial(_note, manager, slots, ids, before, counts))
    return planned, accepted, noted


def _note(manager: KVCacheManager, slots: Any, ids: Any, before: Any, counts: Any) -> None:
    manager.note_tokens(slots, ids, start=before, counts=counts)
    manager._forward.publish()


def _step_to_a_boundary(manager: KVCacheManager, slots: Any, *, seed: int) -> float:
    """Bring all requests in front of a block's end, then time the step in which all close it."""
    rng, block_tokens = np.random.default_rng(seed), manager.config.block_tokens
    before = manager.lengths[slots]
    ends = (before // block_tokens + 1) * block_tokens + DRAFTS - 1
    ends = np.maximum(ends, before)
    manager.prepare_forward(slots, before, ends).complete()
    counts = ends - before
    _note(manager, slots, rng.integers(0, VOCABULARY, int(counts.sum())), before, counts)
    return sum(_step(manager, slots, seed=seed + 1, counts=np.ones_like(slots)))


def _time_layers(manager: KVCacheManager, slots: Any, num_steps: int) -> list[float]:
    config = manager.config
    weights, inputs = model_weights(config, seed=0), model_projections(config, 1, seed=1)

    def run_layers(plan: ForwardPlan) -> None:
        for idx, (projections, layer_weights) in enumerate(zip(inputs, weights, strict=True)):
            manager.acquire(idx, plan).forward(projections, layer_weights)

    plans = (plan_tokens(manager, slots) for _ in range(num_steps))
    return [time_call(partial(run_layers, plan))[1] for plan in plans]
