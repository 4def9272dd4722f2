"""The redis backend beside a network and servers that misbehave: every answer is the value or a fault, and in time."""

import asyncio
import contextlib
import dataclasses
import time

import pytest

from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError, CapacityError
from kvtier.testing.context import lend_context
from kvtier.testing.fault_proxy import Fault, FaultProxy
from kvtier.testing.servers.fixtures import program_of
from kvtier.testing.servers.redis_servers import RedisCluster, RedisServer, SentinelPair
from kvtier.testing.servers.redis_tiers import new_prefix, opened_redis
from kvtier.testing.subject import value_of

pytestmark = pytest.mark.redis

MIB = 1 << 20
BIG = value_of("big", 3 * MIB)
SMALL = b"small"


@pytest.fixture
def proxy(valkey):
    with FaultProxy(("127.0.0.1", valkey.port)) as proxy:
        yield proxy


@pytest.fixture
async def hasty():
    """A context whose calls end within a second and a half."""
    async with lend_context() as context:
        yield dataclasses.replace(context, deadline_seconds=1.5)


async def value_or_fault(subject, name, value):
    """What a read gives: the value, or a fault; anything else fails."""
    try:
        found = await subject.get(name, len(value))
    except BackendError:
        return None
    assert found in {None, value}
    return found


@pytest.mark.parametrize("client", ["wire", "redis-py"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut_after=0),
        Fault(cut_after=30_000),
        Fault(cut_after=MIB, reset=True),
        Fault(flip_at=0),
        Fault(flip_at=2),
        Fault(silent=True),
        Fault(bytes_per_second=50_000),
    ],
    ids=["cut", "cut in the head", "reset in a part", "wrong kind", "wrong length", "silent", "trickle"],
)
async def test_spoilt_replies(proxy, hasty, fault, client):
    async with opened_redis(f"redis://127.0.0.1:{proxy.port}", context=hasty, client=client) as subject:
        await subject.put("big", BIG)
        await subject.put("small", SMALL)
        proxy.replies = fault
        begun = time.monotonic()
        assert await value_or_fault(subject, "big", BIG) is None
        took = time.monotonic() - begun
        assert took < 20, "nobody watched the clock"
        proxy.heal()
        for _ in range(5):  # connections that broke are found out one by one
            await value_or_fault(subject, "small", SMALL)
        assert await subject.get("small", 10) == SMALL
        assert await value_or_fault(subject, "big", BIG) in {None, BIG}
        await subject.put("big", BIG)
        assert await subject.get("big", len(BIG)) == BIG


@pytest.mark.parametrize(
    "fault",
    [Fault(cut_after=0), Fault(cut_after=MIB, reset=True), Fault(silent=True)],
    ids=["cut", "reset in a part", "silent"],
)
async def test_spoilt_requests(proxy, hasty, fault):
    async with opened_redis(f"redis://127.0.0.1:{proxy.port}", context=hasty) as subject:
        await subject.put("big", BIG)
        newer = value_of("newer", len(BIG))
        proxy.requests = fault
        with pytest.raises(BackendError):
            await subject.put("big", newer)
        proxy.heal()
        for _ in range(5):
            await value_or_fault(subject, "small", SMALL)
        assert await subject.get("big", len(BIG)) in {BIG, newer}
        await subject.put("big", newer)
        assert await subject.get("big", len(BIG)) == newer


