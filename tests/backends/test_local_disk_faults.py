"""Media that are full, slow, broken or lie: an entry is old, new or a miss, and nothing unfinished stays."""

import asyncio
import errno
import os
import resource
import signal
import subprocess
import threading

import pytest

from kvtier.backends.base import Read, Write, Written
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.errors import BackendTimeoutError, BackendUnavailableError, CapacityError, ClosedError
from kvtier.testing.context import lend_context
from kvtier.testing.subject import Subject, value_of


def unfinished(root):
    return [path.name for path in root.glob("owners/*/*.tmp")]


async def test_short_reads_and_writes_are_continued(disk, monkeypatch):
    write, read = os.pwritev, os.preadv
    value = value_of("short", 10_007)
    monkeypatch.setattr("os.pwritev", lambda fd, views, offset: write(fd, [views[0][:313]], offset))
    await disk.put("entry", value, pieces=5)
    monkeypatch.undo()
    assert await disk.get("entry", 10_007) == value
    monkeypatch.setattr("os.preadv", lambda fd, views, offset: read(fd, [views[0][:211]], offset))
    assert await disk.get("entry", 10_007, pieces=4) == value
    assert await disk.get("entry", 5_000, offset=3_000, partial=True, pieces=3) == value[3_000:8_000]


async def test_medium_that_takes_nothing_is_an_error(disk, root, monkeypatch):
    monkeypatch.setattr("os.pwritev", lambda fd, views, offset: 0)
    with pytest.raises(BackendUnavailableError):
        await disk.put("entry", b"12345")
    assert unfinished(root) == []
    assert await disk.get("entry", 10) is None


KINDS = [
    (errno.ENOSPC, CapacityError),
    (errno.EDQUOT, CapacityError),
    (errno.EFBIG, CapacityError),
    (errno.EIO, BackendUnavailableError),
    (errno.EROFS, BackendUnavailableError),
    (errno.EMFILE, BackendUnavailableError),
    (errno.ESTALE, BackendUnavailableError),
    (errno.ETIMEDOUT, BackendTimeoutError),
]


@pytest.mark.parametrize(("number", "kind"), KINDS)
@pytest.mark.parametrize("call", ["open", "pwritev", "utime", "fsync", "rename"])
async def test_every_step_of_a_write_may_fail(root, context, monkeypatch, call, number, kind):
    backend = LocalDiskBackend(path=root, fsync=True)
    await backend.open(context)
    disk = Subject(backend)
    await disk.put("entry", b"old")

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"os.{call}", fail)
    (answer,) = await backend.write_many([Write("entry", [memoryview(b"newer")])])
    assert type(answer) is kind
    assert str(root) in str(answer)
    monkeypatch.undo()
    assert unfinished(root) == []
    assert await disk.get("entry", 10) == b"old"
    assert await disk.put("entry", b"newer") == Written(5)
    await backend.aclose()


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
async def test_every_step_of_a_read_may_fail(disk, monkeypatch, call):
    await disk.put("entry", b"12345")

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"os.{call}", fail)
    (answer,) = await disk.backend.read_many([Read("entry", [memoryview(bytearray(5))])])
    assert type(answer) is BackendUnavailableError
    monkeypatch.undo()
    assert await disk.get("entry", 5) == b"12345"


async def test_one_name_that_fails_leaves_the_others(disk, monkeypatch):
    await disk.put_all({"good": b"1", "bad": b"2", "better": b"3"})
    unlink = os.unlink

    def fail(name, **kwargs):
        if name == "bad":
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(name, **kwargs)

    monkeypatch.setattr("os.unlink", fail)
    answers = await disk.backend.delete_many(["good", "bad", "better", "absent"])
    assert answers[0] is True
    assert isinstance(answers[1], BackendUnavailableError)
    assert answers[2:] == [True, False]


async def test_file_systems_without_links_still_take_if_absent(disk, root, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", fail)
    assert (await disk.put("entry", b"first", if_absent=True)).stored
    assert not (await disk.put("entry", b"second", if_absent=True)).stored
    assert await disk.get("entry", 10) == b"first"
    assert unfinished(root) == []


async def test_fsync_comes_before_the_rename_and_after(root, context, monkeypatch):
    calls = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "pwritev")}
    for name in real:
        monkeypatch.setattr(f"os.{name}", lambda *a, _n=name, **k: (calls.append(_n), real[_n](*a, **k))[1])
    for fsync, expected in ((True, ["pwritev", "fsync", "rename", "fsync"]), (False, ["pwritev", "rename"])):
        backend = LocalDiskBackend(path=root, fsync=fsync)
        await backend.open(context)
        await Subject(backend).put("entry", b"1")  # makes the directories
        calls.clear()
        await Subject(backend).put("entry", b"2")
        assert calls == expected
        await backend.aclose()


