"""Bulk bytes over the wire: each job is one thread on one connection, a long value is several jobs at once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvtier.backends.batches import answer_each
from kvtier.backends.redis_faults import ReplyError, listed, spoilt
from kvtier.backends.redis_layout import ENVELOPE_BYTES, WHOLE_BYTES, Keys, Shape, open_envelope, window
from kvtier.backends.redis_members import Members
from kvtier.backends.redis_scripts import COMMIT, UPLOAD_MILLISECONDS
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.backends.redis_address import Endpoint
    from kvtier.backends.redis_control import Control
    from kvtier.backends.redis_members import Stretch
    from kvtier.backends.redis_pool import Wires
    from kvtier.backends.redis_scripts import Script
    from kvtier.backends.redis_wire import Reply, Wire
    from kvtier.concurrency.workers import Workers

    T = TypeVar("T")

LANE_BYTES: Final = 256 << 10  # less than this per connection is not worth another thread
CORES: Final[int] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# One connection fills the gaps of another; more threads than cores only take the interpreter from each other.
LANES: Final = max(2, CORES)

_UPLOAD_WORD = b"%d" % UPLOAD_MILLISECONDS


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of one part, and the memory they come from or go to."""

    number: int
    start: int
    stop: int
    whole: bool
    views: Sequence[memoryview]

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a read asks for: `room` bytes from `offset` on, or less where the value ends."""

    views: Sequence[memoryview]
    offset: int
    room: int
    partial: bool

    def fits(self, shape: Shape) -> bool:
        """Tell whether a value of this shape may be read."""
        return self.partial or shape.size - self.offset <= self.room

    def stop(self, shape: Shape) -> int:
        """Return where in the value the read ends."""
        return max(self.offset, min(shape.size, self.offset + self.room))

    def pieces(self, shape: Shape) -> list[Piece]:
        """Return what is wanted of each part."""
        found, stop = [], self.stop(shape)
        for number in range(1, shape.parts + 1):
            first, last = shape.span(number)
            start, end = max(first, self.offset), min(last, stop)
            if start < end:
                views = window(self.views, start - self.offset, end - self.offset)
                found.append(Piece(number, start - first, end - first, (start, end) == (first, last), views))
        return found


@dataclass(slots=True)
class Publication:
    """A value on its way to the server.

    Attributes:
        name: of the entry.
        shape: how the value is cut.
        views: the value.
        words: what `COMMIT` is told behind the part size.
        asked: whether `COMMIT` was sent: what fails from then on may have happened all the same.
    """

    name: str
    shape: Shape
    views: Sequence[memoryview]
    words: Sequence[str]
    asked: bool = False


class Path(Protocol):
    """How bulk bytes move. Everything raises `BackendError`."""

    async def fetch_head(self, name: str, wanted: Wanted, deadline: float) -> Shape | None:
        """Return the shape of an entry, having filled what its head holds of `wanted`; `None` if there is none.

        Where it does not fit nothing is promised about the views. Raises `SpoiltError` for what is no head of ours.
        """

    async def fetch_parts(self, name: str, shape: Shape, pieces: Sequence[Piece], deadline: float) -> bool:
        """Fill the pieces; tell whether every one was there."""

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

    async def fetch_head(self, name: str, wanted: Wanted, deadline: float) -> Shape | None:
        """See `Path`."""
        return await self._on_wire(name, deadline, partial(_fetch_head, self._keys.head(name).encode(), wanted))

    async def fetch_parts(self, name: str, shape: Shape, pieces: Sequence[Piece], deadline: float) -> bool:
        """See `Path`."""
        keys = {piece.number: self._keys.part(name, shape, piece.number).encode() for piece in pieces}
        jobs = [partial(_fetch_lane, keys, lane) for lane in self._lanes(pieces)]
        return all(await self._all(name, deadline, jobs))

    async def publish(self, publication: Publication, deadline: float) -> list[int]:
        """See `Path`; the lane that ends last publishes, on its own connection."""
        name, shape = publication.name, publication.shape
        lanes = self._lanes(Wanted(publication.views, 0, shape.size, partial=False).pieces(shape))
        publishing = Publishing(publication, self._keys, lanes)
        turns = self._turns if shape.parts else None
        replies = await self._all(name, deadline, [partial(publishing.run, n) for n in range(len(lanes))], turns)
        (reply,) = [reply for reply in replies if reply is not None]
        return [int(number) for number in listed(reply, 2)]

    async def run(self, bucket: int, script: Script, words: Sequence[str]) -> object:
        """See `Path`."""
        command = [self._keys.counters[bucket].encode(), *(word.encode() for word in words)]
        return await self._on_bucket(bucket, deadline_in(self._seconds), partial(_script, script, command))

    async def members(self, bucket: int, stretch: Stretch, read: Callable[[Members], T]) -> tuple[list[T], str | None]:
        """See `Path`; the frames of the reply are left between its members."""
        job = partial(_members, self._keys.index(bucket).encode(), stretch, read)
        return await self._on_bucket(bucket, deadline_in(self._seconds), job)

    def _lanes(self, pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
        total = sum(piece.size for piece in pieces)
        count = max(1, min(len(pieces), self._workers.size, LANES, total // LANE_BYTES))
        return [pieces[lane::count] for lane in range(count)]

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


class Publishing:
    """The lanes of one value: each brings its parts, and whichever ends last sends `COMMIT` behind them.

    It costs no way over the loop to another thread, and no other connection has to be awake.
    """

    def __init__(self, publication: Publication, keys: Keys, lanes: Sequence[Sequence[Piece]]) -> None:
        name, shape = publication.name, publication.shape
        self._publication = publication
        self._uploads = [
            [(b"SET", keys.part(name, shape, each.number).encode(), each.views, b"PX", _UPLOAD_WORD) for each in lane]
            for lane in lanes
        ]
        head = [memoryview(shape.envelope()), *window(publication.views, 0, shape.head)]
        front = (shape.size, shape.token, shape.head, shape.part, *publication.words)
        counter = keys.counters[keys.bucket(name)].encode()
        words: list[bytes | Sequence[memoryview]] = [str(word).encode() for word in front]
        self._command = [counter, name.encode(), head, *words]
        self._lock = threading.Lock()
        self._brought: set[int] = set()
        self._last: int | None = None  # who publishes

    def run(self, lane: int, wire: Wire) -> Reply:
        """Do one lane, in a thread; return the reply of `COMMIT` if it was the last.

        Called again, because somebody else serves the bucket now, it brings nothing twice: a part that is published
        already would begin to expire.
        """
        if lane not in self._brought and self._uploads[lane]:
            wire.command_each(self._uploads[lane])
        with self._lock:
            self._brought.add(lane)
            if self._last is None and len(self._brought) == len(self._uploads):
                self._last = lane
                self._publication.asked = True
        return _script(COMMIT, self._command, wire) if self._last == lane else None


def deadline_in(seconds: float) -> float:
    """Return the moment in `seconds` from now, as the wire counts time."""
    return time.monotonic() + seconds


def _fetch_head(key: bytes, wanted: Wanted, wire: Wire) -> Shape | None:
    bare = wanted.offset >= WHOLE_BYTES  # no head reaches that far
    if bare:
        wire.send(b"GETRANGE", key, b"0", b"%d" % (ENVELOPE_BYTES - 1))
    else:
        wire.send(b"GET", key)
    size = wire.bulk_size()
    if size is None:
        return None
    front = bytearray(min(size, ENVELOPE_BYTES))
    wire.fill(memoryview(front))
    shape = open_envelope(bytes(front))
    rest = size - len(front)
    if shape is not None and not bare and rest != shape.head:
        shape = None
    if shape is not None and rest and wanted.fits(shape):
        skipped, stop = min(wanted.offset, shape.head), min(wanted.stop(shape), shape.head)
        wire.skip(skipped)
        for view in window(wanted.views, 0, stop - skipped):
            wire.fill(view)
        rest -= max(stop, skipped)
    wire.skip(rest)
    wire.end_bulk()
    if shape is None:
        raise spoilt(key.decode())
    return shape


def _fetch_lane(keys: dict[int, bytes], lane: Sequence[Piece], wire: Wire) -> bool:
    complete = True
    for piece in lane:  # one at a time: a server makes a copy of each reply, and those it is asked for pile up there
        if piece.whole:
            wire.send(b"GET", keys[piece.number])
        else:
            wire.send(b"GETRANGE", keys[piece.number], b"%d" % piece.start, b"%d" % (piece.stop - 1))
        size = wire.bulk_size()
        if size is None:
            complete = False
            continue
        if size == piece.size:
            for view in piece.views:
                wire.fill(view)
        else:
            complete = False
            wire.skip(size)
        wire.end_bulk()
    return complete


def _members(index: bytes, stretch: Stretch, read: Callable[[Members], T], wire: Wire) -> tuple[list[T], str | None]:
    """Read pages; while this thread takes one apart the server looks up the next, so that none waits for the other.

    Another thread would only take the interpreter from this one: a server needs a tenth of the time that it takes here.
    """

    def ask(least: str) -> None:
        wire.send(b"TIME")
        wire.send(b"ZRANGEBYLEX", index, least.encode(), stretch.most.encode(), b"LIMIT", b"0", b"%d" % stretch.limit)

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


def _script(script: Script, command: Sequence[bytes | Sequence[memoryview]], wire: Wire) -> Reply:
    try:
        return wire.command(b"EVALSHA", script.digest.encode(), b"1", *command)
    except ReplyError as error:
        if error.code != "NOSCRIPT":
            raise
    wire.command(b"SCRIPT", b"LOAD", script.text.encode())
    return wire.command(b"EVALSHA", script.digest.encode(), b"1", *command)
