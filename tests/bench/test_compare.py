"""`--compare`: peers beside ours, with stand-ins for them and for the clock."""

import functools
import json

import pytest
import torch

from dsv4 import CacheConfig
from dsv4.bench import attend, index
from dsv4.bench.attend import AttendShape
from dsv4.cli import main
from tests.kernels.fake_peers import FakeDeepGEMM, FakeFlashMLA

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins run on the CPU")


def replay_once(step, **_):
    step()
    return 8.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setenv("COLUMNS", "200")
    for module in (attend, index):
        monkeypatch.setattr(module, "replay_time", replay_once)
        monkeypatch.setattr(module, "NUM_LAYERS", 2)
        monkeypatch.setattr(module, "REPEATS", 2)


@pytest.fixture
def small_attend(clock, monkeypatch):
    shapes = (
        AttendShape("CSA", CacheConfig.v4_flash, 4, 8, 300, 64, (1, 2)),
        AttendShape("HCA", CacheConfig.v4_flash, 128, 64, 300, 2, (1,)),
        AttendShape("SWA", CacheConfig.v4_flash, 0, 64, 200, 0, (1,)),
    )
    monkeypatch.setattr(attend, "SHAPES", shapes)
    monkeypatch.setattr(attend, "DEVICE", "cpu")
    ours = attend._attend
    monkeypatch.setattr(  # only the reference, since the interpreter is slow
        attend, "_attend",
        lambda case, layer_idx, backend="", **options: ours(
            case, layer_idx, backend="reference", **options
        ),
    )  # fmt: skip


def test_attend(small_attend, monkeypatch, capsys):
    fake = FakeFlashMLA()
    monkeypatch.setattr(attend, "load_flash_mla", lambda: fake)
    assert main(["bench", "attend", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("FlashMLA" in line and "ours / theirs" in line for line in table)
    result = json.loads(last)
    assert result["peers"] == {"FlashMLA": "compared"}
    for row in result["rows"]:
        assert row["flashmla_us"] == 4.0 and row["ratio"] == 1.0
    assert [row["batch"] for row in result["rows"]] == [1, 2, 1, 1]
    assert {tuple(call.query.shape) for call in fake.calls} == {(1, 1, 64, 512), (2, 1, 64, 512)}


def test_attend_that_is_wrong_is_not_timed(small_attend, monkeypatch, capsys):
    fake = FakeFlashMLA()

    def wrong(inputs, schedule):
        return fake(inputs._replace(window_rows=inputs.window_rows.flip(-1) * 0 - 1), schedule)

    monkeypatch.setattr(attend, "load_flash_mla", lambda: wrong)
    assert main(["bench", "attend", "--compare"]) == 1
    assert "CSA: FlashMLA's output differs from the reference's" in capsys.readouterr().err


def refuse():
    raise ImportError("nothing here: pip install 'dsv4[peer]'")


def test_attend_without_the_peer(small_attend, monkeypatch, capsys):
    monkeypatch.setattr(attend, "load_flash_mla", refuse)
    assert main(["bench", "attend", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert "FlashMLA is not compared: nothing here: pip install 'dsv4[peer]'" in table
    assert "flashmla_us" not in json.loads(last)["rows"][0]


@pytest.fixture
def small_index(clock, monkeypatch):
    monkeypatch.setattr(index, "replay_time", lambda step, **_: 8.0)  # the interpreter is slow
    monkeypatch.setattr(index, "SCORED", ((600, 2),))
    monkeypatch.setattr(index, "CHOSEN", ())
    monkeypatch.setattr(index, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(index, "CHUNK_ENTRIES", 1100)
    monkeypatch.setattr(index, "index_case", functools.partial(index.index_case, device="cpu"))


def test_index(small_index, monkeypatch, capsys):
    fake = FakeDeepGEMM()
    monkeypatch.setattr(index, "load_deep_gemm", fake.logits)
    assert main(["bench", "index", "--compare"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("DeepGEMM FP8" in line for line in table)
    rows = json.loads(last)["rows"]
    assert [(row["step"], row["format"], "ratio" in row) for row in rows] == [
        ("query", "fp8", False), ("score", "fp8", True),
        ("query", "mxfp4", False), ("score", "mxfp4", True),
    ]  # fmt: skip
    assert set(fake.sizes) == {2}


def test_index_that_is_wrong_is_not_timed(small_index, monkeypatch, capsys):
    right = FakeDeepGEMM().logits()
    wrong = right._replace(score=lambda *arguments: right.score(*arguments) * 1.1)
    monkeypatch.setattr(index, "load_deep_gemm", lambda: wrong)
    assert main(["bench", "index", "--compare"]) == 1
    assert "The scores differ from the reference's" in capsys.readouterr().err


def test_a_folder_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "attend", "--compare", "--peers", "no/such/folder"])
    assert stopped.value.code == 2
    assert "expected a folder, got no/such/folder" in capsys.readouterr().err
