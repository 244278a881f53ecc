"""`dsv4 bench quality`: the cost of each row format, in errors and in answers of a memory model."""

from collections.abc import Iterator, Sequence
from itertools import cycle, groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import CacheConfig
from dsv4.formats import INDEX_FORMATS, KV_FORMATS, V41_FORMATS, RowFormat, index_row, kv_row
from dsv4.kernels.reference.arithmetic import hadamard
from dsv4.kernels.reference.attention import attend_dense
from dsv4.kernels.reference.codec import decode, encode
from dsv4.kernels.reference.indexer import score_entries, select_topk
from dsv4.model.memory_book import Book, write_book
from dsv4.tools.bench.timing import one_thread
from dsv4.tools.console import track
from dsv4.tools.demo.ask import ask, is_right, open_cache, read_book
from dsv4.tools.demo.memory_run import make_model

HEAD_DIM, ROPE_DIM, INDEX_DIM, INDEX_HEADS = 512, 64, 128, 64  # DeepSeek-V4-Flash
NUM_QUERIES, NUM_ROWS, NUM_KEYS, TOPK = 16, 640, 8192, 512
LENGTHS = (512, 2048, 4096)
MARGINS = (1.0, *(2.0**-power for power in range(2, 13)))
# Row formats of V4.1's windows, entries and index keys, and whether they store the model's values.
V41_ROWS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("its own", {}, True),
    ("V4's, second rounding", {"kv_format": "fp8", "index_format": "fp8"}, True),
    ("V4's, only rounding", {"kv_format": "fp8", "index_format": "fp8"}, False),
    ("bf16", {"kv_format": "bf16", "index_format": "bf16"}, True),
)
FORMATS: dict[str, tuple[str, ...]] = {
    "kv": (*KV_FORMATS, *V41_FORMATS), "index": INDEX_FORMATS,
}  # fmt: skip
TITLES = {"kv": "KV rows", "index": "index keys"}
STYLES = ("-", "--", ":", "-.")  # of the lines of a length
CHANCE = 0.2  # below this share of a kind no margin is tried any more


def bench_quality(
    *, num_questions: int, lengths: Sequence[int] | None, device: str, plot: Path | None
) -> dict[str, Any]:
    """Measure every format on random rows of V4-Flash's widths, and on the memory model.

    V4.1's rows are the values that the model attends, so others are compared with them.

    Errors are relative to the exact result, root mean square. A margin is the share of a stored
    row that tells it from others. The memory model is asked at smaller and smaller margins.
    """
    with one_thread():
        result = {
            "kv": [_kv_errors(name) for name in FORMATS["kv"]],
            "index": [_index_errors(name) for name in FORMATS["index"]],
            "v41": list(_v41_errors()),
            "answers": list(_curves(lengths or LENGTHS, num_questions, device)),
        }
    result["margins"] = list(_smallest_margins(result["answers"]))
    if plot is not None:
        plot_quality(result["answers"], plot)
    return result


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _stored(fmt: RowFormat, values: Tensor) -> Tensor:
    flat = values.reshape(-1, values.shape[-1])
    return decode(fmt, encode(fmt, flat)).view_as(values)


def _error(values: Tensor, exact: Tensor) -> float:
    return float((values.double() - exact).norm() / exact.norm())


def _kv_errors(name: Any) -> dict[str, Any]:
    """Errors of rows, and of attention over them."""
    fmt = kv_row(name, head_dim=HEAD_DIM, rope_dim=ROPE_DIM)
    rows = _draw(NUM_QUERIES, NUM_ROWS, HEAD_DIM, seed=0)
    exact, stored = rows.double(), _stored(fmt, rows).double()
    return {
        "format": name, "row_bytes": fmt.row_bytes, "row_error": _error(stored, exact),
        "output_error": _output_error(stored, exact),
    }  # fmt: skip


def _output_error(got: Tensor, exact: Tensor) -> float:
    """Error of attention over rows, against attention over the exact ones."""
    query = _draw(NUM_QUERIES, 8, HEAD_DIM, seed=1).double()
    mask = torch.ones(exact.shape[:2], dtype=torch.bool)
    return _error(*(attend_dense(query, rows, mask, None)[0] for rows in (got, exact)))


def _v41_errors() -> Iterator[dict[str, Any]]:
    """Errors of V4.1's rows in other formats, against the values that the model attends."""
    own = CacheConfig.v41_flash()
    window, heads = own.sliding_window, own.index_num_heads
    rows, keys = _draw(NUM_QUERIES, NUM_ROWS, HEAD_DIM, seed=0), _draw(NUM_KEYS, INDEX_DIM, seed=2)
    index_query = _draw(NUM_QUERIES, heads, INDEX_DIM, seed=3)
    weights = _draw(NUM_QUERIES, heads, seed=4)
    drawn = (rows[:, :window], rows[:, window:], keys, index_query)
    exact = _v41_stored(own, *drawn)
    chosen = _choose(exact[3], weights, exact[2])
    share = sum(1 / layer.ratio for layer in own.schedule if layer.owns_entries)
    for name, choices, is_second in V41_ROWS:
        config = CacheConfig.v41_flash(**choices)
        stored = _v41_stored(config, *(exact if is_second else drawn))
        pairs = [(got.double(), want.double()) for got, want in zip(stored, exact, strict=True)]
        both = [torch.cat(parts, dim=1) for parts in zip(*pairs[:2], strict=True)]
        yield {
            "rows": name,
            "bytes": share * (config.entry_row.row_bytes + config.index_row.row_bytes),
            "window_error": _error(*pairs[0]), "entry_error": _error(*pairs[1]),
            "output_error": _output_error(*both), "key_error": _error(*pairs[2]),
            "changed": 1 - _recall(_choose(stored[3], weights, stored[2]), chosen),
        }  # fmt: skip


