"""Case 9: somebody removes files behind the store's back; what is gone is a miss, counted and credited."""

from collections import Counter

import pytest
import torch

import kvtier
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.store import open_chunks
from kvtier.testing.kv_values import same_bits

KEYS = [f"key {number}" for number in range(10)]
GONE, LEFT = KEYS[::2], KEYS[1::2]


def value_of(key, take=0):
    return torch.full((KEYS.index(key) * 1000 + 1,), take, dtype=torch.int32)


class CountingDisk(LocalDiskBackend):
    """The disk backend itself; it also counts what it is asked per name."""

    def __init__(self, *, path):
        super().__init__(path=path)
        self.reads = Counter()
        self.stats = Counter()

    async def read_many(self, reads):
        self.reads.update(read.name for read in reads)
        return await super().read_many(reads)

    async def stat_many(self, names):
        self.stats.update(names)
        return await super().stat_many(names)


class Disk:
    def __init__(self, path):
        self.path = path
        self.files = {}
        self.backend = None

    def open(self, *above, capacity="64MiB"):
        self.backend = CountingDisk(path=self.path)
        tier = {"backend": self.backend, "name": "disk", "capacity": capacity}
        return open_chunks({"deadline_seconds": 60, "memory": {"staging_bytes": "2MiB"}, "tiers": [*above, tier]})

    def found(self):
        return {path for path in (self.path / "entries").rglob("*") if path.is_file()}

    def size(self):
        return sum(path.stat().st_size for path in self.found())

    async def put(self, store, key, value):
        """Put durably, and learn which file it is in."""
        before = self.found()
        await store.put(key, value, wait="durable")
        for path in self.found() - before:
            self.files[key] = path

    def unlink(self, *keys):
        for key in keys:
            self.files[key].unlink()


@pytest.fixture
async def disk(tmp_path):
    disk = Disk(tmp_path)
    async with disk.open() as store:
        for key in KEYS:
            await disk.put(store, key, value_of(key))
    assert len(disk.files) == len(KEYS)
    return disk


def assert_books_agree_with_the_medium(store, disk):
    tier = store.stats().tiers["disk"]
    assert tier.bytes == disk.size()
    assert tier.entries == len(disk.found())
    assert tier.found + tier.written - tier.evicted - tier.deleted - tier.vanished == tier.entries
    assert (tier.errors, tier.corrupt, tier.write_errors, tier.up) == (0, 0, 0, True)


async def assert_left_values_are_right(store):
    for key in LEFT:
        assert same_bits(await store.get(key), value_of(key))


async def test_get_is_a_miss_and_tries_the_medium_at_most_once(disk):
    async with disk.open() as store:
        disk.unlink(*GONE)
        for _ in range(3):
            for key in GONE:
                before = disk.backend.reads.total() + disk.backend.stats.total()
                assert await store.get(key) is None
                assert disk.backend.reads.total() + disk.backend.stats.total() - before <= 1
                assert await store.exists(key) is False
        assert all(count == 1 for count in disk.backend.reads.values()), "a load that cannot succeed was tried again"
        assert store.stats().tiers["disk"].vanished == len(GONE)
        await assert_left_values_are_right(store)
        assert_books_agree_with_the_medium(store, disk)


async def test_a_batch_is_right_about_what_is_left(disk):
    async with disk.open() as store:
        disk.unlink(*GONE)
        found = await store.get_many(KEYS)
        assert [key for key, value in zip(KEYS, found, strict=True) if value is not None] == LEFT
        assert await store.exists_many(KEYS) == [key in LEFT for key in KEYS]
        assert_books_agree_with_the_medium(store, disk)


async def test_delete_tells_that_nothing_was_there(disk):
    async with disk.open() as store:
        disk.unlink(*GONE)
        for _ in range(2):
            assert await store.delete_many(GONE) == [False] * len(GONE)
        assert await store.delete(LEFT[0]) is True
        assert await store.delete(LEFT[0]) is False
        assert_books_agree_with_the_medium(store, disk)


async def test_list_drops_what_is_gone(disk):
    async with disk.open() as store:
        disk.unlink(*GONE)
        assert sorted([entry.key async for entry in store.list()]) == LEFT
        assert store.stats().tiers["disk"].vanished == len(GONE)
        assert await store.exists_many(GONE) == [False] * len(GONE)
        assert_books_agree_with_the_medium(store, disk)


