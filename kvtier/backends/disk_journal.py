"""Append-only logs beside the entries: one file at a time per open backend, `journal/<creation time>-<owner>.log`."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier.backends.disk_layout import JOURNAL, OWNERS, create_file, directory, names_in
from kvtier.backends.disk_owner import is_live

if TYPE_CHECKING:
    from kvtier.backends.disk_layout import DiskRoot
    from kvtier.backends.disk_owner import Owner

_LOG = re.compile(r"\d{20}-(\d{1,10}-[0-9a-f]{16})\.log")  # the digits are ns since the epoch: names sort by age
_LONGEST = 1 << 30  # a log is read into memory whole: what is behind its first GiB is not worth that


class Journal:
    """This backend's log and the logs of those that are gone. Methods block and exclude each other.

    A log only ever grows. After a compaction, or an append that failed, this backend goes on in another file, so that
    others who follow it (`follow`) never miss the beginning of a record.
    """

    def __init__(self, root: DiskRoot, owner: Owner, *, fsync: bool) -> None:
        self._root = root
        self._owner = owner
        self._fsync = fsync
        self._stamp = 0
        self._fd: int | None = None
        self._read_sizes: dict[str, int] = {}  # what `read` last returned: name of the log -> bytes
        self._followed: dict[str, int] | None = None  # how far the logs of others were read
        self._mutex = threading.Lock()

    def append(self, records: bytes) -> None:
        """Append whole records; of an append that fails nothing stays."""
        with self._mutex:
            fd = self._writable()
            size = os.fstat(fd).st_size
            try:
                _write_all(fd, memoryview(records))
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(fd, size)
                self._take_up(None)
                raise

    def read(self) -> list[bytes]:
        """Return the contents of this log and of those whose owners are gone, oldest first."""
        with self._mutex, self._root.in_use() as root, directory(root, JOURNAL, create=True) as logs:
            contents = {}
            for name, owner in _logs_in(logs):
                if owner == self._owner.name or not is_live(root, owner):
                    with suppress(OSError):  # compacted away by another process, or unreadable: it is only a hint
                        contents[name] = _read_from(logs, name, 0)
            self._read_sizes = {name: len(content) for name, content in contents.items()}
            return list(contents.values())

    def replace(self, records: bytes) -> None:
        """Put `records` in place of what `read` returned; what was appended since follows them."""
        with self._mutex, self._root.in_use() as root, directory(root, JOURNAL, create=True) as logs:
            # Its owner may have been taken for dead because somebody removed its place, and have gone on.
            replaced = [n for n, owner in _logs_in(logs) if owner == self._owner.name or n in self._read_sizes]
            contents = [records]
            for name in replaced:
                with suppress(OSError):  # removed by another process, or unreadable: it is only a hint
                    contents.append(_read_from(logs, name, self._read_sizes.get(name, 0)))
            self._rewrite(root, logs, contents)
            if self._fsync:
                os.fsync(logs)
            for name in replaced:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=logs)
            self._read_sizes = {}

    def follow(self) -> dict[str, bytes]:
        """Return what others appended to their logs since the last call, by log; the first call only begins."""
        heard: dict[str, bytes] = {}
        with self._mutex, self._root.in_use() as root, directory(root, JOURNAL, create=True) as logs:
            before, self._followed = self._followed, {}
            for name, owner in _logs_in(logs):
                if owner == self._owner.name:
                    continue
                with suppress(OSError):  # compacted away meanwhile
                    start = _size(logs, name) if before is None else before.get(name, 0)
                    more = _read_from(logs, name, start)
                    self._followed[name] = start + len(more)
                    if more:
                        heard[name] = more
        return heard

    def close(self) -> None:
        """Let go of the file, which stays for the next process to read."""
        with self._mutex:
            self._take_up(None)

    def _rewrite(self, root: int, logs: int, contents: list[bytes]) -> None:
        self._owner.claim()
        with directory(root, OWNERS, self._owner.name) as place:
            unfinished = f"{secrets.token_hex(8)}.tmp"
            fd = create_file(place, unfinished, flags=os.O_APPEND)
            try:
                for content in contents:
                    _write_all(fd, memoryview(content))
                if self._fsync:
                    os.fsync(fd)
                os.rename(unfinished, self._next_name(), src_dir_fd=place, dst_dir_fd=logs)
            except BaseException:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(unfinished, dir_fd=place)
                raise
        self._take_up(fd)

    def _writable(self) -> int:
        """Return the open log; a new one if there is none yet or somebody removed it."""
        self._owner.claim()
        if self._fd is None or os.fstat(self._fd).st_nlink == 0:
            with self._root.in_use() as root, directory(root, JOURNAL, create=True) as logs:
                self._take_up(create_file(logs, self._next_name(), flags=os.O_APPEND))
        if self._fd is None:
            raise AssertionError  # taken up just now
        return self._fd

    def _take_up(self, fd: int | None) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = fd

    def _next_name(self) -> str:
        self._stamp = max(time.time_ns(), self._stamp + 1)
        return f"{self._stamp:020d}-{self._owner.name}.log"


def _logs_in(logs: int) -> list[tuple[str, str]]:
    """Return each log's name and owner, oldest first."""
    matches = [_LOG.fullmatch(name) for name in sorted(names_in(logs))]
    return [(match[0], match[1]) for match in matches if match is not None]


def _write_all(fd: int, content: memoryview) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _size(logs: int, name: str) -> int:
    return os.stat(name, dir_fd=logs, follow_symlinks=False).st_size


def _read_from(logs: int, name: str, start: int) -> bytes:
    """Return what a log holds behind its first `start` bytes."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=logs)
    with os.fdopen(fd, "rb") as log:
        size = max(0, min(os.fstat(fd).st_size - start, _LONGEST))  # a reader allocates what it is asked for
        log.seek(start)
        return log.read(size)
