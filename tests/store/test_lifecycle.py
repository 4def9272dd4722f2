"""A store's life: opened once, used by one loop in one process, closed whole."""

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

import kvtier
from kvtier import registry
from kvtier.concurrency.workers import Workers
from kvtier.errors import BackendError, BackendUnavailableError, ClosedError, ConfigError
from kvtier.testing.faults import FlakyBackend, HangingBackend
from kvtier.testing.memory import MemoryBackend

TOKENS = list(range(8))


class BreakingBackend(MemoryBackend):
    """Its reads end in an error, raised where the memory to fill is at hand."""

    async def read_many(self, reads):
        view = reads[0].into[0][:1]
        raise BackendError(f"broken before {len(view)} bytes were read")


class SlowFirstCopy(Workers):
    """Threads that take their time for the first copy into a result."""

    copies = 0
    loop_bytes = 0

    async def run(self, func, *args):
        def slowly():
            time.sleep(0.5)
            return func(*args)

        is_copy = getattr(func, "__name__", "") == "_deliver"
        SlowFirstCopy.copies += is_copy
        return await (super().run(slowly) if is_copy and SlowFirstCopy.copies == 1 else super().run(func, *args))


async def consume(iterator):
    return [item async for item in iterator]


async def enter(context):
    async with context:
        pass


def calls(store, kit):
    return {
        "get": lambda: store.get(TOKENS),
        "get_many": lambda: store.get_many([TOKENS]),
        "put": lambda: store.put(TOKENS, kit.kv(TOKENS)),
        "exists": lambda: store.exists(TOKENS),
        "delete": lambda: store.delete(TOKENS),
        "touch": lambda: store.touch(TOKENS),
        "pin": lambda: store.pin(TOKENS, ttl_seconds=1),
        "prefetch": lambda: store.prefetch(TOKENS),
        "list": lambda: consume(store.list()),
        "lease": lambda: enter(store.lease(TOKENS)),
        "stream": lambda: consume(store.stream(TOKENS)),
        "flush": store.flush,
        "clear": store.clear,
        "namespaces": store.namespaces,
        "chunks.get": lambda: store.chunks.get("key"),
        "chunks.put": lambda: store.chunks.put("key", b"1"),
        "chunks.delete": lambda: store.chunks.delete("key"),
        "chunks.exists": lambda: store.chunks.exists("key"),
        "chunks.list": lambda: consume(store.chunks.list()),
        "stats": lambda: asyncio.to_thread(store.stats),
        "pressure": lambda: asyncio.to_thread(store.pressure),
    }


async def assert_every_call_refuses(store, kit, match):
    for name, call in calls(store, kit).items():
        with pytest.raises(ClosedError, match=match if name not in {"stats", "pressure"} else "."):
            await call()


class TestRefusal:
    async def test_before_it_is_opened(self, kit):
        await assert_every_call_refuses(kit.open(kit.memory()), kit, "new.*async with")

    async def test_after_it_was_closed(self, kit):
        async with kit.open(kit.memory(), kit.disk()) as store:
            face = store.with_namespace(kvtier.Namespace(model="other", revision="1"))
        await assert_every_call_refuses(store, kit, "closed")
        await assert_every_call_refuses(face, kit, "closed")

    async def test_while_it_closes(self, kit):
        backend = HangingBackend(MemoryBackend())
        async with kit.open(kit.medium(backend), close_seconds=1.0) as store:
            backend.hang("write")
            await store.put(TOKENS, kit.kv(TOKENS))
            closing = asyncio.ensure_future(store.aclose())
            await asyncio.sleep(0.05)
            with pytest.raises(ClosedError, match="closing"):
                await store.get(TOKENS)
            backend.release()
            await closing

    async def test_from_another_event_loop(self, kit, opened):
        store = await opened(kit.open(kit.memory()))

        def elsewhere():
            asyncio.run(assert_every_call_refuses(store, kit, "another event loop"))

        await asyncio.to_thread(elsewhere)
        await store.put(TOKENS, kit.kv(TOKENS))
        assert await store.exists(TOKENS) == 8

    async def test_in_a_forked_child(self, kit, opened):
        store = await opened(kit.open(kit.memory(), kit.disk()))
        await store.put(TOKENS, kit.kv(TOKENS))
        (read, write), parent = os.pipe(), os.getpid()
        child = os.fork()
        if child == 0:  # no pytest, no asyncio of the parent's: report and be gone
            told = "nothing raised"
            try:
                store.stats()
            except ClosedError as exc:
                told = str(exc)
            finally:
                os.write(write, told.encode())
                os._exit(0)
        os.close(write)
        told = await asyncio.to_thread(os.read, read, 1000)
        os.waitpid(child, 0)
        os.close(read)
        assert f"process {parent}" in told.decode()
        hit = await store.get(TOKENS)
        kit.assert_kv(hit, TOKENS)

    async def test_in_a_forked_child_with_a_loop_of_its_own(self, kit, opened):
        store = await opened(kit.open_chunks(kit.memory()))
        (read, write), parent = os.pipe(), os.getpid()
        child = os.fork()
        if child == 0:
            told = "nothing raised"
            try:
                store.get("key").send(None)  # runs up to the first refusal
            except ClosedError as exc:
                told = str(exc)
            except BaseException as exc:
                told = repr(exc)
            finally:
                os.write(write, told.encode())
                os._exit(0)
        os.close(write)
        told = await asyncio.to_thread(os.read, read, 1000)
        os.waitpid(child, 0)
        os.close(read)
        assert f"process {parent}" in told.decode()


