"""A captured step: the eager bytes for every plan that fits, and refusals that change nothing.

Without a GPU a graph is stood in for by one that runs the step again over the captured buffers.
"""

import random

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, CapturedForward, KVCacheManager, prepare_forward
from dsv4.cache.graphs import captured_forward
from dsv4.cache.graphs.captured_layers import CapturedLayers
from dsv4.model.attention import forward_layer
from dsv4.testing import model_projections, model_weights, move_to, poison, take_rows
from tests.v41 import tiny_v41

DECODE = CacheConfig.tiny()
VERIFY = CacheConfig.tiny(drafts_per_step=3)
V41 = tiny_v41(block_tokens=256)
VERIFY_V41 = tiny_v41(block_tokens=256, drafts_per_step=3)
PROMPTS = (0, 1, 3, 124, 126, 127, 130, 252, 255, 258, 380, 384)


class EagerGraph:
    """Runs again what a CUDA graph would repeat, into the same outputs."""

    def __init__(self, device, pool=None):
        self.run = self.outputs = None

    def capture(self, run):
        self.run = run
        run()
        self.outputs = run()
        return self.outputs

    def replay(self):
        for kept, new in zip(leaves(self.outputs), leaves(self.run()), strict=True):
            kept.copy_(new)


@pytest.fixture
def eager_graph(monkeypatch):
    monkeypatch.setattr(captured_forward, "CudaGraph", EagerGraph)


def make_manager(config, **sizes):
    defaults = {"max_requests": 5, "num_blocks": 16, "max_forward_tokens": 512}
    return KVCacheManager(config, **{**defaults, **sizes})


def write_layers(handles, inputs, weights):
    for handle, layer, weight in zip(handles, inputs, weights, strict=True):
        handle.write(layer, weight)


def write_eagerly(manager, plan, inputs, weights):
    handles = [manager.acquire(idx, plan) for idx in range(len(manager.schedule))]
    write_layers(handles, inputs, weights)


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [leaf for part in value for leaf in leaves(part)]


class Twins:
    """Two managers that see the same plans: one replays a capture, the other runs each layer."""

    def __init__(self, config, *, batch, tokens_per_request=1, device="cpu", backend="reference"):
        sizes = {"max_requests": batch + 1, "num_blocks": 3 * (batch + 1)}
        self.captured, self.eager = (
            make_manager(config, device=device, backend=backend, **sizes) for _ in range(2)
        )
        for manager in (self.captured, self.eager):
            poison(manager)
        num_tokens = batch * tokens_per_request
        self.weights, self.prompt, self.inputs = (
            [move_to(device, layer) for layer in layers]
            for layers in (
                model_weights(config, seed=0),
                model_projections(config, max(PROMPTS), seed=1),
                model_projections(config, num_tokens, seed=2),
            )
        )
        self.generator = torch.Generator(device).manual_seed(3)
        self.forward = CapturedForward(
            self.captured,
            lambda handles: write_layers(handles, self.inputs, self.weights),
            batch=batch,
            tokens_per_request=tokens_per_request,
        )
        self.eager.device_memory.plan_buffers.reserve(num_tokens)

    def open(self, length):
        """A request of the prompt's first tokens, prefilled layer by layer."""
        slot = self.captured.open_request()
        assert self.eager.open_request() == slot
        if length:
            prompt = [take_rows(layer, slice(0, length)) for layer in self.prompt]
            for manager in (self.captured, self.eager):
                plan = prepare_forward(manager, [slot], [0], [length])
                write_eagerly(manager, plan, prompt, self.weights)
        return slot

    def close(self, slot):
        self.captured.free_request(slot)
        self.eager.free_request(slot)

    def step(self, slots, before, after):
        """One forward of random inputs; all rows that the plan leaves over are NaN."""
        num_tokens = sum(after) - sum(before)
        for tensor in leaves(self.inputs):
            tensor.normal_(generator=self.generator)
            tensor[num_tokens:] = torch.nan
        used = [take_rows(layer, slice(0, num_tokens)) for layer in self.inputs]
        write_eagerly(
            self.eager, prepare_forward(self.eager, slots, before, after), used, self.weights
        )
        plan = prepare_forward(self.captured, slots, before, after)
        self.forward.replay(plan)
        assert plan.is_complete

    def compare(self):
        mine, theirs = self.captured.tensors(), self.eager.tensors()
        for name in mine.keys() - {"pooled", "index_scratch", "partials", "rope_rows"}:
            pair = [side[name].reshape(-1).view(torch.uint8) for side in (mine, theirs)]
            assert torch.equal(*pair), f"{name} differs"
        self.captured.check_integrity()


