"""`dsv4 bench index`: index queries, scores and top-k of a step and a chunk, by graph replay."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.config import CacheConfig
from dsv4.distributed.context import own_tokens
from dsv4.formats import IndexFormatName, PagedRows
from dsv4.kernels import ops
from dsv4.kernels.contracts import IndexInputs, Selection, TokenMap
from dsv4.kernels.external import deepgemm
from dsv4.kernels.external.find import PagedLogits, load_deep_gemm
from dsv4.kernels.index_scratch import IndexScratch
from dsv4.kernels.layer_memory import existing
from dsv4.kernels.reference import indexer as reference
from dsv4.kernels.reference.gather import gather_rows, visible_entry_rows
from dsv4.kernels.triton import chunk_scores, indexer, topk
from dsv4.tools.bench import requests, timing
from dsv4.tools.bench.decode import fill_storages
from dsv4.tools.bench.environment import load_external, require_cuda
from dsv4.tools.bench.external.sglang import SGLangKernels, load_sglang
from dsv4.tools.bench.external.sglang_index import SGLangQuery, SGLangTopk
from dsv4.tools.console import track, working
from dsv4.tools.planner.command import PRESETS

RATIO = 4
NUM_LAYERS = 4  # rotating pools: more than the L2 of any GPU holds
PREFILL_TOKENS = 65536
FORMATS: tuple[IndexFormatName, ...] = ("fp8", "mxfp4")
SCORED = ((8192, 1), (262144, 1), (8192, 32), (32768, 64))  # entries × requests
CHOSEN = ((8192, 1), (8192, 32), (262144, 1))
STEP_TARGETS_US = {  # rotating, by step, entries and requests
    ("all", 8192, 1): 7.0, ("all", 262144, 1): 18.0, ("top-k", 8192, 32): 3.9,
}  # fmt: skip
CHUNK_TOKENS = 8192  # queries of a chunk
CHUNK_TARGETS: dict[IndexFormatName, dict[int, float]] = {  # TFLOP/s, by entries of the last query
    "fp8": {32768: 800.0, 131072: 870.0, 262144: 900.0},
    "mxfp4": {32768: 750.0, 131072: 800.0, 262144: 820.0},
}
ASCENDING_TARGET = 2.5  # of the time with other scores
SCORE_ERROR = 2.0**-6  # of the largest score; E4M3 products are added with 13 bits on Hopper
NUM_TURNS = 5  # runs of each rotating layer in a captured step
MODELS, MODEL_CONTEXT = ("v4-flash", "v41-flash"), 1 << 20  # their indices are compared
LEAST_FOUND = 0.98  # of the reference's choice; FP8 products change neighbours of the last
NUM_DRAWS = 5  # draws of scores: the time of top-k depends on the draw
# Scales of scores that ascend: numbers, and exponents of UE8M0 that E5M2 operands hold.
ASCENDING: dict[IndexFormatName, tuple[float, float]] = {"fp8": (0.5, 1.5), "mxfp4": (107, 133)}
RANK_CASES = ((1, 1), (32, 1), (1, 4), (1, 2048))  # requests × tokens of each
RANK_TARGET = 1.2  # of a rank's share of the time
RANK_LAUNCHES = 48  # of a captured step, whatever its layers, unless it is of a long chunk


class IndexCase(NamedTuple):
    """Layers of a forward, their queries, and a workspace of the right size.

    Tokens see num_entries, which are those of a rank if the context is split.
    """

    handles: list[LayerCacheHandle]
    tokens: TokenMap
    query: Tensor
    head_weights: Tensor
    scratch: IndexScratch
    num_entries: int


def bench_index(*, num_ranks: int, compare: bool) -> dict[str, Any]:
    """Time each step of the index, one layer warm and 4 layers rotating.

    `compare` times DeepGEMM's scores of FP8 keys too, and SGLang's queries for FP8 keys and its
    top-k. DeepGEMM has no other format on Hopper, so MXFP4 scores are compared with its FP8. With
    num_ranks above 1, only scores are timed: those of one rank of a split context.
    """
    require_cuda("index")
    if num_ranks > 1:
        cases = [(name, *case) for name in FORMATS for case in RANK_CASES]
        rows = [_measure_rank(num_ranks, *case) for case in track(cases, "ranks")]
        return {"num_ranks": num_ranks, "context": MODEL_CONTEXT, "ranks": rows}
    loaders = {"DeepGEMM": load_deep_gemm, "SGLang": load_sglang}
    (logits, sglang), peers = load_external(compare, loaders)
    total = 3 * len(FORMATS) * len(SCORED) + len(CHOSEN)
    rows = list(track(_measure_steps(logits, sglang), "decode steps", total=total))
    chunks = [(name, num_entries) for name in FORMATS for num_entries in CHUNK_TARGETS[name]]
    prefill = [measure_prefill(*chunk) for chunk in track(chunks, "prefill chunks")]
    with working("models"):
        models = [measure_model(name, MODEL_CONTEXT) for name in MODELS]
    for row in models:
        row["of_flash"] = row["total_ms"] / models[0]["total_ms"]
    return {
        "rows": rows, "prefill": prefill, "model_tokens": CHUNK_TOKENS,
        "model_context": MODEL_CONTEXT, "models": models, **peers,
    }  # fmt: skip


def _measure_steps(
    logits: PagedLogits | None, sglang: SGLangKernels | None
) -> Iterator[dict[str, Any]]:
    deepgemm_us: dict[tuple[int, int], float] = {}  # by entries and batch
    for name in FORMATS:
        for num_entries, batch in SCORED:
            case = index_case(name, num_entries, batch)
            check_scores(case)
            row = _measure("query", name, case, prepare_queries)
            if sglang is not None and name == "fp8":
                calls = SGLangQuery(sglang, case.handles[0], case.query, case.head_weights)
                row |= _compare(row, calls)
            yield row
            row = _measure("score", name, case, score_entries)
            if logits is not None:
                if name == "fp8":
                    deepgemm_us[num_entries, batch] = _time_deepgemm(case, logits)
                theirs = deepgemm_us[num_entries, batch]
                row |= timing.beside(row["rotating_us"], "deepgemm_us", theirs)
            yield row
            score_entries(case, case.handles[0])
            check_topk(case, select_entries(case, case.handles[0]))
            yield _measure("all", name, case, select_entries)
            del case
    for num_entries, batch in CHOSEN:
        case = index_case("fp8", num_entries, batch)
        row = _measure_topk(case)
        if sglang is not None:
            scores = case.scratch.scores
            topk = SGLangTopk(sglang, case.handles[0], scores, num_entries=num_entries)
            row |= _compare(row, topk)
        yield row
        del case


def _measure_rank(
    num_ranks: int, name: IndexFormatName, batch: int, step_tokens: int
) -> dict[str, Any]:
    """Time the scores of a rank that has all entries, and of the first of several."""
    times = []
    for count in (1, num_ranks):
        case = index_case(
            name, MODEL_CONTEXT // RATIO, batch, step_tokens=step_tokens, num_ranks=count
        )
        check_scores(case)
        times.append(_time_scores(case))
        del case
    share = times[1] / times[0]
    return {
        "format": name, "batch": batch, "tokens": step_tokens, "one_us": times[0],
        "rank_us": times[1], "share": share, **timing.judge(share, RANK_TARGET / num_ranks),
    }  # fmt: skip


def _time_scores(case: IndexCase) -> float:
    """Microseconds of a layer's scores, layers rotating; of a chunk with the keys' operands."""
    parts = [
        chunk_parts(
            handle, case.query, case.head_weights, max_entries=case.num_entries, tokens=case.tokens
        )
        for handle in case.handles
    ]
    parts[0]["query"]()
    num_turns = RANK_LAUNCHES // len(parts) if len(case.query) < 1024 else 1
    return timing.time_rotating(lambda idx: parts[idx]["score"](), len(parts), num_turns=num_turns)


def index_case(
    name: IndexFormatName,
    num_entries: int,
    batch: int,
    *,
    step_tokens: int = 1,
    num_ranks: int = 1,
    device: str = "cuda",
) -> IndexCase:
    """Plan the last step_tokens of each request; the last token sees num_entries keys.

    Of several ranks it is the first one's part: a share of the keys, in more layers, so that none
    finds its keys in the L2.
    """
    config = CacheConfig.v4_flash(
        compress_ratios=(RATIO,) * (NUM_LAYERS * num_ranks), num_query_heads=1, index_format=name
    ).split_context(0, num_ranks)
    length, num_entries = num_entries * RATIO, config.own_entries(num_entries, RATIO)
    manager = requests.manager_for(
        config, batch, length, device=device, chunk=min(length, PREFILL_TOKENS), backend="triton"
    )
    slots = requests.open_requests(manager, [length - step_tokens] * batch)
    handles = requests.acquire_layers(manager, requests.plan_tokens(manager, slots, step_tokens))
    for handle in handles:  # random codes, and scales of about 1
        keys = existing(handle.memory.index_keys)
        keys.data.random_(0, requests.FINITE_BYTES)
        if keys.format.name == "fp8":
            keys.field("scale").fill_(1.0)
        else:
            keys.scales.random_(125, 130)
    shape = (batch * step_tokens, config.index_num_heads, config.index_head_dim)
    query = torch.randn(shape, dtype=torch.bfloat16, device=device)
    head_weights = torch.randn(shape[:2], dtype=torch.bfloat16, device=device)
    scratch = indexer.index_scratch(query, handles[0].memory, max_entries=num_entries)
    tokens = handles[0].tokens._replace(block_table=manager.block_table)
    if num_ranks > 1:
        tokens = own_tokens(tokens, config, RATIO)
    if step_tokens == 1 and scratch.num_rows < batch:
        raise RuntimeError(
            f"The workspace holds {scratch.num_rows} of {batch} requests; nothing is timed"
        )
    return IndexCase(handles, tokens, query, head_weights, scratch, num_entries)


def measure_prefill(name: IndexFormatName, num_entries: int) -> dict[str, Any]:
    """Time a chunk of CHUNK_TOKENS queries: its scores alone, and the whole index.

    The index is timed again on scores that ascend with the entries, the worst order.
    """
    case = index_case(name, num_entries, 1, step_tokens=CHUNK_TOKENS)
    check_scores(case)
    handle = case.handles[0]
    parts = chunk_parts(handle, case.query, case.head_weights.abs(), max_entries=num_entries)
    parts["query"]()
    counts = (handle.positions.long() + 1) // RATIO
    num_flops = 2 * int(counts.sum()) * case.query[0].numel()
    score_us, select_us = (timing.replay_time(parts[part], num_replays=5)
                           for part in ("score", "select"))  # fmt: skip
    row: dict[str, Any] = {
        "format": name, "tokens": CHUNK_TOKENS, "entries": num_entries,
        "score_us": score_us, "score_tflops": num_flops / score_us / 1e6,
        "select_us": select_us, "select_tflops": num_flops / select_us / 1e6,
    }  # fmt: skip
    row |= timing.judge(row["select_tflops"], CHUNK_TARGETS[name].get(num_entries), is_least=True)
    make_ascending(existing(handle.memory.index_keys), name)
    row["ascending_us"] = timing.replay_time(parts["select"], num_replays=5)
    row["ascending_ratio"] = row["ascending_us"] / select_us
    return row | timing.judge(row["ascending_ratio"], ASCENDING_TARGET, "ascending_")


def make_ascending(keys: PagedRows, name: IndexFormatName) -> None:
    """Make keys that differ by their scales alone, which ascend; in mxfp4 by powers of two."""
    keys.data[:] = keys.data[0, 0].clone()
    scales = keys.field("scale") if name == "fp8" else keys.scales
    scales.copy_(torch.linspace(*ASCENDING[name], keys.num_rows).view(*scales.shape[:2], 1))


def measure_model(name: str, context: int, *, device: str = "cuda") -> dict[str, Any]:
    """Time the index of a prompt's last chunk, over all layers of a model that choose.

    One layer of each kind is timed, and stands for all of its kind.
    """
    config = PRESETS[name]()
    manager = requests.manager_for(config, 1, context, device=device, chunk=CHUNK_TOKENS)
    slots = requests.open_requests(manager, [context - CHUNK_TOKENS])
    fill_storages(manager)
    plan = requests.plan_tokens(manager, slots, CHUNK_TOKENS)
    plan.complete()
    inputs, _weights = requests.model_inputs(config, CHUNK_TOKENS, device)
    layers = [layer for layer in config.schedule if layer.owns_choice]
    kinds = [requests.layer_kind(layer) for layer in layers]
    blocks: dict[int, Tensor] = {}  # candidates, by the layer that publishes them
    times: dict[tuple[int, bool, bool, bool], float] = {}
    for layer, kind in zip(layers, kinds, strict=True):
        if kind in times:
            continue
        handle, index = manager.acquire(layer.layer_idx, plan), inputs[layer.layer_idx].indexer
        case = handle, existing(index), blocks.get(layer.candidates_of)
        blocks[layer.layer_idx] = select_chunk(*case).blocks
        check_choice(*case)
        times[kind] = timing.replay_time(partial(select_chunk, *case), num_replays=3) / 1e3
    return {
        "model": name, "layers": len(layers), "total_ms": sum(times[kind] for kind in kinds),
        "kinds": ", ".join(f"{kinds.count(kind)} x {ms:.1f}" for kind, ms in times.items()),
    }  # fmt: skip


def select_chunk(
    handle: LayerCacheHandle,
    index: IndexInputs,
    blocks: Tensor | None,
    *,
    rows: Tensor | None = None,
    backend: str = "triton",
) -> Selection:
    """Select entries for all tokens of a chunk, or for `rows`, from candidate blocks if given."""
    memory, tokens, query, weights = handle.memory, handle.tokens, index.query, index.head_weights
    if rows is not None:
        memory = memory._replace(rope_rows=memory.rope_rows[:, :, rows])
        query, weights = query[rows], weights[rows]
        blocks = None if blocks is None else blocks[rows]
        tokens = tokens._replace(
            positions=tokens.positions[rows], request_ids=tokens.request_ids[rows]
        )
    return ops.select_entries(
        query, weights, memory, tokens, candidates=blocks, backend=backend,
        max_entries=handle.plan.max_entries(handle.layer.ratio),
    )  # fmt: skip


def check_choice(handle: LayerCacheHandle, index: IndexInputs, blocks: Tensor | None) -> None:
    """Refuse to time choices of a chunk's second and last token that are not the reference's."""
    chosen = select_chunk(handle, index, blocks)
    rows = torch.tensor([1, len(index.query) - 1], device=index.query.device)
    want = select_chunk(handle, index, blocks, rows=rows, backend="reference")
    for name in ("entry_idx", "blocks"):
        pairs = zip(getattr(chosen, name)[rows].tolist(), getattr(want, name).tolist(), strict=True)
        if any(len({*mine} & {*theirs}) < LEAST_FOUND * len({*theirs}) for mine, theirs in pairs):
            raise RuntimeError(f"{name} differs from the reference's; nothing is timed")


def chunk_parts(
    handle: LayerCacheHandle,
    query: Tensor,
    head_weights: Tensor,
    *,
    max_entries: int,
    tokens: TokenMap | None = None,
) -> dict[str, Callable[[], None]]:
    """Cut the index of a forward with a chunk into parts, each for all its queries.

    They are queries, scores with the keys' operands, top-k, and all of them as a layer runs them.
    tokens are the handle's unless a rank has its own.
    """
    memory, sizes = handle.memory, {"max_entries": max_entries}
    tokens = handle.tokens if tokens is None else tokens
    keys = chunk_scores.cut_chunk_keys(query, memory, tokens, **sizes)
    scratch = indexer.index_scratch(query, memory, **sizes, chunk_keys=keys)
    chosen = indexer.empty_selection(len(query), memory.layout.index_topk, query.device)
    starts = range(0, len(query), scratch.num_rows)
    parts = [range(len(query))[first : first + scratch.num_rows] for first in starts]

    def prepare() -> None:
        for part in parts:
            indexer.prepare_queries(query, head_weights, scratch, memory, tokens, part)

    def score() -> None:
        if keys is not None:
            chunk_scores.store_operands(keys, memory, tokens, **sizes)
        for part in parts:
            indexer.score_entries(
                scratch, memory, tokens, part, num_heads=query.shape[1], **sizes, chunk_keys=keys
            )

    def choose() -> None:
        for part in parts:
            topk.choose_best(
                chosen, scratch.scores, scratch.group_tops, tokens, memory.layout, part,
                topped_rows=0 if keys is None else keys.topped_rows, **sizes,
            )  # fmt: skip

    def select() -> None:
        indexer.select_entries(
            query, head_weights, memory, tokens, max_entries=sizes["max_entries"]
        )

    return {"query": prepare, "score": score, "topk": choose, "select": select}


def prepare_queries(case: IndexCase, handle: LayerCacheHandle) -> None:
    """Prepare as many queries as the workspace holds."""
    indexer.prepare_queries(
        case.query, case.head_weights, case.scratch, handle.memory, case.tokens,
        range(case.scratch.num_rows),
    )  # fmt: skip


def score_entries(case: IndexCase, handle: LayerCacheHandle) -> None:
    """Score every entry of a layer for as many tokens as the workspace holds."""
    indexer.score_entries(
        case.scratch, handle.memory, case.tokens, range(case.scratch.num_rows),
        num_heads=case.query.shape[1], max_entries=case.num_entries,
    )  # fmt: skip


def select_entries(case: IndexCase, handle: LayerCacheHandle) -> Selection:
    """Select a layer's entries for all tokens: queries, scores and top-k."""
    return indexer.select_entries(
        case.query, case.head_weights, handle.memory, case.tokens, max_entries=case.num_entries
    )


