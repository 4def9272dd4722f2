"""One call on its way from a blocking caller to the event loop and back."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from kvtier.concurrency.gate import Gate
from kvtier.errors import BackendTimeoutError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Coroutine

    from kvtier.blocking.futures import Ending

T = TypeVar("T")
Outcome = Literal["ended", "overdue", "cancelled"]

MARGIN_SECONDS = 0.05  # a call on the loop ends this much earlier, so that what it has is back in time
MARGIN_SHARE = 0.1  # but keeps at least nine tenths of its time


class OverdueError(BackendTimeoutError):
    """The call did not end by its deadline, because the loop is stuck or its queue is full."""


class Desk(Protocol):
    """Where calls wait and are counted."""

    changed: threading.Condition  # guards the life of all calls

    def count(self, call: Call[Any], outcome: Outcome) -> None:
        """Count how a call was settled; `changed` is held."""

    def leave(self, call: Call[Any]) -> None:
        """Free the place of a call that is off the loop; `changed` is held."""

    def finished(self, future: Future[Any]) -> None:
        """Take note that the future of a submitted call is finished."""

    def stop_soon(self, call: Call[Any]) -> None:
        """Have the loop stop a call, or take it out of the queue; from any thread."""


class Call(Generic[T]):
    """A coroutine to run on the loop: settled exactly once, by its end, its deadline, or the end of the loop.

    `make` is called on the loop with the seconds the coroutine may take.
    """

    __slots__ = (
        "__weakref__",
        "_desk",
        "_entered",
        "_make",
        "_settled",
        "_task",
        "_wanted",
        "begun",
        "ends",
        "future",
        "gate",
        "seconds",
    )

    def __init__(
        self,
        make: Callable[[float], Coroutine[object, object, T]],
        seconds: float,
        *,
        desk: Desk,
        future: Ending[T],
    ) -> None:
        self._make: Callable[[float], Coroutine[object, object, T]] | None = make
        self._desk = desk
        self._task: asyncio.Task[None] | None = None
        self._entered = False  # the task runs, or is over
        self._settled = False
        self._wanted = True  # nobody asked to cancel it
        self.begun: bool = False  # taken from the queue; set by the loop's thread, holding the lock
        self.seconds: float = seconds
        self.ends: float = time.monotonic() + seconds
        self.gate: Gate = Gate()
        self.future: Ending[T] = future

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

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the coroutine in a task of its own."""
        self._task = loop.create_task(self._run())

    def stop(self) -> None:
        """Cancel the coroutine, if it has begun; otherwise its task looks itself whether it is still wanted."""
        if self._entered and self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        """Settle the call from within its task: a callback of the task would come one round of the loop later."""
        self._entered = True
        make, self._make = self._make, None
        left = self.left() - min(MARGIN_SECONDS, MARGIN_SHARE * self.seconds)
        if make is None or self._settled or not self._wanted:
            self._off_loop("cancelled")
            return
        if left <= 0:
            self._off_loop("overdue", self._overdue())
            return
        self.gate.enter_call()
        try:
            result = await make(left)
        except asyncio.CancelledError:
            self._off_loop("cancelled")
        except BaseException as exc:
            self._off_loop("ended", exc)
            if not isinstance(exc, Exception):
                raise
        else:
            self._off_loop("ended", result=result)

    def _off_loop(self, outcome: Outcome, error: BaseException | None = None, result: T | None = None) -> None:
        """Give the place back, and settle unless that is done."""
        self._task = None
        with self._desk.changed:
            self._desk.leave(self)
            first = self._claim(outcome)
        if first:
            self._finish(outcome, error, result)

    # --- in any thread

    def _claim(self, outcome: Outcome) -> bool:
        """Return True to the one who is to finish the future; the desk's lock is held."""
        if self._settled:
            return False
        self._settled = True
        self._desk.count(self, outcome)
        return True

    def _settle(self, outcome: Outcome, error: BaseException | None) -> None:
        with self._desk.changed:
            first = self._claim(outcome)
        if first:
            self._finish(outcome, error)

    def _finish(self, outcome: Outcome, error: BaseException | None, result: T | None = None) -> None:
        """Finish the future, once nothing touches the call's memory any more."""
        if outcome == "ended" and error is None:
            self.future.set_result(result)  # type: ignore[arg-type]  # what the coroutine returned
        else:
            self.gate.close()  # to whatever the coroutine has left behind
            self.future.end_cancelled() if error is None else self.future.set_exception(error)
        if isinstance(self.future, Future):
            self._desk.finished(self.future)

    def fail(self, error: BaseException) -> None:
        """Settle with an error."""
        self._settle("ended", error)

    def expire(self) -> bool:
        """Settle as overdue, waiting for no more than the copy under way; tell whether it was not settled before."""
        wanted = self._wanted
        with self._desk.changed:
            if not self._claim("overdue" if wanted else "cancelled"):
                return False
        if not self.begun:
            self._make = None  # lets go of the arguments
        self._desk.stop_soon(self)
        self._finish("overdue", self._overdue()) if wanted else self._finish("cancelled", None)
        return True

    def _overdue(self) -> OverdueError:
        return OverdueError(f"the call did not end within {self.seconds} seconds")

    def cancel(self) -> bool:
        """Ask for the end; a call that has not begun is over at once. False if it is settled."""
        with self._desk.changed:
            if self._settled:
                return False
            self._wanted = False
            begun = self.begun
        if not begun:
            self._make = None
            self._settle("cancelled", None)
        self._desk.stop_soon(self)
        return True


@lru_cache(maxsize=64)
def takes_deadline(method: Callable[..., object]) -> bool:
    """Tell whether a method has a `deadline_seconds` parameter."""
    return "deadline_seconds" in signature(method).parameters
