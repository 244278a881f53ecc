"""`LayerCacheHandle`: what it refuses, what its views say, and what its gathers return."""

import functools
import re
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dsv4 import AttentionType, CacheConfig, KVCacheManager, prepare_forward
from dsv4.kernels.contracts import CompressorWeights, Selection
from dsv4.kernels.reference.attention import prepare_query
from dsv4.kernels.reference.codec import decode
from dsv4.rope import build_rope_table
from dsv4.testing import (
    POISON_BYTE,
    Row,
    join_rows,
    model_projections,
    model_weights,
    poison,
    run_forward,
    take_rows,
)
from tests.dense import dense_layer

CONFIG = CacheConfig.tiny()
SWA, CSA, HCA, LAST = range(4)
WINDOW = 128
every_layer = pytest.mark.parametrize("layer_idx", [SWA, CSA, HCA], ids=["SWA", "CSA", "HCA"])


def make_manager(config=CONFIG, **sizes):
    defaults = {"max_requests": 6, "num_blocks": 12, "max_forward_tokens": 1024}
    manager = KVCacheManager(config, **{**defaults, **sizes})
    poison(manager)
    return manager


def pools_of(manager):
    return manager.paged.storage, manager.state.storage, manager.device_memory.memories[0].workspace


def pool_bytes(manager):
    return [storage.clone() for storage in pools_of(manager)]


def assert_same_bytes(manager, expected):
    for got, want in zip(pool_bytes(manager), expected, strict=True):
        assert torch.equal(got, want)


@contextmanager
def refused(manager, error, match):
    """The body is refused with this error, and no byte of the pools changes."""
    before = pool_bytes(manager)
    with pytest.raises(error, match=match):
        yield
    assert_same_bytes(manager, before)


def write_swa(handle, tensors):
    handle.write_swa(tensors["kv"], tensors["norm_weight"])


def flush(handle, tensors):
    index = {}
    if "index_kv" in tensors:
        index = {
            "index_kv": tensors["index_kv"],
            "index_gate": tensors["index_gate"],
            "index_weights": CompressorWeights(
                tensors["index_position_bias"], tensors["index_norm_weight"]
            ),
        }
    weights = CompressorWeights(tensors["position_bias"], tensors["norm_weight"])
    handle.flush_compression(tensors["kv"], tensors["gate"], weights, **index)


def select(handle, tensors):
    return handle.select_entries(tensors["query"], tensors["head_weights"])


def attend(handle, tensors):
    selection = None
    if handle.layer.attention_type is AttentionType.CSA:
        selection = select_as_csa(handle)
    return handle.attend(tensors["query"], tensors["sinks"], selection)


NUM_TOKENS = 5
WINDOW_SHAPES = {"kv": [5, 96], "norm_weight": [96]}
ATTEND_SHAPES = {"query": [5, 4, 96], "sinks": [4]}
SHAPES = {
    (write_swa, SWA): WINDOW_SHAPES,
    (write_swa, CSA): WINDOW_SHAPES,
    (write_swa, HCA): WINDOW_SHAPES,
    (flush, CSA): {
        "kv": [5, 192],
        "gate": [5, 192],
        "position_bias": [4, 192],
        "norm_weight": [96],
        "index_kv": [5, 128],
        "index_gate": [5, 128],
        "index_position_bias": [4, 128],
        "index_norm_weight": [64],
    },
    (flush, HCA): {
        "kv": [5, 96], "gate": [5, 96], "position_bias": [128, 96], "norm_weight": [96],
    },
    (select, CSA): {"query": [5, 16, 64], "head_weights": [5, 16]},
    (attend, SWA): ATTEND_SHAPES,
    (attend, CSA): ATTEND_SHAPES,
    (attend, HCA): ATTEND_SHAPES,
}  # fmt: skip
STEPS = (write_swa, flush, select, attend)


def random_inputs(step, layer_idx, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES[step, layer_idx]
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ready_handle(layer_idx, until, *, manager=None):
    """A handle of one request's first five tokens, with the steps before `until` done."""
    manager = manager or make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [NUM_TOKENS])
    handle = manager.acquire(layer_idx, plan)
    for step in STEPS[: STEPS.index(until)]:
        if step is not select and (step, layer_idx) in SHAPES:
            step(handle, random_inputs(step, layer_idx))
    return manager, handle


def one_token_more(tensor):
    return torch.cat((tensor, tensor[:1]))


