"""FlashMLA's decode on the pools of a bench.

Lists of rows, padded queries and schedules are made beforehand and are not timed. Our times
include that work, since our kernels find rows and split their work themselves.
"""

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels.contracts import AttentionResult
from dsv4.kernels.external.find import Decoded, SparseDecode
from dsv4.tools.bench.attend_case import AttendCase


class FlashMLACalls:
    """FlashMLA's decode of a step, ready to be repeated, layer by layer."""

    def __init__(self, decode: SparseDecode, case: AttendCase) -> None:
        from dsv4.kernels.external import flashmla

        self._decode, self._handles, self._query = decode, case.handles, case.query
        sinks = flashmla.padded_sinks(case.sinks, case.query.shape[1])
        self._inputs = [
            flashmla.decode_inputs(
                flashmla.padded_query(case.query), sinks, handle.memory, rows, handle.tokens,
                first_token=0, max_entries=case.num_entries, is_workspace=False,
            )
            for handle, rows in zip(case.handles, case.rows, strict=True)
        ]  # fmt: skip
        self._schedule = decode(self._inputs[0], None).schedule

    def run(self, layer_idx: int) -> Decoded:
        """Decode a layer, without the kernels around FlashMLA's."""
        return self._decode(self._inputs[layer_idx], self._schedule)

    def result(self, layer_idx: int) -> AttentionResult:
        """Decode a layer and rotate the output back, as our own kernel does."""
        handle = self._handles[layer_idx]
        return rotate_back(self.run(layer_idx), handle, self._query, is_workspace=False)


def rotate_back(
    decoded: Decoded, handle: LayerCacheHandle, query: Tensor, *, is_workspace: bool
) -> AttentionResult:
    """Rotate FlashMLA's output of all tokens back."""
    from dsv4.kernels.external import flashmla

    result = AttentionResult(
        torch.empty_like(query),
        torch.empty(query.shape[:2], dtype=torch.float32, device=query.device),
    )
    flashmla.finish(
        result, decoded, handle.memory, handle.tokens, first_token=0, is_workspace=is_workspace
    )
    return result
