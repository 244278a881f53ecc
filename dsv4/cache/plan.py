"""`ForwardPlan`: one forward as data, in buffers whose addresses never change."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4.cache.memory.arrays import IntArray
from dsv4.kernels.contracts import CheckpointPoints, TokenMap


@dataclass(eq=False)
class ForwardPlan:
    """One forward, as `prepare_forward` decided it.

    It is valid until the next plan of the same manager, or until one of its requests is freed or
    truncated.

    Attributes:
        owner: The manager that made it.
        tokens: The device side.
        request_slots: `[batch]`, a host copy; -1 is a padding row.
        positions_before: `[batch]`, lengths before this forward.
        positions_after: `[batch]`, lengths after it.
        num_tokens: Tokens of this forward, padding rows included.
        longest: The largest length after this forward, over real rows.
        num_new_blocks: Blocks this plan allocated, copies of shared ones included.
        has_workspace: Some chunk reads its window from the workspace.
        num_layer_writes: Writes of a whole forward, see `CacheConfig.num_layer_writes`.
        boundaries: Block boundaries inside chunks that the layers checkpoint; None for none.
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
    num_layer_writes: int
    boundaries: CheckpointPoints | None = None
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
        return not progress.has_failed and (progress.is_declared_complete or self.is_written)

    @property
    def is_written(self) -> bool:
        """Every layer was written by its handle, which also checkpoints."""
        written = self._progress.layers.values()
        num_written = sum(layer.has_window + layer.has_entries for layer in written)
        return not self._progress.has_failed and num_written == self.num_layer_writes

    @property
    def has_started(self) -> bool:
        """Some layer was written, or tried to, or the forward was declared complete."""
        progress = self._progress
        has_written = any(p.has_window or p.has_entries for p in progress.layers.values())
        return has_written or progress.has_failed or progress.is_declared_complete

    @property
    def is_retired(self) -> bool:
        """A newer plan owns the buffers."""
        return self._progress.is_retired

    def max_entries(self, ratio: int) -> int:
        """Return the most entries that a token of this forward sees in a layer of that ratio."""
        return self.longest // ratio if ratio else 0

    def complete(self) -> None:
        """Declare every layer written, for callers that run the layers without their handles."""
        self.check_current()
        self._progress.is_declared_complete = True

    def retire(self) -> None:
        """Mark the buffers as taken over by a newer plan."""
        self._progress.is_retired = True

    def layer(self, layer_idx: int) -> "LayerProgress":
        """Return the progress of this forward in a layer."""
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
        """Run `step`, the only write of these parts; a failure in it tears the forward."""
        self.check_current()
        if (window and layer.has_window) or (entries and layer.has_entries):
            part = "window" if window and layer.has_window else "entries"
            raise RuntimeError(
                f"Layer {layer.layer_idx} has already written its {part} in this forward"
            )
        progress = self._progress
        if window:
            progress.workspace_owner = None  # a failed step leaves it undefined
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
                "freed or truncated; use the plan that the last prepare_forward returned"
            )


@dataclass(eq=False)
class LayerProgress:
    """The parts of a layer that a forward has written."""

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
