"""Who writes under a root, and who of them is dead: an advisory lock that the kernel drops with its process."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvtier.backends.disk_layout import (
    FILE_MODE,
    LOCK_FILE,
    OWNERS,
    create_file,
    directory,
    names_in,
    unlock_and_close,
)
from kvtier.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvtier.backends.disk_layout import DiskRoot

_OWNER = re.compile(r"\d{1,10}-[0-9a-f]{16}")


def is_owner(name: str) -> bool:
    """Tell whether `name` is formed like an owner's."""
    return _OWNER.fullmatch(name) is not None


class Owner:
    """One open backend's place for unfinished files: `owners/<pid>-<random>/`, locked for as long as it lives.

    The lock (`flock` on the file `lock` inside) vanishes with its process however that ends, so whoever opens the
    root next knows whose unfinished files are garbage; the random part makes a reused pid another owner. A forked
    child shares the lock until it ends or executes another program. Methods block: they are called in threads.
    """

    def __init__(self, root: DiskRoot) -> None:
        self.name: str = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._root = root
        self._lock: int | None = None
        self._released = False
        self._mutex = threading.Lock()

    def claim(self) -> None:
        """Make the place and lock it, also again if somebody removed it; clear away what dead owners left."""
        with self._mutex:
            if self._released:
                raise ClosedError(f"the disk tier at {self._root.path} is closed")
            if self._lock is not None and os.fstat(self._lock).st_nlink == 0:
                self._unlock()
            if self._lock is None:
                with self._root.in_use() as root, _registration(root):
                    _sweep(root)
                    self._lock = _register(root, self.name)

    @contextmanager
    def place(self) -> Generator[int, None, None]:
        """Lend the descriptor of the directory for unfinished files."""
        self.claim()
        with self._root.in_use() as root, directory(root, OWNERS, self.name) as here:
            yield here

    def release(self) -> None:
        """Remove the place and let go of the lock; a second call does nothing."""
        with self._mutex:
            self._released = True
            if self._lock is None:
                return
            # What cannot be removed now is swept by whoever opens the root next.
            with (
                suppress(OSError, ClosedError),
                self._root.in_use() as root,
                _registration(root),
                directory(root, OWNERS) as owners,
            ):
                _remove(owners, self.name)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            unlock_and_close(lock)


def is_live(root: int, owner: str) -> bool:
    """Tell whether the owner's process still has the root open. The answer "no" is final."""
    try:
        with directory(root, OWNERS, owner) as place:
            return _is_locked(place)
    except OSError:  # gone, or not an owner's directory at all
        return False


def _is_locked(place: int) -> bool:
    try:
        fd = os.open(LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


@contextmanager
def _registration(root: int) -> Generator[None, None, None]:
    """Hold the root's lock, under which owners come and go: nobody sees a half-registered one."""
    fd = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE, dir_fd=root)
    try:
        os.fchmod(fd, FILE_MODE)
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        unlock_and_close(fd)


def _register(root: int, owner: str) -> int:
    with directory(root, OWNERS, owner, create=True) as place:
        lock = create_file(place, LOCK_FILE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _sweep(root: int) -> None:
    with directory(root, OWNERS, create=True) as owners:
        for name in names_in(owners):
            if is_owner(name) and not is_live(root, name):
                with suppress(OSError):  # whatever stands in the way must not keep the tier from opening
                    _remove(owners, name)


def _remove(owners: int, name: str) -> None:
    with directory(owners, name) as place:
        for file in names_in(place):
            os.unlink(file, dir_fd=place)
    os.rmdir(name, dir_fd=owners)
