"""`Journal`: makes a change of a manager whole or undone, whatever is raised inside.

Several assignments cannot be one in Python. So each change first notes how to undo it. A change
that ends well is committed by one assignment; one that breaks off is undone. An undo that breaks
off too is finished by the manager's next call, before anything else. Each note can be followed
twice.
"""

from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dsv4.errors import LostCacheError

_MISSING = object()


class _Change:
    """The notes of one change, and the work that follows its commit."""

    def __init__(self) -> None:
        self.undo: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.afterwards: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.is_committed = False


class Journal:
    """Encloses a change: `with journal: ...`. Changes do not nest.

    Outside of a change nothing is noted.

    Args:
        fatal: Errors after which nothing can be undone.

    Attributes:
        is_lost: There was one of them.
    """

    def __init__(self, fatal: tuple[type[BaseException], ...] = ()) -> None:
        self._change: _Change | None = None
        self._fatal, self.is_lost = fatal, False

    def __enter__(self) -> None:
        self.finish()
        self._change = _Change()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        change = self._change
        if isinstance(error, self._fatal):
            self._lose(error)
        if kind is None and change is not None:
            if not change.afterwards:
                self._change = None  # commits, and nothing is left to do
                return
            change.is_committed = True
        self.finish()

    def finish(self) -> None:
        """Undo a change that broke off, or do the rest of one that was committed."""
        change = self._change
        if self.is_lost:
            self._lose(None)
        if change is None:
            return
        try:
            steps = change.afterwards if change.is_committed else reversed(change.undo)
            for step, args in steps:
                step(*args)
        except self._fatal as error:
            self._lose(error)
        self._change = None

    def _lose(self, error: BaseException | None) -> NoReturn:
        self.is_lost = True
        raise LostCacheError(
            "The device failed inside a call, and what the cache holds is lost: expected no such "
            "error; make another manager, in another process if the device does not recover"
        ) from error

    def note(self, undo: Callable[..., object], *args: Any) -> None:
        """Note a function that undoes what comes next; it may be called twice."""
        if self._change is not None:
            self._change.undo.append((undo, args))

    def set_rows(self, array: NDArray[Any], index: Any, values: Any) -> None:
        """Note elements of an array, then change them."""
        if self._change is not None:
            self._change.undo.append((array.__setitem__, (index, np.array(array[index]))))
        array[index] = values

    def set_attribute(self, owner: object, name: str, value: Any) -> None:
        """Note an attribute, then change it."""
        if self._change is not None:
            self._change.undo.append((setattr, (owner, name, getattr(owner, name))))
        setattr(owner, name, value)

    def set_item(self, items: dict[Any, Any], key: Hashable, value: Any) -> None:
        """Note an item of a dict, then change or add it."""
        self._note_item(items, key)
        items[key] = value

    def drop_item(self, items: dict[Any, Any], key: Hashable) -> None:
        """Note an item of a dict, then remove it, if it is there."""
        self._note_item(items, key)
        items.pop(key, None)

    def _note_item(self, items: dict[Any, Any], key: Hashable) -> None:
        if self._change is not None:
            self._change.undo.append((_put_back, (items, key, items.get(key, _MISSING))))

    def note_tail(self, items: list[Any], start: int) -> None:
        """Note the end of a list, which changes next from `start` on."""
        if self._change is not None:
            self._change.undo.append((items.__setitem__, (slice(start, None), items[start:])))

    def after_commit(self, step: Callable[..., object], *args: Any) -> None:
        """Do this once the change is committed, and again if that breaks off."""
        if self._change is None:
            step(*args)
        else:
            self._change.afterwards.append((step, args))


def _put_back(items: dict[Any, Any], key: Hashable, value: Any) -> None:
    if value is _MISSING:
        items.pop(key, None)
    else:
        items[key] = value
