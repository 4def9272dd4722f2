"""Entries that lost precision, and entries of another kind: told, replaced, never served where they must not be."""

import dataclasses

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.testing.memory import MemoryBackend

TOKENS = list(range(16))


async def parts_of(stream):
    return [part async for part in stream]


async def leased(store):
    async with store.lease(TOKENS) as lease:
        return lease.num_tokens, lease.lossy


@pytest.fixture(params=["memory", "memory-disk", "disk"])
def tiers(request, kit):
    return {"memory": [kit.memory()], "memory-disk": [kit.memory(), kit.disk()], "disk": [kit.disk()]}[request.param]


async def test_what_was_computed_on_a_lossy_hit_stays_marked(kit, opened, tiers):
    store = await opened(kit.open(*tiers))
    await store.put(TOKENS[:8], kit.kv(TOKENS[:8]))
    await store.put(TOKENS, kit.kv(TOKENS), lossy=True)
    await store.flush()
    assert (await store.get(TOKENS[:8])).lossy is False
    hit = await store.get(TOKENS)
    assert hit.lossy is True
    kit.assert_kv(hit, TOKENS)
    assert await leased(store) == (16, True)
    assert [part.lossy for part in await parts_of(store.stream(TOKENS))] == [False, False, True, True]
    assert sorted([entry.lossy async for entry in store.list()]) == [False, False, True, True]


async def test_an_exact_value_replaces_a_lossy_one_everywhere_and_never_the_reverse(kit, opened, tiers):
    store = await opened(kit.open(*tiers))
    await store.put(TOKENS, kit.kv(TOKENS, take=1), lossy=True)
    await store.flush()
    await store.put(TOKENS, kit.kv(TOKENS, take=2))
    await store.flush()
    await store.put(TOKENS, kit.kv(TOKENS, take=3), lossy=True)
    await store.flush()
    hit = await store.get(TOKENS)
    assert hit.lossy is False
    kit.assert_kv(hit, TOKENS, take=2)
    for memory in store._engine.memory_tiers:
        for entry in list(memory.ledger.index.entries.values()):
            memory.drop(entry, "evicted")
    if len(tiers) > 1 or "path" in tiers[0]:
        kit.assert_kv(await store.get(TOKENS), TOKENS, take=2)
    kit.assert_books_balance(store)


async def test_a_lossless_store_never_serves_lossy_entries(kit, opened, tiers):
    store = await opened(kit.open(*tiers, lossless=True))
    await store.put(TOKENS[:8], kit.kv(TOKENS[:8]))
    await store.put(TOKENS, kit.kv(TOKENS), lossy=True)
    await store.flush()
    assert await store.exists(TOKENS) == 8
    assert (await store.get(TOKENS)).num_tokens == 8
    assert await leased(store) == (8, False)
    assert [part.stop for part in await parts_of(store.stream(TOKENS))] == [4, 8]
    assert [part.stop for part in await parts_of(store.stream(TOKENS, by="layer"))] == [8, 8]
    assert await store.touch(TOKENS) == 8
    await store.put(TOKENS, kit.kv(TOKENS))
    kit.assert_kv(await store.get(TOKENS), TOKENS)
    assert await store.exists(TOKENS) == 16


@pytest.mark.parametrize("call", ["get", "lease", "stream", "stream by layer", "prefetch"])
async def test_not_even_those_that_the_journal_does_not_tell_of(kit, opened, call):
    async with kit.open(kit.disk()) as store:
        await store.put(TOKENS, kit.kv(TOKENS), lossy=True)
    for path in (kit.path / "disk" / "journal").iterdir():
        path.unlink()
    store = await opened(kit.open(kit.memory(), kit.disk(), lossless=True))
    if call == "get":
        assert await store.get(TOKENS) is None
    elif call == "lease":
        assert (await leased(store))[0] == 0
    elif call == "prefetch":
        assert await store.prefetch(TOKENS) == 0
    else:
        assert (
            await parts_of(store.stream(TOKENS, by=call.removeprefix("stream by ") if "by" in call else "chunk")) == []
        )
    assert await store.get(TOKENS) is None
    await store.put(TOKENS, kit.kv(TOKENS, take=2))
    await store.flush()
    kit.assert_kv(await store.get(TOKENS), TOKENS, take=2)


