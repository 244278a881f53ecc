"""Handles that tests watch or steer."""

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from torch import Tensor

from dsv4 import LayerCacheHandle
from dsv4.kernels.contracts import Selection

_Handle = TypeVar("_Handle", bound=LayerCacheHandle)


def turned_into(kind: type[_Handle], handle: LayerCacheHandle, **more: Any) -> _Handle:
    """The same handle as one of another kind."""
    return kind(**{each.name: getattr(handle, each.name) for each in fields(handle)}, **more)


@dataclass(eq=False)
class RecordingHandle(LayerCacheHandle):
    """A handle that remembers which entries were selected, `[num_tokens, topk]` each time."""

    selections: list[Tensor] = field(default_factory=list)

    def select_entries(
        self, query: Tensor, head_weights: Tensor, candidates: Selection | None = None
    ) -> Selection:
        selection = super().select_entries(query, head_weights, candidates)
        self.selections.append(selection.entry_idx)
        return selection


def finish(manager, plan):
    """Mark all that a forward writes as written, with no kernel run."""
    for layer in manager.schedule:
        progress, has_entries = plan.layer(layer.layer_idx), layer.owns_entries
        plan.begin_write(progress, window=True, entries=has_entries)
        plan.end_write(progress, window=True, entries=has_entries)
