"""The kit's own tools: the clock, the painted buffers, the context, the plug-in."""

import pytest

from kvtier.testing import plugin
from kvtier.testing.clock import FrozenClock
from kvtier.testing.context import lend_context
from kvtier.testing.paint import PaintedBuffers
from kvtier.testing.subject import split, value_of


def test_frozen_clock_stands_still():
    clock = FrozenClock(wall=100.0, monotonic=5.0)
    assert (clock.wall(), clock.monotonic()) == (100.0, 5.0)
    clock.advance(2.5)
    assert (clock.wall(), clock.monotonic()) == (102.5, 7.5)
    clock.set_wall(50.0)
    assert (clock.wall(), clock.monotonic()) == (50.0, 7.5)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="time does not go back"):
            clock.advance(seconds)
    assert clock.monotonic() == 7.5


def test_paint_shows_a_late_touch():
    buffers = PaintedBuffers([3, 0, 5])
    assert [part.nbytes for part in buffers.parts] == [3, 0, 5]
    buffers.parts[0][:] = b"123"
    buffers.parts[2][:] = b"45678"
    assert buffers.take(7) == b"1234567"
    buffers.assert_untouched()
    buffers.parts[2][4] = 1
    with pytest.raises(AssertionError, match="1 bytes of a buffer were written"):
        buffers.assert_untouched()


@pytest.mark.parametrize("place", [-1, 3])
def test_paint_shows_a_write_outside(place):
    buffers = PaintedBuffers([3, 3])
    whole = memoryview(buffers.parts[0].obj)
    start = 61  # the first guard
    whole[start + place] = 0
    with pytest.raises(AssertionError, match="outside the buffers"):
        buffers.take(3)


def test_paint_can_begin_as_a_source():
    buffers = PaintedBuffers(split(100, 7), content=value_of("source", 100))
    assert b"".join(buffers.parts) == value_of("source", 100)
    buffers.take()
    assert b"".join(buffers.parts) == b"\xc3" * 100


@pytest.mark.parametrize(("size", "pieces"), [(0, 1), (0, 5), (1, 3), (1000, 1), (1000, 2), (1000, 30)])
def test_split_sums_up(size, pieces):
    sizes = split(size, pieces)
    assert len(sizes) == pieces
    assert sum(sizes) == size
    assert min(sizes) >= 0
    assert pieces <= 2 or 0 in sizes


async def test_context_notices_a_slot_that_was_kept():
    with pytest.raises(AssertionError, match="kept 4096 bytes"):
        async with lend_context() as context:
            slot = context.arena.try_allocate(1)
    assert slot is not None


def test_plugin_registers_markers_and_nothing_else(pytestconfig):
    known = pytestconfig.getini("markers")
    for marker in ("gpu: ", "redis: ", "s3: "):
        assert any(line.startswith(marker) for line in known)
    assert [name for name in vars(plugin) if name.startswith("pytest_")] == ["pytest_configure"]
