"""Who holds which keys: the own index first, then the media that other processes write to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import BackendTimeoutError, BackendUnavailableError
from kvtier.tier.memory import MemoryTier
from kvtier.tier.reading import probe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine
    from kvtier.tier.index import Entry
    from kvtier.tier.stored import StoredTier


@dataclass(slots=True)
class Located:
    """A key and the tiers that hold it, uppermost first; those below a memory tier that does are left out."""

    key: str
    memory: tuple[MemoryTier, Entry] | None = None
    waiting: StoredTier | None = None  # the value is in memory, on its way to this tier
    stored: Sequence[tuple[StoredTier, Entry]] = ()


def locate(engine: Engine, key: str, *, exact: bool = False) -> Located | None:
    """Return who holds `key` as far as this store knows and can be asked now; None if nobody.

    With `exact`, entries known to be lossy do not count.
    """
    found = Located(key)
    for tier in engine.tiers:
        entry = tier.find(key)
        good = entry is not None and not (exact and entry.lossy)
        if isinstance(tier, MemoryTier):
            if entry is not None and good:
                found.memory = (tier, entry)
                return found
            continue
        if found.waiting is None and engine.waiting_in(tier, key, exact=exact) is not None:
            found.waiting = tier
        if entry is not None and good and tier.up:
            found.stored = (*found.stored, (tier, entry))
    return found if found.waiting is not None or found.stored else None


async def locate_all(
    engine: Engine, keys: Sequence[str], deadline: Deadline, *, exact: bool = False
) -> list[Located | None]:
    """Return who holds each key; keys nobody here knows are asked for on the shared media, in one round trip."""
    found = [locate(engine, key, exact=exact) for key in keys]
    unknown = [key for key, where in zip(keys, found, strict=True) if where is None]
    if unknown and await _probe(engine, unknown, deadline):
        return [locate(engine, key, exact=exact) for key in keys]  # all anew: others may have moved meanwhile
    return found


async def leading_runs(
    engine: Engine, runs: Sequence[Sequence[str]], deadline: Deadline, *, exact: bool = False
) -> list[list[Located]]:
    """Return for each run of keys its longest leading part that is held somewhere.

    Only the first unknown key of a run is asked for on the shared media; while keys are found there, the number asked
    for at once doubles. All runs share their round trips.
    """
    found: list[list[Located]] = [[] for _ in runs]
    asked: dict[int, int] = {}
    open_runs = set(range(len(runs)))
    while open_runs:
        wanted: list[str] = []
        for i in sorted(open_runs):
            _advance(engine, runs[i], found[i], exact=exact)
            at = len(found[i])
            if at == len(runs[i]) or asked.get(i, -1) >= at:  # complete, or the key at the gap was asked for in vain
                open_runs.discard(i)
                continue
            width = max(1, 2 * (at - asked[i])) if i in asked else 1
            wanted.extend(runs[i][at : at + width])
            asked[i] = at
        if not wanted or not await _probe(engine, list(dict.fromkeys(wanted)), deadline):
            break
    for i in open_runs:
        _advance(engine, runs[i], found[i], exact=exact)
    return found


def _advance(engine: Engine, keys: Sequence[str], found: list[Located], *, exact: bool) -> None:
    for key in keys[len(found) :]:
        where = locate(engine, key, exact=exact)
        if where is None:
            return
        found.append(where)


async def _probe(engine: Engine, keys: Sequence[str], deadline: Deadline) -> bool:
    """Ask every shared tier in service for the keys; tell whether any was asked and answered in time.

    Raises:
        BackendError: in a strict store, if a tier is out of service, failed, or did not answer in time.
    """
    strict = engine.settings.strict
    for tier in engine.stored_tiers:
        if strict and not tier.up:
            raise BackendUnavailableError(f"tier {tier.name!r} is out of service: {tier.breaker.last_error}")
    tiers = [tier for tier in engine.stored_tiers if tier.shared and tier.up]
    if not tiers or deadline.passed:
        return False
    asking = [engine.services.supervisor.spawn(probe(tier, keys), name=f"{tier.name} probe") for tier in tiers]
    await asyncio.wait(asking, timeout=deadline.remaining())
    for task in asking if strict else ():
        error = task.result() if task.done() else BackendTimeoutError(f"{task.get_name()}: no answer in time")
        if error is not None:
            raise error
    return any(task.done() for task in asking)
