"""`dsv4 demo`: runs the demo of the command's options and prints its result."""

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4.tools.console import make_table, working
from dsv4.tools.demo.memory_run import run_memory
from dsv4.tools.demo.run import load_subject, random_subject, run_demo
from dsv4.tools.demo.serve_run import run_served

STEPS_PER_LINE = 12
SHOWN_CHARACTERS = 60
PLACES = {
    "record": "an entry of 4 tokens, found by the index",
    "straddling": "a record of two windows: their overlap",
    "chapter": "an entry of 128 tokens",
    "line": "the window: this line is in no entry",
    "nobody": "nowhere: no such name in the book",
}


def run_command(options: argparse.Namespace) -> dict[str, Any]:
    """Run the demo with the given options, and a spinner on a terminal."""
    device = options.device
    formats = {"kv_format": options.kv, "index_format": options.index}
    if torch.device(device).type == "cpu" and options.model in (None, "random"):
        torch.set_num_threads(1)  # tensors this small gain nothing from threads
    with working("generating"):
        if options.model is None:
            run = run_served if options.serve else run_memory
            sizes = {"num_tokens": options.tokens, "num_questions": options.questions}
            return run(device=device, **sizes, **formats)
        if options.model == "random":
            subject = random_subject(seed=options.seed, device=device)
        else:
            subject = load_subject(options.model, options.prompt, device=device)
        return run_demo(subject, num_new=options.new_tokens, **formats)


def print_demo(result: dict[str, Any], console: Console) -> None:
    """Print the result: lines of the memory model, tables of others."""
    if result["demo"] == "memory":
        _print_memory(result, console)
    else:
        _print_tables(result, console)


def _print_memory(result: dict[str, Any], console: Console) -> None:
    """Print lines of at most 80 characters."""
    count, (start, end), shown = result["questions"], result["text"], result["shown"].items()
    asked_about = f"{count} question{'' if count == 1 else 's'}"
    about = "A DeepSeek-V4 whose weights are written down reads a book of"
    lines = [
        f"{about} {result['tokens']:,} tokens",
        f"on {result['device']}, and is asked {asked_about}.", "",
        f"  {start} ...", f"  {end} ...", "",
        *(f"  {asked:<15}{answer:<9}{PLACES[place]}" for place, (asked, answer) in shown),
        "", f"{'':<56}{'tokens/s':>11}{'tokens/s':>11}",
        f"{'':<36}{'right':>7}{'bytes':>13}{'prefill':>11}{'answers':>11}",
    ]  # fmt: skip
    for name, run in result["runs"].items():
        right = f"{run['right']}/{count}"
        numbers = (run[key] for key in ("num_bytes", "prefill_per_second", "answers_per_second"))
        size, *speeds = ("-" if number is None else f"{number:,.0f}" for number in numbers)
        lines.append(f"{name:<36}{right:>7}{size:>13}" + "".join(f"{each:>11}" for each in speeds))
    lines += [f"{name:<36}{f'{right}/{count}':>7}" for name, right in result["after"].items()]
    if not result["ok"]:
        lines.append("MISMATCH: an answer is wrong")
    else:
        is_same = result["same_ids"]
        lines.append("equal: all answers have the same ids" if is_same else
                     "right: every answer is the book's")  # fmt: skip
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _print_tables(result: dict[str, Any], console: Console) -> None:
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
    columns = result["first_difference"].values()
    for length, text, *firsts in zip(result["prompts"], result["texts"], *columns, strict=True):
        cells = ["none" if first is None else str(first + 1) for first in firsts]
        table.add_row(str(length), *cells, Text(text, no_wrap=True, overflow="ellipsis"))
    return table


def _error_table(result: dict[str, Any], formats: str) -> Table:
    title = "Largest logit error at each step, as a share of the largest logit"
    table = make_table(
        title, ("rows", "steps", f"in order, {STEPS_PER_LINE} a line"), [], num_left=3
    )
    for label, errors in zip(("fp32", formats), result["logit_error"].values(), strict=True):
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
