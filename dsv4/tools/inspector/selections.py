"""`SelectionRecorder`: records the entries that top-k chooses for one request, in a file.

The file is safetensors: for each CSA layer `layer.N.positions` `[tokens]` and `layer.N.entries`
`[tokens, topk]`, both int32, padded with -1. Of a position that was rolled back and written again,
the last choice is kept.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels.contracts import Selection

FORMAT = "dsv4-selections-1"
METADATA_KEY = "selections"


class RunFiles(NamedTuple):
    """The files of one run: a request, the same in bf16 rows, and its selections."""

    request: str
    against: str
    selections: str


RUN_FILES = RunFiles("request.safetensors", "request-bf16.safetensors", "selections.safetensors")


class LayerSelections(NamedTuple):
    """The choices of one layer.

    positions is `[tokens]` int32, ascending; entries is `[tokens, topk]` int32, ascending and
    then -1.
    """

    positions: Tensor
    entries: Tensor


class SelectionRecorder:
    """Collect the selections of one request while it runs.

    Each recorded forward waits for the device, so this is not for serving. Captured graphs cannot
    be recorded.
    """

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self._steps: dict[int, list[LayerSelections]] = {}

    def watch(self, handle: LayerCacheHandle) -> LayerCacheHandle:
        """Return the same handle with a `select_entries` that also records."""
        values = {field.name: getattr(handle, field.name) for field in fields(handle)}
        return _WatchedHandle(**values, recorder=self)

    def record(self, layer_idx: int, positions: Tensor, entries: Tensor) -> None:
        """Record the entries `[tokens, topk]` of a layer's tokens at `positions` `[tokens]`."""
        if positions.dim() != 1 or entries.dim() != 2 or len(positions) != len(entries):
            raise ValueError(
                "Invalid selections: expected positions [tokens] and entries [tokens, topk], got "
                f"{list(positions.shape)} and {list(entries.shape)}"
            )
        step = LayerSelections(positions.cpu().int(), entries.cpu().int())
        self._steps.setdefault(layer_idx, []).append(step)

    def selections(self) -> dict[int, LayerSelections]:
        """Return the recorded selections, by layer."""
        return {idx: _in_order(steps) for idx, steps in sorted(self._steps.items())}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the recorded selections."""
        from safetensors.torch import save_file

        tensors = {
            f"layer.{idx}.{name}": tensor
            for idx, layer in self.selections().items()
            for name, tensor in layer._asdict().items()
        }
        save_file(tensors, path, {METADATA_KEY: json.dumps({"format": FORMAT})})


@dataclass(eq=False)
class _WatchedHandle(LayerCacheHandle):
    recorder: SelectionRecorder | None = None

    def select_entries(self, query: Tensor, head_weights: Tensor) -> Selection:
        selection = super().select_entries(query, head_weights)
        assert self.recorder is not None
        slots = self.request_slots[self.request_ids.long()]
        is_mine = slots == self.recorder.slot
        self.recorder.record(
            self.layer.layer_idx, self.positions[is_mine], selection.entry_idx[is_mine]
        )
        return selection


def _in_order(steps: list[LayerSelections]) -> LayerSelections:
    """Join steps in the order of positions; the last step of a position counts."""
    positions = torch.cat([step.positions for step in steps])
    entries = torch.cat([step.entries for step in steps])
    last = {position: row for row, position in enumerate(positions.tolist())}
    rows = torch.tensor([last[position] for position in sorted(last)], dtype=torch.int64)
    return LayerSelections(positions[rows], entries[rows])


def read_selections(path: str | os.PathLike[str]) -> dict[int, LayerSelections]:
    """Read a file of `SelectionRecorder.save`, by layer; refuse any other file."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"No recorded selections at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            _check_metadata(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, UnicodeDecodeError) as error:
        raise _refusal(path, f"expected a whole safetensors file, got: {error}") from None
    matches = [re.fullmatch(r"layer\.(\d+)\.positions", name) for name in tensors]
    layers = sorted(int(match[1]) for match in matches if match)
    expected = {f"layer.{idx}.{name}" for idx in layers for name in LayerSelections._fields}
    if set(tensors) != expected:
        raise _refusal(path, f"expected positions and entries of layers, got {sorted(tensors)}")
    return {idx: _layer(path, idx, tensors) for idx in layers}


def _layer(path: str | os.PathLike[str], idx: int, tensors: dict[str, Tensor]) -> LayerSelections:
    layer = LayerSelections(*(tensors[f"layer.{idx}.{name}"] for name in LayerSelections._fields))
    shapes = layer.positions.dim(), layer.entries.dim()
    if shapes != (1, 2) or len(layer.positions) != len(layer.entries):
        raise _refusal(
            path,
            f"expected [tokens] and [tokens, topk] in layer {idx}, got "
            f"{list(layer.positions.shape)} and {list(layer.entries.shape)}",
        )
    return layer


def _check_metadata(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    try:
        file_format = json.loads(metadata[METADATA_KEY])["format"]
    except (KeyError, TypeError, ValueError):
        raise _refusal(path, f"expected metadata {METADATA_KEY!r} in JSON, found none") from None
    if file_format != FORMAT:
        raise _refusal(path, f"expected the format {FORMAT}, got {file_format}")


def _refusal(path: str | os.PathLike[str], problem: str) -> ValueError:
    return ValueError(f"Invalid recorded selections {os.fspath(path)}: {problem}")
