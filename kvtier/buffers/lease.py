"""How much of the arena is out on leases, and which leases last too long."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtier.concurrency.clock import Clock


class Hold:
    """One lease's part of a `LeaseShare`: it counts until it was released *and* the views it covers are gone.

    Attributes:
        size: bytes it counts for.
        reported: True once `LeaseShare.overdue` has told of it.
    """

    __slots__ = ("_clock", "_exporters", "_share", "_taken", "released", "reported", "size")

    def __init__(self, share: LeaseShare, size: int, clock: Clock) -> None:
        self._share = share
        self._clock = clock
        self._taken = clock.monotonic()
        self._exporters: list[weakref.ref[object]] = []
        self.size: int = size
        self.released: bool = False
        self.reported: bool = False

    @property
    def age(self) -> float:
        """Seconds since it was taken."""
        return self._clock.monotonic() - self._taken

    def cover(self, views: Iterable[memoryview]) -> None:
        """Count as long as any of these owned views, or what was made of it, is alive."""
        self._exporters.extend(weakref.ref(view.obj) for view in views)

    @property
    def lingering(self) -> bool:
        """True while a covered view is alive."""
        self._exporters = [exporter for exporter in self._exporters if exporter() is not None]
        return bool(self._exporters)

    def release(self) -> None:
        """End the lease.

        Raises:
            RuntimeError: it was ended before.
        """
        if self.released:
            raise RuntimeError(f"a lease of {self.size} bytes was released twice")
        self.released = True
        self._share.end(self)


class LeaseShare:
    """At most `limit_bytes` out on leases at one time. It belongs to one event loop and never waits."""

    def __init__(self, limit_bytes: int, *, max_seconds: float, clock: Clock) -> None:
        self.limit_bytes = limit_bytes
        self.max_seconds = max_seconds
        self._clock = clock
        self._running: set[Hold] = set()
        self._lingering: list[Hold] = []  # released, but views are alive
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of leases that have not ended or whose views are alive."""
        self._sweep()
        return self._used

    @property
    def room(self) -> int:
        """Bytes that further leases may take."""
        return max(0, self.limit_bytes - self.used)

    @property
    def count(self) -> int:
        """How many such leases there are."""
        self._sweep()
        return len(self._running) + len(self._lingering)

    def try_take(self, size: int) -> Hold | None:
        """Return a hold on `size` bytes, or None if the share has no room for them."""
        if self._used + size > self.limit_bytes:
            self._sweep()
        if self._used + size > self.limit_bytes:
            return None
        hold = Hold(self, size, self._clock)
        self._running.add(hold)
        self._used += size
        return hold

    def overdue(self) -> list[Hold]:
        """Return the holds that have lasted `max_seconds` or longer, each once; they are not taken back."""
        self._sweep()
        holds = [*self._running, *self._lingering]
        found = [hold for hold in holds if not hold.reported and hold.age >= self.max_seconds]
        for hold in found:
            hold.reported = True
        return found

    def end(self, hold: Hold) -> None:
        """Take note that `hold` was released; it calls this."""
        self._running.discard(hold)
        self._lingering.append(hold)

    def _sweep(self) -> None:
        """Forget released leases that left no view behind."""
        lingering = []
        for hold in self._lingering:
            if hold.lingering:
                lingering.append(hold)
            else:
                self._used -= hold.size
        self._lingering = lingering
