"""Faults at chosen points of a call: a line of the library, a torch op, a file operation."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.listdir", "tempfile.mkstemp", "os.mkdir"}


class Fault(KeyboardInterrupt):
    """What a fault raises; like an interrupt, it is no `Exception`."""


class OutOfMemoryFault(MemoryError):
    """What every second fault raises."""


class Points:
    """Counts the points of a call, and raises at one of them."""

    def __init__(self, chosen: int | None = None) -> None:
        self.chosen, self.count = chosen, 0

    def pass_one(self) -> None:
        """Count a point; raise if it is the chosen one."""
        self.count += 1
        if self.count - 1 == self.chosen:
            raise (Fault if self.chosen % 2 else OutOfMemoryFault)(f"at point {self.chosen}")


@contextmanager
def at_lines(points: Points) -> Iterator[None]:
    """Every line of the library that runs is a point."""
    import dsv4

    folder = str(Path(dsv4.__file__).parent)

    def on_call(frame, event, arg):
        return on_line if frame.f_code.co_filename.startswith(folder) else None

    def on_line(frame, event, arg):
        if event == "line":
            points.pass_one()
        return on_line

    old = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(old)


class _OpPoints(TorchDispatchMode):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self.points = points

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.points.pass_one()
        result = func(*args, **(kwargs or {}))
        self.points.pass_one()
        return result


@contextmanager
def at_ops(points: Points) -> Iterator[None]:
    """Before and after every torch op is a point."""
    with _OpPoints(points):
        yield


_listening: list[tuple[int, Points]] = []


def _hear(event: str, args: tuple) -> None:
    if _listening and event in FILE_EVENTS:
        thread, points = _listening[-1]
        if thread == threading.get_ident():
            points.pass_one()


@contextmanager
def at_files(points: Points) -> Iterator[None]:
    """Every operation of this thread on a file is a point."""
    if not getattr(_hear, "is_added", False):
        sys.addaudithook(_hear)
        _hear.is_added = True  # a hook cannot be removed
    _listening.append((threading.get_ident(), points))
    try:
        yield
    finally:
        _listening.clear()


KINDS: dict[str, Callable] = {"lines": at_lines, "ops": at_ops, "files": at_files}
