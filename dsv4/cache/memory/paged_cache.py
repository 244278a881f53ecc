"""`PagedKVPool`: the compressed entries and index keys of all layers, in blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.memory.layout import RunLayout
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.formats import PagedRows


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
        """`[blocks, entries_per_block, nope_dim]`: the part that is not rotated."""
        return self.entries.field("nope")

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
        schemas: tuple[LayerCacheSchema, ...],
        layout: RunLayout,
        *,
        num_blocks: int,
        index_global_scale: float | None,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.storage = torch.zeros(num_blocks, layout.num_bytes, dtype=torch.uint8, device=device)
        scale = 1.0 if index_global_scale is None else index_global_scale
        self.indexer_global_scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self._layers = tuple(self._view(idx, schema) for idx, schema in enumerate(schemas))

    def layer(self, layer_idx: int) -> LayerPages | None:
        """The pages of a layer; None for SWA."""
        return self._layers[layer_idx]

    def _view(self, layer_idx: int, schema: LayerCacheSchema) -> LayerPages | None:
        offsets, rows = self.layout.offsets[layer_idx], schema.entries_per_block
        if "entries" not in offsets:
            return None
        entries = schema.kv_row.pages(self.storage, offset=offsets["entries"], rows_per_page=rows)
        keys = None
        if "index_keys" in offsets:
            keys = schema.index_row.pages(
                self.storage, offset=offsets["index_keys"], rows_per_page=rows
            )
        return LayerPages(entries, keys, self.indexer_global_scale)
