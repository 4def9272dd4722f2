import pytest

from kvtier.testing.clock import FrozenClock
from kvtier.tier.breaker import FAILURES_TO_OPEN, PROBE_SECONDS, Breaker


@pytest.fixture
def clock():
    return FrozenClock()


@pytest.fixture
def breaker(clock):
    return Breaker(clock)


def fail(breaker, times):
    return [breaker.failed("no answer") for _ in range(times)]


def test_it_opens_after_so_many_failures_in_a_row_and_says_so_once(breaker):
    assert fail(breaker, FAILURES_TO_OPEN - 1) == [False] * (FAILURES_TO_OPEN - 1)
    breaker.succeeded()
    assert fail(breaker, FAILURES_TO_OPEN) == [*[False] * (FAILURES_TO_OPEN - 1), True]
    assert not breaker.passes
    assert fail(breaker, 2) == [False, False]


def test_one_probe_at_a_time_and_its_end_decides(breaker, clock):
    breaker.open_now("down")
    assert not breaker.probe_due()
    clock.advance(PROBE_SECONDS)
    assert breaker.probe_due()
    assert not breaker.probe_due()
    assert not breaker.passes
    breaker.failed("still down")
    assert not breaker.probe_due()
    clock.advance(PROBE_SECONDS)
    assert breaker.probe_due()
    breaker.succeeded()
    assert breaker.passes


def test_what_fails_late_does_not_put_the_probe_off(breaker, clock):
    breaker.open_now("down")
    clock.advance(PROBE_SECONDS * 0.9)
    breaker.failed("a call begun before")
    clock.advance(PROBE_SECONDS * 0.1)
    assert breaker.probe_due()


def test_probes_of_many_stores_are_spread(clock):
    waits = set()
    for _ in range(200):
        clock.advance(0.00037)
        breaker = Breaker(clock)
        breaker.open_now("down")
        waits.add(round(breaker.seconds_to_probe(), 2))
    assert min(waits) >= PROBE_SECONDS / 2
    assert max(waits) <= PROBE_SECONDS
    assert len(waits) > 20
