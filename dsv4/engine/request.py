"""`Request`, its samples, and the `Output` that a client gets of them."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.prefix.disk_tier import Prefetch
from dsv4.cache.swap import SwappedRequest
from dsv4.engine.drafts import Ends
from dsv4.engine.sampling_params import SamplingParams
from dsv4.engine.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class TokenLogprobs(NamedTuple):
    """Logarithms of probabilities at one place: the chosen token's, and the likeliest tokens'."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Output:
    """New tokens of one sample of a request.

    Attributes:
        request_id: The request's.
        index: Number of the sample, 0 to n - 1.
        token_ids, text: The new ones. The text never has a stop text, nor what may become one.
        logprobs: Of each new token; None if the request does not ask.
        finish_reason: None until the sample's last output.
        stop: The stop text that was found.
        error: What went wrong, if something did.
        num_prompt_tokens, num_cached_tokens: Tokens of the prompt, and those of them that the
            prefix cache had.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


OnOutput = Callable[[Output], None]


@dataclass(eq=False)
class Request:
    """A prompt and its samples.

    Attributes:
        number: In the order of coming.
        deadline: The time at which it ends, of the engine's clock; None for none.
    """

    request_id: str
    number: int
    prompt: IntArray
    params: SamplingParams
    on_output: OnOutput
    salt: bytes = b""
    checkpoint_at: int | None = None
    deadline: float | None = None
    num_cached_tokens: int = 0
    prefetch: Prefetch | None = None
    samples: list["Sample"] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(sample.is_over for sample in self.samples)


@dataclass(eq=False)
class Sample:
    """One answer to a request's prompt.

    Attributes:
        ids: The prompt, then the generated tokens that the host knows. The last one, or the
            pending one, has not been run yet.
        num_pending: Chosen tokens that are on the device alone.
        ends: As of `propose_drafts`.
        others: Samples of the same prompt that are forked off once that has run.
        slot, swapped: Its slot while it runs, else -1; its cache while it waits on the host.
    """

    request: Request
    index: int
    ids: list[int]
    seed: int
    stream: TextStream | None = None
    ends: Ends = field(default_factory=dict)
    others: list["Sample"] = field(default_factory=list)
    num_pending: int = 0
    slot: int = -1
    swapped: SwappedRequest | None = None
    is_over: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """The order of coming."""
        return self.request.number, self.index

    @property
    def num_tokens(self) -> int:
        """Tokens so far, pending ones too."""
        return len(self.ids) + self.num_pending

    @property
    def most_tokens(self) -> int:
        """Tokens at which it ends."""
        return len(self.request.prompt) + self.request.params.max_new_tokens

    @property
    def answer(self) -> list[int]:
        return self.ids[len(self.request.prompt) :]


def make_samples(request: Request, new_stream: Callable[[], TextStream | None]) -> list[Sample]:
    seed = secrets.randbits(62) if request.params.seed is None else request.params.seed
    request.samples = [
        Sample(request, index, request.prompt.tolist(), seed + (index << 40), new_stream())
        for index in range(request.params.n)
    ]
    return request.samples
