"""One value on its way to or from a server, over as many connections as take part; every method runs in a thread."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.backends.redis_faults import ReplyError, spoilt
from kvtier.backends.redis_layout import ENVELOPE_BYTES, WHOLE_BYTES, Keys, Shape, open_envelope, window
from kvtier.backends.redis_scripts import COMMIT, UPLOAD_MILLISECONDS
from kvtier.backends.redis_wire import framed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtier.backends.redis_scripts import Script
    from kvtier.backends.redis_wire import Framed, Reply, Wire

_UPLOAD_WORDS = (b"PX", b"%d" % UPLOAD_MILLISECONDS)


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


class Publishing:
    """A value that is put: each lane brings its parts, and whichever ends last sends `COMMIT` behind them.

    It costs no way over the loop to another thread, and no other connection has to be awake.
    """

    def __init__(self, publication: Publication, keys: Keys, lanes: int) -> None:
        name, shape, views = publication.name, publication.shape, publication.views
        self._publication = publication
        self._lanes = lanes
        self._keys = keys.parts(name, shape)
        head = [memoryview(shape.envelope()), *window(views, 0, shape.head)]
        front = (shape.size, shape.token, shape.head, shape.part, *publication.words)
        counter = keys.counters[keys.bucket(name)].encode()
        words: list[bytes | Sequence[memoryview]] = [str(word).encode() for word in front]
        self._command = [counter, name.encode(), head, *words]
        self._lock = threading.Lock()
        self._brought: set[int] = set()
        self._last: int | None = None  # who publishes

    def run(self, lane: int, wire: Wire) -> Reply:
        """Do one lane; return the reply of `COMMIT` if it was the last.

        Called again, because somebody else serves the bucket now, it brings nothing twice: a part that is published
        already would begin to expire.
        """
        if lane not in self._brought and self._keys:
            wire.command_each(self._uploads(lane))
        with self._lock:
            self._brought.add(lane)
            if self._last is None and len(self._brought) == self._lanes:
                self._last = lane
                self._publication.asked = True
        return run_script(COMMIT, self._command, wire) if self._last == lane else None

    def _uploads(self, lane: int) -> Iterator[Framed]:
        shape, views = self._publication.shape, self._publication.views
        for number in range(lane, shape.parts, self._lanes):
            part = window(views, *shape.span(number + 1))
            yield framed((b"SET", self._keys[number].encode()), part, _UPLOAD_WORDS)


class Fetching:
    """A value that is read: the first lane brings its head, then whichever is free takes the next piece.

    Attributes:
        shape: of the entry, once its head is there; `None` if there is none.
        whole: whether every piece was there.
        left: pieces that no lane has taken.
    """

    def __init__(self, name: str, wanted: Wanted, keys: Keys) -> None:
        self.shape: Shape | None = None
        self.whole: bool = True
        self.left: deque[Piece] = deque()
        self._name = name
        self._wanted = wanted
        self._keys = keys
        self._part_keys: list[str] = []

    def begin(self, begun: Callable[[], object], wire: Wire) -> None:
        """Be the first lane; call `begun` when others may help."""
        if self.shape is None:  # else it goes on after a redirection
            self.shape = _fetch_head(self._keys.head(self._name).encode(), self._wanted, wire)
            if self.shape is None or not self._wanted.fits(self.shape):
                return
            self._part_keys = self._keys.parts(self._name, self.shape)
            self.left.extend(self._wanted.pieces(self.shape))
            if len(self.left) > 1:
                begun()
        self.run(wire)

    def run(self, wire: Wire) -> None:
        """Fetch pieces while there are any; what this lane cannot get from its server is there for the next."""
        while self.left:
            try:
                piece = self.left.popleft()
            except IndexError:  # another lane took the last one
                return
            try:
                if not _fetch_piece(self._part_keys[piece.number - 1].encode(), piece, wire):
                    self.whole = False
            except BaseException:
                self.left.appendleft(piece)
                raise


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


def _fetch_piece(key: bytes, piece: Piece, wire: Wire) -> bool:
    """Tell whether it was there. One at a time: a server makes a copy of each reply, and those would pile up there."""
    if piece.whole:
        wire.send(b"GET", key)
    else:
        wire.send(b"GETRANGE", key, b"%d" % piece.start, b"%d" % (piece.stop - 1))
    size = wire.bulk_size()
    if size is None:
        return False
    if size == piece.size:
        for view in piece.views:
            wire.fill(view)
    else:
        wire.skip(size)
    wire.end_bulk()
    return size == piece.size


def run_script(script: Script, command: Sequence[bytes | Sequence[memoryview]], wire: Wire) -> Reply:
    """Return a script's reply; the server learns it if it does not know it. Raises as `Wire.command`."""
    try:
        return wire.command(b"EVALSHA", script.digest.encode(), b"1", *command)
    except ReplyError as error:
        if error.code != "NOSCRIPT":
            raise
    wire.command(b"SCRIPT", b"LOAD", script.text.encode())
    return wire.command(b"EVALSHA", script.digest.encode(), b"1", *command)
