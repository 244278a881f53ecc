"""The changes that would make a plan fit."""

from dataclasses import replace

import pytest

from dsv4.config import CacheConfig
from dsv4.tools.planner.changes import find_changes
from dsv4.tools.planner.memory_plan import MemoryPlan


def flash_plan(gpu_bytes: int = 141 * 10**9, **choices) -> MemoryPlan:
    config = CacheConfig.v4_flash(include_mtp=True, **choices)
    return MemoryPlan(config, num_requests=8, context_tokens=2**20, gpu_bytes=gpu_bytes)


def short_by(plan: MemoryPlan, num_bytes: int) -> MemoryPlan:
    return replace(plan, gpu_bytes=plan.needed_bytes - num_bytes)


def test_a_plan_that_fits_needs_none():
    assert flash_plan().fits and find_changes(flash_plan()) == []


def test_the_changes_and_their_order():
    plan = short_by(flash_plan(kv_format="bf16", index_format="fp8", drafts_per_step=2), 2**30)
    changes = find_changes(plan)
    assert [change.what.split(" ")[0] for change in changes if change.plan.fits] == [
        "index", "KV", "a", "7", "a",
    ]  # fmt: skip
    smaller = [change for change in changes if "GPU" not in change.what]
    assert all(change.plan.needed_bytes < plan.needed_bytes for change in smaller)
    assert not changes[-1].plan.fits
    assert "all of these together" not in [change.what for change in changes]


@pytest.mark.parametrize("name", ["bf16", "fp8", "nvfp4", "mxfp4"])
def test_the_least_change_of_a_kind(name):
    plan, enough = flash_plan(index_format="fp32"), flash_plan(index_format=name)
    found = find_changes(replace(plan, gpu_bytes=enough.needed_bytes))
    (change,) = [change for change in found if "index" in change.what]
    assert change.what == f"index keys in {name} instead of fp32" and change.plan.free_bytes == 0


def test_the_largest_saving_where_no_change_fits():
    plan, best = flash_plan(index_format="fp32"), flash_plan(index_format="mxfp4")
    found = find_changes(replace(plan, gpu_bytes=best.needed_bytes - 2**30))
    (change,) = [change for change in found if "index" in change.what]
    assert "mxfp4" in change.what and change.plan.free_bytes == -(2**30)


def test_small_gaps():
    plan = flash_plan()
    names = [change.what for change in find_changes(short_by(plan, 1)) if change.plan.fits]
    assert names[0].startswith("page_align 16")
    assert names[1] == "prefill chunks of at most 8,191 tokens"
    assert "tails in bfloat16" in names
    assert "7 requests instead of 8" in names
    assert "a context of at most 1,048,320 tokens" in names


def test_drafts():
    plan = flash_plan(drafts_per_step=3)
    saved = plan.needed_bytes - flash_plan(drafts_per_step=2).needed_bytes
    found = [c for c in find_changes(short_by(plan, saved)) if "drafts" in c.what]
    assert [(c.what, c.plan.fits) for c in found] == [("2 drafts a step", True)]


def test_all_formats_together():
    plan = flash_plan(kv_format="bf16", index_format="bf16")
    best = flash_plan(
        kv_format="fp8_entry_scale", index_format="mxfp4", page_align=16, tail_dtype="bfloat16"
    )
    changes = find_changes(replace(plan, gpu_bytes=best.needed_bytes))
    (together,) = [c for c in changes if c.what == "all of these together"]
    assert together.plan.fits and together.plan.config == best.config
    assert changes[0] is together


@pytest.mark.parametrize(("ranks", "left"), [(1, 8), (8, 16), (2, 8)])
def test_more_ranks(ranks, left):
    plan = replace(flash_plan(), weights_bytes=800 * 10**9, num_ranks=ranks)
    changes = find_changes(replace(plan, gpu_bytes=plan.cache_bytes + 800 * 10**9 // left))
    found = [change.what for change in changes if "ranks" in change.what]
    assert found == [f"{left} ranks instead of {ranks}"]


def test_ranks_divide_the_heads():
    config = replace(flash_plan().config, num_query_heads=12)
    plan = replace(flash_plan(), config=config, weights_bytes=800 * 10**9)
    changes = find_changes(replace(plan, gpu_bytes=plan.cache_bytes + 10**11))
    assert not any("ranks" in change.what for change in changes)  # 8 would do
    changes = find_changes(replace(plan, gpu_bytes=plan.cache_bytes + 2 * 10**11))
    assert [c.what for c in changes if "ranks" in c.what] == ["4 ranks instead of 1"]


def test_no_number_of_ranks_divides_the_cache():
    plan = replace(flash_plan(), weights_bytes=10**9, gpu_bytes=10**9)
    changes = find_changes(plan)
    assert not any("ranks" in change.what for change in changes)
    assert changes[-1].plan.gpu_bytes <= plan.needed_bytes


def test_the_gpu_that_would_do():
    plan = short_by(flash_plan(), 2**30)
    (gpu,) = [change for change in find_changes(plan) if "GPU" in change.what]
    assert gpu.plan.free_bytes == 0
    assert gpu.what == f"a GPU with {-(-plan.needed_bytes // 10**7) / 100:.2f} GB"
