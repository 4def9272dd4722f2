"""Bulk bytes over the wire: each job is one thread on one connection, a long value is several jobs at once."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvtier.backends.batches import answer_each
from kvtier.backends.redis_faults import listed
from kvtier.backends.redis_lanes import Fetching, Publication, Publishing, Wanted, run_script
from kvtier.backends.redis_members import Members
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.backends.redis_address import Endpoint
    from kvtier.backends.redis_control import Control
    from kvtier.backends.redis_layout import Keys, Shape
    from kvtier.backends.redis_members import Stretch
    from kvtier.backends.redis_pool import Wires
    from kvtier.backends.redis_scripts import Script
    from kvtier.backends.redis_wire import Wire
    from kvtier.concurrency.workers import Workers

    T = TypeVar("T")

LANE_BYTES: Final = 256 << 10  # less than this per connection is not worth another thread
CORES: Final[int] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# One connection fills the gaps of another; more threads than cores only take the interpreter from each other.
LANES: Final = max(2, CORES)


class Path(Protocol):
    """How bulk bytes move. Everything raises `BackendError`."""

    async def fetch(self, name: str, wanted: Wanted, deadline: float) -> tuple[Shape | None, bool]:
        """Fill what `wanted` asks for; return the entry's shape, `None` if there is none, and whether all was there.

        Where it does not fit, or was not all there, nothing is promised about the views. Raises `SpoiltError` for what
        is no head of ours.
        """

    async def publish(self, publication: Publication, deadline: float) -> list[int]:
        """Bring a value's parts to the server, then run `COMMIT`; return its reply.

        Parts that no `COMMIT` follows vanish there by themselves.
        """

    async def run(self, bucket: int, script: Script, words: Sequence[str]) -> object:
        """Run a script whose reply is long."""

    async def members(self, bucket: int, stretch: Stretch, read: Callable[[Members], T]) -> tuple[list[T], str | None]:
        """Return what `read` makes of each page of a bucket's index, and where the next stretch begins, if one does.

        `read` may run in a thread; what it raises is raised.
        """


class WirePath:
    """The path over blocking sockets, in the tier's threads."""

    def __init__(self, control: Control, wires: Wires, keys: Keys, workers: Workers, *, seconds: float) -> None:
        self._control = control
        self._wires = wires
        self._keys = keys
        self._workers = workers
        self._seconds = seconds
        # Over all values: of more connections that push at once, a server on few cores has buffers and page faults.
        self._turns: asyncio.Semaphore = asyncio.Semaphore(LANES)

    async def fetch(self, name: str, wanted: Wanted, deadline: float) -> tuple[Shape | None, bool]:
        """See `Path`; the lane that brings the head goes on, and others join it."""
        fetching = Fetching(name, wanted, self._keys)
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        async def first() -> None:
            try:
                begin = partial(fetching.begin, lambda: loop.call_soon_threadsafe(begun.set))
                await self._on_wire(name, deadline, begin)
            finally:
                begun.set()

        async def others() -> None:
            await begun.wait()
            sizes = [piece.size for piece in [*fetching.left]]
            await self._all(name, deadline, [fetching.run] * (self._lanes(len(sizes) + 1, sum(sizes)) - 1))

        for answer in await answer_each(lambda lane: lane(), (first, others)):
            if isinstance(answer, BackendError):
                raise answer
        return fetching.shape, fetching.whole

    async def publish(self, publication: Publication, deadline: float) -> list[int]:
        """See `Path`; the lane that ends last publishes, on its own connection."""
        name, shape = publication.name, publication.shape
        lanes = self._lanes(shape.parts, shape.size - shape.head)
        publishing = Publishing(publication, self._keys, lanes)
        turns = self._turns if shape.parts else None
        replies = await self._all(name, deadline, [partial(publishing.run, lane) for lane in range(lanes)], turns)
        (reply,) = [reply for reply in replies if reply is not None]
        return [int(number) for number in listed(reply, 2)]

    async def run(self, bucket: int, script: Script, words: Sequence[str]) -> object:
        """See `Path`."""
        command = [self._keys.counters[bucket].encode(), *(word.encode() for word in words)]
        return await self._on_bucket(bucket, deadline_in(self._seconds), partial(run_script, script, command))

    async def members(self, bucket: int, stretch: Stretch, read: Callable[[Members], T]) -> tuple[list[T], str | None]:
        """See `Path`; the frames of the reply are left between its members."""
        job = partial(_members, self._keys.index(bucket).encode(), stretch, read)
        return await self._on_bucket(bucket, deadline_in(self._seconds), job)

    def _lanes(self, pieces: int, total: int) -> int:
        return max(1, min(pieces, self._workers.size, LANES, total // LANE_BYTES))

    async def _all(
        self, name: str, deadline: float, jobs: Sequence[Callable[[Wire], T]], turns: asyncio.Semaphore | None = None
    ) -> list[T]:
        """Run the jobs at once, or each in its turn; raise the first failure when all have ended."""

        async def run(job: Callable[[Wire], T]) -> T:
            async with turns or nullcontext():
                return await self._on_wire(name, deadline, job)

        answers = []
        for answer in await answer_each(run, jobs):
            if isinstance(answer, BackendError):
                raise answer
            answers.append(answer)
        return answers

    async def _on_wire(self, name: str, deadline: float, job: Callable[[Wire], T]) -> T:
        return await self._on_bucket(self._keys.bucket(name), deadline, job)

    async def _on_bucket(self, bucket: int, deadline: float, job: Callable[[Wire], T]) -> T:
        async def work(endpoint: Endpoint, asking: bool) -> T:  # noqa: FBT001  # the shape of `routed`
            return await self._workers.run(self._run, endpoint, deadline, asking, job)

        return await self._control.routed(bucket, work)

    def _run(self, endpoint: Endpoint, deadline: float, asking: bool, job: Callable[[Wire], T]) -> T:  # noqa: FBT001  # passed through `Workers.run`
        with self._wires.lend(endpoint, deadline, asking=asking) as wire:
            return job(wire)


def deadline_in(seconds: float) -> float:
    """Return the moment in `seconds` from now, as the wire counts time."""
    return time.monotonic() + seconds


def _members(index: bytes, stretch: Stretch, read: Callable[[Members], T], wire: Wire) -> tuple[list[T], str | None]:
    """Read pages; while this thread takes one apart the server looks up the next, so that none waits for the other.

    Another thread would only take the interpreter from this one: a server needs a tenth of the time that it takes here.
    """

    def ask(least: str) -> None:
        wire.send(b"TIME")
        wire.send(b"ZRANGEBYLEX", index, least.encode(), stretch.most.encode(), b"LIMIT", b"0", b"%d" % stretch.limit)
        wire.send(b"PING")

    found: list[T] = []
    ask(stretch.least)
    while True:
        seconds, micros = listed(wire.reply(), 2)
        count, text = wire.words()
        page = Members(count, text, int(seconds) * 1000 + int(micros) // 1000, spare=1)
        at_end = count < stretch.limit
        pause = at_end or len(found) + 1 == stretch.pages
        if not pause:
            ask(page.behind)
        found.append(read(page))
        if pause:
            return found, None if at_end else page.behind
