"""Consoles of the commands, and the progress of long work.

A terminal gets colours and progress bars, but neither with NO_COLOR. Files and pipes get no escape
codes. Progress goes to stderr, so that results can be piped.

Names and contents of files are text and nothing more: a console takes no markup, and drops
characters that a terminal would act on.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment

_Item = TypeVar("_Item")
# Control characters but the end of a line, changes of direction, and bytes that are no text.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Drop the characters that a terminal would act on."""
    return _UNPRINTABLE.sub("", text)


class _PlainConsole(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            is_own = segment.control is not None
            yield segment if is_own else Segment(printable(segment.text), segment.style)


def make_console(*, stderr: bool = False) -> Console:
    """Make the console of stdout or stderr: plain text with NO_COLOR or without a terminal."""
    return _PlainConsole(
        stderr=stderr, markup=False, emoji=False,
        force_terminal=False if os.environ.get("NO_COLOR") else None,
    )  # fmt: skip


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
