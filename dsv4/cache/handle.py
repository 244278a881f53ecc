"""`LayerCacheHandle`: one layer of the cache for one forward. Allocates nothing in the pools."""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.cache.flush import maybe_flush
from dsv4.cache.layer_checks import LayerChecks
from dsv4.cache.memory.paged_cache import LayerPages
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.cache.memory.state_cache import LayerState
from dsv4.cache.plan import ForwardPlan, LayerProgress
from dsv4.config import CacheConfig
from dsv4.distributed.context import SplitContext
from dsv4.errors import RankLostError
from dsv4.kernels import ops
from dsv4.kernels.contracts import (
    AttentionResult,
    CompressorWeights,
    Gathered,
    KeyWeights,
    LayerProjections,
    LayerWeights,
    LayerWrites,
    Selection,
    TokenMap,
    WindowInputs,
)
from dsv4.kernels.layer_memory import LayerMemory, WindowRows
from dsv4.layer_schedule import LayerSpec
from dsv4.rope import RopeRows


class SWAView(NamedTuple):
    """Views of all slots' rings, and the positions of the batch's rows in them.

    Attributes:
        fp8, rope, inv_scale: `[max_requests, ring_rows, ..]`, the fields of a row in any format;
            rope is None where it is no field of its own, inv_scale in formats without scales.
        positions: `[batch, ring_rows]`, the position a ring row holds after this forward, -1 for
            none.
        head: `[batch]`, the row that the next token will take.
        slots: `[batch]`, the request slots.
    """

    fp8: Tensor
    rope: Tensor | None
    inv_scale: Tensor | None
    positions: Tensor
    head: Tensor
    slots: Tensor


class ClassicalView(NamedTuple):
    """The paged, compressed part: `[num_blocks, entries_per_block, ..]`, table and lengths."""

    entries_fp8: Tensor
    entries_rope: Tensor | None
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


@dataclass(frozen=True)
class LayerParts:
    """All of a layer that no forward changes."""

    config: CacheConfig
    layer: LayerSpec
    schema: LayerCacheSchema
    paged: LayerPages | None
    state: LayerState
    memory: LayerMemory
    backend: str
    attention_backend: str
    index_backend: str
    batch_invariant: bool
    checks: LayerChecks
    part: int
    on_device: AbstractContextManager[object]
    context: SplitContext | None = None


