"""The store's figures, and changes that touch only the books."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtier.keys.names import is_kv_key
from kvtier.store.results import Histogram, MemoryStats, Pressure, Stats, TierStats
from kvtier.tier.latency import BOUNDS_SECONDS
from kvtier.tier.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.store.engine import Engine, Tier
    from kvtier.tier.latency import Latency


def stats(engine: Engine) -> Stats:
    """Return all figures at this moment."""
    arena, results = engine.arena.stats(), engine.results.stats()
    return Stats(
        tiers={tier.name: _tier_stats(engine, tier) for tier in engine.tiers},
        memory=MemoryStats(
            arena_capacity=arena.capacity,
            arena_used=arena.used,
            arena_high_water=arena.high_water,
            arena_waiting=arena.waiting,
            arena_prefaulted=arena.prefaulted,
            arena_huge_bytes=arena.huge_bytes,
            numa_node=arena.numa_node,
            pinned=arena.pinned,
            locked=arena.locked,
            results=results.lent + results.idle,
            results_budget=results.budget,
            leased=engine.leases.used,
        ),
        reads_under_way=engine.flights.under_way,
        tasks=engine.services.supervisor.count,
    )


def _tier_stats(engine: Engine, tier: Tier) -> TierStats:
    ledger = tier.ledger
    writer = engine.writers.get(tier.name)
    return TierStats(
        name=tier.name,
        backend=tier.kind,
        bytes=ledger.usage,
        capacity=ledger.capacity,
        entries=len(ledger.index),
        pinned=ledger.pinned_count,
        up=tier.up,
        health="closed" if isinstance(tier, MemoryTier) else tier.breaker.state,
        last_error="" if isinstance(tier, MemoryTier) else tier.breaker.last_error,
        in_flight_bytes=0 if isinstance(tier, MemoryTier) else tier.in_flight_bytes,
        queued_bytes=writer.queued_bytes if writer is not None else 0,
        queued=writer.pending if writer is not None else 0,
        counters=ledger.counters.plain(),
        read_seconds=_seconds(ledger.counters.read_latency),
        write_seconds=_seconds(ledger.counters.write_latency),
        read_histogram=_histogram(ledger.counters.read_latency),
        write_histogram=_histogram(ledger.counters.write_latency),
        medium={} if isinstance(tier, MemoryTier) else tier.backend.figures(),
    )


def _seconds(latency: Latency) -> dict[str, float]:
    if not latency.count:
        return {}
    mean = latency.total_seconds / latency.count
    return {"p50": latency.quantile(0.5), "p99": latency.quantile(0.99), "mean": mean}


def _histogram(latency: Latency) -> Histogram:
    return Histogram(bounds=BOUNDS_SECONDS, counts=tuple(latency.counts), total_seconds=latency.total_seconds)


def pressure(engine: Engine) -> Pressure:
    """Return how full memory, queues and tiers are."""
    arena, results = engine.arena.stats(), engine.results.stats()
    return Pressure(
        arena=arena.used / arena.capacity,
        results=results.lent / results.budget,
        queues={
            name: min(1.0, writer.queued_bytes / writer.tier.settings.write_queue_bytes)
            for name, writer in engine.writers.items()
        },
        tiers={tier.name: tier.ledger.usage / tier.ledger.capacity for tier in engine.tiers},
    )


def namespaces(engine: Engine) -> dict[str, int]:
    """Return how many known KV keys each namespace has, by its 16 hex digits."""
    keys = {key for tier in engine.tiers for key in tier.ledger.index.keys_under("") if is_kv_key(key)}
    return dict(Counter(key.split("/", 1)[0] for key in sorted(keys)))


def extend_life(engine: Engine, keys: Sequence[str], expires: float | None) -> None:
    """Set the later of the present and a new expiry in every tier that has the keys."""
    for tier in engine.tiers:
        for key in keys:
            entry = tier.find(key)
            if entry is not None and tier.ledger.extend_life(entry, expires) and not isinstance(tier, MemoryTier):
                tier.set_expiry(entry)


def set_pins(tiers: Sequence[Tier], keys: Sequence[str], ttl_seconds: float | None) -> None:
    """Pin the keys in these tiers for a time, or unpin them for None."""
    for tier in tiers:
        for key in keys:
            if ttl_seconds is None:
                tier.ledger.unpin(key)
            elif tier.find(key) is not None:
                tier.ledger.pin(key, tier.ledger.now() + ttl_seconds)
