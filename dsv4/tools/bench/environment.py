"""The machine and the versions of a measurement, and the projects that it is compared with."""

import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dsv4


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


def check_device(device: str) -> None:
    """Refuse a device that is neither the CPU nor a GPU of this machine."""
    kind, _, number = device.partition(":")
    if not (device in ("cpu", "cpu:0", "cuda") or (kind == "cuda" and number.isdecimal())):
        raise ValueError(f"Invalid --device: expected cpu, cuda or cuda:N, got {device!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise RuntimeError(f"--device {device} needs a CUDA device, and this machine has {count}")


def load_external(
    compare: bool, projects: Mapping[str, Callable[[], Any]]
) -> tuple[list[Any], dict[str, Any]]:
    """Load each project's kernels, None if they are missing, and report why; none if not asked."""
    kernels, states = [], {}
    for name, load in projects.items() if compare else ():
        try:
            kernels.append(load())
            states[name] = "compared"
        except ImportError as error:
            kernels.append(None)
            states[name] = str(error)
    return (kernels, {"peers": states}) if compare else ([None] * len(projects), {})


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
