"""Index: score a query against its request's keys and choose the best entries."""

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    max_entries: int,
    candidates: Tensor | None = None,
    chosen_scores: Tensor | None = None,
    block_scores: Tensor | None = None,
) -> Selection:
    """Select the `index_topk` best visible entries of each token.

    Args:
        query: `[num_tokens, index_heads, index_head_dim]` fp32 or bf16, before RoPE.
        head_weights: `[num_tokens, index_heads]`, as projected; the scales are applied here.
        max_entries: Upper bound of the entries that a token of this forward sees.
        candidates: `[num_tokens, blocks]` int32, the blocks that entries may come from, ascending,
            then -1; None for all. They have all entries of a token that sees at most `index_topk`,
            unless `chosen_scores` are asked for.
        chosen_scores: `[num_tokens, index_topk]` fp32, takes the scores of what is selected, of all
            tokens alike.
        block_scores: `[num_tokens, candidate_blocks]` fp32, takes the largest scores of the blocks
            that are published; with `chosen_scores`.

    Notes:
        Of equal scores the smaller entry is chosen; a NaN score is never chosen. A token that sees
        at most `index_topk` entries selects all of them, whatever their scores.
    """
    keys, global_scale, layout = existing(memory.index_keys), memory.global_scale, memory.layout
    ratio, topk, size = layout.ratio, layout.index_topk, layout.candidate_size
    slots, positions = addressing.token_slots(tokens), tokens.positions.long()
    counts = addressing.visible_entries(positions, ratio)
    counts = torch.where(slots >= 0, counts, 0)
    width = min(topk, max_entries)
    num_tokens = len(positions)
    first = torch.arange(max(width, layout.candidate_blocks), device=positions.device)
    blocks = first[: layout.candidate_blocks].expand(num_tokens, -1)
    blocks = torch.where(blocks * size < counts[:, None], blocks, -1)
    if max_entries <= topk and chosen_scores is None:
        entry_idx = torch.where(first[:width] < counts[:, None], first[:width], -1)
    else:
        quantised = index_query(
            query, keys.format, memory.rope.take(slice(len(query))),
            has_hadamard=layout.has_hadamard, global_scale=global_scale,
        )  # fmt: skip
        step = max(1, _SLICE_ELEMENTS // (max_entries * keys.format.dim))
        entry_idx = positions.new_full((num_tokens, width), -1)
        for start in range(0, num_tokens, step):
            part = slice(start, start + step)
            if candidates is None:
                listed, num_listed = None, counts[part]
                rows = visible_entry_rows(keys, tokens, part, ratio=ratio, max_entries=max_entries)
            else:
                listed, num_listed = _members(candidates[part].long(), counts[part], size)
                rows = addressing.entry_rows(
                    tokens.block_table, slots[part, None], listed, keys.rows_per_page
                )
            values = gather_rows(keys, rows, global_scale=global_scale)
            scores = score_entries(quantised[part], head_weights[part], values)
            chosen = select_topk(scores, num_listed, topk)[:, :width]
            if chosen_scores is not None:
                chosen_scores[part, : chosen.shape[1]] = scores.gather(1, chosen.clamp(min=0))
            if listed is not None:
                chosen = torch.where(chosen >= 0, listed.gather(1, chosen.clamp(min=0)), -1)
            entry_idx[part, : chosen.shape[1]] = chosen
            if layout.candidate_blocks:
                best = select_blocks(scores, counts[part], layout.candidate_blocks, size)
                blocks[part, : best.shape[1]] = best
                if block_scores is not None:
                    block_scores[part] = largest_scores(scores, blocks[part], counts[part], size)
    padded = positions.new_full((len(positions), topk), -1)
    padded[:, :width] = entry_idx
    rows = addressing.entry_rows(tokens.block_table, slots[:, None], padded, keys.rows_per_page)
    return Selection(padded.int(), rows, (padded >= 0).sum(dim=1).int(), blocks.int())


def _members(blocks: Tensor, counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Entries `[n, blocks × size]` of ascending blocks, then -1, and their number `[n]`.

    The newest block is the last, so that visible entries come before all others.
    """
    entries = (blocks[:, :, None] * size + torch.arange(size, device=blocks.device)).flatten(1)
    is_real = (blocks >= 0).repeat_interleave(size, dim=1) & (entries < counts[:, None])
    return torch.where(is_real, entries, -1), is_real.sum(dim=1)


def largest_scores(scores: Tensor, blocks: Tensor, counts: Tensor, size: int) -> Tensor:
    """Find the largest score of each listed block, `[n, blocks]`; -inf for none but NaN."""
    entries, _ = _members(blocks, counts, size)
    listed = scores.gather(1, entries.clamp(min=0))
    listed = torch.where((entries >= 0) & ~torch.isnan(listed), listed, -torch.inf)
    return listed.view(*blocks.shape, size).amax(dim=2)


def select_blocks(scores: Tensor, counts: Tensor, num_blocks: int, size: int) -> Tensor:
    """Blocks of `size` entries with the largest scores, ascending, then -1.

    The block of the newest entry is always among them. It may hold few entries as yet.

    Args:
        scores: `[n, entries]` fp32; those beyond `counts` `[n]` are not used.

    Returns:
        `[n, min(num_blocks, blocks of the entries)]` int64.
    """
    idx = torch.arange(scores.shape[1], device=scores.device)
    is_used = (idx < counts[:, None]) & ~torch.isnan(scores)
    used = pad(torch.where(is_used, scores, -torch.inf), (0, -len(idx) % size), value=-torch.inf)
    largest = used.unflatten(1, (-1, size)).amax(dim=2)
    newest = (counts - 1).div(size, rounding_mode="floor")
    is_newest = torch.arange(largest.shape[1], device=scores.device) == newest[:, None]
    largest = torch.where(is_newest, torch.inf, largest)
    return select_topk(largest, -(-counts // size), num_blocks)


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
