"""Every call ends by its deadline, whatever became of the loop, and lets go of its caller's memory.

The loop stays stopped until the test is through: a call that waited for it would run into the test's own time limit.
"""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest
import torch

import kvtier
from kvtier.blocking import call
from kvtier.blocking.futures import CallFuture
from kvtier.blocking.watch import Watch
from kvtier.concurrency import Workers
from kvtier.concurrency.gate import GateClosedError, gate_of_call
from kvtier.store import fetching, placing
from kvtier.testing.kv_values import same_bits

TOKENS = list(range(16))
SOON = {"deadline_seconds": 0.2}


def test_a_blocked_loop_costs_misses_and_drops(kit, stopper):
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        store.chunks.put("a", b"value")
        stopper.stop(store)
        assert store.get(TOKENS, **SOON) is None
        assert store.get_many([TOKENS, TOKENS], **SOON) == [None, None]
        assert store.exists(TOKENS, **SOON) == 0
        assert store.exists_many([TOKENS], **SOON) == [0]
        assert list(store.list(**SOON)) == []
        result = store.put(TOKENS, kit.kv(TOKENS), **SOON)
        assert [(chunk.status, chunk.reason) for chunk in result.chunks] == [("dropped", "overdue")] * 4
        assert store.chunks.get("a", **SOON) is None
        assert store.chunks.put("a", b"other", **SOON).count("dropped") == 1
        for call in (
            lambda: store.delete(TOKENS, **SOON),
            lambda: store.clear(**SOON),
            lambda: store.flush(**SOON),
            lambda: store.put(TOKENS, kit.kv(TOKENS), wait="pinned-cpu", **SOON),
            lambda: store.chunks.delete("a", **SOON),
            store.submit(kvtier.KVStore.get, TOKENS, **SOON).result,
        ):
            with pytest.raises(kvtier.BackendTimeoutError):
                call()
        assert not store.drain(**SOON)
        stopper.go.set()
        assert store.drain(deadline_seconds=60)
        assert store.get(TOKENS, deadline_seconds=60).num_tokens == 16  # what was given up was never begun
        assert store.chunks.get("a", deadline_seconds=60) == b"value"
        counts = store.calls
        assert counts.overdue >= 14
        assert counts.under_way == 0
        assert counts.submitted == counts.ended + counts.overdue + counts.cancelled


def test_a_strict_store_raises(kit, stopper):
    with kit.open(strict=True) as store:
        stopper.stop(store)
        with pytest.raises(kvtier.BackendTimeoutError):
            store.get(TOKENS, **SOON)
        with pytest.raises(kvtier.BackendTimeoutError):
            store.put(TOKENS, kit.kv(TOKENS), **SOON)
        stopper.go.set()


def test_a_full_queue_drops_what_is_submitted_and_bounds_what_waits(kit, stopper):
    with kit.open(queue_calls=2) as store:
        blocked = stopper.stop(store)
        waiting = store.submit(kvtier.KVStore.exists, TOKENS, deadline_seconds=60)
        dropped = store.submit(kvtier.KVStore.exists, TOKENS)
        assert dropped.done()
        assert isinstance(dropped.exception(), kvtier.CapacityError)
        assert store.poll() == [dropped]
        assert store.get(TOKENS, **SOON) is None
        assert store.calls.dropped == 2
        stopper.go.set()
        assert waiting.result(60) == 0
        assert blocked.result(60) is None
        assert store.exists(TOKENS, deadline_seconds=60) == 0


def test_an_overdue_call_that_never_began_gives_its_place_back(kit, stopper):
    with kit.open(queue_calls=2) as store:
        stopper.stop(store)
        for _ in range(3):
            assert store.get(TOKENS, **SOON) is None
        assert store.calls.dropped == 0
        stopper.go.set()


def test_a_waiting_caller_takes_a_place_as_soon_as_there_is_one(kit, stopper):
    with kit.open(queue_calls=1) as store:
        stopper.stop(store)
        found = []
        caller = threading.Thread(target=lambda: found.append(store.exists(TOKENS, deadline_seconds=60)))
        caller.start()
        stopper.go.set()
        caller.join(60)
        assert found == [0]


