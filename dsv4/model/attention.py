"""`AttentionSubBlock`: a whole attention layer of DeepSeek-V4 or V4.1 on top of the cache.

The projections run here. They are called as modules, so quantised linears and adapters stay in
place. Attention itself, and everything that lives from one token to the next, goes through the
`LayerCacheHandle`.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.layer_checks import INPUT_DTYPES, check_tensor
from dsv4.checks import check_int, check_type
from dsv4.config import LAYER_TYPE_NAMES, CacheConfig
from dsv4.kernels.contracts import (
    AttentionResult,
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    KeyWeights,
    LayerProjections,
    LayerWeights,
    Selection,
)
from dsv4.layer_schedule import AttentionType, LayerSpec

# The parts of a module that every type of layer has.
PARTS = ("q_a_proj", "q_a_norm", "q_b_proj", "kv_proj", "kv_norm", "sinks", "o_a_proj", "o_b_proj",
         "compressor")  # fmt: skip
# Tensors of a V4.1 layer: of every one, of a kv source, of an index source.
TENSORS = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight",
           "attn_sink", "wo_a.weight", "wo_b.weight")  # fmt: skip
KV_TENSORS = ("compressor.wkv.weight", "compressor.norm.weight", "indexer.wk.weight",
              "indexer.k_norm.weight")  # fmt: skip
GATE_TENSOR = "compressor.wgate.weight"  # of an entry of more than one token
INDEX_TENSORS = ("indexer.wq_b.weight", "indexer.weights_proj.weight")


class AttentionSubBlock:
    """Queries, cache and output projection of one layer; call it with a layer's handle.

    Args:
        module: A transformers `DeepseekV4Attention`, or a module whose parts have the same names.
        config: The cache's.
        layer: The layer of `config.schedule` that the module is.
    """

    def __init__(self, module: Any, config: CacheConfig, layer: LayerSpec) -> None:
        check_type("config", config, CacheConfig)
        check_type("layer", layer, LayerSpec)
        missing = [name for name in PARTS if not hasattr(module, name)]
        if missing:
            raise TypeError(
                f"Invalid module: expected {', '.join(PARTS)} as a DeepseekV4Attention has them, "
                f"got a {type(module).__name__} without {', '.join(missing)}"
            )
        needed = (layer.owns_entries, layer.owns_choice)
        if (module.compressor is not None, _indexer(module) is not None) != needed:
            raise ValueError(
                f"Invalid module of layer {layer.layer_idx} ({layer.attention_type.name}): "
                f"expected compressor: {needed[0]}, indexer: {needed[1]}"
            )
        self.module = module
        self.config = config
        self.layer = layer

    @classmethod
    def from_hf(cls, module: Any, config: CacheConfig, layer_idx: int) -> "AttentionSubBlock":
        """Wrap a transformers `DeepseekV4Attention`; its tensors are shared, not copied."""
        check_type("config", config, CacheConfig)
        layer_idx = check_int("layer_idx", layer_idx, at_least=0, at_most=config.num_layers - 1)
        layer = config.schedule[layer_idx]
        name = getattr(module, "layer_type", None)
        if name not in LAYER_TYPE_NAMES:
            raise TypeError(
                f"Invalid module: expected a layer_type, one of {', '.join(LAYER_TYPE_NAMES)}, "
                f"got a {type(module).__name__} with {name!r}"
            )
        ratio = LAYER_TYPE_NAMES[name]
        if ratio != layer.ratio:
            raise ValueError(
                f"Invalid module for layer {layer_idx}: expected {layer.attention_type.name}, "
                f"got {AttentionType.from_ratio(ratio).name}"
            )
        return cls(module, config, layer)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], config: CacheConfig, layer_idx: int
    ) -> "AttentionSubBlock":
        """Make a layer of DeepSeek-V4.1 of its tensors, shared but for a pair's projections.

        Args:
            tensors: By their names in the layer's attention, such as `wq_a.weight`, fp32 or bf16
                on one device; others are ignored.
        """
        check_type("tensors", tensors, Mapping)
        check_type("config", config, CacheConfig)
        layer_idx = check_int("layer_idx", layer_idx, at_least=0, at_most=config.num_layers - 1)
        layer = config.schedule[layer_idx]
        if not config.has_latent_keys:
            raise ValueError("Invalid config: expected DeepSeek-V4.1's; from_hf makes V4's layers")
        needed = [*TENSORS, *(KV_TENSORS if layer.owns_entries else ())]
        needed += [GATE_TENSOR] if layer.owns_entries and layer.ratio > 1 else []
        needed += INDEX_TENSORS if layer.owns_choice else ()
        missing = [name for name in needed if name not in tensors]
        if missing:
            raise ValueError(
                f"Invalid tensors of layer {layer_idx}: expected {', '.join(needed)}, "
                f"without {', '.join(missing)}"
            )
        named = {name: tensors[name] for name in needed}
        _check_tensors(named, config)
        return cls(_named_module(named, config, layer), config, layer)

    @torch.no_grad()
    def __call__(
        self, hidden: Tensor, handle: LayerCacheHandle, chosen: dict[int, Selection] | None = None
    ) -> Tensor:
        """Compute the layer's attention output.

        Args:
            hidden: `[num_tokens, hidden_size]`, the attention input (after the layer's input
                norm), tokens of all requests one after the other.
            handle: This layer's handle for this forward.
            chosen: Selections of this forward by layer; V4.1 needs it, empty at the first layer.
                An index source adds its own.

        Returns:
            `[num_tokens, hidden_size]`; rows of padding tokens are 0.
        """
        self._check(hidden, handle)
        return attend(self.module, hidden, handle, learned_weights(self.module), chosen)

    def _check(self, hidden: Tensor, handle: LayerCacheHandle) -> None:
        check_type("handle", handle, LayerCacheHandle)
        is_own = handle.config == self.config or handle.config.whole == self.config.whole
        if handle.layer != self.layer or not is_own:
            raise ValueError(
                f"Invalid handle: expected layer {self.layer.layer_idx} of this block's config, "
                f"got layer {handle.layer.layer_idx}" + ("" if is_own else " of another config")
            )
        expected = (handle.plan.num_tokens, self.module.q_a_proj.in_features)
        check_tensor("hidden", hidden, expected, INPUT_DTYPES, handle.tokens.positions.device)


def learned_weights(module: Any) -> LayerWeights:
    """Return the tensors of an attention module that the cache applies; shared, not copied."""
    compressor, indexer = module.compressor, _indexer(module)
    return LayerWeights(
        module.kv_norm.weight,
        module.sinks,
        None if compressor is None else _compressor_weights(compressor),
        None if indexer is None else _index_weights(indexer),
    )


def attend(
    module: Any,
    hidden: Tensor,
    handle: LayerCacheHandle,
    weights: LayerWeights,
    chosen: dict[int, Selection] | None = None,
) -> Tensor:
    """Return a module's output for `hidden` `[num_tokens, hidden_size]`, tokens in order."""
    if chosen is None and handle.config.kv_source_layer_ids:
        raise TypeError("Layers that share entries need chosen: expected a dict, got None")
    inputs = project(module, hidden, handle.config)
    chosen = {} if chosen is None else chosen
    attended = forward_layer(handle, inputs, weights, chosen, is_query_raw=True).output
    if not len(attended):  # transformers' grouped linear cannot reshape 0 rows
        return torch.empty_like(hidden)
    grouped = attended.flatten(1).unflatten(1, (module.o_a_proj.n_groups, -1))
    return _linear(module.o_b_proj, _linear(module.o_a_proj, grouped).flatten(1))


