"""`Fields`: typed reading of a request's JSON, which refuses by name what does not fit."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from dsv4.engine import SamplingParams
from dsv4.serve.api_error import ApiError
from dsv4.serve.served_model import ServedModel

# Fields beyond OpenAI's, with the names that vLLM gave them.
OWN_FIELDS = frozenset(
    {"cache_salt", "ignore_eos", "min_p", "repetition_penalty", "stop_token_ids", "top_k"}
)
LARGEST_SEED = (1 << 63) - 1
Refused = Mapping[str, tuple[Any, ...]]  # values that ask for nothing, by field


class Fields:
    """The body of a request; null is as good as absent.

    Args:
        body: The JSON object.
        known: Names of all fields that the API has; any other is refused.
        refused: Fields that would change the answer and are not supported.
    """

    def __init__(
        self, body: Mapping[str, Any], *, known: Collection[str], refused: Refused
    ) -> None:
        self.body = {name: value for name, value in body.items() if value is not None}
        for name, value in self.body.items():
            if name not in known:
                raise ApiError(f"Unrecognized request argument supplied: {name}", param=name)
            if name in refused and value not in refused[name]:
                raise ApiError(f"{name} is not supported by this server", param=name)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field of a type, or the default."""
        value = self.body.get(name, default)
        if value is not default and type(value) is not kind:
            raise ApiError(
                f"Invalid type of {name}: expected {kind.__name__}, got {type(value).__name__}",
                param=name,
            )
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a finite number from `low` to `high`."""
        value = self.body.get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise _invalid(name, f"a number from {low:g} to {high:g}", value)
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """Return an integer from `low` to `high`, or the default."""
        value = self.body.get(name, default)
        if value is not default and (type(value) is not int or not low <= value <= high):
            raise _invalid(name, f"an integer from {low} to {high}", value)
        return value

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """Return a text, or a list of up to `most` texts, none of them empty."""
        value = self.body.get(name, [])
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list)
            or len(texts) > most
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise ApiError(
                f"Invalid {name}: expected a text or up to {most} texts, none of them empty",
                param=name,
            )
        return tuple(_encodable(text, name) for text in texts)

    def salt(self) -> bytes:
        """Return the salt of the prefix cache; requests of different salts share nothing."""
        return _encodable(self.get("cache_salt", str, ""), "cache_salt").encode()

    def sampling(self, served: ServedModel, **given: Any) -> SamplingParams:
        """Return the sampling parameters that all APIs share, and the `given` ones."""
        defaults, vocab_size = served.defaults, served.model.config.vocab_size
        own = self.get("stop_token_ids", list, [])
        if not all(type(token) is int and 0 <= token < vocab_size for token in own):
            raise ApiError("Invalid stop_token_ids: expected token ids", param="stop_token_ids")
        ends = () if self.get("ignore_eos", bool, False) else served.stop_token_ids
        values: dict[str, Any] = {
            "temperature": self.number("temperature", defaults["temperature"], 0, 2),
            "top_p": self.number("top_p", defaults["top_p"], 0, 1),
            "top_k": self.integer("top_k", defaults["top_k"], -1, vocab_size),
            "min_p": self.number("min_p", 0.0, 0, 1),
            "presence_penalty": self.number("presence_penalty", 0.0, -2, 2),
            "frequency_penalty": self.number("frequency_penalty", 0.0, -2, 2),
            "repetition_penalty": self.number("repetition_penalty", 1.0, 0.01, 100),
            "seed": self.integer("seed", None, -LARGEST_SEED - 1, LARGEST_SEED),
        }
        values["top_k"] = max(values["top_k"], 0)  # vLLM's -1 is every token
        if values["top_p"] == 0:
            values["top_p"] = math.ulp(0.0)  # the best token alone
        ends = (*ends, *own)
        return SamplingParams(stop_token_ids=ends, timeout=served.timeout, **values, **given)


def _encodable(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"Invalid {name}: expected text that UTF-8 can hold", param=name) from error
    return text


def _invalid(name: str, expected: str, value: Any) -> ApiError:
    text = repr(value)
    shown = text if len(text) <= 40 else text[:40] + "..."
    return ApiError(f"Invalid {name}: expected {expected}, got {shown}", param=name)
