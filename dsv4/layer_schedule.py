"""The layer schedule: the attention type of each layer. Knows nothing of memory."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class AttentionType(enum.Enum):
    """The three layer types of DeepSeek-V4; the value is the compression ratio m.

    Attributes:
        ratio: Tokens per compressed entry; 0 where a layer has no entries.
    """

    SWA = 0
    CSA = 4
    HCA = 128

    def __init__(self, ratio: int) -> None:
        self.ratio = ratio

    @classmethod
    def from_ratio(cls, ratio: int) -> "AttentionType":
        """Return the type of a `compress_ratios` value."""
        for member in cls:
            if member.value == ratio:
                return member
        known = ", ".join(f"{member.value} ({member.name})" for member in cls)
        raise ValueError(f"Unknown compression ratio: expected one of {known}, got {ratio!r}")


GROUP_ROWS = 16  # rows that are pooled in order
HCA_GROUPS = AttentionType.HCA.ratio // GROUP_ROWS  # groups of an HCA window


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the schedule."""

    layer_idx: int
    attention_type: AttentionType
    is_mtp: bool = False

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry; 0 for SWA."""
        return self.attention_type.ratio

    @property
    def rope_base(self) -> Literal["main", "compress"]:
        """The RoPE table of every tensor of this layer."""
        return "main" if self.attention_type is AttentionType.SWA else "compress"


def build_schedule(ratios: Sequence[int], *, num_mtp_layers: int = 0) -> tuple[LayerSpec, ...]:
    """Build one `LayerSpec` per entry of `ratios`; the last `num_mtp_layers` are MTP layers."""
    first_mtp = len(ratios) - num_mtp_layers
    return tuple(
        LayerSpec(idx, AttentionType.from_ratio(ratio), is_mtp=idx >= first_mtp)
        for idx, ratio in enumerate(ratios)
    )
