"""What other threads wake a loop with."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Bell:
    """Rung in any thread, answered on the loop it was made on; ringing several times before the answer is once.

    An eventfd where there is one: `call_soon_threadsafe` costs an object per call, and three system calls more.
    """

    def __init__(self, answer: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer = answer
        self._lock = threading.Lock()  # a number that is closed may be somebody else's file a moment later
        self._closed = False
        self._descriptor: int | None = None
        if hasattr(os, "eventfd"):
            self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self._descriptor, self._rung)

    def ring(self) -> None:
        """Have the loop answer soon; nothing happens once it is closed."""
        with self._lock:
            if self._closed:
                return
            if self._descriptor is not None:
                os.eventfd_write(self._descriptor, 1)
                return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._answer)

    def _rung(self) -> None:
        if self._descriptor is not None:
            os.eventfd_read(self._descriptor)
            self._answer()

    def close(self) -> None:
        """Ring no more; on the loop."""
        with self._lock:
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
