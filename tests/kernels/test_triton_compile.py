"""Every kernel compiles for Hopper and Blackwell, and spills nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arch", [90, 100])
def test_no_kernel_spills(arch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(arch)]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert result.returncode == 0, result.stderr
    kernels = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(kernels) == 3 * 3 + 1 + 4 * 4  # writes, the edges of CSA chunks, gathers
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []
