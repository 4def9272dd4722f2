"""What a directory holds, in bytes per leaf: counters in one file under `flock`, shared by all its users."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import secrets
import struct
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvtier.backends.disk_layout import LEDGER_FILE, SHARDS, create_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvtier.backends.disk_layout import DiskRoot
    from kvtier.backends.disk_owner import Owner

SPARES = SHARDS  # the slot of files that are kept to be overwritten
_SLOTS = SHARDS + 1
_SLOT = struct.Struct("<qQ")  # bytes of the entries; how often that changed
_FRONT = b"kvtier-ledger 1\n"
_FRONT_SIZE = 4096
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_SIZE = _FRONT_SIZE + _SLOTS * _SLOT.size


class DiskLedger:
    """Counts the bytes of all entries, whoever wrote them. Methods block; threads and processes exclude each other.

    Whoever adds an entry counts it before it appears, and whoever removes one counts that after it is gone, all under
    the lock: a process that dies in between leaves a count that is too high, never one too low. A listing puts it
    right, leaf by leaf (`observe`), while others go on; so are files met that came or went by other means.

    Where there is no `flock`, `works` is False, nothing is counted, and the tier's own books are all there is.
    """

    def __init__(self, root: DiskRoot, owner: Owner, capacity: int) -> None:
        self.capacity = capacity
        self.works: bool = True
        self.known: int = 0  # bytes in all as of the last look
        self.doubtful: set[int] = set()  # leaves where something was missing that may have been counted
        self._root = root
        self._owner = owner
        self._fd: int | None = None
        self._closed = False
        self._mutex = threading.Lock()

    @contextmanager
    def locked(self) -> Generator[LockedLedger, None, None]:
        """Hold the lock for a handful of system calls: nobody publishes, removes or recycles an entry meanwhile."""
        with self._mutex:
            fd = self._open_or_none()
            locked = fd is not None and self._lock(fd)
            try:
                yield LockedLedger(fd if locked else None, self)
            finally:
                if fd is not None and locked:
                    self._unlock(fd)

    def _lock(self, fd: int) -> bool:
        if not self.works:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise
            self.works = False
        return self.works

    def _unlock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor too
        except OSError:  # closing lets go of it for certain
            self._let_go()

    def observe(self, shard: int, list_leaf: Callable[[], int]) -> None:
        """Set a leaf's count to what is there. `list_leaf` lists it and returns the bytes it found.

        That is done without the lock; once more under it if the leaf changed meanwhile, or its count was wrong.
        """
        with self._mutex:
            fd = self._open_or_none()
            before = _read_slot(fd, shard)
        found = list_leaf()
        with self._mutex:
            now = _read_slot(self._open_or_none(), shard)
        if now != before or now[0] != found:
            with self.locked() as books:
                if books.slot(shard) != before:
                    found = list_leaf()
                books.set(shard, found)
        self.doubtful.discard(shard)

    def close(self) -> None:
        """Let go of the file."""
        with self._mutex:
            self._closed = True
            self._let_go()

    def _open_or_none(self) -> int | None:
        """Return the open file; None if it cannot be had now: a full disk must not keep entries from being removed."""
        try:
            return self._open()
        except OSError:
            return None

    def _open(self) -> int:
        """Return the open file, another one if somebody removed it; the caller has the mutex."""
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
            self._let_go()
        if self._fd is None:
            with self._root.in_use() as top:  # raises `ClosedError` after the root was closed
                self._fd = _open_ledger(top) or self._make(top)
        return self._fd

    def _make(self, top: int) -> int:
        """Put an empty ledger there whole; if somebody else was faster, theirs counts."""
        with self._owner.place() as place:
            unfinished = f"{secrets.token_hex(8)}.tmp"
            fd = create_file(place, unfinished)
            try:
                content = memoryview(_FRONT.ljust(_SIZE, b"\0"))
                while content:
                    content = content[os.write(fd, content) :]
                with suppress(FileExistsError):
                    _publish_new(place, unfinished, top)
            finally:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(unfinished, dir_fd=place)
        made = _open_ledger(top)
        if made is None:
            raise FileNotFoundError(errno.ENOENT, f"{LEDGER_FILE} was removed while it was made")
        return made

    def _let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LockedLedger:
    """The ledger while its lock is held; without a file (`counts` is False) it takes everything and knows nothing."""

    def __init__(self, fd: int | None, ledger: DiskLedger) -> None:
        self._fd = fd
        self._ledger = ledger

    @property
    def counts(self) -> bool:
        """Whether there is a ledger, and a lock on it."""
        return self._fd is not None

    def slot(self, slot: int) -> tuple[int, int]:
        """Return the bytes that are counted in a leaf, and how often that changed."""
        return _read_slot(self._fd, slot)

    def add(self, slot: int, size: int) -> None:
        """Count `size` more bytes (less, if negative) in a leaf, or among the spares."""
        self.set(slot, self.slot(slot)[0] + size)

    def set(self, slot: int, size: int) -> None:
        """Say how many bytes there are."""
        if self._fd is not None:
            held, changes = self.slot(slot)
            os.pwrite(self._fd, _SLOT.pack(size, (changes + 1) % (1 << 64)), _place_of(slot))
            self._ledger.known += size - held

    def total(self) -> int:
        """Return the bytes of all entries and spares."""
        if self._fd is None:
            return 0
        content = array.array("q", os.pread(self._fd, _SLOTS * _SLOT.size, _FRONT_SIZE))
        if sys.byteorder == "big":
            content.byteswap()
        self._ledger.known = sum(content[::2])
        return self._ledger.known


def _place_of(slot: int) -> int:
    return _FRONT_SIZE + slot * _SLOT.size


def _read_slot(fd: int | None, slot: int) -> tuple[int, int]:
    if fd is None:
        return 0, 0
    content = os.pread(fd, _SLOT.size, _place_of(slot))
    if len(content) < _SLOT.size:  # somebody cut the file short: what is behind its end counts as nothing
        return 0, 0
    held, changes = _SLOT.unpack(content)
    return held, changes


def _open_ledger(top: int) -> int | None:
    """Open the ledger if there is one; something else in its place, or another format, is replaced."""
    try:
        fd = os.open(LEDGER_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=top)
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        os.unlink(LEDGER_FILE, dir_fd=top)
        return None
    if os.pread(fd, len(_FRONT), 0) == _FRONT:
        return fd
    os.close(fd)
    os.unlink(LEDGER_FILE, dir_fd=top)
    return None


def _publish_new(place: int, unfinished: str, top: int) -> None:
    try:
        os.link(unfinished, LEDGER_FILE, src_dir_fd=place, dst_dir_fd=top, follow_symlinks=False)
    except OSError as exc:
        if exc.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
            raise
        os.rename(unfinished, LEDGER_FILE, src_dir_fd=place, dst_dir_fd=top)
