"""What the store does by itself and at its end: expiry, probes of tiers that are down, journals, flush."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.errors import BackendError, ClosedError, ConfigError
from kvtier.keys.names import name_of
from kvtier.placement import flush_target
from kvtier.store.coherence import listen
from kvtier.store.results import FlushResult, TierFlush
from kvtier.store.warming import warm_up
from kvtier.tier.memory import MemoryTier
from kvtier.tier.opening import bring_up

if TYPE_CHECKING:
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.tier.stored import StoredTier

TICK_SECONDS = 0.5
LOOKS_PER_PERIOD = 4  # at news of others within one coherence period
PROBE_NAME = name_of("kvtier probe")


class Upkeep:
    """One background task per store, and the flush that `aclose` shares with the public call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stored: dict[str, int] = {}  # per tier, as of the last flush
        self._dropped: dict[str, int] = {}
        self._listen_at: dict[str, float] = {}  # per tier, when to look for news of others

    def start(self) -> None:
        """Begin; the supervisor ends it."""
        supervisor = self._engine.services.supervisor
        supervisor.start(self._run(), name="upkeep")
        for tier in self._engine.memory_tiers:
            if tier.settings.warm_bytes:
                supervisor.start(warm_up(self._engine, tier), name=f"{tier.name} warm-up")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for tier in self._engine.tiers:
                tier.sweep()
            for hold in self._engine.leases.overdue():
                self._engine.events.emit("lease_overdue", size=hold.size, reason="a lease outlives its max_seconds")
            for tier in self._engine.stored_tiers:
                if tier.breaker.probe_due():
                    self._engine.services.supervisor.start(self._probe(tier), name=f"{tier.name} health probe")
            await self._append_journals()
            for tier in self._engine.stored_tiers:
                if self._listening_due(tier):
                    await listen(self._engine, tier)

    def _listening_due(self, tier: StoredTier) -> bool:
        """Tell whether to look for news on a medium now: a few times per period, oftener where that is cheap."""
        now = self._engine.clock.monotonic()
        seconds = self._engine.settings.coherence_seconds / LOOKS_PER_PERIOD
        cheap = tier.backend.traits.follow_seconds
        if cheap is not None:
            seconds = min(seconds, cheap)
        due = now >= self._listen_at.setdefault(tier.name, now + seconds)
        if due:
            self._listen_at[tier.name] = now + seconds
        return due

    async def _probe(self, tier: StoredTier) -> None:
        """Try a tier that is down; a success puts it back into service."""
        try:
            await tier.bounded(self._reach(tier))
        except (BackendError, ConfigError, ClosedError) as exc:
            tier.breaker.failed(exc)
            return
        tier.breaker.succeeded()
        self._engine.events.emit("recovered", tier=tier.name)

    async def _reach(self, tier: StoredTier) -> None:
        if not tier.ready:
            await bring_up(tier)
            return
        answer = (await tier.backend.stat_many([PROBE_NAME]))[0]
        if isinstance(answer, BackendError):
            raise answer

    async def _append_journals(self, deadline: Deadline | None = None) -> None:
        for tier in self._engine.stored_tiers:
            if tier.journal is None or not tier.journal.pending or not tier.up:
                continue
            try:
                await tier.bounded(tier.journal.append(), deadline)
            except BackendError as exc:  # costs the order after a restart, nothing else
                tier.failed(exc)

    async def flush(self, deadline: Deadline) -> FlushResult:
        """Bring what stands on no persistent tier to one, then wait for every value on its way; see `KVStore.flush`."""
        engine = self._engine
        await self._save_homeless(deadline)
        draining = [writer.drain(timeout=deadline.remaining()) for writer in engine.writers.values()]
        await asyncio.gather(*draining)
        for tier in engine.stored_tiers:  # older values that are still to be removed would come back after a crash
            tier.sweep()
            await tier.locks.settle(timeout=deadline.remaining())
        await self._append_journals(deadline)
        return FlushResult(tiers={tier.name: self._since_last(tier) for tier in engine.stored_tiers})

    def _since_last(self, tier: StoredTier) -> TierFlush:
        counters, writer = tier.ledger.counters, self._engine.writers[tier.name]
        stored = counters.written + counters.replaced
        dropped = counters.dropped.total() - counters.dropped["superseded"]
        result = TierFlush(
            stored=stored - self._stored.get(tier.name, 0),
            failed=dropped - self._dropped.get(tier.name, 0),
            pending=writer.pending + len(tier.unremoved),
            last_error=writer.last_error,
        )
        self._stored[tier.name], self._dropped[tier.name] = stored, dropped
        return result

    async def _save_homeless(self, deadline: Deadline) -> None:
        """Offer every value that only memory has to the first persistent tier, as its queue has room."""
        engine = self._engine
        target = flush_target(engine.tiers)
        first = next((tier for tier in engine.tiers if tier.persistent), None)  # if all are down it refuses
        tier = engine.tiers[target] if target is not None else first
        if tier is None or isinstance(tier, MemoryTier):
            return
        writer = engine.writers[tier.name]
        for memory in engine.memory_tiers:
            for key in list(memory.ledger.index.entries):
                entry = memory.ledger.index.entries.get(key)
                if entry is None or entry.value is None or self._has_home(key):
                    continue
                value = memory.lend(entry)
                try:
                    if not await writer.room_for(value.size, timeout=deadline.remaining()):
                        tier.ledger.counters.dropped["late"] += 1
                        continue
                    if memory.ledger.index.entries.get(key) is entry:  # neither deleted nor put anew meanwhile
                        writer.offer(value, expires=entry.expires, priority=entry.priority)
                finally:
                    value.release()

    def _has_home(self, key: str) -> bool:
        engine = self._engine
        return any(
            tier.persistent and (tier.find(key) is not None or engine.writers[tier.name].has(key))
            for tier in engine.stored_tiers
        )

    async def settle(self, deadline: Deadline) -> None:
        """Let reads under way end, then flush."""
        flights = self._engine.flights
        if flights.under_way:
            await flights.wait_all(timeout=deadline.remaining())
        await self._engine.reads.wait_none(timeout=deadline.remaining())
        await self.flush(deadline)
