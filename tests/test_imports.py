"""Imports go one way, are few, and are quick."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dsv4"

# A module may import from its own level or a lower one; the longest name that fits is its level.
LEVELS = [
    ["dsv4.checks", "dsv4.errors", "dsv4.formats", "dsv4.layer_schedule"],
    ["dsv4.config"],
    ["dsv4.rope"],
    ["dsv4.kernels"],
    ["dsv4.cache.memory", "dsv4.op_level"],
    ["dsv4.cache.prefix"],
    ["dsv4.cache", "dsv4.distributed.context"],
    ["dsv4.cache.graphs"],
    ["dsv4.model", "dsv4.testing", "dsv4.distributed"],
    ["dsv4.integrations", "dsv4.engine"],
    ["dsv4.serve"],
    ["dsv4.tools"],
]


def rank(module: str) -> int:
    """The number of a module's level."""
    fits = [
        (len(name), number)
        for number, names in enumerate(LEVELS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    assert fits, f"{module} has no level: add it to LEVELS"
    return max(fits)[1]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != "dsv4":
            found[name] = path
    return found


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, but for those that only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from _run_nodes(child)


def imported(path: Path) -> set[str]:
    """Modules that a file imports when it runs, those inside functions too."""
    names = set()
    for node in _run_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dsv4."):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            known = inner & set(modules())
            names |= known or {node.module}
    return names


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module):
    for name in imported(modules()[module]):
        assert rank(name) <= rank(module), f"{module} imports {name}"


def test_no_cycles():
    graph = {name: imported(path) for name, path in modules().items()}
    TopologicalSorter({name: names - {name} for name, names in graph.items()}).prepare()


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("dsv4.kernels.")])
def test_kernels_do_not_know_the_cache(module):
    assert not [name for name in imported(modules()[module]) if name.startswith("dsv4.cache")]


@pytest.mark.parametrize("module", [m for m in modules() if m.startswith("dsv4.kernels.triton")])
def test_triton_does_not_lean_on_the_reference(module):
    assert not [name for name in imported(modules()[module]) if "reference" in name]


def test_import_needs_torch_and_numpy_only():
    code = (
        "import sys, dsv4\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "extras = {'transformers', 'rich', 'triton', 'matplotlib', 'safetensors', 'xxhash'}\n"
        "print(sorted(names & extras))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_import_loads_no_tools_and_no_external_kernels():
    code = (
        "import sys, dsv4\n"
        "levels = ('dsv4.tools', 'dsv4.integrations', 'dsv4.testing', 'dsv4.kernels.external')\n"
        "print(sorted(name for name in sys.modules if name.startswith(levels)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # These two refuse a config that FlashMLA or DeepGEMM cannot read.
    allowed = [f"dsv4.kernels.external{name}" for name in ("", ".find", ".limits")]
    assert result.stdout.strip() == str(allowed), result.stderr


def share_of_import_time() -> float:
    """The time that importing dsv4 takes, as a share of the time for what it needs."""
    code = (
        "import time\n"
        "start = time.process_time()\n"
        "import torch, numpy\n"
        "between = time.process_time()\n"
        "import dsv4\n"
        "print((time.process_time() - between) / (between - start))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return float(result.stdout)


def test_import_is_quick():
    assert min(share_of_import_time() for _ in range(2)) < 0.5
