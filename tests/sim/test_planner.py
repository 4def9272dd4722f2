"""Which way is soonest, by arithmetic that a reader can follow."""

import pytest

from kvtier.errors import InvalidValueError
from kvtier.sim.planner import Link, Prefill, Stretch, plan_load

PREFILL = Prefill(linear_seconds=0.001)  # 1,000 tokens per second
FAST, SLOW = (Link(latency_seconds=0.01, bytes_per_second=speed) for speed in (1e6, 1e3))


def stretch(link, tokens=100, size=10_000):
    return Stretch(tokens=tokens, size=size, link=link, tier=str(link.bytes_per_second))


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not():
    load = plan_load([stretch(FAST)] * 3, PREFILL)
    assert (load.choice, load.load_tokens) == ("load", 300)
    assert load.benefit_seconds == pytest.approx(0.3 - 0.01 - 3 * 0.01)
    slow = plan_load([stretch(SLOW)] * 3, PREFILL)
    assert (slow.choice, slow.load_tokens, slow.benefit_seconds) == ("recompute", 0, 0.0)


def test_only_the_part_that_pays_is_loaded():
    mixed = plan_load([stretch(FAST), stretch(SLOW)], PREFILL)
    assert (mixed.choice, mixed.load_tokens) == ("load", 100)
    assert mixed.seconds == pytest.approx(0.02 + 0.1)


def test_both_ends_at_once_when_the_engine_can():
    even = Link(latency_seconds=0.0, bytes_per_second=100_000)  # a stretch takes as long to load as to compute
    both = plan_load([stretch(even)] * 4, PREFILL, split=True)
    assert (both.choice, both.compute_tokens, both.load_tokens) == ("both", 200, 200)
    assert both.seconds == pytest.approx(0.2)
    assert plan_load([stretch(even)] * 4, PREFILL).choice != "both"


def test_never_slower_than_computing():
    for seconds in (0.0, 0.05, 0.2, 5.0):
        link = Link(latency_seconds=seconds, bytes_per_second=1e9)
        for split in (False, True):
            chosen = plan_load([stretch(link)] * 5, PREFILL, split=split)
            assert chosen.seconds <= chosen.recompute_seconds


def test_the_fit_finds_what_made_the_times():
    true = Prefill(linear_seconds=2e-4, quadratic_seconds=3e-8)
    fitted = Prefill.fit([(n, true.seconds(n)) for n in (128, 1024, 8192)])
    assert fitted.linear_seconds == pytest.approx(2e-4)
    assert fitted.quadratic_seconds == pytest.approx(3e-8)
    assert true.seconds(100, start=50) == pytest.approx(true.seconds(150) - true.seconds(50))


def test_a_curve_that_bends_the_wrong_way_is_a_line():
    fitted = Prefill.fit([(100, 0.2), (1000, 1.0)])
    assert fitted.quadratic_seconds == 0.0
    assert fitted.linear_seconds > 0


def test_one_length_is_not_enough():
    with pytest.raises(InvalidValueError, match="two lengths"):
        Prefill.fit([(100, 0.1), (100, 0.2)])
