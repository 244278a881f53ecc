"""`dsv4 demo --save`: saves a request of random projections for `dsv4 inspect`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import IndexFormatName, KVFormatName
from dsv4.testing import model_projections, model_weights, take_rows
from dsv4.tools.inspector.selections import RUN_FILES, SelectionRecorder

LENGTH, PREFILL = 300, 260


def keep_run(
    folder: Path, *, kv_format: KVFormatName, index_format: IndexFormatName, seed: int
) -> None:
    """Save a request in the given formats, its selections, and the same request in bf16."""
    recorder = SelectionRecorder(slot=0)
    chosen = CacheConfig.tiny(kv_format=kv_format, index_format=index_format)
    plain = CacheConfig.tiny(kv_format="bf16", index_format="bf16")
    folder.mkdir(parents=True, exist_ok=True)
    _run(chosen, seed, recorder).save_request(0, folder / RUN_FILES.request)
    recorder.save(folder / RUN_FILES.selections)
    _run(plain, seed).save_request(0, folder / RUN_FILES.against)


def _run(
    config: CacheConfig, seed: int, recorder: SelectionRecorder | None = None
) -> KVCacheManager:
    """Run one request through all layers: a prefill, then decode steps."""
    weights = model_weights(config, seed=seed, draw=_draw)
    tokens = model_projections(config, LENGTH, seed=seed + config.num_layers, draw=_draw)
    manager = KVCacheManager(config, max_requests=1, num_blocks=8)
    slot = manager.open_request()
    starts = [0, *range(PREFILL, LENGTH)]
    for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
        plan = prepare_forward(manager, [slot], [start], [end])
        for layer_idx in range(config.num_layers):
            handle = manager.acquire(layer_idx, plan)
            watched = handle if recorder is None else recorder.watch(handle)
            watched.forward(take_rows(tokens[layer_idx], slice(start, end)), weights[layer_idx])
    return manager


def _draw(shape: Sequence[int], *, generator: torch.Generator) -> Tensor:
    """Draw numbers of mean 0 and variance 1 with the same bits on every CPU, unlike `randn`."""
    uniform = torch.randint(-(2**15), 2**15 + 1, (12, *shape), generator=generator)
    return uniform.sum(dim=0) / 2**16
