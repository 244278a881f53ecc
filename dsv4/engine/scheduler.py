"""`Scheduler`: which requests have a slot, and which of their tokens the next forward runs."""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.plan import ForwardPlan
from dsv4.engine.drafts import propose_drafts
from dsv4.engine.request import Sample
from dsv4.errors import NoFreeSlotError, OutOfBlocksError

LOOKAHEAD = 16  # waiting samples that are looked at in a step


class Row(NamedTuple):
    """The tokens of one sample in a forward.

    Attributes:
        before: Its length before the forward.
        known: Tokens from there on; empty if the one token is on the device alone.
        drafts: Guesses after them.
    """

    sample: Sample
    before: int
    known: list[int]
    drafts: list[int]

    @property
    def num_known(self) -> int:
        """Tokens before the drafts."""
        return len(self.known) or 1

    @property
    def after(self) -> int:
        """The sample's length after the forward."""
        return self.before + self.num_known + len(self.drafts)

    @property
    def is_last(self) -> bool:
        """No token of the sample remains, so that the next one is chosen."""
        return self.before + self.num_known == self.sample.num_tokens


class Scheduler:
    """Running samples have a slot of the manager; waiting ones have none.

    Samples start in the order of coming. One is passed over while another one's prefill, or a read
    from disk, will leave it a longer prefix.

    Args:
        max_step_tokens: The most tokens of a forward.
        num_drafts: The most drafts of a sample in a forward.
    """

    def __init__(self, manager: KVCacheManager, max_step_tokens: int, num_drafts: int) -> None:
        self.manager = manager
        self.max_step_tokens = max_step_tokens
        self.num_drafts = num_drafts
        self.has_prefix = manager.capacity.num_checkpoints > 0
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.counts: Counter[str] = Counter()

    def add(self, samples: list[Sample]) -> None:
        """Queue the first of some samples of a prompt; it takes the others along."""
        if samples:
            samples[0].others = samples[1:]
            self._wait(samples[0])

    def _wait(self, sample: Sample) -> None:
        self.waiting.append(sample)
        self.waiting.sort(key=lambda each: each.order)

    def end(self, sample: Sample) -> None:
        """Drop a sample, wherever it is."""
        sample.is_over = True
        self._give_up(sample)
        if sample in self.waiting:
            self.waiting.remove(sample)
        self.add([each for each in sample.others if not each.is_over])
        sample.others = []

    def restart(self, sample: Sample) -> None:
        """Give up the cache of a sample, and queue it to run its tokens again."""
        self._give_up(sample)
        if sample not in self.waiting:
            self._wait(sample)
        self.counts["recomputed"] += 1

    def _give_up(self, sample: Sample) -> None:
        if sample.slot >= 0:
            self.manager.free_request(sample.slot)
            self.running.remove(sample)
        if sample.swapped is not None:
            self.manager.drop_swapped(sample.swapped)
        sample.slot, sample.swapped = -1, None

    @property
    def can_admit(self) -> bool:
        """A sample waits, and there is a slot for it."""
        return bool(self.waiting) and self.manager.num_free_slots > 0

    def admit(self) -> None:
        """Start waiting samples in order, while the known tokens of all running ones fit."""
        for sample in self.waiting[:LOOKAHEAD]:
            if not self.manager.num_free_slots:
                return
            if sample.num_pending or self._gains_by_waiting(sample):
                continue
            if self.running and not self._fits(sample):
                return
            self._start(sample)

    def _start(self, sample: Sample) -> None:
        manager, request = self.manager, sample.request
        if sample.swapped is not None:
            try:
                slot = manager.swap_in(sample.swapped)
            except OutOfBlocksError:  # others on the host keep blocks on the device
                return self.restart(sample)
            sample.swapped = None
        elif self.has_prefix:
            named = () if request.checkpoint_at is None else (request.checkpoint_at,)
            hit = manager.resume_request(sample.ids, salt=request.salt, checkpoint_at=named)
            slot = hit.slot
            if len(sample.ids) == len(request.prompt):
                request.num_cached_tokens = hit.num_tokens
                self.counts["cached_tokens"] += hit.num_tokens
        else:
            slot = manager.open_request(num_tokens=sample.num_tokens)
        sample.slot = slot
        self.waiting.remove(sample)
        self.running.append(sample)

    def _gains_by_waiting(self, sample: Sample) -> bool:
        """Tell whether a read from disk, or a prefill that runs, will leave it a longer prefix."""
        if not self.has_prefix or sample.swapped is not None:
            return False
        request, block = sample.request, self.manager.config.block_tokens
        if request.prefetch is not None:
            if not request.prefetch.done():
                return True
            request.prefetch = None
        lengths = self.manager.lengths
        for other in self.running:
            length = int(lengths[other.slot])
            if length >= other.num_tokens - 1 or other.request.salt != request.salt:
                continue
            shared = _num_shared(other.request.prompt, request.prompt) // block * block
            if shared > length and shared >= block:
                found = self.manager.match_prefix(sample.ids, salt=request.salt).num_tokens
                return shared > found
        return False

    def _fits(self, sample: Sample) -> bool:
        """Tell whether blocks are left for it beside the next tokens of all running samples."""
        manager, block = self.manager, self.manager.config.block_tokens
        slots = [each.slot for each in self.running]
        stats = manager.stats()
        spare = stats.num_free_blocks + stats.num_evictable_blocks
        spare -= manager.blocks_needed(slots, [self._next_length(each) for each in self.running])
        if sample.swapped is not None:
            return spare >= sample.swapped.num_missing_blocks + 1
        own = -(-self._next_length(sample) // block)
        if own > spare and self.has_prefix:
            match = manager.match_prefix(sample.ids, salt=sample.request.salt)
            own += match.num_blocks - (match.num_tokens + match.num_replayed) // block
        return own <= spare

    def _next_length(self, sample: Sample) -> int:
        """Return the length of a sample once its known tokens have run, with drafts."""
        return min(sample.num_tokens + self.num_drafts, sample.most_tokens - 1)

    def plan(self, rows: list[Row]) -> ForwardPlan:
        slots, before = [row.sample.slot for row in rows], [row.before for row in rows]
        return self.manager.prepare_forward(slots, before, [row.after for row in rows])

    def choose_rows(self) -> list[Row]:
        """Share the tokens of a step: decode steps first, then prompts in the order of coming."""
        rows, prefills, budget = list[Row](), [], self.max_step_tokens
        lengths = self.manager.lengths.tolist()
        for sample in self.running:
            before = lengths[sample.slot]
            if sample.num_tokens - before != 1:
                prefills.append((sample.order, sample, before))
            elif sample.num_tokens < sample.most_tokens and budget > 0:
                known, room = sample.ids[before:], self._next_length(sample) - sample.num_tokens
                drafts = list[int]()
                if room > 0 and known and not sample.request.params.has_penalty:
                    drafts = propose_drafts(sample.ids, min(room, budget - 1), sample.ends)
                rows.append(Row(sample, before, known, drafts))
                budget -= 1 + len(drafts)
        for _, sample, before in sorted(prefills, key=lambda each: each[0]):
            known = sample.ids[before : before + max(budget, 0)]
            if known:
                rows.append(Row(sample, before, known, []))
                budget -= len(known)
        return rows

    @property
    def has_guesses(self) -> bool:
        """A sample whose next token is pending has guesses, as far as its tokens are known."""
        return self.num_drafts > 0 and any(
            sample.num_pending and propose_drafts(sample.ids, 1, sample.ends)
            for sample in self.running
        )

    def choose_step(self, in_flight: Collection[Sample] | None) -> list[Row]:
        """Rows of a verification step that needs no token of the step in flight; else none.

        All running samples decode. At least half of them have guesses, which reach as far behind
        the known tokens as this step can.

        Args:
            in_flight: The samples of the step in flight; None if all tokens are known.
        """
        rows, num_misses, most = list[Row](), 0, 2 * self.num_drafts + 1
        if len(self.running) * (1 + self.num_drafts) > self.max_step_tokens:
            return []
        lengths = self.manager.lengths if in_flight is None else None
        longest = self.manager.capacity.longest_request
        for sample in self.running:
            size = len(sample.ids)
            is_known = lengths is None or lengths[sample.slot] == size - 1
            is_decoding = is_known and (in_flight is None or sample in in_flight)
            has_penalty = sample.request.params.has_penalty
            if not is_decoding or has_penalty or sample.others or size + most >= longest:
                return []
            drafts = propose_drafts(sample.ids, most, sample.ends)
            rows.append(Row(sample, size - 1, sample.ids[-1:], drafts))
            num_misses += not drafts
            if 2 * num_misses > len(self.running):
                return []
        return rows

    def make_room(self, error: OutOfBlocksError) -> None:
        """Preempt the youngest running sample, or give up what another one keeps on the device."""
        if len(self.running) == 1:
            kept = [each for each in self.waiting if each.swapped is not None]
            if not kept:
                raise error  # one sample alone always fits: something else holds blocks
            return self.restart(kept[-1])
        youngest = max(self.running, key=lambda each: each.order)
        self.counts["preempted"] += 1
        try:
            youngest.swapped = self.manager.swap_out(youngest.slot)
        except (NoFreeSlotError, OutOfBlocksError):  # the host is full
            return self.restart(youngest)
        self.running.remove(youngest)
        youngest.slot = -1
        self._wait(youngest)

    def fork(self, sample: Sample) -> list[Sample]:
        """Fork the other samples off one whose prompt has run, and return them.

        One without room waits: it will find the prompt, or run it by itself.
        """
        others, sample.others = [each for each in sample.others if not each.is_over], []
        for other in others:
            try:
                other.slot = self.manager.fork(sample.slot)
            except (NoFreeSlotError, OutOfBlocksError):
                self._wait(other)
            else:
                self.running.append(other)
        return others


def _num_shared(first: IntArray, second: IntArray) -> int:
    """Count the tokens at the beginning that two prompts share."""
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size