def forward_layer(
    handle: LayerCacheHandle,
    inputs: LayerProjections,
    weights: LayerWeights,
    chosen: dict[int, Selection],
    *,
    is_query_raw: bool = False,
) -> AttentionResult:
    """Run one layer of a forward; `chosen` has the selections so far, by the layer they are of."""
    layer, index = handle.layer, inputs.indexer
    if not handle.config.kv_source_layer_ids:
        return handle.forward(inputs, weights, is_query_raw=is_query_raw)
    handle.write(inputs, weights)
    if index is not None:
        candidates = chosen.get(layer.candidates_of)
        chosen[layer.layer_idx] = handle.select_entries(index.query, index.head_weights, candidates)
    selection = chosen.get(layer.choice_of)
    return handle.attend(inputs.query, weights.sinks, selection, is_query_raw=is_query_raw)


def project(module: Any, hidden: Tensor, config: CacheConfig) -> LayerProjections:
    """Project `hidden` `[num_tokens, hidden_size]` to a handle's inputs, with a raw query."""
    q_low = module.q_a_norm(_linear(module.q_a_proj, hidden))
    compressor, indexer = module.compressor, _indexer(module)
    return LayerProjections(
        _linear(module.q_b_proj, q_low).unflatten(-1, (-1, config.head_dim)),
        _linear(module.kv_proj, hidden),
        None if compressor is None else _compressor_inputs(compressor, hidden),
        None if indexer is None else _index_inputs(indexer, hidden, q_low, config),
    )


def _index_inputs(indexer: Any, hidden: Tensor, q_low: Tensor, config: CacheConfig) -> IndexInputs:
    query = _linear(indexer.q_b_proj, q_low).unflatten(-1, (-1, config.index_head_dim))
    kv, gate = (None, None) if config.has_latent_keys else _compressor_inputs(indexer, hidden)
    return IndexInputs(kv, gate, query, _linear(indexer.scorer.weights_proj, hidden))


def _indexer(module: Any) -> Any:
    return getattr(module, "indexer", getattr(module.compressor, "indexer", None))


def _compressor_inputs(compressor: Any, hidden: Tensor) -> CompressorInputs:
    gate = None if compressor.gate_proj is None else _linear(compressor.gate_proj, hidden)
    return CompressorInputs(_linear(compressor.kv_proj, hidden), gate)


def _compressor_weights(compressor: Any) -> CompressorWeights:
    return CompressorWeights(compressor.position_bias, compressor.kv_norm.weight)


