"""Unfinished files go when their owner is dead, and only then."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from kvtier.backends import disk_owner
from kvtier.backends.base import Write
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.testing.subject import Subject

HOLDER = """
import asyncio, os, sys
from kvtier.backends import disk_owner
from kvtier.backends.base import Write
from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.testing.context import lend_context

real = os.pwritev
def half(fd, views, offset):
    if len(views[0]) == 5000:      # the write that is caught half-way
        real(fd, [views[0][:2000]], offset)
        print("half", flush=True)
        sys.stdin.readline()
        return 2000
    return real(fd, views, offset)
os.pwritev = half

async def main():
    async with lend_context(arena_bytes=4096) as context:
        backend = LocalDiskBackend(path=sys.argv[1])
        await backend.open(context)
        await backend.append_journal(b"of the holder")
        print(await backend.write_many([Write("entry", [memoryview(b"v" * 5000)])]), flush=True)
        await backend.aclose()

asyncio.run(main())
"""


@pytest.fixture
def holder(root):
    """A live process that is half-way through a write."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def unfinished(root):
    return sorted(path.name for path in root.glob("owners/*/*.tmp"))


async def test_unfinished_file_of_the_living_is_left_alone(root, context, holder):
    assert len(unfinished(root)) == 1
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    disk = Subject(backend)
    assert len(unfinished(root)) == 1
    assert await disk.listing() == []
    assert await disk.get("entry", 6000) is None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert "Written(size=5000, stored=True)" in holder.stdout.readline()
    assert await disk.get("entry", 6000) == b"v" * 5000
    await backend.aclose()


async def test_unfinished_file_of_the_dead_goes_at_open(root, context, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert len(unfinished(root)) == 1
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    assert unfinished(root) == []
    assert [path.name.split("-")[0] for path in root.glob("owners/*")] == [str(os.getpid())]
    assert await Subject(backend).listing() == []
    assert list(await backend.read_journals()) == [b"of the holder"]
    await backend.aclose()


async def test_reused_pid_does_not_keep_garbage(root, context):
    """A dead owner's directory that bears the pid of a live process (here: our own) goes all the same."""
    stale = root / "owners" / f"{os.getpid()}-{'0' * 16}"
    stale.mkdir(parents=True)
    (stale / "lock").touch()
    (stale / "0123.tmp").write_bytes(b"half")
    lockless = root / "owners" / f"1-{'1' * 16}"
    lockless.mkdir()
    (lockless / "0123.tmp").write_bytes(b"half")
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    assert not stale.exists()
    assert not lockless.exists()
    await backend.aclose()


async def test_foreign_places_are_left_alone(root, context):
    for name in ("somebody", f"1-{'x' * 16}"):
        (root / "owners" / name).mkdir(parents=True)
        (root / "owners" / name / "precious").write_bytes(b"x")
    (root / "owners" / f"2-{'2' * 16}").symlink_to(root / "owners" / "somebody")
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    await backend.aclose()
    assert len(list(root.glob("owners/*/precious"))) == 3
    assert len(list(root.glob("owners/somebody/precious"))) == 1


async def test_dead_owner_that_cannot_be_removed_does_not_keep_the_tier_closed(root, context):
    stale = root / "owners" / f"1-{'0' * 16}"
    (stale / "a directory").mkdir(parents=True)
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    await Subject(backend).put("entry", b"x")
    await backend.aclose()


async def test_two_owners_in_one_process_see_each_other_alive(root, context):
    one, other = LocalDiskBackend(path=root), LocalDiskBackend(path=root)
    await one.open(context)
    (place,) = root.glob("owners/*")
    (place / "feed.tmp").write_bytes(b"half")
    await other.open(context)
    assert unfinished(root) == ["feed.tmp"]
    await one.aclose()
    assert unfinished(root) == []
    assert (await other.write_many([Write("entry", [memoryview(b"x")])]))[0].stored
    await other.aclose()


def fork_sleeper():
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_forked_child_does_not_hold_the_roots_lock(root, context, monkeypatch):
    """The lock under which owners register is let go although a child that was forked meanwhile has it open."""
    children = []
    sweep = disk_owner._sweep
    monkeypatch.setattr(disk_owner, "_sweep", lambda top: (children.append(fork_sleeper()), sweep(top)))
    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    try:
        with (root / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
        await backend.aclose()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_forked_child_does_not_keep_a_closed_owner_alive(root, context, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    backend = LocalDiskBackend(path=root)
    await backend.open(context)
    (place,) = root.glob("owners/*")
    child = fork_sleeper()
    top = os.open(root, os.O_RDONLY)
    try:
        assert disk_owner.is_live(top, place.name)
        monkeypatch.setattr(disk_owner, "_remove", fail)
        await backend.aclose()
        assert place.exists()
        assert not disk_owner.is_live(top, place.name)
    finally:
        os.close(top)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
