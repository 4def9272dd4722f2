"""A clock that stands still until it is told to go on."""

from __future__ import annotations


class FrozenClock:
    """A `kvtier.concurrency.Clock` for tests: both times move by `advance` only; `set_wall` plays an administrator.

    Args:
        wall: seconds since the epoch to begin with.
        monotonic: the other clock's first reading.
    """

    def __init__(self, *, wall: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return self._monotonic

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks; negative `seconds` are a `ValueError`."""
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds}: time does not go back; set_wall can")
        self._wall += seconds
        self._monotonic += seconds

    def set_wall(self, wall: float) -> None:
        """Jump the wall clock, in either direction; the monotonic one does not notice."""
        self._wall = wall
