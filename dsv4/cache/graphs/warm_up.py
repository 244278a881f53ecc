"""`warm_up`: every kernel variant that serving can launch, compiled before the first request.

Triton compiles a kernel again for other constants, dtypes, pointer alignments and launch
parameters. These follow from a layer's type and weights, from the parts that a write stores, and
from the kind and size of a forward. Layers of one type differ in offsets alone, which are aligned.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.graphs.captured_forward import check_complete, fill_with_padding
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.layer_checks import INPUT_DTYPES, make_projections
from dsv4.cache.manager import KVCacheManager
from dsv4.kernels import ops
from dsv4.kernels.backends import load_backend
from dsv4.kernels.contracts import LayerProjections, LayerWeights
from dsv4.kernels.index_scratch import index_scratch_bytes
from dsv4.kernels.layer_memory import existing
from dsv4.layer_schedule import AttentionType

if TYPE_CHECKING:
    from dsv4.kernels.triton.launch import Kind, QueryLaunch

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
    is_query_raw: bool = False,
) -> None:
    """Compile every kernel that writes, gathers, selects or attends, in any forward.

    It runs on padding, which no request notices. The reference has nothing to compile.

    Args:
        manager: The cache; one whose last forward is not complete is refused.
        weights: Those of every layer, as they will be used.
        dtype: The dtype of the projections that will be written, and of the queries.
        is_query_raw: The queries that will be given are raw, see `LayerCacheHandle.attend`.
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
    buffers = manager.device_memory.plan_buffers
    load_backend(manager.backend).apply_accepted(
        buffers.acceptance(0), buffers.token_map(0, 0, 0, 0)
    )
    kernels = _Kernels(manager, dtype, is_query_raw=is_query_raw)
    for layer_idx in _distinct_layers(manager, weights):
        for forwards in kernels.forwards(layer_idx):
            attended, selected = set(), set()
            for forward in forwards:
                handle = kernels.write_layer(layer_idx, forward, weights[layer_idx])
                if forward is forwards[0]:
                    kernels.gather(handle)
                query = kernels.query_launch(forward.num_tokens)
                if query not in selected:
                    kernels.select_entries(handle)
                selected.add(query)
                choices = kernels.attend_choices(layer_idx, forward.num_tokens, forward.num_chunks)
                if tuple(choices) not in attended:
                    kernels.attend(handle, weights[layer_idx].sinks, choices.values())
                attended.add(tuple(choices))
    if manager.index_backend == "deepgemm":
        kernels.score_by_deepgemm()


def _distinct_layers(manager: KVCacheManager, weights: Sequence[LayerWeights]) -> list[int]:
    """Return one layer of each type, and of each dtype and alignment of its weights."""
    first: dict[object, int] = {}
    for layer, layer_weights in zip(manager.schedule, weights, strict=True):
        compressors = (layer_weights.compressor or (), layer_weights.indexer or ())
        tensors = (layer_weights.kv_norm, *compressors[0], *compressors[1])
        given = [x for x in tensors if x is not None]
        looks = tuple((x.dtype, x.data_ptr() % POINTER_ALIGN == 0) for x in given)
        sinks = None if layer_weights.sinks is None else layer_weights.sinks.dtype
        publishes = layer.layer_idx == manager.config.candidate_source_layer_id
        owned = (layer.owns_entries, layer.owns_choice, layer.candidates_of >= 0, publishes)
        first.setdefault((layer.ratio, owned, looks, sinks), layer.layer_idx)
    return list(first.values())


