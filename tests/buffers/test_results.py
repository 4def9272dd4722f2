import asyncio
import ctypes
import gc
import pathlib
import random
import threading

import pytest
import torch

from kvtier.buffers import PAGE, ResultPool
from kvtier.buffers.results import class_size
from kvtier.errors import CapacityError, ClosedError

MIB = 1 << 20


def address(view):
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [1, PAGE, PAGE + 1, 65535, 65537, MIB, MIB + 1, 32 * MIB, 33 * MIB - 5])
def test_classes_waste_at_most_an_eighth(size):
    length = class_size(size)
    assert length >= size
    assert length % PAGE == 0
    assert length <= max(size * 9 / 8, size + PAGE)
    assert class_size(length) == length


def test_classes_are_few():
    assert len({class_size(size) for size in range(1, 64 * MIB, 4099)}) <= 140


async def test_a_view_is_what_was_asked_for():
    pool = ResultPool(16 * MIB)
    view = await pool.take(MIB + 5, timeout=1)
    assert (view.nbytes, view.format, view.readonly) == (MIB + 5, "B", False)
    assert address(view) % PAGE == 0
    assert (await pool.take(0, timeout=1)).nbytes == 0


async def test_a_dead_view_serves_the_next_of_its_class():
    pool = ResultPool(16 * MIB)
    view = await pool.take(MIB, timeout=1)
    first = address(view)
    view[:5] = b"stale"
    tensor = torch.frombuffer(view[100:], dtype=torch.uint8)
    del view
    other = await pool.take(MIB, timeout=1)
    assert address(other) != first  # a tensor over it is alive
    del tensor
    again = await pool.take(MIB - 100, timeout=1)
    assert address(again) == first
    assert bytes(again[:5]) == b"stale"  # recycled: its pages are backed, its content is undefined
    assert (pool.stats().lent, pool.stats().idle) == (2 * MIB, 0)


async def test_idle_buffers_of_other_classes_go_when_the_budget_is_needed():
    pool = ResultPool(4 * MIB)
    for size in (MIB, 2 * MIB, MIB // 2):
        view = await pool.take(size, timeout=1)
        del view
    assert pool.stats().idle == 3.5 * MIB
    views = [await pool.take(MIB // 2, timeout=1) for _ in range(2)]
    del views
    assert pool.stats().idle == 4 * MIB
    view = await pool.take(MIB // 2, timeout=1)  # one of two: its class becomes the one used last
    del view
    view = await pool.take(3 * MIB, timeout=0)
    stats = pool.stats()
    assert (stats.lent, stats.idle) == (3 * MIB, MIB)  # used longest ago goes first
    assert stats.high_water <= pool.budget
    half = await pool.take(MIB // 2, timeout=0)
    assert (pool.stats().lent, pool.stats().idle) == (3.5 * MIB, MIB // 2)  # its class was the one kept
    del view, half


async def test_never_more_than_the_budget_and_first_come_first_served():
    pool = ResultPool(4 * MIB)
    views = [await pool.take(2 * MIB, timeout=1) for _ in range(2)]
    order = []

    async def take(size):
        view = await pool.take(size, timeout=60)
        order.append(size)
        return view

    big = asyncio.create_task(take(3 * MIB))
    small = asyncio.create_task(take(MIB))
    await settle()
    views.pop()
    await settle()
    assert order == []
    assert pool.stats().waiting == 2
    views.pop()
    await asyncio.wait_for(asyncio.gather(big, small), 20)
    assert order == [3 * MIB, MIB]
    assert pool.stats().high_water == 4 * MIB


async def test_a_tensor_that_dies_in_another_thread_wakes():
    pool = ResultPool(MIB)
    tensors = [torch.frombuffer(await pool.take(MIB, timeout=1), dtype=torch.uint8)]
    task = asyncio.create_task(pool.take(MIB, timeout=60))
    await settle()
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    assert (await asyncio.wait_for(task, 20)).nbytes == MIB
    thread.join()


async def test_timeout_cancel_and_hopeless_sizes():
    pool = ResultPool(MIB)
    view = await pool.take(MIB, timeout=1)
    with pytest.raises(TimeoutError):
        await pool.take(1, timeout=0.01)
    with pytest.raises(CapacityError, match=str(MIB)):
        await pool.take(MIB + 1, timeout=60)
    waiting = asyncio.create_task(pool.take(MIB, timeout=60))
    follower = asyncio.create_task(pool.take(PAGE, timeout=60))
    await settle()
    waiting.cancel()
    await asyncio.wait([waiting])
    del view
    assert (await asyncio.wait_for(follower, 20)).nbytes == PAGE
    with pytest.raises(ValueError, match="budget=0"):
        ResultPool(0)


async def test_granted_and_cancelled_at_once_gives_back():
    pool = ResultPool(MIB)
    view = await pool.take(MIB, timeout=1)
    task = asyncio.create_task(pool.take(MIB, timeout=60))
    await settle()
    del view
    pool._turns.serve()
    assert pool.stats().lent == MIB
    task.cancel()
    await asyncio.wait([task])
    del task
    await settle()
    gc.collect()
    assert pool.stats().lent == 0


async def test_a_budget_that_is_no_class_size_can_be_used_whole():
    pool = ResultPool(5000)
    view = await pool.take(5000, timeout=0)
    assert view.nbytes == 5000
    assert pool.stats().lent == 5000


async def test_buffers_stay_out_of_forked_children():
    pool = ResultPool(8 * MIB)
    view = await pool.take(3 * MIB, timeout=1)
    begin = f"{address(view):x}-"
    text = pathlib.Path("/proc/self/smaps").read_text()
    flags = next(line for line in text[text.index(begin) :].splitlines() if line.startswith("VmFlags"))
    assert "dc" in flags.split()


async def test_close_refuses_and_leaves_views_alone():
    pool = ResultPool(2 * MIB)
    view, idle = await pool.take(MIB, timeout=1), await pool.take(MIB, timeout=1)
    waiting = asyncio.create_task(pool.take(MIB, timeout=60))
    await settle()
    pool.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await pool.take(1, timeout=1)
    view[:4] = b"mine"
    del idle
    pool.close()
    assert (pool.stats().lent, pool.stats().idle) == (MIB, 0)
    assert bytes(view[:4]) == b"mine"


@pytest.mark.parametrize("seed", range(5))
async def test_random_schedules(seed):
    rng = random.Random(seed)
    pool = ResultPool(8 * MIB)
    wrong = []

    async def client(number):
        size = rng.choice([PAGE, 3 * PAGE, MIB // 2, MIB, 3 * MIB, 8 * MIB])
        view = await pool.take(size, timeout=60)
        try:
            mark = number % 251
            view[0] = view[-1] = mark
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
                stats = pool.stats()
                if stats.lent + stats.idle > pool.budget or stats.high_water > pool.budget:
                    wrong.append(stats)
            if not view[0] == view[-1] == mark:
                wrong.append(number)
        finally:
            del view  # a cancelled task keeps its frames, and so this, until the task itself goes

    tasks = [asyncio.create_task(client(number)) for number in range(60)]
    for _ in range(30):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert wrong == []
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    del tasks, results
    await settle()
    gc.collect()
    assert pool.stats().lent == 0
    assert pool.stats().waiting == 0
