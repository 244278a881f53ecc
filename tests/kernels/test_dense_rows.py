"""Attention of chunks over dense rows on Hopper, within the bound of `test_triton_attention`.

On the CPU rows become dense, and the choice of dense rows is made from sizes. `test_hopper` runs
the kernel there by a model of Gluon, with NaN rows of this file.
"""

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.kernels.index_scratch import dense_sizes
from dsv4.kernels.reference.gather import gather_rows
from dsv4.kernels.triton import attention, dense_rows
from dsv4.kernels.triton.dense_rows import choose_dense, cut_dense_rows, make_dense_rows
from dsv4.testing import POISON_BYTE, model_weights, move_to, poison, take_rows
from tests.kernels.serving import write_in_parts
from tests.kernels.test_triton_attention import (
    CSA,
    HCA,
    PRESETS,
    SINKS,
    SWA,
    TYPES,
    assert_absent_outside_of_the_pool,
    assert_same_bits,
    assert_within_bound,
    make_inputs,
    make_raw,
    run,
    triton,
)
from tests.kernels.test_triton_gather import DEVICE, filled, written_projections

BOTH = [SWA, CSA, HCA]


def sizes_of(handle, *, max_entries: int, num_tokens: int, num_chunks: int = 2):
    layout = handle.memory.layout
    return dense_sizes(
        num_tokens=num_tokens, num_chunks=num_chunks, window=layout.window,
        max_entries=max_entries, entries_per_block=layout.entries_per_block,
        num_blocks=handle.memory.blocks.shape[0], num_heads=64, dim=layout.head_dim,
    )  # fmt: skip


