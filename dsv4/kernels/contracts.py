"""Inputs and results of the cache's steps: plain structs of tensors, the same for all backends.

-1 is the only sentinel: the slot of a padding row, or a block or row that does not exist.
"""

from typing import NamedTuple

from torch import Tensor


class TokenMap(NamedTuple):
    """Device tensors of a plan: the requests of its tokens and where their rows go. All int32.

    Attributes:
        request_slots: `[batch]`; -1 is a padding row, which touches nothing.
        positions_before, positions_after: `[batch]`, lengths around this forward.
        token_starts: `[batch]`, index of a request's first token.
        positions, request_ids: `[num_tokens]`, position of a token and its row of the batch.
        workspace_starts: `[batch]`, first window-workspace row of a chunk; -1 for other requests.
            A chunk is a request's tokens in this forward, if they are more than a step's.
        chunk_ids: `[num_chunks]`, the rows of the batch that are chunks; a padding row for none,
            which come last.
        block_table: `[max_requests, max_blocks]`, by slot; -1 where there is no block.
        num_read_only: `[max_requests]`, by slot; its first blocks, which are not written.
        max_step: Largest number of tokens of one request, known on the host.
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
    num_read_only: Tensor
    max_step: int


class Acceptance(NamedTuple):
    """The step before, as far as a step's lengths follow from it on the device. All int32."""

    accepted: Tensor  # [max_requests], the tokens that remain of each row of that step
    rows: Tensor  # [batch], the row there of each request of this step; -1 if its length is known
    counts: Tensor  # [batch], the tokens that it had there


class CompressorWeights(NamedTuple):
    """Learned tensors of one compressor.

    position_bias is `[ratio, num_series × dim]`, None in V4.1; norm_weight `[dim]`.
    """

    position_bias: Tensor | None
    norm_weight: Tensor


class KeyWeights(NamedTuple):
    """Learned tensors that make an index key of an entry's latent, in V4.1.

    projection is `[index_head_dim, head_dim]`, norm_weight `[index_head_dim]`.
    """

    projection: Tensor
    norm_weight: Tensor


class CompressorInputs(NamedTuple):
    """A compressor's projections, each `[num_tokens, num_series × head_dim]`.

    gate is None where an entry has one token.
    """

    kv: Tensor
    gate: Tensor | None


class IndexInputs(NamedTuple):
    """The indexer's projections: kv, gate `[num_tokens, 2 × dim]` of its own compressor, query
    `[num_tokens, index_heads, dim]` before RoPE, head_weights `[num_tokens, index_heads]`.

    kv and gate are None in V4.1.
    """

    kv: Tensor | None
    gate: Tensor | None
    query: Tensor
    head_weights: Tensor


class LayerProjections(NamedTuple):
    """A layer's inputs to the cache in one forward, fp32 or bf16.

    query is `[num_tokens, heads, head_dim]`, normed and rotated, or raw where the call says so;
    kv `[num_tokens, head_dim]`, before its norm. compressor is None unless the layer owns entries,
    indexer None unless it owns a choice.
    """

    query: Tensor
    kv: Tensor
    compressor: CompressorInputs | None = None
    indexer: IndexInputs | None = None


class LayerWeights(NamedTuple):
    """Learned tensors that the cache applies itself: kv_norm `[head_dim]`, sinks `[heads]`."""

    kv_norm: Tensor
    sinks: Tensor | None
    compressor: CompressorWeights | None = None
    indexer: CompressorWeights | KeyWeights | None = None


class WindowInputs(NamedTuple):
    """Inputs of window rows: kv `[num_tokens, head_dim]` before its norm, and the norm's weight."""

    kv: Tensor
    norm_weight: Tensor


class EntryInputs(NamedTuple):
    """A compressor's projections `[num_tokens, num_series × dim]` and its learned tensors."""

    kv: Tensor
    gate: Tensor | None
    weights: CompressorWeights


class LayerWrites(NamedTuple):
    """Inputs of one write: window rows, entries, index keys; a part that is None is not written.

    index_keys with `KeyWeights` are made of the entries.
    """

    window: WindowInputs | None = None
    entries: EntryInputs | None = None
    index_keys: EntryInputs | KeyWeights | None = None

    @classmethod
    def of(cls, inputs: LayerProjections, weights: LayerWeights) -> "LayerWrites":
        """Inputs of everything that a layer stores in one forward."""
        entries: EntryInputs | None = None
        index_keys: EntryInputs | KeyWeights | None = None
        if inputs.compressor is not None and weights.compressor is not None:
            compressor = inputs.compressor
            entries = EntryInputs(compressor.kv, compressor.gate, weights.compressor)
        index = inputs.indexer
        if isinstance(weights.indexer, KeyWeights):
            index_keys = weights.indexer
        elif index is not None and index.kv is not None and weights.indexer is not None:
            index_keys = EntryInputs(index.kv, index.gate, weights.indexer)
        return cls(WindowInputs(inputs.kv, weights.kv_norm), entries, index_keys)


class CheckpointPoints(NamedTuple):
    """Block boundaries inside chunks, and the checkpoints of a layer's rows there."""

    points: Tensor  # [num_points, 3] int32: row of the batch, boundary, checkpoint; -1 for none
    checkpoints: Tensor  # [num_checkpoints, checkpoint_bytes] uint8, each as a slot's front


class Selection(NamedTuple):
    """Entries selected per token, in ascending entry index, then -1.

    entry_idx is `[num_tokens, topk]` int32, the entry's index in its request. rows is
    `[num_tokens, topk]` int64, the flat row in the layer's pages. counts is `[num_tokens]` int32.
    blocks is `[num_tokens, candidate_topk_blocks]` int32, the candidates that a candidate source
    publishes, ascending, then -1; other layers have none of them.
    """

    entry_idx: Tensor
    rows: Tensor
    counts: Tensor
    blocks: Tensor


class Gathered(NamedTuple):
    """Dense rows, and whether each exists.

    values is `[..., rows, dim]` in the format's value dtype, zero where is_present
    `[..., rows]` is False.
    """

    values: Tensor
    is_present: Tensor


class AttentionResult(NamedTuple):
    """Attention output `[num_tokens, heads, dim]`; lse `[num_tokens, heads]` fp32 without sinks."""

    output: Tensor
    lse: Tensor
