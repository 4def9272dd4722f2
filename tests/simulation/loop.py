"""An event loop whose order and time come from a seed: ready callbacks are shuffled, the clock jumps to a timer."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import random

WALL_AT_START = 1_700_000_000.0
ITERATION_SECONDS = 1e-6  # what one turn of the loop takes: time never stands still
MOST_ITERATIONS = 400_000  # a scenario takes some thousands


class StuckError(Exception):
    """Nothing can ever run again, or the loop spins."""


class _Numbered:
    """A deterministic hash, so that sets of tasks and futures have the same order in every run."""

    def __init__(self, *args, number, **kwargs):
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self):
        return self._number


class SimulatedTask(_Numbered, asyncio.Task):
    pass


class SimulatedFuture(_Numbered, asyncio.Future):
    pass


class SimulationLoop(asyncio.SelectorEventLoop):
    """Runs what is ready in a seeded order; when nothing is, jumps to the next timer. Never waits, never polls."""

    def __init__(self, seed: int) -> None:
        self._now = 0.0
        super().__init__()
        self._order = random.Random(f"order {seed}")
        self._numbers = itertools.count()
        self.iterations = 0
        self.problems: list[str] = []  # what asyncio reports when nobody else can be told
        self.set_task_factory(
            lambda loop, coro, **kwargs: SimulatedTask(coro, loop=loop, number=self._next(), **kwargs)
        )
        self.set_exception_handler(self._note)

    def _next(self) -> int:
        return next(self._numbers)

    def _note(self, loop, context) -> None:
        self.problems.append(f"{context['message']}: {context.get('exception')!r}")

    def create_future(self):
        return SimulatedFuture(loop=self, number=self._next())

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            self._unschedule()
        if not self._ready and not self._stopping:
            if not self._scheduled:
                raise StuckError("every task waits for something that nobody will do")
            self._now = max(self._now, self._scheduled[0]._when)
        self._now += ITERATION_SECONDS
        self.iterations += 1
        if self.iterations > MOST_ITERATIONS:
            raise StuckError(f"{self.iterations} turns of the loop: something spins")
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0]._when <= self._now):
            handle = self._unschedule()
            if not handle._cancelled:
                self._ready.append(handle)
        batch = list(self._ready)
        self._ready.clear()
        self._order.shuffle(batch)
        for handle in batch:
            if not handle._cancelled:
                handle._run()

    def _unschedule(self):
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False
        self._timer_cancelled_count -= handle._cancelled
        return handle


class VirtualClock:
    """`kvtier.concurrency.Clock` on the loop's time."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return WALL_AT_START + self._loop.time()


class Trace:
    """What happened, in order: lines for people, and a hash that tells two runs apart."""

    def __init__(self, loop: SimulationLoop, *, keep: bool) -> None:
        self._loop = loop
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self._hash.update(f"{self._loop.iterations} {self._loop.time():.9f} {text}\n".encode())
        if self._keep:
            self.lines.append(f"{self._loop.time():12.6f}  {text}")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def run(seed: int, main, *, keep_trace: bool = False):
    """Run `main(loop, trace)` in a fresh loop; return its result."""
    loop = SimulationLoop(seed)
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main(loop, Trace(loop, keep=keep_trace)))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