def test_a_dead_loop_ends_every_call(kit):
    async def die(_store):
        raise SystemExit("the loop's thread dies")

    async def forever(_store, *, deadline_seconds):
        await asyncio.Event().wait()

    store = kit.open()
    with store:
        pending = store.submit(forever, deadline_seconds=60)
        dying = store.submit(die)
        with pytest.raises(kvtier.ClosedError, match="the loop's thread dies"):
            pending.result(60)
        assert dying.exception(60) is not None
        for call in (
            lambda: store.get(TOKENS),
            lambda: store.put(TOKENS, kit.kv(TOKENS)),
            lambda: store.submit(kvtier.KVStore.get, TOKENS),
            store.flush,
        ):
            with pytest.raises(kvtier.ClosedError, match="the loop's thread dies"):
                call()
        assert store.calls.under_way == 0


def test_closing_gives_up_on_a_loop_that_is_stuck(kit, stopper):
    store = kit.open(close_seconds=0.2)
    store.open()
    blocked = stopper.stop(store)
    store.close()
    with pytest.raises(kvtier.ClosedError):
        blocked.result(60)
    with pytest.raises(kvtier.ClosedError):
        store.get(TOKENS)
    stopper.go.set()
    store._thread._thread.join(60)
    assert not store._thread._thread.is_alive()


def test_a_put_that_was_given_up_never_reads_its_source_again(kit, stopper, monkeypatch):
    """The loop stops between two copies of one put; what it copies when it goes on must not be the caller's memory."""
    monkeypatch.setattr(placing, "SNAPSHOT_JOB_BYTES", 1)  # a job per chunk
    source = kit.kv(TOKENS)
    with kit.open() as store:
        caught = _stop_after_first_copy(monkeypatch, store, stopper)
        result = store.put(TOKENS, source, **SOON)
        assert result.count("dropped") == 4
        assert caught == [True]
        for tensor in source.values():
            tensor.fill_(99)
        stopper.go.set()
        assert store.drain(deadline_seconds=60)
        hit = store.get(TOKENS, deadline_seconds=60)
        kept = 0 if hit is None else hit.num_tokens
        for name, tensor in kit.kv(TOKENS[:kept]).items():
            assert same_bits(hit.kv[name], tensor)


def test_a_get_that_was_given_up_never_writes_again(kit, stopper, monkeypatch):
    monkeypatch.setattr(fetching, "COPY_JOB_BYTES", 1)
    monkeypatch.setattr(Workers, "loop_bytes", 0)  # jobs, however small the chunks
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        out = kit.paint(16)
        caught = _stop_after_first_copy(monkeypatch, store, stopper)
        assert store.get(TOKENS, out=out, **SOON) is None
        assert caught == [True]
        mine = kit.paint(16, 55)
        for name, tensor in out.items():
            tensor.copy_(mine[name])
        stopper.go.set()
        assert store.drain(deadline_seconds=60)
        assert all(torch.equal(out[name], mine[name]) for name in out)


def _stop_after_first_copy(monkeypatch, store, stopper):
    """Stop the loop when the first copy job of the next call comes back to it."""
    workers = store.submit(_workers).result(60)
    run, caught = workers.run, []

    async def run_and_stop(*args):
        result = await run(*args)
        if not caught:
            caught.append(True)
            stopper.stopped.set()
            stopper.go.wait(60)
        return result

    monkeypatch.setattr(workers, "run", run_and_stop)
    return caught


async def _workers(store):
    return store._engine.services.workers


def test_a_cancelled_future_ends_when_its_call_does(kit, stopper):
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        stopper.stop(store)
        waiting = store.submit(kvtier.KVStore.get, TOKENS, deadline_seconds=60)
        assert waiting.cancel()
        assert waiting.cancelled()  # it had not begun
        stopper.go.set()
        assert store.drain(deadline_seconds=60)
        done = store.submit(kvtier.KVStore.get, TOKENS, deadline_seconds=60)
        assert done.result(60).num_tokens == 16
        assert not done.cancel()
        assert store.calls.cancelled == 1


