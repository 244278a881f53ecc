"""`dsv4 bench prefill` on the CPU: a tiny model, and stand-ins for the clock and for peers."""

import json

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig
from dsv4.kernels import ops
from dsv4.tools.bench import prefill, timing
from dsv4.tools.bench.external import deepgemm
from dsv4.tools.bench.prefill import sample_starts, sum_prompt
from dsv4.tools.cli import main
from tests.kernels.fake_external import FakePrefill, FakeSGLang, fake_mqa_logits
from tests.tools.bench.test_compare import drop_one, refuse

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs here")

TINY = CacheConfig.tiny(compress_ratios=(0, 0, 4, 128, 4))
WIDE = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), index_topk=8)
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


@pytest.fixture
def peers(small, monkeypatch):
    """Stand-ins beside a model of V4-Flash's widths, whose index chooses 8 entries."""
    monkeypatch.setattr(prefill.CacheConfig, "v4_flash", lambda: WIDE)
    parts = dict.fromkeys(("query", "score", "topk", "select"), lambda: None)
    monkeypatch.setattr(prefill, "chunk_parts", lambda *_, **__: parts)  # the interpreter is slow
    monkeypatch.setattr(prefill, "CHOSEN_AT_ONCE", 16)
    monkeypatch.setattr(deepgemm, "QUERIES_AT_ONCE", 24)
    sglang, flashmla = FakeSGLang(), FakePrefill()
    monkeypatch.setattr(prefill, "load_mqa_logits", lambda: fake_mqa_logits)
    monkeypatch.setattr(prefill, "load_sglang", sglang.kernels)
    monkeypatch.setattr(prefill, "load_flash_mla_prefill", lambda: flashmla)
    return sglang, flashmla


COMPARE = ["bench", "prefill", "--compare", "--context", "128", "--whole", "1"]


def test_peers(peers, capsys):
    sglang, flashmla = peers
    assert main(COMPARE) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert set(result["peers"].values()) == {"compared"}
    times = {
        row["layer"]: {key: row[key] for key in ("deepgemm_us", "sglang_us", "flashmla_us")
                       if key in row}
        for row in result["rows"] if row["start"] == 64
    }  # fmt: skip
    csa = {"deepgemm_us": 8.0, "sglang_us": 8.0 * CHUNK / 16, "flashmla_us": 8.0}
    assert times == {"SWA": {}, "CSA": csa, "HCA": {"flashmla_us": 8.0}}
    assert sglang.calls == ["choose_entries"] * 4  # a check and a run of each chunk
    assert len(flashmla.calls) == 2 * 2 * 2
    for kernel in ("scores, DeepGEMM", "top-k, SGLang", "attention, FlashMLA"):
        assert any(kernel in line for line in table)


def shift_rows(flashmla):
    return lambda inputs: flashmla(
        inputs._replace(rows=inputs.rows.where(inputs.rows < 0, inputs.rows + 1))
    )


@pytest.mark.parametrize(
    ("name", "spoil", "refusal"),
    [
        ("load_mqa_logits", lambda run: lambda *given: run(*given) * 1.1, "DeepGEMM's scores"),
        ("load_sglang", drop_one, "SGLang's top-k"),
        ("load_flash_mla_prefill", shift_rows, "CSA: FlashMLA's output of a chunk"),
    ],
)
def test_wrong_peers_are_not_timed(name, spoil, refusal, peers, monkeypatch, capsys):
    right = getattr(prefill, name)()
    for other in ("load_mqa_logits", "load_sglang", "load_flash_mla_prefill"):
        monkeypatch.setattr(prefill, other, refuse)
    monkeypatch.setattr(prefill, name, lambda: spoil(right))
    assert main(COMPARE) == 1
    assert f"{refusal} differ" in capsys.readouterr().err


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


@pytest.mark.parametrize("context", ["63", "65"])
def test_a_context_that_is_no_whole_chunks(context, small, capsys):
    assert main(["bench", "prefill", "--context", "128", "--context", context]) == 1
    error = f"Invalid --context: expected a multiple of 64, got {context}"
    assert error in capsys.readouterr().err
