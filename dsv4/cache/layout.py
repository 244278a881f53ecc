"""Where each layer's bytes lie inside a block and inside a request's fixed state.

    block  | L0 page | L1 page | ... | L0 keys | L2 keys | ... | pad |     × num_blocks
    slot   | L0 ring | L1 ring | ... | L0 tail | L0 index tail | ... | pad |  × max_requests

A block is one run of bytes over all layers, and so is a slot: copying, swapping or sending
one is a single copy. A layer's pool is a strided view whose stride is the run's size, so the
run itself is rounded up to `page_align`, as kernels that check the page stride need it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dsv4.cache.schema import LayerCacheSchema
from dsv4.formats import round_up


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


def block_layout(schemas: tuple[LayerCacheSchema, ...], *, page_align: int) -> RunLayout:
    """Pages of one block: all KV entries, then all index keys."""
    return _lay_out(
        len(schemas),
        [
            *((idx, "entries", s.page_bytes) for idx, s in enumerate(schemas)),
            *((idx, "index_keys", s.index_page_bytes) for idx, s in enumerate(schemas)),
        ],
        align=page_align,
    )


def slot_layout(schemas: tuple[LayerCacheSchema, ...], *, page_align: int) -> RunLayout:
    """Fixed state of one request: all window rings, then all tails."""
    return _lay_out(
        len(schemas),
        [
            *((idx, "ring", s.ring_bytes) for idx, s in enumerate(schemas)),
            *((idx, "tail", s.tail_bytes) for idx, s in enumerate(schemas)),
            *((idx, "index_tail", s.index_tail_bytes) for idx, s in enumerate(schemas)),
        ],
        align=page_align,
    )


def _lay_out(num_layers: int, parts: Iterable[tuple[int, str, int]], *, align: int) -> RunLayout:
    offsets: tuple[dict[str, int], ...] = tuple({} for _ in range(num_layers))
    end = 0
    for layer_idx, name, size in parts:
        if size:
            offsets[layer_idx][name] = end
            end += size
    return RunLayout(offsets, round_up(end, align), round_up(end, align) - end)
