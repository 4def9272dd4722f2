import math

import pytest

from kvtier.concurrency import Deadline


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now

    def wall(self):
        return 0.0


def test_it_counts_down_to_zero_and_stays_there():
    clock = Clock()
    deadline = Deadline.after(2.5, clock)
    assert deadline.remaining() == 2.5
    assert not deadline.passed
    clock.now += 2.0
    assert deadline.remaining() == 0.5
    clock.now += 10
    assert deadline.remaining() == 0.0
    assert deadline.passed


def test_whole_seconds_are_numbers_too():
    assert Deadline.after(3, Clock()).remaining() == 3


@pytest.mark.parametrize("seconds", [0, -1, -0.0, math.inf, -math.inf, math.nan, True, None, "5"])
def test_unlimited_and_senseless_deadlines_are_refused(seconds):
    with pytest.raises(ValueError, match="deadline_seconds"):
        Deadline.after(seconds, Clock())
