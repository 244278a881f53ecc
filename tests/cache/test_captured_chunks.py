"""Captured mixed steps: the eager bytes and outputs for decode rows beside chunks, in any mixture.

Without a GPU a graph is stood in for by one that runs the step again over the captured buffers.
"""

import random
import time

import pytest
import torch

from dsv4 import (
    CacheConfig,
    CapturedForward,
    CheckpointPolicy,
    GraphPool,
    KVCacheManager,
    prepare_forward,
)
from dsv4.model.attention import forward_layer
from dsv4.testing import model_projections, model_weights, move_to, poison, take_rows
from tests.cache.test_captured_forward import capture, eager_graph, grown, leaves, make_manager
from tests.v41 import tiny_v41

__all__ = ["eager_graph"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = CacheConfig.tiny()
VERIFY = CacheConfig.tiny(drafts_per_step=3)
FEW = CacheConfig.tiny(drafts_per_step=3, compress_ratios=(4, 128))
V41 = tiny_v41(block_tokens=256, drafts_per_step=3)
FEW_V41 = tiny_v41(
    block_tokens=256, drafts_per_step=3, compress_ratios=(2, 1, 1), kv_source_layer_ids=(0, 1),
    index_source_layer_ids=(0, 1, 2), candidate_source_layer_id=1,
)  # fmt: skip
FLASH = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), index_topk=64)
CHUNKS = (2, 5, 61, 127, 128, 129, 200)


class Twins:
    """Two managers that see the same plans: one replays captures, the other runs each layer.

    Args:
        sizes: Rows, tokens and chunks of each capture, the largest first.
    """

    def __init__(self, config, sizes, *, device="cpu", dtype=torch.float32, pool=None, **choices):
        batch, num_tokens, _ = sizes[0]
        choices = {"backend": "reference", "batch_invariant": True, **choices}
        choices |= {"max_requests": batch + 1, "num_blocks": 6 * batch, "device": device}
        choices |= {"max_request_tokens": 1024, "max_forward_tokens": num_tokens + 128}
        self.captured, self.eager = (KVCacheManager(config, **choices) for _ in range(2))
        self.managers = (self.captured, self.eager)
        for manager in self.managers:
            poison(manager)
            manager.device_memory.checkpoints.fill_(0xFF)
        self.weights, self.inputs = (
            [move_to(device, layer) for layer in layers]
            for layers in (
                model_weights(config, seed=0),
                model_projections(config, num_tokens, seed=2, dtype=dtype),
            )
        )
        self.generator = torch.Generator(device).manual_seed(3)
        self.forwards = [self.capture(*size, pool) for size in sizes]
        self.eager.device_memory.plan_buffers.reserve(num_tokens)
        self.num_replays = [0] * len(sizes)

    def capture(self, batch, num_tokens, max_chunks, pool):
        inputs = [take_rows(layer, slice(0, num_tokens)) for layer in self.inputs]
        return CapturedForward(
            self.captured, lambda handles: self.run(handles, inputs),
            batch=batch, num_tokens=num_tokens, max_chunks=max_chunks, pool=pool,
        )  # fmt: skip

    def run(self, handles, inputs):
        layers, chosen = zip(handles, inputs, self.weights, strict=True), {}
        return [forward_layer(*layer, chosen) for layer in layers]

    def step(self, rows):
        """Run one forward of random inputs by both; return their outputs.

        All rows of the inputs that the plan leaves over are NaN.
        """
        rows = [[row[i] for row in rows] for i in range(3)]
        num_tokens = sum(rows[2]) - sum(rows[1])
        for tensor in leaves(self.inputs):
            tensor.normal_(generator=self.generator)
            tensor[num_tokens:] = torch.nan
        used = [take_rows(layer, slice(0, num_tokens)) for layer in self.inputs]
        plan = prepare_forward(self.eager, *rows)
        handles = [self.eager.acquire(idx, plan) for idx in range(len(self.eager.schedule))]
        theirs = self.run(handles, used)
        plan = prepare_forward(self.captured, *rows)
        nth = max(i for i, forward in enumerate(self.forwards) if forward.fits(plan))
        mine = self.forwards[nth].replay(plan)
        self.num_replays[nth] += 1
        assert plan.is_complete
        return leaves(mine), leaves(theirs), num_tokens

    def compare_bytes(self):
        mine, theirs = self.captured.tensors(), self.eager.tensors()
        for name in mine.keys() - {"pooled", "index_scratch", "partials", "workspace", "rope_rows"}:
            pair = [side[name].reshape(-1).view(torch.uint8) for side in (mine, theirs)]
            assert torch.equal(*pair), f"{name} differs"
        self.captured.check_integrity()

    def close(self, slot):
        self.captured.free_request(slot)
        self.eager.free_request(slot)

    def open(self):
        slot = self.captured.open_request()
        assert self.eager.open_request() == slot
        return slot


