"""dsv4: the KV-cache runtime of DeepSeek-V4's hybrid attention."""

from dsv4.cache.graphs.captured_forward import CapturedForward, GraphPool
from dsv4.cache.graphs.warm_up import warm_up
from dsv4.cache.handle import ClassicalView, IndexerView, LayerCacheHandle, SWAView
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.memory.block_allocator import BlockAllocator
from dsv4.cache.memory.checkpoints import CheckpointPolicy
from dsv4.cache.memory.paged_cache import PagedKVPool
from dsv4.cache.memory.schema import LayerCacheSchema
from dsv4.cache.memory.state_cache import StateCachePool
from dsv4.cache.plan import ForwardPlan
from dsv4.cache.prefix.disk_tier import Prefetch
from dsv4.cache.prefix.events import BlockRemoved, BlockStored
from dsv4.cache.prefix.prefix_cache import PrefixHit, PrefixMatch
from dsv4.cache.prefix.store import PrefixStore
from dsv4.cache.prepare_forward import prepare_forward
from dsv4.cache.stats import CacheStats
from dsv4.cache.swap import SwappedRequest
from dsv4.config import CacheConfig, YarnScaling
from dsv4.errors import (
    IntegrityError,
    LiveForwardError,
    LostCacheError,
    NoFreeSlotError,
    OutOfBlocksError,
)
from dsv4.kernels.contracts import (
    AttentionResult,
    CompressorInputs,
    CompressorWeights,
    Gathered,
    IndexInputs,
    KeyWeights,
    LayerProjections,
    LayerWeights,
    Selection,
)
from dsv4.layer_schedule import AttentionType, LayerSpec
from dsv4.model.attention import AttentionSubBlock

__version__ = "0.1.0"

__all__ = [
    "AttentionResult",
    "AttentionSubBlock",
    "AttentionType",
    "BlockAllocator",
    "BlockRemoved",
    "BlockStored",
    "CacheConfig",
    "CacheStats",
    "CapturedForward",
    "CheckpointPolicy",
    "ClassicalView",
    "CompressorInputs",
    "CompressorWeights",
    "ForwardPlan",
    "Gathered",
    "GraphPool",
    "IndexInputs",
    "IndexerView",
    "IntegrityError",
    "KVCacheManager",
    "KeyWeights",
    "LayerCacheHandle",
    "LayerCacheSchema",
    "LayerProjections",
    "LayerSpec",
    "LayerWeights",
    "LiveForwardError",
    "LostCacheError",
    "NoFreeSlotError",
    "OutOfBlocksError",
    "PagedKVPool",
    "Prefetch",
    "PrefixHit",
    "PrefixMatch",
    "PrefixStore",
    "SWAView",
    "Selection",
    "StateCachePool",
    "SwappedRequest",
    "YarnScaling",
    "__version__",
    "prepare_forward",
    "warm_up",
]
