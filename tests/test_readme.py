"""What the README and the docs show works: snippets run, paths exist."""

import re
from pathlib import Path

import pytest

from dsv4.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PLANNING = (ROOT / "docs" / "planning.md").read_text()


def test_the_snippet_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["out"].shape == names["hidden"].shape
    assert not names["manager"].is_open[names["slot_a"]]
    names["manager"].check_integrity()


def test_the_planning_snippet_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", PLANNING, re.DOTALL)
    exec(compile(snippet, "docs/planning.md", "exec"), {})


@pytest.mark.parametrize(
    ("command", "output"),
    re.findall(r"```sh\n(dsv4 .*?)\n```\n\n```text\n(.*?)\n```", PLANNING, re.DOTALL),
)
def test_the_planning_page_shows_what_the_command_prints(capsys, monkeypatch, command, output):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert "\n".join(line.rstrip() for line in printed.rstrip().splitlines()) == output


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
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md", "docs/planning.md"]
)
def test_links_and_commands_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"(?:^|`)make ([a-z]+)\b", text, re.M):
        assert re.search(rf"^{command}:", makefile, re.M), command
