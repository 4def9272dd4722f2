"""One scenario from open to the last close: processes that live, crash and close, over media that stay."""

from __future__ import annotations

import asyncio
import gc
import random
import traceback
from dataclasses import dataclass, field

from simulation import audit, loop
from simulation.backends import FakeBackend, FakeDisk, Medium, Weather
from simulation.checker import check_history, owed
from simulation.chunk_clients import ChunkClients
from simulation.history import History
from simulation.kv_clients import KVClients
from simulation.plan import FOR_EVER, Plan, plan_of
from simulation.threads import Crew

from kvtier.backends.pinned_cpu import PinnedCpuBackend
from kvtier.codecs.chain import CodecChain
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import ClosedError
from kvtier.policies.arc import ARCPolicy
from kvtier.policies.fifo import FIFOPolicy
from kvtier.policies.gdsf import GDSFPolicy
from kvtier.policies.lfu import LFUPolicy
from kvtier.policies.lru import LRUPolicy
from kvtier.policies.s3_fifo import S3FIFOPolicy
from kvtier.store.engine import Engine
from kvtier.store.settings import EngineSettings, TierParts
from kvtier.tier.settings import TierSettings

SLACK_SECONDS = 0.15  # over a deadline: copies under way are waited for
CLOSE_SLACK_SECONDS = 1.0  # closing gives every step 0.05 s at least
MOST_EPOCH_SECONDS = 600.0
POLICIES = {p.name: p for p in (LRUPolicy, FIFOPolicy, LFUPolicy, GDSFPolicy, S3FIFOPolicy, ARCPolicy)}


@dataclass
class Outcome:
    """What one scenario came to."""

    seed: int
    digest: str
    problems: list[str]
    trace: list[str] = field(default_factory=list)
    calls: int = 0
    iterations: int = 0


def simulate(seed: int, *, keep_trace: bool = False, plan: Plan | None = None) -> Outcome:
    """Run one scenario; equal seeds give equal outcomes, trace and all."""
    chosen = plan or plan_of(seed)
    was_on = gc.isenabled()
    gc.disable()  # the collector would run finalizers at moments that no seed tells
    try:
        return loop.run(seed, lambda lp, trace: World(chosen, lp, trace).run(), keep_trace=keep_trace)
    finally:
        gc.collect()
        if was_on:
            gc.enable()


class World:
    """The media, the weather and the history, which outlive each process."""

    def __init__(self, plan: Plan, lp: loop.SimulationLoop, trace: loop.Trace) -> None:
        self.plan = plan
        self.loop = lp
        self.trace = trace
        self.clock = loop.VirtualClock(lp)
        self.rng = random.Random(f"world {plan.seed}")
        self.history = History()
        self.media = {tier.name: Medium(tier.capacity) for tier in plan.tiers if tier.kind != "memory"}
        self.weather = Weather(plan.weather, random.Random(f"weather {plan.seed}"), lp)
        self.problems: list[str] = []
        self.calls = 0
        faces = KVClients if plan.face == "kv" else ChunkClients
        self.clients = faces(self)

    def problem(self, text: str) -> None:
        self.trace.note(f"PROBLEM {text}")
        self.problems.append(text)

    async def run(self) -> Outcome:
        try:
            for number in range(len(self.plan.epochs)):
                await Life(self, number).run()
                if self.problems:
                    break
            replacing = self.plan.face == "chunks"
            for text in check_history(self.history, replacing=replacing, calm=self.plan.calm):
                self.problem(text)
        except Exception:
            self.problem("exception: " + traceback.format_exc())
        for text in self.loop.problems:
            self.problem(f"asyncio: {text}")
        return Outcome(
            self.plan.seed, self.trace.digest, self.problems, self.trace.lines, self.calls, self.loop.iterations
        )


