"""Hanging, slow and failing media: every call ends by its deadline, and the tier comes back when it can."""

import asyncio

import pytest

from kvtier.errors import (
    BackendError,
    BackendTimeoutError,
    BackendUnavailableError,
    CapacityError,
    InvalidValueError,
    PartialDeleteError,
)
from kvtier.testing.clock import FrozenClock
from kvtier.testing.faults import FlakyBackend, HangingBackend, SlowBackend
from kvtier.testing.memory import MemoryBackend

TOKENS = list(range(16))
SOON = 0.2  # seconds that calls are given
LATE = 8.0  # no call may take so long; a busy machine may take some of it


class Timed:
    """Fails if the block took longer than anybody waits.

    Counted in naps on the same loop, not in seconds: on a machine that stands still nobody's nap ends.
    """

    nap = 0.05

    def __init__(self, limit=LATE):
        self.limit = limit
        self.naps = 0

    async def __aenter__(self):
        self.napping = asyncio.ensure_future(self.count())

    async def __aexit__(self, *_):
        self.napping.cancel()
        assert self.naps * self.nap < self.limit, f"took {self.naps * self.nap:.1f} s"

    async def count(self):
        while True:
            await asyncio.sleep(self.nap)
            self.naps += 1


async def consume(iterator):
    return [item async for item in iterator]


async def enter(context):
    async with context as lease:
        return lease.num_tokens


KV_VERBS = {
    "get": lambda store: store.get(TOKENS, deadline_seconds=SOON),
    "get_many": lambda store: store.get_many([TOKENS, TOKENS[:8]], deadline_seconds=SOON),
    "exists": lambda store: store.exists(TOKENS, deadline_seconds=SOON),
    "exists_many": lambda store: store.exists_many([TOKENS, [1]], deadline_seconds=SOON),
    "list": lambda store: consume(store.list(deadline_seconds=SOON)),
    "lease": lambda store: enter(store.lease(TOKENS, deadline_seconds=SOON)),
    "stream": lambda store: consume(store.stream(TOKENS, deadline_seconds=SOON)),
    "stream by layer": lambda store: consume(store.stream(TOKENS, by="layer", deadline_seconds=SOON)),
    "prefetch": lambda store: store.prefetch(TOKENS, deadline_seconds=SOON),
    "touch": lambda store: store.touch(TOKENS),
    "pin": lambda store: store.pin(TOKENS, ttl_seconds=10),
    "unpin": lambda store: store.unpin(TOKENS),
    "flush": lambda store: store.flush(deadline_seconds=SOON),
    "chunks.get": lambda store: store.chunks.get("key", deadline_seconds=SOON),
    "chunks.get_many": lambda store: store.chunks.get_many(["key", "other"], deadline_seconds=SOON),
    "chunks.exists": lambda store: store.chunks.exists("nothing", deadline_seconds=SOON),
    "chunks.list": lambda store: consume(store.chunks.list("", deadline_seconds=SOON)),
    "chunks.put": lambda store: store.chunks.put("key", b"1", deadline_seconds=SOON),
    "put": lambda store: store.put([5] * 16, store.some_kv, deadline_seconds=SOON),
}


@pytest.mark.parametrize(
    ("verb", "stubborn"), [(verb, False) for verb in sorted(KV_VERBS)] + [("get", True), ("list", True), ("put", True)]
)
async def test_no_call_outlasts_its_deadline_on_a_medium_that_hangs(kit, verb, stubborn):
    backend = HangingBackend(MemoryBackend(), stubborn=stubborn)
    tier = kit.medium(backend, deadline_seconds=2.0)
    async with kit.open(tier, deadline_seconds=0.5, close_seconds=0.5) as store:
        store.some_kv = kit.kv([5] * 16)
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium", deadline_seconds=30)
        await store.chunks.put("key", b"0", wait="medium")
        backend.hang()
        try:
            async with Timed():
                await KV_VERBS[verb](store)
            kit.assert_books_balance(store)
            async with Timed():
                await store.aclose()
        finally:
            backend.release()