def one_column_less(tensor):
    return tensor[..., :-1]


def one_axis_more(tensor):
    return tensor[None]


def as_half(tensor):
    return tensor.half()


def as_double(tensor):
    return tensor.double()


def as_int(tensor):
    return tensor.int()


def on_meta(tensor):
    return tensor.to("meta")


def refusal_of(name, shape, bad):
    if list(bad.shape) != shape:
        return ValueError, f"Invalid shape of {name}: expected {shape}, got {list(bad.shape)}"
    if bad.dtype != torch.float32:
        return TypeError, (
            f"Invalid dtype of {name}: expected float32 or bfloat16, got {bad.dtype}"
        )
    return ValueError, f"Invalid device of {name}: expected cpu, got meta"


INPUTS = [
    pytest.param(step, layer, name, id=f"{step.__name__}-{['SWA', 'CSA', 'HCA'][layer]}-{name}")
    for (step, layer), shapes in SHAPES.items()
    for name in shapes
]


@pytest.mark.parametrize("step, layer_idx, name", INPUTS)
def test_bad_inputs_are_refused(step, layer_idx, name):
    manager, handle = ready_handle(layer_idx, step)
    inputs = random_inputs(step, layer_idx)
    for spoil in (
        one_token_more, one_column_less, one_axis_more, as_half, as_double, as_int, on_meta,
    ):  # fmt: skip
        bad = spoil(inputs[name])
        error, message = refusal_of(name, SHAPES[step, layer_idx][name], bad)
        with refused(manager, error, re.escape(message) + "$"):
            step(handle, {**inputs, name: bad})
    step(handle, inputs)


@pytest.mark.parametrize(
    "step, layer_idx", SHAPES, ids=lambda value: getattr(value, "__name__", value)
)
def test_bfloat16_and_strided_inputs_give_the_same(step, layer_idx):
    outcomes = []
    for convert in (torch.Tensor.contiguous, strided_copy):
        manager, handle = ready_handle(layer_idx, step)
        inputs = {
            name: convert(tensor.bfloat16())
            for name, tensor in random_inputs(step, layer_idx).items()
        }
        result = step(handle, inputs)
        outcomes.append([*pool_bytes(manager), *(result or ())])
    for plain, strided in zip(*outcomes, strict=True):
        assert torch.equal(plain, strided)


def strided_copy(tensor):
    wide = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


INDEX_NAMES = ("index_kv", "index_gate", "index_weights")


@pytest.mark.parametrize("given", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_a_csa_flush_needs_all_index_inputs(given):
    manager, handle = ready_handle(CSA, flush)
    main, index = csa_flush_arguments()
    match = (
        r"Invalid inputs of layer 1 \(CSA\): expected index_kv, index_gate and index_weights, "
        f"got {len(given)} of 3"
    )
    with refused(manager, ValueError, match):
        handle.flush_compression(*main, **{INDEX_NAMES[i]: index[i] for i in given})
    handle.flush_compression(*main, **dict(zip(INDEX_NAMES, index, strict=True)))


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 1, 2)])
def test_an_hca_flush_takes_no_index_inputs(given):
    manager, handle = ready_handle(HCA, flush)
    tensors = random_inputs(flush, HCA)
    weights = CompressorWeights(tensors["position_bias"], tensors["norm_weight"])
    _, index = csa_flush_arguments()
    match = rf"Invalid inputs of layer 2 \(HCA\): expected no index inputs, got {len(given)} of 3"
    with refused(manager, ValueError, match):
        handle.flush_compression(
            tensors["kv"], tensors["gate"], weights, **{INDEX_NAMES[i]: index[i] for i in given}
        )
    flush(handle, tensors)


def csa_flush_arguments():
    tensors = list(random_inputs(flush, CSA).values())
    main, index = tensors[:4], tensors[4:]
    return (
        (main[0], main[1], CompressorWeights(main[2], main[3])),
        (index[0], index[1], CompressorWeights(index[2], index[3])),
    )


@pytest.mark.parametrize("layer_of_inputs", [CSA, HCA], ids=["CSA inputs", "HCA inputs"])
def test_an_swa_layer_has_nothing_to_flush(layer_of_inputs):
    manager, handle = ready_handle(SWA, flush)
    with refused(manager, ValueError, "Layer 0 is SWA: it has nothing to compress"):
        flush(handle, random_inputs(flush, layer_of_inputs))


