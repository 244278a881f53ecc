"""The commands: output, JSON, exit codes."""

import json

import pytest
import torch

from dsv4 import demo
from dsv4.cli import main


def test_demo_prints_tables(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "CSA" in out and "hca_entries" in out and "equal" in out


def test_demo_json_is_one_object(capsys):
    assert main(["demo", "--json", "--kv", "bf16", "--index", "fp8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["kv_format"] == "bf16"
    assert {layer["type"] for layer in result["layers"]} == {"SWA", "CSA", "HCA"}
    assert all(layer["fp32_vs_transformers"] <= 5e-6 for layer in result["layers"])
    assert all(size["allocated"] >= size["payload"] for size in result["memory"].values())


def test_demo_fails_on_a_mismatch(capsys, monkeypatch):
    from dsv4.kernels.reference import attention

    monkeypatch.setattr(attention, "unrotate", lambda output, positions, rope: output)
    assert main(["demo"]) == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_a_failure_is_one_sentence_on_stderr(capsys, monkeypatch):
    def fail(**_):
        raise RuntimeError("the pool is on fire")

    monkeypatch.setattr(demo, "run_demo", fail)
    assert main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "dsv4: the pool is on fire\n" and captured.out == ""
    with pytest.raises(RuntimeError, match="on fire"):
        main(["--debug", "demo"])


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["demo", "--kv", "fp7"], ["bench"], ["bench", "plan", "--steps", "0"]],
    ids=" ".join,
)
def test_bad_usage_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: dsv4" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench", ["write", "gather", "index", "attend", "step", "tune"])
def test_benches_without_a_gpu(capsys, bench):
    assert main(["bench", bench]) == 1
    assert f"dsv4 bench {bench} needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_step(capsys):
    assert main(["bench", "step", "--requests", "8", "--steps", "5"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert set(result["median_us"]) == {"prepare_forward", "replay", "both"}
    assert result["median_us"]["both"] > result["median_us"]["replay"] > 0
    assert "Host time of a captured step" in "".join(lines)


def test_bench_plan(capsys):
    assert main(["bench", "plan", "--requests", "8", "--steps", "5"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert set(result["median_us"]) == {"43 layers", "4 layers"}
    assert "90th percentile" in "".join(lines)
    assert {"commit", "torch", "cpu"} <= set(result["environment"])
