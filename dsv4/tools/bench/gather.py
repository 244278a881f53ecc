"""`dsv4 bench gather`: dense rows of one layer, by graph replay."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.config import CacheConfig
from dsv4.kernels import ops
from dsv4.kernels.contracts import Gathered
from dsv4.tools.bench import requests, timing
from dsv4.tools.bench.environment import require_cuda
from dsv4.tools.console import track

DEVICE = "cuda"
NUM_LAYERS = 8  # rotating pools: more than the L2 of any GPU holds
NUM_REQUESTS, REQUEST_TOKENS = 32, 32768  # 8192 CSA entries each
NUM_POOL_ROWS = NUM_REQUESTS * REQUEST_TOKENS // 4
WINDOW_BATCH, WINDOW_TOKENS = 256, 200
LISTED = ((32, 512), (128, 512), (256, 512), (32, 8192))
RECORD_BYTES, DENSE_BYTES, INDEX_BYTES = 576 + 8, 1024, 8  # fp8 rows of V4's width


class _Case(NamedTuple):
    """A gather of a layer, by backend and layer index; list_bytes name one of its rows."""

    name: str
    gather: Callable[[str, int], Gathered]
    num_rows: int
    list_bytes: int = 0


def bench_gather() -> dict[str, Any]:
    """Time gathers, one layer warm and 8 layers rotating."""
    require_cuda("gather")
    return {"rows": [_measure(case) for case in track(_cases(), "gathers")]}


def _measure(case: _Case) -> dict[str, Any]:
    if not are_same(*(case.gather(name, NUM_LAYERS - 1) for name in ("triton", "reference"))):
        raise RuntimeError(f"{case.name}: the values differ from the reference's; nothing is timed")
    gather = partial(case.gather, "triton")

    def gather_layers() -> None:
        outputs = [gather(layer_idx) for layer_idx in range(NUM_LAYERS)]
        del outputs  # only now, so that no layer writes into another's output

    num_bytes = case.num_rows * (RECORD_BYTES + DENSE_BYTES + case.list_bytes)
    rotating = timing.replay_time(gather_layers) / NUM_LAYERS
    return {
        "gather": case.name, "num_rows": case.num_rows, "bytes": num_bytes,
        "warm_us": timing.time_warm(gather), "rotating_us": rotating,
        "tb_per_s": num_bytes / rotating / 1e6,
        "share_of_copy": timing.floor_us(num_bytes) / rotating,
    }  # fmt: skip


def compressed_handles(*, num_layers: int) -> list[LayerCacheHandle]:
    """Plan a decode step of CSA layers, for requests of `REQUEST_TOKENS` tokens."""
    return _last_step((4,) * num_layers, NUM_REQUESTS, REQUEST_TOKENS)


def _last_step(ratios: Sequence[int], num_requests: int, length: int) -> list[LayerCacheHandle]:
    """Plan the step that takes requests to a length, on random bytes."""
    config = CacheConfig.v4_flash(compress_ratios=tuple(ratios), num_query_heads=1)
    chunk = max(length, 8192)
    manager = requests.manager_for(config, num_requests, length, device=DEVICE, chunk=chunk)
    manager.paged.storage.random_(0, requests.FINITE_BYTES)
    manager.state.storage.random_(0, requests.FINITE_BYTES)
    slots = requests.open_requests(manager, [length - 1] * num_requests)
    return requests.acquire_layers(manager, requests.plan_tokens(manager, slots))


def random_rows(shape: tuple[int, int]) -> Tensor:
    """Draw flat rows of a layer of `compressed_handles`."""
    return torch.randint(NUM_POOL_ROWS, shape, device=DEVICE)


def _cases() -> list[_Case]:
    """List gathers of rows, of all entries, and of the windows of SWA layers, for large batches."""
    handles = compressed_handles(num_layers=NUM_LAYERS)
    windows = _last_step((0,) * NUM_LAYERS, WINDOW_BATCH, WINDOW_TOKENS)
    rows = {shape: [random_rows(shape) for _ in handles] for shape in LISTED}

    def gather_listed(shape: tuple[int, int], backend: str, layer_idx: int) -> Gathered:
        memory = handles[layer_idx].memory
        return ops.gather_compressed_kv(memory, rows[shape][layer_idx], backend=backend)

    def gather_all(backend: str, layer_idx: int) -> Gathered:
        memory, tokens = handles[layer_idx].memory, handles[layer_idx].tokens
        return ops.gather_all_compressed_kv(
            memory, tokens, max_entries=REQUEST_TOKENS // 4, backend=backend
        )

    def gather_windows(backend: str, layer_idx: int) -> Gathered:
        handle = windows[layer_idx]
        return ops.gather_swa_kv(handle.memory, handle.tokens, backend=backend)

    all_name = f"all entries of {NUM_REQUESTS} requests of {REQUEST_TOKENS} tokens"
    num_window_rows = WINDOW_BATCH * windows[0].window.window
    return [
        *(
            _Case(f"{n} x {m} listed rows", partial(gather_listed, (n, m)), n * m, INDEX_BYTES)
            for n, m in LISTED
        ),
        _Case(all_name, gather_all, NUM_POOL_ROWS),
        _Case(f"windows of {WINDOW_BATCH} requests", gather_windows, num_window_rows),
    ]


def are_same(got: Gathered, expected: Gathered) -> bool:
    """Return whether two gathers gave the same rows, bit for bit."""
    same_bits = torch.equal(got.values.view(torch.int16), expected.values.view(torch.int16))
    return same_bits and torch.equal(got.is_present, expected.is_present)
