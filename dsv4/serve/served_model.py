"""`ServedModel`: the one model of a server, and the requests that its engine has."""

import time
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from dsv4.engine import EngineDeadError, EngineThread, QueueFullError
from dsv4.serve.api_error import ApiError
from dsv4.serve.generation import Generation, Job, dead
from dsv4.serve.metrics import Timings


@dataclass
class ServedModel:
    """A model behind an engine, under the name that clients give.

    transformers' app takes it for its model manager and for its generation state.

    Attributes:
        model, tokenizer: Of transformers; the model gives its config and generation config alone.
        max_tokens: The longest request, prompt and new tokens.
        timeout: Seconds that a request may take, or None.
    """

    name: str
    model: Any
    tokenizer: Any
    engine: EngineThread
    max_tokens: int
    timeout: float | None = None
    timings: Timings = field(default_factory=Timings)
    created: int = field(default_factory=lambda: int(time.time()))
    generations: dict[str, Generation] = field(default_factory=dict)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Sampling where a request names none: the checkpoint's, else OpenAI's."""
        own = self.model.generation_config
        values = {"temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        return plain | {name: value for name, value in values.items() if value is not None}

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)

    def get_gen_models(self) -> list[dict[str, Any]]:
        """Describe the one model, as `/v1/models` lists it."""
        about = {"object": "model", "created": self.created, "owned_by": "dsv4"}
        return [{"id": self.name, **about, "max_model_len": self.max_tokens}]

    def is_cb_alive(self) -> bool:
        """Say whether the engine runs."""
        return self.engine.fatal_error is None

    def shutdown(self) -> None:
        """Leave the engine to who made it."""

    def submit(self, request_id: str, job: Job) -> Generation:
        """Queue the prompts of a job; what is queued when one is refused, `close` cancels."""
        for prompt in job.prompts:
            self._check_room(len(prompt), job.params.max_new_tokens)
        generation = self.generations[request_id] = Generation(self.engine, self.timings, job)
        for number, prompt in enumerate(job.prompts):
            on_output = partial(generation.on_output, number, time.monotonic())
            name = f"{request_id}-{number}"
            try:
                self.engine.submit(
                    prompt, job.params, on_output,
                    request_id=name, salt=job.salt, checkpoint_at=job.checkpoint_at,
                )  # fmt: skip
            except QueueFullError as error:
                message = "The queue is full: try again later"
                raise ApiError(message, status=429, code="rate_limit_exceeded") from error
            except EngineDeadError as error:
                raise dead(str(error)) from error
            except ValueError as error:
                raise ApiError(str(error)) from error
        return generation

    def close(self, request_id: str) -> None:
        """Cancel what a request has left, if anything."""
        generation = self.generations.pop(request_id, None)
        if generation is not None:
            for number in range(len(generation.job.prompts)):
                self.engine.cancel(f"{request_id}-{number}")

    def room_after(self, prompt: list[int]) -> int:
        """Return how many tokens fit after a prompt, at least one."""
        return max(1, self.max_tokens - len(prompt))

    def _check_room(self, num_prompt: int, num_new: int) -> None:
        if not num_prompt:
            raise ApiError("Invalid prompt: expected at least one token")
        if num_prompt + num_new > self.max_tokens:
            raise ApiError(
                f"This model's maximum context length is {self.max_tokens} tokens. However, you "
                f"requested {num_prompt + num_new} tokens ({num_prompt} in the prompt, {num_new} "
                "for the completion).",
                code="context_length_exceeded",
            )
