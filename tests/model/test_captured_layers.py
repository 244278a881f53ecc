"""Whole attention layers give the same in a captured step as one by one."""

import pytest
import torch

from dsv4 import AttentionSubBlock, CacheConfig, CapturedForward, KVCacheManager, prepare_forward
from dsv4.cache.graphs import captured_forward
from dsv4.model.random_hf import random_hf_model
from dsv4.testing import poison
from tests.cache.test_captured_forward import EagerGraph

BATCH = 4
PROMPTS = (2, 126, 255)  # a row of the batch stays empty
NUM_STEPS = 12


class Stack:
    """Layers over a cache of their own.

    On a GPU each layer reads the output of the one before. On a CPU the sums of attention depend on
    the shape, and in the last bit on the CPU; there every layer reads the same input, so that
    stored bytes do not depend on them.
    """

    def __init__(self, model, device):
        config = CacheConfig.from_hf(model.config)
        self.is_chained = device == "cuda"
        self.manager = KVCacheManager(
            config, max_requests=BATCH, num_blocks=12, device=device, max_forward_tokens=512,
            max_request_tokens=512, batch_invariant=self.is_chained,
        )  # fmt: skip
        poison(self.manager)
        self.blocks = [
            AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
            for layer_idx, layer in enumerate(model.model.layers)
        ]

    def run(self, hidden, handles):
        total = hidden
        for block, handle in zip(self.blocks, handles, strict=True):
            total = total + block(total if self.is_chained else hidden, handle)
        return total

    def step(self, hidden, *rows):
        plan = prepare_forward(self.manager, *rows)
        return self.run(hidden, [self.manager.acquire(i, plan) for i in range(len(self.blocks))])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_in_a_capture_are_the_eager_ones(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(captured_forward, "CudaGraph", EagerGraph)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_hf_model(seed=0).to(device, dtype)
    captured, eager = Stack(model, device), Stack(model, device)
    shape = (max(PROMPTS), model.config.hidden_size)
    prompt = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    buffer, output = (torch.zeros_like(prompt[:BATCH]) for _ in range(2))
    forward = CapturedForward(
        captured.manager, lambda handles: output.copy_(captured.run(buffer, handles)), batch=BATCH
    )
    lengths = list(PROMPTS)
    for stack in (captured, eager):
        for length in lengths:
            stack.step(prompt[:length], [stack.manager.open_request()], [0], [length])
    generator = torch.Generator(device).manual_seed(2)
    slots = [0, 1, 2]
    for _ in range(NUM_STEPS):
        buffer.normal_(generator=generator)
        buffer[len(slots) :] = torch.nan
        after = [length + 1 for length in lengths]
        # A row of padding, so that the projections are of the same shape.
        want = eager.step(buffer, [*slots, -1], [*lengths, 0], [*after, 1])
        got = forward.replay(prepare_forward(captured.manager, slots, lengths, after))
        used = slice(0, len(slots))
        assert got[used].isfinite().all()
        if device == "cuda":
            assert torch.equal(got[used], want[used])
        else:
            torch.testing.assert_close(got[used], want[used], rtol=1e-5, atol=1e-5)
        lengths = after
    assert torch.equal(captured.manager.paged.storage, eager.manager.paged.storage)
