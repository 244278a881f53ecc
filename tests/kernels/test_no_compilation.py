"""After `warm_up` nothing is compiled, whatever the lengths, chunks, steps and batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.jit import JITFunction

from dsv4 import warm_up
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
    rope,
    topk,
)
from dsv4.kernels.triton.hopper import attention as hopper
from dsv4.kernels.triton.hopper import dense_attention, index_scores
from tests.kernels.serving import Server, serve


def test_serving_launches_nothing_that_was_not_warmed_up():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.record_launches"]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert result.returncode == 0, result.stderr
    cases = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(cases) == 11
    for case in cases:
        assert case["warmed"] >= 28
        assert case["new"] == [], case["case"]


def test_keys_hold_the_constants_of_callees():
    """A key made before those of its callees would not."""
    script = (
        "from tests import kernel_keys; kernel_keys.install();"
        "from dsv4.kernels.triton.topk import _topk_kernel, pivots_between;"
        "assert pivots_between.used_global_vals and _topk_kernel.hash;"
        "assert pivots_between.used_global_vals.keys() <= _topk_kernel.used_global_vals.keys()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, env=environment)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "index_num_heads", "drafts_per_step"),
    [("v4_flash", 64, 0), ("v4_flash", 64, 2), ("v41_flash", 32, 2)],
)
def test_serving_compiles_nothing(model, index_num_heads, drafts_per_step, monkeypatch):
    server = Server(
        model=model, drafts_per_step=drafts_per_step, max_requests=64,
        index_num_heads=index_num_heads, device="cuda",
    )  # fmt: skip
    for module in (
        acceptance, attention, candidates, checkpoint, chunk_scores, dense_attention, dense_rows,
        flush_write, gather, indexer, rope, topk, hopper, index_scores,
    ):  # fmt: skip
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):  # an earlier test may have compiled what is missing
                kernel.device_caches.clear()
    compiled = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **launch: compiled.append(launch["repr"])
    )
    warm_up(server.manager, server.weights)
    num_warmed = len(compiled)
    assert num_warmed >= 28
    serve(server)
    assert compiled[num_warmed:] == []
