"""`Backend`: the functions of a backend, and the choice of one.

`reference` defines each function. The other backends store the same bytes and select the same
entries. A backend that a caller names runs or raises: no other replaces it in silence.
"""

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Protocol, cast

import torch
from torch import Tensor

from dsv4.kernels.contracts import (
    AttentionResult,
    CheckpointPoints,
    Gathered,
    LayerWrites,
    Selection,
    TokenMap,
)
from dsv4.kernels.layer_memory import LayerMemory

BACKENDS = ("reference", "triton")
EXTERNAL = ("flashmla", "deepgemm")  # each replaces one function: attend, select_entries


class Backend(Protocol):
    """Functions of a backend; `kernels.reference` documents each."""

    def write_layer(
        self, writes: LayerWrites, memory: LayerMemory, tokens: TokenMap,
    ) -> None: ...  # fmt: skip

    def select_entries(
        self, query: Tensor, head_weights: Tensor, memory: LayerMemory, tokens: TokenMap,
        *, max_entries: int,
    ) -> Selection: ...  # fmt: skip

    def attend(
        self, query: Tensor, sinks: Tensor | None, memory: LayerMemory,
        selected_rows: Tensor | None, tokens: TokenMap, *, max_entries: int,
        batch_invariant: bool,
    ) -> AttentionResult: ...  # fmt: skip

    def gather_compressed_kv(self, memory: LayerMemory, rows: Tensor) -> Gathered: ...

    def gather_all_compressed_kv(
        self, memory: LayerMemory, tokens: TokenMap, *, max_entries: int
    ) -> Gathered: ...

    def gather_swa_kv(self, memory: LayerMemory, tokens: TokenMap) -> Gathered: ...

    def checkpoint_window(
        self, boundaries: CheckpointPoints, memory: LayerMemory, tokens: TokenMap
    ) -> None: ...

    def checkpoint_tails(
        self,
        boundaries: CheckpointPoints,
        memory: LayerMemory,
        tokens: TokenMap,
        writes: LayerWrites,
    ) -> None: ...


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
        return
    from triton import knobs

    if not knobs.runtime.interpret:
        raise ValueError(
            f"Invalid device of backend 'triton': expected cuda, got {device} "
            "(TRITON_INTERPRET=1 runs it on the CPU, slowly)"
        )


@cache
def load_backend(name: str) -> Backend:
    """Load a backend; an external one has one function of its own, the others are Triton's."""
    if name not in BACKENDS + EXTERNAL:
        raise ValueError(f"Unknown backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    reference = importlib.import_module("dsv4.kernels.reference")
    if name == "reference":
        return cast(Backend, reference)
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
    return cast(Backend, SimpleNamespace(**functions))
