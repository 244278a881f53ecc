"""`dsv4 demo`: a small random DeepSeek-V4's attention stack through the cache, checked.

Prefill of a batch of sequences and then decode, in fp32 rows against transformers' attention,
and in the chosen formats against the oracle on what those formats store.
"""

from pathlib import Path
from typing import Any

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.formats import IndexFormatName, KVFormatName
from dsv4.inspector.selections import RUN_FILES, SelectionRecorder
from dsv4.kernels.reference.dense import dense_layer
from dsv4.model.attention import AttentionSubBlock
from dsv4.model.random_hf import RecordedLayer, random_hf_model, record_attention

LENGTHS = (300, 130, 37)
PREFILL = (260, 100, 5)
EXACT_TOLERANCE = 5e-6  # of the largest output, fp32 rows against transformers
FORMAT_TOLERANCE = 5e-6  # of the largest output, chosen rows against the oracle on those rows


def run_demo(
    *,
    kv_format: KVFormatName = "fp8",
    index_format: IndexFormatName = "mxfp4",
    seed: int = 0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run both checks; the result says whether they passed and what the cache takes.

    With a folder, the first sequence is kept there for `dsv4 inspect`.
    """
    model = random_hf_model(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    recorded = [
        record_attention(model, torch.randint(0, 128, (n,), generator=generator)) for n in LENGTHS
    ]
    exact = CacheConfig.from_hf(model.config, kv_format="fp32", index_format="fp32")
    chosen = CacheConfig.from_hf(model.config, kv_format=kv_format, index_format=index_format)
    blocks = _blocks(model, exact)
    exact_outputs, _ = _run_cached(blocks, exact, recorded)
    blocks = _blocks(model, chosen)
    recorder = SelectionRecorder(slot=0)
    outputs, manager = _run_cached(blocks, chosen, recorded, recorder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        manager.save_request(0, folder / RUN_FILES.request)
        recorder.save(folder / RUN_FILES.selections)
        plain = CacheConfig.from_hf(model.config, kv_format="bf16", index_format="bf16")
        _, unquantised = _run_cached(_blocks(model, plain), plain, recorded)
        unquantised.save_request(0, folder / RUN_FILES.against)
    layers: list[dict[str, Any]] = []
    for layer, block in zip(chosen.schedule, blocks, strict=True):
        idx = layer.layer_idx
        theirs = [sequence[idx].output for sequence in recorded]
        oracle = [_oracle(block, sequence[idx], manager) for sequence in recorded]
        layers.append(
            {
                "layer": idx,
                "type": layer.attention_type.name,
                "fp32_vs_transformers": _error(exact_outputs[idx], theirs),
                "formats_vs_oracle": _error(outputs[idx], oracle),
                "formats_vs_transformers": _error(outputs[idx], theirs),
            }
        )
    return {
        "demo": "attention stack",
        "sequences": list(LENGTHS),
        "kv_format": kv_format,
        "index_format": index_format,
        "layers": layers,
        "memory": {
            name: {"payload": size.payload, "allocated": size.allocated}
            for name, size in manager.memory().items()
        },
        "ok": all(
            layer["fp32_vs_transformers"] <= EXACT_TOLERANCE
            and layer["formats_vs_oracle"] <= FORMAT_TOLERANCE
            for layer in layers
        ),
    }


def _blocks(model: Any, config: CacheConfig) -> list[AttentionSubBlock]:
    return [
        AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
        for layer_idx, layer in enumerate(model.model.layers)
    ]


def _run_cached(
    blocks: list[AttentionSubBlock],
    config: CacheConfig,
    recorded: list[list[RecordedLayer]],
    recorder: SelectionRecorder | None = None,
) -> tuple[list[list[torch.Tensor]], KVCacheManager]:
    """Each layer's outputs per sequence, for one batched prefill and then decode steps."""
    manager = KVCacheManager(config, max_requests=len(LENGTHS), num_blocks=8)
    slots = [manager.open_request() for _ in LENGTHS]
    parts: list[list[list[torch.Tensor]]] = [[[] for _ in LENGTHS] for _ in blocks]
    before, after = [0] * len(LENGTHS), list(PREFILL)
    while before != list(LENGTHS):
        plan = prepare_forward(manager, slots, before, after)
        counts = [end - start for start, end in zip(before, after, strict=True)]
        for layer_idx, block in enumerate(blocks):
            rows = [
                sequence[layer_idx].hidden[start:end]
                for sequence, start, end in zip(recorded, before, after, strict=True)
            ]
            handle = manager.acquire(layer_idx, plan)
            if recorder is not None:
                handle = recorder.watch(handle)
            output = block(torch.cat(rows), handle)
            for sequence_idx, part in enumerate(output.split(counts)):
                parts[layer_idx][sequence_idx].append(part)
        before, after = after, [min(n + 1, end) for n, end in zip(after, LENGTHS, strict=True)]
    manager.check_integrity()
    return [[torch.cat(part) for part in sequences] for sequences in parts], manager


def _oracle(
    block: AttentionSubBlock, recorded: RecordedLayer, manager: KVCacheManager
) -> torch.Tensor:
    rope = manager.rope_tables[block.layer.rope_base]
    inputs = block.project(recorded.hidden, torch.arange(len(recorded.hidden)), rope)
    dense = dense_layer(
        block.layer.attention_type, inputs, block.cache_weights, rope, manager.config
    )
    return block.project_output(dense.output)


def _error(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest output."""
    scale = max(float(output.abs().max()) for output in theirs)
    return max(float((a - b).abs().max()) / scale for a, b in zip(mine, theirs, strict=True))