@pytest.mark.parametrize("verb", ["close", "write", "read", "scan"])
async def test_closing_ends_within_its_bound_whatever_hangs(kit, verb, events):
    backend = HangingBackend(MemoryBackend(), stubborn=True)
    async with kit.open_chunks(kit.memory(), kit.medium(backend), close_seconds=1.0, observer=events) as store:
        await store.put("early", b"0", wait="medium")
        backend.hang(verb)
        reading = asyncio.ensure_future(store.get("other")) if verb == "read" else None
        await store.put("key", b"1")
        async with Timed():
            await store.aclose()
        if reading is not None:
            await reading
        backend.release()
    assert store._engine._state == "closed"


@pytest.mark.parametrize("failures", [1, 20])
async def test_a_failed_wait_says_what_was_wrong(kit, opened, failures):
    """Also when the tier has been taken out of service since."""
    backend = FlakyBackend(MemoryBackend(), error=lambda: BackendError("the medium is on fire"))
    store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend)))
    backend.down = True
    for number in range(failures):
        with pytest.raises(BackendError, match=r"did not get there: (error|down) \(the medium is on fire\)"):
            await store.put(f"key {number}", b"1", wait="medium")


async def test_a_hanging_open_fails_by_the_tiers_deadline_or_leaves_an_optional_tier_down(kit):
    backend = HangingBackend(MemoryBackend(), hanging=frozenset({"open"}), stubborn=True)
    failing = kit.open_chunks(kit.medium(backend, deadline_seconds=0.3), close_seconds=1.0)
    async with Timed():
        with pytest.raises(BackendError):
            await failing
    optional = kit.medium(backend, deadline_seconds=0.3, required=False)
    async with Timed(), kit.open_chunks(kit.memory(), optional, close_seconds=1.0) as store:
        assert not store.stats().tiers["medium"].up
        await store.put("key", b"1")
        assert await store.get("key") == b"1"
        backend.release()


class TestReads:
    async def test_a_partial_hit_says_so(self, kit, opened):
        """The first two chunks are in memory, the others on a medium that hangs."""
        backend = HangingBackend(MemoryBackend())
        store = await opened(kit.open(kit.memory(), kit.medium(backend), close_seconds=1.0))
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        for entry in list(store._engine.tiers[0].ledger.index.entries.values())[2:]:
            store._engine.tiers[0].drop(entry, "evicted")
        backend.hang("read")
        hit = await store.get(TOKENS, deadline_seconds=SOON)
        assert hit.num_tokens == 8
        assert hit.complete is False
        kit.assert_kv(hit, TOKENS)
        async with store.lease(TOKENS, deadline_seconds=SOON) as lease:
            assert lease.num_tokens == 8
            assert lease.complete is False
        parts = await consume(store.stream(TOKENS, deadline_seconds=SOON))
        assert [(part.start, part.stop) for part in parts] == [(0, 4), (4, 8)]
        backend.release()
        await kit.until(lambda: store.stats().reads_under_way == 0)
        hit = await store.get(TOKENS)
        assert (hit.num_tokens, hit.complete) == (16, True)

    async def test_so_does_one_that_a_fault_cut(self, kit, opened):
        backend = FlakyBackend(MemoryBackend(), verbs=frozenset({"read"}))
        store = await opened(kit.open(kit.memory(promote="never"), kit.medium(backend)))
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        for entry in list(store._engine.tiers[0].ledger.index.entries.values())[2:]:
            store._engine.tiers[0].drop(entry, "evicted")
        backend.fail_next(2)
        hit = await store.get(TOKENS)
        assert (hit.num_tokens, hit.complete) == (8, False)
        hit = await store.get(TOKENS, max_tokens=8)
        assert (hit.num_tokens, hit.complete) == (8, True)

    async def test_a_fault_makes_a_partial_hit_or_a_miss_and_counts(self, kit, opened, events):
        backend = FlakyBackend(MemoryBackend(), error=lambda: OSError(5, "I/O error"), verbs=frozenset({"read"}))
        store = await opened(kit.open(kit.medium(backend), observer=events))
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        backend.down = True
        assert await store.get(TOKENS) is None
        backend.down = False
        await kit.until(lambda: store.stats().tiers["medium"].up)
        assert store.stats().tiers["medium"].errors >= 1
        assert events.count("error") >= 1
        hit = await store.get(TOKENS)
        assert (hit.num_tokens, hit.complete) == (16, True)
        kit.assert_kv(hit, TOKENS)
        kit.assert_books_balance(store)

    async def test_whatever_a_backend_raises_is_a_miss(self, kit, opened):
        backend = FlakyBackend(MemoryBackend())
        store = await opened(kit.open(kit.medium(backend), close_seconds=2.0))
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        await store.chunks.put("key", b"1", wait="medium")
        for error in [OSError, ValueError, RuntimeError, KeyError, MemoryError, TimeoutError, asyncio.CancelledError]:
            backend.down, backend._error = True, error
            assert await store.get(TOKENS) is None
            assert await store.chunks.get("key") is None
            assert await store.chunks.exists(f"nobody knows {error}") is False
            assert await consume(store.list()) is not None
            kit.assert_books_balance(store)
            backend.down = False
            store._engine.tiers[0].breaker.succeeded()
            kit.assert_kv(await store.get(TOKENS), TOKENS)
        backend.down = True
        store._engine.tiers[0].breaker.open_now("test")
        failures = backend.failures
        await kit.until(lambda: backend.failures > failures)
        backend.down = False
        await kit.until(lambda: store.stats().tiers["medium"].up)
        await kit.until(lambda: store.stats().tasks == 1)  # upkeep lives, and nothing else is left

    async def test_a_chunk_that_fails_in_one_tier_is_taken_from_the_next(self, kit, opened):
        flaky = FlakyBackend(MemoryBackend())
        store = await opened(
            kit.open(kit.medium(flaky, name="upper"), kit.medium(MemoryBackend(), name="lower"), observer=None)
        )
        await store.put(TOKENS, kit.kv(TOKENS))
        assert (await store.flush()).complete
        flaky.fail_next(2, error=lambda: BackendUnavailableError("away"))
        hit = await store.get(TOKENS)
        assert (hit.num_tokens, hit.complete) == (16, True)
        assert hit.tiers["lower"] >= 1
        kit.assert_kv(hit, TOKENS)
        kit.assert_books_balance(store)

    async def test_a_slow_medium_is_no_fault(self, kit, opened):
        backend = SlowBackend(MemoryBackend(), seconds=0.05, jitter=0.5)
        store = await opened(kit.open(kit.medium(backend)))
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        hit = await store.get(TOKENS)
        assert (hit.num_tokens, hit.complete) == (16, True)
        assert store.stats().tiers["medium"].up


