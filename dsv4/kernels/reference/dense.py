"""The oracle: a layer over one whole sequence, with no cache, no blocks, no rings, no chunks.

It shares arithmetic and row formats with the cache, but no addressing: windows are reshapes of the
sequence, visibility is a mask over all pairs. Attention reads rows as they would be stored.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    LayerProjections,
    LayerWeights,
)
from dsv4.kernels.reference.arithmetic import hadamard, pool_rows, rms_norm, rotate, round_to
from dsv4.kernels.reference.codec import EncodedRows, decode, encode
from dsv4.kernels.reference.indexer import index_query, score_entries, select_topk
from dsv4.layer_schedule import AttentionType
from dsv4.rope import RopeRows


class DenseLayer(NamedTuple):
    """Everything a layer stores and returns for a sequence of n tokens.

    Attributes:
        output: `[n, heads, head_dim]`.
        window, entries, index_keys: Stored bytes, row i for token or entry i.
        tails, index_tails: kv and gate `[n, width]` as a tail stores them.
        selected: `[n, topk]` entries, -1 for none.

    A field that a layer type doesn't have is None.
    """

    output: Tensor
    window: EncodedRows
    entries: EncodedRows | None
    index_keys: EncodedRows | None
    tails: CompressorInputs | None
    index_tails: CompressorInputs | None
    selected: Tensor | None


def dense_layer(
    attention_type: AttentionType,
    inputs: LayerProjections,
    weights: LayerWeights,
    rope: RopeRows,
    config: CacheConfig,
) -> DenseLayer:
    """Run one layer over one sequence that starts at position 0."""
    layer = _Layer(inputs, weights, rope, attention_type.ratio, config)
    normed = rms_norm(inputs.kv.float(), weights.kv_norm, config.rms_norm_eps)
    window = encode(config.kv_row, layer.rotated(normed, layer.positions))
    entries = index_keys = tails = index_tails = selected = None
    if inputs.compressor is not None and weights.compressor is not None:
        tails, values = layer.compress(inputs.compressor, weights.compressor)
        entries = encode(config.kv_row, values)
    if inputs.indexer is not None and weights.indexer is not None:
        index = CompressorInputs(inputs.indexer.kv, inputs.indexer.gate)
        index_tails, keys = layer.compress(index, weights.indexer)
        global_scale = config.index_global_scale
        scale = None if global_scale is None else keys.new_tensor(global_scale)
        keys = hadamard(keys) if config.index_hadamard else keys
        index_keys = encode(config.index_row, keys, global_scale=scale)
        selected = layer.select(inputs.indexer, index_keys, scale)
    output = layer.attend(window, entries, selected)
    return DenseLayer(output, window, entries, index_keys, tails, index_tails, selected)


class _Layer(NamedTuple):
    """The inputs of a layer, and its steps over the whole sequence."""

    inputs: LayerProjections
    weights: LayerWeights
    rope: RopeRows
    ratio: int
    config: CacheConfig

    @property
    def positions(self) -> Tensor:
        return torch.arange(len(self.inputs.kv), device=self.inputs.kv.device)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, *self.rope.take(positions))

    def compress(
        self, inputs: CompressorInputs, weights: CompressorWeights
    ) -> tuple[CompressorInputs, Tensor]:
        """Rows as a tail stores them, and entries `[n // ratio, dim]` before encoding."""
        num_tokens, ratio, dtype = len(inputs.kv), self.ratio, self.config.tail_torch_dtype
        bias = weights.position_bias.float().repeat(-(-num_tokens // ratio), 1)[:num_tokens]
        stored = CompressorInputs(
            round_to(inputs.kv, dtype), round_to(inputs.gate.float() + bias, dtype)
        )
        num_windows = num_tokens // ratio
        kv, gate = (
            rows[: num_windows * ratio].float().unflatten(0, (num_windows, ratio))
            for rows in stored
        )
        is_present = torch.ones(num_windows, ratio, dtype=torch.bool, device=kv.device)
        dim = weights.norm_weight.shape[0]
        if kv.shape[-1] == 2 * dim:
            kv, gate = (_with_previous(windows, dim) for windows in (kv, gate))
            has_previous = torch.arange(num_windows, device=kv.device)[:, None] > 0
            is_present = torch.cat((has_previous & is_present, is_present), dim=1)
        pooled = pool_rows(kv, gate, is_present)
        normed = rms_norm(pooled, weights.norm_weight, self.config.rms_norm_eps)
        return stored, self.rotated(normed, torch.arange(num_windows, device=kv.device) * ratio)

    def select(self, index: IndexInputs, index_keys: EncodedRows, scale: Tensor | None) -> Tensor:
        """Entries that each token selects, `[n, topk]`, -1 for none."""
        config, positions = self.config, self.positions
        keys = decode(config.index_row, index_keys, global_scale=scale)
        query = index_query(
            index.query, config.index_row, self.rope.take(positions),
            has_hadamard=config.index_hadamard, global_scale=scale,
        )  # fmt: skip
        scores = score_entries(query, index.head_weights, keys.expand(len(positions), *keys.shape))
        chosen = select_topk(scores, (positions + 1) // self.ratio, config.index_topk)
        return pad(chosen, (0, config.index_topk - chosen.shape[1]), value=-1)

    def attend(
        self, window: EncodedRows, entries: EncodedRows | None, selected: Tensor | None
    ) -> Tensor:
        """Softmax over all pairs of queries and rows, in fp64, with a mask for what is visible."""
        row, positions, query = self.config.kv_row, self.positions, self.inputs.query
        distance = positions[:, None] - positions
        values = decode(row, window).double()
        is_visible = (distance >= 0) & (distance < self.config.sliding_window)
        if entries is not None:
            values = torch.cat((values, decode(row, entries).double()))
            entry_idx = torch.arange(len(entries.data), device=positions.device)
            if selected is None:
                is_seen = (entry_idx + 1) * self.ratio <= positions[:, None] + 1
            else:
                hits = torch.zeros(len(positions), len(entry_idx) + 1, device=positions.device)
                columns = torch.where(selected >= 0, selected, len(entry_idx))
                is_seen = hits.scatter(1, columns, 1.0)[:, :-1] > 0
            is_visible = torch.cat((is_visible, is_seen), dim=1)
        logits = torch.einsum("nhd,rd->nhr", query.double(), values) * self.config.head_dim**-0.5
        logits = logits.masked_fill(~is_visible[:, None], -torch.inf)
        if self.weights.sinks is not None:
            sinks = self.weights.sinks.double()[None, :, None].expand(len(positions), -1, 1)
            logits = torch.cat((logits, sinks), dim=-1)
        probabilities = logits.softmax(dim=-1)[:, :, : len(values)]
        output = torch.einsum("nhr,rd->nhd", probabilities, values)
        cos, sin = (rows[:, None].double() for rows in self.rope.take(positions))
        return rotate(output, cos, -sin).to(query.dtype)


def _with_previous(windows: Tensor, dim: int) -> Tensor:
    """First columns of the previous window's rows, then second ones of its own: `[w, 2m, dim]`."""
    previous = torch.zeros_like(windows[:, :, :dim])
    previous[1:] = windows[:-1, :, :dim]
    return torch.cat((previous, windows[:, :, dim:]), dim=1)
