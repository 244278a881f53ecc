"""Compress: pool the rows of a closing window, on the device."""

import triton
import triton.language as tl

from dsv4.kernels.triton.primitives import (
    exp_of_nonpositive,
    load_rope,
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
    for index in tl.range(16, loop_unroll_factor=4):
        gate = window_gate(gate_ptr, stride, bias_ptr, tail_ptr, token, position, before,
                           127 - index - 16 * group, column, is_wanted, DIM, 128, TAIL_ROWS,
                           TAIL_BF16)  # fmt: skip
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    top = fold_pairs_max(largest, BLOCK)[None, :]
    total = tl.zeros((8, BLOCK), tl.float32)
    weighted = tl.zeros((8, BLOCK), tl.float32)
    for index in range(16):
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
def own_row(
    kv_ptr, gate_ptr, stride, bias_ptr, token, column, is_wanted,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """kv, and gate + bias, of a token that closes its window, as a tail keeps them."""
    source = token.to(tl.int64) * stride + column
    kv = tl.load(kv_ptr + source, mask=is_wanted, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + source, mask=is_wanted, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + (RATIO - 1) * WIDTH + column, mask=is_wanted, other=0.0)
    return as_stored(kv, TAIL_BF16), as_stored(gate + bias.to(tl.float32), TAIL_BF16)


@triton.jit
def pool_csa_step(
    kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """`pool_csa` where a request has one token: all rows but its own are in the tail."""
    channel = tl.arange(0, BLOCK)
    is_wanted = channel < DIM
    has_previous = position >= 7
    gates = ()
    kvs = ()
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for index in tl.static_range(8):
        if index == 7:
            kv, gate = own_row(kv_ptr, gate_ptr, stride, bias_ptr, token, channel + DIM, is_wanted,
                               2 * DIM, 4, TAIL_BF16)  # fmt: skip
        else:
            at = tail_ptr + ((position + TAIL_ROWS - 7 + index) % TAIL_ROWS) * (4 * DIM) + channel
            if index < 4:
                mask = is_wanted & has_previous
                gate = tl.load(at + 2 * DIM, mask=mask, other=float("-inf")).to(tl.float32)
                kv = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            else:
                gate = tl.load(at + 3 * DIM, mask=is_wanted, other=0.0).to(tl.float32)
                kv = tl.load(at + DIM, mask=is_wanted, other=0.0).to(tl.float32)
        gates = gates + (gate,)
        kvs = kvs + (kv,)
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(8):
        weight = exp_of_nonpositive(gates[index] - largest)
        if index < 4:
            weight = tl.where(has_previous, weight, 0.0)
        total += weight
        weighted += weight * kvs[index]
    return tl.where(is_wanted, tl.div_rn(weighted, total), 0.0)


@triton.jit
def pool_hca_step(
    kv_ptr, gate_ptr, stride, bias_ptr, tail_ptr, token, position, first,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, TAIL_ROWS: tl.constexpr, TAIL_BF16: tl.constexpr,
):  # fmt: skip
    """CHANNELS of `pool_hca` from `first` on, where a request has one token."""
    column = first + tl.arange(0, CHANNELS)[None, :]
    group = tl.arange(0, 8)[:, None]
    is_wanted = column < DIM
    own_kv, own_gate = own_row(kv_ptr, gate_ptr, stride, bias_ptr, token, column, is_wanted, DIM,
                               128, TAIL_BF16)  # fmt: skip
    is_own = group == 7
    row = position + TAIL_ROWS - 127 + 16 * group
    wanted = is_wanted & (group < 8)
    gates = ()
    largest = tl.full((8, CHANNELS), float("-inf"), tl.float32)
    for index in tl.static_range(16):
        at = tail_ptr + ((row + index) % TAIL_ROWS) * (2 * DIM) + column
        gate = tl.load(at + DIM, mask=wanted, other=0.0).to(tl.float32)
        if index == 15:
            gate = tl.where(is_own, own_gate, gate)
        gates = gates + (gate,)
        largest = tl.maximum(largest, gate, propagate_nan=tl.PropagateNan.ALL)
    top = fold_pairs_max(largest, CHANNELS)[None, :]
    total = tl.zeros((8, CHANNELS), tl.float32)
    weighted = tl.zeros((8, CHANNELS), tl.float32)
    for index in tl.static_range(16):
        at = tail_ptr + ((row + index) % TAIL_ROWS) * (2 * DIM) + column
        kv = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        if index == 15:
            kv = tl.where(is_own, own_kv, kv)
        weight = exp_of_nonpositive(gates[index] - top)
        total += weight
        weighted += weight * kv
    return tl.div_rn(fold_pairs(weighted, CHANNELS), fold_pairs(total, CHANNELS))


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
def load_finish(
    norm_ptr, cos_ptr, sin_ptr, position,
    DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm weight, cos and sin of a row to be finished; asked for early, to be there in time."""
    channel = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    cos, sin = load_rope(cos_ptr, sin_ptr, position, DIM, ROPE, BLOCK)
    return weight, cos, sin


@triton.jit
def finish_row(
    row, weight, cos, sin, eps, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Norm a row `[BLOCK]` and rotate it."""
    normed = (row * rms_factor(row, DIM, eps)) * weight
    return rotate_tail(normed, cos, sin, DIM, ROPE, BLOCK)