class _Kernels:
    """Runs the kernels of a manager on padding, with zeros of one dtype as inputs."""

    def __init__(self, manager: KVCacheManager, dtype: torch.dtype, *, is_query_raw: bool) -> None:
        self.manager, self.config, self.capacity = manager, manager.config, manager.capacity
        self.dtype, self.device, self.is_query_raw = dtype, manager.device, is_query_raw

    def forwards(self, layer_idx: int) -> Iterator[list[_Forward]]:
        """Yield, for each kind of forward, the smallest for every choice of launch parameters."""
        most, longest_step = self.capacity.max_forward_tokens, self.capacity.max_step_tokens
        decodes = range(1, min(most, self.capacity.max_requests) + 1)
        yield [_Forward(size, size, 0, 1) for size in self._sizes(layer_idx, "decode", decodes)]
        # A row without a token makes a step of a forward, even if no row has several.
        steps = range(1, most + 1)
        yield [_Forward(1, size, 0, 2) for size in self._sizes(layer_idx, "step", steps)]
        if most > longest_step:
            chunks = range(longest_step + 1, most + 1)
            yield [_Forward(1, size, 1, size) for size in self._sizes(layer_idx, "chunk", chunks)]

    def _sizes(self, layer_idx: int, kind: "Kind", sizes: range) -> list[int]:
        """Return the fewest tokens for each choice of parameters; a window alone runs as SWA."""
        from dsv4.kernels.triton.launch import launch_parameters

        first: dict[object, int] = {}
        layer = self.manager.schedule[layer_idx]
        ratios, has_queries = (0, layer.ratio), layer.owns_choice
        for size in sizes:
            writes = tuple(launch_parameters(r, kind, size, self.device) for r in ratios)
            choices = self.attend_choices(layer_idx, size, int(kind == "chunk"))
            query = self.query_launch(size) if has_queries else None
            first.setdefault((writes, query, tuple(choices)), size)
        return list(first.values())

    def query_launch(self, num_tokens: int) -> "QueryLaunch":
        """The launch that prepares index queries of so many tokens."""
        from dsv4.kernels.triton.launch import QueryLaunch, find_launch

        return find_launch(QueryLaunch, "index query", self.device, num_tokens)

    def attend_choices(self, layer_idx: int, num_tokens: int, num_chunks: int) -> dict[object, int]:
        """Return the choices of attention, and the fewest entries of a launch that has each.

        They are the heads of a program, the launch that combines splits, and whether rows of a
        chunk are made dense. With `batch_invariant` it is whether one program joins all splits. A
        rank lists its entries, where rank 0 alone has chunks, or attends the window alone.
        """
        numbers = self._entry_numbers(layer_idx)
        if not self._is_listing(layer_idx):
            return self._choices(layer_idx, num_tokens, num_chunks, numbers)
        chunks_here = num_chunks if self.config.rank == 0 else 0
        choices = self._choices(layer_idx, num_tokens, chunks_here, numbers)
        alone = self._choices(layer_idx, num_tokens, num_chunks, (0,))
        return choices | {("alone", choice): number for choice, number in alone.items()}

    def _choices(
        self, layer_idx: int, num_tokens: int, num_chunks: int, numbers: tuple[int, ...]
    ) -> dict[object, int]:
        from dsv4.kernels.triton import attention
        from dsv4.kernels.triton.dense_rows import choose_dense
        from dsv4.kernels.triton.launch import num_multiprocessors

        num_heads = self.config.num_query_heads
        memory = self.manager.device_memory.memories[layer_idx]
        widest = attention.attend_launch(num_heads, self.dtype, memory)
        is_selecting = self.manager.schedule[layer_idx].attention_type is AttentionType.CSA
        if num_tokens <= num_multiprocessors(self.device):  # every tile counts
            numbers = (*range(numbers[0], numbers[-1], widest.tile), numbers[-1])
        choices: dict[object, int] = {}
        for number in numbers:
            launch, num_tiles = widest, attention.count_tiles(memory, widest, number)
            sizes = num_tokens, num_heads, num_tiles
            if self.manager.batch_invariant:
                is_listed = number > 0 and (is_selecting or self._is_listing(layer_idx))
                most = attention.count_most_tiles(
                    memory, widest, self.manager.block_table, number if is_listed else None
                )
                splits = attention.invariant_splits(num_tiles, most, widest, memory)
                joins = attention.count_joining(*sizes, splits, widest, memory) > 0
                choices.setdefault((splits is None, joins), number)
                continue
            if not num_chunks:
                launch = attention.choose_launch(*sizes, widest, memory)
            splits = attention.choose_splits(*sizes, launch, memory)
            combine = splits and attention.combine_launch(self.device, splits.num_splits)
            for max_entries in self._longest_requests(number, layer_idx):
                dense = choose_dense(
                    num_tokens, num_heads, num_tiles * launch.tile, memory, num_chunks=num_chunks,
                    max_entries=max_entries,
                )  # fmt: skip
                choices.setdefault((launch.heads, combine, dense is None), number)
        return choices

    def _is_listing(self, layer_idx: int) -> bool:
        """Whether attention of a layer lists the rank's own entries."""
        return self.manager.context is not None and self.manager.schedule[layer_idx].ratio > 0

    def _longest_requests(self, num_entries: int, layer_idx: int) -> tuple[int, ...]:
        """Return entries of the longest request where so many are attended.

        A list of selected ones is as long for a request of few entries, whose chunks are more
        likely made dense.
        """
        layer = self.manager.schedule[layer_idx]
        most = min(num_entries, self.capacity.max_request_tokens // max(layer.ratio, 1))
        is_listed = layer.attention_type is AttentionType.CSA and most > 0
        return (1, most) if is_listed else (most,)

    def _entry_numbers(self, layer_idx: int) -> tuple[int, ...]:
        """Return the fewest and the most entries of a launch."""
        ratio = self.manager.schedule[layer_idx].ratio
        if self.manager.schedule[layer_idx].attention_type is AttentionType.CSA:
            return (self.config.index_topk,)
        return (1, self.capacity.max_request_tokens // ratio) if ratio else (0,)

    def write_layer(
        self, layer_idx: int, forward: _Forward, weights: LayerWeights
    ) -> LayerCacheHandle:
        """Write a layer in parts and at once."""
        handle = self._acquire(layer_idx, forward)
        inputs = self._zero_projections(handle)
        handle.write_swa(inputs.kv, weights.kv_norm)
        if inputs.compressor is not None and weights.compressor is not None:
            index = inputs.indexer
            handle.flush_compression(
                *inputs.compressor,
                weights.compressor,
                index_kv=None if index is None else index.kv,
                index_gate=None if index is None else index.gate,
                index_weights=weights.indexer,
            )
        handle = self._acquire(layer_idx, forward)
        handle.write(inputs, weights)
        return handle

    def _acquire(self, layer_idx: int, forward: _Forward) -> LayerCacheHandle:
        """Plan padding whose sizes gather at least one entry of every type."""
        plan = self.manager.padding_plan(*forward, max_length=AttentionType.HCA.ratio)
        layer = self.manager.schedule[layer_idx]
        if layer.ratio and not layer.owns_entries:
            plan.layer(layer.entries_of).has_entries = True  # padding needs no owner's
        return self.manager.acquire(layer_idx, plan)

    def gather(self, handle: LayerCacheHandle) -> None:
        """Gather a layer's windows and entries."""
        handle.gather_swa_kv()
        if handle.paged is not None:
            handle.gather_all_compressed_kv()
            handle.gather_compressed_kv(self._no_rows(handle))

    def _no_rows(self, handle: LayerCacheHandle) -> Tensor:
        return self._list(handle, self.config.index_topk, torch.int64)

    def _list(self, handle: LayerCacheHandle, num_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.full((handle.plan.num_tokens, num_rows), -1, dtype=dtype, device=self.device)

    def select_entries(self, handle: LayerCacheHandle) -> None:
        """Select entries, at the smallest number of entries for every choice of programs."""
        from dsv4.kernels.triton.topk import distinct_sizes

        config = self.config
        if not handle.layer.owns_choice or self.manager.index_backend == "reference":
            return
        candidates = None
        if handle.layer.candidates_of >= 0:
            blocks = (handle.plan.num_tokens, config.candidate_topk_blocks)
            candidates = torch.full(blocks, -1, dtype=torch.int32, device=self.device)
        shape = (handle.plan.num_tokens, config.index_num_heads, config.index_head_dim)
        query = torch.zeros(shape, dtype=self.dtype, device=self.device)
        longest = self.capacity.most_entries(handle.layer.ratio)
        memories = [handle.memory]
        if len(handle.tokens.chunk_ids):  # too small a workspace for operands of chunks
            least = index_scratch_bytes(
                config.index_format, num_heads=config.index_num_heads, dim=config.index_head_dim,
                topk=config.index_topk, max_entries=longest, max_tokens=1,
            )  # fmt: skip
            scratch = handle.memory.index_scratch[:least]
            memories.append(handle.memory._replace(index_scratch=scratch))
        sizes = distinct_sizes(longest, topk=config.index_topk)
        if topk := handle.memory.layout.candidate_blocks:
            size = config.candidate_block_size
            most = -(-longest // size)
            sizes += [min(longest, n * size) for n in distinct_sizes(most, topk=topk)]
        name, weights = self.manager.index_backend, query[:, :, 0].contiguous()
        for max_entries, memory in product(dict.fromkeys(sizes), memories):
            given = query, weights, memory, handle.tokens
            ops.select_entries(*given, max_entries=max_entries, candidates=candidates, backend=name)
            if self.manager.context is not None:  # ranks compare scores, of few entries too
                topk, most_blocks = memory.layout.index_topk, memory.layout.candidate_blocks
                scores = query.new_empty(len(query), topk, dtype=torch.float32)
                largest = query.new_empty(len(query), most_blocks, dtype=torch.float32)
                load_backend(name).select_entries(
                    *given, max_entries=max_entries, candidates=candidates, chosen_scores=scores,
                    block_scores=largest if most_blocks else None,
                )  # fmt: skip

    def score_by_deepgemm(self) -> None:
        """Choose entries for every number of tokens that DeepGEMM compiles a kernel for."""
        from dsv4.kernels.external.deepgemm import call_sizes, index_scratch

        config, manager = self.config, self.manager
        layers = [s for s in manager.schedule if s.attention_type is AttentionType.CSA]
        max_entries = self.capacity.max_request_tokens // AttentionType.CSA.ratio
        if not layers or max_entries <= config.index_topk:
            return
        shape = (self.capacity.max_forward_tokens, config.index_num_heads, config.index_head_dim)
        query = torch.zeros((), dtype=self.dtype, device=self.device).expand(shape)
        memory = manager.device_memory.memories[layers[0].layer_idx]
        smallest = config.index_topk + 1  # the fewest entries leave room for the most tokens
        scratch = index_scratch(query, memory, max_entries=smallest)
        for size in call_sizes(scratch.num_rows):
            part = query[:size]
            handle = self._acquire(layers[0].layer_idx, _Forward(1, len(part), 0, 2))
            ops.select_entries(
                part, part[:, :, 0], handle.memory, handle.tokens,
                max_entries=smallest, backend=manager.index_backend,
            )  # fmt: skip

    def attend(
        self, handle: LayerCacheHandle, sinks: Tensor | None, numbers: Iterable[int]
    ) -> None:
        """Attend with and without sinks, over the fewest and the most entries and over `numbers`.

        And for chunks with and without room for dense rows.
        """
        shape = (handle.plan.num_tokens, self.config.num_query_heads, self.config.head_dim)
        query = torch.zeros(shape, dtype=self.dtype, device=self.device)
        is_csa = handle.layer.attention_type is AttentionType.CSA
        rows = self._no_rows(handle) if is_csa else None
        memories, layer_idx = [handle.memory], handle.layer.layer_idx
        if len(handle.tokens.chunk_ids):
            memories.append(handle.memory._replace(index_scratch=handle.memory.index_scratch[:0]))
        numbers = {*self._entry_numbers(layer_idx), *numbers}
        counts = {each for n in numbers for each in self._longest_requests(n, layer_idx)}
        for count, memory in product(sorted(counts), memories):
            tokens, listed = handle.tokens, rows
            if self._is_listing(layer_idx) and count:
                tokens = existing(existing(self.manager.context).attending)
                listed = self._list(handle, count, torch.int32) if rows is None else rows
            elif self._is_listing(layer_idx):
                memory, listed = memory.window_alone, None
            for given in (sinks, None):
                ops.attend(
                    query, given, memory, listed, tokens,
                    max_entries=count, is_query_raw=self.is_query_raw,
                    batch_invariant=self.manager.batch_invariant,
                    backend=self.manager.attention_backend,
                )  # fmt: skip

    def _zero_projections(self, handle: LayerCacheHandle) -> LayerProjections:
        """Return zeros in the shapes of a layer's projections; unread ones take no memory."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)

        def make(name: str, shape: tuple[int, ...]) -> Tensor:
            is_read = name.endswith(("kv", "gate"))
            return zero.repeat(shape) if is_read else zero.expand(shape)

        return make_projections(self.config, handle.layer, handle.plan.num_tokens, make)
