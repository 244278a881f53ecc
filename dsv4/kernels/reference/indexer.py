"""Index: score a query against its request's keys and choose the best entries."""

import torch
from torch import Tensor

from dsv4.formats import RowFormat
from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.reference import addressing
from dsv4.kernels.reference.arithmetic import hadamard, rotate
from dsv4.kernels.reference.codec import decode, encode
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.rope import RopeRows

_SLICE_ELEMENTS = 1 << 23  # key elements scored at once, to bound the temporaries


def select_entries(
    query: Tensor, head_weights: Tensor, memory: LayerMemory, tokens: TokenMap, *, max_entries: int
) -> Selection:
    """Select the `index_topk` best visible entries of each token.

    Args:
        query: `[num_tokens, index_heads, index_head_dim]` fp32 or bf16, before RoPE.
        head_weights: `[num_tokens, index_heads]`, as projected; the scales are applied here.
        max_entries: Upper bound of the entries that a token of this forward sees.

    Notes:
        Of equal scores the smaller entry is chosen; a NaN score is never chosen. A token that sees
        at most `index_topk` entries selects all of them, whatever their scores.
    """
    keys, global_scale = existing(memory.index_keys), memory.global_scale
    ratio, topk = memory.layout.ratio, memory.layout.index_topk
    slots, positions = addressing.token_slots(tokens), tokens.positions.long()
    counts = addressing.visible_entries(positions, ratio)
    counts = torch.where(slots >= 0, counts, 0)
    width = min(topk, max_entries)
    if max_entries <= topk:
        entry_idx = torch.arange(width, device=positions.device).expand(len(positions), -1)
        entry_idx = torch.where(entry_idx < counts[:, None], entry_idx, -1)
    else:
        quantised = index_query(
            query, keys.format, memory.rope.take(slice(len(query))),
            has_hadamard=memory.layout.has_hadamard, global_scale=global_scale,
        )  # fmt: skip
        step = max(1, _SLICE_ELEMENTS // (max_entries * keys.format.dim))
        selected = []
        for start in range(0, len(positions), step):
            part = slice(start, start + step)
            rows = visible_entry_rows(keys, tokens, part, ratio=ratio, max_entries=max_entries)
            values = gather_rows(keys, rows, global_scale=global_scale)
            scores = score_entries(quantised[part], head_weights[part], values)
            selected.append(select_topk(scores, counts[part], topk))
        entry_idx = torch.cat(selected) if selected else positions.new_full((0, width), -1)
    padded = positions.new_full((len(positions), topk), -1)
    padded[:, :width] = entry_idx
    rows = addressing.entry_rows(tokens.block_table, slots[:, None], padded, keys.rows_per_page)
    return Selection(padded.int(), rows, (padded >= 0).sum(dim=1).int())


def index_query(
    query: Tensor,
    fmt: RowFormat,
    rope: RopeRows,
    *,
    has_hadamard: bool,
    global_scale: Tensor | None,
) -> Tensor:
    """Rotate index queries, transform them as the keys were, and quantise them as the keys are.

    Returns:
        `[num_tokens, index_heads, index_head_dim]` fp32, on the grid of the key format.
    """
    rotated = rotate(query.float(), rope.cos[:, None], rope.sin[:, None])
    values = (hadamard(rotated) if has_hadamard else rotated).flatten(0, 1)
    stored = encode(fmt, values, global_scale=global_scale)
    return decode(fmt, stored, global_scale=global_scale).view_as(rotated)


def score_entries(query: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """sum_h w_h ReLU(q_h · k), accumulated in fp64 and rounded once.

    Args:
        query: `[n, heads, dim]`, keys: `[n, entries, dim]`, head_weights: `[n, heads]`.

    Returns:
        `[n, entries]` fp32.
    """
    heads, dim = query.shape[1:]
    weights = head_weights.double() * (dim**-0.5 * heads**-0.5)
    products = torch.bmm(keys.double(), query.double().transpose(1, 2)).relu_()
    return torch.bmm(products, weights[:, :, None])[:, :, 0].float()


def select_topk(scores: Tensor, counts: Tensor, topk: int) -> Tensor:
    """Indices of the `topk` largest of the first `counts` scores, ascending, then -1.

    Args:
        scores: `[n, entries]` fp32. Scores beyond `counts` `[n]` are not used. Where `counts` is
            at most `topk`, none are: all entries are chosen.

    Returns:
        `[n, min(topk, entries)]` int64.
    """
    num_entries = scores.shape[1]
    width = min(topk, num_entries)
    idx = torch.arange(num_entries, device=scores.device)
    has_few = counts[:, None] <= topk
    is_candidate = (idx < counts[:, None]) & (has_few | ~torch.isnan(scores))
    scores = torch.where(is_candidate & ~has_few, scores, -torch.inf)
    # Candidates first, then by score; stable, so that the smaller index wins a tie.
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    is_first = is_candidate.gather(1, order)
    order = order.gather(1, torch.sort(~is_first, dim=1, stable=True).indices)[:, :width]
    is_chosen = is_candidate.gather(1, order)
    chosen = torch.where(is_chosen, order, num_entries).sort(dim=1).values
    return torch.where(chosen < num_entries, chosen, -1)
