"""Operands of kernels by name: pointers, and constants of rows and compressors.

A kernel takes pointers one by one and groups them at its start, which emits no code. A group of
constants is one argument of a kernel. Such a group has no properties: Triton's cache of compiled
kernels would not notice a change of their code.
"""

from typing import Any, NamedTuple

import triton.language as tl

from dsv4.formats import RowFormat, next_power_of_two
from dsv4.kernels.contracts import TokenMap
from dsv4.layer_schedule import AttentionType

CSA_RATIO = tl.constexpr(AttentionType.CSA.ratio)
HCA_RATIO = tl.constexpr(AttentionType.HCA.ratio)
# Pointers of the plan, which kernels are not compiled for by alignment.
PLAN_PTRS = [
    "positions_ptr", "request_ids_ptr", "request_slots_ptr", "before_ptr", "after_ptr",
    "workspace_starts_ptr", "block_table_ptr",
]  # fmt: skip


def token_arguments(tokens: TokenMap) -> dict[str, Any]:
    """The plan's tensors, by the names that kernels have for them."""
    return {
        "positions_ptr": tokens.positions, "request_ids_ptr": tokens.request_ids,
        "request_slots_ptr": tokens.request_slots, "before_ptr": tokens.positions_before,
        "after_ptr": tokens.positions_after, "workspace_starts_ptr": tokens.workspace_starts,
        "block_table_ptr": tokens.block_table, "table_stride": tokens.block_table.stride(0),
    }  # fmt: skip


class TokenPtrs(NamedTuple):
    """The plan's tensors, as `TokenMap` describes them."""

    positions_ptr: tl.tensor
    request_ids_ptr: tl.tensor
    request_slots_ptr: tl.tensor
    before_ptr: tl.tensor
    after_ptr: tl.tensor
    workspace_starts_ptr: tl.tensor
    token_starts_ptr: tl.tensor


class Place(NamedTuple):
    """A token's position, and its request's slot, lengths before and after, and workspace start."""

    position: tl.tensor
    slot: tl.tensor
    before: tl.tensor
    after: tl.tensor
    workspace_start: tl.tensor  # -1 where the request has no chunk


class WindowPtrs(NamedTuple):
    """Inputs of window rows, the slots with their rings, and the workspace."""

    kv_ptr: tl.tensor
    stride: tl.tensor
    norm_ptr: tl.tensor
    slots_ptr: tl.tensor
    slot_bytes: tl.tensor
    ring_offset: tl.tensor
    workspace_ptr: tl.tensor
    workspace_rows: tl.tensor


class CachePtrs(NamedTuple):
    """The slots, the blocks and the block table, and cos and sin that entries are rotated by.

    The first blocks of a slot, num_read_only, are not written.
    """

    slots_ptr: tl.tensor
    slot_bytes: tl.tensor
    blocks_ptr: tl.tensor
    block_bytes: tl.tensor
    block_table_ptr: tl.tensor
    table_stride: tl.tensor
    num_read_only_ptr: tl.tensor
    rope: tl.tuple


class CompressorPtrs(NamedTuple):
    """A compressor's projections and weights, and where its tails and pages lie in the cache."""

    kv_ptr: tl.tensor
    gate_ptr: tl.tensor
    stride: tl.tensor
    bias_ptr: tl.tensor
    norm_ptr: tl.tensor
    eps: tl.tensor
    tail_offset: tl.tensor
    page_offset: tl.tensor
    global_scale: tl.tensor  # NVFP4's
    cache: CachePtrs


class Splits(NamedTuple):
    """The tiles of a token's splits.

    Split s has tile s × split_step and every tile_step-th one after it, at most tiles_per_split.
    """

    num_splits: int
    split_step: int
    tile_step: int
    tiles_per_split: int


class RowSpec(NamedTuple):
    """Constants of a stored row. A row has two records, of data and of scales."""

    DIM: int  # channels
    BLOCK: int  # the same padded to a power of two
    ROTATED: int  # trailing channels that RoPE rotates
    ROPE: int  # trailing channels stored as a field of their own; 0 in an index key
    FORMAT: str  # the row format's name, prefixed with kv_ or index_
    DATA_BYTES: int
    SCALE_BYTES: int
    DATA_STRIDE: int  # bytes from a record to the same of the next row
    SCALE_STRIDE: int
    ROUNDS: bool  # values are rounded to BF16 before they are quantised
    BOUNDS_SCALE: bool  # the floor of `fp8_32` is one of the scale


def row_spec(prefix: str, row: RowFormat, rotated: int) -> RowSpec:
    """Constants of a row format; prefix is kv or index, rotated the channels of RoPE."""
    block, name, sizes = next_power_of_two(row.dim), f"{prefix}_{row.name}", row.record_bytes
    return RowSpec(
        row.dim, block, rotated, row.rope_dim, name, *sizes, *row.record_strides,
        row.rounds_first, row.scale_rule == "ue8m0_scale_floor",
    )  # fmt: skip


class SourceSpec(NamedTuple):
    """Constants of the rows that attention reads.

    ENTRIES is the source of the rows after the window. `listed` takes the first num_entries of a
    token's line of rows_ptr; `all` takes every entry that the token sees, up to num_entries; `none`
    takes none.
    """

    WINDOW: int
    RING_ROWS: int
    HAS_CHUNKS: bool
    ENTRIES: str
    RATIO: int
    ENTRY_ROWS: int  # entries of a page
    ROW: RowSpec  # of the window
    ENTRY: RowSpec


class WindowSpec(NamedTuple):
    """Constants of a window: its row, the tokens it spans, the rows of a ring."""

    ROW: RowSpec
    WINDOW: int
    RING_ROWS: int


class CompressorSpec(NamedTuple):
    """Constants of a compressor."""

    ROW: RowSpec  # of an entry or index key
    RATIO: int  # tokens per entry
    WIDTH: int  # columns of a projection: two series of DIM for CSA, one for HCA
    TAIL_ROWS: int
    TAIL_BF16: bool  # a tail stores BF16, else fp32
    SUM_RING: int  # ring of HCA sums
    SUMS_OFFSET: int  # their first byte behind that of the tail
    ENTRIES_PER_BLOCK: int  # rows of a page
    HADAMARD_STEPS: int  # butterflies of the transform after RoPE, log2(DIM); 0 for none