def _index_weights(indexer: Any) -> CompressorWeights | KeyWeights | None:
    """Return the weights of the index keys; None where the keys are another layer's."""
    if not hasattr(indexer, "k_proj"):
        return _compressor_weights(indexer)
    keys: KeyWeights | None = indexer.k_proj
    return keys


class _Linear:
    """A projection by a weight `[out, in]`; grouped if it has n_groups."""

    def __init__(self, weight: Tensor, n_groups: int = 1) -> None:
        self.weight, self.n_groups, self.in_features = weight, n_groups, weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if self.n_groups == 1 and x.ndim == 2:
            return linear(x, self.weight)
        blocks = self.weight.unflatten(0, (self.n_groups, -1))  # [groups, rank, in]
        return torch.einsum("ngi,gri->ngr", x, blocks)


class _Norm:
    """An RMS norm in fp32, rounded to the input's dtype before its weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def _check_tensors(tensors: Mapping[str, Tensor], config: CacheConfig) -> None:
    """Check shapes, dtypes and devices; a layer's other widths are those of wq_a and wo_a."""
    for name in ("wq_a.weight", "wo_a.weight"):
        check_type(name, tensors[name], Tensor)
        if tensors[name].ndim != 2:
            got = list(tensors[name].shape)
            raise ValueError(f"Invalid shape of {name}: expected two dimensions, got {got}")
    (low, hidden), (rank, width) = tensors["wq_a.weight"].shape, tensors["wo_a.weight"].shape
    heads, dim = config.num_query_heads, config.head_dim
    if not width or heads * dim % width or rank % (heads * dim // width):
        raise ValueError(
            "Invalid shape of wo_a.weight: expected [groups * rank, columns] with groups * columns "
            f"= {heads * dim}, got {[rank, width]}"
        )
    index_heads, index_dim = config.index_num_heads, config.index_head_dim
    shapes = {
        "wq_a.weight": (low, hidden), "q_norm.weight": (low,), "wq_b.weight": (heads * dim, low),
        "wkv.weight": (dim, hidden), "kv_norm.weight": (dim,), "attn_sink": (heads,),
        "wo_a.weight": (rank, width), "wo_b.weight": (hidden, rank),
        "compressor.wkv.weight": (dim, hidden), "compressor.norm.weight": (dim,),
        "compressor.wgate.weight": (dim, hidden), "indexer.wk.weight": (index_dim, dim),
        "indexer.k_norm.weight": (index_dim,),
        "indexer.wq_b.weight": (index_heads * index_dim, low),
        "indexer.weights_proj.weight": (index_heads, hidden),
    }  # fmt: skip
    for name, tensor in tensors.items():
        check_tensor(name, tensor, shapes[name], INPUT_DTYPES, tensors["wq_a.weight"].device)


def _named_module(tensors: Mapping[str, Tensor], config: CacheConfig, layer: LayerSpec) -> Any:
    """Give V4.1's tensors the names of a `DeepseekV4Attention`'s parts."""
    compressor = indexer = None
    if layer.owns_entries:
        pooled = [tensors[name] for name in (KV_TENSORS[0], GATE_TENSOR) if name in tensors]
        # A pair is pooled in fp32, its projections included.
        made = [_Linear(weight.float() if layer.ratio > 1 else weight) for weight in pooled]
        compressor = SimpleNamespace(
            kv_proj=made[0], gate_proj=made[1] if layer.ratio > 1 else None, position_bias=None,
            kv_norm=SimpleNamespace(weight=tensors[KV_TENSORS[1]]),
        )  # fmt: skip
    if layer.owns_choice:
        query, weights = (_Linear(tensors[name]) for name in INDEX_TENSORS)
        keys = [tensors[name] for name in KV_TENSORS[2:]] if layer.owns_entries else None
        indexer = SimpleNamespace(
            q_b_proj=query, scorer=SimpleNamespace(weights_proj=weights),
            k_proj=None if keys is None else KeyWeights(*keys),
        )  # fmt: skip
    wq_a, q_norm, wq_b, wkv, kv_norm, sinks, wo_a, wo_b = (tensors[name] for name in TENSORS)
    return SimpleNamespace(
        q_a_proj=_Linear(wq_a), q_a_norm=_Norm(q_norm, config.rms_norm_eps),
        q_b_proj=_Linear(wq_b), kv_proj=_Linear(wkv), kv_norm=SimpleNamespace(weight=kv_norm),
        sinks=sinks, o_a_proj=_Linear(wo_a, wq_b.shape[0] // wo_a.shape[1]),
        o_b_proj=_Linear(wo_b), compressor=compressor, indexer=indexer,
    )  # fmt: skip


def _linear(module: Any, x: Tensor) -> Tensor:
    """Call a projection in the dtype of its weight; some checkpoints keep single ones in fp32.

    A quantised one, or one whose weight is out of reach, takes `x` as it is.
    """
    dtype = getattr(getattr(module, "weight", None), "dtype", None)
    output: Tensor = module(x.to(dtype) if dtype in INPUT_DTYPES else x)
    return output
