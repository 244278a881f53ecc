"""Ops declare their mutations and results; layers compile whole, and once for all steps."""

import itertools
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import AttentionSubBlock, CacheConfig, KVCacheManager, prepare_forward
from dsv4.cache.memory.layout import checkpoint_bytes
from dsv4.kernels import ops, reference
from dsv4.kernels.contracts import LayerWrites, WindowInputs
from dsv4.kernels.layer_memory import LayerLayout
from dsv4.model.attention import forward_layer
from dsv4.model.random_hf import random_hf_model
from dsv4.testing import (
    Row,
    forward_inputs,
    join_rows,
    model_projections,
    model_weights,
    move_to,
    poison,
    take_rows,
)
from tests.v41 import tiny_v41

CONFIG = CacheConfig.tiny()
SWA, CSA, HCA = 0, 1, 2
# The first layer publishes two entries of three as candidates, and the second chooses one of them.
V41 = tiny_v41(
    compress_ratios=(1, 1), kv_source_layer_ids=(0,), index_source_layer_ids=(0, 1),
    candidate_source_layer_id=0, candidate_topk_blocks=2, candidate_block_size=1, index_topk=1,
)  # fmt: skip
WEIGHTS = model_weights(CONFIG, seed=0)
SEQUENCES = [model_projections(CONFIG, 160, seed=s) for s in (10, 20)]
CUDA = torch.cuda.is_available()
BACKENDS = [("reference", "cpu"), ("triton", "cuda" if CUDA else "cpu")]
# Tokens that two requests add, forward by forward: chunks, then decode over a closing window.
STEPS = [(7, 125), (2, 3), *[(1, 1)] * 4]
INTERPRETED_STEPS = [(1, 1)] * 4


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_manager(backend="reference", device="cpu", config=CONFIG):
    manager = KVCacheManager(
        config, max_requests=4, num_blocks=6, max_forward_tokens=256, backend=backend,
        device=device,
    )  # fmt: skip
    poison(manager)
    return manager


def run_layers(layer_step, *, backend="reference", device="cpu", layers=(SWA, CSA, HCA)):
    """Run the steps of two requests, with a padding row, through `layer_step`."""
    manager = make_manager(backend, device)
    slots, lengths, results = [manager.open_request() for _ in range(2)], [0, 0], []
    weights = [move_to(device, layer) for layer in WEIGHTS]
    for step in INTERPRETED_STEPS if (backend, device) == ("triton", "cpu") else STEPS:
        after = [before + count for before, count in zip(lengths, step, strict=True)]
        plan = prepare_forward(manager, [*slots, -1], [*lengths, 0], [*after, 1])
        for layer_idx in layers:
            rows = [
                take_rows(sequence[layer_idx], slice(start, end))
                for sequence, start, end in zip(SEQUENCES, lengths, after, strict=True)
            ]
            rows.append(take_rows(SEQUENCES[0][layer_idx], slice(0, 1)))
            inputs = move_to(device, join_rows(rows))
            handle = manager.acquire(layer_idx, plan)
            results += layer_step(handle, inputs, weights[layer_idx])
        plan.complete()
        lengths = after
    return manager, results


def forward_and_gather(handle, inputs, weights):
    output, lse = handle.forward(inputs, weights)
    results = [output, lse, *handle.gather_swa_kv()]
    if handle.layer.ratio:
        results += [*handle.gather_all_compressed_kv()]
    return results


def in_parts(handle, inputs, weights):
    handle.write_swa(inputs.kv, weights.kv_norm)
    index, selection = inputs.indexer, None
    if inputs.compressor is not None:
        handle.flush_compression(
            *inputs.compressor, weights.compressor,
            index_kv=None if index is None else index.kv,
            index_gate=None if index is None else index.gate,
            index_weights=weights.indexer,
        )  # fmt: skip
    if index is not None:
        selection = handle.select_entries(index.query, index.head_weights)
    results = [*handle.attend(inputs.query, weights.sinks, selection)]
    return (
        results
        if selection is None
        else [*results, *selection, *handle.gather_compressed_kv(selection.rows)]
    )


