"""Both caches of a transformers model as after a long text, without running the model over it.

What is held has the sizes that the text would give; its values are random. Steps take as long with
them: nothing skips work by a row's value.
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.integrations.transformers import PagedCache
from dsv4.tools.bench.decode import fill_storages

CYCLE = 128  # tokens after which every compression window is where it was
SHORTEST = 2 * CYCLE  # tokens that are run: the window is full, and every layer has an entry


def fill_paged(cache: PagedCache, batch: int, context: int) -> None:
    """Bring an empty cache's rows to a length, by plans alone."""
    columns = cache.manager.capacity.max_forward_tokens // batch
    for start in range(0, context, columns):
        with cache.forward(batch, min(columns, context - start), None) as plan:
            plan.complete()
    fill_storages(cache.manager)


@torch.no_grad()
def fill_own(model: Any, cache: Any, batch: int, context: int) -> None:
    """Bring an empty cache of transformers to a length: a short text, then random entries."""
    num_skipped = max(context - SHORTEST, 0) // CYCLE * CYCLE
    ids = torch.randint(
        1, model.config.vocab_size, (batch, context - num_skipped), device=model.device
    )
    model(ids, past_key_values=cache, logits_to_keep=1)
    for layer in cache.layers:
        layer.cumulative_length += num_skipped
        for name, entries in getattr(layer, "compressed_kv", {}).items():
            num_new = num_skipped // layer.compress_rate
            layer.compressed_kv[name] = _extended(entries, num_new)
            layer.entry_count[name] += num_new


def _extended(entries: Tensor, num_new: int) -> Tensor:
    """`[batch, entries, dim]` and as many random ones after them."""
    new = torch.randn(
        entries.shape[0], num_new, entries.shape[2], dtype=entries.dtype, device=entries.device
    )
    return torch.cat((entries, new), dim=1)
