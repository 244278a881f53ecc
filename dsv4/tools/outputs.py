"""Checks of the files that a command will write, before any work is done.

A file that exists is replaced only with `--force`.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

PICTURES = (".png", ".svg")


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command replace files."""
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def check_new(paths: Iterable[Path | None], *, force: bool) -> None:
    """Refuse a file that exists, unless `force`; None stands for no file."""
    for path in paths:
        if path is not None and os.path.lexists(path) and not force:
            raise ValueError(f"Invalid file to write: {path} exists: --force replaces it")


def check_picture(path: Path, *, what: str, option: str) -> None:
    """Refuse a file name without the suffix of a picture, and a missing matplotlib."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"Invalid {what} file: expected .png or .svg, got {str(path)!r}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"{option} needs matplotlib: pip install 'dsv4[plot]'") from error
