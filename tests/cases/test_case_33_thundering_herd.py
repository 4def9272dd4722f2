"""Case 33: many who want one value cost one read; who is cancelled, or fails, hurts no other."""

import asyncio
from collections import Counter

import pytest
import torch

from kvtier.store import open_chunks
from kvtier.testing.faults import FlakyBackend, HangingBackend, SlowBackend
from kvtier.testing.memory import MemoryBackend

HERD = 200
CANCELLED = [7 * i % HERD for i in range(50)]  # the first, and 49 spread over the others
VALUE = torch.arange(20_000, dtype=torch.int32)


class CountingBackend(MemoryBackend):
    """Counts what it is asked for, by name."""

    def __init__(self, medium):
        super().__init__(medium)
        self.reads, self.writes = Counter(), Counter()

    async def read_many(self, reads):
        self.reads.update(read.name for read in reads)
        return await super().read_many(reads)

    async def write_many(self, writes):
        self.writes.update(write.name for write in writes)
        return await super().write_many(writes)


@pytest.fixture
async def medium():
    """A remote that holds "key" already."""
    medium = {}
    async with open_chunks({"tiers": [tier(MemoryBackend(medium))]}) as store:
        await store.put("key", VALUE, wait="remote")
    return medium


def tier(backend):
    return {"backend": backend, "name": "remote", "capacity": "64MiB"}


def open_over(backend):
    tiers = [{"backend": "pinned-cpu", "capacity": "16MiB"}, tier(backend)]
    return open_chunks({"tiers": tiers, "deadline_seconds": 60})


def herd(store):
    return [asyncio.ensure_future(store.get("key")) for _ in range(HERD)]


async def test_200_gets_are_one_read_even_when_50_are_cancelled(medium):
    counting = CountingBackend(medium)
    hanging = HangingBackend(counting)
    async with open_over(hanging) as store:
        hanging.hang("read")
        gets = herd(store)
        await hanging.wait_stuck()
        for i in CANCELLED:
            gets[i].cancel()
        await asyncio.sleep(0)
        hanging.release()
        ends = await asyncio.gather(*gets, return_exceptions=True)
        cancelled = [isinstance(end, asyncio.CancelledError) for end in ends]
        assert cancelled[0]
        assert sum(cancelled) == 50
        assert all(torch.equal(end, VALUE) for end, gone in zip(ends, cancelled, strict=True) if not gone)
        assert sum(counting.reads.values()) == 1
        del ends, gets
        stats = store.stats()
        assert stats.tiers["remote"].joined == HERD - 1
        assert stats.tiers["remote"].hits == 1
        assert stats.reads_under_way == 0
        assert stats.tiers["remote"].in_flight_bytes == 0


async def test_all_cancelled_leaves_nothing_behind_and_the_next_get_is_served(medium):
    hanging = HangingBackend(MemoryBackend(medium))
    async with open_over(hanging) as store:
        hanging.hang("read")
        gets = herd(store)
        await hanging.wait_stuck()
        for get in gets:
            get.cancel()
        await asyncio.gather(*gets, return_exceptions=True)
        late = asyncio.ensure_future(store.get("key"))
        await asyncio.sleep(0)
        hanging.release()
        assert torch.equal(await late, VALUE)
        assert store.stats().reads_under_way == 0


async def test_in_a_slow_medium_and_while_gets_keep_coming(medium):
    counting = CountingBackend(medium)
    async with open_over(SlowBackend(counting, seconds={"read": 0.2, "stat": 0.05})) as store:
        gets = []
        for _ in range(HERD):
            gets.append(asyncio.ensure_future(store.get("key")))
            await asyncio.sleep(0.001)
        assert all(torch.equal(value, VALUE) for value in await asyncio.gather(*gets))
        assert sum(counting.reads.values()) == 1, "later gets are served from the memory the first read filled"


async def test_a_failure_is_shared_but_not_remembered(medium):
    counting = CountingBackend(medium)
    flaky = FlakyBackend(HangingBackend(counting), verbs=frozenset({"read"}))
    async with open_over(flaky) as store:
        assert await store.exists("key")
        flaky.fail_next(1)
        assert await asyncio.gather(*herd(store)) == [None] * HERD
        assert (flaky.failures, sum(counting.reads.values())) == (1, 0)
        assert store.stats().tiers["remote"].errors == 1
        assert store.stats().tiers["remote"].up
        assert all(torch.equal(value, VALUE) for value in await asyncio.gather(*herd(store)))
        assert sum(counting.reads.values()) == 1


async def test_a_batch_that_names_a_key_twice_reads_it_once(medium):
    counting = CountingBackend(medium)
    async with open_over(counting) as store:
        found = await store.get_many(["key"] * 20)
        assert all(torch.equal(value, VALUE) for value in found)
        assert sum(counting.reads.values()) == 1


@pytest.mark.parametrize("with_memory", [True, False])
async def test_100_puts_of_one_key_are_one_entry_counted_once(with_memory):
    medium = {}
    counting = CountingBackend(medium)
    tiers = [{"backend": "pinned-cpu", "capacity": "64MiB"}] * with_memory
    slow = SlowBackend(counting, seconds={"write": 0.02})
    async with open_chunks({"tiers": [*tiers, tier(slow)], "deadline_seconds": 60}) as store:
        results = await asyncio.gather(*(store.put("key", VALUE) for _ in range(100)))
        assert sum(result.count("stored") + result.count("queued") for result in results) >= 1
        await store.flush()
        assert torch.equal(await store.get("key"), VALUE)
        stats = store.stats().tiers["remote"]
        assert len(medium) == 1
        assert stats.entries == 1
        assert stats.bytes == sum(len(stored.value) for stored in medium.values())
        assert sum(counting.writes.values()) < 20, "puts of one key on their way to a slow medium replace each other"
        for each in store.stats().tiers.values():
            assert each.entries == 1
            assert each.found + each.written - each.evicted - each.deleted == 1
