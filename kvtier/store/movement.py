"""Values between tiers: down after a put and on eviction, up after a hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import CodecError
from kvtier.placement import (
    USES_REMEMBERED,
    TouchMemory,
    demotion_target,
    has_filter,
    promotion_targets,
    refill_targets,
    write_targets,
)
from kvtier.sessions import ENDED
from kvtier.tier.encode import raised_for
from kvtier.tier.memory import MemoryTier
from kvtier.tier.reading import read
from kvtier.tier.stored import StoredTier
from kvtier.tier.value import Value

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from kvtier.concurrency.generations import Claim
    from kvtier.store.engine import Engine
    from kvtier.tier.index import Entry


class Movement:
    """The engine's hand: carries out what `placement` decides. Never waits for a lower tier."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._converting: dict[tuple[str, str], asyncio.Task[None]] = {}  # promotions under way, by tier and key
        self._uses = TouchMemory(USES_REMEMBERED) if has_filter(engine.tiers) else None
        for tier in engine.tiers:
            if isinstance(tier, MemoryTier):
                tier.on_evict = self._demote_from_memory
            else:
                tier.demote = self._demote_from_medium

    # --- down

    def write_down(
        self, value: Value, *, below: int, expires: float | None, priority: int
    ) -> list[tuple[StoredTier, asyncio.Future[str] | None]]:
        """Give the value to every write-through tier below that lacks it; return each stored tier's outcome to come.

        A `None` outcome means that the tier did not take it (counted as dropped there).
        """
        offered: list[tuple[StoredTier, asyncio.Future[str] | None]] = []
        tiers = self._engine.tiers
        again = self._uses is None or self._uses.again(value.key)
        targets = write_targets(tiers, top=below, again=again)
        for i in targets:
            tier = tiers[i]
            if isinstance(tier, MemoryTier):
                if tier.find(value.key) is None:
                    tier.keep(value, expires=expires, priority=priority)
            elif self.lacks(tier, value.key, lossy=value.header.lossy):
                writer = self._engine.writers[tier.name]
                offered.append((tier, writer.offer(value, expires=expires, priority=priority)))
        if not again:
            for i in refill_targets(tiers, below):
                tiers[i].ledger.counters.held_back += 1
        return offered

    def used(self, keys: Sequence[str]) -> None:
        """Write what memory has and was used twice by now to the tiers whose filter waited for that."""
        if self._uses is None:
            return
        for key in keys:
            if not self._uses.again(key):
                continue
            for tier in self._engine.memory_tiers:
                entry = tier.ledger.index.entries.get(key)
                if entry is not None and entry.value is not None:
                    self._refill(tier, entry, entry.value)
                    break

    def _refill(self, tier: MemoryTier, entry: Entry, value: Value) -> None:
        engine = self._engine
        for i in refill_targets(engine.tiers, engine.tiers.index(tier)):
            below = engine.tiers[i]
            if isinstance(below, MemoryTier):
                if below.find(entry.key) is None:
                    below.keep(value, expires=entry.expires, priority=entry.priority)
            elif self.lacks(below, entry.key, lossy=bool(entry.lossy)):
                engine.writers[below.name].offer(value, expires=entry.expires, priority=entry.priority)

    def lacks(self, tier: StoredTier, key: str, *, lossy: bool) -> bool:
        """Tell whether the tier has no such value, nor one on its way, or only a lossy one where this one is exact."""
        if self._engine.writers[tier.name].has(key):
            return False
        entry = tier.find(key)
        return entry is None or (entry.lossy is True and not lossy)

    def _demote_from_memory(self, tier: MemoryTier, entry: Entry) -> None:
        target = self._below(tier, entry.key)
        if target is None or entry.value is None or entry.priority == ENDED:
            return
        if isinstance(target, MemoryTier):
            if target.find(entry.key) is None and target.keep(
                entry.value, expires=entry.expires, priority=entry.priority
            ):
                target.ledger.counters.demoted += 1
        elif self.lacks(target, entry.key, lossy=bool(entry.lossy)):
            writer = self._engine.writers[target.name]
            writer.offer(entry.value, expires=entry.expires, priority=entry.priority, demotion=True)

    async def _demote_from_medium(self, tier: StoredTier, victims: Sequence[Entry]) -> None:
        """Read what a byte tier evicts and hand it on, before it is removed; what cannot be read is just evicted."""
        arena = self._engine.arena
        for entry in victims:
            target = self._below(tier, entry.key)
            if not isinstance(target, StoredTier) or not self.lacks(target, entry.key, lossy=bool(entry.lossy)):
                continue
            writer = self._engine.writers[target.name]
            slot = arena.try_allocate(entry.size)
            if slot is None:
                target.ledger.counters.dropped["no-memory"] += 1
                continue
            try:
                place = tier.limits.ask(entry.size, background=True)
                outcome = await read(tier, entry, slot, place, lookup=False)
                # What was deleted or put anew while it was read must not come back further down.
                if isinstance(outcome, Value) and tier.current(entry):
                    writer.offer(outcome, expires=entry.expires, priority=entry.priority, demotion=True)
            finally:
                slot.release()

    def _below(self, tier: MemoryTier | StoredTier, key: str) -> MemoryTier | StoredTier | None:
        """Return the tier that takes `key` when `tier` lets it go, counting what its filter keeps away."""
        tiers = self._engine.tiers
        again = self._uses is None or self._uses.twice(key)
        below = demotion_target(tiers, tiers.index(tier), again=again)
        if below is None and not again:
            refusing = demotion_target(tiers, tiers.index(tier))
            if refusing is not None:
                tiers[refusing].ledger.counters.held_back += 1
        return tiers[below] if below is not None else None

    # --- up

    def promote(self, value: Value, source: StoredTier, claim: Claim) -> None:
        """Offer what was read from `source` to the tiers above, by their promotion policy. Called once per read."""
        engine = self._engine
        again = engine.touches.again(value.key)
        entry = source.find(value.key)
        expires = entry.expires if entry is not None else value.header.expires
        for i in promotion_targets(engine.tiers, engine.tiers.index(source), again=again):
            tier = engine.tiers[i]
            if tier.find(value.key) is not None:
                continue
            if isinstance(tier, StoredTier):
                engine.writers[tier.name].offer(value, expires=expires, promotion=True)
            else:
                _ = self.promote_to(tier, value, expires=expires)
        del claim

    def promote_to(self, tier: MemoryTier, value: Value, *, expires: float | None = None) -> asyncio.Task[None] | None:
        """Put a value that was read further down into a memory tier.

        Returns:
            None if it was taken (or refused) as it is; else the job that brings it to the tier's form first.
        """
        expires = value.header.expires if expires is None else expires
        if value.header.chain == tier.chain.refs:
            self._keep_promoted(tier, value, expires)
            return None
        mark = (tier.name, value.key)
        job = self._converting.get(mark)
        if job is None:
            claim = self._engine.generations.claim(value.key)  # now, not when the job begins: a delete may come between
            job = self._engine.services.supervisor.spawn(
                self._promote_converted(tier, value.retain(), claim, expires), name=f"{tier.name} promote"
            )
            self._converting[mark] = job
            job.add_done_callback(lambda _: self._converting.pop(mark, None))
        return job

    def _keep_promoted(self, tier: MemoryTier, value: Value, expires: float | None) -> None:
        if tier.keep(value, expires=expires):
            tier.ledger.counters.promoted += 1

    async def _promote_converted(self, tier: MemoryTier, value: Value, claim: Claim, expires: float | None) -> None:
        """Bring the value to the tier's form first. Takes only memory that is free now: a promotion never waits."""
        converted: Value | None = None
        try:
            converted = await raised_for(tier.chain, value, self._engine.services, timeout=0.0, background=True)
            if not claim.stale and tier.find(value.key) is None:
                self._keep_promoted(tier, converted, expires)
        except (TimeoutError, CodecError):
            tier.ledger.counters.dropped["promotion"] += 1
        finally:
            claim.end()
            if converted is not None:
                converted.release()
            value.release()
