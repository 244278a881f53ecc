"""`KVCacheManager`: opens, extends and frees the requests of one cache."""

import operator
import os

import numpy as np
import torch

from dsv4.cache.books import CacheBooks
from dsv4.cache.current_forward import CurrentForward
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.integrity import check_integrity
from dsv4.cache.memory.arrays import read_only
from dsv4.cache.memory.capacity import Capacity, ComponentBytes
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.memory.device_memory import DeviceMemory
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prefix.prefix_cache import PrefixCache, PrefixHit, TokenIds
from dsv4.cache.request_table import RequestTable
from dsv4.cache.saved_request import copy_request, read_saved, write_saved
from dsv4.cache.stats import CacheStats, collect_stats
from dsv4.cache.swap import SwappedRequest
from dsv4.checks import check_int
from dsv4.config import CacheConfig
from dsv4.kernels.backends import check_backend, default_backend
from dsv4.kernels.external.limits import check_attention_backend, check_index_backend


class KVCacheManager:
    """The cache of one model (or of one rank's layers) for up to `max_requests` requests.

    Args:
        config: Geometry, formats and block size.
        max_requests: Requests open at once, and the most rows of one forward.
        num_blocks: Blocks of `config.block_tokens` tokens, shared by all requests.
        device: The device of the pools.
        backend: The kernels: `triton`, the default on a GPU, or `reference`.
        attention_backend: The kernels that attend, by default those of `backend`; `flashmla` reads
            `fp8` rows in place.
        index_backend: The kernels that choose entries, by default those of `backend`; `deepgemm`
            scores `fp8` keys in place.
        max_forward_tokens: The most tokens of one forward.
        max_request_tokens: The longest request; by default all blocks, or the model's limit.
        batch_invariant: With `triton`, give a request's attention the same bits in every batch.
            Small batches are slower.
        num_checkpoints: Block boundaries at which requests can be resumed. With any, full blocks
            stay for later requests with the same beginning, until their memory is needed.
        checkpoint_policy: The boundaries at which checkpoints are taken.
        host_blocks, host_slots: Blocks and slots in host memory, for requests that are swapped
            out. Blocks evicted from the prefix cache go there too.

    Attributes:
        schedule: One `LayerSpec` per layer.
        schemas: One `LayerCacheSchema` per layer.
        capacity: The sizes above.
        books: Records of requests, blocks and the prefix cache.
        device_memory: Every tensor, and each layer's part of it.
        forward: The current plan, and the end of it.
        lengths: `[max_requests]`, tokens of each slot; read-only, as the next three.
        is_open: `[max_requests]`, slots in use.
        is_torn: `[max_requests]`, slots whose last forward ended before it wrote every layer.
        rollback_floor: `[max_requests]`, the shortest length, beside 0, that needs no checkpoint in
            `truncate`. It is `drafts_per_step` below the longest that a request has had.
        block_table: `[max_requests, max_blocks]` int32 on the device, -1 where there is none.
        paged, state: The pools of blocks and of slots.
        allocator: Owners of the blocks.
        prefix: Known tokens of requests and published blocks; None without checkpoints.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_requests: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        backend: str | None = None,
        attention_backend: str | None = None,
        index_backend: str | None = None,
        max_forward_tokens: int = 8192,
        max_request_tokens: int | None = None,
        batch_invariant: bool = False,
        num_checkpoints: int = 0,
        checkpoint_policy: CheckpointPolicy | None = None,
        host_blocks: int = 0,
        host_slots: int = 0,
    ) -> None:
        if not isinstance(batch_invariant, bool):
            raise TypeError(
                f"Invalid batch_invariant: expected True or False, got {batch_invariant!r}"
            )
        if max_request_tokens is None:
            by_blocks = num_blocks * config.block_tokens
            has_blocks = config.smallest_ratio > 0
            max_request_tokens = min(config.max_position, by_blocks if has_blocks else 1 << 62)
        self.config = config
        self.device = torch.device(device)
        self.backend = default_backend(self.device) if backend is None else backend
        self.batch_invariant = batch_invariant
        check_backend(self.backend, self.device)
        if attention_backend is not None:
            check_attention_backend(
                attention_backend, config, self.device, batch_invariant=batch_invariant
            )
        if index_backend is not None:
            check_index_backend(index_backend, config, self.device)
        self._attention_backend, self._index_backend = attention_backend, index_backend
        self.capacity = Capacity(
            config, max_requests, num_blocks, max_forward_tokens, max_request_tokens,
            num_checkpoints, host_blocks, host_slots,
        )  # fmt: skip
        self.schedule = config.schedule
        self.schemas = build_schemas(config)
        requests = RequestTable(self.capacity)
        self.device_memory = DeviceMemory(
            self.capacity, self.schemas, requests.block_table, self.device
        )
        self.books = CacheBooks(
            self.capacity, self.device_memory, requests, checkpoint_policy or CheckpointPolicy()
        )
        self.forward = CurrentForward(self.capacity, self.device_memory, self.books)
        self.lengths = read_only(requests.lengths)
        self.is_open = read_only(requests.is_open)
        self.is_torn = read_only(requests.is_torn)
        self.rollback_floor = read_only(requests.rollback_floor)
        self.block_table = self.device_memory.block_table
        self.paged, self.state = self.device_memory.paged, self.device_memory.state
        self.allocator, self.prefix = self.books.allocator, self.books.prefix

    @property
    def attention_backend(self) -> str:
        return self._attention_backend or self.backend

    @property
    def index_backend(self) -> str:
        return self._index_backend or self.backend

    @property
    def num_free_slots(self) -> int:
        return len(self.books.requests.free_slots)

    def open_request(self) -> int:
        """Open an empty request and return its slot."""
        return self.books.open_slot()

    def resume_request(self, token_ids: TokenIds, *, salt: bytes = b"") -> PrefixHit:
        """Open a request on the longest known beginning of a prompt.

        The cache of its first `num_tokens` tokens is that of former requests with the same tokens
        and salt. Its bytes are those that the request would write. At least one token is left to
        run. The ids are remembered, `note_tokens` extends them, and other requests will find its
        full blocks. It cannot be truncated below `num_tokens`, except to a checkpoint or to 0.

        Args:
            token_ids: The prompt, 32-bit integers.
            salt: The prompt's owner; other salts never share.

        Raises:
            NoFreeSlotError: Every slot is open. Nothing was changed.
        """
        prefix, requests = self._prefix(), self.books.requests
        request = prefix.new_request(token_ids, salt)
        requests.check_free_slot()
        self.forward.settle()
        nodes, checkpoint = prefix.find(request, self.books.acquire_blocks)
        slot = self.books.open_slot()
        length = len(nodes) * self.config.block_tokens
        if nodes:
            self.device_memory.checkpoints.load(checkpoint, self.state.storage, slot)
            blocks = np.array([node.block for node in nodes], dtype=np.int32)
            requests.fill_slot(slot, blocks, length=length, rollback_floor=length)
            request.nodes = nodes
        prefix.track(slot, request)
        return PrefixHit(slot, length)

    def note_tokens(self, slot: int, token_ids: TokenIds, *, start: int) -> None:
        """Tell which tokens a request has, or is about to get, from position `start` on.

        `start` must be the end of the known ids, so that none can be left out. At first that is
        the prompt's length after `resume_request`, and 0 for other requests. `truncate` forgets
        the ids from its length on. Full blocks are published only as far as ids are known.
        """
        self.books.requests.check_open(slot)
        self._prefix().note_tokens(slot, token_ids, check_int("start", start, at_least=0))

    def fork(self, slot: int) -> int:
        """Open a second request with the same tokens and return its slot.

        Both share the full blocks, until one of them writes to such a block and gets a copy of
        its own. Fixed state and the block that is still being filled are copied.

        Raises:
            NoFreeSlotError: Every slot is open. Nothing was changed.
            OutOfBlocksError: There is no block for the copy. Nothing was changed.
            TornForwardError: The last forward of the request did not write every layer.
        """
        books, requests = self.books, self.books.requests
        self._check_whole(slot)
        requests.check_free_slot()
        self.forward.settle()
        blocks, length = requests.blocks_of(slot), int(requests.lengths[slot])
        shared, copied = np.split(blocks, [length // self.config.block_tokens])
        copies = books.acquire_blocks(len(copied))
        books.allocator.share(shared)
        fork = books.open_slot()
        requests.fill_slot(
            fork, np.concatenate((shared, copies)),
            length=length, rollback_floor=int(requests.rollback_floor[slot]),
        )  # fmt: skip
        self.state.storage[fork].copy_(self.state.storage[slot])
        for source, target in zip(copied, copies, strict=True):
            self.paged.storage[target].copy_(self.paged.storage[source])
        if books.prefix is not None:
            self.forward.checkpoint_fork(slot)
            books.prefix.copy(slot, fork)
        return fork

    def swap_out(self, slot: int) -> SwappedRequest:
        """Move a request to host memory, close its slot and free its blocks.

        On a GPU the copies run beside the work that is queued next, which waits for them only
        where it takes new blocks or slots.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room on the host. Nothing was changed.
            TornForwardError: The last forward of the request did not write every layer.
        """
        requests = self.books.requests
        self._check_whole(slot)
        self.forward.settle()
        swapped = self.books.swapped.copy_out(
            slot, requests.blocks_of(slot),
            length=int(requests.lengths[slot]),
            rollback_floor=int(requests.rollback_floor[slot]),
        )  # fmt: skip
        if self.prefix is not None:
            swapped.tracked = self.prefix.forget(slot)
        self.free_request(slot)
        return swapped

    def swap_in(self, swapped: SwappedRequest) -> int:
        """Bring a request back and return its slot, which may be another one.

        Raises:
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        books = self.books
        place = books.swapped.place_of(swapped)
        slot, blocks = books.open_in_blocks(
            len(place.blocks), swapped.length, swapped.rollback_floor
        )
        books.swapped.copy_in(swapped, slot, blocks)
        if books.prefix is not None and swapped.tracked is not None:
            books.prefix.track(slot, swapped.tracked)
        return slot

    def drop_swapped(self, swapped: SwappedRequest) -> None:
        """Give up a request that was swapped out, and its room on the host."""
        self.books.swapped.drop(swapped)

    def save_request(self, slot: int, path: str | os.PathLike[str]) -> None:
        """Write a request to a safetensors file, whole or not at all; waits for the device."""
        self._check_whole(slot)
        requests = self.books.requests
        saved = copy_request(
            self.device_memory.layout, self.state, self.paged, slot=slot,
            blocks=torch.from_numpy(requests.blocks_of(slot)).long(),
            length=int(requests.lengths[slot]),
        )  # fmt: skip
        write_saved(path, saved, self.config)

    def load_request(self, path: str | os.PathLike[str]) -> int:
        """Open a request as `save_request` wrote it and return its slot.

        It continues as the saved one would have, but cannot be truncated below its length.

        Raises:
            ValueError: The file is damaged, or of a cache whose bytes mean something else.
            NoFreeSlotError, OutOfBlocksError: There is no room. Nothing was changed.
        """
        saved = read_saved(path, self.config, self.device_memory.layout)
        if saved.length > self.capacity.max_request_tokens:
            raise ValueError(
                f"Too many tokens in one request: expected at most "
                f"{self.capacity.max_request_tokens}, got {saved.length} in {os.fspath(path)}"
            )
        slot, blocks = self.books.open_in_blocks(
            len(saved.blocks), saved.length, saved.rollback_floor
        )
        self.state.storage[slot] = saved.slot.to(self.device)
        self.paged.storage[torch.from_numpy(blocks).long()] = saved.blocks.to(self.device)
        return slot

    def free_request(self, slot: int) -> None:
        """Close a request and give its blocks back."""
        self.books.requests.check_open(slot)
        self.forward.settle()
        self.forward.end_for(slot)
        self.books.close_slot(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget the last tokens of a request, so that `length` remain.

        Any length from `rollback_floor[slot]` on is possible, because no row that it needs has
        been overwritten. A block boundary with a checkpoint is possible too, and so is 0, which
        leaves an empty request. A plan that names the slot ends if tokens are forgotten.

        Raises:
            ValueError: The request is shorter, or `length` lies below the floor.
            TornForwardError: The last forward did not write every layer, and `length` is not 0.
        """
        requests, prefix = self.books.requests, self.prefix
        requests.check_open(slot)
        present, floor = int(requests.lengths[slot]), int(requests.rollback_floor[slot])
        length = check_int(
            "length", operator.index(length),
            at_least=0, at_most=present, limit=f"the length of slot {slot}",
        )  # fmt: skip
        if length:
            self._check_whole(slot)
        self.forward.settle()
        checkpoint = self.books.find_checkpoint(slot, length) if 0 < length < floor else None
        if length < present:
            self.forward.end_for(slot)
            self.books.shorten(slot, length)
        elif prefix is not None:
            prefix.cut(slot, length)  # ids may be known beyond the request's tokens
        if checkpoint is not None:
            self.device_memory.checkpoints.load(checkpoint, self.state.storage, slot)
            requests.rollback_floor[slot] = length

    def acquire(self, layer_idx: int, plan: ForwardPlan) -> LayerCacheHandle:
        """Return the handle of one layer for the forward that `plan` describes."""
        if plan.owner is not self:
            raise ValueError(
                "Invalid plan: expected one that prepare_forward made for this manager, "
                "got another manager's"
            )
        plan.check_current()
        check_int("layer_idx", layer_idx, at_least=0, at_most=len(self.schedule) - 1)
        return LayerCacheHandle(
            config=self.config,
            layer=self.schedule[layer_idx],
            schema=self.schemas[layer_idx],
            paged=self.paged.layer(layer_idx),
            state=self.state.layer(layer_idx),
            memory=self.device_memory.memories[layer_idx],
            plan=plan,
            progress=plan.layer(layer_idx),
            backend=self.backend,
            attention_backend=self.attention_backend,
            index_backend=self.index_backend,
            batch_invariant=self.batch_invariant,
        )

    def memory(self) -> dict[str, ComponentBytes]:
        """Count bytes by component; the allocated ones add up to those of `tensors()`."""
        return self.capacity.memory()

    def host_memory(self) -> dict[str, ComponentBytes]:
        """Count bytes of blocks and slots on the host, by component."""
        return self.capacity.host_memory()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor the manager owns, by name."""
        return self.device_memory.tensors()

    def stats(self) -> CacheStats:
        """Count free and published blocks, and the hits and evictions of the prefix cache."""
        self.forward.settle()
        return collect_stats(self.books, self.device_memory)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the books contradict each other."""
        check_integrity(self.config, self.books, self.device_memory)

    def _check_whole(self, slot: int) -> None:
        self.books.requests.check_open(slot)
        self.forward.check_whole(np.array([slot]))

    def _prefix(self) -> PrefixCache:
        if self.prefix is None:
            raise ValueError(
                "This manager has no prefix cache: expected num_checkpoints >= 1, got 0"
            )
        return self.prefix
