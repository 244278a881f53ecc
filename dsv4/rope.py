"""The RoPE table. Rotations of rows, entries, keys, queries and outputs all read it.

An fp32 angle is not exact at long positions, so its operation order is part of the model:
f = 1 / theta^(2i/d), angle = fp32(position × f). cos and sin of that angle are evaluated in
fp64 and rounded once, so that the table does not depend on a machine's vector library.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import CacheConfig, YarnScaling

_CHUNK = 65536  # positions evaluated at a time, to bound the fp64 temporaries


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, each `[num_positions, rope_dim / 2]` fp32."""

    cos: Tensor
    sin: Tensor

    @property
    def num_bytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes


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


def build_rope_table(
    config: CacheConfig, base: str, *, num_positions: int, device: torch.device
) -> RopeTable:
    """Build the table of one base, `main` (SWA layers) or `compress` (all others)."""
    if base == "main":
        freqs = inverse_frequencies(config.rope_theta, config.rope_dim, None)
    elif base != "compress":
        raise ValueError(f"Unknown RoPE base: expected 'main' or 'compress', got {base!r}")
    else:
        freqs = inverse_frequencies(config.compress_rope_theta, config.rope_dim, config.yarn)
    cos = torch.empty(num_positions, config.rope_dim // 2, dtype=torch.float32)
    sin = torch.empty_like(cos)
    for start in range(0, num_positions, _CHUNK):
        end = min(start + _CHUNK, num_positions)
        positions = torch.arange(start, end, dtype=torch.float32)
        angles = (positions[:, None] * freqs).double()
        cos[start:end] = angles.cos()
        sin[start:end] = angles.sin()
    return RopeTable(cos.to(device), sin.to(device))
