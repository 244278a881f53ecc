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
def combine_pair(kvs, gates):
    """Pool V4.1's pair of rows, in position order."""
    largest = tl.maximum(gates[0], gates[1], propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros_like(largest)
    weighted = tl.zeros_like(largest)
    for index in tl.static_range(2):
        weight = exp_of_nonpositive(gates[index] - largest)
        total += weight
        weighted += weight * kvs[index]
    return nan_unless_finite(largest, tl.div_rn(weighted, total))


@triton.jit
def project_key(latent, projection_ptr, OUT: tl.constexpr, OUT_BLOCK: tl.constexpr,
                DIM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Multiply a latent `[1, BLOCK]` by a projection `[OUT, DIM]`: `[1, OUT_BLOCK]`.

    16 sums take every 16th channel each, in order, and are then added pairwise.
    """
    steps = tl.reshape(latent, (BLOCK // GROUP_ROWS, GROUP_ROWS))
    number = tl.arange(0, BLOCK // GROUP_ROWS)[:, None]
    lane, out = tl.arange(0, GROUP_ROWS)[:, None], tl.arange(0, OUT_BLOCK)[None, :]
    sums = tl.zeros((GROUP_ROWS, OUT_BLOCK), tl.float32)
    for step in range(DIM // GROUP_ROWS):
        x = tl.sum(tl.where(number == step, steps, 0.0), axis=0)[:, None]  # one term: exact
        weight = tl.load(projection_ptr + out * DIM + step * GROUP_ROWS + lane, mask=out < OUT,
                         other=0.0)  # [16, OUT_BLOCK]  # fmt: skip
        sums += x * weight.to(tl.float32)
    for fold in tl.static_range(4):
        sums = tl.sum(tl.reshape(sums, (GROUP_ROWS // (2 << fold), 2, OUT_BLOCK)), axis=1)
    return sums


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
def sum_group_decode(kv, gate, tail_ptr, position, column, mask, SPEC: tl.constexpr):
    """Sums `[1, CHANNELS]` of the HCA group that a request's only token closes with kv, gate."""
    kvs = ()
    gates = ()
    largest = gate
    for index in tl.static_range(GROUP_ROWS - 1):
        row = position - (GROUP_ROWS - 1 - index)
        old_kv, old_gate = load_stored(tail_ptr, row, column, mask, SPEC)
        largest = tl.maximum(largest, old_gate, propagate_nan=tl.PropagateNan.ALL)
        kvs = kvs + (old_kv,)
        gates = gates + (old_gate,)
    base = at_least_lowest(largest)
    total = tl.zeros_like(base)
    weighted = tl.zeros_like(base)
    for index in tl.static_range(GROUP_ROWS):
        weight = exp_of_nonpositive((gates + (gate,))[index] - base)
        total += weight
        weighted += weight * (kvs + (kv,))[index]
    return largest, total, weighted


@triton.jit
def load_hca_row(
    compressor, tail_ptr, token, position, before, back, column, mask,
    IS_NEW: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """kv, gate of the rows `back` before tokens, which broadcast, from this forward or the tail.

    With IS_NEW all of them are of this forward.
    """
    row = position - back
    if IS_NEW:
        return load_row(compressor, token - back, row, column, mask, SPEC)
    is_new = row >= before
    new_kv, new_gate = load_row(compressor, token - back, row, column, mask & is_new, SPEC)
    kv, gate = load_stored(tail_ptr, row, column, mask & ~is_new, SPEC)
    return tl.where(is_new, new_kv, kv), tl.where(is_new, new_gate, gate)


@triton.jit
def sum_groups(compressor, tail_ptr, token, position, before, column, mask,
               IS_NEW: tl.constexpr, SPEC: tl.constexpr):  # fmt: skip
    """Sums of the HCA groups that `token` closes at `position`, where they do in this forward.

    token and position are `[GROUPS, 1]`, or `[1, 1]`. The gates are read twice: for their maximum
    and for their weights. With IS_NEW all rows are of this forward, and `position` may count from
    the window's first token.
    """
    mask = mask & (position >= before)  # [GROUPS, CHANNELS]
    largest = tl.full(mask.shape, float("-inf"), tl.float32)
    for index in tl.range(GROUP_ROWS, loop_unroll_factor=4):
        _, gate = load_hca_row(compressor, tail_ptr, token, position, before,
                               GROUP_ROWS - 1 - index, column, mask, IS_NEW, SPEC)  # fmt: skip
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros_like(base)
    weighted = tl.zeros_like(base)
    for index in tl.range(GROUP_ROWS, loop_unroll_factor=4):
        kv, gate = load_hca_row(compressor, tail_ptr, token, position, before,
                                GROUP_ROWS - 1 - index, column, mask, IS_NEW, SPEC)  # fmt: skip
        weight = exp_of_nonpositive(gate - base)
        total += weight
        weighted += weight * kv
    return largest, total, weighted


@triton.jit
def pool_hca(sums, tail_ptr, last, before, column, mask, CHANNELS: tl.constexpr,
             SPEC: tl.constexpr):  # fmt: skip
    """Pool an HCA window's groups, which end at `last` `[GROUPS, 1]`: `[CHANNELS]`.

    Groups of this forward have `sums`, which broadcast. The others are stored.
    """
    is_new = last >= before
    stored = load_sums(tail_ptr, last // GROUP_ROWS, column, mask & ~is_new, SPEC)
    largest = tl.where(is_new, sums[0], stored[0])
    total = tl.where(is_new, sums[1], stored[1])
    weighted = tl.where(is_new, sums[2], stored[2])
    return combine_groups(largest, total, weighted, CHANNELS)


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