def compare_outputs(mine, theirs, num_tokens):
    """Compare bits on a GPU; on a CPU they may depend on where a tensor begins."""
    for got, want in zip(mine, theirs, strict=True):
        assert not got[:num_tokens].isnan().any()
        if got.is_cuda:
            assert torch.equal(got[:num_tokens], want)
        else:
            torch.testing.assert_close(got[:num_tokens], want, rtol=1e-4, atol=1e-4)
        rest = got[num_tokens:]
        assert ((rest == 0) | (rest == -torch.inf)).all(), "padding has seen a row"


def choose_rows(twins, choose, lengths, longest):
    """Draw decode rows, steps, chunks, rows without tokens and padding rows."""
    batch, left, max_chunks = twins.forwards[0].batch, twins.forwards[0].num_tokens, 0
    limit, most = twins.forwards[0].max_chunks, twins.captured.capacity.max_step_tokens
    rows = []
    for slot in choose.sample(sorted(lengths), choose.randint(1, min(batch, len(lengths)))):
        count = choose.choice((0, 1, 1, 1, most, *choose.sample(CHUNKS, 3)))
        count = min(count, left, longest - lengths[slot])
        if count > most and max_chunks == limit:
            count = 1
        max_chunks += count > most
        left -= count
        rows.append((slot, lengths[slot], lengths[slot] + count))
    if len(rows) < batch and left and choose.random() < 0.2:
        rows.insert(choose.randint(0, len(rows)), (-1, 0, 1))
    return rows


def drive(twins, *, num_steps, seed, check_every=1, compare=compare_outputs, longest=900):
    """Requests open, close and grow at random; return the numbers of chunks that steps have had."""
    choose, lengths, chunks = random.Random(seed), {}, set()
    most = twins.captured.capacity.max_step_tokens
    for step in range(num_steps):
        for slot in [s for s in lengths if lengths[s] >= longest or choose.random() < 0.03]:
            twins.close(slot)
            del lengths[slot]
        while twins.captured.num_free_slots and (not lengths or choose.random() < 0.4):
            lengths[twins.open()] = 0
        rows = choose_rows(twins, choose, lengths, longest)
        compare(*twins.step(rows))
        lengths.update((slot, after) for slot, _, after in rows if slot >= 0)
        chunks.add(sum(after - before > most for slot, before, after in rows if slot >= 0))
        if step % check_every == check_every - 1:
            twins.compare_bytes()
    twins.compare_bytes()
    assert all(twins.num_replays), twins.num_replays
    return chunks


@pytest.mark.parametrize("config", [TINY, VERIFY, V41], ids=["decode", "verify", "v41"])
def test_mixed_steps_are_the_eager_ones(eager_graph, config):
    twins = Twins(config, [(5, 300, 3), (5, 140, 2), (3, 40, 1)])
    assert drive(twins, num_steps=25, seed=0) == {0, 1, 2, 3}


