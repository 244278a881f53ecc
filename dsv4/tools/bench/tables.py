"""Results of the benches for reading: tables, and sentences below them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

Result = Mapping[str, Any]
Columns = Sequence[tuple[str, str]]  # headings and cell templates

DECODE_TIMES: Columns = (
    ("tokens", "{tokens:,}"), ("batch", "{batch}{star}"), ("all 43 layers", "{total_us:.0f}"),
    ("write", "{write_us:.0f}"), ("index", "{index_us:.0f}"), ("attention", "{attention_us:.0f}"),
)  # fmt: skip
PER_CACHE = ("step_us", "speedup", "attention_us", "attention_speedup")
CACHES = {
    "transformers": "transformers' own", "this": "this one", "graphs": "this one, CUDA graphs",
    "free": "one that is free",
}  # fmt: skip
STEP_TIMES: Columns = (
    ("batch", "{batch}"), ("context", "{context:,}"), ("cache", "{cache}"),
    ("step", "{step_us:,.0f}"), ("faster", "{speedup:.2f} x"),
    ("attention", "{attention_us:,.0f}"), ("faster", "{attention_speedup:.2f} x"),
)  # fmt: skip


class Shown(NamedTuple):
    """The printed form of a result."""

    tables: Sequence[Table]
    sentences: Sequence[str] = ()


def build_table(
    title: str, rows: Iterable[Result], columns: Columns, *, num_left: int = 0,
    caption: str | None = None,
) -> Table:  # fmt: skip
    """Build a table from rows; the first `num_left` columns are aligned left."""
    table = Table(title=title, caption=caption)
    for idx, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="left" if idx < num_left else "right")
    for row in rows:
        table.add_row(*(_cell(template, row) for _, template in columns))
    return table


def _cell(template: str, row: Result) -> str:
    """Fill a template; a dash if the row lacks its number."""
    try:
        return template.format_map(row)
    except KeyError:
        return "-"


def show_plan(result: Result) -> Shown:
    """Show host times of plans, by number of layers."""
    title = f"prepare_forward, {result['num_requests']} requests, one token each"
    return Shown([_host_times(title, "V4-Flash", result)])


def show_host(result: Result) -> Shown:
    """Show host times of the parts of an engine's step."""
    title = f"V4-Flash, {result['num_requests']} requests, 1 + {result['drafts']} tokens each"
    return Shown([_times_and_targets(title, "mean", result)])


def show_prefix(result: Result) -> Shown:
    """Show host times of a hit, with and without its copy, and of a hash."""
    title = f"A prefix hit of {result['num_hit_tokens']:,} tokens of V4-Flash"
    return Shown([_times_and_targets(title, "best", result)])


def show_trace(result: Result) -> Shown:
    """Show what was found with each size of memory, and what a hit and the tiers cost."""
    last = result["first"] + result["num_requests"] - 1
    title = f"Found of the prompt tokens: {result['file']}, requests {result['first']} to {last}"
    rows = [
        {
            **row,
            "size": f"{row['blocks']:,}" if row["blocks"] else "all",
            "ratio": "-" if row["ratio"] is None else f"{row['ratio']:.3f}",
            "target": "" if row["target"] is None else f"{row['target']:.2f}",
            **{f"{tier}_gb": count / 1e9 for tier, count in row["bytes"].items()},
        }
        for row in result["rows"]
    ]
    found = (
        ("blocks", "{size}"), ("policy", "{policy}"), ("bound", "{bound:.2%}"),
        ("plain LRU", "{lru:.2%}"), ("found", "{found:.2%}"), ("of LRU", "{ratio}"),
        ("target", "{target}"),
    )  # fmt: skip
    cost = (
        ("blocks", "{size}"), ("policy", "{policy}"),
        ("replayed blocks a hit", "{replayed_blocks_per_hit:.2f}"),
        ("resume, median us", "{resume_median_us:.0f}"), ("90 %", "{resume_p90_us:.0f}"),
        ("device GB", "{device_blocks_gb:.2f}"), ("staged", "{device_checkpoints_gb:.2f}"),
        ("host GB", "{host_blocks_gb:.2f}"), ("checkpoints", "{host_checkpoints_gb:.2f}"),
    )  # fmt: skip
    return Shown(
        [
            build_table(title, rows, found, num_left=2),
            build_table(
                "Cost of a hit, and bytes at the end as V4-Flash's", rows, cost, num_left=2
            ),
        ],
        [
            f"a block is {result['block_bytes']:,} bytes, a checkpoint "
            f"{result['checkpoint_blocks']} blocks, a halo {result['halo_blocks']:.1f}",
            *(
                f"one budget of {row['size']} blocks: {row['device_blocks']:,} on the device and "
                f"{row['host_blocks']:,} on the host, the rest for checkpoints on their way there"
                for row in rows
                if row["policy"] == "one budget" and row["blocks"]
            ),
        ],
    )


