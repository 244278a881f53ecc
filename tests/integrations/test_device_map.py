"""Models on several devices: the cache of a layer lies where the layer runs, ids are the same."""

import importlib

import pytest
import torch
from torch.utils._pytree import tree_map
from transformers import DeepseekV4ForCausalLM

from dsv4.integrations.transformers import attach, detach
from dsv4.integrations.transformers.packed import PackedModel
from tests.integrations.generation import GREEDY, alone, padded, poisoned, prompts, small_model

RATIOS = (4, 128, 0, 4)
OPTIONS = {**GREEDY, "max_new_tokens": 20}


def place(model, devices):
    """Move each layer to its device; the inputs of every module follow it."""

    def follow(module, args, kwargs):
        tensors = [*module.parameters(), *module.buffers()]
        device = tensors[0].device if tensors else torch.device(devices[0])
        move = lambda x: x.to(device) if isinstance(x, torch.Tensor) else x  # noqa: E731
        return tree_map(move, (args, kwargs))

    model.to(devices[0])
    for layer, device in zip(model.model.layers, devices, strict=True):
        layer.to(device)
    for module in (*model.model.children(), *model.model.layers, model.lm_head):
        if not isinstance(module, torch.nn.ModuleList):
            module.register_forward_pre_hook(follow, with_kwargs=True)
    return model


def ids_of(model, cache, device="cpu"):
    inputs = {name: each.to(device) for name, each in padded(prompts(1, 140, 7, 33)).items()}
    ids = model.generate(**inputs, **OPTIONS, past_key_values=cache).tolist()
    cache.manager.check_integrity()
    return ids


def ids_of_one(device="cpu"):
    model = small_model(3, *RATIOS).to(device)
    with poisoned(model, max_tokens=256) as cache:
        return ids_of(model, cache, device)


def take_for_several(monkeypatch):
    """Let attach take the CPU for two devices."""
    attaching = importlib.import_module("dsv4.integrations.transformers.attach")
    devices = [torch.device(name) for name in ("cpu", "cpu", "cpu:0", "cpu:0")]
    monkeypatch.setattr(attaching, "layer_devices", lambda model: devices)


def test_ids_are_those_of_one_device(monkeypatch):
    expected = ids_of_one()
    take_for_several(monkeypatch)
    model = small_model(3, *RATIOS)
    with poisoned(model, max_tokens=256) as cache:
        assert len(cache.manager.devices) == 2
        assert ids_of(model, cache) == expected


def test_graphs_on_several_devices_are_refused(monkeypatch):
    take_for_several(monkeypatch)
    model = small_model(3, *RATIOS)
    model.set_experts_implementation("batched_mm")
    with poisoned(model) as cache, pytest.raises(ValueError, match="No CUDA graphs on several"):
        PackedModel(model, cache, cuda_graphs=True)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_model_that_accelerate_placed(is_offloaded):
    accelerate = pytest.importorskip("accelerate")
    placed = small_model(3, *RATIOS)
    (text,) = prompts(2, 40)
    plain = placed.generate(**alone(text), **OPTIONS).tolist()
    if is_offloaded:
        accelerate.cpu_offload(placed, execution_device=torch.device("cpu"))
        assert placed.model.layers[0].self_attn.kv_norm.weight.is_meta
    else:
        accelerate.dispatch_model(placed, {"": "cpu"}, force_hooks=True)
    with poisoned(placed, max_tokens=256) as cache:
        assert ids_of(placed, cache) == ids_of_one()
    detach(placed)
    assert placed.generate(**alone(text), **OPTIONS).tolist() == plain
    with pytest.raises(ValueError, match="expected one that attach was called with"):
        detach(placed)


NAMES = ("model.embed_tokens", "model.norm", "model.rotary_emb", "model.hc_head", "lm_head")
ON_DISK = {f"model.layers.{idx}": "cpu" if idx < 2 else "disk" for idx in range(4)}


@pytest.mark.parametrize(
    "device_map",
    ["cpu", "auto", {"": "cpu"}, {**dict.fromkeys(NAMES, "cpu"), **ON_DISK}],
    ids=["cpu", "auto", "dict", "disk"],
)
def test_a_model_that_from_pretrained_placed(device_map, tmp_path):
    pytest.importorskip("accelerate")
    small_model(3, *RATIOS).save_pretrained(tmp_path / "model")
    model = DeepseekV4ForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "weights"
    ).eval()
    if "disk" in str(device_map):
        assert model.model.layers[3].self_attn.kv_norm.weight.is_meta
    device = model.model.embed_tokens.weight.device
    with poisoned(model, max_tokens=256) as cache:
        assert ids_of(model, cache, device) == ids_of_one(device)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_layers_on_gpu_and_cpu(first):
    second = "cpu" if first == "cuda" else "cuda"
    devices = [first, first, second, second]
    model = place(small_model(3, *RATIOS), devices)
    with poisoned(model, max_tokens=256) as cache:
        for parts, device in zip(cache.manager._layers, devices, strict=True):
            assert parts.memory.blocks.device.type == parts.memory.slots.device.type == device
        assert ids_of(model, cache, first) == ids_of_one("cuda")
    with pytest.raises(ValueError, match=r"expected (False|cuda)"):
        attach(model, max_requests=1, max_tokens=64, cuda_graphs=True)


@pytest.mark.gpu
@pytest.mark.parametrize("main", ["cpu", None])
def test_accelerate_on_gpu_and_cpu(main):
    """Layers on the CPU run there, or are brought to the GPU for their forward."""
    accelerate = pytest.importorskip("accelerate")
    names = [name for name, _ in small_model(3, *RATIOS).model.named_children()]
    places = {f"model.{name}": 0 for name in names if name != "layers"} | {"lm_head": 0}
    places |= {f"model.layers.{idx}": 0 if idx < 2 else "cpu" for idx in range(4)}
    model = accelerate.dispatch_model(small_model(3, *RATIOS), places, main_device=main)
    with poisoned(model, max_tokens=256) as cache:
        found = [parts.memory.blocks.device.type for parts in cache.manager._layers]
        assert found == ["cuda", "cuda", *([main or "cuda"] * 2)]
        assert ids_of(model, cache, "cuda") == ids_of_one("cuda")
