"""Bytes of transformers' own cache of a DeepSeek-V4, by component, for comparisons."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

ENTRY_NAMES = {
    "compressed_sparse_attention": "csa_entries",
    "heavily_compressed_attention": "hca_entries",
}
STATES = ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")


def transformers_cache_bytes(cache: Any, layer_types: list[str]) -> dict[str, int]:
    """Count the bytes of a `DynamicCache` that has run, by component.

    Keys and values that share a tensor count once. The model's config has the `layer_types`.
    """
    sizes = dict.fromkeys(("csa_entries", "index_keys", "hca_entries", "window", "states"), 0)
    seen = set()
    for layer, layer_type in zip(cache.layers, layer_types, strict=True):
        for component, tensor in _tensors(layer, ENTRY_NAMES.get(layer_type, "")):
            if tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                sizes[component] += tensor.nbytes
    return sizes


def _tensors(layer: Any, entries: str) -> Iterator[tuple[str, Tensor]]:
    yield "window", layer.keys
    yield "window", layer.values
    compressed = getattr(layer, "compressed_kv", {})
    for name, component in (("compressor", entries), ("indexer", "index_keys")):
        if compressed.get(name) is not None:
            yield component, compressed[name]
    for state in STATES:
        for tensor in getattr(layer, state, {}).values():
            if tensor is not None:
                yield "states", tensor