def _times_and_targets(title: str, first: str, result: Result) -> Table:
    rows = [
        {
            "name": name.replace("_", " "),
            **{key: result[f"{key}_us"][name] for key in (first, "median", "p90")},
            "target": f"{result['target_us'][name]:.0f}" if name in result["target_us"] else "",
        }
        for name in result["median_us"]
    ]
    columns = (
        ("", "{name}"), (f"{first} us", f"{{{first}:.1f}}"), ("median us", "{median:.1f}"),
        ("90th percentile us", "{p90:.1f}"), ("target us", "{target}"),
    )  # fmt: skip
    return build_table(title, rows, columns)


def show_swap(result: Result) -> Shown:
    """Show both directions of a swap."""
    columns = (
        ("", "{way}"), ("blocks", "{blocks}"), ("bytes", "{bytes:,}"), ("best ms", "{best_ms:.1f}"),
        ("median ms", "{median_ms:.1f}"), ("best GB/s", "{best_gb_per_s:.1f}"),
        ("median GB/s", "{median_gb_per_s:.1f}"),
    )  # fmt: skip
    title = (
        f"A request of {result['num_tokens']:,} tokens of V4-Flash to pinned memory and back "
        f"(target {result['target_gb_per_s']:.0f} GB/s)"
    )
    return Shown([build_table(title, result["rows"], columns, num_left=2)])


def show_write(result: Result) -> Shown:
    """Show decode steps, with SGLang's if compared, and a prefill."""
    steps = [
        {**row, "type": row["type"] + (" closing" if row["closing"] else "")}
        for row in result["rows"]
    ]
    step_columns = (
        ("layer", "{type}"), ("batch", "{batch}"), ("warm", "{warm_us:.2f}"),
        ("rotating, 43 layers", "{rotating_us:.2f}"), ("bytes / 4.27 TB/s", "{floor_us:.2f}"),
        *_external_columns(result, sglang_us="SGLang"),
    )  # fmt: skip
    prefill_columns = (
        ("layer", "{type}"), ("tokens", "{tokens}"), ("measured", "{us:.1f}"),
        ("bytes / 4.27 TB/s", "{floor_us:.1f}"),
    )  # fmt: skip
    return Shown(
        [
            build_table("One layer's writes in a decode step, microseconds", steps, step_columns),
            build_table(
                "One layer's writes of a prefill, microseconds", result["prefill"], prefill_columns
            ),
        ],
        _missing(result),
    )


def show_step(result: Result) -> Shown:
    """Show host times of a captured step, then whole steps; a star marks shared blocks."""
    title = (
        f"Host time of a captured step, {result['num_requests']} requests, "
        f"{result['num_layers']} layers written (target {result['target_us']:.0f} us)"
    )
    decode = [{**row, "star": "" if row["has_own_blocks"] else " *"} for row in result["decode"]]
    caption = "* on shared blocks" if any(row["star"] for row in decode) else None
    decode_title = "One decode step of V4-Flash's attention layers, microseconds"
    return Shown(
        [
            _host_times(title, "", result),
            build_table(decode_title, decode, DECODE_TIMES, caption=caption),
        ]
    )


def _host_times(title: str, heading: str, result: Result) -> Table:
    rows = [
        {"name": name, "median": median, "p90": result["p90_us"][name]}
        for name, median in result["median_us"].items()
    ]
    columns = (
        (heading, "{name}"), ("median us", "{median:.1f}"), ("90th percentile us", "{p90:.1f}"),
    )  # fmt: skip
    return build_table(title, rows, columns)


def show_gather(result: Result) -> Shown:
    """Show gathers, and their share of a copy's speed."""
    columns = (
        ("gather", "{gather}"), ("rows", "{num_rows:,}"), ("warm us", "{warm_us:.2f}"),
        ("rotating us, 8 layers", "{rotating_us:.2f}"), ("TB/s", "{tb_per_s:.2f}"),
        ("of 4.27 TB/s", "{share_of_copy:.0%}"),
    )  # fmt: skip
    title = "One layer's gathers of V4-Flash's fp8 rows"
    return Shown([build_table(title, result["rows"], columns, num_left=1)])


def show_index(result: Result) -> Shown:
    """Show steps of the index, with DeepGEMM's and SGLang's if compared."""
    columns = (
        ("step", "{step}"), ("format", "{format}"), ("entries", "{entries:,}"),
        ("batch", "{batch}"), ("warm", "{warm_us:.2f}"),
        ("rotating, 4 layers", "{rotating_us:.2f}"), ("bytes / 4.27 TB/s", "{floor_us:.2f}"),
        *_external_columns(result, deepgemm_us="DeepGEMM FP8", sglang_us="SGLang"),
    )  # fmt: skip
    title = "One layer's index of V4-Flash in a decode step, microseconds"
    return Shown([build_table(title, result["rows"], columns, num_left=2)], _missing(result))


