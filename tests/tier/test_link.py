"""The estimate of a tier's speed: exact on a steady line, quick to follow one that changed, deaf to one outlier."""

import random

import pytest

from kvtier.planner import Link
from kvtier.tier.link import LinkEstimate

MIB = 1 << 20
STEADY = Link(latency_seconds=0.002, bytes_per_second=100e6)


def read(estimate, link, sizes, *, noise=0.0, seed=1):
    draw = random.Random(seed)
    for size in sizes:
        estimate.note(size, link.seconds(size) * (1 + noise * draw.uniform(-1, 1)), 0.0)


def expected(estimate, size):
    return estimate.link.seconds(size)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_steady_line_is_known(noise):
    estimate = LinkEstimate()
    read(estimate, STEADY, [MIB, 4 * MIB, 12 * MIB] * 5, noise=noise)
    for size in (MIB, 36 * MIB):
        assert expected(estimate, size) == pytest.approx(STEADY.seconds(size), rel=0.02 + 1.5 * noise)


@pytest.mark.parametrize("factor", [16, 4, 1 / 4, 1 / 16])
def test_two_reads_tell_that_the_line_has_changed(factor):
    estimate = LinkEstimate()
    read(estimate, STEADY, [12 * MIB, 24 * MIB, 36 * MIB] * 10, noise=0.05)
    changed = Link(latency_seconds=0.002, bytes_per_second=factor * STEADY.bytes_per_second)
    read(estimate, changed, [12 * MIB, 24 * MIB], noise=0.05)
    assert expected(estimate, 36 * MIB) == pytest.approx(changed.seconds(36 * MIB), rel=0.2)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_line_that_becomes_quicker_step_by_step_does_not_pass_for_one_of_high_latency(noise):
    estimate = LinkEstimate()
    for step, speed in enumerate((0.25, 0.5, 0.75, 1.33, 2.0, 4.0, 0.25, 0.5)):
        line = Link(latency_seconds=0.002, bytes_per_second=speed * STEADY.bytes_per_second)
        read(estimate, line, [12 * MIB, 24 * MIB], noise=noise, seed=step)
        for size in (12 * MIB, 24 * MIB, 36 * MIB):
            assert expected(estimate, size) == pytest.approx(line.seconds(size), rel=0.3)
            read(estimate, line, [size], noise=noise, seed=step)


def burst(estimate, link, size, count, *, at_once, now):
    """Let `count` reads share the line, `at_once` at a time; those that run together end together."""
    for _ in range(count):
        estimate.began(now)
    for done in range(at_once, count + 1, at_once):
        for number in range(at_once):
            estimate.ended(size, now + link.seconds(done * size) + number * 1e-3)
    return now + link.seconds(count * size) + 1.0


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_reads_that_share_a_slow_line_and_end_together_are_one_sample(at_once):
    estimate, now = LinkEstimate(), 0.0
    slow = Link(latency_seconds=0.002, bytes_per_second=10e6)
    for count in (4, 8, 40, 4):
        now = burst(estimate, slow, 12 * MIB, count, at_once=at_once, now=now)
        for chunks in (1, 4, 8):
            assert expected(estimate, chunks * 12 * MIB) == pytest.approx(slow.seconds(chunks * 12 * MIB), rel=0.1)


def test_another_latency_is_learnt():
    estimate = LinkEstimate()
    sizes = [MIB, 4 * MIB, 12 * MIB]
    read(estimate, STEADY, sizes * 5)
    far = Link(latency_seconds=0.2, bytes_per_second=STEADY.bytes_per_second)
    read(estimate, far, sizes * 5)
    for size in sizes:
        assert expected(estimate, size) == pytest.approx(far.seconds(size), rel=0.3)


def test_one_odd_read_changes_little_and_teaches_no_correction():
    estimate = LinkEstimate()
    read(estimate, STEADY, [MIB, 4 * MIB, 12 * MIB] * 10)
    estimate.note(4 * MIB, 20 * STEADY.seconds(4 * MIB), 0.0)
    estimate.correct(4 * MIB, 20 * STEADY.seconds(4 * MIB), 0.0)
    read(estimate, STEADY, [4 * MIB, 12 * MIB, MIB] * 4)
    assert expected(estimate, 12 * MIB) == pytest.approx(STEADY.seconds(12 * MIB), rel=0.01)
    assert estimate._correction == 1.0


def test_what_else_a_get_waits_for_is_learnt():
    estimate = LinkEstimate()
    read(estimate, STEADY, [MIB, 12 * MIB] * 3)
    for _ in range(20):
        estimate.correct(12 * MIB, 1.5 * STEADY.seconds(12 * MIB), 0.0)
    assert expected(estimate, 24 * MIB) == pytest.approx(1.5 * STEADY.seconds(24 * MIB), rel=0.01)
