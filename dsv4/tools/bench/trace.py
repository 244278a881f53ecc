"""`dsv4 bench trace`: what the prefix cache finds of a trace's prompts, over its memory."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.memory.layout import block_layout, checkpoint_bytes
from dsv4.cache.memory.schema import build_schemas
from dsv4.cache.prefix.prefix_cache import PrefixHit
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.testing import model_projections, model_weights, take_rows
from dsv4.tools.bench.timing import one_thread, time_call
from dsv4.tools.bench.trace_file import HASH_TOKENS, TracePrompt, found_by_lru, read_trace
from dsv4.tools.console import track

SIZES = (5_000, 20_000)  # blocks, beside all that there are
PLOTTED_SIZES = (1_250, 2_500, 5_000, 10_000, 20_000, 40_000, 80_000)
CHUNK_BLOCKS = 32  # of a forward: 8,192 tokens of V4-Flash
DEVICE_SHARE = 4  # of one budget, a quarter
STAGED_CHECKPOINTS = 8
TABLE_ROWS = 4096
STYLES = {  # of the lines of a plot
    "bound": ("#8c8c8c", ":"),
    "lru": ("black", "--"),
    "checkpoints on the host": ("#1b9e77", "-"),
    "one budget": ("#3573b1", "-"),
    "one budget, no branches": ("#e6ab02", "-"),
    "one budget, none along prompts": ("#d95f02", "-"),
    "one budget, ends of prompts": ("#6b4c9a", "-"),
    "halo only": ("#a6761d", "-"),
}
LABELS = {"bound": "unlimited, at whole blocks", "lru": "plain LRU, full attention"}


class Setting(NamedTuple):
    """A way to use the memory of some blocks.

    Attributes:
        policy: Where checkpoints are taken.
        is_one_budget: Blocks on the host and checkpoints count too. Else only blocks on the device
            do, and checkpoints have as many bytes on the host.
        targets: The least ratio to a plain LRU by blocks; 0 for all.
    """

    policy: CheckpointPolicy
    is_one_budget: bool = True
    targets: Mapping[int, float] = {}


ON_HOST, ONE_BUDGET, HALO_ONLY = "checkpoints on the host", "one budget", "halo only"
NO_POLICY = CheckpointPolicy(0, at_prompt_end=False, at_branches=False, at_forks=False)
SETTINGS = {
    ON_HOST: Setting(
        CheckpointPolicy(), is_one_budget=False, targets={5_000: 0.95, 20_000: 0.95, 0: 0.95}
    ),
    ONE_BUDGET: Setting(CheckpointPolicy(), targets={5_000: 0.92, 20_000: 0.88, 0: 0.95}),
    HALO_ONLY: Setting(NO_POLICY),
}
PLOTTED = {
    **SETTINGS,
    "one budget, no branches": Setting(CheckpointPolicy(at_branches=False)),
    "one budget, none along prompts": Setting(CheckpointPolicy(every_blocks=0)),
    "one budget, ends of prompts": Setting(CheckpointPolicy(every_blocks=0, at_branches=False)),
}


def bench_trace(
    *, file: Path, num_requests: int, first: int, num_blocks: int | None, plot: Path | None
) -> dict[str, Any]:
    """Replay prompts of a trace, one after the other, with every layer written.

    A hash id of 512 tokens is one block. The model is narrow, but its checkpoints and halo are as
    large, in blocks, as V4-Flash's. Tokens that are replayed count as not found.
    """
    prompts = read_trace(file, first=first, count=num_requests)
    sizes = SIZES if plot is None else PLOTTED_SIZES
    cases = _cases(prompts, sizes if num_blocks is None else (num_blocks,))
    settings = SETTINGS if plot is None else PLOTTED
    todo = [(case, name) for case in cases for name in settings]
    with one_thread():
        rows = [
            _measure(prompts, case, name, settings[name]) for case, name in track(todo, "replaying")
        ]
    config = narrow_config()
    result = {
        "file": file.name, "first": first, "num_requests": num_requests,
        "num_tokens": sum(prompt.num_tokens for prompt in prompts),
        "block_bytes": block_sizes(CacheConfig.v4_flash())[0],
        "checkpoint_blocks": block_sizes(config)[1],
        "halo_blocks": config.halo_tokens / config.block_tokens, "rows": rows,
    }  # fmt: skip
    if plot is not None:
        plot_trace(result, plot)
    return result


class Case(NamedTuple):
    """A size of memory.

    Attributes:
        asked: Blocks; 0 for all that there are.
        num_blocks: The same, as a number.
        longest: Blocks of the longest prompt.
        found_by_lru, bound: Blocks that a plain LRU of this size finds, and one of any size.
    """

    asked: int
    num_blocks: int
    longest: int
    found_by_lru: int
    bound: int


def _cases(prompts: Sequence[TracePrompt], sizes: Sequence[int]) -> list[Case]:
    """Return the sizes that the trace can fill, and one that holds all of it."""
    longest = max(len(prompt.hashes) for prompt in prompts)
    distinct = len({each for prompt in prompts for each in prompt.hashes})
    every = CheckpointPolicy().every_blocks
    most_checkpoints = distinct // every + 2 * len(prompts) + STAGED_CHECKPOINTS
    needed = distinct + block_sizes(narrow_config())[1] * most_checkpoints
    bound = found_by_lru(prompts, distinct)
    sizes = [*(size for size in sizes if size < needed), 0]
    found = [found_by_lru(prompts, size or distinct) for size in sizes]
    return [
        Case(size, size or DEVICE_SHARE * needed, longest, each, bound)
        for size, each in zip(sizes, found, strict=True)
    ]


def narrow_config() -> CacheConfig:
    """Return a narrow model whose checkpoint takes 6 blocks and whose halo 21, as V4-Flash's."""
    return CacheConfig(
        compress_ratios=(0, 4), num_query_heads=1, head_dim=24, rope_dim=8, sliding_window=43,
        index_num_heads=1, index_head_dim=32, index_topk=8, kv_format="bf16",
        tail_dtype="bfloat16", block_tokens=4, page_align=720,
    )  # fmt: skip


