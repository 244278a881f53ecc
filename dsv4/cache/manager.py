"""`KVCacheManager`: opens, extends and frees the requests of one cache."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from dsv4.cache import arrivals
from dsv4.cache.books import CacheBooks
from dsv4.cache.current_forward import CurrentForward
from dsv4.cache.forward_planner import ForwardPlanner, Ints
from dsv4.cache.handle import LayerCacheHandle, LayerParts
from dsv4.cache.incoming import IncomingRequest
from dsv4.cache.integrity import check_integrity
from dsv4.cache.layer_backends import choose_backends
from dsv4.cache.memory.arrays import BoolArray, Int64Array, IntArray
from dsv4.cache.memory.cache_memory import CacheMemory, read_devices
from dsv4.cache.memory.capacity import (
    Capacity,
    ComponentBytes,
    blocks_for,
    count_host_blocks,
    longest_in,
)
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.memory.journal import Journal
from dsv4.cache.memory.paged_cache import PagedKVPool
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.memory.state_cache import StateCachePool
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prefix.disk_tier import Prefetch
from dsv4.cache.prefix.events import OnEvents
from dsv4.cache.prefix.prefix_cache import PrefixCache, PrefixHit, PrefixMatch
from dsv4.cache.prefix.store import PrefixStore, RecordName
from dsv4.cache.prefix.token_store import TokenIds, split_ids
from dsv4.cache.request_table import RequestTable
from dsv4.cache.saved_request import (
    SavedRequest,
    check_request,
    copy_request,
    own_share,
    read_saved,
    write_saved,
)
from dsv4.cache.stats import CacheStats, collect_stats
from dsv4.cache.swap import SwappedRequest
from dsv4.checks import (
    NotCopyable,
    check_at_most,
    check_bool,
    check_int,
    check_ints,
    check_one_or_more,
    check_type,
)
from dsv4.config import CacheConfig
from dsv4.distributed.context import SplitContext, rank_config

DEVICE_CHECKPOINTS = 8


class Transfer(Protocol):
    """Moves bytes between the pools and another process."""

    def close(self) -> None:
        """End it: nothing of the pools is read or written any more."""


class KVCacheManager(NotCopyable):
    """The cache of one model (or of one rank's layers) for up to `max_requests` requests.

    Every call is whole or undone: whatever is raised inside, the requests are as before it or as
    after it, and can be used. One thread at a time may call it.

    Args:
        config: Geometry, formats and block size.
        max_requests: Requests open at once, and the most rows of one forward.
        num_blocks: Blocks of `config.block_tokens` tokens, shared by all requests.
        device: The device of the pools, or one for each layer. Then each layer's bytes lie on its
            own device, under one set of books. A plan's arrays travel once to each device.
        backend: The kernels: `triton`, the default on a GPU, or `reference`.
        attention_backend: The kernels that attend, by default those of `backend`; `flashmla` reads
            `fp8` rows in place.
        index_backend: The kernels that choose entries, by default those of `backend`; `deepgemm`
            scores `fp8` keys in place.
        max_forward_tokens: The most tokens of one forward.
        max_request_tokens: The longest request; by default all blocks, or the model's limit.
        batch_invariant: With `triton`, give a request's attention the same bits in every batch.
            Small batches are slower.
        prefix_bytes: Host memory for the prefix cache. With any, full blocks stay for later
            requests with the same beginning, until their memory is needed. They then go to the
            host, where checkpoints are too: block boundaries at which requests can be resumed.
        num_checkpoints: Checkpoints on the device, before they go to the host. With any there is a
            prefix cache. By default 8 if `prefix_bytes` is given, else none.
        checkpoint_policy: The boundaries at which checkpoints are taken.
        host_blocks, host_slots: More blocks in host memory, and slots, for requests that are
            swapped out.
        undo_slots: Chunks of one forward that `plan.cancel` brings back to their length before it.
        wipe_on_free: Overwrite with zeros the slots and blocks that a request gives back.
        on_events: Is told which blocks the prefix cache has got and lost, for routers; see
            `BlockStored`. It is called at the start of the manager's next call.
        storage: The caller's memory for some of `tensors()`, by name; the rest is allocated.
        store: Records on disk, for a prefix cache with blocks on the host. What is published is
            written there, and read back to the host by `prefetch` and `resume_request`. Close the
            manager first.
        process_group: Ranks of torch.distributed that divide every request's blocks, in turn. Each
            makes the same calls in the same order; see `dsv4.distributed.context`. A block of the
            manager is then one of each rank, and `config` the rank's own.

    Attributes:
        schedule: One `LayerSpec` per layer.
        schemas: One `LayerCacheSchema` per layer.
        capacity: The sizes above.
        device: The device; of several that of layer 0.
        memory_parts: The tensors of each device.
        layout: The places of every layer's bytes in blocks and slots.
        transfers: Those that read or write the pools in place; `close` ends them.
        num_sleeps: Calls of `sleep`. Graphs from before one write to memory that was given back.
        blocks, slots: The rows of all devices, each in the order of bytes of one device.
        device_memory: Every tensor of `device`, and each layer's part of it.
        block_table: `[max_requests, max_blocks]` int32 on the device, -1 where there is none.
        context: The other ranks of a context that is split, else None.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_requests: int,
        num_blocks: int,
        device: torch.device | str | Sequence[torch.device | str] = "cpu",
        backend: str | None = None,
        attention_backend: str | None = None,
        index_backend: str | None = None,
        max_forward_tokens: int = 8192,
        max_request_tokens: int | None = None,
        batch_invariant: bool = False,
        prefix_bytes: int = 0,
        num_checkpoints: int | None = None,
        checkpoint_policy: CheckpointPolicy | None = None,
        host_blocks: int = 0,
        host_slots: int = 0,
        undo_slots: int = 1,
        wipe_on_free: bool = False,
        on_events: OnEvents | None = None,
        storage: Mapping[str, torch.Tensor] | None = None,
        store: PrefixStore | None = None,
        process_group: Any = None,
    ) -> None:
        check_type("config", config, CacheConfig)
        if checkpoint_policy is not None:
            check_type("checkpoint_policy", checkpoint_policy, CheckpointPolicy)
        if store is not None:
            check_type("store", store, PrefixStore)
        if on_events is not None and not callable(on_events):
            raise TypeError(f"Invalid on_events: expected a function, got {on_events!r}")
        if process_group is not None:
            config = rank_config(
                config, process_group, backends=(attention_backend, index_backend), store=store
            )
        check_bool("batch_invariant", batch_invariant)
        check_bool("wipe_on_free", wipe_on_free)
        if max_request_tokens is None:
            max_request_tokens = longest_in(config, num_blocks)
        self.config = config
        devices = read_devices(device, config.num_layers)
        self.device = devices[0]
        self._backends = choose_backends(
            config, devices, backend, attention_backend, index_backend,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        self.backend, self.batch_invariant = self._backends.by_part[0], batch_invariant
        self.attention_backend = self._backends.attention
        self.index_backend = self._backends.index
        self.schedule = config.schedule
        self.schemas = build_schemas(config)
        if num_checkpoints is None:
            num_checkpoints = DEVICE_CHECKPOINTS if prefix_bytes else 0
        host_blocks = check_int("host_blocks", host_blocks, at_least=0)
        host_blocks += count_host_blocks(config, prefix_bytes)
        self.capacity = Capacity(
            config, max_requests, num_blocks, max_forward_tokens, max_request_tokens,
            num_checkpoints, host_blocks, host_slots, undo_slots,
        )  # fmt: skip
        self._problem, self.num_sleeps = "", 0
        self._journal = Journal(fatal=(torch.AcceleratorError,))
        self._requests = RequestTable(self.capacity, self._journal)
        self._memory = CacheMemory(
            self.capacity, self.schemas, self._requests.block_table, devices, storage
        )
        self.memory_parts, self.layout = self._memory.parts, self._memory.layout
        self.device_memory = self.memory_parts[0]
        self.blocks, self.slots = self._memory.blocks, self._memory.slots
        policy = checkpoint_policy or CheckpointPolicy()
        self._books = CacheBooks(
            self.capacity, self._memory, self._requests, policy, self._journal,
            wipe_on_free=wipe_on_free, on_events=on_events, store=store,
        )  # fmt: skip
        self._forward = CurrentForward(self.capacity, self._memory, self._books)
        self._planner = ForwardPlanner(
            self.capacity, self._memory, self._books, self._forward,
            backends=self._backends.by_part,
        )  # fmt: skip
        self.block_table = self.device_memory.block_table
        self.context: SplitContext | None = None
        if process_group is not None and config.num_ranks > 1:
            self.check_one_device("split context")
            self.context = SplitContext(
                self.capacity, self.device_memory, process_group, policy, wipe_on_free,
                batch_invariant,
            )  # fmt: skip
        self._layers = self._make_layers()
        self.transfers: WeakSet[Transfer] = WeakSet()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, that of layer 0 first."""
        return tuple(part.device for part in self._memory.parts)

    @property
    def paged(self) -> PagedKVPool:
        """The pool of blocks, on one device."""
        self.check_one_device("paged")
        return self.device_memory.paged

    @property
    def state(self) -> StateCachePool:
        """The pool of slots, on one device."""
        self.check_one_device("state")
        return self.device_memory.state

    def check_one_device(self, name: str) -> None:
        """Refuse what there is on one device only."""
        if len(self._memory.parts) > 1:
            found = ", ".join(map(str, self.devices))
            raise ValueError(f"No {name} on several devices: expected one, got {found}")

    @property
    def can_capture(self) -> bool:
        """Whether CUDA graphs can hold a forward: one device, and ranks that exchange on it."""
        is_alone = self.context is None or self.context.can_capture
        return len(self._memory.parts) == 1 and is_alone

    @property
    def lengths(self) -> Int64Array:
        """`[max_requests]`, tokens of each slot; a copy. Waits for a step that was committed."""
        self.settle()
        return np.where(self._requests.is_hidden, 0, self._requests.lengths)

    @property
    def rollback_floor(self) -> Int64Array:
        """`[max_requests]`, the shortest length, beside 0, that `truncate` can always go back to.

        It is `drafts_per_step + 1` below the longest that a request has had; a copy. Waits for a
        step that was committed.
        """
        self.settle()
        return np.where(self._requests.is_hidden, 0, self._requests.rollback_floor)

    @property
    def num_known_ids(self) -> Int64Array:
        """`[max_requests]`, token ids that the prefix cache knows of each slot; a copy.

        Waits for a step that was committed, which may forget ids that were noted before it.
        """
        self.settle()
        return self._books.prefix.ids.num_known.copy()

    @property
    def is_open(self) -> BoolArray:
        """`[max_requests]`, slots in use; a copy."""
        self._journal.finish()
        return self._requests.is_open & ~self._requests.is_hidden

    @property
    def open_slots(self) -> list[int]:
        """The slots of open requests, in rising order."""
        self._journal.finish()
        slots: list[int] = self._requests.open_slots.tolist()
        return slots

    @property
    def swapped_requests(self) -> tuple[SwappedRequest, ...]:
        """The requests that wait on the host."""
        self._journal.finish()
        return tuple(self._books.swapped)

    @property
    def num_free_slots(self) -> int:
        """Requests that can be opened now."""
        self._begin()
        return len(self._requests.free_slots)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody owns."""
        self._begin()
        return self._books.allocator.num_free

    @property
    def live_plan(self) -> ForwardPlan | None:
        """The plan that is neither complete nor cancelled; None if there is none."""
        self._journal.finish()
        return self._forward.live_plan

    def open_request(self, *, num_tokens: int = 0) -> int:
        """Open an empty request and return its slot.

        Args:
            num_tokens: Tokens that it will have at least; too many to ever fit are refused.
        """
        check_int("num_tokens", num_tokens, at_least=0)
        self._check_fits(num_tokens)
        return self.open_requests(1)[0]

    def open_requests(self, count: int) -> list[int]:
        """Open empty requests and return their slots, all or none."""
        count = check_int("count", count, at_least=0)
        self._begin()
        with self._journal:
            return self._books.open_slots(count)

    def resume_request(
        self, token_ids: TokenIds, *, salt: bytes = b"", checkpoint_at: Ints = ()
    ) -> PrefixHit:
        """Open a request on the longest known beginning of a prompt.

        The cache of its first `num_tokens` tokens is that of former requests with the same tokens
        and salt. Its bytes are those that the request would write. At least one token is left to
        run. The ids are remembered, `note_tokens` extends them, and other requests will find its
        full blocks.

        Where blocks are known but no checkpoint is near, the last `num_replayed` tokens before
        their end must be run again. They find the entries of all tokens, write none, and bring back
        window rows and tails. The request cannot be truncated below `num_tokens + num_replayed`,
        except to a checkpoint or to 0.

        Where the store has records with which more would be found, they are read now. An engine
        may wait for the hit's `prefetch`, free the slot and resume again.

        Args:
            token_ids: The prompt, 32-bit integers.
            salt: The prompt's owner; other salts never share.
            checkpoint_at: Lengths at which later prompts may leave this one, such as that before
                a generation prompt. By default its end.

        Raises:
            ValueError: The prompt can never fit.
            NoFreeSlotError: Every slot is open. Nothing was changed.
        """
        prompt = self._prefix().read_prompt(token_ids, salt)
        most = len(prompt.ids)
        self._check_fits(most)
        named = check_ints("checkpoint_at", checkpoint_at, at_least=0, at_most=most).tolist()
        self._begin()
        return arrivals.resume(self._books, self._forward, prompt, named)

    def prefetch(self, token_ids: TokenIds, *, salt: bytes = b"") -> Prefetch | None:
        """Start to read from disk what `resume_request` would not find of a prompt in memory.

        Threads read into host memory, where things that are worth less make room. The manager's
        first call after they are done makes the blocks known.

        Returns:
            None if the store has no more of the prompt, or the host no room for it.
        """
        prefix = self._prefix()
        prompt = prefix.read_prompt(token_ids, salt)
        self._begin()
        self._forward.publish()
        path = prefix.find_blocks(prompt)
        return prefix.prefetch(prompt, path, prefix.choose_start(path).num_tokens)

    def name_records(self, token_ids: TokenIds, *, salt: bytes = b"") -> list[RecordName]:
        """Name the records of a prompt, to fetch them from another process's store.

        See `dsv4.distributed.records`.

        Raises:
            ValueError: The manager has no store.
        """
        prefix = self._prefix()
        return prefix.name_records(prefix.read_prompt(token_ids, salt))

    def match_prefix(self, token_ids: TokenIds, *, salt: bytes = b"") -> PrefixMatch:
        """Count the tokens of a prompt that `resume_request` would find now; changes nothing."""
        prefix = self._prefix()
        prompt = prefix.read_prompt(token_ids, salt)
        self._begin()
        self._forward.publish()
        return prefix.match(prompt)

    def note_tokens(
        self,
        slots: int | Ints,
        token_ids: TokenIds,
        *,
        start: int | Ints,
        counts: Ints | None = None,
    ) -> None:
        """Tell which tokens requests have, or are about to get, from position `start` on.

        `start` must be `num_known_ids` of the slot, so that none can be left out. At first that is
        the prompt's length after `resume_request`, and 0 after `open_request`. Forks and files
        bring ids along. `truncate` forgets those from its length on. Full blocks are published only
        as far as ids are known.

        Args:
            slots: A slot, or several.
            token_ids: The ids of all of them, those of the first slot first.
            start: The position of the first id, of each slot.
            counts: The ids of each slot; by default one, or all if there is one slot.
        """
        prefix = self._prefix()
        self._begin()
        self._forward.settle_older()
        rows = self._requests.check_all_open(slots)
        starts = check_one_or_more("start", start)
        ids, sizes = split_ids(len(rows), token_ids, starts, counts)
        with self._journal:
            prefix.note_tokens(rows, ids, sizes, starts)

    def fork(self, slot: int) -> int:
        """Open a second request with the same tokens and return its slot.

        Both share the full blocks, until one of them writes to such a block and gets a copy of
        its own. Fixed state and the block that is still being filled are copied.

        Raises:
            NoFreeSlotError: Every slot is open. Nothing was changed.
            OutOfBlocksError: There is no block for the copy. Nothing was changed.
            LiveForwardError: A forward of the request is neither complete nor cancelled.
        """
        return arrivals.fork(self._books, self._forward, self._idle_slot(slot))

    def swap_out(self, slot: int) -> SwappedRequest:
        """Move a request to host memory, close its slot and give up its blocks.

        Blocks that other requests own too stay where they are. Published blocks stay too, and go
        to the host when their memory is needed. On a GPU the copies run beside the work that is
        queued next, which waits for them only where it takes new blocks or slots.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room on the host. Nothing was changed.
            LiveForwardError: A forward of the request is neither complete nor cancelled.
        """
        books, requests = self._books, self._requests
        slot = self._idle_slot(slot)
        self._forward.publish()
        blocks = requests.blocks_of(slot)
        books.swapped.make_room(slot, blocks)
        with self._journal:
            swapped = books.swapped.copy_out(slot, blocks, requests.extent_of(slot))
            swapped.nonce = int(requests.nonces[slot])
            slots = np.array([slot])
            self._forward.retire_for(slots)
            books.close_slots(slots)
            return swapped

    def swap_in(self, swapped: SwappedRequest) -> int:
        """Bring a request back and return its slot, which may be another one.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        self._begin()
        return arrivals.swap_in(self._books, swapped)

    def drop_swapped(self, swapped: SwappedRequest) -> None:
        """Give up a request that was swapped out, and its room on the host."""
        self._begin()
        with self._journal:
            self._books.swapped.drop(swapped)

    def export_request(self, slot: int, *, first_block: int = 0) -> SavedRequest:
        """Copy a request to tensors on the manager's device, for `import_request`.

        They hold all that it can read, at any length from its floor on, and nothing of others.

        Args:
            first_block: Leave out the blocks before it; such a request cannot be imported.

        Raises:
            ValueError: The request has tokens to replay.
            LiveForwardError: A forward of the request is neither complete nor cancelled.
        """
        slot = self._idle_slot(slot)
        most = int(self._requests.num_blocks[slot])
        check_int("first_block", first_block, at_least=0, at_most=most)
        return self._copy_request(slot, int(self._requests.rollback_floor[slot]), first_block)

    def import_request(self, saved: SavedRequest) -> int:
        """Open a request as `export_request` copied it and return its slot.

        It may be of any manager whose bytes mean the same, on any device. It continues as the
        exported one would have, with the same floor. Its known tokens and its salt, as a hash,
        come with it. A rank of a split context also takes one of a manager without a group, and
        keeps its own blocks.

        Raises:
            ValueError: It is of a cache whose bytes mean something else.
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        saved = own_share(saved, self.config, self.layout)
        self._check_fits(saved.length)
        self._begin()
        return arrivals.load(self._books, saved)

    def final_tokens(self, slot: int) -> int:
        """Count the first tokens of a request that nothing but a checkpoint or 0 can bring back.

        Their entries do not change any more, also while a forward of the request is live.
        """
        return self._forward.final_tokens(int(self._open_rows(slot)[0]))

    def request_nonce(self, slot: int) -> int:
        """Return a random number that no other request has, on any machine.

        It stays while the request grows and is swapped, and changes where it goes back to a
        checkpoint or to 0.
        """
        return int(self._requests.nonces[self._open_rows(slot)[0]])

    def reserve_request(self, num_tokens: int, *, label: object = None) -> IncomingRequest:
        """Keep a slot and blocks for a request of up to so many tokens that is on its way.

        No other call sees it before `accept_request`.

        Args:
            label: Finds it among `incoming_requests`, should an interrupt keep it from returning.

        Raises:
            ValueError: It can never fit.
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        num_tokens = check_int("num_tokens", num_tokens, at_least=0)
        self._check_fits(num_tokens)
        self._begin()
        num_blocks = int(blocks_for(self.config, np.array([num_tokens]))[0])
        self._books.make_slot_room(num_blocks)
        with self._journal:
            slot, blocks = self._books.take_slot(num_blocks)
            return self._requests.reserve(slot, blocks, num_tokens, label)

    @property
    def incoming_requests(self) -> tuple[IncomingRequest, ...]:
        """The requests that room is kept for."""
        self._journal.finish()
        return tuple(self._requests.incoming.values())

    def accept_request(self, incoming: IncomingRequest, saved: SavedRequest) -> int:
        """Open the request whose blocks were written to the room kept for it; return its slot.

        Args:
            incoming: The room. Blocks that the request does not need are given back.
            saved: The request. Its blocks are in the room already, so their bytes are not read.

        Raises:
            ValueError: It is no request of such a cache, or the room is not its own.
        """
        self._begin()
        self._requests.check_incoming(incoming)
        check_request(saved, self.config, self.layout)
        return arrivals.accept(self._books, incoming, saved)

    def write_incoming(self, incoming: IncomingRequest, first_block: int, rows: Tensor) -> None:
        """Write some blocks of a request that is on its way.

        Args:
            rows: `[n, block_bytes]` uint8 on any device, its blocks from `first_block` on.
        """
        self.check_incoming(incoming)
        self.blocks.write(incoming.blocks[first_block : first_block + len(rows)], rows)

    def check_incoming(self, incoming: IncomingRequest) -> None:
        """Refuse room that is given up, or another manager's."""
        self._journal.finish()
        self._requests.check_incoming(incoming)

    def drop_incoming(self, incoming: IncomingRequest) -> None:
        """Give up the room that is kept for a request; again does nothing more."""
        self._begin()
        if self._requests.incoming.get(incoming.slot) is incoming:
            with self._journal:
                self._books.close_slots(np.array([incoming.slot]))

    def save_request(self, slot: int, path: str | os.PathLike[str]) -> None:
        """Write a request to a safetensors file, whole or not at all; waits for the device.

        Raises:
            ValueError: The request has tokens to replay.
        """
        slot = self._idle_slot(slot)
        saved = self._copy_request(slot, int(self._requests.lengths[slot]))
        write_saved(path, saved, self.config)

    def load_request(self, path: str | os.PathLike[str]) -> int:
        """Open a request as `save_request` wrote it and return its slot.

        It continues as the saved one would have, but cannot be truncated below its length. Its
        known tokens and its salt, as a hash, are in the file.

        Raises:
            ValueError: The file is damaged, or of a cache whose bytes mean something else.
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        saved = read_saved(path, self.config)
        self._check_fits(saved.length, f" in {os.fspath(path)}")
        return self.import_request(saved)

    def free_request(self, slot: int) -> None:
        """Close a request and give its blocks back.

        Inside a live forward its slot and blocks are kept until that is complete or cancelled;
        the forward's other requests are not touched.
        """
        self.free_requests(slot)

    def free_requests(self, slots: int | Ints) -> None:
        """Close requests and give their blocks back, as `free_request` does."""
        rows = self._open_rows(slots)
        self._forward.publish()
        is_live = np.isin(rows, self._forward.live_slots)
        with self._journal:
            self._requests.mark_closing(rows[is_live])
            self._forward.retire_for(rows[~is_live])
            self._books.close_slots(rows[~is_live])

    def reset(self) -> None:
        """Cancel the live forward, free all requests, drop the swapped and the incoming ones.

        The prefix cache stays.
        """
        self._begin()
        self._forward.settle_commit()
        with self._journal:
            if self._forward.live_plan is not None:
                self._forward.undo(self._forward.live_plan)
            self._forward.retire_for(self._requests.open_slots)
            self._books.close_slots(np.array([*self._requests.incoming], dtype=np.int64))
            for swapped in self._books.swapped:
                self._books.swapped.drop(swapped)
            self._books.close_slots(self._requests.open_slots)

    def truncate(self, slots: int | Ints, lengths: int | Ints) -> None:
        """Forget the last tokens of requests, so that `lengths` remain.

        Any length from `rollback_floor[slot]` on is possible, because no row that it needs has
        been overwritten. A block boundary with a checkpoint is possible too, and so is 0, which
        leaves an empty request. The last plan can no longer be read if it names the slot and
        tokens are forgotten.

        Args:
            slots: A slot, or several.
            lengths: The tokens that remain, of each slot.

        Raises:
            ValueError: A request is shorter, or its length lies below the floor.
            LiveForwardError: A forward of the request is neither complete nor cancelled.
        """
        rows = self._open_rows(slots)
        self._forward.truncate(rows, check_one_or_more("length", lengths))

    def blocks_needed(self, slots: int | Ints, lengths: int | Ints) -> int:
        """Count the blocks that a forward of requests to these lengths takes; changes nothing.

        The number is exact for a forward that is prepared next. Copies of shared blocks count.
        `stats()` says how many are free or can be evicted.
        """
        rows, after = self._open_rows(slots), check_one_or_more("length", lengths)
        before = self._requests.lengths[rows]
        if len(rows) != len(after) or (after < before).any():
            raise ValueError(
                f"Invalid lengths: expected one of at least its present length for each slot, "
                f"{before.tolist()[:8]}, got {after.tolist()[:8]}"
            )
        self._forward.publish()  # a request that adopts a published block shares its own no more
        return self._planner.count_blocks(rows, before, after).num_blocks

    def blocks_to_fork(self, slots: int | Ints) -> int:
        """Count the blocks that forks of these requests take, one of each; changes nothing.

        A slot that is named twice is forked twice.
        """
        rows = check_one_or_more("slot", slots)
        self._open_rows(np.unique(rows))
        num_copied = self._requests.num_blocks[rows] - self._requests.num_full_blocks(rows)
        return int(np.maximum(num_copied, 0).sum())

    def blocks_freed(self, slots: int | Ints) -> int:
        """Count the blocks that are free or evictable without these requests; changes nothing."""
        return self._books.count_freed(self._open_rows(slots))

    def prepare_forward(
        self, request_slots: Ints, positions_before: Ints, positions_after: Ints
    ) -> ForwardPlan:
        """Plan a forward that takes each request from one length to another.

        The plan is live until every layer is written, or until `plan.complete()` or
        `plan.cancel()`. No other can be made before.

        Args:
            request_slots: `[batch]`, distinct open slots in any order; -1 is a padding row, whose
                tokens are computed and stored nowhere.
            positions_before: `[batch]`, the requests' present lengths.
            positions_after: `[batch]`, their lengths after this forward. Tokens are numbered row
                by row, in the order given.

        Raises:
            ValueError: The rows don't fit the manager or its requests.
            OutOfBlocksError: The flushes of this forward, and the copies of shared blocks that
                they write to, need more blocks than are free.
            LiveForwardError: The last forward is neither complete nor cancelled.
        """
        self._begin()
        self._forward.settle_commit()
        return self._planner.prepare(request_slots, positions_before, positions_after)

    def prepare_step(self, request_slots: Ints, num_tokens: int) -> ForwardPlan:
        """Plan a step of each request from its end, which only the device may know.

        After `plan.commit(accepted)` a request ends behind its accepted tokens. The plan has the
        blocks of its longest possible length. The device finds positions and lengths when the plan
        arrives there. The host does not wait, unless requests could then be too long, or too few
        blocks are left.

        Args:
            request_slots: `[batch]`, distinct open slots in any order; -1 is a padding row.
            num_tokens: The tokens of each row, at most `drafts_per_step + 1`.

        Raises:
            ValueError, OutOfBlocksError, LiveForwardError: As in `prepare_forward`.
        """
        self._begin()
        return self._planner.prepare_step(request_slots, num_tokens)

    def settle(self) -> None:
        """Wait until the host knows the length of every request."""
        self._journal.finish()
        self._forward.settle_commit()

    def acquire(self, layer_idx: int, plan: ForwardPlan) -> LayerCacheHandle:
        """Return the handle of one layer for the forward that `plan` describes."""
        self.check_plan(plan)
        if type(layer_idx) is not int or not 0 <= layer_idx < len(self._layers):
            last = len(self._layers) - 1
            layer_idx = check_int("layer_idx", layer_idx, at_least=0, at_most=last)
        self.make_rope(plan)
        return LayerCacheHandle(self._layers[layer_idx], plan, plan.layer(layer_idx))

    def make_rope(self, plan: ForwardPlan) -> None:
        """Make the RoPE rows of a plan's tokens, once for all layers."""
        if not plan.has_rope:
            self._backends.make_rope(self._memory, plan)
            if self.context is not None:
                self.context.start(plan, self._requests.block_table)
            plan.has_rope = True

    def check_plan(self, plan: ForwardPlan) -> None:
        """Refuse a plan of another manager, and one that is over."""
        check_type("plan", plan, ForwardPlan)
        if plan.owner() is not self._forward:
            raise ValueError(
                "Invalid plan: expected one that prepare_forward made for this manager, "
                "got another manager's"
            )
        plan.check_current()

    def padding_plan(
        self, num_rows: int, num_tokens: int, num_chunks: int, max_step: int, *, max_length: int
    ) -> ForwardPlan:
        """Plan a forward over the buffers as they are, for captures and warm-up.

        Every row is padding; sizes are those of requests of `max_length`.
        """
        return self._planner.padding_plan(
            num_rows, num_tokens, num_chunks, max_step, max_length=max_length
        )

    def blocks_of(self, slot: int) -> IntArray:
        """Return the blocks of a request, in order; a copy."""
        return self._requests.blocks_of(int(self._open_rows(slot)[0]))

    def memory(self) -> dict[str, ComponentBytes]:
        """Count bytes by component; the allocated ones add up to those of `tensors()`."""
        return self.capacity.memory(self._memory.part_of)

    def host_memory(self) -> dict[str, ComponentBytes]:
        """Count bytes of blocks and slots on the host, by component."""
        return self.capacity.host_memory()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor the manager owns, by name."""
        return self._memory.tensors()

    def stats(self) -> CacheStats:
        """Count blocks by their owners, and the hits and evictions of the prefix cache."""
        self._begin()
        self._forward.publish()
        return collect_stats(self._books, self._memory)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the books contradict each other."""
        self._begin()
        check_integrity(self.config, self._books, self._forward, self._memory)

    def sleep(self) -> None:
        """Give the memory of blocks, slots and checkpoints back, until `wake`.

        No request may be open. Published blocks and checkpoints go to the host, as far as there is
        room, with the requests that wait there. Captured graphs cannot be replayed after it.

        Raises:
            RuntimeError: A request is open, or one that is swapped out has blocks on the device.
        """
        self._begin()
        self._books.empty_device(self.capacity.num_checkpoints)
        self._forward.retire()
        self._problem = "asleep: call wake() first"
        self.num_sleeps += 1
        self._memory.release()

    def wake(self) -> None:
        """Take the memory again that `sleep` gave back."""
        if self._problem.startswith("asleep"):
            self._memory.restore()
            self._problem = ""

    def close(self) -> None:
        """Give all memory back; the manager cannot be used again.

        Published blocks that wait are given to the store first.
        """
        if (tier := self._books.prefix.tier) is not None:
            is_usable = not self._problem and not self._journal.is_lost
            if is_usable:
                self._journal.finish()
            tier.close(is_usable=is_usable)
        for transfer in tuple(self.transfers):
            transfer.close()
        self._problem = "closed"
        self._forward.retire()
        self._layers = []
        self._memory.release()
        self._books.host.release()

    def __enter__(self) -> "KVCacheManager":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Finish what an earlier call left, and record what the last forward has made final."""
        if self._problem:
            raise RuntimeError(f"This manager is {self._problem}")
        self._journal.finish()
        self._forward.settle()
        prefix = self._books.prefix
        if prefix.tier is not None:
            prefix.tier.advance()
        prefix.tree.events.send()

    def _open_rows(self, slots: int | Ints) -> Int64Array:
        """Check open slots, and wait until their lengths are known."""
        self._begin()
        rows = self._requests.check_all_open(slots)
        self._forward.settle_commit(rows)
        return rows

    def _idle_slot(self, slot: int) -> int:
        rows = self._open_rows(slot)
        self._forward.check_idle(rows)
        return int(rows[0])

    def _check_fits(self, num_tokens: int, where: str = "") -> None:
        """Refuse a request that can never be so long."""
        check_at_most(self.capacity.longest_request, "tokens in one request", num_tokens, where)

    def _copy_request(self, slot: int, floor: int, first_block: int = 0) -> SavedRequest:
        return copy_request(
            self.config, self._memory, self._books, slot, floor=floor, first_block=first_block
        )

    def _make_layers(self) -> list[LayerParts]:
        return self._backends.make_layers(self.config, self.schemas, self._memory, self.context)

    def _prefix(self) -> PrefixCache:
        if not self._books.prefix.tree.is_on:
            raise ValueError(
                "This manager has no prefix cache: expected prefix_bytes, or num_checkpoints >= 1"
            )
        return self._books.prefix
