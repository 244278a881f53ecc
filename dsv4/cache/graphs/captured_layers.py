"""`CapturedLayers`: decode steps of one token a request, each layer a CUDA graph of its own.

It serves models that run layer by layer: the work between two layers stays eager.
`CapturedForward` has all layers in one graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from dsv4.cache.graphs.captured_forward import (
    CudaGraph,
    GraphPool,
    check_complete,
    check_current,
    fill_with_padding,
)
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan

LayerStep = Callable[[LayerCacheHandle], Any]


class CapturedLayers:
    """Graphs of a decode step, one per layer, captured on padding and replayed for any plan.

    Args:
        manager: The cache; one whose last forward is not complete is refused.
        step: Called with each layer's handle. It writes all that the layer stores and does not wait
            for the device. Its inputs are tensors whose addresses never change. It returns tensors
            that each replay fills again.
        batch: The requests of a replay, one token each.
        max_length: The longest request of a replay.
    """

    def __init__(
        self, manager: KVCacheManager, step: LayerStep, *, batch: int, max_length: int
    ) -> None:
        self.manager, self._num_sleeps = manager, manager.num_sleeps
        self.batch = batch
        self.max_length = max_length
        if manager.config.kv_source_layer_ids:
            raise ValueError(
                "Cannot capture layers one by one: some use the choices of others; "
                "CapturedForward captures their whole step"
            )
        if manager.context is not None:
            raise ValueError("Cannot capture layers one by one in a split context: expected none")
        check_complete(manager, "capture")
        fill_with_padding(manager, batch)
        pool = GraphPool(manager.device)  # they are replayed in the order of capture
        self._graphs = [CudaGraph(manager.device, pool) for _ in manager.schedule]
        self._outputs = [
            graph.capture(partial(self._run, step, idx)) for idx, graph in enumerate(self._graphs)
        ]

    @property
    def is_current(self) -> bool:
        """Whether its manager has not slept since the capture."""
        return self.manager.num_sleeps == self._num_sleeps

    def fits(self, batch: int, longest: int) -> bool:
        """Tell whether a step of that batch and longest request can be replayed."""
        return batch == self.batch and longest <= self.max_length

    def replay(self, layer_idx: int, plan: ForwardPlan) -> Any:
        """Run a layer for a plan that fits, and return the outputs of its step."""
        check_current(self.is_current)
        is_decode = plan.num_tokens == plan.num_requests and plan.tokens.max_step == 1
        if not is_decode or not self.fits(plan.num_requests, plan.longest):
            raise ValueError(
                f"Invalid plan: expected {self.batch} requests of one token each, up to "
                f"{self.max_length} long, as captured, got {plan.num_tokens} tokens of "
                f"{plan.num_requests} requests up to {plan.longest} long"
            )
        self.manager.make_rope(plan)
        has_entries = self.manager.schedule[layer_idx].owns_entries
        layer = plan.layer(layer_idx)
        plan.begin_write(layer, window=True, entries=has_entries)
        try:
            self._graphs[layer_idx].replay()
        except BaseException:
            plan.cancel()
            raise
        plan.end_write(layer, window=True, entries=has_entries)
        return self._outputs[layer_idx]

    def _run(self, step: LayerStep, layer_idx: int) -> Any:
        """Run a layer's step over the buffers as they are, through a plan that only it sees."""
        plan = self.manager.padding_plan(self.batch, self.batch, 0, 1, max_length=self.max_length)
        plan.has_rope = True  # `replay` makes the rows, once for all layers
        try:
            return step(self.manager.acquire(layer_idx, plan))
        finally:
            plan.is_retired = True