def _measure(
    step: str, name: str, case: IndexCase, run: Callable[[IndexCase, LayerCacheHandle], object]
) -> dict[str, Any]:
    def run_layer(layer_idx: int) -> None:
        run(case, case.handles[layer_idx])

    row, batch = case.handles[0].memory.layout.index_row, len(case.query)
    num_keys, query_bytes = batch * case.num_entries, case.query.nbytes
    num_bytes = {
        "query": query_bytes + batch * case.scratch.queries.shape[1],
        "score": num_keys * (row.row_bytes + 4),  # keys in, scores out
        "all": query_bytes + num_keys * row.row_bytes,
    }[step]
    times = timing.time_layers(run_layer, NUM_LAYERS, num_bytes, num_turns=NUM_TURNS)
    return _row(step, name, case, num_bytes, times)


def _time_deepgemm(case: IndexCase, logits: PagedLogits) -> float:
    """Microseconds of DeepGEMM's scores, layers rotating; queries and schedule are made before."""
    prepare_queries(case, case.handles[0])
    if logits.set_overlap is not None:
        logits.set_overlap(True)  # programmatic dependent launch, as vLLM has it
    inputs = [
        deepgemm.score_inputs(
            case.scratch, handle.memory, handle.tokens, range(len(case.query)),
            num_heads=case.query.shape[1], max_entries=case.num_entries,
        )
        for handle in case.handles
    ]  # fmt: skip
    schedule = logits.make_schedule(inputs[0].lengths)

    def score(layer_idx: int) -> Tensor:
        return logits.score(*inputs[layer_idx], schedule, case.num_entries)

    check_scores(case, lambda: score(len(inputs) - 1))
    return timing.time_rotating(score, NUM_LAYERS, num_turns=NUM_TURNS)


