"""`prepare_forward`: what a plan says, when blocks are taken, and refusals that change nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.cache.memory.capacity import blocks_for
from dsv4.errors import LiveForwardError, OutOfBlocksError
from tests.handles import finish

WINDOW = 128
MODELS = {
    "mixed": CacheConfig.tiny(),
    "hca": CacheConfig.tiny(compress_ratios=(0, 128)),
    "swa": CacheConfig.tiny(compress_ratios=(0, 0)),
}


def tensor_fields(tokens):
    """All fields but `max_step`, a number."""
    return [name for name in tokens._fields if name != "max_step"]


def make_manager(config=MODELS["mixed"], **sizes):
    defaults = {"max_requests": 6, "num_blocks": 12, "max_forward_tokens": 2048}
    return KVCacheManager(config, **{**defaults, **sizes})


def grow(manager, slots, after):
    before = manager.lengths[list(slots)].copy()
    plan = prepare_forward(manager, slots, before, after)
    finish(manager, plan)
    return plan


def grown_manager(*lengths, config=MODELS["mixed"], **sizes):
    """A manager whose first slots have these lengths, with a finished plan as the current one."""
    manager = make_manager(config, **sizes)
    slots = [manager.open_request() for _ in lengths]
    return manager, grow(manager, slots, lengths)


def plan_arrays(plan):
    """Everything a plan says, as plain lists."""
    device = {name: getattr(plan.tokens, name).tolist() for name in tensor_fields(plan.tokens)}
    host = {
        name: getattr(plan, name).tolist()
        for name in ("request_slots", "positions_before", "positions_after")
    }
    scalars = {
        name: getattr(plan, name)
        for name in ("num_tokens", "num_requests", "longest", "num_new_blocks", "has_workspace")
    }
    return device, host, scalars


def snapshot(manager, plan):
    """All that a refusal must leave alone."""
    allocator = manager._books.allocator
    return {
        "lengths": manager.lengths.tolist(),
        "is_open": manager.is_open.tolist(),
        "num_slot_blocks": manager._books.requests.num_blocks.tolist(),
        "host_block_table": manager._books.requests.block_table.tolist(),
        "block_table": manager.block_table.tolist(),
        "free": (allocator.num_free, allocator.num_owners.tolist(), allocator._free.tolist()),
        "free_slots": (manager.num_free_slots, list(manager._books.requests._free_slots)),
        "plan_buffers": manager.device_memory.plan_buffers.packed.tolist(),
        "plan": plan_arrays(plan),
        "is_complete": plan.is_complete,
        "is_retired": plan.is_retired,
    }


def assert_refused(manager, plan, rows, error, match):
    before = snapshot(manager, plan)
    with pytest.raises(error, match=match):
        prepare_forward(manager, *rows)
    assert snapshot(manager, plan) == before
    assert manager.acquire(0, plan).plan is plan
    manager.check_integrity()


LENGTHS = (0, 5, 130, 300, 3, 256)
BATCHES = {
    "decode": [(4, 3, 4), (1, 5, 6), (5, 256, 257)],
    "one prefill": [(0, 0, 700)],
    "mixed": [(3, 300, 301), (-1, 0, 2), (0, 0, 200), (2, 130, 130), (1, 5, 140), (-1, 7, 7)],
    "verify": [(5, 256, 260), (3, 300, 305), (-1, 40, 60), (2, 130, 134)],
    "zero tokens": [(3, 300, 300), (0, 0, 0)],
    "padding only": [(-1, 3, 9), (-1, 0, 0)],
    "no rows": [],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("drafts", [0, 3])
def test_contents_of_a_plan(rows, drafts):
    manager, _ = grown_manager(*LENGTHS, config=CacheConfig.tiny(drafts_per_step=drafts))
    slots, before, after = ([row[i] for row in rows] for i in range(3))
    plan = prepare_forward(manager, slots, before, after)

    tokens = plan.tokens
    assert tokens.request_slots.tolist() == plan.request_slots.tolist() == slots
    assert tokens.positions_before.tolist() == plan.positions_before.tolist() == before
    assert tokens.positions_after.tolist() == plan.positions_after.tolist() == after
    expected = [(idx, p) for idx, row in enumerate(rows) for p in range(row[1], row[2])]
    assert (
        list(zip(tokens.request_ids.tolist(), tokens.positions.tolist(), strict=True)) == expected
    )
    starts, end = [], 0
    for slot, first, last in rows:
        is_long = slot >= 0 and last - first > drafts + 1
        starts.append(end if is_long else -1)
        end += last - first + WINDOW - 1 if is_long else 0
    assert tokens.workspace_starts.tolist() == starts
    assert end <= manager.capacity.workspace_rows
    assert tokens.block_table is manager.block_table

    longest = max((last for slot, _, last in rows if slot >= 0), default=0)
    assert (plan.num_requests, plan.num_tokens) == (len(rows), len(expected))
    assert plan.longest == longest
    assert [plan.max_entries(ratio) for ratio in (0, 4, 128)] == [0, longest // 4, longest // 128]
    assert plan.has_workspace == (end > 0)
    assert not plan.is_complete and not plan.is_retired
    for name in tensor_fields(tokens):
        assert getattr(tokens, name).dtype == torch.int32
    for slot, _, last in rows:
        assert slot < 0 or manager.lengths[slot] == last
    manager.check_integrity()


def test_rows_left_out_keep_their_length_and_blocks():
    manager, _ = grown_manager(*LENGTHS)
    table = manager._books.requests.block_table.copy()
    grow(manager, [3], [1000])
    assert manager.lengths.tolist() == [0, 5, 130, 1000, 3, 256]
    others = [0, 1, 2, 4, 5]
    assert np.array_equal(manager._books.requests.block_table[others], table[others])
    assert np.array_equal(manager._books.requests.block_table[3, :2], table[3, :2])


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("max_forward_tokens", [1, 2, 3, 5, 8, 11, 100])
@pytest.mark.parametrize("max_requests", [1, 3, 8])
def test_the_workspace_holds_the_worst_forward(drafts, max_forward_tokens, max_requests):
    config = CacheConfig.tiny(drafts_per_step=drafts)
    manager = make_manager(config, max_requests=max_requests, max_forward_tokens=max_forward_tokens)
    shortest = drafts + 2
    counts = [shortest] * min(max_requests, max_forward_tokens // shortest)
    if counts:
        counts[-1] += max_forward_tokens - sum(counts)
    slots = [manager.open_request() for _ in counts]
    plan = prepare_forward(manager, slots, [0] * len(counts), counts)
    starts = plan.tokens.workspace_starts.tolist()
    ends = [start + count + WINDOW - 1 for start, count in zip(starts, counts, strict=True)]
    assert ends[:-1] == starts[1:]
    assert max(ends, default=0) == manager.capacity.workspace_rows


BLOCK_BOUNDARIES = {
    "mixed": {
        0: 0, 3: 0, 4: 1, 5: 1, 255: 1, 256: 1, 257: 1, 259: 1, 260: 2, 261: 2,
        511: 2, 512: 2, 513: 2, 515: 2, 516: 3,
    },
    "hca": {
        3: 0, 4: 0, 5: 0, 127: 0, 128: 1, 129: 1, 255: 1, 256: 1, 257: 1, 383: 1, 384: 2, 385: 2,
        511: 2, 512: 2, 513: 2, 639: 2, 640: 3,
    },
    "swa": {3: 0, 4: 0, 5: 0, 255: 0, 256: 0, 257: 0, 511: 0, 512: 0, 513: 0},
}  # fmt: skip


@pytest.mark.parametrize(
    "model, length, num_blocks",
    [(model, *pair) for model, table in BLOCK_BOUNDARIES.items() for pair in table.items()],
)
def test_blocks_for_a_prefill(model, length, num_blocks):
    manager = make_manager(MODELS[model])
    slot = manager.open_request()
    plan = prepare_forward(manager, [slot], [0], [length])
    assert plan.num_new_blocks == num_blocks == manager._books.requests.num_blocks[slot]
    assert (manager._books.requests.block_table[slot] >= 0).sum() == num_blocks
    assert manager._books.allocator.num_free == 12 - num_blocks
    manager.check_integrity()


@pytest.mark.parametrize(
    "model, opening",
    [("mixed", [3, 259, 515]), ("hca", [127, 383]), ("swa", [])],
    ids=["mixed", "hca", "swa"],
)
def test_decoding_takes_a_block_with_the_token_that_closes_its_first_entry(model, opening):
    manager = make_manager(MODELS[model])
    slot = manager.open_request()
    took = [pos for pos in range(520) if grow(manager, [slot], [pos + 1]).num_new_blocks]
    assert took == opening
    manager.check_integrity()


@pytest.mark.parametrize("block_tokens", [128, 384, 896])
def test_other_block_sizes(block_tokens):
    manager, _ = grown_manager(
        block_tokens + 3, block_tokens + 4, config=CacheConfig.tiny(block_tokens=block_tokens)
    )
    assert manager._books.requests.num_blocks.tolist() == [1, 2, 0, 0, 0, 0]


def test_blocks_of_several_requests_go_to_their_own_rows():
    manager, _ = grown_manager(300, 3, 512)
    plan = prepare_forward(manager, [2, -1, 0, 1], [512, 9, 300, 3], [800, 600, 301, 4])
    assert plan.num_new_blocks == 3
    assert manager._books.requests.num_blocks.tolist() == [2, 1, 4, 0, 0, 0]
    used = manager._books.requests.block_table[manager._books.requests.block_table >= 0]
    assert len(set(used.tolist())) == len(used) == 7
    assert (manager._books.allocator.num_owners[used] == 1).all()
    manager.check_integrity()


def test_the_same_calls_give_the_same_plans():
    def run():
        manager, first = grown_manager(300, 3, 512)
        plans = [plan_arrays(first)]
        plans.append(plan_arrays(grow(manager, [2, 0], [800, 301])))
        manager.free_request(0)
        slot = manager.open_request()
        plans.append(plan_arrays(grow(manager, [1, slot], [270, 700])))
        return plans

    assert run() == run()


def as_list(values):
    return list(values)


def as_tuple(values):
    return tuple(values)


def as_int32(values):
    return np.array(values, dtype=np.int32)


def as_int16(values):
    return np.array(values, dtype=np.int16)


def as_strided(values):
    return np.repeat(np.array(values, dtype=np.int64), 2)[::2]


def as_torch_int64(values):
    return torch.tensor(values)


def as_torch_int32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "convert",
    [as_list, as_tuple, as_int16, as_int32, as_strided, as_torch_int32, as_torch_int64],
)
def test_lists_arrays_and_cpu_tensors_are_accepted(convert):
    rows = [[3, -1, 0, 2], [300, 0, 0, 130], [301, 2, 200, 130]]
    manager, _ = grown_manager(*LENGTHS)
    other, _ = grown_manager(*LENGTHS)
    given = [convert(values) for values in rows]
    plan = prepare_forward(manager, *given)
    assert plan_arrays(plan) == plan_arrays(prepare_forward(other, *rows))
    if not isinstance(given[0], tuple):
        given[0][0] = 99
        assert plan.request_slots.tolist() == plan.tokens.request_slots.tolist() == rows[0]


def test_addresses_never_change():
    manager, first = grown_manager(*LENGTHS)

    def addresses(plan):
        return {
            name: getattr(plan.tokens, name).data_ptr()
            for name in tensor_fields(plan.tokens)
            if getattr(plan.tokens, name).numel()
        }

    expected = addresses(first)
    assert len(set(expected.values())) == len(expected) == 10
    storage = manager.device_memory.plan_buffers.packed
    ends = storage.data_ptr() + storage.nbytes
    table = expected.pop("block_table")
    assert all(storage.data_ptr() <= address < ends for address in expected.values())
    for slots, after in (([3], [301]), ([5, 0, 1], [700, 60, 6]), ([2, 4], [131, 900])):
        got = addresses(grow(manager, slots, after))
        assert got.pop("block_table") == table == manager.block_table.data_ptr()
        assert got.items() <= expected.items() and len(got) >= 7


def test_a_plan_does_not_depend_on_the_number_of_layers():
    def run(ratios):
        config = CacheConfig.tiny(compress_ratios=ratios)
        manager, first = grown_manager(*LENGTHS, config=config)
        later = [([5, 3, 0], [257, 900, 4]), ([0, 1, 2], [5, 6, 131])]
        plans = [first, *(grow(manager, *rows) for rows in later)]
        return [plan_arrays(plan)[1:] for plan in plans], plan_arrays(plans[-1])

    assert run((0, 4, 128, 4)) == run((0, 0, *(4, 128) * 20, 4))


SLOT_LENGTHS = (5, 300, 0)
SIZES = {
    "max_requests": 4, "num_blocks": 4, "max_forward_tokens": 700, "max_request_tokens": 900,
}  # fmt: skip
REFUSALS = {
    "slot not open": (
        ([0, 3], [5, 0], [6, 1]), ValueError, "Invalid request_slots: slot 3 is not open",
    ),
    "slot too large": (
        ([0, 4], [5, 0], [6, 1]), ValueError,
        "Invalid request_slots: expected -1 to 3, got 0 to 4",
    ),
    "slot below -1": (
        ([-2, 1], [0, 300], [1, 301]), ValueError,
        "Invalid request_slots: expected -1 to 3, got -2 to 1",
    ),
    "slot twice": (
        ([1, 0, 1], [300, 5, 300], [301, 6, 301]), ValueError, "slot 1 is named more than once",
    ),
    "before behind": (
        ([1, 0], [300, 4], [301, 6]), ValueError,
        "Invalid positions_before: expected 5, the length of slot 0, got 4",
    ),
    "before ahead": (
        ([1, 0], [301, 5], [302, 6]), ValueError,
        "Invalid positions_before: expected 300, the length of slot 1, got 301",
    ),
    "before negative": (
        ([2], [-1], [1]), ValueError,
        "Invalid positions_before: expected 0, the length of slot 2, got -1",
    ),
    "going back": (
        ([1, 0], [300, 5], [301, 4]), ValueError,
        "expected 0 <= positions_before <= positions_after, got 5 and 4 in row 1",
    ),
    "padding going back": (
        ([0, -1], [5, 3], [6, 2]), ValueError,
        "expected 0 <= positions_before <= positions_after, got 3 and 2 in row 1",
    ),
    "padding before negative": (
        ([0, -1], [5, -1], [6, 2]), ValueError,
        "expected 0 <= positions_before <= positions_after, got -1 and 2 in row 1",
    ),
    "too many rows": (
        ([0, -1, -1, -1, -1], [5, 0, 0, 0, 0], [6, 0, 0, 0, 0]), ValueError,
        "Too many requests in one forward: expected at most 4, got 5",
    ),
    "too many tokens": (
        ([0, 2], [5, 0], [10, 696]), ValueError,
        "Too many tokens in one forward: expected at most 700, got 701",
    ),
    "too many padding tokens": (
        ([0, -1], [5, 0], [6, 700]), ValueError,
        "Too many tokens in one forward: expected at most 700, got 701",
    ),
    "request too long": (
        ([0, 1], [5, 300], [6, 901]), ValueError,
        "Too many tokens in one request: expected at most 900, got 901",
    ),
    "padding too long": (
        ([0, -1], [5, 899], [6, 901]), ValueError,
        "Too many tokens in one request: expected at most 900, got 901",
    ),
    "fewer slots": (
        ([0], [5, 300], [6, 301]), ValueError, "of equal length, got 1, 2 and 2",
    ),
    "fewer lengths": (
        ([0, 1], [5, 300], [6]), ValueError, "of equal length, got 2, 2 and 1",
    ),
    "slots 2-D": (
        ([[0, 1]], [5, 300], [6, 301]), ValueError,
        r"Invalid shape of request_slots: expected one axis, got \[1, 2\]",
    ),
    "after too large": (
        ([0], [5], [2**70]), ValueError,
        f"Invalid positions_after: expected 64-bit signed integers, got {2**70}",
    ),
    "before 2-D": (
        ([0, 1], np.array([[5], [300]]), [6, 301]), ValueError,
        r"Invalid shape of positions_before: expected one axis, got \[2, 1\]",
    ),
    "after a number": (
        ([0], [5], 6), TypeError,
        "Invalid positions_after: expected a list of integers, got 6",
    ),
    "slots float": (
        ([0.0], [5], [6]), TypeError,
        "Invalid dtype of request_slots: expected integers, got float64",
    ),
    "before float": (
        ([0], np.array([5], dtype=np.float32), [6]), TypeError,
        "Invalid dtype of positions_before: expected integers, got float32",
    ),
    "after bool": (
        ([2], [0], torch.tensor([True])), TypeError,
        "Invalid dtype of positions_after: expected integers, got bool",
    ),
    "slots on a device": (
        (torch.zeros(1, dtype=torch.int64, device="meta"), [5], [6]), ValueError,
        "Invalid device of request_slots: expected cpu, got meta",
    ),
    "out of blocks": (
        ([2], [0], [600]), OutOfBlocksError,
        "Out of blocks: 3 needed, 1 of 4 free; in this forward 1 of 1 requests grow",
    ),
    "out of blocks together": (
        ([1, -1, 0, 2], [300, 0, 5, 0], [301, 300, 260, 4]), OutOfBlocksError,
        "Out of blocks: 2 needed, 1 of 4 free; in this forward 2 of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, error, match", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_changes_nothing(rows, error, match):
    manager, plan = grown_manager(*SLOT_LENGTHS, **SIZES)
    assert_refused(manager, plan, rows, error, match)
    grow(manager, [2, 0, 1], [3, 6, 310])
    manager.check_integrity()


def test_the_largest_legal_forwards_are_accepted():
    manager, _ = grown_manager(*SLOT_LENGTHS, **{**SIZES, "num_blocks": 8})
    plan = grow(manager, [0, 2], [9, 696])
    assert plan.num_tokens == 700
    assert grow(manager, [1], [900]).longest == 900
    finish(manager, prepare_forward(manager, [0, -1, -1, -1], [9, 0, 0, 899], [10, 0, 1, 900]))


def test_a_forward_refused_for_blocks_runs_once_they_are_free():
    manager, plan = grown_manager(*SLOT_LENGTHS, **SIZES)
    rows = ([2, 0], [0, 5], [4, 260])
    assert_refused(manager, plan, rows, OutOfBlocksError, "2 needed, 1 of 4 free")
    manager.free_request(1)
    assert prepare_forward(manager, *rows).num_new_blocks == 2
    manager.check_integrity()


def test_the_last_block_can_be_taken():
    manager, _ = grown_manager(*SLOT_LENGTHS, **SIZES)
    grow(manager, [1, 2], [511, 256])
    assert manager._books.allocator.num_free == 0
    grow(manager, [1, 2], [512, 259])
    manager.check_integrity()


@pytest.mark.parametrize("others", [[], [0, 1]], ids=["alone", "with others"])
def test_a_second_plan_is_refused_while_one_is_live(others):
    manager, _ = grown_manager(*SLOT_LENGTHS, **SIZES)
    plan = prepare_forward(manager, [2], [0], [3])
    slots = others or [2]
    before = manager.lengths[slots]
    match = r"A forward of slots \[2\] is live: run all of its layers"
    assert_refused(manager, plan, (slots, before, before + 1), LiveForwardError, match)
    plan.cancel()
    grow(manager, [0, 1], [6, 301])


def test_a_slot_freed_and_reopened_starts_at_zero():
    manager, _ = grown_manager(*SLOT_LENGTHS, **SIZES)
    manager.free_request(1)
    assert manager.open_request() == 1
    with pytest.raises(ValueError, match="expected 0, the length of slot 1, got 300"):
        prepare_forward(manager, [1], [300], [301])
    assert grow(manager, [1], [5]).num_new_blocks == 1


def brute_force_blocks(config, length):
    """Blocks with a closed entry of any layer, counted token by token."""
    return len(
        {
            pos // config.block_tokens
            for ratio in config.compress_ratios
            if ratio
            for pos in range(ratio - 1, length, ratio)
        }
    )


OPERATIONS = st.lists(
    st.one_of(
        st.just(("open",)),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(
            st.just("grow"),
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=4),
        ),
    ),
    max_size=24,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(MODELS)), OPERATIONS)
def test_random_requests_keep_the_books_right(model, operations):
    config = MODELS[model]
    manager = make_manager(
        config, max_requests=3, num_blocks=5, max_forward_tokens=1200, max_request_tokens=1100
    )
    lengths = {}

    def blocks(of):
        return sum(brute_force_blocks(config, length) for length in of.values())

    for name, *arguments in operations:
        if name == "open" and len(lengths) < 3:
            lengths[manager.open_request()] = 0
        elif name == "free" and arguments[0] in lengths:
            del lengths[arguments[0]]
            manager.free_request(arguments[0])
        elif name == "grow":
            rows = {slot: count for slot, count in arguments[0] if slot in lengths}
            rows = {slot: min(lengths[slot] + count, 1100) for slot, count in rows.items()}
            if blocks({**lengths, **rows}) > 5:
                with pytest.raises(OutOfBlocksError):
                    grow(manager, list(rows), list(rows.values()))
            else:
                grow(manager, list(rows), list(rows.values()))
                lengths |= rows
        manager.check_integrity()
        expected = [lengths.get(slot, 0) for slot in range(3)]
        assert manager.lengths.tolist() == expected
        num_blocks = manager._books.requests.num_blocks.tolist()
        assert num_blocks == [brute_force_blocks(config, n) for n in expected]
        assert blocks_for(config, manager.lengths).tolist() == num_blocks
        assert manager._books.allocator.num_free == 5 - blocks(lengths)
    for slot in lengths:
        manager.free_request(slot)
    manager.check_integrity()
    assert manager._books.allocator.num_free == 5


def assert_padded(manager, plan, num_tokens):
    """All that the plan leaves over reads as padding, up to `num_tokens` tokens."""
    batch, host = plan.num_requests, manager.device_memory.plan_buffers.host
    rest = manager.capacity.max_requests + 1 - batch
    expected = {
        "request_slots": -1, "positions_before": 0, "positions_after": 0,
        "token_starts": plan.num_tokens, "workspace_starts": -1,
    }  # fmt: skip
    for name, value in expected.items():
        assert host[name][batch:].tolist() == [value] * rest, name
    assert rest >= 1 and host["request_slots"][batch] == -1
    spare = num_tokens - plan.num_tokens
    assert host["positions"][plan.num_tokens : num_tokens].tolist() == [0] * spare
    assert host["request_ids"][plan.num_tokens : num_tokens].tolist() == [batch] * spare


def test_what_a_plan_leaves_over_is_padding():
    manager, plan = grown_manager(*LENGTHS)
    most = plan.num_tokens
    assert_padded(manager, plan, most)
    for rows in (*BATCHES.values(), BATCHES["mixed"]):
        manager, plan = grown_manager(*LENGTHS)
        for _ in range(2):
            plan = prepare_forward(manager, *([row[i] for row in rows] for i in range(3)))
            finish(manager, plan)
            assert_padded(manager, plan, most)
            rows = [(slot, after, after + (after > 5)) for slot, _, after in rows[::-1]]


def test_a_plan_of_the_same_size_finds_its_padding():
    manager, first = grown_manager(*LENGTHS)
    for slots in ([3, 1], [2, 5], [5, 3, 1], [1, 2, 3]):
        plan = grow(manager, slots, manager.lengths[slots] + 1)
        assert_padded(manager, plan, first.num_tokens)
        assert plan.tokens.request_slots.tolist() == slots


def test_reserved_tokens_are_padded_before_any_plan_reaches_them():
    manager, _ = grown_manager(5, 6)
    for reserved in (40, 20, 100):
        grow(manager, [0, 1], manager.lengths[:2] + 1)
        manager.device_memory.plan_buffers.reserve(reserved)
        plan = grow(manager, [0, 1], manager.lengths[:2] + 1)
        assert_padded(manager, plan, max(40, reserved))
