"""RoPE rows of a forward: the kernel's bits are the reference's, in plans and under graphs."""

import pytest
import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.kernels import ops
from dsv4.rope import base_frequencies, rope_at

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = {
    "flash": CacheConfig.v4_flash(compress_ratios=(0, 4, 128)),
    "no_power_of_two": CacheConfig.tiny(head_dim=104, rope_dim=24, kv_format="bf16"),
}


def make_manager(config, backend="triton", **sizes):
    defaults = {"max_requests": 4, "num_blocks": 8, "max_forward_tokens": 512}
    return KVCacheManager(config, device=DEVICE, backend=backend, **(defaults | sizes))


@pytest.mark.parametrize("num_tokens", [0, 1, 61, 64, 512])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_of_the_reference(name, num_tokens):
    memory = make_manager(CONFIGS[name]).device_memory.memories[0]
    generator = torch.Generator().manual_seed(num_tokens)
    positions = torch.randint(0, 1 << 20, (num_tokens,), generator=generator, dtype=torch.int32)
    edges = torch.tensor([0, 3, 127, (1 << 20) - 1], dtype=torch.int32)
    positions[: len(edges)] = edges[:num_tokens]
    rows = {}
    for backend in ("reference", "triton"):
        memory.rope_rows.fill_(torch.nan)
        ops.make_rope(memory, positions.to(DEVICE), backend=backend)
        rows[backend] = memory.rope_rows.view(torch.int32).clone()
    assert torch.equal(rows["triton"], rows["reference"])
    assert memory.rope_rows[:, :, num_tokens:].isnan().all()
    assert not memory.rope_rows[:, :, :num_tokens].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("base", [0, 1])
def test_bits_of_the_cpu_at_every_position(base):
    config = CONFIGS["flash"]
    memory = make_manager(config, max_forward_tokens=1 << 20).device_memory.memories[base]
    ops.make_rope(memory, torch.arange(1 << 20, dtype=torch.int32, device=DEVICE), backend="triton")
    frequencies = base_frequencies(config, ("main", "compress")[base])
    for positions in torch.arange(1 << 20).split(1 << 16):
        got = memory.rope.take(slice(int(positions[0]), int(positions[-1]) + 1))
        for mine, expected in zip(got, rope_at(positions, frequencies), strict=True):
            assert torch.equal(mine.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_plan_has_the_rows_of_its_tokens_and_of_their_windows(backend):
    config = CONFIGS["flash"]
    manager = make_manager(config, backend)
    slots = manager.open_requests(2)
    prepare_forward(manager, slots, [0, 0], [3, 127]).complete()
    plan = prepare_forward(manager, slots, [3, 127], [4, 140])
    positions = torch.tensor([3, *range(127, 140)])
    assert plan.tokens.positions.tolist() == positions.tolist()
    for idx, (base, ratio) in enumerate([("main", 0), ("compress", 4), ("compress", 128)]):
        handle, frequencies = manager.acquire(idx, plan), base_frequencies(config, base)
        for mine, expected in zip(handle.rope, rope_at(positions, frequencies), strict=True):
            assert torch.equal(mine.cpu(), expected)
        if ratio:
            starts = rope_at(positions + 1 - ratio, frequencies)
            is_closing = (positions + 1) % ratio == 0
            assert is_closing.any()
            for mine, expected in zip(handle.memory.entry_rope, starts, strict=True):
                assert torch.equal(mine[: len(positions)].cpu()[is_closing], expected[is_closing])


def test_rows_are_made_once_for_all_layers(monkeypatch):
    calls = []
    monkeypatch.setattr(ops, "make_rope", lambda *arguments, **_: calls.append(arguments))
    manager = make_manager(CONFIGS["flash"], "reference")
    plan = prepare_forward(manager, [manager.open_request()], [0], [1])
    assert not calls and not plan.has_rope
    for layer_idx in (0, 1, 2, 0):
        manager.acquire(layer_idx, plan)
    assert len(calls) == 1 and plan.has_rope


def test_a_stale_plan_makes_and_has_no_rows():
    manager = make_manager(CONFIGS["flash"], "reference")
    handle = manager.acquire(0, prepare_forward(manager, [], [], []))
    prepare_forward(manager, [], [], [])
    manager.device_memory.memories[0].rope_rows.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="Stale plan"):
        manager.acquire(0, handle.plan)
    with pytest.raises(RuntimeError, match="Stale plan"):
        _ = handle.rope
    assert manager.device_memory.memories[0].rope_rows.isnan().all()
