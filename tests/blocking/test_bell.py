"""The bell wakes its loop, with an eventfd and without one, and touches no file once it is closed."""

import asyncio
import os
import threading

import pytest

import kvtier
from kvtier.blocking.bell import Bell

TOKENS = list(range(16))


@pytest.fixture(params=["eventfd", "call_soon_threadsafe"])
def way(request, monkeypatch):
    if request.param == "eventfd":
        if not hasattr(os, "eventfd"):
            pytest.skip("this system has none")
    else:
        monkeypatch.delattr(os, "eventfd", raising=False)
    return request.param


async def test_it_is_answered_on_the_loop(way):
    answered, heard = [], asyncio.Event()

    def answer():
        answered.append(threading.current_thread())
        heard.set()

    bell = Bell(answer)
    ringer = threading.Thread(target=bell.ring)
    ringer.start()
    await heard.wait()
    assert answered == [threading.current_thread()]
    ringer.join()
    bell.close()


async def test_a_closed_bell_writes_to_no_file_that_took_its_number(way, tmp_path):
    bell = Bell(lambda: None)
    number = bell._descriptor
    assert (number is not None) == (way == "eventfd")
    bell.close()
    with (tmp_path / "other").open("wb") as other:
        moved = number is not None and number != other.fileno()
        if moved:
            os.dup2(other.fileno(), number)
        bell.ring()
        if moved:
            os.close(number)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_store_serves_calls_either_way(way, kit):
    with kit.open() as store:
        store.put(TOKENS, kit.kv(TOKENS))
        assert store.exists(TOKENS) == 16
        assert store.submit(kvtier.KVStore.exists, TOKENS).result(60) == 16


def test_what_was_queued_just_before_closing_is_served_though_the_bell_was_not_heard(kit, monkeypatch):
    store = kit.open()
    store.open()
    monkeypatch.setattr(Bell, "ring", lambda _bell: None)
    future = store.submit(kvtier.KVStore.exists, TOKENS, deadline_seconds=60)
    store.close()
    assert future.result(60) == 0
