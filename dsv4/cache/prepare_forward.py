"""`prepare_forward`: plans one forward of a manager, between graphs."""

from dsv4.cache.forward_planner import Ints
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.plan import ForwardPlan


def prepare_forward(
    manager: KVCacheManager, request_slots: Ints, positions_before: Ints, positions_after: Ints
) -> ForwardPlan:
    """Plan a forward of a manager's requests; see `KVCacheManager.prepare_forward`."""
    return manager.prepare_forward(request_slots, positions_before, positions_after)
