"""Consoles of the commands, and the progress of long work.

A terminal gets colours and progress bars, but neither with NO_COLOR. Files and pipes get no escape
codes. Progress goes to stderr, so that results can be piped.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TimeElapsedColumn,
)

_Item = TypeVar("_Item")


def make_console(*, stderr: bool = False) -> Console:
    """Make the console of stdout or stderr: plain text with NO_COLOR or without a terminal."""
    return Console(stderr=stderr, force_terminal=False if os.environ.get("NO_COLOR") else None)


def track(items: Iterable[_Item], what: str, *, total: int) -> Iterator[_Item]:
    """Yield the items; on a terminal a bar shows how many of `total` are done."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _show(what, *columns) as progress:
        yield from progress.track(items, total=total, description=what)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner and the elapsed time on a terminal."""
    with _show(what, SpinnerColumn(), TimeElapsedColumn()) as progress:
        progress.add_task(what, total=None)
        yield


def _show(what: str, *columns: ProgressColumn) -> Progress:
    console = make_console(stderr=True)
    if not console.is_terminal and console.file.isatty():
        console.print(f"{what} ...", highlight=False)
    is_shown = console.is_terminal
    return Progress(
        "{task.description}", *columns, console=console, transient=True, disable=not is_shown
    )
