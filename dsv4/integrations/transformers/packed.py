"""`PackedModel`: an attached model on ragged batches of its cache's manager, for engines."""

from typing import Any

import torch
from torch import Tensor

from dsv4.cache.graphs.captured_forward import GraphPool
from dsv4.cache.plan import ForwardPlan
from dsv4.checks import check_int
from dsv4.formats import next_power_of_two
from dsv4.integrations.transformers.cache import PagedCache
from dsv4.integrations.transformers.captured_step import (
    CapturedStep,
    can_capture,
    check_experts,
    find_step,
    run_packed,
)

LEAST_MIXED = 64  # tokens of the smallest graph with chunks
MOST_MIXED = 512  # longer steps keep a GPU busy while the host launches them
MIXED_CHUNKS = 4


class PackedModel:
    """Runs the tokens of a plan of `cache.manager` in one row, without padding.

    With graphs, steps are captured by size: batches, lengths, and tokens of steps with chunks are
    rounded up to powers of two. The graphs share their memory.

    Args:
        model: The attached model.
        cache: The cache that `attach` returned; only its manager's requests are used.
        cuda_graphs: Capture steps; by default on a GPU, if the model's experts can be captured.
        mixed_tokens: The most tokens of a captured step that has chunks; 0 captures none. By
            default 512 with `grouped_mm` experts; `batched_mm` copies weights for every token.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        *,
        cuda_graphs: bool | None = None,
        mixed_tokens: int | None = None,
    ) -> None:
        cache.check_owner(model.model)
        if cuda_graphs:
            cache.manager.check_one_device("CUDA graphs")
            check_experts(model)
        elif cuda_graphs is None:
            is_fit = cache.manager.can_capture and model.device.type == "cuda"
            cuda_graphs = is_fit and can_capture(model)
        if mixed_tokens is None:
            is_grouped = model.config._experts_implementation == "grouped_mm"
            mixed_tokens = MOST_MIXED if is_grouped else 0
        self._model, self._cache, self._has_graphs = model, cache, cuda_graphs
        self._mixed_tokens = check_int("mixed_tokens", mixed_tokens, at_least=0)
        has_pool = cuda_graphs and model.device.type == "cuda"
        self._pool = GraphPool(model.device) if has_pool else None
        self._steps: dict[tuple[int, int], CapturedStep] = {}  # by batch and tokens of a request
        self._mixed: dict[tuple[int, int], CapturedStep] = {}  # by batch and tokens of all
        self._next: CapturedStep | None = None

    @property
    def vocab_size(self) -> int:
        """The token ids that it knows: those below."""
        size: int = self._model.config.vocab_size
        return size

    @property
    def captured_sizes(self) -> list[tuple[int, int]]:
        """Batch and tokens of a request of every graph without chunks."""
        return list(self._steps)

    @property
    def mixed_sizes(self) -> list[tuple[int, int]]:
        """Batch and tokens of every graph with chunks."""
        return list(self._mixed)

    def before_plan(
        self, num_requests: int, tokens_per_request: int, longest: int, num_tokens: int
    ) -> None:
        """Capture the next step, of at most so many, if no graph of its size is there."""
        self._next, capacity = None, self._cache.manager.capacity
        if not self._has_graphs:
            return
        batch = min(next_power_of_two(num_requests), capacity.max_requests)
        if tokens_per_request <= capacity.max_step_tokens:
            self._next = find_step(
                self._steps, (batch, tokens_per_request), self._model, self._cache,
                longest=longest, pool=self._pool, batch=batch,
                tokens_per_request=tokens_per_request,
            )  # fmt: skip
        elif num_tokens <= self._mixed_tokens:
            room = max(LEAST_MIXED, next_power_of_two(num_tokens))
            room = min(room, capacity.max_forward_tokens)
            self._next = find_step(  # without the head, which few of the tokens need
                self._mixed, (batch, room), self._model.model, self._cache,
                longest=longest, pool=self._pool, batch=batch, num_tokens=room,
                max_chunks=min(batch, MIXED_CHUNKS),
            )  # fmt: skip

    @torch.no_grad()
    def __call__(self, ids: Tensor, plan: ForwardPlan, rows: Tensor) -> Tensor:
        """Return the logits `[rows, vocabulary]` of some of the tokens `ids` `[num_tokens]`."""
        step, self._next = self._next, None
        if step is not None and step.fits(plan):
            step.ids[: len(ids)].copy_(ids)
            outputs: Tensor = step.run(plan)
            if not step.max_chunks:
                return outputs[rows]
            hidden = outputs
        else:
            hidden = run_packed(self._model.model, self._cache, ids, plan)
        logits: Tensor = self._model.lm_head(hidden[rows])
        return logits
