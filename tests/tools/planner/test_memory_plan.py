"""The plan's numbers are a manager's numbers, to the byte and to the block."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.capacity import Capacity
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.errors import NoFreeSlotError, OutOfBlocksError
from dsv4.tools.planner.memory_plan import MemoryPlan, largest
from tests.cache.test_capacity import random_case
from tests.v41 import tiny_v41

GIB = 2**30
PRESETS = {"flash": CacheConfig.v4_flash, "pro": CacheConfig.v4_pro}
BF16 = {"kv_format": "bf16", "index_format": "bf16"}
FP8 = {"kv_format": "fp8", "index_format": "fp8"}
MXFP4 = {"kv_format": "fp8", "index_format": "mxfp4"}


def make_plan(config: CacheConfig, **changes: int) -> MemoryPlan:
    defaults = {"num_requests": 1, "context_tokens": 1000, "gpu_bytes": 80 * 10**9}
    return MemoryPlan(config, **(defaults | {"max_forward_tokens": 64} | changes))


def tiny_plan(**changes: int) -> MemoryPlan:
    return make_plan(CacheConfig.tiny(block_tokens=128), **changes)


def build_manager(capacity: Capacity) -> KVCacheManager:
    sizes = ("max_requests", "num_blocks", "max_forward_tokens", "max_request_tokens",
             "num_checkpoints", "undo_slots")  # fmt: skip
    return KVCacheManager(capacity.config, **{name: getattr(capacity, name) for name in sizes})


def tensor_bytes(manager: KVCacheManager) -> int:
    return sum(tensor.nbytes for tensor in manager.tensors().values())


def fill(manager: KVCacheManager, slot: int, tokens: int) -> None:
    """Grow a request to `tokens` tokens, a chunk at a time."""
    step = manager.capacity.max_forward_tokens
    for start in range(0, tokens, step):
        prepare_forward(manager, [slot], [start], [min(start + step, tokens)]).complete()


def total(sizes: dict, column: int) -> Fraction:
    return sum((Fraction(size[column]) for size in sizes.values()), Fraction(0))


@pytest.mark.parametrize("seed", range(50))
def test_allocated_bytes_are_those_of_the_manager(seed):
    config, sizes = random_case(seed)
    plan = make_plan(
        config, num_requests=sizes["max_requests"], context_tokens=sizes["max_request_tokens"],
        max_forward_tokens=sizes["max_forward_tokens"], num_checkpoints=sizes["num_checkpoints"],
        undo_slots=seed % 3,
    )  # fmt: skip
    manager = build_manager(plan.capacity)
    assert plan.cache_bytes == tensor_bytes(manager)
    assert plan.cache_bytes == sum(size.allocated for size in plan.memory.values())
    parts = [total(plan.per_request(), 1) * plan.num_requests, total(plan.shared(), 1)]
    tokens = plan.capacity.num_blocks * config.block_tokens
    assert plan.cache_bytes == sum(parts) + total(plan.per_token(), 1) * tokens
    slots = [manager.open_request() for _ in range(plan.num_requests)]
    for slot in slots:
        fill(manager, slot, plan.context_tokens)
    assert manager._books.allocator.num_free == 0
    manager.check_integrity()


@pytest.mark.parametrize(
    ("preset", "payload", "pages", "blocks"),
    [("flash", 3514.25, 3563.25, 3564.00), ("pro", 5031.4375, 5106.75, 5107.50)],
)
def test_bytes_per_token(preset, payload, pages, blocks):
    sizes = make_plan(PRESETS[preset]()).per_token()
    assert total(sizes, 0) == payload
    assert total(sizes, 1) == blocks
    assert blocks - sizes["block_padding"][1] == pages


# SPEC's table: GiB of one request at 128k and at 1M, fp32 tails, no drafts, MTP counted. It has all
# rows of an HCA window, 512 KiB a layer, where a plan has 16 rows and 7 sums, 106 KiB.
PUBLISHED = [
    ("flash", BF16, "0.857", "6.735"), ("flash", FP8, "0.484", "3.774"),
    ("flash", MXFP4, "0.443", "3.446"), ("pro", BF16, "1.227", "9.642"),
    ("pro", FP8, "0.695", "5.404"), ("pro", MXFP4, "0.636", "4.935"),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "formats", "at_128k", "at_1m"), PUBLISHED)
def test_one_request_as_published(preset, formats, at_128k, at_1m):
    config = PRESETS[preset](include_mtp=True, **formats)
    summed = config.compress_ratios.count(128) * (512 - 106) * 2**10
    for context, published in ((2**17, at_128k), (2**20, at_1m)):
        plan = make_plan(config, context_tokens=context)
        assert f"{(plan.one_request().payload + summed) / GIB:.3f}" == published
        assert plan.one_request().allocated >= plan.one_request().payload


@pytest.mark.parametrize(
    ("preset", "layers", "csa", "hca"), [("flash", 44, 21, 20), ("pro", 62, 30, 31)]
)
def test_one_request_is_the_formula(preset, layers, csa, hca):
    plan = make_plan(PRESETS[preset](include_mtp=True), context_tokens=2**20)
    entries = csa * (584 + 68) * 2**18 + hca * 584 * 2**13
    tails = csa * 8 * (1024 + 256) * 2 * 4 + hca * (16 * 2 + 7 * 3) * 512 * 4
    assert plan.one_request().payload == entries + layers * 128 * 584 + tails


def test_a_part_filled_block_is_a_whole_one():
    assert [tiny_plan(context_tokens=n).blocks_per_request for n in (3, 4, 128, 131, 132)] == [
        0, 1, 1, 1, 2,
    ]  # fmt: skip
    assert tiny_plan(context_tokens=3).per_token() == tiny_plan(context_tokens=999).per_token()


def test_ranks_divide_weights_and_heads():
    one = tiny_plan(weights_bytes=1001)
    four = replace(one, num_ranks=4)
    assert (one.rank_weights_bytes, four.rank_weights_bytes) == (1001, 251)
    changed = [name for name in one.memory if four.memory[name] != one.memory[name]]
    assert changed == ["attention_partials"]
    assert four.needed_bytes == four.cache_bytes + 251


@pytest.mark.parametrize(
    ("config", "num_ranks", "num_stages"),
    [(CacheConfig.tiny(num_query_heads=12), 3, 1), (CacheConfig.tiny(num_query_heads=12), 4, 3),
     (CacheConfig.v4_flash(), 2, 1), (CacheConfig.v4_flash(), 4, 2), (CacheConfig.v4_pro(), 8, 4)],
)  # fmt: skip
def test_a_rank_is_as_large_as_a_manager_of_its_heads(config, num_ranks, num_stages):
    plan = make_plan(config, num_ranks=num_ranks, num_stages=num_stages, max_forward_tokens=300)
    heads = replace(config, num_query_heads=config.num_query_heads // num_ranks)
    for layers, num_bytes in plan.stages.items():
        stage = heads.cut_layers(*layers) if num_stages > 1 else heads
        manager = build_manager(replace(plan.capacity, config=stage))
        assert num_bytes == tensor_bytes(manager)
    assert plan.cache_bytes < replace(plan, num_ranks=1).cache_bytes


@pytest.mark.parametrize(
    ("config", "sizes"),
    [(CacheConfig.tiny(block_tokens=128), each) for each in ([4], [2, 2], [2, 1, 1], [1, 1, 1, 1])]
    + [(tiny_v41(), each) for each in ([7], [3, 4], [1, 2, 4])],
)  # fmt: skip
def test_a_stage_is_as_large_as_its_manager(config, sizes):
    plan = make_plan(
        config, num_requests=3, context_tokens=300, num_stages=len(sizes), weights_bytes=1001
    )
    ends = np.cumsum(sizes).tolist()
    assert list(plan.stages) == list(pairwise([0, *ends]))
    for layers, num_bytes in plan.stages.items():
        stage = replace(plan.capacity, config=plan.config.cut_layers(*layers))
        assert num_bytes == tensor_bytes(build_manager(stage))
    assert plan.cache_bytes == max(plan.stages.values())
    assert plan.rank_weights_bytes == -(-1001 * max(sizes) // sum(sizes))
    tight = replace(plan, gpu_bytes=plan.needed_bytes)
    assert tight.fits and tight.max_requests == 3
    assert tight.max_blocks == plan.capacity.num_blocks
    assert not replace(plan, gpu_bytes=plan.needed_bytes - 1).fits


@pytest.mark.parametrize(
    ("config", "cuts"),
    [(CacheConfig.v41_flash(), ([20], [14, 20], [8, 14, 20], [2, 8, 14, 20])),
     (CacheConfig.v41_flash(include_mtp=True), ([20], [14, 20], [8, 20, 40])),
     (CacheConfig.v4_flash(), ([22], [15, 29]))],
)  # fmt: skip
def test_stages_begin_where_no_entries_are_shared(config, cuts):
    for each in cuts:
        plan = make_plan(config, num_stages=len(each) + 1)
        assert [first for first, _ in plan.stages] == [0, *each]


@pytest.mark.parametrize("tokens", [1, 127, 129, 1000])
@pytest.mark.parametrize("requests", [1, 2, 7])
def test_requests_that_fit_do_fit(requests, tokens):
    planned = tiny_plan(num_requests=requests, context_tokens=tokens)
    budget, more = planned.cache_bytes, replace(planned, num_requests=requests + 1).cache_bytes
    for gpu_bytes, expected in (
        (budget - 1, requests - 1), (budget, requests), (more - 1, requests), (more, requests + 1),
    ):  # fmt: skip
        assert replace(planned, gpu_bytes=gpu_bytes).max_requests == expected
        assert replace(planned, gpu_bytes=gpu_bytes).fits == (expected >= requests)

    manager = build_manager(planned.capacity)
    assert tensor_bytes(manager) == budget
    for _ in range(requests):
        fill(manager, manager.open_request(), tokens)
    assert manager._books.allocator.num_free == 0
    with pytest.raises(NoFreeSlotError):
        manager.open_request()
    assert tensor_bytes(build_manager(replace(planned, num_requests=requests + 1).capacity)) == more


def test_one_request_more_has_no_blocks():
    plan = tiny_plan(num_requests=3, context_tokens=300)
    manager = build_manager(replace(plan.capacity, max_requests=4))
    for _ in range(3):
        fill(manager, manager.open_request(), 300)
    with pytest.raises(OutOfBlocksError):
        fill(manager, manager.open_request(), 300)


@pytest.mark.parametrize("extra", [0, 1, -1], ids=["exact", "one byte more", "one byte less"])
def test_tokens_that_fit_do_fit(extra):
    wanted = tiny_plan(num_requests=3, context_tokens=2000)
    enough = sum(s.allocated for s in replace(wanted.capacity, num_blocks=19).memory().values())
    plan = replace(wanted, gpu_bytes=enough + 4096 + extra, reserved_bytes=4096)
    blocks = 18 if extra < 0 else 19
    assert (plan.max_blocks, plan.max_tokens) == (blocks, blocks * 128)
    manager = build_manager(replace(plan.capacity, num_blocks=blocks))
    assert tensor_bytes(manager) <= plan.budget_bytes
    for tokens in (1024, 640, (blocks - 13) * 128):
        fill(manager, manager.open_request(), tokens)
    with pytest.raises(OutOfBlocksError):
        prepare_forward(manager, [0], [1024], [1028])
    more = build_manager(replace(plan.capacity, num_blocks=blocks + 1))
    assert tensor_bytes(more) > plan.budget_bytes


def test_the_longest_context_that_fits():
    plan = tiny_plan(num_requests=3, context_tokens=2000)
    enough = replace(plan, context_tokens=1024).cache_bytes
    assert replace(plan, gpu_bytes=enough).max_context == 1024
    assert replace(plan, gpu_bytes=enough - 1).max_context == 896
    assert replace(plan, gpu_bytes=1).max_context == 0
    assert plan.max_context == plan.config.max_position


@pytest.mark.parametrize("blocks", [3929, 3930, 3999, 4000, 4001])
def test_a_longer_context_may_need_less(blocks):
    """The index's workspace loses a row at 3,930 and at 4,000 blocks of V4-Flash.

    That shows with rows that are never made dense, which would take more.
    """
    config = CacheConfig.v4_flash(kv_format="fp8_entry_scale")
    plan = make_plan(config, max_forward_tokens=8192)
    needed = {n: replace(plan, context_tokens=256 * n).cache_bytes for n in range(3900, 4050)}
    assert needed[3930] < needed[3929] and needed[4000] < needed[3999]
    longest = max(n for n in needed if needed[n] <= needed[blocks])
    assert replace(plan, gpu_bytes=needed[blocks]).max_context == 256 * longest


def test_a_model_without_compressed_layers():
    plan = make_plan(CacheConfig(compress_ratios=(0, 0)), gpu_bytes=10**8)
    assert plan.max_blocks is None and plan.max_tokens is None
    assert plan.blocks_per_request == 0
    assert total(plan.per_token(), 1) == 0
    assert plan.max_requests > 1


def test_weights_that_leave_nothing():
    plan = tiny_plan(weights_bytes=81 * 10**9)
    assert plan.budget_bytes == -(10**9)
    assert (plan.fits, plan.max_requests, plan.max_blocks, plan.max_context) == (False, 0, 0, 0)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 63, 64, 65, 1000])
def test_largest(number):
    assert largest(lambda n: n <= number) == number
    assert largest(lambda n: n <= number, at_most=64) == min(number, 64)
    assert largest(lambda n: n <= number, at_most=0) == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"gpu_bytes": 0}, "Invalid gpu_bytes: expected an integer from 1 to .*, got 0"),
        ({"weights_bytes": -1}, "Invalid weights_bytes: expected an integer from 0 to .*, got -1"),
        (
            {"reserved_bytes": 0.5},
            "Invalid reserved_bytes: expected an integer from 0 to .*, got 0.5",
        ),
        ({"num_stages": 5}, "Invalid num_stages: expected an integer from 1 to 4 .*, got 5"),
        ({"num_stages": 4, "config": tiny_v41()}, "integer from 1 to 3 .the most stages .*, got 4"),
        ({"num_ranks": 0}, "Invalid num_ranks: expected an integer from 1 to .*, got 0"),
        ({"num_ranks": 3}, "Invalid num_ranks: expected a divisor of 4 query heads, got 3"),
        ({"num_requests": 0}, "Invalid num_requests: expected an integer from 1 to .*, got 0"),
        ({"context_tokens": 0}, "Invalid context_tokens: expected an integer from 1 to .*, got 0"),
        (
            {"context_tokens": 65537},
            r"Invalid context_tokens: expected at most 65536 .*, got 65537",
        ),
        (
            {"max_forward_tokens": 0},
            "Invalid max_forward_tokens: expected an integer from 1 to .*, got 0",
        ),
    ],
)
def test_refusals(changes, match):
    with pytest.raises(ValueError, match=match):
        replace(tiny_plan(), **changes)
