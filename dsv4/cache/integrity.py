"""Whether the books of a manager contradict each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.errors import IntegrityError

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager


def check_integrity(manager: "KVCacheManager") -> None:
    """Raise `IntegrityError` if the books contradict each other; waits for the device."""
    for owners in (
        manager.allocator, manager.checkpoints.owners,
        manager.host.block_owners, manager.host.slot_owners,
    ):  # fmt: skip
        owners.check_integrity()
    if (manager.host_block_table >= manager.capacity.num_blocks).any():
        raise IntegrityError(
            f"The block table names block {manager.host_block_table.max()}; "
            f"there are {manager.capacity.num_blocks}"
        )
    if manager.prefix is not None:
        manager.prefix.tree.check_integrity()
    problems = [*_block_problems(manager), *_owner_problems(manager), *_slot_problems(manager)]
    if problems:
        raise IntegrityError("; ".join(problems))


def _slot_problems(manager: "KVCacheManager") -> Iterator[str]:
    is_closed, lengths, floor = ~manager.is_open, manager.lengths, manager.rollback_floor
    if lengths[is_closed].any() or manager.is_torn[is_closed].any():
        yield "a slot that is not open has a length or is torn"
    if (lengths < 0).any():
        yield "a slot has a negative length"
    if sorted(manager._free_slots) != np.flatnonzero(is_closed).tolist():
        yield "the free slots are not those that are not open"
    if ((floor < 0) | (floor > lengths)).any():
        yield "a slot's rollback floor does not lie between 0 and its length"


def _block_problems(manager: "KVCacheManager") -> Iterator[str]:
    table, num_blocks = manager.host_block_table, manager.num_slot_blocks
    is_used = np.arange(manager.capacity.max_request_blocks) < num_blocks[:, None]
    if ((table >= 0) != is_used).any():
        yield "a block table row does not match its slot's number of blocks"
    if (num_blocks != manager.blocks_for(manager.lengths)).any():
        yield "a slot's number of blocks does not match its length"
    if not np.array_equal(manager.read_device_table(), table):
        yield "the device's block table differs from the host's"
    # A shared block holds the same tokens of all its owners, so it has one column.
    rows, columns = np.nonzero(table >= 0)
    ids = table[rows, columns]
    column_of = np.full(manager.capacity.num_blocks, -1)
    column_of[ids] = columns
    wrong = ids[column_of[ids] != columns]
    if wrong.size:
        yield f"block {wrong[0]} is in more than one column"


def _owner_problems(manager: "KVCacheManager") -> Iterator[str]:
    table, prefix = manager.host_block_table, manager.prefix
    owners = np.bincount(table[table >= 0], minlength=manager.capacity.num_blocks)
    checkpoints: list[int] = []
    host_blocks = [block for each in manager.waiting_places for block in each.blocks.tolist()]
    if prefix is not None:
        owners[prefix.tree.owned_blocks()] += 1
        checkpoints = [*prefix.tree.owned_checkpoints(), *prefix.pending_checkpoints()]
        host_blocks += prefix.tree.owned_host_blocks()
        for slot, request in prefix.requests.items():
            blocks = [node.block for node in request.nodes]
            if blocks != table[slot, : len(blocks)].tolist():
                yield f"the blocks of slot {slot} are not those that it has published"
    if (owners != manager.allocator.num_owners).any():
        block = int(np.flatnonzero(owners != manager.allocator.num_owners)[0])
        yield (
            f"block {block} is in {owners[block]} rows of the block table"
            f"{' and the prefix cache' if prefix is not None else ''} but has "
            f"{manager.allocator.num_owners[block]} owners"
        )
    host = manager.host
    host_slots = [each.slot for each in manager.waiting_places]
    for name, allocator, ids in (
        ("checkpoint", manager.checkpoints.owners, checkpoints),
        ("host block", host.block_owners, host_blocks),
        ("host slot", host.slot_owners, host_slots),
    ):
        yield from _miscounted(name, allocator, ids)


def _miscounted(name: str, allocator: BlockAllocator, ids: list[int]) -> Iterator[str]:
    counts = np.bincount(np.array(ids, dtype=np.int64), minlength=allocator.num_blocks)
    if (counts != allocator.num_owners).any():
        first = int(np.flatnonzero(counts != allocator.num_owners)[0])
        yield (
            f"{name} {first} is used {counts[first]} times but has "
            f"{allocator.num_owners[first]} owners"
        )
