"""`dsv4 bench quality`: fewer bits, larger errors; every format fails below its margin."""

import json
from pathlib import Path

import pytest

from dsv4.tools.bench import quality
from dsv4.tools.cli import main


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(quality, "MARGINS", (1.0, 2.0**-7))
    monkeypatch.setattr(quality, "NUM_QUERIES", 2)
    monkeypatch.setattr(quality, "NUM_KEYS", 2048)


def test_bench_quality(small, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "quality.png"
    arguments = ["--questions", "24", "--tokens", "256", "--plot", str(picture)]
    assert main(["bench", "quality", *arguments]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Smallest margin" in "".join(lines)
    assert_fewer_bits_are_worse(result)
    assert_own_rows_are_exact(result["v41"])
    right = {(row["part"], row["format"], row["margin"]): row["right"] for row in result["answers"]}
    for part, names in quality.FORMATS.items():
        for name in names:
            assert right[part, name, 1.0] == 1
            assert (right[part, name, 2.0**-7] == 1) == (name in ("bf16", "fp32"))
    margins = {(row["part"], row["format"]): row for row in result["margins"]}
    assert margins["kv", "fp8"]["margin"] == 1 and margins["kv", "fp8"]["text"] == "1 / 1"
    assert margins["kv", "fp32"]["margin"] == 2.0**-7 and margins["kv", "fp32"]["is_last"]
    assert any("at most 1 / 128" in line for line in lines)
    fp8 = {row["part"]: row["kinds"] for row in result["answers"]
           if row["format"] == "fp8" and row["margin"] < 1}  # fmt: skip
    assert fp8["kv"]["record"] < 1 and fp8["kv"]["chapter"] < 1 == fp8["kv"]["line"]
    assert fp8["index"]["record"] < 1 == fp8["index"]["chapter"], "chapters need no index"


def test_questions_are_on_what_the_book_has(monkeypatch):
    """A name that it lacks is unknown at any margin: asked alone, no curve would end."""
    asked = []
    answer = quality.ask
    monkeypatch.setattr(quality, "ask", lambda *run: asked.extend(run[2]) or answer(*run))
    right = quality._ask(quality.write_book(256), {"index": "mxfp4"}, 1.0, 4, "cpu")
    assert sorted(each.kind for each in asked) == ["chapter", "line", "record", "record"]
    assert right == {"record": 1, "chapter": 1, "line": 1}


def assert_own_rows_are_exact(rows) -> None:
    own, second, only, bf16 = rows
    errors = [name for name in own if name.endswith("error")]
    assert [row["bytes"] for row in rows] == [890, 1790, 1790, 3200]
    for exact in (own, bf16):
        assert not any(exact[name] for name in errors) and exact["changed"] == 0
    assert second["window_error"] < 1e-6 and second["key_error"] == second["changed"] == 0
    assert 0.015 < second["entry_error"] < 0.025 and 0.015 < second["output_error"] < 0.03
    assert only["output_error"] > 3 * second["output_error"] and only["changed"] > 0.1


def assert_fewer_bits_are_worse(result) -> None:
    kv = {row["format"]: row for row in result["kv"]}
    index = {row["format"]: row for row in result["index"]}
    assert kv["fp32"]["row_error"] == kv["fp32"]["output_error"] == 0
    assert 0 < kv["bf16"]["output_error"] < 0.004 < 0.02 < kv["fp8"]["output_error"] < 0.04
    assert 0.015 < kv["fp8_32"]["output_error"] < 0.04 < 0.08 < kv["nvfp4_16"]["output_error"] < 0.2
    assert index["fp32"]["recall"] == 1 and index["fp32"]["output_error"] == 0
    lossy = [index[name] for name in ("mxfp4", "nvfp4", "fp8", "bf16")]
    recalls = [row["recall"] for row in lossy]
    assert recalls == sorted(recalls) and 0.8 < recalls[0] < 0.92
    assert lossy[3]["output_error"] < lossy[2]["output_error"]
    for row in lossy[:3]:
        # Random rows have nothing in common: each that is missed or wrong adds its square.
        square = 2 * (1 - row["recall"])
        assert 0.5 * square < row["output_error"] ** 2 < 2 * square


def test_the_page_shows_the_record():
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "quality.md").read_text()
    record = json.loads((docs / "benchmarks-quality.json").read_text())
    margins: dict[tuple[str, str], dict] = {}
    for row in record["margins"]:  # of all lengths the largest
        key = row["part"], row["format"]
        margins[key] = max(row, margins.get(key, row), key=lambda each: each["margin"])
    for part in ("kv", "index"):
        for row in record[part]:
            recall = [f"{row['recall']:.1%}"] if part == "index" else []
            cells = [f"{row['row_error']:.2%}", *recall, f"{row['output_error']:.2%}"]
            shown = [cell.replace("%", " %") for cell in cells]
            shown = [{"0.00 %": "0", "100.0 %": "100 %"}.get(cell, cell) for cell in shown]
            margin = margins[part, row["format"]]["text"].replace(" / ", "/")
            line = ("`" + row["format"] + "`", str(row["row_bytes"]), *shown, margin)
            assert "| " + " | ".join(line) + " |" in page
    assert record["environment"]["commit"][:7] in page
