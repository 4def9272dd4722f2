"""A batch is worked through at once, answered in order, and ends when its last item has ended."""

import asyncio

import pytest

from kvtier.backends.batches import answer_each
from kvtier.errors import BackendError, CapacityError, ClosedError


async def test_answers_are_in_order_and_errors_are_values():
    async def call(item):
        for _ in range(10 - item):
            await asyncio.sleep(0)
        if item % 3 == 0:
            raise CapacityError(str(item))
        return item

    answers = await answer_each(call, range(10))
    assert [answer if isinstance(answer, int) else str(answer) for answer in answers] == [
        "0", 1, 2, "3", 4, 5, "6", 7, 8, "9",
    ]  # fmt: skip
    assert await answer_each(call, []) == []


async def test_no_more_than_the_limit_at_once():
    now, most = 0, 0

    async def call(item):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    await answer_each(call, range(20), limit=3)
    assert most == 3
    await answer_each(call, range(20))
    assert most == 20


@pytest.mark.parametrize("how", ["raise", "cancel"])
async def test_ends_only_when_every_call_has_ended(how):
    ended = []
    go_on = asyncio.Event()

    async def call(item):
        if item == 0 and how == "raise":
            raise ClosedError("closed")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await go_on.wait()  # like a thread job that cannot be stopped
            raise
        finally:
            ended.append(item)

    async def short(item):
        if item:
            await go_on.wait()
            ended.append(item)
        elif how == "raise":
            raise ClosedError("closed")

    batch = asyncio.ensure_future(answer_each(short if how == "raise" else call, range(4)))
    for _ in range(3):
        await asyncio.sleep(0)
    if how == "cancel":
        batch.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not batch.done()
    go_on.set()
    with pytest.raises((ClosedError, asyncio.CancelledError)):
        await batch
    assert len(ended) >= 3
    assert not isinstance(ClosedError("x"), BackendError)
