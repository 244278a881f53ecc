"""Every example of the docs runs, and what they show is what commands print."""

import contextlib
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4 import AttentionSubBlock, CacheConfig, KVCacheManager, prepare_forward
from dsv4.cache.graphs import captured_forward
from dsv4.model.random_hf import random_hf_model
from dsv4.tools.cli import main
from dsv4.tools.demo.kept_run import keep_run
from dsv4.tools.inspector.selections import RUN_FILES
from scripts.docs_pages import collect_pages
from scripts.module_map import module_map
from tests.cache.test_captured_forward import EagerGraph

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
ROOT_PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
GUIDES = [
    "engine", "formats", "graphs", "inspecting", "op-level", "planning", "prefix", "scale",
    "serving",
]  # fmt: skip


def read(page: str) -> str:
    return (ROOT / page).read_text()


def commands(pages: list[str]) -> list[tuple[str, str | None]]:
    """The `dsv4` commands of pages, each with the output that the page shows, if any."""
    pattern = r"```sh\n(dsv4 [^\n]*)\n```(?:\n\n```text\n(.*?)\n```)?"
    found = [match for page in pages for match in re.findall(pattern, read(page), re.DOTALL)]
    return [(command, output or None) for command, output in found]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "run"
    keep_run(folder, kv_format="fp8", index_format="mxfp4", seed=0)
    return folder


@pytest.mark.parametrize("guide", GUIDES)
def test_the_python_of_a_guide_runs(guide, monkeypatch):
    """Without a GPU, a graph is stood in for by one that runs the step again."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", read(f"docs/{guide}.md"), re.DOTALL))
    assert code
    if not torch.cuda.is_available():
        code = code.replace('device = "cuda"', 'device = "cpu"')
        monkeypatch.setattr(captured_forward, "CudaGraph", EagerGraph)
    exec(compile(code, f"docs/{guide}.md", "exec"), {"__name__": "__main__"})


def test_the_layers_of_the_engine_guide_are_the_models():
    """With the model's own weights they give what `AttentionSubBlock` does, for each type."""
    blocks = re.findall(r"```python\n(.*?)```", read("docs/engine.md"), re.DOTALL)
    names: dict = {"__name__": "__main__"}
    exec(compile("\n".join(blocks[:2]), "docs/engine.md", "exec"), names)
    model = random_hf_model(seed=0)
    config = CacheConfig.from_hf(model.config, block_tokens=128, drafts_per_step=3)
    assert config.schedule == names["config"].schedule
    hidden = torch.randn(140, 64, generator=torch.Generator().manual_seed(1))
    managers = [KVCacheManager(config, max_requests=1, num_blocks=2) for _ in range(2)]
    plans = [prepare_forward(manager, [manager.open_request()], [0], [140]) for manager in managers]
    for layer_idx, layer in enumerate(model.model.layers):
        attention = names["Attention"](config.schedule[layer_idx])
        attention.load_state_dict(layer.self_attn.state_dict())
        block = AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
        own, expected = (
            part(hidden, manager.acquire(layer_idx, plan))
            for part, manager, plan in zip((attention, block), managers, plans, strict=True)
        )
        torch.testing.assert_close(own.detach(), expected)


def test_no_page_has_python_that_is_not_run():
    elsewhere = ["docs/transformers.md"]  # tests/integrations/test_docs.py
    others = [page for page in PAGES if Path(page).stem not in GUIDES and page not in elsewhere]
    assert not [page for page in others if "```python" in read(page)]


