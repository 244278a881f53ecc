"""`attach` and `detach`: make a transformers model use a `PagedCache`.

`attach` replaces three methods on the instances: `generate`, the base model's `forward` and the
attention modules' `forward`. Each calls the class's method unless `past_key_values` is a
`PagedCache`. `detach` removes them.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch

from dsv4.cache.graphs.captured_forward import check_graph_device
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import blocks_for
from dsv4.checks import check_int
from dsv4.config import CacheConfig
from dsv4.distributed.context import rank_config
from dsv4.formats import IndexFormatName, KVFormatName

try:
    from transformers import DeepseekV4ForCausalLM
    from transformers.modeling_outputs import MoeModelOutputWithPast

    from dsv4.integrations.transformers.cache import CudaGraphs, PagedCache
    from dsv4.integrations.transformers.captured_step import check_experts
    from dsv4.integrations.transformers.device_map import forward_name, is_offloaded, layer_devices
    from dsv4.integrations.transformers.padding import NO_MASK
except ImportError as error:
    raise ImportError(
        "dsv4.integrations.transformers needs transformers: pip install 'dsv4[hf]'"
    ) from error

BASE_INPUTS = (
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache",
)  # fmt: skip
TEXT_INPUTS = ("inputs", "input_ids", "inputs_embeds")
MANAGER_INPUTS = {"config", "device", "max_request_tokens"}  # follow from the model and the sizes


def attach(
    model: Any,
    *,
    max_requests: int,
    max_tokens: int | None = None,
    num_blocks: int | None = None,
    kv_format: KVFormatName = "fp8",
    index_format: IndexFormatName = "mxfp4",
    drafts_per_step: int = 20,
    max_forward_tokens: int = 8192,
    backend: str | None = None,
    batch_invariant: bool = False,
    cuda_graphs: CudaGraphs = False,
    **choices: Any,
) -> PagedCache:
    """Make a cache for a model; pass it to the model as `past_key_values`.

    The model's weights do not change, nor does its behaviour with another cache or none. A model
    can have several caches; each owns its memory.

    Args:
        model: A `DeepseekV4ForCausalLM` in fp32 or bf16, on one device or placed by `device_map`.
            The cache of a layer lies on the device that the layer runs on.
        max_requests: The most rows of a batch; beams and `num_return_sequences` count.
        max_tokens: The most tokens of a row, prompt included; every row has room for them. Or
        num_blocks: Blocks of `block_tokens` tokens, shared by the rows.
        kv_format, index_format: Row formats, see `dsv4.formats`.
        drafts_per_step: The most tokens that assisted decoding may reject in one step.
        max_forward_tokens: Longer forwards run in spans of columns.
        backend, batch_invariant: See `KVCacheManager`.
        cuda_graphs: Capture the attention modules of decode steps at the first step of a batch
            size, and replay them from then on. `"step"` captures the whole base model as one
            graph; its experts must be `batched_mm`, or `grouped_mm` in BF16. Captures are made
            anew once weights were moved or replaced, or the manager has slept. After a change of
            captured modules, or of hooks on them, attach again.
        **choices: Any other choice of `CacheConfig` or `KVCacheManager`, such as `block_tokens` or
            `prefix_bytes`.
    """
    _check_model(model)
    config_choices, manager_choices = _split_choices(choices)
    config = CacheConfig.from_hf(
        model.config, kv_format=kv_format, index_format=index_format,
        drafts_per_step=drafts_per_step, **config_choices,
    )  # fmt: skip
    if max_forward_tokens < max_requests:
        raise ValueError(
            f"Invalid max_forward_tokens: expected at least max_requests ({max_requests}), "
            f"got {max_forward_tokens}"
        )
    if cuda_graphs not in (False, True, "step"):
        raise ValueError(
            f"Invalid cuda_graphs: expected False, True or 'step', got {cuda_graphs!r}"
        )
    if cuda_graphs:
        check_graph_device(model.device)
        if len({str(parameter.device) for parameter in model.parameters()}) > 1:
            raise ValueError(
                "Invalid cuda_graphs: expected False for a model on several devices, "
                f"got {cuda_graphs!r}"
            )
    if cuda_graphs == "step":
        check_experts(model)
    manager = KVCacheManager(
        config,
        max_requests=max_requests,
        num_blocks=_num_blocks(
            config, max_requests, max_tokens, num_blocks, manager_choices.get("process_group")
        ),
        device=layer_devices(model.model),
        backend=backend,
        max_forward_tokens=max_forward_tokens,
        max_request_tokens=max_tokens,
        batch_invariant=batch_invariant,
        **manager_choices,
    )
    cache = PagedCache(model.model, manager, cuda_graphs=cuda_graphs)
    for module, name, method in _routes(model):
        setattr(module, name, partial(method, module))  # can be copied and pickled, as the module
    return cache


def detach(model: Any) -> None:
    """Restore the model's methods. Its caches can only be closed from then on."""
    routes = _routes(model) if isinstance(model, DeepseekV4ForCausalLM) else []
    if not routes or not all(_is_routed(*route) for route in routes):
        raise ValueError("Invalid model: expected one that attach was called with")
    for module, name, _ in routes:
        delattr(module, name)
        if name == "_old_forward":
            module._old_forward = MethodType(type(module).forward, module)