class TestStrict:
    async def open(self, kit, opened, backend, **options):
        return await opened(
            kit.open(kit.medium(backend, deadline_seconds=1.0), strict=True, close_seconds=1.0, **options)
        )

    async def test_a_fault_raises_instead_of_being_a_miss(self, kit, opened):
        backend = FlakyBackend(MemoryBackend(), error=lambda: OSError(5, "I/O error"))
        store = await self.open(kit, opened, backend)
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        await store.chunks.put("key", b"1", wait="medium")
        calls = {
            "get": lambda: store.get(TOKENS),
            "chunks.get": lambda: store.chunks.get("key"),
            "exists": lambda: store.exists([9] * 16),
            "chunks.exists": lambda: store.chunks.exists("nobody knows"),
            "list": lambda: consume(store.list()),
            "lease": lambda: enter(store.lease(TOKENS)),
            "stream": lambda: consume(store.stream(TOKENS)),
        }
        for name, call in calls.items():
            backend.fail_next(4)
            with pytest.raises((BackendError, OSError)) as caught:
                await call()
            assert isinstance(caught.value, BackendError), f"{name} raised {caught.value!r}"
            backend._next.clear()
            store._engine.tiers[0].breaker.succeeded()
            store._engine.tiers[0].absent.clear()

    async def test_a_hang_raises_a_timeout(self, kit, opened):
        backend = HangingBackend(MemoryBackend())
        store = await self.open(kit, opened, backend)
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        await store.chunks.put("key", b"1", wait="medium")
        backend.hang("read", "stat")
        async with Timed():
            with pytest.raises(BackendTimeoutError):
                await store.get(TOKENS, deadline_seconds=SOON)
            with pytest.raises(BackendTimeoutError):
                await store.chunks.get("key", deadline_seconds=SOON)
            with pytest.raises(BackendTimeoutError):
                await store.exists([9] * 16, deadline_seconds=SOON)
        backend.release()

    async def test_a_tier_out_of_service_raises(self, kit, opened):
        backend = FlakyBackend(MemoryBackend())
        store = await self.open(kit, opened, backend)
        await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        store._engine.tiers[0].breaker.open_now("test")
        with pytest.raises(BackendUnavailableError):
            await store.get(TOKENS)

    async def test_a_miss_is_still_a_value(self, kit, opened):
        store = await self.open(kit, opened, MemoryBackend())
        assert await store.get(TOKENS) is None
        assert await store.exists(TOKENS) == 0
        assert await store.chunks.get("key") is None