@pytest.mark.parametrize(("command", "output"), commands([*PAGES, "README.md"]))
def test_commands_print_what_the_page_shows(command, output, run, capsys, monkeypatch, tmp_path):
    style, pinned = contextlib.nullcontext(), read("requirements.txt")
    if "--plot" in command or "--heatmap" in command:
        matplotlib = pytest.importorskip("matplotlib")
        style = pytest.importorskip("matplotlib.style").context("default")
    shutil.copytree(run, tmp_path / "run")
    for name in RUN_FILES:
        shutil.copy(run / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    capsys.readouterr()
    with style:  # whatever the user's own is
        assert main(command.split()[1:]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    printed = "\n".join(line.rstrip() for line in captured.out.rstrip().splitlines())
    if output is not None:
        assert printed == output
    for name in re.findall(r"--(?:plot|html|heatmap) (\S+)", command):
        assert (tmp_path / name).stat().st_size > 0
    for name in re.findall(r"--plot (\S+)", command):  # of arithmetic alone, so the same everywhere
        from matplotlib.image import imread

        if f"\nmatplotlib=={matplotlib.__version__} " not in pinned:
            continue
        drawn, shown = imread(tmp_path / name), imread(ROOT / "docs" / name)
        assert drawn.shape == shown.shape and (drawn == shown).all()


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", read(page)):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a page, without code, tables and headings."""
    text = re.sub(r"```.*?```|<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"^(#|\||    (?!- )|:::).*$", "", text, flags=re.M)
    parts = re.split(r"\n\s*\n|\n\s*(?:- |\d+\. )", text)
    parts = [re.sub(r"`[^`]*`", "code", part) for part in parts]
    return [re.sub(r"\]\([^)]*\)", "]", part) for part in parts]


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES])
def test_sentences_are_short(page):
    sentences = [each for part in prose(read(page)) for each in re.split(r"(?<=[.?!])\s+", part)]
    assert not [each for each in sentences if len(re.findall(r"\S*\w\S*", each)) > 25]


@pytest.mark.parametrize("page", [*PAGES, *ROOT_PAGES])
def test_lines_are_wrapped(page):
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    assert not [line for line in text.splitlines() if len(line) > 100 and line[0] != "|"]


def test_commits_are_in_the_history():
    done = subprocess.run(["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    history = done.stdout.split()
    if len(history) < 100:
        pytest.skip("there is no whole history")
    records = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.json")]
    for page in [*PAGES, *ROOT_PAGES, *records]:
        named = set(re.findall(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,10}\b", read(page)))
        for each in named - {"0a2080b"}:  # of transformers
            assert any(commit.startswith(each) for commit in history), f"{page}: {each}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r'= "(\S+\.md)"', read("zensical.toml")))
    inside = {Path(page).relative_to("docs").as_posix() for page in PAGES}
    assert inside == listed - {"index.md", "contributing.md", "changelog.md", "security.md"}


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)", "\n".join(map(read, PAGES)), re.M))
def test_the_reference_names_what_is_there(name):
    import importlib

    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


def test_the_reference_has_every_public_name():
    """By its own entry, or as a member of its module's."""
    listed = set(re.findall(r"^::: (\S+)", "\n".join(map(read, PAGES)), re.M))
    public = [getattr(dsv4, name) for name in dsv4.__all__ if name != "__version__"]
    for each in public:
        assert {each.__module__, f"{each.__module__}.{each.__name__}"} & listed, each


def test_the_module_map_is_current():
    assert read("docs/modules.md") == module_map(), "docs/modules.md is stale: run make map"


def test_the_module_map_leads_to_files():
    """The paths of its first section, which no docstring holds."""
    table = read("docs/modules.md").split("|---|---|")[1]
    paths = re.findall(r"`([a-z_/]+\.py)`", table)
    assert len(paths) > 5
    for path in paths:
        assert (ROOT / "dsv4" / path).exists(), path


def test_pages_of_the_root_are_pages_of_the_site(tmp_path):
    collect_pages(tmp_path / "pages")
    for page in (tmp_path / "pages").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_builds(tmp_path):
    if util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: make docs builds the site")
    collect_pages(tmp_path / "build" / "docs")
    config = read("zensical.toml").replace('paths = ["."]', f'paths = ["{ROOT}"]')
    (tmp_path / "zensical.toml").write_text(config)
    arguments = ["build", "--strict", "--clean"]
    subprocess.run([sys.executable, "-m", "zensical", *arguments], cwd=tmp_path, check=True)
    assert "KVCacheManager" in (tmp_path / "build" / "site" / "api" / "cache.html").read_text()
