"""The layer schedule: each layer's attention type, what it owns and whose rows it reads.

Every layer owns its window. In DeepSeek-V4 a compressed layer owns its entries and index keys too,
and chooses among them itself. In DeepSeek-V4.1 entries and keys belong to the kv sources, choices
to the index sources. A layer uses those of the last source up to itself. Knows nothing of memory.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


class AttentionType(enum.Enum):
    """The three layer types; the value is the compression ratio m of DeepSeek-V4.

    Attributes:
        ratio: Tokens per compressed entry in V4; 0 where a layer has no entries.
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
        if ratio in SHARED_RATIOS and not isinstance(ratio, bool):
            return cls.CSA
        known = ", ".join(f"{member.value} ({member.name})" for member in cls)
        known += ", 1 and 2 (CSA of V4.1)"
        raise ValueError(f"Unknown compression ratio: expected one of {known}, got {ratio!r}")


SHARED_RATIOS = (1, 2)  # of V4.1: no overlap, no bias, keys from the entry's latent
GROUP_ROWS = 16  # rows that are pooled in order
HCA_GROUPS = AttentionType.HCA.ratio // GROUP_ROWS  # groups of an HCA window


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the schedule.

    Attributes:
        ratio: Tokens per compressed entry; 0 for SWA. The default is the type's in V4.
        entries_of: The layer whose entries and index keys it reads; -1 for SWA.
        choice_of: The layer whose choice of entries it attends; -1 unless CSA.
        candidates_of: The layer that names the only blocks its choice may come from; -1 for none.

    A layer with its own number there is an owner; the default is that it owns all it reads.
    """

    layer_idx: int
    attention_type: AttentionType
    is_mtp: bool = False
    ratio: int = -1
    entries_of: int = -1
    choice_of: int = -1
    candidates_of: int = -1

    def __post_init__(self) -> None:
        kind, own = self.attention_type, self.layer_idx
        has_entries, has_choice = kind is not AttentionType.SWA, kind is AttentionType.CSA
        for name, default in (
            ("ratio", kind.ratio),
            ("entries_of", own if has_entries else -1),
            ("choice_of", own if has_choice else -1),
        ):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, default)

    @property
    def owns_entries(self) -> bool:
        """It compresses; entries, and index keys if it is CSA, are its own."""
        return self.entries_of == self.layer_idx

    @property
    def owns_choice(self) -> bool:
        """It chooses entries for itself, and for other layers of its group."""
        return self.choice_of == self.layer_idx

    @property
    def has_latent_keys(self) -> bool:
        """Index keys are made of the entry before RoPE, not by a compressor of their own."""
        return self.ratio in SHARED_RATIOS

    @property
    def rope_base(self) -> Literal["main", "compress"]:
        """The RoPE table of every tensor of this layer."""
        return "main" if self.attention_type is AttentionType.SWA else "compress"


@dataclass(frozen=True)
class Sources:
    """Layers that own what others read; without kv sources each layer owns its own.

    Attributes:
        kv: Layers that make entries and index keys.
        index: Layers that choose entries; the kv sources are among them.
        candidates: The layer that publishes candidate blocks; -1 for none.
    """

    kv: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    candidates: int = -1

    def problems(self, ratios: Sequence[int]) -> Iterator[str]:
        """Yield why layers of these ratios cannot share."""
        for name, ids in (("kv_source", self.kv), ("index_source", self.index)):
            name = f"{name}_layer_ids"
            if list(ids) != sorted(set(ids)):
                yield f"Invalid {name}: expected ascending layers, got {list(ids)}"
            wrong = [idx for idx in ids if ratios[idx] not in SHARED_RATIOS]
            if wrong:
                yield f"Invalid {name}: expected layers of ratio 1 or 2, got layer {wrong[0]}"
        missing = sorted(set(self.kv) - set(self.index))
        if missing:
            yield (
                f"Invalid index_source_layer_ids: expected every kv source among them, "
                f"layer {missing[0]} is not"
            )
        for idx, ratio in enumerate(ratios):
            for name, ids in (("kv", self.kv), ("index", self.index)):
                source = last_source(ids, idx)
                if self.kv and ratio and (source < 0 or ratios[source] != ratio):
                    got = "none" if source < 0 else f"layer {source} of ratio {ratios[source]}"
                    yield (
                        f"Invalid {name}_source_layer_ids: layer {idx} needs a {name} source of "
                        f"its ratio {ratio} up to itself, got {got}"
                    )
        if self.candidates >= 0 and self.candidates not in self.index:
            yield (
                "Invalid candidate_source_layer_id: expected one of index_source_layer_ids, "
                f"got {self.candidates}"
            )
        later = [idx for idx in self.kv if 0 <= self.candidates < idx]
        if later:
            yield (
                "Invalid candidate_source_layer_id: candidates are entries of one kv source, "
                f"expected none after layer {self.candidates}, got {later[0]}"
            )


def last_source(ids: Sequence[int], layer_idx: int) -> int:
    """Return the last of `ids` up to a layer; -1 for none."""
    return max((idx for idx in ids if idx <= layer_idx), default=-1)


NO_SOURCES = Sources()


def build_schedule(
    ratios: Sequence[int], *, num_mtp_layers: int = 0, sources: Sources = NO_SOURCES
) -> tuple[LayerSpec, ...]:
    """Build one `LayerSpec` per entry of `ratios`; the last `num_mtp_layers` are MTP layers."""
    first_mtp, schedule = len(ratios) - num_mtp_layers, []
    for idx, ratio in enumerate(ratios):
        kv, index = (last_source(ids, idx) if ratio else -1 for ids in (sources.kv, sources.index))
        is_inside = 0 <= sources.candidates < idx and idx in sources.index
        candidates, kind = sources.candidates if is_inside else -1, AttentionType.from_ratio(ratio)
        schedule.append(LayerSpec(idx, kind, idx >= first_mtp, ratio, kv, index, candidates))
    return tuple(schedule)
