"""`PrefixCache`: the token ids of open requests, and the blocks they publish for later requests.

It publishes a full block once none of its tokens can be rejected, and decides where checkpoints are
taken. The tree of published blocks is `prefix_tree`'s, the bytes are the pools'.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.prefix.prefix_tree import PrefixNode, PrefixTree, hash_blocks, root_digest
from dsv4.config import CacheConfig
from dsv4.errors import OutOfBlocksError

TokenIds = Sequence[int] | NDArray[np.integer]
ID_DTYPE = np.dtype("<i4")
ID_LIMITS = np.iinfo(np.int32)


class PrefixHit(NamedTuple):
    """A slot opened by `resume_request`, and the number of its tokens that were found."""

    slot: int
    num_tokens: int


class Prefix(NamedTuple):
    """The first blocks of a request, and the checkpoint at their end; -1 for none."""

    nodes: list[PrefixNode]
    checkpoint: int


class PlannedCheckpoint(NamedTuple):
    """A boundary inside a chunk that a forward checkpoints."""

    row: int
    slot: int
    boundary: int
    checkpoint: int


@dataclass(eq=False)
class TrackedRequest:
    """An open request whose token ids are known.

    Attributes:
        root: The start of its chain of hashes.
        ids: int32, from position 0 on; the first `num_known` are known.
        num_prompt_tokens: Ids that were given as its prompt.
        digests: The hashes of its first blocks, as far as they were needed.
        nodes: Its published blocks, the first of its row of the block table.
        pending: Its checkpoints that are not published yet, by boundary.
    """

    root: bytes
    ids: IntArray
    num_known: int
    num_prompt_tokens: int = 0
    digests: list[bytes] = field(default_factory=list)
    nodes: list[PrefixNode] = field(default_factory=list)
    pending: dict[int, int] = field(default_factory=dict)

    def new_digests(self, block_tokens: int) -> Iterator[bytes]:
        """Hash the full blocks that have no hash yet, lazily."""
        width = block_tokens * ID_DTYPE.itemsize
        known = self.ids[: self.num_known].data.cast("B")
        previous = self.digests[-1] if self.digests else self.root
        for digest in hash_blocks(previous, known[len(self.digests) * width :], width):
            self.digests.append(digest)
            yield digest

    def extend(self, ids: IntArray) -> None:
        """Add ids behind the known ones."""
        end = self.num_known + len(ids)
        if end > len(self.ids):
            larger = np.empty(2 * end, dtype=ID_DTYPE)
            larger[: self.num_known] = self.ids[: self.num_known]
            self.ids = larger
        self.ids[self.num_known : end] = ids
        self.num_known = end

    def copy(self) -> "TrackedRequest":
        """Copy the record for a fork."""
        return TrackedRequest(
            self.root, self.ids[: self.num_known].copy(), self.num_known, self.num_prompt_tokens,
            list(self.digests), list(self.nodes), dict(self.pending),
        )  # fmt: skip


class PrefixCache:
    """Records of open requests, and the publication of their blocks and checkpoints.

    Args:
        max_requests: Slots of the manager.
        blocks, checkpoints: Their owners.
        block_table: The host's, `[max_requests, max_blocks]`.
        set_blocks: Writes block ids to a row of the block table: slot, columns, ids.
    """

    def __init__(
        self,
        config: CacheConfig,
        policy: CheckpointPolicy,
        tree: PrefixTree,
        *,
        max_requests: int,
        blocks: BlockAllocator,
        checkpoints: BlockAllocator,
        block_table: IntArray,
        set_blocks: Callable[[int, Int64Array, IntArray], None],
    ) -> None:
        self.tree = tree
        self.policy = policy
        self.requests: dict[int, TrackedRequest] = {}
        self.num_lookups = 0
        self.num_hits = 0
        self.num_asked_tokens = 0
        self.num_hit_tokens = 0
        self.num_skipped_checkpoints = 0
        self._config = config
        self._blocks, self._checkpoints = blocks, checkpoints
        self._block_table, self._set_blocks = block_table, set_blocks
        self._num_known: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._num_published: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._planned: list[PlannedCheckpoint] = []

    def new_request(self, token_ids: TokenIds, salt: bytes) -> TrackedRequest:
        """Make the record of a prompt."""
        if not isinstance(salt, bytes):
            raise TypeError(f"Invalid salt: expected bytes, got {type(salt).__name__}")
        ids = as_token_ids(token_ids)
        root = root_digest(self._config.format_fingerprint, salt)
        return TrackedRequest(root, ids, len(ids), len(ids))

    def track(self, slot: int, request: TrackedRequest) -> None:
        """Track a request in a slot."""
        self.requests[slot] = request
        self._update(slot)

    def note_tokens(self, slot: int, token_ids: TokenIds, start: int) -> None:
        """Extend the known ids of a slot; start to track one that was not, without salt."""
        ids = as_token_ids(token_ids)
        request = self.requests.get(slot)
        num_known = 0 if request is None else request.num_known
        if start != num_known:
            raise ValueError(
                f"Invalid start: expected {num_known}, the number of ids known of slot {slot}, "
                f"got {start}"
            )
        if request is None:
            request = self.requests[slot] = self.new_request(ids[:0], b"")
        request.extend(ids)
        self._update(slot)

    def find(self, request: TrackedRequest, acquire: Callable[[int], IntArray]) -> Prefix:
        """Find the longest beginning of a prompt with a checkpoint; share its blocks on the device.

        One token at least is left to run.

        Args:
            acquire: Takes blocks for those that must come back from the host. If it raises
                `OutOfBlocksError`, a shorter beginning is taken.
        """
        path = self._known_path(request)
        while path and path[-1].checkpoint < 0:
            path.pop()
        self.num_lookups += 1
        self.num_asked_tokens += request.num_known
        while path:
            if self._bring(path, acquire):
                self.num_hits += 1
                self.num_hit_tokens += len(path) * self._config.block_tokens
                self.tree.touch(path[-1])
                return Prefix(path, self.tree.use_checkpoint(path[-1]))
            path.pop()
            while path and path[-1].checkpoint < 0:
                path.pop()
        return Prefix([], -1)

    def plan_checkpoints(
        self,
        slots: Int64Array,
        before: Int64Array,
        after: Int64Array,
        *,
        max_checkpoints: int,
    ) -> list[tuple[int, int, int]]:
        """Choose the boundaries that this forward's chunks checkpoint: row, boundary, checkpoint.

        Args:
            slots, before, after: Slots and lengths of all rows; a row without a chunk has slot -1.
        """
        first, last = before // self._config.block_tokens + 1, after // self._config.block_tokens
        for row in np.flatnonzero((slots >= 0) & (first <= last)).tolist():
            slot = int(slots[row])
            for block in reversed(self._chosen(slot, int(first[row]), int(last[row]))):
                checkpoint = None
                if len(self._planned) < max_checkpoints:
                    checkpoint = self.tree.take_checkpoint()
                if checkpoint is None:
                    self.num_skipped_checkpoints += 1
                    continue
                boundary = block * self._config.block_tokens
                self._planned.append(PlannedCheckpoint(row, slot, boundary, checkpoint))
        return [(each.row, each.boundary, each.checkpoint) for each in self._planned]

    def end_checkpoints(self, *, is_done: bool) -> None:
        """The forward that was to take them is over: they are pending, or were not taken."""
        for planned in self._planned:
            if is_done:
                self.requests[planned.slot].pending[planned.boundary] = planned.checkpoint
            else:
                self._checkpoints.release(np.array([planned.checkpoint]))
        self._planned.clear()

    def passed_boundaries(
        self, slots: IntArray, before: IntArray, after: IntArray
    ) -> list[tuple[int, int]]:
        """Choose the boundaries that a forward without chunks has passed: slot, boundary."""
        first, last = before // self._config.block_tokens + 1, after // self._config.block_tokens
        rows = np.flatnonzero((slots >= 0) & (first <= last)).tolist()
        return [
            (int(slots[row]), block * self._config.block_tokens)
            for row in rows
            for block in self._chosen(int(slots[row]), int(first[row]), int(last[row]))
        ]

    def take_pending(self, slot: int, boundary: int) -> int | None:
        """Take a checkpoint for a boundary of a slot; None if it has one or none is left."""
        request = self.requests[slot]
        if self.checkpoint_at(slot, boundary) is not None:
            return None
        checkpoint = self.tree.take_checkpoint()
        if checkpoint is None:
            self.num_skipped_checkpoints += 1
        else:
            request.pending[boundary] = checkpoint
        return checkpoint

    def publish(self, lengths: Int64Array, is_torn: BoolArray) -> None:
        """Publish every full block that is `drafts_per_step` tokens behind its request's end."""
        final = np.minimum(lengths - self._config.drafts_per_step, self._num_known)
        num_final = final // self._config.block_tokens
        for slot in np.flatnonzero((num_final > self._num_published) & ~is_torn).tolist():
            self._publish(slot, int(num_final[slot]))

    def checkpoint_at(self, slot: int, boundary: int) -> int | None:
        """Return the checkpoint of a request's boundary; None if there is none."""
        request = self.requests.get(slot)
        if request is None or boundary % self._config.block_tokens:
            return None
        if boundary in request.pending:
            return request.pending[boundary]
        num_blocks = boundary // self._config.block_tokens
        if not 0 < num_blocks <= len(request.nodes):
            return None
        node = request.nodes[num_blocks - 1]
        return self.tree.use_checkpoint(node) if node.checkpoint >= 0 else None

    def checkpointed_lengths(self, slot: int) -> list[int]:
        """Return the boundaries of a request that have a checkpoint."""
        request = self.requests.get(slot)
        if request is None:
            return []
        published = (
            (number + 1) * self._config.block_tokens
            for number, node in enumerate(request.nodes)
            if node.checkpoint >= 0
        )
        return sorted({*published, *request.pending})

    def pending_checkpoints(self) -> list[int]:
        """Return the checkpoints that requests and the current forward own."""
        pending = [each for request in self.requests.values() for each in request.pending.values()]
        return pending + [planned.checkpoint for planned in self._planned]

    def cut(self, slot: int, length: int) -> None:
        """Forget a request's ids from `length` on, with their hashes, nodes and checkpoints."""
        request = self.requests.get(slot)
        if request is None:
            return
        num_blocks = length // self._config.block_tokens
        self._give_up(request, num_blocks)
        request.num_known = min(request.num_known, length)
        request.num_prompt_tokens = min(request.num_prompt_tokens, length)
        del request.digests[num_blocks:]
        self._update(slot)

    def copy(self, slot: int, fork: int) -> None:
        """Track a fork with the same ids, blocks and pending checkpoints."""
        request = self.requests.get(slot)
        if request is None:
            return
        self._checkpoints.share(np.array(list(request.pending.values()), dtype=np.int32))
        self.track(fork, request.copy())

    def forget(self, slot: int) -> TrackedRequest | None:
        """Stop tracking a slot; return the record of its tokens alone."""
        request = self.requests.pop(slot, None)
        self._num_known[slot] = self._num_published[slot] = 0
        if request is not None:
            self._give_up(request, 0)
        return request

    def _known_path(self, request: TrackedRequest) -> list[PrefixNode]:
        """Return the nodes of a prompt's first blocks; at least one token is left over."""
        path, block_tokens = [], self._config.block_tokens
        num_blocks = max(0, (request.num_known - 1) // block_tokens)
        for digest in islice(request.new_digests(block_tokens), num_blocks):
            node = self.tree.nodes.get(digest)
            if node is None:
                break
            path.append(node)
        return path

    def _bring(self, path: list[PrefixNode], acquire: Callable[[int], IntArray]) -> bool:
        """Restore the blocks of a path from the host and share all; False if there is no room."""
        on_device = [node for node in path if node.block >= 0]
        on_host = path[len(on_device) :]
        blocks = np.array([node.block for node in on_device], dtype=np.int32)
        self._blocks.share(blocks)
        self.tree.pin(on_host)
        try:
            restored = acquire(len(on_host))
        except OutOfBlocksError:
            self._blocks.release(blocks)
            return False
        finally:
            self.tree.pin(on_host, is_pinned=False)
        self.tree.restore(on_host, restored)
        self._blocks.share(restored)
        return True

    def _chosen(self, slot: int, first: int, last: int) -> list[int]:
        request = self.requests.get(slot)
        if request is None:
            return []
        prompt_blocks = request.num_prompt_tokens // self._config.block_tokens
        return self.policy.chosen(first, last, prompt_blocks=prompt_blocks)

    def _publish(self, slot: int, num_final: int) -> None:
        request, block_tokens = self.requests[slot], self._config.block_tokens
        first = len(request.nodes)
        columns = np.arange(first, num_final)
        for _ in islice(
            request.new_digests(block_tokens), max(0, num_final - len(request.digests))
        ):
            pass
        digests = request.digests[first:num_final]
        mine = self._block_table[slot, first:num_final].copy()
        parent = request.nodes[-1] if request.nodes else None
        nodes = self.tree.add(digests, parent, mine)
        self._adopt(slot, columns, mine, np.array([node.block for node in nodes], dtype=np.int32))
        request.nodes += nodes
        self._num_published[slot] = num_final
        for boundary in [each for each in request.pending if each <= num_final * block_tokens]:
            node = request.nodes[boundary // block_tokens - 1]
            self.tree.give_checkpoint(node, request.pending.pop(boundary))

    def _adopt(self, slot: int, columns: Int64Array, mine: IntArray, known: IntArray) -> None:
        """Replace own blocks by those that were published before with the same tokens."""
        is_other = mine != known
        if is_other.any():
            self._blocks.share(known[is_other])
            self._set_blocks(slot, columns[is_other], known[is_other])
            self._blocks.release(mine[is_other])

    def _give_up(self, request: TrackedRequest, num_blocks: int) -> None:
        """Keep the nodes of the first blocks, and the pending checkpoints up to there."""
        if len(request.nodes) > num_blocks:
            self.tree.touch(request.nodes[-1])
            del request.nodes[num_blocks:]
        limit = num_blocks * self._config.block_tokens
        for boundary in [each for each in request.pending if each > limit]:
            self._checkpoints.release(np.array([request.pending.pop(boundary)]))

    def _update(self, slot: int) -> None:
        request = self.requests[slot]
        self._num_known[slot] = request.num_known
        self._num_published[slot] = len(request.nodes)


def as_token_ids(values: TokenIds) -> IntArray:
    """Copy token ids to little-endian int32, as they are hashed."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"Invalid shape of token ids: expected one axis, got {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Invalid dtype of token ids: expected integers, got {array.dtype}")
    if array.size and not ID_LIMITS.min <= array.min() <= array.max() <= ID_LIMITS.max:
        raise ValueError(
            f"Invalid token ids: expected 32-bit signed integers, "
            f"got {array.min()} to {array.max()}"
        )
    return array.astype(ID_DTYPE)
