"""What a step of the cache is given and what it must do: contracts, and the choice of backend.

A backend has the functions of `Backend`. `reference` defines the meaning of each; the others
store the same bytes and select the same entries. A backend that is asked for runs or raises;
nothing falls back in silence. `triton` has kernels for the write path; its gathers, its indexer
and its attention are the reference's.

-1 is the only sentinel: a slot of a padding row, a block or row that does not exist.
"""

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dsv4.formats import PagedRows
from dsv4.model.rope import RopeTable

BACKENDS = ("reference", "triton")


@dataclass(frozen=True)
class TokenMap:
    """The device side of a plan: whose tokens these are and where their rows go. All int32.

    Attributes:
        request_slots: `[batch]`; -1 is a padding row, which touches nothing.
        positions_before, positions_after: `[batch]`, lengths around this forward.
        token_starts: `[batch]`, index of a request's first token.
        positions, request_ids: `[num_tokens]`, position of a token and its row of the batch.
        workspace_starts: `[batch]`, first window-workspace row of a request whose chunk is too
            long to be read back from its ring; -1 where the ring is enough.
        chunk_ids: `[num_chunks]`, the rows of the batch that have a workspace start.
        block_table: `[max_requests, max_blocks]`, by slot; -1 where there is no block.
        max_step: The most tokens of one request; a number, known on the host.
    """

    request_slots: Tensor
    positions_before: Tensor
    positions_after: Tensor
    token_starts: Tensor
    positions: Tensor
    request_ids: Tensor
    workspace_starts: Tensor
    chunk_ids: Tensor
    block_table: Tensor
    max_step: int


class CompressorWeights(NamedTuple):
    """Learned tensors of one compressor.

    position_bias is `[ratio, num_series × dim]`, norm_weight `[dim]`.
    """

    position_bias: Tensor
    norm_weight: Tensor


class CompressorInputs(NamedTuple):
    """A compressor's projections, each `[num_tokens, num_series × head_dim]`."""

    kv: Tensor
    gate: Tensor


class IndexInputs(NamedTuple):
    """The indexer's projections: kv, gate `[num_tokens, 2 × dim]` of its own compressor, query
    `[num_tokens, index_heads, dim]` before RoPE, head_weights `[num_tokens, index_heads]`.
    """

    kv: Tensor
    gate: Tensor
    query: Tensor
    head_weights: Tensor


class LayerProjections(NamedTuple):
    """What a layer hands to the cache in one forward, fp32 or bf16.

    query is `[num_tokens, heads, head_dim]`, normed and rotated; kv `[num_tokens, head_dim]`,
    before its norm. compressor is None for SWA, indexer None unless CSA.
    """

    query: Tensor
    kv: Tensor
    compressor: CompressorInputs | None = None
    indexer: IndexInputs | None = None


class LayerWeights(NamedTuple):
    """The learned tensors that the cache applies itself: kv_norm `[head_dim]`, sinks `[heads]`."""

    kv_norm: Tensor
    sinks: Tensor | None
    compressor: CompressorWeights | None = None
    indexer: CompressorWeights | None = None


class WindowRows(NamedTuple):
    """Where the rows of the sliding window lie.

    ring has one page per slot; workspace is one page that holds, for each request with a
    `workspace_start`, its last `window - 1` rows from before the chunk and then the chunk's own.
    """

    ring: PagedRows
    workspace: PagedRows
    window: int


class PoolingScratch(NamedTuple):
    """Where programs that share a window leave their parts: pooled `[windows, head_dim]` fp32,
    and arrivals `[windows]` int32, which is 0 before and after every launch.

    There are as many windows as can close in one forward, one every 128 tokens and one more for
    each request: the window that a token closes is number request + token // 128.
    """

    pooled: Tensor
    arrivals: Tensor


class LayerMemory(NamedTuple):
    """Where a layer's rows lie: window, and for CSA and HCA entries and tail; CSA has both twice.

    global_scale is NVFP4's, or None.
    """

    window: WindowRows
    entries: PagedRows | None
    tail: Tensor | None
    index_keys: PagedRows | None
    index_tail: Tensor | None
    global_scale: Tensor | None
    scratch: PoolingScratch


