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
from dsv4.kernels.triton.hopper.softmax import DENSE, load_turn, quarter_offsets
from dsv4.kernels.triton.primitives import fold_pairs, query_factor

HEAD = gl.constexpr(gl.SliceLayout(1, DENSE.value))
NEIGHBOUR = gl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;")  # of a lane, by a bit of it
IN_PLACE = gl.constexpr(8)  # heads prepared at once in shared memory


class QuerySums(NamedTuple):
    """Sums of the squares of each side's half, `[4, HEADS]`, at 2 × parity of a work item + side.

    A side writes a place again two items later, when the other side has read it.
    """

    halves: gl.shared_memory_descriptor
    is_stored: gl.shared_memory_descriptor


@gluon.jit
def make_query_sums(HEADS: gl.constexpr):
    """Allocate the sums of both sides and their barrier."""
    halves = gl.allocate_shared_memory(gl.float32, (4, HEADS), VECTOR)
    return QuerySums(halves, make_barrier(2))


@gluon.jit
def sum_squares(values):
    """Sum the squares of a channel quarter, `[HEADS, CHANNEL_QUARTER]` BF16: `[HEADS]`."""
    wide = values.to(gl.float32)
    sums = fold_pairs(wide * wide, 3)  # [HEADS, 16], a lane each
    for step in gl.static_range(4):
        bit = gl.full_like(sums, 1 << step, dtype=gl.int32)
        sums += gl.inline_asm_elementwise(
            NEIGHBOUR, "=f,f,r", [sums, bit], dtype=gl.float32, is_pure=False, pack=1
        )
    return gl.convert_layout(gl.max(sums, axis=1), HEAD)  # they are equal


@gluon.jit
def multiply_apart(x, y):
    """x × y, which no compiler fuses with a sum."""
    x, y = gl.broadcast(x, y)
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def rotate(values, cos_ptr, sin_ptr, position):
    """Rotate the trailing channels of a row's last ones, `[HEADS, WIDTH]`."""
    HEADS: gl.constexpr = values.shape[0]
    PAIRS: gl.constexpr = values.shape[1] // 2
    even, odd = gl.split(gl.reshape(values, (HEADS, PAIRS, 2)))  # [HEADS, PAIRS]
    cos, sin = load_turn(cos_ptr, sin_ptr, position, even)
    new_even = multiply_apart(even, cos) - multiply_apart(odd, sin)
    new_odd = multiply_apart(odd, cos) + multiply_apart(even, sin)
    return gl.reshape(gl.join(new_even, new_odd), (HEADS, 2 * PAIRS))


@gluon.jit
def norm_quarter(values, factor, rope, position, QUARTER: gl.constexpr):
    """Norm a channel quarter by a factor a head, and rotate its last channels."""
    normed = values.to(gl.float32) * factor[:, None]
    if QUARTER == CHANNEL_QUARTERS - 1:
        normed = gl.convert_layout(rotate(normed, rope[0], rope[1], position), DENSE)
    return normed.to(gl.bfloat16)


@gluon.jit
def load_raw_query(query, query_ptr, sums, rope, out_loc, nth, NUM_HEADS: gl.constexpr,
                   QUERY_EPS: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Prepare a side's half of a raw query's channels in shared memory, for the nth work item."""
    HEADS: gl.constexpr = query[0].shape[1]
    query_ptr += out_loc.row * DIM
    is_head = out_loc.first_head + gl.arange(0, HEADS, layout=HEAD) < NUM_HEADS
    loaded = gl.tuple(())
    for quarter in gl.static_range(SIDE * SIDE_QUARTERS, (SIDE + 1) * SIDE_QUARTERS):
        at = quarter_offsets(quarter, HEADS, DENSE)  # [HEADS, CHANNEL_QUARTER]
        mask = is_head[:, None] & (at >= 0)
        loaded = loaded + (gl.load(query_ptr + at, mask=mask, other=0.0),)
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
        values = norm_quarter(values, factor, rope, out_loc.position, quarter)
        query[quarter].index(0).store(values)


@gluon.jit
def prepare_in_place(query, rope, position, QUERY_EPS: gl.constexpr):
    """Prepare a raw query in shared memory: two halves of channels, `[1, HEADS, 256]` each."""
    for block in gl.static_range(query[0].shape[1] // IN_PLACE):
        views, loaded, squares = gl.tuple(()), gl.tuple(()), gl.tuple(())
        for quarter in gl.static_range(CHANNEL_QUARTERS):
            heads = query[quarter // 2].index(0).slice(block * IN_PLACE, IN_PLACE, dim=0)
            view = heads.slice(quarter % 2 * CHANNEL_QUARTER, CHANNEL_QUARTER, dim=1)
            values = view.load(DENSE)  # [IN_PLACE, CHANNEL_QUARTER]
            views, loaded = views + (view,), loaded + (values,)
            squares = squares + (sum_squares(values),)
        total = (squares[0] + squares[1]) + (squares[2] + squares[3])
        factor = query_factor(total, QUERY_EPS, DIM)
        for quarter in gl.static_range(CHANNEL_QUARTERS):
            views[quarter].store(norm_quarter(loaded[quarter], factor, rope, position, quarter))
    fence_async_shared()
    gl.thread_barrier()
