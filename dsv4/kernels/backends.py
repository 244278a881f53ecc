"""The choice of a backend: `load_backend` returns its functions, those of `kernels.reference`.

`reference` defines each function. The other backends store the same bytes and select the same
entries. A backend that a caller names runs or raises: no other replaces it in silence.
"""

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

BACKENDS = ("reference", "triton")
EXTERNAL = ("flashmla", "deepgemm")  # each replaces one function: attend, select_entries
OLDEST = (8, 0)  # compute capability: products of BF16
COMPILED = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))  # ahead of time, in tests
RUN = ((9, 0),)  # what the GPU tests have run on


def default_backend(device: torch.device) -> str:
    """Backend for tensors on `device` if the caller names none."""
    return "triton" if device.type == "cuda" else "reference"


def check_backend(name: str, device: torch.device) -> None:
    """Refuse a backend that does not exist, is not installed or cannot run on `device`."""
    if name not in BACKENDS:
        raise ValueError(f"Unknown backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    load_backend(name)
    if name != "triton":
        return
    if device.type == "cuda":
        if device.index is not None and device.index != torch.cuda.current_device():
            raise ValueError(
                "Invalid device of backend 'triton': expected the current one, "
                f"cuda:{torch.cuda.current_device()}, got {device} "
                f"(torch.cuda.set_device({device.index}) makes it the current one)"
            )
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            raise ValueError(
                f"Invalid device of backend 'triton': expected compute capability {_text(OLDEST)} "
                f"or later, got {_text(capability)} ({torch.cuda.get_device_name(device)})"
            )
        return
    from triton import knobs

    if not knobs.runtime.interpret:
        raise ValueError(
            f"Invalid device of backend 'triton': expected cuda, got {device} "
            "(TRITON_INTERPRET=1 runs it on the CPU, slowly)"
        )


def experience(capability: tuple[int, int]) -> str:
    """Say what the kernels have shown on GPUs of that compute capability."""
    if capability in RUN:
        return "GPU tests were run; docs/gpu-tests.json says at which commit"
    seen = "compiled in tests" if capability in COMPILED else "never compiled in tests"
    return f"{seen}, never run on such a GPU" if capability >= OLDEST else "refused"


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@cache
def load_backend(name: str) -> Any:
    """Load a backend; an external one has one function of its own, the others are Triton's."""
    if name not in BACKENDS + EXTERNAL:
        raise ValueError(f"Unknown backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    reference = importlib.import_module("dsv4.kernels.reference")
    if name == "reference":
        return reference
    try:
        kernels = importlib.import_module("dsv4.kernels.triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError("backend='triton' needs Triton: pip install 'dsv4[triton]'") from error
    functions = {**vars(reference), **{n: getattr(kernels, n) for n in kernels.__all__}}
    if name in EXTERNAL:
        external = importlib.import_module(f"dsv4.kernels.external.{name}")
        function = "attend" if name == "flashmla" else "select_entries"
        functions[function] = getattr(external, function)
    return SimpleNamespace(**functions)
