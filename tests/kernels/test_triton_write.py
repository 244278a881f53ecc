"""The Triton write path stores the reference's bytes: on a GPU, or under Triton's interpreter."""

from dataclasses import dataclass, field

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.testing import (
    join_rows,
    model_projections,
    model_weights,
    move_to,
    poison,
    take_rows,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWA, CSA, HCA = (0,), (4,), (128,)
# Each step is rows of (sequence, tokens): chunks, single tokens and several at once.
SHORT = [[(0, 5), (1, 1)], [(1, 3), (0, 1)], [(0, 2), (1, 1)]]
OVER_THE_WINDOW = [[(0, 127), (1, 2)], [(0, 1), (1, 1)], [(1, 126), (0, 1)]]


@dataclass(frozen=True)
class Case:
    """A schedule, its choices, the steps to take and the inputs' dtype."""

    name: str
    ratios: tuple[int, ...]
    choices: dict = field(default_factory=dict)
    steps: list = field(default_factory=lambda: SHORT)
    dtype: torch.dtype = torch.float32
    scale: float = 1.0

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("swa over the window", SWA, steps=[[(0, 125)], [(0, 1)], [(0, 4)], [(0, 1)]]),
    Case("csa", CSA),
    Case("csa bf16 inputs", CSA, dtype=torch.bfloat16),
    Case("csa verify", CSA, {"drafts_per_step": 2}, [[(0, 3)], [(0, 3), (1, 2)], [(0, 3), (1, 3)]]),
    Case("csa bf16 tails", CSA, {"tail_dtype": "bfloat16"}),
    Case("csa without hadamard", CSA, {"index_hadamard": False}),
    Case("csa global scale", CSA, {"index_format": "nvfp4", "index_global_scale": 0.01}),
    Case("csa tiny values", CSA, scale=1e-20),
    Case("csa huge values", CSA, scale=1e18),
    Case("csa zeros", CSA, scale=0.0),
    Case("hca over the window", HCA, steps=OVER_THE_WINDOW),
    Case("hca bf16", HCA, {"tail_dtype": "bfloat16", "kv_format": "bf16"}, OVER_THE_WINDOW,
         torch.bfloat16),
    *(Case(f"swa {name}", SWA, {"kv_format": name}) for name in KV_FORMATS),
    *(Case(f"csa {name} keys", CSA, {"index_format": name}) for name in INDEX_FORMATS),
]  # fmt: skip


def run(case: Case, *, backend: str, device: str, in_parts: bool = False) -> KVCacheManager:
    """All steps of a case; padding rows of NaN between the real ones."""
    config = CacheConfig.tiny(compress_ratios=case.ratios, **case.choices)
    manager = KVCacheManager(
        config, max_requests=4, num_blocks=6, max_forward_tokens=256, device=device,
        backend=backend,
    )  # fmt: skip
    poison(manager)
    slots = [manager.open_request() for _ in range(3)][1:]
    lengths = [0, 0]
    weights = [move_to(device, layer) for layer in model_weights(config, seed=0)]
    sequences = [
        [scaled(layer, case.scale) for layer in layers]
        for layers in (model_projections(config, 160, seed=s, dtype=case.dtype) for s in (10, 20))
    ]
    for step in case.steps:
        rows = [(slots[s], sequences[s], lengths[s], lengths[s] + count) for s, count in step]
        plan = prepare_forward(
            manager,
            [rows[0][0], -1, *(row[0] for row in rows[1:])],
            [rows[0][2], 0, *(row[2] for row in rows[1:])],
            [rows[0][3], 1, *(row[3] for row in rows[1:])],
        )
        for layer_idx in range(config.num_layers):
            parts = [take_rows(row[1][layer_idx], slice(row[2], row[3])) for row in rows]
            padding = scaled(take_rows(rows[0][1][layer_idx], slice(0, 1)), torch.nan)
            inputs = move_to(device, join_rows([parts[0], padding, *parts[1:]]))
            handle = manager.acquire(layer_idx, plan)
            (write_in_parts if in_parts else type(handle).write)(handle, inputs, weights[layer_idx])
        for sequence, count in step:
            lengths[sequence] += count
    return manager


def write_in_parts(handle, inputs, weights) -> None:
    handle.write_swa(inputs.kv, weights.kv_norm)
    if inputs.compressor is not None:
        index = inputs.indexer
        handle.flush_compression(
            *inputs.compressor,
            weights.compressor,
            index_kv=None if index is None else index.kv,
            index_gate=None if index is None else index.gate,
            index_weights=weights.indexer,
        )


