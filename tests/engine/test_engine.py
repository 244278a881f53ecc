"""Every request gets the tokens that it has alone, whatever happens around it."""

import functools
import random
from collections import Counter
from unittest.mock import patch

import pytest
import torch

from dsv4 import CheckpointPolicy
from dsv4.engine import Engine, SamplingParams
from dsv4.engine.drafts import propose_drafts
from dsv4.engine.sampler import draw_tokens
from tests.test_engine import FAILURES as MODEL_FAILURES
from tests.test_engine import MARGIN, VOCABULARY, make_world

FAILURES = [*MODEL_FAILURES, "in the sampler"]
FEATURES = {
    "cached_tokens", "preempted", "recomputed", "length", "stop", "cancelled", "timeout",
    "cancelled inside", "kept_drafts", "rejected_drafts", *FAILURES, "forward behind plain",
    *(
        f"{event} behind verified"
        for event in (
            "forward", "forward of forks", "preempted", "cancelled inside", "cancelled between",
            *FAILURES,
        )
    ),
}  # fmt: skip


def ragged(model, manager):
    """The examples' decoder as an engine calls a model."""
    return lambda ids, plan, rows: model(ids, manager, plan)[rows]


class Answers:
    """What the clients of an engine have got, by request and sample."""

    def __init__(self):
        self.tokens, self.reasons, self.logprobs = {}, {}, {}

    def __call__(self, output):
        key = output.request_id, output.index
        assert key not in self.reasons  # nothing comes after the last output
        self.tokens.setdefault(key, []).extend(output.token_ids)
        self.logprobs.setdefault(key, []).extend(output.logprobs or ())
        if output.finish_reason is not None:
            self.reasons[key] = output.finish_reason


@functools.cache
def alone(name, prompt, params, rank):
    """The tokens of one sample in an engine with room for it, without drafts."""
    world = make_world(name)
    manager = world.new_manager(max_requests=rank + 1, num_blocks=(rank + 1) * 8 * world.unit)
    answers = Answers()
    engine = Engine(ragged(world.model, manager), manager)
    engine.submit(list(prompt), params, answers, request_id="it")
    with patch("dsv4.engine.engine.draw_tokens", draw_clearly):
        while engine.step():
            pass
    return answers.tokens["it", rank]


def draw_clearly(logits, *args, **options):
    """Draw tokens that other logits choose too, which differ by what sums in another order may."""
    drawn = draw_tokens(logits, *args, **options)
    step = MARGIN * logits.abs().max() * (-1.0) ** torch.arange(logits.shape[-1])
    for near in (logits + step, logits - step):
        assert torch.equal(draw_tokens(near, *args, **options).tokens, drawn.tokens)
    return drawn


