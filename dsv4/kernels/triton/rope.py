"""RoPE rows of a forward's tokens, in one launch for all layers: the reference's operations."""

import triton
import triton.language as tl
from torch import Tensor

from dsv4.formats import next_power_of_two
from dsv4.kernels.layer_memory import LayerMemory
from dsv4.kernels.triton.operands import HCA_RATIO
from dsv4.kernels.triton.primitives import INTERPRETED
from dsv4.rope import ROW_STEPS, sin_cos

ROWS = 4  # of a program; the interpreter has one program
_sin_cos = sin_cos if INTERPRETED else triton.jit(sin_cos)


@triton.jit(
    do_not_specialize=["num_tokens", "max_tokens"],
    do_not_specialize_on_alignment=["positions_ptr", "rows_ptr"],
)
def _rope_kernel(
    positions_ptr, frequencies_ptr, rows_ptr, num_tokens, max_tokens,
    CSA_STEP: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute some rows, in the order of tokens and then of `ROW_STEPS`."""
    nth = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, kind = nth // 4, nth % 4
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (token < num_tokens) & (pair < PAIRS)  # [ROWS, BLOCK]
    step = tl.where(kind == 2, CSA_STEP, tl.where(kind == 3, HCA_RATIO, 1))
    position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0) // step * step
    frequency = tl.load(frequencies_ptr + kind * PAIRS + pair, mask=mask, other=0.0)
    sin, cos = _sin_cos((position.to(tl.float32) * frequency).to(tl.float64))
    cos_row = (kind * 2).to(tl.int64) * max_tokens + token
    tl.store(rows_ptr + cos_row * PAIRS + pair, cos.to(tl.float32), mask=mask)
    tl.store(rows_ptr + (cos_row + max_tokens) * PAIRS + pair, sin.to(tl.float32), mask=mask)


def make_rope(memory: LayerMemory, positions: Tensor) -> None:
    """Compute cos and sin of a forward's tokens; see `kernels.reference.rope`.

    This launch lies between the plan's upload and every layer: it must not begin beside another, or
    let one begin, since kernels read the plan before they wait.
    """
    num_tokens, (_, _, max_tokens, pairs) = len(positions), memory.rope_rows.shape
    num_rows = len(ROW_STEPS) * num_tokens
    if num_rows:
        rows = next_power_of_two(num_rows) if INTERPRETED else ROWS
        _rope_kernel[(triton.cdiv(num_rows, rows),)](
            positions_ptr=positions, frequencies_ptr=memory.frequencies,
            rows_ptr=memory.rope_rows, num_tokens=num_tokens, max_tokens=max_tokens, PAIRS=pairs,
            CSA_STEP=memory.layout.row_steps[2], BLOCK=next_power_of_two(pairs), ROWS=rows,
            enable_fp_fusion=False,
        )  # fmt: skip
