"""`LayerChecks`: refuses inputs that do not fit a layer, before anything is written."""

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.cache.plan import SelectedParts
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    EntryInputs,
    IndexInputs,
    KeyWeights,
    LayerProjections,
    LayerWeights,
    LayerWrites,
    Selection,
)
from dsv4.layer_schedule import AttentionType, LayerSpec

INPUT_DTYPES = (torch.float32, torch.bfloat16)
QUERY_DTYPES = {"flashmla": (torch.bfloat16,)}  # by attention backend, where not all of the above


def check_tensor(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor's type, shape, dtype and device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Invalid {name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device:
        return
    if tensor.shape != shape:
        raise ValueError(
            f"Invalid shape of {name}: expected {list(shape)}, got {list(tensor.shape)}"
        )
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"Invalid dtype of {name}: expected {names}, got {tensor.dtype}")
    raise ValueError(f"Invalid device of {name}: expected {device}, got {tensor.device}")


def _kind(value: object) -> str:
    """Name what came, for the text of a refusal."""
    return "None" if value is None else type(value).__name__


def make_projections(
    config: CacheConfig, layer: LayerSpec, num_tokens: int, make: Callable[..., Tensor]
) -> LayerProjections:
    """Make a layer's inputs in the shapes that it takes.

    Args:
        make: Called with the name of each input, and its shape.
    """
    num_series = 2 if layer.attention_type is AttentionType.CSA and not layer.has_latent_keys else 1

    def compressor(prefix: str, dim: int) -> CompressorInputs:
        shape = (num_tokens, num_series * dim)
        kv = make(f"{prefix}kv", shape)
        return CompressorInputs(kv, None if layer.ratio == 1 else make(f"{prefix}gate", shape))

    query = make("query", (num_tokens, config.num_query_heads, config.head_dim))
    kv = make("kv", (num_tokens, config.head_dim))
    main = compressor("", config.head_dim) if layer.owns_entries else None
    if not layer.owns_choice:
        return LayerProjections(query, kv, main)
    dim, heads = config.index_head_dim, (num_tokens, config.index_num_heads)
    index_kv, index_gate = (None, None) if layer.has_latent_keys else compressor("index_", dim)
    index_query, head_weights = make("index_query", (*heads, dim)), make("head_weights", heads)
    return LayerProjections(
        query, kv, main, IndexInputs(index_kv, index_gate, index_query, head_weights)
    )


