"""Logs beside the entries: what faults and other processes do to them."""

import errno
import os
import shutil

import pytest

from kvtier.backends.local_disk import LocalDiskBackend
from kvtier.errors import BackendUnavailableError, CapacityError


def logs(root):
    return sorted(root.glob("journal/*"))


async def test_torn_append_is_cut_off(disk, root, monkeypatch):
    journal = disk.backend
    await journal.append_journal(b"first")
    write, calls = os.write, []

    def tear(fd, content):
        calls.append(len(content))
        if len(calls) == 1:
            return write(fd, content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", tear)
    with pytest.raises(CapacityError):
        await journal.append_journal(b"second")
    monkeypatch.undo()
    await journal.append_journal(b"third")
    assert list(await journal.read_journals()) == [b"first", b"third"]
    await journal.replace_journals(b"compact")
    await journal.append_journal(b"fourth")
    assert list(await journal.read_journals()) == [b"compactfourth"]
    assert len(logs(root)) == 1
    assert calls == [6, 3]


@pytest.mark.parametrize("call", ["rename", "fsync", "write"])
async def test_failed_compaction_loses_nothing(root, context, monkeypatch, call):
    for record in (b"one", b"two"):
        journal = LocalDiskBackend(path=root, fsync=True)
        await journal.open(context)
        await journal.append_journal(record)
        if record == b"one":
            await journal.aclose()
    await journal.read_journals()

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"os.{call}", fail)
    with pytest.raises(CapacityError):
        await journal.replace_journals(b"compact")
    monkeypatch.undo()
    assert list(await journal.read_journals()) == [b"one", b"two"]
    assert list(root.glob("owners/*/*.tmp")) == []
    await journal.append_journal(b"+")
    await journal.replace_journals(b"compact")
    assert list(await journal.read_journals()) == [b"compact+"]
    await journal.aclose()
    assert [path.read_bytes() for path in logs(root)] == [b"compact+"]


async def test_crash_between_rename_and_removal_leaves_both(root, context, monkeypatch):
    journal = LocalDiskBackend(path=root)
    await journal.open(context)
    await journal.append_journal(b"ended")
    await journal.aclose()
    journal = LocalDiskBackend(path=root)
    await journal.open(context)
    await journal.read_journals()
    unlink = os.unlink

    def crash(name, **kwargs):
        if name.endswith(".log"):
            raise OSError(errno.EIO, "crash")
        unlink(name, **kwargs)

    monkeypatch.setattr("os.unlink", crash)
    with pytest.raises(Exception, match="crash"):
        await journal.replace_journals(b"compact")
    monkeypatch.undo()
    assert list(await journal.read_journals()) == [b"ended", b"compact"]
    await journal.aclose()


async def test_follower_never_hears_a_torn_record(disk, root, context, monkeypatch):
    """An append that failed half-way may have been heard: what comes next stands in a log of its own."""
    listener = LocalDiskBackend(path=root)
    await listener.open(context)
    await disk.backend.append_journal(b"first")
    await listener.follow_journals()
    write = os.write

    def tear(fd, content):
        if len(content) == 6:
            return write(fd, content[:3])
        heard.append((root / "journal" / logs(root)[0].name).read_bytes())  # what a follower sees now
        raise OSError(errno.EIO, "Input/output error")

    heard = []
    monkeypatch.setattr("os.write", tear)
    with pytest.raises(BackendUnavailableError):
        await disk.backend.append_journal(b"second")
    monkeypatch.undo()
    assert heard == [b"firstsec"]
    await disk.backend.append_journal(b"third, whole")
    assert list((await listener.follow_journals()).values()) == [b"third, whole"]
    await listener.aclose()


async def test_foreign_and_linked_logs_are_not_read(disk, root, tmp_path):
    await disk.backend.append_journal(b"mine")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "journal" / "notes.log").write_bytes(b"foreign")
    (root / "journal" / f"{0:020d}-1-{'0' * 16}.log.bak").write_bytes(b"foreign")
    planted = root / "journal" / f"{0:020d}-1-{'0' * 16}.log"
    planted.symlink_to(tmp_path / "secret")
    assert b"secret" not in b"".join(await disk.backend.read_journals())
    await disk.backend.replace_journals(b"compact")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert (root / "journal" / "notes.log").exists()
    planted.unlink()
    os.mkfifo(planted)
    assert b"".join(await disk.backend.read_journals()) == b"compact"


async def test_log_that_was_removed_is_begun_anew(disk, root):
    await disk.backend.append_journal(b"lost")
    for path in logs(root):
        path.unlink()
    await disk.backend.append_journal(b"kept")
    assert list(await disk.backend.read_journals()) == [b"kept"]


async def test_logs_are_private_and_one_per_process(disk, root):
    for i in range(5):
        await disk.backend.append_journal(b"record %d" % i)
    (log,) = logs(root)
    assert log.stat().st_mode & 0o777 == 0o600
    assert str(os.getpid()) in log.name


async def test_compaction_keeps_what_one_taken_for_dead_appended_since(root, context):
    """Somebody removed the owner's place, and its process goes on in the same log."""
    other = LocalDiskBackend(path=root)
    await other.open(context)
    await other.append_journal(b"before")
    shutil.rmtree(root / "owners")
    journal = LocalDiskBackend(path=root)
    await journal.open(context)
    assert list(await journal.read_journals()) == [b"before"]
    await other.append_journal(b"since")
    await journal.replace_journals(b"compact")
    assert b"".join(await journal.read_journals()) == b"compactsince"
    await other.append_journal(b"later")
    await other.aclose()
    assert b"".join(await journal.read_journals()) == b"compactsincelater"
    await journal.aclose()
