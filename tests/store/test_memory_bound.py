"""However fast values come and however slow the medium, memory stays within the arena and the budgets (K4, K7)."""

import asyncio
import time
from pathlib import Path

import pytest

from kvtier.testing.faults import HangingBackend, SlowBackend
from kvtier.testing.memory import MemoryBackend

KIB, MIB = 1 << 10, 1 << 20
VALUE_BYTES = 64 * KIB
QUEUE = 512 * KIB
STAGING = 1 * MIB
RESULTS = 1 * MIB
GENEROUS = 30.0  # seconds on a busy machine, for what is bound to end in a few


def resident():
    """Bytes of memory of this process that are its own."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * 4096


class Watch:
    """Looks at every figure after each step and keeps the highest."""

    def __init__(self, store, *, queue=QUEUE, largest=VALUE_BYTES):
        self.store, self.queue, self.largest = store, queue, largest
        self.high = {}

    def look(self):
        stats = self.store.stats()
        seen = {"arena": stats.memory.arena_used, "results": stats.memory.results, "leased": stats.memory.leased}
        for name, tier in stats.tiers.items():
            seen |= {f"{name} queued": tier.queued_bytes, f"{name} in flight": tier.in_flight_bytes}
            assert tier.queued_bytes <= max(self.queue, self.largest + 8192), name
            assert 0 <= tier.bytes <= tier.capacity + 4 * (self.largest + 8192), name
        assert stats.memory.arena_used <= stats.memory.arena_capacity
        assert stats.memory.arena_high_water <= stats.memory.arena_capacity
        assert stats.memory.results <= stats.memory.results_budget
        assert stats.tasks <= 100, "tasks pile up behind a slow medium"
        self.high = {name: max(value, self.high.get(name, 0)) for name, value in seen.items()}


def slow_tier(kit, seconds=0.02, **options):
    return kit.medium(SlowBackend(MemoryBackend(), seconds=seconds), write_queue_bytes=QUEUE, **options)


@pytest.mark.parametrize("on_full", ["drop", "wait"])
@pytest.mark.parametrize("with_memory", [True, False], ids=["below memory", "alone"])
async def test_flat_out_puts_to_a_slow_tier(kit, opened, with_memory, on_full):
    memory = [kit.memory(capacity="2MiB", on_full=on_full)] * with_memory
    tiers = [*memory, slow_tier(kit, on_full=on_full)]
    store = await opened(kit.open_chunks(*tiers, staging=2 * STAGING, results=RESULTS, deadline_seconds=GENEROUS))
    watch = Watch(store)
    values = [kit.tensor(number, VALUE_BYTES - number) for number in range(20)]
    before = resident()

    async def flat_out(client):
        for number in range(60):
            await store.put(f"{client}/{number}", values[(client + number) % 20])
            watch.look()

    await asyncio.gather(*(flat_out(client) for client in range(8)))
    medium = sum(len(stored.value) for stored in store._engine.tiers[-1].backend._inner.inner.medium.values())
    assert resident() - before <= 16 * MIB + medium, "the process grew by more than its budgets"
    assert watch.high["medium queued"] > QUEUE / 2, "the medium was not slow enough to tell"
    await store.flush(deadline_seconds=GENEROUS)
    watch.look()
    stats = store.stats().tiers["medium"]
    lost = sum(number for reason, number in stats.dropped.items() if reason != "superseded")
    assert stats.written <= 480 <= stats.written + lost, "every value is stored (by the flush, perhaps) or counted"
    assert (lost > 0) == (on_full == "drop")
    kit.assert_books_balance(store)


async def test_flat_out_gets_and_puts_through_a_small_arena(kit, opened):
    tiers = [kit.memory(capacity="512KiB"), slow_tier(kit, 0.002, max_in_flight_bytes=QUEUE)]
    store = await opened(kit.open_chunks(*tiers, staging=STAGING, results=RESULTS, deadline_seconds=GENEROUS))
    watch = Watch(store)
    keys = [f"key {number}" for number in range(40)]
    for number, key in enumerate(keys):
        await store.put(key, kit.tensor(number, VALUE_BYTES), wait="medium")

    async def churn(client):
        for number in range(40):
            place = (client * 7 + number) % 40
            if client % 2:
                await store.put(keys[place], kit.tensor(place, VALUE_BYTES))
            else:
                found = await store.get(keys[place])
                assert found is None or found.equal(kit.tensor(place, VALUE_BYTES))
                del found
            watch.look()
            assert store.stats().tiers["medium"].in_flight_bytes <= QUEUE + VALUE_BYTES + 8192

    await asyncio.gather(*(churn(client) for client in range(8)))
    assert watch.high["medium in flight"] > 0
    await store.flush(deadline_seconds=GENEROUS)
    kit.assert_books_balance(store)


async def test_a_value_larger_than_the_queue_goes_through_alone(kit, opened):
    tiers = [kit.memory(capacity="16MiB"), slow_tier(kit)]
    store = await opened(kit.open_chunks(*tiers, staging="4MiB", deadline_seconds=GENEROUS))
    watch = Watch(store, largest=2 * MIB)
    for number in range(4):
        await store.put(f"big {number}", kit.tensor(number, 2 * MIB))
        watch.look()
    await store.flush(deadline_seconds=GENEROUS)
    assert store.stats().tiers["medium"].written == 4, "the flush saves what the queue had no room for"
    kit.assert_books_balance(store)


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("with_memory", [True, False], ids=["below memory", "alone"])
async def test_a_hanging_medium_bounds_memory_and_closing_ends(kit, with_memory, stubborn):
    backend = HangingBackend(MemoryBackend(), stubborn=stubborn)
    medium = kit.medium(backend, write_queue_bytes=QUEUE, deadline_seconds=0.3)
    memory = [kit.memory(capacity="2MiB")] * with_memory
    store = await kit.open_chunks(*memory, medium, staging=STAGING, close_seconds=1.5, deadline_seconds=0.3)
    watch = Watch(store)
    await store.put("early", b"1", wait="medium")
    backend.hang()
    backend.hang("close")
    for number in range(100):
        await store.put(f"key {number}", kit.tensor(number, VALUE_BYTES), deadline_seconds=0.02)
        watch.look()
    reads = [asyncio.ensure_future(store.get("early", deadline_seconds=0.1)) for _ in range(20)]
    await backend.wait_stuck()
    await asyncio.gather(*reads)
    watch.look()
    began = time.monotonic()
    await store.aclose()
    assert time.monotonic() - began < GENEROUS
    backend.release()
    await kit.until(lambda: len(asyncio.all_tasks()) == 1)
