"""FlashMLA's and DeepGEMM's own kernels on the pools of a bench: what they are given, and checks.

What a peer needs beside its kernel is made before and not timed: lists of rows, padded queries,
schedules. Our times include it, since our kernels find rows and cut their work themselves.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels import AttentionResult
from dsv4.kernels.index_scratch import IndexScratch
from dsv4.kernels.peers import find

_Peer = TypeVar("_Peer")


def load_peer(load: Callable[[], _Peer]) -> tuple[_Peer | None, str]:
    """A peer, or None and one sentence that says why there is none."""
    try:
        return load(), ""
    except ImportError as error:
        return None, str(error)


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
        from dsv4.kernels.peers import flashmla

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
        from dsv4.kernels.peers import flashmla

        handle, query = self._handles[layer_idx], self._query
        result = AttentionResult(
            torch.empty_like(query),
            torch.empty(query.shape[:2], dtype=torch.float32, device=query.device),
        )
        flashmla.finish(
            result, self.run(layer_idx), handle.memory, handle.tokens, handle.rope,
            first_token=0, is_workspace=False,
        )  # fmt: skip
        return result


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
        from dsv4.kernels.peers import deepgemm

        self._logits, self._max_entries = logits, max_entries
        if logits.set_overlap is not None:
            logits.set_overlap(True)  # programmatic dependent launch, as vLLM has it
        self._inputs = [
            deepgemm.score_inputs(
                scratch, handle.memory, handle.tokens, num_heads=query.shape[1],
                topk=handle.config.index_topk, max_entries=max_entries,
                first_token=0, num_tokens=len(query),
            )
            for handle in handles
        ]  # fmt: skip
        self._schedule = logits.make_schedule(self._inputs[0].lengths)

    def run(self, layer_idx: int) -> Tensor:
        """The layer's scores, `[num_tokens, max_entries]`."""
        return self._logits.score(*self._inputs[layer_idx], self._schedule, self._max_entries)
