"""Bulk bytes over redis-py, for set-ups that only it can talk to: several copies of every value, some on the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvtier.backends.batches import answer_each
from kvtier.backends.redis_faults import listed, spoilt, text_of
from kvtier.backends.redis_lanes import Piece, Publication, Wanted
from kvtier.backends.redis_layout import ENVELOPE_BYTES, Keys, Shape, open_envelope, window
from kvtier.backends.redis_members import Members
from kvtier.backends.redis_scripts import COMMIT, UPLOAD_MILLISECONDS
from kvtier.backends.views import BIG_BYTES, scatter
from kvtier.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.backends.redis_control import Control
    from kvtier.backends.redis_members import Stretch
    from kvtier.backends.redis_scripts import Script
    from kvtier.concurrency.workers import Workers

    T = TypeVar("T")

_AT_ONCE = 4


class PlainPath:
    """The path over redis-py's own connections. The deadline of a call is that of its client."""

    def __init__(self, control: Control, keys: Keys, workers: Workers) -> None:
        self._control = control
        self._keys = keys
        self._workers = workers

    async def fetch(self, name: str, wanted: Wanted, deadline: float) -> tuple[Shape | None, bool]:
        """See `Path`."""
        del deadline
        content = await self._get("GET", name, self._keys.head(name))
        if content is None:
            return None, False
        shape = open_envelope(content[:ENVELOPE_BYTES])
        if shape is None or len(content) - ENVELOPE_BYTES != shape.head:
            raise spoilt(name)
        if not wanted.fits(shape):
            return shape, False
        start, stop = min(wanted.offset, shape.head), min(wanted.stop(shape), shape.head)
        await self._copy(memoryview(content)[ENVELOPE_BYTES + start : ENVELOPE_BYTES + stop], wanted.views)
        keys = self._keys.parts(name, shape)
        pieces = wanted.pieces(shape)
        return shape, all(
            _raised(await answer_each(lambda each: self._fetch(name, keys, each), pieces, limit=_AT_ONCE))
        )

    async def _fetch(self, name: str, keys: Sequence[str], piece: Piece) -> bool:
        bounds = () if piece.whole else (piece.start, piece.stop - 1)
        content = await self._get("GET" if piece.whole else "GETRANGE", name, keys[piece.number - 1], *bounds)
        if content is None or len(content) != piece.size:
            return False
        await self._copy(memoryview(content), piece.views)
        return True

    async def publish(self, publication: Publication, deadline: float) -> list[int]:
        """See `Path`."""
        del deadline
        name, shape, views = publication.name, publication.shape, publication.views

        keys = self._keys.parts(name, shape)

        async def put(piece: Piece) -> None:
            content = await self._workers.run(b"".join, piece.views)
            key = keys[piece.number - 1]
            await self._control.command(self._keys.bucket(name), "SET", key, content, "PX", UPLOAD_MILLISECONDS)

        pieces = Wanted(views, 0, shape.size, partial=False).pieces(shape)
        _raised(await answer_each(put, pieces, limit=_AT_ONCE))
        head = b"".join([shape.envelope(), *window(views, 0, shape.head)])
        front = (name, head, shape.size, shape.token, shape.head, shape.part)
        publication.asked = True
        reply = await self._control.script(self._keys.bucket(name), COMMIT, *front, *publication.words)
        return [int(number) for number in listed(reply, 2)]

    async def run(self, bucket: int, script: Script, words: Sequence[str]) -> object:
        """See `Path`."""
        return await self._control.script(bucket, script, *words)

    async def members(self, bucket: int, stretch: Stretch, read: Callable[[Members], T]) -> tuple[list[T], str | None]:
        """See `Path`; a page at a time, and no thread."""
        (seconds, micros) = listed(await self._control.command(bucket, "TIME"), 2)
        span = (stretch.least, stretch.most, "LIMIT", 0, stretch.limit)
        found = await self._control.command(bucket, "ZRANGEBYLEX", self._keys.index(bucket), *span)
        members = [text_of(member) for member in found] if isinstance(found, list) else []
        page = Members(len(members), " ".join(members), int(seconds) * 1000 + int(micros) // 1000, spare=0)
        return [read(page)], page.behind if page.count == stretch.limit else None

    async def _get(self, verb: str, name: str, key: str, *bounds: int) -> bytes | None:
        content = await self._control.command(self._keys.bucket(name), verb, key, *bounds)
        return content if isinstance(content, bytes) else None

    async def _copy(self, source: memoryview, into: Sequence[memoryview]) -> None:
        if source.nbytes > BIG_BYTES:
            await self._workers.run(scatter, source, into)
        else:
            scatter(source, into)


def _raised(answers: Sequence[T | BackendError]) -> list[T]:
    whole = []
    for answer in answers:
        if isinstance(answer, BackendError):
            raise answer
        whole.append(answer)
    return whole
