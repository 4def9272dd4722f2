"""What one operation of each policy costs with a million entries resident, and the memory an entry takes.

The cost is amortised: over rounds that replace every entry once, so that all that a policy puts off is paid. The bare
`OrderedDict` beside them does what a policy without parents, sizes and priorities could do at best.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pathlib
import random
import statistics
import time
from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.harness import Figure, parser, save, show
from kvtier.registry import policies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.policies.base import Policy

DEPTH = 8  # entries of one prompt
ROUND = 2_000  # times insert, touch, victims, remove
BARE = "OrderedDict"
GOALS = {"lru": 3e-6, "lfu": 3e-6, "fifo": 3e-6, "s3-fifo": 3e-6, "arc": 10e-6, "gdsf": 10e-6, "adaptive": 10e-6}


class Bare:
    """The four operations on the quickest container there is, without anything that a policy must know."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, int] = OrderedDict()

    def insert(self, key: str, *, parent: str | None, size: int, now: float) -> None:
        """Put `key` last."""
        del parent, now
        self._entries[key] = size

    def touch(self, key: str, now: float) -> None:
        """Put `key` last, if it is there."""
        del now
        if key in self._entries:
            self._entries.move_to_end(key)

    def remove(self, key: str) -> None:
        """Forget `key`."""
        del self._entries[key]

    def victims(self, need: int) -> Sequence[str]:
        """Name the first."""
        del need
        return [next(iter(self._entries))]


class Load:
    """A full policy, and rounds of the four operations on it."""

    def __init__(self, policy: Policy | Bare, entries: int) -> None:
        self._policy = policy
        self._entries = entries
        self._serial = count()
        self._draw = random.Random(1)
        for _ in range(entries):
            self._insert()
        self.filled_bytes = resident_bytes()

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


def measured(name: str, load: Load, entries: int) -> Figure:
    """Replace all entries once; the ratio is to the goal, its lower quartile over the rounds."""
    rounds = []
    gc.collect()
    for _ in range(max(1, entries // ROUND)):
        began = time.perf_counter()
        load.run()
        rounds.append((time.perf_counter() - began) / (4 * ROUND))
    seconds = statistics.fmean(rounds)
    goal = GOALS.get(name, seconds)
    upper = statistics.quantiles(rounds, n=4)[2] if len(rounds) > 1 else seconds
    return Figure(
        name=name,
        seconds=seconds,
        gigabytes_per_second=None,
        ratio=goal / seconds,
        ratio_lower_quartile=goal / upper,
        goal=1.0 if name in GOALS else None,
    )


def in_a_process(name: str, entries: int) -> tuple[Figure, int]:
    """Return the figure of one policy and its bytes per entry; a process of its own has no memory to use again."""
    gc.collect()
    before = resident_bytes()
    load = Load(Bare() if name == BARE else policies.load(name)(), entries)
    return measured(name, load, entries), round((load.filled_bytes - before) / entries)


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/policies.json`; four operations of each round count."""
    made = parser(__doc__, rounds=1)
    made.add_argument("--entries", type=int, default=1_000_000)
    made.add_argument("--only", default=",".join([BARE, *GOALS]), help="policies, comma-separated")
    options = made.parse_args(arguments)
    figures, per_entry = [], {}
    for name in options.only.split(","):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            figure, per_entry[name] = pool.apply(in_a_process, (name, options.entries))
        figures.append(figure)
        print(
            f"{name:12} {figure.seconds * 1e6:6.2f} us per operation, {per_entry[name]:6} bytes per entry", flush=True
        )
    show(figures)
    if not options.no_save:
        seconds = {figure.name: figure.seconds for figure in figures}
        extra = {"seconds_per_operation": seconds, "bytes_per_entry": per_entry}
        save("policies", figures, flags={"entries": options.entries}, extra=extra)
    return figures


if __name__ == "__main__":
    main()
