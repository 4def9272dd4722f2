"""Threads for blocking calls, made so that no call outlives its caller unnoticed and none blocks the exit."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

from kvtier.concurrency.jobs import Job
from kvtier.errors import BackendTimeoutError, BackendUnavailableError, ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Urgency(Protocol):
    """What tells whether foreground work goes first; it may change its mind once, to False."""

    @property
    def background(self) -> bool:
        """Whether nobody waits for it, now."""

    def tell(self, changed: Callable[[], None]) -> None:
        """Call `changed`, on the loop, when it changes its mind; told the same twice, call it once."""


class _Background:
    background = True

    def tell(self, changed: Callable[[], None]) -> None:
        """Never changes its mind."""


_BACKGROUND = _Background()
_of_task: ContextVar[Urgency | None] = ContextVar("kvtier-urgency", default=None)


def work_for(urgency: Urgency) -> None:
    """Have the jobs of the running task, in whatever workers, be of this urgency from now on."""
    _of_task.set(urgency)


class Workers:
    """Daemon threads of one owner: at most `size` of them busy, started when needed, fed in the order jobs came.

    Background jobs wait behind all others and keep at most `most_background` threads busy, as a rule half of them.
    One whose urgency changes while it waits is taken before the others, at once if a thread is idle.

    A job that runs longer than `job_seconds` is *abandoned*: counted, `on_abandoned` is told (on the loop), and a
    replacement thread may start, up to twice `size` threads in all. Its caller goes on waiting, because the job may
    still touch the caller's memory. With every thread stuck, `run` raises at once until a job comes back.
    """

    loop_bytes = 64 << 10  # hashed or copied in some 10 us: the loop does it sooner than it asks and hears a thread

    def __init__(
        self,
        name: str,
        size: int,
        *,
        most_background: int | None = None,
        job_seconds: float | None = None,
        on_abandoned: Callable[[], None] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size={size}: workers need at least one thread")
        self.name = name
        self.size = size
        self._most_background = max(1, size // 2 if most_background is None else most_background)
        self._job_seconds = job_seconds
        self._on_abandoned = on_abandoned
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Job] = deque()
        self._later: deque[Job] = deque()  # background jobs
        self._running: set[Job] = set()
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count()
        self._idle = 0
        self._abandoned = 0
        self._closed = False
        self._on_gone: list[Callable[[], object]] = []

    @property
    def busy(self) -> int:
        """Jobs that run now, abandoned ones left out."""
        return len(self._running) - self._abandoned

    @property
    def abandoned(self) -> int:
        """Jobs past `job_seconds` that have not come back."""
        return self._abandoned

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._queue) + len(self._later)

    async def run(self, func: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call `func(*args)` in a thread; return its result or raise its exception. Its class is the task's own.

        Returns only when the job has really ended. Cancelled while the job is queued: it never starts, and
        `CancelledError` comes at once. Cancelled while it runs: waits for its end, then raises `CancelledError`.

        Raises:
            ClosedError: after `aclose`.
            BackendTimeoutError: every thread is stuck, or `aclose` gave up on this job.
            BackendUnavailableError: the system refuses to start a thread.
        """
        return await self._run(func, args, _of_task.get())

    async def run_background(self, func: Callable[[*Ts], T], *args: *Ts) -> T:
        """As `run`, for work that nobody waits for."""
        return await self._run(func, args, _BACKGROUND)

    async def _run(self, func: Callable[[*Ts], T], args: tuple[*Ts], urgency: Urgency | None) -> T:
        results: list[T] = []

        def call() -> None:
            results.append(func(*args))

        job = Job(call, asyncio.get_running_loop(), urgency)
        del call
        if urgency is not None and urgency.background:
            urgency.tell(self._look_again)
        self._submit(job)
        if self._job_seconds is not None:
            job.timer = job.loop.call_later(self._job_seconds, self._check, job, self._job_seconds)
        try:
            await self._end_of(job)
            if job.error is not None:
                raise job.error
            return results.pop()
        finally:
            if job.timer is not None:
                job.timer.cancel()
            job.error = job.timer = None  # an exception's traceback leads here: leave no cycle behind

    async def aclose(self, timeout: float) -> bool:
        """Refuse new jobs, let the others end for at most `timeout` seconds; tell whether every thread has ended.

        Callers of jobs that have not ended by then get `BackendTimeoutError`, also those whose job still runs and may
        touch its memory until the process ends: after False, memory given to a job must be leaked, not reused.
        """
        loop = asyncio.get_running_loop()
        gone = loop.create_future()

        def report() -> None:
            if not gone.done():
                gone.set_result(None)

        with self._lock:
            self._closed = True
            self._on_gone.append(lambda: loop.call_soon_threadsafe(report))
            threads = list(self._threads)
            self._changed.notify_all()
        try:
            if threads:
                await asyncio.wait([gone], timeout=timeout)
        finally:
            self._fail_rest()
        for thread in threads:
            if thread not in self._threads:
                thread.join(1.0)  # it has left its loop: this takes microseconds
        return not self._threads

    def _submit(self, job: Job) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"workers {self.name!r} are closed")
            if self._abandoned >= 2 * self.size:
                raise BackendTimeoutError(f"all {self._abandoned} threads of {self.name!r} are stuck")
            (self._later if job.background else self._queue).append(job)
            self._changed.notify()
        refused = self._start_threads()
        if refused is not None and not self._threads and self._withdraw(job):
            raise BackendUnavailableError(f"cannot start a thread for {self.name!r}: {refused}") from refused

    def _look_again(self) -> None:
        """A background job that waits may have become one that begins now."""
        with self._lock:
            self._changed.notify_all()
        self._start_threads()

    def _start_threads(self) -> RuntimeError | None:
        """Start as many threads as the queue wants and the limit allows; return the system's refusal, if any."""
        while True:
            with self._lock:
                most = min(2 * self.size, self.size + self._abandoned)
                if self._takeable() <= self._idle or len(self._threads) >= most:
                    return None
                name = f"kvtier-{self.name}-{next(self._numbers)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.add(thread)
                self._idle += 1  # as good as idle: it will come for a job
            try:
                thread.start()
            except RuntimeError as exc:
                with self._lock:
                    self._threads.discard(thread)
                    self._idle -= 1
                return exc

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            self._finish(job)
            del job  # the thread keeps no arguments and no result alive while it waits

    def _next(self) -> Job | None:
        """Wait for a job and take it; None when this thread is to end. The thread counts as idle on entry."""
        with self._lock:
            while not self._takeable() or self._surplus():
                if self._closed or self._surplus():
                    self._leave()
                    return None
                self._changed.wait()
            job = self._queue.popleft() if self._queue else self._pop_later()
            self._idle -= 1
            self._running.add(job)
            job.started = job.loop.time()
            return job

    def _takeable(self) -> int:
        """Return how many waiting jobs may begin now, were there threads for all; the caller holds the lock."""
        if not self._later:
            return len(self._queue)
        busy = sum(job.background and not job.abandoned for job in self._running)
        urgent = sum(not job.background for job in self._later)
        return len(self._queue) + urgent + max(0, min(len(self._later) - urgent, self._most_background - busy))

    def _pop_later(self) -> Job:
        """Take the first background job that is none any more, else the first; the caller holds the lock."""
        for i, job in enumerate(self._later):
            if not job.background:
                del self._later[i]
                return job
        return self._later.popleft()

    def _surplus(self) -> bool:
        """True when an abandoned job came back and its replacement thread is there too."""
        return len(self._threads) > self.size + self._abandoned

    def _leave(self) -> None:
        self._idle -= 1
        self._threads.discard(threading.current_thread())
        if self._threads:
            return
        for report in self._on_gone:
            try:
                report()
            except RuntimeError:  # its loop is closed: nobody waits
                continue

    def _finish(self, job: Job) -> None:
        with self._lock:
            self._running.discard(job)
            self._idle += 1
            if job.abandoned:
                self._abandoned -= 1
            job.ended = True
        job.wake()

    async def _end_of(self, job: Job) -> None:
        cancelled: asyncio.CancelledError | None = None
        try:
            while not job.ended:
                try:
                    await job.wait_woken()
                except asyncio.CancelledError as exc:
                    if self._withdraw(job):
                        raise
                    cancelled = exc  # the job runs: its memory is ours until it ends
                except GeneratorExit:  # the loop is gone
                    self._withdraw(job)
                    raise
            if cancelled is not None:
                raise cancelled
        finally:
            cancelled = None

    def _withdraw(self, job: Job) -> bool:
        """Take a job back out of the queue; tell whether that worked: False once a thread has it."""
        with self._lock:
            for queue in (self._queue, self._later):
                if job in queue:
                    queue.remove(job)
                    return True
        return False

    def _check(self, job: Job, limit: float) -> None:
        """Abandon the job if it has run for `limit` seconds, else look again when it may have."""
        started = job.started
        left = limit if started is None else started + limit - job.loop.time()
        if left > 0 and not job.ended:
            job.timer = job.loop.call_later(left, self._check, job, limit)
            return
        with self._lock:
            if job not in self._running or job.abandoned:
                return
            job.abandoned = True
            self._abandoned += 1
            stuck = self._abandoned >= 2 * self.size
            self._changed.notify_all()  # a background job that it held up may begin now
        if stuck:
            self._fail_queued(f"all threads of {self.name!r} are stuck")
        else:
            self._start_threads()
        if self._on_abandoned is not None:
            self._on_abandoned()

    def _fail_queued(self, reason: str) -> None:
        with self._lock:
            jobs = [*self._queue, *self._later]
            self._queue.clear()
            self._later.clear()
        for job in jobs:
            self._fail(job, reason)

    def _fail_rest(self) -> None:
        """At close: end the waits for jobs that never started and for those that do not come back."""
        self._fail_queued(f"workers {self.name!r} were closed before the job began")
        with self._lock:
            jobs = list(self._running)
        for job in jobs:
            self._fail(job, f"workers {self.name!r} were closed while the job ran on")

    def _fail(self, job: Job, reason: str) -> None:
        job.error = BackendTimeoutError(reason)
        job.ended = True
        job.wake()
