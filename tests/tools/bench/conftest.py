import pytest
import torch

from dsv4.tools.bench import timing


def replay_once(step, **_):
    step()
    return 8.0


@pytest.fixture
def clock(monkeypatch):
    """Replace the GPU's clock: every step runs once and takes 8 us."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(timing, "replay_time", replay_once)
    monkeypatch.setattr(timing, "REPEATS", 2)
