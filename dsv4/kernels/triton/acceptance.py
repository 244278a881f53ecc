"""Acceptance: a step begins where the accepted tokens of the step before end."""

import triton
import triton.language as tl

from dsv4.kernels.contracts import Acceptance, TokenMap

BLOCK = 128
POINTERS = [
    "accepted_ptr", "rows_ptr", "counts_ptr", "before_ptr", "after_ptr", "positions_ptr",
    "request_ids_ptr",
]  # fmt: skip


@triton.jit
def _move_back(target_ptr, place, request, is_there, accepted_ptr, rows_ptr, counts_ptr):
    """Subtract from elements of an array the rejected tokens of their requests."""
    row = tl.load(rows_ptr + request, mask=is_there, other=-1)
    follows = row >= 0
    count = tl.load(counts_ptr + request, mask=follows, other=0)
    accepted = tl.load(accepted_ptr + row, mask=follows, other=0)
    rejected = count - tl.minimum(tl.maximum(accepted, 0), count)
    value = tl.load(target_ptr + place, mask=follows, other=0)
    tl.store(target_ptr + place, value - rejected, mask=follows)


@triton.jit(do_not_specialize=["batch", "num_tokens"], do_not_specialize_on_alignment=POINTERS)
def _accept_kernel(
    accepted_ptr, rows_ptr, counts_ptr, before_ptr, after_ptr, positions_ptr, request_ids_ptr,
    batch, num_tokens, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = place < batch
    _move_back(before_ptr, place, place, is_row, accepted_ptr, rows_ptr, counts_ptr)
    _move_back(after_ptr, place, place, is_row, accepted_ptr, rows_ptr, counts_ptr)
    is_token = place < num_tokens
    request = tl.load(request_ids_ptr + place, mask=is_token, other=0)
    _move_back(positions_ptr, place, request, is_token, accepted_ptr, rows_ptr, counts_ptr)


def apply_accepted(step_before: Acceptance, tokens: TokenMap) -> None:
    """Move a step back by the rejected tokens of the step before.

    Other kernels read the plan before they wait, so a copy must lie between them and this one.
    It is one of two arrays that nothing reads any more.
    """
    batch, num_tokens = len(step_before.rows), len(tokens.positions)
    _accept_kernel[(triton.cdiv(max(batch, num_tokens, 1), BLOCK),)](
        accepted_ptr=step_before.accepted, rows_ptr=step_before.rows,
        counts_ptr=step_before.counts, before_ptr=tokens.positions_before,
        after_ptr=tokens.positions_after, positions_ptr=tokens.positions,
        request_ids_ptr=tokens.request_ids, batch=batch, num_tokens=num_tokens, BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    step_before.rows[:1].copy_(step_before.counts[:1])
