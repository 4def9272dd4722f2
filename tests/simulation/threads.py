"""Threads without threads: `Workers` whose jobs run inline, at some moment of a seeded span of virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kvtier.errors import BackendTimeoutError, ClosedError

if TYPE_CHECKING:
    import random

WHEN = (0.0, 0.5, 1.0)  # where in its span a job does its work: its memory must be there from start to end


class _Job:
    def __init__(self, call, loop, seconds, when):
        self.call = call
        self.future = loop.create_future()
        self.seconds = seconds
        self.when = when
        self.result = None
        self.error = None
        self.running = self.abandoned = self.ended = False
        self.timers = []


class SimulatedWorkers:
    """As `kvtier.concurrency.Workers`: FIFO, cancelled while queued never runs, cancelled while running waits.

    `draw` gives each job's (virtual) seconds. A job does its work at the start, in the middle or at the end of its
    span; either way its caller hears of it at the end only, like the caller of a thread.
    """

    def __init__(self, name, size, *, most_background=None, job_seconds=None, on_abandoned=None, rng, draw) -> None:
        if size < 1:
            raise ValueError(f"size={size}: workers need at least one thread")
        self.name = name
        self.size = size
        self.loop_bytes = rng.choice((0, 0, 1 << 20))
        self._job_seconds = job_seconds
        self._on_abandoned = on_abandoned
        self._rng = rng
        self._draw = draw
        self._queue: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._closed = self._dead = False
        self._gone: list[asyncio.Future[None]] = []

    @property
    def busy(self) -> int:
        return len(self._running) - self.abandoned

    @property
    def abandoned(self) -> int:
        return sum(job.abandoned for job in self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def run(self, func, *args):
        return await self._run(self._draw(), func, *args)

    async def run_background(self, func, *args):
        return await self.run(func, *args)

    async def run_for(self, seconds, func):
        """Run a job that takes so long."""
        return await self._run(seconds, func)

    async def _run(self, seconds, func, *args):
        if self._closed:
            raise ClosedError(f"workers {self.name!r} are closed")
        if self.abandoned >= 2 * self.size:
            raise BackendTimeoutError(f"all {self.abandoned} threads of {self.name!r} are stuck")
        job = _Job(lambda: func(*args), asyncio.get_running_loop(), self._draw(), self._rng.choice(WHEN))
        self._queue.append(job)
        self._start_jobs()
        cancelled = None
        while not job.ended:
            try:
                await job.future
            except asyncio.CancelledError as exc:
                if not job.running and not job.ended:
                    self._queue.remove(job)
                    raise
                cancelled = exc
                if job.future.cancelled():
                    job.future = asyncio.get_running_loop().create_future()
        if cancelled is not None:
            raise cancelled
        if job.error is not None:
            raise job.error
        return job.result

    async def aclose(self, timeout: float) -> bool:
        self._closed = True
        if self._running or self._queue:
            gone = asyncio.get_running_loop().create_future()
            self._gone.append(gone)
            try:
                await asyncio.wait([gone], timeout=timeout)
            finally:
                self._fail(list(self._queue), "closed before the job began")
                self._queue.clear()
                self._fail(list(self._running), "closed while the job ran on")
        return not self._running

    def kill(self) -> None:
        """Crash: nothing runs any more, and who waits is told nothing but to go."""
        self._closed = self._dead = True
        for job in [*self._queue, *self._running]:
            for timer in job.timers:
                timer.cancel()
        self._fail([*self._queue, *self._running], "crashed")
        self._queue.clear()
        self._running.clear()

    def _start_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue and len(self._running) < min(2 * self.size, self.size + self.abandoned):
            job = self._queue.popleft()
            job.running = True
            self._running.add(job)
            if job.when == 0.0:
                self._work(job)
            else:
                job.timers.append(loop.call_later(job.seconds * job.when, self._work, job))
            job.timers.append(loop.call_later(job.seconds * 1.000001, self._finish, job))
            if self._job_seconds is not None and job.seconds > self._job_seconds:
                job.timers.append(loop.call_later(self._job_seconds, self._abandon, job))

    def _work(self, job) -> None:
        try:
            job.result = job.call()
        except BaseException as exc:  # it belongs to the caller
            job.error = job.error or exc
        job.call = None

    def _finish(self, job) -> None:
        self._running.discard(job)
        self._end(job)
        self._start_jobs()
        if not self._running and not self._queue:
            for gone in self._gone:
                if not gone.done():
                    gone.set_result(None)

    def _abandon(self, job) -> None:
        if job not in self._running:
            return
        job.abandoned = True
        if self.abandoned >= 2 * self.size:
            stuck = list(self._queue)
            self._queue.clear()
            self._fail(stuck, f"all threads of {self.name!r} are stuck")
        else:
            self._start_jobs()
        if self._on_abandoned is not None:
            self._on_abandoned()

    def _fail(self, jobs, reason: str) -> None:
        for job in jobs:
            job.error = BackendTimeoutError(f"workers {self.name!r}: {reason}")
            self._end(job)

    def _end(self, job) -> None:
        job.ended = True
        if not job.future.done():
            job.future.set_result(None)


class Crew:
    """Makes the workers of one process; `kill` ends them all at once."""

    def __init__(self, rng: random.Random, *, copy_seconds: float) -> None:
        self._rng = rng
        self._copy_seconds = copy_seconds
        self.made: list[SimulatedWorkers] = []

    def make(self, name, size, **options) -> SimulatedWorkers:
        workers = SimulatedWorkers(name, size, rng=self._rng, draw=self._draw, **options)
        self.made.append(workers)
        return workers

    def _draw(self) -> float:
        return self._rng.random() * self._copy_seconds

    @property
    def running(self) -> int:
        return sum(len(workers._running) for workers in self.made)

    def kill(self) -> None:
        for workers in self.made:
            workers.kill()
