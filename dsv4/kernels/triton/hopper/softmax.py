"""Steps that `few_heads` and `many_heads` share: the query, the softmax, the output's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from dsv4.kernels.triton.hopper.decode import CHANNEL_QUARTER, DIM, ROPE, SIDE_QUARTERS

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
# Rows of a channel quarter as they lie in memory.
DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def load_query(query, query_ptr, out_loc, NUM_HEADS: gl.constexpr, SIDE: gl.constexpr):
    """Start to copy a side's half of the query's channels to shared memory, for a work item."""
    HEADS: gl.constexpr = query[0].shape[1]
    query_ptr += out_loc.row * DIM
    is_head = out_loc.first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, DENSE)) < NUM_HEADS
    for quarter in gl.static_range(SIDE * SIDE_QUARTERS, (SIDE + 1) * SIDE_QUARTERS):
        at = quarter_offsets(quarter, HEADS, DENSE)  # [HEADS, CHANNEL_QUARTER]
        async_copy.async_copy_global_to_shared(
            query[quarter].index(0), query_ptr + at, mask=is_head[:, None] & (at >= 0)
        )
    async_copy.commit_group()


@gluon.jit
def wait_for_query():
    """Wait until a side's half of the query is in shared memory."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def finite_base(largest):
    """The largest logit, which others are relative to; 0 where there is none yet."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def output_factor(sink, largest, total):
    """The factor of accumulators, 1 / (sum + sink), `[HEADS]`; 0 where no row was seen."""
    with_sink = total + gl.exp2(sink.to(gl.float32) * LOG2_E - finite_base(largest))
    return gl.where(total == 0.0, 0.0, 1.0 / gl.where(total == 0.0, 1.0, with_sink))


@gluon.jit
def log_sum_exp(largest, total):
    """The log-sum-exp without the sink."""
    return (largest + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN_2


@gluon.jit
def load_turn(cos_ptr, sin_ptr, token_idx, pairs):
    """Load cos, sin `[1, PAIRS]` of pairs `[HEADS, PAIRS]`; 1, 0 where one isn't rotated."""
    PAIRS: gl.constexpr = pairs.shape[1]
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, pairs.type.layout)) - (PAIRS - ROPE // 2)
    offset = token_idx.to(gl.int64) * (ROPE // 2) + pair
    cos = gl.load(cos_ptr + offset, mask=pair >= 0, other=1.0)
    return cos[None, :], gl.load(sin_ptr + offset, mask=pair >= 0, other=0.0)[None, :]


@gluon.jit
def rotate_back(values, cos_ptr, sin_ptr, token_idx):
    """Rotate the trailing channels of a row's last ones, `[HEADS, WIDTH]`, back."""
    HEADS: gl.constexpr = values.shape[0]
    PAIRS: gl.constexpr = values.shape[1] // 2
    even, odd = gl.split(gl.reshape(values, (HEADS, PAIRS, 2)))  # [HEADS, PAIRS]
    cos, sin = load_turn(cos_ptr, sin_ptr, token_idx, even)
    turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.reshape(turned, (HEADS, 2 * PAIRS))


@gluon.jit
def quarter_offsets(quarter: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of a channel quarter, `[HEADS, CHANNEL_QUARTER]`, in contiguous rows of DIM."""
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    first = head * DIM + quarter * CHANNEL_QUARTER  # [HEADS, 1]
    return first + gl.arange(0, CHANNEL_QUARTER, layout=gl.SliceLayout(0, LAYOUT))[None, :]
