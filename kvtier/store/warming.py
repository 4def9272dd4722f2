"""After open: the hottest entries of the tiers below, brought up into a memory tier in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.concurrency.deadline import Deadline
from kvtier.store.loads import Loads
from kvtier.store.lookup import locate
from kvtier.tier.opening import stocked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.store.engine import Engine
    from kvtier.tier.index import Entry
    from kvtier.tier.memory import MemoryTier

AT_ONCE = 16  # reads under way: warming shares the background half of every budget with other work


async def warm_up(engine: Engine, tier: MemoryTier) -> None:
    """Load up to `warm_bytes` of what lower tiers used last, parents before children; evicts nothing, never raises."""
    for below in engine.stored_tiers:
        await stocked(below)
    goal = min(tier.settings.warm_bytes, tier.ledger.capacity)
    hottest = _hottest_first(engine, tier)
    while batch := _next_batch(hottest, goal - tier.ledger.usage):
        claims = [engine.generations.claim(key) for key in batch]
        located = [where for key in batch if (where := locate(engine, key)) is not None]
        try:
            with Loads(engine, located, background=True) as loads:
                for i, where in enumerate(located):
                    value = await loads.value(i, Deadline.after(engine.settings.deadline_seconds, engine.clock))
                    stale = claims[batch.index(where.key)].stale
                    if value is None or stale or tier.find(where.key) is not None:
                        continue
                    _ = engine.movement.promote_to(tier, value)
        finally:
            for claim in claims:
                claim.end()


def _next_batch(hottest: Iterator[Entry], room: int) -> list[str]:
    """Return the next keys that together fit into `room` bytes; none ends the warm-up."""
    batch: list[str] = []
    while len(batch) < AT_ONCE:
        entry = next(hottest, None)
        if entry is None or entry.size > room:
            break
        room -= entry.size
        batch.append(entry.key)
    return batch


def _hottest_first(engine: Engine, tier: MemoryTier) -> Iterator[Entry]:
    for below in engine.tiers[engine.tiers.index(tier) + 1 :]:
        keys = list(below.ledger.policy.coldest_first())
        while keys:
            entry = below.find(keys.pop())
            if entry is not None and tier.find(entry.key) is None:
                yield entry
