"""The Triton write path stores the reference's bytes: on a GPU, or under Triton's interpreter."""

import random
from dataclasses import dataclass, field
from math import inf, nan

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.formats import INDEX_FORMATS, KV_FORMATS
from dsv4.kernels.backends import check_backend
from dsv4.kernels.triton import flush_write
from dsv4.testing import (
    join_rows,
    model_projections,
    model_weights,
    move_to,
    poison,
    take_rows,
)
from tests.kernels.serving import write_in_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWA, CSA, HCA = (0,), (4,), (128,)
# A step is a list of (sequence, tokens): chunks, single tokens and several at once.
SHORT = [[(0, 5), (1, 1)], [(1, 3), (0, 1)], [(0, 2), (1, 1)]]
TO_28 = [[(0, 22), (1, 3)], [(0, 1), (1, 1)], [(0, 1), (1, 4)], [(0, 4)]]
ONE_WINDOW = [[(0, 126), (1, 127)], [(0, 1), (1, 1)], [(0, 1)]]
NONE_OF_ONE = [
    [(0, 126), (1, 0)], [(0, 0), (1, 127)], [(2, 3), (0, 0), (1, 7)], [(1, 9), (2, 2), (0, 0)],
]  # fmt: skip
OVER_THE_WINDOW = [[(0, 127), (1, 2)], [(0, 1), (1, 1)], [(1, 126), (0, 1)]]
AROUND_GROUPS = [
    [(0, 13), (1, 2)], [(0, 3), (1, 30)], [(0, 17), (1, 1)], [(0, 3), (1, 3)], [(0, 95), (1, 3)],
    [(0, 3), (1, 90)],
]  # fmt: skip
OVER_A_GROUP = [[(0, 100), (1, 20)], [(0, 21), (1, 21)], [(0, 21), (1, 90)], [(0, 15), (1, 21)]]
# Special values of one window after another. "no gate": all of a channel's gates are -inf.
SPECIALS = ("few gates", "nan", "clean", "clean", "no gate", "infinite kv")


@dataclass(frozen=True)
class Case:
    """A schedule, its choices, its steps, and its inputs' dtype, scale and special values."""

    name: str
    ratios: tuple[int, ...]
    choices: dict = field(default_factory=dict)
    steps: list = field(default_factory=lambda: SHORT)
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    has_specials: bool = False

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
    Case("csa denormal values", CSA, scale=1e-40),
    Case("csa nan and infinity", CSA, steps=TO_28, has_specials=True),
    Case("csa nan and infinity in bf16", CSA, {"tail_dtype": "bfloat16"}, TO_28, torch.bfloat16,
         has_specials=True),
    Case("swa denormal values", SWA, scale=1e-40),
    Case("swa nan and infinity", SWA, has_specials=True),
    Case("hca denormal values", HCA, steps=ONE_WINDOW, scale=1e-40),
    Case("hca nan and infinity", HCA, steps=ONE_WINDOW, has_specials=True),
    Case("hca over the window", HCA, steps=OVER_THE_WINDOW),
    Case("hca chunks and steps around groups", HCA, {"drafts_per_step": 2}, AROUND_GROUPS),
    Case("hca steps of more than a group", HCA, {"drafts_per_step": 20}, OVER_A_GROUP),
    Case("hca bf16", HCA, {"tail_dtype": "bfloat16", "kv_format": "bf16"}, OVER_THE_WINDOW,
         torch.bfloat16),
    Case("csa rows and keys that are no power of two", CSA,
         {"head_dim": 104, "rope_dim": 24, "kv_format": "fp8_entry_scale", "index_head_dim": 96,
          "index_hadamard": False}),
    Case("hca more rotated channels than a group has", HCA,
         {"head_dim": 192, "rope_dim": 128, "index_head_dim": 128, "sliding_window": 100},
         ONE_WINDOW),
    *(Case(f"{name}, a request without tokens", ratios, steps=NONE_OF_ONE)
      for name, ratios in (("swa", SWA), ("csa", CSA), ("hca", HCA))),
    *(Case(f"swa {name}", SWA, {"kv_format": name}) for name in KV_FORMATS),
    *(Case(f"csa {name} keys", CSA, {"index_format": name}) for name in INDEX_FORMATS),
]  # fmt: skip


