"""`PackedModel`: an attached model on ragged batches of its cache's manager, for engines."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.cache.plan import ForwardPlan
from dsv4.integrations.transformers.padding import NO_MASK

if TYPE_CHECKING:
    from dsv4.integrations.transformers.cache import PagedCache


class PackedModel:
    """Runs the tokens of a plan of `cache.manager` in one row, without padding.

    Args:
        model: The attached model.
        cache: The cache that `attach` returned; only its manager's requests are used.
    """

    def __init__(self, model: Any, cache: "PagedCache") -> None:
        cache.check_owner(model.model)
        self._model, self._cache = model, cache

    @torch.no_grad()
    def __call__(self, ids: Tensor, plan: ForwardPlan, rows: Tensor) -> Tensor:
        """Return the logits `[rows, vocabulary]` of some of the tokens `ids` `[num_tokens]`."""
        hidden = run_packed(self._model.model, self._cache, ids, plan)
        logits: Tensor = self._model.lm_head(hidden[rows])
        return logits


def run_packed(base: Any, cache: "PagedCache", ids: Tensor, plan: ForwardPlan) -> Tensor:
    """Return the base model's last hidden states, `[num_tokens, hidden_size]`."""
    with cache.running(plan):
        outputs = type(base).forward(
            base, input_ids=ids[None], position_ids=plan.tokens.positions[None].long(),
            attention_mask=NO_MASK, past_key_values=cache, use_cache=True,
        )  # fmt: skip
    hidden: Tensor = outputs[0][0]
    return hidden
