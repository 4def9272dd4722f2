"""What a scrape shows is what the store counted, from any thread, also while the loop is busy or gone."""

import asyncio
import re
import threading

import pytest
import torch

prometheus_client = pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from kvtier.metrics.prometheus import StoreCollector  # noqa: E402
from kvtier.store import open_chunks  # noqa: E402


def config(tmp_path):
    return {
        "tiers": [
            {"backend": "pinned-cpu", "capacity": "1MiB"},
            {"backend": "local-disk", "path": str(tmp_path / "kv"), "capacity": "8MiB"},
        ]
    }


def series(registry):
    """Return {(name, labels): value} of one scrape, read back by the client's own parser."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def labels(**given):
    return tuple(sorted(given.items()))


@pytest.fixture
async def store(tmp_path):
    async with open_chunks(config(tmp_path)) as store:
        yield store


@pytest.fixture
async def registry(store):
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    return registry


async def work(store):
    for i in range(6):
        await store.put(f"key {i}", torch.full((200_000,), i, dtype=torch.uint8), wait="durable")
    for i in range(6):
        await store.get(f"key {i}")
    await store.get("nothing")
    await store.delete("key 0")
    await store.flush()


async def test_every_series_is_the_stores_own_count(store, registry):
    await work(store)
    seen = await asyncio.to_thread(series, registry)
    for name, tier in store.stats().tiers.items():
        results = {
            "hit": tier.hits,
            "miss": tier.misses,
            "corrupt": tier.corrupt,
            "raced": tier.raced,
            "timeout": tier.timeouts,
            "error": tier.errors,
            "skipped": tier.skipped,
        }
        for word, count in results.items():
            assert seen["kvtier_lookups_chunks_total", labels(tier=name, result=word)] == count
        assert sum(results.values()) == tier.lookups > 0
        assert seen["kvtier_usage_bytes", labels(tier=name)] == tier.bytes
        assert seen["kvtier_capacity_bytes", labels(tier=name)] == tier.capacity
        assert seen["kvtier_entries_chunks", labels(tier=name)] == tier.entries
        assert seen["kvtier_transfers_bytes_total", labels(tier=name, op="read")] == tier.read_bytes
        assert seen["kvtier_tier_up", labels(tier=name)] == 1
    assert seen["kvtier_operation_seconds_count", labels(tier="local-disk", op="write")] == 6
    assert seen["kvtier_operation_seconds_bucket", labels(tier="local-disk", op="write", le="+Inf")] == 6
    assert seen["kvtier_memory_bytes", labels(op="arena")] == store.stats().memory.arena_capacity


async def test_drops_show_their_reason(store, registry):
    await store.put("huge", torch.zeros(64 << 20, dtype=torch.uint8))
    reasons = {
        dict(key)["result"]
        for (name, key), value in (await asyncio.to_thread(series, registry)).items()
        if name == "kvtier_drops_chunks_total" and value
    }
    assert reasons


async def test_names_and_labels_keep_to_the_rules(store, registry):
    await work(store)
    text = (await asyncio.to_thread(generate_latest, registry)).decode()
    names = set(re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE))
    assert len(names) >= 9
    assert all(re.fullmatch(r"kvtier(_[a-z]+)+_(chunks|bytes|jobs)_total", name) for name in names), names
    used = {label for (_, key) in await asyncio.to_thread(series, registry) for label, _ in key}
    assert used == {"tier", "op", "result", "le"}
    assert len(re.findall(r"^# HELP", text, re.MULTILINE)) == len(re.findall(r"^# TYPE", text, re.MULTILINE))


async def test_a_busy_loop_gives_the_last_figures_and_a_closed_store_too(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.metrics.snapshots.WAIT_SECONDS", 0.01)
    async with open_chunks(config(tmp_path)) as store:
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        await store.put("a", b"1")
        name = "kvtier_entries_chunks", labels(tier="pinned-cpu")
        assert (await asyncio.to_thread(series, registry))[name] == 1
        await store.put("b", b"1")
        seen = []
        thread = threading.Thread(target=lambda: seen.append(series(registry)[name]))
        thread.start()
        thread.join()  # the loop stands still meanwhile
        assert seen == [1]
        assert series(registry)[name] == 2  # on the loop itself
    assert series(registry)[name] == 2
    assert (await asyncio.to_thread(series, registry))[name] == 2
