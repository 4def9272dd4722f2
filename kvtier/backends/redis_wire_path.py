"""Bulk bytes over the wire: each job is one thread on one connection, a long value is several jobs at once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvtier.backends.batches import answer_each
from kvtier.backends.redis_faults import ReplyError, listed
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


class Path(Protocol):
    """How bulk bytes move. Everything raises `BackendError`."""

    async def fetch_head(self, name: str, wanted: Wanted, deadline: float) -> Shape | None:
        """Return the shape of an entry, having filled what its head holds of `wanted`; `None` if there is none.

        Where it does not fit nothing is promised about the views.
        """

    async def fetch_parts(self, name: str, shape: Shape, pieces: Sequence[Piece], deadline: float) -> bool:
        """Fill the pieces; tell whether every one was there."""

    async def upload(self, name: str, shape: Shape, views: Sequence[memoryview], deadline: float) -> None:
        """Bring a value's parts to the server, where they vanish again unless `commit` follows."""

    async def commit(
        self, name: str, shape: Shape, views: Sequence[memoryview], words: Sequence[str], deadline: float
    ) -> list[int]:
        """Run `COMMIT` with the head and `words` behind the part size; return its reply."""

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

    async def fetch_head(self, name: str, wanted: Wanted, deadline: float) -> Shape | None:
        """See `Path`."""
        return await self._on_wire(name, deadline, partial(_fetch_head, self._keys.head(name).encode(), wanted))

    async def fetch_parts(self, name: str, shape: Shape, pieces: Sequence[Piece], deadline: float) -> bool:
        """See `Path`."""
        keys = {piece.number: self._keys.part(name, shape, piece.number).encode() for piece in pieces}
        jobs = [partial(_fetch_lane, keys, lane) for lane in self._lanes(pieces)]
        return all(await self._all(name, deadline, jobs))

    async def upload(self, name: str, shape: Shape, views: Sequence[memoryview], deadline: float) -> None:
        """See `Path`."""
        pieces = Wanted(views, 0, shape.size, partial=False).pieces(shape)
        keys = {piece.number: self._keys.part(name, shape, piece.number).encode() for piece in pieces}
        await self._all(name, deadline, [partial(_upload_lane, keys, lane) for lane in self._lanes(pieces)])

    async def commit(
        self, name: str, shape: Shape, views: Sequence[memoryview], words: Sequence[str], deadline: float
    ) -> list[int]:
        """See `Path`."""
        counter = self._keys.counters[self._keys.bucket(name)].encode()
        head = [memoryview(shape.envelope()), *window(views, 0, shape.head)]
        front = [str(word).encode() for word in (shape.size, shape.token, shape.head, shape.part)]
        command: list[bytes | Sequence[memoryview]] = [
            counter,
            name.encode(),
            head,
            *front,
            *(word.encode() for word in words),
        ]
        return [
            int(number) for number in listed(await self._on_wire(name, deadline, partial(_script, COMMIT, command)), 2)
        ]

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
        # One connection fills the gaps of another; more threads than cores only take the interpreter from each other.
        count = max(1, min(len(pieces), self._workers.size, max(2, CORES), total // LANE_BYTES))
        return [pieces[lane::count] for lane in range(count)]

    async def _all(self, name: str, deadline: float, jobs: Sequence[Callable[[Wire], T]]) -> list[T]:
        """Run the jobs at once; raise the first failure when all have ended."""

        async def run(job: Callable[[Wire], T]) -> T:
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


def _upload_lane(keys: dict[int, bytes], lane: Sequence[Piece], wire: Wire) -> None:
    wire.command_each([(b"SET", keys[piece.number], piece.views, b"PX", _UPLOAD_WORD) for piece in lane])


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
