"""`dsv4 bench write`: the write path of one layer, decode steps and a prefill, by graph replay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.kernels import ops
from dsv4.kernels.contracts import LayerProjections, LayerWeights, LayerWrites
from dsv4.layer_schedule import AttentionType
from dsv4.testing import model_projections, model_weights, move_to, poison
from dsv4.tools.bench import timing
from dsv4.tools.bench.environment import load_external, require_cuda
from dsv4.tools.bench.external.sglang import SGLangKernels, load_sglang
from dsv4.tools.bench.external.sglang_index import complex_frequencies
from dsv4.tools.bench.external.sglang_write import SGLangLayer, check_sglang
from dsv4.tools.bench.requests import acquire_layers, manager_for
from dsv4.tools.console import track, working

BATCHES = (1, 32, 128, 256)
PREFILL_TOKENS = 8192
NUM_LAYERS = 43  # rotating pools: as many as V4-Flash has layers
ROW_BYTES, KEY_BYTES = 584, 68
WINDOW_BYTES = 512 * 2 + ROW_BYTES  # of a token: bf16 kv in, a row out
# Columns of a compressed layer's kv, and of its gate: two series of entries and index keys in CSA.
WIDTHS = {AttentionType.SWA: 0, AttentionType.CSA: 2 * (512 + 128), AttentionType.HCA: 512}
ENTRY_BYTES = {
    AttentionType.SWA: 0, AttentionType.CSA: ROW_BYTES + KEY_BYTES, AttentionType.HCA: ROW_BYTES,
}  # fmt: skip
# Lengths before and after checked forwards: a chunk, a step to a window's end, one past it.
CHECKED_LENGTHS = (([0, 0], [126, 3]), ([126, 3], [127, 4]), ([127, 4], [128, 5]))
ONE_CLOSING = (128,)  # batches in which one HCA window closes
TARGETS_US = {  # rotating, by type, windows that close, and batch
    (AttentionType.SWA, 0, 1): 1.0, (AttentionType.SWA, 0, 256): 1.3,
    (AttentionType.HCA, 1, 128): 4.5, (AttentionType.HCA, 128, 128): 8.0,
}  # fmt: skip
PREFILL_TARGETS_US = {AttentionType.SWA: 8.0, AttentionType.CSA: 28.0, AttentionType.HCA: 18.0}
NUM_PREFILL_LAYERS = 4  # rotating; CSA projections of 4 layers are four times the L2

WriteCase = list[tuple[LayerCacheHandle, LayerProjections, LayerWeights]]  # by layer


def bench_write(*, batches: tuple[int, ...] = BATCHES, compare: bool) -> dict[str, Any]:
    """Time the writes of a layer, one layer warm and 43 layers rotating.

    `compare` times SGLang's kernels of a decode step too, 43 layers rotating.
    """
    require_cuda("write")
    (sglang,), peers = load_external(compare, {"SGLang": load_sglang})
    with working("checking"):
        for kind in AttentionType:
            check_bytes(kind)
            if sglang is not None:
                check_sglang(sglang, write_config(kind))
    steps = [
        (kind, is_closing * batch, batch)
        for kind in AttentionType
        for is_closing in ((False, True) if kind.ratio else (False,))
        for batch in batches
    ]
    steps += [(AttentionType.HCA, 1, batch) for batch in batches if batch in ONE_CLOSING]
    return {
        "rows": [_step_row(*step, sglang) for step in track(steps, "decode steps")],
        "prefill": [_prefill_row(kind) for kind in track(AttentionType, "prefills")],
        **peers,
    }


def _step_row(
    kind: AttentionType, num_closing: int, batch: int, sglang: SGLangKernels | None
) -> dict[str, Any]:
    before = [255] * num_closing + [253] * (batch - num_closing)
    after = [length + 1 for length in before]
    one, every = (
        write_case(write_config(kind, num_layers=each), before, after) for each in (1, NUM_LAYERS)
    )
    names = {0: kind.name, batch: f"{kind.name} closing"}
    row: dict[str, Any] = {
        "layer": names.get(num_closing, f"{kind.name}, {num_closing} closing"), "type": kind.name,
        "closing": num_closing, "batch": batch, "warm_us": _time(one), "rotating_us": _time(every),
        "floor_us": timing.floor_us(_step_bytes(kind, batch, num_closing)),
    }  # fmt: skip
    row |= timing.judge(row["rotating_us"], TARGETS_US.get((kind, num_closing, batch)))
    if sglang is not None:
        frequencies = complex_frequencies(every[0][0])
        layers = [SGLangLayer(sglang, *layer, frequencies) for layer in every]
        theirs = timing.time_rotating(lambda layer_idx: layers[layer_idx].run(), NUM_LAYERS)
        row |= timing.beside(row["rotating_us"], "sglang_us", theirs)
    return row


def _prefill_row(kind: AttentionType) -> dict[str, Any]:
    """Time a chunk's writes from position 0: BF16 projections in, rows and entries out."""
    config = write_config(kind, num_layers=NUM_PREFILL_LAYERS)
    num_entries = PREFILL_TOKENS // kind.ratio if kind.ratio else 0
    num_bytes = PREFILL_TOKENS * (WINDOW_BYTES + WIDTHS[kind] * 4) + num_entries * ENTRY_BYTES[kind]
    us = _time(write_case(config, [0], [PREFILL_TOKENS]))
    floor = {"floor_us": timing.floor_us(num_bytes)}
    judged = timing.judge(us, PREFILL_TARGETS_US[kind])
    return {"type": kind.name, "tokens": PREFILL_TOKENS, "us": us, **floor, **judged}


