"""`dsv4 bench prefill`: a whole prompt of V4-Flash, chunk by chunk, without the projections.

One layer of each type is timed part by part, by graph replay, for chunks at several positions. The
time of a prompt is the sum over its chunks, with times in between interpolated, times the number
of layers. Short prompts also run whole, all layers after another, which checks that sum. Rows are
random numbers, as the time does not depend on them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.memory.capacity import Capacity
from dsv4.config import CacheConfig
from dsv4.kernels.contracts import AttentionResult, LayerProjections, Selection
from dsv4.kernels.reference.addressing import visible_entries
from dsv4.kernels.triton import dense_rows
from dsv4.layer_schedule import AttentionType
from dsv4.tools.bench import timing
from dsv4.tools.bench.attend_case import AttendCase, attend, check_result, layer_case
from dsv4.tools.bench.decode import fill_storages
from dsv4.tools.bench.environment import load_external, require_cuda
from dsv4.tools.bench.external import flashmla
from dsv4.tools.bench.external.deepgemm import ChunkLogits, MqaLogits, load_mqa_logits
from dsv4.tools.bench.external.flashmla import SparsePrefill, load_flash_mla_prefill
from dsv4.tools.bench.external.sglang import SGLangKernels, load_sglang
from dsv4.tools.bench.external.sglang_index import SGLangTopk
from dsv4.tools.bench.index import chunk_parts, select_chunk
from dsv4.tools.bench.requests import ModelCase, extend, manager_for, model_inputs
from dsv4.tools.bench.write import check_bytes, write_layer
from dsv4.tools.console import track, working

DEVICE = "cuda"
CHUNK = 8192
CONTEXTS = (1 << 17, 1 << 19, 1 << 20)
TARGET_S = {1 << 17: 2.6, 1 << 19: 25.0, 1 << 20: 92.0}
TARGET_MIB = {"V4-Flash": 416, "V4-Pro": 640}
WORKSPACES = ("index_scratch", "window_workspace", "attention_partials", "pooling_scratch")
PARTS = ("write", "query", "score", "topk", "dense", "attend")  # attend is without dense
CHECKED_QUERIES = 16  # of a chunk
CHOSEN_AT_ONCE = 1024  # queries of a call of SGLang's top-k
NUM_REPLAYS = 3


class Peers(NamedTuple):
    """External kernels that were found."""

    logits: MqaLogits | None = None
    sglang: SGLangKernels | None = None
    prefill: SparsePrefill | None = None


def bench_prefill(
    *, num_positions: int, contexts: Sequence[int] | None, whole: int, compare: bool,
    plot: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Time prompts of some contexts; those of up to `whole` tokens run whole too.

    `compare` times DeepGEMM's scores of FP8 keys, SGLang's top-k and FlashMLA's prefill on the same
    shapes.
    """
    require_cuda("prefill")
    contexts = sorted(contexts or CONTEXTS)
    for context in contexts:
        if context % CHUNK:
            raise ValueError(f"Invalid --context: expected a multiple of {CHUNK}, got {context}")
    kernels, states = load_external(compare, {
        "DeepGEMM": load_mqa_logits, "SGLang": load_sglang,
        "FlashMLA's prefill": load_flash_mla_prefill,
    })  # fmt: skip
    peers = Peers(*kernels)
    with working("checking"):
        for kind in AttentionType:
            check_bytes(kind)
        case = prefill_case(CacheConfig.v4_flash(), contexts[-1], device=DEVICE)
    starts = sample_starts(contexts, num_positions)
    rows = [row for start in track(starts, "chunks") for row in measure_chunk(case, start, peers)]
    wholes = [context for context in contexts if context <= whole]
    if wholes:
        run_whole(case, wholes[0])  # compiles what is left
    seconds = {each: run_whole(case, each) for each in track(wholes, "whole prompts")}
    counts = Counter(layer.attention_type.name for layer in case.manager.schedule)
    prompts = [sum_prompt(rows, counts, each, seconds.get(each)) for each in contexts]
    if plot is not None:
        plot_prompts(rows, counts, prompts, plot)
    return {
        "chunk": CHUNK, "layers": counts, "rows": rows, "prompts": prompts,
        "memory": [workspace_row(*each) for each in
                   (("V4-Flash", CacheConfig.v4_flash()), ("V4-Pro", CacheConfig.v4_pro()))],
        **states,
    }  # fmt: skip


