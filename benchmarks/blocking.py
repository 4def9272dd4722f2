"""What the blocking facade adds to a call, beside the smallest possible call to a loop in another thread.

The added time is the caller's wall time without what the coroutine itself took on the loop.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from functools import wraps
from typing import TYPE_CHECKING

import kvtier
from benchmarks.harness import Case, Figure, measure, parser, save, show

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvtier.blocking import BlockingStore

    Exists = Callable[..., Coroutine[object, object, int]]

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
        self.added: dict[str, list[float]] = {"call": [], "submit": []}

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

    def timed_calls(self) -> None:
        """Ask the same, and keep the time beside the coroutine's own."""
        exists = kvtier.KVStore.exists
        kvtier.KVStore.exists = self._timed(exists)  # type: ignore[method-assign]  # what the facade runs on the loop
        try:
            for _ in range(CALLS):
                begin = time.perf_counter()
                self.store.exists(TOKENS)
                self.added["call"].append(time.perf_counter() - begin - self.inner[-1])
        finally:
            kvtier.KVStore.exists = exists  # type: ignore[method-assign]

    def timed_futures(self) -> None:
        """Submit the same, and wait for the future."""
        exists = self._timed(kvtier.KVStore.exists)
        for _ in range(CALLS):
            begin = time.perf_counter()
            self.store.submit(exists, TOKENS).result()
            self.added["submit"].append(time.perf_counter() - begin - self.inner[-1])

    def _timed(self, exists: Exists) -> Exists:
        @wraps(exists)
        async def timed(store: kvtier.KVStore, tokens: list[int], **options: float | None) -> int:
            begin = time.perf_counter()
            found = await exists(store, tokens, **options)
            self.inner.append(time.perf_counter() - begin)
            return found

        return timed

    def cases(self) -> list[Case]:
        """Return every case, the base first."""
        return [
            Case(name="bare call", call=self.bare),
            Case(name="exists", call=self.blocking),
            Case(name="exists, timed", call=self.timed_calls),
            Case(name="exists submitted, timed", call=self.timed_futures),
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
    added = {
        kind: {"median": statistics.median(times), "p99": statistics.quantiles(times, n=100)[98]}
        for kind, times in bench.added.items()
    }
    for kind, times in added.items():
        print(f"added per {kind}: median {times['median'] * 1e6:.0f} us, p99 {times['p99'] * 1e6:.0f} us")
    if not options.no_save:
        extra = {
            "calls_per_round": CALLS,
            "added_seconds": added,
            "inner_median_seconds": statistics.median(bench.inner),
            "goal_seconds": GOAL_SECONDS,
            "met": added["call"]["median"] < GOAL_SECONDS,
        }
        save("blocking", figures, flags=vars(options), extra=extra)
    return figures


if __name__ == "__main__":
    main()