async def test_file_size_limit_is_a_capacity_error(disk, root):
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        (answer,) = await disk.backend.write_many([Write("entry", [memoryview(bytes(200_000))])])
        assert isinstance(answer, CapacityError)
        assert await disk.put("small", b"12345")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert unfinished(root) == []
    assert await disk.get("entry", 10) is None
    assert (await disk.put("entry", bytes(200_000))).stored


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 2 MiB with few inodes, where that is allowed."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=200", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_full_disk(small_disk, context):
    backend = LocalDiskBackend(path=small_disk / "root")
    await backend.open(context)
    disk = Subject(backend)
    values = {f"n{i}": value_of(i, 200_000) for i in range(20)}
    answers = await backend.write_many([Write(name, [memoryview(value)]) for name, value in values.items()])
    stored = {name for name, answer in zip(values, answers, strict=True) if isinstance(answer, Written)}
    assert 3 < len(stored) < 12
    assert all(isinstance(answer, CapacityError) for answer in answers if not isinstance(answer, Written))
    assert unfinished(small_disk / "root") == []
    for name, value in values.items():
        assert await disk.get(name, 200_000) == (value if name in stored else None)
    await backend.delete_many(sorted(stored)[:3])
    assert (await disk.put("after", value_of("after", 400_000))).stored
    await backend.aclose()


async def test_full_disk_can_be_opened_and_read(small_disk, context):
    root = small_disk / "root"
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    await Subject(backend).put("entry", b"12345")
    await backend.aclose()
    filler = []
    try:
        while True:
            path = small_disk / f"filler-{len(filler)}"
            path.touch()
            filler.append(path)
    except OSError:
        pass
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    disk = Subject(backend)
    assert await disk.get("entry", 10) == b"12345"
    (answer,) = await backend.write_many([Write("other", [memoryview(b"x")])])
    assert isinstance(answer, CapacityError)
    for path in filler:
        path.unlink()
    assert (await disk.put("other", b"x")).stored
    await backend.aclose()


async def test_job_that_hangs_over_the_close_harms_nobody(root, context, monkeypatch):
    stuck, go_on = threading.Event(), threading.Event()
    write = os.pwritev

    def hang(fd, views, offset):
        stuck.set()
        go_on.wait(30)
        return write(fd, views, offset)

    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    monkeypatch.setattr("os.pwritev", hang)
    writing = asyncio.ensure_future(backend.write_many([Write("entry", [memoryview(b"12345")])]))
    while not stuck.is_set():
        await asyncio.sleep(0)
    await backend.aclose()
    numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]  # whoever gets the closed numbers
    go_on.set()
    with pytest.raises(ClosedError):
        await writing
    monkeypatch.undo()
    for number in numbers:
        os.fstat(number)
        os.close(number)
    again = LocalDiskBackend(path=root)
    await again.open(context)
    assert await Subject(again).get("entry", 10) in {None, b"12345"}
    assert unfinished(root) == []
    await again.aclose()


async def test_close_without_a_thread_to_be_had(root, context, monkeypatch):
    """Every thread hangs: the close must not, and lets nobody new in."""
    backend = LocalDiskBackend(path=root)
    await backend.open(context)

    async def stuck(*args):
        raise BackendTimeoutError("all threads are stuck")

    with monkeypatch.context() as patched:
        patched.setattr(context.workers, "run", stuck)
        opened = backend._opened
        await backend.aclose()
    with pytest.raises(ClosedError), opened.root.in_use():
        pass
    with pytest.raises(ClosedError):
        await backend.stat_many(["entry"])
    opened.close()


async def test_close_after_the_threads_have_gone(root):
    async with lend_context() as context:
        backend = LocalDiskBackend(path=root)
        await backend.open(context)
        await backend.append_journal(b"record")
    await backend.aclose()
    assert list(root.glob("owners/*")) == []


async def test_faults_while_closing_are_swallowed(root, context, monkeypatch):
    """What cannot be cleared away now, the next process clears away."""
    backend = LocalDiskBackend(path=root)
    await backend.open(context)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.rmdir", fail)
    await backend.aclose()
    monkeypatch.undo()
    assert len(list(root.glob("owners/*"))) == 1
    again = LocalDiskBackend(path=root)
    await again.open(context)
    assert len(list(root.glob("owners/*"))) == 1
    await again.aclose()
    assert list(root.glob("owners/*")) == []
