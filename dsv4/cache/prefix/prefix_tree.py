"""`PrefixTree`: published blocks by the hash of their tokens, and their eviction. Knows no tensor.

A node is one full block, known by a hash of all tokens up to its end. Its entries lie either on the
device or on the host. The ancestors of a node on the device are on the device too. A request that
uses a block uses all before it, so unused blocks can always be evicted from the leaves up.
"""

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.journal import Journal
from dsv4.errors import IntegrityError, OutOfBlocksError

DIGEST_BYTES = 32
CopyBlocks = Callable[[IntArray, IntArray], None]


def root_digest(meaning: str, salt: bytes) -> bytes:
    """Hash salt and format, the start of a chain that no other salt or format shares."""
    text = f"dsv4 prefix {len(salt)} {meaning} ".encode()
    return hashlib.sha256(text + salt).digest()


def hash_blocks(previous: bytes, token_ids: memoryview, block_bytes: int) -> Iterator[bytes]:
    """Yield the hash of each full block: of the hash before it and its ids, little-endian int32."""
    for end in range(block_bytes, len(token_ids) + 1, block_bytes):
        hashed = hashlib.sha256(previous)
        hashed.update(token_ids[end - block_bytes : end])
        previous = hashed.digest()
        yield previous


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A full block.

    Attributes:
        digest: The hash of all tokens up to its end.
        parent: The block before it; None for a first one.
        block, host_block: The block of its entries on device or host; -1 for none.
        checkpoint: The checkpoint at its end; -1 for none.
        last_used: Time of the last use, of it or of a block after it.
        num_device_children: Children on the device.
        num_swapped: Swapped requests that need it; it may go to the host, but not be lost.
    """

    digest: bytes
    parent: "PrefixNode | None"
    block: int = -1
    host_block: int = -1
    checkpoint: int = -1
    last_used: int = 0
    num_device_children: int = 0
    num_swapped: int = 0
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)

    @property
    def is_device_leaf(self) -> bool:
        return self.block >= 0 and not self.num_device_children

    @property
    def is_host_leaf(self) -> bool:
        return self.block < 0 <= self.host_block and not self.children and not self.num_swapped


class PrefixTree:
    """Published blocks and checkpoints, least recently used first out.

    Methods that copy bytes enclose their changes by themselves: what they overwrite cannot be
    undone. The others are part of a caller's change.

    Args:
        blocks, checkpoints, host_blocks: The owners of each; the tree is one of them.
        copy_to_host, copy_to_device: Copy blocks from the first ids to the second.

    Attributes:
        nodes: Every node by its digest.
        num_evicted_blocks, num_evicted_checkpoints: Those that had to leave the device.
        num_lost_blocks: Blocks that left device and host.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        checkpoints: BlockAllocator,
        host_blocks: BlockAllocator,
        journal: Journal,
        *,
        copy_to_host: CopyBlocks,
        copy_to_device: CopyBlocks,
    ) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}
        self.num_evicted_blocks = 0
        self.num_evicted_checkpoints = 0
        self.num_lost_blocks = 0
        self._blocks, self._checkpoints, self._host_blocks = blocks, checkpoints, host_blocks
        self._journal = journal
        self._copy_to_host, self._copy_to_device = copy_to_host, copy_to_device
        self._is_mine: BoolArray = np.zeros(blocks.num_blocks, dtype=np.bool_)
        self._num_on_host = 0  # nodes on the host alone
        self._num_kept = 0  # those of them that swapped requests need
        self._num_reserved = 0  # nodes on the device that may need room on the host
        self._clock = 0
        self._queue: _Queue = _Queue()
        self._host_queue: _Queue = _Queue()
        self._checkpointed: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks on the device that the tree owns."""
        return int(np.count_nonzero(self._is_mine))

    @property
    def num_host_blocks(self) -> int:
        """Blocks that are on the host alone."""
        return self._num_on_host

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpointed)

    @property
    def num_evictable(self) -> int:
        """Blocks on the device that nobody else owns."""
        return int(np.count_nonzero(self._is_mine & (self._blocks.num_owners == 1)))

    @property
    def num_host_room(self) -> int:
        """Blocks on the host that are free, or can be, for others than swapped requests."""
        droppable = self._num_on_host - self._num_kept
        return self._host_blocks.num_free + droppable - self._num_reserved

    def new_nodes(self) -> list[PrefixNode]:
        """Return a list for `add`; the nodes that it puts there are forgotten by an undo."""
        added: list[PrefixNode] = []
        self._journal.note(self._forget, added)
        return added

    def add(
        self,
        digest: bytes,
        parent: PrefixNode | None,
        block: int,
        added: list[PrefixNode],
    ) -> tuple[PrefixNode, bool]:
        """Return the node of a block, and whether the block is now the tree's too.

        A known hash keeps its block, but one on the host alone takes the one that is given. The
        caller shares the block if it became the tree's.

        Args:
            added: From `new_nodes`; gets the node if it is new.
        """
        node = self.nodes.get(digest)
        if node is None:
            self._clock += 1
            node = PrefixNode(digest, parent, block, last_used=self._clock)
            added.append(node)
            self.nodes[digest] = node
            self._is_mine[block] = True
            if parent is not None:
                parent.children[digest] = node
                parent.num_device_children += 1
        elif node.block < 0:
            self._put_on_device(node, block)
        else:
            return node, False
        return node, True

    def _forget(self, added: list[PrefixNode]) -> None:
        for node in reversed(added):
            parent = node.parent
            self.nodes.pop(node.digest, None)
            self._is_mine[node.block] = False
            if parent is not None:
                parent.children.pop(node.digest, None)
                children = parent.children.values()
                parent.num_device_children = sum(child.block >= 0 for child in children)

    def give_checkpoint(self, node: PrefixNode, checkpoint: int) -> None:
        """Make the tree the owner of a checkpoint, or release a node's second one."""
        if node.checkpoint >= 0:
            self._checkpoints.release(np.array([checkpoint]))
            return
        self._journal.note_attribute(node, "checkpoint")
        self._journal.note_item(self._checkpointed, node)
        node.checkpoint = checkpoint
        self._checkpointed[node] = None

    def use_checkpoint(self, node: PrefixNode) -> int:
        """Return the checkpoint of a node and make it the most recently used one."""
        self._checkpointed.move_to_end(node)
        return node.checkpoint

    def make_checkpoint_room(self, count: int, kept: Collection[int] = ()) -> None:
        """Drop the least recently used checkpoints, but some, until so many are free."""
        if self._checkpoints.num_free >= count:
            return
        for node in list(self._checkpointed):
            if self._checkpoints.num_free >= count:
                return
            if node.checkpoint not in kept:
                with self._journal:
                    self._drop_checkpoint(node)
                    self.num_evicted_checkpoints += 1

    def touch(self, node: PrefixNode) -> None:
        """Note that a request used this block, and those before it, until now."""
        self._clock += 1
        node.last_used = self._clock
        self._enqueue(node)

    def count_evictable(self, kept: Iterable[PrefixNode]) -> int:
        """Count blocks on the device that nobody else owns, beside those of some nodes."""
        owners = self._blocks.num_owners
        held = sum(node.block >= 0 and owners[node.block] == 1 for node in kept)
        return self.num_evictable - int(held)

    def evict(self, num_blocks: int, kept: Collection[PrefixNode] = ()) -> None:
        """Free that many blocks which nobody else owns, the least recently used first.

        They go to the host. Blocks that were there longest make room. Nodes that are kept stay
        where they are.

        Raises:
            OutOfBlocksError: There are not so many. Nothing was changed.
        """
        evictable = self.count_evictable(kept)
        if num_blocks > evictable:
            raise OutOfBlocksError(
                num_blocks, self._blocks.num_free, evictable, total=self._blocks.num_blocks
            )
        kept = set(kept)
        self._drop_from_host(min(num_blocks, self.num_host_room), kept)
        with self._journal:
            victims = []
            for _ in range(num_blocks):
                node = self._next_victim(kept)
                victims.append((node, node.block))
                self._take_off_device(node)
            self._move_to_host(victims)
            self.num_evicted_blocks += num_blocks
            self._blocks.release(np.array([block for _, block in victims], dtype=np.int32))

    def restore(self, nodes: Sequence[PrefixNode], blocks: IntArray) -> None:
        """Copy nodes from the host to new blocks, which become the tree's."""
        if not nodes:
            return
        sources = np.array([node.host_block for node in nodes], dtype=np.int32)
        self._copy_to_device(sources, blocks)
        for node, block in zip(nodes, blocks.tolist(), strict=True):
            self._put_on_device(node, block)

    def keep_for_swapped(self, nodes: Iterable[PrefixNode], change: int) -> None:
        """Count one swapped request more, or less, that needs these nodes."""
        self._note_counts()
        for node in nodes:
            self._journal.note_attribute(node, "num_swapped")
            self._count(node, -1)
            node.num_swapped += change
            self._count(node, 1)
            self._enqueue(node)

    def make_host_room(self, num_blocks: int) -> None:
        """Drop blocks on the host until so many are free there.

        Raises:
            OutOfBlocksError: There would not be so many. Nothing was changed.
        """
        host = self._host_blocks
        if num_blocks > self.num_host_room:
            free = host.num_free - self._num_reserved
            raise OutOfBlocksError(
                num_blocks, free, self.num_host_room - free,
                total=host.num_blocks, kind="host blocks",
            )  # fmt: skip
        self._drop_from_host(num_blocks)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the nodes agree with each other and with the owners."""
        on_device = [node.block for node in self.nodes.values() if node.block >= 0]
        if sorted(on_device) != np.flatnonzero(self._is_mine).tolist():
            raise IntegrityError("Prefix tree: its nodes and its blocks are not the same")
        on_host = [node for node in self.nodes.values() if node.host_block >= 0]
        ids = {node.host_block for node in on_host}
        kept = sum(node.num_swapped > 0 for node in on_host)
        reserved = sum(node.num_swapped > 0 <= node.block for node in self.nodes.values())
        counts = (self._num_on_host, self._num_kept, self._num_reserved)
        if len(ids) != len(on_host) or counts != (len(on_host), kept, reserved):
            raise IntegrityError("Prefix tree: its nodes and its blocks on the host differ")
        if reserved > self._host_blocks.num_free:
            raise IntegrityError("Prefix tree: there is no room for blocks of swapped requests")
        for node in self.nodes.values():
            num_children = sum(child.block >= 0 for child in node.children.values())
            is_somewhere = (node.block >= 0) != (node.host_block >= 0)
            has_parent = node.parent is None or node.parent.block >= 0 or node.block < 0
            if num_children != node.num_device_children or not (is_somewhere and has_parent):
                raise IntegrityError("Prefix tree: a node contradicts its parent or children")
            if (node.checkpoint >= 0) != (node in self._checkpointed):
                raise IntegrityError("Prefix tree: a node's checkpoint is not in its order")

    def owned_blocks(self) -> Int64Array:
        """Return the blocks on the device that the tree owns."""
        return np.flatnonzero(self._is_mine)

    def owned_host_blocks(self) -> list[int]:
        """Return the blocks on the host that the tree owns."""
        return [node.host_block for node in self.nodes.values() if node.host_block >= 0]

    def owned_checkpoints(self) -> list[int]:
        """Return the checkpoints that the tree owns."""
        return [node.checkpoint for node in self._checkpointed]

    def _next_victim(self, kept: Collection[PrefixNode]) -> PrefixNode:
        """Return the least recently used block that can go; there is one.

        The queue drops a block that it meets in use. Its last user, such as a fork from before it
        was published, does not queue it again. If only such blocks remain, all are queued anew.
        """

        owners = self._blocks.num_owners

        def can_go(node: PrefixNode) -> bool:
            return node.is_device_leaf and owners[node.block] == 1 and node not in kept

        node = self._pop(self._queue, can_go)
        assert node is not None, "num_evictable counts blocks that can't go"
        return node

    def _pop(self, queue: "_Queue", can_go: Callable[[PrefixNode], bool]) -> PrefixNode | None:
        node = queue.pop(can_go)
        if node is None:
            for each in self.nodes.values():
                self._enqueue(each)
            node = queue.pop(can_go)
        return node

    def _put_on_device(self, node: PrefixNode, block: int) -> None:
        journal, parent = self._journal, node.parent
        journal.note_attribute(node, "block")
        journal.note_rows(self._is_mine, block)
        self._note_counts()
        self._count(node, -1)
        if node.host_block >= 0:
            journal.note_attribute(node, "host_block")
            self._host_blocks.release(np.array([node.host_block]))
            node.host_block = -1
        node.block = block
        self._is_mine[block] = True
        self._count(node, 1)
        if parent is not None:
            journal.note_attribute(parent, "num_device_children")
            parent.num_device_children += 1
        self._clock += 1
        node.last_used = self._clock  # its user queues it once it goes

    def _take_off_device(self, node: PrefixNode) -> None:
        journal, parent = self._journal, node.parent
        journal.note_attribute(node, "block")
        journal.note_rows(self._is_mine, node.block)
        self._note_counts()
        self._count(node, -1)
        self._is_mine[node.block] = False
        node.block = -1
        if parent is not None:
            journal.note_attribute(parent, "num_device_children")
            parent.num_device_children -= 1
            parent.last_used = max(parent.last_used, node.last_used)
            self._enqueue(parent)

    def _move_to_host(self, victims: list[tuple[PrefixNode, int]]) -> None:
        """Give evicted nodes a place on the host, as far as there is room; the last ones first."""
        moved, journal = [], self._journal
        is_needed = [node.num_swapped > 0 for node, _ in victims]
        num_others = self._host_blocks.num_free - self._num_reserved - sum(is_needed)
        for (node, block), must_stay in zip(reversed(victims), reversed(is_needed), strict=True):
            num_others -= not must_stay
            if not must_stay and num_others < 0:
                continue
            journal.note_attribute(node, "host_block")
            node.host_block = int(self._host_blocks.acquire(1)[0])
            self._count(node, 1)
            self._enqueue(node)
            moved.append((block, node.host_block))
        for node, _ in victims:
            if node.host_block < 0:
                self._remove(node)
        if moved:
            sources, targets = np.array(sorted(moved), dtype=np.int32).T
            self._copy_to_host(sources, targets)

    def _drop_from_host(self, num_free: int, kept: Collection[PrefixNode] = ()) -> None:
        """Remove leaves that are on the host alone until so many blocks are free for others."""
        while self._host_blocks.num_free - self._num_reserved < num_free:
            node = self._pop(self._host_queue, lambda node: node.is_host_leaf and node not in kept)
            if node is None:
                return
            with self._journal:
                self._remove(node)

    def _remove(self, node: PrefixNode) -> None:
        """Forget a node that is not on the device."""
        assert not node.children, node.digest
        journal, parent = self._journal, node.parent
        if node.host_block >= 0:
            self._note_counts()
            self._count(node, -1)
            journal.note_attribute(node, "host_block")
            self._host_blocks.release(np.array([node.host_block]))
            node.host_block = -1
        if node.checkpoint >= 0:
            self._drop_checkpoint(node)
        journal.note_item(self.nodes, node.digest)
        del self.nodes[node.digest]
        self.num_lost_blocks += 1
        if parent is not None:
            journal.note_item(parent.children, node.digest)
            del parent.children[node.digest]
            self._enqueue(parent)

    def _drop_checkpoint(self, node: PrefixNode) -> None:
        self._journal.note_attribute(node, "checkpoint")
        self._journal.note_item(self._checkpointed, node)
        self._checkpoints.release(np.array([node.checkpoint]))
        node.checkpoint = -1
        del self._checkpointed[node]

    def _count(self, node: PrefixNode, sign: int) -> None:
        """Add a node's place to the counts, or take it away."""
        is_needed = sign * (node.num_swapped > 0)
        if node.block >= 0:
            self._num_reserved += is_needed
        elif node.host_block >= 0:
            self._num_on_host += sign
            self._num_kept += is_needed

    def _note_counts(self) -> None:
        for name in ("_num_on_host", "_num_kept", "_num_reserved"):
            self._journal.note_attribute(self, name)

    def _enqueue(self, node: PrefixNode) -> None:
        if node.is_device_leaf:
            self._queue.push(node)
        elif node.is_host_leaf:
            self._host_queue.push(node)


class _Queue:
    """Nodes by their last use. Entries that are stale, or may not go, are dropped when met.

    It may hold too little or too much after a change was undone: users look at all nodes if they
    find none here.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PrefixNode]] = []
        self._count = 0
        self._limit = 64

    def push(self, node: PrefixNode) -> None:
        self._count += 1
        heapq.heappush(self._heap, (node.last_used, self._count, node))
        if len(self._heap) > self._limit:
            self._forget_old_uses()

    def _forget_old_uses(self) -> None:
        """Keep one entry for each node; not again before there are twice as many."""
        last = {node: (used, count, node) for used, count, node in self._heap}
        heap = [entry for node, entry in last.items() if entry[0] == node.last_used]
        heapq.heapify(heap)
        self._heap, self._limit = heap, max(64, 2 * len(heap))

    def pop(self, may_go: Callable[[PrefixNode], bool]) -> PrefixNode | None:
        """Take the first node that may go; a node dropped here is pushed again once it is freed."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node.last_used == last_used and may_go(node):
                return node
        return None
