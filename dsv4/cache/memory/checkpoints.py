"""`CheckpointPool`: the fixed state of requests at block boundaries, and its policy."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.memory.arrays import BoolArray, Int64Array
from dsv4.cache.memory.byte_rows import byte_rows
from dsv4.cache.memory.layout import checkpoint_bytes
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.checks import check_bool, check_int


@dataclass(frozen=True)
class CheckpointPolicy:
    """The block boundaries at which a request is checkpointed.

    Attributes:
        every_blocks: Blocks from one checkpoint to the next; 0 for none of these.
        at_prompt_end: Checkpoint the last boundary of the prompt that `resume_request` was given.
        at_forks: Checkpoint the last boundary before a fork, if the window ring still holds it.
    """

    every_blocks: int = 0
    at_prompt_end: bool = True
    at_forks: bool = True

    def __post_init__(self) -> None:
        check_int("every_blocks", self.every_blocks, at_least=0)
        check_bool("at_prompt_end", self.at_prompt_end)
        check_bool("at_forks", self.at_forks)

    def may_choose(
        self, first: Int64Array, last: Int64Array, prompt_blocks: Int64Array
    ) -> BoolArray:
        """Tell for many requests at once whether `chosen` may return any boundary."""
        if self.every_blocks or type(self).chosen is not CheckpointPolicy.chosen:
            return np.ones(len(first), dtype=np.bool_)
        return self.at_prompt_end & (first <= prompt_blocks) & (prompt_blocks <= last)

    def chosen(self, first: int, last: int, *, prompt_blocks: int) -> list[int]:
        """Return the boundaries from `first` to `last`, in blocks, that are checkpointed.

        Args:
            prompt_blocks: Full blocks of the prompt.
        """
        has_prompt_end = self.at_prompt_end and first <= prompt_blocks <= last
        if not self.every_blocks and not has_prompt_end:
            return []
        blocks: set[int] = set()
        if self.every_blocks:
            start = -(-first // self.every_blocks) * self.every_blocks
            blocks.update(range(start, last + 1, self.every_blocks))
        if has_prompt_end:
            blocks.add(prompt_blocks)
        return sorted(blocks - {0})


class CheckpointPool:
    """Checkpoints as one tensor `[num_checkpoints, checkpoint_bytes]`, each the front of a slot.

    Attributes:
        storage: The bytes; a row has the same offset as in a slot.
    """

    def __init__(
        self,
        schemas: tuple[LayerCacheSchema, ...],
        *,
        num_checkpoints: int,
        device: torch.device,
        storage: Tensor | None = None,
    ) -> None:
        self.storage = byte_rows(
            "checkpoints", num_checkpoints, checkpoint_bytes(schemas), device, storage
        )

    def save(self, checkpoint: int, slots: Tensor, slot: int) -> None:
        """Copy the front of a slot of `[max_requests, slot_bytes]`."""
        self.storage[checkpoint].copy_(slots[slot, : self.storage.shape[1]])

    def load(self, checkpoint: int, slots: Tensor, slot: int) -> None:
        """Give a slot the rows of a checkpoint."""
        slots[slot, : self.storage.shape[1]].copy_(self.storage[checkpoint])