def select_as_csa(handle):
    return select(handle, random_inputs(select, CSA))


ONLY_CSA = "Layer 2 is HCA: only CSA layers have index keys"
NOT_SWA = "Layer 0 is SWA: it has no compressed entries"


@pytest.mark.parametrize(
    "layer_idx, read, match",
    [
        pytest.param(HCA, select_as_csa, ONLY_CSA, id="HCA-select"),
        pytest.param(SWA, select_as_csa, NOT_SWA, id="SWA-select"),
        pytest.param(HCA, lambda h: h.read_indexer_view(), ONLY_CSA, id="HCA-indexer view"),
        pytest.param(SWA, lambda h: h.read_indexer_view(), NOT_SWA, id="SWA-indexer view"),
        pytest.param(SWA, lambda h: h.read_classical_view(), NOT_SWA, id="SWA-classical view"),
        pytest.param(SWA, lambda h: h.gather_all_compressed_kv(), NOT_SWA, id="SWA-gather all"),
        pytest.param(
            SWA, lambda h: h.gather_compressed_kv(torch.zeros(5, 1, dtype=torch.int64)), NOT_SWA,
            id="SWA-gather",
        ),
    ],
)  # fmt: skip
def test_parts_that_a_layer_lacks_are_refused(layer_idx, read, match):
    manager, handle = ready_handle(layer_idx, attend)
    with refused(manager, ValueError, match):
        read(handle)


def a_selection():
    rows = torch.full((NUM_TOKENS, 8), -1)
    counts = torch.zeros(NUM_TOKENS, dtype=torch.int32)
    return Selection(rows.int(), rows, counts, rows[:, :0].int())


@pytest.mark.parametrize(
    "layer_idx, selection, match",
    [
        (CSA, None, r"Invalid selection of layer 1 \(CSA\): expected the .* its own .*, got None"),
        (
            HCA,
            a_selection(),
            r"Invalid selection of layer 2 \(HCA\): expected None, got Selection",
        ),
        (
            SWA,
            a_selection(),
            r"Invalid selection of layer 0 \(SWA\): expected None, got Selection",
        ),
    ],
    ids=["CSA", "HCA", "SWA"],
)
def test_a_selection_is_for_csa_layers(layer_idx, selection, match):
    manager, handle = ready_handle(layer_idx, attend)
    inputs = random_inputs(attend, layer_idx)
    with refused(manager, ValueError, match):
        handle.attend(inputs["query"], inputs["sinks"], selection)


@pytest.mark.parametrize(
    "step, layer_idx, part",
    [
        (write_swa, SWA, "window"), (write_swa, CSA, "window"), (write_swa, HCA, "window"),
        (flush, CSA, "entries"), (flush, HCA, "entries"),
    ],
    ids=["window-SWA", "window-CSA", "window-HCA", "entries-CSA", "entries-HCA"],
)  # fmt: skip
def test_a_part_is_written_once(step, layer_idx, part):
    manager, handle = ready_handle(layer_idx, step)
    step(handle, random_inputs(step, layer_idx))
    match = f"Layer {layer_idx} has already written its {part} in this forward"
    with refused(manager, RuntimeError, match):
        step(handle, random_inputs(step, layer_idx, seed=1))
    with refused(manager, RuntimeError, match):
        step(manager.acquire(layer_idx, handle.plan), random_inputs(step, layer_idx, seed=1))


def read_first(layer_idx, step):
    return f"Layer {layer_idx} is read before it is written: call {step} first"


@every_layer
def test_reading_before_the_window_is_written_is_refused(layer_idx):
    manager, handle = ready_handle(layer_idx, write_swa)
    other = manager.acquire(LAST, handle.plan)
    write_swa(other, random_inputs(write_swa, CSA))
    if layer_idx != SWA:
        flush(handle, random_inputs(flush, layer_idx))
    match = read_first(layer_idx, "write_swa")
    with refused(manager, RuntimeError, match):
        attend(handle, random_inputs(attend, layer_idx))
    with refused(manager, RuntimeError, match):
        handle.gather_swa_kv()


@pytest.mark.parametrize("layer_idx", [CSA, HCA], ids=["CSA", "HCA"])
def test_reading_before_the_entries_are_flushed_is_refused(layer_idx):
    manager, handle = ready_handle(layer_idx, flush)
    match = read_first(layer_idx, "flush_compression")
    inputs = random_inputs(attend, layer_idx)
    selection = a_selection() if layer_idx == CSA else None
    with refused(manager, RuntimeError, match):
        handle.attend(inputs["query"], inputs["sinks"], selection)
    if layer_idx == CSA:
        with refused(manager, RuntimeError, match):
            select(handle, random_inputs(select, CSA))


