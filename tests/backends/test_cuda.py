"""What the cuda backend adds to the contract: slots, streams, donated tensors, and a clear no where there is no GPU."""

import asyncio

import pytest
import torch

import kvtier
from kvtier.backends.base import Read, Write
from kvtier.backends.cuda import CudaBackend
from kvtier.backends.device_slots import SlotPool, cut, pairs
from kvtier.buffers.devices import device_of
from kvtier.testing.context import lend_context
from kvtier.testing.streams import LazyDevice

SLOT = 4096


class LazyBackend(CudaBackend):
    def _make_device(self):
        self.lazy = LazyDevice()
        return self.lazy


@pytest.fixture
async def context():
    async with lend_context(capacity=16 * SLOT) as context:
        yield context


@pytest.fixture
async def lazy(context):
    backend = LazyBackend(slot_bytes=SLOT)
    await backend.open(context)
    yield backend
    await backend.aclose()


def value(seed, size=SLOT + 100):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


async def stored(backend, name, size=SLOT + 100):
    into = torch.zeros(size, dtype=torch.uint8)
    assert await backend.read_many([Read(name, [into])]) == [size]
    return into


def test_no_cuda_is_said_clearly():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(kvtier.ConfigError, match="sees no CUDA device"):
        device_of("cuda")
    with pytest.raises(kvtier.ConfigError, match="only 'cuda'"):
        device_of("meta")
    with pytest.raises(kvtier.ConfigError, match="knows no such device"):
        device_of("cud")


async def test_a_store_on_a_missing_device_does_not_open():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(kvtier.ConfigError, match=r"tier 'cuda'.*sees no CUDA device"):
        async with kvtier.open_chunks({"tiers": [{"backend": "cuda", "capacity": "1MiB"}]}):
            pass


async def test_values_go_through_a_store_with_a_device_on_top():
    tiers = [
        {"backend": "cuda", "device": "cpu", "capacity": "4MiB", "slot_bytes": "4KiB", "on_full": "wait"},
        {"backend": "pinned-cpu", "capacity": "4MiB"},
    ]
    async with kvtier.open_chunks({"tiers": tiers}) as store:
        blobs = {f"key {i}": value(i, 100_000) for i in range(80)}  # twice what either tier holds
        for key, blob in blobs.items():
            await store.put(key, blob, wait="cuda")
        found = await store.get_many(list(blobs))
        assert sum(got is not None for got in found) >= 35
        assert all(got is None or torch.equal(got, blob) for got, blob in zip(found, blobs.values(), strict=True))
        stats = store.stats().tiers["cuda"]
        assert 0 < stats.bytes <= stats.capacity
        assert stats.evicted > 0


async def test_entries_end_where_slots_do_not(context):
    backend = CudaBackend(device="cpu", slot_bytes=SLOT)
    await backend.open(context)
    parts = [value(1, 10), value(2, SLOT), value(3, 3 * SLOT)]
    await backend.write_many([Write("a", parts)])
    whole = torch.cat(parts)
    assert torch.equal(await stored(backend, "a", whole.numel()), whole)
    free = backend._pool.free
    await backend.delete_many(["a"])
    assert backend._pool.free == free + 5
    await backend.aclose()


async def test_a_full_device_says_so_and_loses_nothing(context):
    backend = CudaBackend(device="cpu", slot_bytes=SLOT)
    await backend.open(context)
    await backend.write_many([Write("a", [value(1)])])
    answers = await backend.write_many([Write("b", [value(2, 17 * SLOT)]), Write("a", [value(3, 17 * SLOT)])])
    assert all(isinstance(answer, kvtier.CapacityError) for answer in answers)
    assert torch.equal(await stored(backend, "a"), value(1))
    await backend.aclose()


