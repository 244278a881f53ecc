"""`Engine`: serves requests with one model and one cache, a ragged forward at a time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prefix.token_store import LARGEST_ID
from dsv4.checks import check_int, check_ints
from dsv4.engine.request import (
    FinishReason,
    OnOutput,
    Output,
    Request,
    Sample,
    TokenLogprobs,
    make_samples,
)
from dsv4.engine.sampler import Draw, Drawn, draw_tokens, upload
from dsv4.engine.sampling_params import SamplingParams
from dsv4.engine.scheduler import Row, Scheduler
from dsv4.engine.text import TextStream
from dsv4.errors import OutOfBlocksError


class RaggedModel(Protocol):
    """A model over a manager's requests.

    If it has a method `before_plan`, that is called before each plan with the most requests, new
    tokens of one, tokens of one, and new tokens of all; see `PackedModel.before_plan`. If it has a
    `vocab_size`, prompts with larger ids are refused.
    """

    def __call__(self, ids: Tensor, plan: ForwardPlan, rows: Tensor) -> Tensor:
        """Return the logits `[rows, vocabulary]` of some of the plan's tokens `[num_tokens]`."""


class Choice(NamedTuple):
    """The tokens that were chosen for one sample: those of logits `start` to `stop`."""

    sample: Sample
    drafts: list[int]
    length: int
    start: int
    stop: int


@dataclass(frozen=True)
class Flight:
    """A forward whose tokens the host has not read yet.

    accepted `[choices]`, of a committed step, counts the tokens of each choice that are kept.
    """

    choices: list[Choice]
    drawn: Drawn
    is_ready: torch.cuda.Event | None
    accepted: Tensor | None = None


