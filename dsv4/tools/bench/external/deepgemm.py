"""DeepGEMM's scores of a prefill chunk, for `dsv4 bench prefill --compare`.

`fp8_mqa_logits` reads dense FP8 keys and FP8 queries. Both are random numbers here, made
beforehand. It writes the scores of all entries, so that a chunk is scored in several calls.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels.external import find
from dsv4.kernels.reference.addressing import visible_entries

QUERIES_AT_ONCE = 1024
CHECKED_ENTRIES = 1024
SCORE_ERROR = 2.0**-6  # of the largest score: products are added with 13 bits on Hopper

# Scores `[num_tokens, entries]` fp32 of queries `[num_tokens, heads, 128]` E4M3, keys
# `[entries, 128]` E4M3, scales `[entries]` fp32, weights `[num_tokens, heads]` fp32, and the first
# and the end entry of each token, int32; undefined outside of these.
MqaLogits = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def load_mqa_logits() -> MqaLogits:
    """Load DeepGEMM's scores of dense FP8 keys; an ImportError says what is missing."""
    return find.load_first(
        [partial(_mqa_logits, name) for name in ("deep_gemm", "vllm.third_party.deep_gemm")],
        "comparing with DeepGEMM needs its fp8_mqa_logits, or vLLM's copy",
    )


def _mqa_logits(name: str) -> MqaLogits:
    package = find.import_external(name)
    if not hasattr(package, "fp8_mqa_logits"):
        raise ImportError(f"{name}: has no fp8_mqa_logits")

    def run(
        query: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, first: Tensor, end: Tensor
    ) -> Tensor:
        scores: Tensor = package.fp8_mqa_logits(
            query, (keys, scales), weights, first, end, clean_logits=False
        )
        return scores

    return run


class ChunkLogits:
    """DeepGEMM's scores of a chunk's queries, ready to be repeated."""

    def __init__(self, logits: MqaLogits, query: Tensor, handle: LayerCacheHandle) -> None:
        self._logits, device = logits, query.device
        ratio = handle.layer.ratio
        self._end = visible_entries(handle.positions.long(), ratio).int()
        self._first = torch.zeros_like(self._end)
        num_entries = handle.plan.max_entries(ratio)
        self._query = query.to(torch.float8_e4m3fn)
        keys = torch.randn(num_entries, query.shape[2], device=device)
        self._keys = keys.to(torch.float8_e4m3fn)
        self._scales = torch.rand(num_entries, device=device) + 0.5
        self._weights = torch.randn(query.shape[:2], device=device)

    def _score(self, start: int) -> Tensor:
        part = slice(start, start + QUERIES_AT_ONCE)
        return self._logits(
            self._query[part], self._keys, self._scales, self._weights[part], self._first[part],
            self._end[part],
        )  # fmt: skip

    def run(self) -> None:
        for start in range(0, len(self._query), QUERIES_AT_ONCE):
            self._score(start)

    def check(self) -> None:
        """Refuse scores of the last query that differ from the products'."""
        end = int(self._end[-1])
        seen = slice(max(0, end - CHECKED_ENTRIES), end)
        products = self._query[-1].float() @ self._keys[seen].float().T
        want = (products.relu() * self._weights[-1, :, None]).sum(dim=0) * self._scales[seen]
        got = self._score(max(0, len(self._query) - QUERIES_AT_ONCE))[-1, seen]
        if not (got - want).abs().max() <= SCORE_ERROR * want.abs().max():
            raise RuntimeError("DeepGEMM's scores differ from the products; nothing is timed")