class TestBreaker:
    async def test_a_dead_tier_is_left_alone_and_used_again_once_it_answers(self, kit, opened, events):
        backend = FlakyBackend(MemoryBackend())
        store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend), observer=events))
        await store.put("early", b"0", wait="medium")
        backend.down = True
        for number in range(4):
            await store.put(f"k{number}", b"1")
        await store.flush()
        stats = store.stats().tiers["medium"]
        assert not stats.up
        assert stats.health in {"open", "half-open"}
        assert "flaky" in stats.last_error
        assert events.count("degraded") >= 1
        calls = backend.failures
        for number in range(50):
            assert await store.get(f"unknown{number}") is None
        assert backend.failures - calls <= 3, "a tier that is down was asked again and again"
        assert store.stats().tiers["medium"].skipped >= 50
        assert await store.get("k3") == b"1"
        backend.down = False
        await kit.until(lambda: store.stats().tiers["medium"].up)
        assert events.count("recovered") >= 1
        await store.put("later", b"2", wait="medium")
        kit.assert_books_balance(store)

    async def test_a_probe_that_hangs_or_fails_does_not_end_the_probing(self, kit, opened):
        inner = HangingBackend(MemoryBackend())
        backend = FlakyBackend(inner)
        store = await opened(kit.open_chunks(kit.medium(backend, deadline_seconds=0.2), close_seconds=1.0))
        inner.hang("stat")
        store._engine.tiers[0].breaker.open_now("test")
        await inner.wait_stuck(1)
        inner.release()
        backend.fail_next(1, error=lambda: RuntimeError("odd"))
        await kit.until(lambda: store.stats().tiers["medium"].up)

    async def test_misses_and_corrupt_entries_do_not_open_it(self, kit, opened):
        medium = {}
        store = await opened(kit.open_chunks(kit.medium(MemoryBackend(medium))))
        for number in range(10):
            await store.put(f"k{number}", b"1", wait="medium")
        for name, stored in list(medium.items()):
            medium[name] = type(stored)(b"x" * len(stored.value), None, 0.0)
        for number in range(10):
            assert await store.get(f"k{number}") is None
        assert store.stats().tiers["medium"].up
        assert store.stats().tiers["medium"].corrupt == 10
        kit.assert_books_balance(store)


