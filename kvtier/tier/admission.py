"""A tier's own limits: how many transfers, and how many bytes of them, may be under way at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.concurrency.budget import Budget, Ticket
from kvtier.concurrency.deadline import Deadline
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.concurrency.clock import Clock
    from kvtier.tier.settings import TierSettings


class BusyError(BackendError):
    """The tier's own limits left no place in time; the medium is not to blame."""


class Limits:
    """What one tier admits: `max_in_flight` operations of together `max_in_flight_bytes`, within its deadline."""

    def __init__(self, settings: TierSettings, clock: Clock) -> None:
        self.name: str = settings.name
        self.clock = clock
        self.seconds: float = settings.deadline_seconds
        self.transferred: Budget = Budget(settings.max_in_flight_bytes)
        self.operations: Budget = Budget(settings.max_in_flight)

    def ask(self, size: int, *, background: bool) -> Admission:
        """Return a place to wait for."""
        return Admission(self, size, background=background)


class Admission:
    """A place among a tier's transfers: `wait` for it, then `end` it exactly once."""

    __slots__ = ("_limits", "_operation", "_to_tell", "_transfer", "size")

    def __init__(self, limits: Limits, size: int, *, background: bool) -> None:
        self.size: int = size
        self._limits = limits
        self._operation = Ticket(background=background)
        self._transfer = Ticket(background=background)
        self._to_tell: set[Callable[[], None]] = set()

    @property
    def background(self) -> bool:
        """Whether foreground work goes first."""
        return self._operation.background

    def tell(self, changed: Callable[[], None]) -> None:
        """Call `changed` once when it becomes foreground."""
        self._to_tell.add(changed)

    async def wait(self) -> None:
        """Return once the place is there. Cancelled or failed, nothing is held.

        Raises:
            BusyError: no place within the tier's deadline.
        """
        limits = self._limits
        deadline = Deadline.after(limits.seconds, limits.clock)
        try:
            await limits.operations.acquire(1, ticket=self._operation, timeout=deadline.remaining())
            try:
                await limits.transferred.acquire(self.size, ticket=self._transfer, timeout=deadline.remaining())
            except BaseException:
                limits.operations.release(1, ticket=self._operation)
                raise
        except TimeoutError:
            raise BusyError(f"tier {limits.name!r} had no place for {self.size} bytes in time") from None

    def hurry(self) -> None:
        """Make it foreground: a caller waits for it now. In line it gets the place of its arrival."""
        self._limits.operations.raise_priority(self._operation)
        self._limits.transferred.raise_priority(self._transfer)
        while self._to_tell:
            self._to_tell.pop()()

    def end(self) -> None:
        """Give the place back."""
        self._limits.operations.release(1, ticket=self._operation)
        self._limits.transferred.release(self.size, ticket=self._transfer)
