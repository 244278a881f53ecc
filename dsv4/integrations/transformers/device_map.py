"""Models that `device_map` has placed: the device of each layer, and weights that are offloaded.

accelerate replaces a module's `forward` by one that calls its hook, then `_old_forward`. The hook
of an offloaded module has its weights, which are on the meta device outside of its forward.
"""

from typing import Any

import torch

from dsv4.kernels.contracts import LayerWeights
from dsv4.model.attention import learned_weights


def layer_devices(model: Any) -> list[torch.device]:
    """Return the device that each layer of a base model runs on."""
    devices = [_device_of(layer.self_attn) for layer in model.layers]
    return devices if len(set(devices)) > 1 else devices[:1] * len(devices)


def _device_of(module: Any) -> torch.device:
    execution_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution_device is None:
        device: torch.device = module.kv_norm.weight.device
        return device
    return torch.empty(0, device=execution_device).device


def forward_name(module: Any) -> str:
    """Return the attribute that holds the forward of a module itself."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def is_offloaded(module: Any) -> bool:
    """Whether a hook brings a module's weights for its forward alone."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def loaded_weights(module: Any) -> LayerWeights:
    """Return the tensors of an attention module that the cache applies, where it runs."""
    if not module.kv_norm.weight.is_meta:
        return learned_weights(module)
    own = [each for each in module.modules() if is_offloaded(each)]
    own = [each for each in own if each is not module and not hasattr(each, "in_features")]
    try:
        for each in own:
            each._hf_hook.pre_forward(each)
        return learned_weights(module)
    finally:
        for each in own:
            each._hf_hook.post_forward(each, None)