def window_inputs(num_tokens, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 96, generator=generator), torch.ones(96)


def test_the_workspace_belongs_to_the_layer_written_last():
    manager = make_manager()
    plan = prepare_forward(manager, [manager.open_request()], [0], [2])
    first, second = manager.acquire(0, plan), manager.acquire(1, plan)
    first.write_swa(*window_inputs(2))
    second.write_swa(*window_inputs(2, seed=1))
    query, sinks = torch.randn(2, 4, 96), torch.zeros(4)
    match = "The window rows of layer 0 are gone: .* before the next layer is written"
    with refused(manager, RuntimeError, match):
        first.attend(query, sinks)
    with refused(manager, RuntimeError, match):
        first.gather_swa_kv()
    assert second.gather_swa_kv().is_present.sum() == 3


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_that_its_ring_holds_needs_no_order_of_layers(drafts):
    manager = make_manager(CacheConfig.tiny(drafts_per_step=drafts))
    plan = prepare_forward(manager, [manager.open_request()], [0], [drafts + 1])
    handles = [manager.acquire(idx, plan) for idx in range(4)]
    for idx, handle in enumerate(handles):
        handle.write_swa(*window_inputs(drafts + 1, seed=idx))
    for handle in handles:
        assert handle.gather_swa_kv().is_present.sum(dim=1).tolist() == list(range(1, drafts + 2))


