"""Background work in small helpings: what waits on the loop for its turn does not hold up what is in a hurry."""

from __future__ import annotations

import asyncio
from collections import deque

AT_A_TIME = 4  # steps of some 50 us each per turn of the loop


class Pace:
    """Lets few waiters go on per turn of the event loop, in the order they came. It belongs to one loop.

    A loop runs everything that is ready before it looks at anything new: a hundred reads that end together would
    stand between a foreground call and each of its own steps.
    """

    def __init__(self, at_a_time: int = AT_A_TIME) -> None:
        self._at_a_time = at_a_time
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._serving = False

    @property
    def waiting(self) -> int:
        """Waiters that have not had their turn."""
        return len(self._waiting)

    async def turn(self) -> None:
        """Return in this waiter's turn of the loop."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self._waiting.append(mine)
        if not self._serving:
            self._serving = True
            loop.call_soon(self._serve, loop)
        await mine

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        served = 0
        while self._waiting and served < self._at_a_time:
            waiter = self._waiting.popleft()
            if not waiter.done():  # cancelled
                waiter.set_result(None)
                served += 1
        self._serving = bool(self._waiting)
        if self._serving:
            loop.call_soon(self._serve, loop)