class TestClosing:
    async def test_twice_and_at_once(self, kit):
        async with kit.open(kit.memory(), kit.disk()) as store:
            await store.put(TOKENS, kit.kv(TOKENS))
            await asyncio.gather(store.aclose(), store.aclose())
            await store.aclose()
        assert kit.files()

    async def test_a_store_that_was_never_opened(self, kit):
        await kit.open(kit.memory()).aclose()

    async def test_gives_everything_back(self, kit):
        before = threads_and_files()
        async with kit.open(kit.memory(), kit.disk()) as store:
            await store.put(TOKENS, kit.kv(TOKENS))
            hit = await store.get(TOKENS)
            async with store.lease(TOKENS) as lease:
                tensor = lease.chunks[0]["k"].clone()
        del lease
        await kit.until(lambda: threads_and_files() == before)
        kit.assert_kv(hit, TOKENS)  # what was handed out stays valid
        assert tensor.shape[1] == 4

    async def test_with_a_lease_still_held_the_views_stay_valid_and_it_says_so(self, kit, events):
        async with kit.open(kit.memory(), observer=events) as store:
            await store.put(TOKENS, kit.kv(TOKENS))
            async with store.lease(TOKENS) as lease:
                tensor = lease.chunks[0]["k"]
        wanted = kit.kv(TOKENS)["k"][:, :4]
        assert events.count("leaked") == 1
        assert tensor.view(dtype=wanted.view(dtype=tensor.dtype).dtype).equal(wanted) or same(tensor, wanted)

    async def test_errors_that_an_observer_keeps_keep_no_memory(self, kit, events):
        async with kit.open(kit.medium(BreakingBackend()), observer=events) as store:
            await store.put(TOKENS, kit.kv(TOKENS), wait="medium")
            assert await store.get(TOKENS) is None
        assert [event.error for event in events.all if event.kind == "error"]
        assert events.count("leaked") == 0

    async def test_by_an_error_in_the_block(self, kit):
        store = kit.open(kit.memory(), kit.disk())

        async def block():
            async with store:
                await store.put(TOKENS, kit.kv(TOKENS))
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            await block()
        assert len(kit.files()) == 2
        with pytest.raises(ClosedError):
            await store.get(TOKENS)

    async def test_reads_under_way_come_to_their_end(self, kit):
        medium = {}
        async with kit.open(kit.medium(MemoryBackend(medium))) as store:
            await store.put(TOKENS, kit.kv(TOKENS))
        second = asyncio.Event()

        class LateSecond(MemoryBackend):
            reads = 0

            async def read_many(self, reads):
                self.reads += 1
                if self.reads == 2:
                    await second.wait()
                return await super().read_many(reads)

        SlowFirstCopy.copies = 0
        async with kit.open(kit.medium(LateSecond(medium)), make_workers=SlowFirstCopy) as store:
            reading = asyncio.ensure_future(store.get(TOKENS))
            await kit.until(lambda: SlowFirstCopy.copies == 1)  # the first chunk is being copied out
            closing = asyncio.ensure_future(store.aclose())
            second.set()  # the second has landed long before that ends: nothing but the call is under way
            hit = await reading
            await closing
        assert (hit.num_tokens, hit.complete) == (8, True)
        kit.assert_kv(hit, TOKENS)

    async def test_what_cannot_be_flushed_in_time_is_dropped_and_counted(self, kit, events):
        backend = HangingBackend(MemoryBackend())
        async with kit.open_chunks(
            kit.memory(), kit.medium(backend, writers=1), close_seconds=0.5, observer=events
        ) as store:
            backend.hang("write")
            await store.put_many({f"k{number}": b"1" for number in range(5)})
            await store.aclose()
            backend.release()
        assert sum(event.kind == "dropped" and event.reason == "closed" for event in events.all) >= 4


def same(one, other):
    from kvtier.testing.kv_values import same_bits

    return same_bits(one, other)


def threads_and_files():
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier"))
    return threads, len(list(Path("/proc/self/fd").iterdir()))