def sample_starts(contexts: Sequence[int], num_positions: int) -> list[int]:
    """First tokens of the timed chunks: evenly over each context, its ends among them."""
    starts: set[int] = set()
    for context in contexts:
        last = context // CHUNK - 1
        starts |= {
            round(each) * CHUNK for each in np.linspace(0, last, min(num_positions, last + 1))
        }
    return sorted(starts)


def prefill_case(config: CacheConfig, context: int, *, device: str) -> ModelCase:
    """Open a request of no tokens, with room for `context`, and fill all rows."""
    manager = manager_for(config, 1, context, device=device, chunk=CHUNK)
    fill_storages(manager)
    return ModelCase(manager, [manager.open_request()], *model_inputs(config, CHUNK, device))


def measure_chunk(case: ModelCase, start: int, peers: Peers) -> list[dict[str, Any]]:
    """Time a layer of each type on the chunk from `start` on, whose tokens count as written."""
    extend(case.manager, case.slots[0], start)
    handles = case.next_step(CHUNK)
    handles[0].plan.complete()
    first = {handle.layer.attention_type: handle for handle in reversed(handles)}
    return [
        _measure_layer(case, first[kind], start, peers) for kind in AttentionType if kind in first
    ]


def _measure_layer(
    case: ModelCase, handle: LayerCacheHandle, start: int, peers: Peers
) -> dict[str, Any]:
    inputs, weights = case.layer(handle)
    max_entries = handle.plan.max_entries(handle.layer.ratio)
    write_layer(handle, inputs, weights)
    selection = _select(handle, inputs)
    attention = layer_case(handle, inputs, weights, selection)
    checked = torch.linspace(0, CHUNK - 1, CHECKED_QUERIES, device=inputs.query.device).long()
    check_result(attention, attend(attention, 0), "the output of a chunk", queries=checked)

    def run_layer() -> AttentionResult:
        write_layer(handle, inputs, weights)
        return attend(layer_case(handle, inputs, weights, _select(handle, inputs)), 0)

    index = {}
    if inputs.indexer is not None:
        query, head_weights = inputs.indexer.query, inputs.indexer.head_weights
        index = chunk_parts(handle, query, head_weights, max_entries=max_entries)
        index["query"]()
    parts: dict[str, Callable[[], object] | None] = {
        "write": lambda: write_layer(handle, inputs, weights), **index,
        "dense": dense_part(attention), "attend": lambda: attend(attention, 0),
        "layer": run_layer,
    }  # fmt: skip
    row: dict[str, Any] = {"start": start, "layer": attention.name}
    row |= {f"{name}_us": _replay(run) for name, run in parts.items() if run is not None}
    row["attend_us"] -= row.get("dense_us", 0.0)
    return row | _measure_peers(attention, inputs, peers, checked)


def _replay(run: Callable[[], object]) -> float:
    return timing.replay_time(run, num_replays=NUM_REPLAYS)


def _select(handle: LayerCacheHandle, inputs: LayerProjections) -> Selection | None:
    return None if inputs.indexer is None else select_chunk(handle, inputs.indexer, None)


def dense_part(case: AttendCase) -> Callable[[], None] | None:
    """Make rows dense as attention does; None where attention reads them in place."""
    (handle,) = case.handles
    memory, tokens, (num_tokens, num_heads, _) = handle.memory, handle.tokens, case.query.shape
    sizes = dense_rows.choose_dense(
        num_tokens, num_heads, memory.layout.window + case.num_entries, memory,
        num_chunks=len(tokens.chunk_ids),
        max_entries=handle.plan.max_entries(handle.layer.ratio),
    )  # fmt: skip
    if sizes is None:
        return None
    dense = dense_rows.cut_dense_rows(memory.index_scratch, sizes, dim=memory.layout.head_dim)
    return lambda: dense_rows.make_dense_rows(dense, memory, tokens)


