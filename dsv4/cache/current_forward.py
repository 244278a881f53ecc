"""`CurrentForward`: the current plan, and the records in the books once it ends."""

import numpy as np
from torch import Tensor

from dsv4.cache.books import CacheBooks
from dsv4.cache.commit import StepCommit
from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.cache_memory import CacheMemory
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.plan import ForwardPlan
from dsv4.errors import LiveForwardError


class CurrentForward:
    """The last plan of a manager, until the next one.

    A plan is live until it is complete or cancelled. Only its requests have to wait for that.

    Attributes:
        committed: The last step whose accepted tokens the host does not know.
    """

    def __init__(self, capacity: Capacity, memory: CacheMemory, books: CacheBooks) -> None:
        self._books, self._journal = books, books.journal
        self._memory = memory
        self._block_tokens = capacity.config.block_tokens
        self._plan: ForwardPlan | None = None
        self._is_settled = True
        self._boundaries: list[tuple[int, int, int]] | None = []
        self.committed = StepCommit(capacity, memory, books)
        # Slots of the plan that were neither freed nor cut since.
        self._is_named = np.zeros(capacity.max_requests + 1, dtype=np.bool_)

    @property
    def live_plan(self) -> ForwardPlan | None:
        """The plan that is neither complete nor cancelled."""
        plan = self._plan
        return plan if plan is not None and plan.is_live else None

    @property
    def live_slots(self) -> IntArray:
        """The slots that the live plan names."""
        live = self.live_plan
        if live is None:
            return np.empty(0, dtype=np.int32)
        return live.request_slots[live.request_slots >= 0]

    @property
    def held_checkpoints(self) -> Int64Array:
        """The checkpoints that the live plan's requests would go back to."""
        plan = self._plan
        if plan is None or plan.survival is None or self._is_settled:
            return np.empty(0, dtype=np.int64)
        held = plan.survival.checkpoints
        return held[held >= 0]

    def start(self, plan: ForwardPlan, boundaries: list[tuple[int, int, int]] | None) -> None:
        """Make `plan` the current one.

        Args:
            boundaries: Row, slot and boundary that are checkpointed once it is complete; None to
                choose them then, since lengths are not known.
        """
        is_named = np.zeros(len(self._is_named), dtype=np.bool_)
        is_named[plan.request_slots] = True  # padding names the last one
        for name, value in (
            ("_is_named", is_named), ("_boundaries", boundaries), ("_is_settled", False),
            ("_plan", plan),
        ):  # fmt: skip
            self._journal.set_attribute(self, name, value)
        self._books.prefix.has_news = True

    def settle(self) -> None:
        """Record what a complete forward has made final: checkpoints and freed requests."""
        plan = self._plan
        if self._is_settled or plan is None or not plan.is_complete or self._follows_commit:
            return
        boundaries = self._boundaries
        if boundaries is None:
            boundaries = self.choose_boundaries(
                plan.request_slots.astype(np.int64), plan.positions_before.astype(np.int64),
                plan.positions_after.astype(np.int64), np.zeros(plan.num_requests, np.bool_),
            )  # fmt: skip
        for _, slot, boundary in boundaries:
            self.save_checkpoint(slot, boundary)
        with self._journal:
            self._end(plan, is_written=plan.is_written)

    @property
    def _follows_commit(self) -> bool:
        """Whether a plan was made after the step whose counts are not known."""
        step = self.committed.step
        return step is not None and step.plan is not self._plan

    def commit(self, plan: ForwardPlan, accepted: Tensor) -> None:
        """Keep the accepted tokens of a complete step; waits for those of the step before it.

        Requests that were freed or cut since are left as they are.
        """
        self._journal.finish()
        if plan is not self._plan or plan.is_cancelled or plan.is_committed:
            plan.check_current()
        self.committed.check(plan, accepted, self._rows_of(plan))
        self.settle_commit()
        self.settle()
        with self._journal:
            self.committed.start(plan, accepted, self._rows_of(plan))
            self._journal.set_attribute(plan, "is_committed", True)
            self._journal.set_attribute(plan, "is_retired", True)

    def _rows_of(self, plan: ForwardPlan) -> Int64Array:
        """Return the rows of the current plan whose requests are as it left them."""
        rows = plan.written_rows
        slots = plan.request_slots[rows]
        return rows[self._is_named[slots] & ~self._books.requests.is_closing[slots]]

    def settle_commit(self, slots: Int64Array | None = None) -> None:
        """Wait until every length is known, if these slots are in flight or wait for that."""
        if self.committed.step is None:
            return
        is_waiting = self._follows_commit and (slots is None or bool(self._is_named[slots].any()))
        if slots is not None and not is_waiting and not self.committed.names(slots):
            return
        with self._journal:
            self.committed.settle(self._plan)
        self.settle()

    def settle_older(self) -> None:
        """Wait for the counts of a step, unless it is the last one."""
        if self._follows_commit:
            self.settle_commit()

    def cancel(self, plan: ForwardPlan) -> None:
        """Undo a plan that is not complete; waits until its length before it is known."""
        self._journal.finish()
        if plan.is_cancelled or plan.is_retired:
            return
        if plan.is_complete:
            raise RuntimeError(
                "Cannot cancel a complete forward: expected one whose layers are not all written; "
                "truncate forgets its tokens"
            )
        self.settle_commit()
        with self._journal:
            self.undo(plan)

    def lose(self, plan: ForwardPlan) -> None:
        """Undo a plan whose results are lost, unless its end is in the books."""
        if not plan.is_complete or not self._is_settled:
            plan.forget_writes()
            self.cancel(plan)

    def undo(self, plan: ForwardPlan) -> None:
        """Undo a plan, as part of a change."""
        self._journal.set_attribute(plan, "is_cancelled", True)
        if plan is self._plan and plan.survival is not None:
            self._go_back(plan)
            self._end(plan, is_written=False)

    def _go_back(self, plan: ForwardPlan) -> None:
        """Give the requests of a plan the lengths that survive it."""
        books, memory, survival, rows = self._books, self._memory, plan.survival, plan.written_rows
        assert survival is not None
        slots, lengths = plan.request_slots[rows].astype(np.int64), survival.lengths[rows]
        num_read_only = survival.num_read_only[rows]
        is_cut = (lengths < plan.positions_before[rows]) | (
            num_read_only < books.requests.num_read_only[slots]
        )
        books.drop_blocks(slots, lengths, num_read_only)
        books.requests.set_floors(slots, survival.floors[rows])
        books.requests.renew(slots[is_cut])
        for row in rows[is_cut].tolist():
            num_blocks = int(survival.lengths[row]) // self._block_tokens
            books.prefix.give_up(
                int(plan.request_slots[row]), max(num_blocks, int(survival.num_read_only[row]))
            )
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if survival.undo_slots[row] >= 0:
                self._journal.after_commit(memory.load_undo, int(survival.undo_slots[row]), slot)
            elif survival.checkpoints[row] >= 0:
                self._journal.after_commit(
                    books.checkpoints.load, int(survival.checkpoints[row]), slot
                )

    def _end(self, plan: ForwardPlan, *, is_written: bool) -> None:
        """Give up what was held for a live plan."""
        books, requests = self._books, self._books.requests
        books.prefix.end_checkpoints(is_done=is_written)
        held = self.held_checkpoints
        if held.size:
            books.checkpoints.release(held)
        if requests.is_closing.any():
            # Another request may get the slots.
            closing = requests.is_closing.nonzero()[0]
            self._retire_for(plan, closing)
            books.close_slots(closing)
        books.wipe_undo(plan)
        self._journal.set_attribute(self, "_is_settled", True)

    def retire(self) -> None:
        """End the reads of the last plan, which is not live."""
        if self._plan is not None:
            self._plan.is_retired = True
            self._plan = None

    def retire_for(self, slots: Int64Array) -> None:
        """End the reads of the last plan if it names one of the slots."""
        if self._plan is not None and not self._plan.is_live and self._is_named[slots].any():
            self._retire_for(self._plan, slots)

    def _retire_for(self, plan: ForwardPlan, slots: Int64Array) -> None:
        self._journal.set_attribute(plan, "is_retired", True)
        self._journal.set_rows(self._is_named, slots, False)

    def truncate(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Cut open requests to these lengths: to a checkpoint where one lies below its floor."""
        books, requests = self._books, self._books.requests
        requests.check_cut(slots, lengths)
        self.check_idle(slots)
        present = requests.lengths[slots]
        is_below = (lengths > 0) & (lengths < np.minimum(requests.rollback_floor[slots], present))
        if is_below.any() or not lengths.all():
            self.publish()
        below = zip(slots[is_below].tolist(), lengths[is_below].tolist(), strict=True)
        loads = [(books.find_checkpoint(*each), each[0]) for each in below]
        with self._journal:
            is_shorter = lengths < present
            if is_shorter.any():
                self.retire_for(slots[is_shorter])
            books.shorten(slots, lengths)
            requests.renew(slots[is_below | (lengths == 0)])
            for checkpoint, slot in loads:
                self._journal.after_commit(books.checkpoints.load, checkpoint, slot)

    def final_tokens(self, slot: int) -> int:
        """Count the first tokens of a request that only a checkpoint or 0 can bring back.

        A cancel of its live chunk may bring the floor back too.
        """
        requests, plan = self._books.requests, self.live_plan
        limits = [int(requests.lengths[slot]), int(requests.rollback_floor[slot])]
        if plan is not None and slot in self.live_slots:
            row = np.flatnonzero(plan.request_slots == slot)[0]
            limits.append(int(plan.positions_before[row]))
            if plan.survival is not None and plan.survival.undo_slots[row] >= 0:
                limits.append(int(plan.survival.floors[row]))
        return min(limits)

    def publish(self) -> None:
        """Publish the full blocks that no forward can change."""
        prefix = self._books.prefix
        if not (prefix.requests and prefix.has_news):
            return
        live = self.live_slots
        lengths, step = self._books.requests.lengths, self.committed.step
        if step is not None or live.size:
            lengths = lengths.copy()
            lengths[live] = 0
        if step is not None:  # no step after it has made them longer for certain
            shortest = step.plan.positions_before[step.rows[step.slots]]
            lengths[step.slots] = np.minimum(lengths[step.slots], shortest)
        prefix.publish(lengths)
        prefix.has_news = live.size > 0

    def choose_boundaries(
        self, slots: Int64Array, before: Int64Array, after: Int64Array, is_chunk: BoolArray
    ) -> list[tuple[int, int, int]]:
        """Choose the boundaries to checkpoint; a replay's fixed state is right at its end."""
        prefix = self._books.prefix
        if not prefix.requests:
            return []
        start = np.maximum(before, self._books.requests.written_from(slots) - 1)
        return prefix.choose_boundaries(slots, start, after, is_chunk)

    def save_checkpoint(self, slot: int, boundary: int) -> None:
        """Checkpoint a tracked request, unless it has one there or none is left."""
        prefix, owners = self._books.prefix, self._books.checkpoints
        if slot not in prefix.requests or boundary in prefix.checkpoints_of(slot):
            return
        prefix.tree.make_checkpoint_room(1, uses=prefix.has_uses(slot, boundary))
        if not owners.num_free:
            prefix.num_skipped_checkpoints += 1
            return
        with self._journal:
            checkpoint = int(owners.acquire(1)[0])
            owners.save(checkpoint, slot)
            prefix.add_pending(slot, boundary, checkpoint)

    def checkpoint_fork(self, slot: int) -> None:
        """Checkpoint a forked request's last block boundary, if the policy says so.

        Its rows must not have been overwritten.
        """
        prefix, requests = self._books.prefix, self._books.requests
        boundary = int(requests.lengths[slot]) // self._block_tokens * self._block_tokens
        is_held = boundary >= requests.rollback_floor[slot]  # rejected tokens overwrite rows too
        if slot in prefix.requests and prefix.policy.at_forks and boundary and is_held:
            prefix.requests[slot].uses.setdefault(boundary // self._block_tokens, 1)
            self.save_checkpoint(slot, boundary)

    def check_idle(self, slots: Int64Array | None = None) -> None:
        """Refuse to go on while a plan is live, or one that writes these slots."""
        live = self.live_slots
        if not live.size or (slots is not None and not np.isin(live, slots).any()):
            return
        busy = live.tolist()
        raise LiveForwardError(
            f"A forward of slots {busy[:8]}{' and more' if len(busy) > 8 else ''} is live: run all "
            "of its layers, or call plan.complete() if they ran without handles, or plan.cancel(); "
            "the plan is manager.live_plan"
        )
