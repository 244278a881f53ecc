"""`SwappedRequest`: a request that waits in host memory until there is room for it again."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.memory.journal import Journal
from dsv4.cache.prefix.prefix_cache import PrefixCache, TrackedRequest
from dsv4.cache.prefix.retention import PrefixNode
from dsv4.cache.request_table import Extent
from dsv4.checks import NotCopyable
from dsv4.errors import NoFreeSlotError


class HostPlace(NamedTuple):
    """A slot of the host, and where a request's own blocks are, in its order.

    Attributes:
        blocks: Blocks of the host; -1 for one that stayed on the device.
        kept: Blocks of the device that other requests own too; -1 for one on the host.
    """

    slot: int
    blocks: IntArray
    kept: IntArray


@dataclass(eq=False)
class SwappedRequest(NotCopyable):
    """A request that `swap_out` moved to the host; `swap_in` takes it, once.

    Attributes:
        extent: Its lengths, as they were.
        place: Its place on the host; None once it is back, or was dropped.
        tracked: Its record in the prefix cache, which does not lose its published blocks; None if
            its tokens are not known.
        token_ids: Its known tokens.
        nonce: As of `RequestTable`.
    """

    extent: Extent
    place: HostPlace | None
    tracked: TrackedRequest | None = None
    token_ids: IntArray | None = None
    nonce: int = 0

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.extent.length

    @property
    def nodes(self) -> list[PrefixNode]:
        """Its first blocks, which are published."""
        return [] if self.tracked is None else self.tracked.nodes

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that `swap_in` takes: those that are on the host now."""
        if self.place is None:
            return 0
        published = sum(node.block < 0 for node in self.nodes)
        return published + int(np.count_nonzero(self.place.blocks >= 0))


class SwappedRequests:
    """The requests of one manager that wait in host memory."""

    def __init__(
        self, host: HostMemory, allocator: BlockAllocator, prefix: PrefixCache, journal: Journal
    ) -> None:
        self._host, self._allocator, self._journal = host, allocator, journal
        self._prefix = prefix
        self._waiting: dict[SwappedRequest, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._waiting))

    @property
    def places(self) -> list[HostPlace]:
        """The places of all requests that wait."""
        return [self.place_of(each) for each in self._waiting]

    @property
    def num_kept_blocks(self) -> int:
        """Blocks on the device that no open request has, but a request that waits."""
        if not self._waiting:
            return 0
        kept = np.concatenate([place.kept[place.kept >= 0] for place in self.places])
        blocks, times = np.unique(kept, return_counts=True)
        others = self._allocator.num_owners[blocks] - times
        others -= np.isin(blocks, self._prefix.tree.owned_blocks())
        return int(np.count_nonzero(others == 0))

    def make_room(self, slot: int, blocks: IntArray) -> None:
        """Make room on the host for a request with these blocks.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is none. Nothing was changed.
        """
        host, nodes = self._host, self._nodes(slot)
        if not host.slot_owners.num_free:
            raise NoFreeSlotError(1, 0, total=host.slot_owners.num_blocks, is_host=True)
        needed = int(np.count_nonzero(~self._is_shared(blocks[len(nodes) :])))
        needed += sum(node.num_swapped == 0 for node in nodes)
        self._prefix.make_host_room(needed)

    def copy_out(self, slot: int, blocks: IntArray, extent: Extent) -> SwappedRequest:
        """Copy what only this request owns to the host, where `make_room` has made room."""
        host, prefix, nodes = self._host, self._prefix, self._nodes(slot)
        rest = blocks[len(nodes) :]
        is_shared = self._is_shared(rest)
        kept, targets = np.where(is_shared, rest, -1), np.full(len(rest), -1, dtype=np.int32)
        host_slot = int(host.slot_owners.acquire(1)[0])
        targets[~is_shared] = host.block_owners.acquire(int(np.count_nonzero(~is_shared)))
        host.copy_out("blocks", rest[~is_shared], targets[~is_shared])
        host.copy_out("slots", np.array([slot]), np.array([host_slot]))
        self._allocator.share(rest[is_shared])
        swapped = SwappedRequest(extent, HostPlace(host_slot, targets, kept))
        prefix.tree.keep_blocks(rest[is_shared], 1)
        if slot in prefix.requests:
            prefix.tree.keep_for_swapped(nodes, 1)
            swapped.tracked = prefix.requests[slot].copy()
            swapped.tracked.pending.clear()
            swapped.token_ids = prefix.ids.read(slot).copy()
        self._journal.set_item(self._waiting, swapped, None)
        return swapped

    def copy_in(self, swapped: SwappedRequest, slot: int, new_blocks: IntArray) -> IntArray:
        """Copy a request back to the device and drop it here; return its blocks in order."""
        host, place = self._host, self.place_of(swapped)
        num_published = len(new_blocks) - int(np.count_nonzero(place.blocks >= 0))
        published = self._prefix.take(swapped.nodes, new_blocks[:num_published])
        rest, is_mine = place.kept.astype(np.int32), place.blocks >= 0
        rest[is_mine] = new_blocks[num_published:]
        host.copy_in("blocks", place.blocks[is_mine], rest[is_mine])
        host.copy_in("slots", np.array([place.slot]), np.array([slot]))
        self._allocator.share(place.kept[~is_mine])  # `drop` gives up the one it had
        self.drop(swapped)
        return np.concatenate((published, rest))

    def drop(self, swapped: SwappedRequest) -> None:
        """Give up a request, and its room on the host."""
        place = self.place_of(swapped)
        self._host.slot_owners.release(np.array([place.slot]))
        self._host.block_owners.release(place.blocks[place.blocks >= 0])
        self._allocator.release(place.kept[place.kept >= 0])
        self._prefix.tree.keep_for_swapped(swapped.nodes, -1)
        self._prefix.tree.keep_blocks(place.kept[place.kept >= 0], -1)
        self._journal.set_attribute(swapped, "place", None)
        self._journal.drop_item(self._waiting, swapped)

    def place_of(self, swapped: SwappedRequest) -> HostPlace:
        """Return a request's place; refuse another manager's request, and one that is gone."""
        if not isinstance(swapped, SwappedRequest):
            raise TypeError(
                "Invalid swapped request: expected one that swap_out returned, "
                f"got {type(swapped).__name__}"
            )
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

    def _nodes(self, slot: int) -> list[PrefixNode]:
        request = self._prefix.requests.get(slot)
        return [] if request is None else request.nodes

    def _is_shared(self, blocks: IntArray) -> np.ndarray:
        """Whether blocks stay on the device, as other requests have them too.

        Blocks that only others have published are copied; see `PrefixTree.keep_blocks`.
        """
        return (self._allocator.num_owners[blocks] > 1) & ~self._prefix.tree.is_mine[blocks]
