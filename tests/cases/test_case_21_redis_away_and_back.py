"""Case 21: a server that is away at start, dies in the middle of work and comes back empty costs misses only."""

import asyncio

import pytest

from kvtier.errors import BackendError
from kvtier.store import open_chunks
from kvtier.testing.servers.fixtures import program_of
from kvtier.testing.servers.redis_servers import RedisServer

pytestmark = pytest.mark.redis

ROUNDS = 3
LONGEST_SECONDS = 60.0  # for what takes a second or two on a machine of one's own


class Kinds:
    """An observer that remembers the kinds of what happened."""

    def __init__(self):
        self.kinds = set()

    def on_event(self, event):
        self.kinds.add(event.kind)


def value_of(number):
    return bytes([number]) * (100_000 + number)


async def until(met):
    """Wait for something that happens by itself."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while not met():
            await asyncio.sleep(0.02)


@pytest.fixture
def server(server_folder):
    server = RedisServer(program_of("valkey"), server_folder)
    yield server
    server.close()


def config(server, *, required=False):
    memory = {"backend": "pinned-cpu", "name": "memory", "capacity": "64MiB"}
    redis = {"backend": "redis", "name": "redis", "url": server.url, "capacity": "1GiB", "required": required}
    return {"tiers": [memory, redis], "deadline_seconds": 5}


async def work(store, numbers):
    """Put and get; whatever is found is right, and memory has everything."""

    async def one(number):
        await store.put(f"key {number}", value_of(number))
        assert await store.get(f"key {number}") == value_of(number)

    await asyncio.gather(*(one(number) for number in numbers))


async def test_away_at_start_killed_in_the_middle_and_back(server):
    seen = Kinds()
    async with open_chunks(config(server), observer=seen) as store:
        assert "degraded" in seen.kinds
        assert not store.stats().tiers["redis"].up
        await work(store, range(20))
        for turn in range(ROUNDS):
            server.start()  # empty each time
            await until(lambda: store.stats().tiers["redis"].up)
            await store.put(f"turn {turn}", value_of(turn), wait="redis", deadline_seconds=30)
            assert server.call("DBSIZE") != ":0\r\n"
            busy = asyncio.ensure_future(work(store, range(100)))
            await asyncio.sleep(0)
            server.kill()
            await busy
            await work(store, range(20))
            await until(lambda: not store.stats().tiers["redis"].up)
            assert await store.get(f"turn {turn}") == value_of(turn)
        assert "recovered" in seen.kinds


async def test_a_required_tier_that_is_away_is_an_error_at_open(server):
    with pytest.raises(BackendError, match="redis"):
        async with open_chunks(config(server, required=True)):
            pass


async def test_what_a_server_lost_is_a_miss_and_can_be_put_again(server):
    server.start()
    tiers = [{**config(server)["tiers"][1], "promote": "never"}]
    async with open_chunks({"tiers": tiers, "deadline_seconds": 5}) as store:
        await store.put("key", value_of(1), wait="redis")
        assert await store.get("key") == value_of(1)
        server.kill()
        server.start()
        await until(lambda: store.stats().tiers["redis"].up)
        async with asyncio.timeout(LONGEST_SECONDS):
            while await store.get("key") is not None:  # the connections of before are found dead one by one
                await asyncio.sleep(0.02)
        await until(lambda: store.stats().tiers["redis"].up)
        await store.put("key", value_of(2), wait="redis", deadline_seconds=30)
        assert await store.get("key") == value_of(2)
