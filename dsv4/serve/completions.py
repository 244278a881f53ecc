"""`/v1/completions`: texts or token ids, continued as they are."""

from collections.abc import AsyncIterator
from typing import Any, ClassVar

from transformers.cli.serving.completion import CompletionHandler

from dsv4.engine import Output
from dsv4.serve.api_error import ApiError
from dsv4.serve.chat import read_stream_options, usage
from dsv4.serve.endpoint import Endpoint, event, finite
from dsv4.serve.fields import Fields
from dsv4.serve.generation import Generation, Job

MOST_CHOICES = 128


class CompletionEndpoint(Endpoint):
    """Continues prompts."""

    known = frozenset(CompletionHandler._valid_params_class.__annotations__)
    refused: ClassVar = {"best_of": (1,), "echo": (False,), "logit_bias": ({},), "suffix": ("",)}

    def read(self, fields: Fields) -> Job:
        read_stream_options(fields)
        params = self.sampling(
            fields,
            is_parsed=False,
            max_new_tokens=fields.integer("max_tokens", 16, 1, 1 << 31),
            n=fields.integer("n", 1, 1, MOST_CHOICES),
            stop=fields.strings("stop", 4),
            logprobs=fields.integer("logprobs", None, 0, 5),
        )
        return Job(self._prompts(fields, MOST_CHOICES // params.n), params, fields.salt())

    def _prompts(self, fields: Fields, most: int) -> list[list[int]]:
        prompt = fields.body.get("prompt")
        if isinstance(prompt, str) or (
            isinstance(prompt, list) and prompt[:1] and _is_id(prompt[0])
        ):
            prompt = [prompt]
        if not isinstance(prompt, list) or not 0 < len(prompt) <= most:
            message = f"Invalid prompt: expected a text, token ids, or up to {most} of these"
            raise ApiError(message, param="prompt")
        return [self._ids(each) for each in prompt]

    def _ids(self, prompt: Any) -> list[int]:
        size = self.served.model.config.vocab_size
        if isinstance(prompt, str):
            try:
                return list(self.served.tokenizer(prompt)["input_ids"])
            except (TypeError, ValueError) as error:  # half a surrogate pair
                raise ApiError(f"Invalid prompt: {error}", param="prompt") from error
        if isinstance(prompt, list) and all(_is_id(each) and 0 <= each < size for each in prompt):
            return prompt
        raise ApiError(f"Invalid prompt: expected token ids below {size}", param="prompt")

    def answer(self, head: dict[str, Any], fields: Fields, generation: Generation) -> Any:
        choices = [
            {
                "text": choice.text,
                "index": choice.index,
                "logprobs": self._logprobs(choice.outputs, 0),
                "finish_reason": choice.finish_reason,
            }
            for choice in generation.choices
        ]
        head = {**head, "id": f"cmpl-{head['id']}", "object": "text_completion"}
        return {**head, "choices": choices, "usage": usage(generation)}

    async def events(
        self, head: dict[str, Any], fields: Fields, generation: Generation
    ) -> AsyncIterator[str]:
        has_usage = read_stream_options(fields)
        chunk = {**head, "id": f"cmpl-{head['id']}", "object": "text_completion"}
        chunk |= {"usage": None} if has_usage else {}
        offsets = [0] * len(generation.choices)
        async for choice, output in generation.changed():
            logprobs = self._logprobs([output], offsets[choice.index])
            offsets[choice.index] += len(output.text)
            if output.text or logprobs or choice.finish_reason is not None:
                about = {"index": choice.index, "logprobs": logprobs, "text": output.text}
                about["finish_reason"] = choice.finish_reason
                yield event({**chunk, "choices": [about]})
        if has_usage:
            yield event({**chunk, "choices": [], "usage": usage(generation)})
        yield "data: [DONE]\n\n"

    def _logprobs(self, outputs: list[Output], offset: int) -> dict[str, Any] | None:
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for output in outputs:
            for token, scores in zip(output.token_ids, output.logprobs or [], strict=False):
                text = self.token_text(token)
                found["tokens"].append(text)
                found["token_logprobs"].append(finite(scores.logprob))
                best = {self.token_text(each): finite(score) for each, score in scores.top}
                found["top_logprobs"].append(best)
                found["text_offset"].append(offset)
                offset += len(text)
        return found if found["tokens"] else None


def _is_id(value: Any) -> bool:
    return type(value) is int
