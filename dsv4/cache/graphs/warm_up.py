"""`warm_up`: every kernel variant that serving can launch, compiled before the first request.

Triton compiles a kernel again for other constants, dtypes, pointer alignments and launch
parameters. These follow from a layer's type and weights, from the parts that a write stores, and
from the kind and size of a forward. Layers of one type differ in offsets alone, which are aligned.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsv4.cache.graphs.padding import check_complete, fill_with_padding
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.layer_checks import INPUT_DTYPES
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.kernels import ops
from dsv4.kernels.contracts import CompressorInputs, IndexInputs, LayerProjections, LayerWeights
from dsv4.kernels.index_scratch import index_scratch_bytes
from dsv4.layer_schedule import AttentionType

if TYPE_CHECKING:
    from dsv4.kernels.triton.launch import Kind

POINTER_ALIGN = 16  # bytes; Triton compiles apart for pointers that are not aligned so


class _Forward(NamedTuple):
    """The size of a forward."""

    num_rows: int
    num_tokens: int
    num_chunks: int
    max_step: int


def warm_up(
    manager: KVCacheManager,
    weights: Sequence[LayerWeights],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compile every kernel that writes, gathers, selects or attends, in any forward.

    It runs on padding, which no request notices. The reference has nothing to compile.

    Args:
        manager: The cache; one whose last forward is not complete is refused.
        weights: Those of every layer, as they will be used.
        dtype: The dtype of the projections that will be written, and of the queries.
    """
    if len(weights) != len(manager.schedule):
        raise ValueError(
            f"Invalid weights: expected one per layer, {len(manager.schedule)}, got {len(weights)}"
        )
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"Invalid dtype: expected float32 or bfloat16, got {dtype}")
    check_complete(manager, "warm up")
    if {manager.backend, manager.attention_backend, manager.index_backend} == {"reference"}:
        return
    fill_with_padding(manager, num_tokens=0)
    for layer_idx in _distinct_layers(manager, weights):
        for forwards in _forwards(manager, layer_idx, dtype):
            attended = set()
            for forward in forwards:
                handle = _write_layer(manager, layer_idx, forward, weights[layer_idx], dtype)
                if forward is forwards[0]:
                    _gather(handle)
                    _select_entries(manager, handle, dtype)
                is_split = _is_split(manager, layer_idx, forward.num_tokens, dtype)
                if is_split not in attended:
                    _attend(manager, handle, weights[layer_idx].sinks, dtype)
                attended.add(is_split)
    if manager.index_backend == "deepgemm":
        _score_by_deepgemm(manager, dtype)


def _distinct_layers(manager: KVCacheManager, weights: Sequence[LayerWeights]) -> list[int]:
    """Return one layer of each type, and of each dtype and alignment of its weights."""
    first: dict[object, int] = {}
    for layer, layer_weights in zip(manager.schedule, weights, strict=True):
        compressors = (layer_weights.compressor or (), layer_weights.indexer or ())
        tensors = (layer_weights.kv_norm, *compressors[0], *compressors[1])
        looks = tuple((x.dtype, x.data_ptr() % POINTER_ALIGN == 0) for x in tensors)
        sinks = None if layer_weights.sinks is None else layer_weights.sinks.dtype
        first.setdefault((layer.attention_type, looks, sinks), layer.layer_idx)
    return list(first.values())


def _forwards(
    manager: KVCacheManager, layer_idx: int, dtype: torch.dtype
) -> Iterator[list[_Forward]]:
    """Yield, for each kind of forward, the smallest for every choice of launch parameters."""
    capacity = manager.capacity
    most, longest_step = capacity.max_forward_tokens, capacity.max_step_tokens

    def sizes(kind: "Kind", least: int, most: int) -> list[int]:
        return _launch_sizes(manager, layer_idx, dtype, kind, range(least, most + 1))

    decodes = sizes("decode", 1, min(most, capacity.max_requests))
    yield [_Forward(size, size, 0, 1) for size in decodes]
    # A row without a token makes a step of a forward, even if no row has several.
    yield [_Forward(1, size, 0, 2) for size in sizes("step", 1, most)]
    if most > longest_step:
        yield [_Forward(1, size, 1, size) for size in sizes("chunk", longest_step + 1, most)]


