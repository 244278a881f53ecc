"""Consoles of the commands, and the progress of long work.

A terminal gets colours and progress bars, but neither with NO_COLOR. Files and pipes get no escape
codes. Progress goes to stderr, so that results can be piped.

Names and contents of files are text and nothing more: a console takes no markup, and drops
characters that a terminal would act on.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

_Item = TypeVar("_Item")
Columns = Sequence[tuple[str, str]]  # headings and cell templates
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


def make_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1,
    **style: Any,
) -> Table:  # fmt: skip
    """Make a table of texts; the first `num_left` columns are aligned left, the others right."""
    table = Table(title=title, **style)
    for idx, heading in enumerate(headings):
        table.add_column(heading, justify="left" if idx < num_left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def build_table(
    title: str, rows: Iterable[Mapping[str, Any]], columns: Columns, *, num_left: int = 0,
    missing: str = "-", **style: Any,
) -> Table:  # fmt: skip
    """Make a table of rows; a cell whose number a row lacks, or has as None, is `missing`."""

    def cell(template: str, row: Mapping[str, Any]) -> str:
        try:
            return template.format_map(row)
        except (KeyError, TypeError):
            return missing

    headings = [heading for heading, _ in columns]
    cells = [[cell(template, row) for _, template in columns] for row in rows]
    return make_table(title, headings, cells, num_left=num_left, **style)


def track(items: Iterable[_Item], what: str, *, total: int | None = None) -> Iterator[_Item]:
    """Yield the items; on a terminal a bar shows how many of `total`, or of all, are done."""
    columns = (bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    with _show(what, *columns) as progress:
        yield from progress.track(items, total=total, description=what)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner and the elapsed time on a terminal."""
    with _show(what, bars.SpinnerColumn(), bars.TimeElapsedColumn()) as progress:
        progress.add_task(what, total=None)
        yield


def _show(what: str, *columns: bars.ProgressColumn) -> bars.Progress:
    console = make_console(stderr=True)
    if not console.is_terminal and console.file.isatty():
        console.print(f"{what} ...", highlight=False)
    is_shown = console.is_terminal
    return bars.Progress(
        "{task.description}", *columns, console=console, transient=True, disable=not is_shown
    )
