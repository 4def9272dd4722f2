"""Foreground reads go first, background reads hold at most half of what there is, and a get hurries what it joins."""

import asyncio

import pytest
import torch

import kvtier
from kvtier.concurrency import Workers
from kvtier.testing.memory import MemoryBackend

CHUNKS = 24


class Gated(MemoryBackend):
    """Reads wait at a gate, and say which came to it."""

    def __init__(self, medium=None):
        super().__init__(medium)
        self.gate = asyncio.Event()
        self.gate.set()
        self.came = []

    async def read_many(self, reads):
        self.came += [read.name for read in reads]
        await self.gate.wait()
        return await super().read_many(reads)

    async def arrivals(self, count):
        """Wait until so many reads are at the gate."""
        while len(self.came) < count:
            await asyncio.sleep(0)

    async def settled(self):
        """Wait until no further read comes."""
        before = -1
        while before != len(self.came):
            before = len(self.came)
            for _ in range(50):
                await asyncio.sleep(0)


@pytest.fixture
async def slow(kit, opened):
    """A store whose medium admits 8 reads at once, and the prompt that is on the medium only."""
    backend = Gated()
    store = await opened(
        kit.open(kit.memory(promote="never"), kit.medium(backend, promote="never", max_in_flight=8), staging="8MiB")
    )
    tokens = list(range(CHUNKS * kit.chunk_tokens))
    await store.put(tokens, kit.kv(tokens), wait="medium")
    for entry in list(store._engine.memory_tiers[0].ledger.index.entries.values()):
        store._engine.memory_tiers[0].evict(entry)
    return store, backend, tokens


async def test_background_reads_hold_half_of_the_places_and_a_get_has_the_other_half(slow, kit):
    store, backend, tokens = slow
    backend.gate.clear()
    prefetch = asyncio.ensure_future(store.prefetch(tokens))
    await backend.arrivals(4)
    await backend.settled()
    assert len(backend.came) == 4
    get = asyncio.ensure_future(store.get(tokens[: kit.chunk_tokens * 3]))  # joins three of those
    await backend.arrivals(7)
    await backend.settled()
    assert len(backend.came) == 7  # what the joined reads had of the background's half went to the next three
    backend.gate.set()
    hit = await get
    kit.assert_kv(hit, tokens)
    assert await prefetch == len(tokens)


async def test_a_get_hurries_the_background_reads_that_wait(slow, kit):
    store, backend, tokens = slow
    backend.gate.clear()
    prefetch = asyncio.ensure_future(store.prefetch(tokens))
    await backend.arrivals(4)
    await backend.settled()
    last = store.chunks  # the key level: one chunk alone, the last of the prompt
    key = [entry.key async for entry in store.list("")]
    names = set(backend.came)
    wanted = [k for k in key if store._engine.stored_tiers[0].find(k).name not in names][-1]
    get = asyncio.ensure_future(last.get(wanted))
    await backend.arrivals(5)
    assert backend.came[4] == store._engine.stored_tiers[0].find(wanted).name
    assert store.stats().tiers["medium"].joined == 1
    backend.gate.set()
    await get
    assert await prefetch == len(tokens)


async def test_background_reads_leave_memory_for_a_get(kit, opened):
    """The reads of a prefetch would fill all memory for reads: a get that comes later still finds some."""
    shared = {}
    background, wanted = list(range(CHUNKS * kit.chunk_tokens)), list(range(1000, 1000 + kit.chunk_tokens))
    writer = await opened(kit.open(kit.medium(MemoryBackend(shared))))
    for tokens in (background, wanted):
        await writer.put(tokens, kit.kv(tokens), wait="medium")
    backend = Gated(shared)
    medium = kit.medium(backend, promote="never", max_in_flight=1000)
    store = await opened(kit.open(kit.memory(promote="never", capacity="64KiB"), medium, staging="128KiB"))
    backend.gate.clear()
    prefetch = asyncio.ensure_future(store.prefetch(background))
    await backend.arrivals(1)
    await backend.settled()
    waiting = len(backend.came)
    assert waiting < CHUNKS
    get = asyncio.ensure_future(store.get(wanted))
    await backend.arrivals(waiting + 1)
    backend.gate.set()
    kit.assert_kv(await get, wanted)
    await prefetch


class NotedWorkers(Workers):
    """Threads that keep the names of what they were given to do."""

    asked = ()

    async def run(self, func, *args):
        self.asked = (*self.asked, getattr(func, "__name__", ""))
        return await super().run(func, *args)


class ForAllBytes(NotedWorkers):
    """Threads that are asked however few bytes there are: the control."""

    loop_bytes = 0


@pytest.mark.parametrize(("kind", "asked"), [(NotedWorkers, 0), (ForAllBytes, 2)])
async def test_a_small_value_asks_no_thread_to_verify_and_copy_it(kit, opened, kind, asked):
    store = await opened(kit.open(kit.medium(promote="never"), make_workers=kind))
    tokens = range(4)
    await store.put(tokens, kit.kv(tokens), wait="medium")
    out = {name: torch.zeros_like(tensor) for name, tensor in kit.kv(tokens).items()}
    assert (await store.get(tokens, out=out)).num_tokens == 4
    assert all(
        torch.equal(out[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in kit.kv(tokens).items()
    )
    names = store._engine.services.workers.asked
    assert sum(names.count(name) for name in ("_verified", "_deliver")) == asked


async def test_more_than_64_kib_are_never_copied_on_the_loop(kit, opened):
    layout = kvtier.KVLayout(num_layers=2, num_kv_heads=2, head_dim=1024, dtype="bfloat16")
    store = await opened(kit.open(kit.memory(), make_workers=NotedWorkers, layout=layout))
    tokens = range(4)  # 64 KiB and a header
    kv = kit.kv(tokens, layout=layout)
    await store.put(tokens, kv)
    hit = await store.get(tokens)
    assert all(torch.equal(hit.kv[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in kv.items())
    assert store._engine.services.workers.asked.count("_deliver") == 1
