"""Bytes in flight, bounded: foreground work first, background work never more than half."""

from __future__ import annotations

from kvtier.concurrency.turns import Turns, Waiter


class Ticket:
    """One request's place in a `Budget`, for a caller that may have to raise it.

    Attributes:
        background: the class it counts in now; `Budget.raise_priority` turns it False for good.
    """

    __slots__ = ("admitted", "background", "size", "waiter")

    def __init__(self, *, background: bool = False) -> None:
        self.background: bool = background
        self.size: int = 0
        self.admitted: bool = False
        self.waiter: Waiter[Ticket] | None = None


class Budget:
    """A weighted semaphore of `limit` bytes with two classes of work. It belongs to one event loop.

    Foreground requests are served before background ones, each class in the order of arrival: a request that does not
    fit is not overtaken by a smaller one behind it. Background work holds at most half. A request larger than its
    class may ever hold is admitted when nothing else is in flight.
    """

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"limit={limit}: a budget needs at least one byte")
        self.limit = limit
        self._held = [0, 0]  # bytes of foreground, of background
        self._turns: Turns[Ticket] = Turns(self._give_back)

    @property
    def in_flight(self) -> int:
        """Bytes admitted and not yet released."""
        return sum(self._held)

    @property
    def background(self) -> int:
        """The background class's part of `in_flight`."""
        return self._held[True]

    @property
    def waiting(self) -> int:
        """Requests of both classes that are not admitted yet."""
        return self._turns.ahead(patient=True)

    async def acquire(
        self,
        size: int,
        *,
        background: bool = False,
        timeout: float,
        ticket: Ticket | None = None,
    ) -> None:
        """Return once `size` bytes are admitted; give them back with `release`. Cancelled, it holds nothing.

        A `ticket`, good for one request, brings its own class and lets `raise_priority` change it; release with it.

        Raises:
            TimeoutError: not admitted within `timeout` seconds.
        """
        if size < 0:
            raise ValueError(f"size={size}: cannot be negative")
        mine = ticket or Ticket(background=background)
        mine.size = size
        mine.waiter = Waiter(lambda: self._admit(mine), patient=mine.background)
        await self._turns.wait(mine.waiter, timeout=timeout)

    def release(self, size: int, *, background: bool = False, ticket: Ticket | None = None) -> None:
        """Give back `size` admitted bytes of that class, or of the ticket's class, and serve whoever waits.

        Raises:
            RuntimeError: the class does not hold that much: released twice, or with the wrong class.
        """
        if ticket is not None:
            background = ticket.background
        if size > self._held[background] or (ticket is not None and not ticket.admitted):
            raise RuntimeError(f"{size} bytes released, but the class holds {self._held[background]}")
        self._held[background] -= size
        if ticket is not None:
            ticket.admitted = False
        self._turns.serve()

    def raise_priority(self, ticket: Ticket) -> None:
        """Make a background request foreground, waiting or admitted; in line it gets the place of its arrival."""
        if not ticket.background:
            return
        ticket.background = False
        if ticket.admitted:
            self._held[True] -= ticket.size
            self._held[False] += ticket.size
        if ticket.waiter is not None:
            self._turns.hurry(ticket.waiter)
        self._turns.serve()

    def _admit(self, ticket: Ticket) -> Ticket | None:
        most = self.limit // 2 if ticket.background else self.limit
        fits = self.in_flight + ticket.size <= self.limit and self._held[ticket.background] + ticket.size <= most
        alone = ticket.size > most and self.in_flight == 0
        if not fits and not alone:
            return None
        self._held[ticket.background] += ticket.size
        ticket.admitted = True
        return ticket

    def _give_back(self, ticket: Ticket) -> None:
        self.release(ticket.size, ticket=ticket)
