"""Results of the benches for reading: tables, and sentences below them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from dsv4.tools.console import build_table

Result = Mapping[str, Any]


class Listing(NamedTuple):
    """A table of a bench; the title is filled in from the result, each cell from a row.

    Attributes:
        columns: `heading: template | ...`; a heading alone is the key of its cells.
        rows: Key of the rows in the result.
        num_left: Number of columns that are aligned left.
        num_keys: Number of columns that tell rows apart, for the table of external kernels.
        external: Names of external kernels, and our time, by the key of theirs; --compare adds a
            table of them.
    """

    bench: str
    title: str
    columns: str
    rows: str = "rows"
    num_left: int = 0
    num_keys: int = 2
    external: Mapping[str, tuple[str, str]] = {}


class Shown(NamedTuple):
    """The printed form of a result."""

    tables: Sequence[Table]
    sentences: Sequence[str]


TIMES = "median us: {median:.1f} | 90th percentile us: {p90:.1f}"
TIMES_AND_TARGETS = TIMES + " | target us: {target}"
TARGET = "target: {target:g}, {verdict}"
THEIRS = "ours us: {ours:,.2f} | theirs us: {theirs:,.2f} | ratio: {ratio:.2f}"
LISTINGS = (
    Listing("plan", "prepare_forward, {num_requests} requests, one token each",
        "V4-Flash: {name} | " + TIMES, rows="times"),
    Listing("host", "V4-Flash, {num_requests} requests, 1 + {drafts} tokens each",
        ": {words} | mean us: {mean:.1f} | " + TIMES_AND_TARGETS, rows="times"),
    Listing("prefix", "A prefix hit of {num_hit_tokens:,} tokens of V4-Flash",
        ": {words} | best us: {best:.1f} | " + TIMES_AND_TARGETS, rows="times"),
    Listing("disk",
        "{num_records:,} records of {record_bytes:,} bytes, read in turn with dd (target {target} "
        "of dd)",
        ": {name} | median GB/s: {median:.2f} | of dd: {ratio:.2f} | "
        "CPU s a GB: {cpu_s_per_gb:.2f}", num_left=1),
    Listing("handover",
        "A request of {num_tokens:,} tokens of V4-Flash, {num_bytes:,} bytes, to another process "
        "(target {target} of one message)",
        "transport | : {name} | median GB/s: {gb_per_s:.2f} | of one message: {ratio:.2f}",
        num_left=2),
    Listing("trace", "Found of the prompt tokens: {file}, requests {first} to {last}",
        "blocks: {size} | policy | bound: {bound:.2%} | plain LRU: {lru:.2%} | "
        "found: {found:.2%} | of LRU: {ratio:.3f} | target", num_left=2),
    Listing("trace", "Cost of a hit, and bytes at the end as V4-Flash's",
        "blocks: {size} | policy | replayed blocks a hit: {replayed_blocks_per_hit:.2f} | "
        "resume, median us: {resume_median_us:.0f} | 90 %: {resume_p90_us:.0f} | "
        "device GB: {device_blocks_gb:.2f} | staged: {device_checkpoints_gb:.2f} | "
        "host GB: {host_blocks_gb:.2f} | checkpoints: {host_checkpoints_gb:.2f}", num_left=2),
    Listing("quality", "KV rows: errors",
        "format | bytes: {row_bytes} | row: {row_error:.2%} | output: {output_error:.2%}",
        rows="kv", num_left=1),
    Listing("quality", "Index keys of V4-Flash: errors, recall of the top 512 of 8,192",
        "format | bytes: {row_bytes} | row: {row_error:.2%} | recall: {recall:.1%} | "
        "output: {output_error:.2%}",
        rows="index", num_left=1),
    Listing("quality", "Rows of V4.1-Flash: errors against the values that the model attends",
        "rows | bytes a token: {bytes:,.0f} | window: {window_error:.2%} | "
        "entries: {entry_error:.2%} | output: {output_error:.2%} | keys: {key_error:.2%} | "
        "choices changed: {changed:.1%}", rows="v41", num_left=1),
    Listing("quality", "Smallest margin at which every answer is right",
        "rows: {part} | format | tokens: {tokens:,} | margin: {text}",
        rows="margins", num_left=2),
    Listing("swap",
        "A request of {num_tokens:,} tokens of V4-Flash to pinned memory and back (target "
        "{target_gb_per_s:.0f} GB/s)",
        ": {way} | blocks | bytes: {bytes:,} | best ms: {best_ms:.1f} | "
        "median ms: {median_ms:.1f} | median GB/s: {median_gb_per_s:.1f}", num_left=2),
    Listing("write", "One layer's writes in a decode step, microseconds",
        "layer | batch | warm: {warm_us:.2f} | rotating, 43 layers: {rotating_us:.2f} | "
        + TARGET + " | bytes / 4.27 TB/s: {floor_us:.2f}",
        external={"sglang_us": ("SGLang", "rotating_us")}),
    Listing("write", "One layer's writes of a prefill, microseconds",
        "layer: {type} | tokens | measured: {us:.1f} | " + TARGET
        + " | bytes / 4.27 TB/s: {floor_us:.1f}",
        rows="prefill"),
    Listing("step",
        "Host time of a captured step, {num_requests} requests, {num_layers} layers written "
        "(target {target_us:.0f} us)",
        ": {name} | " + TIMES, rows="times"),
    Listing("step", "One decode step of {model}'s {num_layers} attention layers, microseconds",
        "tokens: {tokens:,} | batch: {batch}{star} | all layers: {total_us:.0f} | "
        + TARGET + " | write: {write_us:.0f} | index: {index_us:.0f} | "
        "attention: {attention_us:.0f}",
        rows="decode"),
    Listing("step",
        "Mixed steps of V4-Flash's attention layers, microseconds; graphs of {pool_bytes:,} bytes; "
        "target of the host, captured: {mixed_target_us}",
        "decode rows: {decode} | chunks | host, eager: {eager_us:,.0f} | "
        "host, captured: {captured_us:,.0f} | target: {verdict} | "
        "step, eager: {eager_step_us:,.0f} | step, captured: {captured_step_us:,.0f}",
        rows="mixed"),
    Listing("gather", "One layer's gathers of V4-Flash's fp8 rows",
        "gather | rows: {num_rows:,} | warm us: {warm_us:.2f} | "
        "rotating us, 8 layers: {rotating_us:.2f} | TB/s: {tb_per_s:.2f} | "
        "of 4.27 TB/s: {share_of_copy:.0%}", num_left=1),
    Listing("index", "One layer's index of V4-Flash in a decode step, microseconds",
        "step | format | entries: {entries:,} | batch | warm: {warm_us:.2f} | "
        "rotating, 4 layers: {rotating_us:.2f} | " + TARGET
        + " | bytes / 4.27 TB/s: {floor_us:.2f}",
        num_left=2, num_keys=4,
        external={"deepgemm_us": ("DeepGEMM", "rotating_us"),
                  "sglang_us": ("SGLang", "warm_us")}),
    Listing("index", "One layer's index of a prefill chunk: scores, and queries to top-k",
        "format | queries: {tokens:,} | entries: {entries:,} | scores us: {score_us:,.0f} | "
        "TFLOP/s: {score_tflops:.0f} | all us: {select_us:,.0f} | TFLOP/s: {select_tflops:.0f} | "
        + TARGET, rows="prefill", num_left=1),
    Listing("index", "The same of scores that ascend",
        "format | entries: {entries:,} | all us: {select_us:,.0f} | "
        "ascending us: {ascending_us:,.0f} | ratio: {ascending_ratio:.2f} | "
        "target: {ascending_target}, {ascending_verdict}", rows="ascending", num_left=1),
    Listing("index",
        "The index of a prefill chunk of {model_tokens:,} queries at {model_context:,} tokens: "
        "all layers of a model that choose, ms",
        "model | layers | all: {total_ms:.1f} | of V4-Flash: {of_flash:.2f} | "
        "a layer of each kind: {kinds}", rows="models", num_left=1),
    Listing("index",
        "A layer's scores of V4-Flash at {context:,} tokens, microseconds: a rank that has all "
        "entries, and one of {num_ranks}",
        "format | requests: {batch} | tokens of each: {tokens:,} | one rank: {one_us:,.2f} | "
        "one of several: {rank_us:,.2f} | share: {share:.3f} | target: {target:.2f}, {verdict}",
        rows="ranks", num_left=1),
    Listing("attend",
        "One layer's attention in a decode step, in the model's rows, microseconds: warm, rotating "
        "over 8 layers, and a copy of the bytes at 4.27 TB/s",
        "layer | batch | warm: {warm_us:.2f} | rotating: {rotating_us:.2f} | "
        + TARGET + " | TFLOP/s: {tflops:.0f} | copy: {floor_us:.2f}",
        num_left=1, external={"flashmla_us": ("FlashMLA", "rotating_us")}),
    Listing("attend", "Attention with batch_invariant=True, rotating",
        "layer | batch | us: {invariant_us:.2f} | of the default: {invariant_ratio:.2f} | "
        "target: {invariant_target}, {invariant_verdict}", num_left=1),
    Listing("attend", "Attention beside that of Flash CSA, one token a request",
        "layer | batch | of Flash CSA: {of_flash:.2f} | "
        "target: {of_flash_target}, {of_flash_verdict}", rows="of_flash", num_left=1),
    Listing("attend", "One layer's attention of a prefill chunk, fp8 rows",
        "layer | queries: {tokens:,} | context: {context:,} | us: {us:,.0f} | "
        "TFLOP/s: {tflops:.0f} | " + TARGET,
        rows="prefill", num_left=1, external={"flashmla_us": ("FlashMLA", "us")}),
    Listing("prefill", "One layer on a chunk of {chunk:,} tokens, microseconds",
        "layer | tokens before: {start:,} | all: {layer_us:,.0f} | write: {write_us:,.1f} | "
        "index: {select_us:,.0f} | dense: {dense_us:,.0f} | attention: {attend_us:,.0f}",
        num_left=1, external={"deepgemm_us": ("scores, DeepGEMM", "score_us"),
                              "sglang_us": ("top-k, SGLang", "topk_us"),
                              "flashmla_us": ("attention, FlashMLA", "attend_us")}),
    Listing("prefill", "The index of a CSA layer by part, microseconds",
        "tokens before: {start:,} | queries: {query_us:,.0f} | scores: {score_us:,.0f} | "
        "top-k: {topk_us:,.0f} | all: {select_us:,.0f}", rows="index"),
    Listing("prefill", "A prompt of V4-Flash, {num_layers} layers, seconds",
        "tokens: {context:,} | sum of chunks: {layer_s:.2f} | whole run: {whole_s:.2f} | "
        "target: {target_s}", rows="prompts"),
    Listing("prefill", "The sum by part, and attention by the type of layer, seconds",
        "tokens: {context:,} | writes: {write_s:.2f} | query: {CSA_query_s:.2f} | "
        "scores: {CSA_score_s:.2f} | top-k: {CSA_topk_s:.2f} | dense: {dense_s:.2f} | "
        "CSA: {CSA_attend_s:.2f} | HCA: {HCA_attend_s:.2f} | SWA: {SWA_attend_s:.2f}",
        rows="prompts"),
    Listing("prefill", "Scratch and workspaces for 1M tokens, MiB",
        "model | index, then dense rows: {index_scratch_mib:.1f} | "
        "windows: {window_workspace_mib:.1f} | partials: {attention_partials_mib:.1f} | "
        "pooling: {pooling_scratch_mib:.2f} | all: {total_mib:.1f} | target: {target_mib}",
        rows="memory", num_left=1),
    Listing("transformers", "A decode step of transformers' model in BF16, microseconds",
        "batch | context: {context:,} | cache | step: {step_us:,.0f} | faster: {speedup:.2f} x | "
        "attention: {attention_us:,.0f} | faster: {attention_speedup:.2f} x", rows="decode"),
    Listing("transformers", "Bytes of one row, fp8 rows and mxfp4 keys",
        "context: {context:,} | this cache: {this_bytes:,} | "
        "transformers': {transformers_bytes:,} | ratio: {ratio:.3f} | "
        "workspaces beside: {workspace_bytes:,}", rows="memory"),
    Listing("engine",
        "{num_requests} requests of {num_shared:,} shared and {num_own:,} own tokens, {num_new} "
        "new ones each (target {target:.0f} x)",
        ": {name} | batch: {batch:.0f} | seconds: {seconds:.1f} | tokens/s: {tokens_per_s:,.0f} | "
        "first token s: {first_token_s:.2f} | the last one's: {last_first_token_s:.2f}"),
    Listing("tune", "Launches of {architecture}, microseconds per layer",
        "work | size | present | us: {present_us} | chosen | us: {chosen_us}", rows="choices"),
)  # fmt: skip
CACHES = {
    "transformers": "transformers' own", "this": "this one", "graphs": "this one, CUDA graphs",
    "step": "this one, whole step a graph", "free": "one that is free",
}  # fmt: skip
PER_CACHE = ("step_us", "speedup", "attention_us", "attention_speedup")


def show(name: str, result: Result) -> Shown:
    """Show the result of a bench: its tables, then sentences."""
    prepare = {
        "trace": _prepare_trace, "step": _prepare_step, "transformers": _prepare_transformers,
        "engine": _prepare_engine, "tune": _prepare_tune, "prefill": _prepare_prefill,
        "index": _prepare_index, "attend": _prepare_attend,
    }.get(name)  # fmt: skip
    ready = {**result, "times": _times(result), **(prepare(result) if prepare else {})}
    captions, tables = ready.get("captions", {}), []
    for each in LISTINGS:
        if each.bench != name or not ready.get(each.rows):
            continue
        columns, rows, title = _columns(each.columns), ready[each.rows], each.title
        tables.append(
            build_table(
                title.format_map(ready), rows, columns, num_left=each.num_left,
                caption=captions.get(each.rows),
            )
        )  # fmt: skip
        if theirs := _beside(rows, each.external):
            columns = [("kernel", "{kernel}"), *columns[: each.num_keys], *_columns(THEIRS)]
            num_left = each.num_left + 1
            tables.append(build_table("Beside others' kernels", theirs, columns, num_left=num_left))
    return Shown(tables, [*ready.get("sentences", ()), *_missing(result)])


def _beside(
    rows: Sequence[Result], external: Mapping[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """Make a row for each time of an external kernel, with ours."""
    return [
        {**row, "kernel": kernel, "ours": row[ours], "theirs": row[key],
         "ratio": row[ours] / row[key]}
        for key, (kernel, ours) in external.items() for row in rows if key in row
    ]  # fmt: skip


def _columns(text: str) -> list[tuple[str, str]]:
    """Read columns: headings, and templates of cells."""
    pairs = (column.partition(": ") for column in text.split(" | "))
    return [(heading, template or f"{{{heading}}}") for heading, _, template in pairs]


def _missing(result: Result) -> list[str]:
    """Name each project that could not be compared, and say why."""
    states = result.get("peers", {}).items()
    return [f"{name} is not compared: {state}" for name, state in states if state != "compared"]


def _times(result: Result) -> list[dict[str, Any]]:
    """Collect times by name, with the target of each if there is one."""
    keys = [key for key in ("mean", "best", "median", "p90") if f"{key}_us" in result]
    targets = result.get("target_us", {})
    targets = targets if isinstance(targets, Mapping) else {}
    return [
        {
            "name": name,
            "words": name.replace("_", " "),
            "target": f"{targets[name]:.0f}" if name in targets else "",
            **{key: result[f"{key}_us"][name] for key in keys},
        }
        for name in result.get("median_us", ())
    ]


def _prepare_trace(result: Result) -> dict[str, Any]:
    rows = [
        {
            **row,
            "size": f"{row['blocks']:,}" if row["blocks"] else "all",
            "target": "" if row["target"] is None else f"{row['target']:.2f}",
            **{f"{tier}_gb": count / 1e9 for tier, count in row["bytes"].items()},
        }
        for row in result["rows"]
    ]
    sentences = [
        f"a block is {result['block_bytes']:,} bytes, a checkpoint "
        f"{result['checkpoint_blocks']} blocks, a halo {result['halo_blocks']:.1f}",
        *(
            f"one budget of {row['size']} blocks: {row['device_blocks']:,} on the device and "
            f"{row['host_blocks']:,} on the host, the rest for checkpoints on their way there"
            for row in rows
            if row["policy"] == "one budget" and row["blocks"]
        ),
    ]
    last = result["first"] + result["num_requests"] - 1
    return {"rows": rows, "last": last, "sentences": sentences}


def _prepare_step(result: Result) -> dict[str, Any]:
    """Mark shared blocks with a star; records without a model's name are of V4-Flash."""
    decode = [{**row, "star": "" if row["has_own_blocks"] else " *"} for row in result["decode"]]
    caption = "* on shared blocks" if any(row["star"] for row in decode) else None
    model = result.get("model", "v4-flash")
    return {"model": model, "decode": decode, "captions": {"decode": caption}}


