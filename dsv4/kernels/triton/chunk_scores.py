"""Index scores of chunks on Hopper: keys as dense operands, and the launches that score them.

The keys of each chunk's request are made operands once per layer, in entry order: E4M3 codes of fp8
keys as they are, E5M2 codes of mxfp4 keys (`mxfp4_scores`). They take the front of the workspace.
`hopper.index_scores` multiplies them by the queries of a group of tokens: 2 of 64 heads, 4 of 32.
Tokens of steps, and groups of tokens of two requests, are left to `indexer._score_kernel`.

The kernel stores the first tops of the top-k too, where rows are long enough to need them.

mxfp4 scores that E5M2 cannot hold come out NaN here too. `_rescore_kernel` computes them again.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import PagedRows, round_up
from dsv4.kernels.contracts import TokenMap
from dsv4.kernels.index_scratch import IndexScratch
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.triton.key_tiles import KeyPages, QueryOperands, ScoreSpec
from dsv4.kernels.triton.launch import is_hopper, num_multiprocessors, starts_early
from dsv4.kernels.triton.mxfp4_scores import (
    MIDDLE_SCALE,
    SCALE_REACH,
    code_tables,
    operand_words,
    score_by_groups,
)
from dsv4.kernels.triton.operands import PLAN_PTRS, row_spec
from dsv4.kernels.triton.primitives import loop_bound, wait_for_launch_before
from dsv4.kernels.triton.topk import (
    ALL_ROWS,
    are_groups_scored,
    store_tops,
    visible_entries,
)

HEADS = (32, 64)  # of queries
DIM = 128  # of queries
COLUMNS = 128  # heads of the tokens that share keys
DTYPES = {"fp8": torch.float8_e4m3fn, "mxfp4": torch.float8_e5m2}  # of operands, by key format
EXTRA_BYTES = 4  # beside the codes of a key
KEY_BYTES = DIM + EXTRA_BYTES
KEY_TILE = 64  # keys of a program that makes operands; their flag is one number
FLAGS = 128  # tiles of keys that a program of `_rescore_kernel` looks at
SCORE_TILE = 256  # keys of a program's product
ITEM_COST = 2  # time of starting a work item, in tiles
CHUNK_PTRS = [*PLAN_PTRS, "chunk_ids_ptr"]


class ChunkKeys(NamedTuple):
    """The keys of a forward's chunks, chunk after chunk.

    extras are the scales of fp8 keys; of mxfp4 keys, a number other than 0 for each tile of keys
    that has one that E5M2 does not hold, and room.
    """

    codes: Tensor  # [num_chunks × stride, 128] in the operands' dtype
    extras: Tensor  # [num_chunks × stride] fp32
    stride: int
    topped_rows: int  # the rows whose tops are stored with their scores, see `topk.choose_best`


@triton.jit
def find_chunk(request, chunk_ids_ptr):
    """The place of a request among the chunks, of which it is one."""
    chunk = tl.full((), 0, tl.int32)
    while tl.load(chunk_ids_ptr + chunk) != request:
        chunk += 1
    return chunk


@triton.jit(do_not_specialize=["key_stride", "table_stride"],
            do_not_specialize_on_alignment=CHUNK_PTRS)  # fmt: skip
def _operand_kernel(
    codes_ptr, extras_ptr, key_stride, data_ptr, scale_ptr, page_stride, after_ptr,
    request_slots_ptr, chunk_ids_ptr, block_table_ptr, table_stride, RATIO: tl.constexpr,
    KEY: tl.constexpr, ENTRIES_PER_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store TILE keys of a chunk's request as operands; 0 for a key without a block."""
    request = tl.load(chunk_ids_ptr + tl.program_id(1))
    slot = tl.load(request_slots_ptr + request).to(tl.int64)
    count = tl.where(slot >= 0, tl.load(after_ptr + request) // RATIO, 0)
    wait_for_launch_before(STARTS_NEXT=True)
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]  # [TILE, 1]
    if tl.program_id(0) * TILE < count:
        block = tl.load(block_table_ptr + slot * table_stride + entry // ENTRIES_PER_BLOCK,
                        mask=entry < count, other=-1)  # fmt: skip
        page_start = tl.maximum(block, 0).to(tl.int64) * page_stride
        page_row = entry % ENTRIES_PER_BLOCK
        word = tl.arange(0, KEY.DATA_BYTES // 4)[None, :]
        word_ptr = (data_ptr + page_start).to(tl.pointer_type(tl.int32))
        words = tl.load(word_ptr + page_row * (KEY.DATA_BYTES // 4) + word, mask=block >= 0,
                        other=0)  # fmt: skip
        key_scale_ptr = scale_ptr + page_start + page_row * KEY.SCALE_BYTES  # [TILE, 1]
        first_key = tl.program_id(1).to(tl.int64) * key_stride
        out_ptr = codes_ptr.to(tl.pointer_type(tl.int32)) + (first_key + entry) * (KEY.DIM // 4)
        if KEY.FORMAT == "index_fp8":
            tl.store(out_ptr + word, words)
            scale = tl.load(key_scale_ptr.to(tl.pointer_type(tl.float32)), mask=block >= 0,
                            other=0.0)  # fmt: skip
            tl.store(extras_ptr + first_key + entry, scale)
        else:
            store_mxfp4(out_ptr, words, key_scale_ptr, block >= 0, extras_ptr + first_key // TILE,
                        KEY.DIM, TILE)  # fmt: skip


@triton.jit
def store_mxfp4(out_ptr, words, key_scale_ptr, is_key, flags_ptr, DIM: tl.constexpr,
                TILE: tl.constexpr):  # fmt: skip
    """Store E5M2 codes in the order of `mxfp4_scores.key_operand`, and the tile's flag."""
    group = tl.arange(0, DIM // 32)[None, :]
    scales = tl.load(key_scale_ptr + group, mask=is_key, other=MIDDLE_SCALE).to(tl.int32)
    low_table, high_table = code_tables(scales)  # [TILE, groups]
    words = tl.reshape(words, (TILE, DIM // 32, 4))
    halves = operand_words(words, low_table[:, :, None], high_table[:, :, None])
    nth = tl.arange(0, 4)[None, None, :]
    place_ptr = out_ptr[:, :, None] + nth * (DIM // 16) + group[:, :, None]  # [TILE, groups, 4]
    tl.store(place_ptr, halves[0].to(tl.int32, bitcast=True))
    tl.store(place_ptr + DIM // 32, halves[1].to(tl.int32, bitcast=True))
    has_codes = tl.max(words & 0x77777777, axis=2) != 0  # a group of zeros is 0 with any scale
    reach = tl.where(has_codes, tl.abs(scales - MIDDLE_SCALE), 0)
    reach = tl.max(tl.max(reach, axis=1), axis=0)
    tl.store(flags_ptr + tl.program_id(0), tl.where(reach > SCALE_REACH, 1.0, 0.0))


@triton.jit(
    do_not_specialize=[
        "first_token", "num_tokens", "topk", "scores_stride", "tops_stride", "table_stride",
        "key_stride", "query_weights_stride",
    ],
    do_not_specialize_on_alignment=CHUNK_PTRS,
)  # fmt: skip
def _rescore_kernel(
    scores_ptr, scores_stride, tops_ptr, tops_stride, query_operand_ptr, query_weights_ptr,
    query_weights_stride, data_ptr, scale_ptr, page_stride, flags_ptr, key_stride, first_token,
    num_tokens, topk, positions_ptr, request_ids_ptr, request_slots_ptr, chunk_ids_ptr,
    workspace_starts_ptr, block_table_ptr, table_stride, RATIO: tl.constexpr, KEY: tl.constexpr,
    SPEC: tl.constexpr, FLAGS: tl.constexpr, TOKENS: tl.constexpr, HAS_TOPS: tl.constexpr,
):  # fmt: skip
    """Compute NaN scores of a token again, and tops: all, or those of tiles with a flag."""
    row = tl.program_id(0)
    slot, count = visible_entries(first_token + row, positions_ptr, request_ids_ptr,
                                  request_slots_ptr, RATIO)  # fmt: skip
    is_scored = are_groups_scored(row, num_tokens, first_token, request_ids_ptr,
                                  workspace_starts_ptr, TOKENS)  # fmt: skip
    wait_for_launch_before(STARTS_NEXT=False)
    first = tl.program_id(1) * FLAGS
    if is_scored & (count > topk) & (first * SPEC.TILE < count):
        chunk = find_chunk(tl.load(request_ids_ptr + first_token + row), chunk_ids_ptr)
        flags_ptr += chunk.to(tl.int64) * key_stride // SPEC.TILE
        end = tl.minimum(first + FLAGS, tl.cdiv(count, SPEC.TILE))
        tile = first + tl.arange(0, FLAGS)
        flags = tl.load(flags_ptr + tile, mask=tile < end, other=0.0)
        line = row.to(tl.int64)
        weights_ptr = query_weights_ptr + line * query_weights_stride
        residual = tl.arange(0, SPEC.BLOCK_HEADS * KEY.DIM // 32)
        is_held = tl.min(tl.load(weights_ptr + SPEC.BLOCK_HEADS + residual), axis=0) >= 1.0
        if (tl.max(flags, axis=0) != 0.0) | (not is_held):
            operands = QueryOperands(
                query_operand_ptr + line * (SPEC.BLOCK_HEADS * KEY.BLOCK), weights_ptr,
                query_weights_stride,
            )  # fmt: skip
            keys = KeyPages(data_ptr, scale_ptr, page_stride)
            pages_ptr = block_table_ptr + slot * table_stride
            out_ptr = scores_ptr + line * scores_stride + tl.zeros((1, 1), tl.int64)
            counts = count + tl.zeros((1,), tl.int32)
            for nth in tl.range(loop_bound(first), loop_bound(end), num_stages=1):
                if (tl.load(flags_ptr + nth) != 0.0) | (not is_held):
                    score_by_groups(nth, pages_ptr, counts, out_ptr, operands, keys, KEY, SPEC)
                    if HAS_TOPS:
                        tl.debug_barrier()  # the scores are stored before they are read
                        entry = nth * SPEC.TILE + tl.arange(0, SPEC.TILE)
                        scores = tl.load(scores_ptr + line * scores_stride + entry,
                                         mask=entry < count)  # fmt: skip
                        store_tops(tops_ptr + line * tops_stride, scores, nth * SPEC.TILE, count)


def group_tokens(memory: LayerMemory, tokens: TokenMap, *, num_heads: int) -> int:
    """The tokens that `hopper.index_scores` scores at once; 0 if it cannot score a forward."""
    layout, device = memory.layout, memory.index_scratch.device
    is_fit = num_heads in HEADS and layout.index_row.dim == DIM and layout.index_format in DTYPES
    has_kernel = len(tokens.chunk_ids) > 0 and is_fit and is_hopper(device)
    return COLUMNS // num_heads if has_kernel else 0


def cut_chunk_keys(
    query: Tensor, memory: LayerMemory, tokens: TokenMap, *, max_entries: int
) -> ChunkKeys | None:
    """Cut the operands of a forward's chunks from the front of the layer's workspace.

    None if `group_tokens` gives 0, or if they would take more than half of the workspace.
    """
    storage, name = memory.index_scratch, memory.layout.index_format
    stride = round_up(max_entries, KEY_TILE)
    num_keys = stride * len(tokens.chunk_ids)
    has_room = num_keys * KEY_BYTES <= storage.numel() // 2
    group = group_tokens(memory, tokens, num_heads=query.shape[1])
    if not has_room or not group:
        return None
    codes, extras = storage[: num_keys * KEY_BYTES].split((num_keys * DIM, num_keys * EXTRA_BYTES))
    operands = codes.view(DTYPES[name]).view(num_keys, DIM)
    rows = ALL_ROWS if len(tokens.request_slots) == 1 else group
    return ChunkKeys(operands, extras.view(torch.float32), stride, rows)


def tokens_at_once(num_rows: int, num_heads: int, device: torch.device) -> int:
    """The tokens to score at once if the workspace holds num_rows: whole waves of programs."""
    wave = COLUMNS // num_heads * num_multiprocessors(device)
    return num_rows // wave * wave or num_rows


def store_operands(
    chunk_keys: ChunkKeys, memory: LayerMemory, tokens: TokenMap, *, max_entries: int
) -> None:
    """Make operands of the keys of every chunk's request."""
    keys = existing(memory.index_keys)
    _operand_kernel[(-(-max_entries // KEY_TILE), len(tokens.chunk_ids))](
        codes_ptr=chunk_keys.codes.view(torch.uint8), extras_ptr=chunk_keys.extras,
        key_stride=chunk_keys.stride, after_ptr=tokens.positions_after,
        request_slots_ptr=tokens.request_slots, chunk_ids_ptr=tokens.chunk_ids,
        RATIO=memory.layout.ratio, TILE=KEY_TILE, num_warps=4,
        launch_pdl=starts_early(keys.data.device),
        KEY=row_spec("index", memory.layout.index_row, memory.layout.rope_dim),
        ENTRIES_PER_BLOCK=keys.rows_per_page, **_page_arguments(keys, tokens),
    )  # fmt: skip


def score_chunks(
    chunk_keys: ChunkKeys,
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    part: range,
    shared: dict[str, Any],
    *,
    max_entries: int,
) -> None:
    """Write the workspace's scores of the tokens `part` that are in groups of one chunk.

    shared are the arguments that the kernels of the index have in common.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from dsv4.kernels.triton.hopper import index_scores

    keys, codes = existing(memory.index_keys), chunk_keys.codes
    is_mxfp4 = keys.format.name == "mxfp4"
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8)
    queries = scratch.queries.view(-1, DIM).view(codes.dtype)
    num_heads = len(queries) // scratch.num_rows
    num_tokens, num_programs = COLUMNS // num_heads, num_multiprocessors(codes.device)
    num_groups = -(-len(part) // num_tokens)
    splits, split_tiles = choose_splits(num_groups, -(-max_entries // SCORE_TILE), num_programs)
    names = ("first_token", "topk", "positions_ptr", "request_ids_ptr", "request_slots_ptr")
    common = {name: shared[name] for name in names} | {
        "scores_ptr": scratch.scores, "scores_stride": scratch.scores.stride(0),
        "tops_stride": scratch.group_tops.stride(0), "HAS_TOPS": scratch.has_tops,
        "num_tokens": len(part), "chunk_ids_ptr": tokens.chunk_ids,
        "key_stride": chunk_keys.stride, "RATIO": memory.layout.ratio, "num_warps": 4,
        "launch_pdl": starts_early(codes.device),
    }  # fmt: skip
    index_scores._score_kernel[(min(num_programs, num_groups * splits),)](
        key_desc=TensorDescriptor.from_tensor(codes, [KEY_TILE, DIM], layout),
        query_desc=TensorDescriptor.from_tensor(queries, [COLUMNS, DIM], layout),
        weights_ptr=scratch.weights, weights_stride=scratch.weights.stride(0),
        scales_ptr=chunk_keys.extras, num_chunks=len(tokens.chunk_ids),
        num_items=num_groups * splits, num_groups=num_groups, split_tiles=split_tiles,
        tops_ptr=scratch.group_tops.view(torch.float32), IS_MXFP4=is_mxfp4, HEADS=num_heads,
        **common,
    )  # fmt: skip
    if is_mxfp4:
        spec = ScoreSpec(num_heads, num_heads, KEY_TILE, 1, 1, 4, keys.rows_per_page)
        grid = (len(part), -(-max_entries // (KEY_TILE * FLAGS)))
        _rescore_kernel[grid](
            tops_ptr=scratch.group_tops, query_operand_ptr=scratch.queries,
            query_weights_ptr=scratch.weights, query_weights_stride=scratch.weights.stride(0),
            flags_ptr=chunk_keys.extras, workspace_starts_ptr=tokens.workspace_starts,
            KEY=shared["KEY"], SPEC=spec, FLAGS=FLAGS, TOKENS=num_tokens,
            **_page_arguments(keys, tokens), **common,
        )  # fmt: skip


@functools.cache
def choose_splits(num_groups: int, num_tiles: int, num_programs: int) -> tuple[int, int]:
    """Choose how keys are split into work items, and the tiles of one, for the shortest time."""
    costs = {}
    for splits in range(1, max(1, num_tiles // 8) + 1):
        tiles = -(-num_tiles // splits)
        costs[splits, tiles] = -(-num_groups * splits // num_programs) * (tiles + ITEM_COST)
    return min(costs, key=lambda choice: costs[choice])


def _page_arguments(keys: PagedRows, tokens: TokenMap) -> dict[str, Any]:
    return {
        "data_ptr": keys.data, "scale_ptr": keys.scales, "page_stride": keys.data.stride(0),
        "block_table_ptr": tokens.block_table, "table_stride": tokens.block_table.stride(0),
    }  # fmt: skip
