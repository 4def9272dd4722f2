"""Files of removed entries are written into again, and no reader ever sees that happen."""

import asyncio
import fcntl
import os
import random
import threading
import time

import pytest

from kvtier.backends import disk_read
from kvtier.backends.base import Read, Write, Written
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.testing.subject import Subject, value_of

MIB = 1 << 20


def inode(path):
    return path.stat().st_ino


async def test_a_removed_entrys_file_becomes_the_next_one(disk, root, entry_path):
    await disk.put("old", value_of("old", MIB))
    file = inode(entry_path("old"))
    assert await disk.delete("old")
    assert await disk.get("old", MIB) is None
    assert await disk.stat("old") is None
    await disk.put("new", value_of("new", MIB), expires=4e9)
    assert inode(entry_path("new")) == file
    assert await disk.get("new", MIB) == value_of("new", MIB)
    assert (await disk.stat("new")).expires == 4e9
    assert disk.backend.figures()["recycled"] == 1
    assert [path.name for path in root.glob("owners/*/*")] == ["lock"]


@pytest.mark.parametrize("size", [MIB + 1, 2 * MIB, 4096])
async def test_other_sizes_get_files_of_their_own(disk, entry_path, size):
    await disk.put("old", value_of("old", MIB))
    await disk.delete("old")
    await disk.put("new", value_of("new", size))
    assert disk.backend.figures()["recycled"] == 0
    assert await disk.get("new", size) == value_of("new", size)


async def test_small_files_are_removed(disk, root):
    await disk.put("old", b"x" * 4096)
    await disk.delete("old")
    assert disk.backend.figures()["spare_bytes"] == 0
    assert [path.name for path in root.glob("owners/*/*")] == ["lock"]


async def test_only_a_few_are_kept_and_none_after_the_close(root, context):
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    disk = Subject(backend)
    for i in range(10):
        await disk.put(f"n{i}", value_of(i, MIB))
    await backend.delete_many([f"n{i}" for i in range(10)])
    assert len(list(root.glob("owners/*/*.spare"))) == 4
    assert backend.figures()["spare_bytes"] == 4 * MIB
    await backend.aclose()
    assert list(root.glob("owners/*")) == []


async def test_switched_off_nothing_is_kept(root, context):
    backend = LocalDiskBackend(path=root, recycle=False)
    await backend.open(context)
    disk = Subject(backend)
    await disk.put("old", value_of("old", MIB))
    await disk.delete("old")
    assert backend.figures()["spare_bytes"] == 0
    await backend.aclose()


async def test_what_somebody_reads_is_not_kept(disk, entry_path):
    await disk.put("old", value_of("old", MIB))
    with entry_path("old").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert await disk.delete("old")
        await disk.put("new", value_of("new", MIB))
        assert reader.read() == value_of("old", MIB)


async def test_a_file_with_a_second_name_is_not_kept(disk, entry_path, tmp_path):
    """A backup made of hard links stays what it was."""
    await disk.put("old", value_of("old", MIB))
    os.link(entry_path("old"), tmp_path / "backup")
    await disk.delete("old")
    await disk.put("new", value_of("new", MIB))
    assert (tmp_path / "backup").read_bytes() == value_of("old", MIB)


async def test_a_write_that_fails_leaves_no_spare_behind(disk, root, monkeypatch):
    await disk.put("old", value_of("old", MIB))
    await disk.delete("old")

    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.utime", fail)
    (answer,) = await disk.backend.write_many([Write("new", [memoryview(value_of("new", MIB))])])
    assert not isinstance(answer, Written)
    monkeypatch.undo()
    assert [path.name for path in root.glob("owners/*/*")] == ["lock"]
    assert await disk.listing() == []
    assert disk.backend._opened.ledger.known >= 0
    with disk.backend._opened.ledger.locked() as books:
        assert books.total() == 0


