"""What a call's outcome is put into: for one caller who waits, or for whoever holds a future."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import weakref

    from kvtier.blocking.call import Call

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Ending(Protocol[T_contra]):
    """Is finished once, and only when nothing touches its call's memory any more."""

    def set_result(self, result: T_contra) -> None:
        """Finish with a result."""

    def set_exception(self, exception: BaseException) -> None:
        """Finish with an error."""

    def end_cancelled(self) -> None:
        """Finish as cancelled."""


class Waiting(Generic[T]):
    """Where the one caller of a blocking call waits: a future for one thread, without a condition and callbacks."""

    __slots__ = ("_error", "_finished", "_result")

    def __init__(self) -> None:
        self._finished = threading.Lock()  # held until then: handing it over wakes the caller, who needs nothing else
        self._finished.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None

    def set_result(self, result: T) -> None:
        """See `Ending`."""
        self._result = result
        self._finished.release()

    def set_exception(self, exception: BaseException) -> None:
        """See `Ending`."""
        self._error = exception
        self._finished.release()

    def end_cancelled(self) -> None:
        """See `Ending`."""
        self.set_exception(CancelledError())

    def result(self, seconds: float) -> T:
        """Return the result or raise the error.

        Raises:
            TimeoutError: it was not finished within `seconds`.
        """
        if not self._finished.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise TimeoutError
        self._finished.release()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback holds this frame: no cycle
        return self._result  # type: ignore[return-value]  # it was set, where no error was


class CallFuture(Future[T]):
    """A future that is finished only when nothing touches its call's memory any more."""

    def __init__(self) -> None:
        super().__init__()
        self.call: weakref.ref[Call[T]] | None = None  # no cycle: a result is free as soon as its holder drops it

    def cancel(self) -> bool:
        """Ask the call to end; False if it has ended. Never waits.

        The future is finished once the call let go of its memory: as cancelled, or with the result that came first.
        """
        call = None if self.call is None else self.call()
        return call is not None and call.cancel()

    def end_cancelled(self) -> None:
        """See `Ending`."""
        super().cancel()
        self.set_running_or_notify_cancel()
