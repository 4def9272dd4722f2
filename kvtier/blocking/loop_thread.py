"""The one thread that runs a store's event loop, and the bounded queue that leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.blocking.bell import Bell
from kvtier.blocking.call import Call, OverdueError
from kvtier.blocking.futures import CallFuture, Waiting
from kvtier.blocking.watch import Watch
from kvtier.errors import CapacityError, ClosedError
from kvtier.events import LOG_EVERY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvtier.blocking.call import Outcome
    from kvtier.store.face import Face

T = TypeVar("T")

KEPT_UNPOLLED = 64  # ended futures that may lie about before those that nobody holds are swept out
JOIN_SECONDS = 1.0  # beyond `close_seconds`: a loop that is not back by then is given up
_log = logging.getLogger("kvtier.blocking")


@dataclass(slots=True, kw_only=True)
class CallCounts:
    """What became of the calls; `submitted` is the sum of the others but `dropped`.

    A call that was `dropped` found the queue full; `overdue` ones did not come back by their deadline.
    """

    submitted: int = 0
    ended: int = 0  # with a result or an error of its own
    overdue: int = 0
    cancelled: int = 0
    under_way: int = 0  # not settled yet
    dropped: int = 0


class LoopThread:
    """Opens a store in a thread of its own and runs coroutines there for other threads.

    Nothing is started before the first call, so a process may fork before that. At most `queue_calls` calls are in
    the queue or on the loop at a time: who asks waits for a place, who submits is refused.
    """

    def __init__(self, face: Face, *, queue_calls: int) -> None:
        self._face = face
        self._queue_calls = queue_calls
        self.changed: threading.Condition = threading.Condition()
        self._inbox: deque[Call[Any]] = deque()
        self._running: set[Call[Any]] = set()
        self._ended: deque[weakref.ref[Future[Any]]] = deque()  # submitted calls, for `poll`
        self._counts = CallCounts()
        self._cleaning: set[asyncio.Future[None]] = set()
        self._warned_at: float = -math.inf
        self._unfinished = 0  # submitted calls that are settled, but whose futures do not tell so yet
        self._waiting = 0  # threads that wait for a change
        self._swept = 0
        self._closing = False
        self._pid = 0
        self._thread: threading.Thread | None = None
        self._state = "new"
        self._error: BaseException | None = None
        self._opened: Future[None] = Future()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell: Bell | None = None
        self._watch = Watch(self.expire)

    # --- calls, from any thread

    def ask(self, make: Callable[[float], Coroutine[object, object, T]], seconds: float) -> T:
        """Run a coroutine on the loop and wait for it, first for a place; not longer than `seconds`.

        Raises:
            OverdueError: it did not end in time.
            ClosedError: closed, forked since, the loop has ended, or this is the loop's own thread.
        """
        waiting: Waiting[T] = Waiting()
        call = Call(make, seconds, desk=self, future=waiting)
        bell = self._queue(call, patient=True)
        if bell is not None:
            bell.ring()
        try:
            return waiting.result(max(call.left(), 0.0))
        except TimeoutError:
            self.expire(call)
            return waiting.result(JOIN_SECONDS)  # settled, perhaps by the loop at this very moment
        except BaseException:
            if not call.settled:  # interrupted: the caller goes on, and takes its memory along
                call.cancel()
                self.expire(call)
            raise

    def submit(self, make: Callable[[float], Coroutine[object, object, T]], seconds: float) -> Future[T]:
        """Have the loop run a coroutine; the watch ends it when it is overdue.

        Raises:
            CapacityError: there is no place in the queue.
            ClosedError: as `ask`.
        """
        future: CallFuture[T] = CallFuture()
        call = Call(make, seconds, desk=self, future=future)
        future.call = weakref.ref(call)
        bell = self._queue(call, patient=False)
        self._watch.add(call)
        if bell is not None:  # last: from here on the loop's thread takes the interpreter
            bell.ring()
        return future

    def _queue(self, call: Call[T], *, patient: bool) -> Bell | None:
        """Put a call into the queue; return what is to be rung, if anything."""
        self.guard()
        with self.changed:
            self._await_place(call, patient=patient)
            self._counts.submitted += 1
            self._counts.under_way += 1
            self._inbox.append(call)
            return self._bell if self._state == "open" else None  # a store that opens takes them by itself

    def _await_place(self, call: Call[T], *, patient: bool) -> None:
        while True:
            self._refuse_closed()
            if len(self._inbox) + len(self._running) < self._queue_calls:
                return
            if not patient:
                self._counts.dropped += 1
                raise CapacityError(f"{self._queue_calls} calls are under way; this one was dropped")
            left = call.left()
            if left <= 0:
                self._counts.dropped += 1
                raise OverdueError(f"{self._queue_calls} calls were under way for {call.seconds} seconds")
            self._wait(left)

    def expire(self, call: Call[Any]) -> None:
        """End a call that is overdue."""
        if call.expire():
            self._warn_overdue(call)

    def _warn_overdue(self, call: Call[Any]) -> None:
        """Log an overdue call, at most once a minute: while the loop is stuck every call is."""
        now = time.monotonic()
        if now - self._warned_at >= LOG_EVERY_SECONDS:
            self._warned_at = now
            _log.warning("a call did not end within %s seconds: the loop is stuck or overloaded", call.seconds)

    def run_later(self, make: Callable[[], Coroutine[object, object, None]]) -> None:
        """Have the loop clean up, before the calls that come later; takes no place and is not waited for."""

        def begin() -> None:
            task = asyncio.ensure_future(make())
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)

        if self._pid == os.getpid():
            self._call_soon(begin)

    def poll(self) -> list[Future[Any]]:
        """Return the futures of submitted calls that have ended since the last poll, if somebody still holds them."""
        self._guard_fork()
        with self.changed:
            ended, self._swept = [ref() for ref in self._ended], 0
            self._ended.clear()
        return [future for future in ended if future is not None]

    def drain(self, seconds: float) -> bool:
        """Wait until no call is under way, not longer than `seconds`; tell whether that came."""
        self.guard()
        ends = time.monotonic() + seconds
        with self.changed:
            while self._inbox or self._running or self._unfinished:
                left = ends - time.monotonic()
                if left <= 0:
                    return False
                self._wait(left)
        return True

    @property
    def counts(self) -> CallCounts:
        """A copy of the figures at this moment."""
        with self.changed:
            return replace(self._counts)

    # --- life, from any thread

    def guard(self) -> None:
        """Start the thread if it never was; refuse calls that cannot be served. Raises as `call`."""
        self._guard_fork()
        if self._state == "new":
            self._start()
        if threading.current_thread() is self._thread:
            raise ClosedError("a blocking call in the thread of the store's own loop would wait for itself")

    def _guard_fork(self) -> None:
        if self._pid and self._pid != os.getpid():
            raise ClosedError(f"opened in process {self._pid}, called in {os.getpid()}; open a store after the fork")

    def _refuse_closed(self) -> None:
        if self._state == "ended":
            raise ClosedError(f"the store's loop has ended: {self._error!r}" if self._error else "the store is closed")
        if self._closing:
            raise ClosedError("the store is closing; open a new one")

    def _start(self) -> None:
        with self.changed:
            if self._state != "new":
                return
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._run, name="kvtier-loop", daemon=True)
            self._state = "opening"
            self._thread.start()
        remember(self)

    def open(self) -> None:
        """Open the store and wait for it. Raises what opening raises."""
        self.guard()
        self._opened.result()

    def close(self) -> None:
        """Refuse calls, let those under way end, close the store; give up on a loop that is stuck."""
        self._guard_fork()
        with self.changed:
            if self._state == "new":
                self._state = "ended"
            first, self._closing = not self._closing, True
            if self._state == "ended":
                return
        if first:
            self._call_soon(self._stop.set)
        if self._thread is None or threading.current_thread() is self._thread:
            return
        self._thread.join(self._face.close_seconds + JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning("the store's loop did not end within %s seconds: given up", self._face.close_seconds)
            self._fail_all(TimeoutError("the loop did not end while the store closed"))

    # --- the loop's thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                try:
                    runner.run(self._serve())
                except BaseException as exc:  # noqa: BLE001  # told to every caller; a thread has nobody else to tell
                    error = exc
                finally:
                    self._fail_all(error)
        except BaseException as exc:  # noqa: BLE001  # what is left of a loop that died may fail to end in order
            _log.warning("the store's loop left something behind: %r", exc)

    async def _serve(self) -> None:
        async with self._face:
            self._bell = Bell(self._take)
            try:
                with self.changed:
                    self._state = "open"
                    stop = self._closing
                self._opened.set_result(None)
                self._take()
                if not stop:
                    await self._stop.wait()
                    self._take()  # what was queued just before, if the bell has not been heard yet
                    await asyncio.sleep(0)  # it has begun now, so the store waits for it
            finally:
                self._bell.close()

    def _take(self) -> None:
        """Start every call in the queue."""
        with self.changed:
            calls = list(self._inbox)
            self._inbox.clear()
            for call in calls:
                call.begun = True
                self._running.add(call)
        loop = asyncio.get_running_loop()
        for call in calls:
            call.start(loop)

    def leave(self, call: Call[Any]) -> None:
        """Free a call's place; the lock is held."""
        self._running.discard(call)
        self._wake_waiting()

    def count(self, call: Call[Any], outcome: Outcome) -> None:
        """Count how a call was settled; the lock is held."""
        setattr(self._counts, outcome, getattr(self._counts, outcome) + 1)
        self._counts.under_way -= 1
        self._unfinished += isinstance(call.future, Future)

    def finished(self, future: Future[Any]) -> None:
        """Let `poll` tell of a submitted call, and `drain` of the last one."""
        with self.changed:
            self._unfinished -= 1
            self._wake_waiting()
        self.keep_for_poll(future)

    def keep_for_poll(self, future: Future[Any]) -> None:
        """Keep a finished future for `poll`, as long as somebody else holds it."""
        with self.changed:
            self._ended.append(weakref.ref(future))
            if len(self._ended) > 2 * self._swept + KEPT_UNPOLLED:
                self._ended = deque(ref for ref in self._ended if ref() is not None)
                self._swept = len(self._ended)

    def stop_soon(self, call: Call[Any]) -> None:
        """Have the loop cancel a call when it comes round to it; one that never began gives its place back now."""
        with self.changed:
            if not call.begun:
                with contextlib.suppress(ValueError):
                    self._inbox.remove(call)
                self._wake_waiting()
                return
        self._call_soon(call.stop)

    def _call_soon(self, what: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: its calls have been failed
                self._loop.call_soon_threadsafe(what)

    def _fail_all(self, error: BaseException | None) -> None:
        with self.changed:
            self._state, self._error = "ended", error
            left = [*self._inbox, *self._running]
            self._inbox.clear()
            self._running.clear()
            self._wake_waiting()
        for call in left:
            call.fail(ClosedError(f"the store's loop has ended: {error!r}" if error else "the store was closed"))
        if not self._opened.done():
            self._opened.set_exception(error or ClosedError("the store was closed"))
        self._watch.stop()

    def _wait(self, seconds: float) -> None:
        self._waiting += 1
        try:
            self.changed.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:
            self._waiting -= 1

    def _wake_waiting(self) -> None:
        if self._waiting:
            self.changed.notify_all()


_alive: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def remember(thread: LoopThread) -> None:
    """Have the store closed when the interpreter ends, while its threads still run."""
    if not _alive:
        import atexit  # noqa: PLC0415  # only a process that opens a blocking store has anything to do at its end

        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _alive.add(thread)


def _close_all() -> None:
    for thread in list(_alive):
        with contextlib.suppress(ClosedError):  # a forked child: nothing of it runs here
            thread.close()
