"""`CacheMemory`: the tensors of a manager on all of its devices, under one set of books."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from dsv4.cache.memory.arrays import IntArray
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.memory.device_memory import DeviceMemory
from dsv4.cache.memory.device_rows import DeviceRows, Piece, Span, find_spans
from dsv4.cache.memory.layout import RunLayout, cache_layout, checkpoint_bytes
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.kernels.layer_memory import LayerMemory


def read_devices(
    device: torch.device | str | Sequence[torch.device | str], num_layers: int
) -> list[torch.device]:
    """Return the device of each layer."""
    if isinstance(device, (str, torch.device)):
        return [torch.device(device)] * num_layers
    devices = [torch.device(each) for each in device]
    if len(devices) != num_layers:
        raise ValueError(
            f"Invalid device: expected one, or one for each of {num_layers} layers, got "
            f"{len(devices)}"
        )
    return [
        torch.device("cuda", torch.cuda.current_device()) if str(each) == "cuda" else each
        for each in devices
    ]


def on_device(device: torch.device, *, is_one: bool) -> AbstractContextManager[object]:
    """Make a device the current one, where a manager has several."""
    return nullcontext() if is_one or device.type != "cuda" else torch.cuda.device(device)


class CacheMemory:
    """One `DeviceMemory` for each device, and the rows over all of them.

    Args:
        devices: The device of each layer.
        storage: As in `DeviceMemory`, on one device only.

    Attributes:
        parts: One `DeviceMemory` for each device, that of layer 0 first.
        part_of: The part of each layer.
        layout: Offsets of every layer's rows, as on one device.
        blocks, slots, undo: The rows of requests, and slots as they were before a chunk.
        checkpoints, fronts: Checkpoints, and the bytes of slots that these hold.
        memories: One `LayerMemory` per layer.
    """

    def __init__(
        self,
        capacity: Capacity,
        schemas: tuple[LayerCacheSchema, ...],
        host_block_table: IntArray,
        devices: Sequence[torch.device],
        storage: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        each = list(dict.fromkeys(devices))
        self.part_of = tuple(each.index(device) for device in devices)
        if len(each) > 1 and storage:
            raise ValueError("Invalid storage: expected none on several devices")
        _check_sources(schemas, self.part_of)
        rows = capacity.workspace_rows
        self.layout = cache_layout(capacity.config, schemas, workspace_rows=rows)
        parts: list[DeviceMemory] = []
        for idx, device in enumerate(each):
            layers = [layer for layer, part in enumerate(self.part_of) if part == idx]
            layout = self.layout
            if len(each) > 1:
                layout = cache_layout(capacity.config, schemas, workspace_rows=rows, layers=layers)
            parts.append(
                DeviceMemory(
                    capacity, layout, host_block_table, device, storage,
                    checkpoint_bytes=checkpoint_bytes([schemas[layer] for layer in layers]),
                    first=parts[0] if parts else None,
                )
            )  # fmt: skip
        self.parts, front = tuple(parts), checkpoint_bytes(schemas)
        self.blocks = self._rows([p.paged.storage for p in parts], self.layout.blocks, "blocks")
        self.slots = self._rows([p.state.storage for p in parts], self.layout.slots, "slots")
        self.undo = self._rows([p.undo for p in parts], self.layout.slots, "slots")
        self.fronts = self.slots.front(front)
        kept = zip(parts, self.fronts.pieces, strict=True)
        self.checkpoints = DeviceRows([Piece(p.checkpoints, s) for p, (_, s) in kept], front)
        self.memories: tuple[LayerMemory, ...] = tuple(
            parts[part].memories[layer] for layer, part in enumerate(self.part_of)
        )

    def _rows(self, storages: list[torch.Tensor], whole: RunLayout, name: str) -> DeviceRows:
        if len(storages) == 1:
            return DeviceRows([Piece(storages[0], (Span(0, 0, whole.num_bytes),))], whole.num_bytes)
        layouts: list[RunLayout] = [getattr(part.layout, name) for part in self.parts]
        spans = [find_spans(whole, layout) for layout in layouts]
        return DeviceRows(list(map(Piece, storages, spans)), whole.num_bytes)

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a device the current one, for kernels."""
        return on_device(device, is_one=len(self.parts) == 1)

    def release(self) -> None:
        """Give the memory of the pools back; their tensors keep their shapes, without memory."""
        for part in self.parts:
            part.release()

    def restore(self) -> None:
        """Take memory for the pools again, zeroed; its addresses may be others."""
        for part in self.parts:
            part.restore()

    def save_undo(self, undo: int, slot: int) -> None:
        """Copy a slot, before a chunk overwrites it."""
        self.undo.copy(self.slots, slot, undo)

    def load_undo(self, undo: int, slot: int) -> None:
        """Give a slot the bytes from before a chunk."""
        self.slots.copy(self.undo, undo, slot)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, on several devices with the part's number before it."""
        if len(self.parts) == 1:
            return self.parts[0].tensors()
        return {
            f"{idx}.{name}": tensor
            for idx, part in enumerate(self.parts)
            for name, tensor in part.tensors().items()
        }


def _check_sources(schemas: tuple[LayerCacheSchema, ...], part_of: Sequence[int]) -> None:
    """Refuse layers whose entries, choice or candidates are another device's."""
    for idx, schema in enumerate(schemas):
        layer = schema.layer
        for source in (layer.entries_of, layer.choice_of, layer.candidates_of):
            if source >= 0 and part_of[source] != part_of[idx]:
                raise ValueError(
                    f"Invalid device of layer {idx}: expected that of layer {source}, whose "
                    "entries or choice it reads"
                )
