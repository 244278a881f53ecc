"""The validators of public arguments."""

import operator
from typing import Any


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
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_bool(name: str, value: Any) -> None:
    """Refuse an argument that is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"Invalid {name}: expected True or False, got {value!r}")


def check_type(name: str, value: Any, kind: type) -> None:
    """Refuse an argument of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"Invalid {name}: expected a {kind.__name__}, got {type(value).__name__}")
