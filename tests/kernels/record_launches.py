"""Print as JSON the launches that serving makes and warm-up has not compiled.

Launches are recorded and not run, so that no GPU is needed. Run as a script, without the
interpreter: `python -m tests.kernels.record_launches`.
"""

import dataclasses
import json
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from dsv4 import CacheConfig, KVCacheManager, prepare_forward, warm_up
from dsv4.kernels.contracts import Selection
from dsv4.kernels.triton import (
    acceptance,
    attention,
    candidates,
    checkpoint,
    chunk_scores,
    dense_rows,
    flush_write,
    gather,
    indexer,
    launch,
    rope,
    topk,
)
from dsv4.kernels.triton.hopper import attention as hopper
from dsv4.kernels.triton.hopper import dense_attention, index_scores
from dsv4.model.attention import forward_layer
from dsv4.testing import model_projections, model_weights, take_rows
from tests.distributed.local import Group
from tests.kernels.serving import LONGEST, Server, attend, serve

BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class LaunchKeys:
    """Replacement of a kernel that records its launches by the key under which Triton compiles."""

    def __init__(self, kernel: JITFunction, keys: dict[str, dict]) -> None:
        self.name = kernel.__name__
        self.keys = keys
        self.names = [p.name for p in kernel.params]
        self.bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs) -> None:
        _, specialization, options = self.bind(*args, **kwargs)
        key = f"{self.name} {specialization} {options}"
        if key not in self.keys:
            self.keys[key] = {
                "kernel": self.name,
                **{n: str(s) for n, s in zip(self.names, specialization, strict=True)},
                **{n: str(o) for n, o in options.items()},
            }


def record_kernels() -> dict[str, dict]:
    """Replace every kernel; their launches fill the returned dict."""
    keys: dict[str, dict] = {}
    make_selection = indexer.empty_selection

    def no_selection(*args: Any, **sizes: Any) -> Selection:
        return Selection(*(each.zero_() for each in make_selection(*args, **sizes)))

    indexer.empty_selection = no_selection  # no kernel writes it
    for module in (
        acceptance, attention, candidates, checkpoint, chunk_scores, dense_attention, dense_rows,
        flush_write, gather, hopper, index_scores, indexer, rope, topk,
    ):  # fmt: skip
        kernels = {n: k for n, k in vars(module).items() if isinstance(k, JITFunction)}
        for name, kernel in kernels.items():
            if name.endswith("_kernel"):
                setattr(module, name, LaunchKeys(kernel, keys))
    return keys


def new_keys(keys: dict[str, dict], warmed: set[str]) -> list[dict]:
    """Launches that were not warmed up, each as its difference from the nearest that was."""
    nearest = []
    for key in keys.keys() - warmed:
        differences = [
            {n: (v, keys[w].get(n)) for n, v in keys[key].items() if keys[w].get(n) != v}
            for w in warmed
        ]
        nearest.append(min(differences, key=len))
    return nearest


def use_triton(manager: KVCacheManager) -> None:
    """Let a manager of the CPU use Triton, which it refuses; nothing is launched here."""
    manager.backend = manager.attention_backend = manager.index_backend = "triton"
    names = {"attention": "triton", "index": "triton"}
    manager._backends = dataclasses.replace(manager._backends, **names)
    manager._backends.by_part[:] = ["triton"]  # of its only device; the planner has the same list
    manager._layers = manager._make_layers()


def serve_one_layer_per_type(
    keys: dict[str, dict], *, longest: int = LONGEST, **sizes: Any
) -> dict:
    keys.clear()
    server = Server(**sizes)
    use_triton(server.manager)
    warm_up(server.manager, server.weights)
    warmed = set(keys)
    serve(server, longest=longest)
    return {"case": f"{sizes}", "warmed": len(warmed), "new": new_keys(keys, warmed)}


