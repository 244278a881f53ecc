"""`BlockStored`, `BlockRemoved`: what routers are told of a prefix cache.

Names and fields are those that vLLM's and SGLang's routers read. A hash is that of all tokens up to
the end of a block, salt and row formats included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.journal import Journal

DEVICE, HOST = "GPU", "CPU_PINNED"


@dataclass(frozen=True)
class BlockStored:
    """Blocks that are there now, each after the one before.

    Attributes:
        block_hashes: Their hashes.
        parent_block_hash: That of the block before the first; None for a first block.
        token_ids: The tokens of all of them; empty for blocks that came from another tier.
        block_size: Tokens of a block.
        lora_id: Always None.
        medium: The tier: `GPU` for the device, `CPU_PINNED` for the host.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = DEVICE


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that have left a tier."""

    block_hashes: list[bytes]
    medium: str = DEVICE


CacheEvent = BlockStored | BlockRemoved
OnEvents = Callable[[list[CacheEvent]], None]


class EventLog:
    """Events of committed changes, until `send` hands them over."""

    def __init__(self, journal: Journal, on_events: OnEvents | None, block_tokens: int) -> None:
        self._journal, self._on_events, self._block_tokens = journal, on_events, block_tokens
        self._events: list[CacheEvent] = []

    @property
    def is_wanted(self) -> bool:
        """Somebody is to be told."""
        return self._on_events is not None

    def note_stored(
        self,
        digests: Sequence[bytes],
        parent: bytes | None,
        *,
        medium: str = DEVICE,
        token_ids: IntArray | None = None,
    ) -> None:
        """Note blocks that a change puts somewhere."""
        if self.is_wanted and digests:
            ids: list[int] = [] if token_ids is None else token_ids.tolist()
            stored = BlockStored(list(digests), parent, ids, self._block_tokens, medium=medium)
            self._journal.after_commit(self._events.append, stored)

    def note_removed(self, digests: Sequence[bytes], *, medium: str = DEVICE) -> None:
        """Note blocks that a change takes from somewhere."""
        if self.is_wanted and digests:
            removed = BlockRemoved(list(digests), medium)
            self._journal.after_commit(self._events.append, removed)

    def send(self) -> None:
        """Hand all events over, once."""
        if self._events and self._on_events is not None:
            events, self._events = self._events, []
            self._on_events(events)
