"""The workspace of the index: bytes of a token, and how many tokens it holds at a time.

Scores of all tokens of a forward would take gigabytes. The index therefore scores as many tokens as
the workspace holds, chooses their entries, and reuses the workspace for the next tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.formats import BYTE_ALIGN, next_power_of_two, round_up

SCRATCH_LIMIT = 192 << 20  # bytes; a token that needs more is taken alone
DENSE_LIMIT = 288 << 20  # bytes of dense rows
DENSE_HEADS = 64  # query heads of a work item of attention over dense rows
DENSE_WORKS = 128  # work items of a forward with room for dense rows; fewer fill no Hopper twice
WHOLE_ENTRIES = 8192  # the most entries, or groups, that a program of the top-k begins with
NARROW_ENTRIES = 4096  # the fewest scores that it holds of groups' members
MAX_TOPK = 4096  # for more, a program has 65,536 scores: more than its counts of 16 bits hold
GROUP = 8  # neighbours that their largest score stands for
MIN_HEADS = 16  # the fewest rows of a matrix product
QUERY_BYTES = {"fp8": 1, "mxfp4": 1, "fp32": 4}  # bytes of a channel by key format; others take 2


class IndexScratch(NamedTuple):
    """Tensors of `num_rows` tokens, kept between the launches."""

    queries: Tensor  # [num_rows, padded heads × padded dim] in the operand's bytes
    weights: Tensor  # [num_rows, padded heads] fp32; mxfp4 adds [groups, padded heads] scales
    scores: Tensor  # [num_rows, at least max_entries] fp32
    group_tops: Tensor  # [num_rows, at least num_group_tops] int32; empty without groups

    @property
    def num_rows(self) -> int:
        return self.scores.shape[0]

    @property
    def has_tops(self) -> bool:
        return self.group_tops.shape[1] > 0


def has_dense_rows(kv_format: str, *, head_dim: int, rope_dim: int, num_heads: int) -> bool:
    """Whether attention of chunks may make rows of that format dense."""
    is_fp8_row = kv_format in ("fp8", "fp8_32") and (head_dim, rope_dim) == (512, 64)
    return is_fp8_row and num_heads % DENSE_HEADS == 0


class DenseSizes(NamedTuple):
    """Bytes of a forward's dense rows, see `triton.dense_rows`."""

    rows_bytes: int
    columns_bytes: int
    left_bytes: int
    window_rows: int  # of all chunks
    chunk_stride: int  # entries of a chunk
    num_blocks: int  # of the pool

    @property
    def num_bytes(self) -> int:
        return self.rows_bytes + self.columns_bytes + self.left_bytes


def dense_sizes(
    *, num_tokens: int, num_chunks: int, window: int, max_entries: int, entries_per_block: int,
    num_blocks: int, num_heads: int, dim: int,
) -> DenseSizes:  # fmt: skip
    """Sizes for num_tokens tokens of num_chunks chunks that see up to max_entries entries."""
    window_rows = num_tokens + num_chunks * (window - 1)
    stride = round_up(max_entries, max(entries_per_block, 1))
    columns = num_chunks * num_blocks if max_entries else 0
    num_works = num_tokens * num_heads // DENSE_HEADS
    return DenseSizes(
        (window_rows + num_chunks * stride) * dim * 2, round_up(columns * 4, BYTE_ALIGN),
        round_up((1 + num_works) * 4, BYTE_ALIGN), window_rows, stride, num_blocks,
    )  # fmt: skip


def padded_heads(num_heads: int) -> int:
    """Heads of a query in the workspace; heads beyond num_heads weigh 0."""
    return max(MIN_HEADS, next_power_of_two(num_heads))


def narrow_width(topk: int) -> int:
    """Scores of groups' members that a program holds: enough for those of topk groups."""
    return max(NARROW_ENTRIES, GROUP * next_power_of_two(topk))


def group_levels(max_entries: int, *, topk: int) -> int:
    """Levels of groups above so many entries, until one program holds the last level."""
    most = max(narrow_width(topk), WHOLE_ENTRIES)
    levels, num_groups = 0, max_entries
    while num_groups > most:
        levels, num_groups = levels + 1, -(-num_groups // GROUP)
    return levels


def padded_entries(max_entries: int, *, levels: int) -> int:
    """Entries rounded up to whole groups of the last level's groups."""
    return round_up(max_entries, GROUP ** (levels + 1))


def num_group_tops(max_entries: int, *, topk: int) -> int:
    """The number of groups of all levels."""
    levels = group_levels(max_entries, topk=topk)
    padded = padded_entries(max_entries, levels=levels)
    return sum(padded // GROUP ** (level + 1) for level in range(levels))


def index_row_bytes(
    key_format: str, *, num_heads: int, dim: int, topk: int, max_entries: int
) -> tuple[int, int, int, int]:
    """Bytes in each tensor of `IndexScratch` for a token that can see `max_entries` entries."""
    heads, block = padded_heads(num_heads), next_power_of_two(dim)
    return (
        heads * block * QUERY_BYTES.get(key_format, 2),
        heads * 4 * (1 + (block // 32 if key_format == "mxfp4" else 0)),
        round_up(max_entries * 4, BYTE_ALIGN),
        round_up(num_group_tops(max_entries, topk=topk) * 4, BYTE_ALIGN),
    )


def index_scratch_bytes(
    key_format: str, *, num_heads: int, dim: int, topk: int, max_entries: int, max_tokens: int
) -> int:
    """Bytes of a workspace for forwards of up to max_tokens."""
    row = sum(
        index_row_bytes(
            key_format, num_heads=num_heads, dim=dim, topk=topk, max_entries=max_entries
        )
    )
    return row * max(1, min(max_tokens, SCRATCH_LIMIT // row))


def cut_index_scratch(storage: Tensor, row: tuple[int, ...], *, num_tokens: int) -> IndexScratch:
    """Divide `storage`, `[bytes]` uint8, for num_tokens tokens or as many as it holds."""
    num_rows = min(num_tokens, storage.numel() // sum(row))
    assert num_rows > 0, (storage.numel(), row)
    dtypes = (torch.uint8, torch.float32, torch.float32, torch.int32)
    used = storage[: num_rows * sum(row)]  # whole elements of every dtype
    parts, start = [], used.storage_offset()
    for size, dtype in zip(row, dtypes, strict=True):
        width, first = size // dtype.itemsize, start // dtype.itemsize
        parts.append(used.view(dtype).as_strided((num_rows, width), (width, 1), first))
        start += num_rows * size
    return IndexScratch(*parts)
