"""A device whose streams do nothing until somebody waits: what is not waited for has not happened."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.buffers.devices import Event


class LazyEvent:
    """A point in a lazy stream; waiting for it does the work before it."""

    def __init__(self, stream: LazyStream) -> None:
        self._stream = stream
        self._done = False
        stream.run(self._mark)

    def _mark(self) -> None:
        self._done = True

    def synchronize(self) -> None:
        """Do the stream's work up to this point, in this thread."""
        self._stream.work_until(self.query)

    def query(self) -> bool:
        """Tell whether the point was reached."""
        return self._done


class LazyStream:
    """Keeps its work until an event behind it is waited for."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._work: deque[Callable[[], object]] = deque()

    @property
    def pending(self) -> int:
        """Pieces of work not done yet."""
        return len(self._work)

    def run(self, work: Callable[[], object]) -> None:
        """Put work at the end."""
        self._work.append(work)

    def record(self) -> Event:
        """Return the point behind all work so far."""
        return LazyEvent(self)

    def wait(self, event: Event) -> None:
        """Have later work wait for `event`."""
        self._work.append(event.synchronize)

    def work_until(self, done: Callable[[], bool]) -> None:
        """Do work in order until `done`."""
        with self._lock:
            while not done() and self._work:
                self._work.popleft()()


class LazyDevice:
    """Host memory behind lazy streams. `caller` is the stream on which the engine under test "computes"."""

    def __init__(self) -> None:
        self.torch_device: torch.device = torch.device("cpu")
        self._lock = threading.RLock()
        self.caller: LazyStream = LazyStream(self._lock)

    def stream(self) -> LazyStream:
        """Return a new stream."""
        return LazyStream(self._lock)

    def current(self, stream: object = None) -> LazyStream:
        """Return the stream given, else the caller's."""
        return stream if isinstance(stream, LazyStream) else self.caller

    def empty(self, size: int) -> torch.Tensor:
        """Return `size` bytes."""
        return torch.empty(size, dtype=torch.uint8)
