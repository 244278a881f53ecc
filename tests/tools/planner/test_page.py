"""The page of `dsv4 plan --html`, in a browser: its numbers are those of `MemoryPlan`."""

import json
import random
import re
from dataclasses import replace
from fractions import Fraction
from importlib import resources

import pytest

from dsv4.config import CacheConfig
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.tools.cli import main
from dsv4.tools.outputs import check_output
from dsv4.tools.planner.command import PRESETS
from dsv4.tools.planner.memory_plan import MemoryPlan
from dsv4.tools.planner.sizes import GPU_BYTES, parse_bytes, parse_gpu, parse_tokens
from tests.browser import open_browser, set_width
from tests.tools.planner.test_command import HF_CONFIG

ARGUMENTS = ["plan", "--model", "v4-flash", "--context", "1M", "--requests", "8", "--gpu", "h200",
             "--weights", "160GB", "--tp", "2"]  # fmt: skip
FIRST = {
    "model": "v4-flash", "context": "1M", "requests": "8", "kv": "fp8", "index": "mxfp4",
    "tails": "float32", "gpu": "h200", "size": "141GB", "weights": "160GB", "ranks": "2",
    "reserve": "0", "block": "256", "align": "576", "drafts": "0", "chunk": "8k",
    "checkpoints": "0", "undo": "1", "mtp": True,
}  # fmt: skip
SET_CHOICES = """
for (const [id, value] of Object.entries(arguments[0])) {
  const control = document.getElementById(id);
  if (control.type === "checkbox") control.checked = value;
  else control.value = value;
  if (id === "model") control.dispatchEvent(new Event("input", {bubbles: true}));
}
document.getElementById("choices").dispatchEvent(new Event("input", {bubbles: true}));
"""
READ_NUMBERS = """
const text = (id) => document.getElementById(id).textContent;
const rows = (id) => Object.fromEntries([...document.querySelectorAll(`#${id} tbody tr`)].map(
  (row) => [row.dataset.name, [...row.cells].slice(1).map((cell) => cell.textContent)]));
return {
  components: rows("components"), totals: rows("totals"),
  verdict: text("verdict"), problem: text("problem"),
  fits: document.getElementById("verdict").className === "fits",
  maxRequests: text("max-requests"), maxContext: text("max-context"),
  maxTokens: text("max-tokens"), oneRequest: document.getElementById("one-request").title,
};
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Make a model of other widths than the presets', with a name that HTML could misread."""
    folder = tmp_path_factory.mktemp("model") / "<b>&'x'</script>".replace("/", "_")
    folder.mkdir()
    small = {
        "head_dim": 112, "qk_rope_head_dim": 32, "index_head_dim": 64, "index_n_heads": 24,
        "num_attention_heads": 80, "index_topk": 100, "max_position_embeddings": 100_000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | small))
    return str(folder)


@pytest.fixture(scope="module")
def driver():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory, model_folder):
    """Write a page with all three models."""
    path = tmp_path_factory.mktemp("page") / "plan.html"
    options = ["--kv", "bf16", "--gpu", "h200", "--html", str(path)]
    assert main(["plan", "--model", model_folder, "--context", "64k", *options]) == 0
    return path


@pytest.fixture
def page(driver, page_file):
    """Open that page from its file in a browser."""
    set_width(driver, 1180)
    driver.get(page_file.as_uri())
    return driver


def choose(driver, choice: dict) -> dict:
    driver.execute_script(SET_CHOICES, choice)
    return driver.execute_script(READ_NUMBERS)


def make_plan(choice: dict) -> MemoryPlan:
    choices = {
        "kv_format": choice["kv"], "index_format": choice["index"], "tail_dtype": choice["tails"],
        "block_tokens": int(choice["block"]), "page_align": int(choice["align"]),
        "drafts_per_step": int(choice["drafts"]),
    }  # fmt: skip
    preset = PRESETS.get(choice["model"])
    if preset is None:
        config = CacheConfig.from_hf(choice["model"], include_mtp=choice["mtp"], **choices)
    else:
        config = preset(include_mtp=choice["mtp"], **choices)
    gpu = choice["size"] if choice["gpu"] == "other" else choice["gpu"]
    return MemoryPlan(
        config,
        num_requests=int(choice["requests"]),
        context_tokens=parse_tokens(choice["context"]),
        gpu_bytes=parse_gpu(gpu),
        weights_bytes=parse_bytes(choice["weights"]),
        reserved_bytes=parse_bytes(choice["reserve"]),
        num_ranks=int(choice["ranks"]),
        max_forward_tokens=parse_tokens(choice["chunk"]),
        num_checkpoints=int(choice["checkpoints"]),
        undo_slots=int(choice["undo"]),
    )


