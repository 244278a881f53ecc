"""`dsv4 demo`: runs the demo of the command's options and prints its tables."""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from dsv4.tools.console import make_console, make_table
from dsv4.tools.demo.run import num_ticks, run_demo
from dsv4.tools.demo.subject import Subject, load_subject, random_subject

STEPS_PER_LINE = 12
SHOWN_CHARACTERS = 60


def run_command(options: argparse.Namespace) -> dict[str, Any]:
    """Run the demo with the given options and a progress bar on stderr."""
    subject = _subject(options)
    with Progress(
        console=make_console(stderr=True), transient=True, disable=options.json
    ) as progress:
        task = progress.add_task("generating", total=num_ticks(subject, options.new_tokens))
        return run_demo(
            subject,
            kv_format=options.kv,
            index_format=options.index,
            num_new=options.new_tokens,
            tick=lambda: progress.advance(task),
        )


def _subject(options: argparse.Namespace) -> Subject:
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(f"--device {options.device} needs a CUDA device, and there is none")
    if options.model is None:
        if options.device == "cpu":
            torch.set_num_threads(1)  # tensors this small gain nothing from threads
        return random_subject(seed=options.seed, device=options.device)
    return load_subject(options.model, options.prompt, device=options.device)


def print_demo(result: dict[str, Any], console: Console) -> None:
    """Print the result as tables."""
    formats = f"{result['kv_format']} rows, {result['index_format']} keys"
    console.print(
        f"DeepSeek-V4 of transformers, {result['model']}, {result['dtype']} on "
        f"{result['device']}: {result['new_tokens']} new tokens for each of "
        f"{len(result['prompts'])} prompts.\n"
    )
    console.print(_ids_table(result, formats), _error_table(result, formats))
    console.print(_memory_table(result, formats), _speed_table(result, formats))
    if not result["ok"]:
        console.print("MISMATCH: with fp32 rows the token ids should be transformers'")
    elif result["first_difference"]["fp32"] == [None] * len(result["prompts"]):
        console.print("equal: with fp32 rows the token ids are transformers'")
    else:
        console.print(f"not compared: a {result['dtype']} model rounds in every layer")


def _ids_table(result: dict[str, Any], formats: str) -> Table:
    table = Table(title="First new token that differs from transformers on the prompt alone")
    table.add_column("prompt, tokens", justify="right", max_width=7)
    for column in ("this cache, fp32 rows", f"this cache, {formats}", "transformers, padded batch"):
        table.add_column(column, justify="right", max_width=len("transformers,"))
    table.add_column("new text", max_width=SHOWN_CHARACTERS)
    columns = result["first_difference"]
    for row, length in enumerate(result["prompts"]):
        firsts = [columns[name][row] for name in ("fp32", "formats", "transformers_padded")]
        cells = ["none" if first is None else str(first + 1) for first in firsts]
        text = Text(result["texts"][row], no_wrap=True, overflow="ellipsis")
        table.add_row(str(length), *cells, text)
    return table


def _error_table(result: dict[str, Any], formats: str) -> Table:
    table = Table(title="Largest logit error at each step, as a share of the largest logit")
    table.add_column("rows")
    table.add_column("steps", justify="right")
    table.add_column(f"in order, {STEPS_PER_LINE} a line")
    for name, label in (("fp32", "fp32"), ("formats", formats)):
        errors = result["logit_error"][name]
        for start in range(0, len(errors), STEPS_PER_LINE):
            line = errors[start : start + STEPS_PER_LINE]
            steps = f"{start + 1} to {start + len(line)}"
            table.add_row("" if start else label, steps, " ".join(f"{error:.0e}" for error in line))
        table.add_row("", "largest", f"{max(errors):.1e}")
        table.add_section()
    return table


def _memory_table(result: dict[str, Any], formats: str) -> Table:
    sizes = [result["memory"][name] for name in ("formats", "fp32", "own")]
    headings = ("component", formats, "fp32 rows", f"transformers, {result['dtype']}")
    rows = [(name, *(f"{size.get(name, 0):,}" for size in sizes)) for name in sizes[0]]
    table = make_table("Bytes of the caches", headings, rows)
    table.add_section()
    table.add_row("total", *(f"{sum(size.values()):,}" for size in sizes))
    return table


def _speed_table(result: dict[str, Any], formats: str) -> Table:
    labels = {
        "formats": f"this cache, padded batch, {formats}",
        "fp32": "this cache, padded batch, fp32 rows",
        "transformers_alone": "transformers, one prompt after the other",
        "transformers_padded": "transformers, padded batch (see above for its ids)",
    }
    speeds = result["tokens_per_second"]
    rows = [(label, f"{speeds[name]:,.1f}") for name, label in labels.items()]
    return make_table("Tokens per second, prefill included", ("run", "tokens/s"), rows)
