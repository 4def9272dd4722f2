"""Reads that callers wait for, counted, so that closing can let them come to their end."""

from __future__ import annotations

import asyncio


class Calls:
    """Enter it for the time of a call: `with calls: ...`. Belongs to one event loop."""

    def __init__(self) -> None:
        self.under_way: int = 0
        self._none = asyncio.Event()

    def __enter__(self) -> None:
        self.under_way += 1

    def __exit__(self, *_: object) -> None:
        self.under_way -= 1
        if not self.under_way:
            self._none.set()

    async def wait_none(self, *, timeout: float) -> bool:
        """Wait until no call is under way, at most `timeout` seconds; tell whether that came."""
        if not self.under_way:
            return True
        self._none.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._none.wait()
        except TimeoutError:
            return False
        return True