class TestOpening:
    async def test_twice(self, kit, opened):
        store = await opened(kit.open(kit.memory()))
        with pytest.raises(ClosedError, match="open"):
            await store.__aenter__()
        await store.put(TOKENS, kit.kv(TOKENS))

    async def test_again_after_closing(self, kit):
        async with kit.open(kit.memory()) as store:
            pass
        with pytest.raises(ClosedError, match="make a new one"):
            await store.__aenter__()

    async def test_without_a_scope(self, kit):
        store = await kit.open(kit.memory())
        assert await store.get(TOKENS) is None
        await store.aclose()

    async def test_entered_in_one_task_and_left_in_another(self, kit):
        store = kit.open(kit.memory(), kit.disk())
        await asyncio.create_task(store.__aenter__())
        await store.put(TOKENS, kit.kv(TOKENS))
        await asyncio.create_task(store.__aexit__(None, None, None))
        assert kit.files()

    async def test_one_tier_that_fails_closes_the_others(self, kit):
        closed = []

        class Noted(MemoryBackend):
            async def aclose(self):
                closed.append(self)
                await super().aclose()

        before = threads_and_files()
        good, bad = Noted(), FlakyBackend(MemoryBackend(), verbs=frozenset({"open"}))
        bad.down = True
        with pytest.raises(BackendUnavailableError):
            async with kit.open(kit.memory(), kit.disk(), kit.medium(good, name="good"), kit.medium(bad, name="bad")):
                pytest.fail("opened")
        assert closed == [good]
        await kit.until(lambda: threads_and_files() == before)

    @pytest.mark.parametrize(
        "error", [RuntimeError("odd"), OSError(5, "I/O error"), asyncio.CancelledError()], ids=repr
    )
    async def test_whatever_a_backend_raises_at_open_is_a_backend_error(self, kit, error):
        bad = FlakyBackend(MemoryBackend(), verbs=frozenset({"open"}), error=lambda: error)
        bad.down = True
        with pytest.raises(BackendError):
            async with kit.open(kit.medium(bad)):
                pytest.fail("opened")
        async with kit.open(kit.memory(), kit.medium(bad, required=False)) as store:
            assert not store.stats().tiers["medium"].up

    async def test_cancelled_it_closes_what_it_had_opened(self, kit):
        before = threads_and_files()
        backend = HangingBackend(MemoryBackend(), hanging=frozenset({"open"}))
        opening = asyncio.ensure_future(kit.open(kit.memory(), kit.disk(), kit.medium(backend)).__aenter__())
        await backend.wait_stuck()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await kit.until(lambda: threads_and_files() == before)

    async def test_two_stores_live_in_one_process(self, kit):
        async with kit.open(kit.memory(), kit.disk()) as one, kit.open(kit.memory(), kit.disk()) as two:
            await one.put(TOKENS, kit.kv(TOKENS), wait="durable")
            kit.assert_kv(await two.get(TOKENS), TOKENS)
            await two.chunks.put("key", b"2", wait="durable")
            assert await one.chunks.get("key") == b"2"
            assert one.stats().tiers["pinned-cpu"].entries != 0
        async with kit.open(kit.memory()) as other:
            assert await other.get(TOKENS) is None

    async def test_a_backend_instance_belongs_to_one_store_at_a_time(self, kit, opened):
        backend = kvtier.backends.local_disk.LocalDiskBackend(path=kit.path / "disk")
        await opened(kit.open(kit.medium(backend)))
        with pytest.raises(ConfigError, match="open already"):
            async with kit.open(kit.medium(backend)):
                pytest.fail("opened")


