"""What the S3 backend makes of servers that fail: every fault is an error within the deadline, never a wrong answer."""

import asyncio
import dataclasses
import hashlib
import random
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvtier.backends import s3_wire
from kvtier.backends.base import Read, TooLongError, Write
from kvtier.backends.s3_control import Control
from kvtier.backends.s3_wire import Wire
from kvtier.errors import BackendError, BackendTimeoutError, BackendUnavailableError
from kvtier.testing.context import lend_context
from kvtier.testing.fault_proxy import Fault
from kvtier.testing.subject import Subject, value_of

MIB = 1 << 20
BROKEN = (BackendUnavailableError, BackendTimeoutError)  # the client library tries again, on a slow machine too long
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>less</Message></Error>"
SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(_SLOW_DOWN) + _SLOW_DOWN


@asynccontextmanager
async def opened(backend, *, deadline_seconds=20.0, threads=4):
    async with lend_context(threads=threads) as context:
        await backend.open(dataclasses.replace(context, deadline_seconds=deadline_seconds))
        subject = Subject(backend)
        try:
            yield subject
        finally:
            await backend.aclose()
            subject.assert_buffers_untouched()


async def answered(call):
    """Await what a slow machine may not manage within a short deadline at first."""
    for _ in range(20):
        try:
            return await call()
        except BackendTimeoutError:
            continue
    pytest.fail("no answer")


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def uploads_of(client, folder):
    return client.list_multipart_uploads(Bucket="shared", Prefix=folder).get("Uploads", [])


@pytest.mark.parametrize("data_path", ["sockets", "aioboto3"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(cut_after=300_000), BROKEN),
        (Fault(cut_after=300_000, reset=True), BROKEN),
        (Fault(cut_after=20), BROKEN),
        (Fault(bytes_per_second=20_000), BackendTimeoutError),
        (Fault(bytes_per_second=30), BackendTimeoutError),
        (Fault(silent=True), BackendTimeoutError),
    ],
    ids=["short", "reset", "head cut", "trickle", "trickling head", "silent"],
)
async def test_a_body_that_does_not_come_whole_is_an_error_in_time(
    make_backend, proxy, proxy_url, fault, kind, data_path
):
    value = value_of("value", MIB)
    async with opened(make_backend(), deadline_seconds=20) as direct:
        await direct.put("entry", value)
    async with opened(make_backend(endpoint=proxy_url, data_path=data_path), deadline_seconds=1.0) as subject:
        proxy.replies = fault
        async with asyncio.timeout(60):
            with pytest.raises(kind):
                await subject.get("entry", MIB)
        proxy.heal()
        proxy.drop_connections()
        assert await answered(lambda: subject.get("entry", MIB)) == value


@pytest.mark.parametrize("fault", [Fault(cut_after=300_000), Fault(silent=True), Fault(bytes_per_second=20_000)])
async def test_a_write_that_fails_leaves_one_value_whole(make_backend, proxy, proxy_url, fault):
    async with opened(make_backend(endpoint=proxy_url), deadline_seconds=1.0) as subject:
        await answered(lambda: subject.put("entry", b"old"))
        proxy.requests = fault
        new = value_of("new", MIB)
        async with asyncio.timeout(60):
            with pytest.raises(BackendError):
                await subject.put("entry", new)
        proxy.heal()
        proxy.drop_connections()
        found = await answered(lambda: subject.get("entry", MIB))
        assert found in (b"old", new)  # a server may have heard all of what nobody heard the answer to


async def test_a_server_that_throttles_now_and_then_is_asked_again(make_backend, proxy, proxy_url):
    async with opened(make_backend(endpoint=proxy_url)) as subject:
        await subject.put("entry", b"12345")
        proxy.answer_instead(SLOW_DOWN, share=0.4)
        for _ in range(10):
            proxy.drop_connections()  # the next request comes on a new connection
            assert await subject.get("entry", 10) == b"12345"


async def test_a_server_that_always_throttles_is_given_up(make_backend, proxy, proxy_url):
    async with opened(make_backend(endpoint=proxy_url)) as subject:
        await subject.put("entry", b"12345")
        proxy.answer_instead(SLOW_DOWN)
        proxy.drop_connections()
        before = proxy.connections
        with pytest.raises(BackendUnavailableError, match="SlowDown"):
            await subject.get("entry", 10)
        assert 2 <= proxy.connections - before <= 5, "not tried again, or without end"
        proxy.heal()
        assert await subject.get("entry", 10) == b"12345"


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "at this moment"])
async def test_connections_that_the_server_closed_meanwhile_cost_nothing(
    make_backend, proxy, proxy_url, monkeypatch, noticed
):
    if not noticed:
        monkeypatch.setattr(s3_wire, "_has_ended", lambda sock: False)
    async with opened(make_backend(endpoint=proxy_url)) as subject:
        for reset in (False, True):
            await subject.put_all({f"n{i}": b"12345" for i in range(8)})
            proxy.drop_connections(reset=reset)
            assert await subject.get("n1", 10) == b"12345"
            proxy.drop_connections(reset=reset)
            assert await subject.put("n1", b"12345", if_absent=False)
            proxy.drop_connections(reset=reset)
            assert await subject.delete("n1")


