"""Find SGLang's kernels of DeepSeek-V4.

SGLang compiles a kernel with nvcc on its first call and keeps the result. It is imported on its
first use; `DSV4_PEERS`, or `find.add_folder`, names one more folder to search.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.external.find import add_environment_folder, import_external

MODULE = "sglang.kernels.ops.attention.dsv4"
RING_ROWS = {4: 8, 128: 128}  # rows of a request's compressor state, by compression ratio
WINDOW_PAGE = 256  # window rows per page


class SGLangKernels(NamedTuple):
    """SGLang's functions of a decode step, one token a request; arguments in order.

    plan_topk makes the plan of choose_entries: lengths `[batch]` int32.
    choose_entries writes the rows of the best entries, in any order: scores `[batch, entries]`
    fp32, lengths, block table `[batch, pages]` int32, rows `[batch, topk]` int32, rows per page,
    plan.
    make_query returns E4M3 codes, and weights `[batch, heads, 1]` fp32 that include factor and
    scale: queries `[batch, heads, 128]` and weights `[batch, heads]` of one dtype, factor,
    frequencies, positions.
    store_window norms, rotates and stores kv: kv `[batch, 512]`, norm weight of the same dtype,
    eps, frequencies, positions, rows `[batch]` int32, pages, rows per page.
    plan_compress makes the plan of pool: ratio, slots and lengths `[batch]` int64.
    pool returns `[batch, dim]`: state `[pages, ratio, width]`, projections `[batch, width]` and
    bias `[rows, dim]`, all fp32, plan.
    store_entries stores pooled rows: rows, plan, norm weight, eps, frequencies, rows `[batch]`
    int64, pages, rows per page, whether the pages are MXFP4.

    Frequencies are `[positions, 32]` complex, pages `[num_pages, page_bytes]` uint8.
    """

    plan_topk: Callable[[Tensor], Tensor]
    choose_entries: Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor], None]
    make_query: Callable[[Tensor, Tensor, float, Tensor, Tensor], tuple[Tensor, Tensor]]
    store_window: Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor, int], None]
    plan_compress: Callable[[int, Tensor, Tensor], Any]
    pool: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    store_entries: Callable[[Tensor, Any, Tensor, float, Tensor, Tensor, Tensor, int, bool], None]


@cache
def load_sglang() -> SGLangKernels:
    """Load SGLang's kernels, or raise an ImportError that says what to install."""
    environment = dict(os.environ)
    add_environment_folder()
    try:
        _check_tools()
        import_external("tvm_ffi")
        return _kernels_of(import_external(MODULE))
    except ImportError as error:
        raise ImportError(
            "comparing with SGLang needs its kernels of DeepSeek-V4, and what compiles them: "
            f"pip install sglang==0.5.23, CUDA's nvcc and ninja ({error})"
        ) from error
    finally:  # SGLang's import moves the caches of Triton and others
        os.environ.clear()
        os.environ.update(environment)


def _check_tools() -> None:
    if shutil.which("ninja") is None:
        raise ImportError("ninja: not installed")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return
    compiler = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    if not compiler.exists():
        raise ImportError(f"nvcc: expected it on the path or at {compiler}")


def _kernels_of(package: Any) -> SGLangKernels:
    for name in (
        "plan_topk_v2", "topk_transform_paged_v2", "fused_q_indexer_rope_hadamard_quant",
        "fused_k_norm_rope_flashmla", "CompressorDecodePlan", "compress_forward",
        "compress_norm_rope_store",
    ):  # fmt: skip
        if not hasattr(package, name):
            raise ImportError(f"{MODULE}: has no {name}")

    def plan_compress(ratio: int, slots: Tensor, lengths: Tensor) -> Any:
        unused = torch.zeros(1, 1, dtype=torch.int32, device=slots.device)
        return package.CompressorDecodePlan.generate(
            compress_ratio=ratio, req_pool_indices=slots, req_to_token=unused,
            full_to_state=unused[0].long(), seq_lens=lengths, swa_page_size=WINDOW_PAGE,
            ring_size=RING_ROWS[ratio], use_req_ring=ratio == 4,
        )  # fmt: skip

    def pool(state: Tensor, projections: Tensor, bias: Tensor, plan: Any) -> Tensor:
        pooled: Tensor = package.compress_forward(
            state, projections, bias, plan,
            head_dim=bias.shape[1], compress_ratio=plan.compress_ratio,
        )  # fmt: skip
        return pooled

    def store_entries(
        pooled: Tensor, plan: Any, norm_weight: Tensor, eps: float, frequencies: Tensor,
        rows: Tensor, pages: Tensor, page_rows: int, is_fp4: bool,
    ) -> None:  # fmt: skip
        package.compress_norm_rope_store(
            pooled, plan, norm_weight=norm_weight, norm_eps=eps, freq_cis=frequencies,
            out_loc=rows, kvcache=pages, page_size=page_rows, use_fp4=is_fp4,
        )  # fmt: skip

    return SGLangKernels(
        package.plan_topk_v2, package.topk_transform_paged_v2,
        package.fused_q_indexer_rope_hadamard_quant, package.fused_k_norm_rope_flashmla,
        plan_compress, pool, store_entries,
    )  # fmt: skip