@pytest.mark.parametrize("config", [FEW, FEW_V41], ids=["v4", "v41"])
def test_triton_s_kernels_skip_the_padding(eager_graph, config):
    twins = Twins(config, [(4, 24, 2)], device=DEVICE, backend="triton")
    slots = [twins.open() for _ in range(3)]
    for manager in twins.managers:
        prepare_forward(manager, slots, [0] * 3, [3, 120, 0]).complete()
        manager.state.storage.zero_()
        manager.paged.storage.zero_()
    compare_outputs(*twins.step([(slots[0], 3, 4), (slots[1], 120, 129), (slots[2], 0, 6)]))
    twins.compare_bytes()


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_rows_without_a_token(eager_graph, num_tokens):
    """Also where tokens are as many as the rows that a graph sees, with the one of padding."""
    config = CacheConfig.tiny(compress_ratios=(4,))
    twins = Twins(config, [(4, num_tokens, 0)], device=DEVICE, backend="triton")
    slots = [twins.open() for _ in range(3)]
    for manager in twins.managers:
        prepare_forward(manager, slots, [0] * 3, [3, 9, 5]).complete()
        manager.state.storage.zero_()
        manager.paged.storage.zero_()
    compare_outputs(*twins.step([(slots[0], 3, 4), (slots[1], 9, 9), (slots[2], 5, 6)]))
    twins.compare_bytes()


def test_what_a_mixed_step_sees(eager_graph):
    manager = make_manager(VERIFY, max_requests=8, max_request_tokens=1000)
    forward, step = capture(manager, batch=3, max_chunks=2, num_tokens=90)
    (plan,) = {handle.plan for handle in step.calls[0]}
    assert (forward.num_rows, forward.num_tokens, forward.max_chunks) == (4, 90, 2)
    assert plan.tokens.chunk_ids.tolist() == [0, 0] and plan.has_workspace
    assert plan.tokens.max_step == 90 and plan.tokens.workspace_starts.tolist() == [-1] * 4
    slots = [manager.open_request() for _ in range(3)]
    plan = prepare_forward(manager, slots, [0] * 3, [40, 1, 5])
    assert plan.tokens.chunk_ids.tolist() == [0, 2]
    plan.complete()
    prepare_forward(manager, slots, [40, 1, 5], [41, 40, 6]).complete()
    buffers = manager.device_memory.plan_buffers.host
    assert buffers["chunk_ids"].tolist() == [1] + [3] * 7, "padding belongs to the first row of it"
    prepare_forward(manager, slots[:1], [41], [42]).complete()
    assert buffers["chunk_ids"].tolist() == [1] * 8 and buffers["request_slots"][1] == -1


def test_chunks_are_as_many_as_tokens_allow(eager_graph):
    manager = make_manager(VERIFY, max_forward_tokens=19)
    forward, _ = capture(manager, batch=5, max_chunks=5)
    assert (forward.num_tokens, forward.max_chunks) == (19, 3)
    assert manager.capacity.workspace_rows == 19 + 3 * (VERIFY.sliding_window - 1)


@pytest.mark.parametrize(
    "choices, match",
    [
        ({"max_chunks": 4}, r"Invalid max_chunks: .* from 0 to 3 \(batch\), got 4"),
        ({"max_chunks": 1, "num_tokens": 4}, "Invalid num_tokens: .* from 5 to 512 .*, got 4"),
        ({"num_tokens": 513}, r"Invalid num_tokens: .* \(max_forward_tokens\), got 513"),
    ],
)
def test_sizes_that_are_refused(eager_graph, choices, match):
    with pytest.raises(ValueError, match=match):
        capture(make_manager(VERIFY), batch=3, **choices)


def test_forwards_that_hold_no_chunk(eager_graph):
    manager = make_manager(VERIFY, max_forward_tokens=4)
    with pytest.raises(ValueError, match=r"Invalid max_chunks: expected 0, .* at least 5 tokens"):
        capture(manager, max_chunks=1)


