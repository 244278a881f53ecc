"""The machine and the versions of a measurement, and the projects that it is compared with."""

import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import dsv4

_Kernels = TypeVar("_Kernels")


def environment() -> dict[str, str]:
    """Collect versions, processor and commit for the result of a bench."""
    return {
        "dsv4": dsv4.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def require_cuda(bench: str) -> None:
    """Refuse a bench that needs a GPU if there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"dsv4 bench {bench} needs a CUDA device, and there is none")


def try_load(load: Callable[[], _Kernels]) -> tuple[_Kernels | None, str]:
    """Load external kernels; if they are missing, return None and the reason."""
    try:
        return load(), ""
    except ImportError as error:
        return None, str(error)


def report_comparison(compare: bool, problems: Mapping[str, str]) -> dict[str, Any]:
    """Report each project as compared, or the reason why not; empty without --compare."""
    states = {name: problem or "compared" for name, problem in problems.items()}
    return {"peers": states} if compare else {}


def _commit() -> str:
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
