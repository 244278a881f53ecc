"""Raw queries on Hopper: each head is normed and rotated on its way to the products.

The result has the bits of `kernels.reference.attention.prepare_query`. Products of BF16 numbers are
exact in fp32, so squares may be fused with their sums. Products of a rotation may not.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4.kernels.triton.hopper.decode import (
    CHANNEL_QUARTER,
    CHANNEL_QUARTERS,
    DIM,
    SIDE_QUARTERS,
    VECTOR,
)
from dsv4.kernels.triton.hopper.program import make_barrier
from dsv4.kernels.triton.hopper.softmax import load_turn, quarter_offsets
from dsv4.kernels.triton.primitives import fold_pairs, halvings, query_factor

NEIGHBOUR = gl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;")  # of a lane, by a bit of it
IN_PLACE = gl.constexpr(32)  # heads prepared at once in shared memory


class QuerySums(NamedTuple):
    """Sums of the squares of each side's half, `[4, HEADS]`, at 2 × parity of a work item + side.

    A side writes a place again two items later, when the other side has read it.
    """

    halves: gl.shared_memory_descriptor
    is_stored: gl.shared_memory_descriptor


@gluon.constexpr_function
def lanes_of(heads):
    """Lanes that have a channel quarter of a head: few, which add more by themselves, or all."""
    return 8 if heads >= 32 else 16


@gluon.constexpr_function
def quarter_layout(heads):
    """The layout of a channel quarter of so many heads in four warps."""
    lanes = lanes_of(heads)
    return gl.BlockedLayout([1, 128 // lanes], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def make_query_sums(HEADS: gl.constexpr):
    """Allocate the sums of both sides and their barrier."""
    halves = gl.allocate_shared_memory(gl.float32, (4, HEADS), VECTOR)
    return QuerySums(halves, make_barrier(2))


@gluon.jit
def sum_squares(values):
    """Sum the squares of a channel quarter, `[HEADS, CHANNEL_QUARTER]` BF16: `[HEADS]`."""
    LANES: gl.constexpr = lanes_of(values.shape[0])
    LAYOUT: gl.constexpr = quarter_layout(values.shape[0])
    wide = values.to(gl.float32)
    sums = fold_pairs(wide * wide, halvings(CHANNEL_QUARTER // LANES))  # [HEADS, LANES]
    for step in gl.static_range(halvings(LANES)):
        bit = gl.full_like(sums, 1 << step, dtype=gl.int32)
        sums += gl.inline_asm_elementwise(
            NEIGHBOUR, "=f,f,r", [sums, bit], dtype=gl.float32, is_pure=False, pack=1
        )
    return gl.convert_layout(gl.max(sums, axis=1), gl.SliceLayout(1, LAYOUT))  # they are equal


@gluon.jit
def split_pairs(values):
    """Split the last channel quarter into even and odd channels, `[HEADS, CHANNEL_QUARTER / 2]`."""
    return gl.split(gl.reshape(values, (values.shape[0], CHANNEL_QUARTER // 2, 2)))


@gluon.jit
def multiply_apart(x, y):
    """x × y, which no compiler fuses with a sum."""
    x, y = gl.broadcast(x, y)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def rotate(values, turn):
    """Rotate the pairs of the last channel quarter by their cos and sin."""
    even, odd = split_pairs(values)
    cos, sin = turn
    new_even = multiply_apart(even, cos) - multiply_apart(odd, sin)
    new_odd = multiply_apart(odd, cos) + multiply_apart(even, sin)
    rotated = gl.reshape(gl.join(new_even, new_odd), values.shape)
    return gl.convert_layout(rotated, quarter_layout(values.shape[0]))


@gluon.jit
def norm_quarter(values, factor, turn, QUARTER: gl.constexpr):
    """Norm a channel quarter by a factor a head, and rotate the last one."""
    normed = values.to(gl.float32) * factor[:, None]
    if QUARTER == CHANNEL_QUARTERS - 1:
        normed = rotate(normed, turn)
    return normed.to(gl.bfloat16)


@gluon.jit
def load_raw_query(query, query_ptr, sums, rope, out_loc, nth, NUM_HEADS: gl.constexpr,
                   QUERY_EPS: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Prepare a side's half of a raw query's channels in shared memory, for the nth work item."""
    HEADS: gl.constexpr = query[0].shape[1]
    LAYOUT: gl.constexpr = quarter_layout(HEADS)
    HEAD: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    query_ptr += out_loc.row * DIM
    is_head = out_loc.first_head + gl.arange(0, HEADS, layout=HEAD) < NUM_HEADS
    loaded = gl.tuple(())
    for quarter in gl.static_range(SIDE * SIDE_QUARTERS, (SIDE + 1) * SIDE_QUARTERS):
        at = quarter_offsets(quarter, HEADS, LAYOUT)  # [HEADS, CHANNEL_QUARTER]
        mask = is_head[:, None] & (at >= 0)
        loaded = loaded + (gl.load(query_ptr + at, mask=mask, other=0.0),)
    turn = 0
    if SIDE == 1:
        turn = load_turn(rope[0], rope[1], out_loc.token_idx, split_pairs(loaded[1])[0])
    parity = nth % 2
    half = sum_squares(loaded[0]) + sum_squares(loaded[1])
    sums.halves.index(2 * parity + SIDE).store(half)
    gl.thread_barrier()
    mbarrier.arrive(sums.is_stored, count=1)
    mbarrier.wait(sums.is_stored, parity)
    squares = sums.halves.index(2 * parity).load(HEAD)
    squares += sums.halves.index(2 * parity + 1).load(HEAD)
    factor = query_factor(squares, QUERY_EPS, DIM)
    for quarter in gl.static_range(SIDE * SIDE_QUARTERS, (SIDE + 1) * SIDE_QUARTERS):
        values = loaded[quarter - SIDE * SIDE_QUARTERS]
        query[quarter].index(0).store(norm_quarter(values, factor, turn, quarter))


