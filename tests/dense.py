"""The oracle: a layer over one whole sequence, with no cache, no blocks, no rings, no chunks.

It shares arithmetic and row formats with the cache, but no addressing: windows are reshapes of the
sequence, visibility is a mask over all pairs. Attention reads rows as they would be stored.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.config import CacheConfig
from dsv4.kernels.contracts import (
    CompressorInputs,
    CompressorWeights,
    IndexInputs,
    KeyWeights,
    LayerProjections,
    LayerWeights,
)
from dsv4.kernels.reference.arithmetic import (
    hadamard,
    pool_rows,
    project,
    rms_norm,
    rotate,
    round_to,
)
from dsv4.kernels.reference.codec import EncodedRows, decode, encode
from dsv4.kernels.reference.indexer import index_query, score_entries, select_topk
from dsv4.layer_schedule import AttentionType, LayerSpec
from dsv4.rope import RopeRows


class DenseLayer(NamedTuple):
    """Everything a layer stores and returns for a sequence of n tokens.

    A field that a layer type doesn't have is None; one that another layer owns is its.
    """

    output: Tensor  # [n, heads, head_dim]
    window: EncodedRows  # stored bytes, row i for token or entry i
    entries: EncodedRows | None
    index_keys: EncodedRows | None
    tails: CompressorInputs | None  # kv and gate [n, width] as a tail stores them
    index_tails: CompressorInputs | None
    selected: Tensor | None  # [n, topk] entries, -1 for none
    candidates: Tensor | None = None  # [n, entries] bool, those that a candidate source publishes


def dense_layer(
    kind: AttentionType | LayerSpec,
    inputs: LayerProjections,
    weights: LayerWeights,
    rope: RopeRows,
    config: CacheConfig,
    before: Sequence[DenseLayer] = (),
) -> DenseLayer:
    """Run one layer over one sequence that starts at position 0.

    Args:
        before: The layers before it, of which it may read some.
    """
    spec = kind if isinstance(kind, LayerSpec) else LayerSpec(0, kind)
    layer = _Layer(inputs, weights, rope, spec.ratio, config)
    normed = rms_norm(inputs.kv.float(), weights.kv_norm, config.rms_norm_eps)
    window = encode(config.kv_row, layer.rotated(normed, layer.positions))
    entries = index_keys = tails = index_tails = selected = None
    candidates = keys = None
    if inputs.compressor is not None and weights.compressor is not None:
        tails, latent = layer.compress(inputs.compressor, weights.compressor)
        entries = encode(config.entry_row, layer.rotated_entries(latent))
        if isinstance(weights.indexer, KeyWeights):
            projected = project(latent, weights.indexer.projection)
            keys = rms_norm(projected, weights.indexer.norm_weight, config.rms_norm_eps)
    elif spec.entries_of >= 0:
        entries, index_keys = before[spec.entries_of].entries, before[spec.entries_of].index_keys
    index = inputs.indexer
    if index is not None and index.kv is not None and weights.indexer is not None:
        assert isinstance(weights.indexer, CompressorWeights)
        index_tails, keys = layer.compress(CompressorInputs(index.kv, index.gate), weights.indexer)
    global_scale = config.index_global_scale
    scale = None if global_scale is None else normed.new_tensor(global_scale)
    if keys is not None:
        keys = layer.rotated_entries(keys)
        keys = hadamard(keys) if config.index_hadamard else keys
        index_keys = encode(config.index_row, keys, global_scale=scale)
    if index is not None and index_keys is not None:
        given = before[spec.candidates_of].candidates if spec.candidates_of >= 0 else None
        scores = layer.scores(index, index_keys, scale)
        selected = layer.select(scores, given)
        if spec.layer_idx == config.candidate_source_layer_id:
            candidates = layer.candidates(scores)
    elif spec.choice_of >= 0:
        selected = before[spec.choice_of].selected
    output = layer.attend(window, entries, selected)
    return DenseLayer(output, window, entries, index_keys, tails, index_tails, selected, candidates)


def dense_layers(
    config: CacheConfig,
    inputs: Sequence[LayerProjections],
    weights: Sequence[LayerWeights],
    ropes: Mapping[str, RopeRows],
) -> list[DenseLayer]:
    """Run all layers of the schedule over one sequence."""
    layers: list[DenseLayer] = []
    for spec, projections, learned in zip(config.schedule, inputs, weights, strict=True):
        rope = ropes[spec.rope_base]
        layers.append(dense_layer(spec, projections, learned, rope, config, layers))
    return layers


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
    ) -> tuple[CompressorInputs | None, Tensor]:
        """Rows as a tail stores them, None without one, and normed entries `[n // ratio, dim]`."""
        num_tokens, ratio, dtype = len(inputs.kv), self.ratio, self.config.tail_torch_dtype
        eps, norm_weight = self.config.rms_norm_eps, weights.norm_weight
        if inputs.gate is None:
            return None, rms_norm(inputs.kv.float(), norm_weight, eps)
        gates = inputs.gate.float()
        if weights.position_bias is not None:
            bias = weights.position_bias.float().repeat(-(-num_tokens // ratio), 1)[:num_tokens]
            gates = gates + bias
        stored = round_to(inputs.kv, dtype), round_to(gates, dtype)
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
        return CompressorInputs(*stored), rms_norm(pooled, norm_weight, eps)

    def rotated_entries(self, normed: Tensor) -> Tensor:
        return self.rotated(normed, torch.arange(len(normed), device=normed.device) * self.ratio)

    def scores(self, index: IndexInputs, index_keys: EncodedRows, scale: Tensor | None) -> Tensor:
        """Scores of each token and entry, `[n, entries]`; NaN where the entry is not visible."""
        config, positions = self.config, self.positions
        keys = decode(config.index_row, index_keys, global_scale=scale)
        query = index_query(
            index.query, config.index_row, self.rope.take(positions),
            has_hadamard=config.index_hadamard, global_scale=scale,
        )  # fmt: skip
        scores = score_entries(query, index.head_weights, keys.expand(len(positions), *keys.shape))
        is_visible = torch.arange(len(keys), device=keys.device) < self.num_visible[:, None]
        return torch.where(is_visible, scores, torch.nan)

    @property
    def num_visible(self) -> Tensor:
        return (self.positions + 1) // self.ratio

    def select(self, scores: Tensor, candidates: Tensor | None) -> Tensor:
        """Entries that each token selects, `[n, topk]`, -1 for none."""
        if candidates is not None:
            scores = torch.where(candidates, scores, torch.nan)
        chosen = select_topk(scores, self.num_visible, self.config.index_topk)
        return pad(chosen, (0, self.config.index_topk - chosen.shape[1]), value=-1)

    def candidates(self, scores: Tensor) -> Tensor:
        """Mark the entries of each token's best blocks, `[n, entries]` bool."""
        size, most = self.config.candidate_block_size, self.config.candidate_topk_blocks
        is_candidate = torch.zeros_like(scores, dtype=torch.bool)
        for token, visible in enumerate(self.num_visible.tolist()):
            if visible:
                best = [block.nan_to_num(-torch.inf).max() for block in scores[token].split(size)]
                newest = (visible - 1) // size
                best[newest] = scores.new_tensor(torch.inf)
                order = sorted(range(newest + 1), key=lambda block: (-float(best[block]), block))
                for block in order[:most]:
                    is_candidate[token, block * size : min((block + 1) * size, visible)] = True
        return is_candidate

    def attend(
        self, window: EncodedRows, entries: EncodedRows | None, selected: Tensor | None
    ) -> Tensor:
        """Softmax over all pairs of queries and rows, in fp64, with a mask for what is visible."""
        config, positions, query = self.config, self.positions, self.inputs.query
        distance = positions[:, None] - positions
        values = decode(config.kv_row, window).double()
        is_visible = (distance >= 0) & (distance < config.sliding_window)
        if entries is not None:
            values = torch.cat((values, decode(config.entry_row, entries).double()))
            entry_idx = torch.arange(len(entries.data), device=positions.device)
            if selected is None:
                is_seen = (entry_idx + 1) * self.ratio <= positions[:, None] + 1
            else:
                hits = torch.zeros(len(positions), len(entry_idx) + 1, device=positions.device)
                columns = torch.where(selected >= 0, selected, len(entry_idx))
                is_seen = hits.scatter(1, columns, 1.0)[:, :-1] > 0
            is_visible = torch.cat((is_visible, is_seen), dim=1)
        logits = torch.einsum("nhd,rd->nhr", query.double(), values) * config.head_dim**-0.5
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
