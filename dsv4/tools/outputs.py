"""Checks of the files that a command will write, before any work is done.

A file that exists is replaced only with `--force`.
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

PICTURES = (".png", ".svg")
KINDS = {  # of the file that an option names, and its suffixes
    "--plot": ("plot file: expected .png or .svg", PICTURES),
    "--heatmap": ("heat map file: expected .png or .svg", PICTURES),
    "--html": ("page file: expected .html", (".html", ".htm")),
}


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command replace files."""
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def check_new(paths: Iterable[Path], *, force: bool) -> None:
    """Refuse a file that exists, unless `force`."""
    for path in paths:
        if os.path.lexists(path) and not force:
            raise ValueError(f"Invalid file to write: {path} exists: --force replaces it")


def check_output(option: str, path: Path | None, *, force: bool) -> None:
    """Refuse the file of an option: its suffix, its folder, that it exists; need matplotlib."""
    if path is None:
        return
    kind, suffixes = KINDS[option]
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"Invalid {kind}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"Invalid file to write: expected a folder {path.parent}, found none")
    if suffixes is PICTURES:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError(f"{option} needs matplotlib: pip install 'dsv4[plot]'") from error
    check_new([path], force=force)
