"""Pages of the site that lie outside of docs/: the README is its first page."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links as they are inside of the site."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=move_links(text)))
    return files


def move_links(text: str) -> str:
    """Links from the repository's root, seen from docs/."""

    def move(match: re.Match[str]) -> str:
        target = match[1].removeprefix("docs/")
        return f"]({PAGES.get(target, target)})"

    return re.sub(r"\]\(([^)]+)\)", move, text)
