"""`ForwardPlan`: one forward as data, in buffers whose addresses never change."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.kernels import TokenMap

IntArray = NDArray[np.int32]


class PlanBuffers:
    """The static buffers of a manager's plans, one packed run of int32 on host and device.

    On the CPU both are the same memory.
    """

    def __init__(self, *, max_requests: int, max_tokens: int, device: torch.device) -> None:
        sizes = {
            "request_slots": max_requests,
            "positions_before": max_requests,
            "positions_after": max_requests,
            "token_starts": max_requests,
            "workspace_starts": max_requests,
            "chunk_ids": max_requests,
            "positions": max_tokens,
            "request_ids": max_tokens,
        }
        self._packed = np.zeros(sum(sizes.values()), dtype=np.int32)
        host = torch.from_numpy(self._packed)
        self.packed = host if device.type == "cpu" else host.to(device)
        self.host: dict[str, IntArray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self.host[name] = self._packed[start : start + size]
            self.device[name] = self.packed[start : start + size]
            start += size
        self._token_map: TokenMap | None = None
        self._sizes = (0, 0, 0, 0)

    def token_map(
        self,
        batch: int,
        num_tokens: int,
        num_chunks: int,
        max_step: int,
        block_table: torch.Tensor,
    ) -> TokenMap:
        """The buffers cut to a forward's size; the last cut is kept for the next step."""
        sizes = (batch, num_tokens, num_chunks, max_step)
        if self._token_map is None or self._sizes != sizes:
            lengths = {"positions": num_tokens, "request_ids": num_tokens, "chunk_ids": num_chunks}
            self._sizes = sizes
            self._token_map = TokenMap(
                **{name: full[: lengths.get(name, batch)] for name, full in self.device.items()},
                block_table=block_table,
                max_step=max_step,
            )
        return self._token_map

    def upload(self) -> None:
        """Bring the host's values to the device."""
        if self.packed.device.type != "cpu":
            self.packed.copy_(torch.from_numpy(self._packed))


@dataclass(eq=False)
class ForwardPlan:
    """What `prepare_forward` decided. Valid until the next plan of the same manager.

    Attributes:
        owner: The manager that made it.
        tokens: The device side.
        request_slots, positions_before, positions_after: `[batch]`, host copies.
        num_tokens: Tokens of this forward, padding rows included.
        longest: The largest length after this forward, over real rows.
        num_new_blocks: Blocks this plan allocated.
        has_workspace: Some chunk reads its window from the workspace.
        num_parts: How many layer parts a whole forward writes.
    """

    owner: object
    tokens: TokenMap
    request_slots: IntArray
    positions_before: IntArray
    positions_after: IntArray
    num_tokens: int
    longest: int
    num_new_blocks: int
    has_workspace: bool
    num_parts: int
    _progress: "_Progress" = field(default_factory=lambda: _Progress())

    @property
    def num_requests(self) -> int:
        """Rows of the batch, padding rows included."""
        return len(self.request_slots)

    @property
    def written_slots(self) -> IntArray:
        """The slots that this forward adds tokens to."""
        adds = (self.request_slots >= 0) & (self.positions_after > self.positions_before)
        return self.request_slots[adds]

    @property
    def is_complete(self) -> bool:
        """Every layer has written its window rows and flushed its entries."""
        progress = self._progress
        if progress.has_failed:
            return False
        written = progress.layers.values()
        num_written = sum(layer.has_window + layer.has_entries for layer in written)
        return progress.is_declared_complete or num_written == self.num_parts

    @property
    def is_retired(self) -> bool:
        """A newer plan owns the buffers."""
        return self._progress.is_retired

    def max_entries(self, ratio: int) -> int:
        """The most entries that any token of this forward sees in a layer of that ratio."""
        return self.longest // ratio if ratio else 0

    def complete(self) -> None:
        """Declare every layer written: by whoever runs the layers without their handles."""
        self.check_current()
        self._progress.is_declared_complete = True

    def retire(self) -> None:
        """Mark the buffers as taken over by a newer plan."""
        self._progress.is_retired = True

    def layer(self, layer_idx: int) -> "LayerProgress":
        """What this forward has written of a layer."""
        layers = self._progress.layers
        if layer_idx not in layers:
            layers[layer_idx] = LayerProgress(layer_idx)
        return layers[layer_idx]

    def owns_workspace(self, layer: "LayerProgress") -> bool:
        """The window workspace holds this layer's rows."""
        return self._progress.workspace_owner is layer

    def run_write(
        self, layer: "LayerProgress", step: Callable[[], None], *, window: bool, entries: bool
    ) -> None:
        """Run `step`, the one write of these parts; a failure in it tears the forward."""
        self.check_current()
        if (window and layer.has_window) or (entries and layer.has_entries):
            part = "window" if window and layer.has_window else "entries"
            raise RuntimeError(
                f"Layer {layer.layer_idx} has already written its {part} in this forward"
            )
        progress = self._progress
        if window:
            progress.workspace_owner = None  # from here on it may hold anything
        try:
            step()
        except BaseException:
            progress.has_failed = True
            raise
        if window:
            layer.has_window = True
            progress.workspace_owner = layer
        if entries:
            layer.has_entries = True

    def check_current(self) -> None:
        """Refuse a plan whose buffers a newer one has taken over."""
        if self.is_retired:
            raise RuntimeError(
                "Stale plan: a newer forward was prepared since, or one of its requests was "
                "freed; use the plan that the last prepare_forward returned"
            )


@dataclass(eq=False)
class LayerProgress:
    """Which parts of a layer a forward has written."""

    layer_idx: int
    has_window: bool = False
    has_entries: bool = False


@dataclass(eq=False)
class _Progress:
    layers: dict[int, LayerProgress] = field(default_factory=dict)
    workspace_owner: LayerProgress | None = None
    is_declared_complete: bool = False
    has_failed: bool = False
    is_retired: bool = False
