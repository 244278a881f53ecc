"""`dsv4 plan`: options, tables and JSON of the command."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4.cache.memory.capacity import ComponentBytes
from dsv4.config import TAIL_DTYPES, CacheConfig, has_mtp_layers
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.tools.console import make_table
from dsv4.tools.outputs import add_force
from dsv4.tools.planner.changes import Change, find_changes
from dsv4.tools.planner.memory_plan import LIMITS, MemoryPlan, component_label
from dsv4.tools.planner.sizes import GPU_BYTES, format_bytes, parse_bytes, parse_gpu, parse_tokens

PRESETS = {
    "v4-flash": CacheConfig.v4_flash, "v4-pro": CacheConfig.v4_pro,
    "v41-flash": CacheConfig.v41_flash,
}  # fmt: skip
# Fields of a config that have an option; those of a plan are its `LIMITS`.
CHOICES = ("kv_format", "index_format", "tail_dtype", "block_tokens", "page_align",
           "drafts_per_step")  # fmt: skip
# Options of a plan that are not called as its fields are.
OPTIONS = {
    "context_tokens": "--context", "num_requests": "--requests", "weights_bytes": "--weights",
    "reserved_bytes": "--reserve", "num_ranks": "--tp", "num_stages": "--pp",
    "max_forward_tokens": "--chunk", "num_checkpoints": "--checkpoints",
}  # fmt: skip
# Numbers of a plan that its JSON has under their own names.
REPORTED = (
    "context_tokens", "num_requests", "max_forward_tokens", "num_checkpoints", "undo_slots",
    "num_ranks", "num_stages", "context_ranks", "blocks_per_request", "gpu_bytes",
    "reserved_bytes", "cache_bytes", "free_bytes", "fits", "max_requests", "max_blocks",
    "max_tokens",
)  # fmt: skip
REPORTED_OF_CHANGES = ("fits", "needed_bytes", "free_bytes")
MAX_NUMBER = 2**20  # of an option that counts things
MAX_DIGITS, MAX_SHOWN = 18, 40
# Choices that are valid for a model of any width.
_ANY_WIDTH: dict[str, Any] = {"kv_format": "bf16", "index_format": "bf16", "block_tokens": 128}
TP_NOTE = (
    "Tensor parallelism divides the weights and the query heads, which attention parts and scratch "
    "depend on. It does not divide rows: K = V is one head that all query heads share."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dsv4 plan`."""
    add = parser.add_argument
    add("--model", required=True, metavar="v4-flash|v4-pro|v41-flash|PATH",
        help="a preset, or a transformers config.json or its folder")  # fmt: skip
    add("--context", required=True, type=tokens, dest="context_tokens", metavar="TOKENS",
        help="tokens of each request: 1M, 128k, 4096 (k = 1024, M = 1024k)")  # fmt: skip
    add("--requests", type=positive, default=1, dest="num_requests", metavar="REQUESTS",
        help="requests open at once")  # fmt: skip
    add("--gpu", required=True, metavar="NAME|SIZE",
        help=f"{', '.join(GPU_BYTES)}, or a size such as 80GiB or 141GB")  # fmt: skip
    add("--weights", type=size, default=0, dest="weights_bytes", metavar="SIZE",
        help="weights of the whole model")  # fmt: skip
    add("--reserve", type=size, default=0, dest="reserved_bytes", metavar="SIZE",
        help="other memory of each GPU: activations, the CUDA context")  # fmt: skip
    add("--tp", type=positive, default=1, dest="num_ranks", metavar="TP",
        help="tensor-parallel ranks")  # fmt: skip
    add("--pp", type=positive, default=1, dest="num_stages", metavar="PP",
        help="pipeline stages, each with ranks of its own")  # fmt: skip
    add("--context-parallel", type=positive, default=1, dest="context_ranks", metavar="N",
        help="ranks that divide each request's blocks, not the weights")  # fmt: skip
    add("--kv", choices=KV_FORMATS, dest="kv_format", help="row format of the KV")
    add("--index", choices=INDEX_FORMATS, default="mxfp4", dest="index_format",
        help="row format of the index keys")  # fmt: skip
    add("--tails", choices=tuple(TAIL_DTYPES), default="float32", dest="tail_dtype",
        help="dtype of the compression tails")  # fmt: skip
    add("--block-tokens", type=positive, default=256, metavar="N")
    add("--page-align", type=positive, metavar="N")
    add("--drafts", type=whole, default=0, dest="drafts_per_step", metavar="N",
        help="the most tokens of a step that may be rejected")  # fmt: skip
    add("--chunk", type=tokens, default=8192, dest="max_forward_tokens", metavar="TOKENS",
        help="tokens of one forward")  # fmt: skip
    add("--checkpoints", type=whole, default=0, dest="num_checkpoints", metavar="N",
        help="block boundaries that the prefix cache can resume at")  # fmt: skip
    add("--undo-slots", type=whole, default=1, metavar="N",
        help="chunks of one forward that a cancelled plan brings back")  # fmt: skip
    add("--mtp", action=argparse.BooleanOptionalAction, default=None,
        help="count the MTP layers (the default if the model has any)")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="draw memory over context length, .png or .svg")
    add("--html", type=Path, metavar="FILE",
        help="write an interactive page that needs no network")  # fmt: skip
    add_force(parser)


