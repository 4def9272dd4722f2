"""Case 7: what a tier says it uses is what it uses, after any mix of puts over puts, deletes, gets and reopening."""

import os
import random

from kvtier.backends.base import Traits
from kvtier.store import open_chunks
from kvtier.testing.memory import MemoryBackend

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 8 * MIB
PAGE = 4096
OVERHEAD = 3 * PAGE  # per entry: the header before the value, and the last page of each that is not full
TURNS = int(os.environ.get("KVTIER_DRIFT_TURNS", "1500"))  # `make kill` asks for 5,000
KEYS = [f"key {i}" for i in range(64)]


class ListedBackend(MemoryBackend):
    """A remote that tells at open what it has."""

    traits = Traits(persistent=True, shared=True, ranges=True, scan_at_open=True)


class Drift:
    """Random operations on a store of three tiers, beside a dict that knows the last value put under each key."""

    def __init__(self, path, seed):
        self.path, self.medium = path, {}
        self.random = random.Random(seed)
        self.last = {}
        self.store = None

    async def reopen(self):
        if self.store is not None:
            await self.store.aclose()
        tiers = [
            {"backend": "pinned-cpu", "capacity": CAPACITY},
            {"backend": "local-disk", "path": str(self.path), "capacity": CAPACITY},
            {"backend": ListedBackend(self.medium), "name": "remote", "capacity": CAPACITY},
        ]
        self.store = await open_chunks({"tiers": tiers, "deadline_seconds": 60, "close_seconds": 60})

    async def step(self):
        key, choice = self.random.choice(KEYS), self.random.random()
        if choice < 0.5:
            self.last[key] = self.random.randbytes(self.random.choice([0, 1, PAGE, self.random.randrange(256 * KIB)]))
            await self.store.put(key, self.last[key])
        elif choice < 0.7:
            await self.store.delete(key)
            self.last.pop(key, None)
        else:
            found = await self.store.get(key)
            assert found is None or found == self.last.get(key), f"{key} holds something else"
        for name, tier in self.store.stats().tiers.items():
            assert 0 <= tier.bytes <= CAPACITY + 256 * KIB + OVERHEAD, f"{name} says {tier.bytes}"

    def on_media(self):
        """What the two media hold, counted by looking."""
        files = [path.stat().st_size for path in (self.path / "entries").rglob("*") if path.is_file()]
        return {"local-disk": sum(files), "remote": sum(len(stored.value) for stored in self.medium.values())}

    async def check(self):
        await self.store.flush(deadline_seconds=60)
        tiers = self.store.stats().tiers
        assert {name: tiers[name].bytes for name in ("local-disk", "remote")} == self.on_media()
        for name in tiers:
            held = [entry.key async for entry in self.store.list() if name in entry.tiers]
            least = sum(len(self.last[key]) for key in held)
            assert len(held) == tiers[name].entries, name
            assert least <= tiers[name].bytes <= least + len(held) * OVERHEAD, f"{name} says {tiers[name].bytes}"


async def test_usage_is_the_truth_all_along_and_0_in_the_end(tmp_path):
    drift = Drift(tmp_path / "disk", seed=7)
    await drift.reopen()
    try:
        for turn in range(TURNS):
            await drift.step()
            if turn % 100 == 99:
                await drift.check()
            if turn % 300 == 299:
                await drift.reopen()
                await drift.check()
        assert drift.store.stats().tiers["local-disk"].entries > 20
        await drift.store.delete_many(KEYS)
        await drift.check()
        assert {tier.bytes for tier in drift.store.stats().tiers.values()} == {0}
        assert set(drift.on_media().values()) == {0}
    finally:
        await drift.store.aclose()


async def test_one_key_put_100_times_evicts_no_other_and_a_half_full_tier_refuses_nothing(tmp_path):
    drift = Drift(tmp_path / "disk", seed=8)
    await drift.reopen()
    try:
        others = {f"other {i}": drift.random.randbytes(240 * KIB) for i in range(15)}
        await drift.store.put_many(others)
        await drift.store.flush()
        for _ in range(100):
            value = drift.random.randbytes(drift.random.randrange(256 * KIB))
            assert (await drift.store.put("again", value, wait="remote")).count("stored") == 1
        drift.last = {**others, "again": value}
        assert await drift.store.get_many(list(drift.last)) == list(drift.last.values())
        await drift.check()
        for name, tier in drift.store.stats().tiers.items():
            assert (tier.entries, tier.evicted) == (16, 0), name
            assert set(tier.dropped) <= {"superseded"}, name
            assert tier.bytes <= 0.55 * CAPACITY, name
        for name in ("local-disk", "remote"):
            big = drift.random.randbytes(3 * MIB)
            drift.last[name] = big
            assert (await drift.store.put(name, big, wait=name)).count("stored") == 1
            await drift.store.delete(name)
            del drift.last[name]
        await drift.check()
    finally:
        await drift.store.aclose()
