"""Metrics for Prometheus: times of requests, and the engine's counts as they are when asked."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dsv4.cache.stats import CacheStats
from dsv4.engine import EngineSnapshot, EngineThread

SECONDS = tuple(base * 10.0**power for power in range(-3, 3) for base in (1, 2, 5))


class Timings:
    """Histograms of the time to the first token and of the time for each token after it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry, "buckets": SECONDS}
        first, each = "dsv4_time_to_first_token_seconds", "dsv4_time_per_token_seconds"
        self._first = Histogram(first, "From a request's arrival to its first token", **common)
        self._each = Histogram(each, "Between tokens of a request, per token", **common)

    def note(self, start: float, last: float | None, now: float, num_tokens: int) -> None:
        """Observe new tokens of a request that came at `start` and had its last ones at `last`."""
        if last is None:
            self._first.observe(now - start)
        else:
            self._each.observe((now - last) / num_tokens)


class EngineCollector:
    """Counts of an engine, read from its last snapshot."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every count."""
        now = self.engine.snapshot()
        for name, value in now.counts.items():
            yield CounterMetricFamily(f"dsv4_{name}", name.replace("_", " "), value)
        is_alive = int(self.engine.fatal_error is None)
        yield GaugeMetricFamily("dsv4_alive", "1 while the engine runs", is_alive)
        requests = GaugeMetricFamily("dsv4_requests", "Open samples", labels=["state"])
        for state in ("waiting", "prefill", "decode", "swapped"):
            requests.add_metric([state], now.count_states(state))
        hits = CounterMetricFamily("dsv4_hit_tokens", "Prompt tokens found", labels=["tier"])
        for tier, count in hits_by_tier(now.stats).items():
            hits.add_metric([tier], count)
        blocks = GaugeMetricFamily("dsv4_blocks", "Blocks of the device", labels=["state"])
        for state in ("free", "request", "swapped", "evictable"):
            blocks.add_metric([state], getattr(now.stats, f"num_{state}_blocks"))
        sizes = GaugeMetricFamily("dsv4_bytes", "Bytes of the cache", labels=["component"])
        for component, size in memory_by_component(now).items():
            sizes.add_metric([component], size)
        yield from (requests, hits, blocks, sizes)


def hits_by_tier(stats: CacheStats) -> dict[str, int]:
    """Return the prompt tokens that were found, by where their blocks were."""
    host = stats.num_host_hit_tokens
    disk = min(stats.num_disk_tokens, host)  # they are read to the host first
    return {"device": stats.num_hit_tokens - host, "host": host - disk, "disk": disk}


def memory_by_component(now: EngineSnapshot) -> dict[str, int]:
    """Return the bytes of the cache by component, on the device and on the host."""
    return {name: size.allocated for name, size in (now.memory | now.host_memory).items()}
