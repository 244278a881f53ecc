"""`CapturedStep`: a whole step of an attached model as one CUDA graph: decode, drafts, chunks.

A replay costs the host some ten microseconds; the launches of a step cost tens of milliseconds.
Replays read the weights at their addresses during capture. Hooks run at capture alone.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.cache.graphs.captured_forward import CapturedForward, GraphPool
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.plan import ForwardPlan
from dsv4.integrations.transformers.captured_attention import room_for
from dsv4.integrations.transformers.padding import NO_MASK
from dsv4.integrations.transformers.weight_addresses import WeightAddresses

if TYPE_CHECKING:
    from dsv4.integrations.transformers.cache import PagedCache


class CapturedStep:
    """Embedding, all layers, norm, head and `finish` in one graph.

    The tokens of a plan are one after the other, as a forward of shape `[1, num_tokens]` has them.
    Model and cache are not kept.

    Args:
        model: The attached `DeepseekV4ForCausalLM`, or its base model, which has no head.
        cache: The model's cache, between two forwards.
        batch, tokens_per_request, max_chunks, num_tokens, max_length, pool: See `CapturedForward`.
        finish: Called with the logits `[num_tokens, vocab_size]`, or with the last hidden states
            of a base model. Its result is the output; it does not wait for the device.

    Attributes:
        ids: `[num_tokens]`, the input. Rows after a plan's last token may hold any id.
    """

    def __init__(
        self,
        model: Any,
        cache: "PagedCache",
        *,
        batch: int,
        tokens_per_request: int = 1,
        max_chunks: int = 0,
        num_tokens: int | None = None,
        max_length: int | None = None,
        pool: GraphPool | None = None,
        finish: Callable[[Tensor], Any] | None = None,
    ) -> None:
        check_experts(model)
        base, head, device = model.base_model, getattr(model, "lm_head", None), model.device
        cache.check_owner(base)
        self._addresses = WeightAddresses([model])
        if num_tokens is None:
            most = cache.manager.capacity.max_forward_tokens
            num_tokens = most if max_chunks else batch * tokens_per_request
        with torch.inference_mode(False):
            self.ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)

        def step(handles: Sequence[LayerCacheHandle]) -> Any:
            output = run_packed(base, cache, self.ids, handles[0].plan)
            if head is not None:
                output = head(output)
            return output if finish is None else finish(output)

        with torch.inference_mode(False), torch.no_grad():
            self._forward = CapturedForward(
                cache.manager, step, batch=batch, tokens_per_request=tokens_per_request,
                max_chunks=max_chunks, num_tokens=num_tokens, max_length=max_length, pool=pool,
            )  # fmt: skip
        self.batch = self._forward.batch
        self.max_chunks = self._forward.max_chunks
        self.max_length = self._forward.max_length

    def is_current(self) -> bool:
        """Tell whether weights and cache lie where they were captured."""
        return self._forward.is_current and self._addresses.are_current()

    def fits(self, plan: ForwardPlan) -> bool:
        """Tell whether a plan that is not yet written can be replayed."""
        return self._forward.fits(plan)

    def run(self, plan: ForwardPlan) -> Any:
        """Replay the step of `ids` for a plan, and complete it.

        Returns:
            The captured outputs, row i for token i, which the next replay overwrites.
        """
        return self._forward.replay(plan)


def find_step(
    steps: dict[Any, CapturedStep],
    key: Any,
    model: Any,
    cache: "PagedCache",
    *,
    longest: int,
    **sizes: Any,
) -> CapturedStep | None:
    """Return the step of a key; it is captured if there is none, or none that still serves.

    One serves no more when weights have moved, when the cache has slept, or when a text is longer
    than it has room for.

    Args:
        steps: All that were captured.
        longest: Tokens of the longest request after the step.
        sizes: Those of a new one.

    Returns:
        None if it would have to be captured while a forward is live.
    """
    step = steps.get(key)
    if step is not None and longest <= step.max_length and step.is_current():
        return step
    if cache.manager.live_plan is not None:
        return None
    step = None
    steps.pop(key, None)  # its memory goes before the next one's comes
    steps[key] = CapturedStep(model, cache, max_length=room_for(longest, cache.manager), **sizes)
    return steps[key]


def run_packed(base: Any, cache: "PagedCache", ids: Tensor, plan: ForwardPlan) -> Tensor:
    """Return the base model's last hidden states, `[num_tokens, hidden_size]`."""
    with cache.running(plan):
        outputs = type(base).forward(
            base, input_ids=ids[None], position_ids=plan.tokens.positions[None].long(),
            attention_mask=NO_MASK, past_key_values=cache, use_cache=True,
        )  # fmt: skip
    hidden: Tensor = outputs[0][0]
    return hidden


def can_capture(model: Any) -> bool:
    """Tell whether the model's experts never wait for the device."""
    name = model.config._experts_implementation
    if name != "grouped_mm" or model.dtype != torch.bfloat16 or model.device.type != "cuda":
        return bool(name == "batched_mm")
    # PyTorch has a kernel for grouped products of these chips; elsewhere it loops on the host.
    return torch.cuda.get_device_capability(model.device)[0] in (9, 10)


def check_experts(model: Any) -> None:
    """Refuse experts that wait for the device, which a graph cannot hold."""
    if not can_capture(model):
        name, dtype = model.config._experts_implementation, str(model.dtype)
        raise ValueError(
            "Invalid experts for a captured step: expected 'batched_mm', or 'grouped_mm' in "
            f"bfloat16 on Hopper or Blackwell, got {name!r} in {dtype.removeprefix('torch.')}, "
            "which waits for the device; call model.set_experts_implementation('batched_mm')"
        )
