"""`SavedRequest`: one request as a safetensors file.

The file has the layout of a slot and of blocks. It holds the rows that the request's length needs,
and zeros elsewhere. A cache that would give the bytes another meaning refuses it.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.memory.capacity import blocks_for
from dsv4.cache.memory.layout import CacheLayout, cache_layout
from dsv4.cache.memory.paged_cache import LayerPages, PagedKVPool
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.memory.state_cache import LayerState, StateCachePool
from dsv4.config import CacheConfig
from dsv4.kernels.layer_memory import LayerLayout

FORMAT = "dsv4-request-2"
METADATA_KEY = "request"


@dataclass(frozen=True)
class SavedRequest:
    """A request outside of its manager, on the CPU.

    Attributes:
        length: Tokens of the request.
        rollback_floor: The shortest length, beside 0, that the stored rows allow.
        slot: `[slot_bytes]` uint8, its fixed state.
        blocks: `[num_blocks, block_bytes]` uint8, its blocks in order.
    """

    length: int
    rollback_floor: int
    slot: Tensor
    blocks: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"slot": self.slot, "blocks": self.blocks}


def copy_request(
    layout: CacheLayout,
    state: StateCachePool,
    paged: PagedKVPool,
    *,
    slot: int,
    blocks: Tensor,
    length: int,
) -> SavedRequest:
    """Copy the rows that `length` tokens need, and none of an earlier request.

    Args:
        blocks: `[num_blocks]` int64, the request's blocks in order.
    """
    cpu = torch.device("cpu")
    old_state, new_state = (StateCachePool(layout, max_requests=1, device=cpu) for _ in range(2))
    old_paged, new_paged = (
        PagedKVPool(layout, num_blocks=len(blocks), index_global_scale=None, device=cpu)
        for _ in range(2)
    )
    old_state.storage[0] = state.storage[slot].cpu()
    old_paged.storage[:] = paged.storage[blocks].cpu()
    for layer_idx, layer in enumerate(layout.layers):
        _copy_state(layer, old_state.layer(layer_idx), new_state.layer(layer_idx), length)
        _copy_entries(layer, old_paged.layer(layer_idx), new_paged.layer(layer_idx), length)
    return SavedRequest(length, length, new_state.storage[0], new_paged.storage)


def _copy_state(layer: LayerLayout, source: LayerState, target: LayerState, length: int) -> None:
    rows = torch.arange(max(0, length - layer.window), length) % layer.ring_rows
    target.ring.data[0, rows] = source.ring.data[0, rows]
    target.ring.scales[0, rows] = source.ring.scales[0, rows]
    if not layer.ratio:
        return
    overlap = layer.ratio * (layer.num_series - 1)  # rows that the next CSA window reads again
    start = length // layer.ratio * layer.ratio - overlap
    rows = torch.arange(max(0, start), length) % layer.tail_rows
    for from_tail, to_tail in (
        (source.tail, target.tail),
        (source.index_tail, target.index_tail),
    ):
        if from_tail is not None and to_tail is not None:
            to_tail[0, rows] = from_tail[0, rows]


def _copy_entries(
    layer: LayerLayout, source: LayerPages | None, target: LayerPages | None, length: int
) -> None:
    if source is None or target is None:
        return
    full, rest = divmod(length // layer.ratio, layer.entries_per_block)
    for from_rows, to_rows in (
        (source.entries, target.entries),
        (source.index_keys, target.index_keys),
    ):
        if from_rows is None or to_rows is None:
            continue
        for part in ("data", "scales"):
            mine, theirs = getattr(from_rows, part), getattr(to_rows, part)
            theirs[:full] = mine[:full]
            theirs[full : full + 1, :rest] = mine[full : full + 1, :rest]


def write_saved(path: str | os.PathLike[str], saved: SavedRequest, config: CacheConfig) -> None:
    """Write a request to a file; a crash leaves the old file or none."""
    from safetensors.torch import save_file

    path = Path(path)
    description = _describe(saved, config)
    description["checksum"] = _checksum(description, saved.tensors)
    # One key: safetensors writes several in any order.
    metadata = {METADATA_KEY: json.dumps(description)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        save_file(saved.tensors, name, metadata)
        _sync(name)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync(path.parent)


def read_saved(
    path: str | os.PathLike[str], config: CacheConfig, layout: CacheLayout
) -> SavedRequest:
    """Read a request of a cache with the same meaning; refuse anything else."""
    with _open(path) as file:
        description = _read_description(path, file.metadata() or {})
        _check_meaning(path, description, config)
        saved = _read_request(path, description, file)
    _check_sizes(path, saved, config, layout)
    return saved


def read_any(path: str | os.PathLike[str]) -> tuple[CacheConfig, SavedRequest]:
    """Read a request of any cache, with a config that gives its bytes their meaning."""
    with _open(path) as file:
        description = _read_description(path, file.metadata() or {})
        config = _read_config(path, description)
        _check_meaning(path, description, config)
        saved = _read_request(path, description, file)
    _check_sizes(path, saved, config, cache_layout(config, build_schemas(config)))
    return config, saved


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"No saved request at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, UnicodeDecodeError) as error:
        raise _refusal(path, f"expected a whole safetensors file, got: {error}") from None


def _read_request(
    path: str | os.PathLike[str], description: dict[str, str], file: Any
) -> SavedRequest:
    names = sorted(file.keys())
    if names != ["blocks", "slot"]:
        raise _refusal(path, f"expected the tensors blocks and slot, got {names}")
    tensors = {name: file.get_tensor(name) for name in names}
    checksum = description.pop("checksum")
    if checksum != _checksum(description, tensors):
        raise _refusal(path, "its contents do not match its checksum")
    return SavedRequest(int(description["length"]), int(description["rollback_floor"]), **tensors)


def _check_sizes(
    path: str | os.PathLike[str], saved: SavedRequest, config: CacheConfig, layout: CacheLayout
) -> None:
    slot_bytes, block_bytes = layout.slots.num_bytes, layout.blocks.num_bytes
    if saved.slot.shape != (slot_bytes,) or saved.blocks.shape[1:] != (block_bytes,):
        raise _refusal(
            path,
            f"expected a slot of {slot_bytes} and blocks of {block_bytes} bytes, "
            f"got {list(saved.slot.shape)} and {list(saved.blocks.shape)}",
        )
    num_blocks = int(blocks_for(config, np.array([saved.length]))[0])
    if not 0 <= saved.rollback_floor <= saved.length or len(saved.blocks) != num_blocks:
        raise _refusal(
            path,
            f"expected {num_blocks} blocks and a floor from 0 to {saved.length}, "
            f"got {len(saved.blocks)} and {saved.rollback_floor}",
        )


def _describe(saved: SavedRequest, config: CacheConfig) -> dict[str, str]:
    return {
        **_meaning(config),
        "length": str(saved.length),
        "rollback_floor": str(saved.rollback_floor),
        "config": json.dumps(config.stored_fields),
    }


def _meaning(config: CacheConfig) -> dict[str, str]:
    """Name the choices that file and cache must share; the fingerprint covers these and more."""
    return {
        "format": FORMAT,
        "kv_format": config.kv_format,
        "index_format": config.index_format,
        "tail_dtype": config.tail_dtype,
        "compress_ratios": json.dumps(config.compress_ratios),
        "block_tokens": str(config.block_tokens),
        "drafts_per_step": str(config.drafts_per_step),
        "config_fingerprint": config.format_fingerprint,
    }


def _read_description(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        description = json.loads(metadata[METADATA_KEY])
    except (KeyError, ValueError):
        raise _refusal(path, f"expected metadata {METADATA_KEY!r} in JSON, found none") from None
    if not isinstance(description, dict):
        raise _refusal(path, f"expected metadata {METADATA_KEY!r} to be an object")
    return description


def _read_config(path: str | os.PathLike[str], description: Mapping[str, str]) -> CacheConfig:
    try:
        return CacheConfig.from_stored_fields(json.loads(description["config"]))
    except KeyError:
        raise _refusal(path, "expected the metadata config, found none") from None
    except (TypeError, ValueError) as error:
        raise _refusal(path, f"expected a config of this version, got: {error}") from None


def _check_meaning(
    path: str | os.PathLike[str], description: Mapping[str, str], config: CacheConfig
) -> None:
    expected = _meaning(config)
    missing = {*expected, "length", "rollback_floor", "checksum"} - set(description)
    if missing:
        raise _refusal(path, f"expected the metadata {', '.join(sorted(missing))}, found none")
    for name, value in expected.items():
        if description[name] != value:
            raise _refusal(
                path, f"expected {name} {value}, as this cache has, got {description[name]}"
            )


def _checksum(description: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(description), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refusal(path: str | os.PathLike[str], problem: str) -> ValueError:
    return ValueError(f"Invalid saved request {os.fspath(path)}: {problem}")
