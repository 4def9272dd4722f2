"""Case 31: whatever a third-party backend raises, the background writer lives, frees the memory and tells of it."""

import asyncio
import itertools
import time

import pytest

from kvtier.backends.bytes_backend import BytesBackend
from kvtier.store import open_chunks
from kvtier.testing.faults import HangingBackend
from kvtier.testing.memory import MemoryBackend

ERRORS = [OSError, ValueError, RuntimeError, asyncio.TimeoutError, asyncio.CancelledError]
PUTS = 10
VALUE = bytes(64 << 10)
GENEROUS = 20.0  # seconds on a busy machine, for what is bound to end much sooner


class SickBackend(BytesBackend):
    """A plug-in written in a hurry: its `put` raises `sickness`, or waits for `waking` when told to hang."""

    def __init__(self):
        self.values = {}
        self.sickness = None
        self.hangs = 0
        self.waking = asyncio.Event()

    async def get(self, name):
        return self.values.get(name)

    async def put(self, name, value, expires):
        if self.hangs:
            self.hangs -= 1
            await self.waking.wait()
        if self.sickness is not None:
            raise self.sickness("sick")
        self.values[name] = value

    async def delete(self, name):
        return self.values.pop(name, None) is not None

    async def names(self):
        return list(self.values)


class RawBackend(MemoryBackend):
    """The same below the easy base class, where nothing translates what it raises."""

    def __init__(self):
        super().__init__()
        self.sickness = None

    @property
    def values(self):
        return self.medium

    async def write_many(self, writes):
        if self.sickness is not None:
            raise self.sickness("sick")
        return await super().write_many(writes)


def open_over(backend, *, with_memory=True, **options):
    memory = [{"backend": "pinned-cpu", "capacity": "64MiB"}] * with_memory
    remote = {"backend": backend, "name": "remote", "capacity": "64MiB", "deadline_seconds": 1.0, **options}
    sizes = {"staging_bytes": "4MiB"}
    return open_chunks({"tiers": [*memory, remote], "deadline_seconds": 30, "close_seconds": 3.0, "memory": sizes})


async def until(true):
    async with asyncio.timeout(GENEROUS):
        while not true():
            await asyncio.sleep(0.01)


def remote(store):
    return store.stats().tiers["remote"]


@pytest.mark.parametrize(("make", "with_memory"), [(SickBackend, True), (RawBackend, False)])
async def test_each_error_in_turn_then_it_heals(make, with_memory):
    backend, number = make(), itertools.count()
    async with open_over(backend, with_memory=with_memory) as store:
        used, failed = store.stats().memory.arena_used, 0
        for error in ERRORS:
            backend.sickness = error
            for _ in range(PUTS):
                await store.put(f"key {next(number)}", VALUE)
            result = await store.flush(deadline_seconds=GENEROUS)
            told = result.tiers["remote"]
            failed += told.failed
            assert not result.complete
            assert told.last_error
            assert remote(store).last_error
            assert remote(store).queued_bytes == remote(store).in_flight_bytes == 0
            assert not remote(store).up, "ten failures in a row, and the tier counts as healthy"
            backend.sickness = None
            await until(lambda: remote(store).up)
            await store.put("between", b"1", wait="remote")
        assert failed >= len(ERRORS) * 3, "the failures that opened the breaker, at least"
        if not with_memory:
            await store.delete("between")
            await until(lambda: store.stats().memory.arena_used == used)
        wanted = {f"later {i}": bytes([i]) * 100 for i in range(PUTS)}
        await store.put_many(wanted)
        async with asyncio.timeout(GENEROUS):
            while not (await store.flush()).complete:  # it counts what failed writes may have left behind as pending
                await asyncio.sleep(0.05)
        assert await store.get_many(list(wanted)) == list(wanted.values())
        assert len(backend.values) == remote(store).entries


async def test_one_failure_spoils_only_its_own_put():
    backend = SickBackend()
    async with open_over(backend, with_memory=False, writers=1) as store:
        await store.put("before", b"1", wait="remote")
        backend.sickness = OSError
        await store.put("lost", VALUE)
        assert (await store.flush()).tiers["remote"].failed == 1
        backend.sickness = None
        await store.put("after", b"2", wait="remote")
        assert await store.get_many(["before", "lost", "after"]) == [b"1", None, b"2"]
        assert remote(store).up


async def test_a_write_that_hangs_is_given_up_and_the_others_go_on():
    backend = SickBackend()
    async with open_over(backend, writers=2) as store:
        backend.hangs = 1
        for i in range(PUTS):
            await store.put(f"key {i}", VALUE)
        result = await store.flush(deadline_seconds=3.0)
        assert (result.tiers["remote"].stored, result.tiers["remote"].failed) == (PUTS - 1, 1)
        assert "time" in result.tiers["remote"].last_error
        assert remote(store).write_timeouts == 1
        await store.put("later", b"1", wait="remote")
        backend.waking.set()
        await until(lambda: remote(store).in_flight_bytes == 0)


@pytest.mark.parametrize("stubborn", [False, True])
async def test_closing_ends_while_everything_hangs(stubborn):
    backend = HangingBackend(MemoryBackend(), stubborn=stubborn)
    store = await open_over(backend)
    backend.hang()
    backend.hang("close")
    for i in range(PUTS):
        await store.put(f"key {i}", VALUE)
    await backend.wait_stuck()
    began = time.monotonic()
    await store.aclose()
    assert time.monotonic() - began < GENEROUS
    backend.release()
    async with asyncio.timeout(GENEROUS):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


async def test_queue_and_memory_do_not_grow_while_it_is_sick():
    backend = SickBackend()
    async with open_over(backend, with_memory=False, write_queue_bytes="1MiB") as store:
        backend.sickness = RuntimeError
        for i in range(200):
            await store.put(f"key {i}", VALUE)
            assert remote(store).queued_bytes <= 1 << 20
            assert store.stats().memory.arena_used <= 4 << 20
        await store.flush(deadline_seconds=GENEROUS)
        stats = store.stats()
        assert stats.tiers["remote"].queued == 0
        assert sum(stats.tiers["remote"].dropped.values()) >= 200
        assert stats.memory.arena_used == 0
