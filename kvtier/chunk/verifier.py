"""Verification of a container while its bytes arrive, front to back, each while it is in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from kvtier.chunk.container import PAGE, NeedMore, check_header, peek
from kvtier.errors import CorruptChunkError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kvtier.chunk.header import Header
    from kvtier.chunk.segments import Segment

_ZEROS = bytes(PAGE)


class Verifier:
    """Does what `container.verify` does, in as many steps as there are pieces.

    Args:
        view: memory that the container is read into.
        key_of: returns the key that the header must hold; raises `CorruptChunkError` if it cannot be right.
        codecs: names that may stand in the chain.
        max_raw: most bytes that the decoded value may take.
    """

    def __init__(
        self, view: memoryview, *, key_of: Callable[[Header], str], codecs: Container[str], max_raw: int
    ) -> None:
        self._view = view
        self._key_of = key_of
        self._codecs = codecs
        self._max_raw = max_raw
        self._begin()

    def _begin(self) -> None:
        self._end = 0
        self._header: Header | None = None
        self._wrong: CorruptChunkError | None = None
        self._segment = 0
        self._hashed = 0  # of the present segment
        self._state = xxhash.xxh3_64()

    def advance(self, end: int) -> bool:
        """Look at what has come: the first `end` bytes are there; 0 begins anew. False: they are wrong."""
        if end == 0:
            self._begin()
            return True
        if self._wrong is not None:
            return False
        self._end = end
        if end < PAGE:  # no container is that short; a header cannot be told from damage before it is all there
            return True
        try:
            self._look()
        except NeedMore:
            return True
        except CorruptChunkError as exc:
            self._wrong = exc.with_traceback(None)
            return False
        return True

    def left(self, size: int) -> int:
        """Return how many of `size` stored bytes `finish` would still look at."""
        return 0 if self._wrong is not None else size - self._end

    def finish(self, size: int) -> Header:
        """Look at the rest of `size` stored bytes, and return the verified header.

        Raises:
            CorruptChunkError: anything is not as it must be.
        """
        if self._wrong is None and size != self._end:
            self.advance(size)
        if self._wrong is not None:
            raise self._wrong
        header = self._header
        if header is None:
            raise CorruptChunkError(f"container of {size} bytes is cut short")
        check_header(header, size=size, key=header.key, codecs=self._codecs, max_raw=self._max_raw)
        if self._segment < len(header.segments):
            raise CorruptChunkError(f"segment {header.segments[self._segment].spec.name!r} is cut short")
        return header

    def _look(self) -> None:
        if self._header is None:
            header = peek(self._view[: self._end])
            key = self._key_of(header)
            check_header(header, size=header.size, key=key, codecs=self._codecs, max_raw=self._max_raw)
            self._header = header
        segments = self._header.segments
        while self._segment < len(segments) and self._advance_in(self._header, segments[self._segment]):
            self._segment += 1
            self._hashed = 0
            self._state = xxhash.xxh3_64()

    def _advance_in(self, header: Header, segment: Segment) -> bool:
        """Hash what is there of a segment; True once it is complete and right."""
        start = header.payload_offset + segment.offset
        stop = start + segment.stored
        padded = start + -(-segment.stored // PAGE) * PAGE
        have = min(self._end, stop)
        if have > start + self._hashed:
            self._state.update(self._view[start + self._hashed : have])
            self._hashed = have - start
        if self._end < padded:
            return False
        if self._state.intdigest() != segment.checksum:
            raise CorruptChunkError(f"checksum of segment {segment.spec.name!r} does not match")
        if self._view[stop:padded].tobytes() != _ZEROS[: padded - stop]:
            raise CorruptChunkError(f"padding behind segment {segment.spec.name!r} is not zero")
        return True