def number(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def check_numbers(shown: dict, plan: MemoryPlan) -> None:
    """Compare everything that the page shows with the plan, exactly."""
    assert shown["problem"] == ""
    sizes = {**plan.per_token(), **plan.per_request(), **plan.shared()}
    assert set(shown["components"]) == {*sizes, "per token", "per request", "shared"}
    for name, (payload, allocated) in sizes.items():
        expected = [payload, allocated, plan.memory[name].allocated]
        assert [number(cell) for cell in shown["components"][name]] == expected, name
    parts = {"per token": plan.per_token(), "per request": plan.per_request()}
    for name, part in {**parts, "shared": plan.shared()}.items():
        totals = [sum(Fraction(size[column]) for size in part.values()) for column in (0, 1)]
        totals.append(Fraction(sum(plan.memory[component].allocated for component in part)))
        assert [number(cell) for cell in shown["components"][name]] == totals, name
    assert {name: number(cells[0]) for name, cells in shown["totals"].items()} == {
        "gpu": plan.gpu_bytes, "weights": plan.rank_weights_bytes,
        "reserved": plan.reserved_bytes, "cache": plan.cache_bytes, "free": abs(plan.free_bytes),
    }  # fmt: skip
    assert shown["fits"] == plan.fits
    assert f"{plan.num_requests:,} request" in shown["verdict"]
    assert number(shown["maxRequests"]) == plan.max_requests
    assert number(shown["maxContext"]) == plan.max_context
    assert number(shown["maxTokens"]) == plan.max_tokens
    assert number(shown["oneRequest"].removesuffix(" bytes")) == plan.one_request().payload


def random_choice(rng: random.Random, model_folder: str) -> dict:
    model = rng.choice(["v4-flash", "v4-pro", model_folder])
    formats = [name for name in KV_FORMATS if model != model_folder or name != "fp8"]
    limit = 100_000 if model == model_folder else 2**20
    context = rng.choice([rng.randint(1, limit), rng.randint(1, 3000), 2 ** rng.randint(2, 16)])
    return {
        "model": model,
        "context": rng.choice([str(context), f"{context:,}"]),
        "requests": str(rng.choice([1, 2, 7, 64, 300])),
        "kv": rng.choice(formats),
        "index": rng.choice(INDEX_FORMATS),
        "tails": rng.choice(["float32", "bfloat16"]),
        "gpu": rng.choice([*GPU_BYTES, "other"]),
        "size": rng.choice(["24GB", "80GiB", "139.8GB", "1.5 TiB", "3000000001B"]),
        "weights": rng.choice(["0", "160GB", "1.7TB", "90GiB"]),
        "ranks": str(rng.choice([1, 2, 4, 16])),
        "reserve": rng.choice(["0", "4GiB", "123456789B"]),
        "block": rng.choice(["128", "256", "512", "1024"]),
        "align": rng.choice(["16", "576"]),
        "drafts": str(rng.choice([0, 1, 3, 17])),
        "chunk": rng.choice(["1", "2", "19", "8k", "4096", "100_000"]),
        "checkpoints": str(rng.choice([0, 1, 30, 1000])),
        "undo": str(rng.choice([0, 1, 2, 100])),
        "mtp": rng.random() < 0.5,
    }


@pytest.mark.browser
def test_numbers_are_those_of_the_plan(page, model_folder):
    rng = random.Random(7)
    for _ in range(80):
        choice = random_choice(rng, model_folder)
        check_numbers(choose(page, choice), make_plan(choice))


@pytest.mark.browser
def test_ranks_divide_the_heads(page):
    shown = choose(page, FIRST | {"ranks": "3"})
    assert shown["problem"] == "expected ranks that divide 64 query heads"


@pytest.mark.browser
@pytest.mark.parametrize("change", [0, -1])
def test_fits_to_the_byte(page, change):
    plan = make_plan(FIRST)
    choice = FIRST | {"gpu": "other", "size": f"{plan.needed_bytes + change}B"}
    shown = choose(page, choice)
    assert shown["fits"] == (change == 0)
    check_numbers(shown, make_plan(choice))


@pytest.mark.browser
def test_a_longer_context_may_need_less(page):
    """The index's workspace loses a row, so 3,969 blocks take less than 3,968."""
    choice = FIRST | {"requests": "1", "mtp": False, "weights": "0", "ranks": "1"}
    choice |= {"kv": "fp8_entry_scale"}  # never made dense, which would take more
    needed = replace(make_plan(choice), context_tokens=3969 * 256).needed_bytes
    choice |= {"gpu": "other", "size": f"{needed}B"}
    shown = choose(page, choice)
    assert shown["maxContext"] == f"{3969 * 256:,}"
    check_numbers(shown, make_plan(choice))


@pytest.mark.browser
def test_opens_with_the_choices_of_the_command(driver, tmp_path):
    path = tmp_path / "plan.html"
    assert main([*ARGUMENTS, "--html", str(path), "--drafts", "2", "--no-mtp"]) == 0
    driver.get(path.as_uri())
    shown = driver.execute_script(READ_NUMBERS)
    check_numbers(shown, make_plan(FIRST | {"drafts": "2", "mtp": False}))
    values = driver.execute_script(
        "return Object.fromEntries(arguments[0].map((id) => "
        "[id, document.getElementById(id).value]))",
        ["model", "context", "requests", "gpu", "weights", "ranks", "drafts"],
    )
    assert values == {
        "model": "v4-flash", "context": "1M", "requests": "8", "gpu": "h200", "weights": "160GB",
        "ranks": "2", "drafts": "2",
    }  # fmt: skip


@pytest.mark.browser
def test_moves_with_keys_and_clicks(driver, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    path = tmp_path / "plan.html"
    assert main([*ARGUMENTS, "--html", str(path)]) == 0
    driver.get(path.as_uri())
    Select(driver.find_element(By.ID, "model")).select_by_visible_text("v4-pro")
    Select(driver.find_element(By.ID, "kv")).select_by_visible_text("bf16")
    Select(driver.find_element(By.ID, "gpu")).select_by_visible_text("b300")
    driver.find_element(By.ID, "context").send_keys(Keys.CONTROL, "a")
    driver.find_element(By.ID, "context").send_keys("128k")
    driver.find_element(By.ID, "requests-slider").send_keys(Keys.HOME)
    choice = FIRST | {"model": "v4-pro", "kv": "bf16", "gpu": "b300", "context": "128k"}
    shown = driver.execute_script(READ_NUMBERS)
    check_numbers(shown, make_plan(choice | {"requests": "1"}))
    driver.find_element(By.ID, "context-slider").send_keys(Keys.END)
    shown = driver.execute_script(READ_NUMBERS)
    check_numbers(shown, make_plan(choice | {"requests": "1", "context": "1M"}))


@pytest.mark.browser
@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("context", "1G", "expected a number of tokens such as 4096, 128k or 1M"),
        ("context", "1.0001k", "expected a number of tokens"),
        ("context", "2M", "expected at most 1,048,576 tokens, the model's limit"),
        ("requests", "0", "expected a whole number of requests above 0"),
        ("requests", "2000000", "expected at most 1,000,000 requests"),
        ("weights", "80", "expected a size of the weights such as 160GB"),
        ("drafts", "-1", "expected a whole number of drafts"),
        ("drafts", "257", "expected at most 256 drafts"),
    ],
)
def test_says_what_it_expects(page, field, text, message):
    good = choose(page, FIRST)
    shown = choose(page, {field: text})
    assert message in shown["problem"]
    assert shown["components"] == good["components"]
    assert choose(page, FIRST)["problem"] == ""


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 375, 768, 1180])
def test_no_width_scrolls_sideways(page, width, model_folder):
    set_width(page, width)
    rng = random.Random(width)
    for _ in range(6):
        assert choose(page, random_choice(rng, model_folder))["problem"] == ""
        page.execute_script("document.querySelector('details').open = true")
        wide, shown = page.execute_script(
            "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
        )
        assert (wide, shown) == (width, width)


