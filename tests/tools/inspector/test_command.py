"""`dsv4 inspect` and `dsv4 demo --save`: tables, JSON, refusals."""

import json
import sys

import pytest
import torch

from dsv4.tools.cli import main
from dsv4.tools.demo.kept_run import keep_run
from dsv4.tools.inspector.selections import RUN_FILES, SelectionRecorder
from tests.tools.inspector.test_report import named, rewrite, set_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "run"
    keep_run(folder, kv_format="fp8", index_format="mxfp4", seed=0)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    """Copy a request of the run, to be changed."""
    path = tmp_path / "request.safetensors"
    path.write_bytes((run / RUN_FILES.request).read_bytes())
    return path


def run_json(capsys, *arguments) -> dict:
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_demo_run(run, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert sorted(found.name for found in run.iterdir()) == sorted(RUN_FILES)
    picture = tmp_path / "heat.png"
    capsys.readouterr()
    assert main(["inspect", str(run), "--heatmap", str(picture)]) == 0
    captured = capsys.readouterr()
    assert picture.read_bytes().startswith(b"\x89PNG") and captured.err == ""
    out = " ".join(captured.out.split())
    for text in (
        "300 tokens; fp8 rows, mxfp4 index keys", "Blocks: 2 of 256 tokens",
        "Window: positions 173 to 299", "12 of 16 rows in use", "Rows by layer",
        "satu-", "rms", "index keys mxfp4 75", "What top-k chose", "Every value is finite.",
    ):  # fmt: skip
        assert text in out, text
    assert "\x1b" not in captured.out


def test_json(run, capsys):
    report = run_json(capsys, run)
    assert report["length"] == 300 and report["problems"] == []
    assert [layer["type"] for layer in report["layers"]] == ["SWA", "CSA", "HCA", "CSA"]
    assert [layer["layer"] for layer in report["selections"]] == [1, 3]
    assert report["selections"][0]["tokens"] == 300
    keys = report["layers"][1]["parts"][2]
    assert keys["part"] == "index keys" and 0.05 < keys["relative_rms_error"] < 0.2


def test_a_file_alone(run, capsys):
    report = run_json(capsys, run / RUN_FILES.request)
    assert report["selections"] is None
    assert report["layers"][0]["parts"][0]["relative_rms_error"] is None
    assert main(["inspect", str(run / RUN_FILES.request)]) == 0
    out = capsys.readouterr().out
    assert "rms" not in out and "satu-" in out and "…" not in out


def test_names_what_is_not_finite(copy, capsys):
    def change(parts):
        bad = torch.ones(2, 96)
        bad[:, 0] = torch.nan
        set_rows(named(parts, 1, "entries"), [30, 31], bad)
        set_rows(named(parts, 0, "window"), [250], bad[:1])

    rewrite(copy, change)
    assert main(["inspect", str(copy)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "layer 1 (CSA), entries 30 to 31, made from tokens 116 to 127: 2 NaN." in out
    assert "layer 0 (SWA), window, token 250: 1 NaN." in out
    assert "Every value is finite" not in out


def test_many_problems_are_cut(copy, capsys):
    def change(parts):
        bad = torch.full((25, 96), torch.nan)
        set_rows(named(parts, 1, "entries"), list(range(0, 50, 2)), bad)

    rewrite(copy, change)
    assert main(["inspect", str(copy)]) == 0
    out = capsys.readouterr().out
    assert out.count("Not finite") == 20 and "5 more places: --json has them." in out
    assert len(run_json(capsys, copy)["problems"]) == 25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FILE"),
        (["nothing"], "argument FILE: expected a file, found none at nothing"),
        (["RUN", "--against", "nothing"], "argument --against: expected a file, found none at"),
        (["RUN", "--selections", "nothing"], "argument --selections: expected a file"),
        (["RUN/request.safetensors", "--heatmap", "a.png"], "--heatmap: expected --selections"),
        (["RUN", "--heatmap", "a.pdf"], "expected .png or .svg, got 'a.pdf'"),
    ],
)
def test_bad_usage_exits_with_2(run, capsys, arguments, message):
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        main(["inspect", *(argument.replace("RUN", str(run)) for argument in arguments)])
    captured = capsys.readouterr()
    assert error.value.code == 2
    assert message in captured.err and captured.out == ""


def fails(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_files_of_something_else(run, capsys, tmp_path):
    torn = tmp_path / "torn"
    torn.write_bytes((run / RUN_FILES.request).read_bytes()[:-9])
    assert "expected a whole safetensors file" in fails(capsys, torn)
    selections = run / RUN_FILES.selections
    assert "expected metadata 'request' in JSON, found none" in fails(capsys, selections)
    request = run / RUN_FILES.request
    assert "expected metadata 'selections'" in fails(capsys, request, "--selections", request)
    assert "expected rows in bf16 or fp32, got fp8" in fails(capsys, request, "--against", request)


def test_selections_of_another_model(run, capsys, tmp_path):
    recorder = SelectionRecorder(0)
    recorder.record(2, torch.arange(3, 6), torch.zeros(3, 8))
    recorder.save(tmp_path / "other")
    message = fails(capsys, run, "--selections", tmp_path / "other")
    assert "expected layers of [1, 3], the CSA layers of the request, got [2]" in message


def test_heatmap_without_matplotlib(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = fails(capsys, run, "--heatmap", tmp_path / "heat.png")
    assert message == "dsv4: --heatmap needs matplotlib: pip install 'dsv4[plot]'\n"
