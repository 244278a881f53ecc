"""`LayerBackends`: the kernels that run each layer, on the device that has its bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.cache.handle import LayerParts
from dsv4.cache.layer_checks import LayerChecks
from dsv4.cache.memory.cache_memory import CacheMemory, on_device
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.cache.plan import ForwardPlan
from dsv4.config import CacheConfig
from dsv4.distributed.context import SplitContext
from dsv4.kernels import ops
from dsv4.kernels.backends import check_backend, default_backend
from dsv4.kernels.external.limits import (
    check_attention_backend,
    check_index_backend,
    check_latent_keys,
    check_topk,
)


@dataclass(frozen=True)
class LayerBackends:
    """The names of a manager's kernels.

    Attributes:
        by_part: Those of each device.
        attention, index: Those that attend and choose entries, where a device has the first's.
        batch_invariant: As `KVCacheManager` has it.
    """

    by_part: list[str]
    attention: str
    index: str
    batch_invariant: bool

    def make_layers(
        self,
        config: CacheConfig,
        schemas: Sequence[LayerCacheSchema],
        memory: CacheMemory,
        context: SplitContext | None,
    ) -> list[LayerParts]:
        """Put together what every layer has in all forwards."""
        layers = []
        for layer_idx, (idx, schema) in enumerate(zip(memory.part_of, schemas, strict=True)):
            part, backend = memory.parts[idx], self.by_part[idx]
            is_own = backend == self.by_part[0]
            attention = self.attention if is_own else backend
            checks = LayerChecks(config, schema.layer, schema, part.block_table.device, attention)
            layers.append(LayerParts(
                config=config, layer=schema.layer, schema=schema,
                paged=part.paged.layer(layer_idx), state=part.state.layer(layer_idx),
                memory=part.memories[layer_idx], backend=backend, attention_backend=attention,
                index_backend=self.index if is_own else backend,
                batch_invariant=self.batch_invariant, checks=checks, part=idx,
                on_device=memory.on_device(part.device), context=context,
            ))  # fmt: skip
        return layers

    def make_rope(self, memory: CacheMemory, plan: ForwardPlan) -> None:
        """Make the RoPE rows of a plan's tokens on every device."""
        for idx, (part, backend) in enumerate(zip(memory.parts, self.by_part, strict=True)):
            with memory.on_device(part.device):
                positions = plan.on_part(idx)[0].positions
                ops.make_rope(part.memories[0], positions, backend=backend)


def choose_backends(
    config: CacheConfig,
    devices: Sequence[torch.device],
    backend: str | None,
    attention: str | None,
    index: str | None,
    *,
    batch_invariant: bool,
) -> LayerBackends:
    """Take the kernels that were asked for, or each device's own; refuse what they cannot do."""
    each = list(dict.fromkeys(devices))
    by_part = [backend or default_backend(device) for device in each]
    for device, kernels in zip(each, by_part, strict=True):
        with on_device(device, is_one=len(each) == 1):
            check_backend(kernels, device)
            if attention is not None:
                check_attention_backend(attention, config, device, batch_invariant=batch_invariant)
            if index is not None:
                check_index_backend(index, config, device)
    attention, index = attention or by_part[0], index or by_part[0]
    check_latent_keys(config, attention=attention, index=index)
    for kernels in (index, *by_part[1:]):
        check_topk(config, index=kernels)
    return LayerBackends(by_part, attention, index, batch_invariant)
