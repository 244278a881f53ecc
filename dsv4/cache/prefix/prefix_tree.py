"""`PrefixTree`: published blocks by the hash of their tokens, and their eviction. Knows no tensor.

A node is one full block, known by a hash of all tokens up to its end. Its entries lie either on the
device or on the host. The ancestors of a node on the device are on the device too. A request that
uses a block uses all before it, so unused blocks can always be evicted from the leaves up.
Checkpoints lie on device or host too, in the host's blocks.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.checkpoints import Checkpoints
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.cache.memory.journal import Journal
from dsv4.cache.prefix.events import DEVICE, HOST, EventLog
from dsv4.cache.prefix.retention import WITHOUT_USES, PrefixNode, Retention
from dsv4.errors import IntegrityError, OutOfBlocksError

DIGEST_BYTES = 32


def root_digest(meaning: str, salt: bytes) -> bytes:
    """Hash salt and format, the start of a chain that no other salt or format shares."""
    text = f"dsv4 prefix {len(salt)} {meaning} ".encode()
    return hashlib.sha256(text + salt).digest()


def hash_blocks(previous: bytes, token_ids: memoryview, block_bytes: int) -> Iterator[bytes]:
    """Yield the hash of each full block: of the hash before it and its ids, little-endian int32."""
    for end in range(block_bytes, len(token_ids) + 1, block_bytes):
        previous = hashlib.sha256(previous + token_ids[end - block_bytes : end]).digest()
        yield previous


class PrefixTree:
    """Published blocks and checkpoints, those of the smallest key first out.

    Methods that copy bytes enclose their changes by themselves: what they overwrite cannot be
    undone. The others are part of a caller's change.

    Args:
        blocks, checkpoints: The owners of each; the tree is one of them.
        host: The host's memory, of which the tree owns some blocks.
        events: Is told of blocks that come and go.

    Attributes:
        is_on: There are checkpoints; else nothing is published.
        holds_blocks_on_host: Evicted blocks go to the host, not only checkpoints.
        nodes: Every node by its digest.
        retention: The order in which things go.
        num_evicted_blocks, num_evicted_checkpoints: Those that had to leave the device.
        num_lost_blocks: Blocks that left device and host.
        num_host_blocks: Blocks that are on the host alone.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        checkpoints: Checkpoints,
        host: HostMemory,
        journal: Journal,
        events: EventLog,
    ) -> None:
        self.events = events
        self.nodes: dict[bytes, PrefixNode] = {}
        self.num_evicted_blocks = self.num_evicted_checkpoints = self.num_lost_blocks = 0
        self.blocks, self.checkpoints, self.host = blocks, checkpoints, host
        self._host_blocks, self._journal = host.block_owners, journal
        self.retention = Retention(
            checkpoint_blocks=checkpoints.blocks_each,
            num_blocks=blocks.num_blocks + self._host_blocks.num_blocks,
        )
        self.is_on, self.holds_blocks_on_host = checkpoints.num_device > 0, True
        self.is_mine: BoolArray = np.zeros(blocks.num_blocks, dtype=np.bool_)
        self.num_keepers: IntArray = np.zeros(blocks.num_blocks, dtype=np.int32)
        self.num_host_blocks = 0
        self._num_kept = 0  # those of them that swapped requests need
        self._num_reserved = 0  # nodes on the device that may need room on the host
        self._on_device: dict[PrefixNode, None] = {}  # nodes with a checkpoint there
        self._on_host: dict[PrefixNode, None] = {}
        self._leaves = _Queue("block_key")
        self._host_things, self._device_checkpoints = _Queue("key"), _Queue("key")

    @property
    def num_blocks(self) -> int:
        """Blocks on the device that the tree owns."""
        return int(np.count_nonzero(self.is_mine))

    @property
    def num_checkpoints(self) -> int:
        return len(self._on_device) + len(self._on_host)

    @property
    def num_host_checkpoints(self) -> int:
        return len(self._on_host)

    @property
    def num_evictable(self) -> int:
        """Blocks on the device that nobody else owns."""
        return int(np.count_nonzero(self.is_mine & (self.blocks.num_owners == 1)))

    @property
    def _num_host_free(self) -> int:
        return self._host_blocks.num_free - self._num_reserved

    def new_nodes(self) -> list[PrefixNode]:
        """Return a list for `add`; the nodes that it puts there are forgotten by an undo."""
        added: list[PrefixNode] = []
        self._journal.note(self._forget, added)
        return added

    def add(
        self, digest: bytes, parent: PrefixNode | None, block: int, added: list[PrefixNode]
    ) -> tuple[PrefixNode, bool]:
        """Return the node of a block, and whether the block is now the tree's too.

        A known hash keeps its block, but one on the host alone takes the one that is given. The
        caller shares the block if it became the tree's.

        Args:
            added: From `new_nodes`; gets the node if it is new.
        """
        node = self.nodes.get(digest)
        if node is None:
            node = self._new_node(digest, parent, block, -1)
            added.append(node)
            self.nodes[digest] = node
            self.is_mine[block] = True
            if parent is not None:
                parent.children[digest] = node
                parent.num_device_children += 1
        elif node.block < 0:
            self._put_on_device(node, block)
        else:
            return node, False
        return node, True

    def add_on_host(self, digest: bytes, parent: PrefixNode | None, host_block: int) -> PrefixNode:
        """Return a new node, for a block of the host that becomes the tree's."""
        node = self._new_node(digest, parent, -1, host_block)
        self._journal.set_item(self.nodes, digest, node)
        self._count(node, 1)
        if parent is not None:
            self._journal.set_item(parent.children, digest, node)
        self._note_stored([node], HOST)
        self._enqueue(node)
        return node

    def _new_node(
        self, digest: bytes, parent: PrefixNode | None, block: int, host_block: int
    ) -> PrefixNode:
        depth = 1
        if parent is not None:
            depth, parent.had_children = parent.depth + 1, True
        clock = self.retention.clock
        return PrefixNode(digest, parent, depth, block, host_block, last_used=clock)

    def _forget(self, added: list[PrefixNode]) -> None:
        for node in reversed(added):
            parent = node.parent
            self.nodes.pop(node.digest, None)
            self.is_mine[node.block] = False
            if parent is not None:
                parent.children.pop(node.digest, None)
                children = parent.children.values()
                parent.num_device_children = sum(child.block >= 0 for child in children)

    def give_checkpoint(self, node: PrefixNode, checkpoint: int, num_uses: int) -> None:
        """Make the tree the owner of a checkpoint, or release a node's second one."""
        node.num_uses = max(node.num_uses, num_uses)
        node.last_used = self.retention.clock
        if node.checkpoint >= 0:
            self.checkpoints.release(np.array([checkpoint]))
        else:
            self._set_checkpoint(node, checkpoint)
            node.added = self.retention.clock
        self._enqueue(node)

    def use_checkpoint(self, node: PrefixNode, *, is_last: bool) -> int:
        """Note that a prompt resumes at a checkpoint, and whether that is all of the prompt.

        Returns:
            The uses of the prompt's own end: those of a conversation pass on to it.
        """
        retention, num_uses = self.retention, 1
        if node.depth > 1 and (is_last or not node.children):
            retention.note_reuse(node.last_used)
            num_uses = node.num_uses + 1
        if is_last or node.children:
            node.num_uses += 1
        node.last_used = retention.clock
        self._enqueue(node)
        return num_uses

    def supersede(self, node: PrefixNode) -> None:
        """Note that a conversation has gone on from a checkpoint and left another."""
        node.num_uses = 0
        self._enqueue(node)

    def make_checkpoint_room(self, count: int, kept: Collection[int] = (), *, uses: bool) -> None:
        """Free checkpoints on the device until there are so many, those of the smallest key first.

        They go to the host, if there is room for their key. Else they are dropped.

        Args:
            kept: Checkpoints that stay.
            uses: Also drop those that have uses.
        """
        if self.checkpoints.num_free >= count:
            return
        owners, stay = self.checkpoints.num_owners, set(kept)
        held = {
            node for node in self._on_device
            if node.checkpoint in stay or owners[node.checkpoint] > 1
        }  # fmt: skip
        while self.checkpoints.num_free < count and len(self._on_device) > len(held):
            node = self._pop(
                self._device_checkpoints, self._on_device.__contains__, self._on_device, held
            )
            assert node is not None
            has_room = self._make_host_room(self.checkpoints.blocks_each, node.key, (node,))
            if not has_room and node.num_uses and not uses:
                self._device_checkpoints.push(node)
                break
            with self._journal:
                if has_room:
                    self._set_checkpoint(node, self.checkpoints.move_to_host(node.checkpoint))
                    self._enqueue(node)
                else:
                    self._drop_checkpoint(node)
            self.num_evicted_checkpoints += 1

    def _set_checkpoint(self, node: PrefixNode, checkpoint: int) -> None:
        """Give a node a checkpoint in place of its own; -1 for none."""
        self._journal.set_attribute(node, "checkpoint", checkpoint)
        self._journal.drop_item(self._on_device, node)
        self._journal.drop_item(self._on_host, node)
        if checkpoint >= 0:
            is_on_host = self.checkpoints.is_on_host(checkpoint)
            self._journal.set_item(self._on_host if is_on_host else self._on_device, node, None)

    def touch(self, node: PrefixNode) -> None:
        """Note that a request used this block, and those before it, until now."""
        node.last_used = self.retention.clock
        self._enqueue(node)

    def count_evictable(self, kept: Iterable[PrefixNode]) -> int:
        """Count blocks on the device that nobody else owns, beside those of some nodes."""
        owners = self.blocks.num_owners
        held = sum(node.block >= 0 and owners[node.block] == 1 for node in kept)
        return self.num_evictable - int(held)

    def evict(self, num_blocks: int, kept: Collection[PrefixNode] = (), *, note: str = "") -> None:
        """Free that many blocks which nobody else owns, those of the smallest key first.

        They go to the host, where they displace what has smaller keys. Nodes that are kept stay
        where they are.

        Raises:
            OutOfBlocksError: There are not so many. Nothing was changed.
        """
        evictable, free = self.count_evictable(kept), self.blocks.num_free
        if num_blocks > evictable:
            raise OutOfBlocksError(
                free + num_blocks, free, evictable if self.is_on else None,
                total=self.blocks.num_blocks, note=note,
            )  # fmt: skip
        kept = set(kept)
        while num_blocks > 0:
            chain = self._next_chain(num_blocks, kept)
            num_held = self._make_room_for_chain(chain, kept)
            with self._journal:
                blocks = np.array([node.block for node in chain], dtype=np.int32)
                for node in chain:
                    self._take_off_device(node)
                self.events.note_removed([node.digest for node in chain])
                first_held = len(chain) - num_held
                self._put_on_host(chain[first_held:], blocks[first_held:])
                self._remove(chain[:first_held])
                self.num_evicted_blocks += len(chain)
                self.blocks.release(blocks)
                if chain[-1].parent is not None:
                    self._enqueue(chain[-1].parent)
            num_blocks -= len(chain)

    def _next_chain(self, max_blocks: int, kept: Collection[PrefixNode]) -> list[PrefixNode]:
        """Return the leaf of the smallest key that can go, and the blocks before it that follow.

        The queue drops a block that it meets in use. Its last user, such as a fork from before it
        was published, does not queue it again. If only such blocks remain, all are queued anew.
        """
        owners = self.blocks.num_owners

        def can_go(node: PrefixNode) -> bool:
            return node.is_device_leaf and owners[node.block] == 1

        node = self._pop(self._leaves, can_go, self.nodes.values(), kept)
        assert node is not None, "num_evictable counts blocks that can't go"
        return _chain(
            node, max_blocks, lambda parent: owners[parent.block] == 1 and parent not in kept
        )

    def _make_room_for_chain(self, chain: list[PrefixNode], kept: Collection[PrefixNode]) -> int:
        """Return how many of a chain's blocks the host takes: its last ones, next to the root.

        Blocks on the host that come after the others are lost with them.
        """
        num_needed = sum(node.num_swapped > 0 for node in chain)  # their room is reserved
        num_held = len(chain)
        if not self.holds_blocks_on_host:
            num_held = num_needed
        elif self._num_host_free < num_held - num_needed:
            self._make_host_room(num_held - num_needed, chain[0].block_key, kept)
            num_held = min(num_held, num_needed + max(0, self._num_host_free))
        for node in chain[: len(chain) - num_held]:
            self._lose_descendants(node)
        return num_held

    def _lose_descendants(self, node: PrefixNode) -> None:
        """Drop all blocks on the host that come after a node."""
        todo = [child for child in node.children.values() if child.block < 0]
        order = []
        while todo:
            order.append(todo.pop())
            todo += order[-1].children.values()
        with self._journal:
            self._remove(order[::-1])

    def _make_host_room(
        self, num_blocks: int, key: float, kept: Collection[PrefixNode] = ()
    ) -> bool:
        """Drop things of smaller keys on the host until so many blocks are free for others."""
        staying = self.count_host_room() - self.count_host_room(kept)

        def is_worthless(parent: PrefixNode) -> bool:
            """It is worth nothing without the leaf after it."""
            return parent.block < 0 and not parent.num_swapped and parent not in kept

        while self._num_host_free < num_blocks <= self.count_host_room() - staying:
            node = self._pop(self._host_things, self._can_leave_host, self.nodes.values(), kept)
            if node is None:
                break
            if node.key >= key:
                self._host_things.push(node)
                break
            with self._journal:
                if node.is_host_leaf:
                    missing = num_blocks - self._num_host_free
                    self._remove(_chain(node, missing, is_worthless))
                else:
                    self._drop_checkpoint(node)
        return self._num_host_free >= num_blocks

    def count_host_room(self, kept: Collection[PrefixNode] = ()) -> int:
        """Count blocks on the host that are free, or can be, for others than swapped requests.

        Those of the nodes that are kept, and of their checkpoints, stay.
        """
        blocks = self.num_host_blocks - self._num_kept
        blocks -= sum(node.host_block >= 0 and not node.num_swapped for node in kept)
        checkpoints = len(self._on_host) - sum(node in self._on_host for node in kept)
        return self._num_host_free + blocks + checkpoints * self.checkpoints.blocks_each

    def make_room_for_new(
        self, num_blocks: int, path: Sequence[PrefixNode], *, depth: int, has_checkpoint: bool
    ) -> bool:
        """Make room on the host for blocks after a path, where they displace smaller keys.

        Args:
            depth: The depth of the last one.
            has_checkpoint: That one will have a checkpoint, whose second use is near.
        """
        clock = self.retention.clock
        key = clock - WITHOUT_USES
        if has_checkpoint:
            before = path[: depth - 1]
            node = PrefixNode(
                b"", before[-1] if before else None, depth,
                checkpoint=0, num_uses=2, last_used=clock, added=clock,
            )  # fmt: skip
            key = self.retention.key_of(node, num_between=depth - 1 - len(before))
        return self._make_host_room(num_blocks, key, set(path))

    def _can_leave_host(self, node: PrefixNode) -> bool:
        return node.is_host_leaf or node in self._on_host

    def restore(self, nodes: Sequence[PrefixNode], blocks: IntArray) -> None:
        """Copy nodes from the host to new blocks, which become the tree's."""
        if not nodes:
            return
        sources = np.array([node.host_block for node in nodes], dtype=np.int32)
        self.host.copy_in("blocks", sources, blocks)
        self._note_stored(nodes, DEVICE)
        for node, block in zip(nodes, blocks.tolist(), strict=True):
            self._put_on_device(node, block)

    def keep_for_swapped(self, nodes: Iterable[PrefixNode], change: int) -> None:
        """Count one swapped request more, or less, that needs these nodes."""
        for node in nodes:
            self._count(node, -1)
            self._journal.set_attribute(node, "num_swapped", node.num_swapped + change)
            self._count(node, 1)
            self._enqueue(node)

    def keep_blocks(self, blocks: IntArray, change: int) -> None:
        """Count one swapped request more, or less, that keeps these blocks on the device.

        They are not published meanwhile: it owns none of the blocks before them, and those could
        not be evicted.
        """
        self._journal.set_rows(self.num_keepers, blocks, self.num_keepers[blocks] + change)

    def make_host_room(self, num_blocks: int) -> None:
        """Drop blocks and checkpoints on the host until so many blocks are free there.

        Raises:
            OutOfBlocksError: There would not be so many. No request was changed.
        """
        if not self._make_host_room(num_blocks, math.inf):
            free = max(0, self._num_host_free)
            room = max(0, self.count_host_room() - free) if self.is_on else None
            raise OutOfBlocksError(
                num_blocks, free, room, total=self._host_blocks.num_blocks, kind="host blocks"
            )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the nodes agree with each other and with the owners."""
        on_device = [node.block for node in self.nodes.values() if node.block >= 0]
        if sorted(on_device) != np.flatnonzero(self.is_mine).tolist():
            raise IntegrityError("Prefix tree: its nodes and its blocks are not the same")
        if (self.is_mine & (self.num_keepers != 0)).any():
            raise IntegrityError("Prefix tree: it has a block that a swapped request keeps")
        on_host = [node for node in self.nodes.values() if node.host_block >= 0]
        ids = {node.host_block for node in on_host}
        kept = sum(node.num_swapped > 0 for node in on_host)
        reserved = sum(node.num_swapped > 0 <= node.block for node in self.nodes.values())
        counts = (self.num_host_blocks, self._num_kept, self._num_reserved)
        if len(ids) != len(on_host) or counts != (len(on_host), kept, reserved):
            raise IntegrityError("Prefix tree: its nodes and its blocks on the host differ")
        if reserved > self._host_blocks.num_free:
            raise IntegrityError("Prefix tree: there is no room for blocks of swapped requests")
        for places, is_on_host in ((self._on_device, False), (self._on_host, True)):
            for node in places:
                is_right = self.checkpoints.is_on_host(node.checkpoint) == is_on_host
                if self.nodes.get(node.digest) is not node or not is_right:
                    raise IntegrityError("Prefix tree: a checkpoint is not where it is listed")
        for node in self.nodes.values():
            num_children = sum(child.block >= 0 for child in node.children.values())
            is_somewhere = (node.block >= 0) != (node.host_block >= 0)
            has_parent = node.parent is None or node.parent.block >= 0 or node.block < 0
            if num_children != node.num_device_children or not (is_somewhere and has_parent):
                raise IntegrityError("Prefix tree: a node contradicts its parent or children")
            if (node.checkpoint >= 0) != (node in self._on_device or node in self._on_host):
                raise IntegrityError("Prefix tree: a node's checkpoint is not in its list")

    def owned_blocks(self) -> Int64Array:
        return np.flatnonzero(self.is_mine)

    def owned_host_blocks(self) -> list[int]:
        """Return the blocks on the host that the tree owns, beside those of checkpoints."""
        return [node.host_block for node in self.nodes.values() if node.host_block >= 0]

    def owned_checkpoints(self) -> list[int]:
        return [node.checkpoint for node in (*self._on_device, *self._on_host)]

    def _pop(
        self,
        queue: "_Queue",
        can_go: Callable[[PrefixNode], bool],
        all_nodes: Collection[PrefixNode],
        kept: Collection[PrefixNode],
    ) -> PrefixNode | None:
        """Take the node of the smallest key that can go and is not kept; there should be one.

        One whose key has risen waits again. A change that was undone may leave nodes in no queue,
        and forgotten ones in some. If a queue is empty, all nodes are queued.
        """
        nodes, aside, found = self.nodes, [], None

        def is_known(node: PrefixNode) -> bool:
            return nodes.get(node.digest) is node and can_go(node)

        for is_last in (False, True):
            while found is None and (node := queue.pop(is_known)) is not None:
                if node in kept:
                    aside.append(node)
                    continue
                before = queue.key_of(node)
                self._enqueue(node)
                if queue.key_of(node) <= before:
                    found = node
            if found is None and not is_last:
                aside = []
                for each in all_nodes:
                    self._enqueue(each)
        for node in aside:
            queue.push(node)
        return found

    def _enqueue(self, node: PrefixNode) -> None:
        """Give a node its keys of now, and queue it wherever it can go."""
        node.key = node.block_key = self.retention.key_of(node)
        if node.children and not node.num_device_children:  # on the host, they need its block
            node.block_key = max(node.key, *(each.block_key for each in node.children.values()))
        if node.is_device_leaf:
            self._leaves.push(node)
        if node in self._on_device:
            self._device_checkpoints.push(node)
        if self._can_leave_host(node):
            self._host_things.push(node)

    def _note_stored(self, nodes: Sequence[PrefixNode], medium: str) -> None:
        """Tell of nodes, each the child of the one before."""
        parent = nodes[0].parent
        digests = [node.digest for node in nodes]
        self.events.note_stored(digests, None if parent is None else parent.digest, medium=medium)

    def _put_on_device(self, node: PrefixNode, block: int) -> None:
        self._count(node, -1)
        if node.host_block >= 0:
            self._host_blocks.release(np.array([node.host_block]))
            self._journal.set_attribute(node, "host_block", -1)
            self.events.note_removed([node.digest], medium=HOST)
        self._set_device_block(node, block)
        self._count(node, 1)
        node.last_used = self.retention.clock  # its user queues it once it goes

    def _take_off_device(self, node: PrefixNode) -> None:
        self._count(node, -1)
        self._set_device_block(node, -1)
        if node.parent is not None:
            node.parent.last_used = max(node.parent.last_used, node.last_used)

    def _set_device_block(self, node: PrefixNode, block: int) -> None:
        """Give a node a block on the device, or take its own away: -1."""
        journal, parent, is_there = self._journal, node.parent, block >= 0
        journal.set_rows(self.is_mine, block if is_there else node.block, is_there)
        journal.set_attribute(node, "block", block)
        if parent is not None:
            count = parent.num_device_children + (1 if is_there else -1)
            journal.set_attribute(parent, "num_device_children", count)

    def _put_on_host(self, nodes: Sequence[PrefixNode], blocks: IntArray) -> None:
        """Copy evicted nodes to the host, where there is room for them."""
        if not nodes:
            return
        targets = self._host_blocks.acquire(len(nodes))
        for node, target in zip(nodes, targets.tolist(), strict=True):
            self._journal.set_attribute(node, "host_block", target)
            self._count(node, 1)
            self._enqueue(node)
        self._note_stored(nodes[::-1], HOST)
        order = np.argsort(blocks)
        self.host.copy_out("blocks", blocks[order], targets[order])

    def _remove(self, nodes: Sequence[PrefixNode]) -> None:
        """Forget nodes that are not on the device, children first; their hashes stay as ghosts."""
        host_blocks = [node.host_block for node in nodes if node.host_block >= 0]
        self.events.note_removed(
            [each.digest for each in nodes if each.host_block >= 0], medium=HOST
        )
        for node in nodes:
            assert not node.children, node.digest
            self.retention.remember(node)
            self._count(node, -1)
            self._journal.set_attribute(node, "host_block", -1)
            if node.checkpoint >= 0:
                self._drop_checkpoint(node)
            self._journal.drop_item(self.nodes, node.digest)
            if node.parent is not None:
                self._journal.drop_item(node.parent.children, node.digest)
        self.num_lost_blocks += len(nodes)
        self._host_blocks.release(np.array(host_blocks, dtype=np.int32))
        if nodes and nodes[-1].parent is not None:
            self._enqueue(nodes[-1].parent)

    def _drop_checkpoint(self, node: PrefixNode) -> None:
        """Give up a checkpoint; the one before it takes its uses over, if it was superseded."""
        self.checkpoints.release(np.array([node.checkpoint]))
        self._set_checkpoint(node, -1)
        if node.children:
            node.num_uses = 0
            return
        before = node.parent
        while before is not None and before.checkpoint < 0 and len(before.children) == 1:
            before = before.parent
        if before is None or before.checkpoint < 0 or len(before.children) > 1:
            return
        if node.num_uses and not before.num_uses:
            before.num_uses, before.last_used = node.num_uses, node.last_used
            self._enqueue(before)

    def _count(self, node: PrefixNode, sign: int) -> None:
        """Add a node's place to the counts, or take it away."""
        is_needed, change = sign * (node.num_swapped > 0), self._journal.set_attribute
        if node.block >= 0:
            change(self, "_num_reserved", self._num_reserved + is_needed)
        elif node.host_block >= 0:
            change(self, "num_host_blocks", self.num_host_blocks + sign)
            change(self, "_num_kept", self._num_kept + is_needed)


