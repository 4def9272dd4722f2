"""The two clocks of a store, injectable so that tests and the simulation own time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the store sees it, in seconds."""

    def monotonic(self) -> float:
        """Never goes back; comparable within this process only."""

    def wall(self) -> float:
        """Since the epoch; comparable between processes, up to their clock skew."""


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()
