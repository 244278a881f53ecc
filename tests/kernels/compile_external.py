"""Compile the kernels around FlashMLA and DeepGEMM ahead of time, as `compile_triton` does.

Run as a script, without the interpreter: `python -m tests.kernels.compile_external 90`.
"""

import sys

import torch

from dsv4 import CacheConfig, KVCacheManager, prepare_forward
from dsv4.kernels.external import deepgemm, flashmla
from tests.kernels.compile_triton import Recorder, report

NAMES = ("_prepare_kernel", "_list_kernel", "_finish_kernel")
KERNELS = {name: getattr(flashmla, name) for name in NAMES}


def record_attention(ratio: int, heads: int, *, num_tokens: int) -> list:
    """Record the launches of one token, or of a chunk."""
    launches: list = []
    for name, kernel in KERNELS.items():
        setattr(flashmla, name, Recorder(kernel, launches))
    config = CacheConfig.v4_flash(compress_ratios=(ratio,), num_query_heads=heads)
    manager = KVCacheManager(config, max_requests=1, num_blocks=1)
    plan = prepare_forward(manager, [manager.open_request()], [0], [num_tokens])
    handle = manager.acquire(0, plan)
    decoded = torch.zeros(num_tokens, 1, heads, 512, dtype=torch.bfloat16)
    flashmla.load_flash_mla = lambda: (
        lambda inputs, schedule: flashmla.Decoded(decoded, torch.zeros(num_tokens, heads, 1), None)
    )
    rows = torch.zeros(num_tokens, 512, dtype=torch.int64) if ratio == 4 else None
    flashmla.attend(
        decoded[:, 0], torch.zeros(heads), handle.memory, rows, handle.tokens, max_entries=1,
        is_query_raw=True,
    )  # fmt: skip
    return launches


def record_index() -> list:
    launches: list = []
    deepgemm._table_kernel = Recorder(deepgemm._table_kernel, launches)
    config = CacheConfig.v4_flash(compress_ratios=(4,), index_format="fp8")
    manager = KVCacheManager(
        config, max_requests=1, num_blocks=1, max_forward_tokens=1, max_request_tokens=2**14
    )
    handle = manager.acquire(0, prepare_forward(manager, [manager.open_request()], [0], [1]))
    scratch = deepgemm.index_scratch(torch.empty(1, 64, 128), handle.memory, max_entries=2**12)
    deepgemm.score_inputs(
        scratch, handle.memory, handle.tokens, range(1), num_heads=64, max_entries=2**12
    )  # fmt: skip
    return launches


def main(arch: int) -> None:
    for ratio in (0, 4, 128):
        for heads, num_tokens in ((64, 1), (128, 5)):
            launches = record_attention(ratio, heads, num_tokens=num_tokens)
            report(launches, f"ratio {ratio}, {num_tokens} tokens", arch)
    report(record_index(), "index", arch)


if __name__ == "__main__":
    main(int(sys.argv[1]))
