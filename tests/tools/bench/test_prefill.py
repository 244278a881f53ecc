"""`dsv4 bench prefill` on the CPU: a tiny model, and stand-ins for the clock and for peers."""

import json

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig
from dsv4.kernels import ops
from dsv4.tools.bench import prefill, timing
from dsv4.tools.bench.prefill import sample_starts, sum_prompt
from dsv4.tools.cli import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs here")

TINY = CacheConfig.tiny(compress_ratios=(0, 0, 4, 128, 4))
CHUNK = 64


@pytest.fixture
def small(clock, monkeypatch):
    monkeypatch.setattr(prefill, "DEVICE", "cpu")
    monkeypatch.setattr(prefill, "CHUNK", CHUNK)
    monkeypatch.setattr(prefill, "CONTEXTS", (128, 256))
    monkeypatch.setattr(prefill, "TARGET_S", {128: 2.5})
    monkeypatch.setattr(prefill, "check_bytes", lambda kind: None)  # it needs a GPU
    monkeypatch.setattr(prefill.CacheConfig, "v4_flash", lambda: TINY)
    load = ops.load_backend  # only the reference, since the interpreter is slow
    monkeypatch.setattr(ops, "load_backend", lambda name: load("reference"))
    monkeypatch.setattr(timing, "time_on_gpu", lambda run: (run(), 3e6))


def test_prompts_are_sums_over_chunks_and_layers(small, capsys, tmp_path):
    plot = tmp_path / "prefill.svg"
    assert main(["bench", "prefill", "--whole", "128", "--plot", str(plot)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["layers"] == {"SWA": 2, "CSA": 2, "HCA": 1}
    starts = [row["start"] for row in result["rows"] if row["layer"] == "CSA"]
    assert starts == [0, 64, 128, 192]
    for row in result["rows"]:
        parts = {key for key in row if key.endswith("_us")}
        index = {"query_us", "score_us", "topk_us", "select_us"} if row["layer"] == "CSA" else set()
        assert parts == {"write_us", "attend_us", "layer_us"} | index
        assert row["layer_us"] == 8.0
    short, long = result["prompts"]
    assert (short["context"], short["whole_s"], short["target_s"]) == (128, 3.0, 2.5)
    assert (long["context"], long["whole_s"], long["target_s"]) == (256, None, None)
    assert short["layer_s"] == pytest.approx(2 * 5 * 8e-6)
    assert long["CSA_score_s"] == pytest.approx(4 * 2 * 8e-6)
    assert any("sum of chunks" in line for line in table)
    assert [row["model"] for row in result["memory"]] == ["V4-Flash", "V4-Pro"]
    assert plot.stat().st_size > 0


def test_chunks_are_sampled_over_each_context():
    assert sample_starts([1 << 17, 1 << 20], 3) == [0, 65536, 122880, 524288, 1040384]


def test_times_between_chunks_are_interpolated(small):
    rows = [
        {"layer": "CSA", "start": start, "layer_us": us, "score_us": us / 2}
        for start, us in ((0, 10.0), (192, 40.0))
    ]
    prompt = sum_prompt(rows, {"CSA": 3}, 256, None)
    assert prompt["layer_s"] == pytest.approx(3e-6 * np.sum([10, 20, 30, 40]))
    assert prompt["CSA_score_s"] == pytest.approx(prompt["layer_s"] / 2)


def test_wrong_attention_is_not_timed(small, monkeypatch, capsys):
    right = prefill.attend

    def wrong(case, layer_idx):
        result = right(case, layer_idx)
        return result._replace(output=result.output * 1.1) if case.name == "HCA" else result

    monkeypatch.setattr(prefill, "attend", wrong)
    assert main(["bench", "prefill"]) == 1
    assert "HCA: the output of a chunk differs from the reference's" in capsys.readouterr().err


def test_a_context_without_a_chunk(small, capsys):
    assert main(["bench", "prefill", "--context", "63"]) == 1
    assert "Invalid --context: expected at least 64, got 63" in capsys.readouterr().err
