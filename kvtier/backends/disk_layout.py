"""Where things lie under a disk tier's root, and descriptors that keep every path inside it."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import threading
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvtier.errors import ClosedError, InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

FORMAT_FILE = "kvtier-format"
LOCK_FILE = "lock"
ENTRIES = "entries"
OWNERS = "owners"
JOURNAL = "journal"
LEDGER_FILE = "ledger"

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

FAN_OUT = 32  # per level: 1,024 leaves, 10 million entries before one holds 10,000 names
SHARDS = FAN_OUT * FAN_OUT

# No such file or directory; a link, a directory or a socket in the entry's place is not an entry either, and what
# stands in a directory's place holds none.
ABSENT = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO})

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SECOND = 10**9
_LAST_MOMENT = 13_569_465_600.0  # the year 2400: what file systems with 34-bit seconds can still hold


def shard_of(name: str) -> int:
    """Return which leaf directory holds `name`, in [0, SHARDS)."""
    return zlib.crc32(name.encode()) % SHARDS


def shard_path(shard: int) -> tuple[str, str]:
    """Return the names of a leaf directory's parent (below `ENTRIES`) and of the leaf."""
    return f"{shard // FAN_OUT:02x}", f"{shard % FAN_OUT:02x}"


def mtime_of(expires: float | None) -> int:
    """Return the modification time, in ns, that says `expires`: the moment itself, or 0 for never."""
    if expires is None or expires == math.inf:
        return 0
    if math.isnan(expires):
        raise InvalidValueError("expires is not a number")
    whole, part = divmod(min(max(expires, 0.0), _LAST_MOMENT), 1)
    return max(1, int(whole) * _SECOND + round(part * _SECOND))


def expiry_of(mtime_ns: int) -> float | None:
    """Return the wall-clock second that a modification time stands for, `None` for never."""
    if mtime_ns <= 0:
        return None
    whole, part = divmod(mtime_ns, _SECOND)
    return whole + part / _SECOND


def make_private(path: Path) -> None:
    """Create a directory with its missing parents, for this user alone whatever the umask."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            directory.mkdir(DIRECTORY_MODE)
        except FileExistsError:  # somebody else was faster
            continue
        directory.chmod(DIRECTORY_MODE)


def open_directory(parent: int, name: str, *, create: bool = False, durable: bool = False) -> int:
    """Open a directory below `parent` without following a link; `durable` syncs the parent if it had to be made."""
    try:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    try:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=parent)
        os.chmod(name, DIRECTORY_MODE, dir_fd=parent)  # mkdir obeys the umask
    except FileExistsError:
        pass
    if durable:
        os.fsync(parent)
    return os.open(name, _OPEN_DIRECTORY, dir_fd=parent)


@contextmanager
def directory(start: int, *names: str, create: bool = False, durable: bool = False) -> Generator[int, None, None]:
    """Step down from `start` one name at a time, following no link; lend the last directory's descriptor."""
    here = start
    try:
        for name in names:
            below = open_directory(here, name, create=create, durable=durable)
            if here != start:
                os.close(here)
            here = below
        yield here
    finally:
        if here != start:
            os.close(here)


def unlock_and_close(fd: int) -> None:
    """Let go of a file's lock, then of the file: closing is not enough if a child was forked meanwhile."""
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def remove_empty_leaves(top: int) -> None:
    """Remove leaf directories that hold nothing; whoever needs one meanwhile makes it anew."""
    for parent in range(FAN_OUT):
        with suppress(OSError), directory(top, ENTRIES, f"{parent:02x}") as here:
            for leaf in range(FAN_OUT):
                with suppress(OSError):  # not there, or not empty
                    os.rmdir(f"{leaf:02x}", dir_fd=here)


def names_in(place: int) -> list[str]:
    """Return the names in an open directory, in no order."""
    with os.scandir(place) as found:
        return [entry.name for entry in found]


def status_of(leaf: int, name: str) -> os.stat_result | None:
    """Return the status of an entry's file; anything but a regular file is no entry."""
    try:
        status = os.stat(name, dir_fd=leaf, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def create_file(parent: int, name: str, *, flags: int = 0) -> int:
    """Create a file that does not exist yet, for this user alone whatever the umask; return it open for writing."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags, FILE_MODE, dir_fd=parent)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


class DiskRoot:
    """The root directory, opened once. What takes its place later, or a link inside it, leads nowhere.

    Jobs in threads use it inside `in_use`; it is really closed when the last of them has left, so that an abandoned
    job never works on a descriptor number that belongs to somebody else by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # a link to the root is the owner's choice
        self._users = 1  # the opener counts as one
        self._closed = False
        self._mutex = threading.Lock()

    @contextmanager
    def in_use(self) -> Generator[int, None, None]:
        """Lend the root's descriptor; raise `ClosedError` after `close`."""
        with self._mutex:
            if self._closed:
                raise ClosedError(f"the disk tier at {self.path} is closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._leave()

    def close(self) -> None:
        """Refuse new users, and close once those inside have left."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        self._leave()

    def _leave(self) -> None:
        with self._mutex:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self._fd)
