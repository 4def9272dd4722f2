"""The redis backend: what lies on the server, what the server takes away, and what it refuses."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.backends.base import Write, Written
from kvtier.backends.redis_faults import Redirected, ReplyError, raise_reply
from kvtier.backends.redis_layout import HEAD_BYTES, WHOLE_BYTES, cut, open_envelope, window
from kvtier.errors import BackendError, BackendUnavailableError, CapacityError
from kvtier.testing.fault_proxy import FaultProxy
from kvtier.testing.servers.fixtures import program_of
from kvtier.testing.servers.redis_servers import RedisServer
from kvtier.testing.servers.redis_tiers import new_prefix, opened_redis
from kvtier.testing.subject import value_of

pytestmark = pytest.mark.redis

MIB = 1 << 20
PAGE = Path(__file__).parents[2] / "docs/how-to/redis.md"
BIG = value_of("big", 5 * MIB)


def keys_of(server, prefix):
    return [line for line in server.call("KEYS", f"{prefix}:*").split("\r\n") if line.startswith(prefix)]


def stored_bytes(server, prefix):
    return int(server.call("GET", f"{prefix}:{{00}}:bytes").split("\r\n")[1])


@pytest.mark.parametrize("size", [0, 1, WHOLE_BYTES, WHOLE_BYTES + 1, 5 * MIB, 5 * MIB + 1])
def test_shapes_cover_every_byte_once(size):
    shape = cut(size, MIB)
    assert open_envelope(shape.envelope()) == shape
    spans = [(0, shape.head), *(shape.span(number) for number in range(1, shape.parts + 1))]
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert spans[-1][1] == size
    assert all(0 < stop - start <= MIB - 64 for start, stop in spans[1:])  # with room for what the server keeps beside
    assert shape.parts == 0 or shape.head == HEAD_BYTES


def test_foreign_heads_are_no_entries():
    envelope = cut(10, MIB).envelope()
    assert open_envelope(envelope[:-1]) is None
    assert open_envelope(b"kvt2" + envelope[4:]) is None
    assert open_envelope(b"kvt1" + b"z" * 60) is None


def test_window():
    views = [memoryview(b"abc"), memoryview(b""), memoryview(b"defgh")]
    assert b"".join(window(views, 2, 6)) == b"cdef"
    assert window(views, 3, 3) == []


async def test_an_evicted_part_is_a_miss_and_the_rest_goes(either_server):
    prefix = new_prefix()
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        await subject.put("entry", BIG)
        await subject.put("other", BIG)
        part = next(key for key in keys_of(either_server, prefix) if ":e:entry:" in key)
        either_server.call("DEL", part)
        assert await subject.get("entry", len(BIG)) is None
        assert not [key for key in keys_of(either_server, prefix) if ":e:entry" in key]
        assert stored_bytes(either_server, prefix) == len(BIG)
        assert [stat.name for stat in await subject.listing()] == ["other"]
        assert await subject.get("other", len(BIG)) == BIG


async def test_an_evicted_head_is_credited_by_a_listing(either_server):
    prefix = new_prefix()
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        await subject.put("entry", BIG)
        either_server.call("DEL", f"{prefix}:{{00}}:e:entry")
        assert await subject.get("entry", len(BIG)) is None
        assert await subject.stat("entry") is None
        assert await subject.listing() == []
        assert stored_bytes(either_server, prefix) == 0
        assert not [key for key in keys_of(either_server, prefix) if ":e:" in key]


async def test_capacity_holds_for_all_who_share_the_server(either_server):
    prefix = new_prefix()
    async with (
        opened_redis(either_server.url, prefix=prefix, capacity=8 * MIB) as one,
        opened_redis(either_server.url, prefix=prefix, capacity=8 * MIB) as other,
    ):
        for i in range(12):
            assert (await (one, other)[i % 2].put(f"n{i}", bytes(MIB))).stored
            assert stored_bytes(either_server, prefix) <= 8 * MIB
        assert [stat.name for stat in await one.listing()] == sorted(f"n{i}" for i in range(4, 12))  # the oldest went
        await one.put("n11", bytes(2 * MIB))
        assert stored_bytes(either_server, prefix) == 8 * MIB
        with pytest.raises(CapacityError):
            await one.put("huge", bytes(9 * MIB))
        assert len(await other.listing()) == 7
        for stat in await one.listing():
            await one.delete(stat.name)
        assert stored_bytes(either_server, prefix) == 0


async def test_expired_entries_leave_the_books(either_server):
    prefix = new_prefix()
    async with opened_redis(either_server.url, prefix=prefix) as subject:
        loop = asyncio.get_running_loop()
        await subject.put("mortal", BIG, expires=time.time() + 0.2)
        until = loop.time() + 30
        while await subject.stat("mortal") is not None and loop.time() < until:
            await asyncio.sleep(0.02)
        await subject.put("next", b"x")  # a write forgets what is due
        assert stored_bytes(either_server, prefix) == 1


async def test_prefixes_are_literal(valkey):
    async with opened_redis(valkey.url) as subject:
        names = ["a", "a.b", "a.bc", "a-b", "ab", "b", "a.", "x-1"]
        await subject.put_all(dict.fromkeys(names, b"x"))

        async def under(prefix):
            return [stat.name async for page in subject.backend.scan_under(prefix) for stat in page]

        assert await under("a.b") == ["a.b", "a.bc"]
        assert await under("a.") == ["a.", "a.b", "a.bc"]
        assert await under("a") == sorted(name for name in names if name.startswith("a"))
        assert await under("") == sorted(names)
        assert await under("c") == []


async def test_an_index_that_somebody_else_wrote_into_is_a_fault(valkey):
    prefix = new_prefix()
    for client in ("wire", "redis-py"):
        async with opened_redis(valkey.url, prefix=prefix, client=client) as subject:
            await subject.put("a", b"x")
            for member in ("b nonsense nonsense nonsense nonsense", "b 1 0 0x1 .", "b"):
                valkey.call("ZADD", f"{prefix}:{{00}}:index", "0", member)
                with pytest.raises(BackendError):
                    _ = [stat async for page in subject.backend.scan_under("") for stat in page]
                valkey.call("ZREM", f"{prefix}:{{00}}:index", member)


async def test_pages_of_a_listing_by_prefix(valkey, monkeypatch):
    monkeypatch.setattr("kvtier.backends.redis_listing.PAGE_ENTRIES", 3)
    async with opened_redis(valkey.url) as subject:
        names = sorted(f"{letter}.{number}" for letter in "abc" for number in range(9))
        await subject.put_all(dict.fromkeys(names, b"x"))
        for prefix in ("b.", "b", "", "b.3", "d"):
            pages = [page async for page in subject.backend.scan_under(prefix)]
            assert [stat.name for page in pages for stat in page] == [n for n in names if n.startswith(prefix)]
            assert all(0 < len(page) <= 3 for page in pages)
        async for page in subject.backend.scan_under("b"):  # and who has seen enough leaves the rest
            assert [stat.name for stat in page] == ["b.0", "b.1", "b.2"]
            break
        assert await subject.get("a.1", 1) == b"x"


async def test_eight_writers_send_one_new_entry_once(valkey):
    prefix = new_prefix()
    with FaultProxy(("127.0.0.1", valkey.port)) as proxy:
        async with contextlib.AsyncExitStack() as stack:
            url = f"redis://127.0.0.1:{proxy.port}"
            subjects = [await stack.enter_async_context(opened_redis(url, prefix=prefix)) for _ in range(8)]
            before = proxy.request_bytes
            answers = await asyncio.gather(*(each.put("entry", BIG, if_absent=True) for each in subjects))
            assert sorted(answer.stored for answer in answers) == [False] * 7 + [True]
            assert all(answer.size == len(BIG) for answer in answers)
            assert proxy.request_bytes - before < 1.1 * len(BIG)
            assert await subjects[3].get("entry", len(BIG)) == BIG


async def test_a_writer_that_died_is_waited_for_a_while_only(valkey):
    prefix = new_prefix()
    async with opened_redis(valkey.url, prefix=prefix) as subject:
        valkey.call("SET", f"{prefix}:{{00}}:c:entry", "someone", "PX", "300")
        assert (await subject.put("entry", BIG, if_absent=True)).stored
        assert await subject.get("entry", len(BIG)) == BIG


# --- what servers refuse


async def stored(subject, name):
    try:
        return (await subject.put(name, b"x")).stored
    except CapacityError:
        return False


async def test_a_full_server_refuses_writes_and_serves_reads(server_folder):
    options = {"maxmemory": "12mb", "maxmemory-policy": "noeviction"}
    with RedisServer(program_of("valkey"), server_folder, options=options) as server:
        async with opened_redis(server.url) as subject:
            await subject.put("entry", BIG)
            for _ in range(3):
                with pytest.raises(CapacityError):
                    await subject.put("more", bytes(12 * MIB))
                with pytest.raises(CapacityError):
                    await subject.put("entry", bytes(12 * MIB))
            assert await subject.get("entry", len(BIG)) == BIG
            assert [stat.name for stat in await subject.listing()] == ["entry"]
            async with asyncio.timeout(60):  # until the server has let go of what it did not take
                while not await stored(subject, "small"):
                    await asyncio.sleep(0.02)


async def test_a_replica_serves_reads_and_refuses_writes(either_server, server_folder):
    prefix = new_prefix()
    replica_of = {"replicaof": f"127.0.0.1 {either_server.port}", "repl-diskless-sync-delay": "0"}
    program = program_of("valkey" if "valkey" in either_server.call("INFO", "server") else "redis")
    with RedisServer(program, server_folder, options=replica_of) as replica:
        async with opened_redis(either_server.url, prefix=prefix) as master:
            await master.put("entry", BIG)
            async with asyncio.timeout(60):
                while replica.call("EXISTS", f"{prefix}:{{00}}:e:entry") != ":1\r\n":
                    await asyncio.sleep(0.02)
            async with opened_redis(replica.url, prefix=prefix) as subject:
                assert await subject.get("entry", len(BIG)) == BIG
                assert [stat.size for stat in await subject.listing()] == [len(BIG)]
                for value in (b"x", BIG):
                    with pytest.raises(CapacityError):
                        await subject.put("other", value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("MISCONF Errors writing to the AOF file", CapacityError),
        ("OOM command not allowed when used memory > 'maxmemory'.", CapacityError),
        (
            "ERR Error running script (call to f_1): @user_script:7: @user_script: 7: -OOM command not allowed",
            CapacityError,
        ),
        ("READONLY You can't write against a read only replica.", CapacityError),
        ("LOADING Redis is loading the dataset in memory", BackendUnavailableError),
        ("NOPERM this user has no permissions", BackendUnavailableError),
        ("ERR max number of clients reached", BackendUnavailableError),
        ("ERR unknown command", BackendError),
    ],
)
def test_error_replies(text, kind):
    with pytest.raises(ReplyError) as caught:
        raise_reply(text)
    assert type(caught.value.ours("redis://host:1")) is kind


def test_redirections():
    with pytest.raises(Redirected) as caught:
        raise_reply("MOVED 3999 [::1]:6381")
    assert (caught.value.host, caught.value.port, caught.value.asking) == ("[::1]", 6381, False)
    with pytest.raises(Redirected) as caught:
        raise_reply("ASK 3999 :6381")
    assert (caught.value.host, caught.value.port, caught.value.asking) == ("", 6381, True)


async def test_parts_are_no_longer_than_the_server_takes(server_folder):
    options = {"proto-max-bulk-len": "1mb"}
    with RedisServer(program_of("valkey"), server_folder, options=options) as server:
        async with opened_redis(server.url, part_bytes=4 * MIB) as subject:
            for size in (3 * MIB, 16 * MIB):
                value = value_of(size, size)
                assert await subject.put("entry", value) == Written(size)
                assert await subject.get("entry", size) == value


async def test_batches_answer_per_item_when_the_server_goes(server_folder):
    with RedisServer(program_of("valkey"), server_folder) as server:
        async with opened_redis(server.url) as subject:
            await subject.put("entry", BIG)
            server.kill()
            answers = await subject.backend.write_many([Write(f"n{i}", [memoryview(b"x")]) for i in range(3)])
            assert all(isinstance(answer, BackendUnavailableError) for answer in answers)
            answers = await subject.backend.stat_many(["entry", "other"])
            assert all(isinstance(answer, BackendUnavailableError) for answer in answers)
            server.start()
            assert await subject.get("entry", len(BIG)) is None
            await subject.put("entry", BIG)
            assert await subject.get("entry", len(BIG)) == BIG


# --- a server of one's own


async def test_an_embedded_server_ends_with_its_backend():
    async with opened_redis("embedded:", capacity=64 * MIB) as subject:
        folder = subject.backend._opened.server._folder
        await subject.put("entry", BIG)
        assert await subject.get("entry", len(BIG)) == BIG
        assert not subject.backend.traits.persistent
        assert (folder / "s").exists()
        pid = int((await subject.backend._opened.control.command(0, "INFO", "server"))["process_id"])
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_embedded_server_ends_with_its_process():
    program = "\n".join(
        [
            "import os, signal",
            "from kvtier.backends.redis_embedded import EmbeddedServer",
            "print(EmbeddedServer(1 << 20).start(), flush=True)",
            "os.kill(os.getpid(), signal.SIGKILL)",
        ]
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout
    path = said.strip()
    assert path
    for _ in range(3000):
        with socket.socket(socket.AF_UNIX) as client:
            if client.connect_ex(path):
                break
        time.sleep(0.01)
    else:
        pytest.fail("the server lives on")
    shutil.rmtree(Path(path).parent)
