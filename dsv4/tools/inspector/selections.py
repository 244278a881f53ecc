"""`SelectionRecorder`: records the entries that top-k chooses for one request, in a file.

The file has for each CSA layer `layer.N.positions` `[tokens]` and `layer.N.entries`
`[tokens, topk]`, both int32, padded with -1. Of a position that was rolled back and written again,
the last choice is kept.
"""

import re
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.tensor_file import FilePath, TensorFile
from dsv4.checks import check_int
from dsv4.kernels.contracts import Selection
from dsv4.layer_schedule import AttentionType

SELECTIONS_FILE = TensorFile("recorded selections", key="selections", version="dsv4-selections-2")


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
        self.slot = check_int("slot", slot, at_least=0)
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
        """Return the recorded selections, by layer; the last step of a position counts."""
        selections = {}
        for idx, steps in sorted(self._steps.items()):
            positions, entries = (torch.cat(parts) for parts in zip(*steps, strict=True))
            last = {position: row for row, position in enumerate(positions.tolist())}
            rows = torch.tensor([last[position] for position in sorted(last)], dtype=torch.int64)
            selections[idx] = LayerSelections(positions[rows], entries[rows])
        return selections

    def save(self, path: FilePath) -> None:
        """Save the recorded selections, whole or not at all."""
        tensors = {
            f"layer.{idx}.{name}": tensor
            for idx, layer in self.selections().items()
            for name, tensor in layer._asdict().items()
        }
        SELECTIONS_FILE.write(path, {}, tensors)


@dataclass(eq=False)
class _WatchedHandle(LayerCacheHandle):
    recorder: SelectionRecorder | None = None

    def select_entries(
        self, query: Tensor, head_weights: Tensor, candidates: Selection | None = None
    ) -> Selection:
        selection = super().select_entries(query, head_weights, candidates)
        assert self.recorder is not None
        slots = self.request_slots[self.request_ids.long()]
        is_mine = slots == self.recorder.slot
        self.recorder.record(
            self.layer.layer_idx, self.positions[is_mine], selection.entry_idx[is_mine]
        )
        return selection


def read_selections(path: FilePath) -> dict[int, LayerSelections]:
    """Read a file of `SelectionRecorder.save`, by layer; refuse any other file."""
    _, tensors = SELECTIONS_FILE.read(path)
    matches = [re.fullmatch(r"layer\.([0-9]{1,9})\.positions", name) for name in tensors]
    layers = sorted(int(match[1]) for match in matches if match)
    expected = {f"layer.{idx}.{name}" for idx in layers for name in LayerSelections._fields}
    if set(tensors) != expected:
        text = f"expected positions and entries of layers, got {sorted(tensors)}"
        raise SELECTIONS_FILE.refusal(path, text)
    return {idx: _layer(path, idx, tensors) for idx in layers}


def _layer(path: FilePath, idx: int, tensors: dict[str, Tensor]) -> LayerSelections:
    layer = LayerSelections(*(tensors[f"layer.{idx}.{name}"] for name in LayerSelections._fields))
    positions, entries = layer
    refusal = partial(SELECTIONS_FILE.refusal, path)
    shapes = positions.dim(), entries.dim()
    if shapes != (1, 2) or len(positions) != len(entries):
        raise refusal(
            f"expected [tokens] and [tokens, topk] in layer {idx}, got "
            f"{list(positions.shape)} and {list(entries.shape)}"
        )
    if (positions.dtype, entries.dtype) != (torch.int32, torch.int32):
        raise refusal(f"expected int32 in layer {idx}, got {positions.dtype} and {entries.dtype}")
    if (positions.diff() <= 0).any() or (positions[:1] < 0).any():
        raise refusal(f"expected ascending positions from 0 on in layer {idx}")
    visible = (positions.long() + 1) // AttentionType.CSA.ratio
    if (entries < -1).any() or (entries >= visible[:, None]).any():
        raise refusal(f"expected entries that their tokens see, or -1, in layer {idx}")
    return layer