def drive(twins, *, num_steps, seed, check_every, longest=410):
    """Requests open, close and grow at random; returns every length that a step has ended at."""
    choose, batch = random.Random(seed), twins.forward.batch
    most = twins.forward.tokens_per_request
    lengths, reached, batches = {}, set(), set()
    for step in range(num_steps):
        for slot in [s for s in lengths if lengths[s] >= longest or choose.random() < 0.01]:
            twins.close(slot)
            del lengths[slot]
        while twins.captured.num_free_slots and (not lengths or choose.random() < 0.2):
            prompt = choose.choice(PROMPTS)
            lengths[twins.open(prompt)] = prompt
        chosen = choose.sample(sorted(lengths), choose.randint(1, min(batch, len(lengths))))
        rows = [
            (s, lengths[s], lengths[s] + (1 if most == 1 else choose.randint(0, most)))
            for s in chosen
        ]
        if len(rows) < batch and choose.random() < 0.2:
            rows.insert(choose.randint(0, len(rows)), (-1, 0, 1))
        twins.step(*([row[i] for row in rows] for i in range(3)))
        lengths.update((slot, after) for slot, _, after in rows if slot >= 0)
        reached.update(after for slot, _, after in rows if slot >= 0)
        batches.add(len(rows))
        if step % check_every == check_every - 1:
            twins.compare()
    twins.compare()
    assert batches == set(range(1, batch + 1))
    return reached


@pytest.mark.parametrize(
    "config, most",
    [(DECODE, 1), (VERIFY, 1), (VERIFY, 4), (V41, 1), (VERIFY_V41, 4)],
)
def test_a_replay_stores_the_eager_bytes(eager_graph, config, most):
    twins = Twins(config, batch=4, tokens_per_request=most)
    reached = drive(twins, num_steps=200 if most == 1 else 80, seed=0, check_every=25)
    if most == 1:  # windows, rings and blocks have been crossed one token at a time
        assert {4, 127, 128, 129, 131, 132, 256, 257, 259, 260} <= reached


@pytest.mark.parametrize(
    "config, most", [(DECODE, 1), (VERIFY, 2), (VERIFY_V41, 2)], ids=["decode", "verify", "v41"]
)
def test_triton_s_kernels_skip_the_padding(eager_graph, config, most):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    twins = Twins(config, batch=3, tokens_per_request=most, device=device, backend="triton")
    for manager in (twins.captured, twins.eager):
        slots = [manager.open_request() for _ in range(2)]
        prepare_forward(manager, slots, [0, 0], [3, 127]).complete()
    twins.step([1, 0], [127, 3], [128, 3 + most])
    twins.compare()