class Selection(NamedTuple):
    """Entries chosen per token, in ascending entry index, then -1.

    entry_idx is `[num_tokens, topk]` int32, index of the entry in its request; rows is
    `[num_tokens, topk]` int64, flat row in the layer's pages; counts is `[num_tokens]` int32.
    """

    entry_idx: Tensor
    rows: Tensor
    counts: Tensor


class Gathered(NamedTuple):
    """Dense rows and which of them exist.

    values is `[..., rows, dim]` in the format's value dtype, zero where is_present
    `[..., rows]` is False.
    """

    values: Tensor
    is_present: Tensor


class AttentionResult(NamedTuple):
    """output `[num_tokens, heads, dim]`, and lse `[num_tokens, heads]` fp32 without the sink."""

    output: Tensor
    lse: Tensor


class Backend(Protocol):
    """The functions a backend has; `kernels.reference` documents each."""

    def write_layer(
        self, inputs: LayerProjections, weights: LayerWeights, memory: LayerMemory,
        tokens: TokenMap, rope: RopeTable, *, ratio: int, eps: float, has_hadamard: bool,
    ) -> None: ...  # fmt: skip

    def append_swa(
        self, kv: Tensor, norm_weight: Tensor, tokens: TokenMap, window: WindowRows,
        rope: RopeTable, *, eps: float,
    ) -> None: ...  # fmt: skip

    def flush_csa(
        self, kv: Tensor, gate: Tensor, weights: CompressorWeights, tail: Tensor,
        entries: PagedRows, index_kv: Tensor, index_gate: Tensor,
        index_weights: CompressorWeights, index_tail: Tensor, index_keys: PagedRows,
        tokens: TokenMap, rope: RopeTable, *,
        eps: float, has_hadamard: bool, global_scale: Tensor | None,
    ) -> None: ...  # fmt: skip

    def flush_hca(
        self, kv: Tensor, gate: Tensor, weights: CompressorWeights, tail: Tensor,
        entries: PagedRows, tokens: TokenMap, rope: RopeTable, *, eps: float,
    ) -> None: ...  # fmt: skip

    def select_entries(
        self, query: Tensor, head_weights: Tensor, keys: PagedRows, tokens: TokenMap,
        rope: RopeTable, *, ratio: int, topk: int, max_entries: int, has_hadamard: bool,
        global_scale: Tensor | None,
    ) -> Selection: ...  # fmt: skip

    def attend(
        self, query: Tensor, sinks: Tensor | None, window: WindowRows,
        entries: PagedRows | None, selected_rows: Tensor | None, tokens: TokenMap,
        rope: RopeTable, *, ratio: int, max_entries: int,
    ) -> AttentionResult: ...  # fmt: skip

    def gather_compressed_kv(self, entries: PagedRows, rows: Tensor) -> Gathered: ...

    def gather_all_compressed_kv(
        self, entries: PagedRows, tokens: TokenMap, *, ratio: int, max_entries: int
    ) -> Gathered: ...

    def gather_swa_kv(self, window: WindowRows, tokens: TokenMap) -> Gathered: ...


def load_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name, for tensors on `device`."""
    if name not in BACKENDS:
        raise ValueError(f"Unknown backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    reference = importlib.import_module("dsv4.kernels.reference")
    if name == "reference":
        return cast(Backend, reference)
    try:
        from triton import knobs
    except ModuleNotFoundError as error:
        raise ImportError("backend='triton' needs Triton: pip install 'dsv4[triton]'") from error
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(
            f"Invalid device of backend 'triton': expected cuda, got {device} "
            "(TRITON_INTERPRET=1 runs it on the CPU, slowly)"
        )
    kernels = importlib.import_module("dsv4.kernels.triton")
    functions = {**vars(reference), **{n: getattr(kernels, n) for n in kernels.__all__}}
    return cast(Backend, SimpleNamespace(**functions))