def _argument(parse: Callable[[str], int]) -> Callable[[str], int]:
    """Turn `parse` into the type of an option; its `ValueError` becomes a usage error."""

    def parse_argument(text: str) -> int:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


tokens, size = _argument(parse_tokens), _argument(parse_bytes)  # types of options


@_argument
def whole(text: str) -> int:
    """Parse an option that is a whole number."""
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ValueError(f"expected a whole number, got {text[:MAX_SHOWN]!r}")
    return int(text)


@_argument
def positive(text: str) -> int:
    """Parse an option that is a whole number above 0."""
    value = int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0
    if not 1 <= value <= MAX_NUMBER:
        shown = text[:MAX_SHOWN]
        raise ValueError(f"expected a whole number from 1 to {MAX_NUMBER:,}, got {shown!r}")
    return value


def build_plan(options: argparse.Namespace) -> MemoryPlan:
    """Build the plan of the options; ValueError if they contradict each other."""
    try:
        gpu_bytes = parse_gpu(options.gpu)
    except ValueError as error:
        raise ValueError(f"argument --gpu: {error}") from None
    if options.num_stages > 1 and options.html is not None:
        raise ValueError("argument --html: expected --pp 1, the page has no stages")
    config = _config(options)
    if options.context_ranks > 1:
        if options.html is not None:
            raise ValueError(
                f"argument --context-parallel: expected 1 for a page, got {options.context_ranks}"
            )
        config = config.split_context(0, options.context_ranks)  # all ranks have as many bytes
    sizes = {name: getattr(options, name) for name in LIMITS if name != "gpu_bytes"}
    try:
        return MemoryPlan(config, gpu_bytes=gpu_bytes, **sizes)
    except ValueError as error:
        name, _, rest = str(error).removeprefix("Invalid ").partition(":")
        text = f"argument {OPTIONS[name]}:{rest}" if name in OPTIONS else str(error)
        raise ValueError(text) from error


def _config(options: argparse.Namespace) -> CacheConfig:
    given = {name: getattr(options, name) for name in CHOICES}
    choices = {name: value for name, value in given.items() if value is not None}
    if options.model in PRESETS:
        include_mtp = options.mtp is not False
        return PRESETS[options.model](include_mtp=include_mtp, **choices)
    if not Path(options.model).exists():
        raise ValueError(
            f"argument --model: expected {', '.join(PRESETS)} or the path of a config.json or its "
            f"folder, got {options.model!r}"
        )
    include_mtp = has_mtp_layers(options.model) if options.mtp is None else options.mtp
    return CacheConfig.from_hf(options.model, include_mtp=include_mtp, **choices)


