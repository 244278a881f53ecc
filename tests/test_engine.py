"""The engine of the examples gives each request the tokens that it has alone, whatever happens."""

import functools
import random
from unittest.mock import patch

import engine
import pytest
import torch
from decoder import Decoder

from dsv4 import CheckpointPolicy, KVCacheManager
from dsv4.kernels import ops

VOCABULARY = 128
MARGIN = 1e-5  # of the largest logit; fp32 sums in another order move logits by less
FAILURES = ["between layers", "in a handle", "after all layers"]
FEATURES = {
    "found tokens", "swapped out", "swapped in", "recomputed", "kept drafts", "rejected drafts",
    "forked", "finished", "cancelled inside", "cancelled between", *FAILURES,
}  # fmt: skip


class World:
    """A model, the sizes of a manager that is too small for its requests, and their tokens alone.

    Attributes:
        unit: Tokens of a short request; the longest has eight times as many.
        smallest_margin: Between the tokens that were chosen alone and others.
    """

    def __init__(self, ratios, *, block_tokens, num_blocks, host_blocks, unit):
        self.model = Decoder(ratios, block_tokens=block_tokens)
        self.num_blocks, self.host_blocks, self.unit = num_blocks, host_blocks, unit
        self.smallest_margin = torch.inf
        self.alone = functools.lru_cache(maxsize=None)(self._alone)

    def new_manager(self, **sizes):
        return KVCacheManager(
            self.model.config, max_forward_tokens=8 * self.unit, backend="reference",
            max_request_tokens=8 * self.unit, **sizes,
        )  # fmt: skip

    def _alone(self, prompt, rank, num_tokens):
        """All tokens of a request in a manager of its own: one prefill, then one by one."""
        num_blocks = -(-num_tokens // self.model.config.block_tokens)
        manager = self.new_manager(max_requests=1, num_blocks=num_blocks)
        slot, before, ids = manager.open_request(), 0, list(prompt)
        while len(ids) < num_tokens:
            plan = manager.prepare_forward([slot], [before], [len(ids)])
            logits = self.model(torch.tensor(ids[before:]), manager, plan)[-1]
            scores, tokens = logits.sort(descending=True)
            gaps = (scores[:-1] - scores[1:]) / logits.abs().max()
            nearest = float(gaps[max(rank - 1, 0) : rank + 1].min())
            self.smallest_margin = min(self.smallest_margin, nearest)
            before = len(ids)
            ids.append(int(tokens[rank]))
            rank = 0
        return ids

    def run(self, ids, manager, plan, *, failure, on_layer):
        """Run the model, calling back before each layer, with one of FAILURES inside or none."""

        def layer(idx, attention, hidden, handle):
            on_layer(idx)
            if idx == 1 and failure == "between layers":
                raise RuntimeError(failure)
            error = RuntimeError(failure) if idx == 1 and failure == "in a handle" else None
            with patch.object(ops, "write_layer", wraps=ops.write_layer, side_effect=error):
                return attention(hidden, handle)

        layers = [functools.partial(layer, *each) for each in enumerate(self.model.attention)]
        with patch.object(self.model, "attention", layers):
            logits = self.model(ids, manager, plan)
        if failure == "after all layers":
            raise RuntimeError(failure)
        return logits


@functools.cache
def make_world(name):
    if name == "short":  # a block has two entries: many boundaries in few tokens
        return World((4, 0), block_tokens=8, num_blocks=12, host_blocks=4, unit=12)
    return World((4, 0, 128), block_tokens=128, num_blocks=4, host_blocks=2, unit=48)


class Traffic:
    """Random requests to an engine, of which some are cancelled, and forwards that fail."""

    def __init__(self, world, seed):
        self.world, self.random = world, random.Random(seed)
        self.manager = world.new_manager(
            max_requests=4, num_blocks=world.num_blocks, num_checkpoints=6,
            host_blocks=world.host_blocks, host_slots=2,
            checkpoint_policy=CheckpointPolicy(every_blocks=1),
        )  # fmt: skip
        self.engine = engine.Engine(self.run_model, self.manager, budget=3 * world.unit)
        self.texts = [self.tokens(3 * world.unit) for _ in range(2)]
        self.failure_at = dict(zip(self.random.sample(range(10, 40), 3), FAILURES, strict=True))
        self.requests, self.counts = [], self.engine.counts

    def tokens(self, count):
        return [self.random.randrange(VOCABULARY) for _ in range(count)]

    def submit(self):
        text = self.random.choice(self.texts)
        shared = text[: self.random.randrange(len(text))]
        prompt = shared + self.tokens(self.random.randint(1, self.world.unit))
        self.requests += self.engine.submit(
            prompt, self.random.randint(8, 48),
            num_samples=self.random.choice([1, 1, 3]), salt=self.random.choice([b"", b"", b"me"]),
        )  # fmt: skip

    def cancel(self, requests, event):
        requests = [each for each in requests if not each.is_over]
        if requests:
            self.engine.end(self.random.choice(requests))
            self.counts[event] += 1

    def run_model(self, ids, manager, plan):
        """Run the model, with a cancelled request or a failure inside at times."""
        failure = self.failure_at.get(self.counts["steps"])
        self.counts[failure or "whole forwards"] += 1
        cancel_at = self.random.randrange(90)

        def on_layer(idx):
            if idx == cancel_at:
                self.cancel(self.engine.running, "cancelled inside")

        return self.world.run(ids, manager, plan, failure=failure, on_layer=on_layer)

    def step(self):
        try:
            return self.engine.step()
        except RuntimeError as error:
            if str(error) not in FAILURES:
                raise
            return True

    def run(self, num_prompts):
        while self.step() or num_prompts:
            self.manager.check_integrity()
            if num_prompts and self.random.random() < 0.4:
                self.submit()
                num_prompts -= 1
            if self.random.random() < 0.03:
                self.cancel(self.requests, "cancelled between")


@pytest.mark.parametrize("name, seed", [("short", 0), ("short", 2), ("short", 3), ("whole", 5)])
def test_every_request_gets_the_tokens_that_it_has_alone(name, seed):
    world = make_world(name)
    traffic = Traffic(world, seed)
    traffic.run(num_prompts=8)
    manager, counts = traffic.manager, traffic.counts
    for request in traffic.requests:
        assert request.is_over
        prompt = tuple(request.ids[: request.num_prompt])
        assert request.ids == world.alone(prompt, request.rank, len(request.ids))
    assert world.smallest_margin > MARGIN
    finished = [each for each in traffic.requests if len(each.ids) == each.num_tokens]
    assert len(finished) == counts["finished"] == len(traffic.requests) - counts["cancelled"]
    assert not manager.open_slots and not manager.swapped_requests
    stats = manager.stats()
    assert stats.num_free_blocks + stats.num_evictable_blocks == world.num_blocks
    expected = FEATURES if name == "short" else FEATURES - {"recomputed"}
    assert not {event for event in expected if not counts[event]}
