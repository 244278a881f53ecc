"""Host arrays of the cache's books: their types, and views that cannot be written."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
_Array = TypeVar("_Array", bound=NDArray[Any])


def read_only(array: _Array) -> _Array:
    """Return a view of the array that refuses writes."""
    view = array.view()
    view.flags.writeable = False
    return view


def ragged(
    slots: Int64Array, first: Int64Array, counts: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return slot and column of `counts` columns of each slot, from `first` on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    columns = np.arange(total) + np.repeat(first - ends + counts, counts)
    return np.repeat(slots, counts), columns


def joined_runs(
    sources: NDArray[np.integer], targets: NDArray[np.integer]
) -> list[tuple[int, int]]:
    """Return first index and length of each stretch in which both rise one by one."""
    if not len(sources):
        return []
    is_break = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    starts = np.concatenate(([0], np.flatnonzero(is_break) + 1))
    counts = np.diff(np.concatenate((starts, [len(sources)])))
    return list(zip(starts.tolist(), counts.tolist(), strict=True))
