import asyncio
import random

import pytest

from kvtier.concurrency import Budget, Ticket


async def settle():
    for _ in range(4):
        await asyncio.sleep(0)


def start(budget, size, *, background=False, ticket=None, timeout=60.0):
    return asyncio.create_task(budget.acquire(size, background=background, timeout=timeout, ticket=ticket))


async def test_bytes_are_counted_and_given_back():
    budget = Budget(100)
    await budget.acquire(60, timeout=1)
    await budget.acquire(40, timeout=1)
    assert budget.in_flight == 100
    waiting = start(budget, 10)
    await settle()
    assert budget.waiting == 1
    budget.release(60)
    await waiting
    assert (budget.in_flight, budget.waiting) == (50, 0)


async def test_background_holds_at_most_half():
    budget = Budget(100)
    await budget.acquire(50, background=True, timeout=1)
    second = start(budget, 1, background=True)
    await settle()
    assert not second.done()
    await budget.acquire(50, timeout=1)  # the other half is the foreground's
    budget.release(50, background=True)
    await second
    assert (budget.in_flight, budget.background) == (51, 1)


async def test_foreground_goes_first():
    budget = Budget(100)
    await budget.acquire(80, timeout=1)
    background = start(budget, 30, background=True)
    await settle()
    foreground = start(budget, 90)
    await settle()
    budget.release(50)  # the older background request would fit now, but somebody in the foreground waits
    await settle()
    assert not background.done()
    budget.release(30)
    await foreground
    assert not background.done()
    budget.release(90)
    await background
    assert (budget.in_flight, budget.background) == (30, 30)


@pytest.mark.parametrize("background", [False, True])
async def test_larger_than_the_class_is_admitted_alone(background):
    budget = Budget(100)
    await budget.acquire(1, timeout=1)
    oversize = start(budget, 1000, background=background)
    await settle()
    assert not oversize.done()
    budget.release(1)
    await oversize
    assert budget.in_flight == 1000
    late = start(budget, 1)
    await settle()
    assert not late.done()
    budget.release(1000, background=background)
    await late


async def test_timeout_and_cancel_hold_nothing_and_pass_the_turn_on():
    budget = Budget(100)
    await budget.acquire(100, timeout=1)
    with pytest.raises(TimeoutError):
        await budget.acquire(10, timeout=0.01)
    cancelled = start(budget, 100)
    follower = start(budget, 10)
    await settle()
    cancelled.cancel()
    budget.release(10)
    await follower
    assert budget.in_flight == 100
    assert cancelled.cancelled()


async def test_admitted_and_cancelled_at_once_gives_back():
    budget = Budget(100)
    await budget.acquire(100, background=True, timeout=1)
    victim = start(budget, 50, background=True)
    await settle()
    budget.release(100, background=True)  # admits the victim, which has not run since
    assert budget.in_flight == 50
    victim.cancel()
    await asyncio.wait([victim])
    assert (budget.in_flight, budget.background) == (0, 0)


async def test_raising_one_who_waits_lets_it_pass_the_background_limit():
    budget = Budget(100)
    await budget.acquire(50, background=True, timeout=1)
    ticket = Ticket(background=True)
    waiting = start(budget, 40, ticket=ticket)
    await settle()
    assert not waiting.done()
    budget.raise_priority(ticket)
    await waiting
    assert ticket.background is False
    assert (budget.in_flight, budget.background) == (90, 50)
    budget.release(40, ticket=ticket)
    assert (budget.in_flight, budget.background) == (50, 50)


async def test_a_raised_request_stands_where_its_arrival_puts_it():
    budget = Budget(100)
    await budget.acquire(100, timeout=1)
    ticket = Ticket(background=True)
    older = start(budget, 40, ticket=ticket)
    await settle()
    younger = start(budget, 90)
    await settle()
    budget.raise_priority(ticket)
    budget.release(50)
    await asyncio.wait_for(older, 20)
    assert not younger.done()
    budget.release(50)
    budget.release(40, ticket=ticket)
    await younger