def test_every_row_of_a_batch_and_of_the_manager(eager_graph):
    config = VERIFY
    manager = make_manager(config, max_requests=3)
    weights, inputs = model_weights(config, seed=0), model_projections(config, 12, seed=1)
    forward = CapturedForward(
        manager, lambda handles: write_layers(handles, inputs, weights),
        batch=3, tokens_per_request=4,
    )  # fmt: skip
    slots = [manager.open_request() for _ in range(3)]
    forward.replay(prepare_forward(manager, slots, [0] * 3, [4] * 3))
    forward.replay(prepare_forward(manager, slots, [4] * 3, [5, 4, 8]))
    other = make_manager(config, max_requests=3)
    slots = [other.open_request() for _ in range(3)]
    plan = prepare_forward(other, slots, [0] * 3, [4] * 3)
    write_eagerly(other, plan, inputs, weights)
    plan = prepare_forward(other, slots, [4] * 3, [5, 4, 8])
    write_eagerly(other, plan, [take_rows(layer, slice(0, 5)) for layer in inputs], weights)
    assert torch.equal(manager.state.storage, other.state.storage)
    assert torch.equal(manager.paged.storage, other.paged.storage)


@pytest.mark.parametrize("most", [1, 4], ids=["decode", "verify"])
def test_a_whole_step_of_layers_that_share(eager_graph, most):
    """Choices go from layer to layer inside of the step; outputs are those of an eager one."""
    weights = model_weights(VERIFY_V41, seed=0)
    inputs = model_projections(VERIFY_V41, 2 * most, seed=2)
    prompt = model_projections(VERIFY_V41, 90, seed=1)

    def run(handles):
        chosen = {}
        return [
            forward_layer(*layer, chosen).output
            for layer in zip(handles, inputs, weights, strict=True)
        ]

    outputs = []
    for is_captured in (True, False):
        manager = make_manager(VERIFY_V41)
        forward = None
        if is_captured:
            forward = CapturedForward(manager, run, batch=2, tokens_per_request=most)
        slots = [manager.open_request() for _ in range(2)]
        for slot, length in zip(slots, (90, 7), strict=True):
            rows = [take_rows(layer, slice(0, length)) for layer in prompt]
            write_eagerly(manager, prepare_forward(manager, [slot], [0], [length]), rows, weights)
        plan = prepare_forward(manager, slots, [90, 7], [90 + most, 7 + most])
        if forward is not None:
            outputs.append([output.clone() for output in forward.replay(plan)])
        else:
            outputs.append(
                run([manager.acquire(idx, plan) for idx in range(VERIFY_V41.num_layers)])
            )
        assert plan.is_complete
    for captured, eager in zip(*outputs, strict=True):
        assert torch.allclose(captured, eager, atol=1e-6, rtol=1e-5) and eager.abs().max() > 0.1


def test_layers_that_share_are_captured_together(eager_graph):
    message = "some use the choices of others; CapturedForward captures their whole step"
    with pytest.raises(ValueError, match=f"Cannot capture layers one by one: {message}"):
        CapturedLayers(make_manager(V41), lambda handle: None, batch=1, max_length=9)


def test_captures_of_several_sizes_share_a_manager(eager_graph):
    twins = Twins(VERIFY, batch=4, tokens_per_request=3)
    small_inputs = tuple(take_rows(layer, slice(0, 2)) for layer in twins.inputs)
    large = twins.forward
    small = CapturedForward(
        twins.captured, lambda handles: write_layers(handles, small_inputs, twins.weights), batch=2
    )
    slots = [twins.open(n) for n in (126, 3, 254, 1)]
    lengths = [126, 3, 254, 1]
    for step in range(12):
        twins.forward, count = (small, 2) if step % 2 else (large, 4)
        after = [n + 1 for n in lengths[:count]]
        twins.step(slots[:count], lengths[:count], after)
        lengths[:count] = after
        twins.compare()


class Recorder:
    """A step that writes every layer and keeps what it was called with."""

    def __init__(self, config, num_tokens):
        self.inputs = model_projections(config, num_tokens, seed=5)
        self.weights = model_weights(config, seed=0)
        self.calls = []
        self.output = torch.zeros(1)

    def __call__(self, handles):
        self.calls.append(handles)
        write_layers(handles, self.inputs, self.weights)
        self.output += 1
        return self.output


