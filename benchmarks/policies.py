"""What one operation of each policy costs with a million entries resident, and the memory an entry takes."""

from __future__ import annotations

import gc
import os
import pathlib
import random
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.harness import Case, Figure, measure, parser, save, show
from kvtier.registry import policies

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.policies.base import Policy

DEPTH = 8  # entries of one prompt
ROUND = 2_000  # times insert, touch, victims, remove
NAMES = ("lru", "lfu", "fifo", "s3-fifo", "arc", "gdsf", "adaptive")


class Load:
    """A full policy, and rounds of the four operations on it."""

    def __init__(self, policy: Policy, entries: int) -> None:
        self._policy = policy
        self._entries = entries
        self._serial = count()
        self._draw = random.Random(1)
        for _ in range(entries):
            self._insert()

    def _insert(self) -> None:
        number = next(self._serial)
        parent = self._key(number - 1) if number % DEPTH else None
        self._policy.insert(self._key(number), parent=parent, size=1, now=number / 80)

    @staticmethod
    def _key(number: int) -> str:
        return f"00112233aabbccdd/0000000000000000/{number:032x}"

    def run(self) -> None:
        """Make room, insert and touch, `ROUND` times."""
        for _ in range(ROUND):
            for victim in self._policy.victims(1):
                self._policy.remove(victim)
            self._insert()
            newest = next(self._serial)
            self._serial = count(newest)
            self._policy.touch(self._key(self._draw.randrange(max(0, newest - self._entries), newest)), newest / 80)


def resident_bytes() -> int:
    """Return the memory that this process has in RAM."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/policies.json`; four operations of each round count."""
    made = parser(__doc__, rounds=7)
    made.add_argument("--entries", type=int, default=1_000_000)
    options = made.parse_args(arguments)
    per_entry: dict[str, float] = {}
    seconds: dict[str, float] = {}
    figures = []
    for name in NAMES:  # one after the other: a million entries of each at once would fill the memory
        gc.collect()
        before = resident_bytes()
        load = Load(policies.load(name)(), options.entries)
        per_entry[name] = (resident_bytes() - before) / options.entries
        call: Callable[[], None] = load.run
        figures += measure([Case(name=name, call=call)], base=name, rounds=options.rounds)
        seconds[name] = figures[-1].seconds / (4 * ROUND)
        del load, call
        print(f"{name:10} {seconds[name] * 1e6:6.2f} us per operation, {per_entry[name]:6.0f} bytes per entry")
    show(figures)
    if not options.no_save:
        extra = {"seconds_per_operation": seconds, "bytes_per_entry": per_entry}
        save("policies", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
