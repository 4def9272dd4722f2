"""Puts of other stores, heard from the media that tell of them, while somebody here waits for one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvtier.errors import BackendError
from kvtier.keys.names import key_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtier.backends.base import ArrivalTeller
    from kvtier.store.engine import Engine
    from kvtier.tier.stored import StoredTier


class Hearing:
    """Listens to every medium that can tell, from the first wait to the last; one subscription serves all waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waits = 0
        self._ears: dict[str, asyncio.Task[None]] = {}  # by tier
        self._begun: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def listening(self, timeout: float) -> AsyncIterator[bool]:
        """Listen for the block; tell whether some medium is listened to."""
        self._waits += 1
        try:
            yield await self._begin(timeout)
        finally:
            self._waits -= 1
            if not self._waits:
                for ear in self._ears.values():
                    ear.cancel()
                self._ears.clear()
                self._begun.clear()

    def forget_absent(self) -> None:
        """Believe no negative answer that is older than the listening."""
        for tier in self._engine.stored_tiers:
            if tier.name in self._ears:
                tier.absent.clear()

    async def _begin(self, timeout: float) -> bool:
        for tier in self._engine.stored_tiers:
            ear = self._ears.get(tier.name)
            if tier.teller is not None and tier.up and (ear is None or ear.done()):
                begun = self._begun[tier.name] = asyncio.Event()
                hear = self._hear(tier, tier.teller, begun)
                self._ears[tier.name] = self._engine.services.supervisor.spawn(hear, name=f"{tier.name} arrivals")
        waiting = [asyncio.ensure_future(begun.wait()) for begun in self._begun.values()]
        if not waiting:
            return False
        try:
            await asyncio.wait(waiting, timeout=timeout)
        finally:
            for each in waiting:
                each.cancel()
        return True

    async def _hear(self, tier: StoredTier, teller: ArrivalTeller, begun: asyncio.Event) -> None:
        try:
            async with teller.arrivals() as names:
                begun.set()
                async for name in names:
                    key = key_of(name)
                    asked = tier.locks.tell_watches(name)  # a probe under way may answer with what was before
                    asked = (key is not None and tier.absent.pop(key, None) is not None) or asked
                    if asked:  # somebody here wants to know
                        self._engine.arrivals.notify()
        except BackendError as exc:  # those who wait still look once a second
            self._engine.events.emit("error", tier=tier.name, reason=f"arrivals not heard: {exc}", error=exc)
        finally:
            begun.set()