def _v41_stored(config: CacheConfig, *values: Tensor) -> list[Tensor]:
    """Store windows, entries, index keys and index queries in a config's rows."""
    formats = (config.kv_row, config.entry_row, config.index_row, config.index_row)
    return [_stored(fmt, each) for fmt, each in zip(formats, values, strict=True)]


def _index_errors(name: Any) -> dict[str, Any]:
    """Errors of index keys, the share of the exact top k, and attention over what is chosen."""
    fmt = index_row(name, head_dim=INDEX_DIM)
    keys = hadamard(_draw(NUM_KEYS, INDEX_DIM, seed=2))
    query = hadamard(_draw(NUM_QUERIES, INDEX_HEADS, INDEX_DIM, seed=3))
    weights, stored = _draw(NUM_QUERIES, INDEX_HEADS, seed=4), _stored(fmt, keys)
    chosen, exact = _choose(_stored(fmt, query), weights, stored), _choose(query, weights, keys)
    rows = _draw(NUM_KEYS, HEAD_DIM, seed=0).double()
    return {
        "format": name, "row_bytes": fmt.row_bytes, "row_error": _error(stored, keys.double()),
        "recall": _recall(chosen, exact),
        "output_error": _output_error(rows[chosen], rows[exact]),
    }  # fmt: skip


def _recall(chosen: Tensor, exact: Tensor) -> float:
    """Share of the exact choices that are found."""
    pairs = zip(chosen.tolist(), exact.tolist(), strict=True)
    return sum(len({*a} & {*b}) for a, b in pairs) / exact.numel()


def _choose(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    scores = [score_entries(query[[i]], weights[[i]], keys[None]) for i in range(len(query))]
    return select_topk(torch.cat(scores), torch.full((len(query),), len(keys)), TOPK)


def _curves(lengths: Sequence[int], num_questions: int, device: str) -> Iterator[dict[str, Any]]:
    """Ask at smaller and smaller margins, until a kind of question has few right answers."""
    formats = [(part, name) for part, names in FORMATS.items() for name in names]
    for length in lengths:
        book = write_book(length)
        for part, name in track(formats, f"{length} tokens"):
            for margin in MARGINS:
                kinds = _ask(book, {part: name}, margin, num_questions, device)
                right = min(kinds.values())
                yield {"part": part, "format": name, "tokens": length, "margin": margin,
                       "right": right, "kinds": kinds}  # fmt: skip
                if right < CHANCE:
                    break


def _ask(
    book: Book, formats: dict[str, Any], margin: float, num_questions: int, device: str
) -> dict[str, float]:
    """Return the share of right answers of each kind of question.

    One part of the cache has a format. The others, and the model, are fp32. The name that the book
    lacks is left out: no format finds it.
    """
    questions = [each for each in book.choose(num_questions + 1) if each.kind != "nobody"]
    kv, index = ({"kv": "fp32", "index": "fp32"} | formats).values()
    model = make_model(device, torch.float32, margin=margin)
    with open_cache(model, len(book.ids), kv, index) as cache:
        read_book(model, cache, book.ids)
        answers = ask(model, cache, questions)
    right: dict[str, list[bool]] = {}
    for question, answer in zip(questions, answers, strict=True):
        right.setdefault(question.kind, []).append(is_right(question, answer))
    return {kind: sum(each) / len(each) for kind, each in right.items()}


def _smallest_margins(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Find the smallest margin at which, and above which, every answer is right.

    It is None if some answer is always wrong. If none ever is, smaller ones were not tried.
    """
    for (part, name, length), group in groupby(rows, key=itemgetter("part", "format", "tokens")):
        line = list(group)
        right = [row["margin"] for row in takewhile(lambda row: row["right"] == 1, line)]
        text = f"1 / {1 / right[-1]:.0f}" if right else "none"
        yield {"part": part, "format": name, "tokens": length,
               "margin": right[-1] if right else None, "is_last": len(right) == len(line),
               "text": f"at most {text}" if len(right) == len(line) else text}  # fmt: skip


def plot_quality(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw right answers of the worst kind over the margin, a line for each format and length."""
    from matplotlib.figure import Figure

    lengths = sorted({row["tokens"] for row in rows})
    styles = dict(zip(lengths, cycle(STYLES)))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2, sharey=True), TITLES, strict=True):
        mine = [row for row in rows if row["part"] == part]
        names = list(dict.fromkeys(row["format"] for row in mine))
        for (name, length), line in groupby(mine, key=itemgetter("format", "tokens")):
            points = [(row["margin"], 100 * row["right"]) for row in line]
            label = name if length == lengths[0] else None
            style, color = styles[length], f"C{names.index(name)}"
            axes.plot(*zip(*points, strict=True), style, color=color, marker=".", label=label)
        for length, style in styles.items():
            axes.plot([], [], style, color="gray", label=f"{length:,} tokens")
        axes.set_xscale("log", base=2)
        axes.invert_xaxis()
        axes.set(title=TITLES[part], ylabel="right answers of the worst kind of question, %")
        axes.set_xlabel("margin: share of a row that tells it from others")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
