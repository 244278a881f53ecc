"""Long contexts in both caches of a transformers model, without running the model over a text.

The caches have the sizes that the text would give, and random values. The time of a step does not
depend on the values.
"""

from typing import Any

import torch

from dsv4.integrations.transformers import PagedCache
from dsv4.tools.bench.decode import fill_storages

CYCLE = 128  # tokens: a multiple of every compression window
SHORTEST = 2 * CYCLE  # tokens that fill the window and give every layer an entry


def fill_paged(cache: PagedCache, batch: int, context: int) -> None:
    """Bring an empty `PagedCache` to a length by plans alone, with random rows."""
    columns = cache.manager.capacity.max_forward_tokens // batch
    for start in range(0, context, columns):
        with cache.forward(batch, min(columns, context - start), None) as plan:
            plan.complete()
    fill_storages(cache.manager)


@torch.no_grad()
def fill_transformers(model: Any, cache: Any, batch: int, context: int) -> None:
    """Bring an empty transformers cache to a length: run a short text, then add random entries."""
    num_skipped = max(context - SHORTEST, 0) // CYCLE * CYCLE
    ids = torch.randint(
        1, model.config.vocab_size, (batch, context - num_skipped), device=model.device
    )
    model(ids, past_key_values=cache, logits_to_keep=1)
    for layer in cache.layers:
        layer.cumulative_length += num_skipped
        for name, entries in getattr(layer, "compressed_kv", {}).items():
            num_new = num_skipped // layer.compress_rate
            new = torch.randn_like(entries[:, :1].expand(-1, num_new, -1))
            layer.compressed_kv[name] = torch.cat((entries, new), dim=1)
            layer.entry_count[name] += num_new
