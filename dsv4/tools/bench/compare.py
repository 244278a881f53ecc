"""FlashMLA's and DeepGEMM's own kernels on the pools of a bench: what they are given, and checks.

What a peer needs beside its kernel is made before and not timed: lists of rows, padded queries,
schedules, a dense copy for its prefill. Our times include it, since our kernels find rows and cut
their work themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.formats import PagedRows
from dsv4.kernels.contracts import AttentionResult
from dsv4.kernels.external import find
from dsv4.kernels.index_scratch import IndexScratch
from dsv4.kernels.reference.addressing import visible_entries, window_positions
from dsv4.kernels.reference.append import workspace_rows
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.tools.bench.requests import count_rows

_Peer = TypeVar("_Peer")


def load_peer(load: Callable[[], _Peer]) -> tuple[_Peer | None, str]:
    """A peer, or None and one sentence that says why there is none."""
    try:
        return load(), ""
    except ImportError as error:
        return None, str(error)


def peer_report(compare: bool, problems: Mapping[str, str]) -> dict[str, Any]:
    """What a result says of peers, by name, if they were to be compared: that, or the problem."""
    states = {name: problem or "compared" for name, problem in problems.items()}
    return {"peers": states} if compare else {}


class FlashMLACalls:
    """FlashMLA's decode of a step, ready to be repeated, layer by layer."""

    def __init__(
        self,
        decode: find.SparseDecode,
        handles: Sequence[LayerCacheHandle],
        query: Tensor,
        sinks: Tensor,
        rows: Sequence[Tensor | None],
        *,
        max_entries: int,
    ) -> None:
        from dsv4.kernels.external import flashmla

        self._decode, self._handles, self._query = decode, handles, query
        padded = flashmla.padded_query(query), flashmla.padded_sinks(sinks, query.shape[1])
        self._inputs = [
            flashmla.decode_inputs(
                *padded, handle.memory, layer_rows, handle.tokens,
                first_token=0, max_entries=max_entries, is_workspace=False,
            )
            for handle, layer_rows in zip(handles, rows, strict=True)
        ]  # fmt: skip
        self._schedule = decode(self._inputs[0], None).schedule

    def run(self, layer_idx: int) -> find.Decoded:
        """The layer's decode alone."""
        return self._decode(self._inputs[layer_idx], self._schedule)

    def result(self, layer_idx: int) -> AttentionResult:
        """The layer's decode as our own kernel gives it."""
        handle = self._handles[layer_idx]
        return _finish(self.run(layer_idx), handle, self._query, is_workspace=False)


class FlashMLAPrefill:
    """FlashMLA's prefill of a chunk on a dense copy of a layer's rows, ready to be repeated.

    The chunk is alone in its forward, and its heads are as many as FlashMLA takes.
    """

    def __init__(
        self,
        prefill: find.SparsePrefill,
        handle: LayerCacheHandle,
        query: Tensor,
        sinks: Tensor,
        selected_rows: Tensor | None,
        *,
        max_entries: int,
    ) -> None:
        self._prefill, self._handle = prefill, handle
        rows, counts = _list_dense_rows(handle, selected_rows, max_entries)
        self._inputs = find.PrefillInputs(query, sinks, _copy_rows(handle), rows, counts)

    def run(self) -> find.Decoded:
        """The chunk's attention alone."""
        return self._prefill(self._inputs)

    def result(self) -> AttentionResult:
        """The chunk's attention as our own kernel gives it."""
        return _finish(self.run(), self._handle, self._inputs.query, is_workspace=True)


def _finish(
    decoded: find.Decoded, handle: LayerCacheHandle, query: Tensor, *, is_workspace: bool
) -> AttentionResult:
    """FlashMLA's output, rotated back."""
    from dsv4.kernels.external import flashmla

    result = AttentionResult(
        torch.empty_like(query),
        torch.empty(query.shape[:2], dtype=torch.float32, device=query.device),
    )
    flashmla.finish(
        result, decoded, handle.memory, handle.tokens,
        first_token=0, is_workspace=is_workspace,
    )  # fmt: skip
    return result


def _copy_rows(handle: LayerCacheHandle) -> Tensor:
    """`[num_rows, 1, dim]` BF16: all rows of the window workspace, then all entries."""
    sources = (handle.window.workspace, _entries(handle))
    device = handle.positions.device
    copies = [
        gather_rows(pages, torch.arange(count_rows(pages), device=device)).bfloat16()
        for pages in sources
    ]
    return torch.cat(copies)[:, None]


def _list_dense_rows(
    handle: LayerCacheHandle, selected_rows: Tensor | None, max_entries: int
) -> tuple[Tensor, Tensor | None]:
    """Rows of the dense copy that each query attends, `[num_tokens, 1, n]`, and their counts."""
    tokens, window = handle.tokens, handle.window.window
    positions, ratio = tokens.positions.long(), handle.layer.ratio
    window_rows = workspace_rows(tokens, window_positions(positions, window), window)
    entry_rows, counts = selected_rows, None
    if entry_rows is None:
        entry_rows = visible_entry_rows(
            _entries(handle), tokens, slice(None), ratio=ratio, max_entries=max_entries
        )
        counts = (window + visible_entries(positions, ratio)).int()
    num_window_rows = count_rows(handle.window.workspace)
    dense_rows = torch.where(entry_rows >= 0, entry_rows + num_window_rows, -1)
    listed = torch.cat((window_rows, dense_rows), dim=1).int()
    padding = -listed.shape[1] % find.LISTED_AT_ONCE
    return torch.nn.functional.pad(listed, (0, padding), value=-1)[:, None], counts


def _entries(handle: LayerCacheHandle) -> PagedRows:
    entries = handle.memory.entries
    assert entries is not None, handle.layer
    return entries


class DeepGEMMCalls:
    """DeepGEMM's scores of a step whose queries the workspace holds, layer by layer."""

    def __init__(
        self,
        logits: find.PagedLogits,
        handles: Sequence[LayerCacheHandle],
        scratch: IndexScratch,
        query: Tensor,
        *,
        max_entries: int,
    ) -> None:
        from dsv4.kernels.external import deepgemm

        self._logits, self._max_entries = logits, max_entries
        if logits.set_overlap is not None:
            logits.set_overlap(True)  # programmatic dependent launch, as vLLM has it
        self._inputs = [
            deepgemm.score_inputs(
                scratch, handle.memory, handle.tokens, num_heads=query.shape[1],
                max_entries=max_entries,
                first_token=0, num_tokens=len(query),
            )
            for handle in handles
        ]  # fmt: skip
        self._schedule = logits.make_schedule(self._inputs[0].lengths)

    def run(self, layer_idx: int) -> Tensor:
        """The layer's scores, `[num_tokens, max_entries]`."""
        return self._logits.score(*self._inputs[layer_idx], self._schedule, self._max_entries)
