"""Every call of the asynchronous store, made from blocking code."""

import gc
import inspect
import weakref

import pytest

import kvtier
from kvtier.blocking import BlockingChunkStore, BlockingStore

TOKENS = list(range(16))


def keywords(function):
    return {
        name: (parameter.kind, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


@pytest.mark.parametrize(
    ("blocking", "original"), [(BlockingStore, kvtier.KVStore), (BlockingChunkStore, kvtier.ChunkStore)]
)
def test_methods_and_parameters_are_those_of_the_asynchronous_class(blocking, original):
    renamed = {"aclose": "close"}
    for name, function in inspect.getmembers(original, inspect.isfunction):
        if name.startswith("_"):
            continue
        assert keywords(getattr(blocking, renamed.get(name, name))) == keywords(function), name


def test_kv_round_trip(kit):
    with kit.open() as store:
        assert store.get(TOKENS) is None
        assert store.exists(TOKENS) == 0
        assert store.put(TOKENS, kit.kv(TOKENS)).count("stored") == 4
        hit = store.get(TOKENS, max_tokens=15)
        assert hit.num_tokens == 15
        kit.assert_kv(store.get(TOKENS).kv, TOKENS)
        out = kit.paint(16)
        assert store.get(TOKENS, out=out).num_tokens == 16
        kit.assert_kv(out, TOKENS)
        assert [hit.num_tokens for hit in store.get_many([TOKENS, TOKENS[:8]])] == [16, 8]
        assert store.exists_many([TOKENS, [5]]) == [16, 0]
        assert store.touch(TOKENS) == store.pin(TOKENS, ttl_seconds=5) == store.unpin(TOKENS) == 16
        assert store.prefetch(TOKENS) == 16
        assert len(list(store.list())) == 4
        assert list(store.namespaces().values()) == [4]
        assert store.delete(TOKENS, start=8) == 2
        store.clear()
        assert store.exists(TOKENS) == 0
        assert store.flush().complete
        assert store.stats().tiers["pinned-cpu"].entries == 0
        assert store.pressure().tiers["pinned-cpu"] == 0


def test_leases_and_streams(kit):
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        with store.lease(TOKENS) as lease:
            assert lease.num_tokens == 16
            assert store.stats().memory.leased > 0
        del lease
        gc.collect()
        assert store.stats().memory.leased == 0
        assert [(part.start, part.stop) for part in store.stream(TOKENS)] == [(0, 4), (4, 8), (8, 12), (12, 16)]
        assert [part.layer for part in store.stream(TOKENS, by="layer")] == [0, 1]
        for part in store.stream(TOKENS):
            assert part.start == 0
            break  # the rest of the stream is closed on the loop


def test_chunks_round_trip(kit):
    with kit.open() as store:
        chunks = store.chunks
        assert chunks.get("a") is None
        assert chunks.put("a", b"first").count("stored") == 1
        assert list(chunks.put_many({"b": b"second", "c": b"third"})) == ["b", "c"]
        assert chunks.get("a") == b"first"
        assert chunks.get_many(["b", "x"]) == [b"second", None]
        assert chunks.exists("a")
        assert chunks.exists_many(["a", "x"]) == [True, False]
        assert sorted(entry.key for entry in chunks.list()) == ["a", "b", "c"]
        assert chunks.delete("a")
        assert chunks.delete_many(["b", "x"]) == [True, False]
        assert chunks.submit(kvtier.ChunkStore.get, "c").result() == b"third"


def test_another_namespace_shares_the_thread(kit):
    with kit.open() as store:
        other = store.with_namespace(kvtier.Namespace(model="org/other", revision="1"))
        other.put(TOKENS, kit.kv(TOKENS, take=1))
        assert (store.exists(TOKENS), other.exists(TOKENS)) == (0, 16)
        assert other.calls.submitted == store.calls.submitted


def test_the_first_call_opens(kit):
    store = kit.open()
    assert store.exists(TOKENS) == 0
    store.close()
    store.close()
    with pytest.raises(kvtier.ClosedError):
        store.exists(TOKENS)


def test_a_store_that_was_never_used_closes(kit):
    store = kit.open()
    store.close()
    with pytest.raises(kvtier.ClosedError):
        store.exists(TOKENS)


def test_an_open_that_fails_says_why(kit, tmp_path):
    (tmp_path / "disk").write_text("a file, no folder")
    with pytest.raises(kvtier.ConfigError, match="local-disk"):
        kit.open(disk=True).open()
    store = kit.open(disk=True)
    with pytest.raises(kvtier.ClosedError, match="local-disk"):
        store.get(TOKENS)


@pytest.mark.parametrize("queue_calls", [0, True, 1.5])
def test_a_queue_has_room_for_one_call_at_least(kit, queue_calls):
    with pytest.raises(kvtier.ConfigError, match="queue_calls"):
        kit.open(queue_calls=queue_calls)


def test_mistakes_of_the_caller_are_raised(kit):
    with kit.open() as store:
        with pytest.raises(kvtier.InvalidKeyError):
            store.get(["a"])
        with pytest.raises(kvtier.LayoutMismatchError):
            store.put(TOKENS, kit.kv(TOKENS[:8]))
        for seconds in (0, -1, float("inf"), True, "1"):
            with pytest.raises(kvtier.InvalidValueError, match="deadline_seconds"):
                store.get(TOKENS, deadline_seconds=seconds)
        with pytest.raises(TypeError):
            store.submit(kvtier.KVStore.get).result()
        with pytest.raises(kvtier.InvalidValueError, match="takes a method itself"):
            store.submit("get", TOKENS)
        assert store.calls.under_way == 0


def test_an_observer_that_calls_the_store_is_told_instead_of_hanging(kit):
    answers = []

    class Curious:
        def on_event(self, event):
            try:
                answers.append(store.exists(TOKENS))
            except kvtier.ClosedError as exc:
                answers.append(str(exc))

    store = kit.open(observer=Curious(), memory={"staging_bytes": "4MiB", "results_bytes": 4096})
    with store:
        store.put(list(range(400)), kit.kv(range(400)))
        assert store.get(list(range(400)), deadline_seconds=2) is None  # no room for the result: an event
    assert answers
    assert "own loop" in answers[0]


def test_submitted_calls_are_polled_once(kit):
    with kit.open() as store:
        futures = [store.submit(kvtier.KVStore.exists, TOKENS) for _ in range(20)]
        assert store.drain()
        assert sorted(map(id, store.poll())) == sorted(map(id, futures))
        assert store.poll() == []
        for _ in range(500):
            store.submit(kvtier.KVStore.exists, TOKENS)  # nobody holds the future
        assert store.drain()
        assert len(store._thread._ended) < 300
        assert store.poll() == []
        counts = store.calls
        assert (counts.submitted, counts.ended, counts.under_way) == (520, 520, 0)


def test_a_future_and_its_call_are_no_cycle(kit, stopper):
    """Recycled memory must come back when the holder of a result drops it, not when the garbage collector runs."""
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        stopper.stop(store)
        future = store.submit(kvtier.KVStore.get, TOKENS, deadline_seconds=60)
        call = weakref.ref(future.call())
        stopper.go.set()
        future.result()
        assert store.drain()
        store.exists(TOKENS)  # the loop has left the call behind
        assert call() is None


def layers_of(kv):
    """The KV of one layer after the other, as a model's thread has it."""
    return [{name: tensor[layer] for name, tensor in kv.items()} for layer in range(2)]


def test_a_prefix_saved_layer_by_layer(kit):
    with kit.open() as store:
        with store.put_layers(TOKENS) as layers:
            for number, kv in enumerate(layers_of(kit.kv(TOKENS))):
                layers.add(number, kv)
        assert layers.result.count("stored") == 4
        kit.assert_kv(store.get(TOKENS).kv, TOKENS)
        with store.put_layers(TOKENS[:8]) as layers:
            layers.add(0, layers_of(kit.kv(TOKENS[:8]))[0])
        assert [(put.status, put.reason) for put in layers.result.chunks] == [("dropped", "layers-missing")] * 2


def test_layers_on_a_stuck_loop_are_dropped_by_the_deadline(kit, stopper):
    with kit.open() as store:
        stopper.stop(store)
        with store.put_layers(TOKENS, deadline_seconds=0.2) as layers:
            for number, kv in enumerate(layers_of(kit.kv(TOKENS))):
                layers.add(number, kv)
        assert {put.reason for put in layers.result.chunks} == {"overdue"}
        stopper.go.set()
        assert store.drain(deadline_seconds=60)
        assert store.exists(TOKENS, deadline_seconds=60) == 0


def test_a_thread_that_fails_between_layers_leaves_nothing_under_way(kit):
    def fail(store):
        with store.put_layers(TOKENS) as layers:
            for number, kv in enumerate(layers_of(kit.kv(TOKENS))):
                layers.add(number, kv)
            raise ZeroDivisionError

    with kit.open() as store:
        with pytest.raises(ZeroDivisionError):
            fail(store)
        assert store.calls.under_way == 0
        assert store.drain(deadline_seconds=60)
