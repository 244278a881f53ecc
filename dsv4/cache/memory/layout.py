"""The offsets of each layer's bytes in a block and in a slot, a request's fixed state.

    block  | L0 page | L1 page | ... | L0 keys | L2 keys | ... | pad |     × num_blocks
    slot   | rings | CSA tails | index tails | HCA tails | pad |            × max_requests

A block is one run of bytes over all layers, and so is a slot: copying, swapping or sending
one is a single copy. A layer's pool is a strided view whose stride is the run's size. Some kernels
check that stride, so the run is rounded up to `page_align`.

Only layers that own entries have pages and tails; the others are told the pages of their owner.

The sums of closed groups follow each HCA tail. At a block's end every window is closed, so only
tails that the next window reads again are needed. Other tails come last in a slot. So the state at
a block's end, a checkpoint, is the front of the slot: one copy too.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.config import CacheConfig
from dsv4.formats import round_up
from dsv4.kernels.layer_memory import LayerLayout
from dsv4.rope import row_steps


@dataclass(frozen=True)
class RunLayout:
    """Byte offsets of the parts of one run.

    Attributes:
        offsets: One dict per layer: the part's name to its first byte.
        num_bytes: Bytes of the run.
        padding: Bytes at its end that belong to no part.
    """

    offsets: tuple[dict[str, int], ...]
    num_bytes: int
    padding: int

    def offset(self, layer_idx: int, name: str) -> int:
        """Return the first byte of a layer's part; -1 if the layer, or the part, is none."""
        return self.offsets[layer_idx].get(name, -1) if layer_idx >= 0 else -1


@dataclass(frozen=True)
class CacheLayout:
    """The runs of a cache, and each layer's rows in them.

    Attributes:
        blocks, slots: The parts of one block and of one slot.
        layers: Offsets, counts and formats of each layer, which cut its rows out of storages.
    """

    blocks: RunLayout
    slots: RunLayout
    layers: tuple[LayerLayout, ...]


def block_layout(
    schemas: tuple[LayerCacheSchema, ...],
    *,
    page_align: int,
    at_least: int = 0,
    layers: Collection[int] | None = None,
) -> RunLayout:
    """Lay out the pages of one block, `at_least` bytes: all KV entries, then all index keys.

    Args:
        layers: Those that it holds pages of; by default all.
    """
    return _lay_out(
        len(schemas),
        [
            *((idx, "entries", s.page_bytes) for idx, s in enumerate(schemas)),
            *((idx, "index_keys", s.index_page_bytes) for idx, s in enumerate(schemas)),
        ],
        align=page_align,
        at_least=at_least,
        layers=layers,
    )


def slot_layout(
    schemas: tuple[LayerCacheSchema, ...], *, page_align: int, layers: Collection[int] | None = None
) -> RunLayout:
    """Lay out the fixed state of one request: a checkpoint's parts, then the other tails."""
    rest = ((idx, s) for idx, s in enumerate(schemas) if not s.tail_buffer_size_b)
    tails = [((idx, "tail", s.tail_bytes), (idx, "sums", s.sum_bytes)) for idx, s in rest]
    parts = [*_checkpoint_parts(schemas), *chain(*tails)]
    return _lay_out(len(schemas), parts, align=page_align, layers=layers)


def checkpoint_bytes(schemas: Sequence[LayerCacheSchema]) -> int:
    """Count the bytes of a checkpoint: window rings, CSA tails, index tails."""
    return sum(size for _, _, size in _checkpoint_parts(schemas))


def _checkpoint_parts(schemas: Sequence[LayerCacheSchema]) -> list[tuple[int, str, int]]:
    csa = [(idx, s) for idx, s in enumerate(schemas) if s.tail_buffer_size_b]
    return [
        *((idx, "ring", s.ring_bytes) for idx, s in enumerate(schemas)),
        *((idx, "tail", s.tail_bytes) for idx, s in csa),
        *((idx, "index_tail", s.index_tail_bytes) for idx, s in csa),
    ]


def cache_layout(
    config: CacheConfig,
    schemas: tuple[LayerCacheSchema, ...],
    *,
    workspace_rows: int = 0,
    layers: Collection[int] | None = None,
) -> CacheLayout:
    """Lay out blocks and slots, and describe each layer's rows in them.

    Args:
        layers: Those that the runs hold, by default all; the others have no place in them.
    """
    blocks = block_layout(
        schemas, page_align=config.page_align, at_least=config.least_block_bytes, layers=layers
    )
    slots = slot_layout(schemas, page_align=config.page_align, layers=layers)
    described = tuple(
        LayerLayout(
            ratio=schema.ratio,
            window=config.sliding_window,
            ring_offset=slots.offset(idx, "ring"),
            ring_rows=schema.ring_rows,
            workspace_rows=workspace_rows,
            entries_offset=blocks.offset(schema.layer.entries_of, "entries"),
            index_offset=blocks.offset(schema.layer.entries_of, "index_keys"),
            entries_per_block=schema.entries_per_block,
            tail_offset=slots.offset(idx, "tail"),
            index_tail_offset=slots.offset(idx, "index_tail"),
            tail_rows=schema.tail_rows,
            sums_offset=slots.offset(idx, "sums"),
            sum_rows=schema.sum_rows,
            num_series=schema.num_series,
            head_dim=config.head_dim,
            rope_dim=config.rope_dim,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            has_hadamard=config.index_hadamard,
            rms_norm_eps=config.rms_norm_eps,
            kv_format=config.kv_format,
            index_format=config.index_format,
            tail_dtype=config.tail_dtype,
            entry_format=config.entry_format or config.kv_format,
            page_arrangement=config.page_arrangement,
            scale_floor=config.scale_floor,
            owns_entries=schema.layer.owns_entries,
            has_latent_keys=schema.layer.has_latent_keys,
            norms_query=not config.has_latent_keys,
            candidate_blocks=config.candidate_topk_blocks * (config.sources.candidates == idx),
            candidate_size=config.candidate_block_size,
            row_steps=row_steps(config),
        )
        for idx, schema in enumerate(schemas)
    )
    return CacheLayout(blocks, slots, described)


def _lay_out(
    num_layers: int,
    parts: Iterable[tuple[int, str, int]],
    *,
    align: int,
    at_least: int = 0,
    layers: Collection[int] | None = None,
) -> RunLayout:
    offsets: tuple[dict[str, int], ...] = tuple({} for _ in range(num_layers))
    end = 0
    for layer_idx, name, size in parts:
        if size and (layers is None or layer_idx in layers):
            offsets[layer_idx][name] = end
            end += size
    num_bytes = max(at_least, round_up(end, align))
    return RunLayout(offsets, num_bytes, num_bytes - end)


def byte_rows(
    name: str, num_rows: int, row_bytes: int, device: torch.device, storage: torch.Tensor | None
) -> torch.Tensor:
    """Return rows of bytes `[num_rows, row_bytes]`: the caller's `storage`, or new ones."""
    if storage is None:
        return torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)
    shape = (num_rows, row_bytes)
    is_right = tuple(storage.shape) == shape and storage.dtype == torch.uint8
    is_there = storage.device == torch.empty(0, device=device).device
    if not is_right or not is_there or not storage.is_contiguous():
        raise ValueError(
            f"Invalid storage of {name}: expected {list(shape)} contiguous uint8 on {device}, got "
            f"{list(storage.shape)} {storage.dtype} on {storage.device}"
        )
    return storage
