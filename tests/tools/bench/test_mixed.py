"""The bench of mixed steps on the CPU, where a graph runs its step again."""

from functools import partial

import pytest
import torch

from dsv4 import CacheConfig
from dsv4.cache.graphs import captured_forward
from dsv4.tools.bench import mixed
from tests.cache.test_captured_forward import EagerGraph

TINY = CacheConfig.tiny()


class NoPool:
    """Stands for memory of graphs."""

    def __init__(self, device):
        self.num_bytes = 7


@pytest.fixture
def small(monkeypatch):
    for name, value in {
        "DEVICE": "cpu", "NUM_DECODE": 2, "CHUNKS": ((9,), (30, 5)), "SIZES": (40, 12),
        "FIRST_LENGTH": 120, "GraphPool": NoPool, "is_same": partial(torch.allclose, atol=1e-4),
    }.items():  # fmt: skip
        monkeypatch.setattr(mixed, name, value)
    monkeypatch.setattr(captured_forward, "CudaGraph", EagerGraph)


def test_the_host_has_a_target(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(mixed, "time_on_gpu", lambda call: (call(), 3.0))
    monkeypatch.setattr(mixed, "NUM_STEPS", 1)
    case, verdicts = mixed.mixed_case(TINY, 400), []
    for target in (1e9, 0):
        monkeypatch.setattr(mixed, "TARGET_US", target)
        verdicts.append(mixed._measure(case, (9,))["verdict"])
    assert verdicts == ["met", "missed"]


def test_replays_are_checked(small, monkeypatch):
    mixed.check_replays(TINY)
    right = mixed.run_mixed

    def wrong(case, chunks, mode):
        results = right(case, chunks, mode)
        if mode == "captured":
            results[-1].output[0] *= -1
        return results

    monkeypatch.setattr(mixed, "run_mixed", wrong)
    with pytest.raises(RuntimeError, match="output differs from an eager step's; none is timed"):
        mixed.check_replays(TINY)
    monkeypatch.setattr(mixed, "run_mixed", right)
    case = mixed.mixed_case(TINY, 300)
    results = mixed.run_mixed(case, (30, 5), "captured")
    assert [result.output.shape[0] for result in results] == [40] * 4
    assert case.manager.lengths[case.slots].tolist() == [121, 122, 152, 128]
    assert case.graphs[12].num_tokens == 12 and case.pool.num_bytes == 7
    assert not any(result.output[:37].isnan().any() for result in results)
