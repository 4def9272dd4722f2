"""The moment by which a call must end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.concurrency.clock import Clock


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on `clock.monotonic()`, handed down from a public call to everything it waits for."""

    ends: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> Deadline:
        """Return the moment `seconds` from now.

        Raises:
            ValueError: `seconds` is not a finite number above zero; unlimited waiting is not offered.
        """
        given: object = seconds  # may come straight from a user
        if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given <= 0:
            raise ValueError(f"deadline_seconds={seconds!r}: must be a finite number of seconds above 0")
        return cls(clock.monotonic() + seconds, clock)

    def remaining(self) -> float:
        """Return the seconds left, 0.0 once the moment has passed."""
        return max(0.0, self.ends - self.clock.monotonic())

    @property
    def passed(self) -> bool:
        """True from the moment on."""
        return self.remaining() == 0.0