REFUSED_PLANS = {
    "chunks": ([(0, 5, 25), (1, 9, 19), (2, 3, 4)], "at most 1 chunks, as captured, got 2"),
    "tokens": ([(0, 5, 105), (1, 9, 10)], "at most 100 tokens, as captured, got 101"),
    "length": ([(4, 400, 420)], "at most 410 tokens in a request, as captured, got 420"),
}


@pytest.mark.parametrize("rows, match", REFUSED_PLANS.values(), ids=REFUSED_PLANS)
def test_plans_that_are_refused_can_be_run_eagerly(eager_graph, rows, match):
    manager = grown(VERIFY, 5, 9, 3, 8, 400)
    forward, step = capture(manager, max_chunks=1, num_tokens=100, max_length=410)
    plan = prepare_forward(manager, *([row[i] for row in rows] for i in range(3)))
    assert not forward.fits(plan)
    with pytest.raises(ValueError, match=f"Invalid plan: expected {match}"):
        forward.replay(plan)
    assert not plan.has_started
    inputs = model_projections(VERIFY, plan.num_tokens, seed=1)
    for idx, (layer, weight) in enumerate(zip(inputs, step.weights, strict=True)):
        manager.acquire(idx, plan).write(layer, weight)
    assert plan.is_complete


def checkpoint_inside_chunks(config, size, steps, **choices):
    """Prefill two prompts to lengths, step by step; return what is kept and both caches' hits."""
    policy = CheckpointPolicy(every_blocks=1)
    twins = Twins(config, [size], num_checkpoints=9, checkpoint_policy=policy, **choices)
    prompts = [list(range(start, start + steps[-1][0] + 1)) for start in (1, 1001)]
    pairs = [[m.resume_request(each).slot for each in prompts] for m in twins.managers]
    assert pairs[0] == pairs[1]
    before = (0, 0)
    for after in steps:
        compare_outputs(*twins.step([*zip(pairs[0], before, after, strict=True)]))
        twins.compare_bytes()
        before = after
    num_kept = twins.captured.stats().num_prefix_checkpoints
    for slot in pairs[0]:
        twins.close(slot)
    return num_kept, *([m.resume_request(each)[1] for each in prompts] for m in twins.managers)


