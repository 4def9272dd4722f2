"""A medium that is right but slow and fails when the weather says so: a dict behind delays, errors and hangs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvtier.backends.base import Backend, Stat, TooLongError, Traits, Written, check_name
from kvtier.errors import BackendUnavailableError, ClosedError

if TYPE_CHECKING:
    import random

    from simulation.plan import TierPlan, WeatherPlan

PAGE_ENTRIES = 2  # per page of a scan: scans shall be slow and interleave


@dataclass(frozen=True)
class Stored:
    value: bytes
    expires: float | None
    changed: float


@dataclass
class Medium:
    """What survives a crash: published entries and appended journal records."""

    capacity: int
    entries: dict[str, Stored] = field(default_factory=dict)
    logs: dict[int, bytes] = field(default_factory=dict)  # by process
    most: int = 0  # the most bytes ever in it

    @property
    def size(self) -> int:
        return sum(len(stored.value) for stored in self.entries.values())

    def publish(self, name: str, stored: Stored) -> None:
        self.entries[name] = stored
        self.most = max(self.most, self.size)


class Weather:
    """Decides how long one operation takes and how it fails."""

    def __init__(self, plan: WeatherPlan, rng: random.Random, loop: asyncio.AbstractEventLoop) -> None:
        self.plan = plan
        self._rng = rng
        self._loop = loop
        self._calm = False
        self.faults = 0

    def calm(self) -> None:
        """End all faults, but for the hangs under way."""
        self._calm = True

    def storm(self) -> None:
        self._calm = False

    def draw(self, *, may_lose_reply: bool = True) -> tuple[float, str]:
        """Return seconds and one of "", "error" (nothing was done), "lost" (done, but the answer is an error)."""
        rng, plan = self._rng, self.plan
        seconds = rng.random() ** 2 * plan.latency * (10 if rng.random() < plan.uneven else 1)
        if self._calm:
            return rng.random() * min(plan.latency, 0.01), ""
        for start, stop, kind in plan.outages:
            if start <= self._loop.time() < stop:
                self.faults += 1
                return (seconds, "error") if kind == "error" else (stop - self._loop.time() + seconds, "")
        chance = rng.random()
        if chance < plan.errors:
            self.faults += 1
            return seconds, "error"
        if chance < plan.errors + plan.lost_replies and may_lose_reply:
            self.faults += 1
            return seconds, "lost"
        if chance < plan.errors + plan.lost_replies + plan.hangs:
            self.faults += 1
            return plan.hang_seconds * (0.2 + rng.random()), ""
        return seconds, ""


def _nothing():
    return None


class FakeBackend(Backend):
    """A stored medium. It touches its callers' buffers from the start of an operation to its end, never after.

    With `threads` it does its work in the tier's (simulated) threads, as a disk does; else on the loop, as a client of
    a server does.
    """

    def __init__(self, plan: TierPlan, medium: Medium, weather: Weather, trace) -> None:
        self.traits = Traits(
            persistent=True, shared=plan.shared, scan_at_open=plan.scan_at_open, native_expiry=plan.native_expiry
        )
        self.plan = plan
        self.medium = medium
        self.weather = weather
        self._trace = trace
        self._context = None
        self._dead = False
        self.down_until = 0.0

    def kill(self) -> None:
        """Crash: what was published stays, nothing else happens."""
        self._dead = True

    # --- the contract

    async def open(self, context) -> None:
        await self._span("open", "")
        if self._context is not None:
            raise AssertionError(f"{self.plan.name} opened twice")
        if context.clock.monotonic() < self.down_until:
            raise BackendUnavailableError(f"{self.plan.name} is still down")
        self._context = context

    async def read_many(self, reads):
        return [await self._item("read", read.name, lambda read=read: self._read(read)) for read in reads]

    async def write_many(self, writes):
        return [await self._item("write", write.name, lambda write=write: self._write(write)) for write in writes]

    async def delete_many(self, names):
        return [await self._item("delete", name, lambda name=name: self._delete(name)) for name in names]

    async def stat_many(self, names):
        return [await self._item("stat", name, lambda name=name: self._stat(name)) for name in names]

    async def scan(self, after=None):
        names = sorted(name for name in self.medium.entries if after is None or name > after)
        for start in range(0, len(names), PAGE_ENTRIES):
            self._alive()
            page = [self._stat(name)[0] for name in names[start : start + PAGE_ENTRIES]]
            await self._span("scan", "")
            yield [stat for stat in page if stat is not None]

    async def set_expiry_many(self, items) -> None:
        await self._span("expire", "")
        for name, expires in items:
            if name in self.medium.entries:
                self.medium.entries[name] = replace(self.medium.entries[name], expires=expires)

    async def aclose(self) -> None:
        self._context = None

    # --- one item: some work at the start of its span, the rest at the end

    async def _item(self, what: str, name: str, begin):
        check_name(name)
        self._alive()
        seconds, fault = self.weather.draw()
        try:
            if fault == "error":
                await self._pause(seconds, _nothing)
                raise BackendUnavailableError(f"{self.plan.name}: bad weather")
            answer = await self._pause(seconds, begin)
            if fault == "lost":
                raise BackendUnavailableError(f"{self.plan.name}: the answer was lost")
        except BackendUnavailableError as exc:
            self._trace.note(f"    {self.plan.name} {what} {name[-6:]} {fault}")
            return exc
        self._trace.note(f"    {self.plan.name} {what} {name[-6:]} -> {answer}")
        return answer

    async def _pause(self, seconds: float, begin):
        """Let the operation's span pass. `begin` does the first part and returns (answer so far, second part)."""
        if self.plan.threads_io:
            return await self._context.workers.run_for(seconds, lambda: self._both(begin()))
        await asyncio.sleep(seconds / 3)
        self._alive()
        begun = begin()
        await asyncio.sleep(seconds / 3)
        self._alive()
        answer = self._both(begun)
        await asyncio.sleep(seconds / 3)
        return answer

    def _both(self, begun):
        if begun is None:
            return None
        answer, rest = begun
        if rest is not None and not self._dead:
            rest()
        return answer

    async def _span(self, what: str, name: str) -> None:
        self._alive(opened=what != "open")
        seconds, fault = self.weather.draw(may_lose_reply=False)
        await asyncio.sleep(seconds)
        self._alive(opened=what != "open")
        self._trace.note(f"    {self.plan.name} {what} {fault or 'ok'}")
        if fault:
            raise BackendUnavailableError(f"{self.plan.name}: bad weather")

    def _alive(self, *, opened: bool = True) -> None:
        if self._dead or (opened and self._context is None):
            raise ClosedError(f"backend {self.plan.name} is not open")
        if self.plan.native_expiry and self._context is not None:
            now = self._context.clock.wall()
            for name, stored in list(self.medium.entries.items()):
                if stored.expires is not None and stored.expires <= now:
                    del self.medium.entries[name]

    def _read(self, read):
        stored = self.medium.entries.get(read.name)
        if stored is None:
            return None, None
        value, into = stored.value[read.offset :], read.into[0]
        if len(value) > len(into) and not read.partial:
            return TooLongError(len(stored.value)), None
        size = min(len(value), len(into))
        half = size // 2
        into[:half] = value[:half]

        def rest() -> None:
            into[half:size] = value[half:size]

        return size, rest

    def _write(self, write):
        (source,) = write.parts
        half = len(source) // 2
        first = bytes(source[:half])

        def rest() -> None:
            value = first + bytes(source[half:])
            self.medium.publish(write.name, Stored(value, write.expires, self._context.clock.wall()))

        return Written(len(source)), rest

    def _delete(self, name: str):
        return self.medium.entries.pop(name, None) is not None, None

    def _stat(self, name: str):
        stored = self.medium.entries.get(name)
        return (None if stored is None else Stat(name, len(stored.value), stored.expires, stored.changed)), None


class FakeDisk(FakeBackend):
    """With a journal: one log per process, appended whole or not at all."""

    def __init__(self, plan: TierPlan, medium: Medium, weather: Weather, trace) -> None:
        super().__init__(plan, medium, weather, trace)
        self._process = len(medium.logs)
        self._read_until: dict[int, int] = {}
        medium.logs[self._process] = b""

    async def append_journal(self, records: bytes) -> None:
        await self._span("append", "")
        self.medium.logs[self._process] += records

    async def read_journals(self):
        await self._span("journals", "")
        self._read_until = {process: len(log) for process, log in self.medium.logs.items()}
        return [self.medium.logs[process] for process in sorted(self.medium.logs)]

    async def replace_journals(self, records: bytes) -> None:
        await self._span("compact", "")
        since = self.medium.logs[self._process][self._read_until.get(self._process, 0) :]
        for process in self.medium.logs:
            self.medium.logs[process] = b""
        self.medium.logs[self._process] = records + since
