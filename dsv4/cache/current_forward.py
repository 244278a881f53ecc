"""`CurrentForward`: the current plan, and the records in the books once it is complete."""

import numpy as np

from dsv4.cache.books import CacheBooks
from dsv4.cache.memory.arrays import BoolArray, Int64Array
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.device_memory import DeviceMemory
from dsv4.cache.plan import ForwardPlan
from dsv4.errors import TornForwardError


class CurrentForward:
    """The last plan of a manager, until it ends.

    A plan is complete when every layer is written. A request is torn if its plan ended before.
    """

    def __init__(self, capacity: Capacity, memory: DeviceMemory, books: CacheBooks) -> None:
        self._books = books
        self._memory = memory
        self._max_step_tokens = capacity.max_step_tokens
        self._block_tokens = capacity.config.block_tokens
        self._all_slots = np.arange(capacity.max_requests)
        self._plan: ForwardPlan | None = None
        self._is_settled = True

    @property
    def is_incomplete(self) -> bool:
        """The plan adds tokens, and some layer has not been written."""
        plan = self._plan
        return plan is not None and not plan.is_complete and plan.written_slots.size > 0

    def start(self, plan: ForwardPlan) -> None:
        """Make `plan` the current one; the last one ends."""
        self.end()
        self._plan = plan
        self._is_settled = False

    def settle(self) -> None:
        """Record the checkpoints and full blocks that complete forwards have made final."""
        prefix, plan = self._books.prefix, self._plan
        if prefix is None:
            return
        if plan is not None and plan.is_complete and not self._is_settled:
            self._is_settled = True
            prefix.end_checkpoints(is_done=plan.is_written)
            is_step = plan.positions_after - plan.positions_before <= self._max_step_tokens
            slots = np.where(is_step, plan.request_slots, -1)
            for slot, boundary in prefix.passed_boundaries(
                slots, plan.positions_before, plan.positions_after
            ):
                self.save_checkpoint(slot, boundary)
        prefix.publish(self._books.requests.lengths, self.find_torn(self._all_slots))

    def save_checkpoint(self, slot: int, boundary: int) -> None:
        """Checkpoint a tracked request, unless it has one there or none is left."""
        prefix = self._books.prefix
        checkpoint = None if prefix is None else prefix.take_pending(slot, boundary)
        if checkpoint is not None:
            self._memory.checkpoints.save(checkpoint, self._memory.state.storage, slot)

    def checkpoint_fork(self, slot: int) -> None:
        """Checkpoint a forked request's last block boundary, if the policy says so.

        Its rows must not have been overwritten.
        """
        prefix, requests = self._books.prefix, self._books.requests
        boundary = int(requests.lengths[slot]) // self._block_tokens * self._block_tokens
        is_held = boundary >= requests.rollback_floor[slot]  # rejected tokens overwrite rows too
        if prefix is None or not prefix.policy.at_forks or slot not in prefix.requests:
            return
        if boundary and is_held:
            self.save_checkpoint(slot, boundary)

    def end(self) -> None:
        """End the plan; if it is not complete, its requests are torn."""
        plan, requests = self._plan, self._books.requests
        if plan is None:
            return
        self.settle()
        if not plan.is_complete:
            slots = plan.written_slots
            requests.is_torn[slots] = requests.is_open[slots]
            if self._books.prefix is not None:
                self._books.prefix.end_checkpoints(is_done=False)
        plan.retire()
        self._plan = None

    def end_for(self, slot: int) -> None:
        """End the plan if it names the slot."""
        if self._plan is not None and slot in self._plan.request_slots:
            self.end()

    def find_torn(self, slots: Int64Array) -> BoolArray:
        """Return whether the last forward of each slot did not write every layer."""
        is_torn = self._books.requests.is_torn[slots]
        if self._plan is None or self._plan.is_complete:
            return is_torn
        return is_torn | np.isin(slots, self._plan.written_slots)

    def check_whole(self, slots: Int64Array) -> None:
        """Refuse slots whose last forward did not write every layer."""
        is_torn = self.find_torn(slots)
        if is_torn.any():
            raise TornForwardError(
                f"The last forward of slot {slots[is_torn][0]} did not write every layer; the slot "
                "can only be freed or truncated to 0"
            )
