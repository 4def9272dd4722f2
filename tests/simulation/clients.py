"""What clients of both faces have in common: seeded calls, memory they use again at once, results they keep."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from simulation import audit
from simulation.history import Reading
from simulation.plan import CALM_LATENCIES

from kvtier.store.report import stats

if TYPE_CHECKING:
    import random

    from simulation.history import Change
    from simulation.values import Source
    from simulation.world import Life, World

MOST_SCRIBBLED = 40
MOST_HELD = 20


class Clients(ABC):
    """All clients of one scenario, over all lives."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.held: list[tuple[str, object, int]] = []  # results that callers still have: key, blob, number
        self.scribbled: list[tuple[str, Source]] = []  # memory that callers gave, and use again

    @abstractmethod
    def client(self, life: Life, name: int, rng: random.Random) -> Client: ...

    @abstractmethod
    def number_of(self, key: str, blob: object) -> int: ...

    @abstractmethod
    async def look(self, life: Life, key: str) -> int:
        """Return the number of the value of `key`, 0 if there is none."""

    async def work(self, life: Life, name: int, rng: random.Random, calls: int) -> None:
        client = self.client(life, name, rng)
        kinds, weights = zip(*self.world.plan.weights.items(), strict=True)
        for kind in rng.choices(kinds, weights, k=calls):
            await asyncio.sleep(rng.random() * self.world.plan.think_seconds)
            if life.closing:
                break
            await getattr(client, kind)()
            if not life.closing:
                audit.check_running(life)

    def watch(self, label: str, source: Source) -> None:
        """Scribble over memory that a call had, and see to it that nobody else does."""
        source.scribble()
        self.scribbled.append((label, source))
        if len(self.scribbled) > MOST_SCRIBBLED:
            self._check_scribbled(*self.scribbled.pop(0))

    def _check_scribbled(self, label: str, source: Source) -> None:
        if not source.is_scribbled():
            self.world.problem(f"K8: the memory given to {label} was touched after the call had ended")

    def hold(self, key: str, blob: object, number: int) -> None:
        if len(self.held) < MOST_HELD:
            self.held.append((key, blob, number))

    def forget(self) -> None:
        """Drop results and buffers; nobody must have touched them since."""
        for key, blob, number in self.held:
            if self.number_of(key, blob) != number:
                self.world.problem(f"a result of {key} changed while its caller had it")
        for label, source in self.scribbled:
            self._check_scribbled(label, source)
        self.held, self.scribbled = [], []


class Client:
    """One client. Its methods have the names of `plan.CALLS`."""

    def __init__(self, clients: Clients, life: Life, name: int, rng: random.Random) -> None:
        self._life = life
        self._name = name
        self._rng = rng
        self._world = clients.world
        self._history = clients.world.history
        self._patient = True  # the last call had time enough for whatever it asked for

    def _deadline(self) -> tuple[float | None, float]:
        """Return what to give as `deadline_seconds`, and what then counts."""
        given = self._rng.choice((None, None, 0.02, 0.5, 2.0))
        return given, self._world.plan.deadline_seconds if given is None else given

    async def _call(self, label: str, method, *args, **kwargs):
        """Call with a seeded deadline and, perhaps, a seeded cancel; return (result, exception)."""
        given, limit = self._deadline()
        self._patient = limit >= CALM_LATENCIES * self._world.plan.weather.latency
        cancels = self._rng.random() < self._world.plan.cancels
        cancel = self._rng.random() ** 2 * 0.1 if cancels else None
        coro = method(*args, deadline_seconds=given, **kwargs)
        return await self._life.call(f"{self._name} {label}", coro, limit, cancel)

    def _read(self, key: str, start: float, time: float, number: int | None, *, there: bool) -> None:
        """Note what a call that began at `start` was told of a key."""
        stop = self._history.moment()
        reading = Reading(key, self._life.number, start, stop, number, time, there=there, patient=self._patient)
        self._history.readings.append(reading)

    def _ttl(self) -> float | None:
        return self._rng.choice((0.05, 0.5, 3.0)) if self._rng.random() < self._world.plan.ttls else None

    def _removed(self, changes: list[Change], error: BaseException | None, *, partial: bool) -> None:
        stop = self._history.moment()
        for change in changes:
            change.stop = stop
            change.took = error is None or partial
            change.lasting = error is None

    async def flush(self):
        start = self._history.moment()
        result, error = await self._call("flush", self._flush)
        if error is not None:
            self._life.unexpected("flush", error)
        return start, result is not None and result.complete

    async def _flush(self, *, deadline_seconds):
        engine = self._life.engine
        return await engine.upkeep.flush(engine.begin(deadline_seconds))

    async def stats(self) -> None:
        if self._life.engine.is_open:
            stats(self._life.engine)