@dataclass(eq=False)
class LayerCacheHandle:
    """Typed access to one layer in one forward; made by `KVCacheManager.acquire`.

    In a forward a layer is written first, then read: `write_swa`, `flush_compression` (CSA and
    HCA), `select_entries` (CSA), `attend`; `forward` is all of them. A layer that owns no entries
    has nothing to flush, and one that owns no choice attends that of another layer. Reads see rows
    as they are stored. Inputs are refused before anything is written, and can then be given again.
    Anything else that is raised inside cancels the plan.
    """

    parts: LayerParts
    plan: ForwardPlan
    progress: LayerProgress

    @property
    def config(self) -> CacheConfig:
        return self.parts.config

    @property
    def layer(self) -> LayerSpec:
        return self.parts.layer

    @property
    def schema(self) -> LayerCacheSchema:
        return self.parts.schema

    @property
    def paged(self) -> LayerPages | None:
        return self.parts.paged

    @property
    def state(self) -> LayerState:
        return self.parts.state

    @property
    def memory(self) -> LayerMemory:
        return self.parts.memory

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
        return self.plan.on_part(self.parts.part)[0]

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
    def rope(self) -> RopeRows:
        """cos and sin at each token, in the base of this layer."""
        rows = self.memory.rope_rows[int(self.layer.ratio > 0), :, : len(self.positions)]
        return RopeRows(*rows)

    @property
    def window(self) -> WindowRows:
        """Where this layer's window rows lie."""
        return self.memory.window

    def forward(
        self,
        inputs: LayerProjections,
        weights: LayerWeights,
        selection: Selection | None = None,
        *,
        is_query_raw: bool = False,
    ) -> AttentionResult:
        """Write a layer's rows, select its entries if it is CSA, and attend.

        All inputs are checked before anything is written. See `attend` for is_query_raw.

        Args:
            selection: That of the layer whose choice, or whose candidates, this one uses; None for
                a layer that uses neither.
        """
        self._check_shared(selection)
        self.write(inputs, weights)
        rows, index = None, inputs.indexer
        if index is not None:
            candidates = () if selection is None else (selection,)
            rows = self.select_entries(index.query, index.head_weights, *candidates).rows
        elif selection is not None:
            rows = selection.rows
        return self._attend(inputs.query, weights.sinks, rows, is_query_raw=is_query_raw)

    def _check_shared(self, selection: Selection | None) -> None:
        """Refuse a selection of any but the layer whose choice or candidates are used."""
        layer = self.layer
        source = layer.candidates_of if layer.owns_choice else layer.choice_of
        if selection is not None and source >= 0 and not layer.owns_entries:
            self._check_entries()
        name = "candidates" if layer.owns_choice else "selection"
        self._check_selection(name, selection, source)

    def _check_selection(self, name: str, selection: Selection | None, source: int) -> None:
        """Refuse a selection of any layer but the source, which is -1 for none."""
        own = self.plan.layer(source).selected if source >= 0 else None
        self.parts.checks.check_selection(name, selection, self.plan.num_tokens, own, source)

    def write(self, inputs: LayerProjections, weights: LayerWeights) -> None:
        """Store everything that the layer stores: `write_swa` and `flush_compression` in one."""
        self.parts.checks.check_inputs(inputs, weights, self.plan.num_tokens)
        self._write(LayerWrites.of(inputs, weights))

    def write_swa(self, kv: Tensor, norm_weight: Tensor) -> None:
        """Norm, rotate, quantise and store the window rows of this forward's tokens.

        Args:
            kv: `[num_tokens, head_dim]` fp32 or bf16, as projected.
            norm_weight: `[head_dim]`.
        """
        self.parts.checks.check_kv(kv, norm_weight, self.plan.num_tokens)
        self._write(LayerWrites(window=WindowInputs(kv, norm_weight)))

    def flush_compression(
        self,
        kv: Tensor,
        gate: Tensor | None,
        weights: CompressorWeights,
        *,
        index_kv: Tensor | None = None,
        index_gate: Tensor | None = None,
        index_weights: CompressorWeights | KeyWeights | None = None,
    ) -> None:
        """Take the compressor's projections; store the entries of the windows that close.

        Args:
            kv, gate: `[num_tokens, series × head_dim]` fp32 or bf16; two series for CSA. An entry
                of one token has no gate.
            index_kv, index_gate: `[num_tokens, 2 × index_head_dim]`; for CSA, and only there.
            index_weights: For CSA; of V4.1 `KeyWeights`, without index_kv and index_gate.
        """
        writes = self.parts.checks.check_compression(
            kv, gate, weights, index_kv, index_gate, index_weights, self.plan.num_tokens
        )
        self._write(writes)

    def _write(self, writes: LayerWrites) -> None:
        """Run the only write of these parts; a failure in it cancels the forward."""
        plan, parts = self.plan, self.parts
        window, entries = writes.window is not None, writes.entries is not None
        plan.begin_write(self.progress, window=window, entries=entries)
        tokens, boundaries = plan.on_part(parts.part)
        try:
            with parts.on_device:
                if boundaries is not None and self.schema.tail_buffer_size_b:
                    # Before the write, which may overwrite rows that an early boundary needs.
                    ops.checkpoint_tails(
                        boundaries, parts.memory, tokens, writes, backend=parts.backend
                    )
                if window:
                    ops.write_layer(writes, parts.memory, tokens, backend=parts.backend)
                else:
                    maybe_flush(writes, parts.memory, tokens, backend=parts.backend)
                if boundaries is not None and window:
                    ops.checkpoint_window(boundaries, parts.memory, tokens, backend=parts.backend)
        except BaseException:
            plan.cancel()
            raise
        plan.end_write(self.progress, window=window, entries=entries)

    def select_entries(
        self, query: Tensor, head_weights: Tensor, candidates: Selection | None = None
    ) -> Selection:
        """The top-k entries of each token of a CSA layer that owns its choice.

        Args:
            query: `[num_tokens, index_heads, index_head_dim]` fp32 or bf16, before RoPE.
            head_weights: `[num_tokens, index_heads]`, as projected.
            candidates: What `select_entries` of the candidate source returned in this forward; for
                the layers that choose among its blocks, and only there.
        """
        self._index_pages()
        if not self.layer.owns_choice:
            raise ValueError(
                f"Layer {self.layer.layer_idx} attends the choice of layer {self.layer.choice_of}: "
                "it selects no entries"
            )
        self.parts.checks.check_index_query(query, head_weights, self.plan.num_tokens)
        self._check_entries()
        self._check_shared(candidates)
        parts, plan = self.parts, self.plan
        blocks = None if candidates is None else candidates.blocks
        try:
            if parts.context is not None:
                selection = parts.context.select_entries(
                    query, head_weights, parts.memory, plan, blocks, backend=parts.index_backend
                )
            else:
                with parts.on_device:
                    selection = ops.select_entries(
                        query, head_weights, parts.memory, plan.on_part(parts.part)[0],
                        max_entries=plan.max_entries(parts.layer.ratio),
                        candidates=blocks, backend=parts.index_backend,
                    )  # fmt: skip
        except BaseException as error:
            self._fail(error)
            raise
        made = weakref.ref(selection.rows), weakref.ref(selection.blocks)
        self.progress.selected.append(made)
        return selection

    def attend(
        self,
        query: Tensor,
        sinks: Tensor | None,
        selection: Selection | None = None,
        *,
        is_query_raw: bool = False,
    ) -> AttentionResult:
        """Attention of each token over its window and its entries.

        Args:
            query: `[num_tokens, heads, head_dim]` fp32 or bf16, normed and rotated.
            sinks: `[heads]`, or None to leave the sink out.
            selection: What `select_entries` returned in this forward, of this layer or of the one
                whose choice it attends; CSA needs it, other layers take None.
            is_query_raw: The query is as projected: attention norms each head, without a weight
                and not in V4.1, and rotates it.

        Returns:
            Output rotated back, in the query's dtype (0 for padding), and the log-sum-exp.
        """
        self.parts.checks.check_query(query, sinks, self.plan.num_tokens)
        self._check_window()
        if self.paged is not None:
            self._check_entries()
        self._check_selection("selection", selection, self.layer.choice_of)
        rows = None if selection is None else selection.rows
        return self._attend(query, sinks, rows, is_query_raw=is_query_raw)

    def _attend(
        self,
        query: Tensor,
        sinks: Tensor | None,
        selected_rows: Tensor | None,
        *,
        is_query_raw: bool,
    ) -> AttentionResult:
        parts, plan = self.parts, self.plan
        options: Any = {
            "max_entries": plan.max_entries(parts.layer.ratio), "is_query_raw": is_query_raw,
            "batch_invariant": parts.batch_invariant, "backend": parts.attention_backend,
        }  # fmt: skip
        try:
            if parts.context is not None:
                return parts.context.attend(
                    query, sinks, parts.memory, selected_rows, plan, **options
                )
            tokens = plan.on_part(parts.part)[0]
            with parts.on_device:
                return ops.attend(query, sinks, parts.memory, selected_rows, tokens, **options)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Cancel a plan that a read has failed in, unless all layers are written.

        The ranks of a split context lose it even then, since some may not have got so far.
        """
        if isinstance(error, RankLostError):
            self.plan.lose()
        elif not self.plan.is_complete:
            self.plan.cancel()

    def gather_compressed_kv(self, rows: Tensor) -> Gathered:
        """Dense entries `[num_tokens, k, head_dim]` at a selection's rows."""
        self._pages()
        self.parts.checks.check_tensor("rows", rows, tuple(rows.shape), (torch.int64, torch.int32))
        self._check_entries()
        with self.parts.on_device:
            return ops.gather_compressed_kv(self.memory, rows, backend=self.parts.backend)

    def gather_all_compressed_kv(self) -> Gathered:
        """Dense entries `[batch, max_entries, head_dim]`: all closed ones of each request."""
        self._pages()
        self._check_entries()
        with self.parts.on_device:
            return ops.gather_all_compressed_kv(
                self.memory, self.tokens,
                max_entries=self.plan.max_entries(self.layer.ratio),
                backend=self.parts.backend,
            )  # fmt: skip

    def gather_swa_kv(self) -> Gathered:
        """Dense window rows `[num_tokens, window, head_dim]`, each token's own last."""
        self._check_window()
        with self.parts.on_device:
            return ops.gather_swa_kv(self.memory, self.tokens, backend=self.parts.backend)

    def read_swa_view(self) -> SWAView:
        """The window rings, with positions and head derived from the lengths."""
        return SWAView(
            self.state.swa_fp8,
            self.state.swa_rope if self.schema.kv_row.rope_dim else None,
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
            pages.entries_rope if self.schema.entry_row.rope_dim else None,
            pages.inv_scale if self.schema.entry_row.scale_bytes else None,
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

    def _check_window(self) -> None:
        self._check_written("write_swa", is_written=self.progress.has_window)
        if self.plan.has_workspace and not self.plan.owns_workspace(self.progress):
            raise RuntimeError(
                f"The window rows of layer {self.layer.layer_idx} are gone: a chunk must be "
                "attended before the next layer is written"
            )

    def _check_entries(self) -> None:
        owner = self.plan.layer(self.layer.entries_of)
        if owner is self.progress:
            self._check_written("flush_compression", is_written=owner.has_entries)
        elif not owner.has_entries:
            raise RuntimeError(
                f"Layer {self.layer.layer_idx} reads the entries of layer {owner.layer_idx} before "
                "they are written: run that layer first"
            )

    def _check_written(self, step: str, *, is_written: bool) -> None:
        self.plan.check_current()
        if not is_written:
            raise RuntimeError(
                f"Layer {self.layer.layer_idx} is read before it is written: call {step} first"
            )
