"""What the blocking facade adds to a call, beside the smallest possible call to a loop in another thread.

The added time is the caller's wall time without what the coroutine itself took on the loop.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from typing import TYPE_CHECKING

import kvtier
from benchmarks.harness import Case, Figure, measure, parser, save, show

if TYPE_CHECKING:
    from kvtier.blocking import BlockingStore

CALLS = 2000  # per round
CONFIG = {"chunk_tokens": 4, "tiers": [{"backend": "pinned-cpu", "capacity": "16MiB"}]}
LAYOUT = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
TOKENS = list(range(16))
GOAL_SECONDS = 100e-6


class Bench:
    """A blocking store, and a bare loop in a thread for comparison."""

    def __init__(self, store: BlockingStore) -> None:
        self.store = store
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.inner: list[float] = []
        self.added: list[float] = []

    def bare(self) -> None:
        """Run an empty coroutine on a loop in another thread, as asyncio offers it."""

        async def nothing() -> None:
            return None

        for _ in range(CALLS):
            asyncio.run_coroutine_threadsafe(nothing(), self.loop).result()

    def blocking(self) -> None:
        """Ask whether a prefix is cached."""
        for _ in range(CALLS):
            self.store.exists(TOKENS)

    def timed(self) -> None:
        """Ask the same, and keep the time beside the coroutine's own."""

        async def exists(store: kvtier.KVStore) -> float:
            begin = time.perf_counter()
            await store.exists(TOKENS)
            return time.perf_counter() - begin

        for _ in range(CALLS):
            begin = time.perf_counter()
            inner = self.store.submit(exists).result()
            self.added.append(time.perf_counter() - begin - inner)
            self.inner.append(inner)

    def cases(self) -> list[Case]:
        """Return every case, the base first."""
        return [
            Case(name="bare call", call=self.bare),
            Case(name="exists", call=self.blocking),
            Case(name="exists, timed", call=self.timed),
        ]


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/blocking.json`."""
    options = parser(__doc__, rounds=9).parse_args(arguments)
    namespace = kvtier.Namespace(model="bench/model", revision="1")
    with kvtier.open_blocking(CONFIG, layout=LAYOUT, namespace=namespace) as store:
        bench = Bench(store)
        figures = measure(bench.cases(), base="bare call", rounds=options.rounds)
        bench.loop.call_soon_threadsafe(bench.loop.stop)
    show(figures)
    added = {"median": statistics.median(bench.added), "p99": statistics.quantiles(bench.added, n=100)[98]}
    print(f"added per call: median {added['median'] * 1e6:.0f} us, p99 {added['p99'] * 1e6:.0f} us")
    if not options.no_save:
        extra = {
            "calls_per_round": CALLS,
            "added_seconds": added,
            "inner_median_seconds": statistics.median(bench.inner),
            "goal_seconds": GOAL_SECONDS,
            "met": added["median"] < GOAL_SECONDS,
        }
        save("blocking", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
