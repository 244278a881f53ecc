"""What the README shows works: its snippet runs, paths exist."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_snippet_runs():
    snippet, integration = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    ids = torch.ones(2, 5, dtype=torch.long)
    names["inputs"] = {"input_ids": ids, "attention_mask": ids}
    exec(compile(integration, "README.md", "exec"), names)
    assert names["ids"].shape[0] == 2
    assert names["out"].shape == names["hidden"].shape
    assert not names["manager"].is_open[names["slot_a"]]
    names["manager"].check_integrity()


def test_the_tree_is_there():
    tree = README.split("## Where things are")[1].split("```")[1]
    listed = re.findall(r"^\s*((?:[a-z_/]+(?:\.py|/)|docs/\S+)(?:  \S+(?:\.py|/))*)", tree, re.M)
    paths = [path for line in listed for path in line.split()]
    assert len(paths) > 20
    for path in paths:
        base = ROOT if path.startswith(("docs", "dsv4")) else ROOT / "dsv4"
        assert (base / path).exists(), path


def test_every_module_is_in_the_tree():
    for path in (ROOT / "dsv4").rglob("*.py"):
        if path.name != "__init__.py" and "bench" not in path.parts:
            assert path.stem in README, path


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/design.md",
        "docs/planning.md",
        "docs/transformers.md",
    ],
)
def test_links_and_commands_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"(?:^|`)make ([a-z]+)\b", text, re.M):
        assert re.search(rf"^{command}:", makefile, re.M), command
