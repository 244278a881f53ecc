"""A serving engine on dsv4, small but whole: read it from top to bottom.

python examples/engine.py

Each step is one forward that mixes prefill chunks, decode steps and the verification of drafts.
Prompts are shared through the prefix cache. Requests wait on the host when blocks run out, and run
their tokens again when the host is full too. The model, in `decoder.py`, needs transformers.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import eq
from typing import NamedTuple

import torch
from decoder import Decoder
from torch import Tensor

from dsv4 import CheckpointPolicy, ForwardPlan, KVCacheManager, SwappedRequest
from dsv4.engine.drafts import Ends, propose_drafts
from dsv4.errors import NoFreeSlotError, OutOfBlocksError

AGING = 16  # tokens in the prefix cache that let a request overtake the one before it


@dataclass(eq=False)
class Request:
    """A prompt and what is generated after it.

    Attributes:
        number, rank: The prompt's, in the order of coming, and that of this sample's first token
            among the logits, so that samples of a prompt differ.
        ids: The prompt, then the generated tokens. The last one has not been run yet.
        num_prompt, num_tokens: Tokens of the prompt, and those at which the request is finished.
        ends: As of `propose_drafts`.
        samples: Other samples of the prompt, which are forked off once that has run.
        slot, swapped: Its slot while it runs, else -1; its cache while it waits on the host.
    """

    number: int
    rank: int
    ids: list[int]
    num_prompt: int
    num_tokens: int
    salt: bytes
    ends: Ends = field(default_factory=dict)
    samples: list["Request"] = field(default_factory=list)
    slot: int = -1
    swapped: SwappedRequest | None = None
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.number}.{self.rank}"


class Row(NamedTuple):
    """The tokens of one request in a forward: known ones from `before` on, then drafts."""

    request: Request
    before: int
    known: list[int]
    drafts: list[int]


class Engine:
    """Serves requests with one model and one manager, which must have a prefix cache.

    A step has up to `budget` tokens. Running requests have a slot, waiting ones have none.
    """

    def __init__(self, model: Callable[..., Tensor], manager: KVCacheManager, budget: int) -> None:
        self.model, self.manager, self.budget = model, manager, budget
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.log: Callable[[str], None] = lambda line: None

    def submit(
        self, prompt: list[int], num_new: int, *, num_samples: int = 1, salt: bytes = b""
    ) -> list[Request]:
        """Queue a prompt and return its samples; requests with different salts share nothing."""
        num_tokens, longest = len(prompt) + num_new, self.manager.capacity.longest_request
        if not 0 < len(prompt) < num_tokens <= longest:
            raise ValueError(f"Invalid request: {len(prompt)} + {num_new} of {longest} tokens")
        self.counts["prompts"] += 1
        samples = [
            Request(self.counts["prompts"], rank, prompt[:], len(prompt), num_tokens, salt)
            for rank in range(num_samples)
        ]
        self.enqueue(samples)
        return samples

    def enqueue(self, samples: list[Request]) -> None:
        """Queue the first of some samples of a prompt; it takes the others along."""
        if samples:
            samples[0].samples = samples[1:]
            self.waiting.append(samples[0])

    def end(self, request: Request, event: str = "cancelled") -> None:
        """End a request at any time, also while a forward with it runs."""
        if not request.is_over:
            self.restart(request, event)
            self.waiting.remove(request)
            request.is_over = True
            self.enqueue([each for each in request.samples if not each.is_over])

    def restart(self, request: Request, event: str) -> None:
        """Give up the cache of a request and queue it; full blocks stay in the prefix cache."""
        self.note(event, request)
        if request.slot >= 0:
            self.manager.free_request(request.slot)
            self.running.remove(request)
        if request.swapped is not None:
            self.manager.drop_swapped(request.swapped)
        request.slot, request.swapped = -1, None
        if request not in self.waiting:
            self.waiting.append(request)

    def step(self) -> bool:
        """Run one forward; False if there is nothing to do. Can be called again if it raises."""
        self.counts["steps"] += 1
        self.admit()
        rows, plan = self.prepare()
        if plan is None:
            return False
        parts = [f"{row[0]} {row.before}+{len(row.known)}+{len(row.drafts)}" for row in rows]
        self.log(f"step {self.counts['steps']}: {', '.join(parts)}")
        try:
            ids = torch.tensor([token for row in rows for token in row.known + row.drafts])
            logits = self.model(ids, self.manager, plan)
        except BaseException:
            self.recover(rows, plan)
            raise
        self.take_tokens(rows, logits)
        return True

    def admit(self) -> None:
        """Open waiting requests while the known tokens of all open ones fit."""
        manager = self.manager
        while self.waiting and manager.num_free_slots:
            request = max(self.waiting, key=self.value_of)
            slots = [each.slot for each in self.running]
            lengths = [self.next_length(each) for each in self.running]
            # Blocks that it would find are not taken off: they may be among the evictable ones.
            own = -(-self.next_length(request) // manager.config.block_tokens)
            spare = manager.num_free_blocks + manager.stats().num_evictable_blocks
            if self.running and manager.blocks_needed(slots, lengths) + own > spare:
                return
            try:
                if request.swapped is not None:
                    request.slot, found = manager.swap_in(request.swapped), 1
                else:
                    request.slot, found, *_ = manager.resume_request(request.ids, salt=request.salt)
            except OutOfBlocksError:  # of swap_in: others on the host keep blocks on the device
                self.restart(request, "recomputed")
                continue
            self.note("swapped in" if request.swapped else "found tokens", request, found)
            request.swapped = None
            self.waiting.remove(request)
            self.running.append(request)

    def value_of(self, request: Request) -> int:
        """Count the tokens of a request that need not run; later ones have a handicap."""
        found = self.manager.match_prefix(request.ids, salt=request.salt).num_tokens
        return (request.swapped.length if request.swapped else found) - AGING * request.number

    def next_length(self, request: Request) -> int:
        """Return the length of a request once its known tokens have run, with drafts."""
        return min(len(request.ids) + self.manager.config.drafts_per_step, request.num_tokens - 1)

    def prepare(self) -> tuple[list[Row], ForwardPlan | None]:
        """Plan a forward of all running requests, or of those that fit."""
        while self.running:
            rows = self.choose_rows()
            slots, before = [row.request.slot for row in rows], [row.before for row in rows]
            after = [row.before + len(row.known) + len(row.drafts) for row in rows]
            try:
                return rows, self.manager.prepare_forward(slots, before, after)
            except OutOfBlocksError as error:
                self.make_room(error)
        return [], None

    def choose_rows(self) -> list[Row]:
        """Share the tokens of a step: decode steps first, then the shortest rest of a prompt."""
        rows, budget, lengths = [], self.budget, self.manager.lengths
        for request in sorted(self.running, key=lambda each: len(each.ids) - lengths[each.slot]):
            ids, before, drafts = request.ids, int(lengths[request.slot]), list[int]()
            known = ids[before : before + budget]
            if len(known) == 1 and len(ids) > request.num_prompt:
                most = min(self.next_length(request) - len(ids), budget - 1)
                drafts = propose_drafts(ids, most, request.ends)
            if known:
                rows.append(Row(request, before, known, drafts))
            budget -= len(known) + len(drafts)
        return rows

    def make_room(self, error: OutOfBlocksError) -> None:
        """Preempt the last request, or give up what another one keeps while it is swapped out."""
        self.log(f"  {error.needed} blocks needed, {error.free} free, {error.evictable} evictable")
        if len(self.running) == 1:
            # There is one: `submit` refuses a request that does not fit alone.
            return self.restart(next(each for each in self.waiting if each.swapped), "recomputed")
        request = max(self.running, key=lambda each: (each.number, each.rank))
        try:
            request.swapped = self.manager.swap_out(request.slot)
        except (NoFreeSlotError, OutOfBlocksError):  # the host is full
            return self.restart(request, "recomputed")
        self.note("swapped out", request)
        self.running.remove(request)
        self.waiting.append(request)
        request.slot = -1

    def recover(self, rows: list[Row], plan: ForwardPlan) -> None:
        """Make the requests of a forward that failed what they were before it."""
        if not plan.is_complete:
            plan.cancel()  # does nothing where a handle has failed, which cancels by itself
            self.log(f"  failed: back to the lengths {plan.surviving_lengths.tolist()}")
            return
        for row in rows:  # all layers are written, and only the logits are missing
            if not row.request.is_over:
                self.restart(row.request, "restarted")

    def take_tokens(self, rows: list[Row], logits: Tensor) -> None:
        """Keep the drafts that the model agrees with, and add the token after them."""
        new: list[tuple[Request, list[int]]] = []
        kept: dict[int, int] = {}  # lengths by slot
        sizes = [len(row.known) + len(row.drafts) for row in rows]
        for (request, before, known, drafts), scores in zip(rows, logits.split(sizes), strict=True):
            length = before + len(known)
            if request.is_over or length < len(request.ids):
                continue  # cancelled inside the forward, or its prompt goes on
            if length == request.num_prompt:
                new += self.first_tokens(request, scores[-1])
                continue
            tokens = scores[len(known) - 1 :].argmax(-1).tolist()
            num_kept = [*map(eq, tokens, drafts), False].index(False)
            self.counts["kept drafts"] += num_kept
            self.counts["rejected drafts"] += len(drafts) - num_kept
            kept[request.slot] = length + num_kept
            new.append((request, tokens[: num_kept + 1]))
        self.manager.truncate(list(kept), list(kept.values()))
        self.manager.note_tokens(
            [request.slot for request, _ in new],
            [token for _, tokens in new for token in tokens],
            start=[len(request.ids) for request, _ in new],
            counts=[len(tokens) for _, tokens in new],
        )
        for request, tokens in new:
            request.ids += tokens
            if len(request.ids) == request.num_tokens:
                self.end(request, "finished")

    def first_tokens(self, request: Request, scores: Tensor) -> list[tuple[Request, list[int]]]:
        """Fork the samples of a prompt that has run; return the first token of each."""
        ranked = scores.argsort(descending=True, stable=True).tolist()
        samples, request.samples = request.samples, []
        new = [(request, [ranked[request.rank]])]
        for sample in [each for each in samples if not each.is_over]:
            try:
                sample.slot = self.manager.fork(request.slot)
            except (NoFreeSlotError, OutOfBlocksError):
                self.waiting.append(sample)  # it will run the prompt by itself, or find it
                continue
            self.note("forked", sample)
            self.running.append(sample)
            new.append((sample, [ranked[sample.rank]]))
        return new

    def note(self, event: str, request: Request, count: int = 1) -> None:
        self.counts[event] += count
        self.log(f"  {request} {event}" + f" {count}" * (count != 1))


def main() -> None:
    """Serve some prompts with too few blocks, and print what each step does."""
    torch.set_num_threads(1)
    model, policy = Decoder(), CheckpointPolicy(every_blocks=1)
    manager = KVCacheManager(
        model.config, max_requests=4, num_blocks=6, max_forward_tokens=128, num_checkpoints=6,
        checkpoint_policy=policy, host_blocks=3, host_slots=2, backend="reference",
    )  # fmt: skip
    engine = Engine(model, manager, budget=128)
    engine.log = print
    text = torch.randint(0, 128, (320,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = engine.submit(text[:150], 30, num_samples=2) + engine.submit(text[:90], 50)
    requests += engine.submit(text[:140] + text[:60], 70) + engine.submit(text[50:], 9)
    while engine.step():
        if engine.counts["steps"] == 9:
            engine.end(requests[1])
            requests += engine.submit(text[:130] + [7] * 20, 12)
    print(*(f"{each}: {each.ids[each.num_prompt :]}" for each in requests), sep="\n")


if __name__ == "__main__":
    main()
