"""`dsv4 bench write`, `gather` and `step` on the CPU: small sizes, and a stand-in for the clock."""

import functools
import json

import pytest
import torch

from dsv4.kernels.backends import load_backend
from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench import gather, step, write
from dsv4.tools.cli import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs here")


def run(capsys, *arguments):
    assert main(["bench", *arguments]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    return "\n".join(table), json.loads(last)


def test_write(clock, monkeypatch, capsys):
    checked, written = [], []
    monkeypatch.setattr(write, "check_bytes", lambda kind: checked.append(kind.name))
    monkeypatch.setattr(write, "write_case", functools.partial(write.write_case, device="cpu"))
    monkeypatch.setattr(write, "write_layer", lambda layer, *_: written.append(layer.layer))
    monkeypatch.setattr(write, "NUM_LAYERS", 3)
    monkeypatch.setattr(write, "NUM_PREFILL_LAYERS", 2)
    monkeypatch.setattr(write, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(write, "bench_write", functools.partial(write.bench_write, batches=(1,)))
    table, result = run(capsys, "write")
    kinds = [(row["type"], row["closing"], row["batch"]) for row in result["rows"]]
    assert kinds == [("SWA", 0, 1), ("CSA", 0, 1), ("CSA", 1, 1), ("HCA", 0, 1), ("HCA", 1, 1)]
    assert {(row["warm_us"], row["rotating_us"]) for row in result["rows"]} == {(4.0, 8 / 3)}
    steps = [layer.layer_idx for layer in written[: 5 * len(kinds)]]
    assert steps == [0, 0, 0, 1, 2] * len(kinds)
    assert [layer.attention_type.name for layer in written[::5]][:5] == [kind for kind, *_ in kinds]
    assert checked == [row["type"] for row in result["prefill"]] == ["SWA", "CSA", "HCA"]
    assert all(row["us"] == 8 / 2 and row["tokens"] == 8 for row in result["prefill"])
    assert "CSA closing" in table and "writes of a prefill" in table
    assert result["rows"][0]["verdict"] == "missed" and "verdict" not in result["rows"][1]
    assert [row["target"] for row in result["prefill"]] == [8, 28, 18]


def test_one_window_closes(clock, monkeypatch):
    closed = []
    monkeypatch.setattr(write, "check_bytes", lambda kind: None)
    monkeypatch.setattr(write, "write_case", functools.partial(write.write_case, device="cpu"))
    monkeypatch.setattr(write, "write_layer", lambda layer, *_: closed.append(
        int(((layer.positions + 1) % 128 == 0).sum())))  # fmt: skip
    monkeypatch.setattr(write, "NUM_LAYERS", 1)
    monkeypatch.setattr(write, "ONE_CLOSING", (3,))
    hca = AttentionType.HCA
    monkeypatch.setattr(write, "TARGETS_US", {(hca, 3, 3): 4.0, (hca, 1, 3): 3.9})
    monkeypatch.setattr(write, "_prefill_row", lambda kind: {})
    rows = write.bench_write(batches=(3,), compare=False)["rows"]
    assert [(row["layer"], row.get("verdict")) for row in rows[-3:]] == [
        ("HCA", None), ("HCA closing", "met"), ("HCA, 1 closing", "missed"),
    ]  # fmt: skip
    assert closed[-12:] == [0] * 4 + [3] * 4 + [1] * 4
    none_us, every_us, one_us = (row["floor_us"] for row in rows[-3:])
    assert one_us - none_us == pytest.approx((every_us - none_us) / 3)


@pytest.fixture
def small_gather(clock, monkeypatch):
    sizes = {
        "DEVICE": "cpu", "NUM_LAYERS": 2, "NUM_REQUESTS": 2, "REQUEST_TOKENS": 64,
        "NUM_POOL_ROWS": 32, "LISTED": ((2, 3),), "WINDOW_BATCH": 2, "WINDOW_TOKENS": 5,
    }  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(gather, name, value)


def test_gather(small_gather, capsys):
    table, result = run(capsys, "gather")
    assert [row["num_rows"] for row in result["rows"]] == [6, 32, 256]
    assert [row["bytes"] for row in result["rows"]] == [6 * 1616, 32 * 1608, 256 * 1608]
    for row in result["rows"]:
        assert row["warm_us"] == row["rotating_us"] == 4.0
        assert row["tb_per_s"] == row["bytes"] / 4.0 / 1e6
    assert "windows of 2 requests" in table


def test_a_gather_that_is_wrong_is_not_timed(small_gather, monkeypatch, capsys):
    right = load_backend("triton").gather_swa_kv

    def wrong(memory, tokens):
        gathered = right(memory, tokens)
        gathered.values[-1, -1, -1] *= -1
        return gathered

    monkeypatch.setattr(load_backend("triton"), "gather_swa_kv", wrong)
    assert main(["bench", "gather"]) == 1
    assert "windows of 2 requests: the values differ from the reference's" in (
        capsys.readouterr().err
    )


class EagerForward:
    """A `CapturedForward` that completes the plan and runs nothing."""

    def __init__(self, manager, step, *, batch):
        assert batch == manager.capacity.max_requests

    def replay(self, plan):
        plan.complete()


def test_step(clock, monkeypatch, capsys):
    monkeypatch.setattr(step, "DEVICE", "cpu")
    monkeypatch.setattr(step, "CapturedForward", EagerForward)
    monkeypatch.setattr(step, "check_replays", lambda config: None)
    times = {f"{part}_us": 10.0 for part in ("total", "write", "index", "attention")}
    decode = [{"tokens": 32768, "batch": batch, "has_own_blocks": False, **times}
              for batch in (32, 8)]  # fmt: skip
    monkeypatch.setattr(step, "bench_decode", lambda config: decode)
    mixed = {"decode": 31, "chunks": "240 + 240", "eager_us": 4321.0, "captured_us": 234.0}
    mixed |= {"eager_step_us": 4400.0, "captured_step_us": 1500.0, "verdict": "met"}
    both = {"mixed": [mixed], "mixed_target_us": 500, "pool_bytes": 1 << 20}
    monkeypatch.setattr(step, "bench_mixed", lambda: both)
    table, result = run(capsys, "step", "--requests", "3", "--steps", "4")
    assert (result["num_requests"], result["num_steps"], result["num_layers"]) == (3, 4, 43)
    assert set(result["median_us"]) == {"prepare_forward", "replay", "both"}
    assert result["median_us"]["both"] > result["median_us"]["replay"] > 0
    assert result["decode"] == [decode[0] | {"target": 1350, "verdict": "met"}, decode[1]]
    assert "32 *" in table and "* on shared blocks" in table
    assert "240 + 240" in table and "4,321" in table and "1,048,576 bytes" in table
