"""`CacheConfig`: the geometry and choices of a cache, frozen and validated once."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from dsv4.checks import check_bool, check_int, check_ints
from dsv4.formats import (
    BYTE_ALIGN,
    IndexFormatName,
    KVFormatName,
    PageArrangement,
    RowFormat,
    ScaleFloor,
    index_row,
    kv_row,
)
from dsv4.layer_schedule import SHARED_RATIOS, AttentionType, LayerSpec, Sources, build_schedule

TailDtypeName = Literal["float32", "bfloat16"]
TAIL_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Far above any model, and low enough that sizes made of them stay exact and quick to compute.
MAX_POSITION = 2**31 - 1  # positions are int32
MAX_LAYERS = 4096
MAX_WIDTH = 2**20
MAX_DRAFTS = 256
MAX_RANKS = 1024
# Fields that change reads, not stored bytes.
_READ_FIELDS = {
    "num_query_heads", "index_num_heads", "index_topk", "max_position", "index_source_layer_ids",
    "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size",
}  # fmt: skip
# Fields that a description leaves out where they have their defaults, which are V4's.
_V41_FIELDS = {"kv_source_layer_ids": (), "entry_format": None, "page_arrangement": "split",
               "scale_floor": "amax", "context": None}  # fmt: skip
# The rows that DeepSeek-V4.1 was trained for; a `kv_format` replaces all of them.
_V41_ROWS = {"kv_format": "fp8_32", "entry_format": "nvfp4_16", "page_arrangement": "joined"}
# Keys of a V4.1 config with the same name there and here.
_SHARED_KEYS = (
    "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id",
    "candidate_topk_blocks", "candidate_block_size",
)  # fmt: skip
# Fields by the name that a model config has for them.
_HF_KEYS = {
    "num_query_heads": "num_attention_heads", "head_dim": "head_dim",
    "sliding_window": "sliding_window", "index_num_heads": "index_n_heads",
    "index_head_dim": "index_head_dim", "index_topk": "index_topk",
    "rms_norm_eps": "rms_norm_eps", "max_position": "max_position_embeddings",
}  # fmt: skip
_LEGACY_RATE_KEYS = {4: "compress_rate_csa", 128: "compress_rate_hca"}
LAYER_TYPE_NAMES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def _make_floats(config: object, *names: str, above: float = 0.0) -> None:
    """Check numbers and make them floats, so that equal configs have equal hashes."""
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= sys.float_info.max:
            raise ValueError(f"Invalid {name}: expected a number above {above:g}, got {value!r}")
        object.__setattr__(config, name, float(value))


def _make_ints(config: object, *names: str, at_least: int, at_most: int) -> None:
    for name in names:
        value = check_int(name, getattr(config, name), at_least=at_least, at_most=at_most)
        object.__setattr__(config, name, value)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN of the compressed layers' RoPE. cos and sin carry no attention factor."""

    factor: float = 16.0
    original_max_position: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        _make_floats(self, "factor", "beta_fast", "beta_slow")
        _make_ints(self, "original_max_position", at_least=1, at_most=MAX_POSITION)


@dataclass(frozen=True)
class Stage:
    """The place of some layers in their model: a pipeline stage, or draft layers alone.

    A cache of them counts blocks and replays as the whole model's does. So the caches of all stages
    need the same blocks for the same lengths, and each can have a prefix cache.

    Attributes:
        model_ratios: `compress_ratios` of the whole model.
        first_layer: The first of these layers.
    """

    model_ratios: tuple[int, ...]
    first_layer: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_ratios", _known_ratios("model_ratios", self.model_ratios))
        _make_ints(self, "first_layer", at_least=0, at_most=len(self.model_ratios) - 1)


@dataclass(frozen=True)
class ContextShare:
    """The place of a rank among those that divide the entries of each block, in equal runs.

    Attributes:
        rank, num_ranks: The rank, from 0, and the number of them.
    """

    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        _make_ints(self, "num_ranks", at_least=2, at_most=MAX_RANKS)
        _make_ints(self, "rank", at_least=0, at_most=self.num_ranks - 1)


