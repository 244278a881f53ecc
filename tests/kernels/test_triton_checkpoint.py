"""Checkpoints inside chunks by Triton's kernels: the reference's bytes."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dsv4 import CacheConfig, CheckpointPolicy, KVCacheManager, prepare_forward
from dsv4.formats import KV_FORMATS
from dsv4.testing import model_projections, model_weights, move_to, poison
from tests.kernels.serving import write_in_parts
from tests.kernels.test_triton_write import spoil
from tests.v41 import tiny_v41

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 8
SMALL = {"compress_ratios": (0, 4), "block_tokens": BLOCK, "sliding_window": BLOCK}
# Lengths of two requests after each forward. Boundaries lie at, and 1 to 7 past a chunk's start.
STEPS = [(9, 5), (23, 30), (30, 35), (31, 52), (57, 53)]
NUM_IDS = 80


@dataclass(frozen=True)
class Case:
    """A config, its inputs' dtype, and whether they have special values."""

    name: str
    choices: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    has_specials: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def config(self) -> CacheConfig:
        if "entry_format" in self.choices:
            return tiny_v41(block_tokens=BLOCK, sliding_window=BLOCK, **self.choices)
        return CacheConfig.tiny(**SMALL | self.choices)


CASES = [
    *(Case(f"{name} rows", {"kv_format": name}) for name in KV_FORMATS),
    Case("drafts", {"drafts_per_step": 2}),
    Case("bf16 inputs", dtype=torch.bfloat16),
    Case("bf16 tails", {"tail_dtype": "bfloat16"}, torch.bfloat16, has_specials=True),
    Case("nan and infinity", has_specials=True),
    Case("widths that are no power of two",
         {"head_dim": 104, "rope_dim": 24, "kv_format": "fp8_entry_scale", "index_head_dim": 96,
          "index_hadamard": False}),
    Case("a window of two tiles", {"sliding_window": 10, "block_tokens": 16}),
    Case("v4.1", {"kv_format": "fp8_32", "entry_format": "nvfp4_16"}),
    Case("v4.1, joined rows", {"kv_format": "fp8_32", "entry_format": "nvfp4_16",
                               "page_arrangement": "joined"}),
]  # fmt: skip


def run(case: Case, *, backend: str, device: str, in_parts: bool = False) -> KVCacheManager:
    """Prefill two prompts in chunks and steps that checkpoint every boundary."""
    config = case.config
    manager = KVCacheManager(
        config, max_requests=3, num_blocks=32, max_forward_tokens=64, num_checkpoints=20,
        checkpoint_policy=CheckpointPolicy(every_blocks=1), backend=backend, device=device,
    )  # fmt: skip
    poison(manager)
    manager.device_memory.checkpoints.fill_(0xFF)
    weights = [move_to(device, layer) for layer in model_weights(config, seed=0)]
    prompts = [model_projections(config, NUM_IDS, seed=s, dtype=case.dtype) for s in (10, 20)]
    if case.has_specials:
        prompts = spoil(prompts)
    slots = [manager.resume_request(np.arange(NUM_IDS) + s).slot for s in (100, 900)]
    before, num_inside = (0, 0), 0
    for after in STEPS:
        plan = prepare_forward(manager, slots, before, after)
        num_inside += 0 if plan.boundaries is None else len(plan.boundaries.points)
        for idx, layer_weights in enumerate(weights):
            inputs = move_to(device, join_prompts(prompts, idx, before, after))
            handle = manager.acquire(idx, plan)
            (write_in_parts if in_parts else type(handle).write)(handle, inputs, layer_weights)
        before = after
    assert num_inside == sum(after // config.block_tokens for after in STEPS[-1])
    return manager


def join_prompts(prompts, layer_idx, before, after):
    """A layer's inputs of all tokens, each the left half of a wider tensor."""
    rows = [slice(*each) for each in zip(before, after, strict=True)]

    def join(*parts):
        joined = torch.cat([part[row] for part, row in zip(parts, rows, strict=True)])
        return torch.cat([joined, joined], -1)[..., : joined.shape[-1]]

    return nested([prompt[layer_idx] for prompt in prompts], join)


def nested(values, join):
    if isinstance(values[0], torch.Tensor):
        return join(*values)
    if values[0] is None:
        return None
    return type(values[0])(*(nested(parts, join) for parts in zip(*values, strict=True)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes(case):
    expected = run(case, backend="reference", device="cpu").device_memory.checkpoints
    got = run(case, backend="triton", device=DEVICE).device_memory.checkpoints
    assert torch.equal(got.cpu(), expected)


def test_window_and_entries_apart():
    case = Case("csa")
    expected = run(case, backend="reference", device="cpu").device_memory.checkpoints
    got = run(case, backend="triton", device=DEVICE, in_parts=True).device_memory.checkpoints
    assert torch.equal(got.cpu(), expected)
