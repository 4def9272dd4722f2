"""A store above a bucket: outages, corruption, other processes, expiry."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import pytest

from kvtier.store import open_chunks
from kvtier.testing.fault_proxy import Fault
from kvtier.testing.s3_servers import SeaweedServer
from kvtier.testing.subject import value_of

KIB = 1 << 10
VALUES = {f"key {i}": value_of(i, 200 * KIB) for i in range(8)}


@pytest.fixture
def own_server(tmp_path):
    with SeaweedServer(tmp_path / "weed") as server:
        server.make_bucket("shared")
        yield server


def config(tier, **extra):
    return {
        "tiers": [{"name": "s3", "capacity": "1GiB", "negative_seconds": 0.01, **tier}],
        "deadline_seconds": 30,
        **extra,
    }


async def until(condition, seconds=100):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def put_all(store):
    for key, value in VALUES.items():
        await store.put(key, value, wait="durable", deadline_seconds=60)


async def all_put(store):
    """Put what is not there; on a slow machine a short deadline may need a second try."""
    for key, value in VALUES.items():
        if await store.get(key) is None:
            await store.put(key, value)
    await store.flush(deadline_seconds=60)
    return await assert_right_or_missing(store) == len(VALUES)


async def assert_right_or_missing(store):
    """Look at every value; return how many were there."""
    found = 0
    for key, value in VALUES.items():
        got = await store.get(key)
        assert got is None or got == value
        found += got is not None
    return found


@pytest.mark.slow
async def test_a_server_killed_stopped_and_started_again(own_server):
    tier = {"backend": own_server.backend("shared"), "deadline_seconds": 1}
    async with open_chunks(config(tier)) as store:
        await until(lambda: all_put(store))
        own_server.kill()
        assert await assert_right_or_missing(store) == 0

        async def down():
            await store.get("key 1")
            return not store.stats().tiers["s3"].up

        await until(down)
        assert await store.get("key 1") is None
        await store.put("later", b"while it is down")
        own_server.start()

        async def back():
            return await assert_right_or_missing(store) == len(VALUES)

        await until(back)
        assert store.stats().tiers["s3"].up

        own_server.pause()
        try:
            assert await assert_right_or_missing(store) == 0
            await until(down)
        finally:
            own_server.resume()
        await until(back)


async def test_a_tier_that_need_not_be_up_comes_into_service_later(make_backend, proxy, proxy_url):
    """Case 21."""
    proxy.refuse()
    tier = {"backend": make_backend(endpoint=proxy_url), "required": False, "deadline_seconds": 20}
    async with open_chunks(config(tier)) as store:
        assert not store.stats().tiers["s3"].up
        assert await store.get("key 1") is None
        proxy.heal()

        async def up():
            return store.stats().tiers["s3"].up

        await until(up)
        await put_all(store)
        assert await assert_right_or_missing(store) == len(VALUES)


async def test_flipped_bits_are_misses_never_values(make_backend, proxy, proxy_url):
    tier = {"backend": make_backend(endpoint=proxy_url), "deadline_seconds": 20}
    async with open_chunks(config(tier)) as store:
        await put_all(store)
        proxy.replies = Fault(flip_at=20_000, flip_every=50_000)
        proxy.drop_connections()
        assert await assert_right_or_missing(store) < len(VALUES)
        stats = store.stats().tiers["s3"]
        assert stats.corrupt + stats.errors > 0


async def test_throttling_costs_time_but_no_value(make_backend, proxy, proxy_url):
    reply = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    tier = {"backend": make_backend(endpoint=proxy_url), "deadline_seconds": 20}
    async with open_chunks(config(tier)) as store:
        await put_all(store)
        proxy.answer_instead(reply, share=0.3)
        proxy.drop_connections()
        assert await assert_right_or_missing(store) == len(VALUES)


async def test_expiry_is_the_objects_own(make_backend, client, folder):
    tier = {"backend": make_backend(), "deadline_seconds": 20}
    async with open_chunks(config(tier)) as store:
        await store.put("mortal", b"1", ttl_seconds=1000, wait="durable")
        await store.put("immortal", b"1", wait="durable")
    objects = client.list_objects_v2(Bucket="shared", Prefix=f"{folder}entries/")["Contents"]
    metadata = [client.head_object(Bucket="shared", Key=item["Key"])["Metadata"] for item in objects]
    assert sorted(map(len, metadata)) == [0, 1]
    async with open_chunks(config(tier | {"backend": make_backend()})) as store:
        listed = {entry.key: entry async for entry in store.list("")}
        assert sorted(listed) == ["immortal", "mortal"]


@contextlib.asynccontextmanager
async def worker(options):
    """Start a process with a store of its own; yields a function that tells it what to do."""
    tiers = [
        {"backend": "pinned-cpu", "capacity": "16MiB"},
        {"backend": "s3", "capacity": "1GiB", "negative_seconds": 0.01, **options},
    ]
    settings = {"tiers": tiers, "coherence_seconds": 2.0, "deadline_seconds": 60}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("worker.py")),
        json.dumps(settings),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )

    async def tell(*command):
        process.stdin.write(json.dumps(command).encode() + b"\n")
        await process.stdin.drain()
        return json.loads(await process.stdout.readline())

    try:
        assert json.loads(await process.stdout.readline()) == "open"
        yield tell
    finally:
        process.stdin.close()
        try:
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_two_processes_share_a_bucket(server, folder):
    options = {**server.options("shared"), "prefix": folder}
    async with worker(options) as one, worker(options) as two:
        assert await two("get", "a") is None
        await one("put", "a", "one's")

        async def two_has(text):
            return await two("get", "a") == text

        await until(lambda: two_has("one's"))  # from now on in its memory as well
        assert await one("delete", "a")
        await until(lambda: two_has(None))
        await two("put", "a", "two's")
        assert await one("get", "a") in {None, "two's"}

        async def one_has():
            return await one("get", "a") == "two's"

        await until(one_has)