async def test_raising_one_who_holds_makes_room_in_the_background():
    budget = Budget(100)
    ticket = Ticket(background=True)
    await budget.acquire(50, timeout=1, ticket=ticket)
    other = start(budget, 50, background=True)
    await settle()
    assert not other.done()
    budget.raise_priority(ticket)
    budget.raise_priority(ticket)  # harmless
    await other
    assert (budget.in_flight, budget.background) == (100, 50)


async def test_raised_and_cancelled_at_once_gives_back_in_its_new_class():
    budget = Budget(100)
    await budget.acquire(50, background=True, timeout=1)
    ticket = Ticket(background=True)
    waiting = start(budget, 40, ticket=ticket)
    await settle()
    budget.raise_priority(ticket)
    assert budget.in_flight == 90
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (budget.in_flight, budget.background) == (50, 50)


async def test_raising_one_who_has_released_changes_nothing():
    budget = Budget(100)
    ticket = Ticket(background=True)
    await budget.acquire(40, timeout=1, ticket=ticket)
    await budget.acquire(10, timeout=1, background=True)
    budget.release(40, ticket=ticket)
    budget.raise_priority(ticket)
    assert (budget.in_flight, budget.background) == (10, 10)


async def test_releasing_what_is_not_held_is_an_error():
    budget = Budget(100)
    await budget.acquire(10, timeout=1)
    with pytest.raises(RuntimeError, match="class holds 0"):
        budget.release(10, background=True)
    budget.release(10)
    with pytest.raises(RuntimeError, match="10 bytes"):
        budget.release(10)
    ticket = Ticket()
    await budget.acquire(10, timeout=1)
    await budget.acquire(10, timeout=1, ticket=ticket)
    budget.release(10, ticket=ticket)
    with pytest.raises(RuntimeError, match="10 bytes"):
        budget.release(10, ticket=ticket)
    assert budget.in_flight == 10


async def test_senseless_sizes_are_refused():
    with pytest.raises(ValueError, match="limit=0"):
        Budget(0)
    with pytest.raises(ValueError, match="size=-1"):
        await Budget(10).acquire(-1, timeout=1)


class Watched(Budget):
    """Notes every admission that breaks a rule: limits, and nobody older of the same class left waiting."""

    def __init__(self, limit):
        super().__init__(limit)
        self.wrong = []

    def _admit(self, ticket):
        alone = self.in_flight == 0
        admitted = super()._admit(ticket)
        if admitted is not None:
            foreground, background = self._turns._lines
            line = background if ticket.background else foreground
            if not alone and (self.in_flight > self.limit or (ticket.background and self.background > self.limit // 2)):
                self.wrong.append(f"{ticket.size} bytes admitted over the limit")
            if any(other.arrival < ticket.waiter.arrival and not other.future.done() for other in line):
                self.wrong.append(f"{ticket.size} bytes overtook")
            if ticket.background and not all(other.future.done() for other in foreground):
                self.wrong.append(f"{ticket.size} bytes of background before the foreground")
        return admitted


@pytest.mark.parametrize("seed", range(20))
async def test_random_schedules(seed):
    rng = random.Random(seed)
    budget = Watched(100)
    finished = []

    async def client(number):
        ticket = Ticket(background=rng.random() < 0.5)
        size = rng.choice([0, 1, 5, 20, 49, 50, 51, 100, 130])
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        tickets.append(ticket)
        await budget.acquire(size, timeout=60, ticket=ticket)
        try:
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
        finally:
            budget.release(size, ticket=ticket)
        finished.append(number)

    tickets = []
    tasks = [asyncio.create_task(client(number)) for number in range(80)]
    for _ in range(60):
        await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if tickets and rng.random() < 0.3:
            budget.raise_priority(rng.choice(tickets))
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert len(finished) == results.count(None)
    assert budget.wrong == []
    assert (budget.in_flight, budget.background, budget.waiting) == (0, 0, 0)