async def test_a_write_waits_for_the_stream_that_makes_the_value(lazy):
    source = torch.zeros(SLOT + 100, dtype=torch.uint8)
    lazy.lazy.caller.run(lambda: source.copy_(value(1)))  # a kernel that has not run yet
    await lazy.write_many([Write("a", [source])])
    source.zero_()  # the caller goes on
    assert torch.equal(await stored(lazy, "a"), value(1))


async def test_a_read_waits_for_the_stream_that_still_uses_the_buffer(lazy):
    await lazy.write_many([Write("a", [value(1)])])
    into = torch.zeros(SLOT + 100, dtype=torch.uint8)
    seen = []
    into.fill_(9)
    lazy.lazy.caller.run(lambda: seen.append(int(into[0])))  # a kernel that reads the old content
    await lazy.read_many([Read("a", [into])])
    assert seen == [9]
    assert torch.equal(into, value(1))


async def test_a_slot_is_not_used_again_before_the_copy_from_it_is_done(lazy, monkeypatch):
    """While a read is under way its entry is deleted, and others are written over every free slot."""
    await lazy.write_many([Write("a", [value(1)])])
    workers = lazy._context.workers
    run, into = workers.run, torch.zeros(SLOT + 100, dtype=torch.uint8)

    async def run_later(func, *args):
        """The job begins only when everything else that can happen has happened."""
        if len(args) > 1 and _fills(args[1], into):
            await lazy.delete_many(["a"])
            answers = [(await lazy.write_many([Write(f"b{i}", [value(10 + i, SLOT)])]))[0] for i in range(20)]
            assert any(isinstance(answer, kvtier.CapacityError) for answer in answers)
        return await run(func, *args)

    monkeypatch.setattr(workers, "run", run_later, raising=False)
    assert await lazy.read_many([Read("a", [into])]) == [SLOT + 100]
    assert torch.equal(into, value(1))
    assert lazy._pool.free >= 2


def _fills(copies, into):
    return any(target.data_ptr() == into.data_ptr() for target, _ in copies)


async def test_donated_tensors_are_kept_not_copied(context):
    backend = LazyBackend(slot_bytes=SLOT, donate=True)
    await backend.open(context)
    free, gift = backend._pool.free, torch.zeros(SLOT + 100, dtype=torch.uint8)
    backend.lazy.caller.run(lambda: gift.copy_(value(1)))
    await backend.write_many([Write("a", [gift])])
    assert backend._pool.free == free
    assert backend._entries["a"].pieces[0].data_ptr() == gift.data_ptr()
    assert torch.equal(await stored(backend, "a"), value(1))
    await backend.write_many([Write("b", [value(2), value(3)])])  # in two parts: copied
    assert backend._pool.free < free
    await backend.delete_many(["a", "b"])
    assert backend._pool.free == free
    await backend.aclose()


async def test_reads_and_writes_of_one_name_never_mix(context):
    backend = CudaBackend(device="cpu", slot_bytes=SLOT)
    await backend.open(context)
    values = [value(seed, 3 * SLOT) for seed in range(4)]
    await backend.write_many([Write("a", [values[0]])])

    async def write():
        for i in range(100):
            await backend.write_many([Write("a", [values[i % 4]])])

    async def read():
        for _ in range(100):
            got = await stored(backend, "a", 3 * SLOT)
            assert any(torch.equal(got, value) for value in values)

    await asyncio.gather(write(), read(), read())
    await backend.aclose()


def test_pairs_cover_every_byte():
    source = value(1, 1000)
    pool = SlotPool(torch.zeros(4096, dtype=torch.uint8), 64)
    slots = pool.take(1000)
    pieces = pool.pieces([*slots[3:], *slots[:3]], 1000)
    for target, part in pairs(pieces, [source[:7], source[7:7], source[7:]]):
        target.copy_(part)
    for start, size in ((0, 1000), (1, 998), (63, 66), (999, 1), (1000, 0)):
        assert torch.equal(torch.cat([*cut(pieces, start, size), source[:0]]), source[start : start + size])