def _chain(
    leaf: PrefixNode, max_blocks: int, can_follow: Callable[[PrefixNode], bool]
) -> list[PrefixNode]:
    """Return a leaf, and the blocks before it that only it needs and that can follow it."""
    chain = [leaf]
    while len(chain) < max_blocks:
        parent = chain[-1].parent
        if parent is None or len(parent.children) > 1 or parent.checkpoint >= 0:
            break
        if not can_follow(parent):
            break
        chain.append(parent)
    return chain


class _Queue:
    """Nodes by one of their keys. Entries that are stale, or may not go, are dropped when met."""

    def __init__(self, key: str) -> None:
        self.key_of = attrgetter(key)
        self._heap: list[tuple[float, int, PrefixNode]] = []
        self._count = 0
        self._limit = 64

    def push(self, node: PrefixNode) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.key_of(node), self._count, node))
        if len(self._heap) > self._limit:
            valid = {entry[2]: entry for entry in self._heap if entry[0] == self.key_of(entry[2])}
            self._heap = list(valid.values())
            heapq.heapify(self._heap)
            self._limit = max(64, 2 * len(self._heap))

    def pop(self, can_go: Callable[[PrefixNode], bool]) -> PrefixNode | None:
        """Take the first node that can go."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if self.key_of(node) == key and can_go(node):
                return node
        return None
