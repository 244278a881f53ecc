"""The contents of a saved request: blocks, window, tails, and the rows of every layer."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.saved_request import (
    SavedRequest,
    first_tail_position,
    first_window_position,
    read_any,
)
from dsv4.config import CacheConfig
from dsv4.tools.inspector.parts import Part, layer_parts
from dsv4.tools.inspector.selections import LayerSelections
from dsv4.tools.inspector.statistics import describe_part

EXACT_FORMATS = ("bf16", "fp32")
FORMAT_FIELDS = ("kv_format", "index_format", "tail_dtype")
GEOMETRY_FIELDS = ("compress_ratios", "kv_source_layer_ids", "head_dim", "rope_dim",
                   "sliding_window", "index_head_dim", "index_hadamard")  # fmt: skip
CHUNK_TOKENS = 2048  # tokens compared at a time


class RequestInspector:
    """Read a saved request and describe it, a layer at a time.

    Args:
        path: A file of `KVCacheManager.save_request`.
        against: The same tokens, saved from a cache of bf16 or fp32 rows, to measure errors.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, against: str | os.PathLike[str] | None = None
    ) -> None:
        self.path = Path(path)
        self.config, self.saved = read_any(path)
        self._parts = layer_parts(self.config, self.saved)
        self._exact = None if against is None else self._read_exact(against)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def layers(self) -> Iterator[dict[str, Any]]:
        """Yield each layer's type and the statistics of its parts."""
        for layer, parts in zip(self.config.schedule, self._parts, strict=True):
            idx = layer.layer_idx
            described = [describe_part(part, self._exact_part(idx, part)) for part in parts]
            yield {"layer": idx, "type": layer.attention_type.name, "parts": described}

    def summary(self) -> dict[str, Any]:
        """Describe the request without its rows: lengths, blocks, window and tails."""
        config, saved = self.config, self.saved
        num_blocks, block_bytes = saved.blocks.shape
        ratio = config.smallest_ratio or 1
        closed_tokens = saved.length // ratio * ratio
        return {
            "file": str(self.path), "length": saved.length, "rollback_floor": saved.rollback_floor,
            **{name: getattr(config, name) for name in FORMAT_FIELDS},
            "config_fingerprint": config.format_fingerprint,
            "blocks": {
                "num_blocks": num_blocks, "block_tokens": config.block_tokens,
                "block_bytes": block_bytes,
                # The share of the blocks' entries that are closed.
                "fill": closed_tokens / (num_blocks * config.block_tokens) if num_blocks else None,
            },
            "slot_bytes": saved.slot.numel(), "window": _window(config, saved),
            "tails": _tails(config, saved),
        }  # fmt: skip

    def report(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        """Join layers to the whole report, and list values that are not finite as problems."""
        problems = [
            {"layer": layer["layer"], "type": layer["type"], "part": part["part"], **problem}
            for layer in layers
            for part in layer["parts"]
            for problem in part["problems"]
        ]
        return {"inspect": "request", **self.summary(), "layers": layers, "problems": problems}

    def _read_exact(self, path: str | os.PathLike[str]) -> list[dict[str, Part]]:
        config, saved = read_any(path)
        invalid = f"Invalid request to compare with {os.fspath(path)}: expected"
        if config.kv_format not in EXACT_FORMATS:
            raise ValueError(f"{invalid} rows in bf16 or fp32, got {config.kv_format}")
        if saved.length != self.saved.length:
            raise ValueError(f"{invalid} {self.saved.length} tokens, got {saved.length}")
        expected, got = (
            {name: getattr(each, name) for name in GEOMETRY_FIELDS}
            for each in (self.config, config)
        )
        if expected != got:
            raise ValueError(f"{invalid} layers and widths {expected}, got {got}")
        return [{part.name: part for part in parts} for parts in layer_parts(config, saved)]

    def _exact_part(self, layer_idx: int, part: Part) -> Part | None:
        """Return the rows before quantisation; None if unknown, or if nothing is quantised."""
        if self._exact is None or part.row_format is None or not part.row_format.group:
            return None
        exact = self._exact[layer_idx][part.name]
        is_known = exact.row_format is not None and not exact.row_format.group
        return exact if is_known else None


def _window(config: CacheConfig, saved: SavedRequest) -> dict[str, Any]:
    ring_rows = config.sliding_window + config.drafts_per_step
    first = first_window_position(config.sliding_window, saved.length)
    positions = (first, saved.length - 1) if saved.length else (None, None)
    return {
        "rows": saved.length - first, "ring_rows": ring_rows, "first_position": positions[0],
        "last_position": positions[1], "next_row": saved.length % ring_rows,
    }  # fmt: skip


def _tails(config: CacheConfig, saved: SavedRequest) -> list[dict[str, Any]]:
    """Describe the tails of each compressed type of layer: open tokens, and rows in use.

    Layers of V4.1 have several ratios, and one token closes an entry of ratio 1.
    """
    owners = [schema for schema in build_schemas(config) if schema.layer.owns_entries]
    name = "{0.attention_type.name}" + (" {0.ratio}:1" if config.has_latent_keys else "")
    kinds = {name.format(schema): schema for schema in owners}
    return [
        {"type": name, "open_tokens": saved.length % schema.ratio,
         "rows": max(0, saved.length - first_tail_position(schema, saved.length)),
         "tail_rows": schema.tail_rows, "closed_entries": saved.length // schema.ratio}
        for name, schema in sorted(kinds.items())
    ]  # fmt: skip


def describe_selections(selections: dict[int, LayerSelections]) -> list[dict[str, Any]]:
    """Summarise the entries that top-k chose in each layer."""
    return [{"layer": idx, **_describe_layer(layer)} for idx, layer in selections.items()]


def _describe_layer(layer: LayerSelections) -> dict[str, Any]:
    entries, visible = layer.entries.numpy(), layer.visible.numpy()
    is_chosen, num_tokens = entries >= 0, len(entries)
    num_visible, num_choices = int(visible.max(initial=0)), int(is_chosen.sum())
    distinct = int(np.count_nonzero(np.bincount(entries[is_chosen])))
    newest = entries >= (visible * 3 // 4)[:, None]
    return {
        "tokens": num_tokens, "entries": num_visible,
        "chosen_per_token": num_choices / num_tokens if num_tokens else None,
        "never_chosen": 1 - distinct / num_visible if num_visible else None,
        "in_newest_quarter": int((newest & is_chosen).sum()) / num_choices if num_choices else None,
        "kept_from_token_before": _kept(entries),
    }  # fmt: skip


def _kept(entries: np.ndarray[Any, Any]) -> float | None:
    """Return the share of a token's entries that the previous token chose too."""
    kept = chosen = 0
    for start in range(0, len(entries) - 1, CHUNK_TOKENS):
        rows = entries[start : start + CHUNK_TOKENS + 1].astype(np.int64)
        stride = int(rows.max(initial=0)) + 2
        # One ascending sequence of all choices; those of a token are consecutive.
        keys = np.where(rows < 0, stride - 1, rows) + stride * np.arange(len(rows))[:, None]
        before, now = keys[:-1].ravel(), (keys[1:] - stride)[rows[1:] >= 0]
        nearest = np.minimum(np.searchsorted(before, now), before.size - 1)
        kept += int((before[nearest] == now).sum())
        chosen += now.size
    return kept / chosen if chosen else None
