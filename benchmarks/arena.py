"""What the arena's own bookkeeping costs, with 10,000 slots out; and its way up."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, Case, Figure, measure, parser, save, show
from kvtier.buffers import PAGE, Arena

if TYPE_CHECKING:
    from kvtier.buffers import Slot

LIVE = 10_000
CALLS = 1000


class Bench:
    """An arena, nearly full of slots of random sizes that have been replaced at random."""

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.arena = Arena(4096 * MIB, pin=False)
        self.live = [self._slot() for _ in range(LIVE)]
        self.chosen: list[Slot] = []
        for _ in range(2 * LIVE):
            self.replace_one()

    def _slot(self) -> Slot:
        while True:
            slot = self.arena.try_allocate(self.rng.randrange(PAGE, 160 * PAGE), entry=True)
            if slot is not None:
                return slot
            self.live.pop(self.rng.randrange(len(self.live))).release()

    def replace_one(self) -> None:
        """Free a random slot, allocate another."""
        self.live.pop(self.rng.randrange(len(self.live))).release()
        self.live.append(self._slot())

    def replace(self) -> None:
        """Free and allocate, CALLS times."""
        for _ in range(CALLS):
            self.replace_one()

    def borrow(self) -> None:
        """Make CALLS views."""
        for slot in self.live[:CALLS]:
            slot.view()

    def own(self) -> None:
        """Make CALLS owned views, drop them, and have the references given back."""
        views = [slot.owned_view() for slot in self.live[:CALLS]]
        del views
        self.arena.drain()


def way_up(capacity: int) -> dict[str, float]:
    """Build an arena on a running loop: how long that took, how late the loop was, when all pages were backed."""

    async def build() -> dict[str, float]:
        worst, stop = 0.0, False

        async def heartbeat() -> None:
            nonlocal worst
            while not stop:
                begin = time.perf_counter()
                await asyncio.sleep(0.001)
                worst = max(worst, time.perf_counter() - begin - 0.001)

        beat = asyncio.create_task(heartbeat())
        await asyncio.sleep(0.05)
        begin = time.perf_counter()
        arena = Arena(capacity, pin=False)
        built = time.perf_counter() - begin
        while not arena.stats().prefaulted:  # noqa: ASYNC110  # a flag is all it gives
            await asyncio.sleep(0.005)
        backed = time.perf_counter() - begin
        stop = True
        await beat
        arena.close()
        return {"capacity": capacity, "constructor_s": built, "prefaulted_s": backed, "worst_loop_lag_s": worst}

    return asyncio.run(build())


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/arena.json`; times are those of CALLS calls."""
    options = parser(__doc__, rounds=15).parse_args(arguments)
    bench = Bench()
    cases = [
        Case(name="free and allocate", call=bench.replace),
        Case(name="borrowed view", call=bench.borrow),
        Case(name="owned view", call=bench.own),
    ]
    figures = measure(cases, base="free and allocate", rounds=options.rounds)
    show(figures)
    for slot in bench.live:
        slot.release()
    bench.arena.close()
    up = way_up(2048 * MIB)
    print({name: round(value, 4) for name, value in up.items()})
    if not options.no_save:
        extra = {"calls": CALLS, "live_slots": LIVE, "way_up": up}
        save("arena", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
