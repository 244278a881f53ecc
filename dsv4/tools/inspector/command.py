"""`dsv4 inspect`: options and tables of the command."""

import argparse
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dsv4.layer_schedule import AttentionType
from dsv4.tools.console import build_table
from dsv4.tools.inspector.report import RequestInspector
from dsv4.tools.inspector.selections import RUN_FILES, LayerSelections, read_selections
from dsv4.tools.outputs import add_force
from dsv4.tools.planner.sizes import format_bytes

STYLE: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
TAIL_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
ENTRY_NAMES = {"entries": "entry", "index keys": "index key"}
PART_COLUMNS = (
    ("layer", "{layer}"), ("part", "{part}"), ("format", "{format}"), ("rows", "{rows:,}"),
    ("least", "{minimum:.3g}"), ("largest", "{maximum:.3g}"), ("zero", "{zero_rate:.2%}"),
    ("satu-\nrated", "{saturation_rate:.2%}"), ("not\nfinite", "{not_finite:,}"),
    ("rms\nerror", "{relative_rms_error:.2%}"),
)  # fmt: skip
SELECTION_COLUMNS = (
    ("layer", "{layer}"), ("tokens", "{tokens:,}"), ("entries", "{entries:,}"),
    ("chosen\na token", "{chosen_per_token:.1f}"), ("never\nchosen", "{never_chosen:.2%}"),
    ("in newest\nquarter", "{in_newest_quarter:.2%}"),
    ("kept from\ntoken before", "{kept_from_token_before:.2%}"),
)  # fmt: skip
MAX_PROBLEMS = 20  # printed problems; the JSON has all of them


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dsv4 inspect`."""
    for name, text in (
        ("path", "a file of save_request, or a folder of dsv4 demo --save"),
        ("--against", "the same tokens saved from a cache of bf16 or fp32 rows: measure errors"),
        ("--selections", "a file of SelectionRecorder.save"),
        ("--heatmap", "draw which entries top-k chose over time, .png or .svg"),
    ):
        parser.add_argument(name, type=Path, metavar="FILE", help=text)
    add_force(parser)


def find_files(options: argparse.Namespace) -> tuple[Path, Path | None, Path | None]:
    """Find the files of the request, its comparison and its selections; a folder has all three."""
    path, against, selections = options.path, options.against, options.selections
    if path.is_dir():
        there = [each if each.is_file() else None for each in map(path.joinpath, RUN_FILES)]
        against, selections = against or there[1], selections or there[2]
        path = path / RUN_FILES.request
    for name, file in (("FILE", path), ("--against", against), ("--selections", selections)):
        if file is not None and not file.is_file():
            raise ValueError(f"argument {name}: expected a file, found none at {file}")
    if options.heatmap is not None and selections is None:
        raise ValueError("argument --heatmap: expected --selections with it")
    return path, against, selections


def read_layer_selections(path: Path, inspector: RequestInspector) -> dict[int, LayerSelections]:
    """Read recorded selections; refuse layers that are not CSA layers of the request."""
    selections, layers = read_selections(path), inspector.config.schedule
    csa = {each.layer_idx: each.ratio for each in layers
           if each.attention_type is AttentionType.CSA}  # fmt: skip
    if not {idx: layer.ratio for idx, layer in selections.items()}.items() <= csa.items():
        raise ValueError(
            f"Invalid recorded selections {path}: expected layers of {[*csa]}, the CSA layers of "
            f"the request, got {sorted(selections)}"
        )
    return selections


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the report as tables and sentences."""
    console.print(*_sentences(report), "", sep="\n", highlight=False)
    console.print(_part_table(report))
    if rows := report["selections"]:
        console.print(build_table("What top-k chose", rows, SELECTION_COLUMNS, missing="", **STYLE))
    problems = report["problems"]
    lines = [_problem(problem) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > len(lines):
        lines.append(f"{len(problems) - len(lines):,} more places: --json has them.")
    console.print(*lines or ["Every value is finite."], sep="\n", highlight=False)


def _sentences(report: dict[str, Any]) -> list[str]:
    blocks, window = report["blocks"], report["window"]
    lines = [
        f"{report['length']:,} tokens; {report['kv_format']} rows, {report['index_format']} index "
        f"keys, {report['tail_dtype']} tails.",
        f"Blocks: {blocks['num_blocks']:,} of {blocks['block_tokens']} tokens, "
        f"{format_bytes(blocks['block_bytes'])} each"
        + ("." if blocks["fill"] is None else f"; {blocks['fill']:.1%} of their entries closed."),
    ]
    if window["rows"]:
        lines.append(
            "Window: positions {first_position:,} to {last_position:,} in a ring of {ring_rows} "
            "rows; the next token takes row {next_row}.".format_map(window)
        )
    return lines + [
        "{type} tails: {open_tokens} tokens of the open window, {rows} of {tail_rows} rows in use; "
        "{closed_entries:,} entries closed.".format_map(tail)
        for tail in report["tails"]
    ]


def _part_table(report: dict[str, Any]) -> Table:
    tail_format = TAIL_NAMES[report["tail_dtype"]]
    rows = [
        {
            **part,
            "layer": "" if number else f"{layer['layer']} {layer['type']}",
            "format": part["format"] or ("fp32" if part["part"] == "sums" else tail_format),
            "not_finite": part["nan"] + part["inf"],
        }
        for layer in report["layers"]
        for number, part in enumerate(layer["parts"])
    ]
    has_errors = any(row["relative_rms_error"] is not None for row in rows)
    columns = PART_COLUMNS if has_errors else PART_COLUMNS[:-1]
    return build_table("Rows by layer", rows, columns, num_left=3, missing="", **STYLE)


def _problem(problem: dict[str, Any]) -> str:
    counts = [f"{problem[key]:,} {name}" for key, name in (("nan", "NaN"), ("inf", "inf"))
              if problem[key]]  # fmt: skip
    tokens = _span("token", problem["first_token"], problem["last_token"])
    rows = f"{problem['part']}, {tokens}"
    if problem["part"] in ENTRY_NAMES:
        name = ENTRY_NAMES[problem["part"]]
        rows = f"{_span(name, problem['first_row'], problem['last_row'])}, made from {tokens}"
    return (
        f"Not finite: layer {problem['layer']} ({problem['type']}), {rows}: {' and '.join(counts)}."
    )


def _span(name: str, first: int, last: int) -> str:
    if first == last:
        return f"{name} {first:,}"
    plural = "entries" if name == "entry" else f"{name}s"
    return f"{plural} {first:,} to {last:,}"