@dataclass(frozen=True)
class CacheConfig:
    """The model's attention geometry and the choices of the cache.

    Attributes:
        compress_ratios: One of 0 (SWA), 4 (CSA), 128 (HCA) per layer, MTP layers last; of
            DeepSeek-V4.1 one of 0, 1 and 2.
        num_mtp_layers: Trailing layers of the schedule that are MTP layers.
        num_query_heads: Query heads of this rank.
        kv_format: Row format of window rows and entries, see `dsv4.formats`.
        entry_format: Row format of entries, if it is another one.
        page_arrangement: Place of KV rows' scales: behind all data of a page, `split`, or behind
            each row's own, `joined`. Index keys are split.
        scale_floor: Whether `fp8_32` bounds a group's `amax` or its `scale` to at least 1e-4.
        kv_source_layer_ids: Layers that make entries and index keys, each for the layers up to the
            next one; empty where every layer makes its own.
        index_source_layer_ids: Layers that choose entries, for the layers up to the next one;
            empty for the kv sources.
        candidate_source_layer_id: The layer that publishes `candidate_topk_blocks` blocks of
            `candidate_block_size` entries, from which later index sources choose; -1 for none.
        index_format: Row format of index keys.
        index_global_scale: NVFP4's optional fp32 scale; None means 1.
        index_hadamard: Transform index keys and queries alike before quantisation, as the
            model was trained to.
        tail_dtype: dtype of the rows of compression windows that are still open.
        block_tokens: Tokens a block covers, a multiple of the largest ratio.
        page_align: KV pages, blocks and window rings are rounded up to it.
        drafts_per_step: The most tokens of one step that may be rejected afterwards.
        stage: The place of these layers in their model; None for a whole model. `cut_layers` sets
            it.
        context: The rank's share of each block; None for all of it. `split_context` sets it.
    """

    compress_ratios: tuple[int, ...]
    num_mtp_layers: int = 0
    num_query_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    sliding_window: int = 128
    index_num_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnScaling | None = YarnScaling()
    max_position: int = 1048576
    kv_format: KVFormatName = "fp8"
    index_format: IndexFormatName = "mxfp4"
    index_global_scale: float | None = None
    index_hadamard: bool = True
    tail_dtype: TailDtypeName = "float32"
    block_tokens: int = 256
    page_align: int = 576
    drafts_per_step: int = 0
    stage: Stage | None = None
    entry_format: KVFormatName | None = None
    page_arrangement: PageArrangement = "split"
    scale_floor: ScaleFloor = "amax"
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    context: ContextShare | None = None

    def __post_init__(self) -> None:
        ratios = _known_ratios("compress_ratios", self.compress_ratios)
        object.__setattr__(self, "compress_ratios", ratios)
        _check_numbers(self)
        _make_sources(self)
        for problem in _problems(self):
            raise ValueError(problem)
        check_bool("index_hadamard", self.index_hadamard)
        _ = self.kv_row, self.entry_row, self.index_row  # refuse unknown formats

    @cached_property
    def schedule(self) -> tuple[LayerSpec, ...]:
        """One `LayerSpec` per layer."""
        return build_schedule(
            self.compress_ratios, num_mtp_layers=self.num_mtp_layers, sources=self.sources
        )

    @property
    def sources(self) -> Sources:
        """The layers that own what others read."""
        index = self.index_source_layer_ids or self.kv_source_layer_ids
        return Sources(self.kv_source_layer_ids, index, self.candidate_source_layer_id)

    @property
    def has_latent_keys(self) -> bool:
        """The model is of DeepSeek-V4.1's kind."""
        return any(ratio in SHARED_RATIOS for ratio in self.model_ratios)

    @cached_property
    def kv_row(self) -> RowFormat:
        """The row of a window token."""
        return self._kv_row(self.kv_format)

    @cached_property
    def entry_row(self) -> RowFormat:
        """The row of a compressed entry."""
        return self._kv_row(self.kv_format if self.entry_format is None else self.entry_format)

    def _kv_row(self, name: KVFormatName) -> RowFormat:
        return kv_row(
            name, head_dim=self.head_dim, rope_dim=self.rope_dim,
            arrangement=self.page_arrangement, scale_floor=self.scale_floor,
        )  # fmt: skip

    @cached_property
    def index_row(self) -> RowFormat:
        """The row of an index key."""
        rounds_first = not self.has_latent_keys
        return index_row(self.index_format, head_dim=self.index_head_dim, rounds_first=rounds_first)

    @property
    def num_layers(self) -> int:
        return len(self.compress_ratios)

    @property
    def model_ratios(self) -> tuple[int, ...]:
        """`compress_ratios` of the whole model."""
        return self.compress_ratios if self.stage is None else self.stage.model_ratios

    def cut_layers(self, first: int, last: int) -> "CacheConfig":
        """Return the config of layers `first` to `last - 1`, for a cache of their own.

        They are numbered from 0 there. Where layers share entries, the first compressed one of
        them is a kv source.
        """
        first = check_int("first", first, at_least=0, at_most=self.num_layers - 1)
        last = check_int("last", last, at_least=first + 1, at_most=self.num_layers)
        before = 0 if self.stage is None else self.stage.first_layer
        num_mtp = max(0, last - max(first, self.num_layers - self.num_mtp_layers))
        return dataclasses.replace(
            self, compress_ratios=self.compress_ratios[first:last], num_mtp_layers=num_mtp,
            stage=Stage(self.model_ratios, before + first), **self._cut_sources(first, last),
        )  # fmt: skip

    def split_context(self, rank: int, num_ranks: int) -> "CacheConfig":
        """Return the config of a rank that keeps one of `num_ranks` blocks in turn.

        A block of its cache is `num_ranks` blocks of this one, of which it stores one.
        """
        if self.context is not None:
            raise ValueError(f"The context is split already, over {self.num_ranks} ranks")
        if num_ranks == 1:
            return self
        if self.candidate_source_layer_id >= 0:
            entries = self.entries_per_block(self.compress_ratios[self.candidate_source_layer_id])
            if entries % self.candidate_block_size:
                raise ValueError(
                    "A split context needs whole candidate blocks on a rank: expected a divisor of "
                    f"{entries} entries, got candidate_block_size {self.candidate_block_size}"
                )
        return dataclasses.replace(
            self, block_tokens=self.block_tokens * num_ranks, context=ContextShare(rank, num_ranks)
        )

    @cached_property
    def whole(self) -> "CacheConfig":
        """The config that `split_context` was called on; itself for one rank."""
        block_tokens = self.block_tokens // self.num_ranks
        return dataclasses.replace(self, block_tokens=block_tokens, context=None)

    @property
    def rank(self) -> int:
        """The rank among those that divide a context; 0 for one alone."""
        return 0 if self.context is None else self.context.rank

    @property
    def num_ranks(self) -> int:
        """Ranks that divide a context."""
        return 1 if self.context is None else self.context.num_ranks

    def entries_per_block(self, ratio: int) -> int:
        """Count the entries of a block that the rank stores for a layer of that ratio."""
        return self.block_tokens // (ratio * self.num_ranks) if ratio else 0

    def own_entries(self, num_entries: int, ratio: int, *, rank: int | None = None) -> int:
        """Count those among a request's first entries that a rank stores, this one or another.

        Rank 0 has the most.
        """
        size, rank = self.entries_per_block(ratio), self.rank if rank is None else rank
        full, rest = divmod(num_entries, size * self.num_ranks)
        return full * size + min(max(rest - rank * size, 0), size)

    def _cut_sources(self, first: int, last: int) -> dict[str, Any]:
        """Return the sources among layers `first` to `last - 1`, as they are numbered there."""
        for layer in self.schedule[first:last]:
            if 0 <= layer.entries_of < first:
                raise ValueError(
                    f"Layers {first} to {last - 1} cannot be cut out: expected a kv source first, "
                    f"layer {layer.layer_idx} reads the entries of layer {layer.entries_of}"
                )
        kv, index, candidates = dataclasses.astuple(self.sources)
        return {
            "kv_source_layer_ids": tuple(idx - first for idx in kv if first <= idx < last),
            "index_source_layer_ids": tuple(idx - first for idx in index if first <= idx < last),
            "candidate_source_layer_id": candidates - first if first <= candidates < last else -1,
        }

    @cached_property
    def num_layer_writes(self) -> int:
        """Writes of a whole forward: every layer's window, every owner's entries."""
        return self.num_layers + sum(layer.owns_entries for layer in self.schedule)

    @cached_property
    def smallest_ratio(self) -> int:
        """Tokens per entry of the model's densest compressed layer; 0 if there is none."""
        return min((ratio for ratio in self.model_ratios if ratio), default=0)

    @property
    def least_block_bytes(self) -> int:
        """Bytes of a block of a stage without compressed layers, in a model that has some."""
        return self.page_align if self.smallest_ratio else 0

    @property
    def halo_tokens(self) -> int:
        """Tokens before a block boundary that make window rows and tails there anew.

        A layer's rows follow from its window in the layer before. So each layer's are right one
        window after that layer's, whatever the rings held at first; entries must be known.
        """
        rows = max(self.sliding_window, self.smallest_ratio)  # of the last layer, tails included
        return rows + (len(self.model_ratios) - 1) * (self.sliding_window - 1)

    @property
    def tail_torch_dtype(self) -> torch.dtype:
        return TAIL_DTYPES[self.tail_dtype]

    @property
    def stored_fields(self) -> dict[str, Any]:
        """The fields that give the stored bytes their meaning, as JSON can hold them."""
        fields = dataclasses.asdict(self)
        left_out = _READ_FIELDS | {n for n, value in _V41_FIELDS.items() if fields[n] == value}
        return {name: value for name, value in fields.items() if name not in left_out}

    @classmethod
    def from_stored_fields(cls, fields: Mapping[str, Any]) -> "CacheConfig":
        """Build a config that stores the same bytes as the one with these `stored_fields`."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"Invalid config: expected a mapping, got {type(fields).__name__}")
        known = {field.name for field in dataclasses.fields(cls)} - _READ_FIELDS
        if not {"compress_ratios"} <= set(fields) <= known:
            raise ValueError(f"Invalid config: expected stored fields, got {list(fields)}")
        for name, default in _V41_FIELDS.items():
            if name in fields and fields[name] in (default, list(default or ())):
                raise ValueError(f"Invalid config: expected {name} only where it is no default")
        made = {
            name: None if fields[name] is None else kind(**fields[name])
            for name, kind in (("yarn", YarnScaling), ("stage", Stage), ("context", ContextShare))
            if name in fields
        }
        return cls(**{**fields, **made})

    @cached_property
    def format_fingerprint(self) -> str:
        """The hash of every choice that gives the stored bytes their meaning.

        Two caches with the same fingerprint can exchange blocks and slots byte for byte.
        """
        meaning = self.stored_fields
        meaning["slots"] = "HCA groups as sums"
        meaning["index_global_scale"] = self.index_global_scale or 1.0
        for row in (self.kv_row, self.entry_row, self.index_row):
            meaning[f"{row.name}/{row.dim}"] = [
                (f.name, f.section, f.offset, str(f.dtype), f.count) for f in row.fields
            ] + [(row.group, row.scale_rule, row.data_bytes, row.scale_bytes)]
        text = json.dumps(meaning, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_hf(cls, config: Any, *, include_mtp: bool = False, **choices: Any) -> "CacheConfig":
        """Take the geometry of a transformers config and the given cache choices.

        Args:
            config: A `DeepseekV4Config`, a mapping, or the path of a config.json or of its folder.
                It has `layer_types` and `compress_rates`, or `compress_ratios`, which come first.
                V4.1's may have them in `text_config`, and has kv and index sources. Without a
                `candidate_source_layer_id` it is the last kv source; -1 is none.
            include_mtp: Append the MTP layers to the schedule.
            **choices: Any other field of `CacheConfig`.
        """
        raw = _as_mapping(config)
        main, mtp = _listed_ratios(raw)
        if include_mtp and not mtp:
            raise ValueError("include_mtp was asked for, but the model config has no MTP layer")
        theta, compress_theta, yarn = _rope(raw)
        geometry: dict[str, Any] = {
            **{name: _required(raw, key) for name, key in _HF_KEYS.items()},
            "compress_ratios": main + mtp if include_mtp else main,
            "num_mtp_layers": len(mtp) if include_mtp else 0,
            "rope_dim": _rope_dim(raw),
            "rope_theta": theta,
            "compress_rope_theta": compress_theta,
            "yarn": yarn,
        }
        geometry |= {name: raw[name] for name in _SHARED_KEYS if raw.get(name) is not None}
        if any(ratio in SHARED_RATIOS for ratio in geometry["compress_ratios"]):
            geometry |= _v41_choices(choices) | _v41_sources({**raw, **choices})
        return cls(**{**geometry, **choices})

    @classmethod
    def v4_flash(cls, *, include_mtp: bool = False, **choices: Any) -> "CacheConfig":
        """DeepSeek-V4-Flash: 2 SWA, 21 CSA and 20 HCA layers, 64 heads."""
        ratios = [0, 0] + [4, 128] * 20 + [4]
        return cls._preset(ratios, include_mtp, choices)

    @classmethod
    def v4_pro(cls, *, include_mtp: bool = False, **choices: Any) -> "CacheConfig":
        """DeepSeek-V4-Pro: 30 CSA and 31 HCA layers, 128 heads, top-k 1024."""
        ratios = [128, 128] + [4, 128] * 29 + [4]
        return cls._preset(ratios, include_mtp, choices, num_query_heads=128, index_topk=1024)

    @classmethod
    def v41_flash(cls, *, include_mtp: bool = False, **choices: Any) -> "CacheConfig":
        """DeepSeek-V4.1-Flash: 2 SWA layers, 38 in four groups that share entries, 64 heads."""
        return cls._preset(
            [0, 0] + [2] * 18 + [1] * 20, include_mtp, choices, num_mtp=3,
            index_num_heads=32, rms_norm_eps=1e-20, kv_source_layer_ids=(2, 8, 14, 20),
            index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36), candidate_source_layer_id=20,
            **_v41_choices(choices),
        )  # fmt: skip

    @classmethod
    def tiny(cls, *, include_mtp: bool = False, **choices: Any) -> "CacheConfig":
        """A small model of all three types, for tests: 4 layers, head_dim 96, top-k 8."""
        return cls._preset(
            [0, 4, 128, 4], include_mtp, choices, num_query_heads=4, head_dim=96, rope_dim=32,
            index_num_heads=16, index_head_dim=64, index_topk=8, max_position=65536,
            yarn=YarnScaling(original_max_position=4096),
        )  # fmt: skip

    @classmethod
    def _preset(
        cls, ratios: list[int], include_mtp: bool, choices: dict[str, Any], num_mtp: int = 1,
        **geometry: Any,
    ) -> "CacheConfig":  # fmt: skip
        mtp = [0] * num_mtp if include_mtp else []
        fields = {"compress_ratios": ratios + mtp, "num_mtp_layers": len(mtp)}
        return cls(**{**fields, **geometry, **choices})


def _known_ratios(name: str, given: Any) -> tuple[int, ...]:
    try:
        ratios = tuple(given)
    except TypeError:
        got = type(given).__name__
        raise ValueError(f"Invalid {name}: expected a sequence, got {got}") from None
    if not 1 <= len(ratios) <= MAX_LAYERS:
        raise ValueError(f"Invalid {name}: expected 1 to {MAX_LAYERS} layers, got {len(ratios)}")
    for ratio in ratios:
        AttentionType.from_ratio(ratio)  # refuses unknown ones
    known = tuple(int(ratio) for ratio in ratios)
    shared = [ratio for ratio in known if ratio in SHARED_RATIOS]
    others = [ratio for ratio in known if ratio > max(SHARED_RATIOS)]
    if shared and others:
        raise ValueError(
            f"Invalid {name}: expected those of one model, 4 and 128 or 1 and 2, "
            f"got {others[0]} and {shared[0]}"
        )
    return known


def _make_sources(config: CacheConfig) -> None:
    """Check the layers that own what others read, and make them tuples."""
    last = config.num_layers - 1
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        given = getattr(config, name)
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            got = type(given).__name__
            raise ValueError(f"Invalid {name}: expected a sequence, got {got}")
        ids = check_ints(name, list(given), at_least=0, at_most=last)
        object.__setattr__(config, name, tuple(ids.tolist()))
    _make_ints(config, "candidate_source_layer_id", at_least=-1, at_most=last)
    _make_ints(
        config, "candidate_topk_blocks", "candidate_block_size", at_least=1, at_most=MAX_WIDTH
    )
    if config.index_source_layer_ids and not config.kv_source_layer_ids:
        raise ValueError("index_source_layer_ids needs kv_source_layer_ids, which are empty")
    for problem in config.sources.problems(config.compress_ratios):
        raise ValueError(problem)
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    fewest = (blocks - 1) * size + 1  # the newest block may hold one entry
    if config.candidate_source_layer_id >= 0 and fewest < config.index_topk:
        raise ValueError(
            f"Invalid candidate_topk_blocks: {blocks} blocks of {size} may hold {fewest} entries, "
            f"expected at least index_topk ({config.index_topk})"
        )


def _v41_choices(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache choices that DeepSeek-V4.1 was trained for, unless rows are chosen."""
    rows = {} if "kv_format" in choices else _V41_ROWS
    return {**rows, "index_hadamard": False, "page_align": BYTE_ALIGN}


