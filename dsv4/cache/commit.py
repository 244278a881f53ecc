"""`StepCommit`: a step whose accepted tokens the device knows, and the host not yet.

Until then the books hold its requests as if all tokens were accepted: their longest lengths, and
blocks for these. The rollback floor follows from their shortest lengths.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.books import CacheBooks
from dsv4.cache.layer_checks import check_tensor
from dsv4.cache.memory.accepted_counts import AcceptedCounts
from dsv4.cache.memory.arrays import Int64Array
from dsv4.cache.memory.cache_memory import CacheMemory
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.plan import ForwardPlan


class Committed(NamedTuple):
    """The step in flight.

    Attributes:
        plan: Its plan, whose lengths before are known.
        slots: Its requests.
        rows, counts: `[max_requests + 1]`, the row and the tokens of each slot; -1 and 0 for
            others, and for padding.
        num_ids: The token ids known of each of the requests.
    """

    plan: ForwardPlan
    slots: Int64Array
    rows: Int64Array
    counts: Int64Array
    num_ids: Int64Array


class StepCommit:
    """The last commit of a manager, until the host knows its counts.

    Attributes:
        step: The step; None if every length is known.
    """

    def __init__(self, capacity: Capacity, memory: CacheMemory, books: CacheBooks) -> None:
        self._books, self._journal = books, books.journal
        self._max_requests, self._max_step = capacity.max_requests, capacity.max_step_tokens
        self._accepted = AcceptedCounts(*(part.plan_buffers.accepted for part in memory.parts))
        self.step: Committed | None = None

    def names(self, slots: Int64Array) -> bool:
        """Whether the length of one of these slots is not known."""
        return self.step is not None and bool(self.step.counts[slots].any())

    def check(self, plan: ForwardPlan, accepted: Tensor, rows: Int64Array) -> None:
        """Refuse a plan that cannot be committed, and counts that don't fit its rows."""
        if not plan.is_complete:
            raise RuntimeError("Cannot commit a forward whose layers are not all written")
        shape, device = (plan.num_requests,), self._accepted.counts.device
        check_tensor("accepted", accepted, shape, (torch.int32, torch.int64), device)
        if plan.has_workspace:
            raise ValueError(
                f"Cannot commit a forward with a chunk: expected at most {self._max_step} tokens "
                f"in a row, got {plan.tokens.max_step}; truncate forgets its last ones"
            )
        slots, before = plan.request_slots[rows].astype(np.int64), plan.positions_before[rows]
        is_replay = before < self._books.requests.written_from(slots)
        if is_replay.any():
            raise ValueError(
                f"Cannot commit a replay: expected requests that have replayed their known tokens, "
                f"got slot {slots[is_replay][0]} at {before[is_replay][0]}"
            )

    def start(self, plan: ForwardPlan, accepted: Tensor, written: Int64Array) -> None:
        """Commit rows of a plan whose lengths are known, as part of a change."""
        slots, prefix = plan.request_slots[written].astype(np.int64), self._books.prefix
        before = plan.positions_before[written].astype(np.int64)
        rows = np.full(self._max_requests + 1, -1, dtype=np.int64)
        counts = np.zeros(self._max_requests + 1, dtype=np.int64)
        rows[slots], counts[slots] = written, plan.positions_after[written] - before
        if accepted.dtype == torch.int64:
            accepted = accepted.clamp(0, self._max_step)  # before it is made int32
        self._accepted.send(accepted)
        prefix.drop_nodes(slots, before)  # the next step may write behind its shortest length
        num_ids = prefix.ids.num_known[slots]
        step = Committed(plan, slots, rows, counts, num_ids) if slots.size else None
        self._journal.set_attribute(self, "step", step)

    def settle(self, current: ForwardPlan | None) -> None:
        """Wait for the counts, and give the requests their lengths, as part of a change.

        Args:
            current: The manager's current plan, which may follow the step.
        """
        step, requests = self.step, self._books.requests
        assert step is not None
        counts, rows = step.counts[step.slots], step.rows[step.slots]
        accepted = np.clip(self._accepted.wait()[rows], 0, counts)
        rejected = np.zeros_like(step.counts)
        rejected[step.slots] = counts - accepted
        lengths = requests.lengths[step.slots] - rejected[step.slots]
        self._books.drop_blocks(step.slots, lengths, requests.num_read_only[step.slots])
        kept = step.plan.positions_before[rows] + accepted
        self._books.prefix.cut_blocks(step.slots, kept)
        is_cut = step.num_ids > kept  # ids that were noted since are of tokens to come
        self._books.prefix.ids.cut(step.slots[is_cut], kept[is_cut])
        self._books.prefix.has_news = True
        if current is not None and current is not step.plan:
            self._settle_plan(step, current, rejected)
        self._journal.set_attribute(self, "step", None)

    def _settle_plan(self, step: Committed, plan: ForwardPlan, rejected: Int64Array) -> None:
        """Give a plan that follows the step its lengths: all arrays as if planned with them."""
        survival, slots = plan.survival, plan.request_slots.astype(np.int64)
        assert survival is not None
        for array in (plan.positions_before, plan.positions_after, survival.lengths):
            self._journal.set_rows(array, slice(None), array - rejected[slots])
        after = plan.positions_after.astype(np.int64)
        floors = np.maximum(survival.floors, after - self._max_step)
        self._journal.set_rows(survival.floors, slice(None), floors)
        follows = plan.written_rows[step.counts[slots[plan.written_rows]] > 0]
        self._books.requests.raise_floors(slots[follows], after[follows])
