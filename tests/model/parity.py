"""`CachedRun`: checks that cached attention equals transformers'."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4 import AttentionSubBlock, CacheConfig, KVCacheManager, prepare_forward
from dsv4.model.random_hf import RecordedLayer
from dsv4.testing import poison
from tests.handles import RecordingHandle, turned_into

TOLERANCE = 5e-6  # of the largest output
TIE = 1e-5  # of the largest score: closer than this, the model leaves the choice open

Step = list[tuple[int, int, int]]  # rows of one forward: sequence, length before, length after


class CachedRun:
    """Sequences of one model fed through a cache, forward by forward."""

    def __init__(
        self, model, config: CacheConfig, recorded: list[list[RecordedLayer]], **sizes: int
    ):
        sizes = {"max_requests": 8, "num_blocks": 64, **sizes}
        self.manager = KVCacheManager(config, **sizes)
        poison(self.manager)
        self.blocks = [
            AttentionSubBlock.from_hf(layer.self_attn, config, layer_idx)
            for layer_idx, layer in enumerate(model.model.layers)
        ]
        self.recorded = recorded
        self.slots: dict[int, int] = {}
        num_layers = config.num_layers
        self.outputs = [[[] for _ in range(num_layers)] for _ in recorded]
        self.selected = [[[] for _ in range(num_layers)] for _ in recorded]

    def open(self, sequence: int) -> None:
        self.slots[sequence] = self.manager.open_request()

    def close(self, sequence: int) -> None:
        self.manager.free_request(self.slots.pop(sequence))

    def step(self, rows: Step) -> None:
        plan = prepare_forward(
            self.manager,
            [self.slots[sequence] for sequence, _, _ in rows],
            [before for _, before, _ in rows],
            [after for _, _, after in rows],
        )
        counts = [after - before for _, before, after in rows]
        for layer_idx, block in enumerate(self.blocks):
            hidden = torch.cat(
                [self.recorded[seq][layer_idx].hidden[before:after] for seq, before, after in rows]
            )
            handle = turned_into(RecordingHandle, self.manager.acquire(layer_idx, plan))
            output = block(hidden, handle)
            for row, part in enumerate(output.split(counts)):
                self.outputs[rows[row][0]][layer_idx].append(part)
            if handle.selections:
                for row, part in enumerate(handle.selections[0].split(counts)):
                    self.selected[rows[row][0]][layer_idx].append(part)

    def run(self, steps: Iterable[Step]) -> None:
        for rows in steps:
            for sequence, before, _ in rows:
                if before == 0 and sequence not in self.slots:
                    self.open(sequence)
            self.step(rows)
        self.manager.check_integrity()

    def check(self) -> None:
        """Check that every output of every layer equals transformers'."""
        for sequence, layers in enumerate(self.recorded):
            for layer_idx, layer in enumerate(layers):
                output = torch.cat(self.outputs[sequence][layer_idx])
                expected = layer.output[: len(output)]
                is_open = torch.zeros(len(output), dtype=torch.bool)
                if layer.index_scores is not None:
                    chosen = torch.cat(self.selected[sequence][layer_idx])
                    ratio = self.manager.schedule[layer_idx].ratio
                    is_open = _check_selection(layer.index_scores, chosen, ratio)
                error = (output - expected).abs().amax(dim=1)[~is_open].max()
                limit = TOLERANCE * expected.abs().max()
                assert error <= limit, (
                    f"sequence {sequence}, layer {layer_idx}: error {error:.3g} > {limit:.3g}"
                )


def _check_selection(scores: Tensor, chosen: Tensor, ratio: int) -> Tensor:
    """Find the tokens at a tie; check that all others chose the model's entries.

    Where the scores on both sides of the cut are closer than `TIE`, the chosen scores must be
    as good as the best ones.
    """
    num_tokens, topk = chosen.shape
    is_tied = torch.zeros(num_tokens, dtype=torch.bool)
    for token in range(num_tokens):
        visible = scores[token, : (token + 1) // ratio]
        mine = chosen[token][chosen[token] >= 0].long()
        best = visible.topk(min(topk, len(visible)))
        limit = TIE * scores[:num_tokens].abs().max()
        if len(visible) > topk:
            cut = visible.sort(descending=True).values
            is_tied[token] = cut[topk - 1] - cut[topk] < limit
        if is_tied[token]:
            error = visible[mine].sort(descending=True).values - best.values
            assert error.abs().max() <= limit, f"token {token}: not the best scores"
        else:
            assert mine.tolist() == best.indices.sort().values.tolist(), f"token {token}"
    return is_tied


def chunked(sequence: int, num_tokens: int, size: int) -> list[Step]:
    """Split one sequence into chunks of `size`."""
    return [
        [(sequence, start, min(start + size, num_tokens))] for start in range(0, num_tokens, size)
    ]
