"""What was flushed is found by the next process, whatever became of the last one and of its journal."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.testing.clock import FrozenClock

ROOT = Path(kvtier.__file__).parents[1]
PROMPTS = [[number] * (4 * number + 3) for number in range(1, 9)]


async def fill(kit, **options):
    async with kit.open(kit.memory(), kit.disk(), **options) as store:
        for tokens in PROMPTS:
            await store.put(tokens, kit.kv(tokens), partial=True)
        await store.chunks.put_many({f"k{number}": kit.tensor(number) for number in range(10)})
        assert (await store.flush()).complete


async def check(kit, store):
    for tokens in PROMPTS:
        hit = await store.get(tokens)
        assert hit is not None
        assert hit.num_tokens == len(tokens), "a flushed chunk is gone"
        assert hit.complete
        kit.assert_kv(hit, tokens)
        assert await store.exists(tokens) == len(tokens)
    for number in range(10):
        assert (await store.chunks.get(f"k{number}")).equal(kit.tensor(number))
    keys = [entry.key async for entry in store.chunks.list("")]
    pieces = sum(-(-len(tokens) // 4) for tokens in PROMPTS)
    assert len(keys) == len(set(keys)) == 10 + pieces
    stats = store.stats().tiers["local-disk"]
    assert stats.entries == len(kit.files()) == 10 + pieces
    assert stats.bytes == sum(path.stat().st_size for path in kit.files())
    kit.assert_books_balance(store)


async def test_everything_flushed_is_found_and_usage_is_true(kit):
    await fill(kit)
    for _ in range(3):
        async with kit.open(kit.memory(), kit.disk()) as store:
            await check(kit, store)
    async with kit.open(kit.disk()) as store:
        await check(kit, store)


@pytest.mark.parametrize("damage", ["deleted", "torn", "garbage", "a file in its place"])
async def test_a_lost_or_torn_journal_costs_nothing_but_order(kit, damage):
    await fill(kit)
    journals = kit.path / "disk" / "journal"
    for path in list(journals.iterdir()):
        content = path.read_bytes()
        path.unlink()
        if damage == "torn":
            path.write_bytes(content[: len(content) // 3])
        elif damage == "garbage":
            path.write_bytes(random.Random(3).randbytes(len(content)))
    if damage == "a file in its place":
        journals.rmdir()
        journals.write_bytes(b"")
    async with kit.open(kit.memory(), kit.disk()) as store:
        await check(kit, store)
        await store.put([77] * 8, kit.kv([77] * 8), wait="durable")
    async with kit.open(kit.disk()) as store:
        assert await store.exists([77] * 8) == 8


async def test_what_was_deleted_evicted_or_expired_before_does_not_come_back(kit):
    clock = FrozenClock()
    async with kit.open_chunks(kit.memory(), kit.disk(), clock=clock) as store:
        await store.put_many({"deleted": b"1", "kept": b"2"}, wait="durable")
        await store.put("expired", b"3", ttl_seconds=10, wait="durable")
        assert await store.delete("deleted")
        clock.advance(20)
        assert (await store.flush()).complete
    async with kit.open_chunks(kit.memory(), kit.disk(), clock=clock) as store:
        assert list(await store.get_many(["deleted", "expired", "kept"])) == [None, None, b"2"]
        assert [entry.key async for entry in store.list()] == ["kept"]


async def test_a_write_back_tier_gets_at_flush_what_only_memory_had(kit):
    async with kit.open(kit.memory(), kit.disk(write="back")) as store:
        for tokens in PROMPTS:
            await store.put(tokens, kit.kv(tokens), partial=True)
        assert kit.files() == []
        result = await store.flush()
        assert result.complete
        assert result.tiers["local-disk"].stored == len(kit.files()) > 0
    async with kit.open(kit.disk()) as store:
        assert [await store.exists(tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]


async def test_closing_flushes_too(kit):
    async with kit.open(kit.memory(), kit.disk(write="back")) as store:
        await store.put([1] * 8, kit.kv([1] * 8))
    async with kit.open(kit.disk()) as store:
        assert await store.exists([1] * 8) == 8


async def test_recency_survives_a_restart(kit):
    """The keys used last are the last to go when the capacity is lowered."""
    async with kit.open_chunks(kit.disk()) as store:
        for number in range(20):
            await store.put(f"k{number}", kit.tensor(number, size=10_000), wait="durable")
        for number in (3, 0, 7):
            await store.get(f"k{number}")
    async with kit.open_chunks(kit.disk(capacity="48KiB")) as store:
        kept = {entry.key async for entry in store.list()}
        assert kept == {"k3", "k0", "k7"}


CHILD = """
import asyncio, sys
import torch
import kvtier
from kvtier.testing.kv_values import Prompt, kv_of

path, flushes = sys.argv[1], sys.argv[2] == "flush"
layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
namespace = kvtier.Namespace(model="org/model", revision="1")
config = {
    "chunk_tokens": 4,
    "memory": {"staging_bytes": "4MiB"},
    "tiers": [
        {"backend": "pinned-cpu", "capacity": "16MiB"},
        {"backend": "local-disk", "path": path, "capacity": "64MiB", "write": "through" if flushes else "back"},
    ],
}

async def main():
    store = await kvtier.open(config, layout=layout, namespace=namespace)
    number = 0
    while True:
        tokens = [number] * 8
        await store.put(tokens, kv_of(layout, Prompt(((tuple(tokens), ""),)), chunk_tokens=4)["full"])
        await store.chunks.put(f"k{number}", torch.full((1000,), number % 251, dtype=torch.uint8))
        if flushes:
            assert (await store.flush()).complete
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


async def killed(kit, how):
    """Run a process that puts without end, kill it after some rounds; return how many rounds it reported."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(kit.path / "disk"), how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        rounds = 0
        while rounds < 8:
            line = await asyncio.to_thread(child.stdout.readline)
            assert line, "the process ended by itself"
            rounds = int(line) + 1
    finally:
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
        child.wait()
        child.stdout.close()
    return rounds + len(rest.split())


async def test_kill_9_after_a_flush_loses_nothing(kit):
    rounds = await killed(kit, "flush")
    async with kit.open(kit.disk()) as store:
        for number in range(rounds):
            hit = await store.get([number] * 8)
            assert hit is not None
            assert hit.num_tokens == 8, f"round {number} of {rounds} was flushed and is gone"
            kit.assert_kv(hit, [number] * 8)
            assert (await store.chunks.get(f"k{number}")).tolist() == [number % 251] * 1000
        stats = store.stats().tiers["local-disk"]
        assert stats.bytes == sum(path.stat().st_size for path in kit.files())
        assert stats.corrupt == 0
        kit.assert_books_balance(store)


async def test_kill_9_without_a_flush_loses_what_only_memory_had(kit):
    """The control of the test above."""
    rounds = await killed(kit, "no flush")
    async with kit.open(kit.disk()) as store:
        found = [await store.exists([number] * 8) for number in range(rounds)]
        assert sum(found) < 8 * rounds
