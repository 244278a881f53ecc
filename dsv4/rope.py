"""RoPE: cos and sin at positions. Rows, entries, keys, queries and outputs are rotated by them.

An fp32 angle is not exact at long positions, so its operation order is part of the model:
f = 1 / theta^(2i/d), angle = fp32(position × f). cos and sin of that angle are evaluated in fp64
and rounded once. Additions and multiplications alone do that, so all machines give the same bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.config import CacheConfig, YarnScaling
from dsv4.layer_schedule import SHARED_RATIOS, AttentionType

# A forward has four rows a token: at its position in the main and in the compress base, then at
# the first position of its CSA window and of its HCA window, both in the compress base.
ROW_STEPS = (1, 1, AttentionType.CSA.ratio, AttentionType.HCA.ratio)


def row_steps(config: CacheConfig) -> tuple[int, ...]:
    """Return the tokens of the windows that a token's rows are for; V4.1 has pairs for CSA."""
    pairs = (1, 1, max(SHARED_RATIOS), AttentionType.HCA.ratio)
    return pairs if config.has_latent_keys else ROW_STEPS


class RopeRows(NamedTuple):
    """cos and sin at some positions, each `[num_positions, rope_dim / 2]` fp32."""

    cos: Tensor
    sin: Tensor

    def take(self, rows: Tensor | slice) -> "RopeRows":
        """Return some of the rows."""
        return RopeRows(self.cos[rows], self.sin[rows])


def inverse_frequencies(theta: float, rope_dim: int, yarn: YarnScaling | None) -> Tensor:
    """Return `[rope_dim / 2]` fp32: 1 / theta^(2i / rope_dim), with YaRN's ramp if given."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.int64).to(torch.float32) / rope_dim
    powers = theta**exponents
    if yarn is None:
        return 1.0 / powers

    def pair_at(rotations: float) -> float:
        turns = yarn.original_max_position / (rotations * 2 * math.pi)
        return rope_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_at(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_at(yarn.beta_slow)), rope_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (yarn.factor * powers)) * (1 - keep) + (1.0 / powers) * keep


def base_frequencies(config: CacheConfig, base: str) -> Tensor:
    """Return the frequencies of one base, `main` (SWA layers) or `compress` (all others)."""
    if base == "main":
        return inverse_frequencies(config.rope_theta, config.rope_dim, None)
    if base != "compress":
        raise ValueError(f"Unknown RoPE base: expected 'main' or 'compress', got {base!r}")
    return inverse_frequencies(config.compress_rope_theta, config.rope_dim, config.yarn)


def row_frequencies(config: CacheConfig) -> Tensor:
    """Return the frequencies of a token's rows, `[4, rope_dim / 2]` fp32."""
    bases = ("main", "compress", "compress", "compress")
    return torch.stack([base_frequencies(config, base) for base in bases])


def rope_at(positions: Tensor, frequencies: Tensor) -> RopeRows:
    """Compute rows at positions `[...]`; frequencies are `[..., rope_dim / 2]` fp32."""
    sin, cos = sin_cos((positions.to(torch.float32)[..., None] * frequencies).double())
    return RopeRows(cos.float(), sin.float())


def sin_cos(angle: "Tensor") -> "tuple[Tensor, Tensor]":
    """Return sine and cosine of fp64 angles that are fp32 numbers from 0 to 2^24.

    Triton compiles these lines too. They have operators alone, and the same order everywhere.
    An error is below one unit of the last fp64 place.
    """
    # Added and subtracted, 1.5 × 2^52 rounds to an integer. pi / 2 has parts of 29, 28 and 53 bits:
    # its multiples by the first two are exact, and x + low is exact to 2^-87.
    quarters = (angle * 0.6366197723675814 + 6755399441055744.0) - 6755399441055744.0
    near = angle - quarters * 1.570796325802803
    second = quarters * 9.920935739593517e-10
    high = near - second
    rest = quarters * 5.721188726109832e-18 - ((near - high) - second)
    x = high - rest  # -pi / 4 to pi / 4
    low = (high - x) - rest
    square = x * x
    odd = square * (1 / 355687428096000) - 1 / 1307674368000  # 1 / 17!, 1 / 15!
    odd = odd * square + 1 / 6227020800
    odd = odd * square - 1 / 39916800
    odd = odd * square + 1 / 362880
    odd = odd * square - 1 / 5040
    odd = odd * square + 1 / 120
    odd = odd * square - 1 / 6
    even = square * (1 / 20922789888000) - 1 / 87178291200  # 1 / 16!, 1 / 14!
    even = even * square + 1 / 479001600
    even = even * square - 1 / 3628800
    even = even * square + 1 / 40320
    even = even * square - 1 / 720
    even = even * square + 1 / 24
    half = square * 0.5
    first = 1.0 - half
    sin = x + (low * first + x * square * odd)
    cos = first + (((1.0 - first) - half) + (square * square * even - x * low))
    # A quarter turn swaps both; turn is -1, 0 or 1. A half turn changes both signs.
    halves = (quarters * 0.5 + 6755399441055744.0) - 6755399441055744.0
    turn = quarters - 2.0 * halves
    is_odd = halves - 2.0 * ((halves * 0.5 + 6755399441055744.0) - 6755399441055744.0)
    sign = 1.0 - 2.0 * is_odd * is_odd
    stay = 1.0 - turn * turn
    return sign * (stay * sin + turn * cos), sign * (stay * cos - turn * sin)


def build_rope_table(
    config: CacheConfig, base: str, *, num_positions: int, device: torch.device
) -> RopeRows:
    """Compute the rows of the first positions in one base."""
    positions = torch.arange(num_positions, device=device)
    return rope_at(positions, base_frequencies(config, base).to(device))
