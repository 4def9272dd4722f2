"""Every key once: from the indexes, and from media that cannot be indexed whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.errors import BackendTimeoutError, BackendUnavailableError
from kvtier.store.results import ListEntry
from kvtier.tier.memory import MemoryTier
from kvtier.tier.opening import learn_names, rescan, stocked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine, Tier
    from kvtier.tier.stored import StoredTier

PAGE_KEYS = 1000


async def list_keys(engine: Engine, prefix: str, deadline: Deadline) -> AsyncIterator[ListEntry]:
    """Yield the keys under a literal prefix, each once; keys put or deleted meanwhile may or may not appear.

    Entries whose key is only written inside them have their header read first, as far as the deadline allows.

    Raises:
        BackendError: in a strict store, if a medium could not be listed.
    """
    for tier in engine.stored_tiers:
        stock = None
        if tier.up:
            stock = engine.services.supervisor.spawn(_take_stock(tier, prefix), name=f"{tier.name} list")
            await asyncio.wait({stock}, timeout=deadline.remaining())
        if engine.settings.strict:
            _raise_fault(tier, stock)
    seen: set[str] = set()
    # Of all tiers at one moment: a key that is promoted while this goes on would be missed in both.
    for keys in [_keys_in(engine, tier, prefix) for tier in engine.tiers]:
        for number, key in enumerate(keys):
            if key in seen:
                continue
            seen.add(key)
            entry = _entry(engine, key)
            if entry is not None:
                yield entry
            if number % PAGE_KEYS == PAGE_KEYS - 1:
                await asyncio.sleep(0)


def _keys_in(engine: Engine, tier: Tier, prefix: str) -> list[str]:
    """Return the keys that a tier holds or is about to."""
    keys = list(tier.ledger.index.keys_under(prefix))
    if tier.name in engine.writers:
        keys.extend(key for key in engine.writers[tier.name].on_their_way() if key.startswith(prefix))
    return keys


def _entry(engine: Engine, key: str) -> ListEntry | None:
    sizes: dict[str, int] = {}
    expires: float | None = None
    lossy: bool | None = None
    for tier in engine.tiers:
        entry = tier.find(key)
        if entry is not None:
            sizes[tier.name] = entry.size
            expires, lossy = entry.expires, entry.lossy
        elif not isinstance(tier, MemoryTier):
            value = engine.waiting_in(tier, key)
            if value is not None:
                sizes[tier.name] = value.size
                expires, lossy = value.header.expires, value.header.lossy
    return ListEntry(key=key, tiers=sizes, expires=expires, lossy=lossy) if sizes else None


def _raise_fault(tier: StoredTier, stock: asyncio.Task[Exception | None] | None) -> None:
    if stock is None:
        raise BackendUnavailableError(f"tier {tier.name!r} is out of service: {tier.breaker.last_error}")
    error = stock.result() if stock.done() else BackendTimeoutError(f"tier {tier.name!r} was not listed in time")
    if error is not None:
        raise error


async def _take_stock(tier: StoredTier, prefix: str) -> Exception | None:
    """Bring the index up to date with a medium that others change too, then learn the keys behind hashed names.

    Returns:
        Why that failed, if it did.
    """
    try:
        await stocked(tier)
        if tier.shared:
            await rescan(tier, prefix)
        await learn_names(tier)
    except Exception as exc:  # noqa: BLE001  # the list then shows what is known
        tier.failed(exc)
        tier.services.events.emit("error", tier=tier.name, reason=f"list failed: {exc}", error=exc)
        return exc
    return None