def capture(manager, *, batch=3, **choices):
    num_tokens = batch * choices.get("tokens_per_request", 1)
    if "max_chunks" in choices:
        num_tokens = choices.get("num_tokens", manager.capacity.max_forward_tokens)
    step = Recorder(manager.config, num_tokens)
    return CapturedForward(manager, step, batch=batch, **choices), step


def grown(config, *lengths, **sizes):
    manager = make_manager(config, **sizes)
    slots = [manager.open_request() for _ in lengths]
    prepare_forward(manager, slots, [0] * len(slots), lengths).complete()
    return manager


def state_of(manager):
    stored = {
        name: tensor.clone()
        for name, tensor in manager.tensors().items()
        if name not in ("plan_buffers", "rope_rows")
    }
    books = (manager.lengths, manager.is_open, manager._books.requests.block_table)
    return stored, [book.copy() for book in books], manager._books.allocator.num_free


def assert_same_state(first, second):
    for name, tensor in first[0].items():
        assert torch.equal(tensor, second[0][name]), name
    assert all(map(np.array_equal, first[1], second[1])) and first[2] == second[2]


def test_a_capture_touches_no_request(eager_graph):
    manager = grown(DECODE, 300, 5, 128)
    manager.state.storage.random_()
    manager.paged.storage.random_()
    before = state_of(manager)
    forward, step = capture(manager, batch=4)
    assert_same_state(before, state_of(manager))
    assert forward.outputs is step.output and len(step.calls) == 2
    plan = prepare_forward(manager, [0, 2], [300, 128], [301, 129])
    assert forward.replay(plan) is step.output
    manager.check_integrity()


@pytest.mark.parametrize("max_length, expected", [(None, 1000), (700, 700)])
def test_what_a_step_sees(eager_graph, max_length, expected):
    manager = make_manager(VERIFY, max_request_tokens=1000)
    forward, step = capture(manager, batch=2, tokens_per_request=4, max_length=max_length)
    (plan,) = {handle.plan for handle in step.calls[0]}
    assert (forward.num_rows, forward.num_tokens, forward.max_length) == (3, 8, expected)
    assert (plan.num_requests, plan.num_tokens, plan.longest) == (3, 8, expected)
    assert plan.max_entries(4) == expected // 4
    assert plan.tokens.request_slots.tolist() == [-1] * 3
    assert plan.tokens.request_ids.tolist() == [0] * 8
    assert plan.tokens.max_step == 4 and not plan.written_rows.size
    with pytest.raises(RuntimeError, match="Stale plan"):
        _ = step.calls[0][0].positions


def test_a_complete_plan_is_over_after_a_capture(eager_graph):
    manager = grown(DECODE, 5)
    plan = prepare_forward(manager, [0], [5], [6])
    plan.complete()
    capture(manager)
    assert plan.is_retired


@pytest.mark.parametrize("num_written", [0, 2])
def test_an_incomplete_forward_holds_up_a_capture(eager_graph, num_written):
    manager = grown(DECODE, 5)
    plan = prepare_forward(manager, [0], [5], [6])
    inputs = [take_rows(layer, slice(0, 1)) for layer in Recorder(DECODE, 3).inputs]
    weights = model_weights(DECODE, seed=0)
    for idx in range(num_written):
        manager.acquire(idx, plan).write(inputs[idx], weights[idx])
    with pytest.raises(RuntimeError, match=r"Cannot capture: .* is not complete"):
        capture(manager)
    for idx in range(num_written, 4):
        manager.acquire(idx, plan).write(inputs[idx], weights[idx])
    assert plan.is_complete
    capture(manager)


def test_a_step_that_leaves_a_layer_out_is_refused(eager_graph):
    manager = grown(DECODE, 5)
    weights, inputs = model_weights(DECODE, seed=0), model_projections(DECODE, 2, seed=1)

    def step(handles):
        write_layers(handles[:3], inputs[:3], weights[:3])

    with pytest.raises(RuntimeError, match="expected one that writes every layer"):
        CapturedForward(manager, step, batch=2)
    prepare_forward(manager, [0], [5], [6]).complete()


