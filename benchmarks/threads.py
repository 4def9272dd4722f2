"""What a hop into the store's own threads costs, against asyncio.to_thread and an executor of one's own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.harness import Case, Figure, measure, parser, save, show
from kvtier.concurrency import Workers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HOPS = 500


def cases(loop: asyncio.AbstractEventLoop, workers: Workers, executor: ThreadPoolExecutor) -> list[Case]:
    """Return each way into a thread, one hop after the other and many at a time."""
    ways: dict[str, Callable[[], Awaitable[int]]] = {
        "to_thread": lambda: asyncio.to_thread(int),
        "own executor": lambda: loop.run_in_executor(executor, int),
        "workers": lambda: workers.run(int),
    }

    async def one_by_one(way: Callable[[], Awaitable[int]]) -> None:
        for _ in range(HOPS):
            await way()

    async def together(way: Callable[[], Awaitable[int]]) -> None:
        await asyncio.gather(*[way() for _ in range(HOPS)])

    return [
        Case(name=f"{name}, {label}", call=lambda r=run, w=way: loop.run_until_complete(r(w)))
        for label, run in (("one by one", one_by_one), ("together", together))
        for name, way in ways.items()
    ]


def main(arguments: list[str] | None = None) -> list[Figure]:
    """Run, print, and write `results/threads.json`; the times are those of all hops together."""
    options = parser(__doc__, rounds=15).parse_args(arguments)
    loop = asyncio.new_event_loop()
    workers = Workers("bench", 4, job_seconds=5.0)
    with ThreadPoolExecutor(4) as executor:
        figures = measure(cases(loop, workers, executor), base="to_thread, one by one", rounds=options.rounds)
    loop.run_until_complete(workers.aclose(5.0))
    loop.run_until_complete(loop.shutdown_default_executor())
    show(figures)
    if not options.no_save:
        save("threads", figures, flags=vars(options), extra={"hops_per_call": HOPS})
    return figures


if __name__ == "__main__":
    main()
