"""`Endpoint`: one API of the server, from a request's JSON to its answer or stream."""

import asyncio
import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from transformers.cli.serving.utils import (
    BaseHandler,
    Modality,
    build_response_parser,
    get_response_template,
)

from dsv4.engine import SamplingParams
from dsv4.serve.api_error import ApiError
from dsv4.serve.fields import OWN_FIELDS, Fields, Refused
from dsv4.serve.generation import Generation, Job
from dsv4.serve.served_model import ServedModel

TEXT_PARTS = ("text", "input_text", "output_text")
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Endpoint(ABC):
    """One API; transformers' app calls `handle_request`.

    Attributes:
        known: Fields that OpenAI's API has.
        refused: See `Fields`.
    """

    known: ClassVar[Collection[str]]
    refused: ClassVar[Refused]

    def __init__(self, served: ServedModel, reader: ThreadPoolExecutor) -> None:
        self.served, self.reader = served, reader

    @abstractmethod
    def read(self, fields: Fields) -> Job:
        """Check a request and make its prompts; runs on the reader's thread."""

    @abstractmethod
    def answer(self, head: dict[str, Any], fields: Fields, generation: Generation) -> Any:
        """Return the JSON of a generation that has ended."""

    @abstractmethod
    def events(
        self, head: dict[str, Any], fields: Fields, generation: Generation
    ) -> AsyncIterator[str]:
        """Yield the events of a stream."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        """Answer a request, or refuse it with `ApiError`."""
        known = {*self.known, *OWN_FIELDS} - {"generation_config"}
        fields = Fields(body, known=known, refused=self.refused)
        model = fields.get("model", str)
        if model is None:
            raise ApiError("you must provide a model parameter", param="model")
        if model != self.served.name:
            raise model_not_found(model)
        is_stream = fields.get("stream", bool, False)
        job = await asyncio.get_running_loop().run_in_executor(self.reader, self.read, fields)
        generation = self.served.submit(request_id, job)
        head = {"id": request_id, "created": int(time.time()), "model": model}
        if is_stream:
            events = self._guarded(self.events(head, fields, generation))
            return StreamingResponse(events, media_type="text/event-stream")
        async for _ in generation.changed():
            pass
        return JSONResponse(self.answer(head, fields, generation))

    @staticmethod
    async def _guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for event in events:
                yield event
        except ApiError as error:
            yield error.event()

    def sampling(self, fields: Fields, *, is_parsed: bool, **given: Any) -> SamplingParams:
        """Return a request's sampling parameters; parsers need the special tokens of a text."""
        served = self.served
        template = get_response_template(served.tokenizer, served.model) if is_parsed else None
        return fields.sampling(served, skip_special_tokens=template is None, **given)

    def render(
        self, fields: Fields, messages: list[Any], tools: Any, *, param: str, **template_kwargs: Any
    ) -> tuple[list[int], int]:
        """Return the prompt that the chat template makes of messages, and where it asks to answer.

        A client may drop the reasoning of an answer, so that its next prompt leaves this one there.
        """
        tokenizer = self.served.tokenizer
        if tokenizer.chat_template is None:
            raise ApiError("This model has no chat template: see --chat-template")
        template_kwargs |= fields.get("chat_template_kwargs", dict, {})
        taken = template_kwargs.keys() & inspect.signature(tokenizer.apply_chat_template).parameters
        if taken:
            raise ApiError(f"Invalid chat_template_kwargs: {min(taken)} is the server's")
        try:
            # Clients send back messages with every field, null where there is nothing.
            messages = [{k: v for k, v in each.items() if v is not None} for each in messages]
            _check_parts(messages, param)
            inputs = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
            prompt, history = (
                tokenizer.apply_chat_template(
                    inputs, add_generation_prompt=is_asked, tools=tools, tokenize=True,
                    return_dict=True, **template_kwargs,
                )["input_ids"]
                for is_asked in (True, False)
            )  # fmt: skip
        except ApiError:
            raise
        except Exception as error:  # a template may fail in any way at what a client sent
            message = f"Invalid {param}: {type(error).__name__}: {error}"
            raise ApiError(message, param=param) from error
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, history, strict=False))
        return list(prompt), sum(1 for _ in same)

    def parsers(self, prompt: list[int], n: int) -> list[Any]:
        """Return what splits each sample's text into content, reasoning and tool calls."""
        served = self.served
        return [build_response_parser(served.tokenizer, served.model, prompt) for _ in range(n)]

    def token_text(self, token: int) -> str:
        return str(self.served.tokenizer.decode([token]))


def model_not_found(name: str) -> ApiError:
    """Return the refusal of a model that is not served."""
    message = f"The model `{name}` does not exist"
    return ApiError(message, status=404, param="model", code="model_not_found")


def event(value: dict[str, Any]) -> str:
    """Return a JSON object as an event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def check_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Return the functions that the model may call; `tool_choice` "none" hides them."""
    tools = fields.get("tools", list, [])
    if not all(isinstance(tool, dict) and tool.get("type") == "function" for tool in tools):
        raise ApiError("Invalid tools: expected functions", param="tools")
    return None if fields.body.get("tool_choice") == "none" else tools or None


def _check_parts(messages: list[dict[str, Any]], param: str) -> None:
    if not messages:
        raise ApiError(f"Invalid {param}: expected at least one message", param=param)
    for message in messages:
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, str | list | None):
            raise TypeError("expected a role and a content that is a text or a list of parts")
        for part in content if isinstance(content, list) else []:
            if part["type"] not in TEXT_PARTS or not isinstance(part["text"], str):
                raise TypeError(f"expected text, got a part of type {part['type']}")
