"""What a step of the cache is given and what it must do: contracts, and the choice of backend.

A backend has the functions of `Backend`. `reference` defines the meaning of each; the others
store the same bytes and select the same entries. A backend that is asked for runs or raises;
nothing falls back in silence.

-1 is the only sentinel: a slot of a padding row, a block or row that does not exist.
"""

import importlib
from dataclasses import astuple, dataclass, field, fields
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dsv4.formats import (
    IndexFormatName,
    KVFormatName,
    PagedRows,
    RowFormat,
    cut_tail,
    index_row,
    kv_row,
)
from dsv4.model.rope import RopeTable

BACKENDS = ("reference", "triton")
PEERS = ("flashmla", "deepgemm")  # of one function each: attend, select_entries


class TokenMap(NamedTuple):
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


@dataclass(frozen=True)
class LayerLayout:
    """Where a layer's rows lie in the raw storages, as plain numbers and names.

    Attributes:
        ratio: Tokens per entry; 0 for SWA.
        window: Tokens of the sliding window.
        ring_offset, ring_rows: First byte of the ring in a slot, and its rows.
        workspace_rows: Rows of the window workspace.
        entries_offset, index_offset: First byte of the pages in a block; -1 for none.
        entries_per_block: Rows of a page.
        tail_offset, index_tail_offset: First byte of the tails in a slot; -1 for none.
        tail_rows: Rows of a tail.
        num_series: Projections a token carries: CSA 2, HCA 1, SWA 0.
        head_dim, rope_dim: Width of a KV row, and of its rotated part.
        index_head_dim: Width of an index key.
        kv_format, index_format, tail_dtype: Names of the row formats and of the tails' dtype.
        key: All of the above in one string, which `from_key` reads back.
    """

    ratio: int
    window: int
    ring_offset: int
    ring_rows: int
    workspace_rows: int
    entries_offset: int
    index_offset: int
    entries_per_block: int
    tail_offset: int
    index_tail_offset: int
    tail_rows: int
    num_series: int
    head_dim: int
    rope_dim: int
    index_head_dim: int
    kv_format: KVFormatName
    index_format: IndexFormatName
    tail_dtype: Literal["float32", "bfloat16"]
    key: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", " ".join(map(str, astuple(self)[:-1])))

    @staticmethod
    @cache
    def from_key(key: str) -> "LayerLayout":
        """The layout of that key."""
        names = [field.name for field in fields(LayerLayout) if field.init]
        values = [int(part) if part.lstrip("-").isdigit() else part for part in key.split(" ")]
        return LayerLayout(**dict(zip(names, values, strict=True)))  # type: ignore[arg-type]

    @cached_property
    def kv_row(self) -> RowFormat:
        """The row of a window token or compressed entry."""
        return kv_row(self.kv_format, head_dim=self.head_dim, rope_dim=self.rope_dim)

    @cached_property
    def index_row(self) -> RowFormat:
        """The row of an index key."""
        return index_row(self.index_format, head_dim=self.index_head_dim)


class LayerStorages(NamedTuple):
    """The raw storages, and where one layer's rows lie in them.

    slots is `[max_requests, slot_bytes]`, blocks `[num_blocks, block_bytes]`, workspace
    `[1, bytes]`, all uint8; pooled and arrivals are those of `PoolingScratch`; index_scratch
    `[bytes]` uint8 is what `index_scratch` cuts up; partials is where attention that is split over
    rows leaves its parts, `[num_partials, heads × (head_dim + 2)]` fp32, each a token's
    accumulators, largest logits and sums; global_scale is NVFP4's `[]` fp32, or None.
    """

    slots: Tensor
    blocks: Tensor
    workspace: Tensor
    pooled: Tensor
    arrivals: Tensor
    index_scratch: Tensor
    partials: Tensor
    global_scale: Tensor | None
    layout: LayerLayout