class LayerChecks:
    """The sizes, dtypes and device that one layer takes; `num_tokens` are those of a forward."""

    def __init__(
        self,
        config: CacheConfig,
        layer: LayerSpec,
        schema: LayerCacheSchema,
        device: torch.device,
        attention_backend: str,
    ) -> None:
        self.config, self.layer, self.schema, self.device = config, layer, schema, device
        self._query_dtypes = QUERY_DTYPES.get(attention_backend, INPUT_DTYPES)
        self._num_index_parts = 3 * (layer.attention_type is AttentionType.CSA)
        self._width = max(schema.num_series, 1) * config.head_dim if layer.owns_entries else 0
        self._index_width = schema.num_series * config.index_head_dim
        self._accepted: LayerWeights | None = None

    def check_inputs(
        self, inputs: LayerProjections, weights: LayerWeights, num_tokens: int
    ) -> None:
        """Check everything that `LayerCacheHandle.forward` takes.

        Weights are checked once: a model gives the same ones in every forward.
        """
        check, index = self.check_tensor, inputs.indexer
        has_entries, is_latent = self._width > 0, self.layer.has_latent_keys
        check("kv", inputs.kv, (num_tokens, self.config.head_dim))
        self.check_query(inputs.query, None, num_tokens)
        has_parts = inputs.compressor is not None, weights.compressor is not None
        if has_parts != (has_entries, has_entries):
            names = ("projections", "weights")
            given = [part for part, has in zip(names, has_parts, strict=True) if has]
            raise ValueError(
                f"Invalid inputs of {self._layer_name}: expected {'' if has_entries else 'no '}"
                f"compressor projections and weights, got {' and '.join(given) or 'none'}"
            )
        num_given = 2 * (index is not None) + (weights.indexer is not None)
        if is_latent:
            self._check_latent(inputs, weights)
        elif num_given != self._num_index_parts:
            self._refuse_index(num_given)
        if inputs.compressor is not None:
            self._check_projections("", *inputs.compressor, num_tokens)
        if index is not None:
            if not is_latent:
                self._check_projections("index_", index.kv, index.gate, num_tokens)
            self.check_index_query(index.query, index.head_weights, num_tokens)
        if is_compiling() or weights is not self._accepted:
            self._check_weights(weights)
            if not is_compiling():
                self._accepted = weights

    def _check_latent(self, inputs: LayerProjections, weights: LayerWeights) -> None:
        """Check that a layer of V4.1 is given what it owns, and nothing else of an index."""
        index, chooses, owns = inputs.indexer, self.layer.owns_choice, self.layer.owns_entries
        if (index is not None) != chooses:
            expected = "an index query and head weights" if chooses else "no index inputs"
            raise ValueError(
                f"Invalid inputs of {self._layer_name}: expected {expected}, got {_kind(index)}"
            )
        if index is not None:
            self._check_no_index_rows(index.kv, index.gate)
        if isinstance(weights.indexer, KeyWeights) != owns or (weights.indexer and not owns):
            expected = "KeyWeights as" if owns else "no"
            raise ValueError(
                f"Invalid weights of {self._layer_name}: expected {expected} indexer, "
                f"got {_kind(weights.indexer)}"
            )

    def _check_no_index_rows(self, kv: Tensor | None, gate: Tensor | None) -> None:
        for name, tensor in (("index_kv", kv), ("index_gate", gate)):
            if tensor is not None:
                raise ValueError(
                    f"Invalid {name} of {self._layer_name}: expected None, index keys are made of "
                    f"its entries, got {_kind(tensor)}"
                )

    def _check_projections(
        self, prefix: str, kv: Tensor | None, gate: Tensor | None, num_tokens: int
    ) -> None:
        shape = (num_tokens, self._index_width if prefix else self._width)
        self.check_tensor(f"{prefix}kv", kv, shape)
        if self.schema.num_series:
            self.check_tensor(f"{prefix}gate", gate, shape)
        elif gate is not None:
            raise ValueError(
                f"Invalid gate of {self._layer_name}: expected None, an entry has one token, "
                f"got {_kind(gate)}"
            )

    def _check_weights(self, weights: LayerWeights) -> None:
        self.check_tensor("norm_weight", weights.kv_norm, (self.config.head_dim,))
        if weights.sinks is not None:
            self.check_tensor("sinks", weights.sinks, (self.config.num_query_heads,))
        self._check_compressors(weights.compressor, weights.indexer)

    def _check_compressors(
        self, main: CompressorWeights | None, indexer: CompressorWeights | KeyWeights | None
    ) -> None:
        """Check the weights that make entries and index keys."""
        dim, index_dim = self.config.head_dim, self.config.index_head_dim
        if main is not None:
            self._check_compressor_weights("", main, dim)
        if isinstance(indexer, KeyWeights):
            self.check_tensor("index_projection", indexer.projection, (index_dim, dim))
            self.check_tensor("index_norm_weight", indexer.norm_weight, (index_dim,))
        elif indexer is not None:
            self._check_compressor_weights("index_", indexer, index_dim)

    def check_kv(self, kv: Tensor, norm_weight: Tensor, num_tokens: int) -> None:
        """Check the inputs of `write_swa`."""
        dim = self.config.head_dim
        self.check_tensor("kv", kv, (num_tokens, dim))
        self.check_tensor("norm_weight", norm_weight, (dim,))

    def check_compression(
        self,
        kv: Tensor,
        gate: Tensor | None,
        weights: CompressorWeights,
        index_kv: Tensor | None,
        index_gate: Tensor | None,
        index_weights: CompressorWeights | KeyWeights | None,
        num_tokens: int,
    ) -> LayerWrites:
        """Check the inputs of `flush_compression`, and return them as one write."""
        layer, index_keys = self.layer, None
        if not layer.owns_entries:
            why = f"reads the entries of layer {layer.entries_of}" if layer.ratio else "is SWA"
            raise ValueError(f"Layer {layer.layer_idx} {why}: it has nothing to compress")
        num_given = sum(part is not None for part in (index_kv, index_gate, index_weights))
        if not layer.has_latent_keys and num_given != self._num_index_parts:
            self._refuse_index(num_given)
        if layer.has_latent_keys:
            self._check_no_index_rows(index_kv, index_gate)
            if not isinstance(index_weights, KeyWeights):
                raise ValueError(
                    f"Invalid index_weights of {self._layer_name}: expected KeyWeights, "
                    f"got {_kind(index_weights)}"
                )
        self._check_projections("", kv, gate, num_tokens)
        if index_kv is not None and isinstance(index_weights, CompressorWeights):
            self._check_projections("index_", index_kv, index_gate, num_tokens)
            index_keys = EntryInputs(index_kv, index_gate, index_weights)
        self._check_compressors(weights, index_weights)
        keys = index_weights if isinstance(index_weights, KeyWeights) else index_keys
        return LayerWrites(entries=EntryInputs(kv, gate, weights), index_keys=keys)

    def check_index_query(self, query: Tensor, head_weights: Tensor, num_tokens: int) -> None:
        """Check the inputs of `select_entries`."""
        heads = self.config.index_num_heads
        self.check_tensor("query", query, (num_tokens, heads, self.config.index_head_dim))
        self.check_tensor("head_weights", head_weights, (num_tokens, heads))

    def check_query(self, query: Tensor, sinks: Tensor | None, num_tokens: int) -> None:
        """Check the query and the sinks of `attend`."""
        heads = self.config.num_query_heads
        shape = (num_tokens, heads, self.config.head_dim)
        self.check_tensor("query", query, shape, self._query_dtypes)
        if sinks is not None:
            self.check_tensor("sinks", sinks, (heads,))

    def check_selection(
        self,
        name: str,
        selection: Selection | None,
        num_tokens: int,
        own: Iterable[SelectedParts] | None,
        source: int,
    ) -> None:
        """Check that a selection is given where one is needed, of a layer and of this forward.

        Args:
            name: The argument.
            own: The rows and blocks that the layer's `select_entries` returned; None where no
                selection is needed.
            source: The layer.
        """
        if selection is None and own is None:
            return
        got = _kind(selection)
        if own is not None and isinstance(selection, Selection):
            shape = (num_tokens, self.config.index_topk)
            self.check_tensor(f"{name}.rows", selection.rows, shape, (torch.int64,))
            rows, blocks = selection.rows, selection.blocks
            if any(rows is made[0]() and blocks is made[1]() for made in own):
                return
            got = "another one"
        whose = "its own" if source == self.layer.layer_idx else f"layer {source}'s"
        result = f"the result of {whose} select_entries in this forward"
        error = ValueError if isinstance(selection, Selection | None) else TypeError
        raise error(
            f"Invalid {name} of {self._layer_name}: expected "
            f"{'None' if own is None else result}, got {got}"
        )

    def check_tensor(
        self,
        name: str,
        tensor: Tensor | None,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES,
    ) -> None:
        """Check one tensor's type, shape, dtype and device."""
        check_tensor(name, tensor, shape, dtypes, self.device)

    @property
    def _layer_name(self) -> str:
        return f"layer {self.layer.layer_idx} ({self.layer.attention_type.name})"

    def _check_compressor_weights(self, prefix: str, weights: CompressorWeights, dim: int) -> None:
        width = self.schema.num_series * dim
        bias, norm_weight = weights
        if not self.layer.has_latent_keys:
            self.check_tensor(f"{prefix}position_bias", bias, (self.layer.ratio, width))
        elif bias is not None:
            raise ValueError(
                f"Invalid position_bias of {self._layer_name}: expected None, got {_kind(bias)}"
            )
        self.check_tensor(f"{prefix}norm_weight", norm_weight, (dim,))

    def _refuse_index(self, num_given: int) -> NoReturn:
        is_needed = self._num_index_parts > 0
        expected = "index_kv, index_gate and index_weights" if is_needed else "no index inputs"
        raise ValueError(
            f"Invalid inputs of {self._layer_name}: expected {expected}, got {num_given} of 3"
        )