class TestArguments:
    def config(self, kit, **options):
        return kit.config(kit.memory(), kit.disk(), **options)

    def test_an_argument_may_stand_in_the_config_instead(self, kit):
        named = self.config(kit, namespace={"model": "org/model", "revision": "1"})
        one = kvtier.open(named, layout=kit.layout)
        two = kvtier.open(self.config(kit), layout=kit.layout, namespace=kit.namespace)
        three = kvtier.open(named, layout=kit.layout, namespace=kit.namespace)
        assert one.namespace == two.namespace == three.namespace

    def test_two_that_disagree_are_refused(self, kit):
        named = self.config(kit, namespace={"model": "org/model", "revision": "2"})
        with pytest.raises(ConfigError, match=r"namespace.*argument.*config"):
            kvtier.open(named, layout=kit.layout, namespace=kit.namespace)
        for flag in ("strict", "lossless"):
            with pytest.raises(ConfigError, match=flag):
                kvtier.open(
                    self.config(kit, **{flag: True}), layout=kit.layout, namespace=kit.namespace, **{flag: False}
                )
            kvtier.open(self.config(kit, **{flag: True}), layout=kit.layout, namespace=kit.namespace, **{flag: True})
            kvtier.open(self.config(kit), layout=kit.layout, namespace=kit.namespace, **{flag: True})

    def test_a_namespace_and_a_layout_are_needed(self, kit):
        with pytest.raises(ConfigError, match="namespace is missing"):
            kvtier.open(self.config(kit), layout=kit.layout)
        with pytest.raises(ConfigError, match="layout is missing"):
            kvtier.open(self.config(kit), namespace=kit.namespace)
        kvtier.open_chunks(self.config(kit))

    def test_a_bare_model_name_is_no_namespace_for_a_tier_that_outlives_the_process(self, kit):
        bare = kvtier.Namespace(model="org/model")
        with pytest.raises(ConfigError, match=r"revision.*local-disk"):
            kvtier.open(self.config(kit), layout=kit.layout, namespace=bare)
        kvtier.open(kit.config(kit.memory()), layout=kit.layout, namespace=bare)
        kvtier.open(self.config(kit), layout=kit.layout, namespace=kvtier.Namespace(model="m", weights="abc"))

    async def test_a_further_face_is_held_to_the_same(self, kit, opened):
        store = await opened(kit.open(kit.memory(), kit.disk()))
        with pytest.raises(ConfigError, match=r"revision.*local-disk"):
            store.with_namespace(kvtier.Namespace(model="other"))
        huge = kvtier.KVLayout(num_layers=1000, num_kv_heads=100, head_dim=100, dtype="float32")
        with pytest.raises(ConfigError, match="capacity"):
            store.with_namespace(kvtier.Namespace(model="other", revision="1"), layout=huge)

    async def test_faces_share_tiers_and_never_keys(self, kit, opened):
        store = await opened(kit.open(kit.memory(), kit.disk()))
        other = store.with_namespace(kvtier.Namespace(model="other", revision="1"))
        await store.put(TOKENS, kit.kv(TOKENS))
        assert await other.get(TOKENS) is None
        await other.put(TOKENS, kit.kv(TOKENS, take=5))
        kit.assert_kv(await store.get(TOKENS), TOKENS)
        kit.assert_kv(await other.get(TOKENS), TOKENS, take=5)
        await store.chunks.put("a/blob/of three parts", b"1")
        assert len(await store.namespaces()) == 2
        await store.chunks.delete("a/blob/of three parts")
        assert len(await consume(store.list())) == len(await consume(other.list())) == 2
        assert len(await consume(store.chunks.list())) == 4
        await other.clear()
        assert await other.get(TOKENS) is None
        assert await store.exists(TOKENS) == 8


async def test_an_observer_that_raises_breaks_nothing(kit):
    class Broken:
        def on_event(self, event):
            raise RuntimeError("observer")

    backend = FlakyBackend(MemoryBackend())
    async with kit.open_chunks(kit.memory(), kit.medium(backend), observer=Broken()) as store:
        backend.down = True
        await store.put_many({f"k{number}": b"1" for number in range(5)})
        await store.flush()
        assert await store.get("k1") == b"1"


async def test_the_config_file_is_enough(kit, monkeypatch):
    path = kit.path / "kvtier.toml"
    path.write_text(
        'chunk_tokens = 4\n[namespace]\nmodel = "org/model"\nrevision = "1"\n'
        '[[tiers]]\nbackend = "pinned-cpu"\ncapacity = "16MiB"\n'
        '[[tiers]]\nbackend = "local-disk"\npath = "tier"\ncapacity = "64MiB"\n'
    )
    async with kvtier.open(path, layout=kit.layout) as store:
        await store.put(TOKENS, kit.kv(TOKENS), wait="durable")
    assert (kit.path / "tier").is_dir()
    monkeypatch.setenv("KVTIER_CACHE_DIR", str(kit.path / "cache"))
    with contextlib.suppress(MemoryError):
        kvtier.open(layout=kit.layout, namespace=kit.namespace)  # nothing is touched before it is entered
    assert not (kit.path / "cache").exists()


BY_NAME = {
    "pinned-cpu": {},
    "cuda": {"device": "cpu"},
    "local-disk": {"path": "kv"},
    "redis": {"url": "redis://127.0.0.1:1"},
    "s3": {"bucket": "kv-of-prompts"},
}


@pytest.mark.parametrize("backend", BY_NAME)
def test_every_backend_is_taken_by_its_name(backend, kit):
    config = {"tiers": [{"backend": backend, "capacity": "16MiB", **BY_NAME[backend]}]}
    assert isinstance(kvtier.open(config, namespace=kit.namespace, layout=kit.layout), kvtier.KVStore)
    if backend in {"local-disk", "redis", "s3"}:
        with pytest.raises(ConfigError, match="revision"):
            kvtier.open(config, namespace=kvtier.Namespace(model="org/model"), layout=kit.layout)


def test_there_is_no_further_backend():
    assert set(registry.backends.names()) == set(BY_NAME)