class LayerMemory(LayerStorages):
    """A layer's storages, and the rows that are cut out of them, once."""

    @cached_property
    def window(self) -> WindowRows:
        """The ring and the workspace."""
        layout = self.layout
        return WindowRows(
            PagedRows(layout.kv_row, self.slots, layout.ring_offset, layout.ring_rows),
            PagedRows(layout.kv_row, self.workspace, 0, layout.workspace_rows),
            layout.window,
        )

    @cached_property
    def entries(self) -> PagedRows | None:
        """Pages of compressed entries; None for SWA."""
        return self._pages(self.layout.entries_offset, self.layout.kv_row)

    @cached_property
    def index_keys(self) -> PagedRows | None:
        """Pages of index keys; None unless CSA."""
        if self.layout.index_offset < 0:
            return None
        return self._pages(self.layout.index_offset, self.layout.index_row)

    @property
    def tail(self) -> Tensor | None:
        """`[max_requests, tail_rows, 2, num_series × head_dim]`; None for SWA."""
        return self._tail(self.layout.tail_offset, self.layout.head_dim)

    @property
    def index_tail(self) -> Tensor | None:
        """The same of the indexer; None unless CSA."""
        return self._tail(self.layout.index_tail_offset, self.layout.index_head_dim)

    @property
    def scratch(self) -> PoolingScratch:
        return PoolingScratch(self.pooled, self.arrivals)

    @cached_property
    def cut_partials(self) -> tuple[Tensor, Tensor]:
        """All accumulators, then all largest logits and sums, each flat."""
        flat, dim = self.partials.view(-1), self.layout.head_dim
        num_accumulators = flat.shape[0] // (dim + 2) * dim
        return flat[:num_accumulators], flat[num_accumulators:]

    def _pages(self, offset: int, row: RowFormat) -> PagedRows | None:
        if offset < 0:
            return None
        return PagedRows(row, self.blocks, offset, self.layout.entries_per_block)

    def _tail(self, offset: int, head_dim: int) -> Tensor | None:
        layout = self.layout
        if offset < 0:
            return None
        return cut_tail(
            self.slots, offset=offset, num_rows=layout.tail_rows,
            width=layout.num_series * head_dim, dtype=getattr(torch, layout.tail_dtype),
        )  # fmt: skip


class WindowInputs(NamedTuple):
    """kv `[num_tokens, head_dim]` before its norm, and norm_weight `[head_dim]`."""

    kv: Tensor
    norm_weight: Tensor


class EntryInputs(NamedTuple):
    """A compressor's projections `[num_tokens, num_series × dim]` and its learned tensors."""

    kv: Tensor
    gate: Tensor
    weights: CompressorWeights


class LayerWrites(NamedTuple):
    """What one write stores: window rows, entries, index keys; a part that is None is left out."""

    window: WindowInputs | None = None
    entries: EntryInputs | None = None
    index_keys: EntryInputs | None = None

    @classmethod
    def of(cls, inputs: LayerProjections, weights: LayerWeights) -> "LayerWrites":
        """Everything that a layer stores in one forward."""
        entries = index_keys = None
        if inputs.compressor is not None and weights.compressor is not None:
            compressor = inputs.compressor
            entries = EntryInputs(compressor.kv, compressor.gate, weights.compressor)
        if inputs.indexer is not None and weights.indexer is not None:
            index_keys = EntryInputs(inputs.indexer.kv, inputs.indexer.gate, weights.indexer)
        return cls(WindowInputs(inputs.kv, weights.kv_norm), entries, index_keys)


class CapturePoints(NamedTuple):
    """Block boundaries inside chunks, and where a layer's rows at them go.

    points is `[num_captures, 3]` int32: row of the batch, boundary, checkpoint; checkpoints is
    `[num_checkpoints, checkpoint_bytes]` uint8, each laid out as the front of a slot.
    """

    points: Tensor
    checkpoints: Tensor


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
        self, writes: LayerWrites, memory: LayerMemory, tokens: TokenMap, rope: RopeTable, *,
        eps: float, has_hadamard: bool,
    ) -> None: ...  # fmt: skip

    def select_entries(
        self, query: Tensor, head_weights: Tensor, memory: LayerMemory, tokens: TokenMap,
        rope: RopeTable, *, topk: int, max_entries: int, has_hadamard: bool,
    ) -> Selection: ...  # fmt: skip

    def attend(
        self, query: Tensor, sinks: Tensor | None, memory: LayerMemory,
        selected_rows: Tensor | None, tokens: TokenMap, rope: RopeTable, *, max_entries: int,
        batch_invariant: bool,
    ) -> AttentionResult: ...  # fmt: skip

    def gather_compressed_kv(self, memory: LayerMemory, rows: Tensor) -> Gathered: ...

    def gather_all_compressed_kv(
        self, memory: LayerMemory, tokens: TokenMap, *, max_entries: int
    ) -> Gathered: ...

    def gather_swa_kv(self, memory: LayerMemory, tokens: TokenMap) -> Gathered: ...

    def capture_window(
        self, captures: CapturePoints, memory: LayerMemory, tokens: TokenMap
    ) -> None: ...

    def capture_tails(
        self, captures: CapturePoints, memory: LayerMemory, tokens: TokenMap, writes: LayerWrites
    ) -> None: ...


def default_backend(device: torch.device) -> str:
    """The backend for tensors on `device` where none is asked for."""
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
    """The functions of the backend of that name; a peer has one, the others are Triton's."""
    if name not in BACKENDS + PEERS:
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
    if name in PEERS:
        peer = importlib.import_module(f"dsv4.kernels.peers.{name}")
        function = "attend" if name == "flashmla" else "select_entries"
        functions[function] = getattr(peer, function)
    return cast(Backend, SimpleNamespace(**functions))
