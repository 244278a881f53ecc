"""`PlanBuffers`: the arrays of a forward plan, at addresses that never change."""

from collections.abc import Callable

import numpy as np
import torch

from dsv4.cache.memory.arrays import Int64Array, IntArray
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.staging import Staging
from dsv4.kernels.contracts import Acceptance, TokenMap


class PlanBuffers:
    """The static buffers of a manager's plans, one packed run of int32 on host and device.

    Rows and tokens that a plan does not use read as padding, so a graph captured with a larger
    batch can run it. Padding rows have slot -1 and no tokens; padding tokens belong to the first
    such row, and padding chunks are it. One row more than a plan can use is always padding.

    On the CPU, host and device are the same memory. Elsewhere the changed elements of the block
    table travel with the plan, as pairs of flat index and value.

    Args:
        block_table: The block table on the device.
        rank_table: The same by rank, see `DeviceMemory`; plans read it.
        blocks: The blocks `[num_blocks, block_bytes]`; a plan may copy some.
        staging: Carries the buffers to the device; None if that is the same memory.
        first: The buffers of a manager's first device, whose host arrays those of the others share.
    """

    def __init__(
        self,
        capacity: Capacity,
        block_table: torch.Tensor,
        rank_table: torch.Tensor,
        blocks: torch.Tensor,
        staging: type[Staging] | None,
        *,
        first: "PlanBuffers | None" = None,
    ) -> None:
        max_requests, max_tokens = capacity.max_requests, capacity.max_forward_tokens
        max_table_updates = capacity.max_table_updates
        max_checkpoints = capacity.max_forward_checkpoints
        sizes = {  # int64 arrays first, because of their alignment
            "table_index": 2 * max_table_updates,
            "copy_rows": 4 * max_requests,
            "table_value": max_table_updates,
            "request_slots": max_requests + 1,
            "positions_before": max_requests + 1,
            "positions_after": max_requests + 1,
            "token_starts": max_requests + 1,
            "workspace_starts": max_requests + 1,
            "chunk_ids": max_requests,
            "num_read_only": max_requests,
            "positions": max_tokens,
            "request_ids": max_tokens,
            "checkpoint_points": 3 * max_checkpoints,
            "committed_rows": max_requests,
            "committed_counts": max_requests,
        }
        num_sent = sum(sizes.values())
        new: IntArray = np.zeros(num_sent + max_requests, dtype=np.int32)
        self._run: IntArray = new if first is None else first._run
        self._packed: IntArray = self._run[:num_sent]
        host = torch.from_numpy(self._run)
        self.packed = host if staging is None else torch.zeros_like(host, device=block_table.device)
        self._staging = None if staging is None else staging(self.packed[:num_sent])
        self.accepted = self.packed[num_sent:]  # the device's alone
        self.host: dict[str, IntArray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self.host[name] = self._packed[start : start + size]
            self.device[name] = self.packed[start : start + size]
            start += size
        self._block_table, self._flat_table = block_table, block_table.view(-1)
        self._rank_table = rank_table
        self._num_ranks = capacity.config.num_ranks
        self._own_columns = rank_table[:, capacity.config.rank :: self._num_ranks]
        self._max_updates = max_table_updates
        self._host_index = self.host.pop("table_index").view(np.int64)
        self._index = self.device.pop("table_index").view(torch.int64)
        self._host_value, self._value = self.host.pop("table_value"), self.device.pop("table_value")
        self._blocks = blocks
        self._host_copies = self.host.pop("copy_rows").view(np.int64).reshape(2, max_requests)
        self._copies = self.device.pop("copy_rows").view(torch.int64).view(2, max_requests)
        self._host_points = self.host.pop("checkpoint_points").reshape(max_checkpoints, 3)
        self._points = self.device.pop("checkpoint_points").view(max_checkpoints, 3)
        self._committed = self.device.pop("committed_rows"), self.device.pop("committed_counts")
        self._padded_to = 0
        self._padded_sizes = (-1, -1)
        self._pad(0, 0)
        self._token_map: TokenMap | None = None
        self._sizes = (0, 0, 0, 0)

    def token_map(self, batch: int, num_tokens: int, num_chunks: int, max_step: int) -> TokenMap:
        """Cut the buffers to a forward's size; a forward of the same size reuses the last cut."""
        sizes = (batch, num_tokens, num_chunks, max_step)
        if self._token_map is None or self._sizes != sizes:
            lengths: dict[str, int | None] = {
                "positions": num_tokens, "request_ids": num_tokens, "chunk_ids": num_chunks,
                "num_read_only": None,
            }  # fmt: skip
            self._sizes = sizes
            self._token_map = TokenMap(
                **{name: full[: lengths.get(name, batch)] for name, full in self.device.items()},
                block_table=self._rank_table,
                max_step=max_step,
            )
        return self._token_map

    def acceptance(self, batch: int) -> Acceptance:
        """Cut the records of the step before to a step's size."""
        return Acceptance(self.accepted, *(array[:batch] for array in self._committed))

    def reserve(self, num_tokens: int) -> None:
        """Pad at least that many tokens in every later plan: a captured graph reads them."""
        self._padded_to = max(self._padded_to, num_tokens)
        self._padded_sizes = (-1, -1)

    def start(self, batch: int, num_tokens: int) -> dict[str, IntArray]:
        """Return the host's arrays for a plan of this size, with padding where it uses none.

        Tokens are padded as far as an earlier plan or a captured graph reaches. A plan of the
        last one's size finds its padding in place, unless that was not uploaded.
        """
        sizes, self._padded_sizes = self._padded_sizes, (-1, -1)
        if sizes != (batch, num_tokens):
            self._pad(batch, num_tokens)
        return self.host

    def _pad(self, batch: int, num_tokens: int) -> None:
        host = self.host
        host["request_slots"][batch:] = -1
        host["positions_before"][batch:] = 0
        host["positions_after"][batch:] = 0
        host["token_starts"][batch:] = num_tokens
        host["workspace_starts"][batch:] = -1
        end = self._padded_to = max(self._padded_to, num_tokens)
        host["positions"][num_tokens:end] = 0
        host["request_ids"][num_tokens:end] = batch

    def note_checkpoints(self, points: list[tuple[int, int, int]]) -> torch.Tensor:
        """Store row, boundary and checkpoint of each point; return where the device has them.

        The other points are padding, which has no checkpoint.
        """
        count = len(points)
        if points:
            self._host_points[:count] = points
        self._host_points[count:, 2] = -1
        return self.points(count)

    def points(self, count: int) -> torch.Tensor:
        """Return where the device has the first points, as far as there are so many."""
        return self._points[:count]

    def upload(
        self,
        changed_blocks: Callable[[], tuple[Int64Array, IntArray]],
        sources: IntArray,
        targets: IntArray,
        sizes: tuple[int, int],
    ) -> None:
        """Queue the host's values, the block table's changes and copies of whole blocks.

        Args:
            changed_blocks: Returns flat indices and present values of the block table's changed
                elements; called only if the device has a table of its own.
            sources, targets: Blocks to copy, at most one per request.
            sizes: Rows and tokens that `start` was given.
        """
        num_copies = len(sources)
        if num_copies:
            self._host_copies[0, :num_copies] = sources
            self._host_copies[1, :num_copies] = targets
        if self._staging is not None:
            changed, values = changed_blocks()
            if len(changed) > self._max_updates:
                self._send_many(changed, values)
                changed = changed[:0]
            count = len(changed)
            self._host_index[:count], self._host_value[:count] = changed, values[:count]
            self._staging.send(self._packed)
            if count:
                self._flat_table.index_copy_(0, self._index[:count], self._value[:count])
        if self._num_ranks > 1:
            self._own_columns.copy_(self._block_table)
        self._padded_sizes = sizes
        if num_copies:
            rows, to = self._copies[:, :num_copies]
            self._blocks.index_copy_(0, to, self._blocks.index_select(0, rows))

    def _send_many(self, changed: Int64Array, values: IntArray) -> None:
        """Bring more elements than the buffers hold, after a long request came or went.

        Their memory is the caching allocator's, so nothing waits for an earlier upload.
        """
        pairs = torch.from_numpy(np.stack((changed, values.astype(np.int64))))
        if self._flat_table.is_cuda:
            pairs = pairs.pin_memory()
        index, ids = pairs.to(self._flat_table.device, non_blocking=True)
        self._flat_table.index_copy_(0, index, ids.to(torch.int32))