def serve_all_layers(keys: dict[str, dict]) -> dict:
    """Run every layer of the model: one that was not warmed up launches as another that was."""
    keys.clear()
    config = CacheConfig.v4_flash(num_query_heads=1, index_num_heads=1)
    manager = KVCacheManager(config, max_requests=1, num_blocks=1)
    use_triton(manager)
    weights = model_weights(config, seed=0)
    inputs = model_projections(config, 3, seed=1, dtype=weights[0].kv_norm.dtype)
    warm_up(manager, weights, dtype=inputs[0].kv.dtype)
    warmed = set(keys)
    plan = prepare_forward(manager, [manager.open_request()], [0], [3])
    for layer_idx, layer in enumerate(inputs):
        handle = manager.acquire(layer_idx, plan)
        handle.write(layer, weights[layer_idx])
        attend(handle, layer, weights[layer_idx].sinks)
    return {"case": "all layers", "warmed": len(warmed), "new": new_keys(keys, warmed)}


def serve_chunks(keys: dict[str, dict], *, is_query_raw: bool) -> dict:
    """Run chunks of 64 heads: too few tokens for dense rows, and enough."""
    keys.clear()
    config = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), num_query_heads=64)
    manager = KVCacheManager(
        config, max_requests=2, num_blocks=8, max_forward_tokens=128, max_request_tokens=1024
    )
    use_triton(manager)
    weights = model_weights(config, seed=0)
    inputs = model_projections(config, 128, seed=1, dtype=torch.bfloat16)
    warm_up(manager, weights, dtype=torch.bfloat16, is_query_raw=is_query_raw)
    warmed = set(keys)
    for count in (2, 3, 40, 100):
        slot = manager.open_request()
        plan = prepare_forward(manager, [slot], [0], [count])
        for layer_idx, layer in enumerate(inputs):
            handle, rows = manager.acquire(layer_idx, plan), take_rows(layer, slice(count))
            handle.write(rows, weights[layer_idx])
            attend(handle, rows, weights[layer_idx].sinks, is_query_raw=is_query_raw)
        manager.free_request(slot)
    assert sum("_attend_dense_kernel" in key for key in keys) == 3, "one for each type of layer"
    return {"case": f"chunks {is_query_raw}", "warmed": len(warmed), "new": new_keys(keys, warmed)}


def serve_rank(keys: dict[str, dict], rank: int) -> dict:
    """Run chunks, steps and decode on a rank of two, from the first tokens on.

    The longest request has more entries than are chosen, but not so many on a rank.
    """
    keys.clear()
    config = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), num_query_heads=64)
    manager = KVCacheManager(
        config, max_requests=8, num_blocks=16, max_forward_tokens=128, max_request_tokens=3000,
        process_group=Group(rank),
    )  # fmt: skip
    use_triton(manager)
    weights = model_weights(config, seed=0)
    inputs = model_projections(config, 128, seed=1, dtype=torch.bfloat16)
    warm_up(manager, weights, dtype=torch.bfloat16)
    warmed = set(keys)
    manager.open_requests(8)
    for counts in ([1] * 8, [3, 1], [2, 90], *[[128]] * 17, [120, 3], [1] * 8):
        before = manager.lengths[: len(counts)]
        plan = prepare_forward(manager, [*range(len(counts))], before, before + counts)
        for layer_idx, layer in enumerate(inputs):
            handle, rows = manager.acquire(layer_idx, plan), take_rows(layer, slice(sum(counts)))
            handle.write(rows, weights[layer_idx])
            attend(handle, rows, weights[layer_idx].sinks)
    assert sum("_attend_dense_kernel" in key for key in keys) > 0
    return {"case": f"rank {rank}", "warmed": len(warmed), "new": new_keys(keys, warmed)}