class TestWrites:
    async def test_put_does_not_wait_for_a_medium_that_hangs(self, kit, opened):
        backend = HangingBackend(MemoryBackend())
        store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend), close_seconds=1.0))
        backend.hang()
        for number in range(20):
            assert (await store.put(f"k{number}", kit.tensor(number), deadline_seconds=SOON)).count("stored") == 1
        assert await store.get("k0") is not None
        backend.release()

    async def test_put_that_waits_raises_by_its_deadline(self, kit, opened):
        backend = HangingBackend(MemoryBackend())
        store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend), close_seconds=1.0))
        backend.hang()
        async with Timed():
            with pytest.raises(BackendTimeoutError):
                await store.put("key", b"1", wait="durable", deadline_seconds=SOON)
        results = await store.put_many({"a": b"1", "b": b"2"}, wait="medium", deadline_seconds=SOON)
        assert all(isinstance(result, BackendTimeoutError) for result in results.values())
        assert await store.get("key") == b"1"
        backend.release()

    @pytest.mark.parametrize("with_memory", [True, False])
    async def test_put_that_waits_for_a_tier_that_is_down_says_so(self, kit, opened, with_memory):
        backend = FlakyBackend(MemoryBackend())
        tiers = [kit.memory()] * with_memory + [kit.medium(backend)]
        store = await opened(kit.open_chunks(*tiers))
        store._engine.tiers[-1].breaker.open_now("test")
        backend.down = True
        with pytest.raises(BackendUnavailableError):
            await store.put("key", b"1", wait="durable")

    @pytest.mark.parametrize(
        "error", [OSError, ValueError, RuntimeError, asyncio.TimeoutError, asyncio.CancelledError, CapacityError]
    )
    async def test_whatever_a_backend_raises_the_writer_goes_on_and_frees_the_memory(self, kit, opened, error):
        backend = FlakyBackend(MemoryBackend(), error=error, verbs=frozenset({"write"}))
        store = await opened(kit.open_chunks(kit.medium(backend), close_seconds=2.0))
        used = store.stats().memory.arena_used
        for number in range(12):
            backend.fail_next(1)
            await store.put(f"k{number}", kit.tensor(number))
            store._engine.tiers[0].breaker.succeeded()
        result = await store.flush()
        assert result.tiers["medium"].failed == 12
        assert result.tiers["medium"].last_error
        assert not result.complete
        store._engine.tiers[0].breaker.succeeded()
        assert store.stats().memory.arena_used == used
        await kit.until(lambda: not store._engine.tiers[0].unremoved)  # what a failed write may have left behind
        for number in range(12):
            await store.put(f"k{number}", kit.tensor(number))
        result = await store.flush()
        assert (result.tiers["medium"].stored, result.complete) == (12, True)
        kit.assert_books_balance(store)

    @pytest.mark.parametrize("with_memory", [False, True])
    async def test_a_value_that_no_tier_takes_is_counted_and_told_once_by_each(self, kit, opened, with_memory):
        events = kit.Events()
        tiers = [kit.memory(capacity="4KiB")] * with_memory + [kit.medium()]  # nothing fits into the memory
        store = await opened(kit.open_chunks(*tiers, observer=events))
        store._engine.tiers[-1].breaker.open_now("test")
        result = await store.put("key", kit.tensor(1, 64 << 10))
        assert (result.chunks[0].status, result.chunks[0].reason) == ("dropped", "down")
        dropped = {name: tier.dropped for name, tier in store.stats().tiers.items()}
        assert dropped == {"medium": {"down": 1}} | ({"pinned-cpu": {"capacity": 1}} if with_memory else {})
        assert sorted(event.tier for event in events.all if event.kind == "dropped") == sorted(dropped)
        assert (await store.flush()).tiers["medium"].failed == 1

    async def test_a_value_that_the_only_memory_has_no_room_for_is_counted_and_told_once(self, kit, opened):
        events = kit.Events()
        store = await opened(kit.open_chunks(kit.memory(capacity="4KiB"), observer=events))
        result = await store.put("key", kit.tensor(1, 64 << 10))
        assert (result.chunks[0].status, result.chunks[0].reason) == ("dropped", "no-room")
        assert store.stats().tiers["pinned-cpu"].dropped == {"capacity": 1}
        assert [event.tier for event in events.all if event.kind == "dropped"] == ["pinned-cpu"]

    @pytest.mark.parametrize("error", [OSError, asyncio.CancelledError])
    async def test_the_last_writer_outlives_its_failure_with_more_behind_it(self, kit, opened, error):
        backend = FlakyBackend(MemoryBackend(), error=error, verbs=frozenset({"write"}))
        store = await opened(kit.open_chunks(kit.medium(backend, writers=1), close_seconds=2.0))
        backend.fail_next(1)
        await store.put_many({f"k{number}": b"1" for number in range(10)})
        result = await store.flush()
        assert (result.tiers["medium"].failed, result.tiers["medium"].stored) == (1, 9)

    async def test_flush_tells_what_is_pending_and_later_that_it_arrived(self, kit, opened):
        backend = HangingBackend(MemoryBackend())
        store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend)))
        backend.hang("write")
        for number in range(6):
            await store.put(f"k{number}", b"1")
        async with Timed():
            result = await store.flush(deadline_seconds=SOON)
        assert not result.complete
        assert result.tiers["medium"].pending == 6
        backend.release()
        result = await store.flush()
        assert result.complete
        assert (result.tiers["medium"].stored, result.tiers["medium"].failed) == (6, 0)

    async def test_flush_never_calls_complete_what_is_nowhere_durable(self, kit, opened):
        backend = FlakyBackend(MemoryBackend())
        store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend)))
        backend.down = True
        store._engine.tiers[1].breaker.open_now("test")
        await store.put("key", b"1")
        for _ in range(3):
            assert not (await store.flush()).complete
        backend.down = False
        await kit.until(lambda: store.stats().tiers["medium"].up)
        assert (await store.flush()).complete
        store._engine.tiers[0].drop(store._engine.tiers[0].find("key"), "evicted")
        assert await store.get("key") == b"1"

    async def test_a_write_that_is_late_still_arrives_and_is_counted_once(self, kit, opened):
        backend = HangingBackend(MemoryBackend())
        store = await opened(kit.open_chunks(kit.medium(backend, deadline_seconds=0.2)))
        backend.hang("write")
        await store.put("key", b"1")
        await kit.until(lambda: store.stats().tiers["medium"].write_timeouts == 1)
        backend.release()
        await kit.until(lambda: store.stats().tiers["medium"].entries == 1)
        assert await store.get("key") == b"1"
        assert store.stats().tiers["medium"].written == 1
        kit.assert_books_balance(store)


