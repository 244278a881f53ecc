"""SGLang's writes of a layer in a decode step, for `dsv4 bench write --compare`.

SGLang's kernels get pools and state of their own, in the same row formats. Their projections are
fp32, with kv and gate in one tensor; ours are BF16. A CSA layer is five launches: the window row,
then two each for the entry and the index key. Plans are made beforehand and are not timed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.formats import PagedRows, RowFormat
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    LayerProjections,
    LayerWeights,
)
from dsv4.kernels.layer_memory import existing
from dsv4.kernels.reference.addressing import entry_rows, ring_rows
from dsv4.kernels.reference.gather import gather_rows
from dsv4.testing import join_rows, model_projections, model_weights, move_to, take_rows
from dsv4.tools.bench.external.sglang import RING_ROWS, WINDOW_PAGE, SGLangKernels
from dsv4.tools.bench.external.sglang_index import are_rows_close, complex_frequencies
from dsv4.tools.bench.requests import manager_for

PAGE_ALIGN = 576  # bytes, for pages of KV rows
CHECKED_LENGTHS = (256, 128)  # both close a window of every ratio
ROUNDED_TWICE = {"fp8": 2.0**-3, "mxfp4": 2.0**-1}  # of a row's norm: E4M3 by 2^-4, E2M1 by 2^-2


class _Compressor(NamedTuple):
    """One compressor's memory, inputs and weights."""

    state: Tensor
    projections: Tensor
    bias: Tensor
    norm_weight: Tensor
    pages: PagedRows


class SGLangLayer:
    """SGLang's writes of a layer in a step of one token a request, ready to be repeated."""

    def __init__(
        self,
        kernels: SGLangKernels,
        handle: LayerCacheHandle,
        inputs: LayerProjections,
        weights: LayerWeights,
        frequencies: Tensor,
    ) -> None:
        self._kernels, self._eps = kernels, handle.config.rms_norm_eps
        self._kv, self._kv_norm = inputs.kv, weights.kv_norm.to(inputs.kv.dtype)
        self._positions, self._frequencies = handle.positions, frequencies
        self._slots = torch.arange(len(inputs.kv), device=inputs.kv.device)
        layout, self._ratio = handle.memory.layout, handle.layer.ratio
        self.window = self._pages(layout.kv_row, WINDOW_PAGE, PAGE_ALIGN)
        positions = self._positions.long()
        self.window_rows = (self._slots * WINDOW_PAGE + positions % WINDOW_PAGE).int()
        self._compressors: list[_Compressor] = []
        if not self._ratio:
            return
        page_rows = layout.entries_per_block
        self.entry_rows = self._slots * page_rows + positions // self._ratio % page_rows
        self._plan = kernels.plan_compress(self._ratio, self._slots, positions + 1)
        for projected, learned, row, align in (
            (inputs.compressor, weights.compressor, layout.kv_row, PAGE_ALIGN),
            (inputs.indexer, weights.indexer, layout.index_row, 1),
        ):
            if projected is not None and learned is not None:
                projections = _joined(projected)
                pages = self._pages(row, page_rows, align)
                num_pages = len(self._slots) * RING_ROWS[self._ratio] // self._ratio
                shape = (num_pages, self._ratio, projections.shape[1])
                state = torch.randn(shape, device=projections.device)
                norm_weight = learned.norm_weight.float()
                # Rows of the previous window, then of this one.
                assert isinstance(learned, CompressorWeights), "V4's"
                bias = existing(learned.position_bias).float()
                bias = torch.cat(bias.split(len(norm_weight), dim=1))
                self._compressors.append(_Compressor(state, projections, bias, norm_weight, pages))

    @property
    def stored(self) -> list[tuple[PagedRows, Tensor]]:
        """The pages that the step writes, and the written rows."""
        entries = [(compressor.pages, self.entry_rows) for compressor in self._compressors]
        return [(self.window, self.window_rows.long()), *entries]

    def run(self) -> None:
        kernels, eps, frequencies = self._kernels, self._eps, self._frequencies
        kernels.store_window(
            self._kv, self._kv_norm, eps, frequencies, self._positions, self.window_rows,
            self.window.storage, WINDOW_PAGE,
        )  # fmt: skip
        for state, projections, bias, norm_weight, pages in self._compressors:
            pooled = kernels.pool(state, projections, bias, self._plan)
            kernels.store_entries(
                pooled, self._plan, norm_weight, eps, frequencies, self.entry_rows, pages.storage,
                pages.rows_per_page, pages.format.name == "mxfp4",
            )  # fmt: skip

    def remember(self, request_idx: int, history: LayerProjections) -> None:
        """Store the last tokens before the step in the state of a request."""
        inputs = [each for each in (history.compressor, history.indexer) if each is not None]
        for compressor, projected in zip(self._compressors, inputs, strict=True):
            num_rows = RING_ROWS[self._ratio]
            ring = compressor.state.view(-1, num_rows, compressor.state.shape[-1])[request_idx]
            rows = _joined(projected)
            last = torch.arange(len(rows), device=ring.device)[-num_rows:]
            ring[last % num_rows] = rows[last]

    def _pages(self, row: RowFormat, page_rows: int, align: int) -> PagedRows:
        shape = (len(self._slots), row.page_bytes(page_rows, align=align))
        storage = torch.zeros(shape, dtype=torch.uint8, device=self._slots.device)
        return row.pages(storage, offset=0, rows_per_page=page_rows)


