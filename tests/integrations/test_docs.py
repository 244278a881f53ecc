"""The docs page and the example do what they show."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dsv4.cache.graphs import captured_forward
from tests.integrations.checkpoint import save_checkpoint
from tests.integrations.generation import RepeatedRun, small_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "transformers.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(small_model(0, 4, 128), folder)
    return folder


def test_the_snippets_run(folder, monkeypatch):
    monkeypatch.setattr(captured_forward, "CudaGraph", RepeatedRun)  # the model is on the CPU
    names = {"path": str(folder), "torch": torch}
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 4
    for snippet in snippets:
        exec(compile(snippet, "docs/transformers.md", "exec"), names)
    assert names["ids"].shape[0] == 1 and names["best"].shape[0] == 2
    assert names["next_ids"].shape == (2,)
    names["cache"].manager.check_integrity()


def test_the_example_runs(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(folder), "w1 w2 w3", "w9"])
    runpy.run_path(str(ROOT / "examples" / "generate.py"), run_name="__main__")
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("w1 w2 w3 w") and second.startswith("w9 w")


def test_three_lines_change():
    text = (ROOT / "examples" / "generate.py").read_text()
    marked = [line for line in text.splitlines() if re.search(r"# [1-9]$", line)]
    assert len(marked) == 3
    assert all("attach" in line or "cache" in line for line in marked)
    unmarked = [line for line in text.splitlines() if line not in marked]
    code = "\n".join(unmarked).split('"""')[-1]
    assert "dsv4" not in code and "cache" not in code