class TestDeletes:
    async def filled(self, kit, opened, backend, **options):
        store = await opened(kit.open_chunks(kit.memory(), kit.medium(backend), close_seconds=1.0, **options))
        await store.put("key", b"old", wait="medium")
        await store.put("other", b"1", wait="medium")
        return store

    async def hidden(self, store):
        assert await store.get("key") is None
        assert await store.exists("key") is False
        assert [entry.key async for entry in store.list()] == ["other"]
        assert await store.get("key") is None

    async def test_on_a_failing_medium_the_key_is_hidden_and_the_tier_named(self, kit, opened):
        medium = {}
        backend = FlakyBackend(MemoryBackend(medium), verbs=frozenset({"delete"}))
        store = await self.filled(kit, opened, backend)
        backend.down = True
        with pytest.raises(PartialDeleteError) as caught:
            await store.delete("key")
        assert caught.value.tiers == ("medium",)
        assert len(medium) == 2
        await self.hidden(store)
        with pytest.raises(PartialDeleteError):
            await store.delete("key")
        await self.hidden(store)
        backend.down = False
        await kit.until(lambda: len(medium) == 1)
        await self.hidden(store)
        await kit.until(lambda: store._engine.tiers[1].ledger.condemned == 0)
        kit.assert_books_balance(store)

    async def test_on_a_hanging_medium_it_ends_by_its_deadline(self, kit, opened):
        medium = {}
        backend = HangingBackend(MemoryBackend(medium))
        store = await self.filled(kit, opened, backend)
        backend.hang("delete")
        async with Timed():
            with pytest.raises(PartialDeleteError):
                await store.delete("key", deadline_seconds=SOON)
        await self.hidden(store)
        backend.release()
        await kit.until(lambda: len(medium) == 1)
        await self.hidden(store)

    async def test_a_value_put_after_a_delete_that_failed_survives_the_second_try(self, kit, opened):
        medium = {}
        flaky = FlakyBackend(HangingBackend(MemoryBackend(medium)), verbs=frozenset({"delete"}))
        store = await self.filled(kit, opened, flaky)
        tier = store._engine.tiers[1]
        flaky.fail_next(1)
        with pytest.raises(PartialDeleteError):
            await store.delete("key")
        flaky.inner.hang("write")
        putting = asyncio.ensure_future(store.put("key", b"new", wait="medium"))
        await flaky.inner.wait_stuck()
        tier.sweep()  # tries the removal again while the new value is being written
        flaky.inner.release()
        await putting
        await kit.until(lambda: len(tier.locks) == 0)
        store._engine.tiers[0].drop(store._engine.tiers[0].find("key"), "evicted")
        assert await store.get("key") == b"new"
        kit.assert_books_balance(store)

    async def test_a_batch_deletes_what_it_can(self, kit, opened):
        backend = FlakyBackend(MemoryBackend(), rate=0.5, seed=3, verbs=frozenset({"delete"}))
        store = await opened(kit.open_chunks(kit.medium(backend)))
        keys = [f"k{number}" for number in range(12)]
        await store.put_many(dict.fromkeys(keys, b"1"), wait="medium")
        with pytest.raises(PartialDeleteError):
            await store.delete_many(keys)
        assert list(await store.exists_many(keys)) == [False] * 12
        backend.rate = 0.0
        await kit.until(lambda: not backend.inner.medium)

    @pytest.mark.parametrize("how", ["delete", "clear"])
    async def test_what_was_deleted_while_an_optional_tier_was_down_stays_hidden_when_it_returns(self, kit, how):
        class Indexed(MemoryBackend):
            traits = MemoryBackend.traits.__class__(persistent=True, shared=True, ranges=True, scan_at_open=True)

        medium = {}
        async with kit.open(kit.medium(Indexed(medium))) as store:
            await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
        backend = FlakyBackend(Indexed(medium), verbs=frozenset({"open", "read", "write", "delete", "stat", "scan"}))
        backend.down = True
        async with kit.open(kit.memory(), kit.medium(backend, required=False)) as store:
            assert not store.stats().tiers["medium"].up
            with pytest.raises(PartialDeleteError):
                await (store.delete(TOKENS) if how == "delete" else store.clear())
            backend.down = False
            await kit.until(lambda: store.stats().tiers["medium"].up)
            assert await store.exists(TOKENS) == 0
            assert await store.get(TOKENS) is None
            await kit.until(lambda: not medium)
            assert await store.get(TOKENS) is None


