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