class Traffic:
    """Random requests to an engine with too little memory, cancels, and forwards that fail."""

    def __init__(self, name, seed, *, overlap, num_drafts):
        self.name, self.world, self.random = name, make_world(name), random.Random(seed)
        self.manager = self.world.new_manager(
            max_requests=4, num_blocks=self.world.num_blocks, num_checkpoints=6,
            host_blocks=self.world.host_blocks, host_slots=2,
            checkpoint_policy=CheckpointPolicy(every_blocks=1),
        )  # fmt: skip
        self.now = 0.0
        self.engine = Engine(
            self.run_model, self.manager, max_step_tokens=3 * self.world.unit,
            num_drafts=num_drafts, overlap=overlap, clock=lambda: self.now,
        )  # fmt: skip
        self.counts, self.answers, self.sent = self.engine.counts, Answers(), {}
        self.texts = [self.tokens(3 * self.world.unit) for _ in range(2)]
        steps = self.random.sample(range(10, 40), len(FAILURES))
        self.failure, self.failure_at = None, dict(zip(steps, FAILURES, strict=True))
        self.failures_ahead = dict(zip(range(2, 14, 3), FAILURES, strict=True))

    def tokens(self, count):
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def submit(self):
        choose = self.random.choice
        text, plain = choose(self.texts), 24 if self.engine.scheduler.num_drafts else 3
        prompt = text[: self.random.randrange(len(text))]
        prompt = tuple(prompt + self.tokens(self.random.randint(1, self.world.unit)))
        params = SamplingParams(
            max_new_tokens=self.random.randint(1, 48), temperature=choose([0, 0, 1, 1.5]),
            top_k=choose([0, 0, 5]), top_p=choose([1, 1, 0.8]), min_p=choose([0, 0, 0.05]),
            repetition_penalty=choose([1] * plain + [1.2]),
            frequency_penalty=choose([0] * plain + [0.3]),
            seed=self.random.getrandbits(60), n=choose([1, 1, 3]), logprobs=choose([None, None, 2]),
            stop_token_ids=tuple(self.tokens(choose([0, 2]))), timeout=choose([None, None, 25.0]),
        )  # fmt: skip
        name = self.engine.submit(
            prompt, params, self.answers, salt=choose([b"", b"", b"me"]),
            checkpoint_at=choose([None, len(prompt) // 2]),
        )  # fmt: skip
        self.sent[name] = prompt, params

    def cancel(self, event):
        if self.engine.requests:
            self.engine.cancel(self.random.choice(list(self.engine.requests)))
            self.count(event)

    def count(self, event):
        self.counts[event] += 1
        self.counts[f"{event} {self.place}"] += 1

    @property
    def place(self):
        """Behind which step of an engine with drafts it goes on before that one's tokens."""
        flight, num_drafts = self.engine._flight, self.engine.scheduler.num_drafts
        if flight is None or not num_drafts:
            return ""
        return "behind plain" if flight.accepted is None else "behind verified"

    def guess(self, ids, count, ends):
        """Return the next tokens of an answer, some of them wrong, or what the engine finds."""
        if self.engine.counts["steps"] % 8 < 2 or self.random.random() < 0.1:
            return propose_drafts(ids, count, ends)
        (sample,) = (each for each in self.engine.scheduler.running if each.ids is ids)
        prompt, params = self.sent[sample.request.request_id]
        answer = alone(self.name, prompt, params, sample.index)
        drafts = answer[len(sample.answer) :][:count]
        return [self.random.choice([draft] * 7 + [0]) for draft in drafts]

    def run_model(self, ids, plan, rows):
        """Run the model, with a cancelled request or a failure inside at times."""
        self.count("forward")
        requests = [sample.request for sample in self.engine.scheduler.running]
        if len(set(map(id, requests))) < len(requests):
            self.count("forward of forks")
        failure = self.failure_at.get(self.counts["steps"])
        if self.place == "behind verified" and failure is None:
            failure = self.failures_ahead.get(self.counts["forward behind verified"])
        self.failure = failure
        if failure not in (None, "in the sampler"):
            self.count(failure)
        cancel_at = self.random.randrange(90)

        def on_layer(idx):
            if idx == cancel_at:
                self.cancel("cancelled inside")

        logits = self.world.run(ids, self.manager, plan, failure=failure, on_layer=on_layer)
        return logits[rows]

    def draw(self, *args, **kwargs):
        if self.failure == "in the sampler":
            self.count(self.failure)
            raise RuntimeError(self.failure)
        return draw_tokens(*args, **kwargs)

    def step(self):
        self.now += 1.0
        self.failure = None
        place, num_preempted = self.place, self.counts["preempted"]
        try:
            return self.engine.step()
        except RuntimeError as raised:
            if str(raised) not in FAILURES:
                raise
            return True
        finally:
            if self.counts["preempted"] > num_preempted:
                self.counts[f"preempted {place}"] += 1

    def run(self, num_prompts):
        with (
            patch("dsv4.engine.scheduler.propose_drafts", self.guess),
            patch("dsv4.engine.engine.draw_tokens", self.draw),
        ):
            self._run(num_prompts)

    def _run(self, num_prompts):
        while (is_busy := self.step()) or num_prompts:
            assert is_busy or self.engine.is_idle
            self.manager.check_integrity()
            if num_prompts and self.random.random() < 0.4:
                self.submit()
                num_prompts -= 1
            if self.random.random() < 0.03:
                self.cancel("cancelled between")
        assert self.engine.is_idle


CASES = [
    ("short", 0, False, 0), ("short", 1, True, 0), ("short", 12, True, 3), ("short", 3, False, 3),
    ("short", 18, True, 3), ("whole", 5, True, 0),
]  # fmt: skip


@functools.cache
def run_traffic(name, seed, overlap, num_drafts):
    traffic = Traffic(name, seed, overlap=overlap, num_drafts=num_drafts)
    traffic.run(num_prompts=10)
    return traffic


@pytest.mark.parametrize("name, seed, overlap, num_drafts", CASES)
def test_every_request_gets_the_tokens_that_it_has_alone(name, seed, overlap, num_drafts):
    traffic = run_traffic(name, seed, overlap, num_drafts)
    manager, answers = traffic.manager, traffic.answers
    keys = {(name, rank) for name, (_, params) in traffic.sent.items() for rank in range(params.n)}
    assert set(answers.reasons) == keys
    for (request, rank), reason in answers.reasons.items():
        prompt, params = traffic.sent[request]
        tokens = answers.tokens[request, rank]
        if not tokens:
            assert reason in ("cancelled", "timeout")
            continue
        expected = alone(name, prompt, params, rank)
        assert tokens == expected[: len(tokens)]
        if reason in ("stop", "length"):
            assert tokens == expected
        if params.logprobs is not None:
            assert len(answers.logprobs[request, rank]) == len(tokens)
    assert not manager.open_slots and not manager.swapped_requests
    stats = manager.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == traffic.world.num_blocks


def test_the_traffic_meets_every_event():
    counts = sum((run_traffic(*case).counts for case in CASES), start=Counter())
    assert not {event for event in FEATURES if not counts[event]}


def test_steps_overlap_while_no_sample_has_guesses():
    world, answers, flights = make_world("short"), Answers(), []
    manager = world.new_manager(max_requests=3, num_blocks=3 * world.unit)

    def run_model(ids, plan, rows):
        flights.append(engine._flight)
        return world.model(ids, manager, plan)[rows]

    engine = Engine(run_model, manager, num_drafts=2, overlap=True)
    prompts = [tuple(range(idx, idx + 5)) for idx in range(3)]
    params = [SamplingParams(max_new_tokens=8 + 2 * (not idx), temperature=0) for idx in range(3)]
    for prompt, each in zip(prompts, params, strict=True):
        engine.submit(prompt, each, answers, request_id=f"{prompt[0]}")
    expected = [alone("short", *each, 0) for each in zip(prompts, params, strict=True)]

    def guess(ids, count, _):
        """Two right drafts for the first request's 9 tokens; its first 8 have a guess already."""
        has_guess = ids[0] == 0 and (len(ids) == 8 or (len(ids) == 9 and count > 1))
        return expected[0][len(ids) - 5 :][:count] if has_guess else []

    with patch("dsv4.engine.scheduler.propose_drafts", guess):
        while engine.step():
            pass
    assert [answers.tokens[f"{idx}", 0] for idx in range(3)] == expected
    # The first step has nothing before it, the fifth waits for drafts, the sixth for their check.
    assert [flight is None for flight in flights] == [1, 0, 0, 0, 1, 1, 0, 0]


@pytest.mark.slow
def test_verification_steps_overlap_without_known_lengths():
    """Drafts guessed a step ahead change no answer; what follows a stop that is found late goes."""
    world, answers, params, texts = make_world("short"), Answers(), {}, []
    manager = world.new_manager(max_requests=4, num_blocks=32 * world.unit, num_checkpoints=4)
    engine = Engine(ragged(world.model, manager), manager, num_drafts=3, overlap=True)
    for idx in range(2):
        prompt = tuple(range(3 * idx, 8 + 4 * idx))
        choices = {"max_new_tokens": 14 + 2 * idx, "seed": idx, "temperature": float(idx)}
        answer = alone("short", prompt, SamplingParams(**choices), 0)
        texts.append([*prompt, *answer])
        if idx == 1:
            choices["stop_token_ids"] = (answer[-9],)
        params[f"{idx}"] = prompt, SamplingParams(**choices)
        engine.submit(prompt, params[f"{idx}"][1], answers, request_id=f"{idx}")

    def guess(ids, count, _):
        """The answer, with every fifth token wrong."""
        (text,) = (text for text in texts if text[: len(ids)] == ids)
        end = len(ids) + count
        return [(text[i] + (i % 5 == 0)) % VOCABULARY for i in range(len(ids), min(end, len(text)))]

    with (
        patch("dsv4.engine.scheduler.propose_drafts", guess),
        patch.object(manager, "prepare_step", wraps=manager.prepare_step) as steps,
    ):
        while engine.step():
            manager.check_integrity()
    counts = engine.counts
    assert steps.call_count > 3 and counts["steps"] < 20
    assert counts["kept_drafts"] > counts["rejected_drafts"] > 0
    for name, (prompt, each) in params.items():
        assert answers.tokens[name, 0] == alone("short", prompt, each, 0)
    assert set(answers.reasons.values()) == {"stop", "length"} and not manager.open_slots