def test_a_step_that_raises_leaves_the_manager_as_it_was(eager_graph):
    manager = grown(DECODE, 5)
    before = state_of(manager)

    def step(handles):
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        CapturedForward(manager, step, batch=2)
    assert_same_state(before, state_of(manager))
    prepare_forward(manager, [0], [5], [6]).complete()


@pytest.mark.parametrize(
    "choices, match",
    [
        ({"batch": 0}, r"Invalid batch: expected an integer from 1 to 5 \(max_requests\), got 0"),
        ({"batch": 6}, "Invalid batch: expected an integer from 1 to 5 .*, got 6"),
        ({"batch": True}, "Invalid batch: .*, got True"),
        (
            {"batch": 2, "tokens_per_request": 5},
            r"Invalid tokens_per_request: .* 1 to 4 \(drafts_per_step \+ 1\), got 5",
        ),
        ({"batch": 2, "max_length": 0}, "Invalid max_length: .* from 1 to 900 .*, got 0"),
        ({"batch": 2, "max_length": 901}, "Invalid max_length: .* from 1 to 900 .*, got 901"),
        (
            {"batch": 5, "tokens_per_request": 4},
            r"batch × tokens_per_request: expected at most 19 \(max_forward_tokens\), got 20",
        ),
    ],
)
def test_sizes_that_are_refused(eager_graph, choices, match):
    manager = make_manager(VERIFY, max_forward_tokens=19, max_request_tokens=900)
    with pytest.raises(ValueError, match=match):
        CapturedForward(manager, lambda handles: None, **choices)


def test_the_cpu_has_no_graphs():
    with pytest.raises(ValueError, match="a captured forward: expected cuda, got cpu"):
        CapturedForward(make_manager(DECODE), lambda handles: None, batch=1)


REFUSED_PLANS = {
    "rows": (1, [(0, 5, 6), (1, 9, 10), (2, 3, 4), (3, 8, 9)], "at most 3 rows, .*, got 4"),
    "tokens in a row": (2, [(0, 5, 8)], "at most 2 tokens in a row, as captured, got 3"),
    "two tokens in decode": (1, [(0, 5, 7)], "at most 1 tokens in a row, as captured, got 2"),
    "no token in a row": (1, [(0, 5, 6), (1, 9, 9)], "one token in each row, .* 1 in 2 rows"),
    "chunk": (2, [(0, 5, 25)], "at most 2 tokens in a row, .* got a chunk of 20, .* workspace"),
    "length": (1, [(4, 400, 401)], "at most 400 tokens in a request, as captured, got 401"),
}


@pytest.mark.parametrize("most, rows, match", REFUSED_PLANS.values(), ids=REFUSED_PLANS)
def test_plans_that_are_refused_can_be_run_eagerly(eager_graph, most, rows, match):
    manager = grown(VERIFY, 5, 9, 3, 8, 400)
    forward, step = capture(manager, batch=3, tokens_per_request=most, max_length=400)
    plan = prepare_forward(manager, *([row[i] for row in rows] for i in range(3)))
    before, num_calls = state_of(manager), len(step.calls)
    with pytest.raises(ValueError, match=f"Invalid plan: expected {match}"):
        forward.replay(plan)
    assert len(step.calls) == num_calls and not plan.has_started
    assert_same_state(before, state_of(manager))
    inputs = model_projections(VERIFY, plan.num_tokens, seed=1)
    write_eagerly(manager, plan, inputs, step.weights)
    assert plan.is_complete


def test_a_plan_of_the_captured_length_is_taken(eager_graph):
    manager = grown(DECODE, 399)
    forward, _ = capture(manager, max_length=400)
    forward.replay(prepare_forward(manager, [0], [399], [400]))


def test_another_manager_s_plan_is_refused(eager_graph):
    forward, _ = capture(grown(DECODE, 5))
    with pytest.raises(ValueError, match="made for this manager, got another"):
        forward.replay(prepare_forward(grown(DECODE, 5), [0], [5], [6]))


