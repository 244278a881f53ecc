"""Find FlashMLA and DeepGEMM: their packages, or the copies in a vLLM installation.

Each is imported on its first use. `DSV4_PEERS`, or `add_folder`, names one more folder to search
after the installed packages; a folder with an unpacked wheel will do.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dsv4.formats import PagedRows

FOLDER_VARIABLE = "DSV4_PEERS"
PAGE_KEYS = 64  # keys per page that DeepGEMM expects
VALUE_DIM = 512
SOFTMAX_SCALE = VALUE_DIM**-0.5
LISTED_AT_ONCE = 128  # FlashMLA expects lists of rows whose width is a multiple of this

_Kernels = TypeVar("_Kernels")


class DecodeInputs(NamedTuple):
    """Inputs of FlashMLA's sparse decode, one token a row.

    Pages are `[num_pages, rows_per_page, 1, 584]` uint8 of any stride. Flat rows are
    `[num_tokens, 1, n]` int32, -1 for none.
    """

    query: Tensor  # [num_tokens, 1, heads, 512] BF16
    sinks: Tensor | None  # [heads] fp32
    window: Tensor
    window_rows: Tensor
    entries: Tensor | None
    entry_rows: Tensor | None
    entry_counts: Tensor | None  # [num_tokens] int32, how many rows are read; None for all


class Decoded(NamedTuple):
    """FlashMLA's results. A later call with the same sizes and counts may reuse the schedule."""

    output: Tensor  # [num_tokens, 1, heads, 512]
    lse: Tensor  # [num_tokens, heads, 1]
    schedule: Any


SparseDecode = Callable[[DecodeInputs, Any], Decoded]


class PagedLogits(NamedTuple):
    """DeepGEMM's functions: the scores of paged FP8 keys, and the schedule that these need."""

    make_schedule: Callable[[Tensor], Tensor]
    score: Callable[..., Tensor]
    set_overlap: Callable[[bool], None] | None


def as_pages(pages: PagedRows) -> Tensor:
    """View pages as `[num_pages, rows_per_page, 1, row_bytes]` uint8.

    A page keeps the data of all its rows, then their scales. The shape gives the number of bytes
    alone; the kernels know where each part of a row lies.
    """
    num_pages, run_bytes = pages.storage.shape
    row_bytes = pages.format.row_bytes
    return pages.storage.as_strided(
        (num_pages, pages.rows_per_page, 1, row_bytes),
        (run_bytes, row_bytes, row_bytes, 1),
        pages.storage.storage_offset() + pages.offset,
    )


