"""`prepare_forward`: decides one forward, between graphs, for any number of layers at once.

It is vectorised over requests and never waits for the device. It either returns a plan with every
block in place or raises with nothing changed.
"""

from array import array as array_of_ints
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.arrays import Int64Array
from dsv4.cache.memory.capacity import blocks_for
from dsv4.cache.plan import ForwardPlan
from dsv4.errors import OutOfBlocksError
from dsv4.kernels.contracts import CheckpointPoints

Ints = Sequence[int] | NDArray[np.integer] | torch.Tensor


def prepare_forward(
    manager: KVCacheManager,
    request_slots: Ints,
    positions_before: Ints,
    positions_after: Ints,
) -> ForwardPlan:
    """Plan a forward that takes each request from one length to another.

    Args:
        manager: Owner of the requests.
        request_slots: `[batch]`, distinct open slots in any order; -1 is a padding row, whose
            tokens are computed and stored nowhere.
        positions_before: `[batch]`, the requests' present lengths.
        positions_after: `[batch]`, their lengths after this forward. Tokens are numbered row by
            row, in the order given.

    Returns:
        The plan, valid until the next call for the same manager.

    Raises:
        ValueError: The rows don't fit the manager or its requests.
        OutOfBlocksError: The flushes of this forward, and the copies of shared blocks that they
            write to, need more blocks than are free.
        TornForwardError: A request's last forward did not write every layer.
    """
    slots = _as_ints("request_slots", request_slots)
    before = _as_ints("positions_before", positions_before)
    after = _as_ints("positions_after", positions_after)
    _check_lengths(slots, before, after)
    counts = after - before
    real = _check_rows(manager, slots, before, after, counts)
    num_tokens = int(counts.sum())
    _check_capacity(manager, slots, after, num_tokens)

    real_slots, real_after = slots[real], after[real]
    manager.forward.settle()
    num_new = _acquire_blocks(manager, real_slots, before[real], real_after)
    manager.forward.end()
    manager.books.requests.advance(real_slots, real_after)
    workspace_starts = _workspace_starts(manager, slots, counts)
    boundaries = _plan_checkpoints(manager, slots, before, after, workspace_starts)
    num_chunks = _fill_buffers(manager, slots, before, after, counts, workspace_starts, num_tokens)
    buffers = manager.device_memory.plan_buffers
    host = buffers.host
    plan = ForwardPlan(
        owner=manager,
        tokens=buffers.token_map(len(slots), num_tokens, num_chunks, int(counts.max(initial=0))),
        request_slots=host["request_slots"][: len(slots)].copy(),
        positions_before=host["positions_before"][: len(slots)].copy(),
        positions_after=host["positions_after"][: len(slots)].copy(),
        num_tokens=num_tokens,
        longest=int(real_after.max(initial=0)),
        num_new_blocks=num_new,
        has_workspace=num_chunks > 0,
        num_layer_writes=manager.config.num_layer_writes,
        boundaries=boundaries,
    )
    manager.forward.start(plan)
    return plan


def _as_ints(name: str, values: Ints) -> Int64Array:
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise ValueError(f"Invalid device of {name}: expected cpu, got {values.device}")
    if isinstance(values, list):
        try:  # twice as fast as numpy's own conversion
            return np.frombuffer(array_of_ints("q", values), dtype=np.int64)
        except (TypeError, OverflowError):
            pass  # refused below, with its contents
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"Invalid shape of {name}: expected one axis, got {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Invalid dtype of {name}: expected integers, got {array.dtype}")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"Invalid {name}: expected 64-bit signed integers, got {array.max()}")
    return array.astype(np.int64, copy=False)


def _check_lengths(slots: Int64Array, before: Int64Array, after: Int64Array) -> None:
    if not slots.shape == before.shape == after.shape:
        raise ValueError(
            "Invalid shapes: expected request_slots, positions_before and positions_after of "
            f"equal length, got {len(slots)}, {len(before)} and {len(after)}"
        )


def _check_rows(
    manager: KVCacheManager,
    slots: Int64Array,
    before: Int64Array,
    after: Int64Array,
    counts: Int64Array,
) -> slice | NDArray[np.bool_]:
    """Refuse rows that contradict the requests; return the index of real rows."""
    requests, max_requests = manager.books.requests, manager.capacity.max_requests
    smallest, largest = (slots.min(), slots.max()) if slots.size else (0, 0)
    if smallest < -1 or largest >= max_requests:
        raise ValueError(
            f"Invalid request_slots: expected -1 to {max_requests - 1}, got {smallest} to {largest}"
        )
    real = slots >= 0 if smallest < 0 else slice(None)
    mine, lengths = slots[real], requests.lengths[slots[real]]
    if not requests.is_open[mine].all():
        slot = mine[~requests.is_open[mine]][0]
        raise ValueError(f"Invalid request_slots: slot {slot} is not open")
    if np.bincount(mine, minlength=1).max() > 1:
        slot = int(np.bincount(mine).argmax())
        raise ValueError(f"Invalid request_slots: slot {slot} is named more than once")
    manager.forward.check_whole(mine)
    is_wrong = before[real] != lengths
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise ValueError(
            f"Invalid positions_before: expected {lengths[row]}, the length of slot {mine[row]}, "
            f"got {before[real][row]}"
        )
    if counts.min(initial=0) < 0 or before.min(initial=0) < 0:
        row = int(((counts < 0) | (before < 0)).argmax())
        raise ValueError(
            "Invalid positions: expected 0 <= positions_before <= positions_after, "
            f"got {before[row]} and {after[row]} in row {row}"
        )
    return real


