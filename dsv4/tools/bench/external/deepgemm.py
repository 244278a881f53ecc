"""DeepGEMM's scores on the pools of a bench. Its schedule is made beforehand and is not timed."""

from collections.abc import Sequence

from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.kernels.external.find import PagedLogits
from dsv4.kernels.index_scratch import IndexScratch


class DeepGEMMCalls:
    """DeepGEMM's scores of a step, layer by layer; the workspace holds the step's queries."""

    def __init__(
        self,
        logits: PagedLogits,
        handles: Sequence[LayerCacheHandle],
        scratch: IndexScratch,
        query: Tensor,
        *,
        max_entries: int,
    ) -> None:
        from dsv4.kernels.external import deepgemm

        self._logits, self._max_entries = logits, max_entries
        if logits.set_overlap is not None:
            logits.set_overlap(True)  # programmatic dependent launch, as vLLM has it
        self._inputs = [
            deepgemm.score_inputs(
                scratch, handle.memory, handle.tokens, num_heads=query.shape[1],
                max_entries=max_entries, first_token=0, num_tokens=len(query),
            )
            for handle in handles
        ]  # fmt: skip
        self._schedule = logits.make_schedule(self._inputs[0].lengths)

    def run(self, layer_idx: int) -> Tensor:
        """Score a layer's entries, `[num_tokens, max_entries]`."""
        return self._logits.score(*self._inputs[layer_idx], self._schedule, self._max_entries)