@pytest.mark.parametrize("noticed", [False, True])
async def test_putting_anew_works(disk, noticed):
    async with disk.open() as store:
        disk.unlink(*GONE)
        if noticed:
            assert await store.get_many(GONE) == [None] * len(GONE)
        for key in GONE:
            await store.put(key, value_of(key, take=1), wait="durable")
        for key in GONE:
            assert same_bits(await store.get(key), value_of(key, take=1))
        await assert_left_values_are_right(store)
        assert len(disk.found()) == len(KEYS)
        assert_books_agree_with_the_medium(store, disk)
    async with disk.open() as store:
        assert same_bits(await store.get(GONE[0]), value_of(GONE[0], take=1))


async def test_gone_between_exists_and_get(disk):
    async with disk.open() as store:
        for key in GONE:
            assert await store.exists(key) is True
            disk.unlink(key)
            assert await store.get(key) is None
            assert await store.exists(key) is False
        assert_books_agree_with_the_medium(store, disk)


async def test_gone_between_list_and_get(disk):
    async with disk.open() as store:
        assert sorted([entry.key async for entry in store.list()]) == KEYS
        disk.unlink(*GONE)
        assert await store.get_many(GONE) == [None] * len(GONE)


async def test_what_a_tier_above_holds_is_still_served(disk):
    """The memory tier has the value; that the disk lost it is nobody's concern, and no read finds out."""
    async with disk.open({"backend": "pinned-cpu", "capacity": "4MiB"}) as store:
        await store.get_many(KEYS)
        disk.unlink(*GONE)
        for key in KEYS:
            assert same_bits(await store.get(key), value_of(key))


async def test_eviction_of_what_is_gone_makes_room_and_harms_nothing(disk):
    """The least recently used entries are the ones that are gone: the tier is full and must choose them."""
    one = disk.files[KEYS[0]].stat().st_size
    full = disk.size()
    async with disk.open(capacity=full + one) as store:
        for key in LEFT:
            assert await store.get(key) is not None
        disk.unlink(*GONE)
        for number in range(len(GONE)):
            await store.put(f"more {number}", torch.zeros(1, dtype=torch.int32), wait="durable")
            assert store.stats().tiers["disk"].bytes <= full + one
        assert await store.exists_many([f"more {number}" for number in range(len(GONE))]) == [True] * len(GONE)
        assert store.stats().tiers["disk"].evicted > 0
        await assert_left_values_are_right(store)
        assert await store.get_many(GONE) == [None] * len(GONE)
        assert_books_agree_with_the_medium(store, disk)


async def test_everything_is_gone_even_the_directories(disk):
    async with disk.open() as store:
        for path in sorted((disk.path / "entries").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (disk.path / "entries").rmdir()
        assert await store.get_many(KEYS) == [None] * len(KEYS)
        assert [entry async for entry in store.list()] == []
        assert_books_agree_with_the_medium(store, disk)
        await store.put(KEYS[0], value_of(KEYS[0]), wait="durable")
        assert same_bits(await store.get(KEYS[0]), value_of(KEYS[0]))


async def test_a_chunk_that_vanished_ends_the_prefix_before_it(tmp_path):
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32")
    tokens, kv = list(range(64)), {name: torch.randn(2, 64, 2, 8) for name in "kv"}
    disk, order = Disk(tmp_path), []
    config = {"chunk_tokens": 16, "tiers": [{"backend": "local-disk", "name": "disk", "path": str(tmp_path)}]}
    config["tiers"][0]["capacity"] = "64MiB"
    async with kvtier.open(config, namespace=kvtier.Namespace(model="m", revision="1"), layout=layout) as store:
        for stop in range(16, 65, 16):
            before = disk.found()
            await store.put(tokens[:stop], {name: part[:, :stop] for name, part in kv.items()}, wait="durable")
            order += disk.found() - before
        assert await store.exists(tokens) == 64
        order[2].unlink()
        hit = await store.get(tokens)
        assert hit.num_tokens == 32
        assert all(same_bits(hit.kv[name], kv[name][:, :32]) for name in "kv")
        assert await store.exists(tokens) == 32
        await store.put(tokens, kv, wait="durable")
        hit = await store.get(tokens)
        assert hit.num_tokens == 64
        assert all(same_bits(hit.kv[name], kv[name]) for name in "kv")
