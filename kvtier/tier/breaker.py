"""Health of one tier: after repeated failures it is left alone, and probed until it answers again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvtier.concurrency.clock import Clock

FAILURES_TO_OPEN = 3
PROBE_SECONDS = 1.0
SPREAD = 0.5  # of the seconds between probes: the stores that lost one medium do not all come back at once

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Closed: all operations pass. Open: none do, so a dead tier costs nothing. Half-open: one probe is under way.

    Pure: it is told of results and asked for permission; it starts nothing.
    """

    def __init__(
        self, clock: Clock, *, failures_to_open: int = FAILURES_TO_OPEN, probe_seconds: float = PROBE_SECONDS
    ) -> None:
        self._clock = clock
        self._failures_to_open = failures_to_open
        self._probe_seconds = probe_seconds
        self._failures = 0
        self._retry_at = 0.0
        self.state: State = "closed"
        self.last_error: str = ""

    @property
    def passes(self) -> bool:
        """Whether ordinary operations may be tried."""
        return self.state == "closed"

    def probe_due(self) -> bool:
        """Tell whether a probe should start now, and if so take the permission for it."""
        if self.state == "open" and self._clock.monotonic() >= self._retry_at:
            self.state = "half-open"
            return True
        return False

    def seconds_to_probe(self) -> float:
        """Return how long until the next probe is due."""
        return max(0.0, self._retry_at - self._clock.monotonic())

    def succeeded(self) -> None:
        """Note an operation the medium answered (a miss is an answer)."""
        self._failures = 0
        self.state = "closed"

    def failed(self, error: BaseException | str) -> bool:
        """Note a failure or a time-out; return True when this one opened the breaker."""
        self._failures += 1
        self.last_error = str(error)
        was = self.state
        if was == "half-open" or (was == "closed" and self._failures >= self._failures_to_open):
            self.state = "open"  # what fails while it is open does not put the next probe off
            self._put_probe_off()
        return self.state == "open" and was == "closed"

    def open_now(self, error: BaseException | str) -> None:
        """Open at once: the tier is known to be down."""
        self.last_error = str(error)
        self._put_probe_off()
        self.state = "open"

    def _put_probe_off(self) -> None:
        """Set the time of the next probe, `probe_seconds` from now and up to half of that sooner.

        The clock's own fraction of a millisecond is the noise: another one in each process, the same in each replay.
        """
        now = self._clock.monotonic()
        self._retry_at = now + self._probe_seconds * (1.0 - SPREAD * (now * 1000.0 % 1.0))
