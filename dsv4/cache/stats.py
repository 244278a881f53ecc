"""`CacheStats`: how full a manager is, and what its prefix cache was good for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager


@dataclass(frozen=True)
class CacheStats:
    """Counts of one manager; those of the prefix cache are 0 where there is none.

    Attributes:
        num_free_blocks, num_evictable_blocks: Blocks that nobody owns, and those that only the
            prefix cache does.
        num_prefix_blocks, num_prefix_host_blocks: Published blocks on the device and on the host.
        num_prefix_checkpoints: Published checkpoints.
        prefix_bytes, prefix_host_bytes: Their bytes on the device and on the host.
        num_lookups, num_hits: Calls of `resume_request`, and those that found something.
        num_asked_tokens, num_hit_tokens: Tokens of their prompts, and those that were there.
        num_evicted_blocks, num_evicted_checkpoints: What left the device to make room.
        num_lost_blocks: Of the evicted blocks, and those on the host, what is nowhere any more.
        num_skipped_checkpoints: Boundaries that the policy chose when no checkpoint was left.
        num_swapped_requests: Requests that wait on the host.
        bytes_to_host, bytes_from_host: What was copied, for swaps and evictions.
    """

    num_free_blocks: int
    num_evictable_blocks: int = 0
    num_prefix_blocks: int = 0
    num_prefix_host_blocks: int = 0
    num_prefix_checkpoints: int = 0
    prefix_bytes: int = 0
    prefix_host_bytes: int = 0
    num_lookups: int = 0
    num_hits: int = 0
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_evicted_checkpoints: int = 0
    num_lost_blocks: int = 0
    num_skipped_checkpoints: int = 0
    num_swapped_requests: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of all prompts' tokens that was already there."""
        return self.num_hit_tokens / self.num_asked_tokens if self.num_asked_tokens else 0.0


def collect_stats(manager: "KVCacheManager") -> CacheStats:
    """The counts of a manager as they are now."""
    host, prefix = manager.host, manager.prefix
    common = {
        "num_free_blocks": manager.allocator.num_free,
        "num_swapped_requests": len(manager.waiting_places),
        "bytes_to_host": host.num_bytes_out,
        "bytes_from_host": host.num_bytes_in,
    }
    if prefix is None:
        return CacheStats(**common)
    tree = prefix.tree
    block_bytes = manager.paged.layout.num_bytes
    checkpoint_bytes = manager.checkpoints.storage.shape[1]
    return CacheStats(
        **common,
        num_evictable_blocks=tree.num_evictable,
        num_prefix_blocks=tree.num_blocks,
        num_prefix_host_blocks=tree.num_host_blocks,
        num_prefix_checkpoints=tree.num_checkpoints,
        prefix_bytes=tree.num_blocks * block_bytes + tree.num_checkpoints * checkpoint_bytes,
        prefix_host_bytes=tree.num_host_blocks * block_bytes,
        num_lookups=prefix.num_lookups,
        num_hits=prefix.num_hits,
        num_asked_tokens=prefix.num_asked_tokens,
        num_hit_tokens=prefix.num_hit_tokens,
        num_evicted_blocks=tree.num_evicted_blocks,
        num_evicted_checkpoints=tree.num_evicted_checkpoints,
        num_lost_blocks=tree.num_lost_blocks,
        num_skipped_checkpoints=prefix.num_skipped_checkpoints,
    )