def _v41_sources(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the candidate source of a V4.1 model config; refuse one without other sources."""
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        if raw.get(key) is None or not _listed(raw, key):
            raise ValueError(
                f"Invalid model config: layers of ratio 1 and 2 need {key}, got {raw.get(key)!r}"
            )
    if raw.get("candidate_source_layer_id") is not None:
        return {}
    return {"candidate_source_layer_id": raw["kv_source_layer_ids"][-1]}


def _check_numbers(config: CacheConfig) -> None:
    _make_ints(
        config, "num_query_heads", "head_dim", "rope_dim", "sliding_window", "index_num_heads",
        "index_head_dim", "index_topk", "block_tokens", "page_align", at_least=1,
        at_most=MAX_WIDTH,
    )  # fmt: skip
    _make_ints(config, "max_position", at_least=1, at_most=MAX_POSITION)
    _make_ints(config, "drafts_per_step", at_least=0, at_most=MAX_DRAFTS)
    _make_ints(config, "num_mtp_layers", at_least=0, at_most=config.num_layers)
    _make_floats(config, "rms_norm_eps")
    _make_floats(config, "rope_theta", "compress_rope_theta", above=1.0)
    if config.index_global_scale is not None:
        _make_floats(config, "index_global_scale")


def _problems(config: CacheConfig) -> Iterator[str]:
    """Yield why widths and choices do not fit each other."""
    head_dim, rope_dim, index_dim = config.head_dim, config.rope_dim, config.index_head_dim
    if rope_dim % 8 or rope_dim >= head_dim or (head_dim - rope_dim) % 16:
        yield (
            "Invalid rope_dim: expected a multiple of 8 below head_dim with head_dim - rope_dim "
            f"a multiple of 16, got rope_dim {rope_dim} and head_dim {head_dim}"
        )
    if index_dim % 32 or index_dim < rope_dim:
        yield (
            "Invalid index_head_dim: expected a multiple of 32 and at least rope_dim "
            f"({rope_dim}), got {index_dim}"
        )
    if config.index_hadamard and index_dim & (index_dim - 1):
        yield f"index_hadamard needs index_head_dim to be a power of two, got {index_dim}"
    stage = config.stage
    if stage is not None and not isinstance(stage, Stage):
        yield f"Invalid stage: expected a Stage or None, got {type(stage).__name__}"
    if stage is not None:
        place = slice(stage.first_layer, stage.first_layer + config.num_layers)
        if stage.model_ratios[place] != config.compress_ratios:
            yield (
                f"Invalid stage: expected compress_ratios {list(stage.model_ratios[place])}, as "
                f"the model has from layer {stage.first_layer} on, got "
                f"{list(config.compress_ratios)}"
            )
    if config.has_latent_keys and head_dim % 16:
        yield f"Invalid head_dim: ratios 1 and 2 need a multiple of 16, got {head_dim}"
    largest, align = max(config.model_ratios), config.page_align
    context = config.context
    if context is not None and not isinstance(context, ContextShare):
        yield f"Invalid context: expected a ContextShare or None, got {type(context).__name__}"
        return
    if largest and config.block_tokens % (largest * config.num_ranks):
        of_ranks = "" if context is None else f" times {config.num_ranks} ranks"
        yield (
            "Invalid block_tokens: expected a multiple of the largest ratio "
            f"({largest}){of_ranks}, got {config.block_tokens}"
        )
    if align % BYTE_ALIGN:
        yield f"Invalid page_align: expected a multiple of {BYTE_ALIGN}, got {align}"
    if config.tail_dtype not in TAIL_DTYPES:
        known = ", ".join(TAIL_DTYPES)
        yield f"Unknown tail_dtype: expected one of {known}, got {config.tail_dtype!r}"
    if config.index_global_scale is not None and config.index_format != "nvfp4":
        yield (
            "index_global_scale is for index_format 'nvfp4' only, "
            f"got {config.index_global_scale!r} with {config.index_format!r}"
        )


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return _section(config, "text_config") or config
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"Invalid config path: expected a config.json, found none at {path}")
        try:
            loaded = json.loads(path.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Invalid config.json: expected JSON in {path}: {error}") from error
        if not isinstance(loaded, dict):
            raise ValueError(
                f"Invalid config.json: expected an object, got {type(loaded).__name__}"
            )
        return _as_mapping(loaded)
    if getattr(config, "text_config", None) is not None:
        return _as_mapping(config.text_config)
    if hasattr(config, "to_dict"):
        # to_dict leaves qk_rope_head_dim out: it is a plain attribute of the transformers config.
        mapping = dict(config.to_dict())
        mapping.setdefault("qk_rope_head_dim", getattr(config, "qk_rope_head_dim", None))
        return mapping
    raise TypeError(
        "Invalid config: expected a DeepseekV4Config, a mapping or a path, "
        f"got {type(config).__name__}"
    )


def _required(raw: Mapping[str, Any], key: str) -> Any:
    value = raw.get(key)
    if value is None:
        raise ValueError(f"Invalid model config: expected the key {key!r}, which is missing")
    return value


def _listed(raw: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = raw[key]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"Invalid {key}: expected a list, got {type(value).__name__}")
    return value


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object of a model config; an empty one if it is missing."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"Invalid {key}: expected an object, got {type(value).__name__}")
    return value or {}


def has_mtp_layers(config: Any) -> bool:
    """Tell whether a model config, in any form that `CacheConfig.from_hf` takes, has MTP layers."""
    return bool(_listed_ratios(_as_mapping(config))[1])


def _listed_ratios(raw: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ratios of the main layers, and those of the MTP layers."""
    num_hidden = check_int(
        "num_hidden_layers", _required(raw, "num_hidden_layers"), at_least=1, at_most=MAX_LAYERS
    )
    if raw.get("compress_ratios") is not None:
        listed = list(_listed(raw, "compress_ratios"))
    elif raw.get("layer_types") is not None:
        listed = [_layer_type_ratio(name, raw) for name in _listed(raw, "layer_types")]
    else:
        raise ValueError(
            "Invalid model config: expected 'layer_types' or 'compress_ratios', found neither"
        )
    if len(listed) < num_hidden:
        raise ValueError(
            f"Invalid layer schedule: expected at least {num_hidden} layers "
            f"(num_hidden_layers), got {len(listed)}"
        )
    num_mtp = check_int(
        "num_nextn_predict_layers", raw.get("num_nextn_predict_layers") or 0, at_least=0,
        at_most=MAX_LAYERS,
    )  # fmt: skip
    return listed[:num_hidden], listed[num_hidden:] or [0] * num_mtp


def _layer_type_ratio(name: str, raw: Mapping[str, Any]) -> int:
    if not isinstance(name, str) or name not in LAYER_TYPE_NAMES:
        raise ValueError(
            f"Unknown layer type: expected one of {', '.join(LAYER_TYPE_NAMES)}, got {name!r}"
        )
    ratio = LAYER_TYPE_NAMES[name]
    rate = _section(raw, "compress_rates").get(name, ratio)
    rate = raw.get(_LEGACY_RATE_KEYS.get(ratio, ""), rate)
    if ratio and rate != ratio:
        raise ValueError(f"Unknown compression ratio of {name}: expected {ratio}, got {rate}")
    return ratio


def _rope_dim(raw: Mapping[str, Any]) -> Any:
    if raw.get("qk_rope_head_dim") is not None:
        return raw["qk_rope_head_dim"]
    factor = _required(raw, "partial_rotary_factor")
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ValueError(
            f"Invalid partial_rotary_factor: expected a number above 0 and up to 1, got {factor!r}"
        )
    head_dim = check_int("head_dim", raw["head_dim"], at_least=1, at_most=MAX_WIDTH)
    return int(head_dim * factor)


def _rope(raw: Mapping[str, Any]) -> tuple[float, float, YarnScaling | None]:
    """Return theta of SWA layers, theta of compressed layers, and their YaRN."""
    parameters = _section(raw, "rope_parameters")
    if "main" in parameters and "compress" in parameters:
        main, compress = (_section(parameters, key) for key in ("main", "compress"))
        if main.get("rope_type", "default") != "default":
            raise ValueError(
                f"Invalid RoPE of SWA layers: expected 'default', got {main['rope_type']!r}"
            )
        theta, compress_theta = _required(main, "rope_theta"), _required(compress, "rope_theta")
    else:
        theta, compress_theta = _required(raw, "rope_theta"), _required(raw, "compress_rope_theta")
        compress = _section(raw, "rope_scaling") or parameters
    rope_type = compress.get("rope_type", compress.get("type", "default"))
    if rope_type == "default":
        return theta, compress_theta, None
    if rope_type != "yarn":
        raise ValueError(f"Unknown RoPE type: expected 'default' or 'yarn', got {rope_type!r}")
    if compress.get("attention_factor") not in (None, 1, 1.0):
        raise ValueError(
            "DeepSeek-V4 does not scale cos and sin: expected attention_factor 1, "
            f"got {compress['attention_factor']}"
        )
    yarn = YarnScaling(
        factor=_required(compress, "factor"),
        original_max_position=_required(compress, "original_max_position_embeddings"),
        beta_fast=compress.get("beta_fast") or 32.0,
        beta_slow=compress.get("beta_slow") or 1.0,
    )
    return theta, compress_theta, yarn
