"""FlashMLA's decode on the pools of a bench.

Lists of rows, padded queries and schedules are made beforehand and are not timed. Our times
include that work, since our kernels find rows and split their work themselves.
"""

from collections.abc import Callable

import torch

from dsv4.kernels.contracts import AttentionResult
from dsv4.kernels.external.find import Decoded, SparseDecode
from dsv4.tools.bench.attend_case import AttendCase


def decode_calls(decode: SparseDecode, case: AttendCase) -> Callable[[int], Decoded]:
    """Return a function that decodes a layer, without the kernels around FlashMLA's."""
    from dsv4.kernels.external import flashmla

    query = flashmla.padded_query(case.query)
    sinks = flashmla.padded_sinks(case.sinks, case.query.shape[1])
    inputs = [
        flashmla.decode_inputs(
            query, sinks, handle.memory, rows, handle.tokens,
            first_token=0, max_entries=case.num_entries, is_workspace=False,
        )
        for handle, rows in zip(case.handles, case.rows, strict=True)
    ]  # fmt: skip
    schedule = decode(inputs[0], None).schedule
    return lambda layer_idx: decode(inputs[layer_idx], schedule)


def rotate_back(decoded: Decoded, case: AttendCase, *, is_workspace: bool) -> AttentionResult:
    """Rotate FlashMLA's output of the first layer back, as our own kernel does."""
    from dsv4.kernels.external import flashmla

    handle, query = case.handles[0], case.query
    result = AttentionResult(
        torch.empty_like(query),
        torch.empty(query.shape[:2], dtype=torch.float32, device=query.device),
    )
    flashmla.finish(
        result, decoded, handle.memory, handle.tokens, first_token=0, is_workspace=is_workspace
    )
    return result
