"""Cancelling at any moment: no memory of the caller is touched afterwards, and nothing is left behind (K8, K7)."""

import asyncio
import concurrent.futures
import random
import time

import pytest
import torch

from kvtier.concurrency.workers import Workers
from kvtier.store.requests import GetRequest
from kvtier.testing.faults import SlowBackend
from kvtier.testing.kv_values import same_bits
from kvtier.testing.memory import MemoryBackend

PAINT = 0x5A
PROMPTS = [[number] * 16 for number in range(6)]


def slowly(func, *args):
    time.sleep(0.002)  # the moment in which a careless store would have let go of the caller already
    return func(*args)


class SlowWorkers(Workers):
    """The real threads, with jobs that take their time, however small."""

    loop_bytes = 0

    async def run(self, func, *args):
        return await super().run(slowly, func, *args)


class CarelessWorkers(SlowWorkers):
    """What asyncio offers by itself: a cancelled wait returns while the thread goes on."""

    pool = concurrent.futures.ThreadPoolExecutor(4)

    async def run(self, func, *args):
        return await asyncio.wrap_future(self.pool.submit(slowly, func, *args))


async def cancelled(call, drawn):
    """Run a call, cancel it somewhere in the middle; tell whether it was cancelled."""
    task = asyncio.ensure_future(call)
    if drawn.random() < 0.5:
        for _ in range(drawn.randrange(6)):
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(drawn.random() * 0.004)
    task.cancel()
    if drawn.random() < 0.3:
        await asyncio.sleep(0)
        task.cancel()  # impatient callers cancel twice
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


def painted(kv):
    return {name: torch.full_like(tensor.view(torch.uint8), PAINT).view(tensor.dtype) for name, tensor in kv.items()}


def repaint(kv):
    for tensor in kv.values():
        tensor.view(torch.uint8).fill_(PAINT)


def is_painted(kv):
    return all(bool((tensor.view(torch.uint8) == PAINT).all()) for tensor in kv.values())


class Damage:
    """Counts how often memory was touched after the call that it was lent to had ended."""

    def __init__(self, kit, store):
        self.kit = kit
        self.store = store
        self.drawn = random.Random(11)
        self.lent = []
        self.cancelled = 0

    async def get(self, tokens):
        out = painted(self.kit.kv(tokens))
        self.cancelled += await cancelled(self.store.get(tokens, out=out), self.drawn)
        repaint(out)
        self.lent.append(out)

    async def get_many(self, prompts):
        outs = [painted(self.kit.kv(tokens)) for tokens in prompts]
        requests = [GetRequest(tokens, out=out) for tokens, out in zip(prompts, outs, strict=True)]
        self.cancelled += await cancelled(self.store.get_many(requests), self.drawn)
        for out in outs:
            repaint(out)
        self.lent.extend(outs)

    async def chunk_get(self, key, like):
        into = {"": torch.full_like(like, PAINT)}
        self.cancelled += await cancelled(self.store.chunks.get(key, into=into[""]), self.drawn)
        repaint(into)
        self.lent.append(into)

    def in_buffers(self):
        return sum(not is_painted(kv) for kv in self.lent)

    async def put(self, tokens, take):
        source = {name: tensor.clone() for name, tensor in self.kit.kv(tokens, take=take).items()}
        self.cancelled += await cancelled(self.store.put(tokens, source), self.drawn)
        repaint(source)

    async def chunk_put(self, key, value):
        source = value.clone()
        self.cancelled += await cancelled(self.store.chunks.put(key, source), self.drawn)
        source.fill_(PAINT)


@pytest.fixture(params=[SlowWorkers, CarelessWorkers])
def workers(request):
    return request.param