def _measure_peers(
    case: AttendCase, inputs: LayerProjections, peers: Peers, checked: torch.Tensor
) -> dict[str, float]:
    """Time other projects' kernels on the same shapes."""
    times, (handle,) = {}, case.handles
    if inputs.indexer is not None and peers.logits is not None:
        logits = ChunkLogits(peers.logits, inputs.indexer.query, handle)
        logits.check()
        times["deepgemm_us"] = _replay(logits.run)
    if inputs.indexer is not None and peers.sglang is not None:
        lengths = visible_entries(handle.positions.long(), handle.layer.ratio)[-CHOSEN_AT_ONCE:]
        num_entries = int(lengths[-1])
        scores = torch.randn(len(lengths), num_entries, device=lengths.device)
        topk = SGLangTopk(peers.sglang, handle, scores, num_entries=num_entries, lengths=lengths)
        topk.check()
        times["sglang_us"] = _replay(topk.run) * CHUNK / len(lengths)
    if handle.layer.ratio and peers.prefill is not None:
        times["flashmla_us"] = _replay(flashmla.checked_prefill(peers.prefill, case, checked))
    return times


def run_whole(case: ModelCase, context: int) -> float:
    """Run a prompt of `context` tokens through all layers, chunk by chunk; returns its seconds."""
    case.manager.free_requests(case.slots)
    case = replace(case, slots=[case.manager.open_request()])

    def run() -> AttentionResult:
        for _ in range(context // CHUNK):
            result = case.forward(case.next_step(CHUNK))[-1]
        return result

    result, elapsed = timing.time_on_gpu(run)
    if not bool(result.output.isfinite().all()):
        raise RuntimeError("A prompt gave an output that is not finite; nothing is reported")
    return elapsed / 1e6


def sum_prompt(
    rows: Sequence[dict[str, Any]], counts: dict[str, int], context: int, whole_s: float | None
) -> dict[str, Any]:
    """Sum the times of all chunks and layers of a prompt, whole and by part, in seconds."""
    starts = np.arange(context // CHUNK) * CHUNK
    prompt = {"context": context, "target_s": TARGET_S.get(context), "whole_s": whole_s}
    curves = prompt_curves(rows, counts, starts)
    return prompt | {f"{name}_s": float(curve.sum()) for name, curve in curves.items()}


def prompt_curves(
    rows: Sequence[dict[str, Any]], counts: dict[str, int], starts: np.ndarray[Any, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of each chunk of a prompt in all layers, interpolated; by part and type."""
    curves = {"layer": np.zeros(len(starts))}
    for kind, count in counts.items():
        mine = [row for row in rows if row["layer"] == kind]
        known = [row["start"] for row in mine]
        for part in ("layer", *PARTS):
            us = [row.get(f"{part}_us", 0.0) for row in mine]
            if any(us):
                name = part if part in ("layer", "write") else f"{kind}_{part}"
                curve = np.interp(starts, known, us) * count / 1e6
                curves[name] = curves.get(name, 0.0) + curve
    return curves


def workspace_row(name: str, config: CacheConfig) -> dict[str, Any]:
    """Bytes of scratch and workspaces for one request of 1M tokens, of the memory plan."""
    longest = CONTEXTS[-1]
    sizes = Capacity(
        config, max_requests=1, num_blocks=longest // config.block_tokens,
        max_forward_tokens=CHUNK, max_request_tokens=longest,
    ).memory()  # fmt: skip
    parts = {part: sizes[part].allocated for part in WORKSPACES}
    return {"model": name, **parts, "total_mib": sum(parts.values()) / 2**20,
            "target_mib": TARGET_MIB[name]}  # fmt: skip


def plot_prompts(
    rows: Sequence[dict[str, Any]], counts: dict[str, int], prompts: Sequence[dict[str, Any]],
    path: Path,
) -> None:  # fmt: skip
    """Draw the seconds of a prompt over its context: all of it, and its largest parts."""
    from matplotlib.figure import Figure

    starts = np.arange(prompts[-1]["context"] // CHUNK) * CHUNK
    curves = {name: each.cumsum() for name, each in prompt_curves(rows, counts, starts).items()}
    largest = sorted(curves, key=lambda name: -curves[name][-1])[:7]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in largest:
        label = "all 43 layers" if name == "layer" else name.replace("_", " ")
        width = 2.5 if name == "layer" else 1.2
        axes.plot((starts + CHUNK) / 1024, curves[name], linewidth=width, label=label)
    for key, marker, label in (("whole_s", "o", "whole run"), ("target_s", "_", "target")):
        points = [(each["context"] / 1024, each[key]) for each in prompts if each[key] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color="black", label=label)
    axes.set(xlabel="context, 1,024 tokens", ylabel="seconds")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
