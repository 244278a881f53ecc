"""Compress: pool the rows of closing windows, on the device.

`projections` is (kv_ptr, gate_ptr, stride, bias_ptr) of one compressor, tail_ptr a slot's tail.
"""

import triton
import triton.language as tl

from dsv4.kernels.triton.append import load_row, load_stored
from dsv4.kernels.triton.primitives import exp_of_nonpositive, nan_unless_finite


@triton.jit
def combine_csa(kvs, gates, has_previous, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`[ROWS, BLOCK]`: 8 rows pooled in position order; the first 4 only if has_previous."""
    largest = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    for index in tl.static_range(8):
        gate = gates[index]
        if index < 4:
            gate = tl.where(has_previous, gate, float("-inf"))
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    weighted = tl.zeros((ROWS, BLOCK), tl.float32)
    for index in tl.static_range(8):
        weight = exp_of_nonpositive(gates[index] - largest)
        part = weight * kvs[index]
        if index < 4:
            weight = tl.where(has_previous, weight, 0.0)
            part = tl.where(has_previous, part, 0.0)
        total += weight
        weighted += part
    return nan_unless_finite(largest, tl.div_rn(weighted, total))


@triton.jit
def pool_csa_step(
    own_kv, own_gate, tail_ptr, position, column, mask,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr,
):  # fmt: skip
    """`[1, BLOCK]`: the CSA window that a request's only token closes; the rest is in the tail.

    own_kv, own_gate are the token's columns of its own window.
    """
    has_previous = position >= 7
    kvs = ()
    gates = ()
    for index in tl.static_range(7):
        row = position + (TAIL_ROWS - 7 + index)
        if index < 4:
            kv, gate = load_stored(tail_ptr, row, column, mask & has_previous, 2 * DIM, TAIL_ROWS)
        else:
            kv, gate = load_stored(tail_ptr, row, column + DIM, mask, 2 * DIM, TAIL_ROWS)
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    return combine_csa(kvs + (own_kv,), gates + (own_gate,), has_previous, 1, BLOCK)


@triton.jit
def pool_csa(
    projections, tail_ptr, token, position, before, column, mask,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """`[1, BLOCK]`: the CSA window that `token` closes, from this forward's rows and the tail's."""
    kvs = ()
    gates = ()
    for index in tl.static_range(8):
        row = position - (7 - index)
        at = column + (0 if index < 4 else DIM)
        if row >= before:
            kv, gate = load_row(projections, token - (7 - index), row, at, mask, 2 * DIM, 4,
                                TAIL_BF16)  # fmt: skip
        else:
            kv, gate = load_stored(tail_ptr, row + 2 * TAIL_ROWS, at, mask & (row >= 0), 2 * DIM,
                                   TAIL_ROWS)  # fmt: skip
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    return combine_csa(kvs, gates, position >= 7, 1, BLOCK)


@triton.jit
def pool_csa_inside(
    projections, token, is_closing,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """`[ROWS, BLOCK]`: windows that `token` `[ROWS]` closes, all of whose rows are this chunk's."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = is_closing[:, None] & (column < DIM)
    kvs = ()
    gates = ()
    for index in tl.static_range(8):
        at = column + (0 if index < 4 else DIM)
        kv, gate = load_row(projections, token[:, None] - (7 - index), index % 4, at, mask,
                            2 * DIM, 4, TAIL_BF16)  # fmt: skip
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    return combine_csa(kvs, gates, tl.full((ROWS, 1), True, tl.int1), ROWS, BLOCK)


@triton.jit
def load_hca_window(
    projections, tail_ptr, token, position, first_channel,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """CHANNELS of the HCA window that a request's only token closes; its other rows are stored.

    16 tiles `[8, CHANNELS]` of kv and 16 of gates: tile i has row i of 8 groups of 16 rows.
    """
    group = tl.arange(0, 8)[:, None]
    column = tl.broadcast_to(first_channel + tl.arange(0, CHANNELS)[None, :], (8, CHANNELS))
    mask = column < DIM
    is_own = group == 7
    own_kv, own_gate = load_row(projections, token, position, column, mask & is_own, DIM, 128,
                                TAIL_BF16)  # fmt: skip
    kvs = ()
    gates = ()
    for index in tl.static_range(16):
        row = 16 * group + index
        if TAIL_ROWS != 128:  # else the tail begins with the window's first row
            row += position + TAIL_ROWS - 127
        if index < 15:
            kv, gate = load_stored(tail_ptr, row, column, mask, DIM, TAIL_ROWS)
        else:
            kv, gate = load_stored(tail_ptr, row, column, mask & ~is_own, DIM, TAIL_ROWS)
            kv, gate = tl.where(is_own, own_kv, kv), tl.where(is_own, own_gate, gate)
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    return kvs, gates


@triton.jit
def combine_hca(kvs, gates, CHANNELS: tl.constexpr):
    """`[CHANNELS]`: the rows of `load_hca_window` pooled, groups side by side, each in order."""
    largest = gates[0]
    for index in tl.static_range(1, 16):
        largest = tl.maximum(largest, gates[index], propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((8, CHANNELS), tl.float32)
    weighted = tl.zeros((8, CHANNELS), tl.float32)
    for index in tl.static_range(16):
        weight = exp_of_nonpositive(gates[index] - base)
        total += weight
        weighted += weight * kvs[index]
    return combine_groups(largest, total, weighted, CHANNELS)


@triton.jit
def leave_channels(pooled, first, window, pooled_ptr, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Store channels of a window, from `first` on, for the program that will have all of them."""
    channel = first + tl.arange(0, CHANNELS)
    tl.store(pooled_ptr + window * DIM + channel, pooled, mask=channel < DIM)


@triton.jit
def pool_hca_step(
    projections, tail_ptr, token, position, first, window, pooled_ptr,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """Leave CHANNELS, from `first` on, of the HCA window that a request's only token closes.

    While 32 of them are pooled, the next are on their way.
    """
    AT_ONCE: tl.constexpr = min(CHANNELS, 32)
    kvs, gates = load_hca_window(projections, tail_ptr, token, position, first, DIM, AT_ONCE,
                                 TAIL_ROWS, TAIL_BF16)  # fmt: skip
    for _ in range(CHANNELS // AT_ONCE - 1):
        next_kvs, next_gates = load_hca_window(
            projections, tail_ptr, token, position, first + AT_ONCE, DIM, AT_ONCE, TAIL_ROWS,
            TAIL_BF16,
        )  # fmt: skip
        leave_channels(combine_hca(kvs, gates, AT_ONCE), first, window, pooled_ptr, DIM, AT_ONCE)
        first += AT_ONCE
        kvs, gates = next_kvs, next_gates
    leave_channels(combine_hca(kvs, gates, AT_ONCE), first, window, pooled_ptr, DIM, AT_ONCE)


@triton.jit
def load_hca_rows(
    projections, tail_ptr, token, position, before, back, column, mask,
    DIM: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """kv, gate `[8, CHANNELS]` of rows `back` `[8, 1]` before a token, from wherever they are."""
    row = position - back
    is_new = row >= before
    new_kv, new_gate = load_row(projections, token - back, row, column, mask & is_new, DIM, 128,
                                TAIL_BF16)  # fmt: skip
    kv, gate = load_stored(tail_ptr, row + TAIL_ROWS, column, mask & ~is_new, DIM, TAIL_ROWS)
    return tl.where(is_new, new_kv, kv), tl.where(is_new, new_gate, gate)


@triton.jit
def pool_hca(
    projections, tail_ptr, token, position, before, first, window, pooled_ptr,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """Leave CHANNELS, from `first` on, of the HCA window that `token` closes, from this forward's
    rows and the tail's.

    The gates are read twice, for their largest and for their weights.
    """
    column = first + tl.arange(0, CHANNELS)[None, :]
    mask = column < DIM
    first_back = 127 - 16 * tl.arange(0, 8)[:, None]
    largest = tl.full((8, CHANNELS), float("-inf"), tl.float32)
    for index in tl.range(16, loop_unroll_factor=4):
        _, gate = load_hca_rows(projections, tail_ptr, token, position, before, first_back - index,
                                column, mask, DIM, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((8, CHANNELS), tl.float32)
    weighted = tl.zeros((8, CHANNELS), tl.float32)
    for index in tl.range(16, loop_unroll_factor=4):
        kv, gate = load_hca_rows(projections, tail_ptr, token, position, before,
                                 first_back - index, column, mask, DIM, TAIL_ROWS,
                                 TAIL_BF16)  # fmt: skip
        weight = exp_of_nonpositive(gate - base)
        total += weight
        weighted += weight * kv
    pooled = combine_groups(largest, total, weighted, CHANNELS)
    leave_channels(pooled, first, window, pooled_ptr, DIM, CHANNELS)


@triton.jit
def combine_groups(largest, total, weighted, CHANNELS: tl.constexpr):
    """`[CHANNELS]`: 8 groups, pooled each with its own largest gate, become one."""
    is_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(largest == largest, largest, float("-inf")), axis=0)
    scale = exp_of_nonpositive(at_least_lowest(largest) - at_least_lowest(top)[None, :])
    pooled = tl.div_rn(fold_pairs(weighted * scale, CHANNELS), fold_pairs(total * scale, CHANNELS))
    return tl.where(is_nan, float("nan"), nan_unless_finite(top, pooled))


@triton.jit
def at_least_lowest(x):
    """x, or the lowest finite number for -inf, so that a group of -inf has a largest gate too."""
    return tl.maximum(x, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fold_pairs(x, CHANNELS: tl.constexpr):
    """Sum `[8, CHANNELS]` over its rows, neighbours first."""
    x = tl.sum(tl.reshape(x, (4, 2, CHANNELS)), axis=1)
    x = tl.sum(tl.reshape(x, (2, 2, CHANNELS)), axis=1)
    return tl.sum(x, axis=0)
