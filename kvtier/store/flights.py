"""Reads shared by their callers: one read of a key at a time, with a life of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvtier.concurrency.budget import Budget, Ticket
from kvtier.errors import ClosedError
from kvtier.tier.reading import Missed, probe, read
from kvtier.tier.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.buffers.arena import Arena, Slot
    from kvtier.concurrency.generations import Claim, Generations
    from kvtier.concurrency.turns import Waiter
    from kvtier.tier.admission import Admission
    from kvtier.tier.index import Entry
    from kvtier.tier.services import Services
    from kvtier.tier.stored import StoredTier

    Holders = Sequence[tuple[StoredTier, Entry]]
    Landed = Callable[[Value, StoredTier, Claim], None]


class Flight:
    """One read of one key: from the tiers that hold it, in their order, until one gives it.

    It belongs to the supervisor, not to the call that began it: cancelling a caller hurts no other. It keeps the
    value until the last reader left; a reader that goes on using the value takes a reference of its own.
    """

    def __init__(self, claim: Claim, holders: Holders, *, background: bool, patient: bool) -> None:
        self.key: str = claim.key
        self.patient = patient  # may wait for memory; a second try may not: its caller holds what it would wait for
        self.claim = claim
        self.holders = holders
        self.background: bool = background
        self.share: Ticket | None = None  # of the memory for background reads, if it is or was one
        self.landing: Waiter[Slot] | None = None  # its place in the line for memory
        self.admission: Admission | None = None  # its place in the tier it is read from now
        self.landed: asyncio.Event = asyncio.Event()
        self.value: Value | None = None
        self.source: StoredTier | None = None
        self.errors: list[Exception] = []
        self.overtaken = False  # the value moved, or another came, while it was read
        self._readers = 0

    def board(self) -> Flight:
        """Become a reader; `leave` must follow."""
        self._readers += 1
        return self

    def hurry(self, arena: Arena, shares: Budget) -> None:
        """Make it foreground: somebody waits for it now."""
        self.background = False
        if self.share is not None:
            shares.raise_priority(self.share)
        if self.landing is not None:
            arena.hurry(self.landing)
        if self.admission is not None:
            self.admission.hurry()

    def leave(self) -> None:
        """Stop being a reader."""
        self._readers -= 1
        self._drop_value_if_unread()

    async def wait(self, timeout: float) -> bool:
        """Wait until the read has ended, at most `timeout` seconds; tell whether it has."""
        if self.landed.is_set():
            return True
        try:
            async with asyncio.timeout(timeout):
                await self.landed.wait()
        except TimeoutError:
            return False
        return True

    def land(self, value: Value | None) -> None:
        """End with a value (whose reference is handed over) or with none."""
        self.value = value
        self.landed.set()
        self._drop_value_if_unread()

    def _drop_value_if_unread(self) -> None:
        if self._readers == 0 and self.landed.is_set() and self.value is not None:
            self.value.release()
            self.value = None


class Flights:
    """All reads from stored tiers that are under way.

    `on_landed` decides on promotion while the claim still stands; `outdated` tells whether a value of a key that was
    put at a wall-clock second has been deleted since.
    """

    def __init__(
        self, services: Services, generations: Generations, *, on_landed: Landed, outdated: Callable[[str, float], bool]
    ) -> None:
        self._services = services
        self._generations = generations
        self._on_landed = on_landed
        self._outdated = outdated
        self._shares = Budget(max(services.arena.staging, 1))  # background reads take at most half of the reserve
        self._joinable: dict[str, Flight] = {}
        self._under_way = 0
        self._none_under_way = asyncio.Event()

    async def wait_all(self, *, timeout: float) -> bool:
        """Wait until no read is under way; False after `timeout` seconds."""
        self._none_under_way.clear()
        if not self._under_way:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._none_under_way.wait()
        except TimeoutError:
            return False
        return True

    @property
    def under_way(self) -> int:
        """Reads that have not ended."""
        return self._under_way

    def join_or_start(self, key: str, holders: Holders, *, background: bool, patient: bool = True) -> Flight:
        """Board the read of `key` that is under way, or start one. `leave` it in the end."""
        flight = self._joinable.get(key)
        if flight is not None:
            holders[0][0].ledger.counters.joined += 1
            if flight.background and not background:
                flight.hurry(self._services.arena, self._shares)
            return flight.board()
        flight = Flight(self._generations.claim(key), holders, background=background, patient=patient).board()
        try:
            self._services.supervisor.start(self._run(flight), name="flight")
        except ClosedError:
            flight.claim.end()
            raise
        self._joinable[key] = flight
        self._under_way += 1
        return flight

    def close_boarding(self, key: str) -> None:
        """Let nobody join the read of `key` any more: the key changed."""
        self._joinable.pop(key, None)

    def close_boarding_under(self, prefix: str) -> None:
        """Do the same for every key under `prefix`."""
        for key in [key for key in self._joinable if key.startswith(prefix)]:
            del self._joinable[key]

    async def _run(self, flight: Flight) -> None:
        value: Value | None = None
        try:
            value = self._if_current(flight, await self._read(flight))
            if value is not None and flight.source is not None and not flight.claim.stale:
                self._on_landed(value, flight.source, flight.claim)
        finally:
            if self._joinable.get(flight.key) is flight:
                del self._joinable[flight.key]
            self._under_way -= 1
            if not self._under_way:
                self._none_under_way.set()
            if flight.share is not None and flight.share.admitted:
                self._shares.release(flight.share.size, ticket=flight.share)
            flight.overtaken = flight.overtaken or flight.claim.stale
            flight.claim.end()
            flight.land(value)

    def _if_current(self, flight: Flight, value: Value | None) -> Value | None:
        """Refuse a value that was deleted since it was put: a store that had not heard of it wrote it again."""
        if value is None or flight.source is None or not self._outdated(value.key, value.header.created):
            return value
        value.release()
        entry = flight.source.find(flight.key)
        if entry is not None:
            flight.source.discard([entry], "deleted")
        return None

    async def _read(self, flight: Flight) -> Value | None:
        """Try the tiers in order, in one slot that is large enough for each, so that no later try waits for memory."""
        landing = _Landing(_largest(flight.holders), patient=flight.patient)
        try:
            for tier, entry in flight.holders:
                outcome = await self._read_from(flight, tier, entry, landing)
                if isinstance(outcome, Missed) and outcome.why == "raced":
                    flight.overtaken = True
                    outcome = await self._read_again(flight, tier, landing) or outcome
                if isinstance(outcome, Value):
                    outcome.slot.trim(outcome.size)  # nobody else holds it yet
                    flight.source, landing.slot = tier, None  # the reference goes with the value
                    return outcome
                if outcome.error is not None:
                    flight.errors.append(outcome.error)
                if outcome.why == "timeouts":
                    landing.give_up()  # the late read still has it
        finally:
            landing.give_up()
        return None

    async def _read_again(self, flight: Flight, tier: StoredTier, landing: _Landing) -> Value | Missed | None:
        """Read what took the entry's place, once; None if nothing did."""
        await probe(tier, [flight.key])
        entry = tier.find(flight.key)
        return None if entry is None else await self._read_from(flight, tier, entry, landing)

    async def _read_from(self, flight: Flight, tier: StoredTier, entry: Entry, landing: _Landing) -> Value | Missed:
        slot = await self._slot(flight, tier, entry, landing)
        if slot is None:
            return Missed("skipped")
        flight.admission = tier.limits.ask(entry.size, background=flight.background)
        return await read(tier, entry, slot, flight.admission)

    async def _slot(self, flight: Flight, tier: StoredTier, entry: Entry, landing: _Landing) -> Slot | None:
        """Return a slot the entry fits into: the one at hand, or another; None, counted, if there is none to be had."""
        if landing.slot is not None and landing.slot.size >= entry.size:
            return landing.slot
        landing.give_up()
        try:
            if entry.size > tier.settings.max_value_bytes:
                raise TimeoutError  # noqa: TRY301  # as good as no memory: such a value is never read
            size = min(max(entry.size, landing.size, 1), self._services.arena.capacity)
            seconds = tier.settings.deadline_seconds if landing.patient else 0.0
            landing.patient = False
            if flight.background and flight.share is None:
                flight.share = Ticket(background=True)
                await self._shares.acquire(size, ticket=flight.share, timeout=seconds)
            arena = self._services.arena
            flight.landing = arena.line_up(max(size, entry.size), background=flight.background)
            landing.slot = await arena.wait(flight.landing, timeout=seconds)
        except Exception as exc:  # noqa: BLE001  # no memory for it in time, or more than there is at all
            counters = tier.ledger.counters
            counters.lookups += 1
            counters.skipped += 1
            self._services.events.emit(
                "dropped", tier=tier.name, key=entry.key, size=entry.size, reason=f"no memory: {exc!r}"
            )
        return landing.slot


def _largest(holders: Holders) -> int:
    """Return the bytes of the largest entry that would be read at all."""
    return max((entry.size for tier, entry in holders if entry.size <= tier.settings.max_value_bytes), default=0)


class _Landing:
    """The memory that one flight reads into, while no value owns it.

    Only the first slot is waited for. A second one is taken if it is free now: whoever waits for this read may hold
    what it would wait for.
    """

    def __init__(self, size: int, *, patient: bool) -> None:
        self.slot: Slot | None = None
        self.size = size
        self.patient = patient

    def give_up(self) -> None:
        """Give the memory back, if there is any."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()
