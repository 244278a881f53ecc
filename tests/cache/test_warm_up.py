"""`warm_up` runs every kernel on padding, touches no request, and refuses a forward half done."""

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward, warm_up
from dsv4.testing import model_projections, model_weights, move_to, poison

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = CacheConfig.tiny(compress_ratios=(0, 4, 128), drafts_per_step=1)


def make_manager(**sizes):
    # The arrays of a plan are aligned alike for 5 requests and for 1: the same kernels.
    defaults = {"max_requests": 5, "num_blocks": 4, "max_forward_tokens": 64}
    sizes = {"device": DEVICE, "backend": "triton", **defaults, **sizes}
    manager = KVCacheManager(CONFIG, **sizes)
    poison(manager)
    return manager


def make_weights(config=CONFIG):
    return [move_to(DEVICE, layer) for layer in model_weights(config, seed=0)]


def write(manager, plan, *, layers=range(3)):
    inputs = model_projections(CONFIG, plan.num_tokens, seed=1)
    for layer_idx in layers:
        handle = manager.acquire(layer_idx, plan)
        handle.write(move_to(DEVICE, inputs[layer_idx]), make_weights()[layer_idx])


def stored(manager):
    names = ("blocks", "slots", "window_workspace", "block_table", "arrivals")
    return {name: manager.tensors()[name].clone() for name in names}


def assert_unchanged(manager, before):
    for name, tensor in before.items():
        assert torch.equal(manager.tensors()[name], tensor), f"{name} differs"
    manager.check_integrity()


def test_it_touches_no_request():
    manager = make_manager()
    slots = [manager.open_request() for _ in range(3)]
    write(manager, prepare_forward(manager, slots, [0, 0, 0], [5, 1, 20]))
    before, lengths = stored(manager), manager.lengths.copy()
    warm_up(manager, make_weights(), dtype=torch.float32)  # as all tests here write
    assert_unchanged(manager, before)
    assert np.array_equal(manager.lengths, lengths)
    write(manager, prepare_forward(manager, slots, [5, 1, 20], [6, 2, 21]))


def test_it_refuses_a_forward_that_is_half_written():
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [2])
    write(manager, plan, layers=[0])
    before = stored(manager)
    with pytest.raises(RuntimeError, match="Cannot warm up: the manager's last forward is not"):
        warm_up(manager, make_weights())
    assert_unchanged(manager, before)
    write(manager, plan, layers=[1, 2])
    assert plan.is_complete


def test_it_refuses_weights_of_other_layers():
    manager = make_manager()
    with pytest.raises(ValueError, match="Invalid weights: expected one per layer, 3, got 2"):
        warm_up(manager, make_weights()[:2])
    wrong = [make_weights()[0]] * 3
    with pytest.raises(ValueError, match="Invalid inputs of layer 1"):
        warm_up(manager, wrong)


def test_it_refuses_a_dtype_that_no_layer_takes():
    with pytest.raises(TypeError, match=r"expected float32 or bfloat16, got torch\.float16"):
        warm_up(make_manager(), make_weights(), dtype=torch.float16)


def test_the_reference_has_nothing_to_compile(monkeypatch):
    manager = make_manager(backend="reference")
    plan = prepare_forward(manager, [], [], [])
    monkeypatch.setattr(KVCacheManager, "acquire", None)
    warm_up(manager, make_weights())
    assert not plan.is_retired


def test_a_manager_too_small_for_chunks():
    manager = make_manager(max_requests=1, max_forward_tokens=2)
    before = stored(manager)
    warm_up(manager, make_weights(), dtype=torch.float32)
    assert_unchanged(manager, before)
