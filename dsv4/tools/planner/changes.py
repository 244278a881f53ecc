"""Changes that would make a plan fit: one at a time, the smallest of each kind.

They are ordered by their cost: first those that store the same values, then other formats, then a
smaller load, then more hardware.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from dsv4.config import CacheConfig
from dsv4.formats import BYTE_ALIGN, INDEX_FORMATS, KV_FORMATS
from dsv4.tools.planner.memory_plan import MemoryPlan, largest

RANKS = (2, 4, 8, 16, 32, 64)


class Change(NamedTuple):
    """One change in words, and the changed plan."""

    what: str
    plan: MemoryPlan


def find_changes(plan: MemoryPlan) -> list[Change]:
    """Find the changes after which `plan` needs less, those that make it fit first.

    Each kind gives its smallest change that fits, else the one that saves most. A plan that fits
    needs no changes.
    """
    if plan.fits:
        return []
    changes = [*_choices(plan), *_loads(plan), *_hardware(plan)]
    return sorted(changes, key=lambda change: not change.plan.fits)


def _choices(plan: MemoryPlan) -> Iterator[Change]:
    kinds = [_page_align, _chunk, _drafts, _index_format, _tails, _kv_format]
    changes = [change for kind in kinds if (change := _least(plan, kind(plan))) is not None]
    yield from changes
    if len(changes) > 1 and not any(change.plan.fits for change in changes):
        together = plan
        for kind in kinds:
            change = _least(together, kind(together))
            together = together if change is None else change.plan
        yield Change("all of these together", together)


def _least(plan: MemoryPlan, candidates: Iterable[Change]) -> Change | None:
    """Return the first candidate that fits, else the smallest; None if none is below `plan`."""
    smallest: Change | None = None
    for change in candidates:
        if change.plan.fits:
            return change
        best = plan if smallest is None else smallest.plan
        if change.plan.needed_bytes < best.needed_bytes:
            smallest = change
    return smallest


def _with_config(plan: MemoryPlan, **choices: Any) -> MemoryPlan:
    return replace(plan, config=replace(plan.config, **choices))


def _page_align(plan: MemoryPlan) -> Iterator[Change]:
    if plan.config.page_align > BYTE_ALIGN:
        text = f"page_align {BYTE_ALIGN} (enough on Hopper; FlashMLA on Blackwell needs 576)"
        yield Change(text, _with_config(plan, page_align=BYTE_ALIGN))


def _chunk(plan: MemoryPlan) -> Iterator[Change]:
    def chunked(tokens: int) -> MemoryPlan:
        return replace(plan, max_forward_tokens=tokens)

    config = plan.config
    # At least one decode step of all requests, and a chunk of one block.
    least = max(plan.num_requests * (config.drafts_per_step + 1), config.block_tokens)
    tokens = largest(lambda number: chunked(number).fits, at_most=plan.max_forward_tokens)
    if tokens >= least:
        yield Change(f"prefill chunks of at most {tokens:,} tokens", chunked(tokens))


def _drafts(plan: MemoryPlan) -> Iterator[Change]:
    for drafts in range(plan.config.drafts_per_step - 1, -1, -1):
        yield Change(f"{drafts} drafts a step", _with_config(plan, drafts_per_step=drafts))


def _index_format(plan: MemoryPlan) -> Iterator[Change]:
    for name in _smaller(plan.config, "index_format"):
        changed = _with_config(plan, index_format=name, index_global_scale=None)
        yield Change(f"index keys in {name} instead of {plan.config.index_format}", changed)


def _tails(plan: MemoryPlan) -> Iterator[Change]:
    if plan.config.tail_dtype != "bfloat16":
        yield Change("tails in bfloat16", _with_config(plan, tail_dtype="bfloat16"))


def _kv_format(plan: MemoryPlan) -> Iterator[Change]:
    for name in _smaller(plan.config, "kv_format"):
        changed = _with_config(plan, kv_format=name)
        yield Change(f"KV rows in {name} instead of {plan.config.kv_format}", changed)


def _smaller(config: CacheConfig, field: str) -> list[str]:
    """List the formats with smaller rows than the present one, largest first."""
    sizes = row_bytes(config, field)
    smaller = [name for name in sizes if sizes[name] < sizes[getattr(config, field)]]
    return sorted(smaller, key=lambda name: -sizes[name])


def row_bytes(config: CacheConfig, field: str) -> dict[str, int]:
    """Return the bytes of a row in each `kv_format` or `index_format` that the widths allow."""
    sizes: dict[str, int] = {}
    for name in KV_FORMATS if field == "kv_format" else INDEX_FORMATS:
        changes: dict[str, Any] = {field: name, "index_global_scale": None}
        with suppress(ValueError):
            changed = replace(config, **changes)
            row = changed.kv_row if field == "kv_format" else changed.index_row
            sizes[name] = row.row_bytes
    return sizes


def _loads(plan: MemoryPlan) -> Iterator[Change]:
    if plan.max_context:
        shorter = replace(plan, context_tokens=plan.max_context)
        yield Change(f"a context of at most {plan.max_context:,} tokens", shorter)
    if plan.max_requests:
        text = f"{plan.max_requests:,} requests instead of {plan.num_requests:,}"
        yield Change(text, replace(plan, num_requests=plan.max_requests))


def _hardware(plan: MemoryPlan) -> Iterator[Change]:
    for ranks in RANKS:
        changed = replace(plan, num_ranks=ranks)
        if ranks > plan.num_ranks and changed.fits:
            yield Change(f"{ranks} ranks instead of {plan.num_ranks}", changed)
            break
    needed = plan.needed_bytes
    text = f"a GPU with {-(-needed // 10**7) / 100:,.2f} GB"
    yield Change(text, replace(plan, gpu_bytes=needed))
