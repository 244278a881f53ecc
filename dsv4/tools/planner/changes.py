"""Changes that would make a plan fit: one at a time, the smallest of each kind.

They are ordered by their cost: first those that store the same values, then other formats, then a
smaller load, then more hardware.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from dsv4.config import CacheConfig
from dsv4.formats import BYTE_ALIGN, INDEX_FORMATS, KV_FORMATS
from dsv4.tools.planner.memory_plan import MemoryPlan, largest

RANKS = (2, 4, 8, 16, 32, 64)
KINDS = ("page_align", "chunk", "drafts", "index_format", "tails", "kv_format")


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
    changes = [change for kind in KINDS if (change := _least(plan, kind)) is not None]
    yield from changes
    if len(changes) > 1 and not any(change.plan.fits for change in changes):
        together = plan
        for kind in KINDS:
            change = _least(together, kind)
            together = together if change is None else change.plan
        yield Change("all of these together", together)


def _least(plan: MemoryPlan, kind: str) -> Change | None:
    """Return the first candidate that fits, else the smallest; None if none is below `plan`."""
    smallest: Change | None = None
    for change in _candidates(plan, kind):
        if change.plan.fits:
            return change
        best = plan if smallest is None else smallest.plan
        if change.plan.needed_bytes < best.needed_bytes:
            smallest = change
    return smallest


def _candidates(plan: MemoryPlan, kind: str) -> Iterator[Change]:
    """Yield the changes of a kind, the smallest first."""
    config = plan.config

    def choose(what: str, **choices: Any) -> Change:
        return Change(what, replace(plan, config=replace(config, **choices)))

    if kind == "page_align" and config.page_align > BYTE_ALIGN:
        text = f"page_align {BYTE_ALIGN} (enough on Hopper; FlashMLA on Blackwell needs 576)"
        yield choose(text, page_align=BYTE_ALIGN)
    elif kind == "chunk":
        # At least one decode step of all requests, and a chunk of one block.
        least = max(plan.num_requests * (config.drafts_per_step + 1), config.block_tokens)
        tokens = largest(
            lambda number: replace(plan, max_forward_tokens=number).fits,
            at_most=plan.max_forward_tokens,
        )
        if tokens >= least:
            shorter = replace(plan, max_forward_tokens=tokens)
            yield Change(f"prefill chunks of at most {tokens:,} tokens", shorter)
    elif kind == "drafts":
        for drafts in range(config.drafts_per_step - 1, -1, -1):
            yield choose(f"{drafts} drafts a step", drafts_per_step=drafts)
    elif kind == "tails" and config.tail_dtype != "bfloat16":
        yield choose("tails in bfloat16", tail_dtype="bfloat16")
    elif kind == "index_format":
        for name in _smaller(config, kind):
            text = f"index keys in {name} instead of {config.index_format}"
            yield choose(text, index_format=name, index_global_scale=None)
    elif kind == "kv_format":
        for name in _smaller(config, kind):
            yield choose(f"KV rows in {name} instead of {config.kv_format}", kv_format=name)


def _smaller(config: CacheConfig, field: str) -> list[str]:
    """List the formats with smaller rows than the present one, largest first."""
    sizes = row_bytes(config, field)
    present = sizes.get(getattr(config, field), 0)  # none is smaller than V4.1's own rows
    smaller = [name for name in sizes if sizes[name] < present]
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
        if ranks <= plan.num_ranks or plan.config.num_query_heads % ranks:
            continue
        changed = replace(plan, num_ranks=ranks)
        if changed.fits:
            yield Change(f"{ranks} ranks instead of {plan.num_ranks}", changed)
            break
    needed = plan.needed_bytes
    text = f"a GPU with {-(-needed // 10**7) / 100:,.2f} GB"
    yield Change(text, replace(plan, gpu_bytes=needed))
