"""`PrefixCache`: the token ids of open requests, and the blocks they publish for later requests.

It publishes a full block once none of its tokens can be rejected, and decides where checkpoints are
taken. The tree of published blocks is `prefix_tree`'s, the bytes are the pools'.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray, ragged
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.memory.journal import Journal
from dsv4.cache.prefix.disk_tier import DiskTier, Prefetch
from dsv4.cache.prefix.prefix_tree import PrefixTree, hash_blocks, root_digest
from dsv4.cache.prefix.retention import Ghost, PrefixNode
from dsv4.cache.prefix.store import RecordName
from dsv4.cache.prefix.token_store import ID_DTYPE, TokenIds, TokenStore, as_token_ids
from dsv4.config import CacheConfig


class PrefixHit(NamedTuple):
    """A slot opened by `resume_request`.

    Attributes:
        num_tokens: Tokens that were found: the request's length, from where it is to be run.
        num_replayed: Tokens from there on whose entries were found too. Running them brings back
            the fixed state; they write no entry, and their outputs mean nothing.
        prefetch: Blocks on their way from disk with which more would be found; None for none.
    """

    slot: int
    num_tokens: int
    num_replayed: int = 0
    prefetch: Prefetch | None = None


class PrefixMatch(NamedTuple):
    """The tokens of a prompt that `resume_request` would find now.

    Attributes:
        num_tokens: Those that need not be run.
        num_replayed: Those after them that are run without writing entries.
        num_host_tokens: Those of both that must first be copied from the host.
        num_blocks: Blocks of theirs that are free or evictable now, and would not be then.
    """

    num_tokens: int
    num_replayed: int
    num_host_tokens: int
    num_blocks: int


class ResumePoint(NamedTuple):
    """Where a prompt with known blocks is resumed.

    Attributes:
        num_tokens: The length there.
        checkpoint: The node with the checkpoint of that length; None at the start of a halo.
        path: The known blocks, which may reach further than that length.
    """

    num_tokens: int
    checkpoint: PrefixNode | None
    path: list[PrefixNode]


GENERATED_PER_STEP = 1  # checkpoint, so that a step in which many blocks close stays short
NO_POINT = ResumePoint(0, None, [])


class PlannedCheckpoint(NamedTuple):
    """A boundary inside a chunk that a forward checkpoints."""

    row: int
    slot: int
    boundary: int
    checkpoint: int


class Prompt(NamedTuple):
    """Token ids from position 0 on, and the start of their chain of hashes."""

    root: bytes
    ids: IntArray


@dataclass(eq=False)
class TrackedRequest:
    """An open request whose token ids are known.

    Attributes:
        root: The start of its chain of hashes.
        nodes: Its published blocks, the first of its row of the block table.
        pending: Its checkpoints that are not published yet, by boundary.
        uses: Boundaries worth a checkpoint, in blocks, and the uses that each begins with.
        resumed: The end of another prompt at which it was resumed, until its own has a checkpoint.
    """

    root: bytes
    nodes: list[PrefixNode] = field(default_factory=list)
    pending: dict[int, int] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    resumed: PrefixNode | None = None

    def copy(self) -> "TrackedRequest":
        parts = list(self.nodes), dict(self.pending), dict(self.uses)
        return TrackedRequest(self.root, *parts, self.resumed)


class PrefixCache:
    """Records of open requests, and the publication of their blocks and checkpoints.

    Args:
        block_table: The host's, `[max_requests, max_blocks]`.
        set_blocks: Writes block ids to a row of the block table: slot, columns, ids.

    Attributes:
        requests: The requests whose ids are known, by slot.
        ids: The known ids of each slot.
        tier: The records on disk; None without a store.
        has_news: Lengths or ids have changed since the last `publish`.
    """

    def __init__(
        self,
        config: CacheConfig,
        policy: CheckpointPolicy,
        tree: PrefixTree,
        journal: Journal,
        *,
        block_table: IntArray,
        set_blocks: Callable[[int, Int64Array, IntArray], None],
        tier: DiskTier | None,
    ) -> None:
        max_requests = len(block_table)
        self.tree = tree
        self.tier = tier
        self.policy = policy
        self.requests: dict[int, TrackedRequest] = {}
        self.ids = TokenStore(max_requests, journal)
        self.num_lookups = self.num_hits = self.num_skipped_checkpoints = 0
        self.num_asked_tokens = self.num_hit_tokens = self.num_host_hit_tokens = 0
        self.has_news = False
        self._config, self._journal = config, journal
        self._blocks, self._checkpoints = tree.blocks, tree.checkpoints
        self._block_table, self._set_blocks = block_table, set_blocks
        # Of each slot: published blocks, checkpoints not published, and the last boundary in
        # blocks that is worth one.
        self._num_published: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._num_pending: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._last_use: Int64Array = np.zeros(max_requests, dtype=np.int64)
        self._planned: list[PlannedCheckpoint] = []

    def read_prompt(self, token_ids: TokenIds, salt: bytes) -> Prompt:
        """Check a prompt and the salt of its owner."""
        if not isinstance(salt, bytes):
            raise TypeError(f"Invalid salt: expected bytes, got {type(salt).__name__}")
        return Prompt(self._root(salt), as_token_ids(token_ids))

    def _root(self, salt: bytes) -> bytes:
        """Return the start of a salt's chain; that of a rank follows from that of one alone."""
        root = root_digest(self._config.whole.format_fingerprint, salt)
        has_all = self._config.num_ranks == 1
        return root if has_all else root_digest(self._config.format_fingerprint, root)

    def choose_start(self, path: list[PrefixNode]) -> ResumePoint:
        """Choose the point with the fewest tokens to run: a checkpoint, or the start of a halo.

        Tokens from there to the end of the known blocks are replayed.
        """
        block_tokens, end = self._config.block_tokens, len(path)
        while end and path[end - 1].checkpoint < 0:
            end -= 1
        halo_start = len(path) * block_tokens - self._config.halo_tokens
        if halo_start > end * block_tokens:
            return ResumePoint(halo_start, None, path)
        return ResumePoint(end * block_tokens, path[end - 1], path) if end else NO_POINT

    def find_blocks(self, prompt: Prompt) -> list[PrefixNode]:
        """Return the nodes of a prompt's known blocks, but for its last token."""
        return self._follow(self._digests(prompt))[0]

    def _digests(self, prompt: Prompt, path: Sequence[PrefixNode] = ()) -> Iterator[bytes]:
        """Hash the full blocks of a prompt after a path, but for its last token."""
        block_tokens = self._config.block_tokens
        num_tokens = max(0, len(prompt.ids) - 1) // block_tokens * block_tokens
        ids = prompt.ids[len(path) * block_tokens : num_tokens].data.cast("B")
        root = path[-1].digest if path else prompt.root
        return hash_blocks(root, ids, block_tokens * ID_DTYPE.itemsize)

    def _follow(self, digests: Iterator[bytes]) -> tuple[list[PrefixNode], Iterator[bytes]]:
        """Return the known nodes, and the digests after them."""
        nodes = self.tree.nodes
        path: list[PrefixNode] = []
        for digest in digests:
            node = nodes.get(digest)
            if node is None:
                return path, chain((digest,), digests)
            path.append(node)
        return path, digests

    def start_request(
        self, prompt: Prompt, count_fitting: Callable[[list[PrefixNode]], int], named: Sequence[int]
    ) -> tuple[ResumePoint, "TrackedRequest", list[PrefixNode]]:
        """Look a prompt up: where to resume it, and where its checkpoints will be worth most.

        These are its end, or the boundaries that its caller names, and the place where it leaves
        the blocks that are known or were.

        Args:
            count_fitting: Returns how many of some nodes there is room for.
            named: Tokens at whose last boundaries other prompts may go on.

        Returns:
            The point, the request, and the prompt's known blocks.
        """
        tree, block_tokens, uses = self.tree, self._config.block_tokens, 1
        tree.retention.clock += 1
        path, digests = self._follow(self._digests(prompt))
        ghosts = tree.retention.follow(digests)
        num_known, num_blocks = len(path) + len(ghosts), len(prompt.ids) // block_tokens
        last: PrefixNode | Ghost | None = ghosts[-1] if ghosts else path[-1] if path else None
        point = self.choose_start(path[: count_fitting(path)])
        request, node = TrackedRequest(prompt.root, list(point.path)), point.checkpoint
        if node is not None:
            uses = tree.use_checkpoint(node, is_last=node.depth == num_blocks)
            request.resumed = None if node.children else node
        if last is not None and last.num_uses and last is not node:
            tree.retention.note_reuse(last.last_used)
            uses = max(uses, last.num_uses + 1)
        ends = {each // block_tokens for each in named}
        if not ends and self.policy.at_prompt_end:
            ends = {num_blocks}
        request.uses = dict.fromkeys(ends - {0}, uses)
        depth = 0 if node is None else node.depth
        is_branch = last is not None and last.had_children and depth < num_known < num_blocks
        if is_branch and self.policy.at_branches:
            request.uses.setdefault(num_known, 1)
        return point, request, path

    def prefetch(self, prompt: Prompt, path: list[PrefixNode], num_tokens: int) -> Prefetch | None:
        """Start to read from disk what a prompt with these known blocks and tokens lacks."""
        if self.tier is None:
            return None
        return self.tier.prefetch(path, num_tokens, self._digests(prompt, path))

    def name_records(self, prompt: Prompt) -> list[RecordName]:
        """Name the records that a store can have of a prompt."""
        if self.tier is None:
            raise ValueError("This manager has no store: expected store=")
        return self.tier.name_records(self._digests(prompt))

    def make_host_room(self, num_blocks: int) -> None:
        """Free blocks on the host, of prefetches too, until there are so many.

        Raises:
            OutOfBlocksError: There would not be so many. No request was changed.
        """
        if self.tier is not None and self.tree.count_host_room() < num_blocks:
            self.tier.cancel_prefetches()
        self.tree.make_host_room(num_blocks)

    def count_lookup(self, num_asked: int, num_found: int, num_on_host: int) -> None:
        """Count a call of `resume_request`, with the tokens found and those of them on the host."""
        self.num_lookups += 1
        self.num_hits += num_found > 0
        self.num_asked_tokens += num_asked
        self.num_hit_tokens += num_found
        self.num_host_hit_tokens += num_on_host

    def match(self, prompt: Prompt) -> PrefixMatch:
        """Count the tokens that are found now; one is left to run."""
        num_tokens, _, path = self.choose_start(self.find_blocks(prompt))
        block_tokens = self._config.block_tokens
        num_host = sum(node.block < 0 for node in path)
        owners = self._blocks.num_owners
        num_unused = sum(owners[node.block] == 1 for node in path if node.block >= 0)
        return PrefixMatch(
            num_tokens, len(path) * block_tokens - num_tokens, num_host * block_tokens,
            num_host + int(num_unused),
        )  # fmt: skip

    def take(self, path: Sequence[PrefixNode], restored: IntArray) -> IntArray:
        """Own the blocks of a path, those from the host in new blocks; return them in order."""
        on_host = [node for node in path if node.block < 0]
        self.tree.restore(on_host, restored)
        blocks = np.array([node.block for node in path], dtype=np.int32)
        self._blocks.share(blocks)
        return blocks

    def track(self, slot: int, request: TrackedRequest, ids: IntArray) -> None:
        """Track a request in a slot that was not tracked."""
        self._journal.set_item(self.requests, slot, request)
        self.ids.append(np.array([slot]), ids, np.array([len(ids)]))
        self.has_news = True
        self._update(slot)

    def note_tokens(
        self, slots: Int64Array, ids: IntArray, counts: Int64Array, starts: Int64Array
    ) -> None:
        """Extend the known ids of slots; start to track those that were not, without salt."""
        known = self.ids.num_known[slots]
        if (starts != known).any():
            row = int((starts != known).argmax())
            raise ValueError(
                f"Invalid start: expected {known[row]}, the number of ids known of slot "
                f"{slots[row]}, got {starts[row]}"
            )
        root = None
        for slot in slots[known == 0].tolist():
            if slot not in self.requests:
                root = root or self._root(b"")
                self._journal.set_item(self.requests, slot, TrackedRequest(root))
        self.ids.append(slots, ids, counts)
        self.has_news = True

    def choose_boundaries(
        self, slots: Int64Array, before: Int64Array, after: Int64Array, is_chunk: BoolArray
    ) -> list[tuple[int, int, int]]:
        """Choose the boundaries that a forward passes and that are worth a checkpoint.

        Args:
            slots, before, after: Slots and lengths of all rows; rows of slot -1 are left out.
            is_chunk: Rows with more tokens than a step.

        Returns:
            Row, slot and boundary; those with uses first, and of a row the last one first.
        """
        block_tokens = self._config.block_tokens
        first, last = before // block_tokens + 1, after // block_tokens
        may_choose = (slots >= 0) & (first <= last)
        if not may_choose.any():
            return []
        may_want = self.policy.may_choose(first, last) | (first <= self._last_use[slots])
        rows = (may_choose & may_want).nonzero()[0].tolist()
        if self.policy.in_generation:
            generated = (may_choose & ~may_want & ~is_chunk).nonzero()[0]
            rows += generated[:GENERATED_PER_STEP].tolist()
        with_uses: list[tuple[int, int, int]] = []
        others: list[tuple[int, int, int]] = []
        for row in rows:
            slot, low, high = int(slots[row]), int(first[row]), int(last[row])
            request = self.requests.get(slot)
            if request is None:
                continue
            blocks = set(self.policy.chosen(low, high))
            if not may_want[row]:
                blocks.add(high)
            blocks.update(block for block in request.uses if low <= block <= high)
            for block in sorted(blocks, reverse=True):
                chosen = with_uses if request.uses.get(block) else others
                chosen.append((row, slot, block * block_tokens))
        return with_uses + others

    def has_uses(self, slot: int, boundary: int) -> bool:
        """The checkpoint of a boundary begins with uses."""
        return bool(self.requests[slot].uses.get(boundary // self._config.block_tokens))

    def plan_checkpoints(
        self, chosen: list[tuple[int, int, int]], max_checkpoints: int
    ) -> list[tuple[int, int, int]]:
        """Take checkpoints for boundaries inside chunks: row, boundary, checkpoint."""
        count = min(len(chosen), self._checkpoints.num_free, max_checkpoints)
        self.num_skipped_checkpoints += len(chosen) - count
        taken = self._checkpoints.acquire(count).tolist()
        planned = [
            PlannedCheckpoint(*point, checkpoint)
            for point, checkpoint in zip(chosen[:count], taken, strict=True)
        ]
        self._journal.set_attribute(self, "_planned", planned)
        return [(each.row, each.boundary, each.checkpoint) for each in planned]

    def end_checkpoints(self, *, is_done: bool) -> None:
        """The forward that was to take them is over: they are pending, or were not taken."""
        if not self._planned:
            return
        for planned in self._planned:
            if is_done:
                self.add_pending(planned.slot, planned.boundary, planned.checkpoint)
            else:
                self._checkpoints.release(np.array([planned.checkpoint]))
        self._journal.set_attribute(self, "_planned", [])

    def add_pending(self, slot: int, boundary: int, checkpoint: int) -> None:
        """Give a request the checkpoint of a boundary; its node, if that is published."""
        request, num_blocks = self.requests[slot], boundary // self._config.block_tokens
        pending = request.pending
        if num_blocks <= len(request.nodes):
            self._give_checkpoint(request, num_blocks, checkpoint)
            return
        self._journal.set_item(pending, boundary, checkpoint)
        self._update(slot)

    def publish(self, lengths: Int64Array) -> None:
        """Publish every full block that is `drafts_per_step` tokens behind its request's end."""
        block_tokens, published = self._config.block_tokens, self._num_published
        final = np.minimum(lengths - self._config.drafts_per_step, self.ids.num_known)
        num_final = final // block_tokens
        slots = (num_final > published).nonzero()[0]
        if slots.size:
            with self._journal:
                self._publish(slots, published[slots], num_final[slots])

    def checkpoints_of(self, slot: int) -> dict[int, int]:
        """Return the checkpoints of a request by their boundaries, in rising order."""
        request, block_tokens = self.requests.get(slot), self._config.block_tokens
        if request is None:
            return {}
        published = {
            (number + 1) * block_tokens: node.checkpoint
            for number, node in enumerate(request.nodes)
            if node.checkpoint >= 0
        }
        return dict(sorted({**published, **request.pending}.items()))

    def pending_checkpoints(self) -> list[int]:
        """Return the checkpoints that requests and the current forward own."""
        pending = [each for request in self.requests.values() for each in request.pending.values()]
        return pending + [planned.checkpoint for planned in self._planned]

    def cut(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Forget the ids of requests from these lengths on, with all that follows from them."""
        if self.requests:
            self.cut_blocks(slots, lengths)
            self.ids.cut(slots, lengths)

    def cut_blocks(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Forget nodes and pending checkpoints of requests from these lengths on."""
        num_blocks = lengths // self._config.block_tokens
        is_cut = (self._num_published[slots] > num_blocks) | (self._num_pending[slots] > 0)
        for slot, count in zip(slots[is_cut].tolist(), num_blocks[is_cut].tolist(), strict=True):
            self.give_up(slot, count)

    def drop_nodes(self, slots: Int64Array, lengths: Int64Array) -> None:
        """Forget the nodes of requests from these lengths on; ids and pending checkpoints stay.

        The tree keeps their blocks. The request shares them until it writes there, and may take
        the nodes again when it publishes next.
        """
        num_blocks = lengths // self._config.block_tokens
        is_cut = self._num_published[slots] > num_blocks
        for slot, count in zip(slots[is_cut].tolist(), num_blocks[is_cut].tolist(), strict=True):
            self._cut_nodes(self.requests[slot], count)
            self._update(slot)

    def _cut_nodes(self, request: TrackedRequest, num_blocks: int) -> None:
        if len(request.nodes) > num_blocks:
            self.tree.touch(request.nodes[-1])
            self._journal.note_tail(request.nodes, num_blocks)
            del request.nodes[num_blocks:]

    def give_up(self, slot: int, num_blocks: int) -> None:
        """Keep the nodes of the first blocks, and the pending checkpoints up to there."""
        request = self.requests.get(slot)
        if request is None:
            return
        self._cut_nodes(request, num_blocks)
        pending = request.pending
        limit = num_blocks * self._config.block_tokens
        for boundary in [each for each in pending if each > limit]:
            self._checkpoints.release(np.array([pending[boundary]]))
            self._journal.drop_item(pending, boundary)
        self._update(slot)

    def copy(self, slot: int, fork: int) -> None:
        """Track a fork with the same ids, blocks and pending checkpoints."""
        request = self.requests.get(slot)
        if request is None:
            return
        self._checkpoints.share(np.array(list(request.pending.values()), dtype=np.int32))
        self.track(fork, request.copy(), self.ids.read(slot).copy())

    def forget(self, slots: Int64Array) -> None:
        tracked = [slot for slot in slots.tolist() if slot in self.requests]
        if not tracked:
            return
        slots = np.array(tracked)
        self.cut(slots, np.zeros(len(slots), dtype=np.int64))
        for slot in tracked:
            self._journal.drop_item(self.requests, slot)

    def _publish(self, slots: Int64Array, first: Int64Array, last: Int64Array) -> None:
        """Publish these blocks of each slot, and the checkpoints at their ends."""
        taken: list[int] = []
        named, firsts = slots.tolist(), first.tolist()
        requests = [self.requests[slot] for slot in named]
        self._journal.note(_shorten_lists, [request.nodes for request in requests], firsts)
        added, add = self.tree.new_nodes(), self.tree.add
        if self.tier is not None:
            self._journal.after_commit(self.tier.note, added)
        width = self._config.block_tokens * ID_DTYPE.itemsize
        known, starts = self.ids.read_bytes(slots)
        rows, columns = ragged(slots, first, last - first)
        is_kept = self.tree.num_keepers[self._block_table[rows, columns]] > 0
        if is_kept.any():
            ends = np.full(len(self._num_published), np.iinfo(np.int64).max)
            np.minimum.at(ends, rows[is_kept], columns[is_kept])
            last = np.minimum(last, ends[slots])
            rows, columns = ragged(slots, first, last - first)
        blocks = iter(self._block_table[rows, columns].tolist())
        for slot, request, start, begin, end in zip(
            named, requests, starts.tolist(), firsts, last.tolist(), strict=True
        ):
            nodes = request.nodes
            parent, digest = (nodes[-1], nodes[-1].digest) if nodes else (None, request.root)
            part = known[start + begin * width : start + end * width]
            num_known = len(nodes)
            for known_as in hash_blocks(digest, part, width):
                block = next(blocks)
                parent, is_taken = add(known_as, parent, block, added)
                nodes.append(parent)
                if is_taken:
                    taken.append(block)
                    continue
                num_known += 1
                if parent.block != block:
                    self._adopt(slot, len(nodes) - 1, block, parent.block)
            if self.tree.events.is_wanted:
                self._tell(slot, nodes, num_known)
            if request.pending:
                self._publish_checkpoints(slot, request, end)
        self._blocks.share(np.array(taken, dtype=np.int32))
        self._journal.set_rows(self._num_published, slots, last)

    def _tell(self, slot: int, nodes: list[PrefixNode], first: int) -> None:
        """Tell of blocks that a request has published, from the first one that was not there."""
        block_tokens = self._config.block_tokens
        ids = self.ids.read(slot)[first * block_tokens : len(nodes) * block_tokens]
        self.tree.events.note_stored(
            [node.digest for node in nodes[first:]], nodes[first - 1].digest if first else None,
            token_ids=ids,
        )  # fmt: skip

    def _publish_checkpoints(self, slot: int, request: TrackedRequest, num_final: int) -> None:
        pending, block_tokens = request.pending, self._config.block_tokens
        for boundary in [each for each in pending if each <= num_final * block_tokens]:
            checkpoint = pending[boundary]
            self._journal.drop_item(pending, boundary)
            self._give_checkpoint(request, boundary // block_tokens, checkpoint)
        self._update(slot)

    def _give_checkpoint(self, request: TrackedRequest, num_blocks: int, checkpoint: int) -> None:
        """Publish a checkpoint; the end at which the request was resumed passes its uses on."""
        uses = request.uses.get(num_blocks, 0)
        node = request.nodes[num_blocks - 1]
        self.tree.give_checkpoint(node, checkpoint, uses)
        if self.tier is not None and uses:
            self._journal.after_commit(self.tier.note, [node], True)
        resumed = request.resumed
        if uses and resumed is not None and num_blocks > resumed.depth:
            request.resumed = None
            self.tree.supersede(resumed)

    def _adopt(self, slot: int, column: int, mine: int, known: int) -> None:
        """Replace an own block by the one that was published before with the same tokens."""
        self._blocks.share(np.array([known]))
        self._set_blocks(slot, np.array([column]), np.array([known], dtype=np.int32))
        self._blocks.release(np.array([mine]))

    def _update(self, slot: int) -> None:
        request = self.requests[slot]
        for array, value in (
            (self._num_published, len(request.nodes)),
            (self._num_pending, len(request.pending)),
            (self._last_use, max(request.uses, default=0)),
        ):
            self._journal.set_rows(array, slot, value)


def _shorten_lists(lists: list[list[PrefixNode]], lengths: list[int]) -> None:
    for items, length in zip(lists, lengths, strict=True):
        del items[length:]
