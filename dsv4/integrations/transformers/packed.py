"""`PackedModel`: an attached model on ragged batches of its cache's manager, for engines."""

from typing import Any

import torch
from torch import Tensor

from dsv4.cache.plan import ForwardPlan
from dsv4.formats import next_power_of_two
from dsv4.integrations.transformers.cache import PagedCache
from dsv4.integrations.transformers.captured_step import (
    CapturedStep,
    can_capture,
    check_experts,
    find_step,
    run_packed,
)


class PackedModel:
    """Runs the tokens of a plan of `cache.manager` in one row, without padding.

    With graphs, steps of few tokens a request are captured by size: batches and lengths are
    rounded up to powers of two.

    Args:
        model: The attached model.
        cache: The cache that `attach` returned; only its manager's requests are used.
        cuda_graphs: Capture steps; by default on a GPU, if the model's experts can be captured.
    """

    def __init__(self, model: Any, cache: PagedCache, *, cuda_graphs: bool | None = None) -> None:
        cache.check_owner(model.model)
        if cuda_graphs:
            check_experts(model)
        elif cuda_graphs is None:
            cuda_graphs = model.device.type == "cuda" and can_capture(model)
        self._model, self._cache, self._has_graphs = model, cache, cuda_graphs
        self._steps: dict[tuple[int, int], CapturedStep] = {}  # by batch and tokens of a request
        self._next: CapturedStep | None = None

    @property
    def captured_sizes(self) -> list[tuple[int, int]]:
        """Batch and tokens of a request of every graph."""
        return list(self._steps)

    def before_plan(self, num_requests: int, tokens_per_request: int, longest: int) -> None:
        """Capture the next step, if it is no chunk and no graph of its size is there.

        Args:
            num_requests, tokens_per_request, longest: The most of the next plan.
        """
        self._next, capacity = None, self._cache.manager.capacity
        if self._has_graphs and tokens_per_request <= capacity.max_step_tokens:
            batch = min(next_power_of_two(num_requests), capacity.max_requests)
            self._next = find_step(
                self._steps, (batch, tokens_per_request), self._model, self._cache,
                longest=longest, batch=batch, tokens_per_request=tokens_per_request,
            )  # fmt: skip

    @torch.no_grad()
    def __call__(self, ids: Tensor, plan: ForwardPlan, rows: Tensor) -> Tensor:
        """Return the logits `[rows, vocabulary]` of some of the tokens `ids` `[num_tokens]`."""
        step, self._next = self._next, None
        if step is not None and step.fits(plan):
            step.ids[: len(ids)].copy_(ids)
            outputs: Tensor = step.run(plan)
            return outputs[rows]
        hidden = run_packed(self._model.model, self._cache, ids, plan)
        logits: Tensor = self._model.lm_head(hidden[rows])
        return logits