def new_manager(config: CacheConfig, **where: str) -> KVCacheManager:
    """A manager of the one size whose kernels these tests compile: sizes decide alignments."""
    return KVCacheManager(config, max_requests=4, num_blocks=6, max_forward_tokens=256, **where)


def run(case: Case, *, backend: str, device: str, in_parts: bool = False) -> KVCacheManager:
    """Run all steps of a case, with padding rows of NaN between the real ones."""
    config = CacheConfig.tiny(compress_ratios=case.ratios, **case.choices)
    manager = new_manager(config, backend=backend, device=device)
    poison(manager)
    slots = [manager.open_request() for _ in range(4)][1:]
    lengths = [0, 0, 0]
    weights = [move_to(device, layer) for layer in model_weights(config, seed=0)]
    sequences = [
        [scaled(layer, case.scale) for layer in layers]
        for layers in (
            model_projections(config, 160, seed=s, dtype=case.dtype) for s in (10, 20, 30)
        )
    ]
    if case.has_specials:
        sequences = spoil(sequences)
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


def scaled(value, scale: float):
    if isinstance(value, torch.Tensor):
        return value * scale
    return None if value is None else type(value)(*(scaled(part, scale) for part in value))


def spoil(sequences: list) -> list:
    return [[with_specials(layer, s) for layer in layers] for s, layers in enumerate(sequences)]


