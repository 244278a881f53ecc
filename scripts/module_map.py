"""Writes docs/modules.md: every module of dsv4, folder by folder, by its docstring's first line."""

import ast
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "modules.md"
WIDTH = 100
HEAD = """# Modules

<!-- `make map` writes this page from the modules' docstrings: do not edit it. -->

Folders stand in the order of imports: a folder imports from itself and from folders above it here.
`kernels` with its folders counts as one, as does `tools`. `tests/test_imports.py` holds that order.
Only `testing`, `op_level` and the package's own `__init__` import from folders further down.

| to see | look in |
|---|---|
| where a row format is defined | `formats.py`: every byte layout, drawn |
| where a position becomes a row | `kernels/reference/addressing.py` |
| when a compression window closes | `_closing_tokens` of `kernels/reference/compressor.py`; on a \
GPU `compress_*` of `kernels/triton/flush_write.py` |
| how a closed window becomes an entry | `kernels/reference/compressor.py`, then \
`kernels/reference/flush_write.py`; on a GPU `kernels/triton/flush_write.py` |
| how a forward is planned, and blocks are taken | `cache/prepare_forward.py` |
| where a block is freed | `release` of `cache/memory/block_allocator.py`; `shorten` of \
`cache/books.py` calls it for `free_request` and `truncate`, `evict` of \
`cache/prefix/prefix_tree.py` for the prefix cache |
| what a layer does in a forward | `cache/handle.py` |
| which kernel attends | `attend_launch` of `kernels/triton/attention.py` decides; \
`fp8` and V4.1's rows on Hopper go to `kernels/triton/hopper/attention.py`, chunks also to \
`kernels/triton/hopper/dense_attention.py` |
| what all of it must equal | the oracle of the tests, `tests.dense`, which has no cache |
"""
# Lowest first, as tests/test_imports.py ranks them; folders inside of a level follow it.
LEVELS = [
    "dsv4",
    "dsv4/kernels",
    "dsv4/cache/memory",
    "dsv4/cache/prefix",
    "dsv4/cache",
    "dsv4/cache/graphs",
    "dsv4/model",
    "dsv4/distributed",
    "dsv4/integrations",
    "dsv4/engine",
    "dsv4/serve",
    "dsv4/tools",
]


def module_map() -> str:
    """Return the page as the docstrings make it now."""
    modules = [path for path in (ROOT / "dsv4").rglob("*.py") if path.name != "__init__.py"]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in modules}
    lines = [line for folder in sorted(folders, key=_place) for line in _section(folder)]
    return "\n".join([HEAD, *lines])


def _place(folder: str) -> tuple[int, str]:
    levels = [level for level in LEVELS if f"{folder}/".startswith(f"{level}/")]
    return LEVELS.index(max(levels, key=len)), folder


def _section(folder: str) -> Iterator[str]:
    yield f"## {folder}\n"
    about = first_line(ROOT / folder / "__init__.py")
    if about:
        yield f"{fill(about, WIDTH)}\n"
    yield "| module | |\n|---|---|"
    for path in sorted((ROOT / folder).glob("*.py")):
        if path.name != "__init__.py":
            yield f"| `{path.stem}` | {first_line(path)} |"
    yield ""


def first_line(path: Path) -> str:
    """Return the first paragraph of a module's docstring on one line; empty if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(module_map(), encoding="utf-8")
