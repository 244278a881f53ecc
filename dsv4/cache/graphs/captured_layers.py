"""`CapturedLayers`: decode steps of one token a request, each layer a CUDA graph of its own.

For models that the cache's user does not run as one step: what lies between two layers stays
eager. `CapturedForward` has all layers in one graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from dsv4.cache.graphs.captured_forward import new_graphs, pad_buffers, padding_plan
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan

LayerStep = Callable[[LayerCacheHandle], Any]


class CapturedLayers:
    """Every layer's part of a decode step, captured on padding alone and replayed for any plan
    of that batch.

    Args:
        manager: The cache. A forward of it that is not complete is not given up: the capture
            is refused.
        step: Called with a layer's handle, for each layer in turn. It writes all that the layer
            stores, reads its inputs from tensors whose addresses never change, does not wait for
            the device, and returns tensors that each replay fills again.
        batch: The requests of a replay, one token each.
        max_length: The longest request of a replay.
    """

    def __init__(
        self, manager: KVCacheManager, step: LayerStep, *, batch: int, max_length: int
    ) -> None:
        self.manager = manager
        self.batch = batch
        self.max_length = max_length
        pad_buffers(manager, batch)
        self._graphs = new_graphs(manager.device, len(manager.schedule))
        self._outputs = [
            graph.capture(partial(self._run, step, idx)) for idx, graph in enumerate(self._graphs)
        ]

    def fits(self, batch: int, longest: int) -> bool:
        """Whether a step of so many requests, the longest of that length, can be replayed."""
        return batch == self.batch and longest <= self.max_length

    def replay(self, layer_idx: int, plan: ForwardPlan) -> Any:
        """Run a layer for a plan that fits. Returns what its step returned."""
        is_decode = plan.num_tokens == plan.num_requests and plan.tokens.max_step == 1
        if not is_decode or not self.fits(plan.num_requests, plan.longest):
            raise ValueError(
                f"Invalid plan: expected {self.batch} requests of one token each, up to "
                f"{self.max_length} long, as captured, got {plan.num_tokens} tokens of "
                f"{plan.num_requests} requests up to {plan.longest} long"
            )
        has_entries = self.manager.schedule[layer_idx].ratio > 0
        plan.run_write(
            plan.layer(layer_idx), self._graphs[layer_idx].replay, window=True, entries=has_entries
        )
        return self._outputs[layer_idx]

    def _run(self, step: LayerStep, layer_idx: int) -> Any:
        """A layer's step over the buffers as they are, through a plan that only it sees."""
        plan = padding_plan(
            self.manager, self.batch, self.batch, max_step=1, max_length=self.max_length
        )
        try:
            return step(self.manager.acquire(layer_idx, plan))
        finally:
            plan.retire()
