"""The script of `make gpu` runs every test once, part after part, and records all outcomes."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COUNTED = """
import pytest, time

@pytest.mark.parametrize("number", range({count}))
def test_counted(number):
    with open("runs.txt", "a") as file:
        file.write(f"{name} {{number}}\\n")
    time.sleep({seconds})
"""
OUTCOMES = """
import os
import pytest

def test_passes(): pass

def test_fails(): assert 1 == 2

def test_skips(): pytest.skip("not here")

@pytest.fixture
def broken(): raise RuntimeError("no fixture")

def test_error(broken): pass

def test_ends_the_process(): os._exit(3)

def test_after_that(): pass

@pytest.mark.slow
def test_slow(): assert False
"""


@pytest.fixture
def gpu_tests(tmp_path, monkeypatch):
    """The script on a tree of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("gpu_tests")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: s\n  gpu: g\n")
    return module


def write_counted(folder, name, *, count, seconds=0.0):
    text = COUNTED.format(name=name, count=count, seconds=seconds)
    (folder / "tests" / f"test_{name}.py").write_text(text)


def run(gpu_tests, folder, *options, commit="abc"):
    state, out = folder / "state.json", folder / "out.json"
    arguments = ["--allow-cpu", "--commit", commit, "--state", str(state), "--out", str(out)]
    code = gpu_tests.main([*arguments, "--workers", "2", *options])
    return code, json.loads(out.read_text())


def counted(folder) -> list[str]:
    path = folder / "runs.txt"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_outcomes(gpu_tests, tmp_path, capsys):
    (tmp_path / "tests" / "test_outcomes.py").write_text(OUTCOMES)
    code, record = run(gpu_tests, tmp_path)
    assert code == 1 and record["complete"] and record["commit"] == "abc"
    assert (record["passed"], record["failed"], record["skipped"]) == (2, 3, 1)
    names = [name.partition("::")[2] for name in record["failures"]]
    assert names == ["test_fails", "test_error", "test_ends_the_process"]
    counts = record["files"]["tests/test_outcomes.py"]
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 3, 1)
    assert {"gpu", "driver", "python", "torch", "triton", "date"} <= record.keys()
    assert "the process ended with 3" in capsys.readouterr().out


def test_parts_run_every_test_once(gpu_tests, tmp_path):
    write_counted(tmp_path, "long", count=8, seconds=0.3)
    write_counted(tmp_path, "short", count=2)
    code, record = run(gpu_tests, tmp_path, "--minutes", "0")
    assert code == 2 and not record["complete"] and record["left"] == 10
    parts = 0
    while code == 2:
        code, record = run(gpu_tests, tmp_path, "--minutes", "0.02")
        moved = tmp_path / "carried.json"
        shutil.move(tmp_path / "state.json", moved)
        shutil.move(moved, tmp_path / "state.json")
        parts += 1
        assert parts < 20
    assert code == 0 and parts > 1 and record["complete"]
    assert (record["passed"], record["left"]) == (10, 0)
    expected = [f"long {n}" for n in range(8)] + [f"short {n}" for n in range(2)]
    assert counted(tmp_path) == sorted(expected)


def test_another_commit_starts_anew(gpu_tests, tmp_path):
    write_counted(tmp_path, "short", count=2)
    assert run(gpu_tests, tmp_path)[0] == 0
    assert run(gpu_tests, tmp_path)[0] == 0
    assert len(counted(tmp_path)) == 2
    assert run(gpu_tests, tmp_path, commit="def")[1]["commit"] == "def"
    assert len(counted(tmp_path)) == 4


def test_another_commit_keeps_what_did_not_fail(gpu_tests, tmp_path):
    write_counted(tmp_path, "short", count=2)
    path = tmp_path / "tests" / "test_mended.py"
    path.write_text("def test_mended(): assert False\ndef test_gone(): pass")
    assert run(gpu_tests, tmp_path)[0] == 1
    path.write_text("def test_mended(): pass\ndef test_new(): pass")
    code, record = run(gpu_tests, tmp_path, "--resume-any", commit="def")
    assert code == 0 and record["complete"] and record["passed"] == 4
    assert (record["commit"], record["earlier_commits"]) == ("def", ["abc"])
    assert len(counted(tmp_path)) == 2


def test_tests_that_cannot_be_collected(gpu_tests, tmp_path):
    (tmp_path / "tests" / "test_broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(SystemExit, match="could not be collected"):
        run(gpu_tests, tmp_path)


def test_a_machine_without_a_gpu_is_refused(gpu_tests, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tests, "describe_environment", lambda: {"gpu": None})
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_tests.main(["--commit", "abc", "--state", str(tmp_path / "state.json")])


def test_the_commit(gpu_tests, monkeypatch):
    monkeypatch.setenv("GPU_TESTS_COMMIT", "from the environment")
    assert gpu_tests.parse([]).commit == "from the environment"
    assert gpu_tests.parse(["--commit", "named"]).commit == "named"
    with pytest.raises(SystemExit, match="no git here"):  # the tree is none of git's
        gpu_tests.find_commit()


def test_slices(gpu_tests):
    tests = [*(f"a.py::t{n}" for n in range(3)), *(f"b.py::t{n}" for n in range(5))]
    assert gpu_tests.slices(tests, size=4) == [
        [f"b.py::t{n}" for n in range(4)], [f"a.py::t{n}" for n in range(3)], ["b.py::t4"],
    ]  # fmt: skip


def test_slices_of_long_tests(gpu_tests, tmp_path):
    tests = [*(f"a.py::t{n}" for n in range(3)), *(f"b.py::t{n}" for n in range(5))]
    files = {"a.py": {"seconds": 120.0, "passed": 2, "failed": 0, "skipped": 2}}
    (tmp_path / "out.json").write_text(json.dumps({"files": files}))
    seconds = gpu_tests.mean_seconds(tmp_path / "out.json")
    assert gpu_tests.mean_seconds(tmp_path / "none.json") == {}
    assert gpu_tests.slices(tests, seconds=seconds) == [
        ["a.py::t0", "a.py::t1"], [f"b.py::t{n}" for n in range(5)], ["a.py::t2"],
    ]  # fmt: skip


def test_kernels_count_for_the_test_that_compiled_them(gpu_tests):
    def report(when):
        return {"test": "a.py::t", "when": when, "outcome": "passed", "seconds": 2, "error": None}

    kernel = {"kernel": "_write_kernel", "seconds": 1.5}
    lines = [kernel, {"began": "a.py::t"}, kernel, report("setup"), kernel, report("call")]
    results, running = gpu_tests.read_results([*lines, report("teardown")])
    assert results["a.py::t"] == {
        "outcome": "passed", "seconds": 6, "kernels": 2, "compiler_seconds": 3.0,
    }  # fmt: skip
    assert running is None
    state = gpu_tests.State("abc", tests=["a.py::t", "a.py::old"], results=results)
    results["a.py::old"] = {"outcome": "passed", "seconds": 1.0}  # of a run that did not count
    counts = gpu_tests.record(state)["files"]["a.py"]
    assert (counts["kernels"], counts["compiler_seconds"], counts["seconds"]) == (2, 3.0, 7)