def write_config(kind: AttentionType, *, num_layers: int = 1, **choices: Any) -> CacheConfig:
    """Configure V4-Flash with layers of one type."""
    ratios = (kind.ratio,) * num_layers
    return CacheConfig.v4_flash(compress_ratios=ratios, num_query_heads=1, **choices)


def write_case(
    config: CacheConfig, before: Sequence[int], after: Sequence[int], *, device: str = "cuda"
) -> WriteCase:
    """Plan a forward that takes each request from one length to another; list its layers."""
    batch = len(before)
    num_tokens = batch * -(-max(after) // config.block_tokens) * config.block_tokens
    sizes = {"chunk": num_tokens, "num_blocks": num_tokens // config.block_tokens}
    manager = manager_for(config, batch, num_tokens, device=device, backend="triton", **sizes)
    slots = manager.open_requests(batch)
    if any(before):
        prepare_forward(manager, slots, [0] * batch, before).complete()
    plan = prepare_forward(manager, slots, before, after)
    inputs = model_projections(config, plan.num_tokens, seed=1, dtype=torch.bfloat16)
    handles = acquire_layers(manager, plan)
    for handle in handles:
        for tail in (handle.state.tail, handle.state.index_tail, handle.state.sums):
            if tail is not None:
                tail.normal_()
    layers = zip(handles, inputs, model_weights(config, seed=0), strict=True)
    return [(handle, move_to(device, each), move_to(device, own)) for handle, each, own in layers]


def _time(case: WriteCase) -> float:
    """Median microseconds per layer over replays: one layer warm, or several rotating."""
    num_turns = timing.REPEATS if len(case) == 1 else 1
    return timing.time_rotating(lambda idx: write_layer(*case[idx]), len(case), num_turns=num_turns)


def write_layer(handle: LayerCacheHandle, inputs: LayerProjections, weights: LayerWeights) -> None:
    """Write a layer without the handle's checks, which allow one write a forward."""
    writes = LayerWrites.of(inputs, weights)
    ops.write_layer(writes, handle.memory, handle.tokens, backend=handle.parts.backend)


def _step_bytes(kind: AttentionType, batch: int, num_closing: int) -> int:
    """Count the bytes that a step must move: projections, window rows, tails, entries."""
    total = batch * (WINDOW_BYTES + WIDTHS[kind] * (4 + 8))  # bf16 kv and gate in, fp32 rows out
    if num_closing:  # earlier rows of one series, kv and gate, and the sums of 7 HCA groups
        num_earlier = {AttentionType.CSA: 14 * (512 + 128), AttentionType.HCA: 51 * 512}[kind]
        total += num_closing * (num_earlier * 4 + ENTRY_BYTES[kind])
    return total


def check_bytes(kind: AttentionType) -> None:
    """Refuse to time kernels whose stored bytes differ from the reference's."""
    same = (stores_same_bytes(write_config(kind), write_layer, *each) for each in CHECKED_LENGTHS)
    if not all(same):
        raise RuntimeError(f"{kind.name}: the bytes differ from the reference's; nothing is timed")


def stores_same_bytes(
    config: CacheConfig,
    write: Callable[[LayerCacheHandle, LayerProjections, LayerWeights], None],
    before: Sequence[int],
    after: Sequence[int],
    *,
    device: str = "cuda",
) -> bool:
    """Compare one forward by the reference on the CPU and by `write`, from the same state."""
    expected, got = (
        manager_for(config, len(before), 512, device=on, chunk=512, backend=backend)
        for on, backend in (("cpu", "reference"), (device, "triton"))
    )
    weights, nothing = model_weights(config, seed=0)[0], [0] * len(before)
    first, last = (
        model_projections(config, count, seed=count, dtype=torch.bfloat16)[0]
        for count in (sum(before), sum(after) - sum(before))
    )
    poison(expected)
    slots, _ = (manager.open_requests(len(before)) for manager in (expected, got))
    expected.acquire(0, prepare_forward(expected, slots, nothing, before)).write(first, weights)
    prepare_forward(got, slots, nothing, before).complete()
    stored = ("blocks", "slots", "window_workspace")
    for name in stored:
        got.tensors()[name].copy_(expected.tensors()[name])
    expected.acquire(0, prepare_forward(expected, slots, before, after)).write(last, weights)
    handle = got.acquire(0, prepare_forward(got, slots, before, after))
    write(handle, move_to(device, last), move_to(device, weights))
    return all(torch.equal(got.tensors()[name].cpu(), expected.tensors()[name]) for name in stored)
