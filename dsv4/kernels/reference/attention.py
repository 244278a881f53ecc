"""Attend: one softmax over the window and the compressed entries, with a sink per head."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.formats import next_power_of_two
from dsv4.kernels.contracts import AttentionResult, TokenMap
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.reference.arithmetic import fold_pairwise, rotate, round_to
from dsv4.kernels.reference.gather import gather_rows, rows_in, visible_entry_rows, window_values_of
from dsv4.rope import RopeRows

_SLICE_ELEMENTS = 1 << 23  # KV elements attended at once, to bound the temporaries


def attend(
    query: Tensor,
    sinks: Tensor | None,
    memory: LayerMemory,
    selected_rows: Tensor | None,
    tokens: TokenMap,
    *,
    max_entries: int,
    is_query_raw: bool = False,
    batch_invariant: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> AttentionResult:
    """Attention of each token over its window and entries, rotated back at its position.

    Args:
        query: `[num_tokens, heads, head_dim]` fp32 or bf16, normed and rotated.
        sinks: `[heads]` logits that take weight and give no value. Without sinks, results over
            parts of the context can be merged by their lse.
        selected_rows: `[num_tokens, k]` flat rows to attend, -1 for none; None means every
            visible entry. A row outside of the pool counts as none.
        max_entries: Upper bound of the entries that a token of this forward sees.
        is_query_raw: The query is as projected; it is first prepared, see `prepare_query`.
        batch_invariant: A token's bits must not depend on the other tokens. Kernels guarantee it.
            The reference does not: PyTorch's sums may depend on shapes.
    """
    window, entries = memory.window, memory.entries
    if is_query_raw:
        query = prepare_query(query, memory)
    num_rows = window.window
    if entries is not None:
        num_rows += max_entries if selected_rows is None else selected_rows.shape[1]
    step = max(1, _SLICE_ELEMENTS // (num_rows * query.shape[-1]))
    outputs, lses = [], []
    for start in range(0, query.shape[0], step):
        part = slice(start, min(start + step, query.shape[0]))
        values, is_present = window_values_of(window, tokens, part)
        if entries is not None:
            if selected_rows is None:
                rows = visible_entry_rows(
                    entries, tokens, part, ratio=memory.layout.ratio, max_entries=max_entries
                )
            else:
                rows = rows_in(entries, selected_rows[part])
            values = torch.cat((values, gather_rows(entries, rows)), dim=1)
            is_present = torch.cat((is_present, rows >= 0), dim=1)
        output, lse = attend_dense(
            query[part].to(compute_dtype), values.to(compute_dtype), is_present, sinks
        )
        outputs.append(unrotate(output, memory.rope.take(part)).to(query.dtype))
        lses.append(lse.float())
    if not outputs:
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        return AttentionResult(query.new_empty(query.shape), lse)
    return AttentionResult(torch.cat(outputs), torch.cat(lses))


def prepare_query(query: Tensor, memory: LayerMemory) -> Tensor:
    """Norm projected queries per head, without a weight, and rotate them at their positions.

    V4.1 has no norm. All is fp32, and rounded once, to the query's dtype. Squares are added
    pairwise, neighbours first, as if there were a power of two of channels. Every kernel follows
    this order.
    """
    rope = memory.rope.take(slice(len(query)))
    wide = query.float()
    if memory.layout.norms_query:
        wide = wide * _query_factors(wide, memory.layout.rms_norm_eps)
    rotated = rotate(wide, rope.cos[:, None], rope.sin[:, None])
    return round_to(rotated, query.dtype)


def _query_factors(wide: Tensor, eps: float) -> Tensor:
    """Compute the factor of each head's norm, `[n, heads, 1]`."""
    dim = wide.shape[-1]
    squares = pad(wide * wide, (0, next_power_of_two(dim) - dim)).flatten(0, 1)
    mean = fold_pairwise(squares[:, :, None]).view(*wide.shape[:2], 1) * (1.0 / dim)
    # PyTorch's fp32 root is not rounded correctly; this one is.
    root = torch.sqrt((mean + eps).double()).float()
    return 1.0 / root


def attend_dense(
    query: Tensor, values: Tensor, is_present: Tensor, sinks: Tensor | None
) -> AttentionResult:
    """Softmax attention in the dtype of its inputs; K and V are the same rows.

    Args:
        query: `[n, heads, dim]`.
        values: `[n, rows, dim]`; is_present: `[n, rows]`.

    Notes:
        A query that sees nothing has an output of 0 and an lse of -inf. A sink of -inf takes no
        weight, a sink of +inf takes all.
    """
    logits = torch.bmm(query, values.transpose(1, 2)) * query.shape[-1] ** -0.5
    logits = torch.where(is_present[:, None], logits, -torch.inf)
    largest = logits.amax(dim=-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(logits - largest)
    total = weights.sum(dim=-1, keepdim=True)
    with_sink = total
    if sinks is not None:
        with_sink = total + torch.exp(sinks.to(query.dtype)[None, :, None] - largest)
    output = torch.bmm(weights, values) / with_sink
    output = torch.where(total > 0, output, 0.0)
    return AttentionResult(output, (total.log() + largest).squeeze(-1))


def unrotate(output: Tensor, rope: RopeRows) -> Tensor:
    """Undo the rotation that the values carry, at the query's position."""
    cos, sin = (each[:, None].to(output.dtype) for each in rope)
    return rotate(output, cos, -sin)