async def test_case_27_unread_and_cancelled_bodies_do_not_drain_the_pool(make_backend, monkeypatch):
    """Cases 23 and 27."""
    monkeypatch.setattr(s3_wire, "_has_ended", lambda sock: False)  # the second line of defence
    names = [f"n{i}" for i in range(5)]
    rng = random.Random(27)
    async with opened(make_backend(), threads=4) as subject:
        await subject.put_all({name: value_of(name, MIB) for name in names})
        await subject.get(names[0], MIB)
        before = descriptors()
        for _ in range(50):
            with pytest.raises(TooLongError):
                await subject.get(rng.choice(names), 100)
        reads = []
        for _ in range(100):
            into = [memoryview(bytearray(MIB))]
            reads.append(asyncio.ensure_future(subject.backend.read_many([Read(rng.choice(names), into)])))
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            rng.choice(reads).cancel()
        for read in reads:
            read.cancel()
            with suppress(asyncio.CancelledError):
                await read
        for _ in range(50):
            name = rng.choice(names)
            assert await subject.get(name, MIB) == value_of(name, MIB)
        assert descriptors() <= before + 4


@pytest.mark.parametrize("size", [5 * MIB, 5 * MIB + 1, 12 * MIB])
async def test_values_around_the_size_of_parts(make_backend, client, folder, size):
    """Case 25."""
    async with opened(make_backend(whole_bytes=5 * MIB, part_bytes=5 * MIB)) as subject:
        value = value_of(size, size)
        await subject.put("entry", value, pieces=3)
        assert await subject.get("entry", size, pieces=2) == value
        assert await subject.get("entry", size + 9 * MIB) == value
        assert await subject.get("entry", MIB, offset=size - 100) == value[-100:]
        assert not (await subject.put("entry", value[:-1], if_absent=True)).stored
        with pytest.raises(TooLongError):
            await subject.get("entry", size - 1)
    tags = client.head_object(Bucket="shared", Key=f"{folder}entries/entry")["ETag"]
    assert ("-" in tags) == (size > 5 * MIB), "parts where a whole was due, or the reverse"
    assert uploads_of(client, folder) == []


async def test_a_failed_multipart_write_leaves_no_upload(make_backend, proxy, proxy_url, client, folder):
    options = {"whole_bytes": 5 * MIB, "part_bytes": 5 * MIB, "endpoint": proxy_url}
    async with opened(make_backend(**options)) as subject:
        proxy.requests = Fault(cut_after=3 * MIB, reset=True)
        with pytest.raises(BackendError):
            await subject.put("entry", value_of("x", 16 * MIB))
        assert uploads_of(client, folder) == []
        assert await subject.get("entry", 16 * MIB) is None


async def test_a_cancelled_multipart_write_leaves_no_upload(make_backend, client, folder):
    async with opened(make_backend(whole_bytes=5 * MIB, part_bytes=5 * MIB)) as subject:
        for turns in (1, 10, 100, 400):
            put = asyncio.ensure_future(subject.put("entry", value_of("x", 12 * MIB)))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            put.cancel()
            with suppress(asyncio.CancelledError):
                await put
            assert uploads_of(client, folder) == []
            assert await subject.get("entry", 12 * MIB) in {None, value_of("x", 12 * MIB)}


async def test_an_upload_that_cannot_be_aborted_is_aborted_at_the_end(make_backend, client, folder, monkeypatch):
    abort, refusals = Control.abort_upload, [BackendUnavailableError("no")] * 3

    async def refuse(control, key, upload_id):
        if refusals:
            raise refusals.pop()
        await abort(control, key, upload_id)

    async def no_part(*args, **kwargs):
        raise BackendUnavailableError("no")

    monkeypatch.setattr(Control, "abort_upload", refuse)
    monkeypatch.setattr(Control, "finish_upload", no_part)
    async with opened(make_backend(whole_bytes=5 * MIB, part_bytes=5 * MIB)) as subject:
        for _ in range(2):
            with pytest.raises(BackendError):
                await subject.put("entry", value_of("x", 6 * MIB))
        assert len(uploads_of(client, folder)) == 2
    assert uploads_of(client, folder) == []


