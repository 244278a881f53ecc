"""`ForwardPlan`: one forward as data, in buffers whose addresses never change."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.cache.staging import IntArray, Staging
from dsv4.kernels.contracts import CapturePoints, TokenMap


class PlanBuffers:
    """The static buffers of a manager's plans, one packed run of int32 on host and device.

    All rows and tokens that a plan does not use read as padding, so that a graph captured with
    a larger batch can run it: rows have slot -1 and no tokens, tokens belong to the first such
    row. There is one row more than a plan can use, which is always padding.

    On the CPU host and device are the same memory. Elsewhere the block table's changed elements
    travel with the plan, as pairs of flat index and value.

    Args:
        max_requests, max_tokens: The most rows and tokens of a plan.
        max_table_updates: The most elements of the block table that one upload brings.
        max_captures: The most block boundaries that one forward checkpoints.
        host_table, table: The block table on host and device.
        blocks: The blocks `[num_blocks, block_bytes]`, of which a plan may copy some.
        staging: What carries the buffers to the device; None if that is the same memory.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        max_table_updates: int,
        max_captures: int,
        host_table: IntArray,
        table: torch.Tensor,
        blocks: torch.Tensor,
        staging: type[Staging] | None,
    ) -> None:
        sizes = {  # the int64 ones first, because of their alignment
            "table_index": 2 * max_table_updates,
            "copy_rows": 4 * max_requests,
            "table_value": max_table_updates,
            "request_slots": max_requests + 1,
            "positions_before": max_requests + 1,
            "positions_after": max_requests + 1,
            "token_starts": max_requests + 1,
            "workspace_starts": max_requests + 1,
            "chunk_ids": max_requests,
            "positions": max_tokens,
            "request_ids": max_tokens,
            "captures": 3 * max_captures,
        }
        self._packed: IntArray = np.zeros(sum(sizes.values()), dtype=np.int32)
        host = torch.from_numpy(self._packed)
        self.packed = host if staging is None else torch.zeros_like(host, device=table.device)
        self._staging = None if staging is None else staging(self.packed)
        self.host: dict[str, IntArray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self.host[name] = self._packed[start : start + size]
            self.device[name] = self.packed[start : start + size]
            start += size
        self._table_updates = _TableUpdates(
            host_table.reshape(-1), table.view(-1),
            self.host.pop("table_index").view(np.int64), self.host.pop("table_value"),
            self.device.pop("table_index").view(torch.int64), self.device.pop("table_value"),
        )  # fmt: skip
        self._copies = _BlockCopies(
            blocks,
            self.host.pop("copy_rows").view(np.int64).reshape(2, max_requests),
            self.device.pop("copy_rows").view(torch.int64).view(2, max_requests),
        )
        self._host_captures = self.host.pop("captures").reshape(max_captures, 3)
        self._captures = self.device.pop("captures").view(max_captures, 3)
        self._padded_to = 0
        self._padded_sizes = (-1, -1)
        self.pad(0, 0)
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

    def reserve(self, num_tokens: int) -> None:
        """From the next plan on, pad at least that many tokens: a captured graph reads them."""
        self._padded_to = max(self._padded_to, num_tokens)
        self._padded_sizes = (-1, -1)

    def pad(self, batch: int, num_tokens: int) -> None:
        """Make padding of all that a plan of this size does not use.

        Tokens are padded as far as an earlier plan or a captured graph reaches. A plan of the
        last one's size finds its padding in place.
        """
        if self._padded_sizes == (batch, num_tokens):
            return
        host = self.host
        host["request_slots"][batch:] = -1
        host["positions_before"][batch:] = 0
        host["positions_after"][batch:] = 0
        host["token_starts"][batch:] = num_tokens
        host["workspace_starts"][batch:] = -1
        end = self._padded_to = max(self._padded_to, num_tokens)
        host["positions"][num_tokens:end] = 0
        host["request_ids"][num_tokens:end] = batch
        self._padded_sizes = (batch, num_tokens)

    def note_blocks(self, flat_index: NDArray[np.int64]) -> None:
        """Elements of the host's block table have changed; the next upload brings them."""
        if self._staging is not None:
            self._table_updates.note(flat_index)

    def note_copies(self, sources: IntArray, targets: IntArray) -> None:
        """The next upload copies whole blocks, all at once; at most one per request."""
        self._copies.note(sources, targets)

    def note_captures(self, points: list[tuple[int, int, int]]) -> torch.Tensor:
        """Row, boundary and checkpoint of each capture; where the next upload brings them."""
        self._host_captures[: len(points)] = points
        return self._captures[: len(points)]

    def upload(self) -> None:
        """Queue the host's values, the block table's changes and copies of blocks."""
        if self._staging is not None:
            for num_updates in self._table_updates.take():
                self._staging.send(self._packed)
                self._table_updates.apply(num_updates)
        self._copies.apply()

    @property
    def noted_blocks(self) -> NDArray[np.int64]:
        """Flat indices of the block table's changes that the next upload brings."""
        return self._table_updates.noted


class _TableUpdates:
    """Changes of the block table on their way to the device, as flat indices and values."""

    def __init__(
        self,
        host_table: IntArray,
        table: torch.Tensor,
        host_index: NDArray[np.int64],
        host_value: IntArray,
        index: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        self._host_table, self._table = host_table, table
        self._host_index, self._host_value = host_index, host_value
        self._index, self._value = index, value
        self._changed: list[NDArray[np.int64]] = []

    @property
    def noted(self) -> NDArray[np.int64]:
        if not self._changed:
            return np.empty(0, dtype=np.int64)
        return np.concatenate(self._changed)

    def note(self, flat_index: NDArray[np.int64]) -> None:
        self._changed.append(flat_index)

    def take(self) -> Iterator[int]:
        """Write the noted changes to the buffers, as many at a time as fit; at least one round.

        An element that changed twice is there twice, both times with its present value.
        """
        changed = self.noted
        for start in range(0, max(len(changed), 1), len(self._host_index)):
            part = changed[start : start + len(self._host_index)]
            self._host_index[: len(part)] = part
            self._host_value[: len(part)] = self._host_table[part]
            yield len(part)
        self._changed.clear()

    def apply(self, num_updates: int) -> None:
        """Queue the uploaded changes: one launch, or none."""
        if num_updates:
            self._table.index_copy_(0, self._index[:num_updates], self._value[:num_updates])


class _BlockCopies:
    """Blocks that a plan copies before its forward writes them: `[2, n]`, sources and targets."""

    def __init__(
        self, blocks: torch.Tensor, host_rows: NDArray[np.int64], rows: torch.Tensor
    ) -> None:
        self._blocks, self._host_rows, self._rows = blocks, host_rows, rows
        self._count = 0

    def note(self, sources: IntArray, targets: IntArray) -> None:
        self._count = len(sources)
        self._host_rows[0, : self._count] = sources
        self._host_rows[1, : self._count] = targets

    def apply(self) -> None:
        """Queue the noted copies, if any."""
        if self._count:
            sources, targets = self._rows[:, : self._count]
            self._blocks.index_copy_(0, targets, self._blocks.index_select(0, sources))
            self._count = 0


@dataclass(eq=False)
class ForwardPlan:
    """What `prepare_forward` decided. Valid until the next plan of the same manager, or until
    one of its requests is freed or truncated.

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
        num_parts: How many layer parts a whole forward writes.
        captures: Block boundaries inside chunks that the layers checkpoint; None if there are none.
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
    captures: CapturePoints | None = None
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
        """Every layer was written by its handle, which also captures."""
        written = self._progress.layers.values()
        num_written = sum(layer.has_window + layer.has_entries for layer in written)
        return not self._progress.has_failed and num_written == self.num_parts

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
                "freed or truncated; use the plan that the last prepare_forward returned"
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
