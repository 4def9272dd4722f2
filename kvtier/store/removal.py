"""Deletes: what is gone here is gone at once; the media follow, and a tier that cannot is named."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.errors import PartialDeleteError
from kvtier.keys.names import key_of
from kvtier.store.coherence import announce
from kvtier.tier.journal import Cleared, Deleted
from kvtier.tier.memory import MemoryTier
from kvtier.tier.stored import Removed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.tier.stored import StoredTier


async def delete_keys(engine: Engine, keys: Sequence[str], deadline: Deadline) -> list[bool]:
    """Remove keys from every tier; tell for each whether it was in any.

    Wins over every put, write-back, promotion and late reply begun before it.

    Raises:
        PartialDeleteError: tiers that did not confirm by the deadline; there the keys are hidden from this store, and
            their removal is tried again.
    """
    news = Deleted(tuple(keys), engine.clock.wall())
    for key in keys:
        engine.tombstones.add(key, news.when)
    was_there = {key: _forget(engine, key) for key in dict.fromkeys(keys)}
    removals: dict[str, asyncio.Task[Removed]] = {}
    for tier in engine.stored_tiers:
        concerned = [key for key in was_there if tier.may_have(key)]
        if concerned:
            removals[tier.name] = tier.remove_keys(concerned)
    engine.services.supervisor.start(announce(engine, news), name="announce")
    found = await _confirm(engine, removals, deadline)
    return [was_there[key] or key in found for key in keys]


def _forget(engine: Engine, key: str) -> bool:
    """Take a key out of memory and off every queue; tell whether it was there. What media had, they tell themselves."""
    engine.generations.change(key)
    engine.flights.close_boarding(key)
    known = False
    for tier in engine.tiers:
        entry = tier.find(key)  # an entry that only its name was known of takes its key
        if isinstance(tier, MemoryTier):
            known = known or entry is not None
            held = tier.ledger.index.find(key)
            if held is not None:
                tier.drop(held, "deleted")
        else:
            writer = engine.writers[tier.name]
            known = known or writer.has(key)
            writer.forget(key)
    return known


async def clear_prefix(engine: Engine, prefix: str, deadline: Deadline) -> None:
    """Remove every key under a literal prefix from every tier, also those only a shared medium knows of.

    Raises:
        PartialDeleteError: as `delete_keys`.
    """
    news = Cleared(prefix, engine.clock.wall())
    engine.tombstones.add_prefix(prefix, news.when)
    engine.generations.clear(prefix)
    engine.flights.close_boarding_under(prefix)
    removals: dict[str, asyncio.Task[Removed]] = {}
    for tier in engine.tiers:
        if isinstance(tier, MemoryTier):
            for key in tier.ledger.index.keys_under(prefix):
                tier.drop(tier.ledger.index.entries[key], "deleted")
            continue
        engine.writers[tier.name].forget_under(prefix)
        if not tier.ready or (tier.stock is not None and not tier.stock.done()):
            tier.cleared.append(prefix)
        removals[tier.name] = engine.services.supervisor.spawn(
            _clear_medium(tier, tier.remove_keys(tier.concerned(prefix)), prefix), name=f"{tier.name} clear"
        )
    engine.services.supervisor.start(announce(engine, news), name="announce")
    await _confirm(engine, removals, deadline)


async def _clear_medium(tier: StoredTier, known: asyncio.Task[Removed], prefix: str) -> Removed:
    """Remove the known keys, then what else the medium has under the prefix."""
    complete = tier.ready
    removed = await known
    complete = complete and removed.complete
    if not tier.shared:
        return Removed(complete, removed.found)
    try:
        async for page in tier.pages():
            keys = [key_of(stat.name) for stat in page if not tier.own_affair(stat.name)]
            strangers = [key for key in keys if key is not None and key.startswith(prefix)]
            if strangers:
                complete = (await tier.remove_keys(strangers)).complete and complete
    except Exception as exc:  # noqa: BLE001  # told by the return value
        tier.failed(exc)
        complete = False
    return Removed(complete, removed.found)


def _complete(task: asyncio.Task[Removed]) -> bool:
    """Tell whether every medium confirmed; a task that the store's end cut off did not."""
    return task.done() and not task.cancelled() and task.result().complete


async def _confirm(engine: Engine, removals: dict[str, asyncio.Task[Removed]], deadline: Deadline) -> set[str]:
    """Wait for the media; return the keys that they had."""
    if removals:
        await asyncio.wait(removals.values(), timeout=deadline.remaining())
    missed = [name for name, task in removals.items() if not _complete(task)]
    if missed:
        engine.events.emit("partial_delete", reason=f"not confirmed by {', '.join(missed)}")
        raise PartialDeleteError(missed)
    return {key for task in removals.values() for key in task.result().found}
