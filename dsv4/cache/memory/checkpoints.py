"""`CheckpointPool`: the fixed state of requests at block boundaries, and which are kept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.layout import checkpoint_bytes
from dsv4.cache.memory.schema import LayerCacheSchema


@dataclass(frozen=True)
class CheckpointPolicy:
    """At which block boundaries a request is checkpointed.

    Attributes:
        every_blocks: At every so many blocks; 0 for none of these.
        at_prompt_end: At the last boundary of the prompt that `resume_request` was given.
        at_forks: At the last boundary before a fork, if the window ring still holds it.
    """

    every_blocks: int = 0
    at_prompt_end: bool = True
    at_forks: bool = True

    def __post_init__(self) -> None:
        value = self.every_blocks
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"Invalid every_blocks: expected an integer >= 0, got {value!r}")
        for name in ("at_prompt_end", "at_forks"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"Invalid {name}: expected True or False, got {getattr(self, name)!r}"
                )

    def chosen(self, first: int, last: int, *, prompt_blocks: int) -> list[int]:
        """The boundaries from `first` to `last`, counted in blocks, that are checkpointed.

        Args:
            prompt_blocks: Full blocks of the prompt.
        """
        blocks: set[int] = set()
        if self.every_blocks:
            start = -(-first // self.every_blocks) * self.every_blocks
            blocks.update(range(start, last + 1, self.every_blocks))
        if self.at_prompt_end and first <= prompt_blocks <= last:
            blocks.add(prompt_blocks)
        return sorted(blocks - {0})


class CheckpointPool:
    """Checkpoints as one tensor `[num_checkpoints, checkpoint_bytes]`, each the front of a slot.

    Attributes:
        storage: The bytes; rows lie where they lie in a slot.
        owners: Who owns which checkpoint.
    """

    def __init__(
        self,
        schemas: tuple[LayerCacheSchema, ...],
        *,
        num_checkpoints: int,
        device: torch.device,
    ) -> None:
        shape = (num_checkpoints, checkpoint_bytes(schemas))
        self.storage = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.owners = BlockAllocator(num_checkpoints)

    def save(self, checkpoint: int, slots: Tensor, slot: int) -> None:
        """Copy the front of a slot of `[max_requests, slot_bytes]`."""
        self.storage[checkpoint].copy_(slots[slot, : self.storage.shape[1]])

    def load(self, checkpoint: int, slots: Tensor, slot: int) -> None:
        """Give a slot the rows of a checkpoint."""
        slots[slot, : self.storage.shape[1]].copy_(self.storage[checkpoint])
