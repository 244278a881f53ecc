"""Tables of results: cells, alignment, and missing numbers."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from dsv4.tools.bench.tables import build_table, show

COLUMNS = (("name", "{name}"), ("us", "{times[best]:.1f}"), ("of all", "{share:.0%}"))


RECORDS = sorted((Path(__file__).parents[3] / "docs").glob("benchmarks-*.json"))


def drawn(*tables, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(*tables)
    return console.file.getvalue()


def printed(table):
    return [line.strip("│┃ ") for line in drawn(table).splitlines() if "│" in line]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_fit_80_columns(path):
    result = json.loads(path.read_text())
    text = drawn(*show(result["bench"], result).tables, width=80)
    assert "━" in text and "…" not in text


def test_each_external_kernel_has_a_ratio():
    row = {"layer": "CSA", "start": 8192, "score_us": 30.0, "topk_us": 8.0, "attend_us": 20.0,
           "deepgemm_us": 40.0, "sglang_us": 4.0, "flashmla_us": 10.0}  # fmt: skip
    result = {"chunk": 8192, "layers": {"CSA": 1}, "rows": [row], "prompts": [], "memory": []}
    text = drawn(*show("prefill", result).tables)
    lines = [line.split("│") for line in text.splitlines() if "8,192" in line and "," in line]
    ratios = {cells[1].strip(): cells[-2].strip() for cells in lines if len(cells) == 8}
    assert ratios == {
        "scores, DeepGEMM": "0.75", "top-k, SGLang": "2.00", "attention, FlashMLA": "2.00",
    }  # fmt: skip


def test_targets_have_verdicts():
    row = {"format": "fp8", "entries": 5, "select_us": 4.0, "ascending_us": 12.0,
           "ascending_ratio": 3.0, "ascending_target": 2.5, "ascending_verdict": "missed",
           "target": 820.0, "verdict": "met"}  # fmt: skip
    text = drawn(*show("index", {"rows": [], "prefill": [row]}).tables)
    assert "2.5, missed" in text and "820, met" in text
    mixed = {"decode": 31, "chunks": "480", "captured_us": 400.0, "verdict": "met"}
    result = {"decode": [], "mixed": [mixed], "mixed_target_us": 500, "pool_bytes": 7}
    text = drawn(*show("step", result).tables, width=200)
    assert "captured: 500" in text and "met" in text


def test_cells_are_filled_in_and_stand_right():
    rows = [{"name": "a", "times": {"best": 1.26}, "share": 0.5}, {"name": "longer", "times": {}}]
    first, second = printed(build_table("", rows, COLUMNS, num_left=1))
    assert first.split("│") == ["a      ", " 1.3 ", "    50%"]
    assert second.split("│") == ["longer ", "   - ", "      -"]
    assert {column.justify for column in build_table("", rows, COLUMNS).columns} == {"right"}
    assert build_table("", rows, COLUMNS, caption="below").caption == "below"


def test_a_launch_that_could_not_be_used():
    used, other = {"num_warps": 2}, {"num_warps": 4, "rows": 8}
    choice = {"work": "csa decode", "size": 32, "present": other, "chosen": used,
              "times": [{"launch": used, "us": 3.456}]}  # fmt: skip
    result = {"architecture": "sm_90", "choices": [choice], "skipped": [], "written": "a.json"}
    shown = show("tune", result)
    (line,) = printed(shown.tables[0])
    cells = [cell.strip() for cell in line.split("│")]
    assert cells == ["csa decode", "32", "num_warps 4, rows 8", "unusable", "num_warps 2", "3.46"]
    assert shown.sentences == ["written to a.json"]