class Engine:
    """Serves requests that come and go at any time; one thread may use it.

    Each step is one forward: prompts in chunks, decode steps and the verification of drafts. With
    `overlap` the next forward is planned and queued before the tokens of the last one are read.

    Args:
        model: Returns the logits of a plan's tokens.
        manager: The cache.
        max_step_tokens: The most tokens of a forward.
        num_drafts: The most tokens that are guessed in a step, at most the cache's
            `drafts_per_step`.
        tokenizer: A fast tokenizer of transformers; without one outputs have no text.
        overlap: By default on a GPU. Penalties need the tokens first, so steps with them don't
            overlap. Verification steps do while all samples decode: their drafts are guessed one
            step ahead. Steps that verify nothing do while no sample has guesses.
        clock: Seconds, for time limits.
    """

    def __init__(
        self,
        model: RaggedModel,
        manager: KVCacheManager,
        *,
        max_step_tokens: int | None = None,
        num_drafts: int = 0,
        tokenizer: Any = None,
        overlap: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        capacity = manager.capacity
        check_int(
            "num_drafts", num_drafts,
            at_least=0, at_most=manager.config.drafts_per_step, limit="drafts_per_step",
        )  # fmt: skip
        limit = capacity.max_forward_tokens
        budget = limit if max_step_tokens is None else max_step_tokens
        check_int("max_step_tokens", budget, at_least=1, at_most=limit, limit="max_forward_tokens")
        self.model, self.manager, self.tokenizer, self.clock = model, manager, tokenizer, clock
        self.scheduler = Scheduler(manager, budget, num_drafts)
        self.requests: dict[str, Request] = {}
        self.counts = self.scheduler.counts
        self._overlap = manager.device.type == "cuda" if overlap is None else overlap
        self._before_plan = getattr(model, "before_plan", None)
        self._largest_id = getattr(model, "vocab_size", LARGEST_ID + 1) - 1
        self._flight: Flight | None = None
        # The last row takes the tokens of samples without a slot.
        self._last_tokens = torch.zeros(
            capacity.max_requests + 1, dtype=torch.int64, device=manager.device
        )
        self._accepted = torch.zeros_like(self._last_tokens)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        checkpoint_at: int | None = None,
    ) -> str:
        """Queue a prompt and return the request's id.

        Args:
            on_output: Called with each new output; it must not raise.
            salt: The prompt's owner; requests with other salts share nothing.
            checkpoint_at: A length at which later prompts may leave this one, such as that before
                the generation prompt.

        Raises:
            ValueError: The prompt is empty, too long or not of the vocabulary, or the request's id
                is in use.
        """
        self.check_prompt(len(prompt), params)
        number = self.counts["submitted"] + 1
        request_id = f"request-{number}" if request_id is None else request_id
        if request_id in self.requests:
            raise ValueError(f"Invalid request_id: expected a new one, got {request_id!r} again")
        ids = check_ints("prompt", prompt, at_least=0, at_most=self._largest_id).astype(np.int32)
        deadline = None if params.timeout is None else self.clock() + params.timeout
        request = Request(request_id, number, ids, params, on_output, salt, checkpoint_at, deadline)
        if self.scheduler.has_prefix:
            request.prefetch = self.manager.prefetch(request.prompt, salt=salt)
        self.scheduler.add(make_samples(request, lambda: self._new_stream(params)))
        self.requests[request_id] = request
        self.counts["submitted"] = number
        self.counts["prompt_tokens"] += len(prompt)
        return request_id

    def check_prompt(self, num_tokens: int, params: SamplingParams) -> None:
        """Refuse a prompt that is empty, or that does not fit with its answer."""
        longest, num_new = self.manager.capacity.longest_request, params.max_new_tokens
        check_int(
            "max_new_tokens", num_new, at_least=1, at_most=longest - 1, limit="the longest request"
        )
        if not 0 < num_tokens <= longest - num_new:
            raise ValueError(
                f"Invalid prompt: expected 1 to {longest - num_new} tokens, so that prompt and "
                f"max_new_tokens ({num_new}) are at most {longest} together, got {num_tokens}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("Invalid stop: expected an engine with a tokenizer, got one without")

    def _new_stream(self, params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        skip = params.skip_special_tokens
        return TextStream(self.tokenizer, params.stop, skip_special_tokens=skip)

    def cancel(self, request_id: str) -> None:
        """End a request; one that is over, or unknown, is left alone."""
        self.end_request(request_id, "cancelled")

    def end_request(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End all samples of a request for a reason that is not its own."""
        request = self.requests.get(request_id)
        for sample in [] if request is None else request.samples:
            if not sample.is_over:
                self._report(sample, reason, error=error)

    def step(self) -> bool:
        """Run one forward; False if nothing is to be done.

        If it raises, every request is as before the step, or is run again: step again.
        """
        self._expire()
        if self._needs_tokens():
            self._take_tokens()
        had_flight = self._flight is not None
        launched = self._launch()
        self._take_tokens(launched)
        self._flight = launched
        if launched is not None and not self._overlap:
            self._take_tokens()
        return launched is not None or had_flight

    @property
    def is_idle(self) -> bool:
        return not self.requests

    def _expire(self) -> None:
        now = self.clock() if any(each.deadline for each in self.requests.values()) else 0.0
        for request in list(self.requests.values()):
            if request.deadline is not None and request.deadline <= now:
                self.end_request(request.request_id, "timeout")

    def _needs_tokens(self) -> bool:
        """Tell whether the next step cannot be planned without the last one's tokens."""
        flight, running = self._flight, self.scheduler.running
        if flight is None or flight.accepted is not None:
            return flight is not None and self.scheduler.can_admit  # which lengths decide
        has_drafts = any(choice.drafts for choice in flight.choices)
        has_penalty = any(sample.request.params.has_penalty for sample in running)
        return has_drafts or has_penalty or self.scheduler.has_guesses

    def _launch(self) -> Flight | None:
        """Queue a forward and the choice of its tokens; None if there is nothing to run."""
        self.scheduler.admit()
        step = self._plan_step()
        if step is not None:
            return self._launch_step(*step)
        if self._flight is not None and self._flight.accepted is not None:
            self._take_tokens()
        planned = self._plan()
        if planned is None:
            return None
        rows, plan = planned
        self.counts["steps"] += 1
        try:
            choices, draws, places = self._choices(rows)
            logits = self.model(self._ids(rows), plan, self._upload(places))
            choices, draws, repeats = self._fork(choices, draws)
            if len(repeats) > len(places):
                logits = logits[self._upload(repeats)]
            drawn = draw_tokens(logits, draws) if draws else Drawn(self._last_tokens[:0])
            return self._start_copy(choices, drawn)
        except BaseException:
            self._recover(plan)
            raise

    def _plan_step(self) -> tuple[list[Row], ForwardPlan] | None:
        """Plan a verification step of all samples whose lengths the device knows, if one fits."""
        flight, size = self._flight, 1 + self.scheduler.num_drafts
        if not self._overlap or size == 1 or (flight is not None and flight.accepted is None):
            return None
        in_flight = None if flight is None else [choice.sample for choice in flight.choices]
        rows = self.scheduler.choose_step(in_flight)
        if not rows:
            return None
        if self._before_plan is not None:
            longest = max(row.before for row in rows) + 2 * size
            self._before_plan(len(rows), size, longest, len(rows) * size)
        try:
            return rows, self.manager.prepare_step([row.sample.slot for row in rows], size)
        except OutOfBlocksError:
            return None  # a step with known lengths makes room

    def _launch_step(self, rows: list[Row], plan: ForwardPlan) -> Flight:
        """Queue a verification step, and keep what it accepts without the host."""
        self.counts["steps"] += 1
        num_drafts, samples = self.scheduler.num_drafts, [row.sample for row in rows]
        size, width = 1 + num_drafts, 2 * num_drafts + 1
        try:
            slots = self._upload([sample.slot for sample in samples])
            guesses = [(row.drafts + row.known * width)[:width] for row in rows]
            guessed = self._upload([token for guess in guesses for token in guess])
            firsts, shift = self._last_tokens[slots], self._accepted[slots]
            if self._flight is None:
                firsts, shift = (
                    self._upload([row.known[0] for row in rows]),
                    torch.zeros_like(slots),
                )
            places = shift[:, None] + torch.arange(num_drafts, device=slots.device)
            drafts = guessed.view(-1, width).gather(1, places)  # [batch, num_drafts]
            ids = torch.cat((firsts[:, None], drafts), dim=1).flatten()
            logits = self.model(ids, plan, torch.arange(len(ids), device=slots.device))
            draws = [_draw_of(each, len(each.ids) + idx) for each in samples for idx in range(size)]
            drawn = draw_tokens(logits, draws, shift.repeat_interleave(size), latest=size)
            chosen = drawn.tokens.view(-1, size)
            accepted = 1 + (chosen[:, :-1] == drafts).cumprod(1).sum(1)
            plan.commit(accepted)
            self._last_tokens[slots] = chosen.gather(1, accepted[:, None] - 1)[:, 0]
            self._accepted[slots] = accepted
            starts = range(0, len(ids), size)
            choices = [
                Choice(sample, [], len(sample.ids), start, start + size)
                for sample, start in zip(samples, starts, strict=True)
            ]
            return self._start_copy(choices, drawn, accepted)
        except BaseException:
            self._recover(plan)
            raise

    def _plan(self) -> tuple[list[Row], ForwardPlan] | None:
        """Plan a forward; requests are preempted, the youngest first, until one fits."""
        while rows := self.scheduler.choose_rows():
            try:
                if self._before_plan is not None:
                    counts = [row.num_known + len(row.drafts) for row in rows]
                    most, longest = max(counts), max(row.after for row in rows)
                    if any(row.drafts for row in rows):
                        most = max(most, 1 + self.scheduler.num_drafts)
                    self._before_plan(len(rows), most, longest, sum(counts))
                return rows, self.scheduler.plan(rows)
            except OutOfBlocksError as error:
                # Requests that have ended may leave room; others are preempted with all tokens.
                if not self._take_tokens():
                    self.scheduler.make_room(error)
        return None

    def _ids(self, rows: list[Row]) -> Tensor:
        """Return the tokens of a forward; those that the host does not know are on the device."""
        unknown = [row.sample.slot for row in rows if not row.known]
        ids = self._upload([token for row in rows for token in (row.known or [-1]) + row.drafts])
        if len(unknown) == len(rows):
            return self._last_tokens[self._upload(unknown)]
        if unknown:
            slots = [
                row.sample.slot for row in rows for _ in range(row.num_known + len(row.drafts))
            ]
            ids = torch.where(ids < 0, self._last_tokens[self._upload(slots)], ids)
        return ids

    def _choices(self, rows: list[Row]) -> tuple[list[Choice], list[Draw], list[int]]:
        """List the tokens to be chosen: by sample, one by one, and their places in the forward."""
        choices, draws, places, end = list[Choice](), list[Draw](), list[int](), 0
        for row in rows:
            sample, num_drafts = row.sample, len(row.drafts)
            end += row.num_known + num_drafts
            if not row.is_last:
                continue
            start, length = len(places), row.before + row.num_known
            places += range(end - num_drafts - 1, end)
            draws += [_draw_of(sample, length + idx) for idx in range(num_drafts + 1)]
            choices.append(Choice(sample, row.drafts, length, start, len(places)))
        return choices, draws, places

    def _fork(
        self, choices: list[Choice], draws: list[Draw]
    ) -> tuple[list[Choice], list[Draw], list[int]]:
        """Fork samples off prompts that have run: choices, draws and logits rows of all."""
        rows = list(range(len(draws)))
        for choice in list(choices):
            if not choice.sample.others:
                continue
            for sample in self.scheduler.fork(choice.sample):
                choices.append(Choice(sample, [], choice.length, len(draws), len(draws) + 1))
                draws.append(_draw_of(sample, choice.length))
                rows.append(choice.start)
        return choices, draws, rows

    def _start_copy(
        self, choices: list[Choice], drawn: Drawn, accepted: Tensor | None = None
    ) -> Flight:
        """Keep the last token of each sample on the device, and start to copy all to the host."""
        if self._overlap and choices and accepted is None:
            slots = self._upload([choice.sample.slot for choice in choices])  # -1: the last row
            lasts = self._upload([choice.stop - 1 for choice in choices])
            self._last_tokens[slots] = drawn.tokens[lasts]
        for choice in choices:
            choice.sample.num_pending += 1
        is_ready = None
        if self.manager.device.type == "cuda":
            drawn = Drawn(
                **{
                    name: _to_pinned(part)
                    for name, part in drawn._asdict().items()
                    if part is not None
                }
            )
            accepted = None if accepted is None else _to_pinned(accepted)
            is_ready = torch.cuda.Event()
            is_ready.record()
        return Flight(choices, drawn, is_ready, accepted)

    def _recover(self, plan: ForwardPlan) -> None:
        """Make the requests of a forward that failed what they were before it."""
        if not plan.is_complete:
            plan.cancel()  # does nothing where a handle has failed, which cancels by itself
            return
        self._take_tokens()
        lengths = self.manager.lengths  # all layers are written, and only tokens are missing
        for sample in list(self.scheduler.running):
            if lengths[sample.slot] >= sample.num_tokens:
                self.scheduler.restart(sample)

    def _take_tokens(self, launched: Flight | None = None) -> bool:
        """Read the tokens of the forward in flight, and pass them on; False if there is none.

        The host does not wait for one that was launched after it.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        if flight.is_ready is not None:
            flight.is_ready.synchronize()
        tokens = flight.drawn.tokens.tolist()
        accepted = None if flight.accepted is None else flight.accepted.tolist()
        kept, new = dict[int, int](), list[tuple[Choice, list[int]]]()
        for row, choice in enumerate(flight.choices):
            sample = choice.sample
            sample.num_pending -= 1
            if sample.is_over:
                continue
            chosen = tokens[choice.start : choice.stop]
            agree = [mine == draft for mine, draft in zip(chosen, choice.drafts, strict=False)]
            num_kept = [*agree, False].index(False) if accepted is None else accepted[row] - 1
            self.counts["kept_drafts"] += num_kept
            self.counts["rejected_drafts"] += len(chosen) - 1 - num_kept
            if choice.drafts:
                kept[sample.slot] = choice.length + num_kept
            new.append((choice, chosen[: num_kept + 1]))
        self.manager.truncate(list(kept), list(kept.values()))
        if accepted is not None and launched is None:
            self.manager.settle()  # rejected tokens are forgotten before others are noted
        self._note([(choice.sample, chosen) for choice, chosen in new])
        for choice, chosen in new:
            self._extend(choice, chosen, flight.drawn)
        return True

    def _note(self, new: list[tuple[Sample, list[int]]]) -> None:
        """Tell the prefix cache which tokens the requests have got."""
        new = [(sample, tokens) for sample, tokens in new if sample.slot >= 0]
        if self.scheduler.has_prefix and new:
            self.manager.note_tokens(
                [sample.slot for sample, _ in new],
                [token for _, tokens in new for token in tokens],
                start=[len(sample.ids) for sample, _ in new],
                counts=[len(tokens) for _, tokens in new],
            )

    def _extend(self, choice: Choice, tokens: list[int], drawn: Drawn) -> None:
        """Add tokens to a sample until it ends, and report them."""
        sample, params, text = choice.sample, choice.sample.request.params, ""
        reason: FinishReason | None = None
        new: list[int] = []
        for token in tokens:
            sample.ids.append(token)
            new.append(token)
            if token in params.stop_token_ids:
                reason = "stop"
            elif sample.stream is not None:
                text += sample.stream.add(token)
                reason = None if sample.stream.stopped_by is None else "stop"
            if reason is None and len(sample.ids) == sample.most_tokens:
                reason = "length"
            if reason is not None:
                break
        self.counts["generated_tokens"] += len(new)
        logprobs = _read_logprobs(drawn, choice.start, len(new), params.logprobs)
        self._report(sample, reason, new, text, logprobs)

    def _report(
        self,
        sample: Sample,
        reason: FinishReason | None,
        tokens: Sequence[int] = (),
        text: str = "",
        logprobs: list[TokenLogprobs] | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Report new tokens of a sample, which a reason ends."""
        request, stream = sample.request, sample.stream
        stop = None if stream is None else stream.stopped_by
        if reason is not None:
            self.scheduler.end(sample)
            if stream is not None and stop is None:
                text += stream.end()
            if request.is_over:
                del self.requests[request.request_id]
            self.counts[reason] += 1
        request.on_output(
            Output(
                request.request_id, sample.index, list(tokens), text, logprobs, reason, stop,
                error, len(request.prompt), request.num_cached_tokens,
            )
        )  # fmt: skip

    def _upload(self, values: list[int]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), self.manager.device)


def _draw_of(sample: Sample, length: int) -> Draw:
    request = sample.request
    place = length - len(request.prompt)
    if not request.params.has_penalty:
        return Draw(request.params, sample.seed, place)
    return Draw(request.params, sample.seed, place, request.prompt, sample.answer)


def _read_logprobs(
    drawn: Drawn, start: int, count: int, wanted: int | None
) -> list[TokenLogprobs] | None:
    if wanted is None or drawn.logprobs is None:
        return None
    assert drawn.top_tokens is not None and drawn.top_logprobs is not None
    stop = start + count
    rows = zip(
        drawn.logprobs[start:stop].tolist(), drawn.top_tokens[start:stop, :wanted].tolist(),
        drawn.top_logprobs[start:stop, :wanted].tolist(), strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs(logprob, list(zip(top, values, strict=True))) for logprob, top, values in rows
    ]


def _to_pinned(part: Tensor) -> Tensor:
    """Start to copy a tensor to the host."""
    host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return host.copy_(part, non_blocking=True)
