"""`dsv4 bench swap` on the CPU: its numbers, and the refusal of changed bytes."""

import functools
import json

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.host_memory import HostMemory
from dsv4.tools.bench import swap
from dsv4.tools.cli import main

RUN = ["bench", "swap", "--tokens", "1500", "--rounds", "2"]  # 6 blocks


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(swap, "bench_swap", functools.partial(swap.bench_swap, device="cpu"))


@pytest.fixture
def orders(monkeypatch):
    """Record the device's blocks of each swap-out."""
    seen = []
    copy = HostMemory.copy_out

    def copy_out(self, kind, sources, targets):
        if kind == "blocks":
            seen.append(sources.tolist())
        copy(self, kind, sources, targets)

    monkeypatch.setattr(HostMemory, "copy_out", copy_out)
    return seen


def test_the_table(orders, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(RUN) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    title = " ".join(" ".join(table[:2]).split())
    assert title.startswith("A request of 1,500 tokens") and title.endswith("(target 40 GB/s)")
    assert [(row["way"], row["blocks"]) for row in result["rows"]] == [
        ("swap_out", "in a row"), ("swap_in", "in a row"),
        ("swap_out", "scattered"), ("swap_in", "scattered"),
    ]  # fmt: skip
    manager = swap._manager(1500, "cpu")
    num_bytes = 6 * manager.paged.storage.shape[1] + manager.state.storage.shape[1]
    for row in result["rows"]:
        assert row["bytes"] == num_bytes
        assert row["best_gb_per_s"] == pytest.approx(num_bytes / row["best_ms"] / 1e6)
        assert 0 < row["median_gb_per_s"] <= row["best_gb_per_s"]
        assert row["median_ms"] >= row["best_ms"]
    assert orders[:3] == [[0, 1, 2, 3, 4, 5]] * 3
    assert orders[3] == orders[4] == orders[5] != orders[0] == sorted(orders[3])


@pytest.mark.parametrize("part", ["block", "slot"])
def test_a_request_that_comes_back_changed_is_not_reported(part, monkeypatch, capsys):
    swap_in = KVCacheManager.swap_in

    def spoil(self, swapped):
        slot = swap_in(self, swapped)
        rows = self.paged.storage if part == "block" else self.state.storage
        rows[-1, -1] ^= 1
        return slot

    monkeypatch.setattr(KVCacheManager, "swap_in", spoil)
    assert main(RUN) == 1
    captured = capsys.readouterr()
    assert "The request came back with other bytes; nothing is reported" in captured.err
    assert captured.out == ""


def test_a_request_without_blocks(capsys):
    assert main(["bench", "swap", "--tokens", "3", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["bytes"] for row in rows} == {swap._manager(3, "cpu").state.storage.shape[1]}
