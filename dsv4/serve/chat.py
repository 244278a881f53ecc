"""`/v1/chat/completions`."""

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall

from dsv4.engine import Output
from dsv4.serve.api_error import ApiError
from dsv4.serve.endpoint import Endpoint, check_tools, event, finite
from dsv4.serve.fields import Fields
from dsv4.serve.generation import Choice, Generation, Job, Piece


class ChatEndpoint(Endpoint):
    """Answers chats."""

    known = frozenset(ChatCompletionHandler._valid_params_class.__annotations__)
    refused: ClassVar = {
        "audio": (),
        "function_call": (),
        "functions": (),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "web_search_options": (),
    }

    def read(self, fields: Fields) -> Job:
        messages = fields.get("messages", list)
        if messages is None:
            raise ApiError("Missing required parameter: 'messages'", param="messages")
        effort = fields.get("reasoning_effort", str)
        given = {} if effort is None else {"reasoning_effort": effort}
        tools = check_tools(fields)
        prompt, end = self.render(fields, messages, tools, param="messages", **given)
        room = self.served.room_after(prompt)
        limit = "max_completion_tokens" if "max_completion_tokens" in fields.body else "max_tokens"
        top = fields.integer("top_logprobs", 0, 0, 20)
        has_logprobs = fields.get("logprobs", bool, False)
        if top and not has_logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        read_stream_options(fields)
        params = self.sampling(
            fields,
            is_parsed=True,
            max_new_tokens=fields.integer(limit, room, 1, 1 << 31),
            n=fields.integer("n", 1, 1, 128),
            stop=fields.strings("stop", 4),
            logprobs=top if has_logprobs else None,
        )
        return Job([prompt], params, fields.salt(), self.parsers(prompt, params.n), end)

    def answer(self, head: dict[str, Any], fields: Fields, generation: Generation) -> Any:
        choices = [
            {
                "index": choice.index,
                "message": self._message(head, choice),
                "logprobs": self._logprobs(choice.outputs),
                "finish_reason": choice.finish_reason,
            }
            for choice in generation.choices
        ]
        head = {**head, "id": f"chatcmpl-{head['id']}", "object": "chat.completion"}
        return {**head, "choices": choices, "usage": usage(generation)}

    async def events(
        self, head: dict[str, Any], fields: Fields, generation: Generation
    ) -> AsyncIterator[str]:
        has_usage = read_stream_options(fields)
        chunk = {**head, "id": f"chatcmpl-{head['id']}", "object": "chat.completion.chunk"}
        chunk |= {"usage": None} if has_usage else {}

        def one(choice: Choice, delta: dict[str, Any], **more: Any) -> str:
            about = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            return event({**chunk, "choices": [{**about, **more}]})

        for choice in generation.choices:
            yield one(choice, {"role": "assistant", "content": ""})
        async for choice, output in generation.changed():
            logprobs = self._logprobs([output])
            pieces = choice.take_new()
            deltas = [self._delta(head, choice, piece) for piece in pieces]
            for delta in deltas or ([{}] if logprobs else []):
                yield one(choice, delta, logprobs=logprobs)
                logprobs = None
            if choice.finish_reason is not None:
                yield one(choice, {}, finish_reason=choice.finish_reason)
        if has_usage:
            yield event({**chunk, "choices": [], "usage": usage(generation)})
        yield "data: [DONE]\n\n"

    def _message(self, head: dict[str, Any], choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                _tool_call(head, choice, number, call)
                for number, call in enumerate(choice.tool_calls)
            ]
        return message

    def _delta(self, head: dict[str, Any], choice: Choice, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, ToolCall):
            number = next(i for i, call in enumerate(choice.tool_calls) if call is piece)
            call = _tool_call(head, choice, number, piece)
            return {"tool_calls": [{"index": number, **call}]}
        name = "reasoning_content" if isinstance(piece, ReasoningText) else "content"
        return {name: str(piece)}

    def _logprobs(self, outputs: list[Output]) -> dict[str, Any] | None:
        content = [
            {
                **self._scored(token, scores.logprob),
                "top_logprobs": [self._scored(*each) for each in scores.top],
            }
            for output in outputs
            if output.logprobs is not None
            for token, scores in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None} if content else None

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token)
        whole = None if "\ufffd" in text else list(text.encode())  # a token may be half a character
        return {"token": text, "logprob": finite(logprob), "bytes": whole}


def _tool_call(head: dict[str, Any], choice: Choice, number: int, call: ToolCall) -> dict[str, Any]:
    name = f"call_{head['id']}_{choice.index}_{number}"
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": name, "type": "function", "function": function}


def read_stream_options(fields: Fields) -> bool:
    """Say whether a stream ends with the usage."""
    options = fields.get("stream_options", dict, {})
    if options and not fields.body.get("stream"):
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    return options.get("include_usage") is True


def usage(generation: Generation) -> dict[str, Any]:
    """Return the token counts of a generation."""
    prompt, new = generation.num_prompt_tokens, generation.num_new_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
