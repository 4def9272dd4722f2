"""A store's figures for readers in other threads."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Protocol

from kvtier.errors import ClosedError

if TYPE_CHECKING:
    from kvtier.store.results import Stats

WAIT_SECONDS = 1.0


class HasStats(Protocol):
    """A store of either level."""

    def stats(self) -> Stats:
        """Return all figures at this moment."""


class Snapshots:
    """Takes figures on the store's event loop, whoever asks.

    Made on that loop. A reader in another thread waits at most a second for a busy loop and then gets the figures
    taken last: what a monitoring system sees may be old, but never half of one moment and half of another.
    """

    def __init__(self, store: HasStats) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._last = store.stats()

    @property
    def latest(self) -> Stats:
        """The figures now, or the last ones if the loop is busy or gone."""
        if _running_loop() is self._loop:
            self._take(None)
        elif self._loop.is_running():
            taken = threading.Event()
            try:
                self._loop.call_soon_threadsafe(self._take, taken)
            except RuntimeError:  # closed between the two lines
                return self._last
            taken.wait(WAIT_SECONDS)
        return self._last

    def _take(self, taken: threading.Event | None) -> None:
        try:
            self._last = self._store.stats()
        except ClosedError:  # the last figures stand
            return
        finally:
            if taken is not None:
                taken.set()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
