"""Compress: pool the rows of closing windows, on the device.

A row is read from the projections of this forward or, if it is older, from its slot's tail.
"""

import triton
import triton.language as tl

from dsv4.kernels.triton.append import load_row, load_stored
from dsv4.kernels.triton.operands import CSA_RATIO, HCA_RATIO
from dsv4.kernels.triton.primitives import exp_of_nonpositive, nan_unless_finite

CSA_ROWS = tl.constexpr(2 * CSA_RATIO.value)  # rows of a CSA window: the previous one's, its own
GROUP_ROWS = tl.constexpr(16)  # rows of an HCA window that are pooled in order
GROUPS = tl.constexpr(HCA_RATIO.value // GROUP_ROWS.value)  # groups of rows, pooled side by side
CHANNELS_AT_ONCE = tl.constexpr(32)  # channels of an HCA window that a decode step pools at once


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
def load_hca_window(
    compressor, tail_ptr, token, position, first_channel,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """CHANNELS of the HCA window that a request's only token closes; its other rows are stored.

    GROUP_ROWS tiles `[GROUPS, CHANNELS]` of kv, and as many of gates. Tile i has row i of each
    group.
    """
    group = tl.arange(0, GROUPS)[:, None]
    column = first_channel + tl.arange(0, CHANNELS)[None, :]
    column = tl.broadcast_to(column, (GROUPS, CHANNELS))
    mask = column < SPEC.ROW.DIM
    is_last = group == GROUPS - 1
    new_kv, new_gate = load_row(compressor, token, position, column, mask & is_last, SPEC)
    kvs = ()
    gates = ()
    for index in tl.static_range(GROUP_ROWS):
        row = group * GROUP_ROWS + index
        if SPEC.TAIL_ROWS != HCA_RATIO:  # else the tail begins with the window's first row
            row += position + SPEC.TAIL_ROWS - (HCA_RATIO - 1)
        if index < GROUP_ROWS - 1:
            kv, gate = load_stored(tail_ptr, row, column, mask, SPEC)
        else:
            kv, gate = load_stored(tail_ptr, row, column, mask & ~is_last, SPEC)
            kv, gate = tl.where(is_last, new_kv, kv), tl.where(is_last, new_gate, gate)
        kvs = kvs + (kv,)
        gates = gates + (gate,)
    return kvs, gates


@triton.jit
def combine_hca(kvs, gates, CHANNELS: tl.constexpr):
    """Pool the rows of `load_hca_window`, groups side by side, each in order: `[CHANNELS]`."""
    largest = gates[0]  # [GROUPS, CHANNELS]
    for index in tl.static_range(1, GROUP_ROWS):
        largest = tl.maximum(largest, gates[index], propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((GROUPS, CHANNELS), tl.float32)
    weighted = tl.zeros((GROUPS, CHANNELS), tl.float32)
    for index in tl.static_range(GROUP_ROWS):
        weight = exp_of_nonpositive(gates[index] - base)
        total += weight
        weighted += weight * kvs[index]
    return combine_groups(largest, total, weighted, CHANNELS)


@triton.jit
def store_pooled(
    pooled, first_channel, window, pooled_ptr, DIM: tl.constexpr, CHANNELS: tl.constexpr
):
    """Store pooled channels of a window for the program that will flush all of them."""
    channel = first_channel + tl.arange(0, CHANNELS)
    tl.store(pooled_ptr + window * DIM + channel, pooled, mask=channel < DIM)


@triton.jit
def pool_hca_decode(
    compressor, tail_ptr, token, position, first_channel, window, pooled_ptr,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Pool and store CHANNELS of the HCA window that a request's only token closes.

    While some channels are pooled, the next ones are loaded.
    """
    AT_ONCE: tl.constexpr = min(CHANNELS, CHANNELS_AT_ONCE)
    DIM: tl.constexpr = SPEC.ROW.DIM
    kvs, gates = load_hca_window(compressor, tail_ptr, token, position, first_channel, AT_ONCE,
                                 SPEC)  # fmt: skip
    for _ in range(CHANNELS // AT_ONCE - 1):
        next_kvs, next_gates = load_hca_window(
            compressor, tail_ptr, token, position, first_channel + AT_ONCE, AT_ONCE, SPEC
        )
        pooled = combine_hca(kvs, gates, AT_ONCE)
        store_pooled(pooled, first_channel, window, pooled_ptr, DIM, AT_ONCE)
        first_channel += AT_ONCE
        kvs, gates = next_kvs, next_gates
    pooled = combine_hca(kvs, gates, AT_ONCE)
    store_pooled(pooled, first_channel, window, pooled_ptr, DIM, AT_ONCE)


@triton.jit
def load_hca_rows(
    compressor, tail_ptr, token, position, before, steps_back, column, mask, SPEC: tl.constexpr
):
    """kv, gate `[GROUPS, CHANNELS]` of the rows `steps_back` `[GROUPS, 1]` before a token."""
    row = position - steps_back
    is_new = row >= before
    new_kv, new_gate = load_row(compressor, token - steps_back, row, column, mask & is_new, SPEC)
    kv, gate = load_stored(tail_ptr, row + SPEC.TAIL_ROWS, column, mask & ~is_new, SPEC)
    return tl.where(is_new, new_kv, kv), tl.where(is_new, new_gate, gate)


@triton.jit
def pool_hca(
    compressor, tail_ptr, token, position, before, first_channel, window, pooled_ptr,
    CHANNELS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Pool and store CHANNELS of the HCA window that `token` closes, from this forward and the
    tail.

    The gates are read twice: for their maximum and for their weights.
    """
    column = first_channel + tl.arange(0, CHANNELS)[None, :]
    mask = column < SPEC.ROW.DIM
    first_back = SPEC.RATIO - 1 - tl.arange(0, GROUPS)[:, None] * GROUP_ROWS  # [GROUPS, 1]
    largest = tl.full((GROUPS, CHANNELS), float("-inf"), tl.float32)
    for index in tl.range(GROUP_ROWS, loop_unroll_factor=4):
        _, gate = load_hca_rows(compressor, tail_ptr, token, position, before, first_back - index,
                                column, mask, SPEC)  # fmt: skip
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    base = at_least_lowest(largest)
    total = tl.zeros((GROUPS, CHANNELS), tl.float32)
    weighted = tl.zeros((GROUPS, CHANNELS), tl.float32)
    for index in tl.range(GROUP_ROWS, loop_unroll_factor=4):
        kv, gate = load_hca_rows(compressor, tail_ptr, token, position, before,
                                 first_back - index, column, mask, SPEC)  # fmt: skip
        weight = exp_of_nonpositive(gate - base)
        total += weight
        weighted += weight * kv
    pooled = combine_groups(largest, total, weighted, CHANNELS)
    store_pooled(pooled, first_channel, window, pooled_ptr, SPEC.ROW.DIM, CHANNELS)


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
