"""The attention modules of a decode step as CUDA graphs, one a module.

A replay takes the host a few microseconds where the module's own launches take hundreds. Weights
are read where they were at the capture; hooks of the modules inside run at the capture alone.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsv4.cache.graphs.captured_layers import CapturedLayers
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import LayerWeights
from dsv4.model.attention import attend, rotation_at

SHORTEST = 1024  # tokens that every capture has room for


class CapturedAttention:
    """All attention modules for decode steps of one batch size.

    Args:
        manager: The cache's, between two forwards.
        modules: The model's attention modules; only used here.
        weights: What `learned_weights` gave for each.
        batch: Rows of a step.
        hidden: A tensor as the modules get them: the last axis and the dtype count.
        longest: Tokens of the longest row after the next step. The capture has room for more, so
            that a text that grows is captured again only where its length passes a power of two.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        modules: Sequence[Any],
        weights: Sequence[LayerWeights],
        *,
        batch: int,
        hidden: Tensor,
        longest: int,
    ) -> None:
        self._hidden = hidden.new_zeros(batch, hidden.shape[-1])

        def step(handle: LayerCacheHandle) -> Tensor:
            idx = handle.layer.layer_idx
            rotation = rotation_at(handle.rope, handle.positions)
            return attend(modules[idx], self._hidden, handle, weights[idx], rotation)

        max_length = max(SHORTEST, next_power_of_two(longest))
        self._layers = CapturedLayers(
            manager, step,
            batch=batch, max_length=min(max_length, manager.capacity.max_request_tokens),
        )  # fmt: skip

    def fits(self, batch: int, longest: int) -> bool:
        """Whether a step of so many rows, the longest of that length, can be replayed."""
        return self._layers.fits(batch, longest)

    def attend(self, layer_idx: int, hidden: Tensor, plan: ForwardPlan) -> Tensor:
        """A module's output for `hidden` `[batch, hidden_size]`; a tensor of its own."""
        self._hidden.copy_(hidden)
        output: Tensor = self._layers.replay(layer_idx, plan)
        return output.clone()
