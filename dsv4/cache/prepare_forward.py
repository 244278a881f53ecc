"""`prepare_forward`: decide one forward, between graphs, for any number of layers at once.

Vectorised over requests and atomic: it either returns a plan with every block in place or raises
with nothing changed. It never waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.errors import OutOfBlocksError, TornForwardError
from dsv4.kernels import TokenMap

Ints = Sequence[int] | NDArray[np.integer] | torch.Tensor
Int64Array = NDArray[np.int64]


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
            tokens are computed with and stored nowhere.
        positions_before: `[batch]`, the requests' present lengths.
        positions_after: `[batch]`, their lengths after this forward; the tokens of a row lie
            one after the other, rows in the order given.

    Returns:
        The plan, valid until the next call for the same manager.

    Raises:
        ValueError: The rows don't fit the manager or its requests.
        OutOfBlocksError: The flushes of this forward need more blocks than are free.
        TornForwardError: A request's last forward did not write every layer.
    """
    slots = _as_ints("request_slots", request_slots)
    before = _as_ints("positions_before", positions_before)
    after = _as_ints("positions_after", positions_after)
    real = _check_rows(manager, slots, before, after)
    counts = after - before
    num_tokens = int(counts.sum())
    _check_capacity(manager, slots, after, num_tokens)

    num_new = _acquire_blocks(manager, slots[real], after[real])
    manager.lengths[slots[real]] = after[real]
    longest = int(after[real].max(initial=0))
    starts, has_workspace = _workspace_starts(manager, slots, counts)
    tokens = _fill_buffers(manager, slots, before, after, counts, starts, num_tokens)
    plan = ForwardPlan(
        owner=manager,
        tokens=tokens,
        request_slots=slots.astype(np.int32),
        positions_before=before.astype(np.int32),
        positions_after=after.astype(np.int32),
        num_tokens=num_tokens,
        longest=longest,
        num_new_blocks=num_new,
        has_workspace=has_workspace,
        num_parts=manager.num_parts,
    )
    manager.start_plan(plan)
    return plan


def _as_ints(name: str, values: Ints) -> Int64Array:
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise ValueError(f"Invalid device of {name}: expected cpu, got {values.device}")
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"Invalid shape of {name}: expected one axis, got {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Invalid dtype of {name}: expected integers, got {array.dtype}")
    return array.astype(np.int64)


def _check_rows(
    manager: KVCacheManager, slots: Int64Array, before: Int64Array, after: Int64Array
) -> NDArray[np.bool_]:
    """Refuse rows that contradict the requests; return which rows are not padding."""
    if not slots.shape == before.shape == after.shape:
        raise ValueError(
            "Invalid shapes: expected request_slots, positions_before and positions_after of "
            f"equal length, got {len(slots)}, {len(before)} and {len(after)}"
        )
    max_requests = manager.capacity.max_requests
    if ((slots < -1) | (slots >= max_requests)).any():
        raise ValueError(
            f"Invalid request_slots: expected -1 to {max_requests - 1}, "
            f"got {slots.min()} to {slots.max()}"
        )
    real = slots >= 0
    mine = slots[real]
    if not manager.is_open[mine].all():
        slot = mine[~manager.is_open[mine]][0]
        raise ValueError(f"Invalid request_slots: slot {slot} is not open")
    if np.bincount(mine, minlength=1).max() > 1:
        slot = int(np.bincount(mine).argmax())
        raise ValueError(f"Invalid request_slots: slot {slot} is named more than once")
    wrong = real & (before != np.where(real, manager.lengths[slots], before))
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"Invalid positions_before: expected {manager.lengths[slots[row]]}, the length of "
            f"slot {slots[row]}, got {before[row]}"
        )
    if ((after < before) | (before < 0)).any():
        row = int(((after < before) | (before < 0)).argmax())
        raise ValueError(
            f"Invalid positions_after: expected at least positions_before ({before[row]}) "
            f"in row {row}, got {after[row]}"
        )
    torn = mine[manager.is_torn[mine] | manager.is_unfinished(mine)]
    if torn.size:
        raise TornForwardError(
            f"The last forward of slot {torn[0]} did not write every layer; the slot can only "
            "be freed"
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


def _acquire_blocks(manager: KVCacheManager, slots: Int64Array, after: Int64Array) -> int:
    """Give each request the blocks that its flushes will need; all or nothing."""
    have = manager.num_slot_blocks[slots]
    need = manager.blocks_for(after)
    missing = need - have
    total = int(missing.sum())
    if not total:
        return 0
    try:
        ids = manager.allocator.acquire(total)
    except OutOfBlocksError as error:
        raise OutOfBlocksError(
            f"{error}; {len(slots)} requests would grow by {total} blocks in this forward"
        ) from None
    first = np.cumsum(missing) - missing
    columns = np.arange(total) + np.repeat(have - first, missing)
    manager.set_blocks(np.repeat(slots, missing), columns, ids)
    manager.num_slot_blocks[slots] = need
    return total


def _workspace_starts(
    manager: KVCacheManager, slots: Int64Array, counts: Int64Array
) -> tuple[Int64Array, bool]:
    """First workspace row of each request whose chunk is longer than its ring can replay."""
    is_long = (counts > manager.capacity.max_step_tokens) & (slots >= 0)
    if not is_long.any():
        return np.full_like(slots, -1), False
    rows = np.where(is_long, counts + (manager.config.sliding_window - 1), 0)
    return np.where(is_long, np.cumsum(rows) - rows, -1), True


def _fill_buffers(
    manager: KVCacheManager,
    slots: Int64Array,
    before: Int64Array,
    after: Int64Array,
    counts: Int64Array,
    workspace_starts: Int64Array,
    num_tokens: int,
) -> TokenMap:
    buffers, batch = manager.plan_buffers, len(slots)
    host, device = buffers.host, buffers.device
    host["request_slots"][:batch] = slots
    host["positions_before"][:batch] = before
    host["positions_after"][:batch] = after
    host["workspace_starts"][:batch] = workspace_starts
    first = np.cumsum(counts) - counts
    ids = np.repeat(np.arange(batch), counts)
    host["request_ids"][:num_tokens] = ids
    host["positions"][:num_tokens] = np.arange(num_tokens) + (before - first)[ids]
    buffers.upload()
    return TokenMap(
        request_slots=device["request_slots"][:batch],
        positions_before=device["positions_before"][:batch],
        positions_after=device["positions_after"][:batch],
        positions=device["positions"][:num_tokens],
        request_ids=device["request_ids"][:num_tokens],
        workspace_starts=device["workspace_starts"][:batch],
        block_table=manager.block_table,
    )