async def test_deletes_one_by_one_where_the_server_takes_no_batches(make_backend, monkeypatch):
    import botocore.exceptions

    batches = []
    async with opened(make_backend()) as subject:
        control = subject.backend._use().control

        async def refuse(**parameters):
            batches.append(parameters)
            raise botocore.exceptions.ClientError({"Error": {"Code": "MissingContentMD5"}}, "DeleteObjects")

        monkeypatch.setattr(control._client, "delete_objects", refuse)
        for _ in range(2):
            await subject.put_all({f"n{i}": b"x" for i in range(20)})
            assert list(await subject.backend.delete_many([f"n{i}" for i in range(21)])) == [True] * 20 + [False]
            assert await subject.listing() == []
    assert len(batches) == 1, "asked again after it was refused"


async def test_a_value_replaced_while_it_is_read_in_parts_is_never_mixed(make_backend):
    size = 11 * MIB
    values = [value_of("even", size), value_of("odd", size)]
    backend = make_backend(whole_bytes=5 * MIB, part_bytes=5 * MIB)
    async with opened(backend, threads=2) as subject:
        await subject.put("entry", values[0])
        done = False

        async def replace():
            for turn in range(1, 6):
                await subject.put("entry", values[turn % 2])

        replacing = asyncio.ensure_future(replace())
        while not done:
            done = replacing.done()
            into = bytearray(size)
            (answer,) = await backend.read_many([Read("entry", [memoryview(into)])])
            assert isinstance(answer, BackendError) or bytes(into) in values
        await replacing


async def test_a_batch_of_deletes_that_succeeds_in_part(make_backend, monkeypatch):
    """What was not there is gone too, what was throttled is tried again, what is refused keeps its place."""
    async with opened(make_backend()) as subject:
        control = subject.backend._use().control
        names = ["absent", "throttled", "refused", "fine"]
        await subject.put_all(dict.fromkeys(names, b"12345"))
        delete, codes = control._client.delete_objects, ["NoSuchKey", "SlowDown", "AccessDenied"]

        async def in_part(*, Delete, **parameters):  # noqa: N803  # the name is the service's
            keys = {item["Key"].rpartition("/")[2]: item for item in Delete["Objects"]}
            await delete(Delete={"Objects": [keys["fine"]], "Quiet": True}, **parameters)
            errors = [{"Key": keys[name]["Key"], "Code": code} for name, code in zip(names, codes, strict=False)]
            return {"Errors": errors}

        monkeypatch.setattr(control._client, "delete_objects", in_part)
        absent, throttled, refused, fine = await subject.backend.delete_many(names)
        assert (absent, throttled, fine) == (True, True, True)
        assert isinstance(refused, BackendError)
        assert "AccessDenied" in str(refused)
        stats = await subject.backend.stat_many(names)
        assert [stat is None for stat in stats] == [False, True, False, True]


async def test_a_dead_server_fails_every_item_of_a_batch_by_itself(make_backend, proxy, proxy_url):
    async with opened(make_backend(endpoint=proxy_url), deadline_seconds=1.0) as subject:
        proxy.refuse()
        proxy.drop_connections()
        backend = subject.backend
        answers = [
            *await backend.read_many([Read(f"n{i}", [memoryview(bytearray(8))]) for i in range(20)]),
            *await backend.write_many([Write(f"n{i}", [memoryview(b"x")]) for i in range(20)]),
            *await backend.stat_many(["a", "b"]),
            *await backend.delete_many(["a", "b"]),
        ]
        assert len(answers) == 44
        assert all(isinstance(answer, BackendUnavailableError) for answer in answers)
        proxy.heal()
        await answered(lambda: subject.put("n1", b"12345"))
        assert await subject.get("n1", 10) == b"12345"


@pytest.mark.parametrize("signed", [True, False])
async def test_payloads_are_signed_when_asked(make_backend, monkeypatch, signed):
    """SeaweedFS compares the signature with the hash that is claimed, not the hash with the body: the test does."""
    sent, exchange = [], Wire.exchange

    def noted(wire, request, into, deadline):
        sent.append((request.method, dict(request.headers), b"".join(request.body)))
        return exchange(wire, request, into, deadline)

    monkeypatch.setattr(Wire, "exchange", noted)
    value = value_of("x", 6 * MIB)
    async with opened(make_backend(signed_payload=signed, whole_bytes=5 * MIB, part_bytes=5 * MIB)) as subject:
        await subject.put("small", value[:100_000], expires=4e9, pieces=3)
        await subject.put("large", value, pieces=3)
        assert await subject.get("small", 100_000) == value[:100_000]
        assert await subject.get("large", 6 * MIB) == value
        assert (await subject.stat("small")).expires == 4e9
    puts = [(headers, body) for method, headers, body in sent if method == "PUT"]
    assert len(puts) == 3
    for headers, body in puts:
        claimed = headers.get("X-Amz-Content-SHA256")
        assert claimed == (hashlib.sha256(body).hexdigest() if signed else None)
        assert ("Authorization" in headers) == signed