@gluon.jit
def quarter_view(query, first_head: gl.constexpr, quarter: gl.constexpr, HEADS: gl.constexpr):
    """A channel quarter, `[HEADS, CHANNEL_QUARTER]`, of a query in two halves of channels."""
    heads = query[quarter // 2].index(0).slice(first_head, HEADS, dim=0)
    return heads.slice(quarter % 2 * CHANNEL_QUARTER, CHANNEL_QUARTER, dim=1)


@gluon.jit
def prepare_in_place(query, turn, QUERY_EPS: gl.constexpr):
    """Prepare a raw query in shared memory: two halves of channels, `[1, HEADS, 256]` each."""
    HEADS: gl.constexpr = IN_PLACE
    LAYOUT: gl.constexpr = quarter_layout(HEADS)
    for block in gl.static_range(query[0].shape[1] // HEADS):
        squares = gl.tuple(())
        for quarter in gl.static_range(CHANNEL_QUARTERS):
            values = quarter_view(query, block * HEADS, quarter, HEADS).load(LAYOUT)
            squares = squares + (sum_squares(values),)
        total = (squares[0] + squares[1]) + (squares[2] + squares[3])
        factor = query_factor(total, QUERY_EPS, DIM)
        gl.thread_barrier()  # else all quarters would stay in registers
        for quarter in gl.static_range(CHANNEL_QUARTERS):
            view = quarter_view(query, block * HEADS, quarter, HEADS)
            view.store(norm_quarter(view.load(LAYOUT), factor, turn, quarter))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def load_query_turn(rope, token_idx):
    """Load the cos and sin that `prepare_in_place` rotates by."""
    HEADS: gl.constexpr = IN_PLACE
    zeros = gl.zeros((HEADS, CHANNEL_QUARTER), gl.float32, layout=quarter_layout(HEADS))
    return load_turn(rope[0], rope[1], token_idx, split_pairs(zeros)[0])
