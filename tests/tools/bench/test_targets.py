"""Targets of the benches: verdicts, and that what has a target is timed."""

import itertools

import pytest

from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench import attend, decode, index, step, timing, write
from dsv4.tools.bench.tables import show
from dsv4.tools.planner.command import PRESETS
from tests.tools.bench.test_tables import drawn


def test_verdicts():
    assert timing.judge(2.5, 2.5) == {"target": 2.5, "verdict": "met"}
    assert timing.judge(2.51, 2.5, "w_") == {"w_target": 2.5, "w_verdict": "missed"}
    assert timing.judge(800.0, 800.0, is_least=True)["verdict"] == "met"
    assert timing.judge(799.0, 800.0, is_least=True)["verdict"] == "missed"
    assert timing.judge(1.0, None) == {}


@pytest.mark.parametrize("shape", attend.SHAPES, ids=lambda shape: shape.name)
def test_shapes_of_attention(shape):
    assert {*shape.targets_us, *shape.of_flash_targets} <= {*shape.batches}
    first, *_ = attend.SHAPES
    assert first.name == attend.FLASH
    assert not shape.of_flash_targets or {*shape.batches} <= {*first.batches}
    if shape.ratio:
        assert shape.num_entries <= shape.length // shape.ratio
    if shape.ratio == 128:
        assert shape.num_entries == shape.length // shape.ratio


def test_steps_with_targets_are_timed():
    scored = itertools.product(("query", "score", "all"), index.SCORED)
    timed = [*scored, *itertools.product(["top-k"], index.CHOSEN)]
    assert {*index.STEP_TARGETS_US} <= {(name, *sizes) for name, sizes in timed}
    sizes = itertools.product(PRESETS, decode.LENGTHS, decode.BATCHES)
    assert {*step.DECODE_TARGETS_US} <= {*sizes}
    for kind, num_closing, batch in write.TARGETS_US:
        assert batch in write.BATCHES and num_closing in (0, 1, batch)
        is_one = num_closing == 1 < batch
        assert not is_one or (kind is AttentionType.HCA and batch in write.ONE_CLOSING)


ATTEND = {"layer": "Flash CSA, 4 tokens each", "batch": 256, "warm_us": 222.22,
          "rotating_us": 222.22, "tflops": 555.0, "floor_us": 99.99, "target": 190.0,
          "verdict": "missed", "invariant_us": 423.66, "invariant_ratio": 1.91,
          "invariant_target": 1.25, "invariant_verdict": "missed", "of_flash": 2.62,
          "of_flash_target": 0.95, "of_flash_verdict": "missed"}  # fmt: skip
INDEX = {"step": "score", "format": "mxfp4", "entries": 262144, "batch": 64, "warm_us": 100.22,
         "rotating_us": 100.22, "floor_us": 10.22, "target": 3.9, "verdict": "missed"}  # fmt: skip
CHUNK = {"format": "mxfp4", "tokens": 8192, "entries": 262144, "score_us": 34567.0,
         "score_tflops": 1057.0, "select_us": 37654.0, "select_tflops": 952.0, "target": 820.0,
         "verdict": "missed", "ascending_us": 37777.0, "ascending_ratio": 1.02,
         "ascending_target": 2.5, "ascending_verdict": "missed"}  # fmt: skip
DECODE = {"tokens": 1048576, "batch": 32, "has_own_blocks": False, "total_us": 9251.0,
          "write_us": 109.0, "index_us": 6251.0, "attention_us": 2942.0, "target": 8000.0,
          "verdict": "missed"}  # fmt: skip
STEP = {"decode": [DECODE], "num_layers": 43, "num_requests": 256, "target_us": 300.0,
        "mixed": [], "pool_bytes": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("bench", "result", "verdicts"),
    [
        ("attend", {"rows": [ATTEND]}, ["190, missed", "1.25, missed", "0.95, missed"]),
        ("index", {"rows": [INDEX], "prefill": [CHUNK]}, ["3.9,", "820,", "2.5, missed"]),
        ("step", STEP, ["8000, missed"]),
    ],
)
def test_tables_with_targets_fit_80_columns(bench, result, verdicts):
    text = drawn(*show(bench, result).tables, width=80)
    assert "…" not in text and all(verdict in text for verdict in verdicts)
