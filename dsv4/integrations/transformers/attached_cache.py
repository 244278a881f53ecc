"""`AttachedCache`: the methods of transformers' `Cache` that do not depend on the content.

Methods for other kinds of caches refuse with a reason. None is inherited, since transformers'
methods expect layers that this cache does not have.
"""

from typing import Any, NoReturn

from transformers import Cache


class AttachedCache(Cache):
    """A `Cache` without layers, written by attached models alone."""

    drafts_per_step: int  # the most tokens that `crop` can remove

    def activate_past_recording(self) -> None:
        """Do nothing: `crop` works at any time."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether `crop` can remove tokens."""
        return self.drafts_per_step > 0

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all memory is allocated from the start."""

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_croppable(self) -> bool:
        return self.drafts_per_step > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [True] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "A PagedCache owns the memory of its requests and is not copied; "
            "batch_repeat_interleave and batch_select_indices copy rows within it"
        )

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "A PagedCache is written by an attached model alone: call attach(model, ...) and use "
            "the cache that it returns with that model"
        )

    update_indexer = update

    def _refuse_linear_attention(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("DeepSeek-V4 has no linear attention: there are no such states")

    get_conv_state = update_conv_state = _refuse_linear_attention
    get_recurrent_state = update_recurrent_state = _refuse_linear_attention
    has_previous_state = _refuse_linear_attention

    def _refuse_offloading(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("A PagedCache is not offloaded: its pools stay on the model's device")

    offload = prefetch = _refuse_offloading