def _launch_sizes(
    manager: KVCacheManager, layer_idx: int, dtype: torch.dtype, kind: "Kind", sizes: range
) -> list[int]:
    """Return the fewest tokens for each choice of parameters; a window alone runs as SWA."""
    from dsv4.kernels.triton.launch import launch_parameters

    first: dict[object, int] = {}
    ratios = (0, manager.schedule[layer_idx].ratio)
    for size in sizes:
        parameters = tuple(launch_parameters(r, kind, size, manager.device) for r in ratios)
        is_split = _is_split(manager, layer_idx, size, dtype)
        first.setdefault((parameters, is_split), size)
    return list(first.values())


def _is_split(
    manager: KVCacheManager, layer_idx: int, num_tokens: int, dtype: torch.dtype
) -> tuple[bool, ...]:
    """Tell whether attention splits over rows, for the shortest and the longest requests."""
    from dsv4.kernels.triton.attention import attend_launch, choose_splits, count_tiles

    if manager.batch_invariant:
        return ()  # by the layer alone
    num_heads, memory = manager.config.num_query_heads, manager.device_memory.memories[layer_idx]
    launch = attend_launch(num_heads, dtype, memory)
    numbers = [count_tiles(memory, launch, n) for n in _entry_numbers(manager, layer_idx)]
    return tuple(
        choose_splits(num_tokens, num_heads, number, launch, memory) is not None
        for number in numbers
    )


