"""`PrefixTree`: published blocks by the hash of their tokens, and their eviction. Knows no tensor.

A node is one full block, known by a hash of all tokens up to its end. Its entries lie either on the
device or on the host. The ancestors of a node on the device are on the device too. A request that
uses a block uses all before it, so unused blocks can always be evicted from the leaves up.
"""

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.errors import IntegrityError, OutOfBlocksError

DIGEST_BYTES = 32
CopyBlocks = Callable[[IntArray, IntArray], None]


def root_digest(meaning: str, salt: bytes) -> bytes:
    """Hash salt and format, the start of a chain that no other salt or format shares."""
    text = f"dsv4 prefix {len(salt)} {meaning} ".encode()
    return hashlib.blake2b(text + salt, digest_size=DIGEST_BYTES).digest()


def hash_blocks(previous: bytes, token_ids: memoryview, block_bytes: int) -> Iterator[bytes]:
    """Yield the hash of each full block: of the hash before it and its ids, little-endian int32."""
    for end in range(block_bytes, len(token_ids) + 1, block_bytes):
        hashed = previous + token_ids[end - block_bytes : end]
        previous = hashlib.blake2b(hashed, digest_size=DIGEST_BYTES).digest()
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
        is_pinned: It must stay on the host.
    """

    digest: bytes
    parent: "PrefixNode | None"
    block: int = -1
    host_block: int = -1
    checkpoint: int = -1
    last_used: int = 0
    num_device_children: int = 0
    is_pinned: bool = False
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)

    @property
    def is_device_leaf(self) -> bool:
        return self.block >= 0 and not self.num_device_children

    @property
    def is_host_leaf(self) -> bool:
        return self.block < 0 <= self.host_block and not self.children and not self.is_pinned


class PrefixTree:
    """Published blocks and checkpoints, least recently used first out.

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
        *,
        copy_to_host: CopyBlocks,
        copy_to_device: CopyBlocks,
    ) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}
        self.num_evicted_blocks = 0
        self.num_evicted_checkpoints = 0
        self.num_lost_blocks = 0
        self._blocks, self._checkpoints, self._host_blocks = blocks, checkpoints, host_blocks
        self._copy_to_host, self._copy_to_device = copy_to_host, copy_to_device
        self._is_mine: BoolArray = np.zeros(blocks.num_blocks, dtype=np.bool_)
        self._num_on_host = 0
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

    def add(
        self, digests: Sequence[bytes], parent: PrefixNode | None, blocks: IntArray
    ) -> list[PrefixNode]:
        """Add nodes of blocks that follow each other; a known hash keeps its block.

        A node whose block is on the host alone takes the one that is given.
        """
        nodes, taken = [], []
        for digest, block in zip(digests, blocks.tolist(), strict=True):
            node = self.nodes.get(digest)
            if node is None:
                node = PrefixNode(digest, parent)
                self.nodes[digest] = node
                if parent is not None:
                    parent.children[digest] = node
            if node.block < 0:
                self._put_on_device(node, block)
                taken.append(block)
            nodes.append(node)
            parent = node
        self._blocks.share(np.array(taken, dtype=np.int32))
        return nodes

    def give_checkpoint(self, node: PrefixNode, checkpoint: int) -> None:
        """Make the tree the owner of a checkpoint, or release a node's second one."""
        if node.checkpoint >= 0:
            self._checkpoints.release(np.array([checkpoint]))
            return
        node.checkpoint = checkpoint
        self._checkpointed[node] = None

    def use_checkpoint(self, node: PrefixNode) -> int:
        """Return the checkpoint of a node and make it the most recently used one."""
        self._checkpointed.move_to_end(node)
        return node.checkpoint

    def take_checkpoint(self) -> int | None:
        """Take a free checkpoint or the least recently used one; None if there is none."""
        while not self._checkpoints.num_free:
            if not self._checkpointed:
                return None
            node, _ = self._checkpointed.popitem(last=False)
            self._checkpoints.release(np.array([node.checkpoint]))
            node.checkpoint = -1
            self.num_evicted_checkpoints += 1
        return int(self._checkpoints.acquire(1)[0])

    def touch(self, node: PrefixNode) -> None:
        """Note that a request used this block, and those before it, until now."""
        self._clock += 1
        node.last_used = self._clock
        self._enqueue(node)

    def evict(self, num_blocks: int) -> None:
        """Free that many blocks which nobody else owns, the least recently used first.

        They go to the host. Blocks that were there longest make room.

        Raises:
            OutOfBlocksError: There are not so many. Nothing was changed.
        """
        if num_blocks > self.num_evictable:
            raise OutOfBlocksError(
                f"Out of blocks: {num_blocks} to evict, {self.num_evictable} nobody uses"
            )
        victims, ids = [], []
        for _ in range(num_blocks):
            node = self._next_victim()
            victims.append(node)
            ids.append(node.block)
            self._take_off_device(node)
        self._move_to_host(victims, ids)
        self.num_evicted_blocks += num_blocks
        self._blocks.release(np.array(ids, dtype=np.int32))

    def restore(self, nodes: Iterable[PrefixNode], blocks: IntArray) -> None:
        """Copy nodes from the host to blocks, which become the tree's."""
        nodes = list(nodes)
        sources = np.array([node.host_block for node in nodes], dtype=np.int32)
        self._copy_to_device(sources, blocks)
        for node, block in zip(nodes, blocks.tolist(), strict=True):
            self._put_on_device(node, block)

    def pin(self, nodes: Iterable[PrefixNode], is_pinned: bool = True) -> None:
        """Keep nodes on the host while others are evicted, or let them go."""
        for node in nodes:
            node.is_pinned = is_pinned
            self._enqueue(node)

    def make_host_room(self, num_blocks: int) -> None:
        """Drop blocks on the host until so many are free there.

        Raises:
            OutOfBlocksError: There would not be so many. Nothing was changed.
        """
        host = self._host_blocks
        if num_blocks > host.num_free + self._num_on_host:
            raise OutOfBlocksError(
                f"Out of host blocks: {num_blocks} needed, {host.num_free} of {host.num_blocks} "
                f"free and {self._num_on_host} of the prefix cache"
            )
        while host.num_free < num_blocks and self._drop_from_host():
            pass

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the nodes agree with each other and with the owners."""
        on_device = [node.block for node in self.nodes.values() if node.block >= 0]
        if sorted(on_device) != np.flatnonzero(self._is_mine).tolist():
            raise IntegrityError("Prefix tree: its nodes and its blocks are not the same")
        on_host = [node.host_block for node in self.nodes.values() if node.host_block >= 0]
        if len(on_host) != self._num_on_host or len(set(on_host)) != len(on_host):
            raise IntegrityError("Prefix tree: its nodes and its blocks on the host differ")
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

    def _next_victim(self) -> PrefixNode:
        """Return the least recently used block that can go; there is one.

        The queue drops a block that it meets in use. Its last user, such as a fork from before it
        was published, does not queue it again. If only such blocks remain, all are queued anew.
        """
        node = self._queue.pop(self._can_leave_device)
        if node is None:
            for each in self.nodes.values():
                self._enqueue(each)
            node = self._queue.pop(self._can_leave_device)
        assert node is not None, "num_evictable counts blocks that can't go"
        return node

    def _can_leave_device(self, node: PrefixNode) -> bool:
        return node.is_device_leaf and self._blocks.num_owners[node.block] == 1

    def _put_on_device(self, node: PrefixNode, block: int) -> None:
        node.block = block
        self._is_mine[block] = True
        if node.parent is not None:
            node.parent.num_device_children += 1
        if node.host_block >= 0:
            self._free_host_block(node)
        self.touch(node)

    def _take_off_device(self, node: PrefixNode) -> None:
        self._is_mine[node.block] = False
        node.block = -1
        parent = node.parent
        if parent is not None:
            parent.num_device_children -= 1
            parent.last_used = max(parent.last_used, node.last_used)
            self._enqueue(parent)

    def _move_to_host(self, nodes: list[PrefixNode], blocks: list[int]) -> None:
        """Give evicted nodes a place on the host; later ones replace earlier ones."""
        for node in nodes:
            if not self._host_blocks.num_free and not self._drop_from_host():
                self._remove(node)
                continue
            node.host_block = int(self._host_blocks.acquire(1)[0])
            self._num_on_host += 1
            self._enqueue(node)
        pairs = [
            (block, node.host_block)
            for node, block in zip(nodes, blocks, strict=True)
            if node.host_block >= 0
        ]
        if pairs:
            sources, targets = np.array(pairs, dtype=np.int32).T
            self._copy_to_host(sources, targets)

    def _drop_from_host(self) -> bool:
        """Remove the least recently used leaf that is on the host alone; False if there is none."""
        node = self._host_queue.pop(lambda node: node.is_host_leaf)
        if node is None:
            return False
        self._remove(node)
        return True

    def _remove(self, node: PrefixNode) -> None:
        """Forget a node that is not on the device."""
        assert not node.children, node.digest
        if node.host_block >= 0:
            self._free_host_block(node)
        if node.checkpoint >= 0:
            del self._checkpointed[node]
            self._checkpoints.release(np.array([node.checkpoint]))
            node.checkpoint = -1
        del self.nodes[node.digest]
        self.num_lost_blocks += 1
        parent = node.parent
        if parent is not None:
            del parent.children[node.digest]
            self._enqueue(parent)

    def _free_host_block(self, node: PrefixNode) -> None:
        self._host_blocks.release(np.array([node.host_block]))
        node.host_block = -1
        self._num_on_host -= 1

    def _enqueue(self, node: PrefixNode) -> None:
        if node.is_device_leaf:
            self._queue.push(node)
        elif node.is_host_leaf:
            self._host_queue.push(node)


class _Queue:
    """Nodes by their last use. Entries that are stale, or may not go, are dropped when met."""

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
        self._heap = [entry for node, entry in last.items() if entry[0] == node.last_used]
        heapq.heapify(self._heap)
        self._limit = max(64, 2 * len(self._heap))

    def pop(self, may_go: Callable[[PrefixNode], bool]) -> PrefixNode | None:
        """Take the first node that may go; a node dropped here is pushed again once it is freed."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node.last_used == last_used and may_go(node):
                return node
        return None
