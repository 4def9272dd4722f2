"""One holder per key at a time, in the order in which places in the queue were taken."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class Turn:
    """A place in the queue for one key; give it back with `release`, whether or not it was waited for."""

    __slots__ = ("_locks", "_ready", "key")

    def __init__(self, locks: KeyLocks, key: str) -> None:
        self.key: str = key
        self._locks = locks
        self._ready = asyncio.Event()

    async def wait(self) -> None:
        """Return when everybody who came before has released."""
        await self._ready.wait()

    def allow(self) -> None:
        """Let the turn begin."""
        self._ready.set()

    def release(self) -> None:
        """Leave the queue, from any place in it."""
        self._locks.leave(self)


class KeyLocks:
    """A lock per key that exists only while it is held or waited for.

    Taking a place is synchronous, so that the order of state changes is the order of the I/O that follows them.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[Turn]] = {}
        self._watches: list[set[str]] = []

    def take_place(self, key: str) -> Turn:
        """Join the queue for `key`."""
        turn = Turn(self, key)
        for watch in self._watches:
            watch.add(key)
        queue = self._queues.setdefault(key, deque())
        queue.append(turn)
        if queue[0] is turn:
            turn.allow()
        return turn

    def leave(self, turn: Turn) -> None:
        """Take a turn out of its queue; the next one begins if this one was first."""
        queue = self._queues[turn.key]
        was_first = queue[0] is turn
        queue.remove(turn)
        if not queue:
            del self._queues[turn.key]
        elif was_first:
            queue[0].allow()

    def held(self, key: str) -> bool:
        """Tell whether somebody holds `key` or waits for it."""
        return key in self._queues

    def last(self, key: str) -> Turn | None:
        """Return the last place in the queue for `key`, if there is a queue."""
        queue = self._queues.get(key)
        return queue[-1] if queue else None

    def names(self) -> Iterator[str]:
        """Iterate a snapshot of the keys that somebody holds or waits for."""
        return iter(list(self._queues))

    @contextmanager
    def watch(self) -> Iterator[set[str]]:
        """Collect the keys that somebody held or waited for at any time of the block, up to now.

        What was learnt about such a key from outside may be older than what its holders did.
        """
        watch = set(self._queues)
        self._watches.append(watch)
        try:
            yield watch
        finally:
            self._watches = [other for other in self._watches if other is not watch]

    def tell_watches(self, key: str) -> bool:
        """Have every block that watches now count `key` as touched, by somebody outside; tell whether there is one."""
        for watch in self._watches:
            watch.add(key)
        return bool(self._watches)

    async def settle(self, *, timeout: float) -> bool:
        """Wait until all who hold or wait for a key now have released it; False after `timeout` seconds."""
        turns = [self.take_place(key) for key in self.names()]
        try:
            async with asyncio.timeout(timeout):
                for turn in turns:
                    await turn.wait()
        except TimeoutError:
            return False
        finally:
            for turn in turns:
                turn.release()
        return True

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold `key` for the block; a cancelled waiter leaves the queue."""
        turn = self.take_place(key)
        try:
            await turn.wait()
            yield
        finally:
            turn.release()

    def __len__(self) -> int:
        return len(self._queues)