class TestBuffers:
    """Memory is repainted the moment a call has ended; the controls, with careless threads, must show damage."""

    @pytest.mark.parametrize("shape", ["memory", "medium"])
    async def test_a_cancelled_get_leaves_the_callers_tensors_alone(self, kit, opened, workers, shape):
        tier = kit.memory() if shape == "memory" else kit.medium()
        store = await opened(kit.open(tier, make_workers=workers))
        for tokens in PROMPTS:
            await store.put(tokens, kit.kv(tokens))
        like = kit.tensor(1, size=5000)
        await store.chunks.put("key", like)
        await store.flush()
        damage, careless = Damage(kit, store), workers is CarelessWorkers
        for number in range(1000 if careless else 70):  # on a busy machine it may take long to hit the moment
            await damage.get(PROMPTS[number % 6])
            await damage.get_many(PROMPTS[number % 3 : number % 3 + 3])
            await damage.chunk_get("key", like)
            if careless and number % 10 == 0 and damage.in_buffers():
                break
        await asyncio.sleep(0.05)  # late writers, if there are any
        assert damage.cancelled > 60 or careless
        assert (damage.in_buffers() == 0) == (workers is SlowWorkers), f"{damage.in_buffers()} damaged"

    @pytest.mark.parametrize("shape", ["memory", "medium"])
    async def test_a_cancelled_put_reads_nothing_any_more(self, kit, opened, shape):
        tier = kit.memory() if shape == "memory" else kit.medium()
        store = await opened(kit.open(tier, make_workers=SlowWorkers))
        damage, damaged, found = Damage(kit, store), 0, 0
        for number in range(120):
            tokens, key, value = [number + 100] * 16, f"k{number}", kit.tensor(number)
            await damage.put(tokens, take=0)
            await damage.chunk_put(key, value)
            hit = await store.get(tokens)
            if hit is not None:
                found += 1
                wanted = kit.kv(tokens)
                damaged += any(not same_bits(hit.kv[n], t[:, : hit.num_tokens]) for n, t in wanted.items())
            got = await store.chunks.get(key)
            if got is not None:
                found += 1
                damaged += not torch.equal(got, value)
        assert damage.cancelled > 60
        assert found > 10
        assert damaged == 0, f"{damaged} stored values were read from memory that was the caller's again"

    async def test_a_snapshot_read_late_would_show(self, kit, opened):
        """The control of the test above: a put that goes on after its caller let go stores the caller's paint."""
        store = await opened(kit.open_chunks(kit.memory(), make_workers=CarelessWorkers))
        for number in range(50):  # on a busy machine the snapshot may be taken before the paint
            source, value, key = kit.tensor(number), kit.tensor(number), f"key {number}"
            putting = asyncio.ensure_future(asyncio.shield(store.put(key, source)))
            await asyncio.sleep(0)
            putting.cancel()
            source.fill_(PAINT)
            await kit.until(lambda: store.stats().tiers["pinned-cpu"].entries == number + 1)  # noqa: B023
            if not torch.equal(await store.get(key), value):
                return
        pytest.fail("the careless threads did no damage")

    async def test_a_get_many_that_fails_has_stopped_filling_the_others(self, kit, opened):
        store = await opened(kit.open(kit.memory(), make_workers=SlowWorkers))
        await store.put(PROMPTS[0], kit.kv(PROMPTS[0]))
        out = painted(kit.kv(PROMPTS[0]))
        for _ in range(5):
            with pytest.raises(ValueError, match="token"):
                await store.get_many([GetRequest(PROMPTS[0], out=out), GetRequest([-1])])
            repaint(out)
            await asyncio.sleep(0.02)
            assert is_painted(out)


