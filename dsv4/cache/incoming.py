"""`IncomingRequest`: a slot and blocks that are kept for a request which is still on its way."""

from collections.abc import Callable
from dataclasses import dataclass

from dsv4.cache.memory.arrays import IntArray
from dsv4.checks import NotCopyable


@dataclass(eq=False)
class IncomingRequest(NotCopyable):
    """Room that `reserve_request` keeps, until `accept_request` or `drop_incoming` takes it.

    Nobody else sees the slot. Its owner may write to it and to the blocks.

    Attributes:
        slot: The slot that the request will have.
        num_tokens: The most tokens that it may have.
        blocks: Blocks on the device for so many tokens, in order.
        nonce: As of `RequestTable`.
        label: What its owner knows it by.
        is_accepted: It has become an open request.
        stop: Ends what writes to the blocks beside its owner; called before they are given up.
    """

    slot: int
    num_tokens: int
    blocks: IntArray
    nonce: int
    label: object = None
    is_accepted: bool = False
    stop: Callable[[], None] | None = None

    def check_fits(self, length: int) -> None:
        """Refuse a request that is longer than was said."""
        if length > self.num_tokens:
            raise ValueError(
                f"Invalid request: expected at most the {self.num_tokens} tokens that room is "
                f"kept for, got {length}"
            )
