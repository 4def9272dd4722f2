"""A backend under test: every buffer it is lent is watched until it is closed."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from kvtier.backends.base import Read, Stat, Write, Written
from kvtier.errors import BackendError
from kvtier.testing.paint import PaintedBuffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backends.base import Backend

Answer = TypeVar("Answer")

_WATCHED = 8  # the latest buffers; all of them would hold too much memory


def value_of(seed: int | str, size: int) -> bytes:
    """Return `size` bytes that no other seed yields."""
    return random.Random(f"kvtier-{seed}").randbytes(size)


def split(size: int, pieces: int) -> list[int]:
    """Return `pieces` odd lengths that sum to `size`, an empty one among them if there are more than two."""
    cuts = random.Random(size * 31 + pieces)
    points = sorted(cuts.randint(0, size) for _ in range(pieces - 1))
    if pieces > 2:
        points[1] = points[0]
        points.sort()
    return [stop - start for start, stop in zip([0, *points], [*points, size], strict=True)]


class Subject:
    """Single calls on a backend, in terms of bytes; a failed item raises its error."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._watched: deque[PaintedBuffers] = deque(maxlen=_WATCHED)

    def watch(self, buffers: PaintedBuffers) -> PaintedBuffers:
        """Watch `buffers` from the moment they are repainted, until the end."""
        self._watched.append(buffers)
        return buffers

    async def put(
        self, name: str, value: bytes, *, pieces: int = 1, expires: float | None = None, if_absent: bool = False
    ) -> Written:
        """Write one entry from a source that is repainted when the call has ended."""
        source = self.watch(PaintedBuffers(split(len(value), pieces), content=value))
        try:
            answers = await self.backend.write_many([Write(name, source.parts, expires, if_absent)])
        finally:
            source.take()
        return _only(answers, (Written,))

    async def put_all(self, values: dict[str, bytes], *, expires: float | None = None) -> None:
        """Write many entries in one batch."""
        answers = await self.backend.write_many([Write(name, [memoryview(v)], expires) for name, v in values.items()])
        assert len(answers) == len(values)
        for answer in answers:
            assert isinstance(answer, Written) and answer.stored, answer

    async def get(
        self, name: str, room: int, *, pieces: int = 1, offset: int = 0, partial: bool = False
    ) -> bytes | None:
        """Read one entry into buffers of `room` bytes that are repainted when the call has ended."""
        into = self.watch(PaintedBuffers(split(room, pieces)))
        filled = 0
        try:
            answers = await self.backend.read_many([Read(name, into.parts, offset, partial)])
            size = _only(answers, (int, type(None)))
            filled = size or 0
            assert 0 <= filled <= room, f"answered {size} bytes for buffers of {room}"
        finally:
            content = into.take(filled)
        return None if size is None else content

    async def delete(self, name: str) -> bool:
        """Delete one entry."""
        return _only(await self.backend.delete_many([name]), (bool,))

    async def stat(self, name: str) -> Stat | None:
        """Look at one entry."""
        return _only(await self.backend.stat_many([name]), (Stat, type(None)))

    async def listing(self, after: str | None = None) -> list[Stat]:
        """Scan to the end."""
        return [stat async for page in self.backend.scan(after) for stat in page]

    def assert_buffers_untouched(self) -> None:
        """Fail if the backend wrote into a buffer after the call that lent it had ended."""
        for buffers in self._watched:
            buffers.assert_untouched()


def _only(answers: Sequence[Answer | BackendError], kinds: tuple[type, ...]) -> Answer:
    assert len(answers) == 1, f"{len(answers)} answers to one item"
    answer = answers[0]
    if isinstance(answer, BackendError):
        raise answer
    assert isinstance(answer, kinds), f"answered {answer!r}, not {' or '.join(kind.__name__ for kind in kinds)}"
    return answer
