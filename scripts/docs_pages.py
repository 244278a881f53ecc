"""Collects the site's pages in build/docs: docs/, and the pages that lie in the root.

The README is the site's first page. Links between pages are rewritten to where the pages go.
"""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def collect_pages(folder: Path) -> None:
    """Make `folder` hold exactly the pages and pictures of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        (folder / target).write_text(move_links(text), encoding="utf-8")
    for page in folder.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        moved = re.sub(r"\]\(\.\./([A-Z]+\.md)", lambda match: f"]({PAGES[match[1]]}", text)
        page.write_text(moved, encoding="utf-8")


def move_links(text: str) -> str:
    """Rewrite links from the root as links from docs/."""

    def move(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/")
        return f"]({PAGES.get(target, target)})"

    return re.sub(r"\]\(([^)]+)\)", move, text)


if __name__ == "__main__":
    collect_pages(ROOT / "build" / "docs")