def page_models(model: str) -> dict[str, CacheConfig]:
    """List the models of a page: the presets and the planned one, with their MTP layers."""
    models = {name: preset(include_mtp=True) for name, preset in PRESETS.items()}
    if model not in models:
        models[model] = CacheConfig.from_hf(model, include_mtp=has_mtp_layers(model), **_ANY_WIDTH)
    if models[model].has_latent_keys:
        raise ValueError(
            "argument --html: expected a model whose layers own all that they read, as V4's do; "
            f"--plot and --json take others, got {model!r}"
        )
    return {name: config for name, config in models.items() if not config.has_latent_keys}


def as_json(plan: MemoryPlan, *, model: str) -> dict[str, Any]:
    """Return all numbers of the plan; bytes are integers, except those per token."""
    return {
        "model": model,
        **{name: getattr(plan.config, name) for name in (*CHOICES, "num_mtp_layers")},
        **{name: getattr(plan, name) for name in REPORTED},
        "bytes_per_token": {
            name: {"payload": float(payload), "allocated": float(allocated)}
            for name, (payload, allocated) in plan.per_token().items()
        },
        "bytes_per_request": _sizes(plan.per_request()),
        "bytes_shared": _sizes(plan.shared()),
        "bytes_of_all": _sizes(plan.memory),
        "stages": [
            {"layers": list(layers), "cache_bytes": size} for layers, size in plan.stages.items()
        ],
        "one_request": plan.one_request()._asdict(),
        "weights_bytes_per_rank": plan.rank_weights_bytes,
        "max_context_tokens": plan.max_context,
        "changes": [
            {"change": what, **{name: getattr(changed, name) for name in REPORTED_OF_CHANGES}}
            for what, changed in find_changes(plan)
        ],
    }


def _sizes(components: dict[str, ComponentBytes]) -> dict[str, dict[str, int]]:
    return {name: size._asdict() for name, size in components.items()}


def title(plan: MemoryPlan, *, model: str) -> str:
    """Describe the plan in one line."""
    config = plan.config
    entries = f", {config.entry_format} entries" if config.entry_format else ""
    formats = f"{config.kv_format} rows{entries}, {config.index_format} index keys"
    return f"{model}, {formats}: {_requests(plan.num_requests)} of {plan.context_tokens:,} tokens"


def _requests(number: int) -> str:
    return f"{number:,} request" + ("" if number == 1 else "s")


def print_plan(plan: MemoryPlan, console: Console, *, model: str, gpu: str) -> None:
    """Print the plan as tables and sentences."""
    changes = find_changes(plan)
    console.print(title(plan, model=model), "", sep="\n", highlight=False)
    console.print(_component_table(plan), _gpu_table(plan, gpu=gpu))
    if plan.num_stages > 1:
        console.print(_stage_table(plan))
    if changes:
        console.print(_change_table(changes))
    sentences = [*_verdict(plan, changes), "", *_notes(plan, gpu=gpu)]
    console.print(*sentences, sep="\n", highlight=False)


def _component_table(plan: MemoryPlan) -> Table:
    headings = ("component", "payload", "allocated", "padding", "in all")
    table = make_table("Bytes of the cache", headings, ())

    def add(heading: str, rows: Mapping[str, tuple[Any, Any]], spec: str, style: str) -> None:
        """Add a row for the sum of these."""
        payload, allocated = (sum(row[column] for row in rows.values()) for column in (0, 1))
        values = (payload, allocated, allocated - payload)
        cells = [format(float(each) if "f" in spec else each, spec) for each in values]
        of_all = sum(plan.memory[name].allocated for name in rows)
        table.add_row(heading, *cells, format_bytes(of_all), style=style)

    for heading, rows, spec in (
        ("per token", plan.per_token(), ",.2f"), ("per request", plan.per_request(), ","),
        ("shared", plan.shared(), ","),
    ):  # fmt: skip
        add(heading, rows, spec, "bold")
        for name, row in rows.items():
            add(f"  {component_label(name)}", {name: row}, spec, "")
        table.add_section()
    return table