@pytest.mark.parametrize("config", [TINY, VERIFY, V41], ids=["decode", "verify", "v41"])
def test_checkpoints_inside_chunks(eager_graph, config):
    """Boundaries of two chunks, of one beside a step, of none; then prompts are hit there."""
    steps = [(140, 20), (259, 21), (263, 150), (264, 390), (399, 391)]
    num_kept, mine, theirs = checkpoint_inside_chunks(config, (4, 300, 2), steps)
    block = config.block_tokens
    assert num_kept == 399 // block + 391 // block
    assert mine == theirs == [399 // block * block, 391 // block * block]


def test_triton_s_checkpoints_inside_chunks(eager_graph):
    """Also where a captured step has more room for boundaries than chunks have."""
    config = CacheConfig.tiny(compress_ratios=(4,), block_tokens=8, sliding_window=8)
    steps = [(11, 1), (12, 20), (20, 21)]
    num_kept, mine, theirs = checkpoint_inside_chunks(config, (3, 30, 2), steps, backend="triton")
    assert (num_kept, mine, theirs) == (4, [16, 16], [16, 16])


def test_a_step_without_handles_checkpoints_nothing(eager_graph):
    """It declares its plan complete; who resumes the prompt must not find a checkpoint."""
    manager, ids = make_manager(TINY, num_checkpoints=2), list(range(1, 290))
    forward = CapturedForward(
        manager, lambda handles: handles[0].plan.complete(), batch=3, max_chunks=1, num_tokens=300
    )
    hit = manager.resume_request(ids)
    plan = prepare_forward(manager, [hit.slot], [0], [289])
    assert len(plan.boundaries.points) == 1
    forward.replay(plan)
    assert plan.is_complete and not plan.is_written
    manager.free_request(hit.slot)
    assert manager.resume_request(ids).num_tokens == 0
    assert manager.stats().num_prefix_checkpoints == 0


def test_checkpoints_of_a_replay_that_fails_are_given_back(eager_graph, monkeypatch):
    manager = make_manager(TINY, num_checkpoints=2)
    forward, _ = capture(manager, max_chunks=1, num_tokens=300)
    hit = manager.resume_request(list(range(1, 290)))
    plan = prepare_forward(manager, [hit.slot], [0], [289])
    assert len(plan.boundaries.points) == 1 and forward.fits(plan)
    monkeypatch.setattr(forward._graph, "replay", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward.replay(plan)
    assert manager._books.checkpoints.num_free == 2
    manager.check_integrity()


def test_a_chunk_that_fails_is_undone(eager_graph, monkeypatch):
    manager = grown(TINY, 40)
    forward, _ = capture(manager, max_chunks=1, num_tokens=200)
    plan = prepare_forward(manager, [0], [40], [150])
    monkeypatch.setattr(forward._graph, "replay", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward.replay(plan)
    assert plan.is_cancelled and manager.lengths[0] == 40


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TINY, VERIFY, V41], ids=["decode", "verify", "v41"])
def test_replays_of_several_sizes_in_one_pool(config):
    pool = GraphPool("cuda")
    assert pool.num_bytes == 0
    sizes = [(7, 600, 4), (7, 300, 2), (4, 150, 1)]
    twins = Twins(config, sizes, device="cuda", backend="triton", pool=pool)
    chunks = drive(twins, num_steps=300, seed=1, check_every=25)
    assert chunks >= {0, 1, 2, 3}
    assert pool.num_bytes > 0


@pytest.mark.gpu
def test_graphs_of_a_pool_share_what_they_do_not_return():
    twins, size = Twins(FEW, [(2, 40, 1)], device="cuda", backend="triton"), 64 << 20

    def step(handles):
        output = twins.run(handles, twins.inputs)[0].output.sum()
        return output + torch.zeros(size // 4, device="cuda").sum()

    pools = [GraphPool("cuda"), GraphPool("cuda")]
    kept = [
        CapturedForward(twins.captured, step, batch=batch, max_chunks=1, num_tokens=40, pool=pool)
        for pool, batch in ((pools[0], 2), (pools[0], 1), (pools[1], 2))
    ]
    assert size <= pools[1].num_bytes <= pools[0].num_bytes < 2 * size, len(kept)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "plain"])
def test_v4_flash_s_kernels_in_mixed_steps(batch_invariant):
    """Plain attention splits rows by the captured sizes: outputs equal those within rounding."""

    def close(mine, theirs, num_tokens):
        for got, want in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got[:num_tokens], want, rtol=2e-2, atol=2e-2)

    twins = Twins(
        FLASH, [(7, 500, 1), (7, 200, 3)], device="cuda", dtype=torch.bfloat16, backend="triton",
        pool=GraphPool("cuda"), batch_invariant=batch_invariant,
    )  # fmt: skip
    compare = compare_outputs if batch_invariant else close
    drive(twins, num_steps=60, seed=2, check_every=10, compare=compare)


@pytest.mark.gpu
def test_planning_and_replaying_never_synchronise():
    twins = Twins(TINY, [(7, 600, 4)], device="cuda", backend="triton")
    manager, forward, times = twins.captured, twins.forwards[0], []
    slots = [manager.open_request() for _ in range(7)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            before = manager.lengths[slots]
            counts = [1 + 40 * ((step + idx) % 7 < 3) for idx in range(7)]
            start = time.perf_counter()
            forward.replay(prepare_forward(manager, slots, before, before + counts))
            times.append(time.perf_counter() - start)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print(f"host time of a mixed step, 4 layers: {sorted(times)[10] * 1e6:.0f} us")
    manager.check_integrity()
