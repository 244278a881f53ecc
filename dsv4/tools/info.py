"""`dsv4 info`: versions, devices, and which backends run here or why not."""

import platform
from importlib import metadata
from typing import Any

import torch

from dsv4.kernels.backends import BACKENDS, check_backend, experience
from dsv4.kernels.external.find import load_deep_gemm, load_flash_mla
from dsv4.kernels.external.limits import external_problem
from dsv4.tools.bench.external.sglang import load_sglang

PACKAGES = ("dsv4", "torch", "triton", "transformers", "numpy")


def collect_info() -> dict[str, Any]:
    """Collect everything that the command prints; the version of a missing package is None."""
    # Benches alone call SGLang's kernels.
    external = {"flashmla": load_flash_mla, "deepgemm": load_deep_gemm, "sglang": load_sglang}
    cpu = {"device": "cpu", "name": platform.machine(),
           **dict.fromkeys(("memory_bytes", "capability", "kernels"))}  # fmt: skip
    backends = {name: _backend_problem(name) for name in BACKENDS}
    peers = {name: external_problem(name, load) for name, load in external.items()}
    return {
        "versions": {"python": platform.python_version(), **{n: _version(n) for n in PACKAGES}},
        "cuda": torch.version.cuda,
        "devices": [cpu, *(_gpu(idx) for idx in range(torch.cuda.device_count()))],
        "backends": _availability(backends), "peers": _availability(peers),
    }  # fmt: skip


def _availability(problems: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    return {name: {"available": text is None, "problem": text} for name, text in problems.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu(idx: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(idx)
    return {
        "device": f"cuda:{idx}", "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "kernels": experience((properties.major, properties.minor)),
    }  # fmt: skip


def _backend_problem(name: str) -> str | None:
    """Say why a backend cannot run on this machine; None if it can."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_backend(name, device)
    except (ImportError, ValueError) as error:
        if isinstance(error, ImportError) or device.type == "cuda":
            return str(error)
        if torch.version.cuda is None:
            return "no CUDA: this torch is built without it"
        return "no CUDA device: torch finds none"
    return None
