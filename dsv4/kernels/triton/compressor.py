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
def pool_hca_step(
    own_kv, own_gate, tail_ptr, position, column, mask,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr,
):  # fmt: skip
    """`[CHANNELS]` of the HCA window that a request's only token closes; the rest is in the tail.

    column is `[1, CHANNELS]`. 8 groups of 16 rows are pooled side by side, each in order.
    """
    group = tl.arange(0, 8)[:, None]
    is_own = group == 7
    row = position + TAIL_ROWS - 127 + 16 * group
    wanted = mask & (group < 8)
    gates = ()
    largest = tl.full((8, CHANNELS), float("-inf"), tl.float32)
    for index in tl.static_range(16):
        at = tail_ptr + ((row + index) % TAIL_ROWS) * (2 * DIM) + column
        gate = tl.load(at + DIM, mask=wanted, other=0.0).to(tl.float32)
        if index == 15:
            gate = tl.where(is_own, own_gate, gate)
        gates = gates + (gate,)
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((8, CHANNELS), tl.float32)
    weighted = tl.zeros((8, CHANNELS), tl.float32)
    for index in tl.static_range(16):
        at = tail_ptr + ((row + index) % TAIL_ROWS) * (2 * DIM) + column
        kv = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        if index == 15:
            kv = tl.where(is_own, own_kv, kv)
        weight = exp_of_nonpositive(gates[index] - base)
        total += weight
        weighted += weight * kv
    return combine_groups(largest, total, weighted, CHANNELS)


@triton.jit
def pool_hca_step_twice(
    own_kv, own_gate, tail_ptr, position, column, mask,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr,
):  # fmt: skip
    """`pool_hca_step` that reads the gates twice: half the registers."""
    group = tl.arange(0, 8)[:, None]
    row = position + TAIL_ROWS - 127 + 16 * group
    wanted = mask & (group < 8)
    largest = tl.full((8, CHANNELS), float("-inf"), tl.float32)
    for index in tl.range(16, loop_unroll_factor=4):
        at = tail_ptr + ((row + index) % TAIL_ROWS) * (2 * DIM) + column
        gate = tl.load(at + DIM, mask=wanted, other=0.0).to(tl.float32)
        gate = tl.where(16 * group + index == 127, own_gate, gate)
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((8, CHANNELS), tl.float32)
    weighted = tl.zeros((8, CHANNELS), tl.float32)
    for index in tl.range(16, loop_unroll_factor=4):
        at = tail_ptr + ((row + index) % TAIL_ROWS) * (2 * DIM) + column
        is_own = 16 * group + index == 127
        gate = tl.load(at + DIM, mask=wanted, other=0.0).to(tl.float32)
        kv = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        weight = exp_of_nonpositive(tl.where(is_own, own_gate, gate) - base)
        total += weight
        weighted += weight * tl.where(is_own, own_kv, kv)
    return combine_groups(largest, total, weighted, CHANNELS)


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
    projections, tail_ptr, token, position, before, column, mask,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """`[CHANNELS]` of the HCA window that `token` closes, from this forward's rows and the tail's.

    The gates are read twice, for their largest and for their weights.
    """
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
    return combine_groups(largest, total, weighted, CHANNELS)


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
