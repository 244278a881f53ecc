"""`Generation`: the samples of one HTTP request, from the engine's thread to the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from dsv4.engine import EngineThread, Output, SamplingParams
from dsv4.serve.api_error import ApiError
from dsv4.serve.metrics import Timings

Piece = str | ToolCall  # ReasoningText is a str


@dataclass(frozen=True)
class Job:
    """Prompts to continue.

    Attributes:
        params: Of every prompt; each has `params.n` samples.
        salt: Of the prefix cache.
        parsers: One for each sample, which splits its text, or None where all is content.
        checkpoint_at: A length at which later prompts may leave the prompt.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    salt: bytes
    parsers: Sequence[Any] | None = None
    checkpoint_at: int | None = None


class Choice:
    """One sample as a client sees it: text, reasoning, tool calls, and why it ended.

    Args:
        parser: Splits text into those, or None where all is text.
    """

    def __init__(self, index: int, parser: Any = None) -> None:
        self.index, self.parser = index, parser
        self.outputs: list[Output] = []
        self.pieces: list[Piece] = []
        self.finish_reason: str | None = None
        if parser is not None:
            self.pieces += response_events_to_chunks(parser.initial_events)
        self.num_taken = 0

    def add(self, output: Output) -> None:
        """Take what the engine gave."""
        self.outputs.append(output)
        is_last = output.finish_reason is not None
        try:
            self.pieces += self._parse(output.text, is_last)
        except Exception:  # a model may write what is no tool call: the rest is text
            self.parser = None
            self.pieces += self._parse(output.text, is_last)
        if is_last:
            self.finish_reason = "tool_calls" if self.tool_calls else output.finish_reason

    def _parse(self, text: str, is_last: bool) -> list[Piece]:
        if self.parser is None:
            return [text] if text else []
        pieces: list[Piece] = response_events_to_chunks(self.parser.feed(text))
        if is_last:
            with suppress(ValueError, RuntimeError):  # the text ends inside of a tool call
                pieces += response_events_to_chunks(self.parser.finalize()[1])
        return pieces

    def take_new(self) -> list[Piece]:
        """Return the pieces since the last call."""
        new, self.num_taken = self.pieces[self.num_taken :], len(self.pieces)
        return new

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [each for each in self.pieces if isinstance(each, ToolCall)]

    @property
    def reasoning(self) -> str:
        return "".join(each for each in self.pieces if isinstance(each, ReasoningText))

    @property
    def text(self) -> str:
        """Text that is neither reasoning nor a tool call."""
        return "".join(each for each in self.pieces if type(each) is str)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


class Generation:
    """The samples of one HTTP request, `params.n` for each prompt.

    Attributes:
        choices: Samples of the first prompt, then those of the second, and so on.
    """

    def __init__(self, engine: EngineThread, timings: Timings, job: Job) -> None:
        self.engine, self.timings, self.job, self.n = engine, timings, job, job.params.n
        parsers = job.parsers or [None] * (len(job.prompts) * self.n)
        self.choices = [Choice(index, parser) for index, parser in enumerate(parsers)]
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._last: dict[int, float] = {}  # when a choice's last tokens came

    def on_output(self, number: int, start: float, output: Output) -> None:
        """Hand over what came for a prompt; runs on the engine's thread."""
        index = number * self.n + output.index
        now = time.monotonic()
        if output.token_ids:
            last = self._last.get(index)
            self._last[index] = now
            self.timings.note(start, last, now, len(output.token_ids))
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, output))

    async def changed(self) -> AsyncIterator[tuple[Choice, Output]]:
        """Yield each output with its choice until all choices have ended."""
        num_open = len(self.choices)
        while num_open:
            index, output = await self._queue.get()
            if output.finish_reason in ("cancelled", "timeout", "error"):
                raise self._failure(output)
            self.choices[index].add(output)
            num_open -= output.finish_reason is not None
            yield self.choices[index], output

    def _failure(self, output: Output) -> ApiError:
        if output.finish_reason == "timeout":
            return ApiError("The request took too long", status=504, code="timeout")
        if output.finish_reason == "cancelled":
            return ApiError("The server is stopping", status=503, code="stopping")
        if self.engine.fatal_error is not None:
            return dead(self.engine.fatal_error)
        return ApiError(f"Generation failed: {output.error}", status=500)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.job.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that the prefix cache had."""
        firsts = [choice.outputs for choice in self.choices[:: self.n]]
        return sum(outputs[0].num_cached_tokens for outputs in firsts if outputs)

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)


def dead(reason: str) -> ApiError:
    """Return the refusal of everything once the engine has died."""
    return ApiError(f"The engine is dead: {reason}", status=503, code="engine_dead")
