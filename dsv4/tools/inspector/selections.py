"""`SelectionRecorder`: records the entries that top-k chooses for one request, in a file.

The file has for each CSA layer `layer.N.positions` `[tokens]` and `layer.N.entries`
`[tokens, topk]`, both int32, padded with -1, and in its description `layer.N.ratio` unless it is
V4's. Of a position that was rolled back and written again, the last choice is kept.
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
from dsv4.layer_schedule import SHARED_RATIOS, AttentionType

CSA_RATIO = AttentionType.CSA.ratio
TENSORS = ("positions", "entries")  # of a layer, in a file
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
    then -1. ratio is the tokens of an entry.
    """

    positions: Tensor
    entries: Tensor
    ratio: int = CSA_RATIO

    @property
    def visible(self) -> Tensor:
        """The number of entries that each token sees, `[tokens]` int64."""
        return (self.positions.long() + 1) // self.ratio


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

    def record(
        self, layer_idx: int, positions: Tensor, entries: Tensor, *, ratio: int = CSA_RATIO
    ) -> None:
        """Record the entries `[tokens, topk]` of a layer's tokens at `positions` `[tokens]`."""
        if positions.dim() != 1 or entries.dim() != 2 or len(positions) != len(entries):
            raise ValueError(
                "Invalid selections: expected positions [tokens] and entries [tokens, topk], got "
                f"{list(positions.shape)} and {list(entries.shape)}"
            )
        step = LayerSelections(positions.cpu().int(), entries.cpu().int(), ratio)
        self._steps.setdefault(layer_idx, []).append(step)

    def selections(self) -> dict[int, LayerSelections]:
        """Return the recorded selections, by layer; the last step of a position counts."""
        selections = {}
        for idx, steps in sorted(self._steps.items()):
            positions = torch.cat([step.positions for step in steps])
            entries = torch.cat([step.entries for step in steps])
            last = {position: row for row, position in enumerate(positions.tolist())}
            rows = torch.tensor([last[position] for position in sorted(last)], dtype=torch.int64)
            selections[idx] = LayerSelections(positions[rows], entries[rows], steps[0].ratio)
        return selections

    def save(self, path: FilePath) -> None:
        """Save the recorded selections, whole or not at all."""
        layers = self.selections().items()
        tensors = {
            f"layer.{idx}.{name}": getattr(layer, name) for idx, layer in layers for name in TENSORS
        }
        ratios = {
            f"layer.{idx}.ratio": str(layer.ratio)
            for idx, layer in layers
            if layer.ratio != CSA_RATIO
        }
        SELECTIONS_FILE.write(path, ratios, tensors)


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
            self.layer.layer_idx, self.positions[is_mine], selection.entry_idx[is_mine],
            ratio=self.layer.ratio,
        )  # fmt: skip
        return selection


def read_selections(path: FilePath) -> dict[int, LayerSelections]:
    """Read a file of `SelectionRecorder.save`, by layer; refuse any other file."""
    described, tensors = SELECTIONS_FILE.read(path)
    matches = [re.fullmatch(r"layer\.([0-9]{1,9})\.positions", name) for name in tensors]
    layers = sorted(int(match[1]) for match in matches if match)
    expected = {f"layer.{idx}.{name}" for idx in layers for name in TENSORS}
    if set(tensors) != expected:
        text = f"expected positions and entries of layers, got {sorted(tensors)}"
        raise SELECTIONS_FILE.refusal(path, text)
    return {idx: _layer(path, idx, described, tensors) for idx in layers}


def _layer(
    path: FilePath, idx: int, described: dict[str, str], tensors: dict[str, Tensor]
) -> LayerSelections:
    positions, entries = (tensors[f"layer.{idx}.{name}"] for name in TENSORS)
    refusal = partial(SELECTIONS_FILE.refusal, path)
    ratios = {str(ratio): ratio for ratio in (*SHARED_RATIOS, CSA_RATIO)}
    ratio = described.get(f"layer.{idx}.ratio", str(CSA_RATIO))
    if ratio not in ratios:
        raise refusal(f"expected a ratio of {', '.join(ratios)} in layer {idx}, got {ratio!r}")
    layer = LayerSelections(positions, entries, ratios[ratio])
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
    if (entries < -1).any() or (entries >= layer.visible[:, None]).any():
        raise refusal(f"expected entries that their tokens see, or -1, in layer {idx}")
    return layer