async def test_nothing_is_left_after_two_thousand_cancelled_operations(kit):
    """Tasks, threads, slots, files, in-flight bytes, claims and locks are what they were before."""
    slow = SlowBackend(MemoryBackend(), seconds={"read": 0.001, "write": 0.001, "delete": 0.0005, "stat": 0.0005})
    drawn = random.Random(5)
    async with kit.open(kit.memory(capacity="1MiB"), kit.disk(), kit.medium(slow)) as store:

        async def consume(iterator, most=3):
            async for _ in iterator:
                most -= 1
                if not most:
                    return

        async def lease(tokens):
            async with store.lease(tokens) as found:
                await asyncio.sleep(0)
                return found.num_tokens

        def operations(tokens, key):
            kv = kit.kv(tokens)
            return [
                lambda: store.get(tokens),
                lambda: store.get(tokens, out=painted(kv)),
                lambda: store.get([*tokens, 7], wait_seconds=1),
                lambda: store.get_many([tokens, PROMPTS[0]]),
                lambda: store.put(tokens, kv),
                lambda: store.put(tokens, kv, wait="medium"),
                lambda: store.exists_many([tokens, [9, 9, 9, 9]]),
                lambda: store.delete(tokens),
                lambda: consume(store.stream(tokens)),
                lambda: consume(store.stream(tokens, by="layer")),
                lambda: consume(store.list()),
                lambda: lease(tokens),
                lambda: store.prefetch(tokens),
                lambda: store.touch(tokens, ttl_seconds=1000),
                lambda: store.pin(tokens, ttl_seconds=1),
                store.flush,
                lambda: store.clear(salt="nobody"),
                lambda: store.chunks.put_many({key: b"1" * 3000, "shared": b"2"}),
                lambda: store.chunks.get_many([key, "shared", "nothing"]),
                lambda: store.chunks.delete_many([key]),
            ]

        async def settle():
            await store.flush()
            for tokens in PROMPTS:
                await store.unpin(tokens)
            await kit.until(lambda: store.stats().reads_under_way == 0 and store.stats().tasks == 1)

        for tokens in PROMPTS:
            await store.put(tokens, kit.kv(tokens))
        for operation in operations(PROMPTS[0], "warm"):  # starts the threads
            await operation()
        await asyncio.gather(*(store.get(tokens) for tokens in PROMPTS * 3))
        await settle()
        before = kit.resources(store)
        count = 0
        while count < 2000:
            batch = []
            for _ in range(20):
                tokens = drawn.choice(PROMPTS)
                batch.append(cancelled(drawn.choice(operations(tokens, f"k{count % 7}"))(), drawn))
            count += sum(await asyncio.gather(*batch))
        await settle()
        after = kit.resources(store)
        threads = after.pop("threads"), before.pop("threads")
        assert after == before
        assert threads[0] <= threads[1] + 16, threads  # pools fill up to their size, and stay there
        kit.assert_books_balance(store)
        for tokens in PROMPTS:
            hit = await store.get(tokens)
            if hit is not None:
                kit.assert_kv(hit, tokens)


async def test_a_cancelled_caller_hurts_no_other_of_the_same_flight(kit, opened):
    reads = 0

    class Counting(SlowBackend):
        async def before(self, verb):
            nonlocal reads
            reads += verb == "read"
            await super().before(verb)

    medium = {}
    async with kit.open(kit.medium(MemoryBackend(medium))) as store:
        await store.put(PROMPTS[0], kit.kv(PROMPTS[0]), wait="durable")
    store = await opened(kit.open(kit.medium(Counting(MemoryBackend(medium), seconds={"read": 0.1}))))
    assert await store.exists(PROMPTS[0]) == 16
    gets = [asyncio.ensure_future(store.get(PROMPTS[0])) for _ in range(30)]
    await asyncio.sleep(0.02)
    for number in (0, 1, 7, 20):
        gets[number].cancel()
    hits = await asyncio.gather(*gets, return_exceptions=True)
    assert sum(isinstance(hit, asyncio.CancelledError) for hit in hits) == 4
    for hit in hits:
        if not isinstance(hit, asyncio.CancelledError):
            assert hit.num_tokens == 16
            kit.assert_kv(hit, PROMPTS[0])
    assert reads == 4, "one read per chunk"
    assert store.stats().tiers["medium"].joined == 29 * 4
