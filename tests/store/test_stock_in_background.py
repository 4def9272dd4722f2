"""A store serves before it knows all that its disk holds; what it does meanwhile is not undone by what it learns."""

import asyncio

import pytest

import kvtier
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.config import TierConfig
from kvtier.errors import BackendUnavailableError
from kvtier.tier import opening

NAMES = [f"{'0' * 16}/{'1' * 16}/{i:032x}" for i in range(40)] + [f"free key {i}" for i in range(20)]


class Held(LocalDiskBackend):
    """Its listing has told everything, and does not end until it is let go on. It notes what is written."""

    def __init__(self, path):
        super().__init__(path=path)
        self.go_on = asyncio.Event()
        self.reached = asyncio.Event()
        self.fault = None
        self.written = []

    async def scan(self, after=None):
        async for page in super().scan(after):
            yield page
        self.reached.set()
        await self.go_on.wait()
        if self.fault is not None:
            raise self.fault

    async def write_many(self, writes):
        self.written += [write.name for write in writes]
        return await super().write_many(writes)


def value(key):
    return key.encode() * 20


@pytest.fixture
async def filled(tmp_path, monkeypatch):
    """A directory with entries, and opens that do not wait for its listing."""
    config = {"tiers": [{"backend": "local-disk", "name": "disk", "path": str(tmp_path / "root"), "capacity": "1MiB"}]}
    async with kvtier.open_chunks(config) as store:
        for key in NAMES:
            await store.put(key, value(key), wait="durable")
        await store.flush()
    monkeypatch.setattr(opening, "STOCK_SECONDS", 0.01)
    return tmp_path / "root"


def held_store(root, capacity="1MiB"):
    backend = Held(root)
    tiers = [TierConfig(backend=backend, name="disk", capacity=capacity)]
    return kvtier.open_chunks({"tiers": tiers, "deadline_seconds": 60}), backend


def entries(store):
    return store.stats().tiers["disk"].entries


async def settled(store, backend):
    backend.go_on.set()
    await asyncio.wait({store._engine.tiers[0].stock})


async def test_gets_are_served_before_the_stock_is_taken(filled):
    store, backend = held_store(filled)
    async with store:
        assert entries(store) == 0
        for key in (NAMES[0], NAMES[-1]):
            assert bytes(await store.get(key)) == value(key)
            assert await store.exists(key)
        assert await store.get("free key 99") is None
        assert entries(store) == 2
        await settled(store, backend)
        assert entries(store) == len(NAMES)
        assert store.stats().tiers["disk"].bytes == sum(path.stat().st_size for path in filled.glob("entries/*/*/*"))


async def test_a_list_waits_for_the_stock(filled):
    store, backend = held_store(filled)
    async with store:
        listing = asyncio.ensure_future(_keys(store))
        await backend.reached.wait()
        assert not listing.done()
        backend.go_on.set()
        assert sorted(await listing) == sorted(NAMES)


async def _keys(store):
    return [entry.key async for entry in store.list("", deadline_seconds=60)]


async def test_writes_wait_until_it_is_known_what_could_go_for_them(filled):
    """A directory that is full: a write before the stock is taken would have nothing to evict."""
    store, backend = held_store(filled, capacity=sum(path.stat().st_size for path in filled.glob("entries/*/*/*")))
    async with store:
        putting = asyncio.ensure_future(store.put("new", b"new", wait="durable", deadline_seconds=60))
        await backend.reached.wait()
        for key in NAMES[:10]:  # each takes more turns of loop and threads than a write needs to get to the disk
            assert bytes(await store.get(key)) == value(key)
        assert not putting.done()
        assert backend.written == []
        backend.go_on.set()
        await putting
        assert bytes(await store.get("new")) == b"new"
        tier = store.stats().tiers["disk"]
        assert tier.evicted == 1
        assert tier.bytes <= tier.capacity


async def test_what_is_deleted_or_cleared_meanwhile_stays_away(filled):
    store, backend = held_store(filled)
    async with store:
        await backend.reached.wait()
        assert await store.delete(NAMES[3]) is True
        assert await store.delete(NAMES[-1]) is True
        await settled(store, backend)
        assert entries(store) == len(NAMES) - 2
        left = await _keys(store)
        assert NAMES[3] not in left
        assert NAMES[-1] not in left
        assert await store.get(NAMES[3]) is None
        assert len(left) == len(NAMES) - 2
    async with kvtier.open_chunks(
        {"tiers": [{"backend": "local-disk", "path": str(filled), "capacity": "1MiB"}]}
    ) as again:
        assert len(await _keys(again)) == len(NAMES) - 2


async def test_what_is_met_by_its_key_meanwhile_is_counted_once(filled):
    for path in (filled / "journal").iterdir():
        path.unlink()  # hashed names tell no key then
    store, backend = held_store(filled)
    async with store:
        assert bytes(await store.get("free key 7")) == value("free key 7")
        await settled(store, backend)
        assert entries(store) == len(NAMES)
        assert sorted(await _keys(store)) == sorted(NAMES)
        assert entries(store) == len(NAMES)


async def test_a_listing_that_fails_puts_the_tier_out_of_service_until_it_works(filled):
    store, backend = held_store(filled)
    async with store:
        await backend.reached.wait()
        backend.fault = BackendUnavailableError("the drive went away")
        await settled(store, backend)
        assert not store.stats().tiers["disk"].up
        assert await store.get(NAMES[0]) is None
        backend.fault = None
        while not store.stats().tiers["disk"].up:
            await asyncio.sleep(0.01)
        await asyncio.wait({store._engine.tiers[0].stock})
        assert bytes(await store.get(NAMES[0])) == value(NAMES[0])
        assert entries(store) == len(NAMES)


async def test_a_close_does_not_wait_for_the_stock(filled):
    store, backend = held_store(filled)
    async with store:
        await backend.reached.wait()
    async with kvtier.open_chunks(
        {"tiers": [{"backend": "local-disk", "path": str(filled), "capacity": "1MiB"}]}
    ) as again:
        assert sorted(await _keys(again)) == sorted(NAMES)


async def test_a_clear_reaches_what_only_the_journal_could_name(filled):
    """Hashed names say nothing of their keys: what the listing finds under a cleared prefix goes all the same."""
    store, backend = held_store(filled)
    async with store:
        await backend.reached.wait()
        from kvtier.concurrency.deadline import Deadline
        from kvtier.store.removal import clear_prefix

        engine = store._engine
        clearing = asyncio.ensure_future(clear_prefix(engine, "free key", Deadline.after(60, engine.clock)))
        for _ in range(20):
            await asyncio.sleep(0)
        await store.put("free key new", b"new")
        await settled(store, backend)
        await clearing
        await store.flush()
        left = await _keys(store)
        assert sorted(left) == sorted([*NAMES[:40], "free key new"])
        assert bytes(await store.get("free key new")) == b"new"
