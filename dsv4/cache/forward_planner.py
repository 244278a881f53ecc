"""`ForwardPlanner`: decides one forward, between graphs, for any number of layers at once.

It is vectorised over requests and never waits for the device. It either returns a plan with every
block in place or raises with nothing changed.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.cache.books import CacheBooks
from dsv4.cache.current_forward import CurrentForward
from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray, read_only
from dsv4.cache.memory.cache_memory import CacheMemory
from dsv4.cache.memory.capacity import Capacity, blocks_for
from dsv4.cache.plan import ForwardPlan, Survival
from dsv4.checks import check_at_most, check_int, check_ints
from dsv4.errors import OutOfBlocksError
from dsv4.kernels.backends import load_backend
from dsv4.kernels.contracts import CheckpointPoints, TokenMap

Ints = Sequence[int] | NDArray[np.integer] | torch.Tensor


class BlockNeeds(NamedTuple):
    """The blocks that a forward takes.

    Attributes:
        grows: Rows that grow into new blocks, and `missing`, how many each.
        copies: Rows that write to a block with another owner, which they copy first.
        num_blocks: All of them.
    """

    grows: NDArray[np.intp]
    missing: Int64Array
    copies: NDArray[np.intp]
    num_blocks: int


class Rows(NamedTuple):
    """The rows of a forward, `[batch]` each.

    Attributes:
        slots: Request slots; -1 is a padding row.
        before, after: Lengths around it.
        counts: Tokens of each.
        is_real: Those that are not padding.
        is_chunk: Real ones with more tokens than a step.
        uncertain: Tokens before that the step before may have rejected; None if there are none.
    """

    slots: Int64Array
    before: Int64Array
    after: Int64Array
    counts: Int64Array
    is_real: BoolArray
    is_chunk: BoolArray
    uncertain: Int64Array | None


class ForwardPlanner:
    """Plans the forwards of one manager."""

    def __init__(
        self,
        capacity: Capacity,
        memory: CacheMemory,
        books: CacheBooks,
        forward: CurrentForward,
        *,
        backends: Sequence[str],
    ) -> None:
        self._capacity, self._config, self._backends = capacity, capacity.config, backends
        self._memory, self._books, self._forward = memory, books, forward
        self._buffers = [part.plan_buffers for part in memory.parts]
        self._nothing = read_only(np.full(capacity.max_requests, -1, dtype=np.int64))

    def prepare_step(self, request_slots: Ints, num_tokens: int) -> ForwardPlan:
        """Plan a step from lengths that only the device may know.

        Where their longest values do not fit, the host waits until it knows them.
        """
        capacity, forward = self._capacity, self._forward
        slots = check_ints(
            "request_slots", request_slots, at_least=-1, at_most=capacity.max_requests - 1
        )
        num_tokens = check_int(
            "num_tokens", num_tokens,
            at_least=1, at_most=capacity.max_step_tokens, limit="drafts_per_step + 1",
        )  # fmt: skip
        forward.settle_older()
        if capacity.max_step_tokens > self._config.block_tokens:
            forward.settle_commit()  # forks of the last step may share blocks behind its first one
        before = self._longest_lengths(slots)
        if before.max(initial=0) + num_tokens <= capacity.max_request_tokens:
            try:
                return self.prepare(slots, before, before + num_tokens)
            except OutOfBlocksError:
                if forward.committed.step is None:
                    raise
        forward.settle_commit()
        before = self._longest_lengths(slots)
        return self.prepare(slots, before, before + num_tokens)

    def _longest_lengths(self, slots: Int64Array) -> Int64Array:
        """Return the lengths of slots if every token is accepted; 0 for padding."""
        return np.where(slots >= 0, self._books.requests.lengths[slots], 0)

    def prepare(
        self, request_slots: Ints, positions_before: Ints, positions_after: Ints
    ) -> ForwardPlan:
        """Plan a forward; see `KVCacheManager.prepare_forward`."""
        rows = self._check_rows(
            check_ints("request_slots", request_slots),
            check_ints("positions_before", positions_before),
            check_ints("positions_after", positions_after),
        )
        batch, num_tokens = len(rows.slots), int(rows.counts.sum())
        check_at_most(self._capacity.max_requests, "requests in one forward", batch)
        check_at_most(self._capacity.max_forward_tokens, "tokens in one forward", num_tokens)
        self._forward.publish()
        real = slice(None) if rows.is_real.all() else rows.is_real
        real_slots, real_before, real_after = rows.slots[real], rows.before[real], rows.after[real]
        uncertain: Int64Array | int = 0 if rows.uncertain is None else rows.uncertain[real]
        real_before = real_before - uncertain  # entries may be written from there on
        needs = self.count_blocks(real_slots, real_before, real_after)
        has_chunks = bool(rows.is_chunk.any())
        chosen: list[tuple[int, int, int]] = []
        if rows.uncertain is None:
            chosen = self._forward.choose_boundaries(*rows[:3], rows.is_chunk)
        in_chunks = [each for each in chosen if rows.is_chunk[each[0]]]
        in_steps = [each for each in chosen if not rows.is_chunk[each[0]]]
        survival = self._plan_survival(rows, has_chunks=has_chunks)
        self._make_room(needs, len(real_slots), in_chunks, survival)
        self._forward.retire()
        with self._books.journal:
            sources, targets = self._take_blocks(needs, real_slots, real_before)
            self._books.requests.advance(real_slots, real_after, uncertain)
            if has_chunks:
                self._hold(rows.slots, survival)
            boundaries = self._take_checkpoints(in_chunks)
            num_chunks = self._fill_buffers(rows, num_tokens, has_chunks=has_chunks)
            max_step, requests = int(rows.counts.max(initial=0)), self._books.requests
            for buffers in self._buffers:
                buffers.upload(requests.changed_blocks, sources, targets, (batch, num_tokens))
            requests.forget_changes()
            sizes = (batch, num_tokens, num_chunks, max_step)
            tokens = [buffers.token_map(*sizes) for buffers in self._buffers]
            if rows.uncertain is not None:
                self._apply_accepted(tokens, batch)
            plan = ForwardPlan(
                owner=weakref.ref(self._forward),
                tokens=tokens[0],
                request_slots=rows.slots.astype(np.int32),
                positions_before=rows.before.astype(np.int32),
                positions_after=rows.after.astype(np.int32),
                num_tokens=num_tokens,
                longest=int(real_after.max(initial=0)),
                num_new_blocks=needs.num_blocks,
                has_workspace=num_chunks > 0,
                num_layer_writes=self._config.num_layer_writes,
                boundaries=boundaries[0],
                survival=survival,
                other_parts=tuple(zip(tokens[1:], boundaries[1:], strict=True)),
            )
            self._forward.start(plan, in_steps if rows.uncertain is None else None)
            return plan

    def padding_plan(
        self, num_rows: int, num_tokens: int, num_chunks: int, max_step: int, *, max_length: int
    ) -> ForwardPlan:
        """Plan a forward over the buffers as they are, sized for requests of `max_length`.

        It checkpoints as many boundaries as its chunks can have.
        """
        nothing, part = np.zeros(num_rows, dtype=np.int32), self._memory.parts[0]
        most = num_chunks + num_tokens // self._config.block_tokens if num_chunks else 0
        points = part.plan_buffers.points(most)
        return ForwardPlan(
            owner=weakref.ref(self._forward),
            tokens=self._buffers[0].token_map(num_rows, num_tokens, num_chunks, max_step),
            request_slots=nothing - 1,
            positions_before=nothing,
            positions_after=nothing,
            num_tokens=num_tokens,
            longest=max_length,
            num_new_blocks=0,
            has_workspace=num_chunks > 0,
            num_layer_writes=self._config.num_layer_writes,
            boundaries=CheckpointPoints(points, part.checkpoints) if len(points) else None,
        )

    def count_blocks(self, slots: Int64Array, before: Int64Array, after: Int64Array) -> BlockNeeds:
        """Find the blocks that a forward of these requests takes."""
        books = self._books
        need, have = blocks_for(self._config, after), books.requests.num_blocks[slots]
        grows = (need > have).nonzero()[0]
        copies = grows[:0]
        if books.allocator.num_shares:
            copies = self._find_copies(slots, before, after, have)
        missing = (need - have)[grows] if grows.size else need[:0]
        num_missing = int(missing.sum()) if grows.size else 0
        return BlockNeeds(grows, missing, copies, num_missing + len(copies))

    def _check_rows(self, slots: Int64Array, before: Int64Array, after: Int64Array) -> Rows:
        """Refuse rows that contradict each other or the requests."""
        if not slots.shape == before.shape == after.shape:
            raise ValueError(
                "Invalid shapes: expected request_slots, positions_before and positions_after of "
                f"equal length, got {len(slots)}, {len(before)} and {len(after)}"
            )
        requests, max_requests = self._books.requests, self._capacity.max_requests
        check_ints("request_slots", slots, at_least=-1, at_most=max_requests - 1)
        counts, is_real = after - before, slots >= 0
        mine = slots[is_real]
        requests.check_open(mine, "request_slots")
        self._forward.check_idle()
        is_wrong = before[is_real] != requests.lengths[mine]
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise ValueError(
                f"Invalid positions_before: expected {requests.lengths[mine[row]]}, the length of "
                f"slot {mine[row]}, got {before[is_real][row]}"
            )
        if counts.min(initial=0) < 0 or before.min(initial=0) < 0:
            row = int(((after < before) | (before < 0)).argmax())
            raise ValueError(
                "Invalid positions: expected 0 <= positions_before <= positions_after, "
                f"got {before[row]} and {after[row]} in row {row}"
            )
        longest = int(after.max(initial=0))
        check_at_most(self._capacity.max_request_tokens, "tokens in one request", longest)
        is_chunk = (counts > self._capacity.max_step_tokens) & is_real
        step = self._forward.committed.step
        uncertain = None if step is None else step.counts[slots]
        if uncertain is not None and not uncertain.any():
            uncertain = None
        return Rows(slots, before, after, counts, is_real, is_chunk, uncertain)

    def _find_copies(
        self, slots: Int64Array, before: Int64Array, after: Int64Array, have: Int64Array
    ) -> NDArray[np.intp]:
        """Find the rows of requests that write to a block with another owner.

        If all owners of a block write to it in this forward, the last of them keeps it.
        """
        ratio, start = self._config.smallest_ratio, self._first_written(slots, before)
        columns = start // self._config.block_tokens
        rows = ((start // ratio < after // ratio) & (columns < have)).nonzero()[0]
        if not rows.size:
            return rows
        ids = self._books.requests.block_table[slots[rows], columns[rows]]
        if not (self._books.allocator.num_owners[ids] > 1).any():
            return rows[:0]
        order = np.argsort(ids, kind="stable")
        rows, ids = rows[order], ids[order]
        num_before = np.arange(len(ids)) - np.searchsorted(ids, ids)  # writers of the same block
        return rows[num_before < self._books.allocator.num_owners[ids] - 1]

    def _plan_survival(self, rows: Rows, *, has_chunks: bool) -> Survival:
        """Decide what a cancelled forward leaves of each request.

        A step overwrites no row that a query at the old length reads. A chunk may: it goes back to
        a checkpoint at that length, to an undo slot (the longest first), to an earlier checkpoint,
        or to 0. A replay goes back to its halo's start, if that is later.
        """
        requests, block_tokens = self._books.requests, self._config.block_tokens
        slots, before = rows.slots, rows.before.copy()
        floors, num_read_only = requests.rollback_floor[slots], requests.num_read_only[slots]
        lowest = rows.after - self._capacity.max_step_tokens  # at most the length before a step
        if rows.uncertain is not None:
            lowest = lowest - rows.uncertain
        none = self._nothing[: len(slots)]
        if not has_chunks:
            return Survival(before, np.maximum(floors, lowest), none, none, num_read_only)
        lowest = np.maximum(floors, np.minimum(before, lowest))
        survival = Survival(before, lowest, none.copy(), none.copy(), num_read_only)
        free = list(range(self._capacity.num_undo_slots))
        chunks = np.flatnonzero(rows.is_chunk & (before > 0))
        for row in chunks[np.argsort(-before[chunks], kind="stable")].tolist():
            slot, length = int(slots[row]), int(before[row])
            held, end = self._held_checkpoint(slot, length), int(num_read_only[row]) * block_tokens
            halo_start = end - self._config.halo_tokens if length < end else 0
            if held[0] < length and free:
                survival.undo_slots[row] = free.pop(0)
                survival.floors[row] = floors[row]
            elif halo_start > held[0]:
                survival.lengths[row] = halo_start
            else:
                survival.lengths[row] = survival.floors[row] = held[0]
                survival.checkpoints[row] = held[1]
                num_read_only[row] = min(num_read_only[row], held[0] // block_tokens)
        return survival

    def _held_checkpoint(self, slot: int, length: int) -> tuple[int, int]:
        """Return the longest length up to `length` with a checkpoint, and that; 0, -1 for none."""
        known = self._books.prefix.checkpoints_of(slot).items()
        return max(((end, each) for end, each in known if end <= length), default=(0, -1))

    def _make_room(
        self,
        needs: BlockNeeds,
        num_requests: int,
        in_chunks: list[tuple[int, int, int]],
        survival: Survival,
    ) -> None:
        """Evict what the forward needs the room of; each eviction is a change of its own."""
        if needs.num_blocks:
            self._books.make_room(
                needs.num_blocks,
                note=f"; in this forward {len(needs.grows)} of {num_requests} requests grow into "
                f"new blocks, {len(needs.copies)} copy one that they share",
            )
        if in_chunks:
            prefix, most = self._books.prefix, self._capacity.max_forward_checkpoints
            with_uses = sum(prefix.has_uses(slot, boundary) for _, slot, boundary in in_chunks)
            for count, uses in ((with_uses, True), (len(in_chunks), False)):
                prefix.tree.make_checkpoint_room(min(count, most), survival.checkpoints, uses=uses)

    def _take_blocks(
        self, needs: BlockNeeds, slots: Int64Array, before: Int64Array
    ) -> tuple[IntArray, IntArray]:
        """Give each request its blocks; return sources and targets of those to copy."""
        books, num_blocks = self._books, needs.num_blocks
        none = np.empty(0, dtype=np.int32)
        if not num_blocks:
            return none, none
        ids = books.acquire_blocks(num_blocks)
        num_fresh = num_blocks - len(needs.copies)
        fresh, targets = ids[:num_fresh], ids[num_fresh:]
        books.requests.append_blocks(slots[needs.grows], needs.missing, fresh)
        if not targets.size:
            return none, none
        start = self._first_written(slots, before)[needs.copies]
        columns = start // self._config.block_tokens
        return books.replace_blocks(slots[needs.copies], columns, targets), targets

    def _first_written(self, slots: Int64Array, before: Int64Array) -> Int64Array:
        """Return the position from which a forward of each request writes entries."""
        return np.maximum(before, self._books.requests.written_from(slots))

    def _hold(self, slots: Int64Array, survival: Survival) -> None:
        """Copy what a chunk would overwrite, and own the checkpoints that it may go back to."""
        held = survival.checkpoints[survival.checkpoints >= 0]
        if held.size:
            self._books.checkpoints.share(held)
        for row in np.flatnonzero(survival.undo_slots >= 0).tolist():
            self._memory.save_undo(int(survival.undo_slots[row]), int(slots[row]))

    def _apply_accepted(self, tokens: list[TokenMap], batch: int) -> None:
        """Let each device find the lengths after the step before."""
        for buffers, each, backend in zip(self._buffers, tokens, self._backends, strict=True):
            with self._memory.on_device(each.positions.device):
                load_backend(backend).apply_accepted(buffers.acceptance(batch), each)

    def _take_checkpoints(
        self, in_chunks: list[tuple[int, int, int]]
    ) -> list[CheckpointPoints] | list[None]:
        """Take checkpoints for the boundaries inside chunks, as far as there are any."""
        prefix, parts = self._books.prefix, self._memory.parts
        most, points = self._capacity.max_forward_checkpoints, []
        if in_chunks:
            points = prefix.plan_checkpoints(in_chunks, most)
        noted = [part.plan_buffers.note_checkpoints(points) for part in parts] if most else []
        if not points:
            return [None] * len(parts)
        return [
            CheckpointPoints(each, part.checkpoints)
            for each, part in zip(noted, parts, strict=True)
        ]

    def _fill_buffers(self, rows: Rows, num_tokens: int, *, has_chunks: bool) -> int:
        """Write the plan's arrays and return the number of chunks."""
        slots, before, after, counts, _, is_chunk, uncertain = rows
        batch, num_chunks = len(slots), 0
        host = self._buffers[0].start(batch, num_tokens)
        num_ranks = self._config.num_ranks  # blocks of the table that kernels read
        np.multiply(self._books.requests.num_read_only, num_ranks, host["num_read_only"],
                    casting="unsafe")  # fmt: skip
        host["request_slots"][:batch] = slots
        host["positions_before"][:batch] = before
        host["positions_after"][:batch] = after
        host["workspace_starts"][:batch] = -1
        step = self._forward.committed.step
        if uncertain is not None and step is not None:
            host["committed_rows"][:batch] = step.rows[slots]
            host["committed_counts"][:batch] = uncertain
        if has_chunks:  # whose rings cannot be read back
            chunks = np.flatnonzero(is_chunk)
            num_chunks = len(chunks)
            widths = counts[chunks] + (self._config.sliding_window - 1)
            host["workspace_starts"][chunks] = np.cumsum(widths) - widths
            host["chunk_ids"][:num_chunks] = chunks
        host["chunk_ids"][num_chunks:] = batch  # the first padding row
        ids = np.arange(batch)
        if num_tokens == batch == np.count_nonzero(counts):  # plain decode: one token each
            host["request_ids"][:batch] = host["token_starts"][:batch] = ids
            host["positions"][:batch] = before
        else:
            first_token = counts.cumsum() - counts
            host["token_starts"][:batch] = first_token
            ids = ids.repeat(counts)
            host["request_ids"][:num_tokens] = ids
            host["positions"][:num_tokens] = np.arange(num_tokens) + (before - first_token)[ids]
        return num_chunks
