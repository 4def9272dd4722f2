"""How long the event loop is kept from its work while a store moves, encodes and verifies data on the same machine.

A heartbeat of 1 ms runs on the loop and notes how late it is: beside nothing, beside the store (put, flush, get, list
on memory and disk with zstd), and beside the control (the same bytes copied, compressed and written by plain threads).
`--disk` measures a disk alone instead: every value written anew past the page cache, read back and verified, listed.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
import zstandard

import kvtier
from benchmarks.harness import MIB, machine, parser, save

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BEAT_SECONDS = 0.001
VALUE = 8 * MIB
VALUES = 6
THREADS = 4  # as many as the store's disk tier has


async def lag_beside(work: Callable[[], Awaitable[None]]) -> list[float]:
    """Return how late each beat was while `work` ran, in seconds, sorted."""
    late: list[float] = []

    async def beat() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_SECONDS)
            late.append(time.perf_counter() - began - BEAT_SECONDS)

    heart = asyncio.create_task(beat())
    await work()
    heart.cancel()
    await asyncio.gather(heart, return_exceptions=True)
    return sorted(late)


async def beside_store(folder: Path, values: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Move the values through a store of memory and disk, over and over."""
    config = {
        "deadline_seconds": 60,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": 2 * VALUE * VALUES},
            {"backend": "local-disk", "path": str(folder), "capacity": "4GiB", "codecs": ["zstd"], "threads": THREADS},
        ],
    }
    async with kvtier.open_chunks(config) as store:

        async def work() -> None:
            for _ in range(rounds):
                await store.put_many(values)
                await store.flush()
                await store.get_many(list(values))
                _ = [entry async for entry in store.list()]

        return await lag_beside(work)


async def beside_threads(folder: Path, values: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Move the same bytes the same ways in plain threads."""
    turns = list(values.values()) * rounds

    def carry() -> None:
        warm = torch.empty(VALUE, dtype=torch.uint8)
        while True:
            try:
                value = turns.pop()
            except IndexError:
                return
            warm.copy_(value)
            packed = zstandard.ZstdCompressor(level=1).compress(warm.numpy())
            path = folder / f"{threading.get_ident()}"
            path.write_bytes(packed)
            zstandard.ZstdDecompressor().decompress(path.read_bytes())
            warm.copy_(value)

    async def work() -> None:
        threads = [threading.Thread(target=carry, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):  # noqa: ASYNC110  # plain threads set no event
            await asyncio.sleep(0.01)

    return await lag_beside(work)


async def beside_disk(folder: Path, values: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Write the values to a disk tier, read and list them, over and over."""
    config = {
        "deadline_seconds": 60,
        "tiers": [{"backend": "local-disk", "path": str(folder), "capacity": "4GiB", "threads": THREADS}],
    }
    async with kvtier.open_chunks(config) as store:

        async def work() -> None:
            for _ in range(rounds):
                await store.delete_many(list(values))
                await store.put_many(values)
                await store.flush()
                await store.get_many(list(values))
                _ = [entry async for entry in store.list()]

        return await lag_beside(work)


async def beside_plain_files(folder: Path, values: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Write the same bytes to files in plain threads, and read them back, past the page cache too."""
    turns = list(values.values()) * rounds
    memory = [mmap.mmap(-1, VALUE) for _ in range(THREADS)]

    def carry(page: mmap.mmap) -> None:
        view = memoryview(page)
        warm = torch.frombuffer(view, dtype=torch.uint8)
        while True:
            try:
                value = turns.pop()
            except IndexError:
                return
            warm.copy_(value)
            path = folder / f"{threading.get_ident()}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.pwritev(fd, [view], 0)
            os.preadv(fd, [view], 0)
            os.close(fd)
            path.unlink()
            xxhash.xxh3_64(view).intdigest()

    async def work() -> None:
        threads = [threading.Thread(target=carry, args=(page,), daemon=True) for page in memory]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):  # noqa: ASYNC110  # plain threads set no event
            await asyncio.sleep(0.01)

    return await lag_beside(work)


def _figures(late: list[float]) -> dict[str, float]:
    return {
        "beats": len(late),
        "p50": late[len(late) // 2],
        "p99": late[int(len(late) * 0.99) - 1],
        "max": late[-1],
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Run, print, and write `results/loop_lag.json`, or `results/loop_lag_disk.json`."""
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--disk", action="store_true", help="a disk alone, without memory and codec")
    options = flags.parse_args(arguments)
    store, control = (beside_disk, beside_plain_files) if options.disk else (beside_store, beside_threads)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    values = {
        f"key {i}": torch.randint(0, 256, (VALUE,), dtype=torch.uint8, generator=generator) for i in range(VALUES)
    }
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVTIER_BENCH_DIR")) as folder:
        found = {
            "idle": _figures(asyncio.run(lag_beside(lambda: asyncio.sleep(2.0)))),
            "control": _figures(asyncio.run(control(Path(folder), values, options.rounds))),
            "store": _figures(asyncio.run(store(Path(folder) / "tier", values, options.rounds))),
        }
    allowed = {"p99": max(0.025, 1.5 * found["control"]["p99"]), "max": found["control"]["max"] + 0.05}
    for name, figures in found.items():
        print(f"{name:8}", {key: round(value, 5) for key, value in figures.items()})
    met = {key: found["store"][key] <= bound for key, bound in allowed.items()}
    print(
        "allowed ", {key: round(value, 5) for key, value in allowed.items()}, "met" if all(met.values()) else "MISSED"
    )
    if not options.no_save:
        extra = {"lag_seconds": found, "allowed": allowed, "met": met, "value_bytes": VALUE, "values": VALUES}
        save(
            "loop_lag_disk" if options.disk else "loop_lag",
            [],
            flags=vars(options),
            extra=extra | {"machine_after": machine()},
        )
    return found


if __name__ == "__main__":
    main()
