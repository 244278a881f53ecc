"""Plans of padding alone: captures and warm-up run on them, so that no request notices."""

import numpy as np

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prepare_forward import prepare_forward


def check_complete(manager: KVCacheManager, purpose: str) -> None:
    """Refuse a manager whose last forward is not complete: padding would end it."""
    if manager.forward.is_incomplete:
        raise RuntimeError(
            f"Cannot {purpose}: the manager's last forward is not complete; run all of its "
            "layers first, or free its requests"
        )


def fill_with_padding(manager: KVCacheManager, num_tokens: int) -> None:
    """Make padding of all rows and of the first `num_tokens` tokens, now and wherever unused."""
    manager.device_memory.plan_buffers.reserve(num_tokens)
    prepare_forward(manager, [], [], []).complete()


def padding_plan(
    manager: KVCacheManager,
    num_rows: int,
    num_tokens: int,
    num_chunks: int,
    max_step: int,
    *,
    max_length: int,
) -> ForwardPlan:
    """Plan a forward over the buffers as they are, sized for requests of `max_length`."""
    nothing = np.zeros(num_rows, dtype=np.int32)
    return ForwardPlan(
        owner=manager,
        tokens=manager.device_memory.plan_buffers.token_map(
            num_rows, num_tokens, num_chunks, max_step
        ),
        request_slots=nothing - 1,
        positions_before=nothing,
        positions_after=nothing,
        num_tokens=num_tokens,
        longest=max_length,
        num_new_blocks=0,
        has_workspace=num_chunks > 0,
        num_layer_writes=manager.config.num_layer_writes,
    )
