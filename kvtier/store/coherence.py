"""Deletes between stores that share a medium: told through its journals, heard within `coherence_seconds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import BackendError
from kvtier.tier.journal import Cleared, Deleted
from kvtier.tier.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.store.engine import Engine, Tier
    from kvtier.tier.index import Entry
    from kvtier.tier.stored import StoredTier


async def announce(engine: Engine, news: Deleted | Cleared) -> None:
    """Tell the other stores on every shared medium; a medium that cannot be told costs them the news, and says so."""
    for tier in engine.stored_tiers:
        if not tier.shared or tier.journal is None or not tier.up:
            continue
        tier.journal.announce(news)
        try:
            await tier.bounded(tier.journal.append())
        except BackendError as exc:
            tier.failed(exc)
            engine.events.emit("error", tier=tier.name, reason=f"delete not announced: {exc}", error=exc)


async def listen(engine: Engine, tier: StoredTier) -> None:
    """Hear what others deleted since the last time, and stop serving it here."""
    if not tier.shared or tier.journal is None or not tier.up:
        return
    try:
        news = await tier.bounded(tier.journal.follow())
    except BackendError as exc:
        tier.failed(exc)
        return
    for item in news:
        if isinstance(item, Cleared):
            engine.tombstones.add_prefix(item.prefix, item.when)
            drop_outdated(engine, [key for each in engine.tiers for key in each.ledger.index.keys_under(item.prefix)])
        else:
            for key in item.keys:
                engine.tombstones.add(key, item.when)
            drop_outdated(engine, item.keys)


def drop_outdated(engine: Engine, keys: Sequence[str]) -> None:
    """Take values that were deleted elsewhere since they were put out of every tier and queue of this store."""
    for key in keys:
        for tier in engine.tiers:
            entry = tier.ledger.index.find(key)
            if entry is not None and _drop(engine, tier, entry):
                engine.generations.change(key)
                engine.flights.close_boarding(key)
            if isinstance(tier, MemoryTier):
                continue
            waiting = engine.writers[tier.name].waiting(key)
            if waiting is not None and engine.tombstones.outdated(key, waiting.header.created):
                engine.generations.change(key)
                engine.writers[tier.name].forget(key)


def _drop(engine: Engine, tier: Tier, entry: Entry) -> bool:
    """Drop an entry that is older than its key's deletion; tell whether it was.

    One that somebody else wrote has no known age. On a shared medium it leaves the books only, and is met again if it
    is still there; elsewhere it stays, and the read that fetches it looks at the value's own age.
    """
    if entry.created is None:
        if not isinstance(tier, MemoryTier) and tier.shared and not tier.locks.held(entry.name):
            tier.ledger.depart(entry, "vanished")
        return False
    if not engine.tombstones.outdated(entry.key, entry.created):
        return False
    if isinstance(tier, MemoryTier):
        return tier.drop(entry, "deleted")
    tier.discard([entry], "deleted")
    return True
