"""Checks that the books of a manager do not contradict each other."""

from collections.abc import Iterator

import numpy as np

from dsv4.cache.books import CacheBooks
from dsv4.cache.current_forward import CurrentForward
from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.cache_memory import CacheMemory
from dsv4.cache.memory.capacity import blocks_for
from dsv4.cache.request_table import RequestTable
from dsv4.config import CacheConfig
from dsv4.errors import IntegrityError


def check_integrity(
    config: CacheConfig, books: CacheBooks, forward: CurrentForward, memory: CacheMemory
) -> None:
    """Raise `IntegrityError` if the books contradict each other; waits for the device."""
    requests, num_blocks = books.requests, books.allocator.num_blocks
    for owners in (
        books.allocator, books.checkpoints, books.host.block_owners, books.host.slot_owners
    ):  # fmt: skip
        owners.check_integrity()
    if (requests.block_table >= num_blocks).any():
        raise IntegrityError(
            f"The block table names block {requests.block_table.max()}; there are {num_blocks}"
        )
    books.prefix.tree.check_integrity()
    problems = [
        *_block_problems(config, requests, num_blocks=num_blocks),
        *_device_problems(requests, memory),
        *_owner_problems(books, forward),
        *_slot_problems(requests),
    ]
    if problems:
        raise IntegrityError("; ".join(problems))


def _slot_problems(requests: RequestTable) -> Iterator[str]:
    is_closed, lengths, floor = requests.is_open == 0, requests.lengths, requests.rollback_floor
    longest = np.maximum(lengths, requests.written_from(np.arange(len(lengths))))
    for name, dtype in (
        ("lengths", np.int64), ("num_blocks", np.int64), ("rollback_floor", np.int64),
        ("num_read_only", np.int64), ("is_open", np.bool_), ("is_closing", np.bool_),
        ("is_hidden", np.bool_), ("block_table", np.int32),
    ):  # fmt: skip
        if getattr(requests, name).dtype != dtype:
            yield f"{name} is {getattr(requests, name).dtype}, expected {np.dtype(dtype)}"
    if any(type(slot) is not int for slot in requests.free_slots):
        yield "a free slot is not an int"
    if lengths[is_closed].any() or requests.is_closing[is_closed].any():
        yield "a slot that is not open has a length or is closing"
    is_hidden = requests.is_closing.copy()
    is_hidden[list(requests.incoming)] = True
    if (is_hidden != requests.is_hidden).any() or is_hidden[is_closed].any():
        yield "the hidden slots are not the closing ones and those of incoming requests"
    if (lengths < 0).any():
        yield "a slot has a negative length"
    if sorted(requests.free_slots) != np.flatnonzero(is_closed).tolist():
        yield "the free slots are not those that are not open"
    if ((floor < 0) | (floor > longest)).any():
        yield "a slot's rollback floor does not lie between 0 and its length, or its replay's end"


def _block_problems(
    config: CacheConfig, requests: RequestTable, *, num_blocks: int
) -> Iterator[str]:
    table = requests.block_table
    is_used = np.arange(table.shape[1]) < requests.num_blocks[:, None]
    if ((table >= 0) != is_used).any():
        yield "a block table row does not match its slot's number of blocks"
    needed = np.maximum(blocks_for(config, requests.lengths), requests.num_read_only)
    if (requests.num_blocks != needed).any():
        yield "a slot's number of blocks does not match its length"
    # A shared block holds the same tokens of all its owners, so it has one column.
    rows, columns = np.nonzero(table >= 0)
    ids = table[rows, columns]
    column_of = np.full(num_blocks, -1)
    column_of[ids] = columns
    wrong = ids[column_of[ids] != columns]
    if wrong.size:
        yield f"block {wrong[0]} is in more than one column"


def _device_problems(requests: RequestTable, memory: CacheMemory) -> Iterator[str]:
    """Compare the block tables, with the changes that the next plan brings."""
    changed, values = requests.changed_blocks()
    for part in memory.parts:
        table: IntArray = part.block_table.cpu().numpy().copy()
        table.reshape(-1)[changed] = values
        if not np.array_equal(table, requests.block_table):
            yield "the device's block table differs from the host's"


def _owner_problems(books: CacheBooks, forward: CurrentForward) -> Iterator[str]:
    table, prefix, places = books.requests.block_table, books.prefix, books.swapped.places
    kept = [place.kept[place.kept >= 0] for place in places]
    blocks = np.concatenate([table[table >= 0], *kept, prefix.tree.owned_blocks()])
    checkpoints = [
        *prefix.tree.owned_checkpoints(), *prefix.pending_checkpoints(),
        *forward.held_checkpoints.tolist(),
    ]  # fmt: skip
    host_blocks = [block for place in places for block in place.blocks.tolist() if block >= 0]
    host_blocks += prefix.tree.owned_host_blocks() + books.checkpoints.host_blocks()
    host_blocks += [] if prefix.tier is None else prefix.tier.owned_host_blocks()
    for slot, request in prefix.requests.items():
        if type(slot) is not int or not books.requests.is_open[slot]:
            yield f"the prefix cache tracks {slot!r}, which is not an open slot"
        published = [node.block for node in request.nodes]
        if published != table[slot, : len(published)].tolist():
            yield f"the blocks of slot {slot} are not those that it has published"
    rows = "rows of the block table" + (" and the prefix cache" if prefix.tree.is_on else "")
    for name, use, owners, ids in (
        ("block", f"in {{}} {rows}", books.allocator.num_owners, blocks),
        ("checkpoint", "used {} times", books.checkpoints.num_owners, checkpoints),
        ("host block", "used {} times", books.host.block_owners.num_owners, host_blocks),
        ("host slot", "used {} times", books.host.slot_owners.num_owners, [p.slot for p in places]),
    ):
        counts = np.bincount(np.array(ids, dtype=np.int64), minlength=len(owners))
        wrong = np.flatnonzero(counts != owners)
        if wrong.size:
            first = int(wrong[0])
            yield f"{name} {first} is {use.format(counts[first])} but has {owners[first]} owners"
