"""`dsv4 demo --save`: saves a request of a small random model for `dsv4 inspect`."""

from pathlib import Path
from typing import Any

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.config import CacheConfig
from dsv4.formats import IndexFormatName, KVFormatName
from dsv4.model.attention import AttentionSubBlock
from dsv4.model.random_hf import RecordedLayer, random_hf_model, record_attention
from dsv4.tools.inspector.selections import RUN_FILES, SelectionRecorder

LENGTH, PREFILL = 300, 260


def keep_run(
    folder: Path, *, kv_format: KVFormatName, index_format: IndexFormatName, seed: int
) -> None:
    """Save a request in the given formats, its selections, and the same request in bf16."""
    model = random_hf_model(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    recorded = record_attention(model, torch.randint(0, 128, (LENGTH,), generator=generator))
    recorder = SelectionRecorder(slot=0)
    chosen = CacheConfig.from_hf(model.config, kv_format=kv_format, index_format=index_format)
    plain = CacheConfig.from_hf(model.config, kv_format="bf16", index_format="bf16")
    folder.mkdir(parents=True, exist_ok=True)
    _run(model, chosen, recorded, recorder).save_request(0, folder / RUN_FILES.request)
    recorder.save(folder / RUN_FILES.selections)
    _run(model, plain, recorded).save_request(0, folder / RUN_FILES.against)


def _run(
    model: Any,
    config: CacheConfig,
    recorded: list[RecordedLayer],
    recorder: SelectionRecorder | None = None,
) -> KVCacheManager:
    """Run the attention layers of one request: a prefill, then decode steps."""
    manager = KVCacheManager(config, max_requests=1, num_blocks=8)
    slot = manager.open_request()
    blocks = [
        AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
        for layer_idx, layer in enumerate(model.model.layers)
    ]
    starts = [0, *range(PREFILL, LENGTH)]
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        plan = prepare_forward(manager, [slot], [start], [end])
        for layer_idx, block in enumerate(blocks):
            handle = manager.acquire(layer_idx, plan)
            watched = handle if recorder is None else recorder.watch(handle)
            block(recorded[layer_idx].hidden[start:end], watched)
    return manager