def add_folder(path: str | os.PathLike[str]) -> None:
    """Search this folder for external kernels too, after the installed packages."""
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise ValueError(
            f"Invalid folder of external kernels: expected a folder, got {os.fspath(path)}"
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def add_environment_folder() -> None:
    """Search the folder that `DSV4_PEERS` names, if it is set."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        add_folder(folder)


@cache
def load_flash_mla() -> SparseDecode:
    """Load FlashMLA's sparse decode of V4's rows; an ImportError says what to install."""
    return load_first(
        (_flash_mla_of_package, _flash_mla_of_vllm),
        "attention_backend='flashmla' needs FlashMLA's kernels for DeepSeek-V4's rows: "
        "pip install 'dsv4[flashmla]', or use vLLM's copy or a flash_mla from before 2026.09.30",
    )


@cache
def load_deep_gemm() -> PagedLogits:
    """Load DeepGEMM's scores of paged FP8 keys; an ImportError says what to install."""
    return load_first(
        [partial(_paged_logits, name) for name in ("deep_gemm", "vllm.third_party.deep_gemm")],
        "index_backend='deepgemm' needs DeepGEMM's paged logits: pip install 'dsv4[deepgemm]', "
        "or use vLLM's copy",
    )


def import_external(name: str) -> ModuleType:
    """Import another project's module; any failure becomes an `ImportError`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name == error.name or name.startswith(f"{error.name}."):
            raise ImportError(f"{name}: not installed") from error
        raise ImportError(f"{name}: needs {error.name}") from error
    except Exception as error:  # a broken build raises anything: OSError, RuntimeError, its own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ImportError(f"{name}: {reason}") from error


def load_first(sources: Iterable[Callable[[], _Kernels]], advice: str) -> _Kernels:
    """Load from the first source that works; else raise the advice and every problem."""
    add_environment_folder()
    problems = []
    for load in sources:
        try:
            return load()
        except ImportError as error:
            problems.append(str(error))
    raise ImportError(f"{advice} ({'; '.join(problems)})")


def _flash_mla_of_package() -> SparseDecode:
    package = import_external("flash_mla")
    has_legacy = getattr(package, "has_legacy", None)
    decode = getattr(package, "flash_mla_with_kvcache", None)
    names = inspect.signature(decode).parameters if decode is not None else {}
    if has_legacy is not None and not has_legacy():
        raise ImportError("flash_mla: built without the legacy kernels, which read V4's rows")
    if "extra_k_cache" not in names:
        raise ImportError("flash_mla: too old to take window and entries as two sources")
    if has_legacy is None and "enable_batch_invariant" in names:
        raise ImportError("flash_mla: this release reads V4.1's rows, and no longer V4's")
    options = {} if has_legacy is None else {"use_legacy": True}

    def run(inputs: DecodeInputs, schedule: Any) -> Decoded:
        if schedule is None:
            schedule = package.get_mla_metadata()[0]
        output, lse = package.flash_mla_with_kvcache(
            q=inputs.query, k_cache=inputs.window, block_table=None, cache_seqlens=None,
            head_dim_v=VALUE_DIM, tile_scheduler_metadata=schedule, softmax_scale=SOFTMAX_SCALE,
            is_fp8_kvcache=True, indices=inputs.window_rows, attn_sink=inputs.sinks,
            extra_k_cache=inputs.entries, extra_indices_in_kvcache=inputs.entry_rows,
            extra_topk_length=inputs.entry_counts, **options,
        )  # fmt: skip
        return Decoded(output, lse, schedule)

    return run


def _flash_mla_of_vllm() -> SparseDecode:
    operator = vllm_operator("sparse_decode_fwd")

    def run(inputs: DecodeInputs, schedule: Any) -> Decoded:
        tiles, splits = (None, None) if schedule is None else schedule
        output, lse, tiles, splits = operator(
            inputs.query, inputs.window, inputs.window_rows, None, inputs.sinks, tiles, splits,
            inputs.entries, inputs.entry_rows, inputs.entry_counts, VALUE_DIM, SOFTMAX_SCALE, None,
        )  # fmt: skip
        return Decoded(output, lse, (tiles, splits))

    return run


def vllm_operator(name: str) -> Any:
    """Return an operator of vLLM's copy of FlashMLA."""
    operators = torch.ops._flashmla_C
    if not hasattr(operators, name):
        _load_library("vllm", "_flashmla_C*.so")
    if not hasattr(operators, name):
        raise ImportError(f"vllm: its FlashMLA has no {name}")
    return getattr(operators, name)


def _load_library(package: str, pattern: str) -> None:
    """Register the operators of a package's shared library without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"{package}: not installed")
    folders = spec.submodule_search_locations or []
    libraries = [str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))]
    if not libraries:
        raise ImportError(f"{package}: has no {pattern}")
    try:
        torch.ops.load_library(libraries[0])
    except OSError as error:
        raise ImportError(f"{package}: {str(error).splitlines()[0]}") from error


def _paged_logits(name: str) -> PagedLogits:
    package = import_external(name)
    for function in (
        "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms",
    ):  # fmt: skip
        if not hasattr(package, function):
            raise ImportError(f"{name}: has no {function}")
    return PagedLogits(
        lambda lengths: package.get_paged_mqa_logits_metadata(
            lengths, PAGE_KEYS, package.get_num_sms()
        ),
        lambda query, *others: package.fp8_fp4_paged_mqa_logits((query, None), *others),
        getattr(package, "set_pdl", None),
    )