def _check_model(model: Any) -> None:
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise TypeError(
            f"Invalid model: expected a DeepseekV4ForCausalLM, got {type(model).__name__}"
        )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and not is_offloaded(module):
                raise ValueError(
                    f"Invalid model: expected weights on devices, got {name} of a "
                    f"{type(module).__name__} on meta"
                )
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"Invalid dtype of model: expected float32 or bfloat16, got {model.dtype}")
    for module, name, method in _routes(model):
        is_own = name == "_old_forward" and module._old_forward == MethodType(
            type(module).forward, module
        )
        if name in vars(module) and not is_own and not _is_routed(module, name, method):
            raise ValueError(
                f"Invalid model: expected {type(module).__name__}.{name} as its class has it, got "
                "one that another library has replaced"
            )


def _split_choices(choices: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split choices into those of `CacheConfig` and those of `KVCacheManager`."""
    of_config = set(inspect.signature(CacheConfig).parameters)
    of_manager = set(inspect.signature(KVCacheManager).parameters) - MANAGER_INPUTS
    unknown = sorted(choices.keys() - of_config - of_manager)
    if unknown:
        raise TypeError(
            f"Unknown choice {', '.join(unknown)}: expected one of "
            f"{', '.join(sorted(of_config | of_manager))}"
        )
    own = {name: choices[name] for name in choices if name in of_config}
    return own, {name: choices[name] for name in choices if name not in own}


def _num_blocks(
    config: CacheConfig,
    max_requests: int,
    max_tokens: int | None,
    num_blocks: int | None,
    process_group: Any,
) -> int:
    if (max_tokens is None) == (num_blocks is None):
        raise ValueError(
            "Invalid sizes: expected either max_tokens or num_blocks, got "
            + ("neither" if num_blocks is None else "both")
        )
    if num_blocks is not None:
        return num_blocks
    max_tokens = check_int(
        "max_tokens", max_tokens, at_least=1, at_most=config.max_position, limit="max_position"
    )
    if process_group is not None:
        config = rank_config(config, process_group)
    return max_requests * int(blocks_for(config, np.array([max_tokens]))[0])


def _routes(model: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """List the replaced methods: module, name of the method, and replacement."""
    return [
        (model, "generate", _generate),
        (model.model, forward_name(model.model), _forward_model),
        *(
            (layer.self_attn, forward_name(layer.self_attn), _forward_attention)
            for layer in model.model.layers
        ),
    ]


def _is_routed(module: Any, name: str, method: Callable[..., Any]) -> bool:
    return getattr(vars(module).get(name), "func", None) is method


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, PagedCache):
        return type(self).generate(self, *args, **kwargs)
    _check_assistant(kwargs.get("assistant_model"))
    view = copy.copy(self)  # the same modules; other threads see none of what is set here
    view._is_stateful = False  # the class declares that its cache cannot be rolled back
    view._prepare_cache_for_generation = partial(
        _check_generation, self, _count_left_out(cache, args, kwargs)
    )
    with cache.generating():
        return type(self).generate(view, *args, **kwargs)


def _check_assistant(assistant: Any) -> None:
    layer_types = set(getattr(getattr(assistant, "config", None), "layer_types", None) or ())
    if isinstance(assistant, DeepseekV4ForCausalLM) and layer_types != {"sliding_attention"}:
        raise ValueError(
            "Invalid assistant_model: expected one whose own cache can be rolled back, got a "
            "DeepseekV4ForCausalLM with compressed layers; prompt_lookup_num_tokens needs none"
        )


def _count_left_out(cache: PagedCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the cached columns that a text leaves out; refuse one without new columns."""
    past, mask = cache.get_seq_length(), kwargs.get("attention_mask")
    given = (mask, *args[:1], *(kwargs.get(name) for name in TEXT_INPUTS))
    lengths = [tensor.shape[1] for tensor in given if isinstance(tensor, torch.Tensor)]
    if past and lengths and lengths[0] <= past:
        raise ValueError(
            f"Invalid text: expected more than the {past} columns that the cache holds, to go on "
            f"from them, got {lengths[0]}; call reset() before another text"
        )
    return lengths[0] - lengths[-1] if lengths else 0


def _check_generation(
    model: Any,
    num_left_out: int,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Refuse, before its first forward, a generation that the cache cannot bring to its end."""
    if generation_config.assistant_early_exit is not None:
        raise ValueError(
            "assistant_early_exit is not supported with a PagedCache: the first layers have no "
            "cache of their own to draft on; use prompt_lookup_num_tokens"
        )
    copies = max(generation_config.num_beams, generation_config.num_return_sequences)
    drafts = generation_config.prompt_lookup_num_tokens or 1  # the last step may draft beyond
    model_kwargs["past_key_values"].check_generation(
        batch_size * copies,
        max_cache_length + num_left_out + drafts - 1,
        model_kwargs.get("attention_mask"),
        drafts=drafts,
    )
    type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )


def _forward_attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    position_ids: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    if not isinstance(past_key_values, PagedCache):
        return type(self).forward(
            self, hidden_states, position_embeddings, position_ids, attention_mask,
            past_key_values, **kwargs,
        )  # fmt: skip
    return past_key_values.attend(self.layer_idx, self, hidden_states), None


def _forward_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = {**dict(zip(BASE_INPUTS, args, strict=False)), **kwargs}
    cache = inputs.get("past_key_values")
    if not isinstance(cache, PagedCache):
        return type(self).forward(self, *args, **kwargs)
    _check_inputs(self, cache, inputs)
    return _run_spans(self, cache, inputs)


def _check_inputs(model: Any, cache: PagedCache, inputs: dict[str, Any]) -> None:
    cache.check_owner(model)
    if any(layer.gradient_checkpointing and layer.training for layer in model.layers):
        raise ValueError(
            "Gradient checkpointing is not supported with a PagedCache: its layers get no cache; "
            "call model.eval(), or train without past_key_values"
        )
    if inputs.get("use_cache") is False:
        raise ValueError("Invalid use_cache: expected True with a PagedCache, got False")
    if inputs.get("output_attentions", model.config.output_attentions):
        raise ValueError(
            "output_attentions is not supported with a PagedCache: attention weights are never "
            "in memory"
        )
    if (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None):
        raise ValueError("Invalid inputs: expected exactly one of input_ids and inputs_embeds")


def _run_spans(model: Any, cache: PagedCache, inputs: dict[str, Any]) -> Any:
    """Run the model over all columns, as many at a time as one forward of the cache takes."""
    names = [name for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
    batch, num_columns = inputs[names[0]].shape[:2]
    if not num_columns:
        raise ValueError("Invalid inputs: expected at least one new column, got none")
    mask, position_ids = inputs.pop("attention_mask", None), inputs.pop("position_ids", None)
    is_token = cache.read_inputs(batch, num_columns, mask, position_ids)
    if names == ["input_ids"] and num_columns == 1 and is_token is None:
        hidden: Any = cache.replay(inputs["input_ids"]) if _is_plain(model, inputs) else None
        if hidden is not None:
            return MoeModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
    spans = cache.split_columns(batch, num_columns, is_token)
    if len(spans) > 1 and (recorded := _recorded(model, inputs)):
        raise ValueError(
            f"{recorded[0]} is not supported in a forward of more than max_forward_tokens tokens: "
            "attach with a larger max_forward_tokens"
        )
    outputs = []
    for start, stop in spans:
        span = {**inputs, **{name: inputs[name][:, start:stop] for name in names}}
        is_span_token = None if is_token is None else is_token[:, start:stop]
        with cache.forward(batch, stop - start, is_span_token):
            outputs.append(type(model).forward(model, **span, attention_mask=NO_MASK))
    return outputs[0] if len(spans) == 1 else _join(outputs)


def _is_plain(model: Any, inputs: dict[str, Any]) -> bool:
    """Tell whether a forward returns the last hidden states alone, and needs no gradients."""
    is_dict = inputs.get("return_dict", getattr(model.config, "return_dict", True))
    return is_dict is not False and not torch.is_grad_enabled() and not _recorded(model, inputs)


def _recorded(model: Any, inputs: dict[str, Any]) -> list[str]:
    """List the options that record outputs of the layers, where they are on."""
    names = ("output_hidden_states", "output_router_logits")
    return [name for name in names if inputs.get(name, getattr(model.config, name, False))]


def _join(outputs: list[Any]) -> Any:
    """Join the outputs of all spans to those of one forward."""
    joined = outputs[-1]
    hidden = torch.cat([output[0] for output in outputs], dim=1)
    if isinstance(joined, tuple):
        return (hidden, *joined[1:])
    joined.last_hidden_state = hidden
    return joined