@pytest.mark.parametrize("ratios", BOTH, ids=list(TYPES))
@pytest.mark.parametrize("kv_format, num_padding", [("fp8", 0), ("fp8", 2), ("bf16", 0)])
def test_rows_become_dense(ratios, kv_format, num_padding):
    """Window rows of the workspace, then the entries of each chunk; nothing else is written.

    A captured forward has chunks of padding behind its own.
    """
    config = CacheConfig.tiny(compress_ratios=ratios, kv_format=kv_format)
    handle = filled(config, [40, 300, 99], [290, 301, 117])
    memory, tokens, layout = handle.memory, handle.tokens, handle.memory.layout
    assert tokens.chunk_ids.tolist() == [0, 3] and tokens.request_slots[1] == -1
    padding = tokens.chunk_ids.new_full((num_padding,), 1)
    tokens = tokens._replace(chunk_ids=torch.cat((tokens.chunk_ids, padding)))
    num_entries = [290 // ratios[0], 117 // ratios[0]] if ratios[0] else [0, 0]
    num_entries += [0] * num_padding
    sizes = sizes_of(handle, max_entries=max(num_entries), num_tokens=handle.plan.num_tokens,
                     num_chunks=len(num_entries))  # fmt: skip
    storage = torch.full((sizes.num_bytes,), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
    dense = cut_dense_rows(storage, sizes, dim=layout.head_dim)
    make_dense_rows(dense, memory, tokens)
    num_window = 250 + 18 + 2 * (layout.window - 1)
    flat = torch.arange(num_window, device=DEVICE)
    assert is_same(dense.rows[:num_window], gather_rows(memory.window.workspace, flat))
    untouched = torch.full((2,), POISON_BYTE, dtype=torch.uint8, device=DEVICE).view(torch.bfloat16)
    for chunk, count in enumerate(num_entries):
        first = sizes.window_rows + chunk * sizes.chunk_stride
        if count:
            slot = int(tokens.request_slots[tokens.chunk_ids[chunk]])
            entry = torch.arange(count, device=DEVICE)
            blocks = tokens.block_table[slot, entry // layout.entries_per_block].long()
            rows = blocks * layout.entries_per_block + entry % layout.entries_per_block
            assert is_same(dense.rows[first : first + count], gather_rows(memory.entries, rows))
            mapped = dense.columns[chunk * sizes.num_blocks + blocks]
            assert torch.equal(mapped, (entry // layout.entries_per_block).int())
        rest = dense.rows[first + count : first + sizes.chunk_stride]
        assert (rest.view(torch.int16) == untouched.view(torch.int16)).all()
    assert int(dense.left[0]) == 0


def test_sizes_that_are_too_small_write_nothing_else():
    """Fewer tokens and entries than the chunks have: what follows the rows stays as it was."""
    handle = filled(CacheConfig.tiny(compress_ratios=HCA), [99, 600], [370, 930])
    layout, sizes = handle.memory.layout, sizes_of(handle, max_entries=3, num_tokens=11)
    storage = torch.full((sizes.num_bytes + 4096,), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
    dense = cut_dense_rows(storage, sizes, dim=layout.head_dim)
    make_dense_rows(dense, handle.memory, handle.tokens)
    flat = torch.arange(sizes.window_rows, device=DEVICE)
    window = gather_rows(handle.memory.window.workspace, flat)
    assert is_same(dense.rows[: sizes.window_rows], window)
    for chunk, request in enumerate(handle.tokens.chunk_ids.tolist()):
        first = sizes.window_rows + chunk * sizes.chunk_stride
        column = torch.arange(sizes.chunk_stride, device=DEVICE) // layout.entries_per_block
        blocks = handle.tokens.block_table[handle.tokens.request_slots[request]][column].long()
        rows = blocks * layout.entries_per_block
        rows += torch.arange(sizes.chunk_stride, device=DEVICE) % layout.entries_per_block
        want = gather_rows(handle.memory.entries, torch.where(blocks >= 0, rows, -1))
        count = min(sizes.chunk_stride, [370, 930][chunk] // 128)
        assert is_same(dense.rows[first : first + count], want[:count])
    untouched = torch.full_like(storage[:4], POISON_BYTE).view(torch.int32)
    is_mapped = dense.columns != untouched
    assert dense.columns[is_mapped].max() < sizes.chunk_stride, "nothing of a row"
    assert int(is_mapped.sum()) <= 2 * sizes.chunk_stride
    assert int(dense.left[0]) == 0
    assert (dense.left.view(torch.uint8)[4:] == POISON_BYTE).all()
    assert (storage[sizes.num_bytes :] == POISON_BYTE).all()


def is_same(got, want) -> bool:
    """Whether rows are equal; poison before the chunk's first token is NaN in both."""
    is_nan = torch.equal(got.isnan(), want.isnan())
    return is_nan and torch.equal(got.float().nan_to_num(), want.float().nan_to_num())


def test_the_choice_is_made_from_sizes():
    config = CacheConfig.v4_flash(compress_ratios=HCA)
    manager = KVCacheManager(
        config, max_requests=2, num_blocks=16, max_forward_tokens=512, max_request_tokens=4096
    )
    (memory,) = manager.device_memory.memories
    enough = {"num_chunks": 1, "max_entries": 32}
    sizes = choose_dense(512, 64, 160, memory, **enough)
    assert sizes.num_bytes == manager.capacity.dense_bytes == memory.index_scratch.numel()
    assert sizes.window_rows == 512 + 127 and sizes.chunk_stride == 32
    assert choose_dense(512, 64, 160, memory, num_chunks=0, max_entries=32) is None
    assert choose_dense(512, 64, 160, memory, num_chunks=2, max_entries=32) is None, "no room"
    assert choose_dense(512, 64, 160, memory, num_chunks=1, max_entries=34) is None, "no room"
    assert choose_dense(512, 32, 160, memory, **enough) is None, "no whole block of heads"
    waves = dense_rows.MIN_WAVES * dense_rows.num_multiprocessors(memory.index_scratch.device)
    assert choose_dense(waves, 64, 160, memory, **enough) is not None
    assert choose_dense(waves - 1, 64, 160, memory, **enough) is None, "too few programs"
    assert choose_dense(400, 64, 4, memory, **enough) is None, "too few reads"


@pytest.fixture
def always_dense(monkeypatch):
    """Rows of every chunk become dense; the fixture lists the sizes of each such call."""
    calls = []
    attend_dense = attention.attend_dense
    monkeypatch.setattr(dense_rows, "MIN_WAVES", 0)
    monkeypatch.setattr(dense_rows, "MIN_READS", 0)
    monkeypatch.setattr(attention, "choose_splits", lambda *arguments: None)

    def attend(query, output, sizes, *arguments, **options):
        left = attend_dense(query, output, sizes, *arguments, **options)
        calls.append((sizes, left))
        return left

    monkeypatch.setattr(attention, "attend_dense", attend)
    return calls


def real(preset: str, ratios: tuple[int, ...], before: list[int], after: list[int], **choices):
    config = PRESETS[preset](compress_ratios=ratios, **choices)
    manager = KVCacheManager(
        config, max_requests=8, num_blocks=96, device="cuda", max_forward_tokens=8704
    )
    poison(manager)
    slots = [manager.open_request() for _ in before]
    (weights,) = model_weights(config, seed=0)
    inputs = written_projections(config, max(8704, sum(before) + 2), seed=1)
    for starts, ends in (([0] * len(before), before), (before, after)):
        plan = prepare_forward(manager, [-1, *slots, -1], [0, *starts, 0], [1, *ends, 1])
        handle = manager.acquire(0, plan)
        rows = take_rows(inputs, slice(0, plan.num_tokens))
        write_in_parts(handle, move_to("cuda", rows), move_to("cuda", weights))
    return handle


LENGTHS = {
    "from 0": ([0], [1000]),
    "2 tokens": ([700], [702]),
    "63, 64, 65": ([60, 1, 3000], [123, 65, 3065]),
    "127, 128, 129": ([0, 127, 4097], [127, 255, 4226]),
    "steps between": ([0, 254, 5000, 700], [130, 255, 5040, 701]),
    "entries around tiles": ([8000, 120, 250], [8200, 140, 260]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("ratios", BOTH, ids=list(TYPES))
@pytest.mark.parametrize(("preset", "heads"), [("flash", 64), ("pro", 128)])
def test_within_the_bound(preset, heads, ratios, lengths, always_dense):
    handle = real(preset, ratios, *LENGTHS[lengths], num_query_heads=heads)
    inputs = make_inputs(handle)
    got = run(triton(), handle, inputs)
    assert_within_bound(handle, inputs, got)
    ((_sizes, left),) = always_dense
    is_chunk = handle.tokens.workspace_starts[handle.tokens.request_ids] >= 0
    blocks = heads // 64
    expected = [blocks * t + b for t in (~is_chunk).nonzero().flatten().tolist()
                for b in range(blocks)]  # fmt: skip
    assert left[0] == len(expected)
    assert sorted(left[1 : 1 + len(expected)].tolist()) == expected, "of other tokens alone"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["from 0", "steps between"])
@pytest.mark.parametrize("ratios", BOTH, ids=list(TYPES))
@pytest.mark.parametrize(("preset", "heads"), [("flash", 64), ("pro", 128)])
def test_raw_queries_give_the_bits_of_prepared_ones(preset, heads, ratios, lengths, always_dense):
    """Also of items that are left to the kernel that reads in place."""
    handle = real(preset, ratios, *LENGTHS[lengths], num_query_heads=heads)
    raw, prepared = make_raw(handle)
    expected = run(triton(), handle, prepared)
    for _ in range(5):
        assert_same_bits(run(triton(), handle, raw, is_query_raw=True), expected)
    assert len(always_dense) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [8191, 8192, 8193])
@pytest.mark.parametrize("ratios", BOTH, ids=list(TYPES))
def test_a_long_chunk(ratios, num_tokens, always_dense):
    handle = real("flash", ratios, [300], [300 + num_tokens])
    inputs = make_inputs(handle)
    got = run(triton(), handle, inputs)
    in_place = run(triton(), handle, inputs, batch_invariant=True)
    assert len(always_dense) == 1
    error = (got.output.float() - in_place.output.float()).norm() / in_place.output.float().norm()
    assert error < 2.0**-8 and torch.allclose(got.lse, in_place.lse, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name, always_dense):
    handle = real("flash", CSA, [60], [200])
    inputs, value = make_inputs(handle), SINKS[name]
    given = None if value is None else torch.full_like(inputs.sinks, value)
    got = run(triton(), handle, inputs._replace(sinks=given))
    known = given if given is not None else torch.full_like(inputs.sinks, -torch.inf)
    assert_within_bound(handle, inputs._replace(sinks=known), got)
    assert len(always_dense) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
def test_rows_outside_of_the_pool(heads, always_dense):
    handle = real("flash", CSA, [0, 2000], [100, 2200], num_query_heads=heads)
    assert_absent_outside_of_the_pool(triton(), handle)
    assert len(always_dense) == 2


@pytest.mark.gpu
def test_rows_of_another_request_and_of_no_closed_entry(always_dense):
    """Items that list them are left to the kernel that reads in place, and only those."""
    handle = real("flash", CSA, [500, 2000], [600, 2200])
    inputs = make_inputs(handle)
    own = run(triton(), handle, inputs)
    rows = inputs.rows.clone()
    table, entries = handle.tokens.block_table, handle.memory.layout.entries_per_block
    slots = handle.tokens.request_slots.tolist()
    other = int(table[slots[2], 3]) * entries + 5
    open_entry = int(table[slots[1], 2]) * entries + entries - 1
    handle.memory.entries.data[int(table[slots[1], 2]), entries - 1] = 0x38
    handle.memory.entries.scales[int(table[slots[1], 2]), entries - 1] = 127
    rows[10, 0], rows[64, 1] = other, open_entry
    got = run(triton(), handle, inputs._replace(rows=rows))
    assert_within_bound(handle, inputs._replace(rows=rows), got)
    same = torch.ones(len(rows), dtype=torch.bool)
    same[[10, 64]] = False
    assert torch.equal(got.output[same], own.output[same])
    _, left = always_dense[1]
    assert sorted(left[1 : 1 + int(left[0])].tolist()) == [0, 10, 64, len(rows) - 1]


def assert_a_nan_is_seen_by_those_that_attend_it(handle, token_pos: int) -> None:
    """Spoil the first chunk's entry that starts at a token, or the window row of that token."""
    inputs = make_inputs(handle)
    before = run(triton(), handle, inputs)
    ratio, layout, chunk = handle.layer.ratio, handle.memory.layout, handle.tokens.chunk_ids[0]
    is_mine = handle.tokens.request_ids == chunk
    if ratio == 0:
        first = int(handle.positions[is_mine][0])
        handle.memory.window.workspace.data[0, layout.window - 1 + token_pos - first, 3] = 0x7F
        is_seen = is_mine & (handle.positions >= token_pos)
        is_seen &= handle.positions < token_pos + layout.window
    else:
        entry, slot = token_pos // ratio, int(handle.tokens.request_slots[chunk])
        block = int(handle.tokens.block_table[slot, entry // layout.entries_per_block])
        row = entry % layout.entries_per_block
        handle.memory.entries.data[block, row, 65] = 0x7F
        is_seen = is_mine & (handle.positions + 1 >= token_pos + ratio)
        if ratio == 4:
            is_seen = (inputs.rows == block * layout.entries_per_block + row).any(1)
    got = run(triton(), handle, inputs)
    assert is_seen.any() and not is_seen[is_mine].all()
    assert got.output[is_seen].isnan().all()
    assert torch.equal(got.output[~is_seen], before.output[~is_seen])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ratios", "token_pos"), [(SWA, 1100), (CSA, 1152), (HCA, 1152)], ids=list(TYPES)
)
def test_a_nan_row(ratios, token_pos, always_dense):
    """Also within a tile that other tokens read in part."""
    handle = real("flash", ratios, [1000, 900], [1400, 950])
    assert_a_nan_is_seen_by_those_that_attend_it(handle, token_pos)


@pytest.mark.gpu
@pytest.mark.parametrize("ratios", BOTH, ids=list(TYPES))
def test_reruns_and_replays_are_bitwise_equal(ratios, always_dense):
    handle = real("flash", ratios, [0, 254, 5000], [300, 255, 5040])
    inputs = make_inputs(handle)
    first = run(triton(), handle, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(triton(), handle, inputs)
    for _ in range(20):
        handle.memory.index_scratch.fill_(POISON_BYTE)
        captured.output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured.output, first.output)
        assert torch.equal(captured.lse, first.lse)


@pytest.mark.gpu
def test_some_tokens_of_a_chunk(always_dense):
    """Windows that are not among the dense rows are read in place."""
    handle = real("flash", HCA, [300], [900])
    inputs = make_inputs(handle)
    whole = run(triton(), handle, inputs)
    some = torch.arange(1, 601, 2, device="cuda")
    tokens = handle.tokens._replace(
        positions=handle.tokens.positions[some], request_ids=handle.tokens.request_ids[some]
    )
    memory = handle.memory._replace(rope_rows=handle.memory.rope_rows[:, :, some])
    got = triton().attend(
        inputs.query[some], inputs.sinks, memory, None, tokens,
        max_entries=handle.plan.max_entries(128),
    )  # fmt: skip
    sizes, left = always_dense[-1]
    assert int(left[0]) > 0 and sizes.window_rows == 300 + 127
    error = (got.output.float() - whole.output[some].float()).abs().max()
    assert error <= 2.0**-6 * whole.output.float().abs().max()