def _entry_numbers(manager: KVCacheManager, layer_idx: int) -> tuple[int, ...]:
    """Return the fewest and the most entries of a launch."""
    ratio, config = manager.schedule[layer_idx].ratio, manager.config
    if ratio == AttentionType.CSA.ratio:
        return (config.index_topk,)
    return (1, manager.capacity.max_request_tokens // ratio) if ratio else (0,)


def _write_layer(
    manager: KVCacheManager,
    layer_idx: int,
    forward: _Forward,
    weights: LayerWeights,
    dtype: torch.dtype,
) -> LayerCacheHandle:
    """Write a layer in parts and at once."""
    handle = manager.acquire(layer_idx, _padding_plan(manager, forward))
    inputs = _zero_projections(handle, forward.num_tokens, dtype)
    handle.write_swa(inputs.kv, weights.kv_norm)
    _flush_compression(handle, inputs, weights)
    handle = manager.acquire(layer_idx, _padding_plan(manager, forward))
    handle.write(inputs, weights)
    return handle


def _gather(handle: LayerCacheHandle) -> None:
    handle.gather_swa_kv()
    if handle.paged is not None:
        handle.gather_all_compressed_kv()
        shape = (handle.plan.num_tokens, handle.config.index_topk)
        handle.gather_compressed_kv(handle.positions.new_full(shape, -1, dtype=torch.int64))


def _select_entries(manager: KVCacheManager, handle: LayerCacheHandle, dtype: torch.dtype) -> None:
    """Select entries, at the smallest number of entries for every choice of programs."""
    from dsv4.kernels.triton.topk import distinct_sizes

    config = manager.config
    if handle.layer.attention_type is not AttentionType.CSA:
        return
    shape = (handle.plan.num_tokens, config.index_num_heads, config.index_head_dim)
    query = torch.zeros(shape, dtype=dtype, device=manager.device)
    longest = manager.capacity.max_request_tokens // handle.layer.ratio
    memories = [handle.memory]
    if len(handle.tokens.chunk_ids):  # too small a workspace for operands of chunks
        least = index_scratch_bytes(
            config.index_format, num_heads=config.index_num_heads, dim=config.index_head_dim,
            topk=config.index_topk, max_entries=longest, max_tokens=1,
        )  # fmt: skip
        memories.append(handle.memory._replace(index_scratch=handle.memory.index_scratch[:least]))
    for max_entries in distinct_sizes(longest, topk=config.index_topk):
        for memory in memories:
            ops.select_entries(
                query, query[:, :, 0].contiguous(), memory, handle.tokens,
                max_entries=max_entries, backend=manager.index_backend,
            )  # fmt: skip


def _score_by_deepgemm(manager: KVCacheManager, dtype: torch.dtype) -> None:
    """Choose entries for every number of tokens that DeepGEMM compiles a kernel for."""
    from dsv4.kernels.external.deepgemm import call_sizes, index_scratch

    config, capacity = manager.config, manager.capacity
    layers = [s for s in manager.schedule if s.attention_type is AttentionType.CSA]
    most, longest = capacity.max_forward_tokens, capacity.max_request_tokens
    max_entries = longest // AttentionType.CSA.ratio
    if not layers or max_entries <= config.index_topk:
        return
    nothing = torch.zeros((), dtype=dtype, device=manager.device)
    query = nothing.expand(most, config.index_num_heads, config.index_head_dim)
    memory = manager.device_memory.memories[layers[0].layer_idx]
    smallest = config.index_topk + 1  # the fewest entries leave room for the most tokens
    scratch = index_scratch(query, memory, max_entries=smallest)
    for size in call_sizes(scratch.num_rows):
        part = query[:size]
        plan = _padding_plan(manager, _Forward(1, len(part), 0, 2))
        handle = manager.acquire(layers[0].layer_idx, plan)
        ops.select_entries(
            part, part[:, :, 0], handle.memory, handle.tokens,
            max_entries=smallest, backend=manager.index_backend,
        )  # fmt: skip


def _attend(
    manager: KVCacheManager,
    handle: LayerCacheHandle,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Attend with and without sinks, over short and over long requests."""
    config, num_tokens = handle.config, handle.plan.num_tokens
    shape = (num_tokens, config.num_query_heads, config.head_dim)
    query = torch.zeros(shape, dtype=dtype, device=handle.positions.device)
    rows = None
    if handle.layer.attention_type is AttentionType.CSA:
        listed = (num_tokens, config.index_topk)
        rows = handle.positions.new_full(listed, -1, dtype=torch.int64)
    for max_entries in _entry_numbers(manager, handle.layer.layer_idx):
        for given in (sinks, None):
            ops.attend(
                query, given, handle.memory, rows, handle.tokens,
                max_entries=max_entries, batch_invariant=manager.batch_invariant,
                backend=manager.attention_backend,
            )  # fmt: skip


def _flush_compression(
    handle: LayerCacheHandle, inputs: LayerProjections, weights: LayerWeights
) -> None:
    if inputs.compressor is None or weights.compressor is None:
        return
    index = inputs.indexer
    handle.flush_compression(
        *inputs.compressor,
        weights.compressor,
        index_kv=None if index is None else index.kv,
        index_gate=None if index is None else index.gate,
        index_weights=weights.indexer,
    )


def _padding_plan(manager: KVCacheManager, forward: _Forward) -> ForwardPlan:
    """Plan padding whose sizes gather at least one entry of every type."""
    return manager.padding_plan(*forward, max_length=AttentionType.HCA.ratio)


def _zero_projections(
    handle: LayerCacheHandle, num_tokens: int, dtype: torch.dtype
) -> LayerProjections:
    """Return zeros in the shapes of a layer's projections; unread ones take no memory."""
    config, kind, device = handle.config, handle.layer.attention_type, handle.positions.device

    def unread(*shape: int) -> torch.Tensor:
        return torch.zeros((), dtype=dtype, device=device).expand(num_tokens, *shape)

    def zeros(width: int) -> torch.Tensor:
        return torch.zeros(num_tokens, width, dtype=dtype, device=device)

    query, kv = unread(config.num_query_heads, config.head_dim), zeros(config.head_dim)
    if kind is AttentionType.SWA:
        return LayerProjections(query, kv)
    width = handle.schema.num_series * config.head_dim
    compressor = CompressorInputs(zeros(width), zeros(width))
    if kind is AttentionType.HCA:
        return LayerProjections(query, kv, compressor)
    index_width = handle.schema.num_series * config.index_head_dim
    index_query = unread(config.index_num_heads, config.index_head_dim)
    head_weights = unread(config.index_num_heads)
    indexer = IndexInputs(zeros(index_width), zeros(index_width), index_query, head_weights)
    return LayerProjections(query, kv, compressor, indexer)
