"""The picture of a plan."""

import sys
from dataclasses import replace

import pytest

from dsv4.config import CacheConfig
from dsv4.tools.outputs import check_output
from dsv4.tools.planner.memory_plan import MemoryPlan
from dsv4.tools.planner.plot import plot_plan, stack


def tiny_plan() -> MemoryPlan:
    return MemoryPlan(
        CacheConfig.tiny(), num_requests=3, context_tokens=8192, gpu_bytes=3 * 2**20,
        weights_bytes=2**20, reserved_bytes=2**18,
    )  # fmt: skip


def test_the_stack_is_what_the_plan_needs():
    plan = tiny_plan()
    contexts = [1, 129, 8192, 65536]
    heights = [sum(sizes) for sizes in zip(*stack(plan, contexts).values(), strict=True)]
    assert heights == [replace(plan, context_tokens=n).needed_bytes for n in contexts]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan{suffix}"
    plot_plan(tiny_plan(), path, title="tiny")
    start = path.read_bytes()[:256]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


def test_refuses_other_files(tmp_path):
    with pytest.raises(ValueError, match=r"Invalid plot file: expected .png or .svg, got"):
        check_output("--plot", tmp_path / "plan.pdf", force=False)


def test_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install 'dsv4\[plot\]'"):
        check_output("--plot", tmp_path / "plan.png", force=False)
