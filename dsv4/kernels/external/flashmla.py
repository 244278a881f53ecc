"""Attend by FlashMLA: its sparse decode reads our `fp8` rows in place.

FlashMLA reads rows from two sources: the window and the entries. Tokens of a chunk read the window
workspace, all others their ring. A forward with both calls FlashMLA twice, and each call stores
the output of its own tokens. Kernels of ours list the rows and prepare raw queries first, and
rotate the output back. FlashMLA rounds its output to BF16 before that, once more than our own
kernel. PyTorch's allocator holds FlashMLA's buffers, outside the memory plan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dsv4.formats import round_up
from dsv4.kernels.contracts import AttentionResult, TokenMap
from dsv4.kernels.external.find import (
    LISTED_AT_ONCE,
    Decoded,
    DecodeInputs,
    as_pages,
    load_flash_mla,
)
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.gather import find_entries, find_listed, find_window, workspace_row
from dsv4.kernels.triton.operands import PLAN_PTRS, token_arguments
from dsv4.kernels.triton.primitives import (
    bf16_bits,
    fold_pairs,
    halvings,
    load_rope,
    query_factor,
    rotate_tail,
)

HEADS = (64, 128)  # numbers of query heads that FlashMLA has kernels for
MAX_TOKENS = 1024  # per call: FlashMLA's accumulators take 128 or 256 KiB a token
MAX_LIST_BYTES = 64 << 20
FINISHED_HEADS = 8  # heads that a program rotates back


@triton.jit
def has_source(token, request_ids_ptr, workspace_starts_ptr, IS_WORKSPACE: tl.constexpr):
    """Return whether a token's window lies in the workspace (IS_WORKSPACE), or in its ring."""
    start = tl.load(workspace_starts_ptr + tl.load(request_ids_ptr + token))
    return start >= 0 if IS_WORKSPACE else start < 0


