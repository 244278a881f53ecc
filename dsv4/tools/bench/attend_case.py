"""`AttendCase`: attention of random queries over random rows, as the benches time and check it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.kernels import ops
from dsv4.kernels.contracts import AttentionResult, LayerProjections, LayerWeights, Selection
from dsv4.kernels.layer_memory import existing
from dsv4.kernels.reference import addressing
from dsv4.tools.bench.requests import acquire_layers

DIM = 512
LARGEST_ERROR = 2.0**-7  # of the output's norm: weights and output are rounded to BF16
LSE_ERROR = 1e-3


class AttendCase(NamedTuple):
    """One forward: its handles and queries, and by layer the selected rows, None for all entries.

    num_entries is the most entries that a query attends.
    """

    name: str
    handles: list[LayerCacheHandle]
    query: Tensor
    sinks: Tensor | None
    rows: Sequence[Tensor | None]
    num_entries: int


def attend_case(
    name: str, manager: KVCacheManager, plan: ForwardPlan, *, num_entries: int, is_selected: bool
) -> AttendCase:
    """Draw normal queries for a plan and complete it.

    With is_selected each query attends a list of `num_entries` entries.
    """
    plan.complete()
    heads, device = manager.config.num_query_heads, manager.device
    query = torch.randn(plan.num_tokens, heads, DIM, device=device, dtype=torch.bfloat16)
    handles = acquire_layers(manager, plan)
    sinks = torch.zeros(heads, device=device)
    rows = [_select_rows(handle, num_entries) if is_selected else None for handle in handles]
    return AttendCase(name, handles, query, sinks, rows, num_entries)


def layer_case(
    handle: LayerCacheHandle, inputs: LayerProjections, weights: LayerWeights,
    selection: Selection | None,
) -> AttendCase:  # fmt: skip
    """Take the attention of one layer after its selection, or over all entries."""
    rows = None if selection is None else selection.rows
    num_entries = handle.plan.max_entries(handle.layer.ratio) if rows is None else rows.shape[1]
    name = handle.layer.attention_type.name
    return AttendCase(name, [handle], inputs.query, weights.sinks, [rows], num_entries)


def _select_rows(handle: LayerCacheHandle, count: int) -> Tensor:
    """Draw rows of `count` distinct visible entries per query, ascending, one from each stretch."""
    entries, tokens = existing(handle.memory.entries), handle.tokens
    visible = addressing.visible_entries(tokens.positions.long(), handle.layer.ratio)
    edges = torch.arange(count + 1, device=visible.device) * visible[:, None] // count
    starts, widths = edges[:, :-1], edges.diff(dim=1)
    entry_idx = starts + (torch.rand(widths.shape, device=widths.device) * widths).long()
    slots = addressing.token_slots(tokens)[:, None]
    return addressing.entry_rows(tokens.block_table, slots, entry_idx, entries.rows_per_page)


def attend(
    case: AttendCase,
    layer_idx: int,
    *,
    backend: str = "triton",
    batch_invariant: bool = False,
    queries: Tensor | None = None,
) -> AttentionResult:
    """Run the attention of a layer, for all queries or for those at the indices `queries`."""
    handle, rows = case.handles[layer_idx], case.rows[layer_idx]
    query, tokens, memory = case.query, handle.tokens, handle.memory
    if queries is not None:
        memory = memory._replace(rope_rows=memory.rope_rows[:, :, queries])
        query, rows = query[queries], None if rows is None else rows[queries]
        tokens = tokens._replace(
            positions=tokens.positions[queries], request_ids=tokens.request_ids[queries]
        )
    return ops.attend(
        query, case.sinks, memory, rows, tokens,
        max_entries=max(case.num_entries, handle.plan.max_entries(handle.layer.ratio)),
        batch_invariant=batch_invariant, backend=backend,
    )  # fmt: skip


def check_result(
    case: AttendCase, got: AttentionResult, what: str, *, queries: Tensor | None = None
) -> None:
    """Refuse a result of the first layer that differs from the reference's.

    `queries` limits the check to these indices.
    """
    expected = attend(case, 0, backend="reference", queries=queries)
    if queries is not None:
        got = AttentionResult(got.output[queries], got.lse[queries])
    error = (got.output.float() - expected.output.float()).norm()
    is_same = bool(error <= LARGEST_ERROR * expected.output.float().norm())
    if not is_same or not torch.allclose(got.lse, expected.lse, rtol=0, atol=LSE_ERROR):
        raise RuntimeError(f"{case.name}: {what} differs from the reference's; nothing is timed")
