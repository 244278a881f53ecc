"""Every kernel compiles for each architecture and fits it; on Hopper and Blackwell none spills."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dsv4.kernels.backends import COMPILED
from dsv4.kernels.triton.launch import KINDS
from tests.marks import long

ARCHITECTURES = [90, pytest.param(100, marks=pytest.mark.slow)]
OTHERS = [80, 89, 120]
SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # of a block
GENERAL = {
    "_write_kernel", "_edge_kernel", "_gather_kernel", "_query_kernel", "_score_kernel",
    "_group_kernel", "_topk_kernel", "_attend_kernel", "_combine_kernel", "_rope_kernel",
    "_accept_kernel", "_score_listed_kernel", "_largest_kernel", "_checkpoint_window_kernel",
    "_checkpoint_tails_kernel",
}  # fmt: skip


def compile_kernels(script: str, *arguments: int) -> list[dict]:
    """Run a script of this folder without the interpreter, and read the kernels it compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.kernels.{script}", *map(str, arguments)]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_fits(kernels: list[dict], arch: int) -> None:
    """A kernel of more shared memory than a block can have would compile, and not launch."""
    too_large = [kernel for kernel in kernels if kernel["shared_bytes"] > SHARED_BYTES[arch]]
    assert too_large == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("step", long([1, 12], [12]))
def test_other_architectures(arch, step):
    """What was never run on such a GPU is compiled at least, fits it, and spills little."""
    kernels = compile_kernels("compile_triton", arch, step)
    assert {kernel["kernel"] for kernel in kernels} == GENERAL
    assert_fits(kernels, arch)
    assert max(kernel["spilled_bytes"] for kernel in kernels) <= 256
    assert (arch // 10, arch % 10) in COMPILED


def test_raw_queries_are_added_in_the_order_of_prepared_ones():
    prepared, raw = compile_kernels("compile_raw_queries")
    assert prepared["channel_widths"] == raw["channel_widths"] == [*"44444442" * 2]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_spills(arch):
    kernels = compile_kernels("compile_triton", arch, 1)
    assert_fits(kernels, arch)
    works = {" ".join(kernel["kind"].split()[:2]) for kernel in kernels}
    assert {f"{layer} {kind}" for layer in ("swa", "csa", "hca") for kind in KINDS} <= works
    counts = Counter(kernel["kernel"] for kernel in kernels)
    assert counts["_gather_kernel"] == 4 * 5  # what is gathered; row formats, V4.1's are one
    assert counts["_score_listed_kernel"] == counts["_largest_kernel"] == 1
    assert counts["_accept_kernel"] == counts["_checkpoint_tails_kernel"] == 1
    assert counts["_checkpoint_window_kernel"] == 2
    assert counts["_query_kernel"] == 5 + 2  # key formats; candidates are published and used
    assert counts["_score_kernel"] == 5 + 4 + 1  # four are in a chunk, one is of V4.1
    assert counts["_operand_kernel"] == (4 if arch == 90 else 0)
    assert counts["gluon_score_kernel"] == (8 if arch == 90 else 0)  # with tops and without
    assert counts["_rescore_kernel"] == (2 if arch == 90 else 0)
    assert counts["_attend_kernel"] == (5 if arch == 90 else 35)
    assert counts["gluon_attend_kernel"] == (17 if arch == 90 else 0)
    assert counts["gluon_attend_chunk_kernel"] == (1 + 5 * 2 + 2 if arch == 90 else 0)
    assert counts["gluon_attend_dense_kernel"] == (5 if arch == 90 else 0)
    assert counts["_dense_rows_kernel"] == counts["gluon_attend_dense_kernel"]
    names = {"_write_kernel", "_edge_kernel", "_topk_kernel", "_combine_kernel", "_rope_kernel"}
    assert counts.keys() >= names
    spilling: Counter[str] = Counter()
    # A join has two sets of accumulators. A split without fused products spills outside of tiles.
    invariant = [kernel for kernel in kernels if kernel["kind"].endswith("True)")]
    assert max(kernel["spilled_bytes"] for kernel in invariant) <= 1360
    for kernel in kernels:
        if kernel in invariant:
            continue
        spilling[kernel["kernel"]] = max(spilling[kernel["kernel"]], kernel["spilled_bytes"])
    # Their warps share all registers there are. What few tiles change is put aside, and of a
    # chunk, whose decoding has fewer, some numbers in every tile.
    assert spilling.pop("gluon_attend_kernel", 0) <= 40
    assert spilling.pop("gluon_attend_chunk_kernel", 0) <= 200
    spilling.pop("gluon_score_kernel", 0)
    most = {"chunk of 64": 80, "chunk of 32": 24, "tops of 64": 56, "tops of 32": 88}
    for kernel in kernels:
        if kernel["kernel"] == "gluon_score_kernel":
            limit = next(limit for kind, limit in most.items() if kind in kernel["kind"])
            assert kernel["spilled_bytes"] <= limit, kernel
    assert +spilling == {}
    if arch == 90:  # the table's 5 programs run at once on a multiprocessor
        of_kinds = [k for k in kernels if k["kind"] in ("mxfp4", "candidates")]
        of_steps = [k["registers"] for k in of_kinds if "_score_" in k["kernel"]]
        assert len(of_steps) == 3 and 4 * 4 * 32 * max(of_steps) <= 65536
    # A kernel that asks for more tensor memory than there is becomes a trap of a few registers.
    assert [kernel for kernel in kernels if kernel["registers"] < 16] == []
