"""`SamplingParams`: how the tokens of one request are chosen, and when it ends."""

import math
from dataclasses import dataclass

from dsv4.checks import check_int

LARGEST_SEED = 2**63 - 1
MOST_LOGPROBS = 20
MOST_SAMPLES = 128


@dataclass(frozen=True)
class SamplingParams:
    """The choices of one request.

    Attributes:
        max_new_tokens: The most tokens that are generated.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: The likeliest tokens whose probabilities add up to it are kept.
        top_k: So many of the likeliest tokens are kept; 0 keeps all.
        min_p: Tokens are kept whose probability is at least this share of the likeliest one's.
        presence_penalty, frequency_penalty: Taken off the logit of a generated token, once and for
            each time it was generated.
        repetition_penalty: Divides positive logits of tokens in prompt and answer, multiplies
            negative ones.
        seed: Makes the answer repeatable; None takes another one each time.
        stop: Texts before which the answer ends.
        stop_token_ids: Tokens at which the answer ends, such as the model's end of text.
        logprobs: Report the logarithm of each token's probability, and of so many of the
            likeliest; None reports nothing.
        n: Answers to the same prompt.
        timeout: Seconds after which the request ends.
        skip_special_tokens: Leave special tokens out of the text.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1
    timeout: float | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, at_least=1)
        check_int("top_k", self.top_k, at_least=0)
        check_int("n", self.n, at_least=1, at_most=MOST_SAMPLES)
        if self.seed is not None:
            check_int("seed", self.seed, at_least=-LARGEST_SEED - 1, at_most=LARGEST_SEED)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, at_least=0, at_most=MOST_LOGPROBS)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, is_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, is_open=True)
        if self.timeout is not None:
            _check_range("timeout", self.timeout, 0.0, math.inf, is_open=True)
        if isinstance(self.stop, str) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise ValueError(f"Invalid stop: expected texts that are not empty, got {self.stop!r}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, at_least=0)

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken."""
        return self.temperature == 0

    @property
    def has_filter(self) -> bool:
        """Tokens are left out by their rank."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def has_penalty(self) -> bool:
        """Logits depend on the tokens before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _check_range(
    name: str, value: float, least: float, most: float, *, is_open: bool = False
) -> None:
    """Refuse what is no number from `least` to `most`, or just above `least`; NaN too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (least < value if is_open else least <= value) and value <= most:
        return
    expected = f"above {least:g} and at most {most:g}" if is_open else f"{least:g} to {most:g}"
    raise ValueError(f"Invalid {name}: expected a number {expected}, got {value!r}")
