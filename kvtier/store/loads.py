"""The chunk reads of one call: values from memory at once, the others through shared flights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.buffers.slot import retain_all
from kvtier.errors import BackendTimeoutError
from kvtier.store.lookup import Located, locate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from kvtier.concurrency.deadline import Deadline
    from kvtier.store.engine import Engine, Tier
    from kvtier.store.flights import Flight
    from kvtier.tier.value import Value


class Loads:
    """Begins to read every key when entered; `value(i)` waits for one; leaving gives all references back.

    Leaving early (an error, a cancelled caller) hurts no other call: flights go on for whoever else boarded them.
    """

    def __init__(self, engine: Engine, located: Sequence[Located], *, background: bool = False) -> None:
        """Prepare to read; `background` reads yield to others and never raise."""
        self._engine = engine
        self._located = located
        self._background = background
        self._values: list[Value | None] = []
        self._flights: list[Flight | None] = []
        self._sources: list[str] = []
        self.late: bool = False  # a deadline passed while a read was under way

    def __enter__(self) -> Self:
        top = self._engine.top
        entries = {} if top is None else top.ledger.index.entries
        lent: list[Value] = []
        for where in self._located:
            memory = where.memory
            if memory is not None and memory[0] is top and entries.get(where.key) is (entry := memory[1]):
                value = entry.value  # the usual case, kept short: a chunk in the top tier
                if value is not None:
                    lent.append(value)
                    self._add(value, None, top.name)
                    continue
            self._add(*self._begin(where.key))
        if top is not None and lent:
            retain_all([value.slot for value in lent])  # nothing was evicted meanwhile: this loop never gives way
            counters = top.ledger.counters
            counters.lookups += len(lent)
            counters.hits += len(lent)
            counters.read_bytes += sum([value.size for value in lent])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for value in self._values:
            if value is not None:
                value.release()
        for flight in self._flights:
            if flight is not None:
                flight.leave()
        self._values, self._flights = [], []

    def _add(self, value: Value | None, flight: Flight | None, source: str) -> None:
        self._values.append(value)
        self._flights.append(flight)
        self._sources.append(source)

    def _begin(self, key: str, *, again: bool = False) -> tuple[Value | None, Flight | None, str]:
        """Take the value from where it is now: it may have been written, evicted or put anew since it was located."""
        engine = self._engine
        where = locate(engine, key, exact=engine.settings.lossless) or Located(key)
        value: Value | None
        for tier in engine.tiers:
            counters = tier.ledger.counters
            if where.memory is not None and where.memory[0] is tier:
                value = where.memory[0].lend(where.memory[1])
            elif tier is where.waiting:
                waiting = engine.waiting_in(where.waiting, key)
                value = None if waiting is None else waiting.retain()
            elif any(tier is holder for holder, _ in where.stored):
                flights, background = engine.flights, self._background
                return None, flights.join_or_start(key, where.stored, background=background, patient=not again), ""
            else:
                value = None
            counters.lookups += 1
            if value is not None:
                counters.hits += 1
                counters.read_bytes += value.size
                return value, None, tier.name
            _count_miss(tier)
        return None, None, ""

    def ready(self, i: int) -> bool:
        """Tell whether `value(i)` would not wait."""
        flight = self._flights[i]
        return flight is None or flight.landed.is_set()

    def at_hand(self, i: int) -> Value | None:
        """Return the i-th value if it was in memory from the start."""
        return self._values[i]

    async def value(self, i: int, deadline: Deadline) -> Value | None:
        """Return the i-th value, or None if no tier gave it by the deadline; valid until this object is left.

        Raises:
            KVTierError: why there is none, in a strict store.
        """
        while (flight := self._flights[i]) is not None:
            if not await flight.wait(deadline.remaining()):
                self.late = True
                self._fail([BackendTimeoutError(f"the deadline passed while {flight.key!r} was read")])
                return None
            if flight.value is None and not flight.overtaken:
                self._fail(flight.errors)
                return None
            if flight.value is not None:
                source = flight.source.name if flight.source is not None else ""
                self._take(i, flight.value.retain(), None, source)
            else:  # the value moved or was put anew while it was read: look where it is now
                self._take(i, *self._begin(flight.key, again=True))
            flight.leave()
        return self._values[i]

    def _fail(self, errors: Sequence[Exception]) -> None:
        if errors and self._engine.settings.strict and not self._background:
            raise errors[0]

    def _take(self, i: int, value: Value | None, flight: Flight | None, source: str) -> None:
        self._values[i], self._flights[i], self._sources[i] = value, flight, source

    def hand_over(self, i: int) -> Value:
        """Return the i-th value, which is there, with its reference: the caller releases it."""
        value = self._values[i]
        if value is None:
            raise RuntimeError(f"value {i} is not there")
        self._values[i] = None
        return value

    def drop(self, i: int) -> None:
        """Give up the i-th value's reference early: what it held is free for the reads that wait for memory."""
        value = self._values[i]
        if value is not None:
            self._values[i] = None
            value.release()

    def source(self, i: int) -> str:
        """Return the name of the tier the i-th value came from; empty if it did not come."""
        return self._sources[i]


def _count_miss(tier: Tier) -> None:
    if tier.up:
        tier.ledger.counters.misses += 1
    else:
        tier.ledger.counters.skipped += 1


def count_absent(engine: Engine, keys: int) -> None:
    """Count keys that no tier has: a miss in each, or a skip where the tier is down."""
    for tier in engine.tiers:
        counters = tier.ledger.counters
        counters.lookups += keys
        if tier.up:
            counters.misses += keys
        else:
            counters.skipped += keys


def touch(engine: Engine, keys: Sequence[str]) -> None:
    """Note a use of the keys in every tier that holds them, the deepest first: leaves stay older than parents."""
    for tier in engine.tiers:
        entries, policy, now = tier.ledger.index.entries, tier.ledger.policy, tier.ledger.now()
        journal = getattr(tier, "journal", None)
        for key in reversed(keys):
            entry = entries.get(key)
            if entry is None:
                continue
            policy.touch(key, now)
            if journal is not None:
                journal.used(entry.name)
        tier.ledger.restore(keys)
    engine.movement.used(keys)
