"""Puts and gets larger than the memory they pass through: slower, never stuck, nothing lost that could be kept."""

import asyncio
import time

import pytest

import kvtier
from kvtier.testing.faults import SlowBackend
from kvtier.testing.memory import MemoryBackend

LAYOUT = kvtier.KVLayout(num_layers=4, num_kv_heads=8, head_dim=64, dtype="bfloat16")  # 8 KiB a token
TOKENS = list(range(256))  # 2 MiB of KV in 64 chunks


def tier(kit, shape):
    if shape == "zstd":
        return kit.disk(codecs=["zstd"])
    return kit.disk() if shape == "disk" else kit.medium(SlowBackend(MemoryBackend(), seconds={"write": 0.002}))


@pytest.mark.parametrize("shape", ["disk", "slow", "zstd"])
async def test_a_put_larger_than_the_memory_streams_through_it(kit, opened, shape):
    store = await opened(kit.open(tier(kit, shape), layout=LAYOUT, staging="512KiB"))
    began = time.monotonic()
    result = await store.put(TOKENS, kit.kv(TOKENS, layout=LAYOUT), deadline_seconds=30)
    assert result.count("dropped") == 0, f"{result} after {time.monotonic() - began:.1f} s"
    assert (await store.flush(deadline_seconds=30)).complete
    assert await store.exists(TOKENS) == 256
    assert store.stats().memory.arena_high_water <= 512 << 10


@pytest.mark.parametrize("shape", ["disk", "slow", "zstd"])
async def test_a_get_larger_than_the_memory_streams_through_it(kit, opened, shape):
    store = await opened(kit.open(tier(kit, shape), layout=LAYOUT, staging="512KiB"))
    await store.put(TOKENS, kit.kv(TOKENS, layout=LAYOUT), deadline_seconds=30)
    assert (await store.flush(deadline_seconds=30)).complete
    hits = await asyncio.gather(*(store.get(TOKENS, deadline_seconds=30) for _ in range(3)))
    wanted = kit.kv(TOKENS, layout=LAYOUT)
    for hit in hits:
        assert (hit.num_tokens, hit.complete) == (256, True)
        assert all(hit.kv[name].equal(tensor) or same(hit.kv[name], tensor) for name, tensor in wanted.items())
    kit.assert_books_balance(store)


async def test_many_puts_at_once_share_it_in_turns(kit, opened):
    store = await opened(kit.open(kit.disk(), layout=LAYOUT, staging="1MiB"))
    prompts = [[number] * 64 for number in range(8)]
    results = await asyncio.gather(
        *(store.put(tokens, kit.kv(tokens, layout=LAYOUT), deadline_seconds=60) for tokens in prompts)
    )
    assert [result.count("dropped") for result in results] == [0] * 8
    await store.flush(deadline_seconds=30)
    assert [await store.exists(tokens) for tokens in prompts] == [64] * 8


async def test_results_beyond_their_budget_wait_for_those_that_die(kit, opened, events):
    store = await opened(kit.open(kit.memory(), layout=LAYOUT, results="5MiB", observer=events))
    await store.put(TOKENS, kit.kv(TOKENS, layout=LAYOUT))
    held = [await store.get(TOKENS) for _ in range(2)]
    assert await store.get(TOKENS, deadline_seconds=0.1) is None
    assert any(event.kind == "dropped" and "result" in event.reason for event in events.all)
    waiting = asyncio.ensure_future(store.get(TOKENS, deadline_seconds=30))
    await asyncio.sleep(0.01)
    held.pop()
    assert (await waiting).num_tokens == 256


async def test_leases_hold_at_most_their_share_and_are_partial_beyond(kit, opened):
    store = await opened(kit.open(kit.memory(capacity="4MiB"), layout=LAYOUT, staging="1MiB"))
    await store.put(TOKENS, kit.kv(TOKENS, layout=LAYOUT))
    async with store.lease(TOKENS) as first:
        assert 0 < first.num_tokens <= 256
        async with store.lease(TOKENS) as second:
            assert second.num_tokens < 256
            assert second.complete is False
        assert store.stats().memory.leased <= store.stats().memory.arena_capacity // 2
    del first, second
    await kit.until(lambda: store.stats().memory.leased == 0)
    async with store.lease(TOKENS) as again:
        assert again.num_tokens > 0


def same(one, other):
    from kvtier.testing.kv_values import same_bits

    return same_bits(one, other)
