"""A store's figures as Prometheus metrics, read when they are scraped: nothing is done per chunk."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError
from kvtier.metrics.snapshots import HasStats, Snapshots

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise ConfigError(
        "kvtier.metrics.prometheus needs prometheus-client: pip install 'kvtier[prometheus]'"
    ) from _missing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.core import Metric

    from kvtier.store.results import Histogram, MemoryStats, Stats, TierStats

# Metric name (without `_total`), its help, and from which counters of `TierStats` each value of its label comes.
_BY_RESULT: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "kvtier_lookups_chunks",
        "Chunks looked for in a tier, by how that ended; the results add up to all lookups.",
        {
            "hit": "hits",
            "miss": "misses",
            "corrupt": "corrupt",
            "raced": "raced",
            "timeout": "timeouts",
            "error": "errors",
            "skipped": "skipped",
        },
    ),
    (
        "kvtier_departures_chunks",
        "Chunks that left a tier, by cause.",
        {"evicted": "evicted", "deleted": "deleted", "expired": "expired", "vanished": "vanished"},
    ),
    (
        "kvtier_failed_writes_chunks",
        "Writes that a medium failed or did not finish in time.",
        {"error": "write_errors", "timeout": "write_timeouts"},
    ),
)
_BY_OP: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "kvtier_arrivals_chunks",
        "Chunks that came into a tier: found on its medium, written, or written over an older one.",
        {"find": "found", "write": "written", "replace": "replaced"},
    ),
    (
        "kvtier_moves_chunks",
        "Chunks that came from a lower tier (promote) or an upper one (demote); they count as written too.",
        {"promote": "promoted", "demote": "demoted"},
    ),
    (
        "kvtier_transfers_bytes",
        "Bytes read from and written to a tier, and those of evicted chunks.",
        {"read": "read_bytes", "write": "written_bytes", "evict": "evicted_bytes"},
    ),
    (
        "kvtier_shared_reads_chunks",
        "Gets that joined a read of the same chunk that was under way.",
        {"read": "joined"},
    ),
    (
        "kvtier_abandoned_calls_jobs",
        "Calls of a medium given up past their deadline, their threads written off.",
        {"call": "abandoned"},
    ),
)
_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("kvtier_usage_bytes", "Bytes that a tier has spoken for.", "bytes"),
    ("kvtier_capacity_bytes", "Bytes that a tier may hold.", "capacity"),
    ("kvtier_entries_chunks", "Chunks in a tier.", "entries"),
    ("kvtier_pinned_chunks", "Chunks that are exempt from eviction.", "pinned"),
    ("kvtier_in_flight_bytes", "Bytes of transfers under way.", "in_flight_bytes"),
    ("kvtier_queued_bytes", "Bytes that wait to be written to a tier.", "queued_bytes"),
    ("kvtier_queued_chunks", "Chunks that wait to be written to a tier or are being written.", "queued"),
)

BREAKER_STATES: Mapping[str, int] = {"closed": 0, "half-open": 1, "open": 2}


class StoreCollector(Collector):
    """Give it to a `prometheus_client` registry; one per store, made on the store's event loop.

    Every label is one of `tier` (a tier's name), `op` and `result` (fixed words): the number of series does not grow
    with keys, namespaces or users. Scraping is allowed from any thread.
    """

    def __init__(self, store: HasStats) -> None:
        self._snapshots = Snapshots(store)

    def collect(self) -> Iterable[Metric]:
        """Yield every metric of one moment."""
        stats = self._snapshots.latest
        tiers = stats.tiers.values()
        for name, text, counters in _BY_RESULT:
            yield _counted(name, text, "result", counters, tiers)
        for name, text, counters in _BY_OP:
            yield _counted(name, text, "op", counters, tiers)
        yield _drops(tiers)
        yield _up(tiers)
        yield _breakers(tiers)
        for name, text, figure in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["tier"])
            for tier in tiers:
                gauge.add_metric([tier.name], getattr(tier, figure))
            yield gauge
        yield _latencies(tiers)
        yield _memory(stats.memory)
        yield from _activity(stats)


def _counted(
    name: str, text: str, label: str, counters: Mapping[str, str], tiers: Iterable[TierStats]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["tier", label])
    for tier in tiers:
        for word, counter in counters.items():
            family.add_metric([tier.name, word], _whole(tier.counters[counter]))
    return family


def _whole(count: int | Mapping[str, int]) -> int:
    return count if isinstance(count, int) else sum(count.values())


def _drops(tiers: Iterable[TierStats]) -> CounterMetricFamily:
    family = CounterMetricFamily("kvtier_drops_chunks", "Writes given up, by reason.", labels=["tier", "result"])
    for tier in tiers:
        dropped = tier.counters["dropped"]
        for reason, count in dropped.items() if not isinstance(dropped, int) else ():
            family.add_metric([tier.name, reason], count)
    return family


def _up(tiers: Iterable[TierStats]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("kvtier_tier_up", "1 while a tier is in service, 0 while it is not.", labels=["tier"])
    for tier in tiers:
        family.add_metric([tier.name], int(tier.up))
    return family


def _breakers(tiers: Iterable[TierStats]) -> GaugeMetricFamily:
    text = "A tier's breaker: 0 closed (all is well), 1 half-open (a probe is under way), 2 open (left alone)."
    family = GaugeMetricFamily("kvtier_breaker_state", text, labels=["tier"])
    for tier in tiers:
        family.add_metric([tier.name], BREAKER_STATES[tier.health])
    return family


def _latencies(tiers: Iterable[TierStats]) -> HistogramMetricFamily:
    text = "How long a byte tier took per chunk: a read with its verification; a write with encoding and eviction."
    family = HistogramMetricFamily("kvtier_operation_seconds", text, labels=["tier", "op"])
    for tier in tiers:
        for op, histogram in (("read", tier.read_histogram), ("write", tier.write_histogram)):
            if sum(histogram.counts):
                family.add_metric([tier.name, op], _buckets(histogram), histogram.total_seconds)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative counts; what took longer than the last bound is counted in it, so that is infinity here."""
    bounds = [*(str(bound) for bound in histogram.bounds[:-1]), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


def _memory(memory: MemoryStats) -> GaugeMetricFamily:
    family = GaugeMetricFamily("kvtier_memory_bytes", "Host memory of the store, by what it is for.", labels=["op"])
    figures = {
        "arena": memory.arena_capacity,
        "arena_used": memory.arena_used,
        "arena_high_water": memory.arena_high_water,
        "results": memory.results,
        "leased": memory.leased,
    }
    for use, size in figures.items():
        family.add_metric([use], size)
    return family


def _activity(stats: Stats) -> Iterable[GaugeMetricFamily]:
    yield GaugeMetricFamily("kvtier_reads_in_flight", "Reads of chunks under way.", value=stats.reads_under_way)
    yield GaugeMetricFamily("kvtier_tasks", "Background tasks of the store.", value=stats.tasks)