def attend_few_tokens(keys: dict[str, dict], *, batch_invariant: bool) -> dict:
    """Attend for 64 heads in steps of any size, over any number of entries, on an H200."""
    keys.clear()
    launch.INTERPRETED_MULTIPROCESSORS = 132
    launch.num_multiprocessors.cache_clear()
    config = CacheConfig.v4_flash(compress_ratios=(0, 4, 128), num_query_heads=64)
    manager = KVCacheManager(
        config, max_requests=80, num_blocks=80, max_forward_tokens=80, max_request_tokens=2**20,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    use_triton(manager)
    weights = model_weights(config, seed=0)
    warm_up(manager, weights, dtype=torch.bfloat16)
    warmed = set(keys)
    for count in (1, 2, 5, 16, 17, 33, 67, 80):
        slots = [manager.open_request() for _ in range(count)]
        plan = prepare_forward(manager, slots, [0] * count, [1] * count)
        query = torch.zeros(count, 64, 512, dtype=torch.bfloat16)
        listed = torch.zeros(count, 512, dtype=torch.int64)
        for layer_idx, rows in enumerate((None, listed, None)):
            handle = manager.acquire(layer_idx, plan)
            for num_entries in range(1, 8193, 61):
                attention.attend(query, weights[layer_idx].sinks, handle.memory, rows,
                                 handle.tokens, max_entries=num_entries,
                                 batch_invariant=batch_invariant)  # fmt: skip
        plan.cancel()
        for slot in slots:
            manager.free_request(slot)
    heads = {key["HEADS"] for key in keys.values() if "HEADS" in key and "STAGES" in key}
    assert len(heads) == (1 if batch_invariant else 3), heads
    of_chunks = [each for key, each in keys.items() if "_attend_chunk_kernel" in key]
    assert any("True" in each["IS_SPLIT"] for each in of_chunks) == batch_invariant
    return {
        "case": f"few tokens {batch_invariant}",
        "warmed": len(warmed),
        "new": new_keys(keys, warmed),
    }


def serve_candidates(keys: dict[str, dict]) -> dict:
    """Run layers of V4.1 that publish candidates and choose among them, with many entries."""
    keys.clear()
    config = CacheConfig.v41_flash(
        compress_ratios=(0, 2, 2, 1, 1), kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4), candidate_source_layer_id=3, num_query_heads=1,
    )  # fmt: skip
    manager = KVCacheManager(
        config, max_requests=4, num_blocks=8, max_forward_tokens=64, max_request_tokens=2**20
    )
    use_triton(manager)
    weights = model_weights(config, seed=0)
    inputs = model_projections(config, 64, seed=1, dtype=torch.bfloat16)
    warm_up(manager, weights, dtype=torch.bfloat16)
    warmed = set(keys)
    for counts in ([1], [1, 1, 1], [2], [40], [40, 1]):
        slots, chosen = [manager.open_request() for _ in counts], {}
        plan = prepare_forward(manager, slots, [0] * len(counts), counts)
        for layer_idx, layer in enumerate(inputs):
            handle, rows = manager.acquire(layer_idx, plan), take_rows(layer, slice(sum(counts)))
            forward_layer(handle, rows, weights[layer_idx], chosen)
            if rows.indexer is None:
                continue
            source = chosen.get(handle.layer.candidates_of)
            for num_entries in (512, 513, *(2**n + each for n in range(10, 20) for each in (0, 1))):
                indexer.select_entries(
                    rows.indexer.query, rows.indexer.head_weights, handle.memory, handle.tokens,
                    max_entries=num_entries // handle.layer.ratio,
                    candidates=None if source is None else source.blocks,
                )  # fmt: skip
        manager.free_requests(slots)
    assert sum("_largest_kernel" in key for key in keys) > 0
    return {"case": "candidates", "warmed": len(warmed), "new": new_keys(keys, warmed)}


def main() -> None:
    keys = record_kernels()
    print(json.dumps(serve_one_layer_per_type(keys, drafts_per_step=0, max_requests=7)))
    print(json.dumps(serve_one_layer_per_type(keys, drafts_per_step=2, index_num_heads=64)))
    v41 = {"model": "v41_flash", "drafts_per_step": 2, "max_requests": 7, "longest": 1100}
    print(json.dumps(serve_one_layer_per_type(keys, **v41)))
    print(json.dumps(serve_all_layers(keys)))
    for is_query_raw in (False, True):
        print(json.dumps(serve_chunks(keys, is_query_raw=is_query_raw)))
    for rank in (0, 1):
        print(json.dumps(serve_rank(keys, rank)))
    for batch_invariant in (False, True):
        print(json.dumps(attend_few_tokens(keys, batch_invariant=batch_invariant)))
    print(json.dumps(serve_candidates(keys)))


if __name__ == "__main__":
    main()
