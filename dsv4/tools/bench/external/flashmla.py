"""FlashMLA's decode and prefill on the rows of a bench.

Lists of rows, padded queries and schedules are made beforehand and are not timed. Our times
include that work, since our kernels find rows and split their work themselves. The prefill reads
BF16 rows, so the rows are copied beforehand too.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels.contracts import AttentionResult
from dsv4.kernels.external import find
from dsv4.kernels.external.find import Decoded, SparseDecode
from dsv4.kernels.layer_memory import existing
from dsv4.kernels.reference.addressing import visible_entries, window_positions
from dsv4.kernels.reference.append import workspace_rows
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.tools.bench.attend_case import AttendCase, check_result


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


class PrefillInputs(NamedTuple):
    """Inputs of FlashMLA's sparse prefill.

    query is `[num_tokens, heads, 512]` BF16 with 64 or 128 heads, sinks `[heads]` fp32 or None;
    values are rows `[num_rows, 1, 512]` BF16, dense; rows `[num_tokens, 1, n]` int32 names them,
    -1 for none, n a multiple of LISTED_AT_ONCE; counts `[num_tokens]` int32 says how many of them
    are read, None for all.
    """

    query: Tensor
    sinks: Tensor | None
    values: Tensor
    rows: Tensor
    counts: Tensor | None


SparsePrefill = Callable[[PrefillInputs], Decoded]


@cache
def load_flash_mla_prefill() -> SparsePrefill:
    """Load FlashMLA's sparse prefill on dense BF16 rows, from vLLM alone, or say why not."""
    find.add_environment_folder()
    operator = find.vllm_operator("sparse_prefill_fwd")

    def run(inputs: PrefillInputs) -> Decoded:
        output, _, lse = operator(
            inputs.query, inputs.values, inputs.rows, find.SOFTMAX_SCALE, find.VALUE_DIM,
            inputs.sinks, inputs.counts, None,
        )  # fmt: skip
        return Decoded(output[:, None], lse[:, :, None], None)

    return run


def checked_prefill(
    prefill: SparsePrefill, case: AttendCase, queries: Tensor
) -> Callable[[], Decoded]:
    """Return a call of FlashMLA's prefill; refuse results of `queries` that are wrong."""
    inputs = prefill_inputs(case)
    result = rotate_back(prefill(inputs), case, is_workspace=True)
    check_result(case, result, "FlashMLA's output of a chunk", queries=queries)
    return partial(prefill, inputs)


def prefill_inputs(case: AttendCase) -> PrefillInputs:
    """Copy all rows of the window workspace, then all entries, and list those of each query.

    The forward holds one chunk alone, and the query has 64 or 128 heads.
    """
    (handle,), (selected_rows,) = case.handles, case.rows
    copies = [
        gather_rows(pages, torch.arange(pages.num_rows, device=case.query.device)).bfloat16()
        for pages in (handle.window.workspace, existing(handle.memory.entries))
    ]
    rows, counts = _list_dense_rows(handle, selected_rows, case.num_entries)
    return PrefillInputs(case.query, case.sinks, torch.cat(copies)[:, None], rows, counts)


def _list_dense_rows(
    handle: LayerCacheHandle, selected_rows: Tensor | None, max_entries: int
) -> tuple[Tensor, Tensor | None]:
    """List the rows of the copy that each query attends, `[num_tokens, 1, n]`, and their counts."""
    tokens, window = handle.tokens, handle.window.window
    positions, ratio = tokens.positions.long(), handle.layer.ratio
    window_rows = workspace_rows(tokens, window_positions(positions, window), window)
    entries, entry_rows, counts = existing(handle.memory.entries), selected_rows, None
    if entry_rows is None:
        entry_rows = visible_entry_rows(
            entries, tokens, slice(None), ratio=ratio, max_entries=max_entries
        )
        counts = (window + visible_entries(positions, ratio)).int()
    num_window_rows = handle.window.workspace.num_rows
    dense_rows = torch.where(entry_rows >= 0, entry_rows + num_window_rows, -1)
    listed = torch.cat((window_rows, dense_rows), dim=1).int()
    padding = -listed.shape[1] % find.LISTED_AT_ONCE
    return torch.nn.functional.pad(listed, (0, padding), value=-1)[:, None], counts
