"""The workspace of the index: how much a token takes of it, and how many it holds at a time.

Scores of all tokens of a forward would take gigabytes. They are made for as many tokens as the
workspace holds, and their entries chosen, before the next ones are scored over them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.formats import BYTE_ALIGN, round_up

SCRATCH_LIMIT = 64 << 20  # bytes; one token at a time where that is not enough for one
WHOLE_ENTRIES = 8192  # entries that one program takes as they are
NARROW_ENTRIES = 4096  # the fewest that it has room for when it starts from groups
GROUP = 8  # neighbours whose largest score stands for them
MIN_HEADS = 16  # of a matrix product
QUERY_BYTES = {"fp8": 1, "mxfp4": 1, "fp32": 4}  # of a channel, by key format; 2 for the others


class IndexScratch(NamedTuple):
    """What is kept of each token between the launches, `num_rows` tokens at a time.

    queries is `[num_rows, padded heads × padded dim]` in the operand's bytes, weights
    `[num_rows, padded heads]` fp32, for mxfp4 followed by `[groups, padded heads]` rests,
    scores `[num_rows, at least max_entries]` fp32, and group_tops
    `[num_rows, at least num_group_tops]` int32, empty where rows are taken whole.
    """

    queries: Tensor
    weights: Tensor
    scores: Tensor
    group_tops: Tensor

    @property
    def num_rows(self) -> int:
        return self.scores.shape[0]


class IndexRowBytes(NamedTuple):
    """Bytes of a token in each tensor of `IndexScratch`."""

    queries: int
    weights: int
    scores: int
    group_tops: int


def padded_heads(num_heads: int) -> int:
    """Heads of a query as it lies in the workspace; those beyond num_heads weigh nothing."""
    return max(MIN_HEADS, _next_power_of_two(num_heads))


def narrow_width(topk: int) -> int:
    """Scores that a program has room for when it starts from groups: all members of topk."""
    return max(NARROW_ENTRIES, GROUP * _next_power_of_two(topk))


def group_levels(max_entries: int, *, topk: int) -> int:
    """How often groups are made of so many entries until a program has room for all of them."""
    width = narrow_width(topk)
    levels, num_groups = 0, max_entries
    while num_groups > (width if levels else max(width, WHOLE_ENTRIES)):
        levels, num_groups = levels + 1, -(-num_groups // GROUP)
    return levels


def padded_entries(max_entries: int, *, levels: int) -> int:
    """So many entries, up to whole groups of the last level's groups."""
    return round_up(max_entries, GROUP ** (levels + 1))


def num_group_tops(max_entries: int, *, topk: int) -> int:
    """Groups of all levels."""
    levels = group_levels(max_entries, topk=topk)
    padded = padded_entries(max_entries, levels=levels)
    return sum(padded // GROUP ** (level + 1) for level in range(levels))


def index_row_bytes(
    key_format: str, *, num_heads: int, dim: int, topk: int, max_entries: int
) -> IndexRowBytes:
    """Bytes that a token takes when it can see `max_entries` entries; more for more."""
    heads, block = padded_heads(num_heads), _next_power_of_two(dim)
    return IndexRowBytes(
        heads * block * QUERY_BYTES.get(key_format, 2),
        heads * 4 * (1 + (block // 32 if key_format == "mxfp4" else 0)),
        round_up(max_entries * 4, BYTE_ALIGN),
        round_up(num_group_tops(max_entries, topk=topk) * 4, BYTE_ALIGN),
    )


def index_scratch_bytes(
    key_format: str, *, num_heads: int, dim: int, topk: int, max_entries: int, max_tokens: int
) -> int:
    """Bytes of a workspace for forwards of up to max_tokens; 0 where nothing is ever scored."""
    if max_entries <= topk:
        return 0
    row = sum(
        index_row_bytes(
            key_format, num_heads=num_heads, dim=dim, topk=topk, max_entries=max_entries
        )
    )
    return row * max(1, min(max_tokens, SCRATCH_LIMIT // row))


def cut_index_scratch(storage: Tensor, row: IndexRowBytes, *, num_tokens: int) -> IndexScratch:
    """The tensors of as many of num_tokens tokens as `storage` `[bytes]` uint8 holds."""
    num_rows = min(num_tokens, storage.numel() // sum(row))
    assert num_rows > 0, (storage.numel(), row)
    dtypes = (torch.uint8, torch.float32, torch.float32, torch.int32)
    parts, start = [], 0
    for size, dtype in zip(row, dtypes, strict=True):
        part = storage[start : start + num_rows * size].view(dtype)
        parts.append(part.view(num_rows, size // dtype.itemsize))
        start += num_rows * size
    return IndexScratch(*parts)


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
