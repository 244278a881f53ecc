"""Whole layers in BF16 are no further from fp64 than transformers' own BF16 is.

A CSA layer's choice of entries is made once, in fp64, and given to all.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4 import AttentionSubBlock, CacheConfig, KVCacheManager, LayerCacheHandle, prepare_forward
from dsv4.kernels.contracts import Selection
from dsv4.kernels.reference.addressing import entry_rows, token_slots
from dsv4.model.random_hf import random_hf_model
from dsv4.testing import poison
from tests.handles import turned_into

NUM_TOKENS, PROMPT = 300, 250
REAL_WIDTHS = {
    "hidden_size": 1024, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 512, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 32,
    "o_groups": 8, "o_lora_rank": 128, "initializer_range": 0.06,
}  # fmt: skip
SMALL = pytest.param("cpu", {}, id="small")
REAL = pytest.param("cuda", REAL_WIDTHS, id="real widths", marks=pytest.mark.gpu)


@dataclass(eq=False)
class ChosenHandle(LayerCacheHandle):
    """A handle whose entries are chosen beforehand, `[positions, topk]`."""

    chosen: Tensor | None = None

    def select_entries(self, query: Tensor, head_weights: Tensor) -> Selection:
        wanted = self.chosen[self.positions.long()]
        slots = token_slots(self.tokens)[:, None]
        rows = entry_rows(
            self.tokens.block_table, slots, wanted, self.memory.layout.entries_per_block
        )
        return Selection(wanted.int(), rows, (wanted >= 0).sum(dim=1).int(), rows[:, :0].int())


class Layer:
    """A layer of transformers that runs a sequence alone and without a cache."""

    def __init__(self, model):
        self.model, self.attention = model, model.model.layers[0].self_attn

    @torch.no_grad()
    def run(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(len(hidden), device=hidden.device)[None]
        distance = positions[0][:, None] - positions[0]
        is_seen = (distance >= 0) & (distance < self.model.config.sliding_window)
        mask = torch.zeros_like(is_seen, dtype=hidden.dtype).masked_fill(~is_seen, -torch.inf)
        embeddings = {
            base: self.model.model.rotary_emb(hidden[None], position_ids=positions, layer_type=base)
            for base in ("main", "compress")
        }
        output, _ = self.attention(hidden[None], embeddings, positions, mask[None, None])
        return output[0]

    def on_indexer(self, hook):
        return self.attention.compressor.indexer.register_forward_hook(hook)


def run_cached(attention, config: CacheConfig, hidden: Tensor, chosen: Tensor | None) -> Tensor:
    """Run a prompt as a chunk, then token by token."""
    manager = KVCacheManager(config, max_requests=1, num_blocks=4, device=hidden.device)
    poison(manager)
    slot, block = manager.open_request(), AttentionSubBlock.from_hf(attention, config, 0)
    outputs = []
    for before, after in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, NUM_TOKENS))]:
        handle = manager.acquire(0, prepare_forward(manager, [slot], [before], [after]))
        outputs.append(
            block(hidden[before:after], turned_into(ChosenHandle, handle, chosen=chosen))
        )
    return torch.cat(outputs)


def ascending(chosen: Tensor) -> Tensor:
    """Order entries as a `Selection` does: ascending, then -1."""
    last = torch.iinfo(chosen.dtype).max
    ordered = torch.where(chosen < 0, last, chosen).sort(dim=1).values
    return torch.where(ordered == last, -1, ordered)


@pytest.mark.parametrize("ratio", [0, 4, 128], ids=["SWA", "CSA", "HCA"])
@pytest.mark.parametrize(("device", "widths"), [SMALL, REAL])
def test_error_is_no_larger_than_transformers_own(device, widths, ratio):
    model = random_hf_model(seed=0, compress_ratios=[ratio], **widths)
    model = model.to(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(NUM_TOKENS, model.config.hidden_size, generator=generator)
    hidden = hidden.to(device, torch.bfloat16)
    config = CacheConfig.from_hf(model.config, kv_format="bf16", index_format="bf16")
    layer, chosen, is_csa = Layer(model), [], ratio == 4

    model.double()
    hook = layer.on_indexer(lambda module, args, result: chosen.append(result)) if is_csa else None
    exact = layer.run(hidden.double())
    model.bfloat16()
    if hook is not None:
        hook.remove()
        layer.on_indexer(lambda module, args, result: chosen[0])
    theirs = layer.run(hidden)
    given = ascending(chosen[0][0]) if is_csa else None
    mine = run_cached(layer.attention, config, hidden, given)

    def error(output: Tensor) -> float:
        return float((output.double() - exact).norm() / exact.norm())

    assert mine.dtype is torch.bfloat16
    assert 0 < error(mine) <= error(theirs)
