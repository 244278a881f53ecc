"""`CapturedAttention`: the attention modules of a decode step as CUDA graphs, one per module.

A replay costs the host a few microseconds; the module's launches cost hundreds. Replays read the
weights at their addresses during capture. Hooks of inner modules run at capture alone.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsv4.cache.graphs.captured_layers import CapturedLayers
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.formats import next_power_of_two
from dsv4.integrations.transformers.weight_addresses import WeightAddresses
from dsv4.model.attention import attend, learned_weights

SHORTEST = 1024  # tokens: every capture has room for at least these


def room_for(longest: int, manager: KVCacheManager) -> int:
    """Return the longest text of a capture that is made for one of `longest` tokens."""
    limit = manager.capacity.max_request_tokens
    return min(max(SHORTEST, next_power_of_two(longest)), limit)


class CapturedAttention:
    """All attention modules for decode steps of one batch size.

    Args:
        manager: The cache's manager, between two forwards.
        modules: The model's attention modules; not kept.
        batch: Rows of a step.
        hidden: Hidden states with the modules' last axis and dtype.
        longest: Tokens of the longest row after the next step. The capture has room for more; a
            growing text is captured again only when its length passes a power of two.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        modules: Sequence[Any],
        *,
        batch: int,
        hidden: Tensor,
        longest: int,
    ) -> None:
        self._hidden = hidden.new_zeros(batch, hidden.shape[-1])
        self._addresses = WeightAddresses(modules)

        def step(handle: LayerCacheHandle) -> Tensor:
            module = modules[handle.layer.layer_idx]
            return attend(module, self._hidden, handle, learned_weights(module))

        max_length = room_for(longest, manager)
        self._layers = CapturedLayers(manager, step, batch=batch, max_length=max_length)

    def is_current(self) -> bool:
        """Return whether weights and cache lie where they were captured."""
        return self._layers.is_current and self._addresses.are_current()

    def fits(self, batch: int, longest: int) -> bool:
        """Return whether a step of `batch` rows of at most `longest` tokens can be replayed."""
        return self._layers.fits(batch, longest)

    def attend(self, layer_idx: int, hidden: Tensor, plan: ForwardPlan) -> Tensor:
        """Replay a module for `hidden` `[batch, hidden_size]`; return a copy of its output."""
        self._hidden.copy_(hidden)
        output: Tensor = self._layers.replay(layer_idx, plan)
        return output.clone()
