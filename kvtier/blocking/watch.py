"""The thread that ends submitted calls by their deadlines, also when the loop does not."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.blocking.call import Call

SLACK = 1024  # entries of ended calls that may lie about before they are swept out


class Watch:
    """A heap of deadlines and one daemon thread, started with the first call."""

    def __init__(self, overdue: Callable[[Call[Any]], object]) -> None:
        self._overdue = overdue
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, weakref.ref[Call[Any]]]] = []  # whoever runs a call holds it
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._sleeps_until = float("inf")
        self._swept = 0  # entries that were alive at the last sweep
        self._stopped = False

    def add(self, call: Call[Any]) -> None:
        """Watch a call from now on."""
        with self._changed:
            heapq.heappush(self._heap, (call.ends, next(self._numbers), weakref.ref(call)))
            if len(self._heap) > 2 * self._swept + SLACK:
                self._heap = [item for item in self._heap if not _settled(item[2])]
                heapq.heapify(self._heap)
                self._swept = len(self._heap)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvtier-deadlines", daemon=True)
                self._thread.start()
            elif call.ends < self._sleeps_until:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; calls that are watched must be settled by then."""
        with self._changed:
            self._stopped = True
            self._heap.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            self._overdue(call)
            del call  # keeps no arguments alive while it sleeps

    def _next(self) -> Call[Any] | None:
        """Sleep until a call is overdue, and return it; None when this thread is to end."""
        with self._changed:
            while not self._stopped:
                while self._heap and _settled(self._heap[0][2]):
                    heapq.heappop(self._heap)
                left = self._heap[0][0] - time.monotonic() if self._heap else None
                if left is not None and left <= 0:
                    call = heapq.heappop(self._heap)[2]()
                    if call is not None:
                        return call
                    continue
                self._sleeps_until = self._heap[0][0] if self._heap else float("inf")
                self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
        return None


def _settled(ref: weakref.ref[Call[Any]]) -> bool:
    call = ref()
    return call is None or call.settled
