"""Compress: pool the rows of closing windows, on the device.

A row is read from the projections of this forward or, if it is older, from its slot's tail. So are
the sums of an HCA window's groups: those that closed earlier are in the tail.
"""

import triton
import triton.language as tl

from dsv4.kernels.triton.append import load_row, load_stored, load_sums
from dsv4.kernels.triton.operands import CSA_RATIO
from dsv4.kernels.triton.primitives import exp_of_nonpositive, nan_unless_finite
from dsv4.layer_schedule import GROUP_ROWS as HCA_GROUP_ROWS
from dsv4.layer_schedule import HCA_GROUPS

CSA_ROWS = tl.constexpr(2 * CSA_RATIO.value)  # rows of a CSA window: the previous one's, its own
GROUP_ROWS = tl.constexpr(HCA_GROUP_ROWS)
GROUPS = tl.constexpr(HCA_GROUPS)  # groups of an HCA window


@triton.jit
def combine_csa(kvs, gates, has_previous, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Pool CSA_ROWS rows in position order: `[ROWS, BLOCK]`.

    The previous window's rows count only if has_previous.
    """
    largest = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    for index in tl.static_range(CSA_ROWS):
        gate = gates[index]  # [ROWS, BLOCK]
        if index < CSA_RATIO:
            gate = tl.where(has_previous, gate, float("-inf"))
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    weighted = tl.zeros((ROWS, BLOCK), tl.float32)
    for index in tl.static_range(CSA_ROWS):
        weight = exp_of_nonpositive(gates[index] - largest)
        product = weight * kvs[index]
        if index < CSA_RATIO:
            weight = tl.where(has_previous, weight, 0.0)
            product = tl.where(has_previous, product, 0.0)
        total += weight
        weighted += product
    return nan_unless_finite(largest, tl.div_rn(weighted, total))


@triton.jit
def pool_csa_decode(kv, gate, tail_ptr, position, column, mask, SPEC: tl.constexpr):
    """Pool the CSA window that a request's only token closes: `[1, BLOCK]`.

    kv, gate are the token's columns of its own window. All other rows are in the tail.
    """
    has_previous = position >= CSA_ROWS - 1
    kvs = ()
    gates = ()
    for index in tl.static_range(CSA_ROWS - 1):
        row = position + (SPEC.TAIL_ROWS - (CSA_ROWS - 1) + index)
        if index < CSA_RATIO:
            old_kv, old_gate = load_stored(tail_ptr, row, column, mask & has_previous, SPEC)
        else:
            old_kv, old_gate = load_stored(tail_ptr, row, column + SPEC.ROW.DIM, mask, SPEC)
        kvs = kvs + (old_kv,)
        gates = gates + (old_gate,)
    return combine_csa(kvs + (kv,), gates + (gate,), has_previous, 1, SPEC.ROW.BLOCK)


@triton.jit
def pool_csa_edge(compressor, tail_ptr, token, place, column, mask, SPEC: tl.constexpr):
    """Pool the CSA window that `token` closes, from this forward and the tail: `[1, BLOCK]`."""
    kvs = ()
    gates = ()
    for index in tl.static_range(CSA_ROWS):
        row = place.position - (CSA_ROWS - 1 - index)
        series = column + (0 if index < CSA_RATIO else SPEC.ROW.DIM)
        if row >= place.before:
            kv, gate = load_row(compressor, token - (CSA_ROWS - 1 - index), row, series, mask,
                                SPEC)  # fmt: skip
        else:
            kv, gate = load_stored(tail_ptr, row + 2 * SPEC.TAIL_ROWS, series, mask & (row >= 0),
                                   SPEC)  # fmt: skip
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    return combine_csa(kvs, gates, place.position >= CSA_ROWS - 1, 1, SPEC.ROW.BLOCK)


@triton.jit
def pool_csa_chunk(compressor, token, is_closing, ROWS: tl.constexpr, SPEC: tl.constexpr):
    """Pool the windows inside a chunk that `token` `[ROWS]` closes: `[ROWS, BLOCK]`."""
    column = tl.arange(0, SPEC.ROW.BLOCK)[None, :]
    mask = is_closing[:, None] & (column < SPEC.ROW.DIM)
    kvs = ()
    gates = ()
    for index in tl.static_range(CSA_ROWS):
        series = column + (0 if index < CSA_RATIO else SPEC.ROW.DIM)
        kv, gate = load_row(compressor, token[:, None] - (CSA_ROWS - 1 - index),
                            index % SPEC.RATIO, series, mask, SPEC)  # fmt: skip
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    has_previous = tl.full((ROWS, 1), True, tl.int1)
    return combine_csa(kvs, gates, has_previous, ROWS, SPEC.ROW.BLOCK)


@triton.jit
def load_hca_row(
    compressor, tail_ptr, token, position, before, steps_back, column, mask, SPEC: tl.constexpr
):
    """kv, gate of the rows `steps_back` before tokens, from this forward or the tail.

    token and position broadcast against column.
    """
    row = position - steps_back
    is_new = row >= before
    new_kv, new_gate = load_row(compressor, token - steps_back, row, column, mask & is_new, SPEC)
    kv, gate = load_stored(tail_ptr, row, column, mask & ~is_new, SPEC)
    return tl.where(is_new, new_kv, kv), tl.where(is_new, new_gate, gate)


@triton.jit
def sum_group(
    compressor, tail_ptr, kv, gate, token, place, column, mask,
    SPEC: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Sums `[1, CHANNELS]` of the group that `token` closes with its row kv, gate."""
    kvs = ()
    gates = ()
    largest = gate
    for index in tl.static_range(GROUP_ROWS - 1):
        if IS_DECODE:
            row = place.position - (GROUP_ROWS - 1 - index)
            old_kv, old_gate = load_stored(tail_ptr, row, column, mask, SPEC)
        else:
            old_kv, old_gate = load_hca_row(
                compressor, tail_ptr, token, place.position, place.before, GROUP_ROWS - 1 - index,
                column, mask, SPEC,
            )  # fmt: skip
        largest = tl.maximum(largest, old_gate, propagate_nan=tl.PropagateNan.ALL)
        kvs = kvs + (old_kv,)
        gates = gates + (old_gate,)
    kvs = kvs + (kv,)
    gates = gates + (gate,)
    base = at_least_lowest(largest)
    total = tl.zeros_like(base)
    weighted = tl.zeros_like(base)
    for index in tl.static_range(GROUP_ROWS):
        weight = exp_of_nonpositive(gates[index] - base)
        total += weight
        weighted += weight * kvs[index]
    return largest, total, weighted


@triton.jit
def sum_groups(
    compressor, tail_ptr, token, position, before, column, mask,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Sums `[GROUPS, CHANNELS]` of groups that close in this forward; anything where not mask.

    `token` and `position` `[GROUPS, 1]` are those of the closing tokens. The gates are read twice:
    for their maximum and for their weights.
    """
    largest = tl.full((GROUPS, CHANNELS), float("-inf"), tl.float32)
    for index in tl.range(GROUP_ROWS, loop_unroll_factor=4):
        _, gate = load_hca_row(compressor, tail_ptr, token, position, before,
                               GROUP_ROWS - 1 - index, column, mask, SPEC)  # fmt: skip
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((GROUPS, CHANNELS), tl.float32)
    weighted = tl.zeros((GROUPS, CHANNELS), tl.float32)
    for index in tl.range(GROUP_ROWS, loop_unroll_factor=4):
        kv, gate = load_hca_row(compressor, tail_ptr, token, position, before,
                                GROUP_ROWS - 1 - index, column, mask, SPEC)  # fmt: skip
        weight = exp_of_nonpositive(gate - base)
        total += weight
        weighted += weight * kv
    return largest, total, weighted


@triton.jit
def pool_hca_step(sums, tail_ptr, position, column, mask, CHANNELS: tl.constexpr,
                  SPEC: tl.constexpr):  # fmt: skip
    """Pool the HCA window whose last group has these sums; its others are stored: `[CHANNELS]`."""
    group = tl.arange(0, GROUPS)[:, None]
    is_last = group == GROUPS - 1
    number = position // GROUP_ROWS - (GROUPS - 1) + group
    stored = load_sums(tail_ptr, number, column, mask & ~is_last, SPEC)
    return combine_groups(tl.where(is_last, sums[0], stored[0]),
                          tl.where(is_last, sums[1], stored[1]),
                          tl.where(is_last, sums[2], stored[2]), CHANNELS)  # fmt: skip


@triton.jit
def pool_hca(
    compressor, tail_ptr, token, position, before, column, mask,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Pool the HCA window that `token` closes: `[CHANNELS]`.

    Groups that closed before this forward are stored, the others are summed anew.
    """
    steps_back = (GROUPS - 1 - tl.arange(0, GROUPS)[:, None]) * GROUP_ROWS  # [GROUPS, 1]
    last = position - steps_back
    is_new = last >= before
    new = sum_groups(compressor, tail_ptr, token - steps_back, last, before, column, mask & is_new,
                     CHANNELS, SPEC)  # fmt: skip
    old = load_sums(tail_ptr, last // GROUP_ROWS, column, mask & ~is_new, SPEC)
    return combine_groups(tl.where(is_new, new[0], old[0]), tl.where(is_new, new[1], old[1]),
                          tl.where(is_new, new[2], old[2]), CHANNELS)  # fmt: skip


@triton.jit
def combine_groups(largest, total, weighted, CHANNELS: tl.constexpr):
    """Combine groups `[GROUPS, CHANNELS]`, each pooled with its own largest gate: `[CHANNELS]`."""
    is_nan = tl.max((largest != largest).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(largest == largest, largest, float("-inf")), axis=0)  # [CHANNELS]
    scale = exp_of_nonpositive(at_least_lowest(largest) - at_least_lowest(top)[None, :])
    pooled = tl.div_rn(fold_pairs(weighted * scale, CHANNELS), fold_pairs(total * scale, CHANNELS))
    return tl.where(is_nan, float("nan"), nan_unless_finite(top, pooled))


@triton.jit
def at_least_lowest(x):
    """Replace -inf by the lowest finite number, so that a group of -inf has a largest gate too."""
    return tl.maximum(x, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fold_pairs(x, CHANNELS: tl.constexpr):
    """Sum `[8, CHANNELS]` over its rows, neighbours first."""
    x = tl.sum(tl.reshape(x, (4, 2, CHANNELS)), axis=1)
    x = tl.sum(tl.reshape(x, (2, 2, CHANNELS)), axis=1)
    return tl.sum(x, axis=0)
