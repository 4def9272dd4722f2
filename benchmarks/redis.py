"""Values of 32 MiB to and from Valkey and Redis, beside a raw loopback stream and redis-py's asyncio client.

Every case moves the same unique, incompressible values over TCP loopback (or a unix socket where it says so); the
server shares the machine's cores with the client, as the stream's sink does with its source.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import redis.asyncio as redis_py

import kvtier
from benchmarks.harness import MIB, Case, measure, parser, save, show
from benchmarks.redis_bare import VALUE, VALUES, Anew, Loop, Plain, Stream, memory
from kvtier.backends.base import Read, Stat, Write, Written
from kvtier.backends.redis import RedisBackend
from kvtier.options import SecretUrl
from kvtier.testing.context import lend_context
from kvtier.testing.servers.redis_servers import RedisServer, redis_program, valkey_program

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from benchmarks.harness import Figure

LAG_ROUNDS = 5
GOALS = {"valkey": 0.9, "redis": 0.8}
CLIENT_GOAL = 4.0
MOST_GETS = 50  # that a frozen server may cost before its breaker opens; each takes a second


class Kvtier:
    """The backend as a tier uses it: values between mapped memory and the server, `at_once` in flight."""

    def __init__(self, url: str, values: Sequence[memoryview], into: Sequence[memoryview], *, at_once: int) -> None:
        self.loop = Loop()
        self._backend = RedisBackend(url=SecretUrl(url), prefix=f"bench-{os.getpid()}-{at_once}")
        self._values, self._into = values, into
        self._at_once = at_once
        self._end: asyncio.Event = asyncio.Event()
        self._open = threading.Event()
        self._closed = asyncio.run_coroutine_threadsafe(self._life(), self.loop.loop)
        self._open.wait(30)

    async def _life(self) -> None:
        async with lend_context(threads=4) as context:
            await self._backend.open(context)
            self._open.set()
            await self._end.wait()
            await self._backend.delete_many([f"v{i}" for i in range(VALUES)])
            await self._backend.aclose()

    def close(self) -> None:
        """Delete what was put, and end."""
        self.loop.loop.call_soon_threadsafe(self._end.set)
        self._closed.result()

    def put(self) -> None:
        """Put every value."""
        self.loop.run(self._each(self._put))

    def get(self) -> None:
        """Get every value."""
        self.loop.run(self._each(self._get))

    async def _each(self, work: Callable[[int], Coroutine[None, None, None]]) -> None:
        turns = asyncio.Semaphore(self._at_once)

        async def one(i: int) -> None:
            async with turns:
                await work(i)

        await asyncio.gather(*(one(i) for i in range(VALUES)))

    async def _put(self, i: int) -> None:
        (answer,) = await self._backend.write_many([Write(f"v{i}", [self._values[i]])])
        if answer != Written(VALUE):
            raise RuntimeError(f"not written: {answer}")

    async def _get(self, i: int) -> None:
        (answer,) = await self._backend.read_many([Read(f"v{i}", [self._into[i]])])
        if answer != VALUE:
            raise RuntimeError(f"not read: {answer}")


class Client:
    """redis-py's asyncio client as its documentation has it."""

    def __init__(self, port: int, values: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        self.loop = Loop()
        self._port = port
        self._values, self._into = [bytes(value) for value in values], into
        self._client: redis_py.Redis | None = None

    def put(self) -> None:
        """Put every value."""
        self.loop.run(self._put())

    def get(self) -> None:
        """Get every value."""
        self.loop.run(self._get())

    def _connected(self) -> redis_py.Redis:
        if self._client is None:
            self._client = redis_py.Redis(port=self._port)
        return self._client

    async def _put(self) -> None:
        for i, value in enumerate(self._values):
            await self._connected().set(f"plain{i}", value)

    async def _get(self) -> None:
        for i, into in enumerate(self._into):
            into[:] = await self._connected().get(f"plain{i}")

    def close(self) -> None:
        """Delete what was put, and end."""

        async def end() -> None:
            for i in range(VALUES):
                await self._connected().delete(f"plain{i}")
            await self._connected().aclose()

        self.loop.run(end())


POPULATE = """
for i = 0, 99999 do
    local name = string.format('%016x.%016x.%032x', math.floor(i / 10000), 7, i)
    redis.call('SET', ARGV[1] .. ':{00}:e:' .. name, 'x')
    local member = name .. ' 33554432 0 1796000000.123 0123456789abcdef.16384.2097152'
    redis.call('ZADD', ARGV[1] .. ':{00}:index', 0, member)
end
"""


async def listing(url: str) -> dict[str, float]:
    """Return how long it takes to list 10,000 of 100,000 entries by prefix, and all, in ms (medians of 7)."""
    prefix = f"listing-{os.getpid()}"
    client = redis_py.Redis.from_url(url, socket_timeout=120)
    await client.eval(POPULATE, 0, prefix)  # type: ignore[misc]  # redis-py says it may be no coroutine
    backend = RedisBackend(url=SecretUrl(url), prefix=prefix)
    took: dict[str, list[float]] = {"prefix": [], "all": []}
    async with lend_context() as context:
        await backend.open(context)
        for _ in range(7):
            for what, pages in (("prefix", backend.scan_under(f"{3:016x}.")), ("all", backend.scan())):
                found: list[Stat] = []  # the one before is let go now: what that takes is no part of the next
                began = time.perf_counter()
                found = [stat async for page in pages for stat in page]
                took[what].append(time.perf_counter() - began)
                if len(found) != {"prefix": 10_000, "all": 100_000}[what]:
                    raise RuntimeError(f"{len(found)} entries listed")
        await backend.aclose()
    await client.flushdb()
    await client.aclose()
    return {what: round(statistics.median(seconds) * 1e3, 2) for what, seconds in took.items()}


async def outage(server: RedisServer) -> dict[str, object]:
    """Return what a server that says nothing any more costs a get of a store, and how soon it is used again."""
    tier = {"backend": "redis", "name": "redis", "url": server.url, "capacity": "1GiB", "deadline_seconds": 1.0}
    async with kvtier.open_chunks({"tiers": [{**tier, "promote": "never"}], "deadline_seconds": 1.0}) as store:
        await store.put("key", bytes(4 * MIB), wait="redis", deadline_seconds=10)
        server.freeze()
        until_open, open_ms = [], []
        while store.stats().tiers["redis"].up:
            if len(until_open) > MOST_GETS:
                raise RuntimeError("the server that was frozen answers")
            began = time.perf_counter()
            await store.get("key")
            until_open.append(round(time.perf_counter() - began, 3))
        for _ in range(100):
            began = time.perf_counter()
            await store.get("key")
            open_ms.append((time.perf_counter() - began) * 1e3)
        server.thaw()
        began = time.perf_counter()
        while not store.stats().tiers["redis"].up:  # noqa: ASYNC110  # what a user sees, not what an event tells
            await asyncio.sleep(0.01)
        recovered = time.perf_counter() - began
        found = await store.get("key", deadline_seconds=5) is not None
    return {
        "deadline_seconds": 1.0,
        "gets until the breaker opens, s": until_open,
        "slowest get once it is open, ms": round(max(open_ms), 3),
        "back in service after, s": round(recovered, 2),
        "value found then": found,
    }


def lags(sides: Mapping[str, Kvtier | Plain | Client]) -> dict[str, dict[str, float]]:
    """Return how late the loop was beside each way to move the values; plain threads are the control."""
    for side in sides.values():
        side.loop.beats = True
    for _ in range(LAG_ROUNDS):
        for side in sides.values():
            side.put()
            side.get()
    return {name: lateness(side.loop.late) for name, side in sides.items()}


def lateness(late: Sequence[float]) -> dict[str, float]:
    ordered = sorted(late) or [0.0]
    return {"p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2), "max_ms": round(ordered[-1] * 1e3, 2)}


def main() -> None:
    flags = parser(__doc__, rounds=7)
    flags.add_argument("--only", choices=["valkey", "redis"], help="one server instead of both")
    arguments = flags.parse_args()
    values, into = memory(VALUES), memory(VALUES)
    size = VALUE * VALUES
    report: dict[str, object] = {}
    figures: list[Figure] = []
    for family, program in (("valkey", valkey_program()), ("redis", redis_program())):
        if program is None or arguments.only not in {None, family}:
            continue
        with ExitStack() as stack:
            stream, kept = Stream(values, keeps=False), Stream(values, keeps=True)
            stack.callback(stream.close)
            stack.callback(kept.close)
            server = stack.enter_context(RedisServer(program, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            sides: dict[str, Kvtier | Plain | Client] = {
                "kvtier tcp": Kvtier(server.url, values, into, at_once=1),
                "kvtier tcp x4": Kvtier(server.url, values, into, at_once=4),
                "kvtier unix": Kvtier(server.unix_url, values, into, at_once=1),
                "plain threads": Plain(server.port, values, into),
                "plain threads, anew": Anew(server.port, values, into),
                "redis-py": Client(server.port, values, into),
            }
            for side in sides.values():
                stack.callback(side.close)
            cases = [
                Case(name=f"{family} stream", call=stream.send, size=size),
                Case(name=f"{family} stream, kept", call=kept.send, size=size),
            ]
            for name, side in sides.items():
                side.put()
                cases += [
                    Case(name=f"{family} {name} put", call=side.put, size=size),
                    Case(name=f"{family} {name} get", call=side.get, size=size),
                ]
            goals = {f"{family} kvtier tcp {verb}": GOALS[family] for verb in ("put", "get")}
            found = measure(cases, base=f"{family} stream", rounds=arguments.rounds, goals=goals)
            seconds = {figure.name: figure.seconds for figure in found}
            for verb in ("put", "get"):
                ours = seconds[f"{family} kvtier tcp {verb}"]
                for other in ("redis-py", "plain threads", "plain threads, anew", "stream, kept"):
                    theirs = seconds.get(f"{family} {other} {verb}", seconds.get(f"{family} {other}", 0.0))
                    report[f"{family} {verb}: kvtier / {other}"] = round(theirs / ours, 2)
            report[f"{family} loop lag"] = lags(sides)
            report[f"{family} listing, ms"] = asyncio.run(listing(server.url))
            report[f"{family} outage"] = asyncio.run(outage(server))
            report[f"{family} server"] = server.call("INFO", "server").split("\r\n")[2:5]
            figures += found
    show(figures)
    for what, said in report.items():
        print(f"{what}: {said}")
    if not arguments.no_save:
        save("redis", figures, flags=vars(arguments), extra={"also": report, "client_goal": CLIENT_GOAL})


if __name__ == "__main__":
    main()
