"""Padding alone: captures and warm-up run on it, so that no request notices."""

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.errors import LiveForwardError


def check_complete(manager: KVCacheManager, purpose: str) -> None:
    """Refuse a manager whose last forward is not complete: padding would overwrite its plan."""
    if manager.live_plan is not None:
        raise LiveForwardError(
            f"Cannot {purpose}: the manager's last forward is not complete; run all of its "
            "layers first, or cancel its plan"
        )


def fill_with_padding(manager: KVCacheManager, num_tokens: int) -> None:
    """Make padding of all rows and of the first `num_tokens` tokens, now and wherever unused."""
    manager.device_memory.plan_buffers.reserve(num_tokens)
    prepare_forward(manager, [], [], []).complete()