def _stage_table(plan: MemoryPlan) -> Table:
    rows = [
        (f"{first} to {end - 1}", f"{size:,}", format_bytes(size))
        for (first, end), size in plan.stages.items()
    ]
    return make_table("The cache of each pipeline stage", ("layers", "bytes", ""), rows)


def _gpu_table(plan: MemoryPlan, *, gpu: str) -> Table:
    num_gpus = plan.num_ranks * plan.num_stages * plan.context_ranks
    ranks = f"each of {num_gpus} ranks" if num_gpus > 1 else "one GPU"
    rows = [("memory", plan.gpu_bytes)]
    if plan.weights_bytes:
        share = f" / {plan.num_ranks}" if plan.num_ranks > 1 else ""
        if plan.num_stages > 1:
            share = f" of {plan.most_layers} of {plan.config.num_layers} layers{share}"
        rows.append((f"weights{share}", plan.rank_weights_bytes))
    if plan.reserved_bytes:
        rows.append(("reserved", plan.reserved_bytes))
    largest = " of the largest stage" if plan.num_stages > 1 else ""
    rows.append((f"cache{largest}", plan.cache_bytes))
    rows.append(("free", plan.free_bytes) if plan.fits else ("missing", -plan.free_bytes))
    cells = [(label, f"{size:,}", format_bytes(size)) for label, size in rows]
    return make_table(f"{gpu}, {ranks}", ("", "bytes", ""), cells)


def _change_table(changes: list[Change]) -> Table:
    rows = []
    for what, plan in changes:
        difference = format_bytes(abs(plan.free_bytes))
        verdict = f"fits, {difference} free" if plan.fits else f"{difference} missing"
        rows.append((what, format_bytes(plan.needed_bytes), verdict))
    return make_table("What would make it fit, one change at a time", ("change", "needs", ""), rows)


def _verdict(plan: MemoryPlan, changes: list[Change]) -> list[str]:
    one = plan.one_request()
    planned = f"{_requests(plan.num_requests)} of {plan.context_tokens:,} tokens"
    if plan.fits:
        fit = f"It fits: {planned}, {format_bytes(plan.free_bytes)} free."
    else:
        fit = f"It does not fit: {planned}, {format_bytes(-plan.free_bytes)} missing."
        fit += f" Nearest change: {changes[0].what}."
    lines = [
        f"One request: {format_bytes(one.payload)} of payload, {format_bytes(one.allocated)} "
        f"allocated, {plan.blocks_per_request:,} blocks of {plan.config.block_tokens} tokens.",
        fit,
        f"Of that context {_requests(plan.max_requests)} fit.",
    ]
    if plan.max_blocks is not None:
        lines.append(
            f"Beside the fixed part of {_requests(plan.num_requests)} there is room for "
            f"{plan.max_tokens:,} tokens ({plan.max_blocks:,} blocks)."
        )
    return lines


def _notes(plan: MemoryPlan, *, gpu: str) -> list[str]:
    notes = []
    if gpu.lower() in GPU_BYTES:
        notes.append(
            f"{gpu} stands for {plan.gpu_bytes // 10**9} GB as marketed, of 10^9 bytes; the driver "
            "may report more: --gpu takes a size too."
        )
    if not plan.weights_bytes:
        notes.append("Weights are not counted: give them with --weights.")
    if not plan.reserved_bytes:
        notes.append("Activations and the CUDA context are not counted: give them with --reserve.")
    if plan.num_ranks > 1:
        notes.append(TP_NOTE)
    if plan.context_ranks > 1:
        notes.append(
            f"A context is split over {plan.context_ranks} ranks: bytes are those of each, and a "
            "block is one of every rank."
        )
    if plan.config.num_mtp_layers:
        notes.append(
            f"MTP layers counted: {plan.config.num_mtp_layers} (--no-mtp leaves them out)."
        )
    return notes
