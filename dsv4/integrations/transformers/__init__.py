"""Generate with transformers through this cache: `attach(model, ...)` makes a `PagedCache`."""

from dsv4.integrations.transformers.attach import attach, detach
from dsv4.integrations.transformers.cache import PagedCache
from dsv4.integrations.transformers.packed import PackedModel

__all__ = ["PackedModel", "PagedCache", "attach", "detach"]
