"""Case 17: values are deleted while slow write-backs and promotions of them are under way; nothing revives them."""

import asyncio

import torch

import kvtier
from kvtier.store import open_chunks
from kvtier.testing.faults import SlowBackend
from kvtier.testing.memory import MemoryBackend

KEYS = [f"m@v1/{i}" for i in range(200)]
ANEW = KEYS[:50]


def tiers(media, path, *, slow):
    """Four tiers: memory, disk, and two remotes that take `slow` seconds for everything."""
    delayed = [SlowBackend(MemoryBackend(medium), seconds=slow) for medium in media]
    return {
        "deadline_seconds": 30,
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "1MiB"},
            {"backend": "local-disk", "path": str(path), "capacity": "64MiB"},
            {"backend": delayed[0], "name": "near", "capacity": "64MiB", "writers": 16},
            {"backend": delayed[1], "name": "far", "capacity": "64MiB", "writers": 16, "write": "back"},
        ],
    }


def old(key):
    return torch.full((100,), KEYS.index(key), dtype=torch.int32)


def new(key):
    return old(key) + 1000


async def test_nothing_deleted_is_readable_again_and_what_was_put_anew_is(tmp_path):
    media = [{}, {}]
    async with open_chunks(tiers(media, tmp_path, slow=0.2)) as store:
        await store.put_many({key: old(key) for key in KEYS})
        promotions = asyncio.gather(*(store.get_many(KEYS[i::4]) for i in range(4)))
        deleted = await store.delete_many([entry.key async for entry in store.list("m@v1/")])
        assert len(deleted) == len(KEYS)
        await store.put_many({key: new(key) for key in ANEW})
        await promotions
        await check(store)
        assert (await store.flush(deadline_seconds=30)).complete
        await check(store)
        for tier in store.stats().tiers.values():
            assert tier.entries <= len(ANEW), tier
    async with open_chunks(tiers(media, tmp_path, slow=0.0)) as store:
        await check(store)


async def check(store):
    found = await store.get_many(KEYS)
    for key, value in zip(KEYS, found, strict=True):
        if key in ANEW:
            assert value is not None, key
            assert torch.equal(value, new(key)), key
        else:
            assert value is None, key


async def test_another_version_in_the_namespace_alone_misses(tmp_path):
    layout = kvtier.KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    tokens, kv = list(range(512)), {name: torch.randn(1, 512, 1, 8) for name in "kv"}
    config = tiers([{}, {}], tmp_path, slow=0.0)
    async with kvtier.open(config, namespace=kvtier.Namespace(model="m", revision="v1"), layout=layout) as store:
        await store.put(tokens, kv, wait="durable")
        assert await store.exists(tokens) == 512
        assert await store.with_namespace(kvtier.Namespace(model="m", revision="v2")).exists(tokens) == 0
    config = tiers([{}, {}], tmp_path, slow=0.0)
    async with kvtier.open(config, namespace=kvtier.Namespace(model="m", revision="v2"), layout=layout) as store:
        assert await store.get(tokens) is None
