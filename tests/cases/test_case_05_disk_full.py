"""Case 5: a volume that is full, of bytes or of inodes, below the configured capacity."""

import os
import subprocess

import pytest

import kvtier

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path):
    """Mount a small file system, where that is allowed."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = []

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount")
        mounted.append(place)
        return place

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def config(place, **options):
    tier = {"backend": "local-disk", "name": "disk", "path": str(place / "root"), "capacity": "100MiB", **options}
    return {"tiers": [tier]}


def value(i, size):
    return i.to_bytes(4, "little") * (size // 4)


def leftovers(place):
    return [path.name for path in place.glob("root/owners/*/*") if path.name != "lock"]


def on_disk(place):
    return sum(path.stat().st_size for path in place.glob("root/entries/*/*/*"))


async def holds(store, keys, size):
    """Return the keys that are there; each must be right."""
    present = []
    for i in keys:
        found = await store.get(f"key {i}")
        assert found in {None, value(i, size)}, f"key {i} is wrong"
        if found is not None:
            present.append(i)
    return present


async def test_bytes_run_out(volume):
    place = volume("size=8m")
    async with kvtier.open_chunks(config(place)) as store:
        for i in range(30):
            await store.put(f"key {i}", value(i, MIB - 8192), wait="durable")
        tier = store.stats().tiers["disk"]
        assert tier.evicted > 20
        assert tier.write_errors > 0, "that the volume was full is nowhere to be seen"
        assert tier.up
        present = await holds(store, range(30), MIB - 8192)
        assert len(present) >= 5
        assert present[-1] == 29
        assert leftovers(place) == []
        for i in present[:2]:
            assert await store.delete(f"key {i}")
        filler = place / "of somebody else"
        with filler.open("wb") as other:  # nothing is left, and what is ours does not make room for two
            for _ in range(100):
                try:
                    other.write(bytes(MIB // 4))
                    other.flush()
                except OSError:
                    break
        await store.put("large", bytes(MIB), wait="durable")
        assert await store.get("large") == bytes(MIB)
        filler.unlink()
        before = store.stats().tiers["disk"].evicted
        for i in range(100, 102):
            await store.put(f"key {i}", value(i, MIB - 8192), wait="durable")
        assert store.stats().tiers["disk"].evicted == before, "room came back, and was not used"
        assert store.stats().tiers["disk"].bytes == on_disk(place)


async def test_inodes_run_out(volume):
    place = volume("size=64m,nr_inodes=200")
    async with kvtier.open_chunks(config(place)) as store:
        stored = []
        for i in range(300):
            try:
                await store.put(f"key {i}", value(i, 400), wait="durable")
                stored.append(i)
            except kvtier.CapacityError:
                continue
        assert len(stored) > 200
        assert store.stats().tiers["disk"].up
        present = await holds(store, range(300), 400)
        assert len(present) > 20
        assert set(present) <= set(stored)
        assert leftovers(place) == []
        assert store.stats().tiers["disk"].bytes == on_disk(place)


async def test_the_volumes_free_space_is_kept(volume):
    place = volume("size=8m")
    async with kvtier.open_chunks(config(place, min_free="2MiB")) as store:
        for i in range(20):
            await store.put(f"key {i}", value(i, MIB - 8192), wait="durable")
            free = os.statvfs(place)
            assert free.f_bavail * free.f_frsize >= 2 * MIB
        assert store.stats().tiers["disk"].write_errors > 0, (
            "the volume is smaller than the capacity, and nobody says so"
        )
        assert len(await holds(store, range(20), MIB - 8192)) >= 4


async def test_a_value_that_can_never_fit_evicts_little(volume):
    place = volume("size=8m")
    async with kvtier.open_chunks(config(place)) as store:
        for i in range(4):
            await store.put(f"key {i}", value(i, MIB), wait="durable")
        with pytest.raises(kvtier.CapacityError):
            await store.put("huge", bytes(20 * MIB), wait="durable")
        assert leftovers(place) == []
        await store.put("key 9", value(9, MIB), wait="durable")
        assert await store.get("key 9") == value(9, MIB)