def with_specials(layer, shift: int):
    """Projections whose windows have SPECIALS one after another, from number `shift` on."""
    choose = random.Random(shift)
    ratio = 1 if layer.compressor is None else 128 if layer.indexer is None else 4

    def spoiled_rows(kv):
        kv = kv.clone()
        for row in range(len(kv)):
            kind = SPECIALS[(row + shift) % len(SPECIALS)]
            if kind in ("nan", "infinite kv"):
                special = nan if kind == "nan" else choose.choice((inf, -inf))
                kv[row, choose.randrange(kv.shape[1])] = special
        return kv

    def spoiled(inputs):
        if inputs is None:
            return None
        kv, gate = inputs.kv.clone(), inputs.gate.clone()
        for first in range(0, len(kv), ratio):
            kind = SPECIALS[(first // ratio + shift) % len(SPECIALS)]
            spoil_window(kind, kv[first : first + ratio], gate[first : first + ratio], choose)
        return inputs._replace(kv=kv, gate=gate)

    return layer._replace(
        kv=spoiled_rows(layer.kv),
        compressor=spoiled(layer.compressor),
        indexer=spoiled(layer.indexer),
    )


def spoil_window(kind: str, kv: torch.Tensor, gate: torch.Tensor, choose: random.Random) -> None:
    row, (a, b, c) = choose.randrange(len(kv)), choose.sample(range(kv.shape[1]), 3)
    if kind == "few gates":
        generator = torch.Generator().manual_seed(a)
        gate[torch.rand(gate.shape, generator=generator) < 0.3] = -inf
    elif kind == "nan":
        kv[row, a] = gate[row, b] = nan
    elif kind == "no gate":
        gate[:, a] = -inf
        gate[row, b] = inf
    elif kind == "infinite kv":
        kv[row, a], kv[row, b], kv[:, c] = inf, -inf, inf


def assert_same_bytes(got: KVCacheManager, expected: KVCacheManager) -> None:
    """Compare every byte that is kept; `arrivals` must be zero again.

    `pooled`, `index_scratch` and `partials` are scratch, and `plan_buffers` also carries changes of
    the block table to a GPU.
    """
    for name, tensor in expected.tensors().items():
        if name in ("pooled", "index_scratch", "partials", "plan_buffers"):
            continue
        same = got.tensors()[name].to(tensor.device)
        pair = [x.reshape(-1).view(torch.uint8) for x in (same, tensor)]
        assert torch.equal(*pair), f"{name} differs"


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
        manager = new_manager(config, backend=backend, device=device)
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


def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_backend("triton", torch.device("cuda"))
    check_backend("triton", torch.device("cuda:0"))
    with pytest.raises(ValueError, match="expected the current one, cuda:0, got cuda:1"):
        check_backend("triton", torch.device("cuda:1"))
    check_backend("reference", torch.device("cuda:1"))


def wide_config(ratios: tuple[int, ...], **choices) -> CacheConfig:
    return CacheConfig.v4_flash(
        compress_ratios=ratios, num_query_heads=1, index_num_heads=1, **choices
    )


def run_wide(config, sequences, *, backend: str, device: str) -> KVCacheManager:
    """Chunks, steps and single tokens of three requests at V4-Flash's width."""
    manager = KVCacheManager(config, max_requests=3, num_blocks=8, backend=backend, device=device)
    poison(manager)
    weights = [move_to(device, layer) for layer in model_weights(config, seed=0)]
    slots = [manager.open_request() for _ in range(3)]
    before = [0, 0, 0]
    for counts in [[300, 5, 1], [1, 1, 129], [1, 2, 1], [130, 1, 1], [1, 1, 1]]:
        after = [b + c for b, c in zip(before, counts, strict=True)]
        plan = prepare_forward(manager, slots, before, after)
        for layer_idx, layer_weights in enumerate(weights):
            parts = [
                take_rows(layers[layer_idx], slice(b, a))
                for layers, b, a in zip(sequences, before, after, strict=True)
            ]
            inputs = move_to(device, join_rows(parts))
            manager.acquire(layer_idx, plan).write(inputs, layer_weights)
        before = after
    return manager


def wide_sequences(config, dtype=torch.float32, scale: float = 1.0) -> list:
    sequences = (model_projections(config, 450, seed=s, dtype=dtype) for s in (1, 2, 3))
    return [[scaled(layer, scale) for layer in layers] for layers in sequences]


def assert_reference_bytes(config, sequences) -> None:
    expected = run_wide(config, sequences, backend="reference", device="cpu")
    assert_same_bytes(run_wide(config, sequences, backend="triton", device="cuda"), expected)


SCALES = {"random": 1.0, "tiny": 1e-20, "huge": 1e18, "denormal": 1e-40, "zero": 0.0}
FORMATS = [("fp8", "mxfp4"), ("fp8_entry_scale", "nvfp4"), ("bf16", "fp8")]


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_bytes_at_the_real_width(ratio, dtype, scale):
    config = wide_config((ratio,))
    assert_reference_bytes(config, wide_sequences(config, dtype, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("formats", FORMATS, ids=" ".join)
def test_nan_and_infinity_at_the_real_width(ratio, formats):
    config = wide_config((ratio,), kv_format=formats[0], index_format=formats[1])
    assert_reference_bytes(config, spoil(wide_sequences(config)))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1e-40], ids=str)
@pytest.mark.parametrize("formats", FORMATS[1:], ids=" ".join)
def test_other_formats_at_the_real_width(formats, scale):
    config = wide_config((0, 4, 128), kv_format=formats[0], index_format=formats[1])
    assert_reference_bytes(config, wide_sequences(config, scale=scale))


@pytest.mark.gpu
def test_reruns_are_bitwise_equal():
    config = wide_config((0, 4, 128))
    sequences = wide_sequences(config, torch.bfloat16)
    first = run_wide(config, sequences, backend="triton", device="cuda")
    for _ in range(20):
        assert_same_bytes(run_wide(config, sequences, backend="triton", device="cuda"), first)


class Pair:
    """Two managers on a GPU that run the same forwards: the reference's and Triton's."""

    def __init__(self, config: CacheConfig, **sizes: int) -> None:
        self.managers = [
            KVCacheManager(config, device="cuda", backend=backend, **sizes)
            for backend in ("reference", "triton")
        ]
        for manager in self.managers:
            poison(manager)
        self.weights = [move_to("cuda", layer) for layer in model_weights(config, seed=0)]
        self.pool = [
            move_to("cuda", layer)
            for layer in model_projections(config, 2048, seed=1, dtype=torch.bfloat16)
        ]
        self.generator = torch.Generator("cuda").manual_seed(2)

    def open(self, count: int) -> list[int]:
        slots = [[m.open_request() for _ in range(count)] for m in self.managers]
        assert slots[0] == slots[1]
        return slots[0]

    def free(self, slots: list[int]) -> None:
        for manager in self.managers:
            for slot in slots:
                manager.free_request(slot)

    def forward(self, counts: dict[int, int]) -> None:
        """Run the same tokens, drawn from the pool, in both."""
        slots, num_tokens = list(counts), sum(counts.values())
        tokens = torch.randint(2048, (num_tokens,), generator=self.generator, device="cuda")
        inputs = [take_rows(layer, tokens) for layer in self.pool]
        for manager in self.managers:
            before = [int(manager.lengths[slot]) for slot in slots]
            after = [b + counts[slot] for b, slot in zip(before, slots, strict=True)]
            plan = prepare_forward(manager, slots, before, after)
            for layer_idx, layer in enumerate(inputs):
                manager.acquire(layer_idx, plan).write(layer, self.weights[layer_idx])

    def compare(self) -> None:
        assert_same_bytes(self.managers[1], self.managers[0])


@pytest.mark.gpu
@pytest.mark.parametrize("drafts_per_step", [0, 2, 20])
def test_chunks_of_any_size_from_any_position(drafts_per_step):
    starts = (0, 1, 2, 3, 4, 5, 7, 8, 99, 120, 126, 127, 128, 129, 130, 131, 255, 256)
    sizes = (*range(1, 18), 61, 120, *range(124, 135), 200, *range(253, 260), 300, 383, 384, 400)
    pair = Pair(  # with the alignments of `run_wide`, and so its kernels
        wide_config((0, 4, 128), drafts_per_step=drafts_per_step), max_requests=len(starts) + 1,
        num_blocks=4 * len(starts), max_request_tokens=1024,
    )  # fmt: skip
    choose = random.Random(0)
    for size in sizes:
        slots = pair.open(len(starts))
        pair.forward(dict(zip(slots, starts, strict=True)))
        pair.forward(dict.fromkeys(choose.sample(slots, len(slots)), size))
        pair.forward(dict.fromkeys(choose.sample(slots, len(slots)), 1))
        pair.compare()
        pair.free(slots)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_chunks_and_steps_in_any_order(seed):
    pair = Pair(
        wide_config((0, 4, 128), drafts_per_step=2), max_requests=12, num_blocks=400,
        max_request_tokens=8192,
    )  # fmt: skip
    choose, slots = random.Random(seed), pair.open(12)
    for step in range(40):
        chosen = choose.sample(slots, choose.randint(1, 12))
        kinds = [choose.choice((0, 1, 1, 2, 3, choose.randint(1, 400))) for _ in chosen]
        pair.forward(dict(zip(chosen, kinds, strict=True)))
        if step % 10 == 9:
            pair.compare()


@pytest.mark.gpu
def test_pools_beyond_two_gigabytes():
    config = wide_config((4, 128))
    sizes = {"max_requests": 1, "num_blocks": 1, "max_request_tokens": 1024}
    one = KVCacheManager(config, **sizes).tensors()
    num_blocks = 2**31 // one["blocks"].shape[1] + 20
    max_requests = 2**31 // one["slots"].shape[1] + 4
    pair = Pair(config, max_requests=max_requests, num_blocks=num_blocks, max_request_tokens=1024)
    for manager in pair.managers:
        manager._books.allocator.acquire(num_blocks - 18)  # the rest lies beyond 2^31
        assert manager.tensors()["blocks"].numel() > 2**31 < manager.tensors()["slots"].numel()
    slots = pair.open(max_requests)[-3:]
    for counts in ([700, 130, 3], [1, 1, 1], [5, 300, 128], [1, 1, 1]):
        pair.forward(dict(zip(slots, counts, strict=True)))
    table = pair.managers[1]._books.requests.block_table[slots]
    first_byte = int(table[table >= 0].min()) * one["blocks"].shape[1]
    assert first_byte >= 2**31 and slots[0] * one["slots"].shape[1] >= 2**31
    pair.compare()


def test_a_single_row_of_any_stride_launches_the_same_kernel():
    row = torch.zeros(1, 96)
    assert flush_write._row_stride(row) == 96
    assert flush_write._row_stride(torch.zeros(96, 1).t()) == 96
    assert flush_write._row_stride(torch.zeros(2, 128)[:, :96]) == 128
