"""Arithmetic of everything that is stored, in operations that every backend rounds alike.

These are IEEE add, subtract, multiply, divide and square root, and integer operations on the bits,
in a written order. A kernel that follows this file stores the same bytes on any device. Attention
and scores have error bounds instead.
"""

import torch
from torch import Tensor

from dsv4.layer_schedule import GROUP_ROWS

EXPONENT_FLOOR = -125.0  # of a weight, so that every weight is a normal number
LOG2_E = 1.4426950408889634
LOWEST = torch.finfo(torch.float32).min
ROUND_TO_WHOLE = 12582912.0  # 1.5 × 2^23: after adding it the low bits hold the nearest integer
# 2^f for |f| <= 1/2, highest power first: relative error 9.4e-8, exactly 1 at 0.
EXP2_COEFFICIENTS = (
    0.0013269406044855714, 0.009671294130384922, 0.0555071122944355, 0.24022246897220612,
    0.6931470036506653, 1.0,
)  # fmt: skip


def float32_bits(x: Tensor) -> Tensor:
    """Bits of fp32 values, as int32."""
    return x.contiguous().view(torch.int32)


def round_to_bf16(x: Tensor) -> Tensor:
    """Round fp32 to BF16, nearest even; every NaN becomes 0x7FFF, as on a GPU."""
    bits = float32_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(torch.isnan(x), 0x7FFF, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 or bf16 values to `dtype`, one of the two."""
    return round_to_bf16(x.float()) if dtype is torch.bfloat16 else x.float()


def exp_of_nonpositive(x: Tensor) -> Tensor:
    """exp(x) for x <= 0 in fp32, as 2^n × 2^f: a polynomial gives 2^f, n is added to the exponent.

    The absolute error is below 1.4e-7, enough for weights that are summed. A result below 2^-125,
    that of -inf included, becomes 2^-125. The result is undefined for NaN.
    """
    exponent = (x * LOG2_E).clamp(min=EXPONENT_FLOOR)
    shifted = exponent + ROUND_TO_WHOLE
    f = exponent - (shifted - ROUND_TO_WHOLE)
    y = torch.full_like(f, EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        y = y * f + coefficient
    return (float32_bits(y) + (float32_bits(shifted) << 23)).view(torch.float32)


def fold_in_order(terms: Tensor) -> Tensor:
    """Sum `[n, groups, rows, dim]` over rows, in their order."""
    total = torch.zeros_like(terms[:, :, 0])
    for row in range(terms.shape[2]):
        total = total + terms[:, :, row]
    return total


def fold_pairwise(terms: Tensor) -> Tensor:
    """Sum `[n, groups, dim]` over groups, neighbours first."""
    while terms.shape[1] > 1:
        terms = terms[:, 0::2] + terms[:, 1::2]
    return terms[:, 0]


def pool_rows(kv: Tensor, gate: Tensor, is_present: Tensor) -> Tensor:
    """Per-channel softmax of the gates over rows, applied to kv.

    Groups of 16 rows are pooled in row order, each with its own largest gate. They are then
    scaled to the largest gate of all and added pairwise.

    Args:
        kv, gate: `[n, rows, dim]` fp32, rows in position order; rows is at most 16, or 16
            times a power of two.
        is_present: `[n, rows]` bool; a missing row has weight 0, whatever it holds.

    Returns:
        `[n, dim]` fp32; NaN where the largest gate is not finite.
    """
    return combine_groups(sum_groups(kv, gate, is_present))


def sum_groups(kv: Tensor, gate: Tensor, is_present: Tensor) -> Tensor:
    """Pool each group of `pool_rows` by itself.

    Returns:
        `[n, groups, 3, dim]` fp32: largest gate, sum of weights, weighted sum. Each value has one
        pattern of bits: a NaN that of torch, a largest gate of 0 the sign plus. Both sums are 0
        where the largest gate is NaN or +inf.
    """
    num, rows, dim = kv.shape
    group = min(rows, GROUP_ROWS)
    shape = (num, rows // group, group, dim)
    mask = is_present[:, :, None].expand_as(kv).reshape(shape)
    gate = torch.where(mask, gate.reshape(shape), -torch.inf)
    largest = gate.amax(dim=2)
    base = largest.clamp(min=LOWEST)  # a group of -inf needs a finite largest gate too
    weight = torch.where(mask, exp_of_nonpositive(gate - base[:, :, None]), 0.0)
    weighted = torch.where(mask, weight * kv.reshape(shape), 0.0)
    sums = (torch.where(largest < torch.inf, fold_in_order(x), 0.0) for x in (weight, weighted))
    stacked = torch.stack((largest + 0.0, *sums), dim=2)
    return torch.where(stacked.isnan(), torch.nan, stacked)


def combine_groups(sums: Tensor) -> Tensor:
    """Pool groups `[n, groups, 3, dim]` of `sum_groups` to `[n, dim]`; see `pool_rows`."""
    largest, *parts = sums.unbind(2)
    top = largest.amax(dim=1)
    scale = exp_of_nonpositive(largest.clamp(min=LOWEST) - top.clamp(min=LOWEST)[:, None])
    total, pooled = (fold_pairwise(part * scale) for part in parts)
    return torch.where(torch.isfinite(top), pooled / total, torch.nan)


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum x² over the last axis: the same fp64 number in any order of addition.

    Each square is rounded to a grid 2^-42 below the largest possible one. So every partial sum of
    up to 2048 squares is exact.
    """
    largest = torch.where(torch.isnan(x), 0.0, x).abs().amax(dim=-1, keepdim=True)
    exponent = (float32_bits(largest) >> 23).to(torch.int64) - 127
    # 1.5 × 2^(2e + 12): adding it drops all bits of a square below 2^(2e - 40).
    magic = (((2 * exponent + 12 + 1023) << 52) | (1 << 51)).view(torch.float64)
    squares = x.double() * x.double()
    return ((squares + magic) - magic).sum(dim=-1, keepdim=True)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of fp32 rows: mean, square root and reciprocal in fp64, rounded once.

    eps is rounded to fp32, as a kernel's arguments are.
    """
    mean = sum_of_squares(x) / x.shape[-1]
    rounded_eps = torch.tensor(eps, dtype=torch.float32).item()
    factor = (1.0 / torch.sqrt(mean + rounded_eps)).float()
    return (x * factor) * weight.float()


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply fp32 rows `[n, dim]` by weight `[out, dim]`, in fp32.

    16 sums take every 16th channel each, in order, and are then added pairwise.
    """
    num_sums, columns = GROUP_ROWS, weight.float().T.unflatten(0, (-1, GROUP_ROWS))
    sums = x.new_zeros(x.shape[0], num_sums, weight.shape[0])
    for step, column in enumerate(columns):
        sums = sums + x[:, step * num_sums : (step + 1) * num_sums, None] * column
    return fold_pairwise(sums)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the trailing channels, in fp32.

    Args:
        x: `[..., dim]` fp32.
        cos, sin: `[..., rope_dim / 2]` fp32, broadcast over the leading axes.
    """
    rope_dim = 2 * cos.shape[-1]
    pairs = x[..., -rope_dim:].unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((x[..., :-rope_dim], rotated.flatten(-2)), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis: a butterfly, strides 1, 2, 4, ..."""
    dim = x.shape[-1]
    stride = 1
    while stride < dim:
        low, high = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        stride *= 2
    scaled: Tensor = x * dim**-0.5
    return scaled
