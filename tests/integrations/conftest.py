"""A small model and a cache of it, whose unused memory is NaN; devices with graphs."""

import importlib

import pytest
import torch

from dsv4.cache.graphs import captured_forward, captured_layers
from dsv4.integrations.transformers import captured_attention
from tests.integrations.generation import RepeatedRun, poisoned, small_model


@pytest.fixture(scope="module")
def model():
    return small_model(3, 4, 128, 0)


@pytest.fixture
def cache(model):
    with poisoned(model) as cache:
        yield cache
        cache.manager.check_integrity()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device with graphs; on the CPU they are stood in for."""
    monkeypatch.setattr(captured_attention, "SHORTEST", 32)
    if request.param == "cpu":
        attaching = importlib.import_module("dsv4.integrations.transformers.attach")
        monkeypatch.setattr(attaching, "check_graph_device", lambda device: None)
        monkeypatch.setattr(captured_layers, "GraphPool", lambda device: None)
        for module in (captured_layers, captured_forward):
            monkeypatch.setattr(module, "CudaGraph", RepeatedRun)
    return torch.device(request.param)