def test_a_stale_plan_is_refused(eager_graph):
    manager = grown(DECODE, 5, 6)
    forward, _ = capture(manager)
    stale = prepare_forward(manager, [0], [5], [6])
    stale.complete()
    plan = prepare_forward(manager, [1], [6], [7])
    with pytest.raises(RuntimeError, match="Stale plan"):
        forward.replay(stale)
    forward.replay(plan)


def test_a_graph_from_before_a_sleep_is_refused(eager_graph):
    """The pools' memory was given back, and may be taken elsewhere."""
    manager = make_manager(DECODE)
    forward, _ = capture(manager)
    manager.sleep()
    manager.wake()
    plan = prepare_forward(manager, [manager.open_request()], [0], [1])
    with pytest.raises(RuntimeError, match="Stale graph: its manager has slept since the capture"):
        forward.replay(plan)
    assert not plan.has_started
    plan.cancel()
    forward, _ = capture(manager)
    forward.replay(prepare_forward(manager, manager.open_slots, [0], [1]))


def test_a_plan_is_replayed_once(eager_graph):
    manager = grown(DECODE, 5)
    forward, _ = capture(manager)
    plan = prepare_forward(manager, [0], [5], [6])
    forward.replay(plan)
    with pytest.raises(RuntimeError, match="expected one not yet written, got one begun or run"):
        forward.replay(plan)


def test_a_plan_partly_written_is_refused(eager_graph):
    manager = grown(DECODE, 5)
    forward, step = capture(manager, batch=1)
    plan = prepare_forward(manager, [0], [5], [6])
    manager.acquire(0, plan).write(step.inputs[0], step.weights[0])
    with pytest.raises(RuntimeError, match="expected one not yet written, got one begun or run"):
        forward.replay(plan)
    for idx in range(1, 4):
        manager.acquire(idx, plan).write(step.inputs[idx], step.weights[idx])
    assert plan.is_complete


def test_empty_plans_and_padding_rows(eager_graph):
    manager = grown(VERIFY, 5, 6)
    forward, step = capture(manager, batch=3, tokens_per_request=2)
    before = state_of(manager)
    for rows in ([], [(-1, 0, 1), (-1, 7, 9)], [(1, 6, 6), (0, 5, 5)]):
        forward.replay(prepare_forward(manager, *([row[i] for row in rows] for i in range(3))))
        assert_same_state(before, state_of(manager))
    assert step.output == 5


@pytest.mark.gpu
@pytest.mark.parametrize("config, most", [(DECODE, 1), (VERIFY, 4)], ids=["decode", "verify"])
def test_five_thousand_replays_store_the_eager_bytes(config, most):
    twins = Twins(config, batch=7, tokens_per_request=most, device="cuda", backend="triton")
    reached = drive(twins, num_steps=5000, seed=1, check_every=100, longest=660)
    assert {4, 128, 132, 256, 260, 384, 512, 516} <= reached


@pytest.mark.gpu
def test_planning_and_replaying_never_synchronise():
    twins = Twins(DECODE, batch=7, device="cuda", backend="triton")
    manager, choose = twins.captured, random.Random(0)
    slots = [manager.open_request() for _ in range(7)]
    for slot, length in zip(slots, (0, 3, 126, 127, 250, 255, 258), strict=True):
        if length:
            prompt = [take_rows(layer, slice(0, length)) for layer in twins.prompt]
            plan = prepare_forward(manager, [slot], [0], [length])
            write_eagerly(manager, plan, prompt, twins.weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(50):
            if step % 10 == 9:
                manager.free_request(slots.pop(choose.randrange(len(slots))))
                slots.append(manager.open_request())
            rows = choose.sample(slots, choose.randint(1, len(slots)))
            before = manager.lengths[rows]
            twins.forward.replay(prepare_forward(manager, rows, before, before + 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    manager.check_integrity()