def assert_same(got, expected):
    for name, tensor in expected[0].tensors().items():
        if name not in ("pooled", "index_scratch", "partials"):
            pair = [x.reshape(-1).view(torch.uint8) for x in (got[0].tensors()[name], tensor)]
            assert torch.equal(*pair), f"{name} differs"
    assert len(got[1]) == len(expected[1])
    for mine, theirs in zip(got[1], expected[1], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


class SeenOps(TorchDispatchMode):
    """Collects the names of this library's ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            self.names.add(func._schema.name.removeprefix("dsv4::"))
        return func(*args, **(kwargs or {}))


FORWARD_OPS = {"make_rope", "write_layer", "select_entries", "attend"}
GATHER_OPS = {"gather_swa_kv", "gather_compressed_kv", "gather_all_compressed_kv"}


def cases(*layers):
    """Backends, steps and layers; of those that are interpreted only a step in parts is quick."""
    found = []
    for (backend, device), step, layer in itertools.product(
        BACKENDS, (forward_and_gather, in_parts), layers or (None,)
    ):
        is_quick = backend == "reference" or (step is in_parts and layer in (None, CSA))
        name = "-".join((backend, device, step.__name__, *map(str, (layer,) if layers else ())))
        marks = () if is_quick else pytest.mark.interpreted
        values = (backend, device, step, layer) if layers else (backend, device, step)
        found.append(pytest.param(*values, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("backend", "device", "step"), cases())
def test_a_step_through_the_ops_is_the_direct_one(backend, device, step):
    options = {"backend": backend, "device": device}
    direct = run_layers(step, **options)
    with SeenOps() as seen:
        through_ops = run_layers(step, **options)
    assert FORWARD_OPS < seen.names < FORWARD_OPS | GATHER_OPS
    assert_same(through_ops, direct)


def test_captures_through_the_ops_are_the_direct_ones():
    def run():
        manager = KVCacheManager(
            CONFIG, max_requests=1, num_blocks=6, max_forward_tokens=512, num_checkpoints=4
        )
        poison(manager)
        ids = torch.arange(300)
        slot, *_ = manager.resume_request(ids)
        inputs = model_projections(CONFIG, 300, seed=3)
        plan = prepare_forward(manager, [slot], [0], [300])
        assert plan.boundaries is not None
        for layer_idx in (SWA, CSA, HCA):
            manager.acquire(layer_idx, plan).forward(inputs[layer_idx], WEIGHTS[layer_idx])
        plan.complete()
        return manager, [manager.device_memory.checkpoints.clone()]

    direct = run()
    with SeenOps() as seen:
        through_ops = run()
    assert {"checkpoint_window", "checkpoint_tails"} < seen.names
    assert_same(through_ops, direct)


def test_a_profiler_sees_the_ops():
    with torch.profiler.profile() as profiled:
        run_layers(forward_and_gather, layers=(CSA,))
    names = {event.key for event in profiled.key_averages()}
    assert {f"dsv4::{name}" for name in FORWARD_OPS} < names


def test_nothing_that_is_stored_or_given_has_a_gradient():
    def step(handle, inputs, weights):
        norm, sinks = (x.clone().requires_grad_() for x in (weights.kv_norm, weights.sinks))
        return handle.forward(inputs, weights._replace(kv_norm=norm, sinks=sinks))

    manager, results = run_layers(step)
    assert not any(result.requires_grad for result in results)
    assert not any(tensor.requires_grad for tensor in manager.tensors().values())


@pytest.mark.parametrize(("backend", "device", "step", "layer_idx"), cases(SWA, CSA, HCA))
def test_a_compiled_layer_is_the_eager_one(backend, device, step, layer_idx):
    options = {"backend": backend, "device": device, "layers": (layer_idx,)}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    assert_same(run_layers(compiled, **options), run_layers(step, **options))
    # One for a chunk, one more once its sizes have changed, one for steps, one for their lengths.
    assert counter.frame_count <= 4


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_bits():
    compiled = torch.compile(forward_and_gather, fullgraph=True)
    expected = run_layers(forward_and_gather, layers=(CSA,))
    assert_same(run_layers(compiled, layers=(CSA,)), expected)


def run_v41(stack, *, backend="reference", device="cpu"):
    """Run steps of a request, with a padding row, through both layers of V4.1 at once."""
    manager, results = make_manager(backend, device, V41), []
    weights = [move_to(device, layer) for layer in model_weights(V41, seed=0)]
    layers = [move_to(device, layer) for layer in model_projections(V41, 3, seed=10)]
    slot = manager.open_request()
    for length in range(3):
        plan = prepare_forward(manager, [slot, -1], [length, 0], [length + 1, 1])
        rows = [Row(slot, layers, length, length + 1), Row(-1, layers, 0, 1)]
        inputs = [forward_inputs(rows, idx) for idx in (0, 1)]
        results += stack([manager.acquire(idx, plan) for idx in (0, 1)], inputs, weights)
    return manager, results


def both_layers(handles, inputs, weights):
    chosen, results = {}, []
    for layer in zip(handles, inputs, weights, strict=True):
        results += [*forward_layer(*layer, chosen)]
    return [*results, *chosen[0], *chosen[1]]


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_candidates_through_the_ops_are_the_direct_ones(backend, device):
    options = {"backend": backend, "device": device}
    direct = run_v41(both_layers, **options)
    with SeenOps() as seen:
        through_ops = run_v41(both_layers, **options)
    assert seen.names == FORWARD_OPS
    assert_same(through_ops, direct)


@pytest.mark.parametrize(
    ("backend", "device"),
    [BACKENDS[0], pytest.param(*BACKENDS[1], marks=pytest.mark.interpreted)],
)
def test_compiled_candidates_are_the_eager_ones(backend, device):
    options = {"backend": backend, "device": device}
    compiled = torch.compile(both_layers, backend="aot_eager", fullgraph=True)
    assert_same(run_v41(compiled, **options), run_v41(both_layers, **options))


@pytest.fixture(scope="module")
def blocks():
    model = random_hf_model(seed=0)
    config = CacheConfig.from_hf(model.config, kv_format="fp8", index_format="mxfp4")
    return [
        AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
        for layer_idx, layer in enumerate(model.model.layers)
    ]


def run_blocks(blocks, stack, *, num_steps):
    """A prefill and decode steps, each a forward through the whole stack."""
    manager = make_manager(config=blocks[0].config)
    slot, length, outputs = manager.open_request(), 0, []
    width = blocks[0].module.q_a_proj.in_features
    hidden = torch.randn(3 + num_steps, width, generator=torch.Generator().manual_seed(1))
    for end in range(3, 3 + num_steps):
        plan = prepare_forward(manager, [slot, -1], [length, 0], [end, 1])
        handles = [manager.acquire(layer_idx, plan) for layer_idx in range(len(blocks))]
        rows = torch.cat((hidden[length:end], hidden[:1]))
        outputs.append(stack(rows, handles))
        assert plan.is_complete
        length = end
    return manager, outputs


def test_compiled_sub_blocks_do_not_recompile_as_requests_grow(blocks):
    def stack(hidden, handles):
        for block, handle in zip(blocks, handles, strict=True):
            hidden = hidden + block(hidden, handle)
        return hidden

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(stack, backend=counter, fullgraph=True)
    got = run_blocks(blocks, compiled, num_steps=2)
    assert_same(got, run_blocks(blocks, stack, num_steps=2))
    num_graphs = counter.frame_count
    got = run_blocks(blocks, compiled, num_steps=9)
    assert_same(got, run_blocks(blocks, stack, num_steps=9))
    assert counter.frame_count <= num_graphs + 1  # lengths become a symbol


def test_a_compiled_sub_block(blocks):
    manager = make_manager(config=blocks[0].config)
    plan = prepare_forward(manager, [manager.open_request()], [0], [3])
    hidden = torch.randn(3, blocks[0].module.q_a_proj.in_features)
    compiled = torch.compile(blocks[0], backend="aot_eager", fullgraph=True)
    assert compiled(hidden, manager.acquire(0, plan)).shape == hidden.shape
    assert plan.layer(0).has_window


def test_compiled_reads_before_writes_are_refused():
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [3])
    read = torch.compile(lambda handle: handle.gather_swa_kv(), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="read before it is written"):
        read(manager.acquire(SWA, plan))


def test_a_compiled_write_that_fails_can_be_cancelled(monkeypatch):
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [3])
    handle = manager.acquire(SWA, plan)

    def fail(**kwargs):
        raise MemoryError

    monkeypatch.setattr(reference, "write_layer", fail)
    write = torch.compile(
        lambda handle, kv: handle.write_swa(kv, WEIGHTS[SWA].kv_norm),
        backend="aot_eager",
        fullgraph=True,
    )
    with pytest.raises(MemoryError):
        write(handle, SEQUENCES[0][SWA].kv[:3])
    assert not handle.progress.has_window and plan.is_live
    plan.cancel()


def op_arguments():
    """Each op's name and arguments on a CSA layer that has been written."""
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request(), -1], [0, 0], [9, 1])
    handle = manager.acquire(CSA, plan)
    inputs = join_rows([take_rows(SEQUENCES[0][CSA], slice(0, n)) for n in (9, 1)])
    handle.write(inputs, WEIGHTS[CSA])
    memory = ops._FLATTENERS["memory"](handle.memory)
    tokens = ops._FLATTENERS["tokens"](handle.tokens)
    index = inputs.indexer
    rows = torch.tensor([[0, -1], [1, 0]]).t()
    writes = ops._flat_writes(LayerWrites.of(inputs, WEIGHTS[CSA]))
    checkpoints = torch.zeros(1, checkpoint_bytes(manager.schemas), dtype=torch.uint8)
    boundaries = (torch.tensor([[0, 8, 0]], dtype=torch.int32), checkpoints)
    return {
        "make_rope": (*memory, handle.positions),
        "write_layer": (*memory, *tokens, writes),
        "checkpoint_window": (*boundaries, *memory, *tokens),
        "checkpoint_tails": (*boundaries, *memory, *tokens, writes),
        "select_entries": (*memory, *tokens, index.query, index.head_weights, 2),
        "attend": (*memory, *tokens, inputs.query, WEIGHTS[CSA].sinks, None, 2, True, False),
        "gather_compressed_kv": (*memory, rows),
        "gather_all_compressed_kv": (*memory, *tokens, 2),
        "gather_swa_kv": (*memory, *tokens),
    }  # fmt: skip


