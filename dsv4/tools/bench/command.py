"""`dsv4 bench`: lists the benches and their options, runs one and prints its result."""

import argparse
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv4.kernels.external.find import add_folder
from dsv4.tools.bench import tables
from dsv4.tools.bench.environment import check_device, environment
from dsv4.tools.console import make_console, printable
from dsv4.tools.outputs import add_force, check_output
from dsv4.tools.planner.command import PRESETS, positive, tokens

LEAST_QUESTIONS = 4  # of bench quality: with fewer a kind is not asked
LEAST_POSITIONS = 2  # of bench prefill: with one, every chunk would count as the first


class Bench(NamedTuple):
    """A bench `NAME`: `dsv4.tools.bench.NAME.bench_NAME`, which takes all its options by name.

    Attributes:
        counts: Defaults of options `--NAME` above 0, which set a parameter `num_NAME`.
        options: Settings of its other arguments, as `argparse` takes them.
        external: The projects whose kernels `--compare` times beside ours.
    """

    help: str
    counts: Mapping[str, int] = {}
    options: Mapping[str, dict[str, Any]] = {}
    external: str | None = None


def _tokens(dest: str, what: str) -> dict[str, Any]:
    return {"dest": dest, "type": tokens, "action": "append", "metavar": "TOKENS",
            "help": f"length of a {what}; may be repeated"}  # fmt: skip


def _plot(what: str) -> dict[str, Any]:
    return {"type": Path, "help": f"draw {what}: .png or .svg"}