def _compare(row: dict[str, Any], calls: SGLangQuery | SGLangTopk) -> dict[str, float]:
    """Microseconds of SGLang's kernel, warm, and our ratio to it."""
    calls.check()
    return timing.beside(row["warm_us"], "sglang_us", timing.time_warm(lambda _: calls.run()))


def _measure_topk(case: IndexCase) -> dict[str, Any]:
    """Time top-k of normal scores; the mean over several draws."""
    handle, scratch, tokens = case.handles[0], case.scratch, range(len(case.query))
    chosen = indexer.empty_selection(len(tokens), handle.config.index_topk, case.query.device)

    def choose(_layer_idx: int) -> None:
        topk.choose_best(
            chosen, scratch.scores, scratch.group_tops, handle.tokens, handle.memory.layout,
            tokens, max_entries=case.num_entries,
        )  # fmt: skip

    times = []
    for _ in range(NUM_DRAWS):
        case.scratch.scores.normal_()
        choose(0)
        check_topk(case, chosen)
        times.append(timing.time_warm(choose))
    num_bytes = len(case.query) * case.num_entries * 4
    both = dict.fromkeys(("warm_us", "rotating_us"), statistics.mean(times))
    floor = {"floor_us": timing.floor_us(num_bytes)}
    return _row("top-k", "fp32", case, num_bytes, both | floor)


