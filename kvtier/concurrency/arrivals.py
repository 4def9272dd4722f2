"""Waking those who wait for something new, without a queue and without a busy wait."""

from __future__ import annotations

import asyncio


class Arrivals:
    """`notify` wakes everybody who waits, or who looked before it, at a lower `count`. Belongs to one event loop."""

    def __init__(self) -> None:
        self.count: int = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake everybody who waits."""
        self.count += 1
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout: float, *, since: int | None = None) -> bool:
        """Wait for the next `notify` (after `count` was `since`), at most `timeout` seconds; tell whether it came."""
        if since is not None and self.count != since:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiter)
        return True
