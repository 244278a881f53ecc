"""`LayerCacheHandle`: one layer of the cache for one forward. Allocates nothing in the pools."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.cache.flush import maybe_flush_csa, maybe_flush_hca
from dsv4.cache.memory.paged_cache import LayerPages
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.cache.memory.state_cache import LayerState
from dsv4.cache.plan import ForwardPlan, LayerProgress
from dsv4.config import CacheConfig
from dsv4.kernels import ops
from dsv4.kernels.contracts import (
    AttentionResult,
    CompressorWeights,
    EntryInputs,
    Gathered,
    LayerProjections,
    LayerWeights,
    LayerWrites,
    Selection,
    TokenMap,
    WindowInputs,
)
from dsv4.kernels.layer_memory import LayerMemory, WindowRows
from dsv4.layer_schedule import AttentionType, LayerSpec
from dsv4.rope import RopeTable

INPUT_DTYPES = (torch.float32, torch.bfloat16)
QUERY_DTYPES = {"flashmla": (torch.bfloat16,)}  # by attention backend, where not all of the above


class SWAView(NamedTuple):
    """The rings of the batch: views of all slots, and what this forward's lengths make of them.

    fp8, rope, inv_scale are `[max_requests, ring_rows, ..]`; inv_scale is None in formats
    without scales. positions is `[batch, ring_rows]`: the position a ring row holds after this
    forward, -1 for none; head `[batch]` is the row the next token will take, and slots
    `[batch]` names the request slots.
    """

    fp8: Tensor
    rope: Tensor
    inv_scale: Tensor | None
    positions: Tensor
    head: Tensor
    slots: Tensor


class ClassicalView(NamedTuple):
    """The paged, compressed part: `[num_blocks, entries_per_block, ..]`, table and lengths."""

    entries_fp8: Tensor
    entries_rope: Tensor
    inv_scale: Tensor | None
    block_table: Tensor
    block_lens: Tensor


class IndexerView(NamedTuple):
    """The index keys of a CSA layer: `[num_blocks, entries_per_block, ..]`, table and lengths."""

    keys_fp4: Tensor
    scale: Tensor | None
    global_scale: Tensor
    block_table: Tensor
    block_lens: Tensor


@dataclass(eq=False)
class LayerCacheHandle:
    """Typed access to one layer in one forward; made by `KVCacheManager.acquire`.

    In a forward a layer is written first, then read: `write_swa`, `flush_compression` (CSA and
    HCA), `select_entries` (CSA), `attend`; `forward` is all of them. Reads see rows as they are
    stored.
    """

    config: CacheConfig
    layer: LayerSpec
    schema: LayerCacheSchema
    paged: LayerPages | None
    state: LayerState
    memory: LayerMemory
    rope: RopeTable
    plan: ForwardPlan
    progress: LayerProgress
    backend: str
    attention_backend: str
    index_backend: str
    batch_invariant: bool = False

    @property
    def num_query_heads(self) -> int:
        return self.config.num_query_heads

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    @property
    def tokens(self) -> TokenMap:
        """The device side of the plan, as long as it is the manager's current one."""
        self.plan.check_current()
        return self.plan.tokens

    @property
    def request_slots(self) -> Tensor:
        """`[batch]` int32; -1 is a padding row."""
        return self.tokens.request_slots

    @property
    def positions(self) -> Tensor:
        """`[num_tokens]` int32, the position of each token in its request."""
        return self.tokens.positions

    @property
    def request_ids(self) -> Tensor:
        """`[num_tokens]` int32, the row of the batch each token belongs to."""
        return self.tokens.request_ids

    @property
    def block_table(self) -> Tensor:
        """`[batch, max_blocks]` int32, a copy in batch order; -1 where there is no block."""
        slots = self.request_slots.long()
        rows = self.tokens.block_table[slots.clamp(min=0)]
        return torch.where(slots[:, None] >= 0, rows, -1)

    @property
    def block_lens(self) -> Tensor:
        """`[batch]` int32, closed entries of each request after this forward; 0 for padding."""
        if not self.layer.ratio:
            return torch.zeros_like(self.request_slots)
        return self._lengths() // self.layer.ratio

    @property
    def tail_len(self) -> Tensor:
        """`[batch]` int32, tokens of the open compression window; 0 for SWA and padding."""
        if not self.layer.ratio:
            return torch.zeros_like(self.request_slots)
        return self._lengths() % self.layer.ratio

    @property
    def swa_head(self) -> Tensor:
        """`[batch]` int32, the ring row that each request's next token will take."""
        return self._lengths() % self.schema.ring_rows

    @property
    def swa_pos(self) -> Tensor:
        """`[batch, ring_rows]` int32, the position each ring row holds after this forward.

        -1 for none.
        """
        rows, last = self.schema.ring_rows, self._lengths()[:, None] - 1
        row = torch.arange(rows, device=last.device, dtype=torch.int32)
        positions = last - (last - row) % rows
        return torch.where(positions >= 0, positions, -1)

    @property
    def window(self) -> WindowRows:
        """Where this layer's window rows lie."""
        return self.memory.window

    def forward(self, inputs: LayerProjections, weights: LayerWeights) -> AttentionResult:
        """Everything between a layer's projections and its attention output, in order.

        All inputs are checked before anything is written.
        """
        self.write(inputs, weights)
        rows = None
        if inputs.indexer is not None:
            rows = self.select_entries(inputs.indexer.query, inputs.indexer.head_weights).rows
        return self._attend(inputs.query, weights.sinks, rows)

    def write(self, inputs: LayerProjections, weights: LayerWeights) -> None:
        """`write_swa` and `flush_compression` in one: everything that the layer stores."""
        self._check_inputs(inputs, weights)
        self._write(LayerWrites.of(inputs, weights))

    def write_swa(self, kv: Tensor, norm_weight: Tensor) -> None:
        """Norm, rotate, quantise and store the window rows of this forward's tokens.

        Args:
            kv: `[num_tokens, head_dim]` fp32 or bf16, as projected.
            norm_weight: `[head_dim]`.
        """
        self._check_kv(kv, norm_weight)
        self._write(LayerWrites(window=WindowInputs(kv, norm_weight)))

    def flush_compression(
        self,
        kv: Tensor,
        gate: Tensor,
        weights: CompressorWeights,
        *,
        index_kv: Tensor | None = None,
        index_gate: Tensor | None = None,
        index_weights: CompressorWeights | None = None,
    ) -> None:
        """Take the compressor's projections; store the entries of the windows that close.

        Args:
            kv, gate: `[num_tokens, series × head_dim]` fp32 or bf16; two series for CSA.
            index_kv, index_gate: `[num_tokens, 2 × index_head_dim]`; for CSA, and only there.
        """
        self._check_compression(kv, gate, weights, index_kv, index_gate, index_weights)
        memory, tokens, rope, config = self.memory, self.tokens, self.rope, self.config
        writes = LayerWrites(
            entries=EntryInputs(kv, gate, weights),
            index_keys=None
            if index_kv is None or index_gate is None or index_weights is None
            else EntryInputs(index_kv, index_gate, index_weights),
        )

        def flush() -> None:
            self._capture_tails(writes)
            if index_kv is None or index_gate is None or index_weights is None:
                maybe_flush_hca(
                    kv, gate, weights, memory, tokens, rope, config=config, backend=self.backend
                )
            else:
                maybe_flush_csa(
                    kv, gate, weights, index_kv, index_gate, index_weights, memory, tokens, rope,
                    config=config, backend=self.backend,
                )  # fmt: skip

        self.plan.run_write(self.progress, flush, window=False, entries=True)

    def select_entries(self, query: Tensor, head_weights: Tensor) -> Selection:
        """The top-k entries of each token of a CSA layer.

        Args:
            query: `[num_tokens, index_heads, index_head_dim]` fp32 or bf16, before RoPE.
            head_weights: `[num_tokens, index_heads]`, as projected.
        """
        self._index_pages()
        self._check_index_query(query, head_weights)
        self._check_entries()
        return ops.select_entries(
            query, head_weights, self.memory, self.tokens, self.rope,
            topk=self.config.index_topk,
            max_entries=self.plan.max_entries(self.layer.ratio),
            has_hadamard=self.config.index_hadamard,
            backend=self.index_backend,
        )  # fmt: skip

    def attend(
        self, query: Tensor, sinks: Tensor | None, selection: Selection | None = None
    ) -> AttentionResult:
        """Attention of each token over its window and its entries.

        Args:
            query: `[num_tokens, heads, head_dim]` fp32 or bf16, normed and rotated.
            sinks: `[heads]`, or None to leave the sink out.
            selection: What `select_entries` gave; CSA needs it, the others have none.

        Returns:
            Output rotated back, in the query's dtype (0 for padding), and the log-sum-exp.
        """
        is_csa = self.layer.attention_type is AttentionType.CSA
        if is_csa != (selection is not None):
            expected = "a selection" if is_csa else "no selection"
            raise ValueError(
                f"Invalid attend of layer {self.layer.layer_idx} "
                f"({self.layer.attention_type.name}): expected {expected}"
            )
        self._check_query(query, sinks)
        if selection is not None:
            shape = (self.plan.num_tokens, self.config.index_topk)
            self._check("selection.rows", selection.rows, shape, (torch.int64,))
        self._check_window()
        if self.paged is not None:
            self._check_entries()
        return self._attend(query, sinks, None if selection is None else selection.rows)

    def _attend(
        self, query: Tensor, sinks: Tensor | None, selected_rows: Tensor | None
    ) -> AttentionResult:
        return ops.attend(
            query, sinks, self.memory, selected_rows, self.tokens, self.rope,
            max_entries=self.plan.max_entries(self.layer.ratio),
            batch_invariant=self.batch_invariant,
            backend=self.attention_backend,
        )  # fmt: skip

    def gather_compressed_kv(self, rows: Tensor) -> Gathered:
        """Dense entries `[num_tokens, k, head_dim]` at a selection's rows."""
        self._pages()
        self._check("rows", rows, tuple(rows.shape), (torch.int64, torch.int32))
        self._check_entries()
        return ops.gather_compressed_kv(self.memory, rows, backend=self.backend)

    def gather_all_compressed_kv(self) -> Gathered:
        """Dense entries `[batch, max_entries, head_dim]`: all closed ones of each request."""
        self._pages()
        self._check_entries()
        return ops.gather_all_compressed_kv(
            self.memory, self.tokens,
            max_entries=self.plan.max_entries(self.layer.ratio),
            backend=self.backend,
        )  # fmt: skip

    def gather_swa_kv(self) -> Gathered:
        """Dense window rows `[num_tokens, window, head_dim]`, each token's own last."""
        self._check_window()
        return ops.gather_swa_kv(self.memory, self.tokens, backend=self.backend)

    def read_swa_view(self) -> SWAView:
        """The window rings, with positions and head derived from the lengths."""
        return SWAView(
            self.state.swa_fp8,
            self.state.swa_rope,
            self.state.swa_inv if self.schema.kv_row.scale_bytes else None,
            self.swa_pos,
            self.swa_head,
            self.request_slots,
        )

    def read_classical_view(self) -> ClassicalView:
        """The compressed entries of a CSA or HCA layer."""
        pages = self._pages()
        return ClassicalView(
            pages.entries_fp8,
            pages.entries_rope,
            pages.inv_scale if self.schema.kv_row.scale_bytes else None,
            self.block_table,
            self.block_lens,
        )

    def read_indexer_view(self) -> IndexerView:
        """The index keys of a CSA layer."""
        pages = self._index_pages()
        return IndexerView(
            pages.indexer_keys_fp4,
            pages.indexer_scale if self.schema.index_row.scale_bytes else None,
            pages.indexer_global_scale,
            self.block_table,
            self.block_lens,
        )

    def _write(self, writes: LayerWrites) -> None:
        tokens = self.tokens

        def write() -> None:
            self._capture_tails(writes)
            ops.write_layer(
                writes, self.memory, tokens, self.rope,
                eps=self.config.rms_norm_eps,
                has_hadamard=self.config.index_hadamard,
                backend=self.backend,
            )  # fmt: skip
            if self.plan.captures is not None:
                ops.capture_window(self.plan.captures, self.memory, tokens, backend=self.backend)

        has_entries = writes.entries is not None
        self.plan.run_write(self.progress, write, window=True, entries=has_entries)

    def _capture_tails(self, writes: LayerWrites) -> None:
        """Before the write: it may overwrite rows that a boundary early in a chunk needs."""
        captures = self.plan.captures
        if captures is not None and writes.index_keys is not None:
            ops.capture_tails(captures, self.memory, self.tokens, writes, backend=self.backend)

    def _lengths(self) -> Tensor:
        """`[batch]` int32, lengths after this forward; 0 for padding."""
        return torch.where(self.request_slots >= 0, self.tokens.positions_after, 0)

    def _pages(self) -> LayerPages:
        if self.paged is None:
            raise ValueError(f"Layer {self.layer.layer_idx} is SWA: it has no compressed entries")
        return self.paged

    def _index_pages(self) -> LayerPages:
        pages = self._pages()
        if pages.index_keys is None:
            raise ValueError(
                f"Layer {self.layer.layer_idx} is {self.layer.attention_type.name}: "
                "only CSA layers have index keys"
            )
        return pages

    def _check(
        self,
        name: str,
        tensor: Tensor,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES,
    ) -> None:
        device = self.memory.slots.device
        if not isinstance(tensor, Tensor):
            raise TypeError(f"Invalid {name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device:
            return
        if tensor.shape != shape:
            raise ValueError(
                f"Invalid shape of {name}: expected {list(shape)}, got {list(tensor.shape)}"
            )
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"Invalid dtype of {name}: expected {names}, got {tensor.dtype}")
        raise ValueError(f"Invalid device of {name}: expected {device}, got {tensor.device}")

    def _check_inputs(self, inputs: LayerProjections, weights: LayerWeights) -> None:
        """All of `forward`'s inputs, before the first of them is written."""
        self._check_kv(inputs.kv, weights.kv_norm)
        self._check_query(inputs.query, weights.sinks)
        given = (inputs.compressor, weights.compressor)
        if any((part is not None) != (self.layer.ratio > 0) for part in given):
            expected = "compressor projections and weights" if self.layer.ratio else "none"
            raise ValueError(
                f"Invalid inputs of layer {self.layer.layer_idx} "
                f"({self.layer.attention_type.name}): expected {expected}"
            )
        if inputs.compressor is None or weights.compressor is None:
            return
        index = inputs.indexer
        self._check_compression(
            *inputs.compressor,
            weights.compressor,
            None if index is None else index.kv,
            None if index is None else index.gate,
            weights.indexer,
        )
        if index is not None:
            self._check_index_query(index.query, index.head_weights)

    def _check_kv(self, kv: Tensor, norm_weight: Tensor) -> None:
        self._check("kv", kv, (self.plan.num_tokens, self.head_dim))
        self._check("norm_weight", norm_weight, (self.head_dim,))

    def _check_query(self, query: Tensor, sinks: Tensor | None) -> None:
        shape = (self.plan.num_tokens, self.num_query_heads, self.head_dim)
        self._check("query", query, shape, QUERY_DTYPES.get(self.attention_backend, INPUT_DTYPES))
        if sinks is not None:
            self._check("sinks", sinks, (self.num_query_heads,))

    def _check_index_query(self, query: Tensor, head_weights: Tensor) -> None:
        num_tokens, heads = self.plan.num_tokens, self.config.index_num_heads
        self._check("query", query, (num_tokens, heads, self.config.index_head_dim))
        self._check("head_weights", head_weights, (num_tokens, heads))

    def _check_compression(
        self,
        kv: Tensor,
        gate: Tensor,
        weights: CompressorWeights,
        index_kv: Tensor | None,
        index_gate: Tensor | None,
        index_weights: CompressorWeights | None,
    ) -> None:
        if self.paged is None:
            raise ValueError(f"Layer {self.layer.layer_idx} is SWA: it has nothing to compress")
        is_csa = self.layer.attention_type is AttentionType.CSA
        index_inputs = (index_kv, index_gate, index_weights)
        if any((given is not None) != is_csa for given in index_inputs):
            expected = "index_kv, index_gate and index_weights" if is_csa else "no index inputs"
            raise ValueError(
                f"Invalid inputs of layer {self.layer.layer_idx} "
                f"({self.layer.attention_type.name}): expected {expected}, "
                f"got {sum(given is not None for given in index_inputs)} of 3"
            )
        self._check_compressor("", kv, gate, weights, self.head_dim)
        if index_kv is not None and index_gate is not None and index_weights is not None:
            self._check_compressor(
                "index_", index_kv, index_gate, index_weights, self.config.index_head_dim
            )

    def _check_compressor(
        self, prefix: str, kv: Tensor, gate: Tensor, weights: CompressorWeights, dim: int
    ) -> None:
        width = self.schema.num_series * dim
        self._check(f"{prefix}kv", kv, (self.plan.num_tokens, width))
        self._check(f"{prefix}gate", gate, (self.plan.num_tokens, width))
        self._check(f"{prefix}position_bias", weights.position_bias, (self.layer.ratio, width))
        self._check(f"{prefix}norm_weight", weights.norm_weight, (dim,))

    def _check_window(self) -> None:
        self._check_written("write_swa", is_written=self.progress.has_window)
        if self.plan.has_workspace and not self.plan.owns_workspace(self.progress):
            raise RuntimeError(
                f"The window rows of layer {self.layer.layer_idx} are gone: a chunk longer than "
                "the ring must be attended before the next layer is written"
            )

    def _check_entries(self) -> None:
        self._check_written("flush_compression", is_written=self.progress.has_entries)

    def _check_written(self, step: str, *, is_written: bool) -> None:
        self.plan.check_current()
        if not is_written:
            raise RuntimeError(
                f"Layer {self.layer.layer_idx} is read before it is written: call {step} first"
            )
