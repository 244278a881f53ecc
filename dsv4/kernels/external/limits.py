"""Limits of FlashMLA and DeepGEMM, checked before a manager allocates anything."""

from collections.abc import Callable

import torch

from dsv4.config import CacheConfig
from dsv4.formats import V41_FORMATS
from dsv4.kernels.backends import BACKENDS, check_backend
from dsv4.kernels.external.find import PAGE_KEYS, load_deep_gemm, load_flash_mla
from dsv4.kernels.index_scratch import MAX_TOPK
from dsv4.layer_schedule import AttentionType

ATTENTION_BACKENDS = (*BACKENDS, "flashmla")
INDEX_BACKENDS = (*BACKENDS, "deepgemm")
ROW_DIMS = (512, 64)  # head_dim and rope_dim of the rows that FlashMLA reads
MAX_HEADS = 128
BLACKWELL_ALIGN = 576  # divides the page strides of FlashMLA's Blackwell kernels
INDEX_HEADS = (32, 64)
INDEX_DIM = 128
ARCHITECTURES = (9, 10)  # compute capabilities: Hopper, and Blackwell in data centres


def check_attention_backend(
    name: str, config: CacheConfig, device: torch.device, *, batch_invariant: bool
) -> None:
    """Refuse an attention backend that is unknown, not installed, or cannot read the cache."""
    if name in BACKENDS:
        check_backend(name, device)
        return
    _check_name("attention_backend", name, ATTENTION_BACKENDS)
    _expect(name, "kv_format", config.kv_format, "'fp8'", config.kv_format == "fp8")
    dims = (config.head_dim, config.rope_dim)
    _expect(name, "head_dim and rope_dim", dims, f"{ROW_DIMS}", dims == ROW_DIMS)
    heads = config.num_query_heads
    _expect(name, "num_query_heads", heads, f"at most {MAX_HEADS}", heads <= MAX_HEADS)
    _expect(name, "batch_invariant", batch_invariant, "False", not batch_invariant)
    load_flash_mla()
    _check_device(name, device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == ARCHITECTURES[1]:
        is_aligned = config.page_align % BLACKWELL_ALIGN == 0
        wanted = f"a multiple of {BLACKWELL_ALIGN} on this GPU"
        _expect(name, "page_align", config.page_align, wanted, is_aligned)


def check_index_backend(name: str, config: CacheConfig, device: torch.device) -> None:
    """Refuse an index backend that is unknown, not installed, or cannot read the cache."""
    if name in BACKENDS:
        check_backend(name, device)
        return
    _check_name("index_backend", name, INDEX_BACKENDS)
    _expect(name, "index_format", config.index_format, "'fp8'", config.index_format == "fp8")
    dim, heads = config.index_head_dim, config.index_num_heads
    _expect(name, "index_head_dim", dim, f"{INDEX_DIM}", dim == INDEX_DIM)
    _expect(name, "index_num_heads", heads, "32 or 64", heads in INDEX_HEADS)
    block_tokens = PAGE_KEYS * AttentionType.CSA.ratio
    is_page = config.block_tokens == block_tokens
    _expect(name, "block_tokens", config.block_tokens, f"{block_tokens}", is_page)
    load_deep_gemm()
    _check_device(name, device)


def check_latent_keys(config: CacheConfig, *, attention: str, index: str) -> None:
    """Refuse backends that cannot read layers of ratio 1 and 2, or V4.1's rows."""
    rows = (config.kv_format, config.entry_format)
    is_v41 = config.has_latent_keys or config.page_arrangement == "joined"
    if attention not in BACKENDS and (is_v41 or any(name in V41_FORMATS for name in rows)):
        raise ValueError(
            f"{attention!r} has no kernels for DeepSeek-V4.1's rows: expected attention_backend "
            f"{' or '.join(BACKENDS)}"
        )
    has_candidates = config.candidate_source_layer_id >= 0 and config.index_format != "mxfp4"
    if index != "reference" and (has_candidates or (is_v41 and index not in BACKENDS)):
        raise ValueError(
            f"{index!r} has no kernels for DeepSeek-V4.1's index in {config.index_format}: "
            "expected index_backend='reference', or mxfp4 keys and 'triton'"
        )


def check_topk(config: CacheConfig, *, index: str) -> None:
    """Refuse more entries or candidate blocks than Triton's top-k counts, which all others use."""
    names = ("index_topk", "candidate_topk_blocks")[: 1 + (config.candidate_source_layer_id >= 0)]
    for name in names if index != "reference" else ():
        if (value := getattr(config, name)) > MAX_TOPK:
            raise ValueError(
                f"Invalid {name} of index_backend {index!r}: expected at most {MAX_TOPK}, "
                f"got {value}"
            )


def external_problem(name: str, load: Callable[[], object]) -> str | None:
    """Say why the kernels that `load` imports cannot run on this machine; None if they can."""
    try:
        load()
        _check_device(name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except (ImportError, ValueError) as error:
        return str(error)
    return None


def _check_name(what: str, name: object, valid: tuple[str, ...]) -> None:
    if name not in valid:
        raise ValueError(f"Unknown {what}: expected one of {', '.join(valid)}, got {name!r}")


def _expect(backend: str, what: str, value: object, expected: str, is_fit: bool) -> None:
    if not is_fit:
        raise ValueError(f"{backend!r} cannot read this cache: expected {what} {expected}, "
                         f"got {value!r}")  # fmt: skip


def _check_device(name: str, device: torch.device) -> None:
    check_backend("triton", device)  # our own kernels list the rows and prepare the queries
    if device.type != "cuda":
        return
    major = torch.cuda.get_device_capability(device)[0]
    if major not in ARCHITECTURES:
        raise ValueError(
            f"Invalid device of {name!r}: expected compute capability 9 or 10, got {major}"
        )
