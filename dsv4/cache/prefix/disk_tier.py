"""`DiskTier`: a manager's use of a prefix store. Nothing waits for the disk.

Published blocks and checkpoints are copied from the device to staging rows. A thread gives them to
the store once the copies are done. A prefetch owns blocks of the host, into which records are read.
The manager's next call makes them nodes of the tree. What is not written, lost or damaged is a
miss: no other record depends on it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.journal import Journal
from dsv4.cache.prefix.prefix_tree import PrefixTree
from dsv4.cache.prefix.retention import PrefixNode
from dsv4.cache.prefix.store import BoundStore, PrefixStore, RecordName
from dsv4.cache.prefix.store_reader import ReadHandle
from dsv4.checks import NotCopyable
from dsv4.config import CacheConfig

STAGING_BYTES = 64 << 20
MAX_STAGING_ROWS = 256
BLOCK = "block"


def _checkpoint(piece: int) -> str:
    """Name the kind of a checkpoint's piece, which fits into a block of the host."""
    return f"checkpoint {piece}"


class Wanted(NamedTuple):
    """Records that a prompt can be resumed from.

    Attributes:
        num_tokens: Tokens that are found with them.
        depth: Blocks of the prompt up to the last of them.
        parent: The digest of the block before them; None if they begin a prompt.
        digests: Those of their blocks.
        checkpointed: The digest of their checkpoint; None for a halo.
    """

    num_tokens: int
    depth: int
    parent: bytes | None
    digests: tuple[bytes, ...]
    checkpointed: bytes | None

    @property
    def end(self) -> bytes:
        """The digest of the block at their depth."""
        return self.digests[-1] if self.checkpointed is None else self.checkpointed


