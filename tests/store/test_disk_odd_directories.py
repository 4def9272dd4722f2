"""Directories that moved, were filled by others, or hold what cannot be removed."""

import os

import kvtier

SIZE = 12_288  # of an entry with 8,000 bytes


def config(root, capacity="1MiB"):
    return {"tiers": [{"backend": "local-disk", "name": "disk", "path": str(root), "capacity": capacity}]}


def value(i):
    return bytes([i]) * 8_000


async def test_a_directory_may_move_between_two_runs(tmp_path):
    async with kvtier.open_chunks(config(tmp_path / "here")) as store:
        for i in range(20):
            await store.put(f"key {i}", value(i), wait="durable")
    (tmp_path / "here").rename(tmp_path / "there")
    async with kvtier.open_chunks(config(tmp_path / "there")) as store:
        for i in range(20):
            assert bytes(await store.get(f"key {i}")) == value(i)
        assert store.stats().tiers["disk"].entries == 20
    assert not (tmp_path / "here").exists()


async def test_what_cannot_be_removed_does_not_stop_the_rest(tmp_path, monkeypatch):
    unlink, stuck = os.unlink, set()

    def refuse(name, **kwargs):
        if name in stuck:
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **kwargs)

    monkeypatch.setattr("os.unlink", refuse)
    capacity = 6 * SIZE
    async with kvtier.open_chunks(config(tmp_path, capacity)) as store:
        await store.put("stuck", value(99), wait="durable")
        stuck.add(next(tmp_path.glob("entries/*/*/*")).name)
        stored = 0
        for i in range(30):
            try:
                await store.put(f"key {i}", value(i), wait="durable")
                stored += 1
            except kvtier.CapacityError:
                continue
        assert stored >= 28, "one entry that stays in the way wedged the tier"
        assert store.stats().tiers["disk"].up
        assert sum(path.stat().st_size for path in tmp_path.glob("entries/*/*/*")) <= capacity
        assert bytes(await store.get("key 29")) == value(29)
        stuck.clear()
        await store.flush()
        for i in range(30, 40):
            await store.put(f"key {i}", value(i), wait="durable")
        await store.flush()
        there = sum(path.stat().st_size for path in tmp_path.glob("entries/*/*/*"))
        assert store.stats().tiers["disk"].bytes == there == capacity


async def test_a_cap_that_was_lowered_is_kept_after_the_open(tmp_path):
    async with kvtier.open_chunks(config(tmp_path, 40 * SIZE)) as store:
        for i in range(40):
            await store.put(f"key {i}", value(i), wait="durable")
    async with kvtier.open_chunks(config(tmp_path, 10 * SIZE)) as store:
        assert store.stats().tiers["disk"].bytes <= 10 * SIZE
        await store.flush()
        assert sum(path.stat().st_size for path in tmp_path.glob("entries/*/*/*")) <= 10 * SIZE
        assert bytes(await store.get("key 39")) == value(39), "what was used last went first"


async def test_a_store_evicts_what_others_left_if_it_knows_of_nothing_else(tmp_path):
    """Two on one directory: one fills it after the other looked."""
    async with kvtier.open_chunks(config(tmp_path, 10 * SIZE)) as late:
        async with kvtier.open_chunks(config(tmp_path, 10 * SIZE)) as early:
            for i in range(10):
                await early.put(f"key {i}", value(i), wait="durable")
        for i in range(50, 55):
            await late.put(f"key {i}", value(i), wait="durable")
            assert bytes(await late.get(f"key {i}")) == value(i)
        assert sum(path.stat().st_size for path in tmp_path.glob("entries/*/*/*")) == 10 * SIZE
