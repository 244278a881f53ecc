"""`StateCachePool`: the fixed state of requests: window rings and compression tails.

Nothing here is rotated, reset or counted: the token at position p lies in row p mod rows. The
visible rows follow from a request's length (`kernels.reference.addressing`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.memory.layout import CacheLayout, byte_rows
from dsv4.checks import check_int
from dsv4.formats import PagedRows


def _series(name: str, part: int, series: str) -> property:
    """Make the property of one series of a tail: its kv is part 0, its gate part 1."""

    def view(state: "LayerState") -> Tensor:
        tail: Tensor | None = getattr(state, name)
        if tail is None:
            raise ValueError(f"This layer has no {name}")
        width = state.ring.format.dim if name == "tail" else tail.shape[-1] // 2
        has_b = tail.shape[-1] > width
        if series == "b" and not has_b:
            raise ValueError("Only a CSA layer has a series the next window reads")
        start = width if series == "a" and has_b else 0
        return tail[:, :, part, start : start + width]

    return property(view)


@dataclass(frozen=True)
class LayerState:
    """One layer's fixed state of all requests, strided views into the slots.

    Attributes:
        ring: Window rows, one page of `ring_rows` rows per slot.
        tail: `[max_requests, tail_rows, 2, num_series × head_dim]`: kv, and gate + bias, of
            the tokens whose windows are open; None for SWA. HCA keeps those of the open group.
        index_tail: The same of the indexer; None unless CSA.
        sums: `[max_requests, sum_rows, 3, head_dim]` fp32: largest gate, sum of weights and
            weighted sum of the open window's closed groups; None unless HCA.

    The series of the columns: `b` is `[:head_dim]`, which the next window reads, `a` is
    `[head_dim:]`, this window's. HCA has `a` alone.
    """

    ring: PagedRows
    tail: Tensor | None
    index_tail: Tensor | None
    sums: Tensor | None

    @property
    def swa_fp8(self) -> Tensor:
        """`[max_requests, ring_rows, nope_dim]`: the part that is not rotated, or all of it."""
        return self.ring.field(self.ring.format.fields[0].name)

    @property
    def swa_rope(self) -> Tensor:
        """`[max_requests, ring_rows, rope_dim]`: the rotated part."""
        return self.ring.field("rope")

    @property
    def swa_inv(self) -> Tensor:
        """`[max_requests, ring_rows, scales]`: the multipliers that restore a value."""
        return self.ring.field("scale")

    tail_ka, tail_za = _series("tail", 0, "a"), _series("tail", 1, "a")
    tail_kb, tail_zb = _series("tail", 0, "b"), _series("tail", 1, "b")
    index_tail_ka, index_tail_za = _series("index_tail", 0, "a"), _series("index_tail", 1, "a")
    index_tail_kb, index_tail_zb = _series("index_tail", 0, "b"), _series("index_tail", 1, "b")


class StateCachePool:
    """All slots as one tensor `[max_requests, slot_bytes]`; a layer's state is a view of it."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        max_requests: int,
        device: torch.device,
        storage: Tensor | None = None,
    ) -> None:
        self.layout = layout.slots
        self.storage = byte_rows("slots", max_requests, self.layout.num_bytes, device, storage)
        self._layers = tuple(
            LayerState(
                layer.cut_ring(self.storage),
                layer.cut_tail(self.storage),
                layer.cut_index_tail(self.storage),
                layer.cut_sums(self.storage),
            )
            for layer in layout.layers
        )

    def layer(self, layer_idx: int) -> LayerState:
        """Return the fixed state of a layer."""
        return self._layers[layer_idx]

    def reset_slot(self, slot: int) -> None:
        """Overwrite a slot with zeros.

        Reuse does not need it, because positions alone decide which rows are read. It is for owners
        who must not leave one user's data behind.
        """
        check_int("slot", slot, at_least=0, at_most=len(self.storage) - 1)
        self.storage[slot].zero_()
