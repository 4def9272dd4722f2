"""A caller's memory, which may be touched only until the call is over, even where the event loop is stuck."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from kvtier.errors import KVTierError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class GateClosedError(KVTierError):
    """The call is over: its caller's memory is out of bounds. Nobody waits for this error."""


class Gate:
    """Stands before the memory that one call was given: copies pass through it, and `close` shuts it for good.

    A coroutine that waits for its copies protects the memory by itself. A caller in another thread, who gives up while
    the loop is stuck, cannot wait for the coroutine; it closes the gate and waits for the copy under way, no more.
    """

    __slots__ = ("_closed", "_empty", "_inside", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self._empty: threading.Event | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._closed:
                raise GateClosedError("the call is over; its memory is its caller's again")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._empty is not None and not self._inside:
                self._empty.set()

    def enter_call(self) -> None:
        """Stand before the memory of the running task's call from now on."""
        _of_call.set(self)

    def close(self) -> None:
        """Let nothing in any more; return when nothing is inside: at most one copy job later."""
        with self._lock:
            self._closed = True
            if not self._inside:
                return
            if self._empty is None:
                self._empty = threading.Event()
            empty = self._empty
        empty.wait()


_of_call: ContextVar[Gate | None] = ContextVar("kvtier-gate", default=None)
_OPEN = nullcontext()


def gate_of_call() -> AbstractContextManager[None]:
    """Return what every copy from or to the running call's memory must be wrapped in.

    Ask in the call's own task: work that outlives the call never touches its memory, and asks for no gate.
    """
    return _of_call.get() or _OPEN
