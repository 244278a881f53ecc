"""The validators of public arguments."""

import operator
import os
from array import array as array_of_ints
from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_int(
    name: str, value: Any, *, at_least: int, at_most: int | None = None, limit: str = ""
) -> int:
    """Return an integer argument; refuse bools, other types and values out of range.

    Args:
        limit: The meaning of `at_most`, for the error text.
    """
    number = value if type(value) is int else _as_int(value)
    if number is not None and number >= at_least and (at_most is None or number <= at_most):
        return number
    expected = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    note = f" ({limit})" if limit else ""
    raise ValueError(f"Invalid {name}: expected an integer {expected}{note}, got {value!r}")


def _as_int(value: Any) -> int | None:
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        return None if is_bool else operator.index(value)
    except TypeError:
        return None


def check_ints(
    name: str, values: Any, *, at_least: int | None = None, at_most: int | None = None
) -> NDArray[np.int64]:
    """Return integers as one axis; refuse other shapes, types and values out of range."""
    array = _as_ints(name, values)
    if at_least is None or at_most is None or not array.size:
        return array
    smallest, largest = array.min(), array.max()
    if smallest < at_least or largest > at_most:
        raise ValueError(
            f"Invalid {name}: expected {at_least} to {at_most}, got {smallest} to {largest}"
        )
    return array


def check_one_or_more(
    name: str, values: Any, *, at_least: int | None = None, at_most: int | None = None
) -> NDArray[np.int64]:
    """Return one integer, or several, as one axis; refuse all others."""
    if isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0:
        return check_ints(name, values, at_least=at_least, at_most=at_most)
    if at_least is not None:
        return np.array([check_int(name, values, at_least=at_least, at_most=at_most)])
    number = _as_int(values)
    if number is None:
        raise TypeError(f"Invalid {name}: expected an integer, got {values!r}")
    return check_ints(name, [number])


def _as_ints(name: str, values: Any) -> NDArray[np.int64]:
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return values
    device = getattr(values, "device", "cpu")
    if str(device) != "cpu":
        raise ValueError(f"Invalid device of {name}: expected cpu, got {device}")
    if isinstance(values, list):
        try:  # twice as fast as numpy's own conversion
            return np.frombuffer(array_of_ints("q", values), dtype=np.int64)
        except (TypeError, OverflowError):
            pass  # refused below, with its contents
    if not hasattr(values, "__len__") or isinstance(values, str | dict):
        raise TypeError(f"Invalid {name}: expected a list of integers, got {values!r}")
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"Invalid shape of {name}: expected one axis, got {list(array.shape)}")
    if array.dtype in (object, np.uint64):  # lists of large integers are one of these
        large = [each for each in array.tolist() if (_as_int(each) or 0) + 2**63 >> 64]
        if large:
            raise ValueError(f"Invalid {name}: expected 64-bit signed integers, got {large[0]}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Invalid dtype of {name}: expected integers, got {array.dtype}")
    return array.astype(np.int64, copy=False)


def check_at_most(limit: int, name: str, value: int, where: str = "") -> None:
    """Refuse more of something than there can be."""
    if value > limit:
        raise ValueError(f"Too many {name}: expected at most {limit}, got {value}{where}")


def check_bool(name: str, value: Any) -> None:
    """Refuse an argument that is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"Invalid {name}: expected True or False, got {value!r}")


def check_checkpoint(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that holds no model of transformers."""
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"Invalid model folder: expected a config.json in {folder}, found none")


def check_type(name: str, value: Any, kind: type) -> None:
    """Refuse an argument of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"Invalid {name}: expected a {kind.__name__}, got {type(value).__name__}")


class NotCopyable:
    """An object whose copy would own the same memory: `copy` and `pickle` are refused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"Cannot copy or pickle a {type(self).__name__}: its copy would share the memory"
        )
