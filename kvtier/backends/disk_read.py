"""One blocking call that reads an entry, and never serves a file that was recycled under its reader."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from kvtier.backends.base import TooLongError
from kvtier.backends.disk_io import WrongBytesError
from kvtier.backends.disk_layout import (
    ABSENT,
    ENTRIES,
    directory,
    shard_of,
    shard_path,
    status_of,
    unlock_and_close,
)
from kvtier.backends.disk_spares import RECYCLED_LEAST
from kvtier.backends.views import total_bytes
from kvtier.errors import RacedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.backends.disk_medium import Medium

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a planted pipe must not block; regular files ignore the flag
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF})


class _ElsewhereError(Exception):
    """The file that was opened is not the entry's any more."""


class _BusyError(Exception):
    """The file is being overwritten with another entry."""


def read_entry(
    medium: Medium,
    name: str,
    views: Sequence[memoryview],
    offset: int,
    *,
    part: bool,
    watch: Callable[[int], bool] | None = None,
) -> int | None:
    """Fill `views` from the entry; return bytes filled, or `None` for a miss.

    A file that was recycled between finding and reading it is looked for once more.

    Raises:
        TooLongError: the entry goes on behind the views, and not just a `part` is wanted.
        RacedError: the file changed twice while it was read.
        OSError: the medium failed.
    """
    for last_try in (False, True):
        if watch is not None:
            watch(0)
        try:
            return _read_once(medium, name, views, offset, part=part, watch=watch)
        except _BusyError:
            if last_try:  # by now the name is nobody's: the file is taken out of its place before it is overwritten
                return None
        except _ElsewhereError:
            if last_try:
                raise RacedError(f"{name}: recycled while it was read") from None
        except OSError as exc:
            if exc.errno in ABSENT:
                medium.ledger.doubtful.add(shard_of(name))
                return None
            raise
    raise AssertionError  # the loop returns or raises


def _read_once(
    medium: Medium,
    name: str,
    views: Sequence[memoryview],
    offset: int,
    *,
    part: bool,
    watch: Callable[[int], bool] | None,
) -> int | None:
    with medium.root.in_use() as top, directory(top, ENTRIES, *shard_path(shard_of(name))) as leaf:
        fd = os.open(name, _READ, dir_fd=leaf)
        try:
            _lock_shared(fd)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            if status.st_size >= RECYCLED_LEAST and status.st_nlink and not _stands_for(leaf, name, status):
                raise _ElsewhereError
            room, size = total_bytes(views), max(0, status.st_size - offset)
            if size > room and not part:
                raise TooLongError(status.st_size)
            wanted = min(size, room)
            try:
                filled = medium.transfers.read(fd, views, offset, wanted, watch)
            except WrongBytesError:
                if not _stands_for(leaf, name, status):
                    raise _ElsewhereError from None
                return wanted
            if filled < wanted:
                raise RacedError(f"{name}: the file shrank while it was read")
            return wanted
        finally:
            unlock_and_close(fd)


def _lock_shared(fd: int) -> None:
    """Keep the file from being recycled; where the file system has no locks nothing is."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _BusyError from None
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise


def _stands_for(leaf: int, name: str, status: os.stat_result) -> bool:
    """Tell whether the name still leads to the file with this status."""
    here = status_of(leaf, name)
    return here is not None and (here.st_ino, here.st_dev) == (status.st_ino, status.st_dev)
