"""What both ways to multiply share: the query, the softmax's arithmetic, rows of the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from dsv4.kernels.triton.hopper.decode import DIM, PART, ROPE, SIDE_PARTS

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Rows of a part as they lie in memory.
DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def load_query(query, query_ptr, where, NUM_HEADS: gl.constexpr, SIDE: gl.constexpr):
    """Start to copy a side's half of the channels of a work's heads."""
    HEADS: gl.constexpr = query[0].shape[1]
    _position, first_head, row, _part_row = where
    query_ptr += row * DIM
    is_head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, DENSE)) < NUM_HEADS
    for part in gl.static_range(SIDE * SIDE_PARTS, (SIDE + 1) * SIDE_PARTS):
        at = part_offsets(part, HEADS, DENSE)
        async_copy.async_copy_global_to_shared(
            query[part].index(0), query_ptr + at, mask=is_head[:, None] & (at >= 0)
        )
    async_copy.commit_group()


@gluon.jit
def wait_for_query():
    """Wait until a side's half of the query is there."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def finite_base(largest):
    """What logits are taken relative to: 0 where there is none yet."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def output_factor(sink, largest, total):
    """What accumulators are multiplied by: 1 / (sum + sink); 0 where no row was seen."""
    with_sink = total + gl.exp2(sink.to(gl.float32) * LOG2_E - finite_base(largest))
    return gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, with_sink))


@gluon.jit
def log_sum_exp(largest, total):
    """The log-sum-exp without the sink."""
    return (largest + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN_2


@gluon.jit
def rotate_back(values, cos_ptr, sin_ptr, position):
    """Rotate the trailing channels of `[heads, PART]` of the last part back at a position."""
    HEADS: gl.constexpr = values.shape[0]
    even, odd = gl.split(gl.reshape(values, (HEADS, PART // 2, 2)))
    pair = gl.arange(0, PART // 2, layout=gl.SliceLayout(0, even.type.layout)) - (PART - ROPE) // 2
    offset = position.to(gl.int64) * (ROPE // 2) + pair
    cos = gl.load(cos_ptr + offset, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(sin_ptr + offset, mask=pair >= 0, other=0.0)[None, :]
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.reshape(turned, (HEADS, PART))


@gluon.jit
def part_offsets(part: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of a part, `[HEADS, PART]`, in rows of DIM that lie one after the other."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    return head * DIM + part * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, LAYOUT))[None, :]
