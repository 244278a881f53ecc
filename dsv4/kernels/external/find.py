"""Where FlashMLA and DeepGEMM come from: their packages, or the copies in a vLLM installation.

Nothing here is imported before it is asked for. `DSV4_PEERS`, or `add_folder`, names a folder to
look in beside the installed packages: one that a wheel was unpacked to will do.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOLDER_VARIABLE = "DSV4_PEERS"
PAGE_KEYS = 64  # keys of a page that DeepGEMM takes
VALUE_DIM = 512
SOFTMAX_SCALE = VALUE_DIM**-0.5
LISTED_AT_ONCE = 128  # widths of lists of rows for FlashMLA are multiples of it


class DecodeInputs(NamedTuple):
    """What FlashMLA's sparse decode is given, one token a row.

    query is `[num_tokens, 1, heads, 512]` BF16, sinks `[heads]` fp32 or None; window and entries
    are pages `[num_pages, rows_per_page, 1, 584]` uint8 of any stride; window_rows and entry_rows
    `[num_tokens, 1, n]` int32 are flat rows, -1 for none; entry_counts `[num_tokens]` int32 says
    how many of entry_rows are looked at, None for all. Without entries the last three are None.
    """

    query: Tensor
    sinks: Tensor | None
    window: Tensor
    window_rows: Tensor
    entries: Tensor | None
    entry_rows: Tensor | None
    entry_counts: Tensor | None


class Decoded(NamedTuple):
    """output `[num_tokens, 1, heads, 512]`, lse `[num_tokens, heads, 1]`, and the schedule, which
    another call with the same sizes and counts may be given.
    """

    output: Tensor
    lse: Tensor
    schedule: Any


SparseDecode = Callable[[DecodeInputs, Any], Decoded]


class PrefillInputs(NamedTuple):
    """What FlashMLA's sparse prefill is given.

    query is `[num_tokens, heads, 512]` BF16 with 64 or 128 heads, sinks `[heads]` fp32 or None;
    values are rows `[num_rows, 1, 512]` BF16, dense; rows `[num_tokens, 1, n]` int32 names them,
    -1 for none, n a multiple of LISTED_AT_ONCE; counts `[num_tokens]` int32 says how many of them
    are looked at, None for all.
    """

    query: Tensor
    sinks: Tensor | None
    values: Tensor
    rows: Tensor
    counts: Tensor | None


SparsePrefill = Callable[[PrefillInputs], Decoded]


class PagedLogits(NamedTuple):
    """DeepGEMM's scores of paged FP8 keys, and the schedule that they need."""

    make_schedule: Callable[[Tensor], Tensor]
    score: Callable[..., Tensor]
    set_overlap: Callable[[bool], None] | None


def add_folder(path: str | os.PathLike[str]) -> None:
    """Look for peers in this folder too, after what is installed."""
    folder = Path(path).resolve()
    if not folder.is_dir():
        raise ValueError(f"Invalid folder of peers: expected a folder, got {os.fspath(path)}")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        importlib.invalidate_caches()


@cache
def load_flash_mla() -> SparseDecode:
    """FlashMLA's sparse decode of DeepSeek-V4's rows.

    Raises:
        ImportError: There is none here; says what to install.
    """
    _add_folder_of_environment()
    problems = []
    for source in (_flash_mla_of_package, _flash_mla_of_vllm):
        try:
            return source()
        except ImportError as error:
            problems.append(str(error))
    raise ImportError(
        "attention_backend='flashmla' needs FlashMLA's kernels for DeepSeek-V4's rows: "
        "pip install 'dsv4[flashmla]', or use vLLM's copy or a flash_mla from before 2026.09.30 "
        f"({'; '.join(problems)})"
    )


@cache
def load_flash_mla_prefill() -> SparsePrefill:
    """FlashMLA's sparse prefill on dense BF16 rows, which is looked for in vLLM alone.

    Raises:
        ImportError: There is none here; says why.
    """
    _add_folder_of_environment()
    operator = _vllm_operator("sparse_prefill_fwd")

    def run(inputs: PrefillInputs) -> Decoded:
        output, _, lse = operator(
            inputs.query, inputs.values, inputs.rows, SOFTMAX_SCALE, VALUE_DIM, inputs.sinks,
            inputs.counts, None,
        )  # fmt: skip
        return Decoded(output[:, None], lse[:, :, None], None)

    return run


@cache
def load_deep_gemm() -> PagedLogits:
    """DeepGEMM's scores of paged FP8 keys.

    Raises:
        ImportError: There is none here; says what to install.
    """
    _add_folder_of_environment()
    problems = []
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            return _paged_logits(import_peer(name))
        except ImportError as error:
            problems.append(str(error))
    raise ImportError(
        "index_backend='deepgemm' needs DeepGEMM's paged logits: pip install 'dsv4[deepgemm]', "
        f"or use vLLM's copy ({'; '.join(problems)})"
    )


def import_peer(name: str) -> ModuleType:
    """Import a module; whatever keeps it from being imported becomes an `ImportError`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or name == error.name or name.startswith(f"{error.name}."):
            raise ImportError(f"{name}: not installed") from error
        raise ImportError(f"{name}: needs {error.name}") from error
    except Exception as error:  # a broken build raises anything: OSError, RuntimeError, its own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ImportError(f"{name}: {reason}") from error


def _add_folder_of_environment() -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        add_folder(folder)


def _flash_mla_of_package() -> SparseDecode:
    package = import_peer("flash_mla")
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
    operator = _vllm_operator("sparse_decode_fwd")

    def run(inputs: DecodeInputs, schedule: Any) -> Decoded:
        tiles, splits = (None, None) if schedule is None else schedule
        output, lse, tiles, splits = operator(
            inputs.query, inputs.window, inputs.window_rows, None, inputs.sinks, tiles, splits,
            inputs.entries, inputs.entry_rows, inputs.entry_counts, VALUE_DIM, SOFTMAX_SCALE, None,
        )  # fmt: skip
        return Decoded(output, lse, (tiles, splits))

    return run


def _vllm_operator(name: str) -> Any:
    """An operator of vLLM's copy of FlashMLA."""
    operators = torch.ops._flashmla_C
    if not hasattr(operators, name):
        _load_library("vllm", "_flashmla_C*.so")
    if not hasattr(operators, name):
        raise ImportError(f"vllm: its FlashMLA has no {name}")
    return getattr(operators, name)


def _load_library(package: str, pattern: str) -> None:
    """Load the ops of a package's shared library, without importing the package."""
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


def _paged_logits(package: ModuleType) -> PagedLogits:
    name = package.__name__
    for function in (
        "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms",
    ):  # fmt: skip
        if not hasattr(package, function):
            raise ImportError(f"{name}: has no {function}")

    def make_schedule(lengths: Tensor) -> Tensor:
        schedule: Tensor = package.get_paged_mqa_logits_metadata(
            lengths, PAGE_KEYS, package.get_num_sms()
        )
        return schedule

    def score(
        query: Tensor, pages: Tensor, weights: Tensor, lengths: Tensor, block_table: Tensor,
        schedule: Tensor, max_entries: int,
    ) -> Tensor:  # fmt: skip
        scores: Tensor = package.fp8_fp4_paged_mqa_logits(
            (query, None), pages, weights, lengths, block_table, schedule, max_entries
        )
        return scores

    return PagedLogits(make_schedule, score, getattr(package, "set_pdl", None))
