"""`check_picture`: refuses a picture that cannot be drawn, before any work is done."""

from pathlib import Path

SUFFIXES = (".png", ".svg")


def check_picture(path: Path, *, what: str, option: str) -> None:
    """Refuse a file name without the suffix of a picture, and a missing matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"Invalid {what} file: expected .png or .svg, got {str(path)!r}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"{option} needs matplotlib: pip install 'dsv4[plot]'") from error
