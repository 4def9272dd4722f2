"""Cached chunks brought up before they are asked for, in the background class."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.store.loads import Loads
from kvtier.tier.memory import MemoryTier

if TYPE_CHECKING:
    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine, Tier
    from kvtier.store.plan import Piece
    from kvtier.store.prefixes import Cached
    from kvtier.tier.value import Value


async def prefetch_cached(engine: Engine, cached: Cached, to: Tier, deadline: Deadline) -> int:
    """Bring what `to` lacks of a cached prefix there, in order; return the usable length that it then holds."""
    pieces = cached.plan.needed(0, cached.usable())
    lacking = [piece for piece in pieces if to.find(cached.plan.key(piece)) is None]
    claims = [engine.generations.claim(cached.plan.key(piece)) for piece in lacking]
    try:
        with Loads(engine, [cached.where[piece] for piece in lacking], background=True) as loads:
            for i, claim in enumerate(claims):
                value = await loads.value(i, deadline)
                if value is None or (engine.settings.lossless and value.header.lossy):
                    break
                if not claim.stale:
                    await _bring_up(engine, value, to, deadline)
                loads.drop(i)
    finally:
        for claim in claims:
            claim.end()
    return _held(cached, to, pieces, exact=engine.settings.lossless)


async def _bring_up(engine: Engine, value: Value, to: Tier, deadline: Deadline) -> None:
    if to.find(value.key) is not None:  # the tier's promotion policy was faster
        return
    if isinstance(to, MemoryTier):
        job = engine.movement.promote_to(to, value)
        if job is not None:
            await asyncio.wait({job}, timeout=deadline.remaining())
    else:
        outcome = engine.writers[to.name].offer(value, expires=value.header.expires, promotion=True)
        if outcome is not None:
            await engine.writers[to.name].drain(timeout=deadline.remaining())


def _held(cached: Cached, to: Tier, pieces: list[Piece], *, exact: bool) -> int:
    """Return the usable length of what stands in the tier."""
    for piece in pieces:
        entry = to.find(cached.plan.key(piece))
        if entry is None or (exact and entry.lossy):
            cached.lose(piece)
    return cached.usable()
