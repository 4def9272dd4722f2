import asyncio

import pytest

from kvtier.concurrency.pace import Pace


async def counted_turns(pace, waiters):
    """Return in which turn of the loop each waiter went on, in the order they went on."""
    went, now = [], 0

    async def wait(number):
        await pace.turn()
        went.append((number, now))

    tasks = [asyncio.ensure_future(wait(i)) for i in range(waiters)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        now += 1
    return went


async def test_few_go_on_per_turn_in_the_order_they_came():
    went = await counted_turns(Pace(3), 10)
    assert [number for number, _ in went] == list(range(10))
    turns = [turn for _, turn in went]
    assert max(turns.count(turn) for turn in turns) == 3
    assert turns[-1] - turns[0] == 3


async def test_a_cancelled_waiter_takes_no_place():
    pace = Pace(1)
    gone = asyncio.ensure_future(pace.turn())
    stays = asyncio.ensure_future(pace.turn())
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await stays
    assert pace.waiting == 0


async def test_it_serves_again_after_it_was_idle():
    pace = Pace(2)
    for _ in range(3):
        await asyncio.gather(*(pace.turn() for _ in range(5)))
        assert pace.waiting == 0
        await asyncio.sleep(0)