async def test_without_locks_nothing_is_recycled(disk, monkeypatch):
    real = fcntl.flock

    def unsupported(fd, how):
        if how & (fcntl.LOCK_SH | fcntl.LOCK_NB):
            raise OSError(95, "Operation not supported")
        real(fd, how)

    await disk.put("old", value_of("old", MIB))
    monkeypatch.setattr("fcntl.flock", unsupported)
    assert await disk.get("old", MIB) == value_of("old", MIB)
    assert await disk.delete("old")
    await disk.put("new", value_of("new", MIB))
    assert disk.backend.figures()["recycled"] == 0
    assert await disk.get("new", MIB) == value_of("new", MIB)


async def test_reader_that_comes_too_late_finds_nothing(disk, monkeypatch):
    """It opened the file, and before it locked it the file had become another entry."""
    await disk.put("old", value_of("old", MIB))
    lock, medium = disk_read._lock_shared, disk.backend._opened
    recycled = []

    def recycle_first(fd):
        if not recycled:
            recycled.append(True)
            from kvtier.backends.disk_files import delete_entries
            from kvtier.backends.disk_write import EntryWrite, write_entry

            assert delete_entries(medium, ["old"]) == [True]
            views = [memoryview(value_of("new", MIB))]
            write_entry(medium, EntryWrite(name="new", views=views, mtime=0, if_absent=False))
        return lock(fd)

    monkeypatch.setattr(disk_read, "_lock_shared", recycle_first)
    assert await disk.get("old", MIB) is None
    assert disk.backend.figures()["recycled"] == 1
    assert await disk.get("new", MIB) == value_of("new", MIB)


async def test_reader_of_a_file_being_overwritten_looks_once_more_and_misses(disk, entry_path):
    await disk.put("old", value_of("old", MIB))
    with entry_path("old").open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert await disk.get("old", MIB) is None
    assert await disk.get("old", MIB) == value_of("old", MIB)


def stripes(name, version):
    """A value whose every page says whose it is."""
    page = f"{name}:{version};".encode().ljust(4096, b".")
    return page * (MIB // 4096)


async def hammer(one, other, seconds_or_rounds):
    """Two backends recycle each other's files while both read; return what was read that nobody had written."""
    wrong, reads = [], 0
    names = [f"n{i}" for i in range(6)]
    choose = random.Random(5)

    async def write(backend):
        for round_ in range(seconds_or_rounds):
            name = choose.choice(names)
            await backend.delete_many([choose.choice(names)])
            await backend.write_many([Write(name, [memoryview(stripes(name, round_))])])

    async def read(backend):
        nonlocal reads
        while not done.is_set():
            name = choose.choice(names)
            into = bytearray(MIB)
            (size,) = await backend.read_many([Read(name, [memoryview(into)])])
            if size is None:
                continue
            reads += 1
            first = bytes(into[:4096])
            if not first.startswith(name.encode() + b":") or into != first * (MIB // 4096):
                wrong.append(name)

    done = threading.Event()
    readers = [asyncio.ensure_future(read(backend)) for backend in (one, other) for _ in range(2)]
    await asyncio.gather(write(one), write(other))
    done.set()
    await asyncio.gather(*readers)
    return wrong, reads


@pytest.mark.parametrize("guarded", [True, False])
async def test_no_reader_sees_a_file_change(root, context, monkeypatch, guarded):
    """And the control, without the locks and the second look, does."""
    if not guarded:
        monkeypatch.setattr(disk_read, "_lock_shared", lambda fd: None)
        monkeypatch.setattr(disk_read, "_stands_for", lambda *args: True)
    read = os.preadv

    def slowly(fd, views, offset):  # so that there is time to change the file
        time.sleep(0)
        return read(fd, [views[0][: 32 << 10]], offset)

    monkeypatch.setattr("os.preadv", slowly)
    one, other = LocalDiskBackend(path=root, io="buffered"), LocalDiskBackend(path=root, io="buffered")
    await one.open(context)
    await other.open(context)
    wrong, reads = [], 0
    for _ in range(1 if guarded else 20):
        more, count = await hammer(one, other, 150 if guarded else 60)
        wrong, reads = wrong + more, reads + count
        if wrong:
            break
    assert reads > 10
    assert bool(wrong) is not guarded
    assert one.figures()["recycled"] + other.figures()["recycled"] > 10
    await one.aclose()
    await other.aclose()