class Prefetch(NotCopyable):
    """Blocks on their way from disk to the host; see `KVCacheManager.prefetch`.

    Once it is done, the manager's next call makes them known. It may be dropped at any time.

    Attributes:
        num_tokens: Tokens of the prompt that are found then, unless a record is lost.
    """

    def __init__(self, wanted: Wanted, blocks: IntArray) -> None:
        self.num_tokens = wanted.num_tokens
        self._wanted, self._blocks = wanted, blocks
        self._reads: list[ReadHandle] = []
        self._starting, self._is_started = Lock(), Event()

    def done(self) -> bool:
        """Say whether all reads are over."""
        return self._is_started.is_set() and all(read.done() for read in self._reads)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all reads, at most so many seconds; say whether they are over."""
        end = None if timeout is None else monotonic() + timeout
        if not self._is_started.wait(timeout):
            return False
        left = (None if end is None else max(0.0, end - monotonic()) for _ in self._reads)
        return all(read.wait(rest) for read, rest in zip(self._reads, left, strict=True))

    def start(
        self, after: Sequence[torch.cuda.Event], records: BoundStore, rows: Sequence[memoryview]
    ) -> None:
        """Start the reads, once, after the copies from and to the rows."""
        with self._starting:
            if self._is_started.is_set():
                return
            wanted, num_blocks = self._wanted, len(self._wanted.digests)
            try:
                for event in after:
                    event.synchronize()
                self._reads.append(records.read(BLOCK, wanted.digests, rows[:num_blocks]))
                if wanted.checkpointed is not None:
                    for piece, row in enumerate(rows[num_blocks:]):
                        read = records.read(_checkpoint(piece), [wanted.checkpointed], [row])
                        self._reads.append(read)
            finally:
                self._is_started.set()

    def cancel(self) -> None:
        with self._starting:
            self._is_started.set()
        for read in self._reads:
            read.cancel()

    def found(self) -> tuple[int, bool]:
        """Count the blocks that were found one after the other; say if the checkpoint was too."""
        if not self._reads:
            return 0, False
        blocks, *pieces = (read.found for read in self._reads)
        num_pieces = len(self._blocks) - len(blocks)
        num_found = blocks.index(False) if False in blocks else len(blocks)
        return num_found, len(pieces) == num_pieces > 0 and all(found == [True] for found in pieces)


class _Job(NamedTuple):
    """Work of the thread, and the staging rows that it needs until it is done."""

    rows: Sequence[int]
    run: Callable[[], None]


class _Record(NamedTuple):
    """A staging row that is to be written."""

    kind: str
    digest: bytes
    row: Tensor
    num_tokens: int


@dataclass
class WriteCounts:
    """Records given to the store, and those that left the device before or were refused."""

    num_given: int = 0
    num_skipped: int = 0


@dataclass
class _Jobs:
    """The queue of the thread; a job stays in it until it is done."""

    queue: deque[_Job | None] = field(default_factory=deque)
    is_new: Event = field(default_factory=Event)

    def put(self, job: _Job | None) -> None:
        self.queue.append(job)
        self.is_new.set()

    def run(self) -> None:
        """Do jobs until there is a None."""
        while True:
            self.is_new.wait()
            self.is_new.clear()
            while self.queue:
                job = self.queue[0]
                if job is None:
                    return
                with suppress(Exception):  # the store is closed, or the device is lost: a miss
                    job.run()
                self.queue.popleft()


class DiskTier:
    """Records of one manager's format in a store.

    Args:
        tree: Adopts what was read. Prefetches own some blocks of its host's memory.

    Attributes:
        num_loaded_tokens: Tokens of blocks that were read and adopted.
        counts: Records that were written.
    """

    def __init__(
        self, store: PrefixStore, config: CacheConfig, tree: PrefixTree, journal: Journal
    ) -> None:
        self.num_loaded_tokens = 0
        self._store, self._records = store, store.bind(config.format_fingerprint)
        self._config, self._tree, self._checkpoints = config, tree, tree.checkpoints
        self._host, self._journal = tree.host, journal
        num_rows = min(MAX_STAGING_ROWS, STAGING_BYTES // tree.host.blocks.shape[1])
        self._staging = tree.host.new_rows(max(tree.checkpoints.blocks_each, num_rows))
        self._waiting: deque[tuple[PrefixNode, bool]] = deque()  # with whether its checkpoint is
        self._prefetches: dict[Prefetch, None] = {}
        self.counts, self._jobs = WriteCounts(), _Jobs()
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="dsv4-prefix-find")
        self._thread = Thread(target=self._jobs.run, name="dsv4-prefix-disk", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def num_damaged(self) -> int:
        return self._store.num_damaged

    def note(self, nodes: Iterable[PrefixNode], is_checkpoint: bool = False) -> None:
        """Queue the blocks of nodes, or their checkpoints, to be written."""
        self._waiting.extend((node, is_checkpoint) for node in nodes)

    def start_writes(self) -> None:
        """Start to copy what waits to staging rows, as far as some are free."""
        taken = {row for job in tuple(self._jobs.queue) if job is not None for row in job.rows}
        free = iter([row for row in range(len(self._staging)) if row not in taken])
        copies: list[tuple[Tensor, Tensor]] = []
        records: list[_Record] = []
        rows: list[int] = []
        while self._waiting:
            node, is_checkpoint = self._waiting[0]
            sources = self._sources(node, is_checkpoint)
            mine = list(islice(free, len(sources)))
            if len(mine) < len(sources):
                break
            self._waiting.popleft()
            self.counts.num_skipped += not sources
            rows += mine
            for piece, (parts, row) in enumerate(zip(sources, mine, strict=True)):
                target = self._staging[row]
                if is_checkpoint:
                    target = target[: self._checkpoints.num_bytes - piece * len(target)]
                end = max((place + len(part) for place, part in parts), default=0)
                target[end:] = 0  # padding
                copies += [(part, target[place : place + len(part)]) for place, part in parts]
                kind = _checkpoint(piece) if is_checkpoint else BLOCK
                num_tokens = node.depth * self._config.block_tokens
                records.append(_Record(kind, node.digest, target, num_tokens))
        if copies:
            events = self._host.copy_away(copies)
            run = partial(_put, events, self._records, records, self.counts)
            self._jobs.put(_Job(rows, run))

    def _sources(self, node: PrefixNode, is_checkpoint: bool) -> list[list[tuple[int, Tensor]]]:
        """Return the parts of a block or checkpoint on the device, in rows of the host's length."""
        if not is_checkpoint:
            return [self._host.device_block(node.block)] if node.block >= 0 else []
        return self._checkpoints.cut(node.checkpoint, self._staging.shape[1])

    def name_records(self, digests: Iterable[bytes]) -> list[RecordName]:
        """Name all records that there can be of these blocks, checkpoints last."""
        known, row_bytes = list(digests), self._staging.shape[1]
        names = [RecordName(BLOCK, digest, row_bytes) for digest in known]
        for piece in range(self._checkpoints.blocks_each):
            size = min(row_bytes, self._checkpoints.num_bytes - piece * row_bytes)
            names += [RecordName(_checkpoint(piece), digest, size) for digest in known]
        return names

    def prefetch(
        self, path: Sequence[PrefixNode], num_tokens: int, digests: Iterator[bytes]
    ) -> Prefetch | None:
        """Start to read the records with which more tokens of a prompt are found.

        Args:
            path: The prompt's blocks in memory.
            num_tokens: Tokens that are found with them.
            digests: Those of the prompt's blocks after the path.

        Returns:
            None if there are none, or there is no room on the host for them.
        """
        try:
            known = [*(node.digest for node in path), *self._find_blocks(digests)]
            for prefetch in self._prefetches:
                there = prefetch._wanted
                is_mine = there.depth <= len(known) and known[there.depth - 1] == there.end
                if is_mine and there.num_tokens > num_tokens:
                    return prefetch
            wanted = self._choose(path, num_tokens, known)
        except RuntimeError:  # the store is closed
            return None
        if wanted is None:
            return None
        num_blocks = len(wanted.digests)
        if wanted.checkpointed is not None:
            num_blocks += self._checkpoints.blocks_each
        if not self._tree.make_room_for_new(
            num_blocks, path, depth=wanted.depth, has_checkpoint=wanted.checkpointed is not None
        ):
            return None
        with self._journal:
            prefetch = Prefetch(wanted, self._host.block_owners.acquire(num_blocks))
            self._journal.set_item(self._prefetches, prefetch, None)
            self._journal.after_commit(self._start, prefetch)
            return prefetch

    def _contains(self, kind: str, digests: Sequence[bytes]) -> list[bool]:
        """Look records up in a thread: an interrupt must not hit one that holds the index."""
        return self._lookups.submit(self._records.contains, kind, digests).result()

    def _find_blocks(self, digests: Iterator[bytes]) -> list[bytes]:
        """Return the first digests whose blocks are all on disk."""
        first = list(islice(digests, 1))
        if not first or not self._contains(BLOCK, first)[0]:  # so it is for most prompts
            return []
        rest = list(digests)
        is_there = [*self._contains(BLOCK, rest), False]
        return first + rest[: is_there.index(False)]

    def _choose(
        self, path: Sequence[PrefixNode], num_tokens: int, known: Sequence[bytes]
    ) -> Wanted | None:
        """Choose the records with which most tokens are found, of those the host has room for.

        Args:
            known: The digests of the prompt's blocks in memory, and of those after them on disk.
        """
        block_tokens, each = self._config.block_tokens, self._checkpoints.blocks_each
        room = self._tree.count_host_room(path)
        first = num_tokens // block_tokens
        last = min(len(known), len(path) + room - each)
        depth = 0
        if room >= each and last > first:
            has_checkpoint = self._contains(_checkpoint(0), known[first:last])
            depth = max((first + i + 1 for i, has in enumerate(has_checkpoint) if has), default=0)
        end = min(len(known), len(path) + room)
        halo_start = end * block_tokens - self._config.halo_tokens
        if max(depth * block_tokens, halo_start) <= num_tokens:
            return None
        parent = path[-1].digest if path else None
        if halo_start > depth * block_tokens:
            return Wanted(halo_start, end, parent, tuple(known[len(path) : end]), None)
        needed = tuple(known[len(path) : depth])
        return Wanted(depth * block_tokens, depth, parent, needed, known[depth - 1])

    def _start(self, prefetch: Prefetch) -> None:
        """Let the thread start the reads, once copies from and to the host's blocks are done."""
        rows = self._host.blocks.numpy()
        row_bytes, state_bytes = rows.shape[1], self._checkpoints.num_bytes
        num_blocks = len(prefetch._wanted.digests)
        buffers = [rows[block].data for block in prefetch._blocks[:num_blocks].tolist()]
        for piece, block in enumerate(prefetch._blocks[num_blocks:].tolist()):
            buffers.append(rows[block, : state_bytes - piece * row_bytes].data)
        run = partial(prefetch.start, self._host.record_copies(), self._records, buffers)
        self._jobs.put(_Job((), run))

    def advance(self) -> None:
        """Adopt what was read, and start writes."""
        if self._prefetches:
            self.adopt()
        if self._waiting:
            self.start_writes()
        if self._jobs.queue:
            self._jobs.is_new.set()  # an interrupt may have come before it was

    def adopt(self) -> None:
        """Make the blocks of prefetches that are done known, and release those not found."""
        for prefetch in [each for each in self._prefetches if each.done()]:
            num_found, has_checkpoint = prefetch.found()
            with self._journal:
                self._adopt(prefetch, num_found, has_checkpoint=has_checkpoint)

    def _adopt(self, prefetch: Prefetch, num_found: int, *, has_checkpoint: bool) -> None:
        tree, wanted, num_blocks = self._tree, prefetch._wanted, len(prefetch._wanted.digests)
        blocks, pieces = prefetch._blocks[:num_blocks].tolist(), prefetch._blocks[num_blocks:]
        unused = blocks[num_found:]
        node = None if wanted.parent is None else tree.nodes.get(wanted.parent)
        for digest, block in zip(wanted.digests[:num_found], blocks[:num_found], strict=True):
            known, is_lost = tree.nodes.get(digest), node is None and wanted.parent is not None
            if known is None and not is_lost:
                node = tree.add_on_host(digest, node, block)
                self.num_loaded_tokens += self._config.block_tokens
            else:
                node = known
                unused.append(block)
        end = tree.nodes.get(wanted.checkpointed) if wanted.checkpointed is not None else None
        if has_checkpoint and end is not None:
            tree.give_checkpoint(end, self._checkpoints.adopt(pieces), 1)
        else:
            unused += pieces.tolist()
        self._forget(prefetch, unused)

    def _forget(self, prefetch: Prefetch, unused: list[int]) -> None:
        self._host.block_owners.release(np.array(unused, dtype=np.int32))
        self._journal.drop_item(self._prefetches, prefetch)

    def cancel_prefetches(self) -> None:
        """Give up all prefetches, and their blocks on the host."""
        for prefetch in list(self._prefetches):
            prefetch.cancel()
            with self._journal:
                self._forget(prefetch, prefetch._blocks.tolist())

    def owned_host_blocks(self) -> list[int]:
        """Return the blocks on the host that prefetches own."""
        return [block for each in self._prefetches for block in each._blocks.tolist()]

    def finish_writes(self) -> None:
        """Give the store all that waits; waits for the device."""
        while self._thread.is_alive() and (self._waiting or self._jobs.queue):
            self.advance()
            sleep(0.0005)

    def close(self, *, is_usable: bool) -> None:
        """Give up all prefetches, and end the thread once it has done its jobs.

        Args:
            is_usable: The device has the blocks that wait to be written.
        """
        if is_usable:
            self.finish_writes()
        for prefetch in self._prefetches:
            prefetch.cancel()
        self._lookups.shutdown()
        self._jobs.put(None)
        self._thread.join()


def _put(
    after: Sequence[torch.cuda.Event],
    records: BoundStore,
    staged: Sequence[_Record],
    counts: WriteCounts,
) -> None:
    """Give the store copies of staging rows, after the copies to them."""
    num_given = 0
    try:
        for event in after:
            event.synchronize()
        for kind, digest, row, num_tokens in staged:
            records.put(kind, digest, row.clone(), num_tokens, copy=False)
            num_given += 1
    finally:
        counts.num_given += num_given
        counts.num_skipped += len(staged) - num_given
