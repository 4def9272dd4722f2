"""What is told while somebody still looks is not missed."""

import asyncio

from kvtier.concurrency.arrivals import Arrivals
from kvtier.concurrency.key_locks import KeyLocks


async def test_what_was_told_since_one_looked_ends_the_wait():
    arrivals = Arrivals()
    before = arrivals.count
    arrivals.notify()
    assert await arrivals.wait(0.01, since=before)
    assert not await arrivals.wait(0.01, since=arrivals.count)
    assert not await arrivals.wait(0.01), "without a count only what comes now is heard"


async def test_all_who_wait_are_woken():
    arrivals = Arrivals()
    waits = [asyncio.ensure_future(arrivals.wait(60, since=arrivals.count)) for _ in range(3)]
    await asyncio.sleep(0)
    arrivals.notify()
    assert await asyncio.gather(*waits) == [True] * 3


def test_who_watches_hears_of_changes_outside():
    locks = KeyLocks()
    assert not locks.tell_watches("nobody looks")
    with locks.watch() as one, locks.watch() as two:
        assert locks.tell_watches("key")
        assert one == two == {"key"}
    assert not locks.tell_watches("later")
