"""Waiting in line on the event loop: whoever came first is served first, and nobody overtakes."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_arrivals = itertools.count()


class Waiter(Generic[T]):
    """One coroutine's place in a line: how it takes what it waits for, and when it came.

    `attempt` is called on the loop, must not await, and returns None while there is nothing to take.
    """

    __slots__ = ("arrival", "attempt", "future", "patient")

    def __init__(self, attempt: Callable[[], T | None], *, patient: bool = False) -> None:
        self.attempt: Callable[[], T | None] = attempt
        self.patient: bool = patient
        self.arrival: int = next(_arrivals)
        self.future: asyncio.Future[T] | None = None


class Turns(Generic[T]):
    """Two lines before one counter: patient waiters are served only while nobody else waits, each line in order.

    Methods belong to one event loop's thread, except `poke` and `ahead`, which any thread may call at any moment.
    `undo` takes back what was granted to a waiter that was cancelled before it could see it.
    """

    def __init__(self, undo: Callable[[T], None]) -> None:
        self._undo = undo
        self._lines: tuple[deque[Waiter[T]], deque[Waiter[T]]] = (deque(), deque())
        self._loop: asyncio.AbstractEventLoop | None = None

    def ahead(self, *, patient: bool) -> int:
        """Return how many would be served before a newcomer."""
        first, second = self._lines
        return len(first) + len(second) if patient else len(first)

    async def wait(self, waiter: Waiter[T], *, timeout: float) -> T:
        """Return what the waiter's attempt returned, once it succeeded in its turn.

        Raises:
            TimeoutError: that took more than `timeout` seconds.
        """
        if not self.ahead(patient=waiter.patient):
            granted = waiter.attempt()
            if granted is not None:
                return granted
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        waiter.future = future
        self._lines[waiter.patient].append(waiter)
        timer = loop.call_later(max(timeout, 0.0), _expire, future, timeout)
        self.serve()  # what was given back just before this waiter was in line poked nobody
        try:
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._undo(future.result())  # granted and cancelled in the same turn of the loop
            self._leave(waiter)
            self.serve()  # the turn passes on
            raise
        finally:
            timer.cancel()

    def serve(self) -> None:
        """Grant to the waiters in order, up to the first whose attempt fails."""
        for line in self._lines:
            while line:
                head = line[0]
                future = head.future
                if future is None or future.done():  # gave up, and has not run since
                    line.popleft()
                    continue
                granted = head.attempt()
                if granted is None:
                    return
                self._leave(head)
                future.set_result(granted)

    def poke(self) -> None:
        """Have `serve` called soon on the waiters' loop; takes no lock, so a finalizer may call it in any thread."""
        loop = self._loop
        if loop is None or not self.ahead(patient=True):
            return
        try:
            loop.call_soon_threadsafe(self.serve)
        except RuntimeError:  # the loop is closed, and its waiters with it
            return

    def hurry(self, waiter: Waiter[T]) -> None:
        """Move a patient waiter into the first line, at the place its arrival gives it."""
        waiting = waiter in self._lines[True]
        if waiting:
            self._lines[True].remove(waiter)
            line = self._lines[False]
            place = next((i for i, other in enumerate(line) if other.arrival > waiter.arrival), len(line))
            line.insert(place, waiter)
        waiter.patient = False

    def fail(self, error: Exception) -> None:
        """End every wait with `error`."""
        for line in self._lines:
            while line:
                future = line.popleft().future
                if future is not None and not future.done():
                    future.set_exception(error)

    def _leave(self, waiter: Waiter[T]) -> None:
        line = self._lines[waiter.patient]
        if waiter in line:
            line.remove(waiter)


def _expire(future: asyncio.Future[T], timeout: float) -> None:
    if not future.done():
        future.set_exception(TimeoutError(f"not granted within {timeout} seconds"))
