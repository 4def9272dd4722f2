"""Case 25 on a real server: values longer than one of its strings may be are cut; one that is full is skipped."""

import pytest

from kvtier.errors import CapacityError
from kvtier.store import open_chunks
from kvtier.testing.servers.fixtures import program_of
from kvtier.testing.servers.redis_servers import RedisServer

pytestmark = pytest.mark.redis

MIB = 1 << 20


def bytes_of(size):
    return bytes(range(256)) * (size // 256)


def tiers(server, path):
    redis = {"backend": "redis", "name": "redis", "url": server.url, "capacity": "1GiB", "promote": "never"}
    return [redis, {"backend": "local-disk", "name": "disk", "path": str(path / "disk"), "capacity": "1GiB"}]


async def test_long_values_pass_where_strings_are_short(server_folder, tmp_path):
    with RedisServer(program_of("valkey"), server_folder, options={"proto-max-bulk-len": "1mb"}) as server:
        config = {"tiers": tiers(server, tmp_path)[:1], "deadline_seconds": 60, "memory": {"staging_bytes": "160MiB"}}
        async with open_chunks(config) as store:
            for size in (3 * MIB, 64 * MIB):
                await store.put(f"{size}", bytes_of(size), wait="redis")
                assert await store.get(f"{size}") == bytes_of(size)
            assert not any(store.stats().tiers["redis"].dropped.values())


async def test_a_full_server_is_skipped_and_counted(server_folder, tmp_path):
    options = {"maxmemory": "16mb", "maxmemory-policy": "noeviction"}
    with RedisServer(program_of("valkey"), server_folder, options=options) as server:
        async with open_chunks({"tiers": tiers(server, tmp_path), "deadline_seconds": 60}) as store:
            await store.put("small", b"1", wait="redis")
            for number in range(3):
                await store.put(f"big {number}", bytes_of(16 * MIB), wait="disk")
                with pytest.raises(CapacityError):
                    await store.put(f"bigger {number}", bytes_of(16 * MIB), wait="redis")
            await store.flush()
            redis = store.stats().tiers["redis"]
            assert redis.up
            assert redis.dropped["full"] > 0
            assert await store.get("big 1") == bytes_of(16 * MIB)
            assert await store.get("small") == b"1"
            held = {entry.key: set(entry.tiers) async for entry in store.list()}
            assert held["small"] == {"redis", "disk"}
            assert held["big 1"] == {"disk"}
            await store.put("after", b"2", wait="redis")
