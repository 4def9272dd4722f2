"""The fault wrappers: invisible when they do nothing, exact and repeatable when they do."""

import asyncio

import pytest

from kvtier.backends.base import Read, Write, Written
from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError
from kvtier.testing.backends import BackendConformance
from kvtier.testing.context import lend_context
from kvtier.testing.faults import VERBS, FlakyBackend, HangingBackend, SlowBackend
from kvtier.testing.memory import MemoryBackend


class Transparent(BackendConformance):
    race_bytes = 64 << 10
    large_bytes = 64 << 10

    @pytest.fixture
    def make_backend(self):
        medium = {}
        return lambda: self.wrap(MemoryBackend(medium))


class TestSlowIsTransparent(Transparent):
    wrap = staticmethod(lambda inner: SlowBackend(inner, seconds={"read": 0.0001}, jitter=0.5))


class TestFlakyIsTransparent(Transparent):
    wrap = staticmethod(FlakyBackend)


class TestHangingIsTransparent(Transparent):
    wrap = staticmethod(HangingBackend)


@pytest.fixture
async def context():
    async with lend_context() as context:
        yield context


async def put(backend, count):
    return await backend.write_many([Write(f"n{i}", [memoryview(b"x")]) for i in range(count)])


async def outcomes(seed, context):
    backend = FlakyBackend(MemoryBackend(), rate=0.3, seed=seed)
    await backend.open(context)
    written = await put(backend, 200)
    read = await backend.read_many([Read(f"n{i}", [memoryview(bytearray(1))]) for i in range(200)])
    await backend.aclose()
    return [type(answer) for answer in written], [type(answer) for answer in read], backend.failures


async def test_flaky_repeats_by_seed(context):
    assert await outcomes(1, context) == await outcomes(1, context)
    assert await outcomes(1, context) != await outcomes(2, context)


async def test_flaky_fails_items_at_its_rate(context):
    written, read, failures = await outcomes(5, context)
    assert 30 < written.count(BackendUnavailableError) < 90
    assert written.count(Written) == 200 - written.count(BackendUnavailableError)
    missed = [kind for kind, stored in zip(read, written, strict=True) if stored is not Written]
    assert int not in missed, "an item answered with an error reached the medium"
    assert failures == written.count(BackendUnavailableError) + read.count(BackendUnavailableError)


async def test_flaky_fails_the_next_calls(context):
    backend = FlakyBackend(MemoryBackend(), verbs=frozenset({"write"}))
    await backend.open(context)
    backend.fail_next(1)
    backend.fail_next(1, error=lambda: ZeroDivisionError("odd"))
    assert await backend.stat_many(["n0"]) == [None]  # not one of the verbs
    with pytest.raises(BackendUnavailableError):
        await put(backend, 1)
    with pytest.raises(ZeroDivisionError):
        await put(backend, 1)
    assert await put(backend, 1) == [Written(1)]
    assert backend.failures == 2


async def test_flaky_is_down_until_it_is_up(context):
    backend = FlakyBackend(MemoryBackend(), error=lambda: BackendTimeoutError("down"))
    await backend.open(context)
    await put(backend, 3)
    backend.down = True
    with pytest.raises(BackendTimeoutError):
        await backend.stat_many(["n0"])
    with pytest.raises(BackendTimeoutError):
        [page async for page in backend.scan()]
    backend.down = False
    assert [len(page) async for page in backend.scan()] == [3]


async def test_slow_takes_its_time_by_verb(context, monkeypatch):
    delays = []

    async def note(seconds):
        delays.append(seconds)

    inner = MemoryBackend()
    backend = SlowBackend(inner, seconds={"write": 2.0, "stat": 1.0}, jitter=0.25, seed=3)
    await backend.open(context)
    monkeypatch.setattr("kvtier.testing.faults.asyncio.sleep", note)
    for _ in range(50):
        await backend.before("write")
    assert all(1.5 <= seconds <= 2.5 for seconds in delays)
    assert max(delays) - min(delays) > 0.5
    delays.clear()
    await backend.before("read")
    assert delays == [0.0]


async def test_hanging_comes_back_on_release(context):
    backend = HangingBackend(MemoryBackend())
    await backend.open(context)
    await put(backend, 1)
    backend.hang("stat")
    stuck = [asyncio.ensure_future(backend.stat_many(["n0"])) for _ in range(3)]
    await backend.wait_stuck(3)
    assert await backend.delete_many(["n9"]) == [False]
    assert not any(task.done() for task in stuck)
    backend.release()
    assert [len(answers) for answers in await asyncio.gather(*stuck)] == [1, 1, 1]
    assert backend.stuck == 0
    assert await backend.stat_many(["n9"]) == [None]
    backend.hang()
    assert set(backend.hanging) == VERBS - {"open", "close"}
    await backend.aclose()


async def test_stubborn_call_is_not_cancelled_before_release(context):
    backend = HangingBackend(MemoryBackend(), hanging=frozenset({"read"}), stubborn=True)
    await backend.open(context)
    read = asyncio.ensure_future(backend.read_many([Read("n0", [])]))
    await backend.wait_stuck()
    read.cancel()
    done, _ = await asyncio.wait({read}, timeout=0.02)
    assert not done
    backend.release()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert not issubclass(asyncio.CancelledError, BackendError)


async def test_hanging_call_can_be_cancelled(context):
    backend = HangingBackend(MemoryBackend(), hanging=frozenset({"read"}))
    await backend.open(context)
    read = asyncio.ensure_future(backend.read_many([Read("n0", [])]))
    await backend.wait_stuck()
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert backend.stuck == 0
