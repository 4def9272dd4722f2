import asyncio

import pytest

from kvtier.concurrency.turns import Turns, Waiter


class Counter:
    """A counter of things to take; waiters want some of them."""

    def __init__(self, stock=0):
        self.stock = stock
        self.turns = Turns(self.put)
        self.order = []

    def put(self, amount):
        self.stock += amount
        self.turns.serve()

    def taker(self, amount, *, patient=False):
        def attempt():
            if self.stock < amount:
                return None
            self.stock -= amount
            return amount

        return Waiter(attempt, patient=patient)

    def start(self, amount, name=None, *, patient=False, timeout=60.0):
        async def wait():
            granted = await self.turns.wait(waiter, timeout=timeout)
            self.order.append(name)
            return granted

        waiter = self.taker(amount, patient=patient)
        task = asyncio.create_task(wait())
        task.waiter = waiter
        return task


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


async def cancel(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_is_there_is_taken_without_waiting():
    counter = Counter(3)
    assert await counter.turns.wait(counter.taker(3), timeout=0) == 3
    assert counter.stock == 0


async def test_a_small_wish_never_overtakes_an_older_big_one():
    counter = Counter(1)
    big = counter.start(5, "big")
    small = counter.start(1, "small")
    await settle()
    assert counter.order == []
    counter.put(4)
    await settle()
    assert counter.order == ["big"]
    counter.put(1)
    await asyncio.gather(big, small)
    assert counter.order == ["big", "small"]


async def test_one_gift_serves_everybody_it_suffices_for():
    counter = Counter()
    tasks = [counter.start(1, i) for i in range(4)]
    await settle()
    counter.put(3)
    await settle()
    assert counter.order == [0, 1, 2]
    assert counter.turns.ahead(patient=True) == 1
    await cancel(*tasks)


async def test_the_patient_line_waits_for_the_other_to_be_empty():
    counter = Counter()
    patient = counter.start(1, "patient", patient=True)
    await settle()
    urgent = counter.start(2, "urgent")
    await settle()
    assert counter.turns.ahead(patient=False) == 1
    assert counter.turns.ahead(patient=True) == 2
    counter.put(1)
    await settle()
    assert counter.order == []  # enough for the patient one, but somebody urgent waits
    counter.put(1)
    await settle()
    assert counter.order == ["urgent"]
    counter.put(1)
    await asyncio.gather(patient, urgent)


async def test_a_hurried_waiter_takes_the_place_its_arrival_gives_it():
    counter = Counter()
    tasks = [
        counter.start(1, "a"),
        counter.start(1, "b", patient=True),
        counter.start(1, "c"),
        counter.start(1, "d", patient=True),
    ]
    await settle()
    counter.turns.hurry(tasks[1].waiter)
    counter.turns.hurry(tasks[1].waiter)  # harmless
    for _ in tasks:
        counter.put(1)
    await asyncio.gather(*tasks)
    assert counter.order == ["a", "b", "c", "d"]


async def test_hurrying_one_who_was_served_queues_nobody():
    counter = Counter(1)
    task = counter.start(1, patient=True)
    await task
    counter.turns.hurry(task.waiter)
    assert counter.turns.ahead(patient=True) == 0


async def test_timeout_ends_the_wait_and_passes_the_turn_on():
    counter = Counter(1)
    big = counter.start(5, timeout=0.01)
    small = counter.start(1, "small")
    with pytest.raises(TimeoutError, match=r"0\.01 seconds"):
        await big
    assert await small == 1
    assert counter.turns.ahead(patient=True) == 0


async def test_no_time_at_all_is_a_timeout():
    counter = Counter()
    with pytest.raises(TimeoutError):
        await counter.turns.wait(counter.taker(1), timeout=-1.0)


async def test_a_cancelled_head_passes_its_turn_on():
    counter = Counter(1)
    big = counter.start(5)
    small = counter.start(1, "small")
    await settle()
    big.cancel()
    assert await small == 1
    assert counter.stock == 0
    assert big.cancelled()


async def test_granted_and_cancelled_at_once_gives_back():
    counter = Counter()
    first = counter.start(1, "first")
    second = counter.start(1, "second")
    await settle()
    counter.put(1)  # granted to the first, which has not run since
    first.cancel()
    assert await second == 1
    assert first.cancelled()
    assert counter.stock == 0
    assert counter.order == ["second"]


async def test_the_wait_sees_what_was_given_back_while_it_queued():
    """Something given back between the first attempt and the queueing pokes nobody: it must not be missed."""
    counter = Counter()
    attempts = []

    def attempt():
        attempts.append(1)
        return 7 if len(attempts) == 2 else None

    assert await asyncio.wait_for(counter.turns.wait(Waiter(attempt), timeout=60), 5) == 7


async def test_fail_ends_every_wait():
    counter = Counter()
    tasks = [counter.start(1), counter.start(1, patient=True)]
    await settle()
    counter.turns.fail(RuntimeError("closed"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in results] == ["closed", "closed"]
    assert counter.turns.ahead(patient=True) == 0


async def test_poke_from_a_thread_serves_on_the_loop():
    asyncio.get_running_loop().set_debug(True)  # refuses what only looks thread-safe
    counter = Counter()
    task = counter.start(1)
    await settle()

    def give():
        counter.stock += 1
        counter.turns.poke()

    await asyncio.to_thread(give)
    assert await asyncio.wait_for(task, 5) == 1


def test_poke_survives_a_closed_loop():
    counter = Counter()

    async def queue_up():
        task = asyncio.create_task(counter.turns.wait(counter.taker(1), timeout=60))
        await settle()
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(queue_up())
    loop.close()
    counter.turns.poke()
    task.get_coro().close()  # what garbage collection would do
    task._log_destroy_pending = False
    assert counter.turns.ahead(patient=True) == 0
