"""Which pages of an arena are free: best fit over extents that merge when they meet."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """The free pages of [first, first + pages), as maximal extents. Pure bookkeeping: no memory, no locks.

    No extent crosses a multiple of `barrier` pages.
    """

    __slots__ = ("_barrier", "_by_end", "_by_size", "_by_start", "end", "first", "free")

    def __init__(self, first: int, pages: int, *, barrier: int) -> None:
        self.first: int = first
        self.end: int = first + pages
        self.free: int = 0
        self._barrier = barrier
        self._by_start: dict[int, int] = {}  # start -> end
        self._by_end: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []  # (pages, start), ascending
        while first < self.end:
            stop = min(self.end, (first // barrier + 1) * barrier)
            self._add(first, stop)
            first = stop

    @property
    def largest(self) -> int:
        """Pages of the largest free extent."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def count(self) -> int:
        """How many free extents there are."""
        return len(self._by_size)

    @property
    def free_at_start(self) -> int:
        """How many pages are free from the first on."""
        return self._by_start.get(self.first, self.first) - self.first

    @property
    def free_at_end(self) -> int:
        """How many pages are free up to the last."""
        return self.end - self._by_end.get(self.end, self.end)

    def take(self, pages: int) -> int | None:
        """Take adjacent pages from the smallest extent that holds them; return the first page, or None."""
        place = bisect_left(self._by_size, (pages, -1))
        if place == len(self._by_size):
            return None
        start = self._by_size[place][1]
        self.take_at(start, pages)
        return start

    def take_at(self, start: int, pages: int) -> None:
        """Take pages that are known to be free, at the start or at the end of a free extent."""
        stop = start + pages
        first = start if start in self._by_start else self._by_end[stop]
        end = self._by_start[first]
        self._remove(first, end)
        if first < start:
            self._add(first, start)
        if stop < end:
            self._add(stop, end)

    def give(self, start: int, pages: int) -> None:
        """Give taken pages back; they merge with free neighbours."""
        end = start + pages
        before = self._by_end.get(start) if start % self._barrier else None
        after = self._by_start.get(end) if end % self._barrier else None
        if before is not None:
            self._remove(before, start)
            start = before
        if after is not None:
            self._remove(end, after)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._by_start[start] = end
        self._by_end[end] = start
        insort(self._by_size, (end - start, start))
        self.free += end - start

    def _remove(self, start: int, end: int) -> None:
        del self._by_start[start]
        del self._by_end[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        self.free -= end - start