def _prepare_index(result: Result) -> dict[str, Any]:
    rows = result.get("prefill", ())
    return {"ascending": [row for row in rows if "ascending_us" in row]}


def _prepare_attend(result: Result) -> dict[str, Any]:
    return {"of_flash": [row for row in result["rows"] if "of_flash" in row]}


def _prepare_transformers(result: Result) -> dict[str, Any]:
    rows = [_cache_row(row, name) for row in result["decode"] for name in CACHES]
    return {"decode": rows, "sentences": result["errors"]}


def _cache_row(row: Result, name: str) -> dict[str, Any]:
    """Take the numbers of one cache from a row of decode steps."""
    numbers = {key: row[key][name] for key in PER_CACHE if name in row[key]}
    if name == "free" and "ceiling" in row:
        numbers["speedup"] = row["ceiling"]
    return {"batch": row["batch"], "context": row["context"], "cache": CACHES[name], **numbers}


def _prepare_prefill(result: Result) -> dict[str, Any]:
    """Sum the dense rows of all types, take bytes as MiB, and choose rows with an index."""
    prompts = [
        {**row, "dense_s": sum(row.get(f"{kind}_dense_s", 0.0) for kind in result["layers"])}
        for row in result["prompts"]
    ]
    memory = [
        {**row, **{f"{part}_mib": size / 2**20 for part, size in row.items() if part != "model"},
         "total_mib": row["total_mib"], "target_mib": row["target_mib"]}
        for row in result["memory"]
    ]  # fmt: skip
    index = [row for row in result["rows"] if "score_us" in row]
    num_layers = sum(result["layers"].values())
    return {"prompts": prompts, "memory": memory, "index": index, "num_layers": num_layers}


def _prepare_engine(result: Result) -> dict[str, Any]:
    found = result["rows"][0]["found_tokens"]
    return {"sentences": [f"{result['faster']:.1f} x the tokens a second; {found:,} tokens found"]}


def _prepare_tune(result: Result) -> dict[str, Any]:
    """List the skipped launches below, and the table if it is not written."""
    from dsv4.kernels.triton.launch import format_table

    rows = [{**each, **_launch(each, "present"), **_launch(each, "chosen")}
            for each in result["choices"]]  # fmt: skip
    lines = ["skipped {work}, {launch}: {problem}".format_map(each) for each in result["skipped"]]
    if result["written"] is None:
        lines.append(format_table({result["architecture"]: result["table"]}))
    else:
        lines.append(f"written to {result['written']}")
    return {"choices": rows, "sentences": lines}


def _launch(choice: Result, which: str) -> dict[str, str]:
    """Format a launch's parameters, and its time if it was usable."""
    launch = choice[which]
    times = [time["us"] for time in choice["times"] if time["launch"] == launch]
    return {
        which: ", ".join(f"{name} {value}" for name, value in launch.items()),
        f"{which}_us": f"{times[0]:.2f}" if times else "unusable",
    }
