"""The README's snippet runs, and its paths, links and commands exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_snippet_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["out"].shape == names["hidden"].shape
    assert not names["manager"].is_open[names["slot_a"]]
    names["manager"].check_integrity()


def tree_of_folders() -> list[str]:
    """The folders of the README's tree, as paths from the root."""
    tree = README.split("## Where things are")[1].split("```")[1]
    folders, parents = [], {}
    for indent, name in re.findall(r"^( *)([a-z0-9/]+)/ ", tree, re.M):
        parents[len(indent)] = name
        folders.append("/".join(parents[depth] for depth in range(0, len(indent) + 1, 2)))
    return folders


def test_the_tree_has_every_folder():
    """But for the tools', which share a line."""
    modules = [path for path in (ROOT / "dsv4").rglob("*.py") if path.name != "__init__.py"]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in modules}
    listed = set(tree_of_folders())
    assert all((ROOT / folder).is_dir() for folder in listed)
    assert {folder for folder in folders if "/tools/" not in folder} == listed - {"docs"}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_make_commands_exist(page):
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"(?:^|`)make ([a-z]+)\b", path.read_text(), re.M):
        assert re.search(rf"^{command}:", makefile, re.M), command
