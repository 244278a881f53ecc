"""`/v1/responses`, without a store of earlier responses."""

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall

from dsv4.serve.api_error import ApiError
from dsv4.serve.endpoint import Endpoint, check_tools, event
from dsv4.serve.fields import Fields
from dsv4.serve.generation import Generation, Job, Piece


class ResponseEndpoint(Endpoint):
    """Answers requests of the Responses API."""

    known: ClassVar = {*ResponseHandler._valid_params_class.__annotations__, "chat_template_kwargs"}
    refused: ClassVar = {
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "previous_response_id": (),
        "prompt": (),
        "tool_choice": ("auto", "none"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    def read(self, fields: Fields) -> Job:
        given = fields.body.get("input")
        if not isinstance(given, str | list) or not given:
            raise ApiError("Invalid input: expected a text or a list of items", param="input")
        fields.get("instructions", str)
        layout = fields.get("text", dict, {}).get("format") or {"type": "text"}
        if layout != {"type": "text"}:
            raise ApiError("Invalid text.format: expected text", param="text.format")
        tools = ResponseHandler._normalize_tools(check_tools(fields))
        effort = fields.get("reasoning", dict, {}).get("effort")
        kwargs = {} if effort is None else {"reasoning_effort": effort}
        messages = self._messages(fields)
        prompt, end = self.render(fields, messages, tools, param="input", **kwargs)
        room = self.served.room_after(prompt)
        limit = fields.integer("max_output_tokens", room, 1, 1 << 31)
        params = self.sampling(fields, is_parsed=True, max_new_tokens=limit)
        return Job([prompt], params, fields.salt(), self.parsers(prompt, 1), end)

    def _messages(self, fields: Fields) -> list[Any]:
        try:
            return list(ResponseHandler._normalize_input(fields.body))
        except (AttributeError, KeyError, TypeError) as error:
            message = f"Invalid input: {type(error).__name__}: {error}"
            raise ApiError(message, param="input") from error

    def answer(self, head: dict[str, Any], fields: Fields, generation: Generation) -> Any:
        builder = _builder(head, fields)
        for piece in generation.choices[0].pieces:
            _add(builder, piece)
        _end(builder)
        return _response(builder, generation)

    async def events(
        self, head: dict[str, Any], fields: Fields, generation: Generation
    ) -> AsyncIterator[str]:
        builder = _builder(head, fields)
        yield "".join(builder.start_response())
        try:
            async for choice, _ in generation.changed():
                for piece in choice.take_new():
                    yield "".join(_add(builder, piece))
        except ApiError as error:
            yield "".join(builder.error(str(error)))
            return
        yield "".join(_end(builder))
        response = _response(builder, generation)
        kind, number = f"response.{response['status']}", builder.seq
        yield event({"type": kind, "sequence_number": number, "response": response})


def _builder(head: dict[str, Any], fields: Fields) -> Any:
    echoed = ("instructions", "max_output_tokens", "temperature", "top_p")
    about = {
        "id": f"resp_{head['id']}",
        "created_at": head["created"],
        "model": head["model"],
        "object": "response",
        "tools": [],
        "tool_choice": fields.body.get("tool_choice", "auto"),
        "parallel_tool_calls": True,
        **{name: fields.body[name] for name in echoed if name in fields.body},
    }
    return _ResponseStreamBuilder(request_id=head["id"], response_defaults=about)


def _add(builder: Any, piece: Piece) -> list[str]:
    """Return the events of one piece; reasoning comes first, then one message, then calls."""
    if isinstance(piece, ReasoningText):
        start = [] if builder.reasoning_open else builder.start_reasoning()
        return [*start, *builder.reasoning_delta(piece)]
    if isinstance(piece, ToolCall):
        name = f"call_{builder.resp_id}_{len(builder.tool_calls)}"
        return [*_end(builder), *builder.tool_call(name, piece.name, piece.arguments)]
    done = builder.finish_reasoning() if builder.reasoning_open else []
    start = [] if builder.message_open else builder.start_message()
    return [*done, *start, *builder.text_delta(piece)]


def _end(builder: Any) -> list[str]:
    """Return the events that close reasoning and message; a response has a message."""
    done = builder.finish_reasoning() if builder.reasoning_open else []
    if builder.message_item is None and not builder.message_open:
        done += builder.start_message()
    return done + (builder.finish_message() if builder.message_open else [])


def _response(builder: Any, generation: Generation) -> Any:
    usage = compute_usage(generation.num_prompt_tokens, generation.num_new_tokens)
    usage.input_tokens_details.cached_tokens = generation.num_cached_tokens
    reasoning = [] if builder.reasoning_item is None else [builder.reasoning_item]
    output = [*reasoning, builder.message_item, *builder.tool_calls]
    about: dict[str, Any] = {"output": output, "usage": usage}
    if generation.choices[0].finish_reason == "length":
        why = {"reason": "max_output_tokens"}
        response = builder._response("incomplete", **about, incomplete_details=why)
    else:
        response = builder._response("completed", **about)
    return response.model_dump(mode="json")
