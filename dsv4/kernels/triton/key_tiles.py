"""Tiles of index keys: the pages that they lie in, and loads of their rows."""

import triton
import triton.language as tl


@triton.constexpr_function
def pages_of_tile(ENTRIES_PER_BLOCK, TILE):
    """Pages that a tile lies in if they are 1 or 2, else 0."""
    if ENTRIES_PER_BLOCK % TILE == 0:
        return 1
    return 2 if 2 * ENTRIES_PER_BLOCK == TILE else 0


@triton.jit
def load_pages(pages_ptr, tile, count, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Blocks of a tile's first and last page, or both times of each entry; -1 where there is none.

    The pages of the next tile are asked for a tile ahead, so that its keys needn't wait for them.
    """
    PAGES: tl.constexpr = pages_of_tile(ENTRIES_PER_BLOCK, TILE)
    entry = tile * TILE
    if PAGES == 0:
        entry += tl.arange(0, TILE)
    first = tl.load(pages_ptr + entry // ENTRIES_PER_BLOCK, mask=entry < count, other=-1)
    last = first
    if PAGES == 2:
        entry += ENTRIES_PER_BLOCK
        last = tl.load(pages_ptr + entry // ENTRIES_PER_BLOCK, mask=entry < count, other=-1)
    return first, last


@triton.jit
def tile_blocks(first, last, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The block of each entry of a tile, `[TILE]`, or of all of them."""
    if pages_of_tile(ENTRIES_PER_BLOCK, TILE) == 2:
        blocks = tl.where(tl.arange(0, TILE) < ENTRIES_PER_BLOCK, first, last)
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
