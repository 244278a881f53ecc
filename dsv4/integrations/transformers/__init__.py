"""Generate with transformers through this cache: `attach(model, ...)` makes a `PagedCache`."""

from dsv4.integrations.transformers.attach import attach, detach
from dsv4.integrations.transformers.cache import PagedCache

__all__ = ["PagedCache", "attach", "detach"]