@pytest.mark.parametrize("name", op_arguments())
def test_schema_and_fake(name):
    op = getattr(torch.ops.dsv4, name).default
    arguments = ("reference", *op_arguments()[name])
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    mutated = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    storages = ["slots", "blocks", "workspace", "pooled", "arrivals"]
    expected = {"make_rope": ["rope_rows"], "write_layer": storages,
                "select_entries": ["index_scratch"],
                "attend": ["index_scratch", "partials"],
                    "checkpoint_window": ["checkpoints"],
                "checkpoint_tails": ["checkpoints"]}  # fmt: skip
    assert mutated == expected.get(name, [])


class CheckedOps(SeenOps):
    """Holds each op to its schema and its fake on the way."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_schema_and_fake_of_candidates():
    with CheckedOps() as seen:
        run_v41(both_layers)
    assert seen.names == FORWARD_OPS


@pytest.mark.parametrize(
    "choices",
    [{"kv_format": "bf16"}, {"kv_format": "fp32"}, {"kv_format": "fp32", "entry_format": "fp8"}],
    ids=lambda choices: "_".join(choices.values()),
)
def test_gathered_values_have_the_rows_dtype(choices):
    """A compiled graph reads results by the dtype that the fake gave them."""
    manager = make_manager(config=CacheConfig.tiny(**choices))
    memory, rows = manager.device_memory.memories[CSA], torch.zeros(2, 3, dtype=torch.int64)
    tokens = prepare_forward(manager, [manager.open_request()], [0], [8]).tokens
    gathers = [
        lambda: ops.gather_compressed_kv(memory, rows, backend="reference"),
        lambda: ops.gather_all_compressed_kv(memory, tokens, max_entries=2, backend="reference"),
        lambda: ops.gather_swa_kv(memory, tokens, backend="reference"),
    ]
    for gather in gathers:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            fake = gather().values
        values = gather().values
        assert (fake.dtype, fake.shape) == (values.dtype, values.shape)


def test_an_unknown_backend_is_refused():
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [1])
    handle = manager.acquire(SWA, plan)
    writes = LayerWrites(window=WindowInputs(SEQUENCES[0][SWA].kv[:1], WEIGHTS[SWA].kv_norm))
    with pytest.raises(ValueError, match="expected one of reference, triton, got 'cutlass'"):
        ops.write_layer(writes, handle.memory, handle.tokens, backend="cutlass")


@pytest.mark.parametrize(
    "config", [CONFIG, CacheConfig.tiny(tail_dtype="bfloat16", kv_format="bf16")]
)
def test_a_layouts_key_is_the_layout(config):
    manager = make_manager(config=config)
    for memory, schema in zip(manager.device_memory.memories, manager.schemas, strict=True):
        layout = LayerLayout.from_key(memory.layout.key)
        assert layout == memory.layout and hash(layout) == hash(memory.layout)
        assert layout.kv_row == schema.kv_row and layout.index_row == schema.index_row


def test_memory_cuts_the_views_of_the_pools():
    manager = make_manager()
    for layer_idx, memory in enumerate(manager.device_memory.memories):
        state, pages = manager.state.layer(layer_idx), manager.paged.layer(layer_idx)
        same = [(memory.window.ring.data, state.ring.data), (memory.tail, state.tail),
                (memory.window.ring.scales, state.ring.scales),
                (memory.index_tail, state.index_tail)]  # fmt: skip
        if pages is None:
            assert memory.entries is None
        else:
            same.append((memory.entries.data, pages.entries.data))
        if pages is None or pages.index_keys is None:
            assert memory.index_keys is None
        else:
            same.append((memory.index_keys.scales, pages.index_keys.scales))
        for mine, theirs in same:
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.data_ptr() == theirs.data_ptr()
                assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