@pytest.mark.parametrize("call", ["get", "lease", "stream", "stream by layer"])
async def test_a_value_of_another_kind_under_a_chunks_key_is_as_good_as_none(kit, opened, tiers, call):
    store = await opened(kit.open(*tiers))
    await store.put(TOKENS, kit.kv(TOKENS))
    keys = store._plan(TOKENS)._chain
    await store.chunks.put(keys[1], kit.tensor(1))
    await store.flush()
    if call == "get":
        hit = await store.get(TOKENS)
        assert (hit.num_tokens, hit.complete) == (4, False)
        kit.assert_kv(hit, TOKENS)
    elif call == "lease":
        assert (await leased(store))[0] == 4
    elif call == "stream":
        assert [part.stop for part in await parts_of(store.stream(TOKENS))] == [4]
    else:
        assert [part.stop for part in await parts_of(store.stream(TOKENS, by="layer"))] == [4, 4]
    assert await store.chunks.get(keys[0]) is None, "KV came out as a blob"


def test_a_lossless_store_refuses_lossy_codecs(kit, monkeypatch):
    from kvtier import registry
    from kvtier.codecs.raw import RawCodec

    class Halving(RawCodec):
        name = "halving"
        lossy = True

    monkeypatch.setitem(registry.codecs._registered, "halving", Halving)
    config = kit.config(kit.memory(), kit.disk(codecs=["halving"]))
    with pytest.raises(ConfigError, match="halving"):
        kvtier.open_chunks(config, lossless=True)
    with pytest.raises(ConfigError, match="halving"):
        kvtier.open_chunks({**config, "lossless": True})


class TestWhatAnotherStoreHasPutMeanwhile:
    """KV that is on a shared medium already is not sent again, if it is as good as what would be sent."""

    @pytest.fixture
    async def pair(self, kit, opened):
        medium = {}
        stores = [await opened(kit.open(kit.medium(MemoryBackend(medium), negative_seconds=60))) for _ in range(2)]
        for store in stores:
            assert await store.get(TOKENS) is None  # and believed for a minute
        return medium, stores

    async def fresh(self, kit, opened, medium, **options):
        return await opened(kit.open(kit.medium(MemoryBackend(medium)), **options))

    async def test_exact_replaces_lossy(self, pair, kit, opened):
        medium, (one, other) = pair
        await one.put(TOKENS, kit.kv(TOKENS, take=1), lossy=True, wait="medium")
        await other.put(TOKENS, kit.kv(TOKENS, take=2), wait="medium")
        kit.assert_kv(await (await self.fresh(kit, opened, medium, lossless=True)).get(TOKENS), TOKENS, take=2)

    async def test_lossy_leaves_exact_alone(self, pair, kit, opened):
        medium, (one, other) = pair
        await one.put(TOKENS, kit.kv(TOKENS, take=1), wait="medium")
        await other.put(TOKENS, kit.kv(TOKENS, take=2), lossy=True, wait="medium")
        kit.assert_kv(await (await self.fresh(kit, opened, medium, lossless=True)).get(TOKENS), TOKENS, take=1)

    async def test_damage_is_written_over(self, pair, kit, opened):
        medium, (one, other) = pair
        await one.put(TOKENS, kit.kv(TOKENS), wait="medium")
        for name, stored in list(medium.items()):
            medium[name] = dataclasses.replace(stored, value=b"\0" * len(stored.value))
        await other.put(TOKENS, kit.kv(TOKENS), wait="medium")
        kit.assert_kv(await (await self.fresh(kit, opened, medium)).get(TOKENS), TOKENS)