@triton.jit(
    do_not_specialize=[
        "first_token", "num_entries", "entries_width", "rows_stride", "row_stride", "pool_rows",
        "table_stride",
    ],
    do_not_specialize_on_alignment=["rows_ptr", *PLAN_PTRS],
)  # fmt: skip
def _list_kernel(
    window_rows_ptr, entry_rows_ptr, entry_counts_ptr, entries_width, first_token, num_entries,
    rows_ptr, rows_stride, row_stride, pool_rows, positions_ptr, request_ids_ptr,
    request_slots_ptr, before_ptr, after_ptr, workspace_starts_ptr, block_table_ptr, table_stride,
    ENTRIES: tl.constexpr, IS_WORKSPACE: tl.constexpr, WINDOW: tl.constexpr,
    WINDOW_WIDTH: tl.constexpr, RING_ROWS: tl.constexpr, ENTRY_ROWS: tl.constexpr,
    RATIO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List TILE of a token's rows: the window's rows, then those of its entries.

    A token whose window is not in this source gets no rows at all.
    """
    line = tl.program_id(0).to(tl.int64)
    token = first_token + tl.program_id(0)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_mine = has_source(token, request_ids_ptr, workspace_starts_ptr, IS_WORKSPACE)
    if tl.program_id(1) * TILE < WINDOW_WIDTH:
        slot, ring_row, is_seen = find_window(
            token, offset, is_mine & (offset < WINDOW), positions_ptr, request_ids_ptr,
            request_slots_ptr, RING_ROWS, WINDOW,
        )  # fmt: skip
        window_row = slot * RING_ROWS + ring_row
        if IS_WORKSPACE:
            window_row = workspace_row(token, offset, positions_ptr, request_ids_ptr, before_ptr,
                                       workspace_starts_ptr, WINDOW).to(tl.int32)  # fmt: skip
        tl.store(window_rows_ptr + line * WINDOW_WIDTH + offset,
                 tl.where(is_seen, window_row, -1), mask=offset < WINDOW_WIDTH)  # fmt: skip
    elif ENTRIES != "none":
        entry = offset - WINDOW_WIDTH
        request = tl.load(request_ids_ptr + token)
        count = num_entries
        if ENTRIES == "all":
            count = tl.minimum((tl.load(positions_ptr + token) + 1) // RATIO, num_entries)
        has_entries = is_mine & (tl.load(request_slots_ptr + request) >= 0)
        count = tl.where(has_entries, count, 0)
        if ENTRIES == "listed":
            page, page_row, is_present = find_listed(
                token, entry, entry < count, rows_ptr, rows_stride, row_stride, pool_rows,
                ENTRY_ROWS,
            )  # fmt: skip
        else:
            page, page_row, is_present = find_entries(
                request, entry, entry < count, request_slots_ptr, after_ptr, block_table_ptr,
                table_stride, RATIO, ENTRY_ROWS,
            )  # fmt: skip
        row = page * ENTRY_ROWS + page_row
        tl.store(entry_rows_ptr + line * entries_width + entry, tl.where(is_present, row, -1),
                 mask=entry < entries_width)  # fmt: skip
        tl.store(entry_counts_ptr + line + entry, count + tl.zeros_like(entry), mask=entry == 0)


@triton.jit
def _prepare_kernel(
    prepared_ptr, query_ptr, cos_ptr, sin_ptr, EPS: tl.constexpr, NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one head of a token's raw query."""
    token = tl.program_id(0) + tl.zeros((1,), tl.int32)
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    at = row * DIM + tl.arange(0, DIM)[None, :]
    x = tl.load(query_ptr + at).to(tl.float32)  # [1, DIM]
    cos, sin = load_rope((cos_ptr, sin_ptr), token, token >= 0, DIM, ROPE, DIM)
    factor = query_factor(fold_pairs(x * x, halvings(DIM)), EPS, DIM)
    x = rotate_tail(x * factor, cos, sin, 1, DIM, ROPE, DIM)
    tl.store(prepared_ptr.to(tl.pointer_type(tl.uint16)) + at, bf16_bits(x))


@triton.jit(
    do_not_specialize=["first_token", "lse_stride", "lse_head_stride"],
    do_not_specialize_on_alignment=PLAN_PTRS,
)
def _finish_kernel(
    output_ptr, lse_ptr, decoded_ptr, decoded_lse_ptr, lse_stride, lse_head_stride, first_token,
    cos_ptr, sin_ptr, request_ids_ptr, request_slots_ptr, workspace_starts_ptr,
    IS_WORKSPACE: tl.constexpr, NUM_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS heads of a token's output back; padding gets 0 and an lse of -inf."""
    line = tl.program_id(0).to(tl.int64)
    token = first_token + tl.program_id(0)
    is_token = tl.load(request_slots_ptr + tl.load(request_ids_ptr + token)) >= 0
    if has_source(token, request_ids_ptr, workspace_starts_ptr, IS_WORKSPACE) | (is_token == 0):
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_head = head < NUM_HEADS
        channel = tl.arange(0, DIM)[None, :]
        at = (line * PADDED_HEADS + head)[:, None] * DIM + channel
        x = tl.load(decoded_ptr + at, mask=is_head[:, None] & is_token, other=0.0).to(tl.float32)
        rows = token + tl.zeros((ROWS,), tl.int32)
        cos, sin = load_rope((cos_ptr, sin_ptr), rows, is_head, DIM, ROPE, DIM)
        x = rotate_tail(x, cos, -sin, ROWS, DIM, ROPE, DIM)
        out_row = token.to(tl.int64) * NUM_HEADS + head
        tl.store(output_ptr.to(tl.pointer_type(tl.uint16)) + (out_row[:, None] * DIM + channel),
                 bf16_bits(x), mask=is_head[:, None])  # fmt: skip
        lse = tl.load(decoded_lse_ptr + line * lse_stride + head * lse_head_stride,
                      mask=is_head & is_token, other=float("-inf"))  # fmt: skip
        tl.store(lse_ptr + out_row, lse, mask=is_head)


def attend(
    query: Tensor,
    sinks: Tensor | None,
    memory: LayerMemory,
    selected_rows: Tensor | None,
    tokens: TokenMap,
    *,
    max_entries: int,
    is_query_raw: bool = False,
    batch_invariant: bool = False,
) -> AttentionResult:
    """See `kernels.reference.attention`."""
    if query.dtype is not torch.bfloat16:
        raise TypeError(f"Invalid dtype of query: 'flashmla' takes bfloat16, got {query.dtype}")
    assert not batch_invariant, "refused when the manager is made"
    num_tokens, num_heads, _ = query.shape
    result = AttentionResult(
        torch.empty(query.shape, dtype=query.dtype, device=query.device),
        torch.empty(num_tokens, num_heads, dtype=torch.float32, device=query.device),
    )
    if is_query_raw:
        query = prepare_query(query, memory)
    decode, sinks = load_flash_mla(), padded_sinks(sinks, num_heads)
    step = tokens_at_once(memory, selected_rows, max_entries)
    for is_workspace in window_sources(tokens):
        for first in range(0, num_tokens, step):
            part = padded_query(query[first : first + step])
            inputs = decode_inputs(
                part, sinks, memory, selected_rows, tokens,
                first_token=first, max_entries=max_entries, is_workspace=is_workspace,
            )  # fmt: skip
            decoded = decode(inputs, None)
            finish(result, decoded, memory, tokens, first_token=first, is_workspace=is_workspace)
    return result


def prepare_query(query: Tensor, memory: LayerMemory) -> Tensor:
    """See `kernels.reference.attention`."""
    num_tokens, num_heads, dim = query.shape
    prepared = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _prepare_kernel[(num_tokens, num_heads)](
        prepared_ptr=prepared, query_ptr=query.contiguous(), cos_ptr=memory.rope.cos,
        sin_ptr=memory.rope.sin, EPS=memory.layout.query_eps, NUM_HEADS=num_heads, DIM=dim,
        ROPE=memory.layout.rope_dim, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return prepared


def window_sources(tokens: TokenMap) -> tuple[bool, ...]:
    """Return the sources of window rows that a forward needs; True is the workspace."""
    num_chunks = len(tokens.chunk_ids)
    if not num_chunks:
        return (False,)
    return (True,) if num_chunks == len(tokens.request_slots) else (False, True)


def tokens_at_once(memory: LayerMemory, selected_rows: Tensor | None, max_entries: int) -> int:
    """Count the tokens of one call."""
    width = sum(list_widths(memory, selected_rows, max_entries))
    return max(1, min(MAX_TOKENS, MAX_LIST_BYTES // (4 * width)))


def list_widths(
    memory: LayerMemory, selected_rows: Tensor | None, max_entries: int
) -> tuple[int, int]:
    """Return the widths of the lists of window rows and of entries; 0 if there are none."""
    window = round_up(memory.layout.window, LISTED_AT_ONCE)
    if not memory.layout.ratio:
        return window, 0
    num_entries = max_entries if selected_rows is None else selected_rows.shape[1]
    return window, round_up(max(1, num_entries), LISTED_AT_ONCE)


def decode_inputs(
    query: Tensor,
    sinks: Tensor | None,
    memory: LayerMemory,
    selected_rows: Tensor | None,
    tokens: TokenMap,
    *,
    first_token: int,
    max_entries: int,
    is_workspace: bool,
) -> DecodeInputs:
    """List the rows of the tokens from first_token on, whose padded queries are given."""
    layout, entries, num_tokens = memory.layout, memory.entries, len(query)
    widths = list_widths(memory, selected_rows, max_entries)
    window_rows, entry_rows, entry_counts = (
        torch.empty(num_tokens, *shape, dtype=torch.int32, device=query.device)
        for shape in ((1, widths[0]), (1, widths[1]), ())
    )
    # Without a list the kernel reads no rows_ptr, but it needs a pointer.
    listed = window_rows[:, 0] if selected_rows is None else selected_rows
    kind = "none" if not layout.ratio else "all" if selected_rows is None else "listed"
    _list_kernel[(num_tokens, sum(widths) // LISTED_AT_ONCE)](
        window_rows_ptr=window_rows, entry_rows_ptr=entry_rows, entry_counts_ptr=entry_counts,
        entries_width=widths[1], first_token=first_token,
        num_entries=max_entries if selected_rows is None else selected_rows.shape[1],
        rows_ptr=listed, rows_stride=listed.stride(0), row_stride=listed.stride(1),
        pool_rows=0 if entries is None else entries.num_rows, **token_arguments(tokens),
        ENTRIES=kind, IS_WORKSPACE=is_workspace, WINDOW=layout.window, WINDOW_WIDTH=widths[0],
        RING_ROWS=layout.ring_rows, ENTRY_ROWS=max(1, layout.entries_per_block),
        RATIO=max(1, layout.ratio), TILE=LISTED_AT_ONCE, num_warps=1,
    )  # fmt: skip
    window = as_pages(memory.window.workspace if is_workspace else memory.window.ring)
    if entries is None:
        return DecodeInputs(query, sinks, window, window_rows, None, None, None)
    return DecodeInputs(
        query, sinks, window, window_rows, as_pages(entries), entry_rows,
        entry_counts if selected_rows is None else None,
    )  # fmt: skip


def finish(
    result: AttentionResult,
    decoded: Decoded,
    memory: LayerMemory,
    tokens: TokenMap,
    *,
    first_token: int,
    is_workspace: bool,
) -> None:
    """Rotate FlashMLA's output of the tokens from first_token on back, and store it."""
    num_heads, dim = result.output.shape[1:]
    num_tokens, _, padded_heads, _ = decoded.output.shape
    _finish_kernel[(num_tokens, triton.cdiv(num_heads, FINISHED_HEADS))](
        output_ptr=result.output, lse_ptr=result.lse, decoded_ptr=decoded.output,
        decoded_lse_ptr=decoded.lse, lse_stride=decoded.lse.stride(0),
        lse_head_stride=decoded.lse.stride(1), first_token=first_token,
        cos_ptr=memory.rope.cos, sin_ptr=memory.rope.sin, request_ids_ptr=tokens.request_ids,
        request_slots_ptr=tokens.request_slots,
        workspace_starts_ptr=tokens.workspace_starts, IS_WORKSPACE=is_workspace,
        NUM_HEADS=num_heads, PADDED_HEADS=padded_heads, DIM=dim, ROPE=memory.layout.rope_dim,
        ROWS=FINISHED_HEADS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def padded_query(query: Tensor) -> Tensor:
    """Pad a query with heads of zeros to `[num_tokens, 1, 64 or 128, dim]`."""
    num_heads = query.shape[1]
    if num_heads != _padded_heads(num_heads):
        query = pad(query, (0, 0, 0, _padded_heads(num_heads) - num_heads))
    return query.contiguous()[:, None]


def padded_sinks(sinks: Tensor | None, num_heads: int) -> Tensor | None:
    """Convert sinks to fp32, with -inf for padded heads; None stays None."""
    if sinks is None:
        return None
    more = _padded_heads(num_heads) - num_heads
    return pad(sinks.float(), (0, more), value=-torch.inf) if more else sinks.float().contiguous()


def _padded_heads(num_heads: int) -> int:
    return HEADS[0] if num_heads <= HEADS[0] else HEADS[1]