async def test_a_silent_server_costs_a_deadline_and_no_thread(proxy, hasty):
    async with opened_redis(f"redis://127.0.0.1:{proxy.port}", context=hasty) as subject:
        await subject.put("big", BIG)
        proxy.replies = Fault(silent=True)
        answers = await asyncio.gather(*(subject.get("big", len(BIG)) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(answer, BackendTimeoutError) for answer in answers)
        assert hasty.workers.busy == 0
        proxy.heal()
        assert await subject.get("big", len(BIG)) == BIG


async def test_closing_wakes_a_thread_that_waits(proxy):
    async with lend_context() as context:
        async with opened_redis(f"redis://127.0.0.1:{proxy.port}", context=context) as subject:
            await subject.put("big", BIG)
            proxy.replies = Fault(silent=True)
            reading = asyncio.ensure_future(subject.get("big", len(BIG)))
            while not context.workers.busy:
                await asyncio.sleep(0.001)
        with pytest.raises(BackendError):
            await reading


async def test_a_frozen_server_and_a_killed_one(server_folder, hasty):
    with RedisServer(program_of("valkey"), server_folder) as server:
        async with opened_redis(server.url, context=hasty) as subject:
            await subject.put("big", BIG)
            server.freeze()
            with pytest.raises(BackendTimeoutError):
                await subject.get("big", len(BIG))
            server.thaw()
            assert await subject.get("big", len(BIG)) == BIG
            reading = [asyncio.ensure_future(value_or_fault(subject, "big", BIG)) for _ in range(8)]
            writing = [asyncio.ensure_future(subject.put(f"n{i}", BIG)) for i in range(8)]
            await asyncio.wait([*reading, *writing], return_when=asyncio.FIRST_COMPLETED)
            server.kill()
            for outcome in await asyncio.gather(*reading, *writing, return_exceptions=True):
                assert not isinstance(outcome, BaseException) or isinstance(outcome, BackendError)
            server.start()
            assert await subject.get("big", len(BIG)) is None
            await subject.put("big", BIG)
            assert await subject.get("big", len(BIG)) == BIG


async def test_puts_that_wait_for_their_turn_beside_a_frozen_server(server_folder, hasty):
    """More puts than may send at once: those that wait end too, and no turn is lost, cancelled or not."""
    with RedisServer(program_of("valkey"), server_folder) as server:
        async with opened_redis(server.url, context=hasty) as subject:
            for _ in range(2):
                server.freeze()
                puts = [asyncio.ensure_future(subject.put(f"n{i}", BIG)) for i in range(12)]
                await asyncio.sleep(0.05)
                for put in puts[::3]:
                    put.cancel()
                async with asyncio.timeout(30):
                    outcomes = await asyncio.gather(*puts, return_exceptions=True)
                assert all(isinstance(each, BackendError | asyncio.CancelledError) for each in outcomes)
                server.thaw()
                async with asyncio.timeout(30):
                    while isinstance(
                        (await asyncio.gather(subject.put("n0", BIG), return_exceptions=True))[0], Exception
                    ):
                        await asyncio.sleep(0.05)
                    await asyncio.gather(*(subject.put(f"n{i}", SMALL) for i in range(12)), subject.put("after", BIG))
                assert await subject.get("after", len(BIG)) == BIG
            assert hasty.workers.busy == 0


async def test_closing_that_is_cut_off_beside_a_frozen_server_leaves_no_connection(server_folder):
    """A store gives a backend what is left of `close_seconds`, which may be less than it waits for the server."""
    with RedisServer(program_of("valkey"), server_folder) as server:
        async with opened_redis(server.url) as subject:
            await subject.put("entry", BIG)
            await asyncio.gather(*(subject.backend.stat_many(["entry"]) for _ in range(4)))  # on a connection each
            control = subject.backend._opened.control  # held: the garbage collector would close what it holds
            before = server.call("CLIENT", "LIST").count("cmd=")
            server.freeze()
            closing = asyncio.ensure_future(subject.backend.aclose())
            await asyncio.sleep(0.05)
            closing.cancel()
            await asyncio.wait({closing})
            server.thaw()
            async with asyncio.timeout(30):
                while server.call("CLIENT", "LIST").count("cmd=") > 1:  # this one itself
                    await asyncio.sleep(0.01)
        assert before > 1
        assert control.servers


async def test_a_server_that_cannot_persist_refuses_puts_and_serves_gets(server_folder, hasty):
    data = server_folder / "data"
    data.mkdir()
    with RedisServer(program_of("valkey"), server_folder, options={"save": "3600 1", "dir": str(data)}) as server:
        async with opened_redis(server.url, context=hasty) as subject:
            await subject.put("big", BIG)
            data.rmdir()
            server.call("BGSAVE")
            async with asyncio.timeout(60):
                while "rdb_last_bgsave_status:err" not in server.call("INFO", "persistence"):
                    await asyncio.sleep(0.02)
            for value in (SMALL, BIG):
                with pytest.raises(CapacityError, match="MISCONF"):
                    await subject.put("other", value)
            assert await subject.get("big", len(BIG)) == BIG


async def test_a_server_that_is_loading_is_away_until_it_has_loaded(server_folder, hasty):
    slow = {"key-load-delay": "50000", "loading-process-events-interval-bytes": "1024"}
    with RedisServer(program_of("valkey"), server_folder) as server:
        async with opened_redis(server.url, context=hasty) as subject:
            await subject.put("big", BIG)
            for number in range(30):
                await subject.put(f"n{number}", SMALL)
            server.call("SAVE")
            server.kill()
            again = RedisServer(program_of("valkey"), server_folder, options=slow, port=server.port)
            again.spawn()
            with contextlib.closing(again):
                async with asyncio.timeout(60):
                    while not said(again).startswith("-LOADING"):
                        await asyncio.sleep(0.005)
                with pytest.raises(BackendUnavailableError, match="LOADING"):
                    await subject.get("big", len(BIG))
                again.wait_ready()
                assert await subject.get("big", len(BIG)) == BIG


def said(server):
    try:
        return server.call("PING")
    except OSError:
        return ""


async def test_sentinels_tell_of_a_new_master(server_folder):
    with SentinelPair(program_of("valkey"), server_folder) as pair:
        async with opened_redis(pair.url, topology="sentinel", service=pair.service) as subject:
            await subject.put("big", BIG)
            pair.master.kill()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    await subject.put("big", BIG)
                    break
                except BackendError:
                    await asyncio.sleep(0.1)
            assert await subject.get("big", len(BIG)) == BIG
            assert "role:master" in pair.replica.call("INFO", "replication")


async def test_a_cluster_whose_slots_move(server_folder):
    with RedisCluster(program_of("valkey"), server_folder) as cluster:
        prefix = new_prefix()
        async with opened_redis(cluster.url, topology="cluster", prefix=prefix) as subject:
            values = {f"n{i}": value_of(i, 200_000) for i in range(40)}
            await subject.put_all(values)
            source, target = cluster.nodes[0], cluster.nodes[1]
            owner = {node: node.call("CLUSTER", "MYID").split("\r\n")[1] for node in (source, target)}
            moved = [
                slot
                for slot in range(5462)
                if "\r\n*0" not in f"\r\n{source.call('CLUSTER', 'GETKEYSINSLOT', str(slot), '1')}"
            ]
            for slot in map(str, moved):
                target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", owner[source])
                source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", owner[target])
                keys = source.call("CLUSTER", "GETKEYSINSLOT", slot, "1000").split("\r\n")[2::2]
                source.call("MIGRATE", "127.0.0.1", str(target.port), "", "0", "10000", "KEYS", *keys)
                assert await subject.listing()
            for name, value in values.items():  # on their way: `ASK`
                assert await subject.get(name, 200_000) == value
            for slot in map(str, moved):
                for node in (target, source):
                    node.call("CLUSTER", "SETSLOT", slot, "NODE", owner[target])
            for name, value in values.items():  # there: `MOVED`
                assert await subject.get(name, 200_000) == value
            assert sorted(stat.name for stat in await subject.listing()) == sorted(values)
            await subject.put("n1", b"newer")
            assert await subject.get("n1", 10) == b"newer"
