"""The `dsv4` command: exits with 2 on bad usage, with 1 and one sentence on stderr on failure."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.tools import serve_command
from dsv4.tools.bench import command as bench_command
from dsv4.tools.bench.environment import check_device
from dsv4.tools.console import make_console, make_table, printable, track, working
from dsv4.tools.inspector import command as inspect_command
from dsv4.tools.inspector.selections import RUN_FILES
from dsv4.tools.outputs import add_force, check_new, check_output
from dsv4.tools.planner import command as plan_command
from dsv4.tools.planner.command import positive, tokens
from dsv4.tools.planner.sizes import format_bytes

DEMO_DEFAULTS = {"tokens": 2048, "questions": 48, "new_tokens": 48, "seed": 0}


class UsageError(Exception):
    """Options that contradict each other, or name something missing."""


@contextmanager
def _checking() -> Iterator[None]:
    """Take what options refuse for bad usage."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
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
        # The reader has closed the pipe. Without this, Python would write to it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if options.debug:
            raise
        print(f"dsv4: {_sentence(error)}", file=sys.stderr)
        return 1


def _sentence(error: BaseException) -> str:
    """Join an error's text to one line."""
    return printable(" ".join(str(error).split())) or type(error).__name__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dsv4", description="KV-cache runtime for DeepSeek-V4's hybrid attention")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text, run, add_options in (
        ("demo", "ask a model about a book, through this cache and through transformers' own",
         _demo, _add_demo_options),
        ("plan", "memory of a cache on a GPU, and how much fits", _plan, plan_command.add_options),
        ("inspect", "contents of a saved request", _inspect, inspect_command.add_options),
        ("serve", "an OpenAI-compatible server of a model", _serve, serve_command.add_options),
        ("info", "versions, devices and backends", _info, None),
        ("bench", "measure time and memory", _bench, bench_command.add_options),
    ):  # fmt: skip
        command = commands.add_parser(name, help=text)
        if add_options is not None:
            add_options(command)
        if run not in (_serve, _bench):
            command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=run)
    return parser


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=tokens, help="length of the book: 64k or 1M (2048)")
    add("--questions", type=positive, help="questions on the book (48)")
    add("--serve", action="store_true", default=None,
        help="ask through dsv4 serve, with the openai client")  # fmt: skip
    add("--model", help="a checkpoint folder or random: generate with that, and compare")
    add("--prompt", action="append", help="a text for --model FOLDER; may be repeated")
    add("--new-tokens", type=positive, help="tokens to generate with --model (48)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N")
    add("--kv", choices=KV_FORMATS, default="fp8", help="row format of the KV")
    add("--index", choices=INDEX_FORMATS, default="mxfp4", help="row format of the index keys")
    add("--seed", type=int, help="of --model random, and of what --save saves (0)")
    add("--save", type=Path, metavar="FOLDER", help="save a request there, for dsv4 inspect")
    add_force(parser)


def _complete_demo(options: argparse.Namespace) -> None:
    """Refuse options that the chosen demo does not look at; set those that are not given."""
    has_book, is_random = options.model is None, options.model == "random"
    for name, is_used, needed in (
        ("tokens", has_book, "the book: leave --model out"),
        ("questions", has_book, "the book: leave --model out"),
        ("serve", has_book, "the book: leave --model out"),
        ("prompt", not (has_book or is_random),
         "--model FOLDER: other models have no tokenizer for it"),
        ("new_tokens", not has_book, "--model: an answer on the book is one word"),
        ("seed", is_random or options.save is not None,
         "--model random or --save: nothing else is drawn"),
    ):  # fmt: skip
        if getattr(options, name) is not None and not is_used:
            raise UsageError(f"--{name.replace('_', '-')} needs {needed}")
    for name, value in DEMO_DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _plan(options: argparse.Namespace) -> int:
    from dsv4.tools.planner.page import write_page
    from dsv4.tools.planner.plot import plot_plan

    with _checking():
        plan = plan_command.build_plan(options)
        check_output("--plot", options.plot, force=options.force)
        check_output("--html", options.html, force=options.force)
        models = {} if options.html is None else plan_command.page_models(options.model)
    if options.plot is not None:
        plot_plan(plan, options.plot, title=plan_command.title(plan, model=options.model))
    if options.html is not None:
        write_page(plan, options.html, model=options.model, gpu=options.gpu, models=models)
    if options.json:
        print(json.dumps(plan_command.as_json(plan, model=options.model)))
    else:
        plan_command.print_plan(plan, make_console(), model=options.model, gpu=options.gpu)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from dsv4.tools.inspector.heatmap import draw_heatmap
    from dsv4.tools.inspector.report import RequestInspector, describe_selections

    with _checking():
        path, against, recorded = inspect_command.find_files(options)
        check_output("--heatmap", options.heatmap, force=options.force)
    with working("reading"):
        inspector = RequestInspector(path, against=against)
        selections = None
        if recorded is not None:
            selections = inspect_command.read_layer_selections(recorded, inspector)
    layers = list(track(inspector.layers(), "layers", total=inspector.num_layers))
    if options.heatmap is not None and selections is not None:
        draw_heatmap(selections, options.heatmap)
    chosen = None if selections is None else describe_selections(selections)
    report = {**inspector.report(layers), "selections": chosen}
    _print(options, report, inspect_command.print_report)
    return 0


def _print(
    options: argparse.Namespace, result: dict[str, Any], show: Callable[[Any, Console], None]
) -> None:
    """Print a result as JSON or for reading."""
    if options.json:
        print(json.dumps(result))
    else:
        show(result, make_console())


def _info(options: argparse.Namespace) -> int:
    from dsv4.tools.info import collect_info

    _print(options, collect_info(), _print_info)
    return 0


def _print_info(result: dict[str, Any], console: Console) -> None:
    versions = [(name, text or "not installed") for name, text in result["versions"].items()]
    devices = [
        (each["device"], each["name"],
         "" if each["memory_bytes"] is None else format_bytes(each["memory_bytes"]),
         each["capability"] or "", each["kernels"] or "")
        for each in result["devices"]
    ]  # fmt: skip
    backends = [
        (name, "yes" if state["available"] else "no", state["problem"] or "")
        for name, state in (result["backends"] | result["peers"]).items()
    ]
    kernels = "Backends, and other projects' kernels"
    console.print(
        make_table("Versions", ("package", "version"), versions, num_left=2),
        make_table(
            "Devices", ("device", "name", "memory", "capability", "kernels"), devices, num_left=5
        ),
        make_table(kernels, ("name", "available", "why not"), backends, num_left=3),
    )


def _serve(options: argparse.Namespace) -> int:
    from dsv4.serve.launch import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    _complete_demo(options)
    with _checking():
        check_device(options.device)
    from dsv4.tools.demo.command import print_demo, run_command
    from dsv4.tools.demo.kept_run import keep_run

    if options.save is not None:
        with _checking():
            check_new((options.save / name for name in RUN_FILES), force=options.force)
    result = run_command(options)
    if options.save is not None:
        keep_run(options.save, kv_format=options.kv, index_format=options.index, seed=options.seed)
    _print(options, result, print_demo)
    return 0 if result["ok"] else 1


def _bench(options: argparse.Namespace) -> int:
    with _checking():
        bench_command.check_options(options)
    return bench_command.run_bench(options)
