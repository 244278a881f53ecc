"""`SwappedRequest`: a request that waits in host memory until there is room for it again."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.prefix.prefix_cache import TrackedRequest
from dsv4.cache.prefix.prefix_tree import PrefixTree
from dsv4.errors import NoFreeSlotError, OutOfBlocksError


class HostPlace(NamedTuple):
    """A slot of the host, and blocks in the request's order."""

    slot: int
    blocks: IntArray


@dataclass(eq=False)
class SwappedRequest:
    """A request that `swap_out` moved to the host; `swap_in` takes it, once.

    Attributes:
        length, rollback_floor: The request's, as they were.
        place: Its place on the host; None once it is back, or was dropped.
        tracked: The known tokens of the request.
    """

    length: int
    rollback_floor: int
    place: HostPlace | None
    tracked: TrackedRequest | None = None


class SwappedRequests:
    """The requests of one manager that wait in host memory.

    Args:
        host: Room for blocks and slots.
        tree: Owner of published blocks on the host, which make room; None without a prefix cache.
    """

    def __init__(self, host: HostMemory, tree: PrefixTree | None) -> None:
        self._host, self._tree = host, tree
        self._waiting: set[SwappedRequest] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def places(self) -> list[HostPlace]:
        """The places of all requests that wait."""
        return [self.place_of(each) for each in self._waiting]

    def copy_out(
        self, slot: int, blocks: IntArray, *, length: int, rollback_floor: int
    ) -> SwappedRequest:
        """Copy a request to the host.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        place = self._reserve(len(blocks))
        self._host.copy_blocks_out(blocks, place.blocks)
        self._host.copy_slot_out(slot, place.slot)
        swapped = SwappedRequest(length, rollback_floor, place)
        self._waiting.add(swapped)
        return swapped

    def copy_in(self, swapped: SwappedRequest, slot: int, blocks: IntArray) -> None:
        """Copy a request back to the device and drop it here."""
        place = self.place_of(swapped)
        self._host.copy_blocks_in(place.blocks, blocks)
        self._host.copy_slot_in(place.slot, slot)
        self.drop(swapped)

    def drop(self, swapped: SwappedRequest) -> None:
        """Give up a request, and its room on the host."""
        place = self.place_of(swapped)
        self._host.slot_owners.release(np.array([place.slot]))
        self._host.block_owners.release(place.blocks)
        swapped.place = None
        self._waiting.remove(swapped)

    def place_of(self, swapped: SwappedRequest) -> HostPlace:
        """Return a request's place; refuse another manager's request, and one that is gone."""
        if swapped.place is None:
            raise ValueError(
                "Invalid swapped request: expected one that waits, got one that is back or dropped"
            )
        if swapped not in self._waiting:
            raise ValueError(
                "Invalid swapped request: expected one that this manager swapped out, "
                "got another manager's"
            )
        return swapped.place

    def _reserve(self, num_blocks: int) -> HostPlace:
        host = self._host
        if not host.slot_owners.num_free:
            raise NoFreeSlotError(
                f"No free slot on the host: all {host.slot_owners.num_blocks} are taken"
            )
        if self._tree is not None:
            self._tree.make_host_room(num_blocks)
        free, total = host.block_owners.num_free, host.block_owners.num_blocks
        if num_blocks > free:
            raise OutOfBlocksError(
                f"Out of host blocks: {num_blocks} needed, {free} of {total} free"
            )
        return HostPlace(int(host.slot_owners.acquire(1)[0]), host.block_owners.acquire(num_blocks))
