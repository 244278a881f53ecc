"""`LayerChecks`: refuses inputs that do not fit a layer, before anything is written."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    CompressorWeights,
    EntryInputs,
    LayerProjections,
    LayerWeights,
    Selection,
)
from dsv4.layer_schedule import AttentionType, LayerSpec

INPUT_DTYPES = (torch.float32, torch.bfloat16)
QUERY_DTYPES = {"flashmla": (torch.bfloat16,)}  # by attention backend, where not all of the above


class LayerChecks(NamedTuple):
    """The sizes, dtypes and device that one layer takes; `num_tokens` are those of a forward."""

    config: CacheConfig
    layer: LayerSpec
    schema: LayerCacheSchema
    device: torch.device
    attention_backend: str
    accepted: dict[str, "weakref.ref[Tensor]"]  # weights that were checked last, by name

    def check_inputs(
        self, inputs: LayerProjections, weights: LayerWeights, num_tokens: int
    ) -> None:
        """Check everything that `LayerCacheHandle.forward` takes."""
        self.check_kv(inputs.kv, weights.kv_norm, num_tokens)
        self.check_query(inputs.query, weights.sinks, num_tokens)
        has_entries = self.layer.ratio > 0
        has_parts = inputs.compressor is not None, weights.compressor is not None
        if has_parts != (has_entries, has_entries):
            expected = "compressor projections and weights" if self.layer.ratio else "none"
            raise ValueError(f"Invalid inputs of {self._layer_name}: expected {expected}")
        if inputs.compressor is None or weights.compressor is None:
            return
        index = inputs.indexer
        self.check_compression(
            *inputs.compressor,
            weights.compressor,
            None if index is None else index.kv,
            None if index is None else index.gate,
            weights.indexer,
            num_tokens,
        )
        if index is not None:
            self.check_index_query(index.query, index.head_weights, num_tokens)

    def check_kv(self, kv: Tensor, norm_weight: Tensor, num_tokens: int) -> None:
        """Check the inputs of `write_swa`."""
        dim = self.config.head_dim
        self.check_tensor("kv", kv, (num_tokens, dim))
        self._check_weight("norm_weight", norm_weight, (dim,), "window")

    def check_compression(
        self,
        kv: Tensor,
        gate: Tensor,
        weights: CompressorWeights,
        index_kv: Tensor | None,
        index_gate: Tensor | None,
        index_weights: CompressorWeights | None,
        num_tokens: int,
    ) -> tuple[EntryInputs, EntryInputs | None]:
        """Check the inputs of `flush_compression`; return those of entries and of index keys."""
        if not self.layer.ratio:
            raise ValueError(f"Layer {self.layer.layer_idx} is SWA: it has nothing to compress")
        is_csa = self.layer.attention_type is AttentionType.CSA
        has_keys = index_kv is not None, index_gate is not None, index_weights is not None
        if has_keys != (is_csa, is_csa, is_csa):
            expected = "index_kv, index_gate and index_weights" if is_csa else "no index inputs"
            raise ValueError(
                f"Invalid inputs of {self._layer_name}: expected {expected}, "
                f"got {sum(has_keys)} of 3"
            )
        entries, index_keys = EntryInputs(kv, gate, weights), None
        self._check_compressor("", entries, self.config.head_dim, num_tokens)
        if index_kv is not None and index_gate is not None and index_weights is not None:
            index_keys = EntryInputs(index_kv, index_gate, index_weights)
            self._check_compressor("index_", index_keys, self.config.index_head_dim, num_tokens)
        return entries, index_keys

    def check_index_query(self, query: Tensor, head_weights: Tensor, num_tokens: int) -> None:
        """Check the inputs of `select_entries`."""
        heads = self.config.index_num_heads
        self.check_tensor("query", query, (num_tokens, heads, self.config.index_head_dim))
        self.check_tensor("head_weights", head_weights, (num_tokens, heads))

    def check_query(self, query: Tensor, sinks: Tensor | None, num_tokens: int) -> None:
        """Check the query and the sinks of `attend`."""
        heads = self.config.num_query_heads
        dtypes = QUERY_DTYPES.get(self.attention_backend, INPUT_DTYPES)
        self.check_tensor("query", query, (num_tokens, heads, self.config.head_dim), dtypes)
        if sinks is not None:
            self._check_weight("sinks", sinks, (heads,))

    def check_selection(self, selection: Selection | None, num_tokens: int) -> None:
        """Check that CSA, and nothing else, is given a selection."""
        is_csa = self.layer.attention_type is AttentionType.CSA
        if is_csa != (selection is not None):
            expected = "a selection" if is_csa else "no selection"
            raise ValueError(f"Invalid attend of {self._layer_name}: expected {expected}")
        if selection is not None:
            shape = (num_tokens, self.config.index_topk)
            self.check_tensor("selection.rows", selection.rows, shape, (torch.int64,))

    def check_own(self, selection: Selection, own: Callable[[], Tensor | None] | None) -> None:
        """Check that a selection is of this layer and forward.

        Args:
            own: Returns the rows that its last `select_entries` chose; None if it chose none.
        """
        if own is None or selection.rows is not own():
            raise ValueError(
                f"Invalid selection of {self._layer_name}: expected the result of its own "
                "select_entries in this forward, got another one"
            )

    def check_tensor(
        self,
        name: str,
        tensor: Tensor,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES,
    ) -> None:
        """Check one tensor's type, shape, dtype and device."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Invalid {name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == self.device:
            return
        if tensor.shape != shape:
            raise ValueError(
                f"Invalid shape of {name}: expected {list(shape)}, got {list(tensor.shape)}"
            )
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"Invalid dtype of {name}: expected {names}, got {tensor.dtype}")
        raise ValueError(f"Invalid device of {name}: expected {self.device}, got {tensor.device}")

    @property
    def _layer_name(self) -> str:
        return f"layer {self.layer.layer_idx} ({self.layer.attention_type.name})"

    def _check_compressor(
        self, prefix: str, inputs: EntryInputs, dim: int, num_tokens: int
    ) -> None:
        width = self.schema.num_series * dim
        self.check_tensor(f"{prefix}kv", inputs.kv, (num_tokens, width))
        self.check_tensor(f"{prefix}gate", inputs.gate, (num_tokens, width))
        bias, norm_weight = inputs.weights
        self._check_weight(f"{prefix}position_bias", bias, (self.layer.ratio, width))
        self._check_weight(f"{prefix}norm_weight", norm_weight, (dim,))

    def _check_weight(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], part: str = ""
    ) -> None:
        """Check a weight once: a model gives the same one in every forward."""
        if torch.compiler.is_compiling():
            self.check_tensor(name, tensor, shape)
            return
        accepted = self.accepted.get(part or name)
        if accepted is None or accepted() is not tensor:
            self.check_tensor(name, tensor, shape)
            self.accepted[part or name] = weakref.ref(tensor)
