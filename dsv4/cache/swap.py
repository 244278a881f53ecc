"""`SwappedRequest`: a request that waits in host memory until there is room for it again."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsv4.cache.memory.host_memory import HostMemory, IntArray
from dsv4.cache.prefix.prefix_cache import TrackedRequest
from dsv4.cache.prefix.prefix_tree import PrefixTree
from dsv4.errors import NoFreeSlotError, OutOfBlocksError


@dataclass(eq=False)
class SwappedRequest:
    """What `swap_out` gave and `swap_in` takes, once.

    Attributes:
        owner: The manager that it belongs to.
        length, rollback_floor: Of the request, as they were.
        place: Where it lies on the host; None once it is back, or was dropped.
        tracked: What is known of its tokens.
    """

    owner: object
    length: int
    rollback_floor: int
    place: "HostPlace | None"
    tracked: TrackedRequest | None

    def taken_from(self, owner: object) -> "HostPlace":
        """Where it lies; refuses another owner's request, and one that is gone."""
        if self.owner is not owner:
            raise ValueError(
                "Invalid swapped request: expected one that this manager swapped out, "
                "got another manager's"
            )
        if self.place is None:
            raise ValueError(
                "Invalid swapped request: expected one that waits, got one that is back or dropped"
            )
        return self.place


class HostPlace(NamedTuple):
    """A slot of the host, and blocks in the request's order."""

    slot: int
    blocks: IntArray


def reserve_place(host: HostMemory, tree: PrefixTree | None, num_blocks: int) -> HostPlace:
    """Room for a request on the host; what the prefix cache keeps there makes room.

    Raises:
        NoFreeSlotError, OutOfBlocksError: There is none. Nothing was changed.
    """
    if not host.slot_owners.num_free:
        raise NoFreeSlotError(
            f"No free slot on the host: all {host.slot_owners.num_blocks} are taken"
        )
    if tree is not None:
        tree.make_host_room(num_blocks)
    free, total = host.block_owners.num_free, host.block_owners.num_blocks
    if num_blocks > free:
        raise OutOfBlocksError(f"Out of host blocks: {num_blocks} needed, {free} of {total} free")
    return HostPlace(int(host.slot_owners.acquire(1)[0]), host.block_owners.acquire(num_blocks))


def release_place(host: HostMemory, place: HostPlace) -> None:
    """Give the room on the host back."""
    host.slot_owners.release(np.array([place.slot]))
    host.block_owners.release(place.blocks)