def scaled(value, scale: float):
    if isinstance(value, torch.Tensor):
        return value * scale
    return None if value is None else type(value)(*(scaled(part, scale) for part in value))


def assert_same_bytes(got: KVCacheManager, expected: KVCacheManager) -> None:
    """Equal in all that is kept; `arrivals` is back at zero.

    `pooled` is scratch, and `plan_buffers` also carries changes of the block table to a GPU.
    """
    for name, tensor in expected.tensors().items():
        if name in ("pooled", "plan_buffers"):
            continue
        assert torch.equal(got.tensors()[name].cpu(), tensor), f"{name} differs"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes(case):
    expected = run(case, backend="reference", device="cpu")
    assert_same_bytes(run(case, backend="triton", device=DEVICE), expected)


@pytest.mark.parametrize(
    "case",
    [
        Case("csa", CSA, steps=[[(0, 5), (1, 1)], [(0, 1), (1, 1)], [(1, 1), (0, 2)]]),
        Case("hca", HCA, steps=[[(0, 126)], [(0, 1)], [(0, 1)]]),
    ],
    ids=str,
)
def test_window_and_entries_apart_are_the_same_bytes(case):
    expected = run(case, backend="reference", device="cpu")
    assert_same_bytes(run(case, backend="triton", device=DEVICE, in_parts=True), expected)


def test_strided_inputs():
    config = CacheConfig.tiny(compress_ratios=CSA)
    (weights,), (inputs,) = model_weights(config, seed=0), model_projections(config, 6, seed=1)
    managers = []
    for backend, device in (("reference", "cpu"), ("triton", DEVICE)):
        manager = KVCacheManager(
            config, max_requests=1, num_blocks=1, backend=backend, device=device
        )
        plan = prepare_forward(manager, [manager.open_request()], [0], [6])
        moved = move_to(device, inputs)
        wide = torch.cat((moved.kv, moved.kv), dim=1)[:, : config.head_dim]
        columns = moved.compressor.gate.t().contiguous().t()
        strided = moved._replace(kv=wide, compressor=moved.compressor._replace(gate=columns))
        assert not strided.kv.is_contiguous() and not columns.is_contiguous()
        manager.acquire(0, plan).write(strided, move_to(device, weights))
        managers.append(manager)
    assert_same_bytes(managers[1], managers[0])


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="backend 'triton': expected cuda, got cpu"):
        KVCacheManager(CacheConfig.tiny(), max_requests=1, num_blocks=1, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_at_the_real_width(ratio, dtype):
    config = CacheConfig.v4_flash(compress_ratios=(ratio,), num_query_heads=1)
    steps = [[300, 5, 1], [1, 1, 129], [1, 2, 1], [130, 1, 1], [1, 1, 1]]
    weights = model_weights(config, seed=0)
    sequences = [model_projections(config, 450, seed=s, dtype=dtype) for s in (1, 2, 3)]
    managers = []
    for backend, device in (("reference", "cpu"), ("triton", "cuda")):
        manager = KVCacheManager(
            config, max_requests=3, num_blocks=8, backend=backend, device=device
        )
        poison(manager)
        slots = [manager.open_request() for _ in range(3)]
        before = [0, 0, 0]
        for counts in steps:
            after = [b + c for b, c in zip(before, counts, strict=True)]
            plan = prepare_forward(manager, slots, before, after)
            parts = [
                take_rows(layers[0], slice(b, a))
                for layers, b, a in zip(sequences, before, after, strict=True)
            ]
            inputs = move_to(device, join_rows(parts))
            manager.acquire(0, plan).write(inputs, move_to(device, weights[0]))
            before = after
        managers.append(manager)
    assert_same_bytes(managers[1], managers[0])


@pytest.mark.gpu
def test_reruns_are_bitwise_equal():
    case = Case("rerun", (0, 4, 128), steps=[[(0, 130), (1, 4)], [(0, 1), (1, 1)]])
    first = run(case, backend="triton", device="cuda")
    for _ in range(20):
        assert_same_bytes(run(case, backend="triton", device="cuda"), _on_cpu(first))


def _on_cpu(manager):
    class Moved:
        @staticmethod
        def tensors():
            return {name: tensor.cpu() for name, tensor in manager.tensors().items()}

    return Moved
