"""`CacheStats`: blocks in use, and hits and evictions of the prefix cache."""

from dataclasses import dataclass

from dsv4.cache.books import CacheBooks
from dsv4.cache.memory.cache_memory import CacheMemory


@dataclass(frozen=True)
class CacheStats:
    """Counts of one manager; those of the prefix cache are 0 where there is none.

    Attributes:
        num_free_blocks, num_evictable_blocks: Blocks without owner, and those that only the prefix
            cache owns.
        num_request_blocks, num_swapped_blocks: Blocks of open requests, and those on the device
            that only swapped requests need. These four are all blocks.
        num_prefix_blocks, num_prefix_host_blocks: Published blocks on the device and on the host.
        num_prefix_checkpoints, num_prefix_host_checkpoints: Published checkpoints, and those of
            them that are on the host.
        prefix_bytes, prefix_host_bytes: Their bytes on the device and on the host.
        num_lookups, num_hits: Calls of `resume_request`, and those that found a beginning.
        num_asked_tokens, num_hit_tokens: Tokens of their prompts, and those that were found.
        num_host_hit_tokens: Those of the tokens found whose blocks were on the host.
        num_disk_tokens: Tokens whose blocks were loaded from disk to the host.
        num_disk_given, num_disk_skipped: Records that were given to the store, and those that had
            left the device before, or that it refused.
        num_disk_damaged: Records of the store that were found damaged.
        num_evicted_blocks, num_evicted_checkpoints: Those that left the device to make room.
        num_lost_blocks: Published blocks that left device and host.
        num_skipped_checkpoints: Boundaries that the policy chose when no checkpoint was left.
        num_swapped_requests: Requests that wait on the host.
        bytes_to_host, bytes_from_host: Bytes copied for swaps and evictions.
    """

    num_free_blocks: int
    num_request_blocks: int
    num_swapped_blocks: int
    num_evictable_blocks: int = 0
    num_prefix_blocks: int = 0
    num_prefix_host_blocks: int = 0
    num_prefix_checkpoints: int = 0
    num_prefix_host_checkpoints: int = 0
    prefix_bytes: int = 0
    prefix_host_bytes: int = 0
    num_lookups: int = 0
    num_hits: int = 0
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_disk_tokens: int = 0
    num_disk_given: int = 0
    num_disk_skipped: int = 0
    num_disk_damaged: int = 0
    num_evicted_blocks: int = 0
    num_evicted_checkpoints: int = 0
    num_lost_blocks: int = 0
    num_skipped_checkpoints: int = 0
    num_swapped_requests: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of all prompts' tokens that was found."""
        return self.num_hit_tokens / self.num_asked_tokens if self.num_asked_tokens else 0.0


def collect_stats(books: CacheBooks, memory: CacheMemory) -> CacheStats:
    """Collect the counts of the books as they are now."""
    prefix, num_free = books.prefix, books.allocator.num_free
    num_evictable, num_swapped = prefix.tree.num_evictable, books.swapped.num_kept_blocks
    common = {
        "num_free_blocks": num_free,
        "num_evictable_blocks": num_evictable,
        "num_swapped_blocks": num_swapped,
        "num_request_blocks": books.allocator.num_blocks - num_free - num_evictable - num_swapped,
        "num_swapped_requests": len(books.swapped),
        "bytes_to_host": books.host.num_bytes_out,
        "bytes_from_host": books.host.num_bytes_in,
    }
    if (tier := prefix.tier) is not None:
        common["num_disk_tokens"] = tier.num_loaded_tokens
        common["num_disk_given"] = tier.counts.num_given
        common["num_disk_skipped"] = tier.counts.num_skipped
        common["num_disk_damaged"] = tier.num_damaged
    tree = prefix.tree
    block_bytes = memory.blocks.num_bytes
    checkpoint_bytes, on_host = memory.checkpoints.num_bytes, tree.num_host_checkpoints
    return CacheStats(
        **common,
        num_prefix_blocks=tree.num_blocks,
        num_prefix_host_blocks=tree.num_host_blocks,
        num_prefix_checkpoints=tree.num_checkpoints,
        num_prefix_host_checkpoints=on_host,
        prefix_bytes=tree.num_blocks * block_bytes
        + (tree.num_checkpoints - on_host) * checkpoint_bytes,
        prefix_host_bytes=tree.num_host_blocks * block_bytes + on_host * checkpoint_bytes,
        num_lookups=prefix.num_lookups,
        num_hits=prefix.num_hits,
        num_asked_tokens=prefix.num_asked_tokens,
        num_hit_tokens=prefix.num_hit_tokens,
        num_host_hit_tokens=prefix.num_host_hit_tokens,
        num_evicted_blocks=tree.num_evicted_blocks,
        num_evicted_checkpoints=tree.num_evicted_checkpoints,
        num_lost_blocks=tree.num_lost_blocks,
        num_skipped_checkpoints=prefix.num_skipped_checkpoints,
    )