class Life:
    """One process: an engine from open to close or crash."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.plan = world.plan.epochs[number]
        seed = world.plan.seed
        self.crew = Crew(random.Random(f"threads {seed} {number}"), copy_seconds=world.plan.copy_seconds)
        self.backends: list[FakeBackend] = []
        self.engine = Engine(
            self._settings(),
            [self._parts(tier) for tier in world.plan.tiers],
            observer=self,
            clock=world.clock,
            make_workers=self.crew.make,
        )
        self.closing = False

    # --- what it is made of

    def _settings(self) -> EngineSettings:
        plan = self.world.plan
        return EngineSettings(
            deadline_seconds=plan.deadline_seconds,
            close_seconds=plan.close_seconds,
            staging_bytes=plan.staging_bytes,
            result_bytes=plan.result_bytes,
            copy_threads=plan.copy_threads,
            codecs={"raw": RawCodec, "zstd": ZstdCodec},
        )

    def _parts(self, plan) -> TierParts:
        policy = POLICIES[plan.policy]
        if plan.kind == "memory":
            backend = PinnedCpuBackend()
        else:
            kind = FakeDisk if plan.kind == "disk" else FakeBackend
            backend = kind(plan, self.world.media[plan.name], self.world.weather, self.world.trace)
            self.backends.append(backend)
        settings = TierSettings(
            name=plan.name,
            capacity=plan.capacity,
            write=plan.write,
            promote=plan.promote,
            required=plan.required,
            on_full=plan.on_full,
            ttl_seconds=plan.ttl_seconds,
            deadline_seconds=plan.deadline_seconds,
            max_in_flight_bytes=plan.in_flight_bytes,
            write_queue_bytes=plan.queue_bytes,
            writers=plan.writers,
            threads=plan.threads,
            negative_seconds=plan.negative_seconds,
            max_value_bytes=1 << 20,
        )
        chain = CodecChain([ZstdCodec()] if plan.zstd else [])
        return TierParts(settings=settings, backend=backend, policy=policy(), chain=chain)

    def on_event(self, event) -> None:
        """Observe the engine; some events must never be seen over media that are right."""
        world = self.world
        world.trace.note(f"  * {event.kind} {event.tier} {(event.key or '')[-8:]} {event.reason[:60]}")
        if event.kind == "corrupt":
            world.problem(f"corrupt: {event.tier} {event.key} {event.error!r}")
        if event.kind == "error" and event.reason.startswith("task "):
            world.problem(f"a background task failed: {event.reason}\n{_lines(event.error)}")
        if event.kind == "dropped" and event.key is not None:
            world.history.drops.append((world.history.moment(), event.tier or "", event.key))
        if event.kind == "leaked" and not self.crew.running and self.plan.close_amid is None:
            world.problem("the arena was leaked at close, though no thread was stuck and no call under way")

    # --- from open to the end

    async def run(self) -> None:
        world, plan = self.world, self.world.plan
        weather = world.weather
        world.trace.note(f"--- life {self.number}")
        weather.calm()
        for backend in self.backends:
            backend.down_until = backend.plan.down_until if not self.number else 0.0
        await self.engine.open()
        self._watch_departures()
        await self._keep_promises()
        weather.storm()
        tasks = [world.loop.create_task(self._client(name), name=f"client {name}") for name in range(self.plan.clients)]
        limit = self.plan.crash_after
        if limit is None:
            limit = self.plan.close_amid
        _, pending = await asyncio.wait(tasks, timeout=MOST_EPOCH_SECONDS if limit is None else limit)
        if self.plan.crash_after is not None:
            await self._crash(tasks)
            return
        if pending and limit is None:
            world.problem(f"K7: {len(pending)} clients never ended")
        if limit is None and plan.weather.hang_seconds < FOR_EVER:
            weather.calm()
            await audit.settle(self)
            audit.check_quiet(self)
        await self._close()
        await self._join(tasks)
        audit.check_closed(self)
        self._make_lasting(amid=limit is not None)

    async def _client(self, name: int) -> None:
        rng = random.Random(f"client {self.world.plan.seed} {self.number} {name}")
        await self.world.clients.work(self, name, rng, self.plan.calls)

    def _watch_departures(self) -> None:
        """Note which keys leave which tier, and how."""
        history = self.world.history
        for tier in self.engine.tiers:
            depart = tier.ledger.depart

            def noting(entry, how, *, depart=depart, name=tier.name):
                gone = depart(entry, how)
                if gone:
                    self.world.trace.note(f"  - {name} {entry.key[-8:]} {how}")
                    history.departures.append((history.moment(), name, entry.key, how))
                return gone

            tier.ledger.depart = noting

    async def _keep_promises(self) -> None:
        """K3: what the crashed process reported as stored must be there."""
        world = self.world
        if not self.number or any(tier.ttl_seconds is not None for tier in world.plan.tiers):
            return
        persistent = {tier.name for tier in world.plan.tiers if tier.kind != "memory"}
        began = world.history.moment()
        for item in owed(world.history, self.number - 1, persistent):
            found = await world.clients.look(self, item.key)
            gone = {key for moment, _, key, _ in world.history.departures if moment > began}
            if found != item.value and item.key not in gone:  # a smaller capacity may have had it evicted
                world.problem(f"K3: {item.key} had value {item.value} ({item.by}); after the end it is {found}")

    async def _crash(self, tasks) -> None:
        world = self.world
        world.trace.note("--- crash")
        for backend in self.backends:
            backend.kill()
        self.crew.kill()
        current = asyncio.current_task()
        rest = [task for task in asyncio.all_tasks() if task is not current]
        self.world.clients.forget()
        for _ in range(20):
            for task in sorted(rest, key=hash):
                task.cancel()
            await asyncio.wait(rest, timeout=0.001)
            rest = [task for task in rest if not task.done()]
            if not rest:
                break
        else:
            world.problem(f"{len(rest)} tasks do not end when cancelled: {[task.get_name() for task in rest]}")
        world.loop.problems.clear()  # a process that dies may leave errors unheard

    async def _close(self) -> None:
        world = self.world
        self.closing = True
        world.clients.forget()
        gc.collect()
        began = world.loop.time()
        closing = world.loop.create_task(self.engine.aclose(), name="aclose")
        await asyncio.wait([closing])
        took = world.loop.time() - began
        world.trace.note(f"--- closed in {took:.3f}")
        if took > world.plan.close_seconds + CLOSE_SLACK_SECONDS:
            world.problem(f"K7: aclose took {took:.3f} s; close_seconds is {world.plan.close_seconds}")
        if closing.exception() is not None:
            world.problem(f"aclose raised {_lines(closing.exception())}")

    async def _join(self, tasks) -> None:
        """Clients that were at work meanwhile find the store closed and end."""
        _, pending = await asyncio.wait(tasks, timeout=MOST_EPOCH_SECONDS)
        if pending:
            self.world.problem(f"K7: {len(pending)} clients hang after the store was closed")
        for task in tasks:
            error = task.exception() if task.done() else None
            if error is not None:
                self.world.problem(f"client failed: {_lines(error)}")

    def _make_lasting(self, *, amid: bool) -> None:
        """A clean close in fair weather: what was put over or deleted stays so."""
        plan = self.world.plan
        if amid or not plan.weather.fair or any(tier.down_until for tier in plan.tiers):
            return
        for change in self.world.history.changes:
            if change.epoch == self.number and change.took:
                change.lasting = True

    # --- for clients

    async def call(self, label: str, coro, limit: float, cancel_after: float | None):
        """Make one call; hold its end against its deadline. Return (result, exception)."""
        world = self.world
        world.calls += 1
        world.trace.note(f"> {label}")
        began = world.loop.time()
        task = world.loop.create_task(coro, name=label)
        cancels: list[bool] = []

        def cancel() -> None:
            cancels.append(task.cancel())

        timer = world.loop.call_later(cancel_after, cancel) if cancel_after is not None else None
        try:
            await asyncio.wait([task])
        finally:
            if timer is not None:
                timer.cancel()
        took = world.loop.time() - began
        if cancels:
            limit = min(limit, cancel_after)
        elif task.cancelled():
            world.problem(f"{label} raised CancelledError, and nobody had cancelled it")
        if took > limit + SLACK_SECONDS:
            world.problem(f"K7: {label} took {took:.3f} s; it had {limit:.3f} (cancelled: {task.cancelled()})")
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        result = task.result() if error is None else None
        world.trace.note(f"< {label} = {_short(result if error is None else error)}")
        return result, error

    def unexpected(self, label: str, error: BaseException) -> None:
        """Report what no call may raise; a store that closes may refuse."""
        if isinstance(error, asyncio.CancelledError) or (isinstance(error, ClosedError) and self.closing):
            return
        self.world.problem(f"{label} raised {_lines(error)}")


def _lines(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error)) if error is not None else ""


def _short(value: object) -> str:
    if isinstance(value, list | tuple) or (isinstance(value, dict) and value):
        values = value.values() if isinstance(value, dict) else value
        return ", ".join(_short(item) for item in values)[:100]
    return "tensor" if hasattr(value, "shape") else repr(value)[:100]
