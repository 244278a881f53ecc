"""The files that commands write: one that exists is replaced only with `--force`."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command replace files."""
    parser.add_argument("--force", action="store_true", help="replace files that exist")


def check_new(paths: Iterable[Path | None], *, force: bool) -> None:
    """Refuse a file that exists, unless `force`; None stands for no file."""
    for path in paths:
        if path is not None and os.path.lexists(path) and not force:
            raise ValueError(f"Invalid file to write: {path} exists: --force replaces it")
