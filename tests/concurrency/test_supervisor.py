import asyncio
import gc

import pytest

from kvtier.concurrency import Supervisor
from kvtier.errors import ClosedError


async def forever():
    await asyncio.Event().wait()


async def failing():
    raise ValueError("broken")


async def test_tasks_are_held_until_they_end():
    supervisor = Supervisor()
    done = []

    async def work():
        await asyncio.sleep(0)
        gc.collect()  # asyncio itself holds tasks weakly only
        done.append(1)

    task = supervisor.spawn(work(), name="work")
    assert supervisor.count == 1
    assert task.get_name() == "work"
    await task
    assert done == [1]
    await asyncio.sleep(0)
    assert supervisor.count == 0


async def test_a_failure_is_reported_once_with_its_name():
    reports = []
    supervisor = Supervisor(lambda name, error: reports.append((name, error)))
    task = supervisor.spawn(failing(), name="writer")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [(name, str(error)) for name, error in reports] == [("writer", "broken")]


@pytest.mark.parametrize("raising", [False, True])
async def test_without_a_working_callback_the_loop_hears_of_it(raising):
    heard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))

    def broken(name, error):
        raise KeyError("callback")

    supervisor = Supervisor(broken if raising else None)
    await asyncio.wait([supervisor.spawn(failing(), name="writer")])
    await asyncio.sleep(0)
    assert len(heard) == 1
    error = heard[0]["exception"]
    assert "writer" in heard[0]["message"]
    assert str(error.__context__ if raising else error) == "broken"


async def test_cancellation_is_not_a_failure():
    reports = []
    supervisor = Supervisor(lambda name, error: reports.append(name))
    task = supervisor.spawn(forever(), name="x")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert reports == []
    assert supervisor.count == 0


async def test_aclose_cancels_and_waits_for_the_ends():
    supervisor = Supervisor()
    log = []

    async def work():
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            log.append("cleaned up")

    for _ in range(3):
        supervisor.spawn(work(), name="w")
    await asyncio.sleep(0)
    assert await supervisor.aclose(5.0) is True
    assert log == ["cleaned up"] * 3
    assert supervisor.count == 0
    assert await supervisor.aclose(5.0) is True


async def test_aclose_ends_although_a_task_does_not():
    supervisor = Supervisor()
    release = asyncio.Event()

    async def stubborn():
        try:
            await forever()
        except asyncio.CancelledError:
            await release.wait()

    task = supervisor.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    assert await supervisor.aclose(0.01) is False
    assert supervisor.count == 1
    release.set()
    await task


async def test_nothing_starts_after_aclose():
    supervisor = Supervisor()
    await supervisor.aclose(1.0)
    with pytest.raises(ClosedError, match="late"):
        supervisor.spawn(forever(), name="late")


async def test_a_task_may_close_its_own_supervisor():
    supervisor = Supervisor()

    async def closer():
        return await supervisor.aclose(5.0)

    assert await supervisor.spawn(closer(), name="closer") is True
