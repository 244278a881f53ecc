"""`AttachedCache`: what of transformers' `Cache` does not depend on what is cached.

Methods for other kinds of caches refuse with a reason; nothing is left to transformers' own, which
would look for layers that this cache does not have.
"""

from typing import Any, NoReturn

from transformers import Cache


class AttachedCache(Cache):
    """A `Cache` without layers: attached models write it, and `crop` works at any time.

    Attributes:
        drafts_per_step: The most tokens that `crop` can take back.
    """

    drafts_per_step: int

    def activate_past_recording(self) -> None:
        """Nothing to do: `crop` works at any time."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether `crop` can take back tokens."""
        return self.drafts_per_step > 0

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: all memory is there from the start."""

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

    def update_indexer(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.update()

    def get_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_linear_attention()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_linear_attention()

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_linear_attention()

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_linear_attention()

    def has_previous_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_linear_attention()

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_offloading()

    def prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_offloading()


def _no_linear_attention() -> ValueError:
    return ValueError("DeepSeek-V4 has no linear attention: there are no such states")


def _no_offloading() -> RuntimeError:
    return RuntimeError("A PagedCache is not offloaded: its pools stay on the model's device")