def _check_capacity(
    manager: KVCacheManager, slots: Int64Array, after: Int64Array, num_tokens: int
) -> None:
    capacity = manager.capacity
    for name, value, limit in (
        ("requests in one forward", len(slots), capacity.max_requests),
        ("tokens in one forward", num_tokens, capacity.max_forward_tokens),
        ("tokens in one request", int(after.max(initial=0)), capacity.max_request_tokens),
    ):
        if value > limit:
            raise ValueError(f"Too many {name}: expected at most {limit}, got {value}")


def _acquire_blocks(
    manager: KVCacheManager, slots: Int64Array, before: Int64Array, after: Int64Array
) -> int:
    """Give each request the blocks that its flushes will need; all or nothing."""
    books = manager.books
    need, have = blocks_for(manager.config, after), books.requests.num_blocks[slots]
    grows = np.flatnonzero(need > have)
    copies = grows[:0]
    if books.allocator.num_shares:
        copies = _find_copies(manager, slots, before, after, have)
    if not grows.size and not copies.size:
        return 0
    missing = need[grows] - have[grows]
    num_missing = int(missing.sum())
    try:
        ids = books.acquire_blocks(num_missing + len(copies))
    except OutOfBlocksError as error:
        raise OutOfBlocksError(
            f"{error}; in this forward {len(grows)} of {len(slots)} requests grow into new blocks, "
            f"{len(copies)} copy one that they share"
        ) from None
    books.requests.append_blocks(slots[grows], missing, ids[:num_missing])
    if copies.size:
        targets = ids[num_missing:]
        sources = books.replace_blocks(
            slots[copies], _first_written(manager, before[copies]), targets
        )
        manager.device_memory.plan_buffers.note_copies(sources, targets)
    return len(ids)


def _first_written(manager: KVCacheManager, before: Int64Array) -> Int64Array:
    """Return the column of the first block that requests of these lengths will write to.

    The blocks after it are new ones.
    """
    return before // manager.config.block_tokens


def _find_copies(
    manager: KVCacheManager,
    slots: Int64Array,
    before: Int64Array,
    after: Int64Array,
    have: Int64Array,
) -> NDArray[np.intp]:
    """Find the rows of requests that write to a block with another owner.

    If all owners of a block write to it in this forward, the last of them keeps it.
    """
    ratio, columns = manager.config.smallest_ratio, _first_written(manager, before)
    rows = np.flatnonzero((before // ratio < after // ratio) & (columns < have))
    ids = manager.books.requests.block_table[slots[rows], columns[rows]]
    order = np.argsort(ids, kind="stable")
    rows, ids = rows[order], ids[order]
    num_before = np.arange(len(ids)) - np.searchsorted(ids, ids)  # writers of the same block
    return rows[num_before < manager.allocator.num_owners[ids] - 1]


def _workspace_starts(
    manager: KVCacheManager, slots: Int64Array, counts: Int64Array
) -> Int64Array | None:
    """Return the first workspace row of each request whose chunk its ring cannot read back.

    None if no chunk is.
    """
    is_long = (counts > manager.capacity.max_step_tokens) & (slots >= 0)
    if not is_long.any():
        return None
    rows = np.where(is_long, counts + (manager.config.sliding_window - 1), 0)
    return np.where(is_long, np.cumsum(rows) - rows, -1)


def _plan_checkpoints(
    manager: KVCacheManager,
    slots: Int64Array,
    before: Int64Array,
    after: Int64Array,
    workspace_starts: Int64Array | None,
) -> CheckpointPoints | None:
    """Choose the block boundaries inside chunks that this forward checkpoints."""
    if manager.prefix is None or workspace_starts is None:
        return None
    chunk_slots = np.where(workspace_starts >= 0, slots, -1)
    points = manager.prefix.plan_checkpoints(
        chunk_slots, before, after, max_checkpoints=manager.capacity.max_forward_checkpoints
    )
    if not points:
        return None
    memory = manager.device_memory
    return CheckpointPoints(
        memory.plan_buffers.note_checkpoints(points), memory.checkpoints.storage
    )


def _fill_buffers(
    manager: KVCacheManager,
    slots: Int64Array,
    before: Int64Array,
    after: Int64Array,
    counts: Int64Array,
    workspace_starts: Int64Array | None,
    num_tokens: int,
) -> int:
    """Write the plan's arrays, queue their upload, and return the number of chunks."""
    buffers, batch = manager.device_memory.plan_buffers, len(slots)
    host = buffers.host
    host["request_slots"][:batch] = slots
    host["positions_before"][:batch] = before
    host["positions_after"][:batch] = after
    num_chunks = 0
    if workspace_starts is None:
        host["workspace_starts"][:batch] = -1
    else:
        host["workspace_starts"][:batch] = workspace_starts
        chunks = np.flatnonzero(workspace_starts >= 0)
        num_chunks = len(chunks)
        host["chunk_ids"][:num_chunks] = chunks
    ids = np.arange(batch)
    if num_tokens == batch == np.count_nonzero(counts):  # plain decode: one token each
        host["request_ids"][:batch] = host["token_starts"][:batch] = ids
        host["positions"][:batch] = before
    else:
        first_token = np.cumsum(counts) - counts
        host["token_starts"][:batch] = first_token
        ids = np.repeat(ids, counts)
        host["request_ids"][:num_tokens] = ids
        host["positions"][:num_tokens] = np.arange(num_tokens) + (before - first_token)[ids]
    buffers.pad(batch, num_tokens)
    buffers.upload(manager.books.requests.changed_blocks)
    manager.books.requests.forget_changes()
    return num_chunks
