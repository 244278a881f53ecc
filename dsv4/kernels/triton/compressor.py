"""Compress: pool the rows of a closing window, on the device."""

import triton
import triton.language as tl

from dsv4.kernels.triton.primitives import (
    exp_of_nonpositive,
    rms_factor,
    rotate_tail,
    round_to_bf16,
)


@triton.jit
def as_stored(x, TAIL_BF16: tl.constexpr):
    """fp32 values as a tail keeps them."""
    if TAIL_BF16:
        x = round_to_bf16(x)
    return x


@triton.jit
def window_kv(
    kv_ptr, stride, tail_ptr, token, position, before, back, column, is_wanted,
    WIDTH: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """kv of the rows `back` tokens before `token`, at `column` of the projection.

    back and column broadcast against each other. Rows of this forward come from the projection,
    older ones from the slot's tail at tail_ptr; rows before position 0 give 0.
    """
    row = position - back
    in_chunk = is_wanted & (row >= before)
    in_tail = is_wanted & (row >= 0) & (row < before)
    new = tl.load(kv_ptr + (token - back).to(tl.int64) * stride + column, mask=in_chunk, other=0.0)
    stored = (row % TAIL_ROWS).to(tl.int64) * (2 * WIDTH) + column
    old = tl.load(tail_ptr + stored, mask=in_tail, other=0.0).to(tl.float32)
    return tl.where(in_tail, old, as_stored(new.to(tl.float32), TAIL_BF16))


@triton.jit
def window_gate(
    gate_ptr, stride, bias_ptr, tail_ptr, token, position, before, back, column, is_wanted,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """gate + bias of the same rows; -inf before position 0."""
    row = position - back
    in_chunk = is_wanted & (row >= before)
    in_tail = is_wanted & (row >= 0) & (row < before)
    source = (token - back).to(tl.int64) * stride + column
    new = tl.load(gate_ptr + source, mask=in_chunk, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + row % RATIO * WIDTH + column, mask=in_chunk, other=0.0)
    stored = (row % TAIL_ROWS).to(tl.int64) * (2 * WIDTH) + WIDTH + column
    old = tl.load(tail_ptr + stored, mask=in_tail, other=0.0).to(tl.float32)
    gate = tl.where(in_tail, old, as_stored(new + bias.to(tl.float32), TAIL_BF16))
    return tl.where(row >= 0, gate, float("-inf"))


@triton.jit
def pool_csa(
    kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, before,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """`[BLOCK]`: the 8 rows of the CSA window that `token` closes, pooled in position order."""
    channel = tl.arange(0, BLOCK)
    is_wanted = channel < DIM
    gates = ()
    kvs = ()
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for index in tl.static_range(8):
        column = channel + (0 if index < 4 else DIM)
        gate = window_gate(gate_ptr, stride, bias_ptr, tail_ptr, token, position, before, 7 - index,
                           column, is_wanted, 2 * DIM, 4, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        kv = window_kv(kv_ptr, stride, tail_ptr, token, position, before, 7 - index,
                       column, is_wanted, 2 * DIM, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        gates = gates + (gate,)
        kvs = kvs + (kv,)
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(8):
        weight = exp_of_nonpositive(gates[index] - largest)
        is_present = position - (7 - index) >= 0
        total += tl.where(is_present, weight, 0.0)
        weighted += tl.where(is_present, weight * kvs[index], 0.0)
    return tl.where(is_wanted, tl.div_rn(weighted, total), 0.0)


@triton.jit
def pool_hca(
    kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, before,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """`[BLOCK]`: the 128 rows of the HCA window that `token` closes.

    8 groups of 16 rows are folded in order, side by side, then the groups pairwise. The gates
    are read twice, for their largest and for their weights; the second time they come from L2.
    """
    column = tl.arange(0, BLOCK)[None, :]
    group = tl.arange(0, 8)[:, None]
    is_wanted = (column < DIM) & (group < 8)
    largest = tl.full((8, BLOCK), float("-inf"), tl.float32)
    for index in tl.range(16, loop_unroll_factor=8):
        gate = window_gate(gate_ptr, stride, bias_ptr, tail_ptr, token, position, before,
                           127 - index - 16 * group, column, is_wanted, DIM, 128, TAIL_ROWS,
                           TAIL_BF16)  # fmt: skip
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    top = fold_pairs_max(largest, BLOCK)[None, :]
    total = tl.zeros((8, BLOCK), tl.float32)
    weighted = tl.zeros((8, BLOCK), tl.float32)
    for index in tl.range(16, loop_unroll_factor=4):
        back = 127 - index - 16 * group
        gate = window_gate(gate_ptr, stride, bias_ptr, tail_ptr, token, position, before, back,
                           column, is_wanted, DIM, 128, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        kv = window_kv(kv_ptr, stride, tail_ptr, token, position, before, back, column, is_wanted,
                       DIM, TAIL_ROWS, TAIL_BF16)  # fmt: skip
        weight = exp_of_nonpositive(gate - top)
        total += weight
        weighted += weight * kv
    pooled = tl.div_rn(fold_pairs(weighted, BLOCK), fold_pairs(total, BLOCK))
    return tl.where(tl.arange(0, BLOCK) < DIM, pooled, 0.0)


@triton.jit
def fold_pairs(x, CHANNELS: tl.constexpr):
    """Sum `[8, CHANNELS]` over its rows, neighbours first."""
    low, high = tl.split(tl.permute(tl.reshape(x, (4, 2, CHANNELS)), (0, 2, 1)))
    low, high = tl.split(tl.permute(tl.reshape(low + high, (2, 2, CHANNELS)), (0, 2, 1)))
    low, high = tl.split(tl.permute(low + high, (1, 0)))
    return low + high


@triton.jit
def fold_pairs_max(x, CHANNELS: tl.constexpr):
    """The largest of `[8, CHANNELS]` over its rows; NaN if any is."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    low, high = tl.split(tl.permute(tl.reshape(x, (4, 2, CHANNELS)), (0, 2, 1)))
    pairs = tl.maximum(low, high, propagate_nan=ALL)
    low, high = tl.split(tl.permute(tl.reshape(pairs, (2, 2, CHANNELS)), (0, 2, 1)))
    low, high = tl.split(tl.permute(tl.maximum(low, high, propagate_nan=ALL), (1, 0)))
    return tl.maximum(low, high, propagate_nan=ALL)


@triton.jit
def finish_entry(
    pooled, norm_ptr, cos_ptr, sin_ptr, position, eps,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm a row `[BLOCK]` and rotate it at `position`."""
    channel = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    normed = (pooled * rms_factor(pooled, DIM, eps)) * weight
    return rotate_tail(normed, cos_ptr, sin_ptr, position, DIM, ROPE, BLOCK)
