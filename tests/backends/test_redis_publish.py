"""How a long value comes to a Redis server: lanes side by side, and the last of them publishes."""

import asyncio
import threading
import time

import pytest

from kvtier.backends import redis_entries, redis_wire_path
from kvtier.backends.redis_address import Access, Credentials, Endpoint
from kvtier.backends.redis_lanes import Fetching, Publication, Publishing, Wanted
from kvtier.backends.redis_layout import HEAD_BYTES, Keys, Shape, cut
from kvtier.backends.redis_wire import Wire
from kvtier.backends.redis_wire_path import LANES
from kvtier.errors import BackendUnavailableError, CapacityError
from kvtier.testing.context import lend_context
from kvtier.testing.servers.redis_tiers import new_prefix, opened_redis
from kvtier.testing.subject import value_of

pytestmark = pytest.mark.redis

BIG = value_of("big", 5 << 20)
WORDS = ["0", "-1", "0", "", "arrivals"]  # never expires, any size, also over another, no claim


def part_keys(server, prefix):
    return [line for line in server.call("KEYS", f"{prefix}:*:e:*:*:*").split("\r\n") if line.startswith(prefix)]


def count(server, pattern):
    return int(server.call("EVAL", "return #redis.call('KEYS', ARGV[1])", "0", pattern)[1:])


def publishing(prefix, lanes=2):
    keys, shape = Keys(prefix, 1), cut(len(BIG), 1 << 20)
    views = [memoryview(bytearray(BIG))]
    publication = Publication("entry", shape, views, WORDS)
    return publication, Publishing(publication, keys, lanes)


@pytest.fixture
def wire(either_server):
    access = Access(Credentials(None, None), 0, None, 5.0)
    found = Wire(access, Endpoint("127.0.0.1", either_server.port), time.monotonic() + 30)
    yield found
    found.close()


async def test_the_lane_that_ends_last_publishes(either_server, wire):
    prefix = new_prefix()
    publication, lanes = publishing(prefix)
    assert lanes.run(1, wire) is None
    assert not publication.asked
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        assert await subject.get("entry", len(BIG)) is None
        assert lanes.run(0, wire) == [1, len(BIG)]
        assert publication.asked
        assert await subject.get("entry", len(BIG)) == BIG


def test_a_lane_asked_twice_brings_nothing_twice(either_server, wire):
    """As when another node serves the bucket meanwhile: a part sent anew would expire under its entry."""
    prefix = new_prefix()
    _, lanes = publishing(prefix)
    assert [lanes.run(lane, wire) for lane in (0, 1, 1)] == [None, [1, len(BIG)], [1, len(BIG)]]
    left = {either_server.call("PTTL", key) for key in part_keys(either_server, prefix)}
    assert left == {":-1\r\n"}


async def test_what_fails_before_it_was_asked_for_is_taken_back(either_server, monkeypatch):
    run = Publishing.run

    def full(self, lane, wire):
        if lane:
            raise CapacityError("full")
        return run(self, lane, wire)

    monkeypatch.setattr(Publishing, "run", full)
    prefix = new_prefix()
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        with pytest.raises(CapacityError):
            await subject.put("entry", BIG)
        assert part_keys(either_server, prefix) == []
        assert await subject.get("entry", len(BIG)) is None


async def test_values_share_the_lanes(either_server, monkeypatch):
    lock, busy, most = threading.Lock(), 0, 0
    run = Publishing.run

    def counted(self, lane, wire):
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        time.sleep(0.01)
        try:
            return run(self, lane, wire)
        finally:
            with lock:
                busy -= 1

    monkeypatch.setattr(Publishing, "run", counted)
    async with (
        lend_context(threads=4 * LANES) as context,
        opened_redis(either_server.url, context=context) as subject,
    ):
        await asyncio.gather(*(subject.put(f"n{i}", BIG) for i in range(2 * LANES)))
        assert most == LANES
        for i in range(2 * LANES):
            assert await subject.get(f"n{i}", len(BIG)) == BIG


async def test_more_parts_than_a_script_names_at_once(either_server, monkeypatch):
    value = value_of("many", 100_000)
    monkeypatch.setattr(redis_entries, "cut", lambda size, _: Shape(size, HEAD_BYTES, 64, cut(size, 1 << 20).token))
    monkeypatch.setattr(redis_wire_path, "LANE_BYTES", 16 << 10)
    prefix = new_prefix()
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        for _ in range(2):  # the second takes the parts of the first away
            await subject.put("entry", value)
            assert await subject.get("entry", len(value)) == value
            assert count(either_server, f"{prefix}:*:e:*:*:*") == -(-(len(value) - HEAD_BYTES) // 64)
        await subject.delete("entry")
        assert count(either_server, f"{prefix}:*:e:*") == 0


class Breaking:
    """A wire that sends `good` commands and then breaks, as where another node serves the keys meanwhile."""

    def __init__(self, wire, good):
        self._wire, self._good = wire, good

    def send(self, *words):
        self._good -= 1
        if self._good < 0:
            raise BackendUnavailableError("broken")
        self._wire.send(*words)

    def __getattr__(self, name):
        return getattr(self._wire, name)


@pytest.mark.parametrize("good", range(4))
async def test_what_a_lane_could_not_fetch_is_fetched_by_the_next(either_server, wire, good):
    prefix, begun = new_prefix(), []
    publication, lanes = publishing(prefix)
    assert [lanes.run(lane, wire) for lane in (0, 1)] == [None, [1, len(BIG)]]
    into = bytearray(len(BIG))
    fetching = Fetching("entry", Wanted([memoryview(into)], 0, len(BIG), partial=False), Keys(prefix, 1))
    with pytest.raises(BackendUnavailableError):
        fetching.begin(lambda: begun.append(len(fetching.left)), Breaking(wire, good))
    fetching.begin(lambda: begun.append(len(fetching.left)), wire)
    assert fetching.shape == publication.shape
    assert fetching.whole
    assert begun == [publication.shape.parts]
    assert into == BIG


async def test_a_part_that_is_gone_is_told_whoever_looked_for_it(either_server, wire):
    prefix = new_prefix()
    _, lanes = publishing(prefix)
    assert [lanes.run(lane, wire) for lane in (0, 1)] == [None, [1, len(BIG)]]
    either_server.call("UNLINK", part_keys(either_server, prefix)[2])
    fetching = Fetching("entry", Wanted([memoryview(bytearray(len(BIG)))], 0, len(BIG), partial=False), Keys(prefix, 1))
    fetching.begin(lambda: fetching.run(wire), wire)  # all is done when the first lane goes on
    assert not fetching.left
    assert not fetching.whole
