"""`PagedKVPool`: the compressed entries and index keys of all layers, in blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.memory.layout import CacheLayout, byte_rows
from dsv4.formats import PagedRows
from dsv4.kernels.layer_memory import LayerLayout


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages, strided views into the blocks.

    Attributes:
        entries: Compressed KV entries, `entries_per_block` rows a page.
        index_keys: Index keys of a CSA layer, else None.
        indexer_global_scale: `[]` fp32, NVFP4's global scale; 1 where none was set.
    """

    entries: PagedRows
    index_keys: PagedRows | None
    indexer_global_scale: Tensor

    @property
    def entries_fp8(self) -> Tensor:
        """`[blocks, entries_per_block, nope_dim]`: the part that is not rotated, or all of it."""
        return self.entries.field(self.entries.format.fields[0].name)

    @property
    def entries_rope(self) -> Tensor:
        """`[blocks, entries_per_block, rope_dim]`: the rotated part."""
        return self.entries.field("rope")

    @property
    def inv_scale(self) -> Tensor:
        """`[blocks, entries_per_block, scales]`: the multipliers that restore a value."""
        return self.entries.field("scale")

    @property
    def indexer_keys_fp4(self) -> Tensor:
        """`[blocks, entries_per_block, bytes]`: two codes a byte in the FP4 formats."""
        return self._index_keys().field("key")

    @property
    def indexer_scale(self) -> Tensor:
        """`[blocks, entries_per_block, scales]` of the index keys."""
        return self._index_keys().field("scale")

    def _index_keys(self) -> PagedRows:
        if self.index_keys is None:
            raise ValueError("Only a CSA layer has index keys")
        return self.index_keys


class PagedKVPool:
    """All blocks as one tensor `[num_blocks, block_bytes]`; a layer's pool is a view of it."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        index_global_scale: float | None,
        device: torch.device,
        storage: Tensor | None = None,
    ) -> None:
        self.layout = layout.blocks
        self.storage = byte_rows("blocks", num_blocks, self.layout.num_bytes, device, storage)
        scale = 1.0 if index_global_scale is None else index_global_scale
        self.indexer_global_scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self._layers = tuple(self._cut(layer) for layer in layout.layers)

    def layer(self, layer_idx: int) -> LayerPages | None:
        """Return the pages of a layer; None for SWA."""
        return self._layers[layer_idx]

    def _cut(self, layer: LayerLayout) -> LayerPages | None:
        entries = layer.cut_entries(self.storage)
        if entries is None:
            return None
        return LayerPages(entries, layer.cut_index_keys(self.storage), self.indexer_global_scale)
