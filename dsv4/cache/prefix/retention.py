"""`Retention`: the order in which the prefix cache gives things up, and its memory of lost ones.

A checkpoint is worth what it saves over what it costs: `uses × gain / cost`. The gain is the tokens
to prefill again without it, from the checkpoint with uses before it. The cost is its bytes, with
those of the blocks that it alone needs. The worth halves with each half-life without a use. As a
number that does not change with time, it is `last_used + half_life × log2(worth)`, the key: the
smallest goes first.

Uses count the turns of a conversation. They pass from one prompt's end to that of the prompt which
goes on from there. A checkpoint without uses, and a block that leads to no checkpoint, go before
all others, the oldest first.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

WITHOUT_USES = 1e15  # below the key of anything with uses
FIRST_HALF_LIFE = 4000.0  # in prompts, until reuses tell
REUSES_AVERAGED = 64
NEWCOMER_SHARE = 0.75  # of its worth, so that one prompt does not displace its equals
NEWCOMER_AGE = 16
GHOSTS_PER_BLOCK = 4


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A full block.

    Uses, times and keys are hints: an undone change may leave them as they are.

    Attributes:
        digest: The hash of all tokens up to its end.
        parent: The block before it; None for a first one.
        depth: Blocks up to its end.
        block, host_block: The block of its entries on device or host; -1 for none.
        checkpoint: The checkpoint at its end; -1 for none.
        num_uses: Uses of its checkpoint.
        last_used: Prompts that were looked up before its last use, or that of a block after it.
        added: Prompts that were looked up before it got its checkpoint.
        key: The place of its checkpoint in the order; see `Retention`.
        block_key: That of its block, which blocks after it on the host need too.
        had_children: Other blocks have come after it.
        num_device_children: Children on the device.
        num_swapped: Swapped requests that need it; it may go to the host, but not be lost.
    """

    digest: bytes
    parent: "PrefixNode | None"
    depth: int
    block: int = -1
    host_block: int = -1
    checkpoint: int = -1
    num_uses: int = 0
    last_used: int = 0
    added: int = 0
    key: float = 0.0
    block_key: float = 0.0
    had_children: bool = False
    num_device_children: int = 0
    num_swapped: int = 0
    children: dict[bytes, "PrefixNode"] = field(default_factory=dict)

    @property
    def has_uses(self) -> bool:
        return self.checkpoint >= 0 and self.num_uses > 0

    @property
    def is_device_leaf(self) -> bool:
        return self.block >= 0 and not self.num_device_children

    @property
    def is_host_leaf(self) -> bool:
        return self.block < 0 <= self.host_block and not self.children and not self.num_swapped


class Ghost(NamedTuple):
    """A block that was lost.

    Attributes:
        had_children: Other blocks came after it.
        num_uses, last_used: Those of its checkpoint.
    """

    had_children: bool
    num_uses: int
    last_used: int


class Retention:
    """Keys of nodes, and ghosts of lost ones.

    Args:
        checkpoint_blocks: The cost of a checkpoint, in blocks.
        num_blocks: Blocks of device and host.

    Attributes:
        clock: Prompts looked up so far.
        half_life: The mean age of reuses, in prompts.
    """

    def __init__(self, *, checkpoint_blocks: float, num_blocks: int) -> None:
        self.clock = 0
        self.half_life = FIRST_HALF_LIFE
        self._checkpoint_blocks = checkpoint_blocks
        self._max_ghosts = GHOSTS_PER_BLOCK * num_blocks
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()

    def key_of(self, node: PrefixNode, *, num_between: int = 0) -> float:
        """Return a node's place in the order now.

        Args:
            num_between: Blocks between it and its parent, while they are not in the tree.
        """
        if not node.has_uses:
            return node.last_used - WITHOUT_USES
        parent, num_own, is_own = node.parent, int(not node.children), not node.children
        num_own += num_between
        while parent is not None and not parent.has_uses:
            is_own = is_own and len(parent.children) == 1  # else others need it too
            num_own += is_own
            parent = parent.parent
        gain = node.depth - (0 if parent is None else parent.depth)
        worth = node.num_uses * gain / (num_own + self._checkpoint_blocks)
        if self.clock - node.added < NEWCOMER_AGE:
            worth *= NEWCOMER_SHARE
        return node.last_used + self.half_life * math.log2(worth)

    def note_reuse(self, last_used: int) -> None:
        """Learn from a use how long things are worth keeping."""
        self.half_life += (self.clock - last_used - self.half_life) / REUSES_AVERAGED
        self.half_life = max(1.0, self.half_life)

    def remember(self, node: PrefixNode) -> None:
        """Keep the hash of a block that is lost."""
        self._ghosts[node.digest] = Ghost(node.had_children, node.num_uses, node.last_used)
        self._ghosts.move_to_end(node.digest)
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def follow(self, digests: Iterable[bytes]) -> list[Ghost]:
        """Return the ghosts of a prompt's next blocks, as far as all are remembered."""
        found = []
        for digest in digests:
            ghost = self._ghosts.get(digest)
            if ghost is None:
                break
            self._ghosts.move_to_end(digest)
            found.append(ghost)
        return found
