"""Requests that come to a new slot with tokens: resumed, forked, swapped in, imported, received.

Each is one change of the books. What there is no room for is refused before it.
"""

from collections.abc import Sequence

import numpy as np

from dsv4.cache.books import CacheBooks
from dsv4.cache.current_forward import CurrentForward
from dsv4.cache.incoming import IncomingRequest
from dsv4.cache.prefix.prefix_cache import PrefixHit, Prompt, TrackedRequest
from dsv4.cache.request_table import Extent
from dsv4.cache.saved_request import SavedRequest
from dsv4.cache.swap import SwappedRequest


def resume(
    books: CacheBooks, forward: CurrentForward, prompt: Prompt, named: Sequence[int]
) -> PrefixHit:
    """Open a request on the known beginning of a prompt; `named` are places for checkpoints."""
    books.requests.check_free_slots()
    forward.publish()
    prefix, block_tokens = books.prefix, books.block_tokens
    (length, checkpointed, path), tracked, in_memory = prefix.start_request(
        prompt, books.count_fitting, named
    )
    num_missing, known = sum(node.block < 0 for node in path), len(path) * block_tokens
    books.make_slot_room(num_missing, path)
    with books.journal:
        slot, restored = books.take_slot(num_missing)
        on_host = max(0, length - known + num_missing * block_tokens)
        prefix.count_lookup(len(prompt.ids), length, on_host)
        if path:
            blocks = prefix.take(path, restored)
            if checkpointed is None:
                books.memory.slots.wipe(np.array([slot]))  # a replay reads finite rows at first
            else:
                books.checkpoints.load(checkpointed.checkpoint, slot)
            books.requests.fill_slot(slot, blocks, Extent(length, known, len(path)))
        prefix.track(slot, tracked, prompt.ids)
    return PrefixHit(slot, length, known - length, prefix.prefetch(prompt, in_memory, length))


def fork(books: CacheBooks, forward: CurrentForward, slot: int) -> int:
    """Open a second request on a slot's full blocks, and on copies of the rest."""
    requests, memory = books.requests, books.memory
    extent, num_full = requests.extent_of(slot), int(requests.num_full_blocks(np.array([slot]))[0])
    shared, copied = np.split(requests.blocks_of(slot), [num_full])
    books.make_slot_room(len(copied))
    forward.checkpoint_fork(slot)
    with books.journal:
        fork, copies = books.take_slot(len(copied))
        books.allocator.share(shared)
        requests.fill_slot(fork, np.concatenate((shared, copies)), extent)
        memory.slots.copy(memory.slots, slot, fork)
        for source, target in zip(copied.tolist(), copies.tolist(), strict=True):
            memory.blocks.copy(memory.blocks, source, target)
        books.prefix.copy(slot, fork)
    return fork


def swap_in(books: CacheBooks, swapped: SwappedRequest) -> int:
    """Open a slot for a request that waits on the host."""
    books.swapped.place_of(swapped)
    books.make_slot_room(swapped.num_missing_blocks, swapped.nodes)
    with books.journal:
        slot, taken = books.take_slot(swapped.num_missing_blocks)
        blocks = books.swapped.copy_in(swapped, slot, taken)
        books.requests.fill_slot(slot, blocks, swapped.extent)
        books.journal.set_rows(books.requests.nonces, slot, swapped.nonce)
        if swapped.tracked is not None:
            assert swapped.token_ids is not None
            books.prefix.track(slot, swapped.tracked, swapped.token_ids)
    return slot


def load(books: CacheBooks, saved: SavedRequest) -> int:
    """Open a slot with the bytes of a request that was copied."""
    books.make_slot_room(len(saved.blocks))
    with books.journal:
        slot, blocks = books.take_slot(len(saved.blocks))
        books.memory.slots.write(np.array([slot]), saved.slot[None])
        books.memory.blocks.write(blocks, saved.blocks)
        books.requests.fill_slot(slot, blocks, Extent(saved.length, saved.rollback_floor))
        _track(books, slot, saved)
    return slot


def accept(books: CacheBooks, incoming: IncomingRequest, saved: SavedRequest) -> int:
    """Open the slot that was kept for a request, whose blocks are written."""
    requests, slots = books.requests, np.array([incoming.slot])
    incoming.check_fits(saved.length)
    with books.journal:
        books.memory.slots.write(slots, saved.slot[None])
        books.drop_blocks(slots, np.array([saved.length]), np.zeros(1, int))
        requests.set_floors(slots, np.array([saved.rollback_floor]))
        requests.reveal(incoming)
        _track(books, incoming.slot, saved)
    return incoming.slot


def _track(books: CacheBooks, slot: int, saved: SavedRequest) -> None:
    """Tell the prefix cache the ids and the salt of a request that has come."""
    if books.prefix.tree.is_on and saved.prefix_root:
        root, ids = bytes.fromhex(saved.prefix_root), saved.token_ids.cpu().numpy()
        books.prefix.track(slot, TrackedRequest(root), ids)
