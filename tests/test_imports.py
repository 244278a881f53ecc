"""Imports go one way, are few, and are quick."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "dsv4"

# A module may import from its own rank or a lower one.
RANKS = [
    ["dsv4.console", "dsv4.errors", "dsv4.formats", "dsv4.model.layer_schedule"],
    ["dsv4.config"],
    ["dsv4.model.rope"],
    ["dsv4.kernels"],  # ops and the backends too
    ["dsv4.cache.schema", "dsv4.cache.block_allocator"],
    ["dsv4.cache.layout", "dsv4.cache.staging", "dsv4.cache.prefix_tree", "dsv4.cache.host_memory"],
    ["dsv4.cache.capacity", "dsv4.cache.paged_cache", "dsv4.cache.state_cache", "dsv4.cache.plan"],
    ["dsv4.cache.flush", "dsv4.cache.saved_request", "dsv4.cache.checkpoints"],
    ["dsv4.cache.handle", "dsv4.cache.prefix_cache"],
    ["dsv4.cache.swap"],
    ["dsv4.cache.manager", "dsv4.cache.stats", "dsv4.cache.integrity"],
    ["dsv4.cache.prepare_forward"],
    ["dsv4.cache.captured_forward", "dsv4.cache.warm_up"],
    ["dsv4.cache.captured_layers"],
    ["dsv4.model.attention", "dsv4.model.random_hf"],
    ["dsv4.testing"],
    ["dsv4.integrations"],
    ["dsv4.bench", "dsv4.info", "dsv4.planner"],
    ["dsv4.inspector"],
    ["dsv4.demo"],
    ["dsv4.cli"],
]


def rank(module: str) -> int:
    for number, names in enumerate(RANKS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return number
    raise AssertionError(f"{module} has no rank: add it to RANKS")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in ("dsv4", "dsv4.cache", "dsv4.integrations", "dsv4.model"):
            found[name] = path
    return found


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dsv4."):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            known = inner & set(modules())
            names |= known or {node.module}
    return names


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module):
    for name in imported(modules()[module]):
        assert rank(name) <= rank(module), f"{module} imports {name}"


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
        "print(sorted(names & {'transformers', 'rich', 'triton', 'matplotlib', 'safetensors'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_import_is_quick():
    code = (
        "import time, torch, numpy\n"
        "start = time.process_time()\n"
        "import dsv4\n"
        "print(time.process_time() - start)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert float(result.stdout) < 1.0
