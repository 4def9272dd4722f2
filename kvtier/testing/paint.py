"""Buffers that show who touches them: before, outside and after the call they were lent to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FRESH = 0x5A  # before the call
_SPENT = 0xC3  # from the moment the call has ended
_GUARD = 61  # bytes between and around the buffers; odd, so that no buffer is aligned


class PaintedBuffers:
    """Buffers of the given sizes inside one block of memory, with guards between them.

    Lend `parts` to one call; when it has ended, in whatever way, `take` what it brought: that checks the guards and
    repaints everything at once. From then on `assert_untouched` says whether somebody wrote into them late, and a
    source that is read late yields paint instead of its value.
    """

    def __init__(self, sizes: Sequence[int], *, content: bytes | None = None) -> None:
        self._memory = bytearray([_FRESH]) * (_GUARD + sum(size + _GUARD for size in sizes))
        self._whole = memoryview(self._memory)
        self._ranges: list[tuple[int, int]] = []
        start = _GUARD
        for size in sizes:
            self._ranges.append((start, start + size))
            start += size + _GUARD
        self.parts: list[memoryview[int]] = [self._whole[start:stop] for start, stop in self._ranges]
        if content is not None:
            self._fill(content)

    def _fill(self, content: bytes) -> None:
        source = memoryview(content)
        for part in self.parts:
            part[:] = source[: part.nbytes]
            source = source[part.nbytes :]

    def take(self, size: int = 0) -> bytes:
        """Return the first `size` bytes of the buffers' concatenation, and repaint; fails if a guard was touched."""
        content = b"".join(self.parts)[:size] if size else b""
        stop = 0
        for start, next_stop in [*self._ranges, (len(self._memory), 0)]:
            guard = self._memory[stop:start]
            assert guard.count(_FRESH) == len(guard), "the backend wrote outside the buffers it was given"
            stop = next_stop
        self.repaint()
        return content

    def repaint(self) -> None:
        """Declare the memory somebody else's."""
        self._whole[:] = bytes([_SPENT]) * len(self._memory)

    def assert_untouched(self) -> None:
        """Fail if anything was written since `take` or `repaint`."""
        late = len(self._memory) - self._memory.count(_SPENT)
        assert late == 0, f"{late} bytes of a buffer were written after the call it was lent to had ended"
