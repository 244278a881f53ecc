"""The `dsv4` command. Bad usage exits with 2, a failure with 1 and one sentence on stderr."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dsv4.console import make_console, track, working
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.inspector import command as inspect_command
from dsv4.planner.command import (
    LABELS,
    add_options,
    as_json,
    build_plan,
    page_models,
    positive,
    print_plan,
    title,
)
from dsv4.planner.sizes import format_bytes

CACHES = {
    "transformers": "transformers' own",
    "this": "this one",
    "graphs": "this one, CUDA graphs",
}


class UsageError(Exception):
    """Options that are wrong together, or name what is not there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except UsageError as error:
        if options.debug:
            raise
        parser.error(_sentence(error))
    except KeyboardInterrupt:
        print("dsv4: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has enough; nothing more is written to them, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if options.debug:
            raise
        print(f"dsv4: {_sentence(error)}", file=sys.stderr)
        return 1


def _sentence(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv4", description="KV-cache runtime for DeepSeek-V4's hybrid attention"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="generate through this cache and through transformers' own"
    )
    demo.add_argument("--model", help="a checkpoint folder; by default a small random model")
    demo.add_argument(
        "--prompt", action="append", default=[], help="a text for --model; more than once for more"
    )
    demo.add_argument("--new-tokens", type=positive, default=48, help="tokens to generate")
    demo.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    demo.add_argument("--kv", choices=KV_FORMATS, default="fp8", help="row format of the KV")
    demo.add_argument(
        "--index", choices=INDEX_FORMATS, default="mxfp4", help="row format of the index keys"
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument(
        "--save", type=Path, metavar="FOLDER", help="keep a request there, for dsv4 inspect"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object")
    demo.set_defaults(run=_demo)

    plan = commands.add_parser("plan", help="what a cache takes on a GPU, and how much fits")
    add_options(plan)
    plan.set_defaults(run=_plan)

    inspect = commands.add_parser("inspect", help="what is inside a saved request")
    inspect_command.add_options(inspect)
    inspect.set_defaults(run=_inspect)

    info = commands.add_parser("info", help="versions, devices and backends")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    benches = commands.add_parser("bench", help="measure").add_subparsers(
        dest="bench", required=True
    )
    plan = benches.add_parser("plan", help="host time of prepare_forward")
    plan.add_argument("--requests", type=positive, default=256)
    plan.add_argument("--steps", type=positive, default=400)
    plan.add_argument("--json", action="store_true", help="print one JSON object only")
    plan.set_defaults(run=_bench_plan)
    prefix = benches.add_parser("prefix", help="host time of a prefix hit and of a block's hash")
    prefix.add_argument("--tokens", type=positive, default=100_000)
    prefix.add_argument("--rounds", type=positive, default=50)
    prefix.add_argument("--json", action="store_true", help="print one JSON object only")
    prefix.set_defaults(run=_bench_prefix)
    write = benches.add_parser("write", help="the write path of a layer, on a GPU")
    write.add_argument("--json", action="store_true", help="print one JSON object only")
    write.set_defaults(run=_bench_write)
    step = benches.add_parser("step", help="a captured decode step, on a GPU")
    step.add_argument("--requests", type=positive, default=256)
    step.add_argument("--steps", type=positive, default=400)
    step.add_argument("--json", action="store_true", help="print one JSON object only")
    step.set_defaults(run=_bench_step)
    gather = benches.add_parser("gather", help="dense rows of a layer, on a GPU")
    gather.add_argument("--json", action="store_true", help="print one JSON object only")
    gather.set_defaults(run=_bench_gather)
    index = benches.add_parser("index", help="queries, scores and top-k of the index, on a GPU")
    index.add_argument("--json", action="store_true", help="print one JSON object only")
    _add_compare(index, "DeepGEMM")
    index.set_defaults(run=_bench_index)
    attend = benches.add_parser("attend", help="attention of a layer in a decode step, on a GPU")
    attend.add_argument("--json", action="store_true", help="print one JSON object only")
    _add_compare(attend, "FlashMLA")
    attend.set_defaults(run=_bench_attend)
    against = benches.add_parser(
        "transformers", help="decode steps of a transformers model with both caches, on a GPU"
    )
    against.add_argument("--steps", type=positive, default=30)
    against.add_argument("--json", action="store_true", help="print one JSON object only")
    against.set_defaults(run=_bench_transformers)
    tune = benches.add_parser("tune", help="launch parameters of this GPU's architecture")
    tune.add_argument("--write", action="store_true", help="update the committed table in place")
    tune.add_argument("--json", action="store_true", help="print one JSON object only")
    tune.set_defaults(run=_bench_tune)
    return parser


def _add_compare(bench: argparse.ArgumentParser, peer: str) -> None:
    bench.add_argument("--compare", action="store_true", help=f"time {peer} beside ours")
    bench.add_argument(
        "--peers", metavar="PATH", help=f"a folder that {peer}, or vLLM's copy, was unpacked to"
    )


def _use_peers(options: argparse.Namespace) -> None:
    from dsv4.kernels.peers.find import add_folder

    if options.peers is None:
        return
    try:
        add_folder(options.peers)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _print_peers(result: dict[str, Any]) -> None:
    """One sentence for each peer that could not be compared."""
    for name, state in result.get("peers", {}).items():
        if state != "compared":
            print(f"{name} is not compared: {state}")


def _plan(options: argparse.Namespace) -> int:
    from dsv4.planner.page import check_page, write_page
    from dsv4.planner.plot import check_plot, plot_plan

    try:
        plan = build_plan(options)
        if options.plot is not None:
            check_plot(options.plot)
        if options.html is not None:
            check_page(options.html)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.plot is not None:
        plot_plan(plan, options.plot, title=title(plan, model=options.model))
    if options.html is not None:
        models = page_models(options.model)
        write_page(
            plan, options.html, model=options.model, gpu=options.gpu, models=models, labels=LABELS
        )
    if options.json:
        print(json.dumps(as_json(plan, model=options.model)))
    else:
        print_plan(plan, make_console(), model=options.model, gpu=options.gpu)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from dsv4.inspector.heatmap import check_heatmap, draw_heatmap
    from dsv4.inspector.report import RequestInspector

    try:
        path, against, recorded = inspect_command.find_files(options)
        if options.heatmap is not None:
            check_heatmap(options.heatmap)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with working("reading"):
        inspector = RequestInspector(path, against=against)
        selections = None
        if recorded is not None:
            selections = inspect_command.read_layer_selections(recorded, inspector)
    layers = list(track(inspector.layers(), "layers", total=inspector.num_layers))
    if options.heatmap is not None and selections is not None:
        draw_heatmap(selections, options.heatmap)
    report = inspect_command.with_selections(inspector.report(layers), selections)
    if options.json:
        print(json.dumps(report))
    else:
        inspect_command.print_report(report, make_console())
    return 0


def _info(options: argparse.Namespace) -> int:
    from dsv4.info import collect_info

    result = collect_info()
    if options.json:
        print(json.dumps(result))
    else:
        _print_info(result)
    return 0


def _print_info(result: dict[str, Any]) -> None:
    versions = Table(title="Versions")
    versions.add_column("package")
    versions.add_column("version")
    for name, version in result["versions"].items():
        versions.add_row(name, version or "not installed")
    devices = Table(title="Devices")
    for column in ("device", "name", "memory", "capability"):
        devices.add_column(column)
    for device in result["devices"]:
        memory = device["memory_bytes"]
        size = "" if memory is None else format_bytes(memory)
        devices.add_row(device["device"], device["name"], size, device["capability"] or "")
    backends = Table(title="Backends, and other projects' kernels")
    backends.add_column("name")
    backends.add_column("available")
    backends.add_column("why not")
    for name, state in (result["backends"] | result["peers"]).items():
        answer = "yes" if state["available"] else "no"
        backends.add_row(name, answer, escape(state["problem"] or ""))
    make_console().print(versions, devices, backends)


def _demo(options: argparse.Namespace) -> int:
    if options.prompt and options.model is None:
        raise UsageError("--prompt needs --model: a random model has no tokenizer")
    from dsv4.demo.command import print_demo, run_command
    from dsv4.demo.kept_run import keep_run

    result = run_command(options)
    if options.save is not None:
        keep_run(options.save, kv_format=options.kv, index_format=options.index, seed=options.seed)
    if options.json:
        print(json.dumps(result))
    else:
        print_demo(result, make_console())
    return 0 if result["ok"] else 1


def _bench_write(options: argparse.Namespace) -> int:
    from dsv4.bench.write import bench_write

    with working("measuring"):
        result = bench_write()
    if not options.json:
        table = Table(title="One layer's writes in a decode step, microseconds")
        for column in ("layer", "batch", "same layer", "43 layers in turn", "bytes / 4.27 TB/s"):
            table.add_column(column, justify="right")
        for row in result["rows"]:
            closing = " closing" if row["closing"] else ""
            table.add_row(
                row["type"] + closing,
                str(row["batch"]),
                f"{row['warm_us']:.2f}",
                f"{row['rotating_us']:.2f}",
                f"{row['floor_us']:.2f}",
            )
        prefill = Table(title="One layer's writes of a prefill, microseconds")
        for column in ("layer", "tokens", "measured", "bytes / 4.27 TB/s"):
            prefill.add_column(column, justify="right")
        for row in result["prefill"]:
            prefill.add_row(
                row["type"], str(row["tokens"]), f"{row['us']:.1f}", f"{row['floor_us']:.1f}"
            )
        make_console().print(table, prefill)
    print(json.dumps(result))
    return 0


def _bench_gather(options: argparse.Namespace) -> int:
    from dsv4.bench.gather import bench_gather

    with working("measuring"):
        result = bench_gather()
    if not options.json:
        table = Table(title="One layer's gathers of V4-Flash's fp8 rows")
        columns = ("rows", "same layer us", "8 layers in turn us", "TB/s", "of 4.27 TB/s")
        table.add_column("gather")
        for column in columns:
            table.add_column(column, justify="right")
        for row in result["rows"]:
            table.add_row(
                row["gather"],
                f"{row['num_rows']:,}",
                f"{row['warm_us']:.2f}",
                f"{row['rotating_us']:.2f}",
                f"{row['tb_per_s']:.2f}",
                f"{row['share_of_copy']:.0%}",
            )
        make_console().print(table)
    print(json.dumps(result))
    return 0


def _bench_index(options: argparse.Namespace) -> int:
    from dsv4.bench.index import bench_index

    _use_peers(options)
    with working("measuring"):
        result = bench_index(compare=options.compare)
    if not options.json:
        table = Table(title="One layer's index of V4-Flash in a decode step, microseconds")
        table.add_column("step")
        table.add_column("format")
        columns = ("entries", "batch", "same layer", "4 layers in turn", "bytes / 4.27 TB/s")
        peer = ("DeepGEMM FP8", "ours / theirs") if options.compare else ()
        for column in (*columns, *peer):
            table.add_column(column, justify="right")
        for row in result["rows"]:
            table.add_row(
                row["step"],
                row["format"],
                f"{row['entries']:,}",
                str(row["batch"]),
                f"{row['warm_us']:.2f}",
                f"{row['rotating_us']:.2f}",
                f"{row['floor_us']:.2f}",
                *_peer_cells(row, "deepgemm_us", is_shown=options.compare),
            )
        make_console().print(table)
        _print_peers(result)
    print(json.dumps(result))
    return 0


def _peer_cells(row: dict[str, Any], name: str, *, is_shown: bool) -> list[str]:
    """A peer's time and our ratio to it; a dash where there is none."""
    if not is_shown:
        return []
    return [f"{row[key]:.2f}" if key in row else "-" for key in (name, "ratio")]


def _bench_attend(options: argparse.Namespace) -> int:
    from dsv4.bench.attend import bench_attend

    _use_peers(options)
    with working("measuring"):
        result = bench_attend(compare=options.compare)
    if not options.json:
        table = Table(title="One layer's attention in a decode step, fp8 rows, microseconds")
        columns = ("batch", "same layer", "8 layers in turn", "batch-invariant", "TFLOP/s",
                   "bytes / 4.27 TB/s")  # fmt: skip
        table.add_column("layer")
        peer = ("FlashMLA", "ours / theirs") if options.compare else ()
        for column in (*columns, *peer):
            table.add_column(column, justify="right")
        for row in result["rows"]:
            table.add_row(
                row["layer"],
                str(row["batch"]),
                f"{row['warm_us']:.2f}",
                f"{row['rotating_us']:.2f}",
                f"{row['invariant_us']:.2f}",
                f"{row['tflops']:.0f}",
                f"{row['floor_us']:.2f}",
                *_peer_cells(row, "flashmla_us", is_shown=options.compare),
            )
        make_console().print(table)
        _print_peers(result)
    print(json.dumps(result))
    return 0


def _bench_transformers(options: argparse.Namespace) -> int:
    from dsv4.bench.transformers import bench_transformers

    result = bench_transformers(num_steps=options.steps, note=_timed_notes())
    if not options.json:
        _print_transformers(result)
    print(json.dumps(result))
    has_errors = any(row["errors"] for row in result["decode"] + result["memory"])
    return int(has_errors)


def _timed_notes() -> Callable[[str], None]:
    """Lines on stderr, each with the seconds since the first."""
    console, start = make_console(stderr=True), time.perf_counter()
    return lambda line: console.print(
        f"{time.perf_counter() - start:5.1f} s  {line}", highlight=False
    )


def _print_transformers(result: dict[str, Any]) -> None:
    decode = Table(title="A decode step of transformers' model in BF16, microseconds")
    for column in ("batch", "context", "cache", "step", "faster", "attention", "faster"):
        decode.add_column(column, justify="right")
    for row in result["decode"]:
        for name, label in CACHES.items():
            decode.add_row(
                str(row["batch"]), f"{row['context']:,}", label, _cell(row["step_us"].get(name)),
                _cell(row["speedup"].get(name), "{:.2f} x"),
                _cell(row["attention_us"].get(name)),
                _cell(row["attention_speedup"].get(name), "{:.2f} x"),
            )  # fmt: skip
        ceiling = _cell(row.get("ceiling"), "{:.2f} x")
        free = _cell(row["step_us"].get("free"))
        decode.add_row(str(row["batch"]), f"{row['context']:,}", "one that is free", free, ceiling)
    memory = Table(title="Bytes of one row, fp8 rows and mxfp4 keys")
    for column in ("context", "this cache", "transformers'", "ratio", "workspaces beside"):
        memory.add_column(column, justify="right")
    for row in result["memory"]:
        memory.add_row(
            f"{row['context']:,}",
            _cell(row.get("this_bytes")),
            _cell(row.get("transformers_bytes")),
            _cell(row.get("ratio"), "{:.3f}"),
            _cell(row.get("workspace_bytes")),
        )
    console = make_console()
    console.print(decode, memory)
    for row in result["decode"] + result["memory"]:
        for name, error in row["errors"].items():
            where = f"batch {row['batch']}, " if "batch" in row else "memory, "
            console.print(f"{where}{row['context']:,} tokens, {name}: {escape(error)}")


def _cell(value: float | None, style: str = "{:,.0f}") -> str:
    return "" if value is None else style.format(value)


def _bench_tune(options: argparse.Namespace) -> int:
    from dsv4.bench.tune import bench_tune

    with working("measuring"):
        result = bench_tune(is_written=options.write)
    if not options.json:
        _print_tuned(result)
    print(json.dumps(result))
    return 0


def _print_tuned(result: dict[str, Any]) -> None:
    from dsv4.kernels.triton.launch import format_table, parse_table

    table = Table(title=f"Launches of {result['architecture']}, microseconds per layer")
    for column in ("work", "size", "present", "us", "chosen", "us"):
        table.add_column(column, justify="right")
    for choice in result["choices"]:
        cells = [choice["work"], str(choice["size"])]
        for launch in (choice["present"], choice["chosen"]):
            times = [time["us"] for time in choice["times"] if time["launch"] == launch]
            cells.append(", ".join(f"{name} {value}" for name, value in launch.items()))
            cells.append(f"{times[0]:.2f}" if times else "unusable")
        table.add_row(*cells)
    make_console().print(table)
    for skipped in result["skipped"]:
        print(f"skipped {skipped['work']}, {skipped['launch']}: {skipped['problem']}")
    if result["written"] is None:
        print(format_table(parse_table(json.dumps({result["architecture"]: result["table"]}))))
    else:
        print(f"written to {result['written']}")


def _bench_plan(options: argparse.Namespace) -> int:
    from dsv4.bench.plan import bench_plan

    with working("measuring"):
        result = bench_plan(num_requests=options.requests, num_steps=options.steps)
    if not options.json:
        table = Table(title=f"prepare_forward, {result['num_requests']} requests, one token each")
        for column in ("V4-Flash", "median us", "90th percentile us"):
            table.add_column(column, justify="right")
        for name, median in result["median_us"].items():
            table.add_row(name, f"{median:.1f}", f"{result['p90_us'][name]:.1f}")
        make_console().print(table)
    print(json.dumps(result))
    return 0


def _bench_prefix(options: argparse.Namespace) -> int:
    from dsv4.bench.prefix import bench_prefix

    result = bench_prefix(num_tokens=options.tokens, num_rounds=options.rounds)
    if not options.json:
        table = Table(title=f"A prefix hit of {result['num_hit_tokens']:,} tokens of V4-Flash")
        for column in ("", "best us", "median us", "90th percentile us", "target us"):
            table.add_column(column, justify="right")
        for name in result["median_us"]:
            target = result["target_us"].get(name)
            cells = (f"{result[key][name]:.1f}" for key in ("best_us", "median_us", "p90_us"))
            table.add_row(name.replace("_", " "), *cells, f"{target:.0f}" if target else "")
        make_console().print(table)
    print(json.dumps(result))
    return 0


def _bench_step(options: argparse.Namespace) -> int:
    from dsv4.bench.step import bench_step

    with working("measuring"):
        result = bench_step(num_requests=options.requests, num_steps=options.steps)
    if not options.json:
        table = Table(
            title=f"Host time of a captured step, {result['num_requests']} requests, "
            f"{result['num_layers']} layers written (target {result['target_us']:.0f} us)"
        )
        for column in ("", "median us", "90th percentile us"):
            table.add_column(column, justify="right")
        for name, median in result["median_us"].items():
            table.add_row(name, f"{median:.1f}", f"{result['p90_us'][name]:.1f}")
        make_console().print(table, _decode_table(result["decode"]))
    print(json.dumps(result))
    return 0


def _decode_table(rows: list[dict[str, Any]]) -> Table:
    """Whole steps; a star where requests share their blocks, for want of memory."""
    table = Table(
        title="One decode step of V4-Flash's attention layers, microseconds",
        caption=None if all(row["has_own_blocks"] for row in rows) else "* on shared blocks",
    )
    for column in ("tokens", "batch", "all 43 layers", "write", "index", "attention"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [row[f"{name}_us"] for name in ("total", "write", "index", "attention")]
        star = "" if row["has_own_blocks"] else " *"
        table.add_row(f"{row['tokens']:,}", f"{row['batch']}{star}", *(f"{t:.0f}" for t in times))
    return table