def test_a_cancelled_call_that_runs_is_finished_once_its_task_is(kit):
    begun, let_go = threading.Event(), threading.Event()

    async def slow(_store, *, deadline_seconds):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.get_running_loop().run_in_executor(None, let_go.wait, 60)  # a copy under way
            raise

    with kit.open() as store:
        future = store.submit(slow, deadline_seconds=60)
        assert begun.wait(60)
        assert future.cancel()
        assert store.exists(TOKENS, deadline_seconds=60) == 0  # the loop has come round
        assert not future.done()
        let_go.set()
        assert store.drain(deadline_seconds=60)
        assert future.cancelled()


def test_a_call_that_is_cancelled_between_the_queue_and_its_task_gives_its_place_back(kit, monkeypatch):
    start = call.Call.start

    def cancel_first(taken, loop):
        assert taken.begun
        taken.cancel()
        start(taken, loop)

    with kit.open(queue_calls=1) as store:
        with monkeypatch.context() as patch:
            patch.setattr(call.Call, "start", cancel_first)
            waiting = store.submit(kvtier.KVStore.get, TOKENS, deadline_seconds=60)
            assert store.drain(deadline_seconds=30)
        assert waiting.cancelled()
        assert store.exists(TOKENS, deadline_seconds=60) == 0
        assert (store.calls.cancelled, store.calls.ended) == (1, 1)


def test_a_call_that_reaches_the_loop_with_hardly_any_time_left_is_overdue(kit, monkeypatch):
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        monkeypatch.setattr(call, "MARGIN_SHARE", 1.0)  # nothing is left for the coroutine
        monkeypatch.setattr(call, "MARGIN_SECONDS", 60.0)
        assert store.get(TOKENS, deadline_seconds=5.0) is None
        with pytest.raises(kvtier.BackendTimeoutError):
            store.flush(deadline_seconds=5.0)
        assert store.calls.overdue == 2


def test_drain_waits_until_the_futures_tell(kit, monkeypatch):
    about_to, go, told = threading.Event(), threading.Event(), CallFuture.set_result

    def late(future, result):
        about_to.set()
        go.wait(60)
        told(future, result)

    with kit.open() as store:
        store.open()
        monkeypatch.setattr(CallFuture, "set_result", late)
        future = store.submit(kvtier.KVStore.exists, TOKENS, deadline_seconds=60)
        assert about_to.wait(30)
        assert not store.drain(**SOON)
        go.set()
        assert store.drain(deadline_seconds=60)
        assert future.done()


def test_a_deadline_that_no_lock_can_wait_for(kit):
    with kit.open() as store:
        assert store.put(TOKENS, kit.kv(TOKENS), deadline_seconds=1e12).count("stored") == 4
        assert store.submit(kvtier.KVStore.exists, TOKENS, deadline_seconds=1e12).result(60) == 16
        assert store.exists(TOKENS, deadline_seconds=0.9) == 16


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_what_a_failed_call_left_behind_cannot_touch_its_memory(kit, error):
    gates = []

    async def fail(_store):
        gates.append(gate_of_call())
        raise error

    with kit.open() as store:
        future = store.submit(fail)
        with pytest.raises((ValueError, CancelledError)):
            future.result(60)
        with pytest.raises(GateClosedError), gates[0]:
            pass


def test_a_submit_that_fails_half_way_leaves_no_deaf_store(kit, monkeypatch):
    def no_thread(_watch, _call):
        raise RuntimeError("can't start new thread")

    with kit.open() as store:
        store.open()
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "add", no_thread)
            with pytest.raises(RuntimeError, match="thread"):
                store.submit(kvtier.KVStore.exists, TOKENS, deadline_seconds=60)
        store.put(TOKENS, kit.kv(TOKENS), deadline_seconds=5)
        assert store.exists(TOKENS, deadline_seconds=5) == 16
        assert store.calls.overdue == 0
