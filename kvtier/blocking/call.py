"""One call on its way from a blocking caller to the event loop and back."""

from __future__ import annotations

import time
import weakref
from concurrent.futures import Future
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from kvtier.concurrency.gate import Gate, gated
from kvtier.errors import BackendTimeoutError

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
Outcome = Literal["ended", "overdue", "cancelled"]

MARGIN_SECONDS = 0.05  # a call on the loop ends this much earlier, so that what it has is back in time
MARGIN_SHARE = 0.1  # but keeps at least nine tenths of its time


class OverdueError(BackendTimeoutError):
    """The call did not end by its deadline, because the loop is stuck or its queue is full."""


class Desk(Protocol):
    """Where calls wait and are counted."""

    changed: threading.Condition  # guards the life of all calls

    def count(self, outcome: Outcome) -> None:
        """Count how a call was settled; `changed` is held."""

    def finished(self, call: Call[Any]) -> None:
        """Take note that a call's future is finished."""

    def stop_soon(self, call: Call[Any]) -> None:
        """Have the loop stop a call, or take it out of the queue; from any thread."""


class CallFuture(Future[T]):
    """A future that is finished only when nothing touches its call's memory any more."""

    def __init__(self, call: Call[T]) -> None:
        super().__init__()
        self._call = weakref.ref(call)  # no cycle: a result's memory is free as soon as its holder drops it

    def cancel(self) -> bool:
        """Ask the call to end; False if it has ended. Never waits.

        The future is finished once the call let go of its memory: as cancelled, or with the result that came first.
        """
        call = self._call()
        return call is not None and call.cancel()

    def end_cancelled(self) -> None:
        """Finish as cancelled; whoever settles the call does this."""
        super().cancel()
        self.set_running_or_notify_cancel()


class Call(Generic[T]):
    """A coroutine to run on the loop: settled exactly once, by its end, its deadline, or the end of the loop.

    `make` is called on the loop with the seconds the coroutine may take.
    """

    __slots__ = (
        "__weakref__",
        "_desk",
        "_make",
        "_settled",
        "_task",
        "_wanted",
        "begun",
        "ends",
        "future",
        "gate",
        "seconds",
        "submitted",
    )

    def __init__(
        self,
        make: Callable[[float], Coroutine[object, object, T]],
        seconds: float,
        *,
        desk: Desk,
        submitted: bool = False,
    ) -> None:
        self._make: Callable[[float], Coroutine[object, object, T]] | None = make
        self._desk = desk
        self._task: asyncio.Task[T] | None = None
        self._settled = False
        self._wanted = True  # nobody asked to cancel it
        self.begun: bool = False  # taken from the queue; set by the loop's thread, holding the lock
        self.seconds: float = seconds
        self.ends: float = time.monotonic() + seconds
        self.gate: Gate = Gate()
        self.submitted: bool = submitted
        self.future: CallFuture[T] = CallFuture(self)

    @property
    def settled(self) -> bool:
        """Whether its outcome is decided."""
        return self._settled

    @property
    def cancelled(self) -> bool:
        """Whether its caller asked for its end."""
        return not self._wanted

    def left(self) -> float:
        """Return the seconds until its deadline, negative behind it."""
        return self.ends - time.monotonic()

    # --- on the loop

    def start(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[Call[T]], None]) -> None:
        """Run the coroutine in a task of its own; `on_end` is told when it is over, whatever became of the call."""
        make, self._make = self._make, None
        left = self.left()
        if make is None or self._settled or left <= 0:
            on_end(self)
            self.expire()
            return
        try:
            with gated(self.gate):  # the task copies the context it is made in
                self._task = loop.create_task(make(left - min(MARGIN_SECONDS, MARGIN_SHARE * self.seconds)))
        except Exception as exc:  # noqa: BLE001  # a wrong argument is the caller's to see
            on_end(self)
            self.fail(exc)
            return
        self._task.add_done_callback(lambda task: self._end(task, on_end))

    def stop(self) -> None:
        """Cancel the coroutine, if it runs."""
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T], on_end: Callable[[Call[T]], None]) -> None:
        self._task = None
        on_end(self)
        if task.cancelled():
            self._settle_cancelled()
            return
        error = task.exception()
        if error is not None:
            self.fail(error)
        elif self._claim("ended"):
            self.future.set_result(task.result())
            self._desk.finished(self)

    # --- in any thread

    def _claim(self, outcome: Outcome) -> bool:
        """Return True to the one who is to say how the call ended."""
        with self._desk.changed:
            if self._settled:
                return False
            self._settled = True
            self._desk.count(outcome)
        return True

    def fail(self, error: BaseException) -> None:
        """Settle with an error, once nothing touches the call's memory any more."""
        if self._claim("ended"):
            self._finish(error)

    def _settle_cancelled(self) -> None:
        if self._claim("cancelled"):
            self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        self.gate.close()
        if error is None:
            self.future.end_cancelled()
        else:
            self.future.set_exception(error)
        self._desk.finished(self)

    def expire(self) -> bool:
        """Settle as overdue, waiting for no more than the copy under way; tell whether it was not settled before."""
        wanted = self._wanted
        if not self._claim("overdue" if wanted else "cancelled"):
            return False
        if not self.begun:
            self._make = None  # lets go of the arguments
        self._desk.stop_soon(self)
        self._finish(OverdueError(f"the call did not end within {self.seconds} seconds") if wanted else None)
        return True

    def cancel(self) -> bool:
        """Ask for the end; a call that has not begun is over at once. False if it is settled."""
        with self._desk.changed:
            if self._settled:
                return False
            self._wanted = False
            begun = self.begun
        if not begun:
            self._make = None
            self._settle_cancelled()
        self._desk.stop_soon(self)
        return True


@lru_cache(maxsize=64)
def takes_deadline(method: Callable[..., object]) -> bool:
    """Tell whether a method has a `deadline_seconds` parameter."""
    return "deadline_seconds" in signature(method).parameters