@pytest.mark.browser
def test_draws_what_it_counts(page):
    choose(page, FIRST)
    plan = make_plan(FIRST)
    widths, labels = page.execute_script(
        "return [[...document.querySelectorAll('#bar span')].map((s) => parseFloat(s.style.width)),"
        " [...document.querySelectorAll('#chart text')].map((t) => t.textContent)]"
    )
    assert sum(widths) == pytest.approx(100 * plan.needed_bytes / plan.gpu_bytes)
    assert "the GPU: 131.316 GiB" in labels and "1M" in labels and "0" in labels
    assert len(page.execute_script("return document.querySelectorAll('#chart polygon')")) == 7


@pytest.mark.browser
def test_needs_no_network(page):
    page.get_log("browser")
    page.refresh()
    assert page.current_url.startswith("file://")
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert page.get_log("browser") == []


def test_the_page_knows_every_component():
    script = (resources.files("dsv4.tools.planner") / "page.js").read_text()
    for name in make_plan(FIRST).memory:
        assert re.search(rf"\b{name}\b", script), name


def test_writes_one_file_without_addresses(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert main([*ARGUMENTS, "--html", str(path)]) == 0
    assert "It fits: 8 requests" in capsys.readouterr().out
    assert [found.name for found in tmp_path.iterdir()] == ["plan.html"]
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text.replace("http-equiv", "") and "src=" not in text
    for placeholder in ("/*STYLE*/", "/*SCRIPT*/", "/*DATA*/"):
        assert placeholder not in text


def test_refuses_other_files(tmp_path):
    with pytest.raises(ValueError, match=r"Invalid page file: expected .html, got"):
        check_output("--html", tmp_path / "plan.pdf", force=False)
