"""Case 29: what readers hold never changes while a writer churns; when they are gone, however, all is usable again."""

import asyncio
import gc
import math
import zlib

import pytest
import torch

import kvtier

LAYOUT = kvtier.KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, dtype="float32")
CHUNK = 16  # tokens: 128 KiB of KV
CHUNK_BYTES = 128 << 10
CHUNKS = 2  # per prompt
CAPACITY = 4 << 20
SLACK = 1 << 20  # values in flight
READERS = 8
PUTS = 160  # 80 MiB through 4 MiB
NOISE = torch.randn(1 << 18, generator=torch.Generator().manual_seed(29))
HOT = 4  # prompts that readers read; the writer puts them anew all along


class ReaderError(Exception):
    """What a reader dies of."""


@pytest.fixture
async def store():
    config = {
        "chunk_tokens": CHUNK,
        "deadline_seconds": 60,
        "tiers": [{"backend": "pinned-cpu", "name": "memory", "capacity": CAPACITY}],
        "memory": {"staging_bytes": SLACK},
    }
    namespace = kvtier.Namespace(model="org/model", revision="1")
    async with kvtier.open(config, namespace=namespace, layout=LAYOUT) as store:
        yield store


def tokens_of(number):
    return [number] * (CHUNK * CHUNKS)


def kv_of(number):
    shape = (4, CHUNK * CHUNKS, 4, 64)
    elements = math.prod(shape)
    return {name: NOISE[first : first + elements].view(shape) for name, first in (("k", number), ("v", number + 5000))}


def checksum(tensor):
    return zlib.crc32(tensor.contiguous().numpy())


def sums_of(number):
    """What each chunk's tensors must sum to, computed from the source."""
    return {
        (name, chunk): checksum(tensor[:, chunk * CHUNK : (chunk + 1) * CHUNK])
        for name, tensor in kv_of(number).items()
        for chunk in range(CHUNKS)
    }


SUMS = [sums_of(number) for number in range(HOT)]


class Reader:
    """Holds what it got and sums it again and again; every other one never lets go as it should."""

    def __init__(self, store, number):
        self.store, self.number = store, number
        self.rounds = 0

    async def run(self):
        prompt = self.number % HOT
        while True:
            await (self._lease(prompt) if self.number % 4 < 2 else self._get(prompt))
            prompt = (prompt + 1) % HOT

    async def _get(self, prompt):
        hit = await self.store.get(tokens_of(prompt))
        if hit is not None:
            held = {
                (name, chunk): tensor[:, chunk * CHUNK : (chunk + 1) * CHUNK]
                for name, tensor in hit.kv.items()
                for chunk in range(hit.num_tokens // CHUNK)
            }
            await self._watch(held, prompt)
        await asyncio.sleep(0)

    async def _lease(self, prompt):
        async with self.store.lease(tokens_of(prompt)) as lease:
            held = {(name, part.start // CHUNK): part[name] for part in lease.chunks for name in ("k", "v")}
            if held:
                await self._watch(held, prompt)
                if self.number % 2 and self.rounds > 20:
                    raise ReaderError(held)  # the traceback and the exception hold the views
        await asyncio.sleep(0)

    async def _watch(self, held, prompt):
        for _ in range(4):
            for place, tensor in held.items():
                assert checksum(tensor) == SUMS[prompt][place], f"prompt {prompt} changed while it was held"
            self.rounds += 1
            await asyncio.sleep(0.002)


async def put(store, number):
    await store.put(tokens_of(number), kv_of(number), deadline_seconds=30)
    tier = store.stats().tiers["memory"]
    assert tier.bytes <= CAPACITY + SLACK
    assert store.stats().memory.arena_used <= CAPACITY + SLACK


async def assert_whole_capacity_is_usable(store):
    """The tier takes as many new values as when it was new, and keeps them."""
    await asyncio.sleep(0)  # the turn of the loop that woke the caller holds on to what it waited for
    gc.collect()
    assert store.stats().memory.leased == 0
    await store.clear()
    assert store.stats().memory.arena_used == 0, "memory is still held by somebody who is gone"
    fitting = CAPACITY // (CHUNK_BYTES + 4096) // CHUNKS
    for number in range(1000, 1000 + fitting):
        result = await store.put(tokens_of(number), kv_of(number))
        assert result.count("stored") == CHUNKS, str(result)
    for number in range(1000, 1000 + fitting):
        assert await store.exists(tokens_of(number)) == CHUNK * CHUNKS, "it did not all fit at once"


async def test_held_tensors_never_change_and_nothing_stays_pinned(store):
    for number in range(HOT):
        await put(store, number)
    readers = [Reader(store, number) for number in range(READERS)]
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    for number in range(PUTS):
        await put(store, 100 + number)
        await put(store, number % HOT)
        await asyncio.sleep(0)
    assert store.stats().tiers["memory"].evicted > PUTS, "the writer did not churn"
    assert min(reader.rounds for reader in readers) > 4, "a reader never got anything to hold"
    assert sum(task.cancel() for task in tasks) >= READERS / 2
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [end for end in ends if not isinstance(end, ReaderError | asyncio.CancelledError)] == []
    assert any(isinstance(end, ReaderError) for end in ends)
    del ends, tasks, readers
    await assert_whole_capacity_is_usable(store)


async def test_a_view_outlives_its_lease_eviction_and_deletion(store):
    await put(store, 0)
    async with store.lease(tokens_of(0)) as lease:
        views = {(name, part.start // CHUNK): part[name] for part in lease.chunks for name in ("k", "v")}
    del lease
    deleting = asyncio.create_task(store.delete(tokens_of(0)))
    for number in range(1, 40):
        await put(store, number)
    assert await deleting == CHUNKS
    assert await store.get(tokens_of(0)) is None
    assert {place: checksum(tensor) for place, tensor in views.items()} == SUMS[0]
    del views
    await assert_whole_capacity_is_usable(store)


async def test_a_delete_while_gets_are_under_way_neither_corrupts_nor_hangs(store):
    for turn in range(40):
        await put(store, turn % HOT)
        gets = [asyncio.create_task(store.get(tokens_of(turn % HOT))) for _ in range(4)]
        for _ in range(turn % 5):
            await asyncio.sleep(0)
        await store.delete(tokens_of(turn % HOT), deadline_seconds=30)
        for hit in await asyncio.gather(*gets):
            if hit is not None:
                first = {name: checksum(tensor[:, :CHUNK]) for name, tensor in hit.kv.items()}
                assert first == {name: SUMS[turn % HOT][name, 0] for name in ("k", "v")}
        assert await store.get(tokens_of(turn % HOT)) is None
    del gets, hit
    await assert_whole_capacity_is_usable(store)


async def test_a_lease_abandoned_in_mid_air_is_given_back(store):
    await put(store, 0)
    entered = asyncio.Event()

    async def hold():
        async with store.lease(tokens_of(0)) as lease:
            entered.set()
            assert lease.num_tokens
            await asyncio.Event().wait()

    holders = [asyncio.create_task(hold()) for _ in range(3)]
    await entered.wait()
    assert store.stats().memory.leased > 0
    assert all(holder.cancel() for holder in holders)
    await asyncio.gather(*holders, return_exceptions=True)
    del holders
    await assert_whole_capacity_is_usable(store)
