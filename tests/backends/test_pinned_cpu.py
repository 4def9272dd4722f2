"""What pinned-cpu does when the arena is full, and how its entries share slots."""

import asyncio
import threading

import pytest

from kvtier.backends.base import Read, Write, Written
from kvtier.backends.pinned_cpu import PinnedCpuBackend
from kvtier.backends.views import gather
from kvtier.errors import CapacityError, ClosedError, ConfigError, InvalidKeyError
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject, value_of

MIB = 1 << 20


@pytest.fixture
async def lent():
    async with lend_context(arena_bytes=8 * MIB) as context:
        backend = PinnedCpuBackend()
        await backend.open(context)
        yield backend, context.arena
        await backend.aclose()


async def test_full_arena_is_a_capacity_error_and_keeps_what_was_there(lent):
    backend, arena = lent
    disk = Subject(backend)
    values = {f"n{i}": value_of(i, MIB) for i in range(9)}
    answers = await backend.write_many([Write(name, [memoryview(value)]) for name, value in values.items()])
    stored = [name for name, answer in zip(values, answers, strict=True) if isinstance(answer, Written)]
    assert len(stored) == 6  # 8 MiB less the staging reserve, which entries leave alone
    assert all(isinstance(answer, CapacityError) for answer in answers if not isinstance(answer, Written))
    assert arena.used == 6 * MIB
    for name in stored:
        assert await disk.get(name, MIB) == values[name]
    with pytest.raises(CapacityError):
        await disk.put(stored[0], value_of("new", MIB))  # old and new do not fit side by side
    assert await disk.get(stored[0], MIB) == values[stored[0]]
    await disk.delete(stored[1])
    assert (await disk.put(stored[0], value_of("new", MIB))).stored
    assert arena.used == 5 * MIB


async def test_values_take_whole_pages(lent):
    backend, arena = lent
    disk = Subject(backend)
    for size, pages in ((0, 1), (1, 1), (4096, 1), (4097, 2)):
        await disk.put("entry", bytes(size))
        assert arena.used == pages * 4096
        assert (await disk.stat("entry")).size == size
    await disk.delete("entry")
    assert arena.used == 0


async def test_only_large_copies_leave_the_loop(lent, monkeypatch):
    backend, _ = lent
    jobs = []
    workers = backend._use().workers
    run = workers.run

    async def count(func, *args):
        jobs.append(func)
        return await run(func, *args)

    monkeypatch.setattr(workers, "run", count)
    disk = Subject(backend)
    await disk.put("small", bytes(64 << 10))
    assert await disk.get("small", 64 << 10) == bytes(64 << 10)
    assert jobs == []
    await disk.put("large", bytes((64 << 10) + 1))
    assert await disk.get("large", (64 << 10) + 1) == bytes((64 << 10) + 1)
    assert len(jobs) == 2


async def test_failed_and_cancelled_writes_give_their_slot_back(lent):
    backend, arena = lent
    for turns in range(6):
        write = asyncio.ensure_future(backend.write_many([Write("entry", [memoryview(bytes(MIB))])]))
        for _ in range(turns):
            await asyncio.sleep(0)
        write.cancel()
        await asyncio.wait({write})
        assert arena.used in {0, MIB}
        await backend.delete_many(["entry"])
        assert arena.used == 0


async def test_close_during_a_write(lent, monkeypatch):
    backend, arena = lent
    begun, go_on = threading.Event(), threading.Event()

    def slow(parts, into):
        begun.set()
        go_on.wait(30)
        gather(parts, into)

    monkeypatch.setattr("kvtier.backends.pinned_cpu.gather", slow)
    write = asyncio.ensure_future(backend.write_many([Write("entry", [memoryview(bytes(MIB))])]))
    while not begun.is_set():
        await asyncio.sleep(0)
    await backend.aclose()
    assert arena.used == MIB, "a slot was given back while a thread writes into it"
    go_on.set()
    with pytest.raises(ClosedError):
        await write
    assert arena.used == 0


async def test_expiry_moves_the_moment_of_change(lent):
    backend, _ = lent
    disk = Subject(backend)
    await disk.put("entry", b"x", expires=5e9)
    before = await disk.stat("entry")
    await backend.set_expiry_many([("entry", 6e9)])
    after = await disk.stat("entry")
    assert (before.expires, after.expires) == (5e9, 6e9)
    assert after.changed >= before.changed > 1e9


async def test_wrong_use_is_told(lent):
    backend, arena = lent
    with pytest.raises(ConfigError, match="open already"):
        await backend.open(backend._use())
    slot = arena.try_allocate(1)
    with pytest.raises(InvalidKeyError):
        backend.adopt("NOT A NAME", slot)
    slot.release()
    with pytest.raises(InvalidKeyError):
        await backend.read_many([Read("../x", [])])
