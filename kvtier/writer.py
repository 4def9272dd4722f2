"""The bounded queue in front of one stored tier: values on their way down, written in the background."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.tier.writing import STORED, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.concurrency.generations import Claim, Generations
    from kvtier.tier.stored import StoredTier
    from kvtier.tier.value import Value


@dataclass(slots=True, eq=False)
class WriteJob:
    """One value to write: the queue holds a reference to it, and a claim until the tier takes that over."""

    value: Value
    claim: Claim
    expires: float | None
    priority: int
    demotion: bool
    promotion: bool
    outcome: asyncio.Future[str]
    begun: bool = False


class Writer:
    """Accepts values while they fit, writes `settings.writers` of them at a time, tells each one's outcome.

    A value of a key that is queued already replaces the queued one. One that is larger than the whole queue is
    accepted alone. There is no permanent task to die: runners start with the first job and end with the last.
    """

    def __init__(self, tier: StoredTier, generations: Generations) -> None:
        self.tier = tier
        self._generations = generations
        self._queue: deque[WriteJob] = deque()
        self._by_key: dict[str, WriteJob] = {}
        self._pending: set[asyncio.Future[str]] = set()
        self._runners = 0
        self._room = asyncio.Event()
        self.queued_bytes: int = 0
        self.last_error: str = ""

    @property
    def pending(self) -> int:
        """Values accepted whose outcome is not known yet."""
        return len(self._pending)

    def has(self, key: str) -> bool:
        """Tell whether a value of `key` waits here or is being written."""
        return key in self._by_key

    def waiting(self, key: str) -> Value | None:
        """Return the value of `key` that waits here or is being written: it can be read from memory meanwhile."""
        job = self._by_key.get(key)
        return job.value if job is not None else None

    def outcome_of(self, key: str) -> asyncio.Future[str] | None:
        """Return the outcome to come of the value of `key` that is on its way."""
        job = self._by_key.get(key)
        return job.outcome if job is not None else None

    def on_their_way(self) -> Sequence[str]:
        """Return the keys on their way."""
        return list(self._by_key)

    def forget(self, key: str) -> None:
        """Give up what is on its way for `key`: it was deleted or put anew. What is being written undoes itself."""
        job = self._by_key.pop(key, None)
        if job is not None and not job.begun:
            job.claim.end()
            self._finish(job, "superseded")

    def forget_under(self, prefix: str) -> None:
        """Do the same for every key under `prefix`."""
        for key in [key for key in self._by_key if key.startswith(prefix)]:
            self.forget(key)

    def offer(
        self,
        value: Value,
        *,
        expires: float | None = None,
        priority: int = 0,
        demotion: bool = False,
        promotion: bool = False,
    ) -> asyncio.Future[str] | None:
        """Queue a value, with a reference of its own; None (counted) if the queue is full or the tier is down."""
        reason = self._refusal(value)
        if reason is not None:
            self._drop(value, reason)
            return None
        if self._runners < self.tier.settings.writers:
            self.tier.services.supervisor.start(self._run(), name=f"{self.tier.name} writer")
            self._runners += 1
        self.forget(value.key)
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        job = WriteJob(
            value.retain(), self._generations.claim(value.key), expires, priority, demotion, promotion, outcome
        )
        self._queue.append(job)
        self._by_key[value.key] = job
        self._pending.add(outcome)
        self.queued_bytes += value.size
        return outcome

    def _refusal(self, value: Value) -> str | None:
        if not self.tier.up:
            return "down"
        full = self.queued_bytes + value.size > self.tier.settings.write_queue_bytes
        return "queue-full" if full and self.queued_bytes else None

    async def room_for(self, size: int, *, timeout: float) -> bool:
        """Wait until a value of `size` bytes would be accepted; False after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout
        while self.queued_bytes and self.queued_bytes + size > self.tier.settings.write_queue_bytes:
            self._room.clear()
            try:
                async with asyncio.timeout_at(ends):
                    await self._room.wait()
            except TimeoutError:
                return False
        return True

    async def _run(self) -> None:
        try:
            while self._queue:
                job = self._queue.popleft()
                if not job.outcome.done():  # a forgotten job stays in the queue, finished
                    await self._write(job)
        finally:
            self._runners -= 1

    async def _write(self, job: WriteJob) -> None:
        job.begun = True
        outcome = "error"
        try:
            outcome = await write(self.tier, job.value, job.claim, expires=job.expires, priority=job.priority)
        finally:
            self._count(job, outcome)
            self._finish(job, outcome)

    def _count(self, job: WriteJob, outcome: str) -> None:
        counters = self.tier.ledger.counters
        if outcome == STORED:
            counters.demoted += job.demotion
            counters.promoted += job.promotion
        else:
            self.last_error = self.tier.breaker.last_error or outcome
            self._drop(job.value, outcome)

    def _drop(self, value: Value, reason: str) -> None:
        self.tier.ledger.counters.dropped[reason] += 1
        if reason != "superseded":
            self.tier.services.events.emit(
                "dropped", tier=self.tier.name, key=value.key, size=value.size, reason=reason
            )

    def _finish(self, job: WriteJob, outcome: str) -> None:
        job.outcome.set_result(outcome)
        self._pending.discard(job.outcome)
        if self._by_key.get(job.value.key) is job:
            del self._by_key[job.value.key]
        self.queued_bytes -= job.value.size
        job.value.release()
        self._room.set()

    async def drain(self, *, timeout: float) -> bool:
        """Wait until everything accepted so far has an outcome; False after `timeout` seconds."""
        waiting = set(self._pending)
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
        return all(outcome.done() for outcome in waiting)

    def abandon(self, reason: str) -> int:
        """Give up what is queued and not begun; tell how many."""
        given_up = 0
        while self._queue:
            job = self._queue.popleft()
            if not job.outcome.done():
                self._drop(job.value, reason)
                job.claim.end()
                self._finish(job, reason)
                given_up += 1
        return given_up