BENCHES = {
    "plan": Bench("host time of prepare_forward", {"requests": 256, "steps": 400}),
    "host": Bench("host time of an engine's step: plan, drafts, tokens, layers",
                  {"requests": 256, "steps": 300}),
    "prefix": Bench("host time of a prefix hit and of a block's hash",
                    {"tokens": 100_000, "rounds": 50}),
    "disk": Bench("reads of a prefix store beside those of dd iflag=direct",
                  {"records": 400, "rounds": 15},
                  {"folder": {"type": Path, "metavar": "FOLDER", "help": "a folder of the disk"}}),
    "trace": Bench("what the prefix cache finds of a trace's prompts", {"requests": 600}, {
        "file": {"type": Path, "metavar": "FILE", "help": "one JSON object a line"},
        "--first": {"type": positive, "default": 1, "help": "the line of the first request"},
        "--blocks": {"dest": "num_blocks", "type": positive, "metavar": "BLOCKS",
                     "help": "memory in blocks; by default several sizes"},
        "--plot": _plot("found over memory"),
    }),
    "quality": Bench("what each row format costs, in errors and in answers", {"questions": 128}, {
        "--tokens": _tokens("lengths", "book"),
        "--device": {"default": "cpu", "help": "cpu, cuda or cuda:N"},
        "--plot": _plot("right answers over margins"),
    }),
    "handover": Bench("a request to another process, beside a plain copy over the same transport",
                      {"tokens": 100_000, "rounds": 10}),
    "swap": Bench("a request to host memory and back, on a GPU", {"tokens": 1 << 20, "rounds": 10}),
    "write": Bench("the write path of a layer, on a GPU", external="SGLang"),
    "step": Bench("a captured decode step, on a GPU", {"requests": 256, "steps": 400},
                  {"--model": {"choices": tuple(PRESETS), "default": "v4-flash"}}),
    "gather": Bench("dense rows of a layer, on a GPU"),
    "index": Bench(
        "queries, scores and top-k of the index, on a GPU; scores of one of several --ranks",
        options={"--ranks": {"dest": "num_ranks", "type": positive, "default": 1,
                             "metavar": "RANKS", "help": "ranks that divide the entries (1)"}},
        external="DeepGEMM and SGLang"),
    "attend": Bench("attention of a layer in a decode step and of a prefill chunk, on a GPU",
                    external="FlashMLA"),
    "prefill": Bench("a whole prompt of V4-Flash, all layers, on a GPU", {"positions": 5}, {
        "--context": _tokens("contexts", "prompt"),
        "--whole": {"type": tokens, "default": 1 << 17, "metavar": "TOKENS",
                    "help": "prompts of up to so many tokens run whole too"},
        "--plot": _plot("seconds over contexts"),
    }, external="DeepGEMM, SGLang and FlashMLA"),
    "transformers": Bench("decode steps of a transformers model with both caches, on a GPU",
                          {"steps": 30}),
    "engine": Bench(
        "requests that share a prompt, through the engine and through generate, on a GPU",
        {"requests": 64, "shared": 8192, "own": 1024, "new": 256}),
    "tune": Bench("launch parameters of this GPU's architecture", options={
        "--write": {"dest": "is_written", "action": "store_true",
                    "help": "update the committed table in place"},
    }),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a command for each bench, with its options; `parameters` names those that it takes."""
    commands = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, bench in BENCHES.items():
        command = commands.add_parser(name, help=bench.help)
        if "--plot" in bench.options:
            add_force(command)
        arguments = [
            command.add_argument(
                f"--{each}", dest=f"num_{each}", type=positive, default=default,
                metavar=each.upper(),
            )
            for each, default in bench.counts.items()
        ]  # fmt: skip
        arguments += [command.add_argument(each, **how) for each, how in bench.options.items()]
        if bench.external is not None:
            text = f"time {bench.external} beside ours"
            arguments.append(command.add_argument("--compare", action="store_true", help=text))
            text = "a folder with their unpacked packages, or vLLM's"
            command.add_argument("--peers", metavar="PATH", help=text)
        command.add_argument("--json", action="store_true", help="print one JSON object only")
        command.set_defaults(parameters=[argument.dest for argument in arguments])


def check_options(options: argparse.Namespace) -> None:
    """Refuse what a bench cannot use, before any work.

    That is a missing folder or device, a plot that cannot be drawn or replaced, too few questions
    or positions, and kernels to compare with where none is timed.
    """
    if options.bench == "disk" and not options.folder.is_dir():
        raise ValueError(f"Invalid FOLDER: expected a folder, got {str(options.folder)!r}")
    if options.bench == "index" and options.compare and options.num_ranks > 1:
        raise ValueError(f"Invalid --compare: expected --ranks 1, got --ranks {options.num_ranks}")
    if options.bench == "quality" and options.num_questions < LEAST_QUESTIONS:
        raise ValueError(
            f"Invalid --questions: expected at least {LEAST_QUESTIONS}, some of each kind, "
            f"got {options.num_questions}"
        )
    if options.bench == "prefill" and options.num_positions < LEAST_POSITIONS:
        raise ValueError(
            f"Invalid --positions: expected at least {LEAST_POSITIONS}, both ends of a prompt, "
            f"got {options.num_positions}"
        )
    if getattr(options, "peers", None) is not None:
        add_folder(options.peers)
    if getattr(options, "plot", None) is not None:
        check_output("--plot", options.plot, force=options.force)
    if getattr(options, "device", None) is not None:
        check_device(options.device)


def run_bench(options: argparse.Namespace) -> int:
    """Run one bench; print its tables, unless --json, and its result as one line of JSON.

    Returns 1 if a part of the bench failed.
    """
    module = importlib.import_module(f"dsv4.tools.bench.{options.bench}")
    run: Callable[..., dict[str, Any]] = getattr(module, f"bench_{options.bench}")
    measured = run(**{name: getattr(options, name) for name in options.parameters})
    result = {"bench": options.bench, **measured, "environment": environment()}
    if not options.json:
        shown = tables.show(options.bench, result)
        make_console().print(*shown.tables)
        for sentence in shown.sentences:
            print(printable(sentence))
    print(json.dumps(result))
    return int(bool(result.get("errors")))
