"""Deletes, clears and newer puts win over everything begun before them, however late it comes to its end."""

import asyncio

import pytest

from kvtier.testing.faults import HangingBackend
from kvtier.testing.memory import MemoryBackend

TOKENS = list(range(8))


class LateAnswers(MemoryBackend):
    """Reads and looks at once, and answers when it is told to: the answer is then out of date."""

    def __init__(self, medium=None):
        super().__init__(medium)
        self.go = asyncio.Event()
        self.go.set()
        self.waiting = 0

    async def _late(self, answers):
        self.waiting += 1
        await self.go.wait()
        self.waiting -= 1
        return answers

    async def read_many(self, reads):
        return await self._late(await super().read_many(reads))

    async def stat_many(self, names):
        return await self._late(await super().stat_many(names))

    async def scan(self, after=None):
        async for page in super().scan(after):
            yield await self._late(page)


@pytest.fixture(params=["medium", "memory-medium"])
async def late(request, kit, opened):
    """A store on a medium that answers late, and the backend; the value is on the medium only."""
    backend = LateAnswers()
    tiers = [kit.memory()] * (request.param == "memory-medium") + [kit.medium(backend, negative_seconds=0.001)]
    store = await opened(kit.open(*tiers))
    await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
    await store.chunks.put("key", b"old", wait="medium")
    for memory in store._engine.memory_tiers:
        for entry in list(memory.ledger.index.entries.values()):
            memory.drop(entry, "evicted")
    backend.go.clear()
    yield store, backend
    backend.go.set()


async def assert_gone(kit, store):
    for _ in range(3):
        assert await store.get(TOKENS) is None
        assert await store.exists(TOKENS) == 0
        await kit.until(lambda: store.stats().tasks == 1)
    kit.assert_books_balance(store)


@pytest.mark.parametrize("how", ["delete", "clear"])
async def test_a_read_begun_before_a_delete_brings_nothing_back(kit, late, how):
    store, backend = late
    reading = asyncio.ensure_future(store.get(TOKENS))
    await kit.until(lambda: backend.waiting >= 2)
    deleting = asyncio.ensure_future(store.delete(TOKENS) if how == "delete" else store.clear())
    await asyncio.sleep(0)
    after = asyncio.ensure_future(store.get(TOKENS))
    await asyncio.sleep(0.01)
    backend.go.set()
    assert await after is None, "a call begun after the delete was given the deleted value"
    await deleting
    early = await reading
    if early is not None:
        kit.assert_kv(early, TOKENS)
    await assert_gone(kit, store)


async def test_a_read_begun_before_a_newer_put_does_not_hide_it(kit, late):
    store, backend = late
    reading = asyncio.ensure_future(store.chunks.get("key"))
    await kit.until(lambda: backend.waiting >= 1)
    await store.chunks.put("key", b"new", wait="medium")
    after = asyncio.ensure_future(store.chunks.get("key"))
    await asyncio.sleep(0.01)
    backend.go.set()
    assert await after == b"new", "a call begun after the put was given the older value"
    assert await reading in {b"old", b"new"}
    await kit.until(lambda: store.stats().tasks == 1)
    assert await store.chunks.get("key") == b"new"
    kit.assert_books_balance(store)


@pytest.mark.parametrize("look", ["exists", "list", "get"])
async def test_an_answer_older_than_a_delete_is_not_believed(kit, opened, look):
    """Another store put the value; this one learns of it while it deletes it."""
    medium = {}
    async with kit.open(kit.medium(MemoryBackend(medium))) as other:
        await other.put(TOKENS, kit.kv(TOKENS))
    backend = LateAnswers(medium)
    store = await opened(kit.open(kit.memory(), kit.medium(backend, negative_seconds=0.001)))
    backend.go.clear()
    call = {"exists": store.exists, "get": store.get, "list": lambda _: consume(store.list())}[look]
    looking = asyncio.ensure_future(call(TOKENS))
    await kit.until(lambda: backend.waiting >= 1)
    assert await store.delete(TOKENS) == 2
    backend.go.set()
    await looking
    await assert_gone(kit, store)
    assert await consume(store.list()) == []
    assert store.stats().tiers["medium"].entries == 0


async def consume(iterator):
    return [item async for item in iterator]


@pytest.mark.parametrize("how", ["delete", "clear"])
@pytest.mark.parametrize("with_memory", [True, False])
async def test_a_write_begun_before_a_delete_leaves_nothing(kit, opened, how, with_memory):
    medium = {}
    backend = HangingBackend(MemoryBackend(medium))
    store = await opened(kit.open(*[kit.memory()] * with_memory, kit.medium(backend)))
    backend.hang("write")
    await store.put(TOKENS, kit.kv(TOKENS))
    await backend.wait_stuck(2)
    deleting = asyncio.ensure_future(store.delete(TOKENS) if how == "delete" else store.clear())
    await asyncio.sleep(0.01)
    assert await store.get(TOKENS) is None
    backend.release()
    await deleting
    await assert_gone(kit, store)
    assert medium == {}


@pytest.mark.parametrize("how", ["delete", "clear"])
async def test_what_is_put_after_a_delete_that_is_still_under_way_stays(kit, opened, how):
    medium = {}
    backend = HangingBackend(MemoryBackend(medium))
    store = await opened(kit.open(kit.memory(), kit.medium(backend)))
    await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
    backend.hang("delete")
    deleting = asyncio.ensure_future(store.delete(TOKENS) if how == "delete" else store.clear())
    await backend.wait_stuck()
    await store.put(TOKENS, kit.kv(TOKENS, take=2))
    backend.release()
    await deleting
    assert (await store.flush()).complete
    kit.assert_kv(await store.get(TOKENS), TOKENS, take=2)
    assert len(medium) == 2
    for entry in list(store._engine.tiers[0].ledger.index.entries.values()):
        store._engine.tiers[0].drop(entry, "evicted")
    kit.assert_kv(await store.get(TOKENS), TOKENS, take=2)
    kit.assert_books_balance(store)


async def test_nothing_is_remembered_of_changes_once_nothing_older_is_under_way(kit, opened):
    store = await opened(kit.open(kit.memory(), kit.medium()))
    for number in range(200):
        await store.chunks.put(f"k{number}", b"1")
        await store.chunks.delete(f"k{number}")
    await store.clear()
    await store.flush()
    await kit.until(lambda: store.stats().tasks == 1)
    assert store._engine.generations.remembered == 0
    assert store._engine.generations.in_flight == 0