def check_sglang(kernels: SGLangKernels, config: CacheConfig, *, device: str = "cuda") -> None:
    """Refuse to time kernels whose rows differ from the reference's by more than two roundings."""
    weights = move_to(device, model_weights(config, seed=0)[0])
    weights = weights._replace(kv_norm=weights.kv_norm.bfloat16().float())
    requests = [
        move_to(device, model_projections(config, length, seed=length, dtype=torch.bfloat16)[0])
        for length in CHECKED_LENGTHS
    ]
    handle = _write_reference(config, requests, weights, device=device)
    inputs = join_rows([take_rows(request, slice(-1, None)) for request in requests])
    layer = SGLangLayer(kernels, handle, inputs, weights, complex_frequencies(handle))
    for idx, request in enumerate(requests):
        layer.remember(idx, take_rows(request, slice(0, -1)))
    layer.run()
    for (pages, rows), expected in zip(layer.stored, _reference_rows(handle), strict=True):
        bound = ROUNDED_TWICE[pages.format.name]
        if not are_rows_close(gather_rows(pages, rows), gather_rows(*expected), bound=bound):
            kind = config.schedule[0].attention_type.name
            raise RuntimeError(
                f"{kind}: SGLang's {pages.format.name} rows differ from the reference's; "
                "nothing is timed"
            )


def _write_reference(
    config: CacheConfig, requests: list[LayerProjections], weights: LayerWeights, *, device: str
) -> LayerCacheHandle:
    """Write requests by the reference; a second forward writes the last token of each."""
    lengths = [len(request.kv) for request in requests]
    manager = manager_for(
        config, len(lengths), max(lengths), device=device, chunk=sum(lengths), backend="reference"
    )
    slots = manager.open_requests(len(lengths))
    before = [0] * len(lengths)
    for after in ([length - 1 for length in lengths], lengths):
        handle = manager.acquire(0, prepare_forward(manager, slots, before, after))
        spans = [slice(*span) for span in zip(before, after, strict=True)]
        inputs = [take_rows(request, span) for request, span in zip(requests, spans, strict=True)]
        handle.write(join_rows(inputs), weights)
        before = after
    return handle


def _reference_rows(handle: LayerCacheHandle) -> list[tuple[PagedRows, Tensor]]:
    """Return the pages that the reference wrote in its last step, and the written rows."""
    tokens, memory = handle.tokens, handle.memory
    slots, positions = tokens.request_slots.long(), tokens.positions.long()
    ring = memory.window.ring
    written = [(ring, ring_rows(slots, positions, ring.rows_per_page))]
    for pages in (memory.entries, memory.index_keys):
        if pages is not None:
            entries = positions // handle.layer.ratio
            rows = entry_rows(tokens.block_table, slots, entries, pages.rows_per_page)
            written.append((pages, rows))
    return written


def _joined(projected: CompressorInputs | IndexInputs) -> Tensor:
    return torch.cat((existing(projected.kv), existing(projected.gate)), dim=1).float()
