"""What was acknowledged with `fsync` is there after every power cut that the record allows; without it, it is not."""

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from kvtier.backends import disk_read, disk_spares, disk_write
from kvtier.backends.base import Read, Write
from kvtier.backends.local_disk import LocalDiskBackend

sys.path.insert(0, str(Path(__file__).parent))
from power_loss import Recorder, build, fixed_random, states

SIZE = 300


def value_of(name, version):
    """A value that tells whether it is whole, as a container does."""
    head = f"{name}:{version}:".encode()
    return (head + hashlib.sha256(head).hexdigest().encode()).ljust(SIZE, b"=")


def is_whole(name, found):
    head = b":".join(found.split(b":", 2)[:2]) + b":"
    return found == value_of(name, head.split(b":")[1].decode()) if head.startswith(name.encode() + b":") else False


@pytest.fixture
def small_files_are_recycled(monkeypatch):
    for module in (disk_read, disk_spares, disk_write):
        monkeypatch.setattr(module, "RECYCLED_LEAST", 100)


async def record(root, context, monkeypatch, *, fsync):
    """Put, replace, remove and recycle; note when each was acknowledged."""
    root.mkdir()
    recorder = Recorder(root)
    with monkeypatch.context() as patched:
        recorder.install(patched)
        backend = LocalDiskBackend(path=root, fsync=fsync, io="buffered")
        await backend.open(context)

        async def put(name, version):
            recorder.begin(name)
            (answer,) = await backend.write_many([Write(name, [memoryview(value_of(name, version))])])
            assert answer.stored
            recorder.ack(name, value_of(name, version))

        async def delete(name):
            recorder.begin(name)
            assert await backend.delete_many([name]) == [True]
            recorder.ack(name, None)

        await put("a", 0)
        await put("b", 0)
        await put("a", 1)
        await delete("b")
        await put("c", 0)
        await put("b", 1)
        assert backend.figures()["recycled"] == 1
        await backend.aclose()
    return recorder.log


def owed(log, cut):
    """Return what must be there: acknowledged, and nothing begun with it since."""
    must = {}
    for effect in log[:cut]:
        if effect.what == "begin":
            must.pop(effect.path, None)
        elif effect.what == "ack" and effect.content:
            must[effect.path] = effect.content
    return must


async def losses(log, root, context, target):
    """Open every directory that a power cut may leave; return what is owed and gone, and how many there were."""
    lost, seen, looked = [], {}, 0
    for cut, effects in states(log, fixed_random()):
        digest, make = build(effects, root, target)
        if digest not in seen:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            make()
            seen[digest] = await read_all(target, context)
            looked += 1
        lost += [(cut, name) for name, value in owed(log, cut).items() if seen[digest].get(name) != value]
    return lost, looked


async def read_all(target, context):
    """Return what a fresh backend finds: it always opens, and what it serves is whole or can be told from that."""
    backend = LocalDiskBackend(path=target, io="buffered")
    await backend.open(context)
    found = {}
    for name in "abc":
        into = bytearray(SIZE)
        (size,) = await backend.read_many([Read(name, [memoryview(into)])])
        if isinstance(size, int) and is_whole(name, bytes(into[:size])):
            found[name] = bytes(into)
    await backend.aclose()
    assert not list(target.glob("owners/*/*"))
    return found


async def test_nothing_acknowledged_is_lost(tmp_path, context, monkeypatch, small_files_are_recycled):
    log = await record(tmp_path / "root", context, monkeypatch, fsync=True)
    lost, looked = await losses(log, tmp_path / "root", context, tmp_path / "after")
    assert looked > 100
    assert lost == []


async def test_control_without_fsync_loses_values(tmp_path, context, monkeypatch, small_files_are_recycled):
    log = await record(tmp_path / "root", context, monkeypatch, fsync=False)
    lost, _ = await losses(log[:60], tmp_path / "root", context, tmp_path / "after")
    assert lost