@pytest.mark.parametrize(
    "step, layer_idx", SHAPES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_stale_plan_is_refused(step, layer_idx):
    manager, handle = ready_handle(layer_idx, step)
    handle.plan.complete()
    prepare_forward(manager, [manager.open_request()], [0], [NUM_TOKENS])
    with refused(manager, RuntimeError, "Stale plan: .* use the plan that the last"):
        step(handle, random_inputs(step, layer_idx))


def test_a_gather_of_a_stale_window_is_refused():
    manager, handle = ready_handle(SWA, attend)
    handle.plan.complete()
    prepare_forward(manager, [], [], [])
    with refused(manager, RuntimeError, "Stale plan"):
        handle.gather_swa_kv()


def test_a_refusal_does_not_tear_the_forward():
    manager = make_manager()
    weights = model_weights(CONFIG, seed=0)
    layers = model_projections(CONFIG, 6, seed=1)
    slot = manager.open_request()
    plan = prepare_forward(manager, [slot], [0], [NUM_TOKENS])
    for idx in range(4):
        handle = manager.acquire(idx, plan)
        with refused(
            manager, ValueError, r"Invalid shape of kv: expected \[5, 96\], got \[6, 96\]"
        ):
            handle.forward(layers[idx], weights[idx])
        handle.forward(take_rows(layers[idx], slice(0, 5)), weights[idx])
    assert plan.is_complete
    run_forward(manager, weights, [Row(slot, layers, 5, 6)])


@every_layer
def test_raw_queries_are_prepared(layer_idx):
    """In `attend` and in `forward`, with the bits of queries that are prepared before."""
    weights, inputs = model_weights(CONFIG, seed=0)[layer_idx], model_projections(CONFIG, 5, seed=1)
    outputs = []
    for is_query_raw in (True, False):
        manager = make_manager()
        plan = prepare_forward(manager, [manager.open_request()], [0], [NUM_TOKENS])
        handle, given = manager.acquire(layer_idx, plan), inputs[layer_idx]
        if not is_query_raw:
            query = prepare_query(given.query, handle.memory)
            given = given._replace(query=query)
        outputs += handle.forward(given, weights, is_query_raw=is_query_raw)
        selection = select_as_csa(handle) if layer_idx == CSA else None
        outputs += handle.attend(given.query, weights.sinks, selection, is_query_raw=is_query_raw)
    for first, second in zip(outputs[:4], outputs[4:], strict=True):
        assert torch.equal(first, second)


def test_the_handle_names_its_forward():
    manager = make_manager()
    slots = [manager.open_request() for _ in range(3)]
    plan = prepare_forward(manager, [slots[2], -1, slots[0]], [0, 4, 0], [2, 5, 1])
    handle = manager.acquire(HCA, plan)
    assert (handle.num_query_heads, handle.head_dim) == (4, 96)
    assert handle.request_slots.tolist() == [2, -1, 0]
    assert handle.positions.tolist() == [0, 1, 4, 0]
    assert handle.request_ids.tolist() == [0, 0, 1, 2]
    assert handle.schema is manager.schemas[HCA]
    assert handle.paged is manager.paged.layer(HCA) and handle.state is manager.state.layer(HCA)
    assert manager.acquire(SWA, plan).paged is None


def grow(manager, slots, before, after):
    plan = prepare_forward(manager, slots, before, after)
    plan.complete()
    return plan


@pytest.mark.parametrize("drafts", [0, 5])
def test_ring_positions_follow_from_the_lengths(drafts):
    rows = WINDOW + drafts
    config = CacheConfig.tiny(drafts_per_step=drafts)
    for after in (1, 2, 127, 128, 129, rows - 1, rows, rows + 1, 2 * rows, 2 * rows + 1, 300):
        manager = make_manager(config)
        for _ in range(4):
            manager.open_request()
        grow(manager, [0, 1], [0, 0], [after - 1, 40])
        plan = prepare_forward(
            manager, [2, 0, -1, 1, 3], [0, after - 1, 7, 40, 0], [130, after, 60, 40, 0]
        )
        view = manager.acquire(CSA, plan).read_swa_view()
        for row, length in enumerate((130, after, 0, 40, 0)):
            ring = [-1] * rows
            for position in range(length):
                ring[position % rows] = position
            assert view.positions[row].tolist() == ring
            assert view.head[row] == length % rows
        assert view.slots.tolist() == [2, 0, -1, 1, 3]


@pytest.mark.parametrize(
    "kv_format, dtype, num_scales",
    [("fp8", torch.float8_e4m3fn, 1), ("bf16", torch.bfloat16, None)],
)
def test_swa_view_is_the_ring(kv_format, dtype, num_scales):
    manager = make_manager(CacheConfig.tiny(kv_format=kv_format, drafts_per_step=2))
    view = manager.acquire(HCA, prepare_forward(manager, [], [], [])).read_swa_view()
    state = manager.state.layer(HCA)
    assert (view.fp8.shape, view.fp8.dtype) == ((6, 130, 64), dtype)
    assert (view.rope.shape, view.rope.dtype) == ((6, 130, 32), torch.bfloat16)
    assert view.fp8.data_ptr() == state.swa_fp8.data_ptr()
    assert view.rope.data_ptr() == state.swa_rope.data_ptr()
    if num_scales is None:
        assert view.inv_scale is None
    else:
        assert view.inv_scale.shape == (6, 130, num_scales)
        assert view.inv_scale.data_ptr() == state.swa_inv.data_ptr()
    assert view.positions.shape == (0, 130) and view.head.shape == (0,)


def test_block_table_and_lengths_come_in_batch_order():
    manager = make_manager()
    for _ in range(4):
        manager.open_request()
    grow(manager, [0, 1, 2], [0, 0, 0], [127, 600, 3])
    plan = prepare_forward(manager, [2, -1, 1, 3, 0], [3, 500, 600, 0, 127], [4, 520, 600, 0, 128])
    table = manager._books.requests.block_table
    expected = np.stack([table[2], np.full(12, -1), table[1], table[3], table[0]])
    assert (expected >= 0).sum(axis=1).tolist() == [1, 0, 3, 0, 1]
    for layer_idx, lengths in ((SWA, [0] * 5), (CSA, [1, 0, 150, 0, 32]), (HCA, [0, 0, 4, 0, 1])):
        handle = manager.acquire(layer_idx, plan)
        assert handle.block_table.tolist() == expected.tolist()
        assert handle.block_lens.tolist() == lengths
        assert handle.block_table.dtype == handle.block_lens.dtype == torch.int32
    for view in (
        manager.acquire(CSA, plan).read_classical_view(),
        manager.acquire(CSA, plan).read_indexer_view(),
    ):
        assert view.block_table.tolist() == expected.tolist()
        assert view.block_lens.tolist() == [1, 0, 150, 0, 32]


def test_the_block_table_of_a_handle_is_a_copy():
    manager, handle = ready_handle(CSA, write_swa)
    handle.block_table.fill_(7)
    manager.check_integrity()
    assert manager._books.requests.block_table[0, 0] == 0


@pytest.mark.parametrize("layer_idx, rows", [(CSA, 64), (HCA, 2)], ids=["CSA", "HCA"])
def test_classical_view_is_the_pages(layer_idx, rows):
    manager, handle = ready_handle(layer_idx, write_swa)
    view, pages = handle.read_classical_view(), manager.paged.layer(layer_idx)
    assert view.entries_fp8.shape == (12, rows, 64)
    assert view.entries_rope.shape == (12, rows, 32)
    assert view.inv_scale.shape == (12, rows, 1)
    assert view.entries_fp8.data_ptr() == pages.entries_fp8.data_ptr()
    assert view.entries_rope.data_ptr() == pages.entries_rope.data_ptr()
    assert view.inv_scale.data_ptr() == pages.inv_scale.data_ptr()


@pytest.mark.parametrize(
    "index_format, key_bytes, scales", [("mxfp4", 32, 2), ("nvfp4", 32, 4), ("bf16", 64, None)]
)
def test_indexer_view_is_the_keys(index_format, key_bytes, scales):
    config = CacheConfig.tiny(index_format=index_format, kv_format="bf16")
    manager, handle = ready_handle(CSA, write_swa, manager=make_manager(config))
    view, pages = handle.read_indexer_view(), manager.paged.layer(CSA)
    assert view.keys_fp4.shape == (12, 64, key_bytes)
    assert view.keys_fp4.data_ptr() == pages.indexer_keys_fp4.data_ptr()
    assert view.global_scale.item() == 1.0
    assert handle.read_classical_view().inv_scale is None
    if scales is None:
        assert view.scale is None
    else:
        assert view.scale.shape == (12, 64, scales)
        assert view.scale.data_ptr() == pages.indexer_scale.data_ptr()


class Request(NamedTuple):
    """A request of the forward under test, and what the oracle says of its layers."""

    slot: int
    before: int
    after: int
    layers: list
    oracle: list


class Scenario(NamedTuple):
    """A second forward after a first one, over poisoned pools, before any layer is written."""

    manager: KVCacheManager
    weights: list
    requests: list


FORMATS = {
    "default": {},
    "drafts": {"drafts_per_step": 3, "tail_dtype": "bfloat16"},
    "bf16": {"kv_format": "bf16", "index_format": "fp8", "block_tokens": 128, "page_align": 16},
    "fp32": {"kv_format": "fp32", "index_format": "nvfp4", "index_global_scale": 0.5},
}
every_format = pytest.mark.parametrize("name", FORMATS)
LENGTHS = [(1, 5, 150), (-1, 7, 30), (3, 260, 261), (0, 6, 6), (4, 0, 3), (2, 140, 160)]
LONGEST = 261


@functools.cache
def first_forward(name):
    """Weights, requests, and the bytes of the pools after the first forward of the requests."""
    config = CacheConfig.tiny(**FORMATS[name])
    weights, manager, requests = model_weights(config, seed=0), make_manager(config), []
    for slot, before, after in LENGTHS:
        layers, oracle = model_projections(config, after, seed=100 * (slot + 2)), []
        if slot < 0:
            layers = [all_nan(inputs) for inputs in layers]
        else:
            oracle = [
                dense_layer(
                    layer.attention_type, layers[layer.layer_idx], weights[layer.layer_idx],
                    build_rope_table(
                        config, layer.rope_base, num_positions=after, device=manager.device
                    ),
                    config,
                )
                for layer in manager.schedule[:LAST]
            ]  # fmt: skip
        requests.append(Request(slot, before, after, layers, oracle))
    for _ in LENGTHS:
        manager.open_request()
    real = [
        request._replace(before=0, after=request.before) for request in requests if request.oracle
    ]
    plan = plan_requests(manager, real)
    for layer_idx in range(4):
        write_layer(manager.acquire(layer_idx, plan), real, weights[layer_idx])
    return weights, requests, pool_bytes(manager)


def build_scenario(name="default"):
    weights, requests, stored = first_forward(name)
    manager = make_manager(CacheConfig.tiny(**FORMATS[name]))
    for _ in LENGTHS:
        manager.open_request()
    rows = [(r.slot, 0, r.before) for r in requests if r.slot >= 0]
    grow(manager, *zip(*rows, strict=True))
    for storage, content in zip(pools_of(manager), stored, strict=True):
        storage.copy_(content)
    return Scenario(manager, weights, requests)


def all_nan(inputs):
    if inputs is None:
        return None
    if isinstance(inputs, torch.Tensor):
        return torch.full_like(inputs, torch.nan)
    return type(inputs)(*(all_nan(part) for part in inputs))


def run_requests(scenario, requests):
    rows = [Row(r.slot, r.layers, r.before, r.after) for r in requests]
    return run_forward(scenario.manager, scenario.weights, rows)


def plan_requests(manager, requests):
    slots, before, after, *_ = zip(*requests, strict=True)
    return prepare_forward(manager, slots, before, after)


def write_layer(handle, requests, weights):
    """Write a layer's window rows and entries; the inputs of all the requests' tokens."""
    idx = handle.layer.layer_idx
    inputs = join_rows([take_rows(r.layers[idx], slice(r.before, r.after)) for r in requests])
    handle.write_swa(inputs.kv, weights.kv_norm)
    index = {}
    if inputs.indexer is not None:
        index = {"index_kv": inputs.indexer.kv, "index_gate": inputs.indexer.gate}
        index["index_weights"] = weights.indexer
    if inputs.compressor is not None:
        handle.flush_compression(*inputs.compressor, weights.compressor, **index)
    return inputs


def written_handle(scenario, layer_idx):
    """The handle of a layer of the second forward, after its writes, and its selection."""
    plan = plan_requests(scenario.manager, scenario.requests)
    handle = scenario.manager.acquire(layer_idx, plan)
    inputs = write_layer(handle, scenario.requests, scenario.weights[layer_idx])
    if inputs.indexer is None:
        return handle, None
    return handle, handle.select_entries(inputs.indexer.query, inputs.indexer.head_weights)


def oracle_values(config, encoded, rows):
    """Rows `[...]` of an oracle's stored bytes, decoded; zeros for -1 or without an oracle."""
    values = torch.zeros(*rows.shape, config.head_dim, dtype=config.kv_row.value_dtype)
    if encoded is not None:
        stored = decode(config.kv_row, encoded).to(values.dtype)
        values[rows >= 0] = stored[rows[rows >= 0]]
    return values


def expected_entries(scenario, layer_idx, ratio):
    """Entries `[batch, max_entries, dim]` of the oracle, and which of them are closed."""
    values, masks = [], []
    for request in scenario.requests:
        closed = request.after // ratio if request.slot >= 0 else 0
        rows = torch.arange(LONGEST // ratio)
        rows[closed:] = -1
        oracle = request.oracle[layer_idx].entries if request.oracle else None
        values.append(oracle_values(scenario.manager.config, oracle, rows))
        masks.append(rows >= 0)
    return torch.stack(values), torch.stack(masks)


def assert_gathered(gathered, values, is_present):
    assert gathered.values.dtype == values.dtype
    assert torch.equal(gathered.is_present, is_present)
    assert torch.equal(gathered.values, values)
    assert (gathered.values[~gathered.is_present] == 0).all()


@every_format
@every_layer
def test_gathered_windows_equal_the_oracle(name, layer_idx):
    scenario = build_scenario(name)
    handle, _ = written_handle(scenario, layer_idx)
    values, masks = [], []
    for request in scenario.requests:
        rows = torch.arange(request.before, request.after)[:, None] - torch.arange(WINDOW).flip(0)
        rows = rows.clamp(min=-1) if request.slot >= 0 else torch.full_like(rows, -1)
        oracle = request.oracle[layer_idx].window if request.oracle else None
        values.append(oracle_values(scenario.manager.config, oracle, rows))
        masks.append(rows >= 0)
    assert_gathered(handle.gather_swa_kv(), torch.cat(values), torch.cat(masks))


@every_format
@pytest.mark.parametrize("layer_idx, ratio", [(CSA, 4), (HCA, 128)], ids=["CSA", "HCA"])
def test_all_gathered_entries_equal_the_oracle(name, layer_idx, ratio):
    scenario = build_scenario(name)
    handle, _ = written_handle(scenario, layer_idx)
    values, is_closed = expected_entries(scenario, layer_idx, ratio)
    assert is_closed.sum(dim=1).tolist() == handle.block_lens.tolist()
    assert_gathered(handle.gather_all_compressed_kv(), values, is_closed)


@every_format
def test_selected_gathered_entries_equal_the_oracle(name):
    scenario = build_scenario(name)
    handle, selection = written_handle(scenario, CSA)
    values, _ = expected_entries(scenario, CSA, 4)
    values = torch.cat((values, torch.zeros_like(values[:, :1])), dim=1)
    ids, chosen = handle.request_ids.long(), selection.entry_idx.long()
    of_tokens = values[ids[:, None], chosen]
    assert_gathered(handle.gather_compressed_kv(selection.rows), of_tokens, chosen >= 0)
    visible = torch.where(handle.request_slots[ids] >= 0, (handle.positions + 1) // 4, 0)
    assert (chosen < visible[:, None]).all()
    assert (chosen >= 0).sum(dim=1).tolist() == visible.clamp(max=8).tolist()


def test_gathered_rows_may_repeat_and_be_missing():
    handle, selection = written_handle(build_scenario(), CSA)
    row = int(selection.rows.max())
    gathered = handle.gather_compressed_kv(torch.tensor([[row, -1, row], [-1, -1, -1]]))
    assert gathered.is_present.tolist() == [[True, False, True], [False, False, False]]
    assert torch.equal(gathered.values[0, 0], gathered.values[0, 2])
    assert gathered.values[0, 0].abs().sum() > 0
    assert (gathered.values[~gathered.is_present] == 0).all()


@every_layer
def test_ring_rows_are_the_oracle_at_the_positions_of_the_view(layer_idx):
    scenario = build_scenario("drafts")
    handle, _ = written_handle(scenario, layer_idx)
    view, ring = handle.read_swa_view(), handle.state.ring
    for row, request in enumerate(scenario.requests):
        if request.slot < 0:
            continue
        positions = view.positions[row].long()
        is_held = positions >= 0
        assert is_held.sum() == min(request.after, WINDOW + 3)
        window = request.oracle[layer_idx].window
        assert torch.equal(ring.data[request.slot][is_held], window.data[positions[is_held]])
        assert torch.equal(ring.scales[request.slot][is_held], window.scales[positions[is_held]])
        assert (ring.data[request.slot][~is_held] == POISON_BYTE).all()


@every_format
def test_padding_rows_of_nan_change_nothing_and_give_zero(name):
    padded, plain = build_scenario(name), build_scenario(name)
    real = [request for request in plain.requests if request.slot >= 0]
    got, want = run_requests(padded, padded.requests), run_requests(plain, real)
    assert_same_bytes(padded.manager, pool_bytes(plain.manager))
    is_padding = torch.cat([torch.full((r.after - r.before,), r.slot < 0) for r in padded.requests])
    for mine, expected in zip(got, want, strict=True):
        assert (mine.output[is_padding] == 0).all()
        assert (mine.lse[is_padding] == -torch.inf).all()
        torch.testing.assert_close(mine.output[~is_padding], expected.output)


@pytest.mark.parametrize("lengths", [[(0, 1)], [(0, 300)], [(3, 3), (128, 140), (0, 5)]], ids=str)
@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "no sinks"])
def test_a_forward_of_padding_alone_touches_nothing(lengths, has_sinks):
    scenario = build_scenario()
    if not has_sinks:
        weights = [layer._replace(sinks=None) for layer in scenario.weights]
        scenario = scenario._replace(weights=weights)
    before = pool_bytes(scenario.manager)
    layers = [all_nan(inputs) for inputs in model_projections(CONFIG, 300, seed=0)]
    results = run_requests(scenario, [Request(-1, *pair, layers, []) for pair in lengths])
    assert_same_bytes(scenario.manager, before)
    for result in results:
        assert result.output.shape == (sum(after - first for first, after in lengths), 4, 96)
        assert (result.output == 0).all()


@pytest.mark.parametrize("slots", [[], [1, 3]], ids=["no rows", "rows of no tokens"])
def test_a_forward_of_no_tokens_touches_nothing(slots):
    scenario = build_scenario()
    manager = scenario.manager
    before, lengths = pool_bytes(manager), manager.lengths[slots]
    plan = prepare_forward(manager, slots, lengths, lengths)
    for idx, weights in enumerate(scenario.weights):
        handle = manager.acquire(idx, plan)
        empty = take_rows(scenario.requests[0].layers[idx], slice(0, 0))
        result = handle.forward(empty, weights)
        assert result.output.shape == (0, 4, 96) and result.lse.shape == (0, 4)
        assert handle.gather_swa_kv().values.shape == (0, WINDOW, 96)
    assert plan.is_complete
    assert_same_bytes(manager, before)