async def test_an_expired_value_put_anew_is_not_removed_by_the_sweep_of_the_old_one(kit, opened):
    clock, backend = FrozenClock(), HangingBackend(MemoryBackend())
    store = await opened(kit.open(kit.medium(backend), clock=clock, deadline_seconds=60.0))
    await store.put(TOKENS, kit.kv(TOKENS), ttl_seconds=10, wait="medium")
    clock.advance(20)
    backend.hang("write")
    putting = asyncio.ensure_future(store.put(TOKENS, kit.kv(TOKENS), wait="medium"))
    await backend.wait_stuck()
    store._engine.tiers[0].sweep()
    backend.release()
    await putting
    await kit.until(lambda: len(store._engine.tiers[0].locks) == 0)
    hit = await store.get(TOKENS)
    assert hit is not None
    assert hit.num_tokens == 16
    kit.assert_books_balance(store)


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), True, "5"], ids=repr)
async def test_an_unlimited_or_senseless_deadline_is_refused(kit, opened, deadline):
    store = await opened(kit.open(kit.memory()))
    calls = [
        lambda: store.get(TOKENS, deadline_seconds=deadline),
        lambda: store.put(TOKENS, kit.kv(TOKENS), deadline_seconds=deadline),
        lambda: store.flush(deadline_seconds=deadline),
        lambda: store.chunks.get("key", deadline_seconds=deadline),
        lambda: consume(store.list(deadline_seconds=deadline)),
    ]
    for call in calls:
        with pytest.raises(InvalidValueError, match="deadline_seconds"):
            await call()


class TestWaiting:
    async def test_a_get_that_waits_is_woken_by_the_put(self, kit, opened, monkeypatch):
        monkeypatch.setattr("kvtier.store.prefixes.LOOK_AGAIN_SECONDS", 1000.0)
        store = await opened(kit.open(kit.memory()))
        getting = asyncio.ensure_future(store.get(TOKENS, wait_seconds=30, deadline_seconds=60))
        await asyncio.sleep(0)
        assert not getting.done()
        async with Timed(20):
            await store.put(TOKENS[:8], kit.kv(TOKENS[:8]))
            await asyncio.sleep(0)
            assert not getting.done(), "half a prefix is not what was waited for"
            await store.put(TOKENS, kit.kv(TOKENS))
            hit = await getting
        assert hit.num_tokens == 16

    async def test_a_get_that_waits_in_vain_returns_what_there_is(self, kit, opened):
        store = await opened(kit.open(kit.memory()))
        await store.put(TOKENS[:8], kit.kv(TOKENS[:8]))
        async with Timed():
            hit = await store.get(TOKENS, wait_seconds=SOON)
            assert hit.num_tokens == 8
            assert await store.get([7] * 9, wait_seconds=100, deadline_seconds=SOON) is None
