"""The store's tiers in their order, with the memory, threads and tasks they share: opened together, closed together."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from kvtier.backends.base import BackendContext, JournalBackend, SlotBackend
from kvtier.buffers.arena import Arena
from kvtier.buffers.lease import LeaseShare
from kvtier.buffers.results import ResultPool
from kvtier.concurrency.arrivals import Arrivals
from kvtier.concurrency.clock import SystemClock
from kvtier.concurrency.deadline import Deadline
from kvtier.concurrency.generations import Generations
from kvtier.concurrency.supervisor import Supervisor
from kvtier.concurrency.workers import Workers
from kvtier.errors import BackendError, CapacityError, ClosedError, ConfigError, InvalidValueError
from kvtier.events import Events
from kvtier.placement import TouchMemory, demotion_memory
from kvtier.sessions import Sessions
from kvtier.store.calls import Calls
from kvtier.store.flights import Flights
from kvtier.store.hearing import Hearing
from kvtier.store.movement import Movement
from kvtier.store.paying import Paying
from kvtier.store.tombstones import Tombstones
from kvtier.store.upkeep import Upkeep
from kvtier.tier.journal import TierJournal
from kvtier.tier.memory import MemoryTier
from kvtier.tier.opening import bring_up
from kvtier.tier.services import Services
from kvtier.tier.stored import StoredTier
from kvtier.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.concurrency.clock import Clock
    from kvtier.events import Observer
    from kvtier.store.settings import EngineSettings, TierParts
    from kvtier.tier.value import Value

Tier: TypeAlias = MemoryTier | StoredTier

SETTLING_SHARE = 0.75  # of `close_seconds` for reads to end and for the flush; the rest is for backends and threads
LEAST_STEP_SECONDS = 0.05
RESULT_ALIGNMENT = 64
KEPT_COHERENCE_PERIODS = 4


class Engine:
    """Everything that the faces of one store (chunks, KV of a model) have in common.

    Opened by the first face that is entered; belongs to the process and event loop that opened it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        parts: Sequence[TierParts],
        *,
        observer: Observer | None = None,
        clock: Clock | None = None,
        make_workers: Callable[..., Workers] = Workers,
    ) -> None:
        self.settings = settings
        self.clock: Clock = clock or SystemClock()
        self.events: Events = Events(observer, self.clock)
        self.generations: Generations = Generations()
        self.arrivals: Arrivals = Arrivals()
        self.touches: TouchMemory = TouchMemory()
        self.sessions: Sessions = Sessions()
        self.reads: Calls = Calls()
        self.hearing: Hearing = Hearing(self)
        self.paying: Paying = Paying(self)
        self.tombstones: Tombstones = Tombstones(
            self.clock, keep_seconds=KEPT_COHERENCE_PERIODS * settings.coherence_seconds
        )
        self.tiers: list[Tier] = []
        self.writers: dict[str, Writer] = {}
        self._parts = list(parts)
        self._make_workers = make_workers
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._stack = AsyncExitStack()
        self._closes: Deadline | None = None
        self._unclosed: list[asyncio.Future[None]] = []  # backends that do not come back from closing

    # --- life

    async def open(self) -> None:
        """Open all tiers or none.

        Raises:
            ConfigError, BackendUnavailableError: from the first tier that does not open; the others are closed again.
            ClosedError: opened before.
        """
        if self._state != "new":
            raise ClosedError(f"this store is {self._state}; make a new one with kvtier.open")
        self._state, self._pid, self._loop = "opening", os.getpid(), asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            self._make_services(stack)
            for parts in self._parts:
                self.tiers.append(await self._open_named(parts, stack))
                self.paying.seed(self.tiers[-1])
            self.movement: Movement = Movement(self)
            self.flights: Flights = Flights(
                self.services,
                self.generations,
                on_landed=self.movement.promote,
                outdated=self.tombstones.outdated,
            )
            self.upkeep: Upkeep = Upkeep(self)
            self.upkeep.start()
            self._stack = stack.pop_all()
        self._state = "open"

    def _make_services(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        memory = sum(parts.settings.capacity for parts in self._parts if isinstance(parts.backend, SlotBackend))
        memory += sum(demotion_memory(above.settings, below.settings) for above, below in pairwise(self._parts))
        # Without a memory tier on top, puts pass through half of it; encoding and reads always have the other half.
        on_top = isinstance(self._parts[0].backend, SlotBackend)
        reserve = settings.staging_bytes if on_top else settings.staging_bytes // 2
        self.arena: Arena = Arena(
            memory + settings.staging_bytes,
            staging=reserve,
            lock=settings.lock_memory,
            huge_pages=settings.huge_pages,
            numa_node=settings.numa_node,
        )
        stack.push_async_callback(self._close_arena)
        self.results: ResultPool = ResultPool(settings.result_bytes)
        stack.callback(self.results.close)
        self.leases: LeaseShare = LeaseShare(
            int(self.arena.capacity * settings.lease_share), max_seconds=settings.lease_seconds, clock=self.clock
        )
        workers = self._make_workers("kvtier-copy", settings.copy_threads)
        stack.push_async_callback(lambda: workers.aclose(self._seconds_left()))
        stack.callback(self._abandon_writes)  # what calls under way offered while the store closed
        supervisor = Supervisor(self._task_failed)
        stack.push_async_callback(lambda: supervisor.aclose(self._seconds_left()))
        self.services: Services = Services(
            clock=self.clock,
            events=self.events,
            supervisor=supervisor,
            workers=workers,
            arena=self.arena,
            codecs=settings.codecs,
        )

    async def _open_named(self, parts: TierParts, stack: AsyncExitStack) -> Tier:
        """Open a tier; a wrong option says whose it is."""
        try:
            return await self._open_tier(parts, stack)
        except ConfigError as exc:
            raise ConfigError(f"tier {parts.settings.name!r}: {exc}") from exc

    async def _open_tier(self, parts: TierParts, stack: AsyncExitStack) -> Tier:
        settings, backend = parts.settings, parts.backend
        threads = self._make_workers(
            f"kvtier-{settings.name}",
            settings.threads,
            most_background=settings.threads - 1,
            job_seconds=settings.deadline_seconds,
            on_abandoned=partial(self._job_abandoned, settings.name),
        )
        stack.push_async_callback(lambda: threads.aclose(self._seconds_left()))
        context = BackendContext(
            tier=settings.name,
            workers=threads,
            clock=self.clock,
            events=self.events,
            arena=self.arena,
            capacity=settings.capacity,
            deadline_seconds=settings.deadline_seconds,
        )
        stack.push_async_callback(self._close_backend, parts)
        if isinstance(backend, SlotBackend):
            await backend.open(context)
            memory = MemoryTier(settings, backend, backend, chain=parts.chain, policy=parts.policy, clock=self.clock)
            memory.ledger.on_change = self.events.changes_of(memory.name)
            stack.callback(memory.forget_all)  # before the backend gives the slots up
            return memory
        tier = StoredTier(settings, backend, chain=parts.chain, policy=parts.policy, services=self.services)
        tier.ledger.on_change = self.events.changes_of(tier.name)
        journal = TierJournal(backend) if isinstance(backend, JournalBackend) else None
        tier.attach(context, journal, powers=backend)
        self.writers[tier.name] = Writer(tier, self.generations)
        try:
            await bring_up(tier)
        except BackendError as exc:
            if settings.required:
                raise
            tier.breaker.open_now(exc)
            self.events.emit("degraded", tier=tier.name, reason=f"down at open: {exc}", error=exc)
        return tier

    async def _close_backend(self, parts: TierParts) -> None:
        """Close one backend; neither its failure nor its silence keeps the others open."""
        closing = asyncio.ensure_future(parts.backend.aclose())
        done, _ = await asyncio.wait({closing}, timeout=self._seconds_left())
        if not done:
            closing.cancel()
            self._unclosed.append(closing)  # held, so that it can end
            self.events.emit("error", tier=parts.settings.name, reason="the backend did not close in time")
        elif not closing.cancelled() and (error := closing.exception()) is not None:
            self.events.emit("error", tier=parts.settings.name, reason=f"close failed: {error!r}", error=error)

    async def _close_arena(self) -> None:
        closer = self._make_workers("kvtier-close", 1)  # unmapping gigabytes takes a while
        closed = await closer.run(self.arena.close)
        if not closed:
            self.events.drop_tracebacks()
            gc.collect()  # views in the tracebacks of past errors are nobody's
            closed = await closer.run(self.arena.close)
        await closer.aclose(LEAST_STEP_SECONDS)
        if not closed:
            self.events.emit("leaked", size=self.arena.capacity, reason="tensors over the arena are still alive")

    def _abandon_writes(self) -> None:
        for writer in self.writers.values():
            writer.abandon("closed")

    def _seconds_left(self) -> float:
        """Return what a step of closing (or of undoing a failed open) may take: together they stay within the bound."""
        left = self._closes.remaining() if self._closes is not None else self.settings.close_seconds
        return max(left, LEAST_STEP_SECONDS)

    def _job_abandoned(self, tier_name: str) -> None:
        for tier in self.tiers:
            if tier.name == tier_name:
                tier.ledger.counters.abandoned += 1
        self.events.emit("abandoned", tier=tier_name, reason="a thread is stuck in a call past its deadline")

    def _task_failed(self, name: str, error: BaseException) -> None:
        self.events.emit("error", reason=f"task {name!r} failed: {error!r}", error=error)

    async def aclose(self) -> None:
        """Refuse calls, let reads finish, flush within `close_seconds`, drop and count the rest, close bottom-up."""
        if self._state != "open":
            return
        self.guard()
        self._state = "closing"
        self._closes = Deadline.after(self.settings.close_seconds, self.clock)
        try:
            await self.upkeep.settle(Deadline.after(self.settings.close_seconds * SETTLING_SHARE, self.clock))
            self._abandon_writes()
        finally:
            self._state = "closed"
            stack, self._stack = self._stack, AsyncExitStack()
            await stack.aclose()

    # --- what every call does first

    def guard(self) -> None:
        """Refuse a call that cannot be served.

        Raises:
            ClosedError: not open, forked since, or called from another event loop.
        """
        if self._pid != os.getpid() and self._pid:
            raise ClosedError(f"opened in process {self._pid}, called in {os.getpid()}; open a store after the fork")
        if self._state != "open":
            advice = "use `async with kvtier.open(...)`" if self._state == "new" else "open a new one"
            raise ClosedError(f"the store is {self._state}; {advice}")
        if _running_loop() is not self._loop:
            raise ClosedError("the store belongs to another event loop; call it there, or open one per loop")

    def begin(self, deadline_seconds: float | None) -> Deadline:
        """Start a public call: refuse it or return its deadline.

        Raises:
            ClosedError: as `guard`.
            InvalidValueError: `deadline_seconds` is not a finite number above 0.
        """
        self.guard()
        seconds = self.settings.deadline_seconds if deadline_seconds is None else deadline_seconds
        try:
            return Deadline.after(seconds, self.clock)
        except ValueError as exc:
            raise InvalidValueError(str(exc)) from None

    async def result_views(self, sizes: Sequence[int], deadline: Deadline) -> list[memoryview] | None:
        """Return recycled memory for a result, one 64-byte aligned view per size, together one buffer.

        None, told as an event, if the results that callers hold leave no room for it by the deadline.
        """
        total = sum(-(-size // RESULT_ALIGNMENT) * RESULT_ALIGNMENT for size in sizes)
        try:
            buffer = await self.results.take(max(total, 1), timeout=deadline.remaining())
        except (TimeoutError, CapacityError) as exc:
            self.events.emit("dropped", size=total, reason="no room for a result; see memory.results", error=exc)
            return None
        views, start = [], 0
        for size in sizes:
            views.append(buffer[start : start + size])
            start += -(-size // RESULT_ALIGNMENT) * RESULT_ALIGNMENT
        return views

    # --- the tiers by kind, known before they are open

    @property
    def outliving(self) -> list[str]:
        """Names of the tiers that outlive the process or are shared with others."""
        traits = [(parts.settings.name, parts.backend.traits) for parts in self._parts]
        return [name for name, has in traits if has.persistent or has.shared]

    @property
    def capacities(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return {parts.settings.name: parts.settings.capacity for parts in self._parts}

    @property
    def is_open(self) -> bool:
        """Whether calls are served."""
        return self._state == "open"

    @property
    def memory_tiers(self) -> list[MemoryTier]:
        """Tiers whose entries are slots, in order."""
        return [tier for tier in self.tiers if isinstance(tier, MemoryTier)]

    @property
    def stored_tiers(self) -> list[StoredTier]:
        """Tiers on byte media, in order."""
        return [tier for tier in self.tiers if isinstance(tier, StoredTier)]

    def waiting_in(self, tier: StoredTier, key: str, *, exact: bool = False) -> Value | None:
        """Return the value of `key` that is on its way to `tier` and not expired, if there is one."""
        value = self.writers[tier.name].waiting(key)
        if value is None or (exact and value.header.lossy):
            return None
        expires = value.header.expires
        return None if expires is not None and expires <= self.clock.wall() else value

    def tier(self, name: str | None) -> Tier:
        """Return a tier by name; the first one for None. Raises `InvalidValueError` for an unknown name."""
        for tier in self.tiers:
            if name is None or tier.name == name:
                return tier
        raise InvalidValueError(f"no tier {name!r}; known: {', '.join(tier.name for tier in self.tiers)}")

    @property
    def top(self) -> MemoryTier | None:
        """The memory tier that takes a put's snapshot: the first tier, if it is one."""
        first = self.tiers[0]
        return first if isinstance(first, MemoryTier) else None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
