"""Remembered file digests: reused while the file stays as it was, never wrong, never needed."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from kvtier.keys import user_cache_folder
from kvtier.keys.file_digests import FileDigests


def later():
    """The clock an hour on: what was written just now has settled."""
    return time.time_ns() + 3_600 * 10**9


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "deep" / "down" / "memory.json"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"first")
    return path


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def ask(memory, path, now_ns=later):
    """Return the digest and how many files were read, as a new process would."""
    digests = FileDigests(memory, now_ns=now_ns)
    return digests.digest(path), digests.files_read


def test_a_file_is_read_once(memory, file):
    assert ask(memory, file) == (sha256(b"first"), 1)
    assert ask(memory, file) == (sha256(b"first"), 0)
    assert [path.name for path in memory.parent.iterdir()] == ["memory.json"]
    assert memory.stat().st_mode & 0o077 == 0


def test_another_content_is_read_again(memory, file):
    ask(memory, file)
    file.write_bytes(b"second, longer")
    assert ask(memory, file) == (sha256(b"second, longer"), 1)


def test_an_edit_that_keeps_size_and_time_is_seen(memory, file):
    ask(memory, file)
    before = file.stat()
    file.write_bytes(b"wrong")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert ask(memory, file) == (sha256(b"wrong"), 1)


def test_a_replaced_file_is_seen(memory, file, tmp_path):
    ask(memory, file)
    other = tmp_path / "other"
    other.write_bytes(b"FIRST")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    assert ask(memory, file) == (sha256(b"FIRST"), 1)


def test_a_file_that_just_changed_is_not_remembered(memory, file):
    assert ask(memory, file, time.time_ns) == (sha256(b"first"), 1)
    assert ask(memory, file, time.time_ns) == (sha256(b"first"), 1)
    assert not memory.exists()


def test_a_link_counts_as_the_file_it_leads_to(memory, file, tmp_path):
    (tmp_path / "link").symlink_to(file)
    ask(memory, file)
    assert ask(memory, tmp_path / "link") == (sha256(b"first"), 0)


def test_files_are_remembered_side_by_side(memory, file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"other")
    ask(memory, file)
    ask(memory, other)
    assert ask(memory, file)[1] == ask(memory, other)[1] == 0


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"format": 1}',
        b'{"format": 1, "files": []}',
        b'{"format": 1, "files": {"PATH": 5}}',
        b'{"format": 1, "files": {"PATH": {"state": STATE}}}',
        b'{"format": 1, "files": {"PATH": {"state": STATE, "sha256": "short"}}}',
        b'{"format": 2, "files": {"PATH": {"state": STATE, "sha256": "' + b"0" * 64 + b'"}}}',
        b"[" * 100_000,
    ],
    ids=lambda stored: stored[:40],
)
def test_a_damaged_memory_costs_nothing_but_reading(memory, file, stored):
    stat = file.stat()
    state = json.dumps([stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]).encode()
    memory.parent.mkdir(parents=True)
    memory.write_bytes(stored.replace(b"PATH", str(file).encode()).replace(b"STATE", state))
    assert ask(memory, file) == (sha256(b"first"), 1)
    assert ask(memory, file) == (sha256(b"first"), 0)


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path, file):
    blocked = tmp_path / "a-file"
    blocked.write_bytes(b"")
    assert ask(blocked / "memory.json", file) == (sha256(b"first"), 1)


def test_a_file_that_changes_while_it_is_read_is_an_error(memory, file):
    def meanwhile():
        file.write_bytes(b"changed under it")
        return later()

    with pytest.raises(OSError, match="changed while it was read"):
        ask(memory, file, meanwhile)


def test_a_missing_file_is_an_error(memory, tmp_path):
    with pytest.raises(FileNotFoundError):
        ask(memory, tmp_path / "none")


def test_where_the_memory_lies(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KVTIER_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_folder() == Path("/home/someone/.cache/kvtier")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert user_cache_folder() == Path("/xdg/kvtier")
    monkeypatch.setenv("KVTIER_CACHE_DIR", "~/own")
    assert user_cache_folder() == Path("/home/someone/own")
