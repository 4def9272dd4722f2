"""Case 25: a value that a tier cannot take is skipped there, counted, and costs nobody else a place."""

import contextlib

import pytest

from kvtier.backends.base import Traits
from kvtier.errors import CapacityError
from kvtier.store import open_chunks
from kvtier.testing.memory import MemoryBackend

MIB = 1 << 20
SMALL = {f"small {i}": bytes([i]) * (100 << 10) for i in range(5)}
BIG = bytes(range(256)) * (3 * MIB // 256)
HUGE = bytes(reversed(range(256))) * (24 * MIB // 256)


class LimitedBackend(MemoryBackend):
    """A remote that takes values of at most 1 MiB, as servers with a limit per value do."""

    traits = Traits(persistent=True, shared=True, ranges=True, max_value_bytes=MIB)


@pytest.fixture
def medium():
    return {}


def memory(capacity="1MiB"):
    return {"backend": "pinned-cpu", "name": "memory", "capacity": capacity}


def remote(medium, **options):
    return {"backend": LimitedBackend(medium), "name": "remote", "capacity": "64MiB", **options}


def disk(path, capacity="64MiB"):
    return {"backend": "local-disk", "name": "disk", "path": str(path / "disk"), "capacity": capacity}


@contextlib.asynccontextmanager
async def filled(*tiers):
    config = {"tiers": list(tiers), "deadline_seconds": 30, "memory": {"staging_bytes": "64MiB"}}
    async with open_chunks(config) as store:
        await store.put_many(SMALL)
        assert (await store.flush()).complete
        yield store


def dropped(store, name):
    return {reason: n for reason, n in store.stats().tiers[name].dropped.items() if n and reason != "superseded"}


async def assert_small_are_everywhere(store):
    held = {entry.key: set(entry.tiers) async for entry in store.list("small")}
    assert held == {key: set(store.stats().tiers) for key in SMALL}, "something was evicted in vain"
    assert all(tier.evicted == 0 for tier in store.stats().tiers.values())
    assert await store.get_many(list(SMALL)) == list(SMALL.values())


@pytest.mark.parametrize("value", [BIG, HUGE], ids=["3 MiB", "24 MiB"])
async def test_tiers_it_does_not_fit_are_skipped_and_another_holds_it(tmp_path, medium, value):
    async with filled(memory(), remote(medium), disk(tmp_path)) as store:
        result = await store.put("big", value, wait="disk", deadline_seconds=30)
        assert result.count("dropped") == 0
        await store.flush(deadline_seconds=30)
        assert await store.get("big") == value
        assert {entry.key: list(entry.tiers) async for entry in store.list("big")} == {"big": ["disk"]}
        assert dropped(store, "memory"), "the memory tier does not count what it could not take"
        assert dropped(store, "remote"), "the remote does not count what it could not take"
        assert dropped(store, "disk") == {}
        await assert_small_are_everywhere(store)


async def test_a_promotion_that_does_not_fit_evicts_nothing(tmp_path, medium):
    async with filled(memory(), remote(medium), disk(tmp_path)) as store:
        await store.put("big", BIG, wait="disk")
        for _ in range(3):
            assert await store.get("big") == BIG
        await store.flush()
        await assert_small_are_everywhere(store)


async def test_a_durable_wait_is_content_with_any_persistent_tier(tmp_path, medium):
    async with filled(memory(), remote(medium), disk(tmp_path)) as store:
        await store.put("big", BIG, wait="durable")
    async with open_chunks({"tiers": [disk(tmp_path)]}) as store:
        assert await store.get("big") == BIG


async def test_a_wait_that_no_tier_can_satisfy_raises_capacity_error(tmp_path, medium):
    async with filled(memory(), remote(medium), disk(tmp_path, capacity="2MiB")) as store:
        for wait in ("durable", "remote", "disk", "memory"):
            with pytest.raises(CapacityError, match="big"):
                await store.put("big", BIG, wait=wait)
            await store.flush()  # until then it can be read on its way
            assert await store.get("big") is None
            assert not await store.exists("big")
        both = await store.put_many({"big": BIG, "fits": b"1"}, wait="durable")
        assert isinstance(both["big"], CapacityError)
        assert both["fits"].count("dropped") == 0
        assert await store.get("fits") == b"1"
        assert await store.delete("fits")
        await assert_small_are_everywhere(store)
        assert all(dropped(store, name) for name in store.stats().tiers)


async def test_a_value_larger_than_all_memory_of_the_store_is_dropped_and_counted(tmp_path, medium):
    async with filled(memory(), remote(medium), disk(tmp_path, capacity="256MiB")) as store:
        with pytest.raises(CapacityError):
            await store.put("huge", bytes(80 * MIB), wait="durable")
        assert (await store.put("huge", bytes(80 * MIB))).count("dropped") == 1
        assert dropped(store, "memory")["no-memory"] == 2
        await assert_small_are_everywhere(store)


async def test_a_limit_is_no_fault_of_the_medium(tmp_path, medium):
    async with filled(memory(), remote(medium)) as store:
        for i in range(10):
            with pytest.raises(CapacityError):
                await store.put(f"big {i}", BIG, wait="remote")
        assert store.stats().tiers["remote"].up
        await store.put("fits", b"1", wait="remote")
        assert len(medium) == len(SMALL) + 1
        assert store.stats().tiers["remote"].bytes == sum(len(stored.value) for stored in medium.values())
        await assert_small_are_everywhere_but_fits(store)


async def assert_small_are_everywhere_but_fits(store):
    await store.delete("fits")
    await assert_small_are_everywhere(store)


async def test_a_smaller_value_in_the_place_of_one_too_large_and_the_reverse(tmp_path, medium):
    async with filled(memory(), remote(medium), disk(tmp_path)) as store:
        for value in (b"1", BIG, b"2", BIG):
            await store.put("key", value, wait="disk")
            await store.flush()
            assert await store.get("key") == value
            held = {name for entry in [entry async for entry in store.list("key")] for name in entry.tiers}
            assert held == ({"disk"} if value is BIG else {"memory", "remote", "disk"})
        await assert_small_are_everywhere(store)
        assert len(medium) == len(SMALL), "the remote kept a value that was replaced"