def block_sizes(config: CacheConfig) -> tuple[int, int]:
    """Return the bytes of a block, and the blocks that a checkpoint takes on the host."""
    schemas = build_schemas(config)
    block_bytes = block_layout(schemas, page_align=config.page_align).num_bytes
    return block_bytes, -(-checkpoint_bytes(schemas) // block_bytes)


def _measure(
    prompts: Sequence[TracePrompt], case: Case, name: str, setting: Setting
) -> dict[str, Any]:
    replay = Replay(setting, case)
    hits, times = zip(*(replay.run(prompt) for prompt in prompts), strict=True)
    block_tokens, num_tokens = replay.config.block_tokens, sum(each.num_tokens for each in prompts)
    num_found = sum(hit.num_tokens for hit in hits) / block_tokens
    num_replayed = sum(hit.num_replayed for hit in hits) / block_tokens
    num_hits = sum(hit.num_tokens + hit.num_replayed > 0 for hit in hits)
    stats = replay.manager.stats()
    block_bytes, checkpoint_blocks = block_sizes(CacheConfig.v4_flash())
    num_staged = stats.num_prefix_checkpoints - stats.num_prefix_host_checkpoints
    tiers = {
        "device_blocks": stats.num_prefix_blocks,
        "device_checkpoints": num_staged * checkpoint_blocks,
        "host_blocks": stats.num_prefix_host_blocks,
        "host_checkpoints": stats.num_prefix_host_checkpoints * checkpoint_blocks,
    }
    share = HASH_TOKENS / num_tokens
    return {
        "policy": name, "blocks": case.asked, "device_blocks": replay.num_device,
        "host_blocks": replay.num_host, "bound": case.bound * share,
        "lru": case.found_by_lru * share, "found": num_found * share,
        "ratio": num_found / case.found_by_lru if case.found_by_lru else None,
        "target": setting.targets.get(case.asked), "num_hits": num_hits,
        "replayed_blocks_per_hit": num_replayed / num_hits if num_hits else 0.0,
        "resume_median_us": statistics.median(times),
        "resume_p90_us": float(np.percentile(times, 90)),
        "bytes": {tier: count * block_bytes for tier, count in tiers.items()},
    }  # fmt: skip


class Replay:
    """A manager of the narrow model, through which prompts run one after the other.

    Attributes:
        num_device, num_host: Blocks on device and host.
    """

    def __init__(self, setting: Setting, case: Case) -> None:
        self.config = config = narrow_config()
        self.num_device = self.num_host = case.num_blocks
        if setting.is_one_budget:
            staged = STAGED_CHECKPOINTS * block_sizes(config)[1]
            self.num_device = max(case.longest, (case.num_blocks - staged) // DEVICE_SHARE)
            self.num_host = case.num_blocks - staged - self.num_device
        if self.num_device < case.longest or self.num_host < 0:
            raise ValueError(
                f"Too few blocks: expected room for a prompt of {case.longest} and for "
                f"{STAGED_CHECKPOINTS} checkpoints, got {case.num_blocks}"
            )
        self.manager = KVCacheManager(
            config, max_requests=1, num_blocks=self.num_device, backend="reference",
            max_forward_tokens=CHUNK_BLOCKS * config.block_tokens,
            max_request_tokens=case.longest * config.block_tokens + 1,
            prefix_bytes=self.num_host * block_sizes(config)[0], num_checkpoints=STAGED_CHECKPOINTS,
            checkpoint_policy=setting.policy,
        )  # fmt: skip
        self.manager._books.prefix.tree.holds_blocks_on_host = setting.is_one_budget
        self._weights = model_weights(config, seed=0)
        self._tables = model_projections(config, TABLE_ROWS, seed=1)

    def run(self, prompt: TracePrompt) -> tuple[PrefixHit, float]:
        """Run a prompt; return its hit and the microseconds of `resume_request`.

        One token follows its blocks, since a hit always leaves one to run.
        """
        manager, block_tokens = self.manager, self.config.block_tokens
        ids = np.append(np.repeat(prompt.hashes, block_tokens), 0).astype(np.int32)
        hit, elapsed = time_call(partial(manager.resume_request, ids))
        rows, chunk = torch.from_numpy(ids % TABLE_ROWS), CHUNK_BLOCKS * block_tokens
        for before in range(hit.num_tokens, len(ids), chunk):
            after = min(before + chunk, len(ids))
            plan = prepare_forward(manager, [hit.slot], [before], [after])
            for idx, (table, weights) in enumerate(zip(self._tables, self._weights, strict=True)):
                manager.acquire(idx, plan).write(take_rows(table, rows[before:after]), weights)
        manager.free_request(hit.slot)
        return hit, elapsed


def plot_trace(result: Mapping[str, Any], path: Path) -> None:
    """Draw a line for each policy; the last point of each holds everything."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    sizes = sorted({row["blocks"] for row in rows if row["blocks"]})
    labels = [f"{size:,}" for size in sizes] + ["all"]
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    for name, (color, line) in STYLES.items():
        if name in LABELS:
            found = {row["blocks"]: row[name] for row in rows}
        else:
            found = {row["blocks"]: row["found"] for row in rows if row["policy"] == name}
        shares = [100 * found[size] for size in (*sizes, 0)]
        axes.plot(labels, shares, line, color=color, label=LABELS.get(name, name), marker=".")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"memory, in blocks of V4-Flash ({result['block_bytes']:,} bytes)")
    axes.set_ylabel("found, % of the prompt tokens")
    last = result["first"] + result["num_requests"] - 1
    axes.set_title(f"{result['file']}, requests {result['first']:,} to {last:,}", parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=150)
