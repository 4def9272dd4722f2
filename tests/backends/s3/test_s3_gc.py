"""Housekeeping: what goes, what stays, what is only counted."""

import dataclasses
import time

import msgspec
import pytest

from kvtier.backends import s3_journal
from kvtier.backends.s3_gc import collect, collect_in
from kvtier.store import open_chunks
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject

DAY = 86_400.0


@pytest.fixture
async def subject(make_backend):
    backend = make_backend()
    async with lend_context(threads=8) as context:
        await backend.open(dataclasses.replace(context, deadline_seconds=60.0))
        yield Subject(backend)
        await backend.aclose()


async def names(subject):
    return [stat.name for stat in await subject.listing()]


async def test_what_has_expired_goes(subject):
    now = time.time()
    await subject.put("past", b"12345", expires=now - 10)
    await subject.put("soon", b"123", expires=now + 1000)
    await subject.put("never", b"1")
    counted = await collect_in(subject.backend, now=now, dry_run=True)
    assert (counted.seen, counted.expired, counted.removed_bytes) == (3, 1, 5)
    assert await names(subject) == ["never", "past", "soon"]
    assert (await collect_in(subject.backend, now=now)).expired == 1
    assert await names(subject) == ["never", "soon"]
    assert (await collect_in(subject.backend, now=now + 2000)).expired == 1
    assert await names(subject) == ["never"]


async def test_what_this_version_cannot_read_goes_when_asked(subject, make_backend):
    tier = {"backend": make_backend(), "name": "s3", "capacity": "1GiB"}
    async with open_chunks({"tiers": [tier], "deadline_seconds": 30}) as store:
        await store.put("key", bytes(100_000), wait="durable")
    (ours,) = await names(subject)
    await subject.put("garbage", b"not a container")
    await subject.put("empty", b"")
    await subject.put("newer", b"\x89KVT\r\n\x1a\n" + (99).to_bytes(2, "little") + bytes(5000))
    assert (await collect_in(subject.backend, now=time.time())).removed_bytes == 0
    assert (await collect_in(subject.backend, now=time.time(), foreign=True)).foreign == 3
    assert await names(subject) == [ours]


async def test_what_is_over_the_capacity_goes_oldest_first(subject, monkeypatch):
    for index in range(6):
        await subject.put(f"n{index}", bytes(1000))
    stats = {stat.name: stat for stat in await subject.listing()}

    async def aged(after=None):  # the server counts in seconds, and nobody wants to wait for six
        yield [msgspec.structs.replace(stats[f"n{i}"], changed=1000.0 - i) for i in range(6)]

    with monkeypatch.context() as patch:
        patch.setattr(subject.backend, "scan", aged)
        assert (await collect_in(subject.backend, now=time.time(), capacity=2500)).over == 4
    assert await names(subject) == ["n0", "n1"]


async def test_abandoned_uploads_and_old_journals_go(subject, client, folder, make_backend, monkeypatch):
    client.create_multipart_upload(Bucket="shared", Key=f"{folder}entries/half")
    client.create_multipart_upload(Bucket="shared", Key=f"{folder}elsewhere/half")
    client.put_object(Bucket="shared", Key=f"{folder}a file of somebody else", Body=b"x")
    other = make_backend()
    async with lend_context() as context:
        await other.open(dataclasses.replace(context, deadline_seconds=60.0))
        await other.append_journal(b"record")
        await other.aclose()
    await subject.backend.append_journal(b"mine")
    young = await collect_in(subject.backend, now=time.time())
    assert (young.uploads, young.logs) == (0, 0)
    monkeypatch.setattr(s3_journal, "KEEP_SECONDS", -5.0)
    old = await collect_in(subject.backend, now=time.time(), upload_seconds=-5.0)
    assert (old.uploads, old.logs) == (1, 1)
    left = [
        item["Key"].removeprefix(folder) for item in client.list_objects_v2(Bucket="shared", Prefix=folder)["Contents"]
    ]
    assert "a file of somebody else" in left
    assert sum(key.endswith(".log") for key in left) == 1
    uploads = client.list_multipart_uploads(Bucket="shared", Prefix=folder)["Uploads"]
    assert [upload["Key"] for upload in uploads] == [f"{folder}elsewhere/half"]
    assert b"".join(await subject.backend.read_journals()) == b"mine"


async def test_housekeeping_opens_and_closes_by_itself(subject, make_backend):
    await subject.put("past", b"12345", expires=time.time() - 10)
    await subject.put("never", b"1")
    assert (await collect(make_backend(), dry_run=True)).expired == 1
    assert (await collect(make_backend())).removed_bytes == 5
    assert await names(subject) == ["never"]
    assert (await collect(make_backend(), capacity=0)).over == 1
    assert await names(subject) == []