def show_attend(result: Result) -> Shown:
    """Show attention of decode steps and of a prefill chunk, with FlashMLA's if compared."""
    columns = (
        ("layer", "{layer}"), ("batch", "{batch}"), ("warm", "{warm_us:.2f}"),
        ("rotating, 8 layers", "{rotating_us:.2f}"), ("batch-invariant", "{invariant_us:.2f}"),
        ("TFLOP/s", "{tflops:.0f}"), ("bytes / 4.27 TB/s", "{floor_us:.2f}"),
        *_external_columns(result, flashmla_us="FlashMLA"),
    )  # fmt: skip
    prefill_columns = (
        ("layer", "{layer}"), ("queries", "{tokens:,}"), ("context", "{context:,}"),
        ("us", "{us:,.0f}"), ("TFLOP/s", "{tflops:.0f}"),
        ("target", "{target_tflops:.0f}"),
        *_external_columns(result, flashmla_tflops="FlashMLA TFLOP/s"),
    )  # fmt: skip
    title = "One layer's attention in a decode step, fp8 rows, microseconds"
    prefill_title = "One layer's attention of a prefill chunk, fp8 rows"
    return Shown(
        [
            build_table(title, result["rows"], columns, num_left=1),
            build_table(prefill_title, result["prefill"], prefill_columns, num_left=1),
        ],
        _missing(result),
    )


def _external_columns(result: Result, **headings: str) -> Columns:
    """Columns of external kernels, by key, and of our ratio to them; none without --compare."""
    if "peers" not in result:
        return ()
    times = tuple((heading, f"{{{key}:.2f}}") for key, heading in headings.items())
    return (*times, ("ours / theirs", "{ratio:.2f}"))


def _missing(result: Result) -> list[str]:
    """Name each project that could not be compared, and say why."""
    states = result.get("peers", {}).items()
    return [f"{name} is not compared: {state}" for name, state in states if state != "compared"]


def show_transformers(result: Result) -> Shown:
    """Show decode steps with both caches, and the bytes of each cache."""
    memory_columns = (
        ("context", "{context:,}"), ("this cache", "{this_bytes:,}"),
        ("transformers'", "{transformers_bytes:,}"), ("ratio", "{ratio:.3f}"),
        ("workspaces beside", "{workspace_bytes:,}"),
    )  # fmt: skip
    title = "A decode step of transformers' model in BF16, microseconds"
    memory_title = "Bytes of one row, fp8 rows and mxfp4 keys"
    rows = [_cache_row(row, name) for row in result["decode"] for name in CACHES]
    return Shown(
        [
            build_table(title, rows, STEP_TIMES),
            build_table(memory_title, result["memory"], memory_columns),
        ],
        result["errors"],
    )


def _cache_row(row: Result, name: str) -> dict[str, Any]:
    """Take the numbers of one cache from a row of decode steps."""
    numbers = {key: row[key][name] for key in PER_CACHE if name in row[key]}
    if name == "free" and "ceiling" in row:
        numbers["speedup"] = row["ceiling"]
    return {"batch": row["batch"], "context": row["context"], "cache": CACHES[name], **numbers}


def show_tune(result: Result) -> Shown:
    """Show present and chosen launches; then the skipped ones, and the table."""
    from dsv4.kernels.triton.launch import format_table

    columns = (
        ("work", "{work}"), ("size", "{size}"), ("present", "{present}"), ("us", "{present_us}"),
        ("chosen", "{chosen}"), ("us", "{chosen_us}"),
    )  # fmt: skip
    architecture = result["architecture"]
    title = f"Launches of {architecture}, microseconds per layer"
    rows = [
        {"work": choice["work"], "size": choice["size"],
         **_launch(choice, "present"), **_launch(choice, "chosen")}
        for choice in result["choices"]
    ]  # fmt: skip
    skipped = [
        f"skipped {each['work']}, {each['launch']}: {each['problem']}" for each in result["skipped"]
    ]
    last = f"written to {result['written']}"
    if result["written"] is None:
        last = format_table({architecture: result["table"]})
    return Shown([build_table(title, rows, columns)], [*skipped, last])


def _launch(choice: Result, which: str) -> dict[str, str]:
    """Format a launch's parameters, and its time if it was usable."""
    launch = choice[which]
    times = [time["us"] for time in choice["times"] if time["launch"] == launch]
    return {
        which: ", ".join(f"{name} {value}" for name, value in launch.items()),
        f"{which}_us": f"{times[0]:.2f}" if times else "unusable",
    }
