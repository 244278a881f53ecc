"""Tiles of index keys: operands of the kernels that score them, pages, loads of rows."""

from typing import NamedTuple

import triton
import triton.language as tl


class KeyPages(NamedTuple):
    """The memory of all index keys."""

    data_ptr: tl.tensor
    scales_ptr: tl.tensor
    page_stride: tl.tensor  # bytes from one page to the next


class QueryOperands(NamedTuple):
    """Index queries as the products take them, and the weights of their heads."""

    query_ptr: tl.tensor
    weights_ptr: tl.tensor
    weights_stride: tl.tensor


class ScoreSpec(NamedTuple):
    """One step of a program: TILE keys for TOKENS tokens. BLOCK_HEADS is HEADS with padding."""

    HEADS: int
    BLOCK_HEADS: int
    TILE: int
    TOKENS: int
    STAGES: int
    WARPS: int
    ENTRIES_PER_BLOCK: int


@triton.constexpr_function
def pages_of_tile(ENTRIES_PER_BLOCK, TILE):
    """Pages that a tile lies in if they are 1 or 2, else 0."""
    if ENTRIES_PER_BLOCK % TILE == 0:
        return 1
    return 2 if 2 * ENTRIES_PER_BLOCK == TILE else 0


@triton.jit
def load_pages(pages_ptr, tile, count, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load the blocks of a tile's first and last page; -1 where there is none.

    A tile in more than two pages gets the block of each entry, twice. Callers load the pages of
    the next tile one tile ahead, so that its keys do not wait for them.
    """
    PAGES: tl.constexpr = pages_of_tile(ENTRIES_PER_BLOCK, TILE)
    entry = tile * TILE
    if PAGES == 0:
        entry += tl.arange(0, TILE)  # [TILE]
    first = tl.load(pages_ptr + entry // ENTRIES_PER_BLOCK, mask=entry < count, other=-1)
    last = first
    if PAGES == 2:
        entry += ENTRIES_PER_BLOCK
        last = tl.load(pages_ptr + entry // ENTRIES_PER_BLOCK, mask=entry < count, other=-1)
    return first, last


@triton.jit
def load_first_pages(pages_ptr, count, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load the blocks of a program's first two tiles, `load_pages` of each."""
    tile, next_tile = tl.program_id(1), tl.program_id(1) + tl.num_programs(1)
    first, last = load_pages(pages_ptr, tile, count, ENTRIES_PER_BLOCK, TILE)
    next_first, next_last = load_pages(pages_ptr, next_tile, count, ENTRIES_PER_BLOCK, TILE)
    return first, last, next_first, next_last


@triton.jit
def tile_blocks(first, last, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The block of each entry of a tile, `[TILE]`, or one for all of them."""
    if pages_of_tile(ENTRIES_PER_BLOCK, TILE) == 2:
        blocks = tl.where(tl.arange(0, TILE) < ENTRIES_PER_BLOCK, first, last)  # [TILE]
    else:
        blocks = first
    return blocks


@triton.jit
def load_row_parts(row_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """`[TILE, BLOCK]`: COUNT elements from row_ptr `[TILE]` on, then zeros."""
    at = tl.arange(0, BLOCK)[None, :]
    if COUNT == BLOCK:
        values = tl.load(row_ptr[:, None] + at)
    else:
        values = tl.load(row_ptr[:, None] + at, mask=at < COUNT, other=0)
    return values