def _row(
    step: str, name: str, case: IndexCase, num_bytes: int, times: dict[str, float]
) -> dict[str, Any]:
    entries, batch = case.num_entries, len(case.query)
    sizes = {"entries": entries, "batch": batch, "bytes": num_bytes}
    target = STEP_TARGETS_US.get((step, entries, batch))
    judged = timing.judge(times["rotating_us"], target)
    return {"step": step, "format": name, **sizes, **times, **judged}


def check_topk(case: IndexCase, chosen: Selection) -> None:
    """Refuse to time choices other than those of the reference from the scores in the workspace."""
    counts = torch.full_like(chosen.counts, case.num_entries).long()
    scores = case.scratch.scores[:, : case.num_entries]
    want = reference.select_topk(scores, counts, chosen.entry_idx.shape[1])
    if not torch.equal(chosen.entry_idx.long(), want):
        raise RuntimeError("The chosen entries differ from the reference's; nothing is timed")


def check_scores(case: IndexCase, run: Callable[[], Tensor] | None = None) -> None:
    """Refuse to time kernels whose scores of the first token differ from the reference's.

    `run` returns the last layer's scores; the default is our own kernel.
    """
    handle = case.handles[-1]
    prepare_queries(case, handle)
    if run is None:
        score_entries(case, handle)
    scores = case.scratch.scores if run is None else run()
    keys = existing(handle.memory.index_keys)
    first = slice(0, 1)
    count = (int(case.tokens.positions[0]) + 1) // RATIO
    newest = slice(count - 1024, count)
    rows = visible_entry_rows(keys, case.tokens, first, ratio=RATIO, max_entries=count)[:, newest]
    ready = reference.index_query(
        case.query[first], keys.format, handle.rope.take(first),
        has_hadamard=handle.config.index_hadamard, global_scale=None,
    )  # fmt: skip
    want = reference.score_entries(ready, case.head_weights[first], gather_rows(keys, rows))
    got = scores[first, newest]
    if not (got - want).abs().max() <= SCORE_ERROR * want.abs().max():
        raise RuntimeError("The scores differ from the reference's; nothing is timed")
