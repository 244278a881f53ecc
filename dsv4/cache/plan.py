"""`ForwardPlan`: one forward as data, in buffers whose addresses never change."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from dsv4.cache.memory.arrays import Int64Array, IntArray
from dsv4.kernels.contracts import CheckpointPoints, TokenMap


class Survival(NamedTuple):
    """What is left of each request of a forward that is cancelled, `[batch]` each.

    Attributes:
        lengths: The length that survives: the one before, or one with a checkpoint, or 0.
        floors: The rollback floor then.
        undo_slots: The copy of its fixed state from before; -1 where none is needed, or left.
        checkpoints: The checkpoint of the length; -1 where none is needed.
        num_read_only: The blocks that its request then replays or has replayed.
    """

    lengths: Int64Array
    floors: Int64Array
    undo_slots: Int64Array
    checkpoints: Int64Array
    num_read_only: Int64Array


class PlanOwner(Protocol):
    """Cancels or commits a plan."""

    def cancel(self, plan: "ForwardPlan") -> None:
        """Undo a plan that is not complete."""

    def lose(self, plan: "ForwardPlan") -> None:
        """Undo a plan whose results are lost."""

    def commit(self, plan: "ForwardPlan", accepted: Tensor) -> None:
        """Keep the accepted tokens of a complete step."""


@dataclass(eq=False)
class ForwardPlan:
    """One forward, as `prepare_forward` decided it.

    It is live until every layer is written, or until `complete` or `cancel`. `with plan:` cancels
    it if anything is raised inside, also between the layers. Its results can be read until the
    next plan of the same manager, or until one of its requests is freed or truncated.

    Attributes:
        owner: Returns what cancels it; None once its manager is gone.
        tokens: The device side.
        request_slots: `[batch]`, a host copy; -1 is a padding row.
        positions_before: `[batch]`, lengths before this forward. While the host does not know
            the accepted tokens of the step before, these are the most that they can be.
        positions_after: `[batch]`, lengths after it.
        num_tokens: Tokens of this forward, padding rows included.
        longest: The largest length after this forward, over real rows.
        num_new_blocks: Blocks this plan allocated, copies of shared ones included.
        has_workspace: Some chunk reads its window from the workspace.
        num_layer_writes: Writes of a whole forward, see `CacheConfig.num_layer_writes`.
        boundaries: Block boundaries inside chunks that the layers checkpoint; None for none.
        survival: What `cancel` leaves; None for a plan of padding alone.
        has_rope: The device has the RoPE rows of its tokens.
        other_parts: `tokens` and `boundaries` on the manager's other devices.
    """

    owner: Callable[[], PlanOwner | None]
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
    survival: Survival | None = None
    is_cancelled: bool = False
    is_retired: bool = False
    is_committed: bool = False
    has_rope: bool = False
    other_parts: tuple[tuple[TokenMap, CheckpointPoints | None], ...] = ()
    _num_written: int = 0
    _has_begun: bool = False
    _is_declared_complete: bool = False
    _workspace_owner: "LayerProgress | None" = None
    _layers: dict[int, "LayerProgress"] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Rows of the batch, padding rows included."""
        return len(self.request_slots)

    @cached_property
    def written_rows(self) -> Int64Array:
        """The rows of requests that this forward adds tokens to."""
        is_written = (self.request_slots >= 0) & (self.positions_after > self.positions_before)
        return is_written.nonzero()[0]

    @property
    def surviving_lengths(self) -> Int64Array:
        """`[batch]`, the length of each request after `cancel`; other rows keep theirs.

        It is the length before this forward, except for chunks that no undo slot was left for.
        """
        lengths = self.positions_before if self.survival is None else self.survival.lengths
        return lengths.astype("int64")

    @property
    def is_complete(self) -> bool:
        """Every layer has written its window rows and flushed its entries."""
        return self._is_declared_complete or self.is_written

    @property
    def is_written(self) -> bool:
        """Every layer was written by its handle, or by a graph of handles: they checkpoint too."""
        return self._num_written == self.num_layer_writes

    @property
    def is_live(self) -> bool:
        """It adds tokens and is neither complete nor cancelled."""
        is_over = self.is_cancelled or self.is_retired or self.is_complete
        return not is_over and self.written_rows.size > 0

    @property
    def has_started(self) -> bool:
        """Some layer was written, or tried to, or the forward was declared complete."""
        return self._has_begun or self._is_declared_complete

    def on_part(self, part: int) -> tuple[TokenMap, CheckpointPoints | None]:
        """Return `tokens` and `boundaries` on one of the manager's devices."""
        return self.other_parts[part - 1] if part else (self.tokens, self.boundaries)

    def max_entries(self, ratio: int) -> int:
        """Return the most entries that a token of this forward sees in a layer of that ratio."""
        return self.longest // ratio if ratio else 0

    def complete(self) -> None:
        """Declare every layer written, for callers that run the layers without their handles."""
        self.check_current()
        self._is_declared_complete = True

    def note_written(self) -> None:
        """Note that a graph wrote every layer as its handle would, checkpoints included."""
        self.check_current()
        self._num_written = self.num_layer_writes

    def commit(self, accepted: Tensor) -> None:
        """Keep the first tokens of each row of this step, as many as the device says.

        It is `truncate` with lengths that the host does not know yet, and ends the reads of this
        plan. `KVCacheManager.prepare_step` plans the next step without them. The host first waits
        for the counts of the step before this one, which gives `positions_before` its values.
        Requests that were freed, truncated or swapped out since the step are left as they are.

        Args:
            accepted: `[batch]` int32 or int64 on the manager's device, from 0 to the row's tokens;
                larger and smaller ones count as these. Those of padding rows are not read.

        Raises:
            RuntimeError: The forward is not complete.
            ValueError: It has a chunk, or a request that replays known tokens.
        """
        owner = self.owner()
        if owner is not None:
            owner.commit(self, accepted)

    def cancel(self) -> None:
        """Undo this forward: each of its requests is again what it was before.

        Their lengths are `surviving_lengths`. Layers may or may not have been written. Cancelling
        twice does nothing more, nor does cancelling a plan that a newer one has followed.

        Raises:
            RuntimeError: The forward is complete; `truncate` forgets its tokens.
        """
        owner = self.owner()
        if owner is not None:
            owner.cancel(self)

    def lose(self) -> None:
        """Undo this forward, also if every layer is written: its results are lost with a rank."""
        owner = self.owner()
        if owner is not None:
            owner.lose(self)

    def forget_writes(self) -> None:
        """Be as before the first write, but not to be used."""
        self._num_written, self._is_declared_complete = 0, False

    def __enter__(self) -> "ForwardPlan":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Cancel the forward if something was raised before it was complete."""
        if kind is not None and self.is_live:
            self.cancel()

    def layer(self, layer_idx: int) -> "LayerProgress":
        """Return the progress of this forward in a layer."""
        progress = self._layers.get(layer_idx)
        if progress is None:
            progress = self._layers[layer_idx] = LayerProgress(layer_idx)
        return progress

    def owns_workspace(self, layer: "LayerProgress") -> bool:
        """The window workspace holds this layer's rows."""
        return self._workspace_owner is layer

    def begin(self) -> None:
        """Note that rows may be written from here on."""
        self.check_current()
        self._has_begun = True

    def begin_write(self, layer: "LayerProgress", *, window: bool, entries: bool) -> None:
        """Refuse a second write of these parts of a layer; `end_write` follows."""
        self.begin()
        if (window and layer.has_window) or (entries and layer.has_entries):
            part = "window" if window and layer.has_window else "entries"
            raise RuntimeError(
                f"Layer {layer.layer_idx} has already written its {part} in this forward"
            )
        if window:
            self._workspace_owner = None  # a failed write leaves it undefined

    def end_write(self, layer: "LayerProgress", *, window: bool, entries: bool) -> None:
        """Note that these parts of a layer are written."""
        if window:
            layer.has_window = True
            self._workspace_owner = layer
        if entries:
            layer.has_entries = True
        self._num_written += window + entries

    def check_current(self) -> None:
        """Refuse a plan that is cancelled, or whose buffers a newer one has taken over."""
        if self.is_cancelled:
            raise RuntimeError(
                "Cancelled plan: it was cancelled, or one of its layers failed; prepare another"
            )
        if self.is_retired:
            raise RuntimeError(
                "Stale plan: a newer forward was prepared since, or one of its requests was "
                "freed, truncated or committed; use the plan that the last prepare_forward returned"
            )


# Return the rows and the blocks of a selection, as far as they are alive.
SelectedParts = tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]]


@dataclass(eq=False, slots=True)
class LayerProgress:
    """The parts of a layer that a forward has written, and the rows and blocks of its choices."""

    layer_idx: int
    has_window: bool = False
    has_entries: bool = False
    selected: list[SelectedParts] = field(default_factory=list)
