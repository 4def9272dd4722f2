"""How much of an arena stays usable, by allocator, when two layouts and blobs mix (docs/design/0003-arena.md)."""

from __future__ import annotations

import json
import math
import random
import statistics
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from benchmarks.harness import RESULTS, parser
from kvtier.buffers.extents import Extents

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 256  # pages of 4 KiB
NO_BARRIER = 1 << 40
SPAN = 32 * MIB


class Allocator(Protocol):
    """Hands out runs of pages."""

    def take(self, pages: int) -> int | None:
        """Return the first page of a free run, or None."""

    def give(self, start: int, pages: int) -> None:
        """Take a run back."""


class BestFit:
    """What the arena uses."""

    def __init__(self, pages: int) -> None:
        self.extents = Extents(0, pages, barrier=NO_BARRIER)

    def take(self, pages: int) -> int | None:
        """See `Allocator`."""
        return self.extents.take(pages)

    def give(self, start: int, pages: int) -> None:
        """See `Allocator`."""
        self.extents.give(start, pages)


class FirstFit:
    """The free run at the lowest address; with `small_above`, small requests come from the highest one."""

    def __init__(self, pages: int, *, small_above: int = 0) -> None:
        self.free = [(0, pages)]
        self.small_above = small_above

    def take(self, pages: int) -> int | None:
        """See `Allocator`."""
        small = pages < self.small_above
        for i in range(len(self.free) - 1, -1, -1) if small else range(len(self.free)):
            start, length = self.free[i]
            if length >= pages:
                rest = (start, length - pages) if small else (start + pages, length - pages)
                self.free[i : i + 1] = [rest] if rest[1] else []
                return start + length - pages if small else start
        return None

    def give(self, start: int, pages: int) -> None:
        """See `Allocator`."""
        i = bisect_left(self.free, (start, 0))
        if i < len(self.free) and self.free[i][0] == start + pages:
            pages += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == start:
            start, pages = self.free[i - 1][0], self.free[i - 1][1] + pages
            del self.free[i - 1]
            i -= 1
        self.free.insert(i, (start, pages))


class SizeClasses:
    """Spans claimed by a size class and returned when empty; large requests go to best fit."""

    def __init__(self, pages: int) -> None:
        self.extents = Extents(0, pages, barrier=NO_BARRIER)
        self.spans: dict[int, dict[int, list[int]]] = {}  # class -> span -> free slots
        self.owner: dict[int, tuple[int, int]] = {}  # slot -> class, span

    @staticmethod
    def _class(pages: int) -> int:
        step = 1 << max(0, pages.bit_length() - 4)
        return -(-pages // step) * step

    def take(self, pages: int) -> int | None:
        """See `Allocator`."""
        size = self._class(pages)
        if size * 4 > SPAN:
            return self.extents.take(pages)
        spans = self.spans.setdefault(size, {})
        span = next((first for first, free in spans.items() if free), None)
        if span is None:
            count = min(SPAN // size, 64)
            span = self.extents.take(count * size)
            if span is None:
                return None
            spans[span] = [span + i * size for i in range(count)]
        slot = spans[span].pop()
        self.owner[slot] = (size, span)
        return slot

    def give(self, start: int, pages: int) -> None:
        """See `Allocator`."""
        owner = self.owner.pop(start, None)
        if owner is None:
            self.extents.give(start, pages)
            return
        size, span = owner
        free = self.spans[size][span]
        free.append(start)
        if len(free) == min(SPAN // size, 64):
            del self.spans[size][span]
            self.extents.give(span, len(free) * size)


ALLOCATORS: dict[str, Callable[[int], Allocator]] = {
    "best fit": BestFit,
    "first fit": FirstFit,
    "first fit, small from the top": lambda pages: FirstFit(pages, small_above=4 * MIB),
    "size classes": SizeClasses,
}
# arena, chunks of two layouts (each with one header page), largest blob: in pages
MIXES = {
    "4 GiB: 32 MiB, 9 MiB, blobs to 16 MiB": (4096 * MIB, 32 * MIB + 1, 9 * MIB + 1, 16 * MIB),
    "4 GiB: 8 MiB, 2.25 MiB, blobs to 16 MiB": (4096 * MIB, 8 * MIB + 1, 9 * MIB // 4 + 1, 16 * MIB),
    "1 GiB: 32 MiB, 9 MiB, blobs to 16 MiB": (1024 * MIB, 32 * MIB + 1, 9 * MIB + 1, 16 * MIB),
}
VICTIMS: dict[str, Callable[[random.Random, int], int]] = {
    "random": lambda rng, count: rng.randrange(count),
    "lru": lambda rng, count: 0,  # noqa: ARG005  # one shape for both
}


def usable(make: Callable[[int], Allocator], mix: tuple[int, int, int, int], victim: str, *, steps: int) -> list[float]:
    """Allocate and, where that fails, drop entries until it fits; return the part in use at each failure."""
    pages, large, small, blob = mix
    rng = random.Random(1)
    allocator = make(pages)
    live: list[tuple[int, int]] = []
    used, at_failure = 0, []
    for _ in range(steps):
        kind = rng.random()
        size = large if kind < 0.2 else small if kind < 0.5 else int(math.exp(rng.uniform(0, math.log(blob))))
        start = allocator.take(size)
        if start is None:
            at_failure.append(used / pages)
        while start is None:
            old = live.pop(VICTIMS[victim](rng, len(live)))
            allocator.give(*old)
            used -= old[1]
            start = allocator.take(size)
        live.append((start, size))
        used += size
    return at_failure[len(at_failure) // 4 :]  # until then a fresh arena fills up


def main(arguments: list[str] | None = None) -> None:
    """Run, print, and write `results/fragmentation.json`. Counts only: the machine and its load do not matter."""
    options = parser(__doc__, rounds=1).parse_args(arguments)
    rows = []
    for label, mix in MIXES.items():
        for victim in VICTIMS:
            for name, make in ALLOCATORS.items():
                values = usable(make, mix, victim, steps=6000)
                low = statistics.quantiles(values, n=20)[0]
                mean = statistics.mean(values)
                rows.append({"mix": label, "evicted": victim, "allocator": name, "mean": mean, "5th percentile": low})
                print(f"{label:42} {victim:7} {name:30} {mean:.3f} (5th percentile {low:.3f})")
    if not options.no_save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "fragmentation.json").write_text(
            json.dumps({"steps": 6000, "seed": 1, "usable": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
