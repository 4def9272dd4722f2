"""Connections at rest, by server: as many as there were threads busy at once."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier.backends.redis_faults import Redirected, ReplyError
from kvtier.backends.redis_wire import Wire
from kvtier.errors import BackendTimeoutError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvtier.backends.redis_address import Access, Endpoint


class Wires:
    """Lends each thread a connection of its own; one that broke, or still owes a reply, is closed, not kept."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._idle: dict[Endpoint, list[Wire]] = {}
        self._lent: set[Wire] = set()
        self._closed = False

    @contextmanager
    def lend(self, endpoint: Endpoint, deadline: float, *, asking: bool = False) -> Generator[Wire, None, None]:
        """Lend a connection for work that must end by `deadline` (seconds of `time.monotonic`).

        Raises:
            BackendUnavailableError, BackendTimeoutError, ReplyError: there is none to be had.
            ClosedError: after `close`.
        """
        wire = self._take(endpoint, deadline)
        wire.begin(deadline, asking=asking)
        try:
            yield wire
        except (ReplyError, Redirected):
            self._give_back(wire)
            raise
        except BaseException:
            self._drop(wire)
            raise
        self._give_back(wire)

    def _take(self, endpoint: Endpoint, deadline: float) -> Wire:
        if time.monotonic() >= deadline:
            raise BackendTimeoutError(f"{endpoint}: no thread was free in time")
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("the connections are closed")
                idle = self._idle.get(endpoint)
                wire = idle.pop() if idle else None
                if wire is not None:
                    self._lent.add(wire)
            if wire is None:
                break
            if wire.idle:
                return wire
            self._drop(wire)  # the server ended it while it was at rest
        wire = Wire(self._access, endpoint, deadline)
        if self._note_lent(wire):
            return wire
        self._drop(wire)
        raise ClosedError("the connections are closed")

    def _note_lent(self, wire: Wire) -> bool:
        with self._lock:
            self._lent.add(wire)
            return not self._closed

    def _give_back(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed and wire.idle:
                self._lent.discard(wire)
                self._idle.setdefault(wire.endpoint, []).append(wire)
                return
        self._drop(wire)

    def _drop(self, wire: Wire) -> None:
        with self._lock:
            self._lent.discard(wire)
        wire.close()

    def close(self) -> None:
        """Close what is at rest, and wake the threads that are blocked on the others."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
            for wire in self._lent:
                wire.shutdown()
        for wires in idle.values():
            for wire in wires:
                wire.close()
