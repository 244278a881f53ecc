"""Index by DeepGEMM: its paged logits score our `fp8` keys in place.

Our own kernels prepare the queries and choose the entries. DeepGEMM compiles one kernel for every
32 tokens of a call, so the number of tokens is rounded up to a power of two. A token that needs no
scores still gets one entry scored, since some releases of DeepGEMM fail on none. PyTorch's
allocator holds the scores, outside the memory plan: at most as many as the index workspace holds.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.contracts import Selection, TokenMap
from dsv4.kernels.external.find import PAGE_KEYS, PagedLogits, as_pages, load_deep_gemm
from dsv4.kernels.index_scratch import IndexScratch
from dsv4.kernels.layer_memory import LayerMemory, existing
from dsv4.kernels.triton import indexer
from dsv4.kernels.triton.operands import PLAN_PTRS
from dsv4.kernels.triton.topk import choose_best, visible_entries

COMPILED_TOKENS = 32  # calls of up to this many tokens share a kernel
TABLE_TILE = 128


class ScoreInputs(NamedTuple):
    """Inputs of DeepGEMM's scores, one token a row."""

    query: Tensor  # [num_tokens, 1, heads, 128] E4M3
    pages: Tensor  # [num_blocks, 64, 1, 132] uint8
    weights: Tensor  # [num_tokens, heads] fp32
    lengths: Tensor  # [num_tokens, 1] int32
    block_table: Tensor  # [num_tokens, columns] int32


@triton.jit(
    do_not_specialize=["first_token", "num_tokens", "num_columns", "topk", "table_stride"],
    do_not_specialize_on_alignment=PLAN_PTRS,
)
def _table_kernel(
    lengths_ptr, blocks_ptr, num_columns, first_token, num_tokens, topk, positions_ptr,
    request_ids_ptr, request_slots_ptr, block_table_ptr, table_stride,
    RATIO: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store a token's number of entries to score, and TILE of the blocks that hold them."""
    line = tl.program_id(0).to(tl.int64)
    token = first_token + tl.minimum(tl.program_id(0), num_tokens - 1)
    slot, count = visible_entries(token, positions_ptr, request_ids_ptr, request_slots_ptr, RATIO)
    is_scored = (count > topk) & (tl.program_id(0) < num_tokens)
    count = tl.where(is_scored, count, 1)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_read = column * PAGE < count
    block = tl.load(block_table_ptr + slot * table_stride + column, mask=is_read & is_scored,
                    other=0)  # fmt: skip
    tl.store(blocks_ptr + line * num_columns + column, tl.maximum(block, 0),
             mask=is_read & (column < num_columns))  # fmt: skip
    tl.store(lengths_ptr + line + column, count + tl.zeros_like(column), mask=column == 0)


def select_entries(
    query: Tensor,
    head_weights: Tensor,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    max_entries: int,
    candidates: Tensor | None = None,
) -> Selection:
    """See `kernels.reference.indexer`."""
    num_tokens, layout = len(tokens.positions), memory.layout
    if max_entries <= layout.index_topk or not num_tokens:  # nothing is scored
        return indexer.select_entries(query, head_weights, memory, tokens, max_entries=max_entries)
    logits = load_deep_gemm()
    chosen = indexer.empty_selection(num_tokens, layout.index_topk, query.device)
    scratch = index_scratch(query, memory, max_entries=max_entries)
    step = tokens_at_once(scratch.num_rows)
    for first in range(0, num_tokens, step):
        part = range(num_tokens)[first : first + step]
        indexer.prepare_queries(query, head_weights, scratch, memory, tokens, part)
        inputs = score_inputs(
            scratch, memory, tokens, part, num_heads=query.shape[1], max_entries=max_entries
        )
        scores = score_entries(logits, inputs, max_entries=max_entries)
        choose_best(
            chosen, scores, scratch.group_tops, tokens, layout, part, max_entries=max_entries
        )
    return chosen


def index_scratch(query: Tensor, memory: LayerMemory, *, max_entries: int) -> IndexScratch:
    """Cut the layer's workspace, with room for the rounded-up number of tokens."""
    num_tokens = padded_tokens(len(query))
    return indexer.index_scratch(query, memory, max_entries=max_entries, num_tokens=num_tokens)


def padded_tokens(num_tokens: int) -> int:
    """Round a number of tokens up to one that DeepGEMM has a kernel for."""
    return num_tokens if num_tokens <= COMPILED_TOKENS else 1 << (num_tokens - 1).bit_length()


def tokens_at_once(num_rows: int) -> int:
    """Count the tokens of one call if the workspace holds num_rows: all, or a power of two."""
    return num_rows if num_rows <= COMPILED_TOKENS else 1 << (num_rows.bit_length() - 1)


def call_sizes(num_rows: int) -> list[int]:
    """List the sizes that calls are rounded up to; DeepGEMM compiles a kernel for each."""
    larger = range(COMPILED_TOKENS.bit_length(), num_rows.bit_length())  # powers of two
    return [min(COMPILED_TOKENS, num_rows), *(1 << power for power in larger)]


def score_inputs(
    scratch: IndexScratch,
    memory: LayerMemory,
    tokens: TokenMap,
    part: range,
    *,
    num_heads: int,
    max_entries: int,
) -> ScoreInputs:
    """Prepare the scores of the tokens `part`, whose queries the workspace holds."""
    padded = padded_tokens(len(part))
    dim, device = memory.layout.index_head_dim, tokens.positions.device
    columns = triton.cdiv(max_entries, PAGE_KEYS)
    lengths = torch.empty(padded, 1, dtype=torch.int32, device=device)
    blocks = torch.empty(padded, columns, dtype=torch.int32, device=device)
    _table_kernel[(padded, triton.cdiv(columns, TABLE_TILE))](
        lengths_ptr=lengths, blocks_ptr=blocks, num_columns=columns, first_token=part.start,
        num_tokens=len(part), topk=memory.layout.index_topk, positions_ptr=tokens.positions,
        request_ids_ptr=tokens.request_ids, request_slots_ptr=tokens.request_slots,
        block_table_ptr=tokens.block_table, table_stride=tokens.block_table.stride(0),
        RATIO=memory.layout.ratio, PAGE=PAGE_KEYS, TILE=TABLE_TILE, num_warps=1,
    )  # fmt: skip
    codes = scratch.queries[:padded].view(torch.float8_e4m3fn)
    query = codes.view(padded, 1, num_heads, dim)
    return ScoreInputs(
        query, as_pages(existing(memory.index_keys)), scratch.weights[:padded], lengths, blocks
    )


def score_entries(logits: PagedLogits, inputs: ScoreInputs, *, max_entries: int) -> Tensor:
    """Score entries, `[num_tokens, max_entries]` fp32; undefined after a token's last entry."""
    return logits.score(*inputs, logits.make_schedule(inputs.lengths), max_entries)
