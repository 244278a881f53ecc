"""`SavedRequest`: one request outside of its manager, as tensors or as a file.

It has the layout of a slot and of blocks. It holds the rows that the request can read, and zeros
elsewhere. A cache that would give the bytes another meaning refuses it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.books import CacheBooks
from dsv4.cache.memory.cache_memory import CacheMemory
from dsv4.cache.memory.capacity import blocks_for
from dsv4.cache.memory.device_rows import copy_bytes
from dsv4.cache.memory.layout import CacheLayout, cache_layout
from dsv4.cache.memory.paged_cache import LayerPages, PagedKVPool
from dsv4.cache.memory.schema import LayerCacheSchema, build_schemas
from dsv4.cache.memory.state_cache import LayerState, StateCachePool
from dsv4.cache.prefix.prefix_tree import DIGEST_BYTES, root_digest
from dsv4.cache.tensor_file import FilePath, TensorFile
from dsv4.config import MAX_POSITION, CacheConfig
from dsv4.formats import sum_ring
from dsv4.kernels.layer_memory import LayerLayout, existing
from dsv4.layer_schedule import GROUP_ROWS, HCA_GROUPS

REQUEST_FILE = TensorFile("saved request", key="request", version="dsv4-request-4")


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class SavedRequest:
    """A request outside of its manager, on any device; one of a file is on the CPU.

    Attributes:
        length: Tokens of the request.
        rollback_floor: The shortest length, beside 0, that the stored rows allow.
        slot: `[slot_bytes]` uint8, its fixed state.
        blocks: `[num_blocks, block_bytes]` uint8, its blocks in order.
        prefix_root: The start of its chain of hashes in hex, which stands for its salt; empty if
            the prefix cache does not track it.
        token_ids: `[n]` int32, the known ids from position 0 on. They can be fewer or more than
            `length`.
        fingerprint: `CacheConfig.format_fingerprint` of its cache.
    """

    length: int
    rollback_floor: int
    slot: Tensor
    blocks: Tensor
    prefix_root: str = ""
    token_ids: Tensor = field(default_factory=_no_ids)
    fingerprint: str = ""

    @property
    def description(self) -> dict[str, str]:
        """Its numbers and its salt as text."""
        return {
            "length": str(self.length),
            "rollback_floor": str(self.rollback_floor),
            "prefix_root": self.prefix_root,
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"slot": self.slot, "blocks": self.blocks, "token_ids": self.token_ids}


def copy_request(
    config: CacheConfig,
    memory: CacheMemory,
    books: CacheBooks,
    slot: int,
    *,
    floor: int,
    first_block: int = 0,
) -> SavedRequest:
    """Copy the rows that lengths from `floor` on need, and none of an earlier request.

    Args:
        floor: The shortest length, beside 0, that the copy can be cut to.
        first_block: Blocks before it are left out.
    """
    length, _, num_read_only = books.requests.extent_of(slot)
    if length < (end := num_read_only * config.block_tokens):
        raise ValueError(
            f"Cannot save slot {slot}: expected a request that has replayed its {end} known "
            f"tokens, got one at {length}"
        )
    layout, device = memory.layout, memory.parts[0].device
    blocks = torch.from_numpy(books.requests.blocks_of(slot)).long()[first_block:]
    entries_from = first_block * config.block_tokens
    new_state = StateCachePool(
        layout, max_requests=1, device=device, storage=_zeros(1, layout.slots.num_bytes, device)
    )
    new_paged = PagedKVPool(
        layout, num_blocks=len(blocks), index_global_scale=None, device=device,
        storage=_zeros(len(blocks), layout.blocks.num_bytes, device),
    )  # fmt: skip
    for layer_idx, layer in enumerate(layout.layers):
        part = memory.parts[memory.part_of[layer_idx]]
        source, target = part.state.layer(layer_idx), new_state.layer(layer_idx)
        _copy_state(layer, source, slot, target, floor, length)
        if layer.owns_entries:
            num_entries = config.own_entries((length - entries_from) // layer.ratio, layer.ratio)
            pages, new_pages = part.paged.layer(layer_idx), new_paged.layer(layer_idx)
            _copy_entries(layer, existing(pages), blocks, existing(new_pages), num_entries)
    root, ids = "", _no_ids()
    if slot in books.prefix.requests:
        root = books.prefix.requests[slot].root.hex()
        ids = torch.from_numpy(books.prefix.ids.read(slot).copy())
    return SavedRequest(
        length, floor, new_state.storage[0], new_paged.storage, root, ids, config.format_fingerprint
    )


def _zeros(num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Allocate rows of zeros; on the CPU only those that are written take memory."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, row_bytes), dtype=np.uint8))
    return torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=device)


def check_request(saved: SavedRequest, config: CacheConfig, layout: CacheLayout) -> None:
    """Refuse tensors that are no request of a cache with this meaning."""
    if not isinstance(saved, SavedRequest):
        raise TypeError(
            "Invalid request: expected one that export_request returned, "
            f"got {type(saved).__name__}"
        )
    if saved.fingerprint != config.format_fingerprint:
        raise ValueError(
            f"Invalid request: expected one of a cache with the fingerprint "
            f"{config.format_fingerprint}, got {saved.fingerprint}"
        )
    for problem in _problems(saved.description, saved.tensors, config, layout):
        raise ValueError(f"Invalid request: {problem}")


def own_share(saved: SavedRequest, config: CacheConfig, layout: CacheLayout) -> SavedRequest:
    """Check a request; of one that has all blocks, take those of the rank.

    A rank has one block in turn, with the layout of one alone. Where its last block has no entry of
    its own, it is zeros.
    """
    whole = config.whole
    is_whole = getattr(saved, "fingerprint", "") == whole.format_fingerprint
    if config.num_ranks == 1 or not is_whole:
        check_request(saved, config, layout)
        return saved
    check_request(saved, whole, layout)
    own = saved.blocks[config.rank :: config.num_ranks]
    num_blocks = int(blocks_for(config, np.array([saved.length]))[0])
    root = saved.prefix_root
    if root:
        root = root_digest(config.format_fingerprint, bytes.fromhex(root)).hex()
    return replace(
        saved, blocks=torch.nn.functional.pad(own, (0, 0, 0, num_blocks - len(own))),
        prefix_root=root, fingerprint=config.format_fingerprint,
    )  # fmt: skip


def first_window_position(window: int, length: int) -> int:
    """Return the oldest token whose window row a file holds: the next sees `window - 1` before."""
    return max(0, length - window + 1)


def first_tail_position(layer: LayerLayout | LayerCacheSchema, length: int) -> int:
    """Return the oldest token whose tail row a file holds: the next group or window reads it."""
    span = min(layer.ratio, GROUP_ROWS)
    return max(0, length // span * span - layer.ratio * (layer.num_series - 1))


def closed_groups(length: int) -> range:
    """Return the groups whose sums a file holds: the closed ones of the open HCA window."""
    num_closed = length // GROUP_ROWS
    return range(num_closed // HCA_GROUPS * HCA_GROUPS, num_closed)


def _copy_state(
    layer: LayerLayout, source: LayerState, slot: int, target: LayerState, floor: int, length: int
) -> None:
    first = first_window_position(layer.window, floor)
    for rows in _ring_slices(first, length, layer.ring_rows):
        copy_bytes(target.ring.data[0, rows], source.ring.data[slot, rows])
        copy_bytes(target.ring.scales[0, rows], source.ring.scales[slot, rows])
    if not layer.tail_rows:
        return
    for rows in _ring_slices(first_tail_position(layer, floor), length, layer.tail_rows):
        for from_tail, to_tail in (
            (source.tail, target.tail),
            (source.index_tail, target.index_tail),
        ):
            if from_tail is not None and to_tail is not None:
                copy_bytes(to_tail[0, rows], from_tail[slot, rows])
    if source.sums is not None and target.sums is not None:
        for group in range(closed_groups(floor).start, length // GROUP_ROWS):
            if group % HCA_GROUPS < HCA_GROUPS - 1:
                row = group % sum_ring(layer.sum_rows)
                copy_bytes(target.sums[0, row], source.sums[slot, row])


def _ring_slices(first: int, end: int, num_rows: int) -> list[slice]:
    """Return the rows of a ring that positions from `first` to `end` have, in one or two runs."""
    start, count = first % num_rows, min(end - first, num_rows)
    over = max(0, start + count - num_rows)
    return [slice(start, start + count - over)] + [slice(0, over)] * (over > 0)


def _copy_entries(
    layer: LayerLayout, source: LayerPages, blocks: Tensor, target: LayerPages, num_entries: int
) -> None:
    full, rest = divmod(num_entries, layer.entries_per_block)
    for from_rows, to_rows in (
        (source.entries, target.entries),
        (source.index_keys, target.index_keys),
    ):
        if from_rows is None or to_rows is None:
            continue
        for part in ("data", "scales"):
            mine, theirs = getattr(from_rows, part), getattr(to_rows, part)
            if full:
                theirs[:full].copy_(mine[blocks[:full]])
            if rest:
                copy_bytes(theirs[full, :rest], mine[int(blocks[full]), :rest])


def write_saved(path: FilePath, saved: SavedRequest, config: CacheConfig) -> None:
    """Write a request to a file; a crash leaves the old file or none."""
    description = {
        **_meaning(config),
        **saved.description,
        "config": json.dumps(config.stored_fields),
    }
    tensors = {name: tensor.cpu() for name, tensor in saved.tensors.items()}
    REQUEST_FILE.write(path, description, tensors)


def read_saved(path: FilePath, config: CacheConfig) -> SavedRequest:
    """Read a request of a cache with the same meaning, or of all ranks; refuse anything else."""
    return _read(path, config)[1]


def read_any(path: FilePath) -> tuple[CacheConfig, SavedRequest]:
    """Read a request of any cache, with a config that gives its bytes their meaning."""
    return _read(path, None)


def _read(path: FilePath, expected: CacheConfig | None) -> tuple[CacheConfig, SavedRequest]:
    description, tensors = REQUEST_FILE.read(path)
    if expected is not None:
        whole = expected.whole
        is_whole = description.get("config_fingerprint") == whole.format_fingerprint
        _check_meaning(path, description, whole if is_whole else expected)
    config = _read_config(path, description)
    _check_meaning(path, description, config)
    layout = cache_layout(config, build_schemas(config))
    for problem in _problems(description, tensors, config, layout):
        raise REQUEST_FILE.refusal(path, problem)
    return config, SavedRequest(
        int(description["length"]), int(description["rollback_floor"]),
        tensors["slot"], tensors["blocks"], description["prefix_root"], tensors["token_ids"],
        config.format_fingerprint,
    )  # fmt: skip


def _meaning(config: CacheConfig) -> dict[str, str]:
    """Name the choices that file and cache must share; the fingerprint covers these and more."""
    return {
        "kv_format": config.kv_format,
        "index_format": config.index_format,
        "tail_dtype": config.tail_dtype,
        "compress_ratios": json.dumps(config.compress_ratios),
        "block_tokens": str(config.block_tokens),
        "drafts_per_step": str(config.drafts_per_step),
        "config_fingerprint": config.format_fingerprint,
    }


def _read_config(path: FilePath, description: Mapping[str, str]) -> CacheConfig:
    try:
        return CacheConfig.from_stored_fields(json.loads(description["config"]))
    except KeyError:
        raise REQUEST_FILE.refusal(path, "expected the metadata config, found none") from None
    except (TypeError, ValueError, RecursionError) as error:
        text = f"expected a config of this version, got: {error}"
        raise REQUEST_FILE.refusal(path, text) from None


def _check_meaning(path: FilePath, description: Mapping[str, str], config: CacheConfig) -> None:
    expected = _meaning(config)
    missing = {*expected, "length", "rollback_floor", "prefix_root", "config"} - set(description)
    if missing:
        text = f"expected the metadata {', '.join(sorted(missing))}, found none"
        raise REQUEST_FILE.refusal(path, text)
    for name, value in expected.items():
        if description[name] != value:
            text = f"expected {name} {value}, as this cache has, got {description[name]}"
            raise REQUEST_FILE.refusal(path, text)


def _problems(
    description: Mapping[str, str],
    tensors: dict[str, Tensor],
    config: CacheConfig,
    layout: CacheLayout,
) -> Iterator[str]:
    """Yield why these are not a request; what follows a problem relies on its absence."""
    if sorted(tensors) != ["blocks", "slot", "token_ids"]:
        yield f"expected the tensors blocks, slot, token_ids, got {sorted(tensors)}"
    for name in ("length", "rollback_floor"):
        text = description[name]
        if not re.fullmatch("0|[1-9][0-9]{0,9}", text) or int(text) > MAX_POSITION:
            yield f"expected {name} to be a whole number from 0 to {MAX_POSITION}, got {text}"
    slot, blocks, ids = tensors["slot"], tensors["blocks"], tensors["token_ids"]
    for name, tensor in (("slot", slot), ("blocks", blocks)):
        if tensor.dtype != torch.uint8:
            yield f"expected {name} in torch.uint8, got {tensor.dtype}"
    slot_bytes, block_bytes = layout.slots.num_bytes, layout.blocks.num_bytes
    if (slot.shape, blocks.shape[1:]) != ((slot_bytes,), (block_bytes,)):
        yield (
            f"expected a slot of {slot_bytes} and blocks of {block_bytes} bytes, "
            f"got {list(slot.shape)} and {list(blocks.shape)}"
        )
    length, floor = int(description["length"]), int(description["rollback_floor"])
    num_blocks = int(blocks_for(config, np.array([length]))[0])
    if floor > length or len(blocks) != num_blocks:
        yield (
            f"expected {num_blocks} blocks and a floor from 0 to {length}, "
            f"got {len(blocks)} and {floor}"
        )
    root, digits = description["prefix_root"], 2 * DIGEST_BYTES
    if not re.fullmatch(f"(?:[0-9a-f]{{{digits}}})?", root):
        yield f"expected prefix_root to be {digits} hex digits or empty, got {root}"
    if ids.dtype != torch.int32 or ids.dim() != 1 or len(ids) > MAX_POSITION:
        yield f"expected token_ids [n] int32, got {list(ids.shape)} {ids.dtype}"
