"""What must hold of an engine's insides: while it runs, when it came to rest, and after it closed."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from simulation.plan import LARGEST_BYTES

from kvtier.tier.memory import MemoryTier

if TYPE_CHECKING:
    from simulation.world import Life

SETTLE_SECONDS = 120.0


async def settle(life: Life) -> None:
    """Wait, in calm weather, until nothing is under way any more."""
    ends = life.world.loop.time() + SETTLE_SECONDS
    life.world.clients.forget()
    gc.collect()
    while _busy(life):
        if life.world.loop.time() > ends:
            life.world.problem(f"never comes to rest: {_busy(life)}")
            return
        await asyncio.sleep(0.1)


def _busy(life: Life) -> str:
    engine = life.engine
    if engine.services.supervisor.count > 1:  # the upkeep task stays
        return f"tasks {sorted(task.get_name() for task in engine.services.supervisor._tasks)}"
    for tier in engine.stored_tiers:
        if engine.writers[tier.name].pending:
            return f"{tier.name} writes {engine.writers[tier.name].pending}"
        if tier.unremoved:
            return f"{tier.name} unremoved {sorted(tier.unremoved)}"
        if not tier.up:
            return f"{tier.name} is {tier.breaker.state}: {tier.breaker.last_error}"
    return ""


def check_running(life: Life) -> None:
    """At any moment: K4, and books that say what the media have, but for names that somebody works on."""
    for tier in life.engine.stored_tiers:
        _check_books(life, tier)
    for tier in life.engine.tiers:
        ledger = tier.ledger
        # `usage` may say more: what is reserved for late writes and what is condemned, both perhaps still in the air.
        size, met = ledger.index.size, tier.shared and ledger.counters.found  # others may have left more than fits
        writers = 0 if isinstance(tier, MemoryTier) else tier.settings.writers
        if size > ledger.capacity + writers * LARGEST_BYTES and not met:
            life.world.problem(f"K4: {tier.name} has {size} of {ledger.capacity} bytes")
        if min(ledger.reserved, ledger.condemned) < 0:
            life.world.problem(f"{tier.name}: reserved {ledger.reserved}, condemned {ledger.condemned}")
    for plan in life.world.plan.tiers:
        medium = life.world.media.get(plan.name)
        if medium is not None and plan.scan_at_open and medium.most > plan.capacity + plan.writers * LARGEST_BYTES:
            life.world.problem(f"K4: {plan.name} held {medium.most} bytes; its capacity is {plan.capacity}")


def _check_books(life: Life, tier) -> None:
    medium = life.world.media[tier.name].entries
    books = {entry.name: entry.size for entry in tier.ledger.index.entries.values()}
    if not _lets_go_by_itself(life, tier):
        for name, size in books.items():
            stored = medium.get(name)
            if not tier.locks.held(name) and (stored is None or len(stored.value) != size):
                there = "nothing" if stored is None else f"{len(stored.value)} bytes"
                life.world.problem(f"{tier.name} says it has {size} bytes of {name}; the medium has {there}")
    if tier.shared or not tier.ready:
        return
    for name in medium.keys() - books.keys():
        if not tier.own_affair(name):
            life.world.problem(f"{tier.name} knows nothing of {name} on its medium")


def _lets_go_by_itself(life: Life, tier) -> bool:
    """Whether the medium may let go of what expires before it heard that it should live longer."""
    expires = life.world.plan.ttls or tier.settings.ttl_seconds is not None
    return bool(tier.backend.traits.native_expiry and expires)


def check_quiet(life: Life) -> None:
    """At rest: the sums balance (K5), the books say what the media have, and nothing is held."""
    check_running(life)
    for tier in life.engine.tiers:
        _check_sums(life, tier)
        if isinstance(tier, MemoryTier):
            _check_memory(life, tier)
        else:
            _check_stored(life, tier)
    engine = life.engine
    entries = {id(e.value.slot): e.value.slot for t in engine.memory_tiers for e in t.ledger.index.entries.values()}
    held = sum(slot.size for slot in entries.values())
    _expect(life, "arena bytes beside the entries", engine.arena.used - held, 0)
    _expect(life, "claims", engine.generations.in_flight, 0)
    _expect(life, "changes remembered", engine.generations.remembered, 0)
    _expect(life, "reads under way", engine.flights.under_way, 0)
    _expect(life, "flights to join", len(engine.flights._joinable), 0)
    _expect(life, "result bytes lent", engine.results.stats().lent, 0)
    _expect(life, "leased bytes", engine.leases.used, 0)
    _expect(life, "tasks", engine.services.supervisor.count, 1)


def _check_sums(life: Life, tier) -> None:
    c, index = tier.ledger.counters, tier.ledger.index
    outcomes = c.hits + c.misses + c.corrupt + c.raced + c.timeouts + c.errors + c.skipped
    _expect(life, f"K5: {tier.name} lookups", c.lookups, outcomes)
    entries = c.found + c.written - c.evicted - c.deleted - c.expired - c.corrupt - c.vanished
    _expect(life, f"K5: {tier.name} entries", len(index), entries)
    _expect(life, f"{tier.name} bytes in the index", index.size, sum(e.size for e in index.entries.values()))
    _expect(life, f"{tier.name} entries in the policy", len(tier.ledger.policy), len(index))
    _expect(life, f"{tier.name} corrupt", c.corrupt, 0)


def _check_memory(life: Life, tier: MemoryTier) -> None:
    index = tier.ledger.index.entries
    _expect(life, f"{tier.name} reserved", tier.ledger.reserved, 0)
    _expect(life, f"{tier.name} names", sorted(tier._slots._entries), sorted(e.name for e in index.values()))
    for entry in index.values():
        holders = sum(
            other.ledger.index.entries.get(entry.key) is not None
            and other.ledger.index.entries[entry.key].value.slot is entry.value.slot
            for other in life.engine.memory_tiers
        )
        _expect(life, f"{tier.name} {entry.key} references", entry.value.slot.references, holders)


def _check_stored(life: Life, tier) -> None:
    writer, ledger = life.engine.writers[tier.name], tier.ledger
    _expect(life, f"{tier.name} reserved", ledger.reserved, 0)
    _expect(life, f"{tier.name} condemned", ledger.condemned, 0)
    _expect(life, f"{tier.name} in flight", tier.in_flight_bytes, 0)
    _expect(life, f"{tier.name} key locks", len(tier.locks), 0)
    _expect(life, f"{tier.name} queued", (writer.pending, writer.queued_bytes, writer._runners), (0, 0, 0))
    _expect(life, f"{tier.name} on their way", list(writer.on_their_way()), [])
    medium = life.world.media[tier.name].entries
    books = {entry.name: entry.size for entry in ledger.index.entries.values()}
    stored = {name: len(item.value) for name, item in medium.items()}
    if tier.shared:
        if _lets_go_by_itself(life, tier):
            return
        stored = {name: size for name, size in stored.items() if name in books}
    if tier.ledger.counters.vanished and not _lets_go_by_itself(life, tier):
        life.world.problem(f"{tier.name}: {tier.ledger.counters.vanished} entries vanished, and nobody else is there")
    _expect(life, f"{tier.name}: what the books say against what the medium has", books, stored)


def check_closed(life: Life) -> None:
    """After the close: no task and no claim is left."""
    engine = life.engine
    stuck = life.crew.running
    if not stuck:
        _expect(life, "tasks after the close", engine.services.supervisor.count, 0)
        _expect(life, "claims after the close", engine.generations.in_flight, 0)
        _expect(life, "arena slots after the close", engine.arena.stats().slots, 0)
        for tier in engine.stored_tiers:
            _expect(life, f"{tier.name} key locks after the close", len(tier.locks), 0)
            _expect(life, f"{tier.name} queued after the close", engine.writers[tier.name].queued_bytes, 0)


def _expect(life: Life, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        life.world.problem(f"{what}: {found}, not {wanted}")
